//! One sweep for all jobs that read a version in one layout: the Flywheel, and the store that obeys it.
//!
//! The Flywheel says which units should be here; this file brings and drops them, and tells it what did not
//! come. Chunks of the sweep are a dataset of their own to the disk tier, with a share of its own, so that
//! plain readers of the dataset keep theirs.
//!
//! 1. The Flywheel is never waited for and never waits: its orders become tasks of their own.
//! 2. What it believes to be here and is not costs a fetch (I5): every read goes through the store.
//! 3. (I6) Its capacity is the sweep's share of the disk, less some for what is on its way (a hundredth, or `loads_bytes`); without a disk
//!    half of the memory, in which its chunks are then held. Under `lru` and `pin` nothing is kept for it.
//! 4. At most `loads_max` units are brought at once, and chunks of `loads_bytes`.

mod bring;
mod counts;
mod loads;
mod means;
mod owed;
mod recording;

use super::{JobError, Samples};
use crate::versions::{Source, Sources};
pub use counts::Counts;
use fletch_core::{
    StoreKey, Verified,
    order::{
        Bits, Laid, OrderKey,
        substitute::{Act, Feed, Flywheel, How, Knobs, Pick, SeatId, Standing},
    },
    residency::Residency,
};
use fletch_store::{DatasetId, ReaderKind, disk::Policy};
use loads::Loads;
pub use means::Means;
use owed::Owed;
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
pub enum Class {
    /// It was asked for by name: a hit is exact.
    Exact,
    /// It was chosen because it is here, and was not fetched for this epoch.
    Substituted,
    /// Its unit was fetched for this epoch.
    Own,
    /// It is read alone.
    Alone,
}

/// A sample that the sweep chose.
#[derive(Debug, Clone, Copy)]
pub struct Picked {
    /// The plan's entry.
    pub entry: u32,
    /// How it counts.
    pub class: Class,
}

const AWAY: u8 = 0;
const COMING: u8 = 1;
const HERE: u8 = 2;

struct Inner {
    fly: Flywheel,
    /// Of each unit: where it is, the number of its latest load, and the epoch that asked for that.
    here: Vec<u8>,
    load: Vec<u32>,
    by: Vec<u64>,
    /// Without a disk: what is held in memory.
    held: HashMap<u32, Vec<Verified>>,
    /// Dropped a moment ago.
    dropped: VecDeque<(Instant, u32)>,
    owed: Owed,
    acts: Vec<Act>,
    /// The sweep's share, and when last less than that was found to be there.
    capacity: u64,
    gave_way: Option<Instant>,
    /// Which unit is looked for next, and what the disk had refused at the last look.
    looked: usize,
    refused: u64,
}

/// See the module.
pub struct Wheel {
    /// The version as samples and units.
    pub samples: Arc<Samples>,
    /// The version in its layout.
    pub source: Arc<Source>,
    /// For reads that come to stay in the sweep's share.
    pub keeping: Arc<Sources>,
    /// For reads that pass.
    pub passing: Arc<Sources>,
    means: Arc<Means>,
    loads: Loads,
    recording: Option<Arc<Recording>>,
    inner: Mutex<Inner>,
}

impl Wheel {
    /// A sweep over a version, which takes over what the cache holds of it. Waits a moment for its share.
    pub async fn start(
        means: &Arc<Means>,
        sources: &Arc<Sources>,
        source: &Arc<Source>,
        samples: Arc<Samples>,
    ) -> Arc<Self> {
        let version = &source.version;
        let number = DatasetId::sweep_of(&sources.domain, source.dataset(), version.root(), version.layout());
        let keeping = sources.beside(source, number);
        let passing = sources.beside(source, DatasetId::UNCACHED);
        let units = samples.shape.units();
        let key = OrderKey::new(version.root(), version.layout().0, 0, 0);
        let recording = recording::of(means.recorder.as_ref(), source).await;
        let make = if recording.is_some() { Flywheel::recorded } else { Flywheel::new };
        let mut fly = make(Arc::clone(&samples.shape), 0, &key, Knobs::default());
        if let Some(recording) = &recording {
            recording.take(&mut fly, &means.tasks);
        }
        means.wheels.fetch_add(1, Relaxed);
        let inner = Inner {
            fly,
            here: vec![AWAY; units],
            load: vec![0; units],
            by: vec![u64::MAX; units],
            held: HashMap::new(),
            dropped: VecDeque::new(),
            owed: Owed::new(units),
            acts: Vec::new(),
            capacity: 0,
            gave_way: None,
            looked: 0,
            refused: 0,
        };
        let wheel = Arc::new(Wheel {
            samples,
            source: Arc::clone(source),
            keeping,
            passing,
            means: Arc::clone(means),
            loads: Loads::new(means.loads_max, means.loads_bytes),
            recording,
            inner: Mutex::new(inner),
        });
        let until = Instant::now() + SHARE_WITHIN;
        wheel.note(0);
        while wheel.awaits_share() && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        wheel.adopt();
        wheel
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // The Flywheel may panic only before it changes anything.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(&self, hash: fletch_core::Hash) -> StoreKey {
        StoreKey { domain: self.keeping.domain.clone(), hash }
    }

    /// The sweep is in use.
    pub fn note(&self, now_ns: u64) {
        let footprint = self.samples.shape.total_bytes();
        let root = self.source.version.root();
        let by = ReaderKind::SweepOver(DatasetId::of(&self.keeping.domain, self.source.dataset()));
        self.means.shares.note(self.keeping.number(), root, footprint, by, now_ns);
    }

    fn awaits_share(&self) -> bool {
        let Some(disk) = self.means.store.disk() else { return false };
        let fletch = disk.engine().is_some_and(|t| t.policy() == Policy::Fletch);
        fletch && disk.share_of(self.keeping.number()).is_none()
    }

    /// What it may keep now, in footprints.
    fn capacity(&self) -> u64 {
        let Some(disk) = self.means.store.disk() else {
            return self.means.memory_bytes / self.means.wheels.load(Relaxed).max(1) as u64;
        };
        let fletch = disk.engine().is_some_and(|t| t.policy() == Policy::Fletch);
        let share = if fletch { disk.share_of(self.keeping.number()).unwrap_or(0) } else { 0 };
        let all = self.samples.shape.total_bytes();
        // All of it fits: then nothing is ever on its way in the place of something else.
        if share >= all { all } else { share - (share / 100).min(self.means.loads_bytes) }
    }

    /// Begins with what the cache holds already.
    fn adopt(self: &Arc<Self>) {
        let units = self.samples.shape.units();
        let mut bits = Bits::zeros(units as u64);
        if self.means.store.disk().is_some() {
            for unit in (0..units).map(|u| u32::try_from(u).unwrap_or(u32::MAX)) {
                let chunks = self.samples.chunks(unit);
                if chunks.iter().all(|c| self.means.store.is_kept(&self.key(c.hash), c.len)) {
                    bits.set(u64::from(unit));
                }
            }
        }
        let capacity = self.capacity();
        let mut inner = self.lock();
        let inner = &mut *inner;
        inner.capacity = capacity;
        inner.fly.set_capacity(capacity, &mut inner.acts);
        inner.fly.adopt(&Residency::new(1, bits.clone()), &mut inner.acts);
        for u in bits.iter_in(0, bits.len()) {
            inner.here[usize::try_from(u).unwrap_or(usize::MAX)] = HERE;
        }
        self.obey(inner, u64::MAX);
    }

    /// A job sits down.
    pub fn join(&self, laid: Laid) -> SeatId {
        self.lock().fly.join(laid)
    }

    /// A job is gone.
    pub fn leave(&self, seat: SeatId) {
        self.lock().fly.leave(seat);
    }

    /// An epoch begins at a seat: `left` are its spots.
    pub fn begin(&self, seat: SeatId, left: Bits) {
        self.lock().fly.begin(seat, left);
    }

    /// The next picks of an epoch, at most `n`; `owner` names the epoch. `base` is the number of
    /// entries of one pass of its plan.
    pub fn draw(
        self: &Arc<Self>,
        seat: SeatId,
        feed: &mut Feed,
        n: u32,
        owner: u64,
        base: u64,
    ) -> Vec<Picked> {
        let mut inner = self.lock();
        let inner = &mut *inner;
        let mut out = Vec::with_capacity(n as usize);
        while out.len() < n as usize {
            let owed = &mut inner.owed;
            feed.fill(&mut inner.fly, seat, AHEAD, &mut inner.acts, |p| {
                if p.how != How::Range {
                    owed.decided(p.unit);
                }
            });
            self.obey(inner, owner);
            let here = &inner.here;
            let is_here = |p: &Pick| p.how != How::Range && here[p.unit as usize] == HERE;
            let Some(pick) = feed.next(&inner.fly, OVERTAKE, is_here) else { break };
            let counts = &self.means.counts;
            match is_here(&pick) || inner.owed.keeps(pick.unit) {
                true => &counts.picked_here,
                false if inner.fly.left_in_reserve(seat) > 0 || feed.planned().any(is_here) => {
                    &counts.picked_over
                }
                false => &counts.picked_away,
            }
            .fetch_add(1, Relaxed);
            let class = match pick.how {
                How::Range if !inner.owed.keeps(pick.unit) => Class::Alone,
                _ if inner.by[pick.unit as usize] == owner => Class::Own,
                _ => Class::Substituted,
            };
            let entry = u64::from(inner.fly.laid(seat).entry(pick.spot)) + u64::from(pick.pass) * base;
            out.push(Picked { entry: u32::try_from(entry).unwrap_or(u32::MAX), class });
        }
        self.ahead_of_need(inner, owner);
        out
    }

    /// Pacing: while the way to the origin is idle, a job that is alone fetches early.
    fn ahead_of_need(self: &Arc<Self>, inner: &mut Inner, owner: u64) {
        let mut free = self.loads.free();
        // Nothing leaves early that is still to be read.
        let may = |i: &Inner| i.fly.oldest().is_none_or(|unit| !i.owed.is_owed(unit));
        while free.has_room() && may(inner) && inner.fly.advance(&mut inner.acts) {
            for act in &inner.acts {
                if let Act::Load(unit) = act {
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
    pub fn class_of(&self, sample: u32, owner: u64) -> Class {
        let (unit, inner) = (self.samples.unit(sample), self.lock());
        match inner.fly.holds(unit) || inner.owed.keeps(unit) {
            false => Class::Alone,
            true if inner.by[unit as usize] == owner => Class::Own,
            true => Class::Substituted,
        }
    }

    /// Carries out the Flywheel's orders, in their sequence.
    fn obey(self: &Arc<Self>, inner: &mut Inner, owner: u64) {
        for act in std::mem::take(&mut inner.acts) {
            match act {
                Act::Evict(unit) => {
                    inner.here[unit as usize] = AWAY;
                    self.means.counts.dropped.fetch_add(1, Relaxed);
                    if !inner.owed.dropped(unit, Instant::now()) {
                        self.let_go(inner, unit);
                    }
                }
                Act::Load(unit) => {
                    let u = unit as usize;
                    inner.here[u] = COMING;
                    inner.owed.loaded(unit);
                    inner.load[u] = inner.load[u].wrapping_add(1);
                    inner.by[u] = owner;
                    let (wheel, number) = (Arc::clone(self), inner.load[u]);
                    self.means.tasks.spawn(async move { wheel.load(unit, number).await });
                }
            }
        }
    }

    /// Whether a sample's unit is here or on its way.
    pub fn stays(&self, sample: u32) -> bool {
        let (unit, inner) = (self.samples.unit(sample), self.lock());
        inner.here[unit as usize] != AWAY || inner.owed.keeps(unit)
    }

    /// A sample that was promised from its unit was read.
    pub fn served(&self, sample: u32) {
        let unit = self.samples.unit(sample);
        let mut inner = self.lock();
        if inner.owed.served(unit) {
            self.let_go(&mut inner, unit);
        }
    }

    fn let_go(&self, inner: &mut Inner, unit: u32) {
        inner.held.remove(&unit);
        inner.dropped.push_back((Instant::now(), unit));
        self.drop_unit(unit);
    }

    fn drop_unit(&self, unit: u32) {
        let Some(disk) = self.means.store.disk() else { return };
        for c in self.samples.chunks(unit) {
            disk.evict_of(&self.key(c.hash), self.keeping.number());
        }
    }

    /// Brings a unit, unless it was given up meanwhile.
    async fn load(self: Arc<Self>, unit: u32, number: u32) {
        let Some(turn) = self.loads.turn(self.longest(unit)).await else { return };
        if !self.wants(unit, number) {
            return;
        }
        let brought = self.bring(unit).await;
        let mut inner = self.lock();
        let inner = &mut *inner;
        if inner.load[unit as usize] != number || !inner.fly.holds(unit) {
            if !inner.fly.holds(unit) && !inner.owed.keeps(unit) {
                self.drop_unit(unit);
            }
            return;
        }
        match brought {
            Ok(chunks) => {
                inner.here[unit as usize] = HERE;
                self.means.counts.loaded_bytes.fetch_add(self.samples.shape.bytes(unit), Relaxed);
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
                self.means.counts.failed.fetch_add(1, Relaxed);
                inner.fly.lost(unit);
            }
        }
    }

    fn wants(&self, unit: u32, number: u32) -> bool {
        let inner = self.lock();
        inner.load[unit as usize] == number && inner.fly.holds(unit)
    }

    /// Housekeeping: a changed share; dropped chunks that were written after all; units that are not there.
    pub fn tick(self: &Arc<Self>, now_ns: u64) {
        self.look();
        let capacity = self.capacity();
        let mut inner = self.lock();
        let inner = &mut *inner;
        if let Some(recording) = &self.recording {
            recording.take(&mut inner.fly, &self.means.tasks);
        }
        if inner.fly.standing().seats > 0 {
            self.note(now_ns);
        }
        self.resize(inner, capacity);
        self.drop_again(inner, owed::WITHIN);
    }

    fn drop_again(&self, inner: &mut Inner, owed_within: Duration) {
        while let Some(unit) = inner.owed.overdue(Instant::now(), owed_within) {
            self.let_go(inner, unit);
        }
        for _ in 0..inner.dropped.len() {
            let Some((at, unit)) = inner.dropped.pop_front() else { break };
            if inner.fly.holds(unit) {
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
            recording.end(&mut self.lock().fly);
        }
    }

    /// What it looks like.
    #[must_use]
    pub fn standing(&self) -> Standing {
        self.lock().fly.standing()
    }
}

impl Drop for Wheel {
    fn drop(&mut self) {
        // At most what was decided since the last look.
        self.end_trace();
        self.means.wheels.fetch_sub(1, Relaxed);
    }
}

/// Why a plan cannot be laid over a version.
pub fn lay(plan: &fletch_core::order::Plan, samples: &Samples) -> Result<Laid, JobError> {
    Ok(Laid::new(plan, &samples.shape)?)
}
