//! Caches of single samples under fixed orders: no cache, LRU, and pin (never evict).

use super::{Arm, Granted, OriginLink, key};
use crate::{Case, statistics::Statistics};
use fletch_core::plan::Permutation;
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Policy {
    Direct,
    Lru,
    Pin,
}

/// A cache of samples. It reads missing samples by range.
pub struct Plain {
    policy: Policy,
    capacity: usize,
    keys: Vec<fletch_core::plan::OrderKey>,
    orders: Vec<Vec<u32>>,
    /// Of each cached sample: when it arrived, and its last use.
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

/// Returns the samples of a job's plan in a random order, last first.
fn permuted(stats: &Statistics, j: usize, key: &fletch_core::plan::OrderKey) -> Vec<u32> {
    let b = &stats.jobs[j];
    let plan: Vec<u32> = b.plan.iter_in(0, b.plan.len()).filter_map(|s| u32::try_from(s).ok()).collect();
    let p = Permutation::new(key, "order", b.epoch, plan.len() as u64);
    (0..p.len()).map(|i| plan[p.at(i) as usize]).collect()
}

impl Arm for Plain {
    fn begin(&mut self, j: usize, stats: &mut Statistics) {
        self.orders[j] = permuted(stats, j, &self.keys[j]);
    }

    fn grant(
        &mut self,
        j: usize,
        now: f64,
        link: &mut OriginLink,
        stats: &mut Statistics,
    ) -> Option<Granted> {
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
        let arrives = link.request(now, 1);
        stats.fetched(now, 1, true);
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
