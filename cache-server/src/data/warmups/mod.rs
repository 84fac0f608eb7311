//! Warm-ups: starts and cancels them, keeps their progress, and pins their chunks. `run` does the work.
//!
//! A warm-up has no journal, because the disk tier knows which chunks it has: a repeated warm-up fetches only
//! what is missing. A restart forgets the warm-ups and their pins; the fetched chunks stay.
//!
//! Invariants:
//! 1. (I6) At most [`RUNNING_MAX`] warm-ups run at once, and [`KNOWN_MAX`] are remembered; the oldest
//!    finished one is forgotten first. All warm-ups together pin at most [`PINNED_CHUNKS_MAX`] chunks.
//! 2. (I7) A warm-up belongs to its domain. For other domains it does not exist.
//! 3. The number of missing chunks comes from a count at the end, not from sums of the run. Chunks that other
//!    servers of the cluster own are missing if these refused them. Those servers pin them (`peer_pins`).

mod peer_pins;
mod run;

use crate::{
    app::telemetry::ReadWatch,
    cluster::ClusterState,
    data::{
        chunk_reads::ChunkReads,
        versions::{Source, Sources},
    },
    tenancy::{accounting::Accounts, tenants::Tenants},
};
use fletch_api::{Amount, Code, Problem, Warmup, WarmupState};
use fletch_bounds::in_waits;
use fletch_core::{DatasetName, Domain, LayoutId, Root, StoreKey, Tenant};
use fletch_store::{DatasetId, Shares, Store};
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use tokio::sync::{Notify, Semaphore};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The most warm-ups that run at once. The others wait for a permit.
const RUNNING_MAX: usize = 2;
/// The most warm-ups that are remembered.
const KNOWN_MAX: usize = 256;
/// The most chunks that all warm-ups together pin: 32 MiB of hashes.
const PINNED_CHUNKS_MAX: u64 = 1 << 20;

/// What warm-ups use of the server.
pub struct WarmupContext {
    /// Where the chunks are kept.
    pub store: Arc<Store>,
    /// The datasets' shares of the disk.
    pub shares: Arc<Shares>,
    /// Keeps and checks chunks, here or at their owners.
    pub reads: Arc<ChunkReads>,
    /// Counts what the warm-ups read.
    pub accounts: Arc<Accounts>,
    /// Whose permits the fetches take. While readers hold permits, warm-ups fetch less.
    pub tenants: Arc<Tenants>,
    /// Gets the waits of the fetches.
    pub watch: Arc<ReadWatch>,
    /// The other servers, which pin the chunks that they own.
    pub cluster: Arc<ClusterState>,
    /// How many chunks are fetched at once while there are no readers.
    pub parallel: usize,
}

impl WarmupContext {
    fn has_readers(&self) -> bool {
        self.tenants.requests.used() > 0
    }
}

/// What a warm-up fetches or checks.
pub struct WarmupRequest {
    /// The tenant that asked for it.
    pub tenant: Tenant,
    /// The sources of the version.
    pub sources: Arc<Sources>,
    /// The layout whose chunks are fetched: the one that readers of the same name get.
    pub source: Arc<Source>,
    /// The root of the version.
    pub root: Root,
    /// Whether to check cached chunks instead of fetching missing ones.
    pub check: bool,
    /// How long the chunks stay pinned afterwards.
    pub pin: Duration,
}

/// Too many warm-ups are queued or running.
#[derive(Debug, thiserror::Error)]
#[error("{0} warm-ups are queued or running, which is the limit")]
pub struct TooManyWarmups(usize);

/// A number of chunks and their bytes.
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

/// The record of a warm-up. A finished one holds no version open.
struct WarmupRecord {
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
    fetched: Count,
    refused: Count,
    /// The part of `refused` that other servers of the cluster refused.
    refused_elsewhere: Count,
    /// Whether other servers of the cluster may protect chunks of this warm-up.
    pinned_elsewhere: AtomicBool,
    failed: Count,
    damaged: Count,
    missing: Count,
}

struct State {
    state: WarmupState,
    started: Option<Instant>,
    took: Option<Duration>,
    ended_ns: Option<u64>,
    pinned_until_ns: Option<u64>,
    error: Option<Problem>,
}

impl WarmupRecord {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Keeps the first error.
    fn set_error(&self, code: Code, detail: String, hint: &'static str) {
        let mut state = self.lock();
        if state.error.is_none() {
            state.error = Some(Problem::new(code, detail, hint));
        }
    }

    fn enter(&self, to: WarmupState) {
        let mut state = self.lock();
        state.state = to;
        if to == WarmupState::Running {
            state.started = Some(Instant::now());
        } else if to.is_over() {
            state.took = state.started.map(|b| b.elapsed());
            state.ended_ns = Some(unix_ns());
        }
    }

    fn view(&self) -> Warmup {
        let state = self.lock();
        let took = state.took.or_else(|| state.started.map(|b| b.elapsed())).unwrap_or_default();
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
            fetched: self.fetched.get(),
            refused: self.refused.get(),
            failed: self.failed.get(),
            damaged: self.damaged.get(),
            missing: self.missing.get(),
            bytes_per_s: rate as u64,
            eta_s: (running && rate >= 1.0).then(|| (left / rate).ceil() as u64),
            started_ns: self.started_ns,
            ended_ns: state.ended_ns,
            pinned_until_ns: state.pinned_until_ns,
            error: state.error.clone(),
        }
    }
}

/// Totals of all warm-ups, for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WarmupStats {
    /// Warm-ups that are queued or running.
    pub live: u64,
    /// Pinned chunks.
    pub pinned: u64,
    /// Chunks fetched since the start.
    pub fetched: Amount,
    /// Chunks that the cache rejected since the start.
    pub refused: Amount,
    /// Chunks that could not be fetched since the start.
    pub failed: Amount,
}

/// All warm-ups.
pub struct Warmups {
    context: WarmupContext,
    all: Mutex<VecDeque<Arc<WarmupRecord>>>,
    permits: Arc<Semaphore>,
    pinned: Arc<AtomicU64>,
    peer_pins: peer_pins::AllPeerPins,
    peer_pins_changed: Notify,
    totals: [Count; 3],
    tasks: TaskTracker,
    stop: CancellationToken,
}

fn unix_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

impl Warmups {
    /// Creates the room, without warm-ups. Their work runs on `tasks`.
    #[must_use]
    pub fn new(context: WarmupContext, tasks: TaskTracker) -> Arc<Self> {
        Arc::new(Warmups {
            context,
            all: Mutex::default(),
            permits: Arc::new(Semaphore::new(RUNNING_MAX)),
            pinned: Arc::default(),
            peer_pins: peer_pins::AllPeerPins::default(),
            peer_pins_changed: Notify::new(),
            totals: Default::default(),
            tasks,
            stop: CancellationToken::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<WarmupRecord>>> {
        self.all.lock()
    }

    /// Starts a warm-up, or returns the same one if it is queued or running already.
    ///
    /// # Errors
    /// [`TooManyWarmups`].
    pub fn start(self: &Arc<Self>, request: WarmupRequest) -> Result<Warmup, TooManyWarmups> {
        let mut all = self.lock();
        let same = |o: &&Arc<WarmupRecord>| {
            let a = (&o.domain, o.root, o.layout, o.check, &o.dataset);
            let layout = request.source.version.layout();
            let b = (&request.sources.domain, request.root, layout, request.check, request.sources.dataset());
            a == b && !o.lock().state.is_over()
        };
        if let Some(record) = all.iter().find(same) {
            return Ok(record.view());
        }
        if all.len() >= KNOWN_MAX {
            let over = all.iter().position(|o| o.lock().state.is_over());
            all.remove(over.ok_or(TooManyWarmups(KNOWN_MAX))?);
        }
        let state = State {
            state: WarmupState::Queued,
            started: None,
            took: None,
            ended_ns: None,
            pinned_until_ns: None,
            error: None,
        };
        let doc = request.source.version.layout_doc();
        let record = Arc::new(WarmupRecord {
            id: format!("{:016x}", rand::random::<u64>()),
            domain: request.sources.domain.clone(),
            dataset: request.sources.dataset().clone(),
            root: request.root,
            layout: request.source.version.layout(),
            check: request.check,
            total: Amount { chunks: doc.chunks, bytes: doc.bytes },
            started_ns: unix_ns(),
            cancel: self.stop.child_token(),
            state: Mutex::new(state),
            looked_at: Count::default(),
            present: Count::default(),
            fetched: Count::default(),
            refused: Count::default(),
            refused_elsewhere: Count::default(),
            pinned_elsewhere: AtomicBool::new(false),
            failed: Count::default(),
            damaged: Count::default(),
            missing: Count::default(),
        });
        all.push_back(Arc::clone(&record));
        let view = record.view();
        drop(all);
        let this = Arc::clone(self);
        let waits = self.context.watch.waits_in_background();
        self.tasks.spawn(in_waits(waits, async move { this.run(record, request).await }));
        Ok(view)
    }

    fn find(&self, domain: &Domain, id: &str) -> Option<Arc<WarmupRecord>> {
        self.lock().iter().find(|o| o.id == id && o.domain == *domain).cloned()
    }

    /// Returns a warm-up of a domain.
    #[must_use]
    pub fn get(&self, domain: &Domain, id: &str) -> Option<Warmup> {
        self.find(domain, id).map(|o| o.view())
    }

    /// Returns the warm-ups of a domain, the latest first.
    #[must_use]
    pub fn list(&self, domain: &Domain) -> Vec<Warmup> {
        self.lock().iter().rev().filter(|o| o.domain == *domain).map(|o| o.view()).collect()
    }

    /// Cancels a warm-up and removes its pins. The fetched chunks stay.
    #[must_use]
    pub fn cancel(&self, domain: &Domain, id: &str) -> Option<Warmup> {
        let record = self.find(domain, id)?;
        record.cancel.cancel();
        Some(record.view())
    }

    /// Evicts a dataset's chunks from disk, after cancelling its warm-ups. The chunks of the sweeps `kept`,
    /// which jobs use, stay. Blocking.
    ///
    /// Returns the number of chunks, or `None` without a disk tier.
    #[must_use]
    pub fn evict(&self, domain: &Domain, dataset: &DatasetName, kept: &[DatasetId]) -> Option<u64> {
        let records: Vec<_> =
            self.lock().iter().filter(|o| o.domain == *domain && o.dataset == *dataset).cloned().collect();
        for record in &records {
            record.cancel.cancel();
            // The warm-up's own task removes its pins. Wait for it, but not longer than a moment.
            let until = Instant::now() + Duration::from_secs(5);
            while record.lock().pinned_until_ns.is_some() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        self.peer_pins.forget_dataset(domain, dataset);
        Some(self.context.store.disk()?.evict_dataset(DatasetId::of(domain, dataset), kept))
    }

    /// Cancels all warm-ups, because the server stops.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Returns the totals.
    #[must_use]
    pub fn stats(&self) -> WarmupStats {
        let live = self.lock().iter().filter(|o| !o.lock().state.is_over()).count() as u64;
        let [fetched, refused, failed] = &self.totals;
        WarmupStats {
            live,
            pinned: self.pinned.load(Relaxed),
            fetched: fetched.get(),
            refused: refused.get(),
            failed: failed.get(),
        }
    }
}

/// The chunks that a warm-up pinned. Dropping it unpins them.
struct Pins {
    store: Arc<Store>,
    reads: Arc<ChunkReads>,
    all: Arc<AtomicU64>,
    domain: Domain,
    hashes: Vec<fletch_core::Hash>,
}

impl Pins {
    fn new(warmups: &Warmups, domain: &Domain) -> Self {
        Pins {
            store: Arc::clone(&warmups.context.store),
            reads: Arc::clone(&warmups.context.reads),
            all: Arc::clone(&warmups.pinned),
            domain: domain.clone(),
            hashes: Vec::new(),
        }
    }

    fn key(&self, hash: fletch_core::Hash) -> StoreKey {
        self.reads.key(&self.domain, hash)
    }

    /// Pins a chunk. Returns `false` if it is not on disk, or the limit of pins is reached.
    fn pin(&mut self, hash: fletch_core::Hash) -> bool {
        let Some(disk) = self.store.disk() else { return false };
        if self.all.fetch_add(1, Relaxed) >= PINNED_CHUNKS_MAX || !disk.pin(&[self.key(hash)])[0] {
            self.all.fetch_sub(1, Relaxed);
            return false;
        }
        self.hashes.push(hash);
        true
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let Some(disk) = self.store.disk() else { return };
        for some in self.hashes.chunks(1024) {
            let keys: Vec<StoreKey> = some.iter().map(|h| self.key(*h)).collect();
            disk.unpin(&keys);
        }
        self.all.fetch_sub(self.hashes.len() as u64, Relaxed);
    }
}
