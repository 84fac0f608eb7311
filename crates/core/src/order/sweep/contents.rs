//! The contents of the cache: how it is split (R1, R13), what enters and leaves window and reserve, exchanges
//! between them (R10), and what the store did otherwise (R14).

use super::{IN_RESERVE, NOT_CACHED, SweepPolicy};
use crate::residency::{CacheAction, Residency};
use std::cmp::Reverse;

/// A reserve of fewer units joins the window (R13): it would hold less than it leaves empty.
const RESERVE_UNITS_MIN: f64 = 2.0;
/// A unit of at most this many samples cannot be many of ten neighbours, however small the window is (R13).
const LONG_UNIT_SAMPLES: f64 = 5.0;
/// At most this part of the units that leave the window are exchanged with the reserve (R10). Each exchange
/// shortens the time in which the other units must be read, and in a nearly complete cache no unit would
/// leave.
const EXCHANGED_MAX: f64 = 0.1;
/// Void entries of a job's due queue that are tolerated beside as many as its valid ones.
const VOID_ENTRIES: u64 = 1024;

impl SweepPolicy {
    /// R1, R13: splits the capacity in window and reserve.
    ///
    /// A window of few long units hands out the samples of one unit after another. It is widened, and where
    /// the cache cannot hold even the least window
    /// ([`SweepParams::window_least`](super::SweepParams::window_least)), there is no window.
    pub(super) fn split(&mut self, capacity: u64) {
        let (cap, all) = (capacity as f64, self.unit_map.total_bytes() as f64);
        let mean = self.mean_unit_bytes;
        let fetched = (all - cap).max(0.0);
        let few = (self.params.window_units * mean).min(self.params.window_few * fetched);
        let long = self.mean_unit_samples > LONG_UNIT_SAMPLES;
        // Through a window of `w` bytes goes what is fetched, and as much as the window itself has.
        let least = |w: f64| {
            if long { self.params.window_least * ((fetched + w) / all).min(1.0) * mean } else { 0.0 }
        };
        let window = (self.params.window * fetched)
            .max(few)
            .max(least(self.params.window_least * mean))
            .min(self.params.window_of_cache * cap)
            .max(4.0 * mean)
            .min(cap);
        let window = if cap - window < RESERVE_UNITS_MIN * mean { cap } else { window };
        let window = if cap < all && window < self.params.window_poor * least(window) { 0.0 } else { window };
        self.capacity = capacity;
        // `capacity as f64` may have rounded up.
        self.window_max = (window as u64).min(capacity);
        self.reserve_max = capacity - self.window_max;
    }

    /// Splits another capacity, and evicts what no longer fits.
    pub(super) fn resize(&mut self, capacity: u64, actions: &mut Vec<CacheAction>) {
        let had_no_window = self.window_max == 0;
        self.split(capacity);
        while self.reserve_bytes > self.reserve_max && !self.reserve.is_empty() {
            let unit = self.reserve.get(self.draws.below(self.reserve.len() as u64));
            // A new window begins with units of the reserve.
            if had_no_window && self.window_bytes + self.unit_map.bytes(unit) <= self.window_max {
                self.leave_reserve(unit);
                self.enter_window(unit);
                self.take_for_all(unit, None, false);
            } else {
                self.evict_from_reserve(unit, actions);
            }
        }
        self.make_room(0, actions);
    }

    /// R14: puts the units that the cache holds in the reserve, then in the window, and evicts the rest.
    pub(super) fn adopt_units(&mut self, residency: &Residency, actions: &mut Vec<CacheAction>) {
        for unit in (0..self.unit_map.units()).map(|u| u32::try_from(u).unwrap_or(u32::MAX)) {
            if !residency.has(unit) || self.holds(unit) {
                continue;
            }
            let bytes = self.unit_map.bytes(unit);
            if self.fits_reserve(unit) {
                self.enter_reserve(unit);
            } else if self.window_bytes + bytes <= self.window_max {
                self.enter_window(unit);
            } else {
                actions.push(CacheAction::Evict(unit));
            }
        }
    }

    /// R14: removes a unit that the store no longer has.
    pub(super) fn forget_unit(&mut self, unit: u32) {
        match self.generation[unit as usize] {
            NOT_CACHED => {}
            IN_RESERVE => self.leave_reserve(unit),
            _ => self.leave_window(unit),
        }
    }

    /// R14: removes the units that a snapshot lacks, of those that entered at position `as_of` or before.
    pub(super) fn forget_missing(&mut self, residency: &Residency, as_of: u64) {
        let missing: Vec<u32> = self
            .window
            .iter()
            .map(|w| w.0)
            .chain(self.reserve.list().iter().copied())
            .filter(|&u| self.holds(u) && self.loaded_at[u as usize] <= as_of && !residency.has(u))
            .collect();
        missing.into_iter().for_each(|u| self.forget_unit(u));
    }

    /// R12: returns whether the window has room for `bytes` more, or would have it without a unit that no
    /// active job needs.
    pub(super) fn has_unneeded_room(&mut self, bytes: u64) -> bool {
        while let Some(&(unit, generation)) = self.window.front()
            && self.generation[unit as usize] != generation
        {
            self.window.pop_front();
        }
        let fits = self.window_bytes + bytes <= self.window_max
            && self.window_bytes + self.reserve_bytes + bytes <= self.capacity;
        fits || self.window.front().is_some_and(|&(unit, _)| {
            (0..self.subscribers.len())
                .filter(|&q| self.is_active(q))
                .all(|q| !self.subscribers[q].needs(unit))
        })
    }

    /// Returns whether the reserve has room for a unit.
    pub(super) fn fits_reserve(&self, unit: u32) -> bool {
        self.reserve_bytes + self.unit_map.bytes(unit) <= self.reserve_max
    }

    /// Loads a unit into the window, after making room for it.
    pub(super) fn load_into_window(&mut self, unit: u32, actions: &mut Vec<CacheAction>) {
        let bytes = self.unit_map.bytes(unit);
        self.make_room(bytes, actions);
        actions.push(CacheAction::Load(unit));
        self.position = self.position.saturating_add(bytes);
        self.enter_window(unit);
    }

    /// R13: loads a unit into the reserve, where there is no window for it to pass through.
    pub(super) fn load_into_reserve(&mut self, unit: u32, actions: &mut Vec<CacheAction>) {
        actions.push(CacheAction::Load(unit));
        self.position = self.position.saturating_add(self.unit_map.bytes(unit));
        self.enter_reserve(unit);
    }

    /// R1: makes room for `bytes` more in the window. The oldest units become reserve while the reserve has
    /// room, and are evicted after that.
    fn make_room(&mut self, bytes: u64, actions: &mut Vec<CacheAction>) {
        while self.window_bytes + bytes > self.window_max
            || self.window_bytes + self.reserve_bytes + bytes > self.capacity
        {
            let Some(&(unit, generation)) = self.window.front() else { return };
            if self.generation[unit as usize] != generation {
                self.window.pop_front();
                continue;
            }
            if self.fits_reserve(unit) {
                self.leave_window(unit);
                self.window.pop_front();
                self.enter_reserve(unit);
            } else {
                self.exchange_with_reserve(unit);
                if self.generation[unit as usize] == generation {
                    self.evict_from_window(unit, actions);
                }
            }
        }
    }

    fn enter_window(&mut self, unit: u32) {
        let u = unit as usize;
        self.loads = match self.loads.wrapping_add(1) {
            NOT_CACHED | IN_RESERVE => 1,
            n => n,
        };
        self.generation[u] = self.loads;
        self.loaded_at[u] = self.position;
        self.window.push_back((unit, self.loads));
        self.window_bytes += self.unit_map.bytes(unit);
    }

    /// Removes a unit from the window. The jobs' due entries for it become void.
    ///
    /// A job that reads on discards void entries when they come due. A paused job does not, and each pass of
    /// the others would add its samples again, so its void entries are removed when they are the most.
    fn leave_window(&mut self, unit: u32) {
        let u = unit as usize;
        let generation = std::mem::replace(&mut self.generation[u], NOT_CACHED);
        self.window_bytes -= self.unit_map.bytes(unit);
        for q in 0..self.subscribers.len() {
            if self.subscribers[q].needs(unit) {
                let s = &mut self.subscribers[q];
                if s.units[u].taken == generation {
                    s.backlog -= u64::from(std::mem::take(&mut s.units[u].backlog));
                }
                if s.due.len() as u64 > 2 * s.backlog + VOID_ENTRIES {
                    let (generations, left) = (&self.generation, &s.left);
                    s.due.retain(|Reverse(d)| d.is_valid(generations, left));
                }
                s.lacking.put(self.ring_index[u] as usize, true);
            }
        }
    }

    fn evict_from_window(&mut self, unit: u32, actions: &mut Vec<CacheAction>) {
        self.leave_window(unit);
        actions.push(CacheAction::Evict(unit));
    }

    fn enter_reserve(&mut self, unit: u32) {
        let u = unit as usize;
        self.generation[u] = IN_RESERVE;
        self.loaded_at[u] = self.position;
        self.reserve.insert(unit);
        self.reserve_bytes += self.unit_map.bytes(unit);
        self.reserve_indexes.put(self.ring_index[u] as usize, true);
        for s in self.subscribers.iter_mut().filter(|s| s.joined) {
            s.reserve_total += s.planned(unit);
            if s.units[u].left > 0 {
                s.reserve_units.insert(unit);
                s.reserve_left += u64::from(s.units[u].left);
                s.lacking.put(self.ring_index[u] as usize, false);
            }
        }
    }

    fn leave_reserve(&mut self, unit: u32) {
        let u = unit as usize;
        self.generation[u] = NOT_CACHED;
        self.reserve.remove(unit);
        self.reserve_bytes -= self.unit_map.bytes(unit);
        self.reserve_indexes.put(self.ring_index[u] as usize, false);
        for s in self.subscribers.iter_mut().filter(|s| s.joined) {
            s.reserve_total = s.reserve_total.saturating_sub(s.planned(unit));
            if s.units[u].left > 0 {
                s.reserve_units.remove(unit);
                s.reserve_left -= u64::from(s.units[u].left);
                s.lacking.put(self.ring_index[u] as usize, true);
            }
        }
    }

    fn evict_from_reserve(&mut self, unit: u32, actions: &mut Vec<CacheAction>) {
        self.leave_reserve(unit);
        actions.push(CacheAction::Evict(unit));
    }

    /// Returns how many jobs' plans need samples of a unit.
    fn plans_with(&self, unit: u32) -> usize {
        self.subscribers.iter().filter(|s| s.joined && s.planned(unit) > 0).count()
    }

    /// R10: exchanges the oldest unit of the window with a unit of the reserve, without a fetch.
    ///
    /// It does so if more plans need the oldest unit than the least needed of eight random reserve units, or
    /// if as many do and rotation is due.
    fn exchange_with_reserve(&mut self, oldest: u32) {
        if self.reserve.is_empty() {
            return;
        }
        let ring = (self.unit_map.units() - self.reserve.len()).max(1) as f64;
        self.rotation_due += (self.params.rotate * self.reserve.len() as f64 / ring).min(EXCHANGED_MAX);
        let mut least = None;
        for _ in 0..8 {
            let unit = self.reserve.get(self.draws.below(self.reserve.len() as u64));
            let plans = self.plans_with(unit);
            if least.is_none_or(|(q, _)| plans < q) {
                least = Some((plans, unit));
            }
        }
        let Some((planned, unit)) = least else { return };
        let mine = self.plans_with(oldest);
        if !(mine > planned || mine == planned && self.rotation_due >= 1.0) {
            return;
        }
        self.rotation_due = (self.rotation_due - 1.0).max(0.0);
        let fits = self.reserve_bytes - self.unit_map.bytes(unit) + self.unit_map.bytes(oldest)
            <= self.reserve_max
            && self.window_bytes - self.unit_map.bytes(oldest) + self.unit_map.bytes(unit) <= self.capacity;
        if !fits {
            return;
        }
        self.leave_window(oldest);
        self.leave_reserve(unit);
        self.enter_reserve(oldest);
        self.enter_window(unit);
        self.take_for_all(unit, None, false);
    }
}
