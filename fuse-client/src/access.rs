//! The access check: whether the server still lets this mount read its version.
//!
//! When the server refuses the version, this module makes the kernel forget it. It owns the errno that every
//! request gets while the version is refused, and the record of what the kernel caches ([`KernelState`]). The
//! mount always has one access request at the server, which holds its answer back until access changes. A
//! server that does not answer refuses nothing.
//!
//! 1. From the moment of a refusal the mount answers every request with the errno, and gives the kernel no
//!    page, name or attribute. It waits for the replies in flight, then makes the kernel forget what it
//!    caches.
//! 2. Invalidations run on a thread of their own that holds no lock: to invalidate pages, the kernel waits
//!    for page locks, and a locked page may wait for a reply of this mount.
//! 3. A refusal can end: when the server allows the version again, the mount reads it again.

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

/// How long the server may hold its answer back. Together with the time to notice a lost request, this stays
/// below the 5 s that SEMANTICS S21 promises.
pub(crate) const HOLD: Duration = Duration::from_secs(3);
/// How much longer than the hold an answer may take.
pub(crate) const HOLD_SLACK: Duration = Duration::from_secs(1);
/// The shortest time between the starts of two access requests.
pub(crate) const PERIOD_MIN: Duration = Duration::from_millis(500);
/// How long the mount waits for replies in flight before it makes the kernel forget.
const DRAIN: Duration = Duration::from_millis(500);
/// How long it then waits for the replies that took longer, before it makes the kernel forget once more.
const DRAIN_AGAIN: Duration = Duration::from_secs(2);
/// The pause between two checks for replies in flight.
const DRAIN_CHECK_EVERY: Duration = Duration::from_millis(5);

/// The kernel's caches for one mount, as far as this module invalidates them.
pub trait KernelCache: Send + Sync + 'static {
    /// Makes the kernel forget the attributes and pages of an inode. May wait for page locks.
    ///
    /// # Errors
    /// The error of the kernel; `NotFound` if the kernel caches no such inode.
    fn invalidate_inode(&self, ino: u64) -> io::Result<()>;

    /// Makes the kernel forget the attributes of an inode, and keep its pages and names.
    ///
    /// # Errors
    /// As [`KernelCache::invalidate_inode`].
    fn forget_attributes(&self, ino: u64) -> io::Result<()>;

    /// Makes the kernel forget a name, and all names below it.
    ///
    /// # Errors
    /// As [`KernelCache::invalidate_inode`].
    fn invalidate_name(&self, parent: u64, name: &[u8]) -> io::Result<()>;
}

/// The state of the access check of one mount.
#[derive(Debug, Default)]
pub struct Access {
    /// 0 while the version may be read, else the errno of every reply.
    errno: AtomicI32,
    in_flight: AtomicUsize,
    refusals: AtomicU64,
    /// The inodes and names that the kernel may cache.
    pub kernel: KernelState,
}

/// Counts one request as in flight until it is dropped, after the reply was sent.
#[derive(Debug)]
pub struct RequestGuard(Arc<Access>);

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Release);
    }
}

impl Access {
    /// Counts a request as in flight until the guard is dropped.
    #[must_use]
    pub fn enter(self: &Arc<Self>) -> RequestGuard {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        RequestGuard(Arc::clone(self))
    }

    /// Returns the errno for every request while the version is refused.
    #[must_use]
    pub fn refused(&self) -> Option<i32> {
        match self.errno.load(Ordering::Acquire) {
            0 => None,
            errno => Some(errno),
        }
    }

    /// Returns how often the server refused the version.
    #[must_use]
    pub fn refusals(&self) -> u64 {
        self.refusals.load(Ordering::Relaxed)
    }

    /// Starts or ends (0) a refusal. Returns whether a refusal started.
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

/// Returns the errno for an error of the server; `None` if the error does not refuse access.
pub(crate) fn refusal(e: &ClientError) -> Option<i32> {
    match e {
        e if e.is_denied() => Some(libc::EACCES),
        ClientError::Problem { .. } if e.kind() == Kind::NotFound => Some(libc::ESTALE),
        _ => None,
    }
}

/// Asks the server about access until `stop`, and makes the kernel forget the version when access is refused.
pub async fn watch(
    access: Arc<Access>,
    client: Client,
    root: Root,
    cache: Arc<dyn KernelCache>,
    stop: CancellationToken,
) {
    // The client gives up a silent connection after a share of its deadline. Hold for less than half of that
    // share.
    let hold = HOLD.min(client.io_timeout() / 4);
    let client = client.within(hold + HOLD_SLACK);
    while !stop.is_cancelled() {
        let started = Instant::now();
        check(&access, &client, root, &cache, hold, &stop).await;
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(PERIOD_MIN.saturating_sub(started.elapsed())) => {}
        }
    }
}

/// Asks the server once, which may hold its answer back for `hold`. Makes the kernel forget the version when
/// access is refused. Returns early at `stop`.
pub(crate) async fn check(
    access: &Arc<Access>,
    client: &Client,
    root: Root,
    cache: &Arc<dyn KernelCache>,
    hold: Duration,
    stop: &CancellationToken,
) {
    let asked = tokio::select! {
        () = stop.cancelled() => return,
        asked = client.check_access(root, hold) => asked,
    };
    match asked.as_ref().err().map(refusal) {
        None => {
            if access.refused().is_some() {
                access.set_errno(0);
                tracing::info!(%root, "the server allows the version again");
            }
        }
        Some(Some(errno)) => {
            if access.set_errno(errno) {
                let why = asked.err().map(|e| e.to_string()).unwrap_or_default();
                tracing::error!(
                    %root, %why,
                    "the server refuses the version: the kernel forgets it, and reads fail until \
                     the server allows it again"
                );
                invalidate(access, cache, stop).await;
            }
        }
        // A server that does not answer refuses nothing. The errors of reads report its silence.
        Some(None) => {
            tracing::debug!(error = ?asked.err(), "the server did not say whether access is allowed")
        }
    }
}

async fn invalidate(access: &Arc<Access>, cache: &Arc<dyn KernelCache>, stop: &CancellationToken) {
    let whole = access.drained(DRAIN).await;
    invalidate_all(access, cache, stop).await;
    if !whole {
        // Replies sent meanwhile may have put pages back.
        if !access.drained(DRAIN_AGAIN).await {
            tracing::warn!("requests that started before the refusal are still in flight");
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
        // Inodes first: when a name goes, the kernel drops the inode and its pages only if no program has it
        // open.
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
            let text = "the kernel still caches a part of the refused version: unmount to remove it";
            tracing::error!(forgotten = done, failed, "{text}");
        }
        Err(error) => {
            tracing::error!(%error, "the kernel still caches the refused version: unmount to remove it")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_api::{Code, Problem};

    #[test]
    fn only_an_answer_of_the_server_is_a_refusal() {
        let problem = |code| ClientError::Problem {
            problem: Box::new(Problem::new(code, "d", "h")),
            request: None,
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
        let away = ClientError::Unreachable { endpoint: "e".into(), why: "refused".into(), refused: true };
        assert_eq!(refusal(&away), None);
    }

    #[tokio::test]
    async fn a_refusal_waits_for_replies_in_flight() {
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
