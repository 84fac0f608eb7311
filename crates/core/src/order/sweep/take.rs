//! What a job takes: of a unit that the sweep loads (R4, R11, R12), and when its epoch begins (R5).

use super::{Due, IN_RESERVE, NOT_CACHED, SubscriberId, SweepPolicy};
use crate::plan::bits::Bits;
use std::cmp::Reverse;

impl SweepPolicy {
    /// Starts an epoch of a job with the slots `left`: counts them by unit, and takes the young units (R5).
    pub(super) fn begin_epoch(&mut self, subscriber: SubscriberId, left: Bits) {
        let job = subscriber.0 as usize;
        let (units, lone) = (self.unit_map.units(), self.one_active_at_most());
        if lone {
            self.shuffle_ring();
        }
        let s = &mut self.subscribers[job];
        assert_eq!(left.len(), s.left.len(), "slots of the plan");
        s.total = left.count();
        s.left = left;
        s.asked_at = self.position;
        s.due.clear();
        s.backlog = 0;
        s.reserve_units.clear();
        (s.reserve_left, s.reserve_total) = (0, 0);
        s.units.iter_mut().for_each(|b| b.backlog = 0);
        for u in 0..units {
            let unit = u32::try_from(u).unwrap_or(u32::MAX);
            let slots = s.plan_units.of_unit(unit);
            let left = s.left.count_in(u64::from(slots.start), u64::from(slots.end));
            s.units[u].left = u32::try_from(left).unwrap_or(u32::MAX);
            let in_reserve = self.generation[u] == IN_RESERVE;
            if in_reserve && left > 0 {
                s.reserve_units.insert(unit);
                s.reserve_left += left;
                s.reserve_total += left;
            }
            s.lacking.put(self.ring_index[u] as usize, left > 0 && !in_reserve);
        }
        // R5: the young units of the window; a lone job takes all of them.
        let young = (self.params.young * self.window_max as f64) as u64;
        for i in (0..self.window.len()).rev() {
            let (unit, generation) = self.window[i];
            let u = unit as usize;
            if self.generation[u] == generation
                && self.subscribers[job].units[u].left > 0
                && (lone || self.loaded_at[u].saturating_add(young) > self.position)
            {
                self.take(job, unit, self.loaded_at[u]);
            }
        }
        self.subscribers[job].backlog_at_start = self.subscribers[job].backlog;
    }

    /// R4: takes a job's share of a unit: all that it needs, or 1/n if the sweep passes n more times before
    /// the job's epoch ends.
    ///
    /// Taken samples come due at random positions after `at`, over half a window, or more for a slow job.
    pub(super) fn take(&mut self, job: usize, unit: u32, at: u64) {
        let u = unit as usize;
        let generation = self.generation[u];
        let ring = (self.unit_map.total_bytes() - self.reserve_bytes) as f64 / self.mean_unit_bytes;
        let slow = 1.0 - self.relative_pace(job);
        let over = self.window_max as f64
            * (self.params.spread + (self.params.spread_slow - self.params.spread) * slow);
        let lone = self.one_active_at_most();
        let lead = if lone { self.params.lead * self.window_max as f64 } else { 0.0 };
        let s = &mut self.subscribers[job];
        let all = u64::from(s.units[u].left);
        // R12: a lone job moves the sweep itself; a second visit would only fetch what it left.
        let visits = s.left.count() as f64 / s.pace.max(1e-3) / ring.max(1.0);
        let visits = if lone { 1.0 } else { visits.floor().clamp(1.0, 8.0) };
        let size = self.unit_map.samples_of(unit).len() as u64;
        let n = ((all as f64 / visits).ceil() as u64).max(all.min(size / 8));
        let skip = if n < all { self.draws.below(all - n + 1) } else { 0 };
        let slots = s.plan_units.of_unit(unit);
        let draws = &mut self.draws;
        let wanted = s
            .left
            .iter_in(u64::from(slots.start), u64::from(slots.end))
            .skip(usize::try_from(skip).unwrap_or(usize::MAX))
            .take(usize::try_from(n).unwrap_or(usize::MAX));
        for slot in wanted {
            let slot = u32::try_from(slot).unwrap_or(u32::MAX);
            let at = at.saturating_add((lead + draws.unit() * over) as u64);
            s.due.push(Reverse(Due { at, slot, unit, generation }));
        }
        s.units[u].taken = generation;
        s.units[u].backlog = u32::try_from(n).unwrap_or(u32::MAX);
        s.backlog += n;
        s.lacking.put(self.ring_index[u] as usize, false);
    }

    /// R4: lets each job that needs a unit take it, unless the job is behind. The unit has just entered the
    /// window.
    ///
    /// The job `mover`, which moved the sweep, takes the unit in any case. So does a lone job, which would
    /// otherwise fetch it again. Of a unit loaded `aside` several of many jobs have left samples behind: they
    /// take it with a larger backlog, so that one load serves them all (R11).
    pub(super) fn take_for_all(&mut self, unit: u32, mover: Option<usize>, aside: bool) {
        // R11: a few jobs keep in step by their reserve.
        let many = if aside { ((self.active_jobs() as f64 - 4.0) / 4.0).clamp(0.0, 1.0) } else { 0.0 };
        let part = self.params.backlog + (self.params.aside_backlog - self.params.backlog) * many;
        let lone = self.one_active_at_most();
        for job in 0..self.subscribers.len() {
            let must = mover == Some(job) || lone && self.is_active(job);
            if self.subscribers[job].needs(unit)
                && (must || (self.subscribers[job].backlog as f64) < self.samples_in(part, job))
            {
                self.take(job, unit, self.position);
            }
        }
    }

    /// Puts a slot that was handed out back among those left; if its unit is in the window, it is due at
    /// once.
    pub(super) fn return_slot(&mut self, subscriber: SubscriberId, slot: u32) {
        let job = subscriber.0 as usize;
        let s = &mut self.subscribers[job];
        assert!(s.left.set(u64::from(slot)), "slot {slot} was not handed out");
        let unit = s.plan_units.unit(slot);
        let u = unit as usize;
        s.units[u].left += 1;
        match self.generation[u] {
            NOT_CACHED => {}
            IN_RESERVE => {
                s.reserve_units.insert(unit);
                s.reserve_left += 1;
            }
            generation => {
                if s.units[u].taken != generation {
                    s.units[u].taken = generation;
                    s.units[u].backlog = 0;
                }
                s.units[u].backlog += 1;
                s.backlog += 1;
                s.due.push(Reverse(Due { at: self.position, slot, unit, generation }));
            }
        }
        self.update_lacking(job, unit);
    }

    /// Recomputes whether a job lacks a unit.
    pub(super) fn update_lacking(&mut self, job: usize, unit: u32) {
        let u = unit as usize;
        let generation = self.generation[u];
        let s = &mut self.subscribers[job];
        let has = generation == IN_RESERVE
            || (generation != NOT_CACHED && s.units[u].taken == generation && s.units[u].backlog > 0);
        s.lacking.put(self.ring_index[u] as usize, s.units[u].left > 0 && !has);
    }
}
