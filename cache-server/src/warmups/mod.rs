//! Warm-ups: which there are, how far each is, and what it protects. `run` does the work.
//!
//! A warm-up keeps no journal: what is there is the truth, so running one again brings only what is
//! missing. After a restart its id is unknown, which says that it was lost; what it brought is not.
//!
//! 1. (I6) At most [`RUNNING_MAX`] run at once and [`KNOWN_MAX`] are remembered, finished ones the shortest;
//!    leased chunks of all of them together are at most [`LEASED_MAX`].
//! 2. (I7) A warm-up is its domain's: to others it does not exist.
//! 3. What is said at the end was counted at the end, not added up on the way.

mod run;

use crate::versions::{Source, Sources, Versions};
use fletch_api::{Amount, Code, Problem, Warmup, WarmupState};
use fletch_core::{DatasetName, Domain, LayoutId, Root, StoreKey};
use fletch_store::{DatasetId, Store};
use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use tokio::sync::Semaphore;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Warm-ups that work at once; others wait for their turn.
const RUNNING_MAX: usize = 2;
/// Warm-ups remembered.
const KNOWN_MAX: usize = 256;
/// Chunks leased by all warm-ups together: 32 MiB of hashes.
const LEASED_MAX: u64 = 1 << 20;

/// What the work is done with.
pub struct WarmupContext {
    /// Where chunks stay.
    pub store: Arc<Store>,
    /// Where they come from.
    pub versions: Arc<Versions>,
    /// Turns of requests for bytes: readers go first.
    pub turns: Arc<Semaphore>,
    /// How many turns there are.
    pub requests: usize,
    /// Chunks brought at once while nobody reads.
    pub parallel: usize,
}

impl WarmupContext {
    fn readers(&self) -> bool {
        self.turns.available_permits() < self.requests
    }
}

/// What is to be warmed.
pub struct Order {
    /// The ways to its bytes.
    pub sources: Arc<Sources>,
    /// The layout whose chunks are meant: the one that readers of the same name are given.
    pub source: Arc<Source>,
    /// Which version.
    pub root: Root,
    /// Whether only to look.
    pub check: bool,
    /// How long to protect it afterwards.
    pub lease: Duration,
}

/// There are as many warm-ups as there may be.
#[derive(Debug, thiserror::Error)]
#[error("{0} warm-ups are under way, which is the limit")]
pub struct TooManyWarmups(usize);

/// Chunks and bytes.
#[derive(Debug, Default)]
struct Count {
    chunks: AtomicU64,
    bytes: AtomicU64,
}

impl Count {
    fn add(&self, bytes: u64) {
        self.chunks.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
    }

    fn get(&self) -> Amount {
        Amount { chunks: self.chunks.load(Relaxed), bytes: self.bytes.load(Relaxed) }
    }

    fn set(&self, to: Amount) {
        self.chunks.store(to.chunks, Relaxed);
        self.bytes.store(to.bytes, Relaxed);
    }
}

/// One warm-up. It holds no version open once it is over.
struct One {
    id: String,
    domain: Domain,
    dataset: DatasetName,
    root: Root,
    layout: LayoutId,
    check: bool,
    total: Amount,
    started_ns: u64,
    cancel: CancellationToken,
    state: Mutex<State>,
    looked_at: Count,
    present: Count,
    brought: Count,
    refused: Count,
    failed: Count,
    damaged: Count,
    missing: Count,
}

struct State {
    state: WarmupState,
    begun: Option<Instant>,
    took: Option<Duration>,
    ended_ns: Option<u64>,
    leased_until_ns: Option<u64>,
    error: Option<Problem>,
}

impl One {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what went wrong first.
    fn blame(&self, code: Code, detail: String, hint: &'static str) {
        let mut state = self.lock();
        if state.error.is_none() {
            state.error = Some(Problem::new(code, detail, hint));
        }
    }

    fn enter(&self, to: WarmupState) {
        let mut state = self.lock();
        state.state = to;
        if to == WarmupState::Running {
            state.begun = Some(Instant::now());
        } else if to.is_over() {
            state.took = state.begun.map(|b| b.elapsed());
            state.ended_ns = Some(unix_ns());
        }
    }

    fn view(&self) -> Warmup {
        let state = self.lock();
        let took = state.took.or_else(|| state.begun.map(|b| b.elapsed())).unwrap_or_default();
        let (total, looked_at) = (self.total, self.looked_at.get());
        let rate = looked_at.bytes as f64 / took.as_secs_f64().max(0.001);
        let left = total.bytes.saturating_sub(looked_at.bytes) as f64;
        let running = state.state == WarmupState::Running;
        Warmup {
            id: self.id.clone(),
            dataset: self.dataset.clone(),
            root: self.root,
            layout: self.layout,
            check: self.check,
            state: state.state,
            total,
            looked_at,
            present: self.present.get(),
            brought: self.brought.get(),
            refused: self.refused.get(),
            failed: self.failed.get(),
            damaged: self.damaged.get(),
            missing: self.missing.get(),
            bytes_per_s: rate as u64,
            eta_s: (running && rate >= 1.0).then(|| (left / rate).ceil() as u64),
            started_ns: self.started_ns,
            ended_ns: state.ended_ns,
            leased_until_ns: state.leased_until_ns,
            error: state.error.clone(),
        }
    }
}

/// Totals for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WarmupStats {
    /// Waiting or working.
    pub live: u64,
    /// Chunks leased.
    pub leased: u64,
    /// Brought since the start.
    pub brought: Amount,
    /// Refused since the start.
    pub refused: Amount,
    /// Failed since the start.
    pub failed: Amount,
}

/// See the module.
pub struct Warmups {
    context: WarmupContext,
    all: Mutex<VecDeque<Arc<One>>>,
    turns: Arc<Semaphore>,
    leased: Arc<AtomicU64>,
    totals: [Count; 3],
    tasks: TaskTracker,
    stop: CancellationToken,
}

fn unix_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

impl Warmups {
    /// None yet; their work runs on `tasks`.
    #[must_use]
    pub fn new(context: WarmupContext, tasks: TaskTracker) -> Arc<Self> {
        Arc::new(Warmups {
            context,
            all: Mutex::default(),
            turns: Arc::new(Semaphore::new(RUNNING_MAX)),
            leased: Arc::default(),
            totals: Default::default(),
            tasks,
            stop: CancellationToken::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<One>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins one; the same that is under way already is that one.
    ///
    /// # Errors
    /// [`TooManyWarmups`].
    pub fn start(self: &Arc<Self>, order: Order) -> Result<Warmup, TooManyWarmups> {
        let mut all = self.lock();
        let same = |o: &&Arc<One>| {
            let a = (&o.domain, o.root, o.layout, o.check, &o.dataset);
            let layout = order.source.version.layout();
            let b = (&order.sources.domain, order.root, layout, order.check, order.source.dataset());
            a == b && !o.lock().state.is_over()
        };
        if let Some(one) = all.iter().find(same) {
            return Ok(one.view());
        }
        if all.len() >= KNOWN_MAX {
            let over = all.iter().position(|o| o.lock().state.is_over());
            all.remove(over.ok_or(TooManyWarmups(KNOWN_MAX))?);
        }
        let state = State {
            state: WarmupState::Queued,
            begun: None,
            took: None,
            ended_ns: None,
            leased_until_ns: None,
            error: None,
        };
        let doc = order.source.version.layout_doc();
        let one = Arc::new(One {
            id: format!("{:016x}", rand::random::<u64>()),
            domain: order.sources.domain.clone(),
            dataset: order.source.dataset().clone(),
            root: order.root,
            layout: order.source.version.layout(),
            check: order.check,
            total: Amount { chunks: doc.chunks, bytes: doc.bytes },
            started_ns: unix_ns(),
            cancel: self.stop.child_token(),
            state: Mutex::new(state),
            looked_at: Count::default(),
            present: Count::default(),
            brought: Count::default(),
            refused: Count::default(),
            failed: Count::default(),
            damaged: Count::default(),
            missing: Count::default(),
        });
        all.push_back(Arc::clone(&one));
        let view = one.view();
        drop(all);
        let this = Arc::clone(self);
        self.tasks.spawn(async move { this.work(one, order).await });
        Ok(view)
    }

    fn find(&self, domain: &Domain, id: &str) -> Option<Arc<One>> {
        self.lock().iter().find(|o| o.id == id && o.domain == *domain).cloned()
    }

    /// One of a domain.
    #[must_use]
    pub fn get(&self, domain: &Domain, id: &str) -> Option<Warmup> {
        self.find(domain, id).map(|o| o.view())
    }

    /// Those of a domain, the last first.
    #[must_use]
    pub fn list(&self, domain: &Domain) -> Vec<Warmup> {
        self.lock().iter().rev().filter(|o| o.domain == *domain).map(|o| o.view()).collect()
    }

    /// Ends one, and what it protects. What it brought stays.
    #[must_use]
    pub fn cancel(&self, domain: &Domain, id: &str) -> Option<Warmup> {
        let one = self.find(domain, id)?;
        one.cancel.cancel();
        Some(one.view())
    }

    /// Evicts a dataset's chunks from disk, after ending its warm-ups and what they protect; how
    /// many. `None` without a disk tier. Blocking.
    #[must_use]
    pub fn evict(&self, domain: &Domain, dataset: &DatasetName) -> Option<u64> {
        let of: Vec<_> =
            self.lock().iter().filter(|o| o.domain == *domain && o.dataset == *dataset).cloned().collect();
        for one in &of {
            one.cancel.cancel();
            // Their own tasks release what they leased; this does not wait for more than a moment.
            let until = Instant::now() + Duration::from_secs(5);
            while one.lock().leased_until_ns.is_some() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        Some(self.context.store.disk()?.evict_dataset(DatasetId::of(domain, dataset)))
    }

    /// Ends all: the server stops.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Totals.
    #[must_use]
    pub fn stats(&self) -> WarmupStats {
        let live = self.lock().iter().filter(|o| !o.lock().state.is_over()).count() as u64;
        let [brought, refused, failed] = &self.totals;
        WarmupStats {
            live,
            leased: self.leased.load(Relaxed),
            brought: brought.get(),
            refused: refused.get(),
            failed: failed.get(),
        }
    }
}

/// Chunks protected by a warm-up; given back when dropped.
struct Leases {
    store: Arc<Store>,
    all: Arc<AtomicU64>,
    domain: Domain,
    hashes: Vec<fletch_core::Hash>,
}

impl Leases {
    fn new(warmups: &Warmups, domain: &Domain) -> Self {
        Leases {
            store: Arc::clone(&warmups.context.store),
            all: Arc::clone(&warmups.leased),
            domain: domain.clone(),
            hashes: Vec::new(),
        }
    }

    fn key(&self, hash: fletch_core::Hash) -> StoreKey {
        StoreKey { domain: self.domain.clone(), hash }
    }

    /// Protects a chunk; `false` when it is not on disk, or there is no more room for leases.
    fn take(&mut self, hash: fletch_core::Hash) -> bool {
        let Some(disk) = self.store.disk() else { return false };
        if self.all.fetch_add(1, Relaxed) >= LEASED_MAX || !disk.pin(&[self.key(hash)])[0] {
            self.all.fetch_sub(1, Relaxed);
            return false;
        }
        self.hashes.push(hash);
        true
    }
}

impl Drop for Leases {
    fn drop(&mut self) {
        let Some(disk) = self.store.disk() else { return };
        for some in self.hashes.chunks(1024) {
            let keys: Vec<StoreKey> = some.iter().map(|h| self.key(*h)).collect();
            disk.unpin(&keys);
        }
        self.all.fetch_sub(self.hashes.len() as u64, Relaxed);
    }
}
