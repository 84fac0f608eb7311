//! Caches of samples under orders that nobody may change: no cache, LRU, and never evict.

use super::{Arm, Granted, Net, key};
use crate::{Case, books::Books};
use fletch_core::plan::Permutation;
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Policy {
    Direct,
    Lru,
    Pin,
}

/// A cache of samples that reads what it lacks by range.
pub struct Plain {
    policy: Policy,
    capacity: usize,
    keys: Vec<fletch_core::plan::OrderKey>,
    orders: Vec<Vec<u32>>,
    /// Of each cached sample: when it arrived and its last use.
    cached: BTreeMap<u32, (f64, u64)>,
    used: BTreeMap<u64, u32>,
    uses: u64,
}

impl Plain {
    pub(super) fn new(case: &Case, policy: Policy) -> Self {
        Plain {
            policy,
            capacity: usize::try_from(case.capacity()).unwrap_or(usize::MAX),
            keys: (0..case.jobs.len()).map(|j| key(case, j as u64, 0)).collect(),
            orders: vec![Vec::new(); case.jobs.len()],
            cached: BTreeMap::new(),
            used: BTreeMap::new(),
            uses: 0,
        }
    }
}

/// The samples of a job's plan in a random order of its own, last first.
fn permuted(books: &Books, j: usize, key: &fletch_core::plan::OrderKey) -> Vec<u32> {
    let b = &books.jobs[j];
    let plan: Vec<u32> = b.plan.iter_in(0, b.plan.len()).filter_map(|s| u32::try_from(s).ok()).collect();
    let p = Permutation::new(key, "order", b.epoch, plan.len() as u64);
    (0..p.len()).map(|i| plan[p.at(i) as usize]).collect()
}

impl Arm for Plain {
    fn begin(&mut self, j: usize, books: &mut Books) {
        self.orders[j] = permuted(books, j, &self.keys[j]);
    }

    fn grant(&mut self, j: usize, now: f64, net: &mut Net, books: &mut Books) -> Option<Granted> {
        let sample = self.orders[j].pop()?;
        self.uses += 1;
        let stamp = self.uses;
        if let Some((arrives, last)) = self.cached.get_mut(&sample) {
            let arrives = *arrives;
            if self.policy == Policy::Lru {
                self.used.remove(last);
                self.used.insert(stamp, sample);
                *last = stamp;
            }
            return Some(Granted { sample, arrives: arrives.max(now), asked: 0.0, forced: false });
        }
        let arrives = net.request(now, 1);
        books.fetched(now, 1, true);
        let room = match self.policy {
            Policy::Direct => false,
            Policy::Pin => self.cached.len() < self.capacity,
            Policy::Lru => {
                if self.cached.len() >= self.capacity
                    && let Some((_, oldest)) = self.used.pop_first()
                {
                    self.cached.remove(&oldest);
                }
                self.capacity > 0
            }
        };
        if room {
            self.cached.insert(sample, (arrives, stamp));
            if self.policy == Policy::Lru {
                self.used.insert(stamp, sample);
            }
        }
        Some(Granted { sample, arrives, asked: now, forced: true })
    }

    fn leave(&mut self, j: usize) {
        self.orders[j].clear();
    }
}
