//! Pushes pages into the kernel's page cache. Before the reply to a READ: a program that reads a small file
//! in small blocks then costs one request, not one for each read-ahead window. And ahead of READs, for a
//! program that reads small files in their order ([`crate::fs::file_runs`]).
//!
//! To store pages, the kernel *waits for page locks*, and a locked page may belong to another READ. So:
//! 1. A push runs on this module's own threads, never on a FUSE thread or a runtime worker, and holds no lock
//!    while the kernel stores. The mount can reply to every other READ meanwhile.
//! 2. A push delays the reply to a READ at offset 0 only. The kernel locks the first page of that READ, so a
//!    file has at most one such READ. A push may wait for other READs, but none of those waits for a push.
//! 3. Pushes ahead have a thread of their own. No READ waits for it.
//! 4. A file of which another READ is under way is not pushed. If the process is killed while a push waits
//!    for a page lock, it cannot end before somebody answers that READ; and whoever starts the next process
//!    may wait for the end of this one.
//! 5. If this reasoning fails on some kernel, the mount replies to the waiting READs after [`PUSH_WAIT_MAX`],
//!    logs a line, and stops pushing.

use crate::fs::read::PagePush;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    io,
    sync::Arc,
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    time::{Duration, Instant},
};

/// The most READs that wait for a push. A further READ gets its reply without a push.
const WAITING_MAX: usize = 64;
/// The most pushes ahead that wait. A further one is skipped.
const AHEAD_MAX: usize = 8;
/// The longest a READ waits for its push.
pub const PUSH_WAIT_MAX: Duration = Duration::from_secs(1);
/// How often to call [`Pusher::answer_late`].
pub const WATCH_EVERY: Duration = Duration::from_millis(250);

/// The READs under way are counted by the inode's number modulo this.
const READ_COUNTERS: usize = 4096;

/// The number of READs under way, of the files with one remainder.
struct ReadCounters(Box<[AtomicU32]>);

impl ReadCounters {
    fn of(&self, ino: u64) -> &AtomicU32 {
        // The remainder is less than the length.
        &self.0[usize::try_from(ino % self.0.len() as u64).unwrap_or(0)]
    }
}

/// A READ under way.
pub struct ReadUnderWay {
    shared: Arc<Shared>,
    ino: u64,
}

impl Drop for ReadUnderWay {
    fn drop(&mut self) {
        self.shared.reads.of(self.ino).fetch_sub(1, Relaxed);
    }
}

/// The kernel's page cache, as far as this module writes to it.
pub trait PageCache: Send + Sync + 'static {
    /// Stores whole pages of an inode. May wait for page locks.
    ///
    /// # Errors
    /// The error of the kernel, which may have stored some of the pages.
    fn store(&self, ino: u64, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// Sends the reply to the waiting READ.
pub type SendReply = Box<dyn FnOnce() + Send>;

struct Shared {
    cache: Box<dyn PageCache>,
    /// The waiting READs, by number. The thread that removes a READ sends its reply.
    waiting: Mutex<HashMap<u64, (Instant, SendReply)>>,
    off: AtomicBool,
    reads: ReadCounters,
    next: AtomicU64,
    pushed_bytes: AtomicU64,
    skipped: AtomicU64,
}

struct QueuedPush {
    shared: Arc<Shared>,
    number: u64,
    ino: u64,
    push: PagePush,
}

/// The work of one push ahead.
type AheadWork = Box<dyn FnOnce() + Send>;

/// The threads that push, for one mount or for all mounts of a process.
pub struct PushThreads {
    jobs: SyncSender<QueuedPush>,
    ahead: SyncSender<AheadWork>,
}

impl PushThreads {
    /// Starts the threads. They end when this value and all its pushers are dropped.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(threads: usize) -> io::Result<Self> {
        let (jobs, todo) = sync_channel(WAITING_MAX);
        let todo = Arc::new(Mutex::new(todo));
        for _ in 0..threads {
            let todo = Arc::clone(&todo);
            std::thread::Builder::new().name("fletch-push".into()).spawn(move || work(&todo))?;
        }
        let (ahead, todo) = sync_channel::<AheadWork>(AHEAD_MAX);
        std::thread::Builder::new().name("fletch-ahead".into()).spawn(move || {
            for work in todo {
                work();
            }
        })?;
        Ok(PushThreads { jobs, ahead })
    }

    /// Returns the pusher of one mount.
    #[must_use]
    pub fn pusher(&self, cache: impl PageCache) -> Pusher {
        let shared = Arc::new(Shared {
            cache: Box::new(cache),
            waiting: Mutex::default(),
            off: AtomicBool::new(false),
            reads: ReadCounters((0..READ_COUNTERS).map(|_| AtomicU32::new(0)).collect()),
            next: AtomicU64::new(0),
            pushed_bytes: AtomicU64::new(0),
            skipped: AtomicU64::new(0),
        });
        Pusher { shared, jobs: self.jobs.clone(), ahead: self.ahead.clone() }
    }
}

/// Hands the pushes of one mount to the push threads.
#[derive(Clone)]
pub struct Pusher {
    shared: Arc<Shared>,
    jobs: SyncSender<QueuedPush>,
    ahead: SyncSender<AheadWork>,
}

impl Pusher {
    /// Notes that a READ of a file is under way.
    #[must_use]
    pub fn note_read(&self, ino: u64) -> ReadUnderWay {
        self.shared.reads.of(ino).fetch_add(1, Relaxed);
        ReadUnderWay { shared: Arc::clone(&self.shared), ino }
    }

    /// Pushes for a READ under way, then calls `done`: at once if pushing is off or the queue is full.
    pub fn push_then(&self, ino: u64, push: PagePush, done: SendReply) {
        if self.shared.off.load(Relaxed) {
            return done();
        }
        let number = self.shared.next.fetch_add(1, Relaxed);
        self.shared.lock().insert(number, (Instant::now(), done));
        let job = QueuedPush { shared: Arc::clone(&self.shared), number, ino, push };
        if self.jobs.try_send(job).is_err() {
            self.shared.skipped.fetch_add(1, Relaxed);
            self.shared.answer(number);
        }
    }

    /// Runs `work` on the thread of pushes ahead, unless pushing is off or too much waits for that thread.
    pub fn run_ahead(&self, work: impl FnOnce() + Send + 'static) {
        if self.shared.off.load(Relaxed) || self.ahead.try_send(Box::new(work)).is_err() {
            self.shared.skipped.fetch_add(1, Relaxed);
        }
    }

    /// Stores a whole file. Returns whether the kernel took it. Call it in [`Pusher::run_ahead`].
    #[must_use]
    pub fn store_file(&self, ino: u64, bytes: &[u8]) -> bool {
        !self.shared.off.load(Relaxed) && self.shared.store(ino, 0, bytes, 0)
    }

    /// Replies to the READs that waited longer than [`PUSH_WAIT_MAX`]. Call it every [`WATCH_EVERY`].
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
                "the kernel did not take pushed pages in time: this mount stops pushing and reads on \
                 without; --push off turns pushing off from the start"
            );
        }
        for done in late {
            done();
        }
    }

    /// Returns the bytes that the kernel took, and the number of skipped pushes.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.shared.pushed_bytes.load(Relaxed), self.shared.skipped.load(Relaxed))
    }
}

impl Shared {
    fn lock(&self) -> parking_lot::MutexGuard<'_, HashMap<u64, (Instant, SendReply)>> {
        // Users only insert and remove, so a panic leaves the map consistent.
        self.waiting.lock()
    }

    /// Stores pages, unless more than `reads` READs are under way. Returns whether the kernel took them.
    fn store(&self, ino: u64, offset: u64, bytes: &[u8], reads: u32) -> bool {
        if self.reads.of(ino).load(Relaxed) > reads {
            self.skipped.fetch_add(1, Relaxed);
            return false;
        }
        match self.cache.store(ino, offset, bytes) {
            Ok(()) => {
                self.pushed_bytes.fetch_add(bytes.len() as u64, Relaxed);
                true
            }
            Err(error) => {
                // The kernel reads these pages on demand. ENODEV here means that the mount is going away.
                self.skipped.fetch_add(1, Relaxed);
                tracing::debug!(%error, ino, "the kernel did not take pushed pages");
                false
            }
        }
    }

    fn answer(&self, number: u64) {
        let waiting = self.lock().remove(&number);
        if let Some((_, done)) = waiting {
            done();
        }
    }
}

fn work(todo: &Mutex<Receiver<QueuedPush>>) {
    loop {
        // A thread that waits holds the lock, and the other threads wait for the lock.
        let next = todo.lock().recv();
        let Ok(QueuedPush { shared, number, ino, push }) = next else { return };
        if !shared.off.load(Relaxed) {
            shared.store(ino, push.offset, &push.bytes, 1);
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
        gate: Mutex<Receiver<()>>,
    }

    impl PageCache for Fake {
        fn store(&self, ino: u64, offset: u64, bytes: &[u8]) -> io::Result<()> {
            self.gate.lock().recv().expect("gate");
            self.stored.send((ino, offset, bytes.len())).expect("test listens");
            Ok(())
        }
    }

    fn pusher(cache: Fake) -> Pusher {
        PushThreads::start(1).expect("thread").pusher(cache)
    }

    fn push() -> PagePush {
        PagePush { offset: 4096, bytes: Bytes::from_static(&[1; 100]) }
    }

    #[test]
    fn pages_are_stored_before_the_reply() {
        let ((stored, seen), (open, gate)) = (channel(), channel());
        let pusher = pusher(Fake { stored, gate: Mutex::new(gate) });
        let (tell, done) = channel();
        pusher.push_then(9, push(), Box::new(move || tell.send(()).expect("test listens")));
        assert!(done.recv_timeout(Duration::from_millis(50)).is_err(), "answered before the store");
        open.send(()).expect("gate");
        done.recv_timeout(Duration::from_secs(5)).expect("answered");
        assert_eq!(seen.try_recv(), Ok((9, 4096, 100)));
        assert_eq!(pusher.counts(), (100, 0));
    }

    #[test]
    fn a_file_that_another_program_reads_is_not_pushed() {
        let ((stored, seen), (open, gate)) = (channel(), channel());
        let pusher = pusher(Fake { stored, gate: Mutex::new(gate) });
        open.send(()).expect("gate");
        let (own, other) = (pusher.note_read(9), pusher.note_read(9));
        let (tell, done) = channel();
        let answer = |read: ReadUnderWay| {
            let tell = tell.clone();
            Box::new(move || {
                drop(read);
                tell.send(()).expect("test listens");
            })
        };
        pusher.push_then(9, push(), answer(own));
        done.recv_timeout(Duration::from_secs(5)).expect("answered");
        assert!(seen.try_recv().is_err() && !pusher.store_file(9, &[1; 100]));
        assert_eq!(pusher.counts(), (0, 2));
        pusher.push_then(9, push(), answer(other));
        done.recv_timeout(Duration::from_secs(5)).expect("answered");
        assert_eq!(seen.try_recv(), Ok((9, 4096, 100)), "its own READ does not count");
    }

    #[test]
    fn a_stuck_store_delays_no_reply_beyond_the_bound_and_ends_pushing() {
        let ((stored, _seen), (open, gate)) = (channel(), channel::<()>());
        let pusher = pusher(Fake { stored, gate: Mutex::new(gate) });
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
