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
mod course;
mod foresight;
mod notes;
mod order;
mod replay;
mod view;
mod worlds;

use super::{
    Ahead, JobError, Samples, Wheel,
    ledger::LedgerFile,
    plan::Cut,
    told::Told,
    wheel::{Class, Means},
};
use crate::versions::Sources;
use commits::Committed;
pub use course::Course;
use fletch_api::{
    EpochState, LeaseRequest, OrderKind, Times, Visitation,
    epochs::{Ack, GrantStatus, WANT_MAX},
};
use fletch_core::{
    Hash, LayoutId, Root,
    delivery::{Event, Lease, Leases, Request, Room, certificate::Shuffle, ledger::Header},
    plan::{Item, OrderKey, Plan, World},
};
use order::Order;
pub use replay::differs;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering::Relaxed},
    time::Instant,
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
    pub wheel: Option<Arc<Wheel>>,
    /// The buckets that the plan is cut into, where its order needs them.
    pub cut: Option<Cut>,
    /// The ledger that is replayed, where one is.
    pub told: Option<Arc<Told>>,
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
    pub means: Arc<Means>,
}

struct Inner {
    leases: Leases,
    order: Order,
    state: EpochState,
    /// By rank.
    shuffles: Vec<Shuffle>,
    padded: BTreeSet<u32>,
    times: Times,
    /// (rank, entries) of leases that were wholly acknowledged.
    settled: BTreeMap<u64, (u32, u32)>,
    /// How the entries of live leases were picked; after a restart nobody knows.
    classes: BTreeMap<u64, Vec<Class>>,
    /// Of each commit that is remembered.
    commits: BTreeMap<u64, Committed>,
    /// The epoch is about to be read anew.
    reopening: bool,
    /// What is fetched ahead of need, where that is known.
    ahead: Option<Arc<Ahead>>,
}

/// See the module.
pub struct Epoch {
    setup: Arc<Setup>,
    header: Header,
    course: Course,
    /// What the sweep knows this epoch by.
    owner: u64,
    ledger: LedgerFile,
    inner: Mutex<Inner>,
    changed: Notify,
    receipt: OnceCell<fletch_api::EpochReceipt>,
}

/// What a lease request came to.
#[derive(Debug, Clone)]
pub struct Granted {
    /// What came of it.
    pub status: GrantStatus,
    /// The lease; 0 without one.
    pub lease: u64,
    /// Whether the same request had it before.
    pub again: bool,
    /// Its entries, and what each is.
    pub entries: Vec<(u32, Item, Class)>,
    /// What the rank may still be granted.
    pub left: u64,
}

/// A request that must wait for somebody's ack.
enum Step {
    Answer(Granted, u64),
    Wait(Granted, u64),
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
        u64::try_from(self.means.since.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Steps of an epoch in this world.
    #[must_use]
    pub fn steps(&self, world: World) -> u64 {
        match (&self.told, &self.cut) {
            (Some(told), _) => told.steps(world),
            (None, Some(cut)) => cut.steps(world),
            (None, None) => world.steps(self.plan.entries()),
        }
    }

    fn ttl_ms(&self) -> u64 {
        u64::try_from(self.means.lease_ttl.as_millis()).unwrap_or(u64::MAX)
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

    /// The next entries of a worker. Held back until `until` while there is hope of an ack.
    ///
    /// # Errors
    /// [`JobError`]; nothing was granted.
    pub async fn lease(&self, ask: &LeaseRequest, until: Instant) -> Result<Granted, JobError> {
        Self::can_want(ask)?;
        let mut acks: &[Ack] = &ask.acks;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let step = self.step(ask, acks)?;
            acks = &[];
            let (answer, upto) = match step {
                Step::Wait(answer, upto) if Instant::now() < until => {
                    self.ledger.durable(upto).await?;
                    if tokio::time::timeout_at(until.into(), changed).await.is_ok() {
                        continue;
                    }
                    (answer, upto)
                }
                Step::Wait(answer, upto) | Step::Answer(answer, upto) => (answer, upto),
            };
            self.ledger.durable(upto).await?;
            return Ok(answer);
        }
    }

    /// Whether a lease has as many entries as this wants.
    ///
    /// # Errors
    /// [`JobError::Request`].
    pub fn can_want(ask: &LeaseRequest) -> Result<(), JobError> {
        if (1..=WANT_MAX).contains(&ask.want) {
            return Ok(());
        }
        Err(JobError::Request(format!("want is {}; a lease has 1 to {WANT_MAX} entries", ask.want)))
    }

    fn step(&self, ask: &LeaseRequest, acks: &[Ack]) -> Result<Step, JobError> {
        let mut inner = self.lock();
        let inner = &mut *inner;
        self.is_open(inner)?;
        let mut events = self.expire_due(inner);
        let request = Request { rank: ask.rank, worker: ask.worker, sequence: ask.sequence };
        let checked = self
            .check(inner, ask.rank, acks, &ask.renew)
            .and_then(|()| Ok(inner.leases.room(request, ask.want, self.held_max())?));
        if let Err(e) = checked {
            self.ledger.append(&events);
            return Err(e);
        }
        let step = self.answer(inner, ask, request, acks, &mut events);
        // Whatever came of it: what was applied is written.
        let upto = self.ledger.append(&events);
        step.map(|s| match s {
            Step::Answer(g, _) => Step::Answer(g, upto),
            Step::Wait(g, _) => Step::Wait(g, upto),
        })
    }

    fn answer(
        &self,
        inner: &mut Inner,
        ask: &LeaseRequest,
        request: Request,
        acks: &[Ack],
        events: &mut Vec<Event>,
    ) -> Result<Step, JobError> {
        self.apply(inner, ask.rank, acks, events)?;
        self.renew(inner, ask.rank, &ask.renew);
        if self.at_most_once() {
            // Whoever asks for more has what it asked for before, or will not ask for it again.
            let before =
                |r: &Request| (r.rank, r.worker) == (ask.rank, ask.worker) && r.sequence < ask.sequence;
            self.deliver(inner, |l| before(&l.request), events);
        }
        let room = inner.leases.room(request, ask.want, self.held_max())?;
        let none = |inner: &Inner, status| Granted {
            status,
            lease: 0,
            again: false,
            entries: Vec::new(),
            left: inner.leases.left(ask.rank),
        };
        Ok(match room {
            Room::Again(lease) => Step::Answer(self.granted(inner, lease, true), 0),
            Room::Done if inner.leases.held(ask.rank) > 0 => Step::Answer(none(inner, GrantStatus::Last), 0),
            Room::Done => Step::Answer(none(inner, GrantStatus::Done), 0),
            Room::Full => Step::Wait(none(inner, GrantStatus::Full), 0),
            Room::Grant(n) => {
                if self.is_full() {
                    return Err(JobError::LedgerFull {
                        epoch: self.number(),
                        most: self.setup.means.ledger_bytes,
                    });
                }
                let lease = self.grant(inner, request, n, events)?;
                Step::Answer(self.granted(inner, lease, false), 0)
            }
        })
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

    /// The order chooses, and the leases note it.
    fn grant(
        &self,
        inner: &mut Inner,
        request: Request,
        n: u32,
        events: &mut Vec<Event>,
    ) -> Result<u64, JobError> {
        self.foresee(inner);
        let (entries, mut classes, from) = inner.order.choose(self, &inner.leases, request.rank, n);
        let event = inner.leases.grant(request, entries, n, self.expires_ms())?;
        let lease = inner.leases.last_id();
        inner.order.granted(lease, request.rank, from);
        if let Event::Grant { entries, .. } = &event {
            if let Some(ahead) = &inner.ahead {
                ahead.granted(entries);
            }
            // Pads that filled up.
            classes.resize(entries.len(), Class::Exact);
            for &e in entries {
                let unit = self.setup.samples.unit(self.course.item(e).sample);
                inner.shuffles[request.rank as usize].see(unit);
            }
        }
        self.setup.means.counts.granted.fetch_add(classes.len() as u64, Relaxed);
        inner.classes.insert(lease, classes);
        events.push(event);
        Ok(lease)
    }

    fn granted(&self, inner: &mut Inner, lease: u64, again: bool) -> Granted {
        let Some(l) = inner.leases.lease(lease) else {
            return Granted { status: GrantStatus::Full, lease: 0, again, entries: Vec::new(), left: 0 };
        };
        let (entries, rank) = (l.entries.clone(), l.request.rank);
        let known = inner.classes.get(&lease);
        let entries = entries
            .into_iter()
            .enumerate()
            .map(|(i, e)| {
                let item = self.course.item(e);
                let class = known.and_then(|c| c.get(i).copied());
                (e, item, class.unwrap_or_else(|| self.class_now(item)))
            })
            .collect();
        inner.leases.renew_one(rank, lease, self.expires_ms());
        Granted { status: GrantStatus::Granted, lease, again, entries, left: inner.leases.left(rank) }
    }

    fn class_now(&self, item: Item) -> Class {
        self.setup.wheel.as_ref().map_or(Class::Exact, |w| w.class_of(item.sample, self.owner))
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
            self.setup.means.counts.acked.fetch_add(entries, Relaxed);
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
        self.setup.means.counts.expired.fetch_add(back.len() as u64, Relaxed);
        inner.order.came_back(&back);
        self.changed.notify_waiters();
        events
    }

    /// Housekeeping: leases whose time is over.
    pub fn tick(&self) {
        let mut inner = self.lock();
        if inner.state == EpochState::Open {
            let events = self.expire_due(&mut inner);
            self.rest_if_idle(&mut inner);
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
