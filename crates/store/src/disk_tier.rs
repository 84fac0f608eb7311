//! The disk tier as reads see it: perhaps not there, perhaps off, and never in the way.
//!
//! ```text
//! read   has(key) ─► a turn ─► blocking thread: one read, one hash ─► Verified, or a miss; of the chunk or of a part
//! keep   admitted? ─► queue (bounded in bytes) ─► one blocking thread that appends until it is empty
//! owner  open, probe, reap, scrub, share, close: called by whoever owns the store's tasks
//! ```
//!
//! Invariants:
//! 1. (I1) nothing leaves but [`Verified`], hashed after it was read; a chunk that is wrong is quarantined;
//! 2. (I5) every error, and every wait that is too long, is a miss;
//! 3. (I6) appends that wait hold at most `queue_bytes`; what does not fit is dropped and
//!    counted. At most [`READERS`] threads read at once, however long a dead disk holds them;
//! 4. a reader never waits for an append.

mod append_queue;

use crate::{
    DatasetId,
    buffer_pool::PooledBuffer,
    disk::{
        Admission, DiskConfig, DiskEngine, DiskError, DiskStats, Health, Policy, ReapReport, Recovery,
        ScrubReport, equal_split,
    },
    stats::Counters,
};
use append_queue::{Append, Queue};
use fletch_core::{Hash, StoreKey, Verified};
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};
use tokio::{
    sync::{Notify, Semaphore},
    task::spawn_blocking,
    time::{Instant, timeout_at},
};

/// Threads that read the disk at once: a flash disk's queue is full then.
pub const READERS: usize = 32;
/// A disk that takes longer than this for a chunk, or than a quarter of the time there is, is passed by.
const READ_WAIT: Duration = Duration::from_secs(5);

/// How often who waits for room in the queue looks again.
const QUEUE_POLL_EVERY: Duration = Duration::from_millis(5);

/// A disk tier, or the place where one will be.
#[derive(Debug)]
pub struct DiskTier {
    engine: RwLock<Option<Arc<DiskEngine>>>,
    /// Why there is none.
    absent: Mutex<Option<String>>,
    readers: Arc<Semaphore>,
    queue_bytes: u64,
    queue: Mutex<Queue>,
    emptied: Notify,
    counters: DiskCounters,
}

#[derive(Debug, Default)]
struct DiskCounters {
    corrupt: AtomicU64,
    late: AtomicU64,
    append_drops: AtomicU64,
    append_dropped_bytes: AtomicU64,
}

/// Whether the tier keeps chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskState {
    /// It could not be opened; it is tried again.
    Absent(String),
    /// It is open.
    Open(Health),
}

/// A snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskReport {
    /// Whether it keeps chunks.
    pub state: DiskState,
    /// The tier's own numbers, while it is open.
    pub engine: Option<DiskStats>,
    /// Reads whose bytes were not the chunk.
    pub corrupt: u64,
    /// Reads that were not waited for any longer.
    pub late: u64,
    /// Chunks that were admitted and dropped because the queue was full.
    pub append_drops: u64,
    /// Their bytes.
    pub append_dropped_bytes: u64,
    /// Bytes that wait to be appended now.
    pub queued_bytes: u64,
}

impl DiskReport {
    /// Damaged chunks that readers and scrubbing found: never served, and fetched again when wanted.
    #[must_use]
    pub fn damaged(&self) -> u64 {
        self.engine.as_ref().map_or(0, |t| t.counts.quarantined)
    }
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is guarded here is whole after every statement.
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DiskTier {
    /// A place for a tier. `queue_bytes` bounds what waits to be appended; it is part of the store's memory.
    #[must_use]
    pub fn new(queue_bytes: u64) -> Arc<Self> {
        Arc::new(DiskTier {
            engine: RwLock::new(None),
            absent: Mutex::new(Some("it was not opened yet".to_owned())),
            readers: Arc::new(Semaphore::new(READERS)),
            queue_bytes,
            queue: Mutex::default(),
            emptied: Notify::new(),
            counters: DiskCounters::default(),
        })
    }

    /// The tier, while it is open (it may be off).
    #[must_use]
    pub fn engine(&self) -> Option<Arc<DiskEngine>> {
        self.engine.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Opens the tier. Blocks: reads tables, and walks a slab or two.
    ///
    /// # Errors
    /// As [`DiskEngine::open`]; the store works without it, and it can be tried again.
    pub fn open(&self, config: DiskConfig, now: SystemTime) -> Result<Recovery, DiskError> {
        // Locked over the opening, so that two callers do not meet in the directory.
        let mut absent = lock(&self.absent);
        let opened = DiskEngine::open(config, now);
        match opened {
            Ok((engine, found)) => {
                *self.engine.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(engine));
                *absent = None;
                Ok(found)
            }
            Err(e) => {
                *absent = Some(e.to_string());
                Err(e)
            }
        }
    }

    /// Notes why it cannot even be tried to open the tier.
    pub fn set_absent_reason(&self, why: String) {
        *lock(&self.absent) = Some(why);
    }

    /// Whether the tier keeps chunks.
    #[must_use]
    pub fn state(&self) -> DiskState {
        if let Some(engine) = self.engine() {
            return DiskState::Open(engine.health());
        }
        // Contended only while it is being opened.
        let why = self.absent.try_lock().ok().and_then(|w| w.clone());
        DiskState::Absent(why.unwrap_or_else(|| "it is being opened".to_owned()))
    }

    /// Numbers.
    #[must_use]
    pub fn report(&self) -> DiskReport {
        let c = &self.counters;
        DiskReport {
            state: self.state(),
            engine: self.engine().map(|t| t.stats()),
            corrupt: c.corrupt.load(Relaxed),
            late: c.late.load(Relaxed),
            append_drops: c.append_drops.load(Relaxed),
            append_dropped_bytes: c.append_dropped_bytes.load(Relaxed),
            queued_bytes: lock(&self.queue).bytes(),
        }
    }

    /// Looks whether the tier still works. Blocks.
    pub fn probe(&self, now: SystemTime) -> DiskState {
        if let Some(engine) = self.engine() {
            engine.probe(now);
        }
        self.state()
    }

    /// Gives the space of dead chunks back, copying at most `budget` bytes. Blocks.
    ///
    /// # Errors
    /// [`DiskError`]; what it means for the tier is in its state.
    pub fn reap(&self, budget: u64) -> Result<ReapReport, DiskError> {
        self.engine().map_or(Ok(ReapReport::default()), |t| t.reap(budget))
    }

    /// Reads and hashes `budget` bytes of what is kept. Blocks.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn scrub(&self, budget: u64) -> Result<ScrubReport, DiskError> {
        self.engine().map_or(Ok(ScrubReport::default()), |t| t.scrub_next(budget))
    }

    /// Divides the tier equally among datasets, each with the footprint it can use at most, if that is
    /// known. Blocks. How many chunks had to leave; `None` without a tier.
    pub fn divide_equally(&self, datasets: &[(DatasetId, Option<u64>)]) -> Option<u64> {
        let engine = self.engine()?;
        Some(engine.set_shares(&equal_split(engine.capacity(), datasets)))
    }

    /// Waits until what was admitted is written, but not longer than `within`.
    pub async fn wait_flushed(&self, within: Duration) {
        let until = Instant::now() + within;
        loop {
            let emptied = self.emptied.notified();
            tokio::pin!(emptied);
            emptied.as_mut().enable();
            if lock(&self.queue).bytes() == 0 || timeout_at(until, emptied).await.is_err() {
                return;
            }
        }
    }

    /// Waits until half of the queue is free for `len` more bytes, but not longer than `within`.
    pub(crate) async fn wait_for_queue_room(&self, len: u32, within: Duration) {
        let until = Instant::now() + within;
        let full = || lock(&self.queue).bytes() + u64::from(len) > (self.queue_bytes / 2).max(u64::from(len));
        while full() && Instant::now() < until {
            tokio::time::sleep(QUEUE_POLL_EVERY).await;
        }
    }

    /// Takes what was to be appended of a chunk for `dataset` back, if nobody began to.
    pub(crate) fn cancel_append(&self, key: &StoreKey, dataset: DatasetId) -> bool {
        lock(&self.queue).cancel(key, dataset)
    }

    /// The chunk, if it waits to be appended: it is neither on disk nor, perhaps, in memory.
    pub(crate) fn queued_chunk(&self, key: &StoreKey) -> Option<Verified> {
        lock(&self.queue).get(key)
    }

    /// Closes the tier, so that the next start is quick. Blocks. What still waits is dropped.
    ///
    /// # Errors
    /// [`DiskError`]; it is closed all the same.
    pub fn close(&self) -> Result<(), DiskError> {
        self.engine().map_or(Ok(()), |t| t.close())
    }

    /// Closes the tier and gives its place up, so that another can be opened, by this process or by another.
    /// Blocks.
    pub fn detach(&self, why: String) {
        let mut absent = lock(&self.absent);
        let engine = self.engine.write().unwrap_or_else(PoisonError::into_inner).take();
        *absent = Some(why);
        if let Some(Err(e)) = engine.map(|t| t.close()) {
            tracing::debug!(error = %e, "the disk engine was not closed well");
        }
    }

    /// Whether the tier has the chunk, `len` bytes long. Does no IO.
    #[must_use]
    pub fn has(&self, key: &StoreKey, len: u32) -> bool {
        self.engine().is_some_and(|t| t.length(key) == Some(len))
    }

    /// Whether the tier has the chunk, or will once what waits was written. Does no IO.
    #[must_use]
    pub fn has_or_queued(&self, key: &StoreKey, len: u32) -> bool {
        // In this order: what waits is in the index before it waits no longer.
        lock(&self.queue).get(key).is_some() || self.has(key, len)
    }

    /// Protects chunks from eviction until as many releases; which of them are there and are now.
    #[must_use]
    pub fn pin(&self, keys: &[StoreKey]) -> Vec<bool> {
        let Some(tier) = self.engine() else { return vec![false; keys.len()] };
        keys.iter().map(|k| tier.pin(std::slice::from_ref(k)) == 1).collect()
    }

    /// Takes one protection back from each chunk.
    pub fn unpin(&self, keys: &[StoreKey]) {
        if let Some(tier) = self.engine() {
            tier.unpin(keys);
        }
    }

    /// Evicts what a dataset has and nobody leased; how many chunks.
    #[must_use]
    pub fn evict_dataset(&self, dataset: DatasetId) -> u64 {
        self.engine().map_or(0, |t| t.evict_dataset(dataset))
    }

    /// Evicts a chunk if it was brought for `dataset` and nobody leased it; one that waits to be written never is.
    pub fn evict_of(&self, key: &StoreKey, dataset: DatasetId) -> bool {
        let waited = self.cancel_append(key, dataset);
        waited | self.engine().is_some_and(|t| t.evict_of(key, dataset))
    }

    /// What a dataset was given of the tier, in footprints.
    #[must_use]
    pub fn share_of(&self, dataset: DatasetId) -> Option<u64> {
        self.engine().and_then(|t| t.share_of(dataset))
    }

    /// Whether the dataset was given a share of so many bytes. True where none are given out.
    #[must_use]
    pub fn has_share(&self, dataset: DatasetId, bytes: u64) -> bool {
        let enough = |share: Option<u64>| share.is_some_and(|s| s >= bytes);
        self.engine().is_none_or(|t| {
            t.policy() != Policy::Fletch
                || t.stats().datasets.iter().any(|d| d.dataset == dataset && enough(d.share))
        })
    }

    /// Whether the tier would keep the chunk if it came now. Does no IO.
    pub(crate) fn admits(&self, key: &StoreKey, dataset: DatasetId, len: u32) -> bool {
        self.engine().is_some_and(|t| t.admit(key, dataset, len) == Admission::Yes)
    }

    /// The chunk as it is on disk, if it is right, in `buffer`, which is as long. What is wrong is never read again.
    pub(crate) async fn read(
        self: &Arc<Self>,
        key: &StoreKey,
        buffer: PooledBuffer,
        until: Instant,
    ) -> Option<Verified> {
        self.read_verified(key, None, buffer, until).await
    }

    /// As many bytes of the chunk as `buffer` is long, from `offset` on, if they hash to `part`. If not, the chunk may
    /// be damaged, or whoever says that they lie there may be wrong: nothing is concluded.
    pub(crate) async fn read_part(
        self: &Arc<Self>,
        key: &StoreKey,
        offset: usize,
        part: Hash,
        buffer: PooledBuffer,
        until: Instant,
    ) -> Option<Verified> {
        self.read_verified(key, Some((offset, part)), buffer, until).await
    }

    async fn read_verified(
        self: &Arc<Self>,
        key: &StoreKey,
        part: Option<(usize, Hash)>,
        buffer: PooledBuffer,
        until: Instant,
    ) -> Option<Verified> {
        let engine = self.engine()?;
        let now = Instant::now();
        let by = now + READ_WAIT.min(until.saturating_duration_since(now) / 4);
        let permit = match timeout_at(by, Arc::clone(&self.readers).acquire_owned()).await {
            Ok(permit) => permit.ok()?,
            Err(_) => return self.give_up_read(key),
        };
        let (disk, of) = (Arc::clone(self), key.clone());
        let job = spawn_blocking(move || {
            let _permit = permit;
            // Its errors are counted, and blamed on the disk, by the tier.
            let found = engine.get_with(&of, |record| {
                let wanted = buffer.as_ref().len();
                let fits = match part {
                    None => record.len() == wanted,
                    Some((offset, _)) => offset.checked_add(wanted).is_some_and(|end| end <= record.len()),
                };
                if !fits {
                    return Ok(None);
                }
                let (offset, hash) = part.unwrap_or((0, of.hash));
                Verified::fill(hash, buffer, |at, piece| record.read_at(offset + at, piece)).map(Result::ok)
            });
            let found = found.ok().flatten()?;
            if found.is_none() && part.is_none() {
                Counters::add(&disk.counters.corrupt, 1);
                engine.quarantine(&of);
            }
            found
        });
        match timeout_at(by, job).await {
            Ok(done) => done.ok().flatten(),
            Err(_) => self.give_up_read(key),
        }
    }

    fn give_up_read(&self, key: &StoreKey) -> Option<Verified> {
        Counters::add(&self.counters.late, 1);
        tracing::warn!(chunk = %key.hash, "the disk takes too long and is passed by");
        None
    }

    /// Has the chunk appended in the background, if it is admitted and the queue has room; whether it will be.
    pub(crate) fn enqueue(self: &Arc<Self>, key: &StoreKey, dataset: DatasetId, chunk: &Verified) -> bool {
        if dataset == DatasetId::UNCACHED {
            return false;
        }
        let (Some(engine), Ok(len)) = (self.engine(), u32::try_from(chunk.bytes().len())) else {
            return false;
        };
        match engine.length(key) {
            Some(there) if there == len => return true,
            // These bytes were just hashed: what is there cannot be the chunk.
            Some(_) => engine.quarantine(key),
            None => {}
        }
        if engine.admit(key, dataset, len) == Admission::No {
            return false;
        }
        let mut queue = lock(&self.queue);
        if queue.bytes() + u64::from(len) > self.queue_bytes {
            Counters::add(&self.counters.append_drops, 1);
            Counters::add(&self.counters.append_dropped_bytes, u64::from(len));
            return false;
        }
        queue.push(Append { key: key.clone(), dataset, chunk: chunk.clone() });
        if !std::mem::replace(&mut queue.has_drainer, true) {
            let disk = Arc::clone(self);
            drop(spawn_blocking(move || disk.drain()));
        }
        true
    }

    /// Appends until nothing waits.
    fn drain(&self) {
        /// Whoever comes after a panic begins anew.
        struct DrainerGuard<'a>(&'a DiskTier);
        impl Drop for DrainerGuard<'_> {
            fn drop(&mut self) {
                lock(&self.0.queue).has_drainer = false;
            }
        }
        loop {
            let permit = DrainerGuard(self);
            while let Some(next) = self.next() {
                let Append { key, dataset, chunk } = &next.append;
                // An error turned the tier off, or concerned this chunk: it is counted there.
                if let Some(Err(e)) = self.engine().map(|t| t.put(key, *dataset, chunk)) {
                    tracing::debug!(chunk = %key.hash, error = %e, "not appended");
                }
            }
            drop(permit);
            self.emptied.notify_waiters();
            // Somebody may have come between the last look and the end of the turn.
            let mut queue = lock(&self.queue);
            if queue.is_empty() || std::mem::replace(&mut queue.has_drainer, true) {
                return;
            }
        }
    }

    fn next(&self) -> Option<AppendInProgress<'_>> {
        lock(&self.queue).next().map(|append| AppendInProgress { disk: self, append })
    }
}

/// What is being appended: it counts until it is over, however that ends.
struct AppendInProgress<'a> {
    disk: &'a DiskTier,
    append: Append,
}

impl Drop for AppendInProgress<'_> {
    fn drop(&mut self) {
        lock(&self.disk.queue).finish(&self.append);
    }
}

#[cfg(test)]
mod tests;
