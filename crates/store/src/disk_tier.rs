//! The handle of the disk tier, for reads. The tier may be absent or off; the handle is always there.
//!
//! [`DiskTier`] holds the engine ([`DiskEngine`]) while it is open. Readers never wait for the engine longer
//! than [`READ_WAIT`].
//!
//! ```text
//! read     has(key) ─► permit ─► blocking thread: one read, one hash ─► Verified, or a miss
//! enqueue  admitted? ─► queue, bounded in bytes ─► one blocking thread that appends groups until it is empty
//! owner    open, probe, reap, scrub, divide, close: called by `maintenance`
//! ```
//!
//! Invariants:
//! 1. (I1) the handle returns only [`Verified`], hashed after it was read. It quarantines a wrong chunk;
//! 2. (I5) every error, and every wait that is too long, is a miss;
//! 3. (I6) queued appends hold at most `queue_bytes`. A chunk that does not fit is dropped and counted.
//!    At most [`READERS`] threads read at once, however long a dead disk holds them;
//! 4. a reader never waits for an append.

mod append_queue;
mod appends;
mod no_wait;
mod promise;

use crate::{
    buffer_pool::PooledBuffer,
    dataset_id::DatasetId,
    disk::{
        Admission, Claim, DiskConfig, DiskEngine, DiskError, DiskStats, Health, OffReason, Policy, Pools,
        ReapReport, Recovery, ScrubReport, split_by_claims, sweeps_first,
    },
    stats::Counters,
};
use append_queue::Queue;
use fletch_bounds::{Gate, pass_gate};
use fletch_core::{Expected, Hash, StoreKey, Verified, verified::Grouped};
use parking_lot::{Condvar, Mutex, RwLock};
pub(crate) use promise::PromiseOutcome;
use promise::Promises;
use std::{
    collections::HashMap,
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};
use tokio::{
    sync::{Notify, Semaphore},
    task::spawn_blocking,
    time::{Instant, timeout_at},
};

/// Most threads that read the disk at once. With 32 reads the queue of a flash disk is full.
pub const READERS: usize = 32;
/// Longest wait for a chunk on disk. A reader waits at most a quarter of the time that it has left.
const READ_WAIT: Duration = Duration::from_secs(5);

/// Most datasets whose refused reads are remembered until the next division.
const DATASETS_REFUSED_MAX: usize = 4096;
/// The part of the capacity, one of this many, whose refusal to one dataset asks for a new division.
const REFUSED_PART: u64 = 32;
/// Shortest time between two divisions that refusals ask for.
const DIVIDE_EVERY_MIN: Duration = Duration::from_millis(100);

/// A disk tier, open or absent.
#[derive(Debug)]
pub struct DiskTier {
    engine: RwLock<Option<Arc<DiskEngine>>>,
    /// Why the tier is absent.
    absent: Mutex<Option<String>>,
    readers: Arc<Semaphore>,
    queue_bytes: u64,
    queue: Mutex<Queue>,
    /// Notified when the next group is due.
    due: Condvar,
    emptied: Notify,
    promises: Promises,
    counters: DiskCounters,
    refused: Mutex<Refused>,
    /// Notified when so much was refused that the tier should be divided anew before the next round.
    much_refused: Notify,
}

/// Reads that found no room in their dataset's share, since the last division.
#[derive(Debug)]
struct Refused {
    /// Their footprints.
    bytes: HashMap<DatasetId, u64>,
    /// The time of the last division.
    since: Instant,
}

#[derive(Debug, Default)]
struct DiskCounters {
    corrupt: AtomicU64,
    late: AtomicU64,
    append_drops: AtomicU64,
    append_dropped_bytes: AtomicU64,
}

/// The state of the tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskState {
    /// The tier is not open, for this reason. Its owner tries to open it again.
    Absent(String),
    /// The tier is open.
    Open(Health),
}

/// A snapshot of the tier and its counters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskReport {
    /// The state of the tier.
    pub state: DiskState,
    /// The engine's own numbers, while the tier is open.
    pub engine: Option<DiskStats>,
    /// Reads whose bytes did not hash to the chunk's name.
    pub corrupt: u64,
    /// Reads that took too long and became misses.
    pub late: u64,
    /// Admitted chunks that were dropped because the append queue was full.
    pub append_drops: u64,
    /// Bytes of those chunks.
    pub append_dropped_bytes: u64,
    /// Bytes of chunks in the append queue.
    pub queued_bytes: u64,
}

impl DiskReport {
    /// Returns the number of damaged chunks that readers and scrubbing found. They are never served.
    #[must_use]
    pub fn damaged(&self) -> u64 {
        self.engine.as_ref().map_or(0, |t| t.counts.quarantined)
    }
}

impl DiskTier {
    /// Returns an absent tier. `queue_bytes` bounds its append queue, which is part of the store's memory.
    #[must_use]
    pub fn new(queue_bytes: u64) -> Arc<Self> {
        Arc::new(DiskTier {
            engine: RwLock::new(None),
            absent: Mutex::new(Some("the tier was not opened yet".to_owned())),
            readers: Arc::new(Semaphore::new(READERS)),
            queue_bytes,
            queue: Mutex::default(),
            due: Condvar::new(),
            emptied: Notify::new(),
            promises: Promises::default(),
            counters: DiskCounters::default(),
            refused: Mutex::new(Refused { bytes: HashMap::new(), since: Instant::now() }),
            much_refused: Notify::new(),
        })
    }

    /// Returns the engine, while the tier is open. The engine may be off.
    #[must_use]
    pub fn engine(&self) -> Option<Arc<DiskEngine>> {
        self.engine.read().clone()
    }

    /// Opens the tier. Blocks: reads the tables of all slabs, and walks a slab or two.
    ///
    /// # Errors
    /// As [`DiskEngine::open`]. The store works without the tier, and the owner may try again.
    pub fn open(&self, config: DiskConfig, now: SystemTime) -> Result<Recovery, DiskError> {
        // Locked until it is open, so that two callers do not open one directory.
        let mut absent = self.absent.lock();
        let opened = DiskEngine::open(config, now);
        match opened {
            Ok((engine, found)) => {
                *self.engine.write() = Some(Arc::new(engine));
                *absent = None;
                Ok(found)
            }
            Err(e) => {
                *absent = Some(e.to_string());
                Err(e)
            }
        }
    }

    /// Records why the tier cannot be opened.
    pub fn set_absent_reason(&self, why: String) {
        *self.absent.lock() = Some(why);
    }

    /// Returns the state of the tier.
    #[must_use]
    pub fn state(&self) -> DiskState {
        if let Some(engine) = self.engine() {
            return DiskState::Open(engine.health());
        }
        // Locked only while the tier opens.
        let why = self.absent.try_lock().and_then(|w| w.clone());
        DiskState::Absent(why.unwrap_or_else(|| "the tier is being opened".to_owned()))
    }

    /// Returns a snapshot of the tier and its counters.
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
            queued_bytes: self.queue.lock().bytes(),
        }
    }

    /// Checks whether the tier works, as [`DiskEngine::probe`]. Blocks.
    ///
    /// Detaches a tier whose file system was unmounted. Its chunks are there again once it can be opened.
    pub fn probe(&self, now: SystemTime) -> DiskState {
        if let Some(engine) = self.engine()
            && let Health::Off { why: OffReason::Vanished, .. } = engine.probe(now)
            && let Err(e @ DiskError::Unmounted { .. }) = engine.check_mounted()
        {
            tracing::warn!(error = %e, "the disk tier is absent; reads skip it until it can be opened");
            self.detach(e.to_string());
        }
        self.state()
    }

    /// Gives the space of dead records back, and copies at most `budget` bytes for it. Blocks.
    ///
    /// # Errors
    /// [`DiskError`]. The state of the tier says what the error means for it.
    pub fn reap(&self, budget: u64) -> Result<ReapReport, DiskError> {
        self.engine().map_or(Ok(ReapReport::default()), |t| t.reap(budget))
    }

    /// Reads and hashes about `budget` bytes of kept chunks. Blocks.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn scrub(&self, budget: u64) -> Result<ScrubReport, DiskError> {
        self.engine().map_or(Ok(ScrubReport::default()), |t| t.scrub_next(budget))
    }

    /// Divides the tier among datasets by their claims. `sweeps` are sweeps, each with the dataset of the
    /// plain readers whose chunks it shares. Blocks.
    ///
    /// Returns how many chunks the new shares evicted; `None` while the tier is absent.
    pub fn divide(&self, claims: &[Claim], sweeps: &[(DatasetId, DatasetId)]) -> Option<u64> {
        let engine = self.engine()?;
        let shares = sweeps_first(split_by_claims(engine.capacity(), claims), claims);
        let mut most: Vec<_> = claims.iter().filter_map(|c| Some((c.pool.plain, c.pool.most?))).collect();
        most.dedup();
        Some(engine.set_pooled_shares(&shares, &Pools { sweeps: sweeps.to_vec(), most }))
    }

    /// Notes that a read of `len` bytes found no room in its dataset's share.
    pub(crate) fn note_refused(&self, dataset: DatasetId, len: u32) {
        let capacity = self.engine().map_or(0, |t| t.capacity());
        let mut refused = self.refused.lock();
        if refused.bytes.len() >= DATASETS_REFUSED_MAX && !refused.bytes.contains_key(&dataset) {
            return;
        }
        let bytes = refused.bytes.entry(dataset).or_default();
        *bytes += DiskEngine::footprint(len);
        if *bytes >= capacity / REFUSED_PART && refused.since.elapsed() >= DIVIDE_EVERY_MIN {
            self.much_refused.notify_one();
        }
    }

    /// Waits until so much was refused that the tier should be divided anew.
    pub async fn wait_for_refusals(&self) {
        self.much_refused.notified().await;
    }

    /// Returns what each dataset asked for: what it has, and what was refused since the last call.
    ///
    /// Datasets that have nothing and were refused nothing are missing. Forgets the refusals.
    pub(crate) fn take_demand(&self) -> HashMap<DatasetId, u64> {
        let mut demand = {
            let mut refused = self.refused.lock();
            refused.since = Instant::now();
            std::mem::take(&mut refused.bytes)
        };
        for usage in self.engine().iter().flat_map(|t| t.stats().datasets) {
            *demand.entry(usage.dataset).or_default() += usage.bytes + usage.shared_bytes;
            // Plain readers find what an ended sweep left, and want it as what they fetched themselves.
            if usage.plain != usage.dataset && usage.share.is_none() {
                *demand.entry(usage.plain).or_default() += usage.bytes;
            }
        }
        demand
    }

    /// Closes the tier, so that the next start is quick. Drops queued appends. Blocks.
    ///
    /// # Errors
    /// [`DiskError`]; the tier is closed all the same.
    pub fn close(&self) -> Result<(), DiskError> {
        self.engine().map_or(Ok(()), |t| t.close())
    }

    /// Closes the tier and releases its directory, so that this process or another can open a tier. Blocks.
    pub fn detach(&self, why: String) {
        let mut absent = self.absent.lock();
        let engine = self.engine.write().take();
        *absent = Some(why);
        if let Some(Err(e)) = engine.map(|t| t.close()) {
            tracing::debug!(error = %e, "closing the detached disk tier failed");
        }
    }

    /// Whether the tier has the chunk with `len` bytes. Does no IO.
    #[must_use]
    pub fn has(&self, key: &StoreKey, len: u32) -> bool {
        self.engine().is_some_and(|t| t.length(key) == Some(len))
    }

    /// Whether the tier has the chunk, or has queued it. Does no IO.
    #[must_use]
    pub fn has_or_queued(&self, key: &StoreKey, len: u32) -> bool {
        // In this order: a chunk is in the index before it leaves the queue.
        self.queue.lock().get(key).is_some() || self.has(key, len)
    }

    /// Pins chunks against eviction, each until an `unpin` of its own.
    ///
    /// Returns for each chunk whether it is present, and so pinned.
    #[must_use]
    pub fn pin(&self, keys: &[StoreKey]) -> Vec<bool> {
        let Some(tier) = self.engine() else { return vec![false; keys.len()] };
        keys.iter().map(|k| tier.pin(std::slice::from_ref(k)) == 1).collect()
    }

    /// Takes one pin off each chunk.
    pub fn unpin(&self, keys: &[StoreKey]) {
        if let Some(tier) = self.engine() {
            tier.unpin(keys);
        }
    }

    /// Evicts all chunks of a dataset that are not pinned, and of the sweeps over it that are not `kept`.
    /// Returns how many there were.
    #[must_use]
    pub fn evict_dataset(&self, dataset: DatasetId, kept: &[DatasetId]) -> u64 {
        self.engine().map_or(0, |t| t.evict_dataset(dataset, kept))
    }

    /// Notes that a dataset uses a chunk, which may be charged to a dataset with which it shares chunks.
    pub fn use_chunk(&self, key: &StoreKey, dataset: DatasetId) {
        if let Some(tier) = self.engine() {
            tier.use_chunk(key, dataset);
        }
    }

    /// Gives a chunk of `dataset` up, as [`DiskEngine::evict_of`]. A queued append of it is cancelled.
    pub fn evict_of(&self, key: &StoreKey, dataset: DatasetId) -> bool {
        let waited = self.cancel_append(key, dataset);
        waited | self.engine().is_some_and(|t| t.evict_of(key, dataset))
    }

    /// Removes chunks, also those that are pinned or wait to be appended, and returns how many there were.
    /// They do not come back after a restart. Blocks.
    ///
    /// # Errors
    /// When the disk does not take that.
    pub fn erase(&self, keys: &[StoreKey]) -> Result<u64, DiskError> {
        let waited = keys.iter().filter(|key| self.cancel_appends(key)).count() as u64;
        Ok(waited + self.engine().map_or(Ok(0), |t| t.erase(keys))?)
    }

    /// Returns the share of a dataset, in footprints, as [`DiskEngine::share_of`].
    #[must_use]
    pub fn share_of(&self, dataset: DatasetId) -> Option<u64> {
        self.engine().and_then(|t| t.share_of(dataset))
    }

    /// Returns the part of the disk that a dataset has for itself, in footprints. Parts add up.
    #[must_use]
    pub fn part_of(&self, dataset: DatasetId) -> Option<u64> {
        self.engine().and_then(|t| t.part_of(dataset))
    }

    /// Whether the dataset has a share of at least `bytes`.
    ///
    /// True for an absent tier, and for policies without shares.
    #[must_use]
    pub fn has_share(&self, dataset: DatasetId, bytes: u64) -> bool {
        let enough = |share: Option<u64>| share.is_some_and(|s| s >= bytes);
        self.engine().is_none_or(|t| t.policy() != Policy::Fletch || enough(t.share_of(dataset)))
    }

    /// Whether the tier would keep the chunk now. Does no IO.
    pub(crate) fn admits(&self, key: &StoreKey, dataset: DatasetId, len: u32) -> bool {
        self.admits_beside(key, dataset, len, 0)
    }

    /// Whether the tier would keep the chunk now, if the dataset occupied `beside` more bytes. Does no IO.
    #[must_use]
    pub fn admits_beside(&self, key: &StoreKey, dataset: DatasetId, len: u32, beside: u64) -> bool {
        self.engine().is_some_and(|t| t.admit_beside(key, dataset, len, beside) == Admission::Yes)
    }

    /// Reads a chunk, or a part of it, into `buffer`, which is as long.
    ///
    /// Quarantines a whole chunk that does not verify. Where a part does not, the chunk may be damaged or the
    /// caller's offset may be wrong.
    pub(crate) async fn read(
        self: &Arc<Self>,
        key: &StoreKey,
        wanted: Wanted,
        buffer: PooledBuffer,
        until: Instant,
    ) -> Option<Grouped> {
        let engine = self.engine()?;
        let now = Instant::now();
        let by = now + READ_WAIT.min(until.saturating_duration_since(now) / 4);
        let permit =
            match pass_gate(Gate::DiskQueue, timeout_at(by, Arc::clone(&self.readers).acquire_owned())).await
            {
                Ok(permit) => permit.ok()?,
                Err(_) => return self.give_up_read(key),
            };
        let (disk, of) = (Arc::clone(self), key.clone());
        let job = spawn_blocking(move || {
            let _permit = permit;
            let is_whole = !matches!(wanted, Wanted::Part { .. });
            // The engine counts its errors and turns itself off.
            let found = engine.get_with(&of, |record| {
                verify(record.len(), (of.hash, wanted), buffer, |at, piece| record.read_at(at, piece))
            });
            let found = found.ok().flatten()?;
            if found.is_none() && is_whole {
                Counters::add(&disk.counters.corrupt, 1);
                engine.quarantine(&of);
            }
            found
        });
        match pass_gate(Gate::Disk, timeout_at(by, job)).await {
            Ok(done) => done.ok().flatten(),
            Err(_) => self.give_up_read(key),
        }
    }

    fn give_up_read(&self, key: &StoreKey) -> Option<Grouped> {
        Counters::add(&self.counters.late, 1);
        let chunk = key.hash;
        tracing::warn!(%chunk, "reading a chunk from disk takes too long; the read goes on without the disk");
        None
    }
}

/// What is read of a chunk.
#[derive(Debug, Clone)]
pub(crate) enum Wanted {
    /// All of it.
    Whole,
    /// All of it, and the hashes of its groups, which take a few hundredths longer.
    Grouped,
    /// Bytes that are read alone.
    Part {
        /// Where they begin in the chunk.
        offset: usize,
        /// A file that lies in the chunk, or a run of the chunk's groups.
        expected: Expected,
    },
}

/// Fills `buffer` by `read` with a record of `len` bytes, or with a part of it. `None` if that does not fit,
/// or is not what is expected.
fn verify(
    len: usize,
    (hash, read_of): (Hash, Wanted),
    buffer: PooledBuffer,
    read: impl Fn(usize, &mut [u8]) -> io::Result<()>,
) -> io::Result<Option<Grouped>> {
    let size = buffer.as_ref().len();
    let fits = match &read_of {
        Wanted::Whole | Wanted::Grouped => len == size,
        Wanted::Part { offset, .. } => offset.checked_add(size).is_some_and(|end| end <= len),
    };
    if !fits {
        return Ok(None);
    }
    let alone = |verified| (verified, None);
    Ok(match read_of {
        Wanted::Whole => Verified::fill(hash, buffer, read)?.ok().map(alone),
        Wanted::Grouped => Verified::fill_grouped(hash, buffer, read)?.ok(),
        Wanted::Part { offset, expected } => {
            Verified::fill(expected, buffer, |at, piece| read(offset + at, piece))?.ok().map(alone)
        }
    })
}

#[cfg(test)]
mod tests;
