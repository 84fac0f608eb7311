//! What is fetched ahead for one epoch whose order is known: `fletch_core::prefetch::segments` says what, in which
//! order and within which budget; this file fetches it, and holds it in memory until it was read.
//!
//! ```text
//! grant ─► course ─► segments (built aside) ─► look: here? ─► queue ─► at most `loads_max` fetches ─► pinned
//! stream: ready(entry) waits for what is on its way ─► reads it ─► served(entry) ─► what is spent is let go
//! ```
//!
//! 1. (I6) What an epoch holds and has on its way is at most what it took of [`PrefetchPool`], in bytes; the pool is part of
//!    `memory.max`.
//! 2. Nothing is fetched twice: what is held stays until every position that needs it was read or acknowledged, and a
//!    reader of what is on its way waits for it.
//! 3. A fetch that fails is not tried again here: its reader fetches for itself, and is told why.
//! 4. Closed, or with its registration gone, it holds nothing, and begins nothing.

mod fetch;

use crate::versions::{Samples, Sources, Versions};
use fetch::Brought;
use fletch_core::{
    StoreKey,
    plan::Bits,
    prefetch::segments::{Segment, SegmentedPrefetch as Plan},
    residency::CacheAction,
};
use fletch_store::Store;
use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::sync::Notify;
use tokio_util::task::TaskTracker;

/// Positions of a segment; where an order goes by blocks, at least one of those.
const CHAPTER: u64 = 1 << 16;
/// Positions that are looked at for each that was served.
const LOOK: u64 = 256;
/// Bytes of an epoch that are on their way at once.
const COMING_BYTES_MAX: u64 = 64 << 20;
/// The least that is worth taking.
const BUDGET_MIN: u64 = 1 << 20;
/// What is longer than such a part of the budget is left to its reader.
const LARGE_PART: u64 = 4;
/// So many lease lifetimes without a grant or a live lease, and what is held is let go.
const IDLE_TTLS: u32 = 10;

/// Memory for what is fetched ahead, of all epochs together.
#[derive(Debug)]
pub struct PrefetchPool {
    /// All of it, in bytes.
    pub total: u64,
    /// Fetches at once, of all epochs together.
    pub loads_max: usize,
    left: AtomicU64,
    takers: AtomicUsize,
    /// Bytes brought from origins ahead of need.
    pub fetched_bytes: AtomicU64,
    /// Of those, bytes that were let go before anybody read them.
    pub vain_bytes: AtomicU64,
}

impl PrefetchPool {
    /// All of it is free.
    #[must_use]
    pub fn new(total: u64, loads_max: usize) -> Arc<Self> {
        Arc::new(PrefetchPool {
            total,
            loads_max,
            left: AtomicU64::new(total),
            takers: AtomicUsize::new(0),
            fetched_bytes: AtomicU64::new(0),
            vain_bytes: AtomicU64::new(0),
        })
    }

    /// Epochs that are fetched for ahead of need now.
    #[must_use]
    pub fn takers(&self) -> u64 {
        self.takers.load(Relaxed) as u64
    }

    /// Whether there is anything left to take.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.left.load(Relaxed) >= BUDGET_MIN
    }

    /// Takes what `wants` of what is left; nothing when it wants nothing.
    fn take(self: &Arc<Self>, wants: impl Fn(u64) -> u64) -> Option<Taken> {
        let taken = self.left.fetch_update(Relaxed, Relaxed, |left| {
            let bytes = wants(left).min(left);
            (bytes >= BUDGET_MIN).then(|| left - bytes)
        });
        let before = taken.ok()?;
        self.takers.fetch_add(1, Relaxed);
        Some(Taken { pool: Arc::clone(self), bytes: wants(before).min(before) })
    }
}

/// A part of a [`PrefetchPool`].
#[derive(Debug)]
struct Taken {
    pool: Arc<PrefetchPool>,
    bytes: u64,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.pool.left.fetch_add(self.bytes, Relaxed);
        self.pool.takers.fetch_sub(1, Relaxed);
    }
}

/// An order that is known: the entry and the sample at each place, of so many.
pub struct UpcomingReads {
    /// How many places there are.
    pub places: u64,
    /// What stands at a place.
    pub at: Box<dyn Fn(u64) -> Option<(u32, u32)> + Send + Sync>,
}

/// What a key of the plan names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    /// A unit, whole.
    Unit,
    /// A sample, by itself.
    Sample,
}

#[derive(Debug, PartialEq, Eq)]
enum Where {
    Queued,
    Coming,
    /// It was brought, or could not be.
    Here,
}

/// What all prefetchers of a server share.
pub struct PrefetchContext {
    /// Where chunks are kept.
    pub store: Arc<Store>,
    /// Fetches chunks.
    pub versions: Arc<Versions>,
    /// Owns the fetches' tasks.
    pub tasks: TaskTracker,
    /// The memory that prefetchers share.
    pub pool: Arc<PrefetchPool>,
    /// How long a lease lives without a sign of life.
    pub lease_ttl: Duration,
}

struct Held {
    serial: u64,
    at: Where,
    brought: Brought,
    used: bool,
}

struct Inner {
    plan: Plan,
    course: Arc<UpcomingReads>,
    /// The first place that is in no segment yet.
    next: u64,
    building: bool,
    /// Which course this is.
    course_number: u64,
    what: HashMap<u32, Held>,
    /// Serials of what is on its way, was read by somebody who waited for the same bytes, and is held no more.
    read: HashSet<u64>,
    queue: VecDeque<u32>,
    serials: u64,
    coming: usize,
    coming_bytes: u64,
    actions: Vec<CacheAction>,
    seen: Instant,
    /// Gone when it is closed.
    taken: Option<Taken>,
}

/// See the module.
pub struct Prefetcher {
    context: Arc<PrefetchContext>,
    samples: Arc<Samples>,
    sources: Arc<Sources>,
    by: By,
    segment: u64,
    budget: u64,
    inner: Mutex<Inner>,
    arrived: Notify,
}

impl Prefetcher {
    /// Begins to fetch what `course` needs, but for the entries that are `done`. `block` is the number of positions
    /// after which an order by units goes on to others; 0 for an order of samples. `None` when there is no memory
    /// for it now.
    pub fn start(
        context: &Arc<PrefetchContext>,
        samples: &Arc<Samples>,
        sources: &Arc<Sources>,
        block: u32,
        course: UpcomingReads,
        done: Bits,
    ) -> Option<Arc<Self>> {
        let (unit_map, pool) = (&samples.unit_map, &context.pool);
        let (all, units) = (unit_map.total_bytes(), unit_map.units().max(1) as u64);
        // By units only if none is fetched again: each is of one sample, or all that is read together has room.
        let whole = if samples.len() == units {
            0
        } else {
            let together = u64::from(block).saturating_mul(units).div_ceil(samples.len().max(1));
            // Two blocks, and what units are larger than their mean.
            let blocks = (all / units).saturating_mul(together).saturating_mul(9) / 4;
            if block > 0 { blocks.min(all) } else { all }
        };
        let fits = |left: u64| whole <= left / 4 * 3;
        // Never more than is of use; half of what is left, so that the next has some.
        let half = |left: u64| (left / 2).min(all.saturating_mul(LARGE_PART)).max(BUDGET_MIN);
        let taken = pool.take(|left| if fits(left) { whole.max(half(left)) } else { half(left) })?;
        let by = if whole <= taken.bytes { By::Unit } else { By::Sample };
        let budget = taken.bytes;
        let inner = Inner {
            plan: Plan::new(budget, done),
            course: Arc::new(course),
            next: 0,
            building: false,
            course_number: 0,
            what: HashMap::new(),
            read: HashSet::new(),
            queue: VecDeque::new(),
            serials: 0,
            coming: 0,
            coming_bytes: 0,
            actions: Vec::new(),
            seen: Instant::now(),
            taken: Some(taken),
        };
        let this = Arc::new(Prefetcher {
            context: Arc::clone(context),
            samples: Arc::clone(samples),
            sources: Arc::clone(sources),
            by,
            segment: CHAPTER.max(block.into()),
            budget,
            inner: Mutex::new(inner),
            arrived: Notify::new(),
        });
        this.build(&mut this.lock());
        Some(this)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // What panics in the plan has changed nothing that a reader depends on: it fetches for itself.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Whether a key needs no fetch of ours.
    fn passes(&self, key: u32) -> bool {
        let unit = if self.by == By::Unit { key } else { self.samples.unit(key) };
        let (chunks, disk) = (self.samples.chunks(unit), self.context.store.disk());
        self.bytes(key) > self.budget / LARGE_PART
            || chunks.iter().all(|c| disk.is_some_and(|d| d.has(&self.key(c.hash), c.len)))
    }

    /// Opens segments, aside: one at a time.
    fn build(self: &Arc<Self>, inner: &mut Inner) {
        if inner.building || !inner.plan.wants() || inner.taken.is_none() {
            return;
        }
        inner.building = true;
        let (this, course) = (Arc::clone(self), Arc::clone(&inner.course));
        let (from, number) = (inner.next, inner.course_number);
        self.context.tasks.spawn_blocking(move || {
            let to = from.saturating_add(this.segment).min(course.places);
            let key = |sample: u32| if this.by == By::Unit { this.samples.unit(sample) } else { sample };
            let steps = (from..to).filter_map(|q| (course.at)(q)).map(|(entry, s)| (entry, key(s)));
            let segment = Segment::new(steps, |key| this.bytes(key));
            let last = to == course.places;
            let mut inner = this.lock();
            let inner = &mut *inner;
            // One of a course that was left is nobody's: another task builds the new one's.
            if inner.course_number == number {
                (inner.building, inner.next) = (false, to);
                if let Err(e) = inner.plan.open(segment, last) {
                    tracing::error!(error = %e, "nothing is fetched ahead of this epoch any more");
                    this.close_now(inner);
                }
                this.go_on(inner, this.segment);
            }
            this.arrived.notify_waiters();
        });
    }

    /// Looks further, fetches what that says, and opens segments as they are needed.
    fn go_on(self: &Arc<Self>, inner: &mut Inner, positions: u64) {
        if inner.taken.is_none() {
            return;
        }
        if !self.sources.is_registered() {
            self.close_now(inner);
            return;
        }
        inner.plan.look(positions, |key| self.passes(key), &mut inner.actions);
        self.obey(inner);
        self.build(inner);
        self.pump(inner);
    }

    fn obey(&self, inner: &mut Inner) {
        for action in std::mem::take(&mut inner.actions) {
            match action {
                CacheAction::Load(key) => {
                    inner.serials += 1;
                    let held = Held {
                        serial: inner.serials,
                        at: Where::Queued,
                        brought: Brought::default(),
                        used: false,
                    };
                    inner.what.insert(key, held);
                    inner.queue.push_back(key);
                }
                CacheAction::Evict(key) => {
                    if let Some(held) = inner.what.remove(&key) {
                        self.let_go(&mut inner.read, &held);
                    }
                }
            }
        }
    }

    fn let_go(&self, read: &mut HashSet<u64>, held: &Held) {
        if !held.used {
            self.context.pool.vain_bytes.fetch_add(held.brought.fetched_bytes, Relaxed);
        } else if held.at == Where::Coming {
            read.insert(held.serial);
        }
    }

    /// Begins fetches while there is room for more.
    fn pump(self: &Arc<Self>, inner: &mut Inner) {
        let pool = &self.context.pool;
        let most = (pool.loads_max / pool.takers.load(Relaxed).max(1)).max(2);
        while inner.coming < most && inner.coming_bytes < COMING_BYTES_MAX {
            let Some(key) = inner.queue.pop_front() else { break };
            self.begin(inner, key);
        }
    }

    fn begin(self: &Arc<Self>, inner: &mut Inner, key: u32) {
        let Some(held) = inner.what.get_mut(&key).filter(|h| h.at == Where::Queued) else { return };
        held.at = Where::Coming;
        let (serial, bytes) = (held.serial, self.bytes(key));
        inner.coming += 1;
        inner.coming_bytes += bytes;
        let this = Arc::clone(self);
        self.context.tasks.spawn(async move {
            let brought = this.bring(key).await;
            let mut inner = this.lock();
            let inner = &mut *inner;
            inner.coming -= 1;
            inner.coming_bytes -= bytes;
            let brought = brought.unwrap_or_else(|why| {
                tracing::debug!(key, error = %why, "what was to be fetched ahead did not come");
                Brought::default()
            });
            this.context.pool.fetched_bytes.fetch_add(brought.fetched_bytes, Relaxed);
            match inner.what.get_mut(&key).filter(|h| h.serial == serial) {
                Some(held) => (held.at, held.brought) = (Where::Here, brought),
                None if inner.read.remove(&serial) => {}
                // Given up meanwhile.
                None => {
                    this.context.pool.vain_bytes.fetch_add(brought.fetched_bytes, Relaxed);
                }
            }
            this.pump(inner);
            this.arrived.notify_waiters();
        });
    }

    /// Waits for what an entry needs, if that is on its way, and at most as long as a read takes. Whether it was
    /// fetched for this very epoch.
    pub async fn ready(self: &Arc<Self>, entry: u32) -> bool {
        let until = tokio::time::Instant::now() + self.context.store.deadline();
        loop {
            let arrived = self.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable();
            {
                let mut inner = self.lock();
                let inner = &mut *inner;
                if inner.taken.is_none() {
                    return false;
                }
                let key = inner.plan.key(entry);
                match key.and_then(|key| Some((key, inner.what.get(&key)?))) {
                    Some((_, held)) if held.at == Where::Here => return held.brought.fetched_bytes > 0,
                    // It is wanted now: it does not wait for those that are wanted later.
                    Some((key, held)) if held.at == Where::Queued => self.begin(inner, key),
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

    /// Entries need nothing any more: they were read, or acknowledged.
    pub fn served(self: &Arc<Self>, entries: &[u32]) {
        let mut inner = self.lock();
        let inner = &mut *inner;
        for &entry in entries {
            if let Some(key) = inner.plan.key(entry)
                && let Some(held) = inner.what.get_mut(&key)
            {
                held.used = true;
            }
            inner.plan.serve(entry, &mut inner.actions);
        }
        self.obey(inner);
        self.go_on(inner, LOOK * entries.len() as u64);
    }

    /// Entries were granted: what of theirs was to be here and is not is fetched now.
    pub fn granted(self: &Arc<Self>, entries: &[u32]) {
        let mut inner = self.lock();
        let inner = &mut *inner;
        inner.seen = Instant::now();
        for &entry in entries {
            if let Some(key) = inner.plan.key(entry).filter(|&k| !inner.plan.holds(k) && !self.passes(k)) {
                inner.plan.lost(key);
            }
        }
        self.go_on(inner, LOOK);
    }

    /// The order is another from here on. What is held and still needed stays.
    pub fn renew(self: &Arc<Self>, course: UpcomingReads, done: Bits) {
        let mut inner = self.lock();
        let inner = &mut *inner;
        inner.course = Arc::new(course);
        inner.course_number += 1;
        // A segment that is being built is of the old one.
        (inner.next, inner.building) = (0, false);
        inner.plan.renew(done);
        self.build(inner);
    }

    /// Whether nobody gave a sign of life for long; `alive` says that a lease lives.
    pub fn idle(&self, alive: bool) -> bool {
        let mut inner = self.lock();
        if alive {
            inner.seen = Instant::now();
        }
        !self.sources.is_registered() || inner.seen.elapsed() > self.patience()
    }

    fn patience(&self) -> Duration {
        self.context.lease_ttl.saturating_mul(IDLE_TTLS)
    }

    /// Lets go of everything; what is on its way counts as in vain when it comes.
    pub fn close(&self) {
        self.close_now(&mut self.lock());
    }

    fn close_now(&self, inner: &mut Inner) {
        inner.taken = None;
        inner.queue.clear();
        for (_, held) in inner.what.drain() {
            self.let_go(&mut inner.read, &held);
        }
        self.arrived.notify_waiters();
    }
}
