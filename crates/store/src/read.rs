//! THE read: memory, then the flight of this chunk: the disk, then its fetch; checked, kept, handed out.

use crate::{
    buffer_pool::PooledBuffer,
    dataset_id::DatasetId,
    disk_tier::DiskTier,
    flight::{FlightRole, Flights, LeaderGuard},
    memory::{Memory, bind_permit},
    pins::Pinned,
    stats::{Counters, StoreStats},
};
use bytes::Bytes;
use fletch_core::{Hash, Kind, Mismatch, StoreKey, Verified};
use futures::future::BoxFuture;
use std::{error::Error, ops::Range, sync::Arc, time::Duration};
use tokio::time::{Instant, timeout_at};
use tokio_util::task::TaskTracker;

/// Above this many bytes a chunk is hashed on a blocking thread (0.03 ms of hashing).
const INLINE_HASH_BYTES: usize = 256 << 10;

/// Brings the bytes of a chunk: called with 0, and again with 1, 2, … for as long as what it
/// brought did not hash to the chunk's name (so a call with `n > 0` *says* that the bytes of
/// call `n - 1` were wrong) and attempts are left. A fetch with nothing else to try returns
/// the error that readers shall see. Retrying a transport is its own business.
pub type Fetch = Arc<dyn Fn(u32) -> BoxFuture<'static, Result<Bytes, FetchError>> + Send + Sync>;

/// Bounds of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreLimits {
    /// Bytes of all buffers alive. Must be at least the largest chunk; four times it to cache well.
    pub memory_bytes: u64,
    /// A read that misses memory ends within this time.
    pub deadline: Duration,
    /// How often a fetch is called at most, at least 1.
    pub attempts: u32,
}

/// Why a fetch brought nothing.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{source}")]
pub struct FetchError {
    /// Who can act on it.
    pub kind: Kind,
    /// The fetcher's own error, to be downcast by those who know it.
    pub source: Arc<dyn Error + Send + Sync>,
}

impl FetchError {
    /// Wraps the fetcher's own error.
    pub fn new(kind: Kind, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        FetchError { kind, source: Arc::from(source.into()) }
    }
}

/// Why a read brought nothing.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ReadError {
    /// The fetch said so.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// Every attempt brought wrong bytes.
    #[error("{0}")]
    Corrupt(Mismatch),
    /// No memory came free in time.
    #[error("no memory for {len} bytes came free within {within:?}")]
    Overloaded {
        /// How many bytes were wanted.
        len: u32,
        /// How long was waited.
        within: Duration,
    },
    /// The fetch did not end in time.
    #[error("no answer within {0:?}")]
    Deadline(Duration),
    /// The fetch's task was lost: it panicked, or the runtime is going down.
    #[error("the fetch was lost")]
    Lost,
}

impl ReadError {
    /// Who can act on it.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            ReadError::Fetch(e) => e.kind,
            ReadError::Corrupt(_) => Kind::Corrupt,
            ReadError::Overloaded { .. } => Kind::Overloaded,
            ReadError::Deadline(_) => Kind::Unavailable,
            ReadError::Lost => Kind::Internal,
        }
    }
}

/// Where a chunk came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tier {
    /// It was in memory.
    Memory,
    /// It was on disk.
    Disk,
    /// Somebody else was bringing it.
    Flight,
    /// This read's own fetch brought it, and it is kept.
    Origin,
    /// This read's own fetch brought it, and there is a disk tier that does not keep it.
    Bypass,
}

/// A chunk, and where it came from.
#[derive(Debug, Clone)]
pub struct Hit {
    /// The whole chunk.
    pub chunk: Verified,
    /// Where it came from.
    pub tier: Tier,
}

/// See the crate's invariants.
#[derive(Debug)]
pub struct Store {
    limits: StoreLimits,
    pub(crate) memory: Memory,
    disk: Option<Arc<DiskTier>>,
    flights: Arc<Flights>,
    tasks: TaskTracker,
    pub(crate) counters: Counters,
}

impl Store {
    /// An empty store whose fetches run on `tasks`, over a disk tier if there is to be one.
    #[must_use]
    pub fn new(limits: StoreLimits, disk: Option<Arc<DiskTier>>, tasks: TaskTracker) -> Arc<Self> {
        Arc::new(Store {
            limits,
            memory: Memory::new(limits.memory_bytes),
            disk,
            flights: Arc::default(),
            tasks,
            counters: Counters::default(),
        })
    }

    /// The chunk, if it is in memory, be it on its way to the disk. Never waits.
    #[must_use]
    pub fn cached(&self, key: &StoreKey) -> Option<Hit> {
        let chunk = self.memory_or_queued(key)?;
        Counters::add(&self.counters.hits_memory, 1);
        Some(Hit { chunk, tier: Tier::Memory })
    }

    /// Keeps a chunk in memory until the guard is dropped, whatever is evicted. What is pinned is part of
    /// `memory_bytes`: whoever pins must bound it.
    #[must_use]
    pub fn pin(&self, key: StoreKey, chunk: Verified) -> Pinned {
        self.memory.pin(key, chunk)
    }

    /// The disk tier, if there is to be one.
    #[must_use]
    pub fn disk(&self) -> Option<&Arc<DiskTier>> {
        self.disk.as_ref()
    }

    /// Whether the chunk is in memory or on disk, `len` bytes long. Reads nothing.
    #[must_use]
    pub fn has(&self, key: &StoreKey, len: u32) -> bool {
        self.disk.as_ref().is_some_and(|d| d.has(key, len)) || self.memory_or_queued(key).is_some()
    }

    /// Whether the whole chunk is in memory: then a part of it that is handed out holds all of it. Counts nothing.
    #[must_use]
    pub fn holds_chunk(&self, key: &StoreKey) -> bool {
        self.memory_or_queued(key).is_some()
    }

    fn memory_or_queued(&self, key: &StoreKey) -> Option<Verified> {
        self.memory.get(key).or_else(|| self.disk.as_ref()?.queued_chunk(key))
    }

    /// Whether a read of the chunk finds it here or on its way, or brings it to stay: on disk, or in
    /// memory because all that it is read with, `of` bytes, fits there. What is only partly wanted
    /// and would not stay is better read by range, under a name of its own. Reads nothing.
    #[must_use]
    pub fn would_keep(&self, key: &StoreKey, dataset: DatasetId, len: u32, of: u64) -> bool {
        of <= self.limits.memory_bytes / 2
            || self.has(key, len)
            || self.flights.has(key)
            || self.disk.as_ref().is_some_and(|d| d.admits(key, dataset, len))
    }

    /// The chunk `key`, which is `len` bytes long: from memory, from the flight that is
    /// bringing it, from disk, or by `fetch`, for `dataset`. Dropping the returned future ends the
    /// waiting, never the fetch.
    ///
    /// What went wrong with somebody else's fetch is not the caller's: it may ask another source, or in another's name.
    /// Who joined such a flight boards once more, within the same deadline, with a fetch of its own; where many had
    /// joined, one of them leads and the others join it (I3), and what comes of that is theirs.
    ///
    /// # Errors
    /// [`ReadError`]; nothing of it is kept, the next read tries again.
    pub async fn read(
        self: &Arc<Self>,
        key: StoreKey,
        len: u32,
        dataset: DatasetId,
        fetch: Fetch,
    ) -> Result<Hit, ReadError> {
        if let Some(hit) = self.cached(&key) {
            return Ok(hit);
        }
        let until = Instant::now() + self.limits.deadline;
        match self.join_or_lead(&key, len, dataset, &fetch).await {
            (Err(ReadError::Fetch(_) | ReadError::Corrupt(_)), true) if Instant::now() < until => {
                let again = timeout_at(until, self.join_or_lead(&key, len, dataset, &fetch)).await;
                again.map_err(|_| ReadError::Deadline(self.limits.deadline))?.0
            }
            (outcome, _) => outcome,
        }
    }

    /// Joins the flight of this chunk, or leads one: its outcome, and whether it was somebody else's.
    async fn join_or_lead(
        self: &Arc<Self>,
        key: &StoreKey,
        len: u32,
        dataset: DatasetId,
        fetch: &Fetch,
    ) -> (Result<Hit, ReadError>, bool) {
        match self.flights.join(key, || self.memory_or_queued(key)) {
            FlightRole::Cached(chunk) => {
                Counters::add(&self.counters.hits_memory, 1);
                (Ok(Hit { chunk, tier: Tier::Memory }), false)
            }
            FlightRole::Follower(arrival) => {
                Counters::add(&self.counters.hits_flight, 1);
                let outcome = arrival.await.unwrap_or(Err(ReadError::Lost));
                (outcome.map(|hit| Hit { tier: Tier::Flight, ..hit }), true)
            }
            FlightRole::Leader(guard, arrival) => {
                let (store, key, fetch) = (Arc::clone(self), key.clone(), Arc::clone(fetch));
                self.tasks.spawn(async move { store.run_flight(guard, key, len, dataset, fetch).await });
                (arrival.await.unwrap_or(Err(ReadError::Lost)), false)
            }
        }
    }

    /// Bytes `at` of the chunk, which is `len` bytes long, if they are in memory by themselves or on disk in the chunk,
    /// and hash to `part` (I1). `None` says nothing about the chunk: it may be in memory, absent, or damaged, or `at`
    /// may be wrong; whoever reads the whole chunk then learns which.
    ///
    /// # Errors
    /// [`ReadError::Overloaded`] when no memory came free in time.
    pub async fn part(
        &self,
        chunk: &StoreKey,
        len: u32,
        at: &Range<usize>,
        part: Hash,
    ) -> Result<Option<Hit>, ReadError> {
        let key = StoreKey { domain: chunk.domain.clone(), hash: part };
        if let Some(hit) = self.cached(&key) {
            return Ok(Some(hit));
        }
        let Some(disk) = self.disk().filter(|d| d.has(chunk, len)) else { return Ok(None) };
        let Some(size) = u32::try_from(at.len()).ok().filter(|&size| size <= len) else { return Ok(None) };
        let (until, within) = (Instant::now() + self.deadline(), self.deadline());
        let Some(buffer) = self.buffer(size, until).await else {
            Counters::add(&self.counters.overloaded, 1);
            return Err(ReadError::Overloaded { len: size, within });
        };
        let Some(verified) = disk.read_part(chunk, at.start, part, buffer, until).await else {
            return Ok(None);
        };
        Counters::add(&self.counters.hits_disk, 1);
        self.memory.insert(key, verified.clone());
        Ok(Some(Hit { chunk: verified, tier: Tier::Disk }))
    }

    /// The longest a read that misses memory takes.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.limits.deadline
    }

    pub(crate) async fn buffer(&self, len: u32, until: Instant) -> Option<PooledBuffer> {
        self.memory.buffer(len, until).await
    }

    /// A snapshot of what was counted.
    #[must_use]
    pub fn stats(&self) -> StoreStats {
        let (cached_bytes, cached_chunks) = self.memory.cached();
        StoreStats {
            cached_bytes,
            cached_chunks,
            live_bytes: self.memory.live_bytes(),
            pinned_bytes: self.memory.pinned_bytes(),
            flights: self.flights.len() as u64,
            ..self.counters.snapshot()
        }
    }

    /// A whole flight, in its own task.
    async fn run_flight(
        &self,
        guard: LeaderGuard,
        key: StoreKey,
        len: u32,
        dataset: DatasetId,
        fetch: Fetch,
    ) {
        let until = Instant::now() + self.limits.deadline;
        let outcome = match self.read_from_disk(&key, len, until).await {
            Ok(None) => self.fetch_verified(&key, len, until, &fetch).await.map(|chunk| {
                Counters::add(&self.counters.fetched_bytes, chunk.bytes().len() as u64);
                let kept = self.disk.as_ref().is_none_or(|d| d.enqueue(&key, dataset, &chunk));
                Hit { chunk, tier: if kept { Tier::Origin } else { Tier::Bypass } }
            }),
            Ok(Some(chunk)) => Ok(Hit { chunk, tier: Tier::Disk }),
            Err(e) => Err(e),
        };
        match &outcome {
            Ok(hit) => self.memory.insert(key, hit.chunk.clone()),
            Err(ReadError::Overloaded { .. }) => Counters::add(&self.counters.overloaded, 1),
            Err(ReadError::Deadline(_)) => Counters::add(&self.counters.deadlines, 1),
            Err(e) => tracing::debug!(chunk = %key.hash, error = %e, "fetch failed"),
        }
        guard.finish(outcome);
    }

    /// One read and one hash of what is on disk; whatever goes wrong there is a miss.
    async fn read_from_disk(
        &self,
        key: &StoreKey,
        len: u32,
        until: Instant,
    ) -> Result<Option<Verified>, ReadError> {
        let Some(disk) = self.disk.as_ref().filter(|d| d.has(key, len)) else { return Ok(None) };
        let within = self.limits.deadline;
        let buffer = self.memory.buffer(len, until).await.ok_or(ReadError::Overloaded { len, within })?;
        let found = disk.read(key, buffer, until).await;
        Counters::add(&self.counters.hits_disk, u64::from(found.is_some()));
        Ok(found)
    }

    async fn fetch_verified(
        &self,
        key: &StoreKey,
        len: u32,
        until: Instant,
        fetch: &Fetch,
    ) -> Result<Verified, ReadError> {
        let within = self.limits.deadline;
        let mut mismatch = None;
        for attempt in 0..self.limits.attempts.max(1) {
            // One permit per attempt: wrong bytes give theirs back with their buffer.
            let permit = self.memory.permit(len, until).await.ok_or(ReadError::Overloaded { len, within })?;
            Counters::add(&self.counters.fetches, 1);
            let bytes = match timeout_at(until, fetch(attempt)).await {
                Ok(Ok(bytes)) => bytes,
                Ok(Err(e)) => {
                    Counters::add(&self.counters.fetch_errors, 1);
                    return Err(e.into());
                }
                Err(_) => return Err(ReadError::Deadline(within)),
            };
            match check(key, len, bind_permit(bytes, permit)).await? {
                Ok(chunk) => return Ok(chunk),
                Err(wrong) => {
                    Counters::add(&self.counters.corrupt, 1);
                    tracing::warn!(chunk = %key.hash, attempt, %wrong, "wrong bytes were fetched");
                    mismatch = Some(wrong);
                }
            }
        }
        Err(mismatch.map_or(ReadError::Lost, ReadError::Corrupt))
    }
}

/// I1. The outer error is a lost blocking thread. Bytes of another length are wrong whatever they
/// hash to (and their permit would be wrong too).
async fn check(key: &StoreKey, len: u32, bytes: Bytes) -> Result<Result<Verified, Mismatch>, ReadError> {
    let expected = key.hash;
    let judge = move || {
        let fits = bytes.len() == len as usize;
        let got = bytes.len();
        Verified::check(expected, bytes).and_then(|v| {
            let hash = v.hash();
            if fits { Ok(v) } else { Err(Mismatch { expected, got: hash, len: got }) }
        })
    };
    if len as usize <= INLINE_HASH_BYTES {
        return Ok(judge());
    }
    tokio::task::spawn_blocking(judge).await.map_err(|_| ReadError::Lost)
}

#[cfg(test)]
mod tests;
