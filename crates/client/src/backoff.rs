//! The wait between attempts: exponential, with jitter.
//!
//! The jitter spreads the retries of many clients that lost their server at the same moment.

use rand::Rng;
use std::time::Duration;

const FIRST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(2);
/// The longest `Retry-After` that is honoured. The deadline of a call is usually shorter.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);

pub(crate) struct Backoff {
    step: Duration,
}

impl Backoff {
    pub fn new() -> Self {
        Backoff { step: FIRST }
    }

    /// Returns the next wait: at least `asked`, the time the server asked for, up to 30 s.
    pub fn wait(&mut self, asked: Option<Duration>) -> Duration {
        let jitter = rand::rng().random_range(0.5..1.0);
        let own = self.step.mul_f64(jitter);
        self.step = (self.step * 2).min(LONGEST);
        match asked {
            Some(asked) => asked.min(RETRY_AFTER_MAX) + FIRST.mul_f64(jitter),
            None => own,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_a_limit_and_honour_retry_after() {
        let mut b = Backoff::new();
        let waits: Vec<Duration> = (0..12).map(|_| b.wait(None)).collect();
        assert!(waits[0] >= FIRST / 2 && waits[0] <= FIRST);
        assert!(waits.iter().all(|w| *w <= LONGEST));
        assert!(waits[11] >= LONGEST / 2);
        assert!(b.wait(Some(Duration::from_secs(3))) >= Duration::from_secs(3));
        assert!(b.wait(Some(Duration::from_secs(3600))) <= RETRY_AFTER_MAX + FIRST);
    }
}
