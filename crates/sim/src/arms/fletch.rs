//! Fletch's own policy: `fletch_core::order::sweep`, unchanged, with this file as its
//! store.

use super::{Arm, Granted, Net, key, strict::DirectReads};
use crate::{Case, books::Books, case::Reader, servers::Servers};
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

/// A sample's length in the policy's bytes: fine enough that samples do not tie.
const SAMPLE_BYTES: u64 = 4096;

/// A unit that is not here.
const AWAY: f64 = f64::INFINITY;

struct Seated {
    subscriber: Option<SubscriberId>,
    queue: PickQueue,
    /// When the bytes of planned range reads arrive, and when they were asked.
    ranges: BTreeMap<u32, (f64, f64)>,
    strict: Option<DirectReads>,
    epochs: u64,
}

/// Fletch.
pub struct Fletch {
    policy: SweepPolicy,
    jobs: Vec<Seated>,
    case: Case,
    servers: Servers,
    /// Of each unit: when it is here, and when it was asked for.
    ready: Vec<f64>,
    asked: Vec<f64>,
    /// Loads whose bytes will be no good, by when that is known.
    doomed: VecDeque<(f64, u32)>,
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
        let seated = |(j, spec): (usize, &crate::JobSpec)| Seated {
            subscriber: None,
            queue: PickQueue::default(),
            ranges: BTreeMap::new(),
            strict: (spec.reader == Reader::Strict).then(|| DirectReads::new(case, j)),
            epochs: 0,
        };
        let make = if recorded { SweepPolicy::recorded } else { SweepPolicy::new };
        let servers = Servers::new(case);
        Fletch {
            policy: make(unit_map, servers.capacity() * SAMPLE_BYTES, &key(case, u64::MAX, 0), params),
            jobs: case.jobs.iter().enumerate().map(seated).collect(),
            servers,
            ready: vec![AWAY; units],
            asked: vec![-1e18; units],
            doomed: VecDeque::new(),
            loads: 0,
            ahead: case.ahead.max(1),
            actions: Vec::new(),
            case: case.clone(),
        }
    }

    /// Whether a load's bytes will be no good: by its number, so that a case is a function.
    fn fails(&self) -> bool {
        let word = key(&self.case, u64::MAX, 1).draws("failing", self.loads).unit();
        word < self.case.failing
    }

    fn evict(&mut self, unit: u32) {
        self.servers.release(unit);
        self.ready[unit as usize] = AWAY;
        // A later load of it is another one.
        self.doomed.retain(|d| d.1 != unit);
    }

    /// A unit finds room, if need be in place of others.
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

    /// Carries out the policy's orders.
    fn obey(&mut self, now: f64, net: &mut Net, books: &mut Books) {
        for action in std::mem::take(&mut self.actions) {
            match action {
                CacheAction::Evict(u) => self.evict(u),
                CacheAction::Load(u) => {
                    assert!(self.ready[u as usize] == AWAY, "unit {u} loaded twice");
                    if !self.keep(u) {
                        // Refused, and nothing was asked of the origin.
                        self.policy.lost(u);
                        books.failed(now);
                        continue;
                    }
                    let size = u64::from(self.case.units[u as usize]);
                    let here = net.request(now, size);
                    self.ready[u as usize] = here;
                    self.asked[u as usize] = now;
                    books.fetched(now, size, false);
                    self.loads += 1;
                    if self.case.failing > 0.0 && self.fails() {
                        let at = self.doomed.partition_point(|d| d.0 <= here);
                        self.doomed.insert(at, (here, u));
                        books.failed(now);
                    }
                }
            }
        }
    }

    /// What has happened to servers and loads until now.
    fn catch_up(&mut self, now: f64) {
        while let Some(&(_, unit)) = self.doomed.front().filter(|d| d.0 <= now) {
            self.doomed.pop_front();
            if self.servers.release(unit) {
                self.ready[unit as usize] = AWAY;
                self.policy.lost(unit);
            }
        }
        let news = self.servers.until(now);
        for &unit in &news.vanished {
            self.ready[unit as usize] = AWAY;
            self.doomed.retain(|d| d.1 != unit);
        }
        if news.known {
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
    fn advance(&mut self, now: f64, net: &mut Net, books: &mut Books) {
        while net.idle(now, u64::from(self.case.units[0])) {
            if !self.policy.advance(&mut self.actions) {
                break;
            }
            self.obey(now, net, books);
        }
    }

    /// The bytes of one sample alone, from the origin; not before a load that fails has failed.
    fn range(&self, unit: u32, now: f64, net: &mut Net, books: &mut Books) -> (f64, f64) {
        books.fetched(now, 1, true);
        let fails = self.doomed.iter().find(|d| d.1 == unit).map_or(now, |d| d.0);
        (net.request(now, 1).max(fails), now)
    }

    /// The sample of a version that a job's slot is.
    fn sample(&self, subscriber: SubscriberId, slot: u32, plan: &fletch_core::plan::Bits) -> u32 {
        let plan_units = self.policy.plan_units(subscriber);
        let entry = plan_units.entry(slot);
        if u64::from(plan_units.slots()) == plan.len() {
            return entry;
        }
        // Entries of a subset are numbered by themselves.
        let sample = plan.nth_in(0, plan.len(), u64::from(entry)).expect("an entry is a sample");
        u32::try_from(sample).unwrap_or(u32::MAX)
    }
}

impl Arm for Fletch {
    fn begin(&mut self, j: usize, books: &mut Books) {
        let policy = &mut self.policy;
        let seated = &mut self.jobs[j];
        if let Some(strict) = &mut seated.strict {
            seated.epochs += 1;
            strict.begin(policy.unit_map(), &key(&self.case, j as u64, seated.epochs), books, j);
            return;
        }
        let b = &books.jobs[j];
        let subscriber = *seated.subscriber.get_or_insert_with(|| {
            let plan =
                Plan::subset(b.plan.len(), b.plan.iter_in(0, b.plan.len())).expect("a plan has samples");
            policy.join(PlanUnits::new(&plan, policy.unit_map()).expect("plan and unit_map are of one case"))
        });
        let slots = u64::from(policy.plan_units(subscriber).slots());
        policy.begin(subscriber, fletch_core::plan::Bits::ones(slots));
    }

    fn grant(&mut self, j: usize, now: f64, net: &mut Net, books: &mut Books) -> Option<Granted> {
        self.catch_up(now);
        let Some(subscriber) = self.jobs[j].subscriber else {
            let (ready, asked) = (&self.ready, &self.asked);
            let doomed = &self.doomed;
            let shared = |u: u32| {
                let here = ready[u as usize];
                (here != AWAY && !doomed.iter().any(|d| d.1 == u)).then(|| (here, asked[u as usize]))
            };
            let mut g = self.jobs[j].strict.as_mut()?.grant(now, net, books, shared)?;
            g.arrives = self.servers.deliver(books.unit_of[g.sample as usize], now, g.arrives);
            return Some(g);
        };
        let Seated { queue, ranges, .. } = &mut self.jobs[j];
        queue.fill(&mut self.policy, subscriber, self.ahead, &mut self.actions, |pick: &Pick| {
            if pick.read_from == ReadFrom::Range {
                books.fetched(now, 1, true);
                ranges.insert(pick.slot, (net.request(now, 1), now));
            }
        });
        let asked_for_this = self.actions.clone();
        self.obey(now, net, books);
        self.advance(now, net, books);
        let Seated { queue, ranges, .. } = &mut self.jobs[j];
        let ready = &self.ready;
        let pick = queue.next(&self.policy, self.case.overtake, |p| match p.read_from {
            ReadFrom::Range => ranges.get(&p.slot).is_some_and(|r| r.0 <= now),
            ReadFrom::Window | ReadFrom::Reserve => ready[p.unit as usize] <= now,
        })?;
        let here = self.ready[pick.unit as usize];
        let known_bad = || self.doomed.iter().any(|d| d.1 == pick.unit);
        let (there, asked) = match (pick.read_from, ranges.remove(&pick.slot)) {
            (_, Some(r)) => r,
            // Its unit is not here: it left between decision and grant, vanished, or is no good.
            (ReadFrom::Range, None) => self.range(pick.unit, now, net, books),
            _ if here == AWAY || (!self.doomed.is_empty() && known_bad()) => {
                self.range(pick.unit, now, net, books)
            }
            _ => (here, self.asked[pick.unit as usize]),
        };
        let forced = asked == now
            && (pick.read_from == ReadFrom::Range || asked_for_this.contains(&CacheAction::Load(pick.unit)));
        let sample = self.sample(subscriber, pick.slot, &books.jobs[j].plan);
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

    /// A load that will be no good is nobody's when its unit has left: what is loaded anew is kept.
    #[test]
    fn a_good_load_outlives_a_bad_one_of_its_unit() {
        let mut case = Case::plain("x", 8, 4, 0.5, false, &[1.0], 1);
        case.origin = Some(crate::Origin::new(1.0, 100.0));
        let (mut net, mut books) = (Net::new(case.origin), Books::new(&case));
        let mut arm = Fletch::new(&case, SweepParams::default(), false);
        let mut obey = |arm: &mut Fletch, failing, now, actions: &[CacheAction]| {
            arm.case.failing = failing;
            arm.actions.extend(actions);
            arm.obey(now, &mut net, &mut books);
        };
        obey(&mut arm, 1.0, 0.0, &[CacheAction::Load(3)]);
        let bad = arm.ready[3];
        obey(&mut arm, 0.0, 1.0, &[CacheAction::Evict(3), CacheAction::Load(3)]);
        assert!(arm.ready[3] > bad);
        arm.catch_up(bad);
        assert!(arm.ready[3] != AWAY && arm.servers.residency().has(3));
        // A bad one that stays is dropped when it comes.
        obey(&mut arm, 1.0, 200.0, &[CacheAction::Load(5)]);
        arm.catch_up(arm.ready[5]);
        assert!(arm.ready[5] == AWAY && !arm.servers.residency().has(5));
    }
}
