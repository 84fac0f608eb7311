//! Exchanges between datasets, which close what the greedy step leaves open: a dataset that wants all or
//! nothing, and links whose prices change with the division.

use super::{
    allocator::{Search, moved},
    greedy::{Held, Hulls},
    rates::evaluate,
};

/// Rounds in which each dataset is tried at each of its knees.
const ROUNDS: usize = 6;
/// With more datasets than these, only those that ended between two knees exchange bytes.
const ALL_PAIRS_MAX: usize = 12;
/// The least part of a share that is exchanged.
const LEAST_PART: f64 = 1.0 / 256.0;
/// A difference in bytes that does not count, relative to a dataset's size or the capacity.
const SAME: f64 = 1e-6;

impl Search {
    /// Whether a dataset's share lies between two of its knees.
    fn is_between(&self, hulls: &Hulls, dataset: usize, share: f64) -> bool {
        let size = self.datasets[dataset].size;
        share > 0.0 && hulls.knees[dataset].iter().all(|knee| (knee - share).abs() > SAME * size)
    }

    /// Tries each dataset at each of its knees, the others being filled around it.
    pub(super) fn try_knees(&mut self) {
        for _ in 0..ROUNDS {
            let before = self.best_score;
            let start = self.best.clone();
            let hulls = self.hulls(&start);
            let mut tries: Vec<Held> = Vec::new();
            for (d, dataset) in self.datasets.iter().enumerate() {
                let now = start[d];
                let other =
                    hulls.knees[d].iter().chain([&0.0]).filter(|k| (**k - now).abs() > SAME * dataset.size);
                tries.extend(other.map(|&knee| match knee > now {
                    true => Held { dataset: d, least: knee, most: f64::INFINITY },
                    false => Held { dataset: d, least: 0.0, most: knee },
                }));
                tries.push(Held { dataset: d, least: now, most: now });
            }
            // A dataset between two knees has most to gain.
            tries.sort_by_key(|t| !self.is_between(&hulls, t.dataset, start[t.dataset]));
            for held in tries {
                if self.is_spent() {
                    return;
                }
                let filled = self.fill(&hulls, Some(held));
                self.offer(filled, SAME / 1000.0);
                if let Some(raised) = self.raise(&start, held) {
                    self.offer(raised, SAME / 1000.0);
                }
            }
            if self.best_score <= before + SAME / 1000.0 * (1.0 + before.abs()) {
                return;
            }
        }
    }

    /// Returns a division with one dataset raised to `held.least` at the cost of the datasets whose bytes are
    /// worth least.
    fn raise(&self, shares: &[f64], held: Held) -> Option<Vec<f64>> {
        let mut need = held.least - shares[held.dataset];
        if need <= 0.0 {
            return None;
        }
        let now = evaluate(&self.problem, &self.datasets, shares);
        let density = |d: usize| {
            let dataset = &self.datasets[d];
            let (level, price) = (now.levels[dataset.link], now.prices[dataset.link]);
            let gain =
                dataset.priced_value(shares[d], level, price) - dataset.priced_value(0.0, level, price);
            gain / shares[d]
        };
        let mut others: Vec<(f64, usize)> = (0..shares.len())
            .filter(|&d| d != held.dataset && shares[d] > 0.0)
            .map(|d| (density(d), d))
            .collect();
        others.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let mut out = shares.to_vec();
        for (_, d) in others {
            let bytes = out[d].min(need);
            out[d] -= bytes;
            out[held.dataset] += bytes;
            need -= bytes;
        }
        self.is_allowed(&out).then_some(out)
    }

    /// Exchanges ever smaller parts of shares between pairs of datasets.
    pub(super) fn exchange(&mut self) {
        let hulls = self.hulls(&self.best.clone());
        let count = self.datasets.len();
        let movable: Vec<usize> = (0..count)
            .filter(|&d| count <= ALL_PAIRS_MAX || self.is_between(&hulls, d, self.best[d]))
            .collect();
        let mut part = 1.0;
        while part >= LEAST_PART {
            let before = self.best_score;
            for &one in &movable {
                for other in 0..count {
                    for (from, to) in [(one, other), (other, one)] {
                        if self.is_spent() {
                            return;
                        }
                        self.try_exchange(from, to, part);
                    }
                }
            }
            if self.best_score <= before {
                part /= 2.0;
            }
        }
    }

    /// Moves a part of one dataset's share to another dataset, if the division gains by it.
    fn try_exchange(&mut self, from: usize, to: usize, part: f64) {
        let bytes = (self.best[from] * part).min(self.datasets[to].room - self.best[to]);
        if from == to || bytes < SAME * self.problem.capacity {
            return;
        }
        let mut shares = self.best.clone();
        shares[from] -= bytes;
        shares[to] += bytes;
        self.offer(shares, SAME / 10.0);
    }

    /// Whether two divisions are the same.
    pub(super) fn is_same(&self, a: &[f64], b: &[f64]) -> bool {
        moved(a, b) < SAME * self.problem.capacity
    }
}
