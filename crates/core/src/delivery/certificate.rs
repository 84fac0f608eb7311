//! Shuffle certificates: how well shuffled an epoch's deliveries were, compared with a uniform shuffle.
//!
//! The statistic is *near*: how often two samples at a distance of 1 to 10 positions in one consumer's order
//! come from the same unit, relative to a uniform shuffle of the same plan. 1 is as good as uniform.
//!
//! Chunks of a pack are random groups of samples, so neighbours from one unit are not alike. *Near* bounds
//! how much of a batch they can make up. An order with too many such neighbours (*mates*) is *poor*. The
//! sweep policy sizes its window so that this seldom happens
//! ([`SweepParams::window_least`](crate::order::sweep::SweepParams)): with a few dozen units, half of them
//! cached, up to .44 of the neighbours are mates.

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// The largest distance between two compared samples, in positions.
pub const LAGS: usize = 10;
/// An order with a larger part of mates is poor. In three training studies (`benches/parity`), orders with
/// .14 and .27 of mates ended as well as uniform shuffles, and an order with .56 did not.
pub const MATES_MAX: f64 = 0.4;
/// An order of fewer positions is never called poor: they prove nothing.
const DELIVERED_MIN: u64 = 1000;
/// An order is not poor if a uniform shuffle has nearly as many mates, because the plan has few units.
const NEAR10_MIN: f64 = 1.5;

/// The statistics of an epoch's order.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Certificate {
    /// Delivered samples that were counted.
    pub delivered: u64,
    /// Neighbours from one unit at distance 1, relative to a uniform shuffle.
    pub near: f64,
    /// The same at distances 1 to 10.
    pub near10: f64,
    /// Mates: the part of all pairs at distances 1 to 10 that come from one unit.
    pub mates: f64,
    /// Whether training on such an order may end worse: `mates` is over [`MATES_MAX`], not by chance, and
    /// enough samples were counted.
    #[serde(default)]
    pub poor: bool,
}

/// Counts neighbours in one consumer's order while it is delivered. Counts of ranks can be merged.
#[derive(Debug, Clone, Default)]
pub struct Shuffle {
    last: VecDeque<u32>,
    same: [u64; LAGS],
    pairs: [u64; LAGS],
    delivered: u64,
}

impl Shuffle {
    /// Counts the next delivered sample, which comes from `unit`.
    pub fn see(&mut self, unit: u32) {
        self.delivered += 1;
        for (lag, &x) in self.last.iter().enumerate() {
            self.pairs[lag] += 1;
            self.same[lag] += u64::from(x == unit);
        }
        self.last.push_front(unit);
        self.last.truncate(LAGS);
    }

    /// Adds the counts of another rank.
    pub fn merge(&mut self, other: &Shuffle) {
        self.delivered += other.delivered;
        for i in 0..LAGS {
            self.same[i] += other.same[i];
            self.pairs[i] += other.pairs[i];
        }
    }

    /// Returns the certificate, given the [`chance`] that two random samples of the plan share a unit.
    #[must_use]
    pub fn certificate(&self, chance: f64) -> Certificate {
        let part = |from: usize, to: usize| {
            let (s, p): (u64, u64) = (self.same[from..to].iter().sum(), self.pairs[from..to].iter().sum());
            s as f64 / p.max(1) as f64
        };
        let relative = |x: f64| if chance > 0.0 { x / chance } else { 0.0 };
        let (near10, mates) = (relative(part(0, LAGS)), part(0, LAGS));
        Certificate {
            delivered: self.delivered,
            near: relative(part(0, 1)),
            near10,
            mates,
            poor: self.delivered >= DELIVERED_MIN && mates > MATES_MAX && near10 > NEAR10_MIN,
        }
    }
}

/// Returns the chance that two different random entries of a plan share a unit. `per_unit` is how many of the
/// plan's entries each unit holds.
#[must_use]
pub fn chance(per_unit: impl IntoIterator<Item = u64>) -> f64 {
    let (mut pairs, mut n) = (0.0, 0.0);
    for x in per_unit {
        let x = x as f64;
        pairs += x * (x - 1.0);
        n += x;
    }
    if n > 1.0 { pairs / (n * (n - 1.0)) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Hash, Root,
        plan::{OrderKey, Permutation},
    };

    fn see(order: impl Iterator<Item = u64>) -> Certificate {
        let mut s = Shuffle::default();
        order.for_each(|x| s.see((x / 32) as u32));
        s.certificate(chance(std::iter::repeat_n(32, 400)))
    }

    #[test]
    fn a_uniform_shuffle_is_one_and_no_shuffle_is_not() {
        let n = 400 * 32;
        let key = OrderKey::new(Root(Hash::of(b"r")), Hash::of(b"p"), 1, 1);
        let near: Vec<f64> = (0..20)
            .map(|i| see((0..n).map(|p| Permutation::new(&key, "order", i, n).at(p))).near10)
            .collect();
        let mean = near.iter().sum::<f64>() / 20.0;
        assert!((mean - 1.0).abs() < 0.1, "{mean}");
        let sorted = see(0..n);
        assert!(sorted.near > 350.0 && sorted.poor && sorted.mates > 0.8);
        assert!(!see((0..n).map(|p| Permutation::new(&key, "order", 9, n).at(p))).poor);
        // 999 samples are too few; of two units, half of all neighbours are mates in any order.
        assert!(!see(0..999).poor);
        let two = |unit: fn(u64) -> u64| {
            let mut s = Shuffle::default();
            (0..4000).for_each(|x| s.see(unit(Permutation::new(&key, "order", 3, 4000).at(x)) as u32));
            s.certificate(chance([2000, 2000]))
        };
        assert!(two(|x| x % 2).mates > 0.45 && !two(|x| x % 2).poor);
    }

    #[test]
    fn ranks_add_up() {
        let (mut a, mut b) = (Shuffle::default(), Shuffle::default());
        (0..50).for_each(|i| a.see(i % 3));
        (0..70).for_each(|i| b.see(i % 5));
        let mut sum = a.clone();
        sum.merge(&b);
        let c = sum.certificate(1.0);
        assert_eq!(c.delivered, 120);
        assert!(c.near == 0.0 && c.near10 > 0.0);
    }
}
