//! How long a client may keep replies waiting. Pure.
//!
//! Each connection has a budget of time. Waiting for the client uses it up, and bytes that the client takes
//! refill it, at [`SEND_BYTES_PER_S_MIN`]. So a client that reads nothing is cut after the whole budget, one
//! that reads more slowly than the least rate a little later, and a faster one never.

use std::time::Duration;

/// The slowest rate, in bytes a second, at which a client may read replies in the long run.
pub const SEND_BYTES_PER_S_MIN: u64 = 16 << 10;

/// The time for which a client may still keep replies waiting.
#[derive(Debug, Clone, Copy)]
pub struct DrainBudget {
    left: Duration,
    most: Duration,
}

impl DrainBudget {
    /// A full budget of `most`.
    #[must_use]
    pub fn new(most: Duration) -> Self {
        DrainBudget { left: most, most }
    }

    /// Returns what is left.
    #[must_use]
    pub fn left(&self) -> Duration {
        self.left
    }

    /// Notes that the server waited for the client.
    pub fn waited(&mut self, time: Duration) {
        self.left = self.left.saturating_sub(time);
    }

    /// Notes that the client took bytes.
    pub fn took(&mut self, bytes: usize) {
        let earned = Duration::from_secs_f64(bytes as f64 / SEND_BYTES_PER_S_MIN as f64);
        self.left = self.left.saturating_add(earned).min(self.most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MOST: Duration = Duration::from_secs(30);

    /// Returns after how many seconds a client is cut that takes `bytes` every `every` seconds.
    fn cut_after(bytes: usize, every: u64) -> Option<u64> {
        let mut budget = DrainBudget::new(MOST);
        (1..100_000).map(|i| i * every).find(|_| {
            budget.waited(Duration::from_secs(every));
            let cut = budget.left().is_zero();
            budget.took(bytes);
            cut
        })
    }

    #[test]
    fn a_client_that_drips_is_cut_and_a_slow_one_is_not() {
        assert_eq!(cut_after(0, 1), Some(30));
        assert_eq!(cut_after(1, 29), Some(58), "a byte every 29 s refills nothing");
        assert_eq!(cut_after(8 << 10, 1), Some(59), "half of the rate takes twice as long");
        assert_eq!(cut_after(16 << 10, 1), None);
        assert_eq!(cut_after(20 * (16 << 10), 20), None, "bursts count like a steady rate");
    }

    proptest! {
        #[test]
        fn whoever_reads_at_the_least_rate_is_never_cut(
            steps in proptest::collection::vec(1u64..30_000, 1..200),
        ) {
            let mut budget = DrainBudget::new(MOST);
            for ms in steps {
                budget.waited(Duration::from_millis(ms));
                prop_assert!(!budget.left().is_zero());
                budget.took(usize::try_from(ms * SEND_BYTES_PER_S_MIN / 1_000 + 1).expect("few"));
            }
        }
    }
}
