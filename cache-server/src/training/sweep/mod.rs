//! Sweeps: one sweep serves all jobs that read a version in one layout under the order `substitute`.
//!
//! [`SweepPolicy`] decides which units should be cached and which sample a job gets (`docs/SWEEP.md`). This
//! room carries out its decisions: it fetches and evicts units, and tells the policy which units did not
//! arrive. The disk tier counts a sweep's chunks as a dataset of their own with a share of its own, so plain
//! readers of the dataset keep their share. Both are one pool: a chunk that plain readers cached becomes the
//! sweep's without a fetch, and they keep what the sweep gives up, as far as their share has room (ADR 80).
//!
//! 1. Nothing waits for the policy, and the policy waits for nothing: each action becomes a task.
//! 2. A unit that the policy believes resident and that is not costs a fetch (I5): every read goes through
//!    the store.
//! 3. (I6) The policy's capacity is the sweep's share of the disk, less a part for fetches under way (a
//!    hundredth, at most `fetch_bytes_max`). Without a disk tier it is half of the memory, which then holds
//!    the chunks. Under the cache policies `lru` and `pin` the capacity is 0.
//! 4. A sweep fetches at most `fetches_max` units and `fetch_bytes_max` bytes of chunks at once.

mod context;
mod fetch;
mod fetch_permits;
mod pending_reads;
mod recording;

use crate::data::versions::Samples;
use crate::data::versions::{Source, Sources};
use crate::tenancy::accounting::{JobCosts, NO_JOB};
pub use context::SweepContext;
use fetch_permits::FetchPermits;
use fletch_api::JobSweep;
use fletch_bounds::in_waits;
use fletch_core::{
    StoreKey,
    order::sweep::{Pick, PickQueue, ReadFrom, SubscriberId, SweepParams, SweepPolicy, SweepProgress},
    plan::{Bits, OrderKey, PlanUnits},
    residency::{CacheAction, Residency},
};
use fletch_store::{DatasetId, Footprint, Pinned, ReaderKind, disk::Policy};
use parking_lot::{Mutex, MutexGuard};
use pending_reads::PendingReads;
pub use recording::Recorder;
use recording::Recording;
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// Most picks that a pick with a resident unit may overtake (rule R15, ADR 10).
const OVERTAKE: usize = 4;
/// Picks decided ahead of a grant (rule R15).
///
/// More would cost a slow job beside fast ones: the sweep has passed before the picks are read (1/1.3/2/4 on
/// 20 %: .409 with 32 picks, .470 with 128). The leases that a job holds hide what takes longer.
const AHEAD: usize = 32;
/// An evicted chunk may have waited for its append for as long, and is evicted once more.
const WRITTEN_WITHIN: Duration = Duration::from_secs(5);
/// How long the first job of a sweep waits for the sweep's share of the disk.
const SHARE_WITHIN: Duration = Duration::from_secs(3);

/// How a granted sample is read, and as what its bytes count (I8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveryClass {
    /// The job asked for the sample by name: a hit is an exact hit.
    Exact,
    /// The sweep chose the sample because its unit is cached; another epoch caused the fetch.
    Substituted,
    /// The sweep fetched the sample's unit for this epoch.
    Fetched,
    /// The sample is read directly: the cache keeps nothing of it.
    Direct,
}

/// A sample that the sweep picked.
#[derive(Debug, Clone, Copy)]
pub struct Picked {
    /// The entry of the plan.
    pub entry: u32,
    /// How the sample is read and counted.
    pub class: DeliveryClass,
}

/// A sweep is too small for as long before the log says so: shares change while jobs begin.
const SMALL_FOR_NS: u64 = 10_000_000_000;

const ABSENT: u8 = 0;
const FETCHING: u8 = 1;
const RESIDENT: u8 = 2;

struct Inner {
    policy: SweepPolicy,
    /// By unit: where it is, the number of its latest fetch, and the epoch that asked for that fetch.
    residence: Vec<u8>,
    fetches: Vec<u32>,
    fetched_for: Vec<u64>,
    /// The bytes of the units whose fetches have not ended.
    fetching_bytes: u64,
    /// By epoch: what its job's reads cost.
    costs: BTreeMap<u64, Weak<JobCosts>>,
    /// Pins of the chunks of resident units, where there is no disk tier: a read finds them in memory.
    held: HashMap<u32, Vec<Pinned>>,
    /// Units evicted within [`WRITTEN_WITHIN`].
    evicted: VecDeque<(Instant, u32)>,
    pending_reads: PendingReads,
    actions: Vec<CacheAction>,
    /// The sweep's share in bytes, and when the disk last kept less than that.
    capacity: u64,
    displaced_at: Option<Instant>,
    /// The unit at which the next check begins, and the disk's count of refusals at the last check.
    next_checked: usize,
    refused: u64,
}

/// The sweep over one version in one layout.
pub struct Sweep {
    /// The version's samples and units.
    pub samples: Arc<Samples>,
    /// The version in its layout.
    pub source: Arc<Source>,
    /// Sources for reads whose chunks the sweep's share keeps.
    pub kept_sources: Arc<Sources>,
    /// Sources for reads of which nothing is kept.
    pub uncached_sources: Arc<Sources>,
    context: Arc<SweepContext>,
    permits: FetchPermits,
    recording: Option<Arc<Recording>>,
    /// When the sweep became too small to share; `u64::MAX` if it is not, 0 after the warning.
    small_since_ns: AtomicU64,
    inner: Mutex<Inner>,
}

impl Sweep {
    /// Starts a sweep over a version. It adopts what the cache holds, after a short wait for its share of the
    /// disk.
    pub async fn start(
        context: &Arc<SweepContext>,
        sources: &Arc<Sources>,
        source: &Arc<Source>,
        samples: Arc<Samples>,
    ) -> Arc<Self> {
        let version = &source.version;
        let number = sources.version_ids_in(source).sweep;
        let kept_sources = sources.with_source(source, number);
        let uncached_sources = sources.with_source(source, DatasetId::UNCACHED);
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
            residence: vec![ABSENT; units],
            fetches: vec![0; units],
            fetched_for: vec![u64::MAX; units],
            fetching_bytes: 0,
            costs: BTreeMap::new(),
            held: HashMap::new(),
            evicted: VecDeque::new(),
            pending_reads: PendingReads::new(units),
            actions: Vec::new(),
            capacity: 0,
            displaced_at: None,
            next_checked: 0,
            refused: 0,
        };
        let sweep = Arc::new(Sweep {
            samples,
            source: Arc::clone(source),
            kept_sources,
            uncached_sources,
            context: Arc::clone(context),
            permits: FetchPermits::new(context.fetches_max, context.fetch_bytes_max),
            recording,
            small_since_ns: AtomicU64::new(u64::MAX),
            inner: Mutex::new(inner),
        });
        let until = Instant::now() + SHARE_WITHIN;
        sweep.note_use(0);
        while sweep.waits_for_share() && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        sweep.adopt();
        sweep
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // The policy panics only before it changes anything.
        self.inner.lock()
    }

    fn key(&self, hash: fletch_core::Hash) -> StoreKey {
        StoreKey { domain: self.kept_sources.domain.clone(), hash }
    }

    /// Tells the division of the disk that jobs use the sweep.
    pub fn note_use(&self, now_ns: u64) {
        let units = &self.samples.unit_map;
        let footprint = Footprint { bytes: units.total_bytes(), chunks: units.units() as u64 };
        let root = self.source.version.root();
        self.context.shares.note(self.kept_sources.version_ids(), root, footprint, ReaderKind::Sweep, now_ns);
    }

    fn waits_for_share(&self) -> bool {
        let Some(disk) = self.context.store.disk() else { return false };
        let fletch = disk.engine().is_some_and(|t| t.policy() == Policy::Fletch);
        fletch && disk.share_of(self.kept_sources.dataset_id()).is_none()
    }

    /// Returns what the sweep may keep now, in bytes as they occupy the disk.
    fn capacity(&self) -> u64 {
        let Some(disk) = self.context.store.disk() else {
            return self.context.memory_bytes / self.context.sweeps.load(Relaxed).max(1) as u64;
        };
        let fletch = disk.engine().is_some_and(|t| t.policy() == Policy::Fletch);
        let share = if fletch { disk.share_of(self.kept_sources.dataset_id()).unwrap_or(0) } else { 0 };
        let all = self.samples.unit_map.total_bytes();
        // The share has room for every unit: no fetch under way ever takes another unit's room.
        if share >= all { all } else { share - (share / 100).min(self.context.fetch_bytes_max) }
    }

    /// Tells the policy which units the cache holds already, whoever cached them (R14).
    fn adopt(self: &Arc<Self>) {
        let capacity = self.capacity();
        let mut inner = self.lock();
        let inner = &mut *inner;
        inner.capacity = capacity;
        inner.policy.set_capacity(capacity, &mut inner.actions);
        let units = self.samples.unit_map.units();
        self.adopt_resident(inner, capacity);
        if self.context.store.disk().is_some() {
            // Chunks of earlier sweeps: nothing else would ever evict them.
            for unit in (0..units).map(|u| u32::try_from(u).unwrap_or(u32::MAX)) {
                if !inner.policy.holds(unit) {
                    self.evict_chunks(unit);
                }
            }
        }
        self.apply_actions(inner, u64::MAX);
    }

    /// Has the policy adopt units that are on disk and that it does not hold, of `room` bytes at most.
    fn adopt_resident(&self, inner: &mut Inner, mut room: u64) {
        let units = self.samples.unit_map.units();
        let mut bits = Bits::zeros(units as u64);
        for unit in (0..units).map(|u| u32::try_from(u).unwrap_or(u32::MAX)) {
            let bytes = self.samples.unit_map.bytes(unit);
            if bytes <= room && !inner.policy.holds(unit) && self.is_on_disk(unit) {
                bits.set(u64::from(unit));
                room -= bytes;
            }
        }
        inner.policy.adopt(&Residency::new(1, bits.clone()), &mut inner.actions);
        for u in bits.iter_in(0, bits.len()).map(|u| u32::try_from(u).unwrap_or(u32::MAX)) {
            if inner.policy.holds(u) {
                inner.residence[u as usize] = RESIDENT;
                self.use_chunks(u);
            }
        }
    }

    /// Returns whether the disk has all chunks of a unit.
    fn is_on_disk(&self, unit: u32) -> bool {
        let Some(disk) = self.context.store.disk() else { return false };
        self.samples.chunks(unit).iter().all(|c| disk.has(&self.key(c.hash), c.len))
    }

    /// Has the chunks of a unit count for the sweep's share, as far as that has room.
    fn use_chunks(&self, unit: u32) {
        let Some(disk) = self.context.store.disk() else { return };
        for c in self.samples.chunks(unit) {
            disk.use_chunk(&self.key(c.hash), self.kept_sources.dataset_id());
        }
    }

    /// Subscribes a job to the sweep.
    pub fn join(&self, plan_units: PlanUnits) -> SubscriberId {
        self.lock().policy.join(plan_units)
    }

    /// Sets the costs to which the fetches for an epoch count.
    pub fn set_costs(&self, owner: u64, costs: &Arc<JobCosts>) {
        let mut inner = self.lock();
        if !inner.costs.contains_key(&owner) {
            inner.costs.retain(|_, costs| costs.strong_count() > 0);
            inner.costs.insert(owner, Arc::downgrade(costs));
        }
    }

    /// Returns the costs to which the fetch of a unit counts: those of the job for which it is fetched.
    fn costs_of(&self, unit: u32) -> Arc<JobCosts> {
        let inner = self.lock();
        let own = inner.costs.get(&inner.fetched_for[unit as usize]).and_then(Weak::upgrade);
        own.or_else(|| inner.costs.values().find_map(Weak::upgrade)).unwrap_or_else(|| {
            let of = (&self.kept_sources.domain, &self.source.registered.tenant);
            self.context.accounts.costs.of_server(of, self.kept_sources.dataset(), NO_JOB)
        })
    }

    /// Ends a job's subscription.
    pub fn leave(&self, subscriber: SubscriberId) {
        self.lock().policy.leave(subscriber);
    }

    /// Begins an epoch of a subscriber; `left` are the plan slots that it still needs.
    pub fn begin(&self, subscriber: SubscriberId, left: Bits) {
        self.lock().policy.begin(subscriber, left);
    }

    /// Returns how many samples of the subscriber's epoch are left in the reserve.
    pub fn left_in_reserve(&self, subscriber: SubscriberId) -> u64 {
        self.lock().policy.left_in_reserve(subscriber)
    }

    /// Returns the next picks of an epoch, at most `n`.
    ///
    /// `owner` identifies the epoch; `base` is the number of entries in one pass over its plan.
    pub fn next_picks(
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
                    pending_reads.add(p.unit);
                }
            });
            self.apply_actions(inner, owner);
            let here = &inner.residence;
            let is_here = |p: &Pick| p.read_from != ReadFrom::Range && here[p.unit as usize] == RESIDENT;
            let Some(pick) = queue.next(&inner.policy, OVERTAKE, is_here) else { break };
            let counts = &self.context.counts;
            match is_here(&pick) || inner.pending_reads.is_kept(pick.unit) {
                true => &counts.picked_resident,
                false if inner.policy.left_in_reserve(subscriber) > 0 || queue.planned().any(is_here) => {
                    &counts.picked_held_back
                }
                false => &counts.picked_absent,
            }
            .fetch_add(1, Relaxed);
            let class = match pick.read_from {
                ReadFrom::Range if !inner.pending_reads.is_kept(pick.unit) => DeliveryClass::Direct,
                _ if inner.fetched_for[pick.unit as usize] == owner => DeliveryClass::Fetched,
                _ => DeliveryClass::Substituted,
            };
            let entry =
                u64::from(inner.policy.plan_units(subscriber).entry(pick.slot)) + u64::from(pick.pass) * base;
            out.push(Picked { entry: u32::try_from(entry).unwrap_or(u32::MAX), class });
        }
        self.fetch_early(inner, owner);
        out
    }

    /// Fetches ahead of need for a lone job while the link to the origin is idle (rule R12).
    fn fetch_early(self: &Arc<Self>, inner: &mut Inner, owner: u64) {
        let mut free = self.permits.free();
        // A unit with pending reads does not leave early.
        let may = |i: &Inner| i.policy.oldest().is_none_or(|unit| !i.pending_reads.has_reads(unit));
        let most = inner.policy.early_bytes_max();
        while free.has_room()
            && inner.fetching_bytes < most
            && may(inner)
            && inner.policy.advance(&mut inner.actions)
        {
            for action in &inner.actions {
                if let CacheAction::Load(unit) = action {
                    free.take(self.longest_chunk(*unit));
                }
            }
            self.apply_actions(inner, owner);
        }
    }

    /// Returns the length of a unit's longest chunk: chunks of one unit are fetched one after the other.
    fn longest_chunk(&self, unit: u32) -> u32 {
        self.samples.chunks(unit).iter().map(|c| c.len).max().unwrap_or(0)
    }

    /// Returns how a sample is read now, for a grant whose class was lost in a restart.
    pub fn class_of(&self, sample: u32, owner: u64) -> DeliveryClass {
        let (unit, inner) = (self.samples.unit(sample), self.lock());
        match inner.policy.holds(unit) || inner.pending_reads.is_kept(unit) {
            false => DeliveryClass::Direct,
            true if inner.fetched_for[unit as usize] == owner => DeliveryClass::Fetched,
            true => DeliveryClass::Substituted,
        }
    }

    /// Carries out the policy's actions in sequence.
    fn apply_actions(self: &Arc<Self>, inner: &mut Inner, owner: u64) {
        for action in std::mem::take(&mut inner.actions) {
            match action {
                CacheAction::Evict(unit) => {
                    inner.residence[unit as usize] = ABSENT;
                    self.context.counts.evicted.fetch_add(1, Relaxed);
                    if !inner.pending_reads.on_evict(unit, Instant::now()) {
                        self.evict(inner, unit);
                    }
                }
                CacheAction::Load(unit) => {
                    let u = unit as usize;
                    inner.pending_reads.reset(unit);
                    inner.fetches[u] = inner.fetches[u].wrapping_add(1);
                    if self.is_on_disk(unit) {
                        // No epoch made the server fetch it.
                        (inner.residence[u], inner.fetched_for[u]) = (RESIDENT, u64::MAX);
                        self.use_chunks(unit);
                        continue;
                    }
                    (inner.residence[u], inner.fetched_for[u]) = (FETCHING, owner);
                    inner.fetching_bytes += self.samples.unit_map.bytes(unit);
                    let (sweep, number) = (Arc::clone(self), inner.fetches[u]);
                    let waits = self.context.watch.waits_in_background();
                    let fetch = in_waits(waits, async move { sweep.fetch(unit, number).await });
                    self.context.tasks.spawn(fetch);
                }
            }
        }
    }

    /// Returns whether a sample's unit is resident or being fetched.
    pub fn stays(&self, sample: u32) -> bool {
        let (unit, inner) = (self.samples.unit(sample), self.lock());
        inner.residence[unit as usize] != ABSENT || inner.pending_reads.is_kept(unit)
    }

    /// Records that a granted sample was read, and evicts its unit if that was the last reason to keep it.
    pub fn served(&self, sample: u32) {
        let unit = self.samples.unit(sample);
        let mut inner = self.lock();
        if inner.pending_reads.finish(unit) {
            self.evict(&mut inner, unit);
        }
    }

    fn evict(&self, inner: &mut Inner, unit: u32) {
        inner.held.remove(&unit);
        inner.evicted.push_back((Instant::now(), unit));
        self.evict_chunks(unit);
    }

    fn evict_chunks(&self, unit: u32) {
        let Some(disk) = self.context.store.disk() else { return };
        for c in self.samples.chunks(unit) {
            disk.evict_of(&self.key(c.hash), self.kept_sources.dataset_id());
        }
    }

    /// Fetches a unit, unless the policy gave it up in the meantime, and then more units ahead of need.
    async fn fetch(self: Arc<Self>, unit: u32, number: u32) {
        let owner = self.bring(unit, number).await;
        let mut inner = self.lock();
        let inner = &mut *inner;
        inner.fetching_bytes -= self.samples.unit_map.bytes(unit);
        if let Some(owner) = owner {
            self.fetch_early(inner, owner);
        }
    }

    /// Fetches a unit. Returns the epoch that asked for it, if the cache has it now.
    async fn bring(self: &Arc<Self>, unit: u32, number: u32) -> Option<u64> {
        let _permit = self.permits.acquire(self.longest_chunk(unit)).await?;
        if !self.is_wanted(unit, number) {
            return None;
        }
        let brought = self.fetch_unit(unit).await;
        let mut inner = self.lock();
        let inner = &mut *inner;
        if inner.fetches[unit as usize] != number || !inner.policy.holds(unit) {
            if !inner.policy.holds(unit) && !inner.pending_reads.is_kept(unit) {
                self.evict_chunks(unit);
            }
            return None;
        }
        match brought {
            Ok(chunks) => {
                inner.residence[unit as usize] = RESIDENT;
                self.context.counts.loaded_bytes.fetch_add(self.samples.unit_map.bytes(unit), Relaxed);
                if let Some(chunks) = chunks {
                    inner.held.insert(unit, chunks);
                }
                Some(inner.fetched_for[unit as usize])
            }
            Err(why) => {
                tracing::debug!(unit, %why, "the fetch of a sweep's unit failed");
                inner.residence[unit as usize] = ABSENT;
                self.context.counts.failed.fetch_add(1, Relaxed);
                inner.policy.lost(unit);
                None
            }
        }
    }

    fn is_wanted(&self, unit: u32, number: u32) -> bool {
        let inner = self.lock();
        inner.fetches[unit as usize] == number && inner.policy.holds(unit)
    }

    /// Follows a changed share, evicts chunks that were appended late, and looks for units that vanished.
    pub fn tick(self: &Arc<Self>, now_ns: u64) {
        self.check_resident();
        let capacity = self.capacity();
        let mut guard = self.lock();
        let inner = &mut *guard;
        if let Some(recording) = &self.recording {
            recording.take(&mut inner.policy, &self.context.tasks);
        }
        if inner.policy.progress().subscribers > 0 {
            self.note_use(now_ns);
        }
        self.resize(inner, capacity);
        self.evict_overdue(inner, pending_reads::WITHIN);
        let in_use = inner.policy.progress().subscribers > 0;
        drop(guard);
        if in_use {
            self.warn_if_small(now_ns);
        }
    }

    fn evict_overdue(&self, inner: &mut Inner, within: Duration) {
        while let Some(unit) = inner.pending_reads.overdue(Instant::now(), within) {
            self.evict(inner, unit);
        }
        for _ in 0..inner.evicted.len() {
            let Some((at, unit)) = inner.evicted.pop_front() else { break };
            if inner.policy.holds(unit) {
                continue;
            }
            self.evict_chunks(unit);
            if at.elapsed() < WRITTEN_WITHIN {
                inner.evicted.push_back((at, unit));
            }
        }
    }

    /// Writes the recorded calls that are not in the trace file yet. Blocking.
    pub fn end_trace(&self) {
        if let Some(recording) = &self.recording {
            recording.end(&mut self.lock().policy);
        }
    }

    /// Returns how much the sweep can hold. `None` while the disk has no share for it: by its policy, or
    /// because no share was decided yet.
    #[must_use]
    pub fn size(&self) -> Option<JobSweep> {
        if let Some(disk) = self.context.store.disk() {
            disk.share_of(self.kept_sources.dataset_id())?;
            disk.engine().filter(|engine| engine.policy() == Policy::Fletch)?;
        }
        let (units, total) = (self.samples.unit_map.units() as u64, self.samples.unit_map.total_bytes());
        let (capacity_bytes, unit_bytes) = (self.lock().capacity, total.checked_div(units).unwrap_or(0));
        Some(JobSweep { capacity_bytes, total_bytes: total, unit_bytes })
    }

    /// Warns of a sweep that was too small to share for [`SMALL_FOR_NS`], once until it has grown.
    fn warn_if_small(&self, now_ns: u64) {
        let Some(why) = self.size().and_then(|size| size.warning()) else {
            self.small_since_ns.store(u64::MAX, Relaxed);
            return;
        };
        let since = self.small_since_ns.fetch_min(now_ns, Relaxed);
        if since > 0 && now_ns.saturating_sub(since) >= SMALL_FOR_NS {
            // A time that is never reached again: the warning was given.
            self.small_since_ns.store(0, Relaxed);
            let (dataset, root) = (self.kept_sources.dataset(), self.source.version.root());
            tracing::warn!(%dataset, %root, "{why}");
        }
    }

    /// Returns the sweep's numbers for metrics.
    #[must_use]
    pub fn progress(&self) -> SweepProgress {
        self.lock().policy.progress()
    }
}

impl Drop for Sweep {
    fn drop(&mut self) {
        // The trace lacks at most the calls since the last tick.
        self.end_trace();
        self.context.sweeps.fetch_sub(1, Relaxed);
    }
}
