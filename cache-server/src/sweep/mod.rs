//! One sweep for all jobs that read a version in one layout: the SweepPolicy, and the store that obeys it.
//!
//! The SweepPolicy says which units should be here; this file brings and drops them, and tells it what did not
//! come. Chunks of the sweep are a dataset of their own to the disk tier, with a share of its own, so that
//! plain readers of the dataset keep theirs.
//!
//! 1. The SweepPolicy is never waited for and never waits: its orders become tasks of their own.
//! 2. What it believes to be here and is not costs a fetch (I5): every read goes through the store.
//! 3. (I6) Its capacity is the sweep's share of the disk, less some for what is on its way (a hundredth, or `loads_bytes`); without a disk
//!    half of the memory, in which its chunks are then held. Under `lru` and `pin` nothing is kept for it.
//! 4. At most `loads_max` units are brought at once, and chunks of `loads_bytes`.

mod context;
mod fetch;
mod fetch_permits;
mod pending_reads;
mod recording;

use crate::versions::Samples;
use crate::versions::{Source, Sources};
pub use context::SweepContext;
use fetch_permits::FetchPermits;
use fletch_core::{
    StoreKey, Verified,
    order::sweep::{Pick, PickQueue, ReadFrom, SubscriberId, SweepParams, SweepPolicy, SweepProgress},
    plan::{Bits, OrderKey, PlanUnits},
    residency::{CacheAction, Residency},
};
use fletch_store::{DatasetId, ReaderKind, disk::Policy};
use pending_reads::PendingReads;
pub use recording::Recorder;
use recording::Recording;
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

/// Picks that one whose bytes are here may overtake (ADR 10).
const OVERTAKE: usize = 4;
/// So many picks are decided before they are granted. A slow job beside fast ones pays for each: the sweep has passed before they
/// are read (1/1.3/2/4 on 20 %: .409 with 32, .470 with 128). What takes time is hidden by the leases that a job holds.
const AHEAD: usize = 32;
/// Within this time a dropped chunk may still have been waiting to be written.
const WRITTEN_WITHIN: Duration = Duration::from_secs(5);
/// How long a first job waits until the sweep has its share of the disk.
const SHARE_WITHIN: Duration = Duration::from_secs(3);

/// How a picked sample counts (I8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveryClass {
    /// It was asked for by name: a hit is exact.
    Exact,
    /// It was chosen because it is here, and was not fetched for this epoch.
    Substituted,
    /// Its unit was fetched for this epoch.
    Fetched,
    /// It is read directly: nothing is kept of it.
    Direct,
}

/// A sample that the sweep chose.
#[derive(Debug, Clone, Copy)]
pub struct Picked {
    /// The plan's entry.
    pub entry: u32,
    /// How it counts.
    pub class: DeliveryClass,
}

const AWAY: u8 = 0;
const COMING: u8 = 1;
const HERE: u8 = 2;

struct Inner {
    policy: SweepPolicy,
    /// Of each unit: where it is, the number of its latest load, and the epoch that asked for that.
    here: Vec<u8>,
    load: Vec<u32>,
    by: Vec<u64>,
    /// Without a disk: what is held in memory.
    held: HashMap<u32, Vec<Verified>>,
    /// Dropped a moment ago.
    dropped: VecDeque<(Instant, u32)>,
    pending_reads: PendingReads,
    actions: Vec<CacheAction>,
    /// The sweep's share, and when last less than that was found to be there.
    capacity: u64,
    gave_way: Option<Instant>,
    /// Which unit is looked for next, and what the disk had refused at the last look.
    looked: usize,
    refused: u64,
}

/// See the module.
pub struct Sweep {
    /// The version as samples and units.
    pub samples: Arc<Samples>,
    /// The version in its layout.
    pub source: Arc<Source>,
    /// For reads that come to stay in the sweep's share.
    pub keeping: Arc<Sources>,
    /// For reads that pass.
    pub passing: Arc<Sources>,
    context: Arc<SweepContext>,
    permits: FetchPermits,
    recording: Option<Arc<Recording>>,
    inner: Mutex<Inner>,
}

impl Sweep {
    /// A sweep over a version, which takes over what the cache holds of it. Waits a moment for its share.
    pub async fn start(
        context: &Arc<SweepContext>,
        sources: &Arc<Sources>,
        source: &Arc<Source>,
        samples: Arc<Samples>,
    ) -> Arc<Self> {
        let version = &source.version;
        let number = DatasetId::sweep_of(&sources.domain, source.dataset(), version.root(), version.layout());
        let keeping = sources.beside(source, number);
        let passing = sources.beside(source, DatasetId::UNCACHED);
        let units = samples.unit_map.units();
        let key = OrderKey::new(version.root(), version.layout().0, 0, 0);
        let recording = recording::of(context.recorder.as_ref(), source).await;
        let make = if recording.is_some() { SweepPolicy::recorded } else { SweepPolicy::new };
        let mut policy = make(Arc::clone(&samples.unit_map), 0, &key, SweepParams::default());
        if let Some(recording) = &recording {
            recording.take(&mut policy, &context.tasks);
        }
        context.sweeps.fetch_add(1, Relaxed);
        let inner = Inner {
            policy,
            here: vec![AWAY; units],
            load: vec![0; units],
            by: vec![u64::MAX; units],
            held: HashMap::new(),
            dropped: VecDeque::new(),
            pending_reads: PendingReads::new(units),
            actions: Vec::new(),
            capacity: 0,
            gave_way: None,
            looked: 0,
            refused: 0,
        };
        let sweep = Arc::new(Sweep {
            samples,
            source: Arc::clone(source),
            keeping,
            passing,
            context: Arc::clone(context),
            permits: FetchPermits::new(context.fetches_max, context.fetch_bytes_max),
            recording,
            inner: Mutex::new(inner),
        });
        let until = Instant::now() + SHARE_WITHIN;
        sweep.note(0);
        while sweep.awaits_share() && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        sweep.adopt();
        sweep
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // The SweepPolicy may panic only before it changes anything.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(&self, hash: fletch_core::Hash) -> StoreKey {
        StoreKey { domain: self.keeping.domain.clone(), hash }
    }

    /// The sweep is in use.
    pub fn note(&self, now_ns: u64) {
        let footprint = self.samples.unit_map.total_bytes();
        let root = self.source.version.root();
        let by = ReaderKind::SweepOver(DatasetId::of(&self.keeping.domain, self.source.dataset()));
        self.context.shares.note(self.keeping.number(), root, footprint, by, now_ns);
    }

    fn awaits_share(&self) -> bool {
        let Some(disk) = self.context.store.disk() else { return false };
        let fletch = disk.engine().is_some_and(|t| t.policy() == Policy::Fletch);
        fletch && disk.share_of(self.keeping.number()).is_none()
    }

    /// What it may keep now, in footprints.
    fn capacity(&self) -> u64 {
        let Some(disk) = self.context.store.disk() else {
            return self.context.memory_bytes / self.context.sweeps.load(Relaxed).max(1) as u64;
        };
        let fletch = disk.engine().is_some_and(|t| t.policy() == Policy::Fletch);
        let share = if fletch { disk.share_of(self.keeping.number()).unwrap_or(0) } else { 0 };
        let all = self.samples.unit_map.total_bytes();
        // All of it fits: then nothing is ever on its way in the place of something else.
        if share >= all { all } else { share - (share / 100).min(self.context.fetch_bytes_max) }
    }

    /// Begins with what the cache holds already.
    fn adopt(self: &Arc<Self>) {
        let units = self.samples.unit_map.units();
        let mut bits = Bits::zeros(units as u64);
        if self.context.store.disk().is_some() {
            for unit in (0..units).map(|u| u32::try_from(u).unwrap_or(u32::MAX)) {
                let chunks = self.samples.chunks(unit);
                if chunks.iter().all(|c| self.context.store.is_kept(&self.key(c.hash), c.len)) {
                    bits.set(u64::from(unit));
                }
            }
        }
        let capacity = self.capacity();
        let mut inner = self.lock();
        let inner = &mut *inner;
        inner.capacity = capacity;
        inner.policy.set_capacity(capacity, &mut inner.actions);
        inner.policy.adopt(&Residency::new(1, bits.clone()), &mut inner.actions);
        for u in bits.iter_in(0, bits.len()) {
            inner.here[usize::try_from(u).unwrap_or(usize::MAX)] = HERE;
        }
        self.obey(inner, u64::MAX);
    }

    /// A job sits down.
    pub fn join(&self, plan_units: PlanUnits) -> SubscriberId {
        self.lock().policy.join(plan_units)
    }

    /// A job is gone.
    pub fn leave(&self, subscriber: SubscriberId) {
        self.lock().policy.leave(subscriber);
    }

    /// An epoch begins at a subscriber: `left` are its slots.
    pub fn begin(&self, subscriber: SubscriberId, left: Bits) {
        self.lock().policy.begin(subscriber, left);
    }

    /// The next picks of an epoch, at most `n`; `owner` names the epoch. `base` is the number of
    /// entries of one pass of its plan.
    pub fn draw(
        self: &Arc<Self>,
        subscriber: SubscriberId,
        queue: &mut PickQueue,
        n: u32,
        owner: u64,
        base: u64,
    ) -> Vec<Picked> {
        let mut inner = self.lock();
        let inner = &mut *inner;
        let mut out = Vec::with_capacity(n as usize);
        while out.len() < n as usize {
            let pending_reads = &mut inner.pending_reads;
            queue.fill(&mut inner.policy, subscriber, AHEAD, &mut inner.actions, |p| {
                if p.read_from != ReadFrom::Range {
                    pending_reads.decided(p.unit);
                }
            });
            self.obey(inner, owner);
            let here = &inner.here;
            let is_here = |p: &Pick| p.read_from != ReadFrom::Range && here[p.unit as usize] == HERE;
            let Some(pick) = queue.next(&inner.policy, OVERTAKE, is_here) else { break };
            let counts = &self.context.counts;
            match is_here(&pick) || inner.pending_reads.keeps(pick.unit) {
                true => &counts.picked_here,
                false if inner.policy.left_in_reserve(subscriber) > 0 || queue.planned().any(is_here) => {
                    &counts.picked_over
                }
                false => &counts.picked_away,
            }
            .fetch_add(1, Relaxed);
            let class = match pick.read_from {
                ReadFrom::Range if !inner.pending_reads.keeps(pick.unit) => DeliveryClass::Direct,
                _ if inner.by[pick.unit as usize] == owner => DeliveryClass::Fetched,
                _ => DeliveryClass::Substituted,
            };
            let entry =
                u64::from(inner.policy.plan_units(subscriber).entry(pick.slot)) + u64::from(pick.pass) * base;
            out.push(Picked { entry: u32::try_from(entry).unwrap_or(u32::MAX), class });
        }
        self.ahead_of_need(inner, owner);
        out
    }

    /// Pacing: while the way to the origin is idle, a job that is alone fetches early.
    fn ahead_of_need(self: &Arc<Self>, inner: &mut Inner, owner: u64) {
        let mut free = self.permits.free();
        // Nothing leaves early that is still to be read.
        let may = |i: &Inner| i.policy.oldest().is_none_or(|unit| !i.pending_reads.is_owed(unit));
        while free.has_room() && may(inner) && inner.policy.advance(&mut inner.actions) {
            for action in &inner.actions {
                if let CacheAction::Load(unit) = action {
                    free.take(self.longest(*unit));
                }
            }
            self.obey(inner, owner);
        }
    }

    /// The chunks of a unit are brought one after the other: what it takes at once, in bytes.
    fn longest(&self, unit: u32) -> u32 {
        self.samples.chunks(unit).iter().map(|c| c.len).max().unwrap_or(0)
    }

    /// How a sample of a unit is to be read now, when nobody remembers how it was picked.
    pub fn class_of(&self, sample: u32, owner: u64) -> DeliveryClass {
        let (unit, inner) = (self.samples.unit(sample), self.lock());
        match inner.policy.holds(unit) || inner.pending_reads.keeps(unit) {
            false => DeliveryClass::Direct,
            true if inner.by[unit as usize] == owner => DeliveryClass::Fetched,
            true => DeliveryClass::Substituted,
        }
    }

    /// Carries out the SweepPolicy's orders, in their sequence.
    fn obey(self: &Arc<Self>, inner: &mut Inner, owner: u64) {
        for action in std::mem::take(&mut inner.actions) {
            match action {
                CacheAction::Evict(unit) => {
                    inner.here[unit as usize] = AWAY;
                    self.context.counts.dropped.fetch_add(1, Relaxed);
                    if !inner.pending_reads.dropped(unit, Instant::now()) {
                        self.let_go(inner, unit);
                    }
                }
                CacheAction::Load(unit) => {
                    let u = unit as usize;
                    inner.here[u] = COMING;
                    inner.pending_reads.loaded(unit);
                    inner.load[u] = inner.load[u].wrapping_add(1);
                    inner.by[u] = owner;
                    let (sweep, number) = (Arc::clone(self), inner.load[u]);
                    self.context.tasks.spawn(async move { sweep.load(unit, number).await });
                }
            }
        }
    }

    /// Whether a sample's unit is here or on its way.
    pub fn stays(&self, sample: u32) -> bool {
        let (unit, inner) = (self.samples.unit(sample), self.lock());
        inner.here[unit as usize] != AWAY || inner.pending_reads.keeps(unit)
    }

    /// A sample that was promised from its unit was read.
    pub fn served(&self, sample: u32) {
        let unit = self.samples.unit(sample);
        let mut inner = self.lock();
        if inner.pending_reads.served(unit) {
            self.let_go(&mut inner, unit);
        }
    }

    fn let_go(&self, inner: &mut Inner, unit: u32) {
        inner.held.remove(&unit);
        inner.dropped.push_back((Instant::now(), unit));
        self.drop_unit(unit);
    }

    fn drop_unit(&self, unit: u32) {
        let Some(disk) = self.context.store.disk() else { return };
        for c in self.samples.chunks(unit) {
            disk.evict_of(&self.key(c.hash), self.keeping.number());
        }
    }

    /// Brings a unit, unless it was given up meanwhile.
    async fn load(self: Arc<Self>, unit: u32, number: u32) {
        let Some(turn) = self.permits.turn(self.longest(unit)).await else { return };
        if !self.wants(unit, number) {
            return;
        }
        let brought = self.bring(unit).await;
        let mut inner = self.lock();
        let inner = &mut *inner;
        if inner.load[unit as usize] != number || !inner.policy.holds(unit) {
            if !inner.policy.holds(unit) && !inner.pending_reads.keeps(unit) {
                self.drop_unit(unit);
            }
            return;
        }
        match brought {
            Ok(chunks) => {
                inner.here[unit as usize] = HERE;
                self.context.counts.loaded_bytes.fetch_add(self.samples.unit_map.bytes(unit), Relaxed);
                if let Some(chunks) = chunks {
                    inner.held.insert(unit, chunks);
                }
                // The way is free for the next.
                drop(turn);
                let owner = inner.by[unit as usize];
                self.ahead_of_need(inner, owner);
            }
            Err(why) => {
                tracing::debug!(unit, %why, "a unit of a sweep did not come");
                inner.here[unit as usize] = AWAY;
                self.context.counts.failed.fetch_add(1, Relaxed);
                inner.policy.lost(unit);
            }
        }
    }

    fn wants(&self, unit: u32, number: u32) -> bool {
        let inner = self.lock();
        inner.load[unit as usize] == number && inner.policy.holds(unit)
    }

    /// Housekeeping: a changed share; dropped chunks that were written after all; units that are not there.
    pub fn tick(self: &Arc<Self>, now_ns: u64) {
        self.look();
        let capacity = self.capacity();
        let mut inner = self.lock();
        let inner = &mut *inner;
        if let Some(recording) = &self.recording {
            recording.take(&mut inner.policy, &self.context.tasks);
        }
        if inner.policy.progress().subscribers > 0 {
            self.note(now_ns);
        }
        self.resize(inner, capacity);
        self.drop_again(inner, pending_reads::WITHIN);
    }

    fn drop_again(&self, inner: &mut Inner, owed_within: Duration) {
        while let Some(unit) = inner.pending_reads.overdue(Instant::now(), owed_within) {
            self.let_go(inner, unit);
        }
        for _ in 0..inner.dropped.len() {
            let Some((at, unit)) = inner.dropped.pop_front() else { break };
            if inner.policy.holds(unit) {
                continue;
            }
            self.drop_unit(unit);
            if at.elapsed() < WRITTEN_WITHIN {
                inner.dropped.push_back((at, unit));
            }
        }
    }

    /// Writes what was recorded and not written. Blocking.
    pub fn end_trace(&self) {
        if let Some(recording) = &self.recording {
            recording.end(&mut self.lock().policy);
        }
    }

    /// What it looks like.
    #[must_use]
    pub fn progress(&self) -> SweepProgress {
        self.lock().policy.progress()
    }
}

impl Drop for Sweep {
    fn drop(&mut self) {
        // At most what was decided since the last look.
        self.end_trace();
        self.context.sweeps.fetch_sub(1, Relaxed);
    }
}
