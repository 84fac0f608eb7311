//! Fletch's own policy: `fletch_core::order::substitute`, unchanged, with this file as its
//! store.

use super::{Arm, Granted, Net, key, plain::permuted};
use crate::{Case, books::Books, case::Reader};
use fletch_core::order::{
    Flywheel, Laid, Plan, Shape,
    substitute::{Act, Feed, How, Knobs, Pick, SeatId},
};
use std::{collections::BTreeMap, sync::Arc};

/// A sample's length in the policy's bytes: fine enough that samples do not tie.
const SAMPLE_BYTES: u64 = 4096;

/// A unit that is not here.
const AWAY: f64 = f64::INFINITY;

struct Seated {
    seat: Option<SeatId>,
    feed: Feed,
    /// When the bytes of planned range reads arrive, and when they were asked.
    ranges: BTreeMap<u32, (f64, f64)>,
    strict: Vec<u32>,
}

/// Fletch.
pub struct Fletch {
    fly: Flywheel,
    jobs: Vec<Seated>,
    keys: Vec<fletch_core::order::OrderKey>,
    sizes: Vec<u32>,
    /// Of each unit: when it is here, and when it was asked for.
    ready: Vec<f64>,
    asked: Vec<f64>,
    used: u64,
    capacity: u64,
    ahead: usize,
    overtake: usize,
    acts: Vec<Act>,
}

impl Fletch {
    pub(super) fn new(case: &Case, knobs: Knobs) -> Self {
        let unit_of: Vec<u32> =
            (0u32..).zip(&case.units).flat_map(|(u, &g)| std::iter::repeat_n(u, g as usize)).collect();
        let shape = Shape::new(&unit_of, case.units.iter().map(|&g| u64::from(g) * SAMPLE_BYTES).collect());
        let shape = Arc::new(shape.expect("every sample lies in a unit of its case"));
        let units = shape.units();
        let seated =
            || Seated { seat: None, feed: Feed::default(), ranges: BTreeMap::new(), strict: Vec::new() };
        Fletch {
            fly: Flywheel::new(shape, case.capacity() * SAMPLE_BYTES, &key(case, usize::MAX), knobs),
            jobs: case.jobs.iter().map(|_| seated()).collect(),
            keys: (0..case.jobs.len()).map(|j| key(case, j)).collect(),
            sizes: case.units.clone(),
            ready: vec![AWAY; units],
            asked: vec![-1e18; units],
            used: 0,
            capacity: case.capacity(),
            ahead: case.ahead.max(1),
            overtake: case.overtake,
            acts: Vec::new(),
        }
    }

    /// Carries out the policy's orders; which units were asked for.
    fn obey(&mut self, now: f64, net: &mut Net, books: &mut Books) {
        for act in &self.acts {
            match *act {
                Act::Evict(u) => {
                    assert!(self.ready[u as usize] != AWAY, "unit {u} evicted twice");
                    self.ready[u as usize] = AWAY;
                    self.used -= u64::from(self.sizes[u as usize]);
                }
                Act::Load(u) => {
                    assert!(self.ready[u as usize] == AWAY, "unit {u} loaded twice");
                    let size = u64::from(self.sizes[u as usize]);
                    self.used += size;
                    assert!(self.used <= self.capacity, "the cache holds more than it may");
                    self.ready[u as usize] = net.request(now, size);
                    self.asked[u as usize] = now;
                    books.fetched(now, size, false);
                }
            }
        }
    }

    fn strict(&mut self, j: usize, now: f64, net: &mut Net, books: &mut Books) -> Option<Granted> {
        let sample = self.jobs[j].strict.pop()?;
        let unit = books.unit_of[sample as usize] as usize;
        if self.ready[unit] != AWAY {
            let arrives = self.ready[unit].max(now);
            return Some(Granted { sample, arrives, asked: self.asked[unit], forced: false });
        }
        books.fetched(now, 1, true);
        Some(Granted { sample, arrives: net.request(now, 1), asked: now, forced: true })
    }
}

impl Arm for Fletch {
    fn begin(&mut self, j: usize, books: &Books) {
        let b = &books.jobs[j];
        if b.reader == Reader::Strict {
            self.jobs[j].strict = permuted(books, j, &self.keys[j]);
            return;
        }
        let fly = &mut self.fly;
        let seat = *self.jobs[j].seat.get_or_insert_with(|| {
            let plan =
                Plan::subset(b.plan.len(), b.plan.iter_in(0, b.plan.len())).expect("a plan has samples");
            fly.join(Laid::new(&plan, fly.shape()).expect("plan and shape are of one case"))
        });
        let spots = u64::from(fly.laid(seat).spots());
        fly.begin(seat, fletch_core::order::Bits::ones(spots));
    }

    fn grant(&mut self, j: usize, now: f64, net: &mut Net, books: &mut Books) -> Option<Granted> {
        let Some(seat) = self.jobs[j].seat else { return self.strict(j, now, net, books) };
        let Seated { feed, ranges, .. } = &mut self.jobs[j];
        self.acts.clear();
        let acts = &mut self.acts;
        feed.fill(&mut self.fly, seat, self.ahead, acts, |pick: &Pick| {
            if pick.how == How::Range {
                books.fetched(now, 1, true);
                ranges.insert(pick.spot, (net.request(now, 1), now));
            }
        });
        self.obey(now, net, books);
        let asked_for_this: Vec<Act> = self.acts.clone();
        while net.idle(now, u64::from(self.sizes[0])) {
            self.acts.clear();
            if !self.fly.advance(&mut self.acts) {
                break;
            }
            self.obey(now, net, books);
        }
        let Seated { feed, ranges, .. } = &mut self.jobs[j];
        let ready = &self.ready;
        let pick = feed.next(&self.fly, self.overtake, |p| match p.how {
            How::Range => ranges.get(&p.spot).is_some_and(|r| r.0 <= now),
            How::Window | How::Reserve => ready[p.unit as usize] <= now,
        })?;
        let (arrives, asked) = match (pick.how, ranges.remove(&pick.spot)) {
            (_, Some(r)) => r,
            // Its unit left the cache between decision and grant.
            (How::Range, None) => {
                books.fetched(now, 1, true);
                (net.request(now, 1), now)
            }
            _ => (self.ready[pick.unit as usize], self.asked[pick.unit as usize]),
        };
        assert!(arrives != AWAY, "served from a unit that is not here");
        let forced =
            asked == now && (pick.how == How::Range || asked_for_this.contains(&Act::Load(pick.unit)));
        let sample = self.fly.laid(seat).entry(pick.spot);
        // Entries of a subset are numbered by themselves.
        let sample = if u64::from(self.fly.laid(seat).spots()) == books.jobs[j].plan.len() {
            sample
        } else {
            let plan = &books.jobs[j].plan;
            u32::try_from(plan.nth_in(0, plan.len(), u64::from(sample)).expect("an entry is a sample"))
                .unwrap_or(u32::MAX)
        };
        Some(Granted { sample, arrives: arrives.max(now), asked, forced })
    }

    fn leave(&mut self, j: usize) {
        if let Some(seat) = self.jobs[j].seat.take() {
            self.jobs[j].feed.give_back(&mut self.fly, seat);
            self.fly.leave(seat);
        }
        self.jobs[j].strict.clear();
        self.jobs[j].ranges.clear();
    }
}
