//! Whether this mount's version is still granted, and making the kernel forget it when it is not.
//!
//! Owns the answer that every request gets while the version is refused, and what is known of the
//! kernel's cache ([`KernelState`]). A mount asks its server all the time (a request that the server holds
//! back); a server that does not answer refuses nothing.
//!
//! 1. From the moment of a refusal every request is answered with its errno, and no page, name or
//!    attribute is given to the kernel: what was being answered is waited for, then the kernel is counts to
//!    forget what it has.
//! 2. Notifications run on a thread of their own that holds no lock: invalidating pages waits for
//!    page locks, and a locked page may wait for one of our answers.
//! 3. A refusal is not for ever: when the version is granted again, it is read again.

use crate::fs::kernel_state::KernelState;
use fletch_client::{Client, ClientError};
use fletch_core::{Kind, Root};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

/// How long the server is asked to hold its answer back. With the time a lost request takes to be
/// noticed it stays below the 5 s that are promised.
pub(crate) const HOLD: Duration = Duration::from_secs(3);
/// How much longer an answer may take.
pub(crate) const HOLD_SLACK: Duration = Duration::from_secs(1);
/// Between two requests at least.
pub(crate) const PERIOD_MIN: Duration = Duration::from_millis(500);
/// How long answers under way are waited for before the kernel is counts to forget.
const DRAIN: Duration = Duration::from_millis(500);
/// And once more after, for those that took longer.
const DRAIN_AGAIN: Duration = Duration::from_secs(2);
/// Between two looks at what is under way.
const DRAIN_CHECK_EVERY: Duration = Duration::from_millis(5);

/// The kernel's cache of a mount, as this module needs it.
pub trait KernelCache: Send + Sync + 'static {
    /// Forgets attributes and pages of an inode. May wait for page locks.
    ///
    /// # Errors
    /// What the kernel says; `NotFound` when it knows no such inode.
    fn invalidate_inode(&self, ino: u64) -> io::Result<()>;

    /// Forgets a name, and all names below it.
    ///
    /// # Errors
    /// As [`KernelCache::invalidate_inode`].
    fn invalidate_name(&self, parent: u64, name: &[u8]) -> io::Result<()>;
}

/// See the module.
#[derive(Debug, Default)]
pub struct Access {
    /// 0 while the version is granted, else the errno of every answer.
    errno: AtomicI32,
    in_flight: AtomicUsize,
    refusals: AtomicU64,
    /// What the kernel may know.
    pub kernel: KernelState,
}

/// A request under way; ends when it is dropped, after its answer was sent.
#[derive(Debug)]
pub struct RequestGuard(Arc<Access>);

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Release);
    }
}

impl Access {
    /// Counts a request until the value is dropped.
    #[must_use]
    pub fn enter(self: &Arc<Self>) -> RequestGuard {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        RequestGuard(Arc::clone(self))
    }

    /// The errno that every request is answered with, if the version is refused.
    #[must_use]
    pub fn refused(&self) -> Option<i32> {
        match self.errno.load(Ordering::Acquire) {
            0 => None,
            errno => Some(errno),
        }
    }

    /// Times that the version was refused.
    #[must_use]
    pub fn refusals(&self) -> u64 {
        self.refusals.load(Ordering::Relaxed)
    }

    /// Begins or ends a refusal; whether one began.
    fn set_errno(&self, errno: i32) -> bool {
        let before = self.errno.swap(errno, Ordering::AcqRel);
        let began = errno != 0 && before == 0;
        if began {
            self.refusals.fetch_add(1, Ordering::Relaxed);
        }
        began
    }

    async fn drained(&self, within: Duration) -> bool {
        let none = async {
            while self.in_flight.load(Ordering::Acquire) > 0 {
                sleep(DRAIN_CHECK_EVERY).await;
            }
        };
        timeout(within, none).await.is_ok()
    }
}

/// The errno for an answer of the server; `None` when it says nothing about the access.
pub(crate) fn refusal(e: &ClientError) -> Option<i32> {
    match e {
        e if e.is_denied() => Some(libc::EACCES),
        ClientError::Problem { .. } if e.kind() == Kind::NotFound => Some(libc::ESTALE),
        _ => None,
    }
}

/// Asks until `stop`.
pub async fn watch(
    access: Arc<Access>,
    client: Client,
    root: Root,
    cache: Arc<dyn KernelCache>,
    stop: CancellationToken,
) {
    // Below half of the client's own patience with a connection, which is a share of its deadline.
    let hold = HOLD.min(client.io_timeout() / 4);
    let client = client.within(hold + HOLD_SLACK);
    while !stop.is_cancelled() {
        let begun = Instant::now();
        let asked = tokio::select! {
            () = stop.cancelled() => return,
            asked = client.has_access(root, hold) => asked,
        };
        match asked.as_ref().err().map(refusal) {
            None => {
                if access.refused().is_some() {
                    access.set_errno(0);
                    tracing::info!(%root, "the version is granted again");
                }
            }
            Some(Some(errno)) => {
                if access.set_errno(errno) {
                    let why = asked.err().map(|e| e.to_string()).unwrap_or_default();
                    tracing::error!(
                        %root, %why,
                        "the version is refused: the kernel is made to forget it, and reads fail until it is granted again"
                    );
                    invalidate(&access, &cache, &stop).await;
                }
            }
            // A server that is away refuses nothing; reads say that it is away.
            Some(None) => {
                tracing::debug!(error = ?asked.err(), "whether the version is granted is not known")
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(PERIOD_MIN.saturating_sub(begun.elapsed())) => {}
        }
    }
}

async fn invalidate(access: &Arc<Access>, cache: &Arc<dyn KernelCache>, stop: &CancellationToken) {
    let whole = access.drained(DRAIN).await;
    invalidate_all(access, cache, stop).await;
    if !whole {
        // What was being answered meanwhile may have brought pages back.
        if !access.drained(DRAIN_AGAIN).await {
            tracing::warn!("requests that began before the refusal are still under way");
        }
        invalidate_all(access, cache, stop).await;
    }
}

async fn invalidate_all(access: &Arc<Access>, cache: &Arc<dyn KernelCache>, stop: &CancellationToken) {
    let (access, cache, stop) = (Arc::clone(access), Arc::clone(cache), stop.clone());
    let work = move || {
        let mut counts = (0u64, 0u64);
        let mut count = |outcome: io::Result<()>| match outcome {
            Ok(()) => counts.0 += 1,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(_) => counts.1 += 1,
        };
        // Inodes first: dropping a name may make the kernel drop its inode, pages and all, but only
        // where nobody has it open.
        for ino in access.kernel.inodes() {
            if stop.is_cancelled() {
                return counts;
            }
            count(cache.invalidate_inode(ino));
        }
        for (parent, name) in access.kernel.names() {
            if stop.is_cancelled() {
                return counts;
            }
            count(cache.invalidate_name(parent, &name));
        }
        counts
    };
    match tokio::task::spawn_blocking(work).await {
        Ok((done, 0)) => tracing::info!(forgotten = done, "the kernel forgot the version"),
        Ok((done, failed)) => {
            tracing::error!(forgotten = done, failed, "the kernel did not forget all of the version: unmount")
        }
        Err(error) => tracing::error!(%error, "the kernel was not made to forget the version: unmount"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_api::{Code, Problem};

    #[test]
    fn only_a_word_of_the_server_is_a_refusal() {
        let problem = |code| ClientError::Problem {
            problem: Box::new(Problem::new(code, "d", "h")),
            retry_after: None,
        };
        assert_eq!(refusal(&problem(Code::NotFound)), Some(libc::ESTALE));
        assert_eq!(refusal(&problem(Code::Unauthorized)), Some(libc::EACCES));
        assert_eq!(refusal(&problem(Code::Forbidden)), Some(libc::EACCES));
        for code in
            [Code::OriginUnavailable, Code::Overloaded, Code::NotReady, Code::Internal, Code::TablesCorrupt]
        {
            assert_eq!(refusal(&problem(code)), None, "{code}");
        }
        let away = ClientError::Unreachable { endpoint: "e".into(), why: "refused".into() };
        assert_eq!(refusal(&away), None);
    }

    #[tokio::test]
    async fn a_refusal_waits_for_answers_under_way() {
        let access = Arc::<Access>::default();
        assert!(access.drained(Duration::ZERO).await);
        let one = access.enter();
        assert!(!access.drained(Duration::from_millis(50)).await);
        drop(one);
        assert!(access.drained(Duration::ZERO).await);
        assert!(access.set_errno(libc::ESTALE) && !access.set_errno(libc::EACCES), "a refusal begins once");
        assert_eq!((access.refused(), access.refusals()), (Some(libc::EACCES), 1));
        assert!(!access.set_errno(0) && access.refused().is_none());
    }
}
