//! Epochs: one pass of a job over its plan, from the ledger that remembers it to the receipt that proves it.
//!
//! ```text
//! request ─► lock: expire · acks · renew · room · sequence chooses · leases apply · ledger append
//!         ─► durable ─► answer; of a lease: head and data at once ─► durable ─► end of the answer
//! ```
//!
//! 1. (I2) Everything that changes the leases is an event, appended to the ledger under the same lock. So the
//!    ledger has the events in the order in which they happened. An answer ends after its events are durable,
//!    and nobody uses an answer that has not ended. No request waits for the disk under the lock.
//! 2. A restart replays the ledger; leases that lived before it live on for a whole `lease_ttl`. A pause of
//!    the server does not count for leases.
//! 3. A rejected request changes nothing, except that expired leases have ended.

mod acks;
mod commits;
mod context;
mod delivery;
mod error;
mod grant;
mod lease_clock;
mod ledger;
mod prefetching;
mod rank_record;
mod recovery;
mod replay_source;
mod schedule;
mod sequence;
mod view;
mod worlds;

use crate::{
    data::versions::{Samples, Sources},
    tenancy::{accounting::JobCosts, tenants::JobCharges},
    training::{
        benefit::JobWindow,
        prefetch::Prefetcher,
        sweep::{DeliveryClass, Sweep},
    },
};
use commits::Committed;
pub use context::JobContext;
pub use delivery::{Delivery, SampleBytes};
pub use error::JobError;
use fletch_api::{AckedBy, EpochState, OrderKind, Times, Visitation};
use fletch_core::{
    Hash, LayoutId, Root, Tenant,
    delivery::{Event, Lease, Leases, Loss, Request, certificate::Shuffle, ledger::Header},
    plan::{OrderKey, Plan, World},
};
pub use grant::Granted;
pub use lease_clock::LeaseClock;
use ledger::LedgerFile;
pub use ledger::{Recorded, is_unsynced};
use parking_lot::{Mutex, MutexGuard};
pub use recovery::header_mismatch;
pub use replay_source::{ReplaySource, replayed_ledger};
pub use schedule::{BucketedPlan, Schedule};
use sequence::Sequence;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, OnceLock, atomic::Ordering::Relaxed},
};
use tokio::sync::{Notify, OnceCell};
pub use worlds::{world_of, world_spec};

/// Most acknowledged leases that are remembered, so that an ack may arrive twice ...
const ACKED_LEASES_MAX: usize = 4096;
/// ... or this many for each rank, if that is more: after a restart every rank may ask again.
const ACKED_LEASES_PER_RANK: usize = 8;

/// What all epochs of a job share.
pub struct JobSetup {
    /// The tenant of the job.
    pub tenant: Tenant,
    /// The job's name.
    pub job: String,
    /// What the job uses of its tenant's limits.
    pub charges: Arc<JobCharges>,
    /// The version's root.
    pub root: Root,
    pub layout: LayoutId,
    /// The samples that each epoch delivers.
    pub plan: Plan,
    /// The plan's entries by unit.
    pub plan_units: fletch_core::plan::PlanUnits,
    /// Entries in a block of a strict order by units; 0 where the strict order goes by samples.
    pub block: u32,
    /// The version's samples and units.
    pub samples: Arc<Samples>,
    /// The sweep that the job subscribes to, for the order `substitute`.
    pub sweep: Option<Arc<Sweep>>,
    /// The plan divided into buckets, for orders that need it.
    pub bucketed: Option<BucketedPlan>,
    /// The ledger that the epochs replay, for the order `replay`.
    pub replay: Option<Arc<ReplaySource>>,
    /// The plan's hash, its buckets included.
    pub hash: Hash,
    pub order: OrderKind,
    /// Sources for samples that an order asks for by name.
    pub exact: Arc<Sources>,
    /// The seed of every random choice.
    pub seed: u64,
    /// Which samples count as delivered.
    pub visitation: Visitation,
    /// The latest batches, for the estimate of what cache is worth to the job.
    pub window: JobWindow,
    /// What all jobs of the server share.
    pub context: Arc<JobContext>,
}

struct Inner {
    leases: Leases,
    sequence: Sequence,
    state: EpochState,
    /// By rank: the statistics of the shuffle so far.
    shuffles: Vec<Shuffle>,
    padded: BTreeSet<u32>,
    times: Times,
    /// By rank: the loaders that acknowledged entries, since the server opened the epoch.
    acked_by: BTreeMap<u32, Vec<AckedBy>>,
    /// By lease: (rank, entries) of leases that were acknowledged in full.
    acked_leases: BTreeMap<u64, (u32, u32)>,
    /// By live lease: the classes of its entries. A restart forgets them.
    classes: BTreeMap<u64, Vec<DeliveryClass>>,
    /// By commit that is remembered.
    commits: BTreeMap<u64, Committed>,
    /// How often the ledger was lost.
    losses: Vec<Loss>,
    /// The epoch is about to be opened anew from its ledger.
    reopening: bool,
    /// Fetches ahead of the epoch's readers, where its order is known.
    prefetcher: Option<Arc<Prefetcher>>,
}

/// One epoch of a job.
pub struct Epoch {
    setup: Arc<JobSetup>,
    header: Header,
    schedule: Schedule,
    /// The epoch's identity at the sweep.
    owner: u64,
    ledger: LedgerFile,
    inner: Mutex<Inner>,
    changed: Notify,
    /// What the job's reads cost, from its first lease on.
    costs: OnceLock<Arc<JobCosts>>,
    receipt: OnceCell<fletch_api::EpochReceipt>,
}

impl JobSetup {
    /// Returns the key from which an epoch draws every random choice.
    #[must_use]
    pub fn key(&self, epoch: u64) -> OrderKey {
        OrderKey::new(self.root, self.hash, self.seed, epoch)
    }

    /// Returns the time in milliseconds on the clock of leases.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        self.context.lease_clock.now_ms()
    }

    /// Returns the number of steps of an epoch in this world.
    #[must_use]
    pub fn steps(&self, world: World) -> u64 {
        match (&self.replay, &self.bucketed) {
            (Some(told), _) => told.steps(world),
            (None, Some(bucketed)) => bucketed.steps(world),
            (None, None) => world.steps(self.plan.entries()),
        }
    }

    /// Checks whether the records and ledgers of the job's tenant may grow by `more` bytes.
    ///
    /// # Errors
    /// [`JobError::StateFull`].
    pub fn check_state_bytes(&self, more: u64) -> Result<(), JobError> {
        Ok(self.context.tenants.check_state_bytes(&self.tenant, more)?)
    }

    /// Returns how long a lease lives without a sign of life, in milliseconds.
    #[must_use]
    pub fn ttl_ms(&self) -> u64 {
        u64::try_from(self.context.lease_ttl.as_millis()).unwrap_or(u64::MAX)
    }
}

impl Epoch {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Core checks before it changes anything, so a panic there has changed nothing.
        self.inner.lock()
    }

    /// Returns the epoch's number.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.header.epoch
    }

    /// Sets the costs to which fetches ahead of the job's reads count. The first call decides.
    pub fn set_costs(&self, costs: &Arc<JobCosts>) {
        let costs = self.costs.get_or_init(|| Arc::clone(costs));
        if let Some(sweep) = &self.setup.sweep {
            sweep.set_costs(self.owner, costs);
        }
    }

    /// Returns the epoch's ledger.
    #[must_use]
    pub fn ledger(&self) -> &LedgerFile {
        &self.ledger
    }

    /// Returns how long a lease lives without a sign of life, in milliseconds.
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

    /// Renews a lease whose stream is being read, if it is still the lease of that request.
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
            inner.end();
            let delivered = inner.leases.acked().count() + inner.padded.len() as u64;
            events.push(Event::End { delivered, redelivered: inner.leases.redelivered() });
            self.count_shuffle(inner);
        }
    }

    fn at_most_once(&self) -> bool {
        self.setup.visitation == Visitation::AtMostOnce
    }

    /// Counts granted entries as delivered, for the visitation `at-most-once`.
    ///
    /// Until then such a lease is like any other, so that a repeated request gets the same entries.
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
            // A live lease accepts its own rank's ack of all its entries.
            if let Ok(Some(event)) = inner.leases.ack(rank, lease, len) {
                entries += newly.len() as u64;
                inner.record_acked(&newly);
                inner.record_acked_lease(lease, rank, len);
                events.push(event);
            }
        }
        if entries > 0 {
            self.setup.context.counts.acked.fetch_add(entries, Relaxed);
            self.changed.notify_waiters();
            self.end_if_over(inner, events);
        }
    }

    /// Ends the leases whose time is over; returns the events.
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
            tracing::info!(
                job = %self.setup.job, epoch = self.number(), lease, rank,
                "a lease expired; what it held is granted again"
            );
        }
        self.setup.context.counts.expired.fetch_add(back.len() as u64, Relaxed);
        self.note_ended(inner, &due, &back);
        events
    }

    /// Gives the order what leases held that have ended.
    fn note_ended(&self, inner: &mut Inner, due: &[(u64, u32)], back: &[u32]) {
        for &(lease, rank) in due {
            inner.lease_ended(lease, rank);
        }
        inner.sequence.take_back(back);
        self.changed.notify_waiters();
    }

    /// Ends all leases of a rank, because another process is this rank now, or its process ended.
    ///
    /// The events become durable with the next ones, as those of [`Epoch::tick`].
    pub fn end_leases_of(&self, rank: u32) {
        let mut inner = self.lock();
        let inner = &mut *inner;
        if inner.state != EpochState::Open {
            return;
        }
        let mut events = Vec::new();
        if self.at_most_once() {
            self.deliver(inner, |l| l.request.rank == rank, &mut events);
        } else {
            let of_rank = inner.leases.live().filter(|l| l.request.rank == rank);
            let due: Vec<(u64, u32)> = of_rank.map(|l| (l.id, rank)).collect();
            let (ended, back) = inner.leases.expire_rank(rank);
            // Nobody waited for them to expire.
            self.setup.context.counts.released.fetch_add(back.len() as u64, Relaxed);
            self.note_ended(inner, &due, &back);
            events = ended;
        }
        self.ledger.append(&events);
    }

    /// Ends leases whose time is over, and a prefetch that nobody uses.
    pub fn tick(&self) {
        let mut inner = self.lock();
        if inner.state == EpochState::Open {
            let events = self.expire_due(&mut inner);
            self.close_idle_prefetch(&mut inner);
            // These events become durable with the next ones: after a crash the leases only live a little
            // longer.
            self.ledger.append(&events);
        }
    }

    /// Stops granting and writing, so that the ledger may be opened anew. Blocking.
    pub fn close(&self) {
        self.lock().reopening = true;
        self.abandon();
        self.ledger.close();
    }

    /// Stops granting, because the job went on to a later epoch. Returns whether the epoch was open.
    pub fn abandon(&self) -> bool {
        let mut inner = self.lock();
        let was_open = inner.state == EpochState::Open;
        if was_open {
            inner.state = EpochState::Abandoned;
            inner.end();
        }
        drop(inner);
        self.changed.notify_waiters();
        was_open
    }
}

impl Inner {
    /// Ends the sequence and the prefetch.
    pub(super) fn end(&mut self) {
        self.sequence = Sequence::Over;
        if let Some(ahead) = self.prefetcher.take() {
            ahead.close();
        }
    }

    pub(super) fn record_acked(&mut self, entries: &[u32]) {
        if let Some(ahead) = &self.prefetcher {
            ahead.served(entries);
        }
        let n = self.leases.planned().len();
        self.padded.extend(entries.iter().filter(|&&e| u64::from(e) >= n));
    }

    /// Records that a lease ended with entries unacknowledged. They come again.
    pub(super) fn lease_ended(&mut self, lease: u64, rank: u32) {
        self.sequence.ended(lease, rank);
        self.classes.remove(&lease);
    }

    pub(super) fn record_acked_lease(&mut self, lease: u64, rank: u32, entries: u32) {
        self.sequence.settled(lease);
        self.classes.remove(&lease);
        self.acked_leases.insert(lease, (rank, entries));
        let most = ACKED_LEASES_MAX.max(ACKED_LEASES_PER_RANK * self.leases.world().ranks as usize);
        while self.acked_leases.len() > most {
            self.acked_leases.pop_first();
        }
    }

    pub(super) fn add_ranks(&mut self) {
        let ranks = self.leases.world().ranks as usize;
        let more = ranks.saturating_sub(self.shuffles.len());
        self.shuffles.extend(std::iter::repeat_with(Shuffle::default).take(more));
    }
}
