//! Waiting between attempts: exponential with full jitter, so that a thousand mounts that lost
//! their server at once do not come back at once.

use rand::Rng;
use std::time::Duration;

const FIRST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(2);
/// A server that asks for more is asked again after this; the deadline ends it anyway.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);

pub(crate) struct Backoff {
    step: Duration,
}

impl Backoff {
    pub fn new() -> Self {
        Backoff { step: FIRST }
    }

    /// How long to wait now: at least what the server asked for.
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
    fn waits_grow_to_a_bound_and_keep_to_what_is_asked() {
        let mut b = Backoff::new();
        let waits: Vec<Duration> = (0..12).map(|_| b.wait(None)).collect();
        assert!(waits[0] >= FIRST / 2 && waits[0] <= FIRST);
        assert!(waits.iter().all(|w| *w <= LONGEST));
        assert!(waits[11] >= LONGEST / 2);
        assert!(b.wait(Some(Duration::from_secs(3))) >= Duration::from_secs(3));
        assert!(b.wait(Some(Duration::from_secs(3600))) <= RETRY_AFTER_MAX + FIRST);
    }
}
