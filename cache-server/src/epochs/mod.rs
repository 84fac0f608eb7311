//! One epoch: what is granted to whom, in which order, and the ledger that remembers it.
//!
//! ```text
//! request ─► lock: expire · acks · renew · room · order chooses · leases apply · ledger append ─► durable ─► answer
//! ```
//!
//! 1. (I2) Everything that changes the leases is an event that is appended under the same lock, so the ledger has
//!    them in the order in which they happened; nothing is answered before its event is durable.
//! 2. A restart replays the ledger; what lived then lives on for a whole `ttl`.
//! 3. A refused request changes nothing but what time has changed anyway (expiries).

mod acks;
mod commits;
mod context;
mod delivery;
mod error;
mod grant;
mod ledger;
mod prefetching;
mod recovery;
mod replay_source;
mod schedule;
mod sequence;
mod view;
mod worlds;

use crate::{
    prefetch::Prefetcher,
    sweep::{DeliveryClass, Sweep},
    versions::{Samples, Sources},
};
use commits::Committed;
pub use context::JobContext;
pub use delivery::Delivery;
pub use error::JobError;
use fletch_api::{EpochState, OrderKind, Times, Visitation};
use fletch_core::{
    Hash, LayoutId, Root,
    delivery::{Event, Lease, Leases, Request, certificate::Shuffle, ledger::Header},
    plan::{OrderKey, Plan, World},
};
pub use grant::Granted;
use ledger::LedgerFile;
pub use ledger::{Staged, never_was, stage, sync_beside, write_whole};
pub use recovery::differs;
pub use replay_source::{ReplaySource, ledger_of};
pub use schedule::{BucketedPlan, Schedule};
use sequence::Sequence;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering::Relaxed},
};
use tokio::sync::{Notify, OnceCell};
pub use worlds::world_of;

/// Leases that were wholly acknowledged and are remembered, so that an ack may come twice: so many, ...
const SETTLED_MAX: usize = 4096;
/// ... or of each rank so many: after a restart all of them may ask again.
const SETTLED_RANK: usize = 8;

/// What all epochs of a job share.
pub struct Setup {
    /// The job's name.
    pub job: String,
    /// The version.
    pub root: Root,
    /// The layout.
    pub layout: LayoutId,
    /// What is delivered.
    pub plan: Plan,
    /// The plan laid over the layout.
    pub plan_units: fletch_core::plan::PlanUnits,
    /// Strict orders go by units, in blocks of so many entries; 0 for an order of samples.
    pub block: u32,
    /// The version as samples.
    pub samples: Arc<Samples>,
    /// The sweep, where the cache chooses.
    pub sweep: Option<Arc<Sweep>>,
    /// The buckets that the plan is cut into, where its order needs them.
    pub bucketed: Option<BucketedPlan>,
    /// The ledger that is replayed, where one is.
    pub told: Option<Arc<ReplaySource>>,
    /// The plan's name, with its buckets.
    pub hash: Hash,
    /// Who chooses.
    pub order: OrderKind,
    /// The way to the bytes of what is asked for by name.
    pub exact: Arc<Sources>,
    /// Where every random choice begins.
    pub seed: u64,
    /// What counts as delivered.
    pub visitation: Visitation,
    /// What it is served with.
    pub context: Arc<JobContext>,
}

struct Inner {
    leases: Leases,
    order: Sequence,
    state: EpochState,
    /// By rank.
    shuffles: Vec<Shuffle>,
    padded: BTreeSet<u32>,
    times: Times,
    /// (rank, entries) of leases that were wholly acknowledged.
    settled: BTreeMap<u64, (u32, u32)>,
    /// How the entries of live leases were picked; after a restart nobody knows.
    classes: BTreeMap<u64, Vec<DeliveryClass>>,
    /// Of each commit that is remembered.
    commits: BTreeMap<u64, Committed>,
    /// The epoch is about to be read anew.
    reopening: bool,
    /// What is fetched ahead of need, where that is known.
    prefetcher: Option<Arc<Prefetcher>>,
}

/// See the module.
pub struct Epoch {
    setup: Arc<Setup>,
    header: Header,
    schedule: Schedule,
    /// What the sweep knows this epoch by.
    owner: u64,
    ledger: LedgerFile,
    inner: Mutex<Inner>,
    changed: Notify,
    receipt: OnceCell<fletch_api::EpochReceipt>,
}

impl Setup {
    /// What everything random of an epoch is drawn from.
    #[must_use]
    pub fn key(&self, epoch: u64) -> OrderKey {
        OrderKey::new(self.root, self.hash, self.seed, epoch)
    }

    /// The moment, in leases' milliseconds.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        u64::try_from(self.context.since.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Steps of an epoch in this world.
    #[must_use]
    pub fn steps(&self, world: World) -> u64 {
        match (&self.told, &self.bucketed) {
            (Some(told), _) => told.steps(world),
            (None, Some(bucketed)) => bucketed.steps(world),
            (None, None) => world.steps(self.plan.entries()),
        }
    }

    fn ttl_ms(&self) -> u64 {
        u64::try_from(self.context.lease_ttl.as_millis()).unwrap_or(u64::MAX)
    }
}

impl Epoch {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Core checks before it changes; what panics there has changed nothing.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which epoch.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.header.epoch
    }

    /// Its ledger.
    #[must_use]
    pub fn ledger(&self) -> &LedgerFile {
        &self.ledger
    }

    /// How long a lease lives without a sign of life, in milliseconds.
    #[must_use]
    pub fn ttl_ms(&self) -> u64 {
        self.setup.ttl_ms()
    }

    fn expires_ms(&self) -> u64 {
        self.setup.now_ms().saturating_add(self.setup.ttl_ms())
    }

    fn is_open(&self, inner: &Inner) -> Result<(), JobError> {
        match inner.state {
            EpochState::Abandoned if inner.reopening || !self.ledger.works() => Err(JobError::Reopening),
            EpochState::Abandoned | EpochState::Damaged => {
                Err(JobError::Closed { epoch: self.number(), what: "abandoned" })
            }
            EpochState::Open | EpochState::Finished => Ok(()),
        }
    }

    /// The stream of a lease is being read: it lives on, if it is still the lease of that request.
    pub fn touch(&self, lease: u64, request: Request) {
        let expires = self.expires_ms();
        let mut inner = self.lock();
        if inner.leases.lease(lease).is_some_and(|l| l.request == request) {
            inner.leases.renew_one(request.rank, lease, expires);
        }
    }

    fn end_if_over(&self, inner: &mut Inner, events: &mut Vec<Event>) {
        if inner.state == EpochState::Open && inner.leases.finished() {
            inner.state = EpochState::Finished;
            inner.over();
            let delivered = inner.leases.acked().count() + inner.padded.len() as u64;
            events.push(Event::End { delivered, redelivered: inner.leases.redelivered() });
            self.judge(inner);
        }
    }

    fn at_most_once(&self) -> bool {
        self.setup.visitation == Visitation::AtMostOnce
    }

    /// At most once: what was granted is delivered, whatever became of it. Until then it is a lease as any other, so
    /// that the same request gets the same.
    fn deliver(&self, inner: &mut Inner, which: impl Fn(&Lease) -> bool, events: &mut Vec<Event>) {
        let all: Vec<(u64, u32, u32, Vec<u32>)> = inner
            .leases
            .live()
            .filter(|l| which(l))
            .map(|l| {
                let len = u32::try_from(l.entries.len()).unwrap_or(u32::MAX);
                (l.id, l.request.rank, len, l.entries[l.acked as usize..].to_vec())
            })
            .collect();
        let mut entries = 0;
        for (lease, rank, len, newly) in all {
            // A live lease takes its own rank's ack of all it has.
            if let Ok(Some(event)) = inner.leases.ack(rank, lease, len) {
                entries += newly.len() as u64;
                inner.note_acked(&newly);
                inner.settle(lease, rank, len);
                events.push(event);
            }
        }
        if entries > 0 {
            self.setup.context.counts.acked.fetch_add(entries, Relaxed);
            self.changed.notify_waiters();
            self.end_if_over(inner, events);
        }
    }

    /// Ends leases whose time is over; their events.
    fn expire_due(&self, inner: &mut Inner) -> Vec<Event> {
        let now = self.setup.now_ms();
        if self.at_most_once() {
            let mut events = Vec::new();
            self.deliver(inner, |l| l.expires_ms <= now, &mut events);
            return events;
        }
        let due: Vec<(u64, u32)> =
            inner.leases.live().filter(|l| l.expires_ms <= now).map(|l| (l.id, l.request.rank)).collect();
        if due.is_empty() {
            return Vec::new();
        }
        let (events, back) = inner.leases.expire(now);
        for &(lease, rank) in &due {
            tracing::info!(job = %self.setup.job, epoch = self.number(), lease, rank, "a lease expired; what it held is granted again");
            inner.order.expired(lease, rank);
            inner.classes.remove(&lease);
        }
        self.setup.context.counts.expired.fetch_add(back.len() as u64, Relaxed);
        inner.order.came_back(&back);
        self.changed.notify_waiters();
        events
    }

    /// Housekeeping: leases whose time is over.
    pub fn tick(&self) {
        let mut inner = self.lock();
        if inner.state == EpochState::Open {
            let events = self.expire_due(&mut inner);
            self.close_idle_prefetch(&mut inner);
            // Made durable with whatever comes next: a restart would only let them live a little longer.
            self.ledger.append(&events);
        }
    }

    /// Its file may be opened anew: nothing is granted, and nothing is written when this returns. Blocking.
    pub fn close(&self) {
        self.lock().reopening = true;
        self.abandon();
        self.ledger.close();
    }

    /// The job went on: nothing is granted any more.
    pub fn abandon(&self) {
        let mut inner = self.lock();
        if inner.state == EpochState::Open {
            inner.state = EpochState::Abandoned;
            inner.over();
        }
        drop(inner);
        self.changed.notify_waiters();
    }
}

impl Inner {
    /// Nothing is granted any more.
    pub(super) fn over(&mut self) {
        self.order = Sequence::Over;
        if let Some(ahead) = self.prefetcher.take() {
            ahead.close();
        }
    }

    pub(super) fn note_acked(&mut self, entries: &[u32]) {
        if let Some(ahead) = &self.prefetcher {
            ahead.served(entries);
        }
        let n = self.leases.planned().len();
        self.padded.extend(entries.iter().filter(|&&e| u64::from(e) >= n));
    }

    pub(super) fn settle(&mut self, lease: u64, rank: u32, entries: u32) {
        self.order.settled(lease);
        self.classes.remove(&lease);
        self.settled.insert(lease, (rank, entries));
        let most = SETTLED_MAX.max(SETTLED_RANK * self.leases.world().ranks as usize);
        while self.settled.len() > most {
            self.settled.pop_first();
        }
    }

    pub(super) fn widen(&mut self) {
        let ranks = self.leases.world().ranks as usize;
        let more = ranks.saturating_sub(self.shuffles.len());
        self.shuffles.extend(std::iter::repeat_with(Shuffle::default).take(more));
    }
}
