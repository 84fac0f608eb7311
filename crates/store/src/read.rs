//! THE read of a chunk: memory, then the chunk's flight.
//!
//! The flight reads the disk, or else fetches the chunk, verifies and keeps it.

use crate::{
    buffer_pool::PooledBuffer,
    dataset_id::DatasetId,
    disk::DiskError,
    disk_tier::{DiskTier, Wanted},
    flight::{FlightRole, Flights, LeaderGuard, SharedOutcome},
    memory::{Memory, bind_permit},
    outcome::{FetchError, Hit, ReadError, Tier},
    pins::Pinned,
    stats::{Counters, StoreStats},
};
use bytes::Bytes;
use fletch_bounds::{Gate, carried, pass_gate};
use fletch_core::{Expected, Hash, Mismatch, StoreKey, Verified, groups::GroupRun, verified::Grouped};
use futures::future::BoxFuture;
use std::{ops::Range, sync::Arc, time::Duration};
use tokio::time::{Instant, timeout_at};
use tokio_util::task::TaskTracker;
use tracing::{Instrument as _, info_span};

mod at_once;
mod learn;
mod runs;

pub use at_once::{AtOnce, Brought};
pub use learn::Names;
pub(crate) use runs::{KnownGroups, groups_bytes};

/// Largest chunk that is hashed on the async thread (0.03 ms). Larger chunks are hashed on a blocking thread.
const INLINE_HASH_BYTES: usize = 256 << 10;

/// How long beyond its deadline a reader waits for a flight that it joined. The flight's own error comes
/// before that, and says more.
const JOINED_GRACE: Duration = Duration::from_millis(250);

/// Fetches the bytes of a chunk. The argument is the number of the attempt, from 0.
///
/// The store calls attempt `n + 1` when the bytes of attempt `n` did not hash to the chunk's name and
/// attempts are left. So a call with `n > 0` tells the fetch that its last bytes were wrong. A fetch with no
/// other source returns the error that readers get. A fetch retries its own transport.
pub type Fetch = Arc<dyn Fn(u32) -> BoxFuture<'static, Result<Bytes, FetchError>> + Send + Sync>;

/// The bounds of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreLimits {
    /// Bytes of all live buffers. At least the largest chunk; at least four of those to cache well.
    pub memory_bytes: u64,
    /// Longest time that a read takes when it misses memory.
    pub deadline: Duration,
    /// Most attempts of one fetch, at least 1.
    pub attempts: u32,
}

/// A read that memory does not answer.
#[derive(Clone)]
struct FlightRequest {
    /// The chunk, or the name of a place if there are `names`.
    key: StoreKey,
    len: u32,
    /// When the reader gives up.
    until: Instant,
    dataset: DatasetId,
    fetch: Fetch,
    /// The record of what names stand for.
    names: Option<Arc<dyn Names>>,
    /// The run of groups, if no whole chunk is wanted. `key` has its name.
    run: Option<GroupRun>,
}

impl FlightRequest {
    /// Returns the key under which the bytes are kept. `None` if their hash was not learned yet.
    fn content_key(&self) -> Option<StoreKey> {
        let hash = match &self.names {
            Some(names) => names.content(&self.key)?,
            None => self.key.hash,
        };
        Some(StoreKey { domain: self.key.domain.clone(), hash })
    }

    /// Returns what the bytes under a key must be.
    fn expected(&self, key: &StoreKey) -> Expected {
        self.run.clone().map_or(Expected::Whole(key.hash), Expected::Run)
    }
}

/// The chunk store. See the invariants of the crate.
#[derive(Debug)]
pub struct Store {
    limits: StoreLimits,
    pub(crate) memory: Memory,
    disk: Option<Arc<DiskTier>>,
    flights: Arc<Flights>,
    tasks: TaskTracker,
    pub(crate) counters: Counters,
    pub(crate) groups: KnownGroups,
}

impl Store {
    /// Returns an empty store over a disk tier, if there is one. Its fetches run on `tasks`.
    #[must_use]
    pub fn new(limits: StoreLimits, disk: Option<Arc<DiskTier>>, tasks: TaskTracker) -> Arc<Self> {
        Arc::new(Store {
            limits,
            groups: KnownGroups::new(groups_bytes(limits.memory_bytes)),
            memory: Memory::new(limits.memory_bytes - groups_bytes(limits.memory_bytes)),
            disk,
            flights: Arc::default(),
            tasks,
            counters: Counters::default(),
        })
    }

    /// Returns the chunk if it is in memory, cached or waiting to be appended to disk. Never waits.
    #[must_use]
    pub fn cached(&self, key: &StoreKey) -> Option<Hit> {
        let chunk = self.memory_or_queued(key)?;
        Counters::add(&self.counters.hits_memory, 1);
        Some(Hit { chunk, tier: Tier::Memory })
    }

    /// Pins a chunk in memory until the guard is dropped, whatever the cache evicts.
    ///
    /// Pins are part of `memory_bytes`. The caller must bound them.
    #[must_use]
    pub fn pin(&self, key: StoreKey, chunk: Verified) -> Pinned {
        self.memory.pin(key, chunk)
    }

    /// The disk tier, unless the store has none.
    #[must_use]
    pub fn disk(&self) -> Option<&Arc<DiskTier>> {
        self.disk.as_ref()
    }

    /// Whether the chunk is in memory, or on disk with `len` bytes. Reads nothing.
    #[must_use]
    pub fn has(&self, key: &StoreKey, len: u32) -> bool {
        self.disk.as_ref().is_some_and(|d| d.has(key, len)) || self.memory_or_queued(key).is_some()
    }

    /// Removes chunks from memory and disk, and returns how many there were. One that is pinned in memory
    /// stays with its holders. Blocks.
    ///
    /// # Errors
    /// As [`DiskTier::erase`].
    pub fn erase(&self, keys: &[StoreKey]) -> Result<u64, DiskError> {
        let in_memory: Vec<bool> = keys.iter().map(|key| self.memory.remove(key)).collect();
        let on_disk = self.disk.as_ref().map_or(Ok(0), |disk| disk.erase(keys))?;
        Ok(on_disk.max(in_memory.into_iter().filter(|was| *was).count() as u64))
    }

    /// Whether a read of the chunk would begin a fetch: it is not cached, and nobody fetches it now.
    #[must_use]
    pub fn needs_fetch(&self, key: &StoreKey, len: u32) -> bool {
        !self.has(key, len) && !self.flights.has(key)
    }

    /// Whether the whole chunk is in memory, so that a part handed out keeps all of it there. Counts no hit.
    #[must_use]
    pub fn holds_chunk(&self, key: &StoreKey) -> bool {
        self.memory_or_queued(key).is_some()
    }

    fn memory_or_queued(&self, key: &StoreKey) -> Option<Verified> {
        self.memory.get(key).or_else(|| self.disk.as_ref()?.queued_chunk(key))
    }

    /// Whether a read of the chunk finds it, joins a fetch of it, or keeps what it fetches. Reads nothing.
    ///
    /// `working_set` is the length of everything that is read along with the chunk. The store keeps a chunk
    /// in memory when all of that fits there, else on disk when the tier admits it. If a caller needs only
    /// `part` bytes of a chunk that the store would not keep, it should read that range under a key of its
    /// own. Those bytes then count as what the dataset asked of the disk.
    #[must_use]
    pub fn would_keep(
        &self,
        key: &StoreKey,
        dataset: DatasetId,
        (part, len): (u32, u32),
        working_set: u64,
    ) -> bool {
        let kept = working_set <= self.limits.memory_bytes / 2
            || self.has(key, len)
            || self.flights.has(key)
            || self.disk.as_ref().is_some_and(|d| d.admits(key, dataset, len));
        if let Some(disk) = self.disk.as_ref().filter(|_| !kept && dataset != DatasetId::UNCACHED) {
            disk.note_refused(dataset, part);
        }
        kept
    }

    /// Returns a chunk of `len` bytes from memory, a flight, the disk, or `fetch`.
    ///
    /// Keeps a fetched chunk for `dataset`. Dropping the returned future ends the waiting, never the fetch.
    ///
    /// An error of another reader's fetch does not count for the caller, which may use another source or
    /// another principal. The caller then joins once more, within the same deadline, with its own fetch.
    /// Where many readers had joined, one of them leads and the others join it (I3); they return the outcome
    /// of that second flight.
    ///
    /// # Errors
    /// [`ReadError`]. The store does not keep an error: the next read tries again.
    pub async fn read(
        self: &Arc<Self>,
        key: StoreKey,
        len: u32,
        dataset: DatasetId,
        fetch: Fetch,
    ) -> Result<Hit, ReadError> {
        self.read_with(key, len, dataset, fetch, None).await
    }

    /// As [`Store::read`], and tries `at_once` before it fetches. See [`AtOnce`].
    ///
    /// # Errors
    /// As [`Store::read`].
    pub async fn read_with(
        self: &Arc<Self>,
        key: StoreKey,
        len: u32,
        dataset: DatasetId,
        fetch: Fetch,
        at_once: Option<AtOnce<'_>>,
    ) -> Result<Hit, ReadError> {
        if let Some(hit) = self.cached(&key) {
            return Ok(hit);
        }
        let until = Instant::now() + self.limits.deadline;
        let request = FlightRequest { key, len, until, dataset, fetch, names: None, run: None };
        self.join(request, at_once).await
    }

    /// Joins a flight, or leads one; and once more after the error of another reader's fetch.
    async fn join(
        self: &Arc<Self>,
        request: FlightRequest,
        at_once: Option<AtOnce<'_>>,
    ) -> Result<Hit, ReadError> {
        let until = request.until;
        let outcome = match self.join_or_lead(&request, at_once).await {
            (Err(ReadError::Fetch(_) | ReadError::Corrupt(_)), true) if Instant::now() < until => {
                match timeout_at(until, self.join_or_lead(&request, None)).await {
                    Ok((outcome, _)) => outcome,
                    Err(_) => Err(ReadError::Deadline(self.limits.deadline)),
                }
            }
            (outcome, _) => outcome,
        };
        // Counted here and not by the flight: each reader that joined it is rejected.
        if let Err(ReadError::Overloaded { .. }) = outcome {
            Counters::add(&self.counters.overloaded, 1);
        }
        outcome
    }

    /// Joins the flight of a request or leads one. Returns its outcome, and whether another reader led it.
    async fn join_or_lead(
        self: &Arc<Self>,
        request: &FlightRequest,
        at_once: Option<AtOnce<'_>>,
    ) -> (Result<Hit, ReadError>, bool) {
        let in_memory = || self.memory_or_queued(&request.content_key()?);
        match self.flights.join(&request.key, in_memory) {
            FlightRole::Cached(chunk) => {
                Counters::add(&self.counters.hits_memory, 1);
                (Ok(Hit { chunk, tier: Tier::Memory }), false)
            }
            FlightRole::Follower(outcome) => (self.joined(outcome, request.until).await, true),
            FlightRole::Leader(guard, outcome) => {
                let FlightRequest { key, len, dataset, .. } = request;
                if let Some(hit) = at_once.and_then(|a| self.at_once(key, *len, *dataset, a)) {
                    guard.finish(Ok(hit.clone()));
                    return (Ok(hit), false);
                }
                let span = info_span!("flight", chunk = %key.hash);
                let (store, request) = (Arc::clone(self), request.clone());
                let flight = async move { store.run_flight(guard, request).await };
                self.tasks.spawn(carried(flight.instrument(span)));
                (outcome.await.unwrap_or(Err(ReadError::Lost)), false)
            }
        }
    }

    /// Waits for the outcome of another reader's flight.
    async fn joined(&self, outcome: SharedOutcome, until: Instant) -> Result<Hit, ReadError> {
        Counters::add(&self.counters.hits_flight, 1);
        // A leader that reads on its own thread may hang in a disk, beyond the flight's deadline.
        let outcome = pass_gate(Gate::SharedFetch, timeout_at(until + JOINED_GRACE, outcome)).await;
        let hit = match outcome {
            Ok(outcome) => outcome.unwrap_or(Err(ReadError::Lost))?,
            Err(_) => return Err(ReadError::Deadline(self.limits.deadline)),
        };
        Ok(Hit { tier: Tier::Flight, ..hit })
    }

    /// Returns the bytes `at` of a chunk of `len` bytes, from disk or from memory under their own key.
    ///
    /// The bytes must hash to `part` (I1). `None` says nothing about the chunk: it may be in memory, absent
    /// or damaged, or `at` may be wrong. A caller that then reads the whole chunk finds out.
    ///
    /// # Errors
    /// [`ReadError::Overloaded`] when no memory came free before the deadline.
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
        let part = Wanted::Part { offset: at.start, expected: Expected::Whole(part) };
        let Some((verified, _)) = disk.read(chunk, part, buffer, until).await else { return Ok(None) };
        Counters::add(&self.counters.hits_disk, 1);
        self.memory.insert(key, verified.clone());
        Ok(Some(Hit { chunk: verified, tier: Tier::Disk }))
    }

    /// The longest time that a read takes when it misses memory.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.limits.deadline
    }

    pub(crate) async fn buffer(&self, len: u32, until: Instant) -> Option<PooledBuffer> {
        self.memory.buffer(len, until).await
    }

    /// Returns a snapshot of the counters.
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

    /// Runs a whole flight: disk, else fetch; then memory; then the waiting readers.
    async fn run_flight(&self, guard: LeaderGuard, request: FlightRequest) {
        let until = Instant::now() + self.limits.deadline;
        let FlightRequest { key, len, dataset, fetch, .. } = &request;
        let outcome = match (request.content_key(), &request.names) {
            (None, Some(names)) => self.learn_content(&request, Arc::clone(names), until).await,
            (content, _) => {
                let key = content.unwrap_or_else(|| key.clone());
                match self.read_from_disk(&key, *len, until).await {
                    Ok(None) => {
                        let expected = request.expected(&key);
                        let fetched = self.fetch_verified((&key, expected), *len, until, fetch).await;
                        fetched.map(|chunk| self.fetched(&key, *dataset, chunk))
                    }
                    Ok(Some(chunk)) => Ok(Hit { chunk, tier: Tier::Disk }),
                    Err(e) => Err(e),
                }
            }
        };
        match &outcome {
            Ok(hit) => {
                let key = StoreKey { domain: key.domain.clone(), hash: hit.chunk.hash() };
                self.memory.insert(key, hit.chunk.clone());
            }
            // Each reader that gets it counts itself.
            Err(ReadError::Overloaded { .. }) => {}
            Err(ReadError::Deadline(_)) => Counters::add(&self.counters.deadlines, 1),
            Err(e) => tracing::debug!(chunk = %key.hash, error = %e, "the fetch of a chunk failed"),
        }
        guard.finish(outcome);
    }

    /// Reads and hashes the chunk on disk. Every failure there is a miss.
    async fn read_from_disk(
        &self,
        key: &StoreKey,
        len: u32,
        until: Instant,
    ) -> Result<Option<Verified>, ReadError> {
        let Some(disk) = self.disk.as_ref().filter(|d| d.has(key, len)) else { return Ok(None) };
        let within = self.limits.deadline;
        let buffer = self.memory.buffer(len, until).await.ok_or(ReadError::Overloaded { len, within })?;
        let found = disk.read(key, self.groups.whole(key.hash, len), buffer, until).await;
        Counters::add(&self.counters.hits_disk, u64::from(found.is_some()));
        Ok(found.map(|(chunk, groups)| {
            self.groups.learn(groups);
            chunk
        }))
    }

    /// Fetches the chunk until an attempt returns its bytes.
    async fn fetch_verified(
        &self,
        (key, expected): (&StoreKey, Expected),
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
            match check(expected.clone(), len, bind_permit(bytes, permit)).await? {
                Ok((chunk, groups)) => {
                    self.groups.learn(groups);
                    return Ok(chunk);
                }
                Err(wrong) => {
                    Counters::add(&self.counters.corrupt, 1);
                    tracing::warn!(chunk = %key.hash, attempt, %wrong, "a fetch returned wrong bytes");
                    mismatch = Some(wrong);
                }
            }
        }
        Err(mismatch.map_or(ReadError::Lost, ReadError::Corrupt))
    }
}

/// Hashes fetched bytes (I1). The outer error is a lost blocking thread.
///
/// Bytes of another length are wrong whatever they hash to: their permit would be wrong too.
async fn check(expected: Expected, len: u32, bytes: Bytes) -> Result<Result<Grouped, Mismatch>, ReadError> {
    let verify = move || {
        let fits = bytes.len() == len as usize;
        let got = bytes.len();
        Verified::check_grouped(expected, bytes).and_then(|(v, groups)| {
            let hash = v.hash();
            if fits { Ok((v, groups)) } else { Err(Mismatch { expected: hash, got: hash, len: got }) }
        })
    };
    if len as usize <= INLINE_HASH_BYTES {
        return Ok(verify());
    }
    tokio::task::spawn_blocking(verify).await.map_err(|_| ReadError::Lost)
}

#[cfg(test)]
mod tests;
