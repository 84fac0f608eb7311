//! The sweep's moves: taking, loading, evicting, exchanging with the reserve.

use super::*;

/// At most this part of the units that would leave the window changes places with one of the reserve: each such one
/// shortens the time that the others have to be read in, and where nearly all is cached none would ever leave.
const EXCHANGED_MAX: f64 = 0.1;

impl SweepPolicy {
    /// Whether the window has room for `bytes` more, or gets it by dropping its oldest unit
    /// that no active job needs.
    pub(super) fn oldest_is_read(&mut self, bytes: u64) -> bool {
        while let Some(&(unit, generation)) = self.window.front()
            && self.generation[unit as usize] != generation
        {
            self.window.pop_front();
        }
        let fits = self.window_bytes + bytes <= self.window_max
            && self.window_bytes + self.reserve_bytes + bytes <= self.capacity;
        fits || self.window.front().is_some_and(|&(unit, _)| {
            (0..self.subscribers.len()).filter(|&q| self.active(q)).all(|q| !self.subscribers[q].needs(unit))
        })
    }

    /// The unit of the window that leaves it next, if there is one.
    #[must_use]
    pub fn oldest(&self) -> Option<u32> {
        let stays = |w: &&(u32, u32)| self.generation[w.0 as usize] == w.1;
        self.window.iter().find(stays).map(|w| w.0)
    }

    /// A job counts while it has asked within the last few windows.
    pub(super) fn active(&self, q: usize) -> bool {
        let s = &self.subscribers[q];
        s.on && (self.position - s.last) as f64 <= self.params.active * self.window_max as f64
    }

    pub(super) fn actives(&self) -> usize {
        (0..self.subscribers.len()).filter(|&q| self.active(q)).count()
    }

    /// Whether at most one job is active. Asked for every sample: of a thousand jobs the second answers.
    pub(super) fn alone(&self) -> bool {
        (0..self.subscribers.len()).filter(|&q| self.active(q)).nth(1).is_none()
    }

    /// 1: the job keeps up with the sweep; 1/4: it has a quarter of its speed.
    fn step(&self, q: usize) -> f64 {
        (self.subscribers[q].pace / self.mean_samples).min(1.0)
    }

    /// So many samples will a job read in this part of a window.
    pub(super) fn samples_of(&self, part: f64, q: usize) -> f64 {
        part * self.window_max as f64 / self.mean * self.mean_samples * self.step(q).max(0.1)
    }

    /// Measures a job's pace over half windows.
    pub(super) fn measure(&mut self, j: usize) {
        let (now, half) = (self.position, self.window_max as f64 / 2.0);
        let mean = self.mean;
        let s = &mut self.subscribers[j];
        s.last = now;
        let passed = (now - s.mark.0) as f64;
        if self.window_max == 0 {
            // Nothing is swept: there is no pace.
            s.mark = (now, s.drawn);
        } else if passed >= half {
            // Longer than two such spans is a pause, not a pace.
            if passed < 2.0 * half + 2.0 * mean {
                let pace = (s.drawn - s.mark.1) as f64 / (passed / mean);
                s.pace += (pace - s.pace) * 0.3;
            }
            s.mark = (now, s.drawn);
        }
    }

    /// Whether place `p` lies farther ahead than the sweep may move at once. Reserve units are
    /// no part of the way.
    pub(super) fn is_far(&self, p: usize) -> bool {
        let n = self.ring.len();
        let enough = (self.params.jump * n as f64) as usize;
        let from = self.pointer % n;
        let gaps = if from <= p {
            self.solid.gaps_in(from, p, enough)
        } else {
            let first = self.solid.gaps_in(from, n, enough);
            if first > enough { first } else { first + self.solid.gaps_in(0, p, enough - first) }
        };
        gaps > enough
    }

    /// Rule 7: whether so little of a unit is wanted that it is read sample by sample.
    pub(super) fn little(&self, j: usize, unit: u32, need: f64) -> bool {
        let u = unit as usize;
        let samples = self.unit_map.samples_of(unit).len() as f64;
        if f64::from(self.subscribers[j].books[u].rem) < self.params.range * samples {
            return true;
        }
        let wanted: f64 = (0..self.subscribers.len())
            .filter(|&q| self.active(q))
            .map(|q| f64::from(self.subscribers[q].books[u].rem))
            .sum();
        wanted < need * samples
    }

    /// Rule 2: whether the reserve's share of what a job has left is at least its share of the plan. A job
    /// that is alone leaves out what it holds of the window: its reserve is to be used up when the last unit
    /// was brought, not some time after that, while the way to the origin stands idle.
    pub(super) fn reserve_is_next(&self, j: usize) -> bool {
        let s = &self.subscribers[j];
        let (mut left, mut total) = (s.left.count(), s.total);
        if self.alone() {
            (left, total) = (left - s.backlog, total - s.carried);
        }
        u128::from(s.pin_left) * u128::from(total) >= u128::from(s.pin_all) * u128::from(left)
    }

    /// Drops void entries from the head of a job's due queue.
    pub(super) fn prune(&mut self, j: usize) {
        let s = &mut self.subscribers[j];
        while let Some(Reverse(d)) = s.due.peek()
            && (self.generation[d.unit as usize] != d.generation || !s.left.get(u64::from(d.slot)))
        {
            s.due.pop();
        }
    }

    /// Recomputes whether a job lacks a unit.
    pub(super) fn refresh(&mut self, j: usize, unit: u32) {
        let u = unit as usize;
        let generation = self.generation[u];
        let s = &mut self.subscribers[j];
        let has = generation == RESERVE
            || (generation != AWAY && s.books[u].taken == generation && s.books[u].held > 0);
        s.lack.put(self.place[u] as usize, s.books[u].rem > 0 && !has);
    }

    fn hand_out(&mut self, j: usize, slot: u32, unit: u32, read_from: ReadFrom) -> Pick {
        let s = &mut self.subscribers[j];
        assert!(s.left.clear(u64::from(slot)), "slot {slot} handed out twice");
        s.books[unit as usize].rem -= 1;
        if read_from != ReadFrom::Range {
            s.drawn += 1;
        }
        if s.books[unit as usize].rem == 0 || s.books[unit as usize].held == 0 {
            self.refresh(j, unit);
        }
        Pick { slot, unit, read_from, pass: 0 }
    }

    /// # Panics
    /// When nothing valid is due: callers prune and look first.
    pub(super) fn serve_due(&mut self, j: usize) -> Pick {
        let s = &mut self.subscribers[j];
        let Reverse(d) = s.due.pop().expect("something is due");
        s.backlog -= 1;
        s.books[d.unit as usize].held -= 1;
        self.hand_out(j, d.slot, d.unit, ReadFrom::Window)
    }

    pub(super) fn serve_reserve(&mut self, j: usize) -> Pick {
        let n = self.subscribers[j].pins.len() as u64;
        let unit = self.subscribers[j].pins.get(self.draws.below(n));
        let slot = self.any_spot(j, unit);
        let s = &mut self.subscribers[j];
        s.pin_left -= 1;
        if s.books[unit as usize].rem == 1 {
            s.pins.remove(unit);
        }
        self.hand_out(j, slot, unit, ReadFrom::Reserve)
    }

    /// One sample straight from the origin, spread over the units of which little is wanted, so
    /// that stragglers do not arrive in a row.
    pub(super) fn serve_range(&mut self, j: usize, unit: u32, need: f64) -> Pick {
        let mut chosen = unit;
        for _ in 0..8 {
            let from = self.draws.below(self.ring.len() as u64) as usize;
            let Some(p) = self.subscribers[j].lack.next(from) else { break };
            let other = self.ring[p];
            if !self.holds(other) && self.little(j, other, need) {
                chosen = other;
                break;
            }
        }
        let slot = self.any_spot(j, chosen);
        self.hand_out(j, slot, chosen, ReadFrom::Range)
    }

    /// One sample straight from the origin, of the units that the window cannot hold, one of which is at place `p`: any
    /// that is left is as likely, so that without a cache an order is a plain shuffle. Where few are left, units that are far
    /// behind others are likelier. The sweep goes on as if it had passed a part of the unit, and comes to those that fit.
    pub(super) fn serve_any(&mut self, j: usize, p: usize, far: bool) -> Pick {
        let unit = self.ring[p];
        if !far && self.draws.below(self.unit_map.samples_of(unit).len() as u64) == 0 {
            self.pointer = p + 1;
        }
        let slots = u64::from(self.subscribers[j].plan_units.slots());
        let suits =
            |policy: &Self, unit| !policy.holds(unit) && policy.unit_map.bytes(unit) > policy.window_max;
        for _ in 0..64 {
            let at = self.draws.below(slots);
            let slot = u32::try_from(at).unwrap_or(u32::MAX);
            let other = self.subscribers[j].plan_units.unit(slot);
            if self.subscribers[j].left.get(at) && suits(self, other) {
                return self.hand_out(j, slot, other, ReadFrom::Range);
            }
        }
        let mut chosen = unit;
        for _ in 0..8 {
            let from = self.draws.below(self.ring.len() as u64) as usize;
            let other = self.subscribers[j].lack.next(from).map(|p| self.ring[p]);
            if let Some(other) = other.filter(|&other| suits(self, other)) {
                chosen = other;
                break;
            }
        }
        let slot = self.any_spot(j, chosen);
        self.hand_out(j, slot, chosen, ReadFrom::Range)
    }

    /// A random slot of a unit that the job still needs.
    fn any_spot(&mut self, j: usize, unit: u32) -> u32 {
        let s = &self.subscribers[j];
        let slots = s.plan_units.of_unit(unit);
        let k = self.draws.below(u64::from(s.books[unit as usize].rem));
        let slot = s.left.nth_in(u64::from(slots.start), u64::from(slots.end), k);
        slot.and_then(|x| u32::try_from(x).ok()).expect("rem counts the slots left")
    }

    /// Rule 4: a job takes its share of a unit: everything, or 1/n if others will have the sweep pass n more
    /// times before its epoch ends. Samples come due spread over half a window or more.
    pub(super) fn take(&mut self, j: usize, unit: u32, at: u64) {
        let u = unit as usize;
        let generation = self.generation[u];
        let ring = (self.unit_map.total_bytes() - self.reserve_bytes) as f64 / self.mean;
        let slow = 1.0 - self.step(j);
        let over = self.window_max as f64
            * (self.params.spread + (self.params.spread_slow - self.params.spread) * slow);
        let alone = self.alone();
        let lead = if alone { self.params.lead * self.window_max as f64 } else { 0.0 };
        let s = &mut self.subscribers[j];
        let all = u64::from(s.books[u].rem);
        // Who is alone moves the sweep, which comes by again only to fetch what was left.
        let visits = s.left.count() as f64 / s.pace.max(1e-3) / ring.max(1.0);
        let visits = if alone { 1.0 } else { visits.floor().clamp(1.0, 8.0) };
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
        s.books[u].taken = generation;
        s.books[u].held = u32::try_from(n).unwrap_or(u32::MAX);
        s.backlog += n;
        s.lack.put(self.place[u] as usize, false);
    }

    /// A unit has just come into the window: whoever needs it takes it, if what that job already
    /// holds will be read in time; the job that moved the sweep does in any case, and one that is alone, which would
    /// fetch it again. A unit loaded `aside` is
    /// one that somebody left behind, and of many jobs others did too: they take it with a larger backlog,
    /// so that one load serves them all.
    pub(super) fn offer(&mut self, unit: u32, mover: Option<usize>, aside: bool) {
        // Few jobs keep in step by their reserve.
        let many = if aside { ((self.actives() as f64 - 4.0) / 4.0).clamp(0.0, 1.0) } else { 0.0 };
        let part = self.params.backlog + (self.params.aside_backlog - self.params.backlog) * many;
        let alone = self.alone();
        for q in 0..self.subscribers.len() {
            let must = mover == Some(q) || alone && self.active(q);
            if self.subscribers[q].needs(unit)
                && (must || (self.subscribers[q].backlog as f64) < self.samples_of(part, q))
            {
                self.take(q, unit, self.position);
            }
        }
    }

    /// Rule 8: the place just passed changes with one passed a little earlier.
    pub(super) fn stir(&mut self, p: usize) {
        let n = self.ring.len();
        let reach = (self.params.stir * n as f64) as u64;
        let i = (p + n - self.draws.below(reach + 1) as usize % n) % n;
        self.swap_places(p, i);
    }

    /// Where nobody else is on the way, each epoch goes round another ring.
    pub(super) fn shuffle_ring(&mut self) {
        for i in (1..self.ring.len()).rev() {
            let q = self.draws.below(i as u64 + 1) as usize;
            self.swap_places(i, q);
        }
    }

    fn swap_places(&mut self, p: usize, i: usize) {
        if p == i {
            return;
        }
        self.ring.swap(p, i);
        let (a, b) = (self.ring[p] as usize, self.ring[i] as usize);
        (self.place[a], self.place[b]) =
            (u32::try_from(p).unwrap_or(u32::MAX), u32::try_from(i).unwrap_or(u32::MAX));
        let swap = |r: &mut Ring| {
            let (x, y) = (r.has(p), r.has(i));
            if x != y {
                r.put(p, y);
                r.put(i, x);
            }
        };
        swap(&mut self.solid);
        self.subscribers.iter_mut().filter(|s| s.on).for_each(|s| swap(&mut s.lack));
    }

    /// Loads a unit into the window, after making room for it.
    pub(super) fn load(&mut self, unit: u32, actions: &mut Vec<CacheAction>) {
        let bytes = self.unit_map.bytes(unit);
        self.make_room(bytes, actions);
        actions.push(CacheAction::Load(unit));
        self.position = self.position.saturating_add(bytes);
        self.enter_window(unit);
    }

    /// Whether the reserve has room for a unit.
    pub(super) fn fits_reserve(&self, unit: u32) -> bool {
        self.reserve_bytes + self.unit_map.bytes(unit) <= self.reserve_max
    }

    /// Loads a unit into the reserve, where there is no window to come through.
    pub(super) fn pin(&mut self, unit: u32, actions: &mut Vec<CacheAction>) {
        actions.push(CacheAction::Load(unit));
        self.position = self.position.saturating_add(self.unit_map.bytes(unit));
        self.enter_reserve(unit);
    }

    pub(super) fn enter_window(&mut self, unit: u32) {
        let u = unit as usize;
        self.loads = match self.loads.wrapping_add(1) {
            AWAY | RESERVE => 1,
            n => n,
        };
        self.generation[u] = self.loads;
        self.loaded_at[u] = self.position;
        self.window.push_back((unit, self.loads));
        self.window_bytes += self.unit_map.bytes(unit);
    }

    /// Makes room for `bytes` more in the window: the oldest units leave it, into the reserve
    /// while that has room, else out of the cache.
    pub(super) fn make_room(&mut self, bytes: u64, actions: &mut Vec<CacheAction>) {
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
                self.exchange(unit);
                if self.generation[unit as usize] == generation {
                    self.drop_window(unit, actions);
                }
            }
        }
    }

    /// The books of a unit that leaves the window: its due entries become void.
    fn leave_window(&mut self, unit: u32) {
        let u = unit as usize;
        let generation = std::mem::replace(&mut self.generation[u], AWAY);
        self.window_bytes -= self.unit_map.bytes(unit);
        for q in 0..self.subscribers.len() {
            if self.subscribers[q].needs(unit) {
                let s = &mut self.subscribers[q];
                if s.books[u].taken == generation {
                    s.backlog -= u64::from(std::mem::take(&mut s.books[u].held));
                }
                s.lack.put(self.place[u] as usize, true);
            }
        }
    }

    pub(super) fn drop_window(&mut self, unit: u32, actions: &mut Vec<CacheAction>) {
        self.leave_window(unit);
        actions.push(CacheAction::Evict(unit));
    }

    pub(super) fn enter_reserve(&mut self, unit: u32) {
        let u = unit as usize;
        self.generation[u] = RESERVE;
        self.loaded_at[u] = self.position;
        self.reserve.insert(unit);
        self.reserve_bytes += self.unit_map.bytes(unit);
        self.solid.put(self.place[u] as usize, true);
        for s in self.subscribers.iter_mut().filter(|s| s.on) {
            s.pin_all += s.planned(unit);
            if s.books[u].rem > 0 {
                s.pins.insert(unit);
                s.pin_left += u64::from(s.books[u].rem);
                s.lack.put(self.place[u] as usize, false);
            }
        }
    }

    /// The books of a unit that leaves the reserve.
    pub(super) fn leave_reserve(&mut self, unit: u32) {
        let u = unit as usize;
        self.generation[u] = AWAY;
        self.reserve.remove(unit);
        self.reserve_bytes -= self.unit_map.bytes(unit);
        self.solid.put(self.place[u] as usize, false);
        for s in self.subscribers.iter_mut().filter(|s| s.on) {
            s.pin_all = s.pin_all.saturating_sub(s.planned(unit));
            if s.books[u].rem > 0 {
                s.pins.remove(unit);
                s.pin_left -= u64::from(s.books[u].rem);
                s.lack.put(self.place[u] as usize, true);
            }
        }
    }

    pub(super) fn drop_reserve(&mut self, unit: u32, actions: &mut Vec<CacheAction>) {
        self.leave_reserve(unit);
        actions.push(CacheAction::Evict(unit));
    }

    /// How many jobs' plans hold some of a unit.
    fn popularity(&self, unit: u32) -> usize {
        self.subscribers.iter().filter(|s| s.on && s.planned(unit) > 0).count()
    }

    /// Rule 10: the oldest window unit changes places with a reserve unit, without a fetch, if
    /// more plans hold it than hold the least planned of a few, or because it is time to rotate.
    fn exchange(&mut self, oldest: u32) {
        if self.reserve.is_empty() {
            return;
        }
        let ring = (self.unit_map.units() - self.reserve.len()).max(1) as f64;
        self.turn += (self.params.rotate * self.reserve.len() as f64 / ring).min(EXCHANGED_MAX);
        let mut least = None;
        for _ in 0..8 {
            let unit = self.reserve.get(self.draws.below(self.reserve.len() as u64));
            let p = self.popularity(unit);
            if least.is_none_or(|(q, _)| p < q) {
                least = Some((p, unit));
            }
        }
        let Some((planned, unit)) = least else { return };
        let mine = self.popularity(oldest);
        if !(mine > planned || mine == planned && self.turn >= 1.0) {
            return;
        }
        self.turn = (self.turn - 1.0).max(0.0);
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
        self.offer(unit, None, false);
    }
}
