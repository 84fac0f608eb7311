//! Pushing pages into the kernel's page cache before a READ is answered, so that a program that
//! reads a small file in small blocks costs one request and not one per read-ahead window.
//!
//! Storing pages *waits for page locks*, and a locked page may belong to another READ. So:
//! 1. a push runs on this module's own thread, never on a FUSE thread or a runtime worker, and
//!    holds no lock while the kernel stores: every other READ can be answered meanwhile;
//! 2. only READs at offset 0 are held back by a push. Their first page is locked by the kernel,
//!    so at most one is under way per file, and no READ that a push may wait for waits for one;
//! 3. should that reasoning fail on some kernel, [`PUSH_WAIT_MAX`] answers whoever waits, and pushing
//!    stops for this mount with a log line.

use crate::fs::read::PagePush;
use std::{
    collections::HashMap,
    io,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// READs that wait for a push at most; one more is answered without.
const WAITING_MAX: usize = 64;
/// How long a READ waits for its push.
pub const PUSH_WAIT_MAX: Duration = Duration::from_secs(1);
/// How often impatience is looked for.
pub const WATCH_EVERY: Duration = Duration::from_millis(250);

/// The kernel's page cache, as this module needs it.
pub trait PageCache: Send + 'static {
    /// Puts whole pages of an inode into it. May wait for page locks.
    ///
    /// # Errors
    /// What the kernel says; the pages may or may not be there then.
    fn store(&self, ino: u64, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// Answers the READ that waits.
pub type SendReply = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Shared {
    /// READs that wait, by their number; whoever removes one answers it.
    waiting: Mutex<HashMap<u64, (Instant, SendReply)>>,
    off: AtomicBool,
    next: AtomicU64,
    pushed_bytes: AtomicU64,
    skipped: AtomicU64,
}

struct QueuedPush {
    number: u64,
    ino: u64,
    push: PagePush,
}

/// Hands pushes to their thread.
#[derive(Clone)]
pub struct Pusher {
    shared: Arc<Shared>,
    jobs: Option<SyncSender<QueuedPush>>,
}

impl Pusher {
    /// Pushes nothing, ever.
    #[must_use]
    pub fn off() -> Self {
        Pusher { shared: Arc::default(), jobs: None }
    }

    /// Starts the thread. It ends when the last clone of the pusher is dropped.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(cache: impl PageCache) -> io::Result<Self> {
        let (jobs, todo) = sync_channel(WAITING_MAX);
        let shared = Arc::<Shared>::default();
        let worker = Arc::clone(&shared);
        std::thread::Builder::new().name("fletch-push".into()).spawn(move || work(&worker, &cache, &todo))?;
        Ok(Pusher { shared, jobs: Some(jobs) })
    }

    /// Pushes, then calls `done`; or calls it at once when pushing is off or behind.
    pub fn push_then(&self, ino: u64, push: PagePush, done: SendReply) {
        let Some(jobs) = self.jobs.as_ref().filter(|_| !self.shared.off.load(Relaxed)) else {
            return done();
        };
        let number = self.shared.next.fetch_add(1, Relaxed);
        self.shared.lock().insert(number, (Instant::now(), done));
        if jobs.try_send(QueuedPush { number, ino, push }).is_err() {
            self.shared.skipped.fetch_add(1, Relaxed);
            self.shared.answer(number);
        }
    }

    /// Answers whoever waited longer than [`PUSH_WAIT_MAX`]; to be called every [`WATCH_EVERY`].
    pub fn answer_late(&self) {
        let late: Vec<SendReply> = {
            let mut waiting = self.shared.lock();
            let numbers: Vec<u64> = waiting
                .iter()
                .filter(|(_, (since, _))| since.elapsed() > PUSH_WAIT_MAX)
                .map(|(n, _)| *n)
                .collect();
            numbers.iter().filter_map(|n| waiting.remove(n)).map(|(_, done)| done).collect()
        };
        if late.is_empty() {
            return;
        }
        if !self.shared.off.swap(true, Relaxed) {
            tracing::warn!(
                waited = ?PUSH_WAIT_MAX,
                "the kernel did not take pushed pages in time; pushing is off for this mount \
                 (reads go on as before; --push off makes it so from the start)"
            );
        }
        for done in late {
            done();
        }
    }

    /// Bytes the kernel took, and pushes left out.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.shared.pushed_bytes.load(Relaxed), self.shared.skipped.load(Relaxed))
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, (Instant, SendReply)>> {
        // Only inserted into and removed from: a panic leaves the map whole.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, number: u64) {
        let waiting = self.lock().remove(&number);
        if let Some((_, done)) = waiting {
            done();
        }
    }
}

fn work(shared: &Shared, cache: &impl PageCache, todo: &Receiver<QueuedPush>) {
    while let Ok(QueuedPush { number, ino, push }) = todo.recv() {
        if !shared.off.load(Relaxed) {
            match cache.store(ino, push.offset, &push.bytes) {
                Ok(()) => {
                    shared.pushed_bytes.fetch_add(push.bytes.len() as u64, Relaxed);
                }
                Err(error) => {
                    // The pages are read on demand then; a mount that goes away says ENODEV here.
                    shared.skipped.fetch_add(1, Relaxed);
                    tracing::debug!(%error, ino, "pages not pushed");
                }
            }
        }
        drop(push);
        shared.answer(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use std::sync::mpsc::{Sender, channel};

    struct Fake {
        stored: Sender<(u64, u64, usize)>,
        gate: Receiver<()>,
    }

    impl PageCache for Fake {
        fn store(&self, ino: u64, offset: u64, bytes: &[u8]) -> io::Result<()> {
            self.gate.recv().expect("gate");
            self.stored.send((ino, offset, bytes.len())).expect("test listens");
            Ok(())
        }
    }

    fn push() -> PagePush {
        PagePush { offset: 4096, bytes: Bytes::from_static(&[1; 100]) }
    }

    #[test]
    fn pages_are_stored_before_the_answer() {
        let ((stored, seen), (open, gate)) = (channel(), channel());
        let pusher = Pusher::start(Fake { stored, gate }).expect("thread");
        let (tell, done) = channel();
        pusher.push_then(9, push(), Box::new(move || tell.send(()).expect("test listens")));
        assert!(done.recv_timeout(Duration::from_millis(50)).is_err(), "answered before the store");
        open.send(()).expect("gate");
        done.recv_timeout(Duration::from_secs(5)).expect("answered");
        assert_eq!(seen.try_recv(), Ok((9, 4096, 100)));
        assert_eq!(pusher.counts(), (100, 0));
    }

    #[test]
    fn a_stuck_store_holds_nobody_longer_than_patience_and_ends_pushing() {
        let ((stored, _seen), (open, gate)) = (channel(), channel::<()>());
        let pusher = Pusher::start(Fake { stored, gate }).expect("thread");
        let (tell, done) = channel();
        let many = WAITING_MAX + 10;
        for i in 0..many {
            let tell = tell.clone();
            pusher.push_then(i as u64, push(), Box::new(move || tell.send(()).expect("test listens")));
        }
        let at_once = done.try_iter().count();
        assert!((8..=10).contains(&at_once), "those past the bound do not wait: {at_once}");
        std::thread::sleep(PUSH_WAIT_MAX + Duration::from_millis(50));
        pusher.answer_late();
        assert_eq!(at_once + done.try_iter().count(), many, "everybody was answered exactly once");
        pusher.push_then(1, push(), Box::new(move || tell.send(()).expect("test listens")));
        assert_eq!(done.try_iter().count(), 1, "pushing is off");
        drop(open);
    }
}
