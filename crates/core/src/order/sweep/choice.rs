//! The choice of a job's next sample (R3), with the pace of the reserve (R2), loads aside (R6), reads by
//! range (R7) and loads ahead of need (R12).

use super::{Pick, ReadFrom, SubscriberId, SweepPolicy};
use crate::residency::CacheAction;
use std::cmp::Reverse;

impl SweepPolicy {
    /// R3: chooses a job's next sample. Returns `None` when its epoch has no slot left.
    pub(super) fn pick(&mut self, subscriber: SubscriberId, actions: &mut Vec<CacheAction>) -> Option<Pick> {
        let job = subscriber.0 as usize;
        if self.subscribers[job].left.count() == 0 {
            return None;
        }
        self.measure_pace(job);
        loop {
            self.discard_void_due(job);
            let soon = self.position.saturating_add(self.mean_unit_bytes as u64);
            let s = &self.subscribers[job];
            // At the last position, `u64::MAX`, the sweep stands still: all that is taken is due.
            if s.due.peek().is_some_and(|d| d.0.at < soon || soon == u64::MAX) {
                return Some(self.serve_due(job));
            }
            if s.reserve_left > 0 && self.reserve_is_next(job) {
                return Some(self.serve_reserve(job));
            }
            let Some(p) = s.lacking.next(self.pointer) else {
                return Some(if s.due.is_empty() { self.serve_reserve(job) } else { self.serve_due(job) });
            };
            let far = self.is_beyond_jump(p);
            let unit = self.ring[p];
            if far && self.window_max > 0 {
                // R6: the sweep must not pass what other jobs need.
                if s.reserve_left > 0 {
                    return Some(self.serve_reserve(job));
                }
                if s.backlog as f64 > self.samples_in(self.params.ahead, job) {
                    return Some(self.serve_due(job));
                }
            }
            if self.holds(unit) {
                if !far {
                    self.pointer = p + 1;
                }
                self.take(job, unit, self.position);
                continue;
            }
            let wanted_min = if far {
                (self.params.aside * self.active_jobs() as f64).max(self.params.wanted)
            } else {
                self.params.wanted
            };
            let large = self.unit_map.bytes(unit) > self.window_max;
            let straggler = |policy: &Self| policy.is_straggler(job, unit, wanted_min);
            if self.window_max == 0 && self.fits_reserve(unit) && !straggler(self) {
                if !far {
                    // Should the load fail, the next choice must not order the same unit again at once.
                    self.pointer = p + 1;
                }
                self.load_into_reserve(unit, actions);
                continue;
            }
            if large || straggler(self) {
                if !self.subscribers[job].due.is_empty() {
                    return Some(self.serve_due(job));
                }
                return Some(if large {
                    self.serve_too_large(job, p, far)
                } else {
                    self.serve_straggler(job, unit, wanted_min)
                });
            }
            if !far {
                self.pointer = p + 1;
                self.stir(p);
            }
            self.load_into_window(unit, actions);
            self.take_for_all(unit, Some(job), far);
        }
    }

    /// Chooses a sample of the reserve, if the job needs any.
    pub(super) fn pick_cached(
        &mut self,
        subscriber: SubscriberId,
        actions: &mut Vec<CacheAction>,
    ) -> Option<Pick> {
        let job = subscriber.0 as usize;
        if self.subscribers[job].reserve_left == 0 {
            return self.pick(subscriber, actions);
        }
        self.measure_pace(job);
        Some(self.serve_reserve(job))
    }

    /// R12: loads the next unit ahead of need, if one job is active and no active job needs the oldest unit.
    /// Returns whether it did.
    pub(super) fn load_early(&mut self, actions: &mut Vec<CacheAction>) -> bool {
        let mut active = (0..self.subscribers.len()).filter(|&q| self.is_active(q));
        let (Some(lone), None) = (active.next(), active.next()) else { return false };
        let Some(p) = self.subscribers[lone].lacking.next(self.pointer) else { return false };
        let unit = self.ring[p];
        if self.holds(unit) {
            return false;
        }
        let bytes = self.unit_map.bytes(unit);
        if bytes > self.window_max || !self.has_unneeded_room(bytes) {
            return false;
        }
        let samples = self.unit_map.samples_of(unit).len() as f64;
        if f64::from(self.subscribers[lone].units[unit as usize].left) < self.params.range * samples
            || self.subscribers[lone].backlog as f64 >= self.samples_in(self.params.early, lone)
        {
            return false;
        }
        self.pointer = p + 1;
        self.stir(p);
        self.load_into_window(unit, actions);
        self.take_for_all(unit, Some(lone), false);
        true
    }

    /// R2: returns whether the reserve's share of what a job has left is at least its share of the plan.
    ///
    /// For a lone job, samples that it has taken from the window do not count as left (R12). Its reserve then
    /// ends with the last load, and not some time later, while the link to the origin is idle.
    fn reserve_is_next(&self, job: usize) -> bool {
        let s = &self.subscribers[job];
        let (mut left, mut total) = (s.left.count(), s.total);
        if self.one_active_at_most() {
            (left, total) = (left - s.backlog, total - s.backlog_at_start);
        }
        u128::from(s.reserve_left) * u128::from(total) >= u128::from(s.reserve_total) * u128::from(left)
    }

    /// R7: returns whether jobs want too little of a unit to load it.
    ///
    /// Either the asking job wants too little, or all active jobs together want less than `wanted_min` units'
    /// worth of samples.
    fn is_straggler(&self, job: usize, unit: u32, wanted_min: f64) -> bool {
        let u = unit as usize;
        let samples = self.unit_map.samples_of(unit).len() as f64;
        if f64::from(self.subscribers[job].units[u].left) < self.params.range * samples {
            return true;
        }
        let wanted: f64 = (0..self.subscribers.len())
            .filter(|&q| self.is_active(q))
            .map(|q| f64::from(self.subscribers[q].units[u].left))
            .sum();
        wanted < wanted_min * samples
    }

    /// Removes void entries from the head of a job's due queue.
    fn discard_void_due(&mut self, job: usize) {
        let s = &mut self.subscribers[job];
        while let Some(Reverse(d)) = s.due.peek()
            && !d.is_valid(&self.generation, &s.left)
        {
            s.due.pop();
        }
    }

    /// Hands out the taken sample that is due first.
    ///
    /// # Panics
    /// When no valid entry is due. Callers discard void entries and look first.
    fn serve_due(&mut self, job: usize) -> Pick {
        let s = &mut self.subscribers[job];
        let Reverse(d) = s.due.pop().expect("something is due");
        s.backlog -= 1;
        s.units[d.unit as usize].backlog -= 1;
        self.hand_out(job, d.slot, d.unit, ReadFrom::Window)
    }

    /// Hands out a random sample of a random unit of the reserve.
    fn serve_reserve(&mut self, job: usize) -> Pick {
        let n = self.subscribers[job].reserve_units.len() as u64;
        let unit = self.subscribers[job].reserve_units.get(self.draws.below(n));
        let slot = self.random_slot(job, unit);
        let s = &mut self.subscribers[job];
        s.reserve_left -= 1;
        if s.units[unit as usize].left == 1 {
            s.reserve_units.remove(unit);
        }
        self.hand_out(job, slot, unit, ReadFrom::Reserve)
    }

    /// R7: hands out one sample by range, of `unit` or of another straggler. Reads are spread over stragglers
    /// so that the samples of one unit do not arrive in a row.
    fn serve_straggler(&mut self, job: usize, unit: u32, wanted_min: f64) -> Pick {
        let mut chosen = unit;
        for _ in 0..8 {
            let from = self.draws.below(self.ring.len() as u64) as usize;
            let Some(p) = self.subscribers[job].lacking.next(from) else { break };
            let other = self.ring[p];
            if !self.holds(other) && self.is_straggler(job, other, wanted_min) {
                chosen = other;
                break;
            }
        }
        let slot = self.random_slot(job, chosen);
        self.hand_out(job, slot, chosen, ReadFrom::Range)
    }

    /// R13: hands out one sample by range, of the units that are larger than the window. One of them is at
    /// ring index `p`.
    ///
    /// Each sample that is left is equally likely, so that without a cache the order is a plain shuffle.
    /// Where few are left, units that follow a long gap are likelier. The pointer moves as if the sweep had
    /// passed a part of the unit, so that it reaches the units that fit.
    fn serve_too_large(&mut self, job: usize, p: usize, far: bool) -> Pick {
        let unit = self.ring[p];
        if !far && self.draws.below(self.unit_map.samples_of(unit).len() as u64) == 0 {
            self.pointer = p + 1;
        }
        let slots = u64::from(self.subscribers[job].plan_units.slots());
        let suits =
            |policy: &Self, unit| !policy.holds(unit) && policy.unit_map.bytes(unit) > policy.window_max;
        for _ in 0..64 {
            let at = self.draws.below(slots);
            let slot = u32::try_from(at).unwrap_or(u32::MAX);
            let other = self.subscribers[job].plan_units.unit(slot);
            if self.subscribers[job].left.get(at) && suits(self, other) {
                return self.hand_out(job, slot, other, ReadFrom::Range);
            }
        }
        let mut chosen = unit;
        for _ in 0..8 {
            let from = self.draws.below(self.ring.len() as u64) as usize;
            let other = self.subscribers[job].lacking.next(from).map(|p| self.ring[p]);
            if let Some(other) = other.filter(|&other| suits(self, other)) {
                chosen = other;
                break;
            }
        }
        let slot = self.random_slot(job, chosen);
        self.hand_out(job, slot, chosen, ReadFrom::Range)
    }

    /// Returns a random slot of a unit, of those that the job still needs.
    fn random_slot(&mut self, job: usize, unit: u32) -> u32 {
        let s = &self.subscribers[job];
        let slots = s.plan_units.of_unit(unit);
        let k = self.draws.below(u64::from(s.units[unit as usize].left));
        let slot = s.left.nth_in(u64::from(slots.start), u64::from(slots.end), k);
        slot.and_then(|x| u32::try_from(x).ok()).expect("`left` counts the slots left")
    }

    fn hand_out(&mut self, job: usize, slot: u32, unit: u32, read_from: ReadFrom) -> Pick {
        let s = &mut self.subscribers[job];
        assert!(s.left.clear(u64::from(slot)), "slot {slot} handed out twice");
        s.units[unit as usize].left -= 1;
        if read_from != ReadFrom::Range {
            s.drawn += 1;
        }
        if s.units[unit as usize].left == 0 || s.units[unit as usize].backlog == 0 {
            self.update_lacking(job, unit);
        }
        Pick { slot, unit, read_from, pass: 0 }
    }
}
