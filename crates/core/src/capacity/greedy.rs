//! The greedy step: at given prices the value of each dataset is a function of its own share alone, so the
//! steepest parts of their concave hulls are filled first.

use super::{allocator::Search, rates::evaluate, streams::TOLERANCE};

/// A straight part of a dataset's hull, up to the share `to`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment {
    /// The value of a byte.
    slope: f64,
    dataset: usize,
    to: f64,
}

/// The hulls of all datasets at the prices of one division.
#[derive(Debug, Clone)]
pub(super) struct Hulls {
    /// All segments, steepest first.
    segments: Vec<Segment>,
    /// The shares of each dataset at which its value has a knee, ascending.
    pub knees: Vec<Vec<f64>>,
}

impl Hulls {
    /// Returns hulls that prefer nothing.
    pub fn flat() -> Self {
        Hulls { segments: Vec::new(), knees: Vec::new() }
    }
}

/// Bounds within which the greedy step must leave one dataset.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    pub dataset: usize,
    pub least: f64,
    pub most: f64,
}

/// The order in which the minimums of limits are filled. What one limit takes can fill the most bytes of
/// another one, so more than one order is tried.
#[derive(Debug, Clone, Copy)]
struct LimitOrder {
    reversed: bool,
    /// Whether datasets of several limits come first.
    shared_first: bool,
}

const LIMIT_ORDERS: [LimitOrder; 4] = [
    LimitOrder { reversed: false, shared_first: false },
    LimitOrder { reversed: true, shared_first: false },
    LimitOrder { reversed: false, shared_first: true },
    LimitOrder { reversed: true, shared_first: true },
];

/// A division that is being filled.
struct Filling<'a> {
    search: &'a Search,
    held: Option<Held>,
    shares: Vec<f64>,
    left: f64,
    /// The bytes of each limit's datasets.
    totals: Vec<f64>,
}

impl Filling<'_> {
    /// Returns the bytes that a dataset may still get.
    fn room(&self, dataset: usize) -> f64 {
        let own = self.left.min(self.search.datasets[dataset].room - self.shares[dataset]);
        let of_limits = self.search.limits_of[dataset].iter().map(|&l| self.search.most(l) - self.totals[l]);
        of_limits.fold(own, f64::min).max(0.0)
    }

    /// Returns the bytes that a dataset may still get before it reaches what it is held at.
    fn held_room(&self, dataset: usize) -> f64 {
        self.held.filter(|h| h.dataset == dataset).map_or(f64::INFINITY, |h| h.most) - self.shares[dataset]
    }

    fn give(&mut self, dataset: usize, bytes: f64) {
        let bytes = bytes.min(self.room(dataset));
        if bytes > 0.0 {
            self.shares[dataset] += bytes;
            self.left -= bytes;
            for &limit in &self.search.limits_of[dataset] {
                self.totals[limit] += bytes;
            }
        }
    }

    fn give_segment(&mut self, segment: &Segment, bytes: f64) {
        let d = segment.dataset;
        self.give(d, (segment.to - self.shares[d]).min(self.held_room(d)).min(bytes));
    }

    /// Gives the datasets of a limit the bytes that they get at least: where they are worth most, then
    /// anywhere.
    fn fill_minimum(&mut self, limit: usize, segments: &[Segment], shared_first: bool) {
        let search = self.search;
        let of_limit = |d: usize| search.limits_of[d].contains(&limit);
        let preferred = |d: usize| !shared_first || search.limits_of[d].len() > 1;
        if let Some(held) = self.held.filter(|h| of_limit(h.dataset) && self.shares[h.dataset] == 0.0) {
            self.give(held.dataset, held.least.min(self.lacking(limit)));
        }
        for segment in segments.iter().filter(|s| of_limit(s.dataset) && preferred(s.dataset)) {
            self.give_segment(segment, self.lacking(limit));
        }
        for first in [true, false] {
            for &d in search.limit_datasets(limit).iter().filter(|&&d| preferred(d) == first) {
                self.give(d, self.lacking(limit).min(self.held_room(d)));
            }
        }
    }

    /// Returns the bytes by which the datasets of a limit are below what they get at least.
    fn lacking(&self, limit: usize) -> f64 {
        (self.search.least(limit) - self.totals[limit]).max(0.0)
    }

    /// Divides the rest equally among datasets with room: an estimate of no gain may be wrong.
    fn fill_rest(&mut self) {
        for round in 0..3 {
            // The last round ignores what a dataset is held at: unused capacity helps nobody.
            let room = |f: &Self, d: usize| {
                let held = if round < 2 { f.held_room(d) } else { f64::INFINITY };
                f.room(d).min(held)
            };
            let open: Vec<usize> = (0..self.shares.len())
                .filter(|&d| room(self, d) > TOLERANCE * self.search.datasets[d].size)
                .collect();
            for (i, &d) in open.iter().enumerate() {
                let part = self.left / (open.len() - i) as f64;
                self.give(d, part.min(room(self, d)));
            }
        }
    }
}

impl Search {
    /// Returns the hulls of all datasets at the prices of a division.
    pub(super) fn hulls(&self, shares: &[f64]) -> Hulls {
        let now = evaluate(&self.problem, &self.datasets, shares);
        let mut hulls = Hulls::flat();
        for (d, dataset) in self.datasets.iter().enumerate() {
            let (level, price) = (now.levels[dataset.link], now.prices[dataset.link]);
            let mut knees = dataset.knees(level);
            let previous = self.previous.as_ref().map(|p| p[d].min(dataset.room));
            if let Some(previous) = previous.filter(|&p| p > 0.0) {
                knees.push(previous);
                knees.sort_by(f64::total_cmp);
            }
            let value = |share: f64| {
                let taken_away = previous.map_or(0.0, |p| (p - share).max(0.0));
                dataset.priced_value(share, level, price) - self.price_of_moving(taken_away)
            };
            let mut hull: Vec<(f64, f64)> = vec![(0.0, value(0.0))];
            for &share in &knees {
                let point = (share, value(share));
                if point.1 <= hull[hull.len() - 1].1 {
                    continue;
                }
                while let [.., a, b] = hull[..] {
                    if (point.1 - b.1) * (b.0 - a.0) < (b.1 - a.1) * (point.0 - b.0) {
                        break;
                    }
                    hull.pop();
                }
                hull.push(point);
            }
            let segment = |ends: &[(f64, f64)]| {
                let (from, to) = (ends[0], ends[1]);
                Segment { slope: (to.1 - from.1) / (to.0 - from.0), dataset: d, to: to.0 }
            };
            hulls.segments.extend(hull.windows(2).map(segment));
            hulls.knees.push(knees);
        }
        hulls.segments.sort_by(|a, b| b.slope.total_cmp(&a.slope).then(a.dataset.cmp(&b.dataset)));
        hulls
    }

    /// Fills the capacity along hulls: minimums first, then the steepest segments, then the rest equally.
    pub(super) fn fill(&self, hulls: &Hulls, held: Option<Held>) -> Vec<f64> {
        let [first, others @ ..] = LIMIT_ORDERS;
        let mut shares = self.fill_in(hulls, held, first);
        for order in others {
            if self.is_allowed(&shares) {
                break;
            }
            shares = self.fill_in(hulls, held, order);
        }
        shares
    }

    fn fill_in(&self, hulls: &Hulls, held: Option<Held>, order: LimitOrder) -> Vec<f64> {
        let limits = self.problem.limits.len();
        let mut filling = Filling {
            search: self,
            held,
            shares: vec![0.0; self.datasets.len()],
            left: self.problem.capacity,
            totals: vec![0.0; limits],
        };
        for i in 0..limits {
            let limit = if order.reversed { limits - 1 - i } else { i };
            filling.fill_minimum(limit, &hulls.segments, order.shared_first);
        }
        if let Some(held) = held {
            filling.give(held.dataset, held.least - filling.shares[held.dataset]);
        }
        for segment in &hulls.segments {
            filling.give_segment(segment, f64::INFINITY);
        }
        filling.fill_rest();
        filling.shares
    }
}
