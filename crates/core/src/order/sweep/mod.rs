//! The sweep policy: chooses each job's next sample and the units that the cache holds (`docs/SWEEP.md`).
//!
//! The algorithm's own name is *Flywheel*. `docs/SWEEP.md` explains it and numbers its rules R1 to R15;
//! comments here quote these numbers. ADR 10 has the decisions and what was tried.
//!
//! One [`SweepPolicy`] serves all jobs that read one layout with the order `substitute`. It divides the cache
//! in a *window*, through which units pass in ring order, first in, first out, and a *reserve*, which stays
//! from epoch to epoch. A job gets, in this order (R3):
//! 1. a sample of the window that is *due*;
//! 2. a sample of the reserve, if the pace of the reserve allows one (R2);
//! 3. else the sweep moves on by one unit, and the choice starts again.
//!
//! The policy owns two decisions: which units *should* be cached, and which sample a job gets next. It never
//! waits, and it never assumes that a load has finished. A [`CacheAction`] is an order to the store. A pick
//! of a unit that is still on its way is a slow read, not a wrong one.
//!
//! I1. A slot is handed out at most once, until [`SweepPolicy::begin`] or [`SweepPolicy::give_back`] returns
//!     it.
//! I2. While a job's epoch has slots left, [`SweepPolicy::next`] hands one out. No job waits for another.
//! I3. Window and reserve together never exceed the capacity, in bytes.
//! I4. The sweep never jumps (R6). A job whose next unit is far away reads its reserve, then taken samples
//!     ahead of time, then loads that unit aside or reads it by range.
//! I5. The same calls give the same answers.
//!
//! Cost: O(log n) a pick; O(jobs) a load, an eviction or an exchange, beside the samples that jobs take.
//! Memory: 17 bytes a unit and job, 1 bit a slot and job, 24 bytes a taken sample, 21 bytes a unit for all.
//!
//! The methods of [`SweepPolicy`] are divided by what they decide: `choice` (the next sample), `take` (what a
//! job takes of a loaded unit), `contents` (what window and reserve hold), `ring_order` (where the sweep
//! goes), `pace` (how fast each job reads). This file has the calls that other code makes.

mod choice;
mod contents;
mod pace;
mod params;
mod pick_queue;
mod ring_order;
mod subscriber;
mod take;
pub mod trace;
mod trace_log;

pub use params::{PARAM_MAX, SweepParams};
pub use pick_queue::{DueCopies, PickQueue};
pub use trace_log::{Call, CallResult};

use crate::plan::{
    bits::{Bits, Ring},
    key::{Draws, OrderKey},
    unit_map::{PlanUnits, UnitMap},
};
use crate::residency::{CacheAction, Residency};
use std::{collections::VecDeque, sync::Arc};
use subscriber::{Due, Members, Subscriber};
use trace_log::TraceLog;

/// The units that loads ahead of need may have under way in any case, so that an origin with a delay is not
/// idle between two units of a small window.
const EARLY_UNITS: f64 = 4.0;

/// Generation of a unit that is neither in the window nor in the reserve.
const NOT_CACHED: u32 = 0;
/// Generation of a unit of the reserve.
const IN_RESERVE: u32 = u32::MAX;

/// The number of a job at a [`SweepPolicy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SubscriberId(pub u32);

/// Where a picked sample is to be read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReadFrom {
    /// From the sweep's window.
    Window,
    /// From the reserve.
    Reserve,
    /// From the origin, this sample alone. The cache keeps nothing of it.
    Range,
}

/// The sample that a job gets next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pick {
    /// Its slot in the job's plan. [`PlanUnits::entry`] gives the slot's entry.
    pub slot: u32,
    /// The unit that holds it.
    pub unit: u32,
    /// Where to read it from.
    pub read_from: ReadFrom,
    /// The pass over the plan's base: 0, or the number of the echo. The plan's entry is
    /// `pass · base + PlanUnits::entry(slot)`.
    pub pass: u32,
}

/// Sizes of a sweep and its parts, for people and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct SweepProgress {
    /// Bytes that the sweep has loaded since it began: its position.
    pub swept_bytes: u64,
    /// Bytes in the window.
    pub window_bytes: u64,
    /// Bytes that the window may have.
    pub window_bytes_max: u64,
    /// Bytes in the reserve.
    pub reserve_bytes: u64,
    /// Bytes that the reserve may have.
    pub reserve_bytes_max: u64,
    /// Jobs that have joined and not left.
    pub subscribers: u32,
}

/// The state of one layout's sweep.
#[derive(Debug, Clone)]
pub struct SweepPolicy {
    params: SweepParams,
    unit_map: Arc<UnitMap>,
    /// The mean of all units: bytes, and samples.
    mean_unit_bytes: f64,
    mean_unit_samples: f64,
    capacity: u64,
    window_max: u64,
    reserve_max: u64,
    /// Units in sweep order; the index of each unit in it; the index that the sweep visits next.
    ring: Vec<u32>,
    ring_index: Vec<u32>,
    pointer: usize,
    /// Of each unit: [`NOT_CACHED`], [`IN_RESERVE`] or the number of its load into the window.
    generation: Vec<u32>,
    /// Of each unit: the sweep's position when the unit entered the window or the reserve.
    loaded_at: Vec<u64>,
    loads: u32,
    /// Bytes loaded by the sweep, `u64::MAX` at most.
    position: u64,
    /// Units of the window with their generations, oldest first. A pair is void when the unit's generation is
    /// another one by now.
    window: VecDeque<(u32, u32)>,
    window_bytes: u64,
    reserve: Members,
    reserve_bytes: u64,
    /// Indexes of the ring whose unit is in the reserve.
    reserve_indexes: Ring,
    subscribers: Vec<Subscriber>,
    /// Exchanges that rotation owes, as a fraction of one (R10).
    rotation_due: f64,
    draws: Draws,
    /// Records every call, if a trace is wanted.
    trace_log: Option<Box<TraceLog>>,
}

impl SweepPolicy {
    /// Returns the sweep of an empty cache of `capacity` bytes over the units of `unit_map`.
    #[must_use]
    pub fn new(unit_map: Arc<UnitMap>, capacity: u64, key: &OrderKey, params: SweepParams) -> Self {
        let units = unit_map.units();
        let mut draws = key.draws("flywheel", 0);
        let mut ring: Vec<u32> = (0..u32::try_from(units).unwrap_or(u32::MAX)).collect();
        for i in (1..units).rev() {
            let q = draws.below(i as u64 + 1) as usize;
            ring.swap(i, q);
        }
        let mut ring_index = vec![0; units];
        for (index, &unit) in (0u32..).zip(&ring) {
            ring_index[unit as usize] = index;
        }
        let n = units.max(1) as f64;
        let mut policy = SweepPolicy {
            mean_unit_bytes: (unit_map.total_bytes() as f64 / n).max(1.0),
            mean_unit_samples: (unit_map.samples() as f64 / n).max(f64::MIN_POSITIVE),
            params,
            capacity: 0,
            window_max: 0,
            reserve_max: 0,
            ring,
            ring_index,
            pointer: 0,
            generation: vec![NOT_CACHED; units],
            loaded_at: vec![0; units],
            loads: 0,
            position: 0,
            window: VecDeque::new(),
            window_bytes: 0,
            reserve: Members::new(units),
            reserve_bytes: 0,
            reserve_indexes: Ring::new(units),
            subscribers: Vec::new(),
            rotation_due: 0.0,
            draws,
            unit_map,
            trace_log: None,
        };
        policy.split(capacity);
        policy
    }

    /// Changes the capacity. Evicts random units of the reserve, then the oldest units of the window, until
    /// the rest fits.
    pub fn set_capacity(&mut self, capacity: u64, actions: &mut Vec<CacheAction>) {
        let from = actions.len();
        self.resize(capacity, actions);
        self.record(|| Call::Capacity { bytes: capacity }, || CallResult::actions(&actions[from..]));
    }

    /// Adopts the units that the cache already holds, after a restart (R14). They fill the reserve first,
    /// then the window. The policy evicts what exceeds both.
    pub fn adopt(&mut self, residency: &Residency, actions: &mut Vec<CacheAction>) {
        let from = actions.len();
        self.adopt_units(residency, actions);
        self.record(
            || Call::Adopt { residency: residency.clone() },
            || CallResult::actions(&actions[from..]),
        );
    }

    /// Adds a job. Its epoch starts with [`SweepPolicy::begin`].
    ///
    /// # Panics
    /// When 2^32 jobs have joined already.
    pub fn join(&mut self, plan_units: PlanUnits) -> SubscriberId {
        let kept = self.trace_log.is_some().then(|| plan_units.clone());
        let subscriber = self.add_subscriber(plan_units);
        if let Some(plan_units) = kept {
            self.record(
                || Call::Join { plan_units },
                || CallResult { subscriber: Some(subscriber), ..CallResult::default() },
            );
        }
        subscriber
    }

    /// Removes a job. From now on it protects no unit and counts in no decision.
    pub fn leave(&mut self, subscriber: SubscriberId) {
        self.remove_subscriber(subscriber);
        self.record(|| Call::Leave { subscriber }, CallResult::default);
    }

    /// Starts or resumes an epoch of a job: `left` are the slots still to be handed out.
    ///
    /// # Panics
    /// When `left` has another length than the plan has slots.
    pub fn begin(&mut self, subscriber: SubscriberId, left: Bits) {
        let kept = self.trace_log.is_some().then(|| left.clone());
        self.begin_epoch(subscriber, left);
        if let Some(left) = kept {
            self.record(|| Call::Begin { subscriber, left }, CallResult::default);
        }
    }

    /// Returns a job's next sample and appends the orders to the store that come with it. Returns `None` when
    /// its epoch has no slot left.
    pub fn next(&mut self, subscriber: SubscriberId, actions: &mut Vec<CacheAction>) -> Option<Pick> {
        let from = actions.len();
        let pick = self.pick(subscriber, actions);
        self.record(
            || Call::Next { subscriber },
            || CallResult { pick, ..CallResult::actions(&actions[from..]) },
        );
        pick
    }

    /// Returns a sample of the reserve, as long as the job needs any, and else what [`SweepPolicy::next`]
    /// returns.
    ///
    /// For a probe of what the job does when it waits for no origin. R2 lets the job read less of the reserve
    /// afterwards, until both parts of its epoch are even again.
    pub fn next_cached(&mut self, subscriber: SubscriberId, actions: &mut Vec<CacheAction>) -> Option<Pick> {
        let from = actions.len();
        let pick = self.pick_cached(subscriber, actions);
        self.record(
            || Call::NextCached { subscriber },
            || CallResult { pick, ..CallResult::actions(&actions[from..]) },
        );
        pick
    }

    /// Loads one unit ahead of need, for a lone job while the link to the origin is idle (R12).
    ///
    /// Returns whether the sweep moved. A lone job pays for the same bytes, only sooner. Several jobs would
    /// fall out of step (ADR 10). Loads for an epoch that has not begun would displace units that the current
    /// epoch wants as much.
    pub fn advance(&mut self, actions: &mut Vec<CacheAction>) -> bool {
        let from = actions.len();
        let moved = self.load_early(actions);
        self.record(|| Call::Advance, || CallResult { moved, ..CallResult::actions(&actions[from..]) });
        moved
    }

    /// Returns the most bytes that loads ahead of need should have under way.
    ///
    /// A sample comes due when as many bytes were ordered after its unit (R12). With no more under way, its
    /// unit is there by then, on a link that all of them share. Four units are always allowed.
    #[must_use]
    pub fn early_bytes_max(&self) -> u64 {
        (self.params.lead * self.window_max as f64).max(EARLY_UNITS * self.mean_unit_bytes) as u64
    }

    /// Takes back a slot that was handed out and not read, because its lease expired. The slot is due at
    /// once.
    ///
    /// # Panics
    /// When the slot was not handed out.
    pub fn give_back(&mut self, subscriber: SubscriberId, slot: u32) {
        self.return_slot(subscriber, slot);
        self.record(|| Call::GiveBack { subscriber, slot }, CallResult::default);
    }

    /// Notes that a unit is not cached after all: the cache lost it, or its load failed (R14). No sample is
    /// handed out twice or lost by this.
    pub fn lost(&mut self, unit: u32) {
        self.forget_unit(unit);
        self.record(|| Call::Lost { unit }, CallResult::default);
    }

    /// Reduces the capacity by the size of a unit that the store had no room for (R14).
    ///
    /// The reduction holds until the next [`SweepPolicy::set_capacity`]. `actions` gets the units to evict.
    /// Returns whether the policy still holds the unit, so that its load may be tried again. Nothing changes
    /// when the unit is no longer wanted, or when half of `granted` is already given up: a store that refuses
    /// more has another trouble than lack of room.
    pub fn give_way(&mut self, unit: u32, granted: u64, actions: &mut Vec<CacheAction>) -> bool {
        let less = self.capacity.checked_sub(self.unit_map.bytes(unit)).filter(|&less| less >= granted / 2);
        let Some(less) = less.filter(|_| self.holds(unit)) else { return false };
        self.set_capacity(less, actions);
        self.holds(unit)
    }

    /// Notes as lost each unit that a snapshot of the cache lacks although the cache should have it (R14).
    ///
    /// `as_of` is [`SweepProgress::swept_bytes`] of a moment whose loads had all finished when the snapshot
    /// was made. Units ordered later are left alone, so an old snapshot is harmless: it only finds less.
    pub fn reconcile(&mut self, residency: &Residency, as_of: u64) {
        self.forget_missing(residency, as_of);
        self.record(|| Call::Reconcile { residency: residency.clone(), as_of }, CallResult::default);
    }

    /// Returns how many picks may be decided ahead of a grant (R15). The units of more picks could leave the
    /// window first.
    #[must_use]
    pub fn ahead_max(&self, subscriber: SubscriberId) -> usize {
        self.samples_in(self.params.ahead, subscriber.0 as usize) as usize
    }

    /// Returns how many slots the job's epoch has left.
    #[must_use]
    pub fn left(&self, subscriber: SubscriberId) -> u64 {
        self.subscribers[subscriber.0 as usize].left.count()
    }

    /// Returns how many of the slots left are in the reserve.
    #[must_use]
    pub fn left_in_reserve(&self, subscriber: SubscriberId) -> u64 {
        self.subscribers[subscriber.0 as usize].reserve_left
    }

    /// Returns the slots that the job's epoch has left. With the plan, they are all that a restart needs.
    #[must_use]
    pub fn left_slots(&self, subscriber: SubscriberId) -> &Bits {
        &self.subscribers[subscriber.0 as usize].left
    }

    /// Returns the job's plan, sorted by unit.
    #[must_use]
    pub fn plan_units(&self, subscriber: SubscriberId) -> &PlanUnits {
        &self.subscribers[subscriber.0 as usize].plan_units
    }

    /// Returns the layout that this sweep goes through.
    #[must_use]
    pub fn unit_map(&self) -> &Arc<UnitMap> {
        &self.unit_map
    }

    /// Returns whether the policy wants the unit cached. The store may not have it yet, or no longer.
    #[must_use]
    pub fn holds(&self, unit: u32) -> bool {
        self.generation[unit as usize] != NOT_CACHED
    }

    /// Returns the unit that leaves the window next.
    #[must_use]
    pub fn oldest(&self) -> Option<u32> {
        let stays = |w: &&(u32, u32)| self.generation[w.0 as usize] == w.1;
        self.window.iter().find(stays).map(|w| w.0)
    }

    /// Returns the sizes of the sweep and its parts.
    #[must_use]
    pub fn progress(&self) -> SweepProgress {
        SweepProgress {
            swept_bytes: self.position,
            window_bytes: self.window_bytes,
            window_bytes_max: self.window_max,
            reserve_bytes: self.reserve_bytes,
            reserve_bytes_max: self.reserve_max,
            subscribers: u32::try_from(self.subscribers.iter().filter(|s| s.joined).count())
                .unwrap_or(u32::MAX),
        }
    }

    fn add_subscriber(&mut self, plan_units: PlanUnits) -> SubscriberId {
        let units = self.unit_map.units();
        let subscriber = Subscriber::new(units, plan_units, self.mean_unit_samples, self.position);
        let at = match self.subscribers.iter().position(|s| !s.joined) {
            Some(i) => {
                self.subscribers[i] = subscriber;
                i
            }
            None => {
                self.subscribers.push(subscriber);
                self.subscribers.len() - 1
            }
        };
        SubscriberId(u32::try_from(at).expect("fewer than 2^32 subscribers"))
    }

    /// Frees the memory of a job. Its number stays, for the next job that joins.
    fn remove_subscriber(&mut self, subscriber: SubscriberId) {
        let units = 0;
        let s = &mut self.subscribers[subscriber.0 as usize];
        let plan_units = s.plan_units.clone();
        *s = Subscriber::new(units, plan_units, 0.0, 0);
        s.joined = false;
    }
}

#[cfg(test)]
mod tests;
