//! Bounds the CPU time of a thread.

use nix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// How long a thread that used its part sleeps.
const PAUSE: Duration = Duration::from_millis(5);

/// Bounds the calling thread to a part of a core.
#[derive(Debug)]
pub struct Pace {
    began: Instant,
    used_at_begin: Duration,
    part: f64,
}

fn used() -> Duration {
    Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("the clock of this thread"))
}

impl Pace {
    /// Bounds this thread to `part` of a core from now on.
    #[must_use]
    pub fn new(part: f64) -> Self {
        Pace { began: Instant::now(), used_at_begin: used(), part }
    }

    /// Sleeps while the thread has used more than its part.
    pub fn keep(&self) {
        while self.share() > self.part {
            std::thread::sleep(PAUSE);
        }
    }

    /// Returns the part of a core that the thread has used so far.
    #[must_use]
    pub fn share(&self) -> f64 {
        let elapsed = self.began.elapsed().max(PAUSE);
        (used() - self.used_at_begin).as_secs_f64() / elapsed.as_secs_f64()
    }
}
