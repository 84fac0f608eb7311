//! **SweepPolicy**: a pinned reserve beside one shared sweep (DESIGN §7; ADR 10 has the rules, the
//! figures, and what was tried).
//!
//! One `SweepPolicy` serves all jobs of one dataset in one layout. The cache is split in a
//! *window*, through which a shared *sweep* moves units in ring order, first in first out, and
//! a *reserve* that is kept between epochs. A job gets, in this order:
//! 1. a sample that the sweep has made *due*;
//! 2. a reserve sample, while the reserve's share of what it has left is at least the reserve's
//!    share of its plan (so the fastest job mixes both evenly, and a slower one keeps its
//!    reserve for the time when it would otherwise have to leave the sweep);
//! 3. else it moves the sweep by one unit.
//!
//! It owns which units *should* be here and which sample comes next; it never waits, and never
//! assumes that a load has finished: [`CacheAction`]s are orders to the store, and a pick of a unit that
//! is still on its way is a slow read, not a wrong one.
//!
//! I1. A slot is handed out at most once between two `begin`s or a [`SweepPolicy::give_back`].
//! I2. As long as a job's epoch has slots left, [`SweepPolicy::next`] hands one out: nobody waits
//!     for another job.
//! I3. Units in window and reserve together never exceed the capacity, in bytes.
//! I4. The sweep never jumps: a job whose next unit is far reads its reserve, then ahead of
//!     time, then aside (by range, or a load that does not move the sweep).
//! I5. The same calls give the same answers.
//!
//! Cost: O(log) a pick; O(jobs) a load, an eviction or an exchange, beside the picks they set up.
//! Memory: 17 bytes a unit and job, a bit a slot and job, 24 bytes a backlog sample, 21 bytes a
//! unit shared.

mod calls;
mod moves;
mod params;
mod pick_queue;
mod progress;
mod subscriber;
pub mod trace;
mod trace_log;

pub use params::SweepParams;
pub use pick_queue::{DueCopies, PickQueue};
pub use progress::SweepProgress;
pub use trace_log::{Call, CallResult};

use crate::plan::{
    bits::{Bits, Ring},
    key::{Draws, OrderKey},
    unit_map::{PlanUnits, UnitMap},
};
use crate::residency::{CacheAction, Residency};
use std::{cmp::Reverse, collections::VecDeque, sync::Arc};
use subscriber::{Due, Members, Subscriber};
use trace_log::TraceLog;

/// Generation of a unit that is not here.
const AWAY: u32 = 0;
/// Generation of a unit of the reserve.
const RESERVE: u32 = u32::MAX;
/// A reserve of fewer units is none: the window has them.
const RESERVE_UNITS_MIN: f64 = 2.0;
/// Units of fewer samples cannot be many of ten neighbours, however few of them are read at once.
const LONG_UNIT_SAMPLES: f64 = 5.0;

/// A job's place at a [`SweepPolicy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SubscriberId(pub u32);

/// How a picked sample is to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReadFrom {
    /// From the sweep's window.
    Window,
    /// From the reserve.
    Reserve,
    /// Alone, from the origin; nothing is kept.
    Range,
}

/// The sample a job gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pick {
    /// Its slot in the job's plan ([`PlanUnits::entry`] says which entry that is).
    pub slot: u32,
    /// The unit that holds it.
    pub unit: u32,
    /// How to read it.
    pub read_from: ReadFrom,
    /// Which pass over the plan's base: 0, or the number of the echo. The plan's entry is
    /// `pass · base + PlanUnits::entry(slot)`.
    pub pass: u32,
}

/// The state of one dataset's sweep.
#[derive(Debug, Clone)]
pub struct SweepPolicy {
    params: SweepParams,
    unit_map: Arc<UnitMap>,
    /// Bytes of a mean unit, and samples in it.
    mean: f64,
    mean_samples: f64,
    capacity: u64,
    window_max: u64,
    reserve_max: u64,
    /// Units in sweep order, the place of each, and the next place.
    ring: Vec<u32>,
    place: Vec<u32>,
    pointer: usize,
    /// Of each unit: [`AWAY`], [`RESERVE`] or the number of its load; the sweep's position then.
    generation: Vec<u32>,
    loaded_at: Vec<u64>,
    loads: u32,
    /// Bytes loaded by the sweep, `u64::MAX` at most.
    position: u64,
    /// Units of the window, oldest first; a pair is void when the unit's generation differs.
    window: VecDeque<(u32, u32)>,
    window_bytes: u64,
    reserve: Members,
    reserve_bytes: u64,
    /// Places of the ring whose unit is in the reserve.
    solid: Ring,
    subscribers: Vec<Subscriber>,
    turn: f64,
    draws: Draws,
    /// Where calls are told, if anywhere.
    trace_log: Option<Box<TraceLog>>,
}

impl SweepPolicy {
    /// An empty cache of `capacity` bytes for the units of `shape`.
    #[must_use]
    pub fn new(unit_map: Arc<UnitMap>, capacity: u64, key: &OrderKey, params: SweepParams) -> Self {
        let units = unit_map.units();
        let mut draws = key.draws("flywheel", 0);
        let mut ring: Vec<u32> = (0..u32::try_from(units).unwrap_or(u32::MAX)).collect();
        for i in (1..units).rev() {
            let q = draws.below(i as u64 + 1) as usize;
            ring.swap(i, q);
        }
        let mut place = vec![0; units];
        for (p, &u) in (0u32..).zip(&ring) {
            place[u as usize] = p;
        }
        let n = units.max(1) as f64;
        let mut policy = SweepPolicy {
            mean: (unit_map.total_bytes() as f64 / n).max(1.0),
            mean_samples: (unit_map.samples() as f64 / n).max(f64::MIN_POSITIVE),
            params,
            capacity: 0,
            window_max: 0,
            reserve_max: 0,
            ring,
            place,
            pointer: 0,
            generation: vec![AWAY; units],
            loaded_at: vec![0; units],
            loads: 0,
            position: 0,
            window: VecDeque::new(),
            window_bytes: 0,
            reserve: Members::new(units),
            reserve_bytes: 0,
            solid: Ring::new(units),
            subscribers: Vec::new(),
            turn: 0.0,
            draws,
            unit_map,
            trace_log: None,
        };
        policy.split(capacity);
        policy
    }

    /// Rule 1: how the capacity is split. A window of few long units hands their samples out one after the other: it is
    /// widened, and where the cache does not hold even that, there is none ([`SweepParams::window_least`]).
    fn split(&mut self, capacity: u64) {
        let (cap, all) = (capacity as f64, self.unit_map.total_bytes() as f64);
        let fetched = (all - cap).max(0.0);
        let few = (self.params.window_units * self.mean).min(self.params.window_few * fetched);
        let long = self.mean_samples > LONG_UNIT_SAMPLES;
        // What goes through a window of `w` bytes is what is fetched, and as much as the window itself has.
        let least = |w: f64| {
            if long { self.params.window_least * ((fetched + w) / all).min(1.0) * self.mean } else { 0.0 }
        };
        let window = (self.params.window * fetched)
            .max(few)
            .max(least(self.params.window_least * self.mean))
            .min(self.params.window_of_cache * cap)
            .max(4.0 * self.mean)
            .min(cap);
        // So short a reserve holds less than it leaves empty.
        let window = if cap - window < RESERVE_UNITS_MIN * self.mean { cap } else { window };
        let window = if cap < all && window < self.params.window_poor * least(window) { 0.0 } else { window };
        self.capacity = capacity;
        // The capacity may have been rounded up.
        self.window_max = (window as u64).min(capacity);
        self.reserve_max = capacity - self.window_max;
    }

    fn resize(&mut self, capacity: u64, actions: &mut Vec<CacheAction>) {
        let begins = self.window_max == 0;
        self.split(capacity);
        while self.reserve_bytes > self.reserve_max && !self.reserve.is_empty() {
            let unit = self.reserve.get(self.draws.below(self.reserve.len() as u64));
            // A window that begins begins with what is here.
            if begins && self.window_bytes + self.unit_map.bytes(unit) <= self.window_max {
                self.leave_reserve(unit);
                self.enter_window(unit);
                self.offer(unit, None, false);
            } else {
                self.drop_reserve(unit, actions);
            }
        }
        self.make_room(0, actions);
    }

    fn take_over(&mut self, residency: &Residency, actions: &mut Vec<CacheAction>) {
        for unit in (0..self.unit_map.units()).map(|u| u32::try_from(u).unwrap_or(u32::MAX)) {
            if !residency.has(unit) || self.generation[unit as usize] != AWAY {
                continue;
            }
            let bytes = self.unit_map.bytes(unit);
            if self.reserve_bytes + bytes <= self.reserve_max {
                self.enter_reserve(unit);
            } else if self.window_bytes + bytes <= self.window_max {
                self.enter_window(unit);
            } else {
                actions.push(CacheAction::Evict(unit));
            }
        }
    }

    fn sit(&mut self, plan_units: PlanUnits) -> SubscriberId {
        let subscriber = Subscriber::new(self.unit_map.units(), plan_units, self.mean_samples, self.position);
        let at = match self.subscribers.iter().position(|s| !s.on) {
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

    fn rise(&mut self, subscriber: SubscriberId) {
        let units = 0;
        let s = &mut self.subscribers[subscriber.0 as usize];
        // Keeps the slot, frees the memory.
        let plan_units = s.plan_units.clone();
        *s = Subscriber::new(units, plan_units, 0.0, 0);
        s.on = false;
    }

    fn start(&mut self, subscriber: SubscriberId, left: Bits) {
        let j = subscriber.0 as usize;
        let (units, alone) = (self.unit_map.units(), self.alone());
        if alone {
            self.shuffle_ring();
        }
        let s = &mut self.subscribers[j];
        assert_eq!(left.len(), s.left.len(), "slots of the plan");
        s.total = left.count();
        s.left = left;
        s.last = self.position;
        s.due.clear();
        s.backlog = 0;
        s.pins.clear();
        (s.pin_left, s.pin_all) = (0, 0);
        s.books.iter_mut().for_each(|b| b.held = 0);
        for u in 0..units {
            let unit = u32::try_from(u).unwrap_or(u32::MAX);
            let slots = s.plan_units.of_unit(unit);
            let rem = s.left.count_in(u64::from(slots.start), u64::from(slots.end));
            s.books[u].rem = u32::try_from(rem).unwrap_or(u32::MAX);
            let pinned = self.generation[u] == RESERVE;
            if pinned && rem > 0 {
                s.pins.insert(unit);
                s.pin_left += rem;
                s.pin_all += rem;
            }
            s.lack.put(self.place[u] as usize, rem > 0 && !pinned);
        }
        // Rule 5: the young part of the window.
        let young = (self.params.young * self.window_max as f64) as u64;
        for i in (0..self.window.len()).rev() {
            let (unit, generation) = self.window[i];
            let u = unit as usize;
            if self.generation[u] == generation
                && self.subscribers[j].books[u].rem > 0
                && (alone || self.loaded_at[u].saturating_add(young) > self.position)
            {
                self.take(j, unit, self.loaded_at[u]);
            }
        }
        self.subscribers[j].carried = self.subscribers[j].backlog;
    }

    /// So many picks may be decided ahead of service without risking that their units leave the
    /// window first.
    #[must_use]
    pub fn ahead_max(&self, subscriber: SubscriberId) -> usize {
        self.samples_of(self.params.ahead, subscriber.0 as usize) as usize
    }

    /// How many slots the job's epoch has left.
    #[must_use]
    pub fn left(&self, subscriber: SubscriberId) -> u64 {
        self.subscribers[subscriber.0 as usize].left.count()
    }

    /// How many of them lie in the reserve: here, and kept for later.
    #[must_use]
    pub fn left_in_reserve(&self, subscriber: SubscriberId) -> u64 {
        self.subscribers[subscriber.0 as usize].pin_left
    }

    /// The slots the job's epoch has left: with the plan, all there is to resume from.
    #[must_use]
    pub fn left_slots(&self, subscriber: SubscriberId) -> &Bits {
        &self.subscribers[subscriber.0 as usize].left
    }

    /// The job's plan as laid over the layout.
    #[must_use]
    pub fn plan_units(&self, subscriber: SubscriberId) -> &PlanUnits {
        &self.subscribers[subscriber.0 as usize].plan_units
    }

    /// The layout it sweeps.
    #[must_use]
    pub fn unit_map(&self) -> &Arc<UnitMap> {
        &self.unit_map
    }

    /// Whether the unit should be here, as far as this policy ordered.
    #[must_use]
    pub fn holds(&self, unit: u32) -> bool {
        self.generation[unit as usize] != AWAY
    }

    fn pick(&mut self, subscriber: SubscriberId, actions: &mut Vec<CacheAction>) -> Option<Pick> {
        let j = subscriber.0 as usize;
        if self.subscribers[j].left.count() == 0 {
            return None;
        }
        self.measure(j);
        loop {
            self.prune(j);
            // 1. What the sweep has made due.
            let soon = self.position.saturating_add(self.mean as u64);
            let s = &self.subscribers[j];
            // The last position there is stays where it is: then nothing comes later.
            if s.due.peek().is_some_and(|d| d.0.at < soon || soon == u64::MAX) {
                return Some(self.serve_due(j));
            }
            // 2. The reserve, as long as its share of what is left is not below its share of the plan.
            if s.pin_left > 0 && self.reserve_is_next(j) {
                return Some(self.serve_reserve(j));
            }
            // 3. Move the sweep.
            let Some(p) = s.lack.next(self.pointer) else {
                return Some(if s.due.is_empty() { self.serve_reserve(j) } else { self.serve_due(j) });
            };
            let far = self.is_far(p);
            let unit = self.ring[p];
            if far && self.window_max > 0 {
                // ... but not past what others need.
                if s.pin_left > 0 {
                    return Some(self.serve_reserve(j));
                }
                if s.backlog as f64 > self.samples_of(self.params.ahead, j) {
                    return Some(self.serve_due(j));
                }
            }
            if self.holds(unit) {
                if !far {
                    self.pointer = p + 1;
                }
                self.take(j, unit, self.position);
                continue;
            }
            let need = if far {
                (self.params.aside * self.actives() as f64).max(self.params.wanted)
            } else {
                self.params.wanted
            };
            let large = self.unit_map.bytes(unit) > self.window_max;
            if self.window_max == 0 && self.fits_reserve(unit) && !self.little(j, unit, need) {
                if !far {
                    // Not the same again at once, should it not come.
                    self.pointer = p + 1;
                }
                self.pin(unit, actions);
                continue;
            }
            if large || self.little(j, unit, need) {
                if !self.subscribers[j].due.is_empty() {
                    return Some(self.serve_due(j));
                }
                return Some(if large { self.serve_any(j, p, far) } else { self.serve_range(j, unit, need) });
            }
            if !far {
                self.pointer = p + 1;
                self.stir(p);
            }
            self.load(unit, actions);
            self.offer(unit, Some(j), far);
        }
    }

    fn press(&mut self, actions: &mut Vec<CacheAction>) -> bool {
        let mut active = (0..self.subscribers.len()).filter(|&q| self.active(q));
        let (Some(alone), None) = (active.next(), active.next()) else { return false };
        let Some(p) = self.subscribers[alone].lack.next(self.pointer) else { return false };
        if self.holds(self.ring[p]) {
            return false;
        }
        let unit = self.ring[p];
        if self.unit_map.bytes(unit) > self.window_max || !self.oldest_is_read(self.unit_map.bytes(unit)) {
            return false;
        }
        let samples = self.unit_map.samples_of(unit).len() as f64;
        if f64::from(self.subscribers[alone].books[unit as usize].rem) < self.params.range * samples
            || self.subscribers[alone].backlog as f64 >= self.samples_of(self.params.early, alone)
        {
            return false;
        }
        self.pointer = p + 1;
        self.stir(p);
        self.load(unit, actions);
        self.offer(unit, Some(alone), false);
        true
    }

    fn put_back(&mut self, subscriber: SubscriberId, slot: u32) {
        let j = subscriber.0 as usize;
        let s = &mut self.subscribers[j];
        assert!(s.left.set(u64::from(slot)), "slot {slot} was not handed out");
        let unit = s.plan_units.unit(slot);
        let u = unit as usize;
        s.books[u].rem += 1;
        match self.generation[u] {
            AWAY => {}
            RESERVE => {
                s.pins.insert(unit);
                s.pin_left += 1;
            }
            generation => {
                if s.books[u].taken != generation {
                    s.books[u].taken = generation;
                    s.books[u].held = 0;
                }
                s.books[u].held += 1;
                s.backlog += 1;
                s.due.push(Reverse(Due { at: self.position, slot, unit, generation }));
            }
        }
        self.refresh(j, unit);
    }

    fn lose(&mut self, unit: u32) {
        match self.generation[unit as usize] {
            AWAY => {}
            RESERVE => self.drop_reserve(unit, &mut Vec::new()),
            _ => self.drop_window(unit, &mut Vec::new()),
        }
    }

    fn compare(&mut self, residency: &Residency, as_of: u64) {
        let gone: Vec<u32> = self
            .window
            .iter()
            .map(|w| w.0)
            .chain(self.reserve.list().iter().copied())
            .filter(|&u| self.holds(u) && self.loaded_at[u as usize] <= as_of && !residency.has(u))
            .collect();
        gone.into_iter().for_each(|u| self.lose(u));
    }
}

#[cfg(test)]
mod tests;
