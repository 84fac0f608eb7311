//! Decides how long a call waits before another home is asked too, and how many calls may do that. Pure.
//!
//! A hedge is a call to a second home while the first still may answer (J. Dean and L. A. Barroso, "The Tail
//! at Scale", CACM 2013). Its time is three times the 99th percentile of the first home's latencies, and its
//! number is at most 2 % of the home's calls, after a burst of [`BURST`].

use std::time::Duration;

/// How many latencies are remembered.
const LATENCIES: usize = 128;
/// With fewer latencies than this, the longest one stands for the percentile.
const LATENCIES_MIN: usize = 8;
/// The shortest wait before a hedge, however fast the home is: a loaded machine is not a slow home.
const HEDGE_MIN: Duration = Duration::from_millis(100);
/// The wait before a hedge at a home that has not answered often enough.
const HEDGE_UNKNOWN: Duration = Duration::from_millis(300);
/// The shortest silence of a call that counts as its failure.
const SILENT_MIN: Duration = Duration::from_millis(750);
/// What each call adds to the budget, in thousandths of a hedge: 2 %.
const EARNED: u32 = 20;
/// What a hedge costs.
const COST: u32 = 1000;
/// How many hedges a home has at first.
pub const BURST: u32 = 3;
/// The most hedges that a home saves up.
const SAVED_MAX: u32 = 10;

/// The recent latencies of a home, and its budget of hedges.
#[derive(Debug, Clone)]
pub struct Patience {
    latencies: Vec<Duration>,
    next: usize,
    budget: u32,
}

impl Default for Patience {
    fn default() -> Self {
        Patience { latencies: Vec::new(), next: 0, budget: BURST * COST }
    }
}

impl Patience {
    /// Records the latency of an answer.
    pub fn record(&mut self, latency: Duration) {
        if self.latencies.len() < LATENCIES {
            self.latencies.push(latency);
        } else {
            self.latencies[self.next] = latency;
        }
        self.next = (self.next + 1) % LATENCIES;
    }

    /// Returns how long a call waits before another home is asked too.
    #[must_use]
    pub fn hedge_after(&self) -> Duration {
        let mut sorted = self.latencies.clone();
        sorted.sort_unstable();
        // Of 128 latencies, the second longest.
        let rank = (sorted.len() * 99).div_ceil(100).saturating_sub(1);
        let thrice = sorted.get(rank).copied().unwrap_or_default().saturating_mul(3);
        thrice.max(if sorted.len() < LATENCIES_MIN { HEDGE_UNKNOWN } else { HEDGE_MIN })
    }

    /// Returns the silence after which a call counts as failed, if another home can answer it.
    #[must_use]
    pub fn silent_after(&self) -> Duration {
        self.hedge_after().saturating_mul(2).max(SILENT_MIN)
    }

    /// Counts a call, which adds to the budget of hedges.
    pub fn earn(&mut self) {
        self.budget = (self.budget + EARNED).min(SAVED_MAX * COST);
    }

    /// Takes a hedge from the budget. Returns whether it had one.
    pub fn take_hedge(&mut self) -> bool {
        let left = self.budget.checked_sub(COST);
        self.budget = left.unwrap_or(self.budget);
        left.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn a_hedge_waits_three_times_the_99th_percentile() {
        let mut patience = Patience::default();
        assert_eq!((patience.hedge_after(), patience.silent_after()), (MS(300), MS(750)));
        patience.record(MS(400));
        assert_eq!(patience.hedge_after(), MS(1200), "a slow first answer is believed");
        for _ in 0..1000 {
            patience.record(MS(50));
        }
        assert_eq!((patience.hedge_after(), patience.silent_after()), (MS(150), MS(750)));
        patience.record(MS(5000));
        assert_eq!(patience.hedge_after(), MS(150), "one of 128 is beyond the percentile");
        patience.record(MS(5000));
        assert_eq!((patience.hedge_after(), patience.silent_after()), (MS(15_000), MS(30_000)));
    }

    proptest! {
        #[test]
        fn hedges_are_at_most_two_in_a_hundred_calls_after_the_burst(
            steps in prop::collection::vec(any::<bool>(), 1..5000),
        ) {
            let (mut patience, mut calls, mut hedges) = (Patience::default(), 0u32, 0u32);
            for hedge in steps {
                if hedge {
                    hedges += u32::from(patience.take_hedge());
                } else {
                    patience.earn();
                    calls += 1;
                }
                prop_assert!(hedges <= BURST + calls / 50);
            }
        }

        #[test]
        fn waits_stay_ordered_and_bounded_by_what_was_seen(
            latencies in prop::collection::vec(0u64..20_000, 0..400),
        ) {
            let mut patience = Patience::default();
            latencies.iter().for_each(|&ms| patience.record(MS(ms)));
            let most = MS(latencies.iter().copied().max().unwrap_or(0)) * 3;
            prop_assert!(patience.hedge_after() >= HEDGE_MIN);
            prop_assert!(patience.hedge_after() <= most.max(HEDGE_UNKNOWN));
            prop_assert!(patience.silent_after() >= patience.hedge_after());
        }
    }
}
