//! Prefetch for epochs whose order is known: fetches what the next reads need, and pins it in memory until it
//! is read.
//!
//! `fletch_core::prefetch::segments` decides what to fetch, in which order and within which budget; this room
//! carries out its decisions.
//!
//! ```text
//! grant ─► upcoming reads ─► segments (built on another thread) ─► look: resident? ─► queue
//!       ─► at most `fetches_max` fetches ─► pinned
//! stream: ready(entry) waits for a fetch under way ─► reads ─► served(entry) ─► spent pins are released
//! ```
//!
//! 1. (I6) What an epoch pins and fetches is at most its part of the [`PrefetchPool`], in bytes; the pool is
//!    part of `memory.max`.
//! 2. Nothing is fetched twice: a pin stays until every position that needs it was read or acknowledged, and
//!    a reader waits for a fetch that is under way.
//! 3. A failed fetch is not retried here: the reader fetches for itself, and gets the error.
//! 4. A prefetcher that is closed, or whose dataset was unregistered, pins nothing and starts nothing.

mod fetch;

use crate::{
    app::telemetry::ReadWatch,
    data::{
        chunk_reads::ChunkReads,
        versions::{Samples, Sources, Versions},
    },
    tenancy::accounting::JobCosts,
};
use fetch::Fetched;
use fletch_bounds::in_waits;
use fletch_core::{
    StoreKey, Tenant,
    plan::Bits,
    prefetch::segments::{Segment, SegmentedPrefetch as Plan},
    residency::CacheAction,
};
use fletch_store::Store;
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::sync::Notify;
use tokio_util::task::TaskTracker;

/// Positions of a segment; at least one block, where the order goes by blocks.
const SEGMENT_POSITIONS: u64 = 1 << 16;
/// Positions to look ahead for each entry that was read.
const LOOK: u64 = 256;
/// Most bytes that one epoch fetches at once.
const FETCHING_BYTES_MAX: u64 = 64 << 20;
/// Least memory that is worth taking from the pool, in bytes.
const BUDGET_MIN: u64 = 1 << 20;
/// A unit or sample larger than this part of the budget is left to its reader.
const LARGE_PART: u64 = 4;
/// Lease lifetimes without a grant or a live lease after which a prefetcher is closed.
const IDLE_TTLS: u32 = 10;

/// Memory that the prefetchers of all epochs share.
#[derive(Debug)]
pub struct PrefetchPool {
    /// Total size in bytes.
    pub total: u64,
    /// Most fetches at once, of all epochs together.
    pub fetches_max: usize,
    left: AtomicU64,
    takers: AtomicUsize,
    /// Bytes that prefetchers fetched from origins.
    pub fetched_bytes: AtomicU64,
    /// Fetched bytes that were released before anything read them.
    pub unused_bytes: AtomicU64,
}

impl PrefetchPool {
    /// A pool whose memory is all free.
    #[must_use]
    pub fn new(total: u64, fetches_max: usize) -> Arc<Self> {
        Arc::new(PrefetchPool {
            total,
            fetches_max,
            left: AtomicU64::new(total),
            takers: AtomicUsize::new(0),
            fetched_bytes: AtomicU64::new(0),
            unused_bytes: AtomicU64::new(0),
        })
    }

    /// Returns the number of epochs with a prefetcher.
    #[must_use]
    pub fn takers(&self) -> u64 {
        self.takers.load(Relaxed) as u64
    }

    /// Returns whether a prefetcher could take memory now.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.left.load(Relaxed) >= BUDGET_MIN
    }

    /// Takes what `wants` asks of the free memory; `None` when that is too little.
    fn take(self: &Arc<Self>, wants: impl Fn(u64) -> u64) -> Option<PoolMemory> {
        let memory = self.left.fetch_update(Relaxed, Relaxed, |left| {
            let bytes = wants(left).min(left);
            (bytes >= BUDGET_MIN).then(|| left - bytes)
        });
        let before = memory.ok()?;
        self.takers.fetch_add(1, Relaxed);
        Some(PoolMemory { pool: Arc::clone(self), bytes: wants(before).min(before) })
    }
}

/// Memory taken from a [`PrefetchPool`], returned when it is dropped.
#[derive(Debug)]
struct PoolMemory {
    pool: Arc<PrefetchPool>,
    bytes: u64,
}

impl Drop for PoolMemory {
    fn drop(&mut self) {
        self.pool.left.fetch_add(self.bytes, Relaxed);
        self.pool.takers.fetch_sub(1, Relaxed);
    }
}

/// The reads of an order that is known.
pub struct UpcomingReads {
    /// Number of positions.
    pub positions: u64,
    /// Returns the entry and the sample at a position.
    pub at: Box<dyn Fn(u64) -> Option<(u32, u32)> + Send + Sync>,
}

/// What the keys of a prefetch plan identify.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    /// A whole unit.
    Unit,
    /// A sample by itself.
    Sample,
}

#[derive(Debug, PartialEq, Eq)]
enum FetchState {
    Queued,
    Fetching,
    /// The fetch has ended, with or without success.
    Done,
}

/// What all prefetchers of a server share.
pub struct PrefetchContext {
    /// Where chunks are kept.
    pub store: Arc<Store>,
    /// Fetches chunks.
    pub versions: Arc<Versions>,
    pub reads: Arc<ChunkReads>,
    /// Gets the waits of the reads.
    pub watch: Arc<ReadWatch>,
    /// Owns the fetches' tasks.
    pub tasks: TaskTracker,
    /// The memory that prefetchers share.
    pub pool: Arc<PrefetchPool>,
    /// How long a lease lives without a sign of life.
    pub lease_ttl: Duration,
}

struct Held {
    serial: u64,
    at: FetchState,
    fetched: Fetched,
    used: bool,
}

struct Inner {
    plan: Plan,
    upcoming: Arc<UpcomingReads>,
    /// The first position that is in no segment yet.
    next: u64,
    building: bool,
    /// Number of the current upcoming reads.
    reads_number: u64,
    held: HashMap<u32, Held>,
    /// Serials of fetches under way whose bytes a reader took from the same flight, and that are no longer
    /// needed.
    read: HashSet<u64>,
    queue: VecDeque<u32>,
    serials: u64,
    fetching: usize,
    fetching_bytes: u64,
    actions: Vec<CacheAction>,
    active_at: Instant,
    /// `None` once the prefetcher is closed.
    memory: Option<PoolMemory>,
}

/// The prefetcher of one epoch.
pub struct Prefetcher {
    context: Arc<PrefetchContext>,
    /// The tenant of the epoch's job.
    tenant: Tenant,
    /// What the job's reads cost.
    costs: Arc<JobCosts>,
    samples: Arc<Samples>,
    sources: Arc<Sources>,
    by: By,
    segment: u64,
    budget: u64,
    inner: Mutex<Inner>,
    arrived: Notify,
}

impl Prefetcher {
    /// Starts to fetch what `upcoming` needs, except for the entries in `done`.
    ///
    /// `block` is the number of positions in a block of an order by units; 0 for an order of samples. Returns
    /// `None` when the pool has no memory.
    pub fn start(
        context: &Arc<PrefetchContext>,
        (tenant, costs): (&Tenant, &Arc<JobCosts>),
        samples: &Arc<Samples>,
        sources: &Arc<Sources>,
        block: u32,
        upcoming: UpcomingReads,
        done: Bits,
    ) -> Option<Arc<Self>> {
        let (unit_map, pool) = (&samples.unit_map, &context.pool);
        let (all, units) = (unit_map.total_bytes(), unit_map.units().max(1) as u64);
        // Whole units only if none is fetched twice: each has one sample, or all that is read together fits.
        let whole = if samples.len() == units {
            0
        } else {
            let together = u64::from(block).saturating_mul(units).div_ceil(samples.len().max(1));
            // Two blocks, and an allowance for units that are larger than the mean.
            let blocks = (all / units).saturating_mul(together).saturating_mul(9) / 4;
            if block > 0 { blocks.min(all) } else { all }
        };
        let fits = |left: u64| whole <= left / 4 * 3;
        // Never more than is useful; half of the free memory, so that the next epoch gets some.
        let half = |left: u64| (left / 2).min(all.saturating_mul(LARGE_PART)).max(BUDGET_MIN);
        let memory = pool.take(|left| if fits(left) { whole.max(half(left)) } else { half(left) })?;
        let by = if whole <= memory.bytes { By::Unit } else { By::Sample };
        let budget = memory.bytes;
        let inner = Inner {
            plan: Plan::new(budget, done),
            upcoming: Arc::new(upcoming),
            next: 0,
            building: false,
            reads_number: 0,
            held: HashMap::new(),
            read: HashSet::new(),
            queue: VecDeque::new(),
            serials: 0,
            fetching: 0,
            fetching_bytes: 0,
            actions: Vec::new(),
            active_at: Instant::now(),
            memory: Some(memory),
        };
        let this = Arc::new(Prefetcher {
            context: Arc::clone(context),
            tenant: tenant.clone(),
            costs: Arc::clone(costs),
            samples: Arc::clone(samples),
            sources: Arc::clone(sources),
            by,
            segment: SEGMENT_POSITIONS.max(block.into()),
            budget,
            inner: Mutex::new(inner),
            arrived: Notify::new(),
        });
        this.build(&mut this.lock());
        Some(this)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic in the plan changes nothing that a reader depends on: readers fetch for themselves.
        self.inner.lock()
    }

    fn key(&self, hash: fletch_core::Hash) -> StoreKey {
        StoreKey { domain: self.sources.domain.clone(), hash }
    }

    fn bytes(&self, key: u32) -> u64 {
        match self.by {
            By::Unit => self.samples.unit_map.bytes(key),
            By::Sample => self.samples.bytes(key),
        }
    }

    /// Returns whether a key needs no prefetch.
    fn needs_no_prefetch(&self, key: u32) -> bool {
        let unit = if self.by == By::Unit { key } else { self.samples.unit(key) };
        let (chunks, disk) = (self.samples.chunks(unit), self.context.store.disk());
        self.bytes(key) > self.budget / LARGE_PART
            || chunks.iter().all(|c| disk.is_some_and(|d| d.has(&self.key(c.hash), c.len)))
    }

    /// Builds the next segment on another thread, one at a time.
    fn build(self: &Arc<Self>, inner: &mut Inner) {
        if inner.building || !inner.plan.wants() || inner.memory.is_none() {
            return;
        }
        inner.building = true;
        let (this, upcoming) = (Arc::clone(self), Arc::clone(&inner.upcoming));
        let (from, number) = (inner.next, inner.reads_number);
        self.context.tasks.spawn_blocking(move || {
            let to = from.saturating_add(this.segment).min(upcoming.positions);
            let key = |sample: u32| if this.by == By::Unit { this.samples.unit(sample) } else { sample };
            let steps = (from..to).filter_map(|q| (upcoming.at)(q)).map(|(entry, s)| (entry, key(s)));
            let segment = Segment::new(steps, |key| this.bytes(key));
            let last = to == upcoming.positions;
            let mut inner = this.lock();
            let inner = &mut *inner;
            // A segment of earlier upcoming reads is dropped: another task builds the new one.
            if inner.reads_number == number {
                (inner.building, inner.next) = (false, to);
                if let Err(e) = inner.plan.open(segment, last) {
                    tracing::error!(error = %e, "nothing is fetched ahead of this epoch any more");
                    this.close_now(inner);
                }
                this.advance(inner, this.segment);
            }
            this.arrived.notify_waiters();
        });
    }

    /// Looks ahead, queues what that asks for, and builds segments as they are needed.
    fn advance(self: &Arc<Self>, inner: &mut Inner, positions: u64) {
        if inner.memory.is_none() {
            return;
        }
        if !self.sources.is_registered() {
            self.close_now(inner);
            return;
        }
        inner.plan.look(positions, |key| self.needs_no_prefetch(key), &mut inner.actions);
        self.apply_actions(inner);
        self.build(inner);
        self.start_fetches(inner);
    }

    fn apply_actions(&self, inner: &mut Inner) {
        for action in std::mem::take(&mut inner.actions) {
            match action {
                CacheAction::Load(key) => {
                    inner.serials += 1;
                    let held = Held {
                        serial: inner.serials,
                        at: FetchState::Queued,
                        fetched: Fetched::default(),
                        used: false,
                    };
                    inner.held.insert(key, held);
                    inner.queue.push_back(key);
                }
                CacheAction::Evict(key) => {
                    if let Some(held) = inner.held.remove(&key) {
                        self.release(&mut inner.read, &held);
                    }
                }
            }
        }
    }

    fn release(&self, read: &mut HashSet<u64>, held: &Held) {
        if !held.used {
            self.context.pool.unused_bytes.fetch_add(held.fetched.fetched_bytes, Relaxed);
        } else if held.at == FetchState::Fetching {
            read.insert(held.serial);
        }
    }

    /// Starts queued fetches while permits are free.
    fn start_fetches(self: &Arc<Self>, inner: &mut Inner) {
        let pool = &self.context.pool;
        let most = (pool.fetches_max / pool.takers.load(Relaxed).max(1)).max(2);
        while inner.fetching < most && inner.fetching_bytes < FETCHING_BYTES_MAX {
            let Some(key) = inner.queue.pop_front() else { break };
            self.start_fetch(inner, key);
        }
    }

    fn start_fetch(self: &Arc<Self>, inner: &mut Inner, key: u32) {
        let Some(held) = inner.held.get_mut(&key).filter(|h| h.at == FetchState::Queued) else { return };
        held.at = FetchState::Fetching;
        let (serial, bytes) = (held.serial, self.bytes(key));
        inner.fetching += 1;
        inner.fetching_bytes += bytes;
        let this = Arc::clone(self);
        let waits = self.context.watch.waits_in_background();
        waits.record_for_job(&self.costs);
        self.context.tasks.spawn(async move {
            let fetched = in_waits(waits, this.fetch(key)).await;
            let mut inner = this.lock();
            let inner = &mut *inner;
            inner.fetching -= 1;
            inner.fetching_bytes -= bytes;
            let fetched = fetched.unwrap_or_else(|why| {
                tracing::debug!(key, error = %why, "what was to be fetched ahead did not come");
                Fetched::default()
            });
            this.context.pool.fetched_bytes.fetch_add(fetched.fetched_bytes, Relaxed);
            match inner.held.get_mut(&key).filter(|h| h.serial == serial) {
                Some(held) => (held.at, held.fetched) = (FetchState::Done, fetched),
                None if inner.read.remove(&serial) => {}
                // The plan gave the key up in the meantime.
                None => {
                    this.context.pool.unused_bytes.fetch_add(fetched.fetched_bytes, Relaxed);
                }
            }
            this.start_fetches(inner);
            this.arrived.notify_waiters();
        });
    }

    /// Waits for the fetch that an entry needs, if it is under way, at most as long as a read takes.
    ///
    /// Returns whether the entry's bytes were fetched from the origin for this epoch.
    pub async fn ready(self: &Arc<Self>, entry: u32) -> bool {
        let until = tokio::time::Instant::now() + self.context.store.deadline();
        loop {
            let arrived = self.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable();
            {
                let mut inner = self.lock();
                let inner = &mut *inner;
                if inner.memory.is_none() {
                    return false;
                }
                let key = inner.plan.key(entry);
                match key.and_then(|key| Some((key, inner.held.get(&key)?))) {
                    Some((_, held)) if held.at == FetchState::Done => return held.fetched.fetched_bytes > 0,
                    // A reader wants the key now, so it does not wait behind keys for later reads.
                    Some((key, held)) if held.at == FetchState::Queued => self.start_fetch(inner, key),
                    Some(_) => {}
                    None if key.is_none() && inner.plan.is_new() && inner.building => {}
                    None => return false,
                }
            }
            if tokio::time::timeout_at(until, arrived).await.is_err() {
                return false;
            }
        }
    }

    /// Records that entries were read or acknowledged, and need nothing any more.
    pub fn served(self: &Arc<Self>, entries: &[u32]) {
        let mut inner = self.lock();
        let inner = &mut *inner;
        for &entry in entries {
            if let Some(key) = inner.plan.key(entry)
                && let Some(held) = inner.held.get_mut(&key)
            {
                held.used = true;
            }
            inner.plan.serve(entry, &mut inner.actions);
        }
        self.apply_actions(inner);
        self.advance(inner, LOOK * entries.len() as u64);
    }

    /// Records that entries were granted, and fetches what should be pinned for them and is not.
    pub fn granted(self: &Arc<Self>, entries: &[u32]) {
        let mut inner = self.lock();
        let inner = &mut *inner;
        inner.active_at = Instant::now();
        for &entry in entries {
            if let Some(key) =
                inner.plan.key(entry).filter(|&k| !inner.plan.holds(k) && !self.needs_no_prefetch(k))
            {
                inner.plan.lost(key);
            }
        }
        self.advance(inner, LOOK);
    }

    /// Continues with other upcoming reads. Pins that are still needed stay.
    pub fn renew(self: &Arc<Self>, upcoming: UpcomingReads, done: Bits) {
        let mut inner = self.lock();
        let inner = &mut *inner;
        inner.upcoming = Arc::new(upcoming);
        inner.reads_number += 1;
        // A segment under construction belongs to the earlier reads.
        (inner.next, inner.building) = (0, false);
        inner.plan.renew(done);
        self.build(inner);
    }

    /// Returns whether the epoch gave no sign of life for long; `alive` says that a lease lives.
    pub fn idle(&self, alive: bool) -> bool {
        let mut inner = self.lock();
        if alive {
            inner.active_at = Instant::now();
        }
        !self.sources.is_registered() || inner.active_at.elapsed() > self.idle_limit()
    }

    fn idle_limit(&self) -> Duration {
        self.context.lease_ttl.saturating_mul(IDLE_TTLS)
    }

    /// Releases everything. Fetches under way count as unused when they end.
    pub fn close(&self) {
        self.close_now(&mut self.lock());
    }

    fn close_now(&self, inner: &mut Inner) {
        inner.memory = None;
        inner.queue.clear();
        for (_, held) in inner.held.drain() {
            self.release(&mut inner.read, &held);
        }
        self.arrived.notify_waiters();
    }
}
