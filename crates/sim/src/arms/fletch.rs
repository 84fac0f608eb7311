//! Fletch's own policy: `fletch_core::order::sweep`, unchanged, with this file as its store.

use super::{Arm, Granted, OriginLink, key, strict::StrictJob};
use crate::{Case, case::Reader, servers::Servers, statistics::Statistics};
use fletch_core::{
    order::{
        SweepPolicy,
        sweep::{Pick, PickQueue, ReadFrom, SubscriberId, SweepParams},
    },
    plan::{Plan, PlanUnits, UnitMap},
    residency::CacheAction,
};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

/// A sample's length in the policy's bytes. Long enough that due positions rarely tie.
const SAMPLE_BYTES: u64 = 4096;

/// Arrival time of a unit that is not cached.
const AWAY: f64 = f64::INFINITY;

/// A job as this arm sees it.
struct SimulatedJob {
    subscriber: Option<SubscriberId>,
    queue: PickQueue,
    /// Of each planned range read, by slot: when its bytes arrive, and when they were requested.
    ranges: BTreeMap<u32, (f64, f64)>,
    strict: Option<StrictJob>,
    epochs: u64,
}

/// Fletch's policy with simulated servers as its store.
pub struct Fletch {
    policy: SweepPolicy,
    jobs: Vec<SimulatedJob>,
    case: Case,
    servers: Servers,
    /// Of each unit: when it arrives, or [`AWAY`].
    ready: Vec<f64>,
    /// Of each unit: when it was requested.
    asked: Vec<f64>,
    /// Loads whose bytes will be wrong, by the time at which that is known.
    failing_loads: VecDeque<(f64, u32)>,
    loads: u64,
    ahead: usize,
    actions: Vec<CacheAction>,
}

impl Fletch {
    pub(super) fn new(case: &Case, params: SweepParams, recorded: bool) -> Self {
        let unit_of: Vec<u32> =
            (0u32..).zip(&case.units).flat_map(|(u, &g)| std::iter::repeat_n(u, g as usize)).collect();
        let unit_map =
            UnitMap::new(&unit_of, case.units.iter().map(|&g| u64::from(g) * SAMPLE_BYTES).collect());
        let unit_map = Arc::new(unit_map.expect("every sample lies in a unit of its case"));
        let units = unit_map.units();
        let simulated = |(j, spec): (usize, &crate::JobSpec)| SimulatedJob {
            subscriber: None,
            queue: PickQueue::default(),
            ranges: BTreeMap::new(),
            strict: (spec.reader == Reader::Strict).then(|| StrictJob::new(case, j)),
            epochs: 0,
        };
        let make = if recorded { SweepPolicy::recorded } else { SweepPolicy::new };
        let servers = Servers::new(case);
        Fletch {
            policy: make(unit_map, servers.capacity() * SAMPLE_BYTES, &key(case, u64::MAX, 0), params),
            jobs: case.jobs.iter().enumerate().map(simulated).collect(),
            servers,
            ready: vec![AWAY; units],
            asked: vec![-1e18; units],
            failing_loads: VecDeque::new(),
            loads: 0,
            ahead: case.ahead.max(1),
            actions: Vec::new(),
            case: case.clone(),
        }
    }

    /// Returns whether a load's bytes will be wrong. Depends on its number alone, so that runs repeat.
    fn fails(&self) -> bool {
        let word = key(&self.case, u64::MAX, 1).draws("failing", self.loads).unit();
        word < self.case.failing
    }

    fn evict(&mut self, unit: u32) {
        self.servers.release(unit);
        self.ready[unit as usize] = AWAY;
        // A later load of the unit may be a good one.
        self.failing_loads.retain(|d| d.1 != unit);
    }

    /// Places a unit, and lets others leave for it where the servers are full.
    fn keep(&mut self, unit: u32) -> bool {
        let granted = self.servers.capacity() * SAMPLE_BYTES;
        let mut actions = Vec::new();
        while !self.servers.keep(unit) {
            if !self.policy.give_way(unit, granted, &mut actions) {
                return false;
            }
            for action in actions.drain(..) {
                if let CacheAction::Evict(u) = action {
                    self.evict(u);
                }
            }
        }
        true
    }

    /// Carries out the policy's actions.
    fn carry_out(&mut self, now: f64, link: &mut OriginLink, stats: &mut Statistics) {
        for action in std::mem::take(&mut self.actions) {
            match action {
                CacheAction::Evict(u) => self.evict(u),
                CacheAction::Load(u) => {
                    assert!(self.ready[u as usize] == AWAY, "unit {u} loaded twice");
                    if !self.keep(u) {
                        // Refused: nothing was requested from the origin.
                        self.policy.lost(u);
                        stats.failed(now);
                        continue;
                    }
                    let size = u64::from(self.case.units[u as usize]);
                    let here = link.request(now, size);
                    self.ready[u as usize] = here;
                    self.asked[u as usize] = now;
                    stats.fetched(now, size, false);
                    self.loads += 1;
                    if self.case.failing > 0.0 && self.fails() {
                        let at = self.failing_loads.partition_point(|d| d.0 <= here);
                        self.failing_loads.insert(at, (here, u));
                        stats.failed(now);
                    }
                }
            }
        }
    }

    /// Applies what has happened to servers and loads until now.
    fn catch_up(&mut self, now: f64) {
        while let Some(&(_, unit)) = self.failing_loads.front().filter(|d| d.0 <= now) {
            self.failing_loads.pop_front();
            if self.servers.release(unit) {
                self.ready[unit as usize] = AWAY;
                self.policy.lost(unit);
            }
        }
        let news = self.servers.until(now);
        for &unit in &news.vanished {
            self.ready[unit as usize] = AWAY;
            self.failing_loads.retain(|d| d.1 != unit);
        }
        if news.announced {
            let as_of = self.policy.progress().swept_bytes;
            self.policy.reconcile(&self.servers.residency(), as_of);
            self.policy.set_capacity(self.servers.capacity() * SAMPLE_BYTES, &mut self.actions);
            for action in std::mem::take(&mut self.actions) {
                if let CacheAction::Evict(u) = action {
                    self.evict(u);
                }
            }
        }
    }

    /// Moves the sweep ahead of need while the link is idle.
    fn advance(&mut self, now: f64, link: &mut OriginLink, stats: &mut Statistics) {
        while link.idle(now, u64::from(self.case.units[0])) {
            if !self.policy.advance(&mut self.actions) {
                break;
            }
            self.carry_out(now, link, stats);
        }
    }

    /// Reads one sample by range from the origin, not before a failing load of its unit has failed. Returns
    /// when its bytes arrive, and when they were requested.
    fn range(&self, unit: u32, now: f64, link: &mut OriginLink, stats: &mut Statistics) -> (f64, f64) {
        stats.fetched(now, 1, true);
        let fails = self.failing_loads.iter().find(|d| d.1 == unit).map_or(now, |d| d.0);
        (link.request(now, 1).max(fails), now)
    }

    /// Returns the dataset's sample for a slot of a job's plan.
    fn sample(&self, subscriber: SubscriberId, slot: u32, plan: &fletch_core::plan::Bits) -> u32 {
        let plan_units = self.policy.plan_units(subscriber);
        let entry = plan_units.entry(slot);
        if u64::from(plan_units.slots()) == plan.len() {
            return entry;
        }
        // A subset numbers its entries from 0.
        let sample = plan.nth_in(0, plan.len(), u64::from(entry)).expect("an entry is a sample");
        u32::try_from(sample).unwrap_or(u32::MAX)
    }
}

impl Arm for Fletch {
    fn begin(&mut self, j: usize, stats: &mut Statistics) {
        let policy = &mut self.policy;
        let job = &mut self.jobs[j];
        if let Some(strict) = &mut job.strict {
            job.epochs += 1;
            strict.begin(policy.unit_map(), &key(&self.case, j as u64, job.epochs), stats, j);
            return;
        }
        let b = &stats.jobs[j];
        let subscriber = *job.subscriber.get_or_insert_with(|| {
            let plan =
                Plan::subset(b.plan.len(), b.plan.iter_in(0, b.plan.len())).expect("a plan has samples");
            policy.join(PlanUnits::new(&plan, policy.unit_map()).expect("plan and unit_map are of one case"))
        });
        let slots = u64::from(policy.plan_units(subscriber).slots());
        policy.begin(subscriber, fletch_core::plan::Bits::ones(slots));
    }

    fn grant(
        &mut self,
        j: usize,
        now: f64,
        link: &mut OriginLink,
        stats: &mut Statistics,
    ) -> Option<Granted> {
        self.catch_up(now);
        let Some(subscriber) = self.jobs[j].subscriber else {
            let (ready, asked) = (&self.ready, &self.asked);
            let failing_loads = &self.failing_loads;
            let shared = |u: u32| {
                let here = ready[u as usize];
                (here != AWAY && !failing_loads.iter().any(|d| d.1 == u)).then(|| (here, asked[u as usize]))
            };
            let mut g = self.jobs[j].strict.as_mut()?.grant(now, link, stats, shared)?;
            g.arrives = self.servers.deliver(stats.unit_of[g.sample as usize], now, g.arrives);
            return Some(g);
        };
        let SimulatedJob { queue, ranges, .. } = &mut self.jobs[j];
        queue.fill(&mut self.policy, subscriber, self.ahead, &mut self.actions, |pick: &Pick| {
            if pick.read_from == ReadFrom::Range {
                stats.fetched(now, 1, true);
                ranges.insert(pick.slot, (link.request(now, 1), now));
            }
        });
        let asked_for_this = self.actions.clone();
        self.carry_out(now, link, stats);
        self.advance(now, link, stats);
        let SimulatedJob { queue, ranges, .. } = &mut self.jobs[j];
        let ready = &self.ready;
        let pick = queue.next(&self.policy, self.case.overtake, |p| match p.read_from {
            ReadFrom::Range => ranges.get(&p.slot).is_some_and(|r| r.0 <= now),
            ReadFrom::Window | ReadFrom::Reserve => ready[p.unit as usize] <= now,
        })?;
        let here = self.ready[pick.unit as usize];
        let known_bad = || self.failing_loads.iter().any(|d| d.1 == pick.unit);
        let (there, asked) = match (pick.read_from, ranges.remove(&pick.slot)) {
            (_, Some(r)) => r,
            // Its unit left between decision and grant, vanished, or has wrong bytes.
            (ReadFrom::Range, None) => self.range(pick.unit, now, link, stats),
            _ if here == AWAY || (!self.failing_loads.is_empty() && known_bad()) => {
                self.range(pick.unit, now, link, stats)
            }
            _ => (here, self.asked[pick.unit as usize]),
        };
        let forced = asked == now
            && (pick.read_from == ReadFrom::Range || asked_for_this.contains(&CacheAction::Load(pick.unit)));
        let sample = self.sample(subscriber, pick.slot, &stats.jobs[j].plan);
        let arrives = self.servers.deliver(pick.unit, now, there.max(now));
        Some(Granted { sample, arrives, asked, forced })
    }

    fn leave(&mut self, j: usize) {
        if let Some(subscriber) = self.jobs[j].subscriber.take() {
            self.jobs[j].queue.give_back(&mut self.policy, subscriber);
            self.policy.leave(subscriber);
        }
        if let Some(strict) = &mut self.jobs[j].strict {
            strict.leave();
        }
        self.jobs[j].ranges.clear();
    }

    fn take_trace(&mut self) -> Vec<u8> {
        self.policy.take_trace()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A failing load of a unit that was evicted does not affect the unit's next load.
    #[test]
    fn a_good_load_outlives_a_bad_one_of_its_unit() {
        let mut case = Case::plain("x", 8, 4, 0.5, false, &[1.0], 1);
        case.origin = Some(crate::Origin::new(1.0, 100.0));
        let (mut link, mut stats) = (OriginLink::new(case.origin), Statistics::new(&case));
        let mut arm = Fletch::new(&case, SweepParams::default(), false);
        let mut carry_out = |arm: &mut Fletch, failing, now, actions: &[CacheAction]| {
            arm.case.failing = failing;
            arm.actions.extend(actions);
            arm.carry_out(now, &mut link, &mut stats);
        };
        carry_out(&mut arm, 1.0, 0.0, &[CacheAction::Load(3)]);
        let bad = arm.ready[3];
        carry_out(&mut arm, 0.0, 1.0, &[CacheAction::Evict(3), CacheAction::Load(3)]);
        assert!(arm.ready[3] > bad);
        arm.catch_up(bad);
        assert!(arm.ready[3] != AWAY && arm.servers.residency().has(3));
        // A failing load that was not evicted is dropped when it arrives.
        carry_out(&mut arm, 1.0, 200.0, &[CacheAction::Load(5)]);
        arm.catch_up(arm.ready[5]);
        assert!(arm.ready[5] == AWAY && !arm.servers.residency().has(5));
    }
}
