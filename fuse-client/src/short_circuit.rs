//! Short-circuit reads: bytes of chunks, read in the slab files of a server of this machine without asking it
//! for each.
//!
//! ```text
//! a chunk's first read ─▶ the server names its slab (a descriptor) ─▶ later reads: pread, check, reply
//!                                                                     every half second: what was read
//! ```
//! 1. (I1) The caller checks what it reads here, and takes the usual way where it is wrong: the chunk may
//!    have been evicted, or its file cut.
//! 2. A FUSE thread reads what the system has in its page cache. A thread that may wait for a disk reads the
//!    rest: [`DISK_READS_MAX`] of them at most, and a reader waits for one for at most [`DISK_WITHIN`]. Then
//!    it asks the server, which knows other places, too.
//! 3. (I6) The process has at most [`SLABS_MAX`] slabs open, for at most [`IDLE`] after their last read. A
//!    slab that the server removes gives its space back all the same.
//! 4. (I7, I8) Bytes are told to the server within [`TELL_EVERY`], which counts them for job and dataset.
//!    When it refuses, the access has ended, and everything that it lent is forgotten.

use crate::hit_connections;
use fletch_client::Client;
use fletch_core::{Hash, Root};
use fletch_store::disk::RecordReader;
use moka::sync::Cache;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use std::{
    borrow::Cow,
    fs::File,
    io,
    os::unix::fs::MetadataExt as _,
    sync::{
        Arc, LazyLock, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::{
    sync::Semaphore,
    task::spawn_blocking,
    time::{sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The most slabs that are open.
const SLABS_MAX: u64 = 512;
/// After so long without a read a slab is closed.
const IDLE: Duration = Duration::from_secs(60);
/// The most chunks of a version whose places are remembered.
const CHUNKS_MAX: u64 = 1 << 16;
/// For how long the server is not asked again for a chunk that it did not lend.
const ABSENT_FOR: Duration = Duration::from_secs(1);
/// After so many refusals in a row the server is asked for one chunk of so many only.
const REFUSED_MAX: u32 = 16;
const ASK_EVERY: u32 = 64;
/// The most threads of the process that read a disk.
const DISK_READS_MAX: usize = 24;
/// The longest time that a read waits for the disk.
const DISK_WITHIN: Duration = Duration::from_secs(1);
/// How often the server is told how much was read.
const TELL_EVERY: Duration = Duration::from_millis(500);

/// The slabs that are open, by device and inode. All versions of a process share them, as the chunks of all
/// versions share slabs.
static SLABS: LazyLock<Cache<(u64, u64), Arc<File>>> =
    LazyLock::new(|| Cache::builder().max_capacity(SLABS_MAX).time_to_idle(IDLE).build());

static DISK_READS: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(DISK_READS_MAX)));

/// Closes idle slabs, until `stop`.
pub async fn close_idle_slabs(stop: CancellationToken) {
    while stop.run_until_cancelled(sleep(IDLE / 4)).await.is_some() {
        SLABS.run_pending_tasks();
    }
}

/// Where a chunk lies.
#[derive(Debug, Clone)]
struct InSlab {
    /// Its slab, while that is open.
    slab: Weak<File>,
    key: (u64, u64),
    offset: u64,
    len: u32,
    asked: Instant,
}

/// What a server lent for the reads of one version.
#[derive(Debug)]
pub struct Lent {
    places: Cache<Hash, InSlab>,
    refused: AtomicU32,
    /// Bytes that were read, and not told.
    untold: AtomicU64,
    /// Whether a task will tell them.
    will_tell: AtomicBool,
}

impl Default for Lent {
    fn default() -> Self {
        let (refused, untold, will_tell) = (AtomicU32::new(0), AtomicU64::new(0), AtomicBool::new(false));
        Lent { places: Cache::new(CHUNKS_MAX), refused, untold, will_tell }
    }
}

/// A chunk that was in an open slab when the server was asked.
#[derive(Debug, Clone)]
pub struct LentChunk {
    slab: Arc<File>,
    offset: u64,
    len: u32,
}

impl LentChunk {
    /// Fills `out` with bytes of the chunk from `offset` on, if the system has them in its page cache. They
    /// are not verified.
    ///
    /// # Errors
    /// `WouldBlock` where the disk would have to be read. Others where the chunk is not there.
    pub fn read_cached_at(&self, offset: usize, out: &mut [u8]) -> io::Result<()> {
        self.record().read_cached_at(offset, out)
    }

    /// As [`LentChunk::read_cached_at`], and waits for the disk.
    ///
    /// # Errors
    /// Those of the disk, and where the chunk is not there.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> io::Result<()> {
        self.record().read_at(offset, out)
    }

    /// Returns all of the chunk, not verified. Waits for the disk.
    ///
    /// # Errors
    /// As [`LentChunk::read_at`].
    pub fn read(&self) -> io::Result<Vec<u8>> {
        self.record().whole()
    }

    fn record(&self) -> RecordReader<'_> {
        RecordReader::new(&self.slab, self.offset, self.len)
    }

    /// Has the system read the chunk ahead. Does not wait.
    ///
    /// # Errors
    /// Those of the system.
    pub fn read_ahead(&self) -> io::Result<()> {
        let offset = i64::try_from(self.offset).map_err(io::Error::other)?;
        let advice = PosixFadviseAdvice::POSIX_FADV_WILLNEED;
        Ok(posix_fadvise(&*self.slab, offset, self.len.into(), advice)?)
    }
}

/// The short-circuit reads of one version.
#[derive(Clone)]
pub struct ShortCircuit<'a> {
    lent: Cow<'a, Arc<Lent>>,
    client: Cow<'a, Client>,
    root: Root,
}

impl<'a> ShortCircuit<'a> {
    /// Returns the short-circuit reads of a version, on a thread that may ask the server now.
    #[must_use]
    pub fn new(lent: &'a Arc<Lent>, client: &'a Client, root: Root) -> Self {
        ShortCircuit { lent: Cow::Borrowed(lent), client: Cow::Borrowed(client), root }
    }

    /// Returns the same for a thread that may not ask the server. There it reads what was lent already.
    #[must_use]
    pub fn into_owned(self) -> ShortCircuit<'static> {
        let (lent, client) = (Cow::Owned(self.lent.into_owned()), Cow::Owned(self.client.into_owned()));
        ShortCircuit { lent, client, root: self.root }
    }

    /// Returns a chunk in its slab. Asks the server if it is not known where that is. `len`: its length in
    /// bytes, if the caller knows it. `None`: it is to be read another way.
    #[must_use]
    pub fn chunk(&self, chunk: Hash, len: Option<u32>) -> Option<LentChunk> {
        let now = Instant::now();
        let is_it = |there: u32| len.is_none_or(|len| len == there);
        if let Some(InSlab { slab, key, offset, len, asked }) = self.lent.places.get(&chunk) {
            if let Some(slab) = slab.upgrade() {
                // Keeps it open.
                drop(SLABS.get(&key));
                return is_it(len).then_some(LentChunk { slab, offset, len });
            }
            if now.saturating_duration_since(asked) < ABSENT_FOR {
                return None;
            }
        }
        let refused = self.lent.refused.load(Relaxed);
        if refused >= REFUSED_MAX && !self.lent.refused.fetch_add(1, Relaxed).is_multiple_of(ASK_EVERY) {
            return None;
        }
        let found = hit_connections::ask_for_slab(&self.client, self.root, chunk, len.unwrap_or(0));
        let Some(found) = found.filter(|found| is_it(found.len)) else {
            self.lent.refused.store(refused.saturating_add(1), Relaxed);
            let absent = InSlab { slab: Weak::new(), key: (0, 0), offset: 0, len: 0, asked: now };
            self.lent.places.insert(chunk, absent);
            return None;
        };
        self.lent.refused.store(0, Relaxed);
        let (offset, len, about) = (found.offset, found.len, found.file.metadata().ok()?);
        let key = (about.dev(), about.ino());
        // The same slab, if it is open already: its inode is not used again meanwhile.
        let slab = SLABS.get_with(key, || Arc::new(found.file));
        self.lent.places.insert(chunk, InSlab { slab: Arc::downgrade(&slab), key, offset, len, asked: now });
        Some(LentChunk { slab, offset, len })
    }

    /// Forgets where a chunk lies: it is there no more.
    pub fn forget(&self, chunk: Hash) {
        self.lent.places.invalidate(&chunk);
    }

    /// Counts bytes that were read, and has them told.
    pub fn note(&self, bytes: u64, tasks: &TaskTracker) {
        if let Some(server) = self.client.hits() {
            server.note_slab_read(bytes);
        }
        self.lent.untold.fetch_add(bytes, Relaxed);
        if self.lent.will_tell.swap(true, Relaxed) {
            return;
        }
        let (lent, client, root) = (Arc::clone(&self.lent), self.client.clone().into_owned(), self.root);
        tasks.spawn(async move {
            sleep(TELL_EVERY).await;
            // Set before the bytes are taken: a read that comes now begins another task.
            lent.will_tell.store(false, Relaxed);
            let told = spawn_blocking(move || lent.tell(&client, root)).await;
            if let Err(error) = told {
                tracing::warn!(%error, "what was read in slabs could not be told to the server");
            }
        });
    }
}

/// Runs `read` on a thread that may wait for the disk. `None`: too many do, or this one takes too long.
pub async fn on_disk_thread<T: Send + 'static>(read: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let permit = Arc::clone(&DISK_READS).try_acquire_owned().ok()?;
    let read = spawn_blocking(move || {
        let _permit = permit;
        read()
    });
    match timeout(DISK_WITHIN, read).await {
        Ok(Ok(done)) => Some(done),
        Ok(Err(error)) => {
            tracing::error!(%error, "a read of a slab ended early: please report this line");
            None
        }
        Err(_) => None,
    }
}

impl Lent {
    /// Tells the server how many bytes were read. Blocks for a very short time.
    fn tell(&self, client: &Client, root: Root) {
        let _may_ask = hit_connections::enter();
        let bytes = self.untold.swap(0, Relaxed);
        if bytes == 0 {
            return;
        }
        match hit_connections::tell_read(client, root, bytes) {
            Some(true) => {}
            Some(false) => {
                tracing::debug!(bytes, "the server refuses what was read in slabs: they are forgotten");
                self.places.invalidate_all();
            }
            // Nobody answered. They are told with the next ones.
            None => drop(self.untold.fetch_add(bytes, Relaxed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[tokio::test]
    async fn i6_reads_of_a_disk_that_hangs_have_a_bound_and_end_in_time() {
        let (open, gate) = channel::<()>();
        let gate = Arc::new(parking_lot::Mutex::new(gate));
        let hang = || {
            let gate = Arc::clone(&gate);
            on_disk_thread(move || gate.lock().recv().is_err())
        };
        let begun = Instant::now();
        let hung = futures::future::join_all((0..DISK_READS_MAX).map(|_| hang())).await;
        assert!(hung.iter().all(Option::is_none) && begun.elapsed() >= DISK_WITHIN);
        // Their threads still wait, so the next read waits for none of them.
        let begun = Instant::now();
        assert!(on_disk_thread(|| ()).await.is_none() && begun.elapsed() < DISK_WITHIN);
        drop(open);
        let answers = async {
            while on_disk_thread(|| ()).await.is_none() {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_secs(20), answers).await.expect("the disk answers again");
    }
}
