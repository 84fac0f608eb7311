//! The clock of leases: it counts the time in which clients could renew them.
//!
//! A server that is paused (a virtual machine that is moved, a frozen cgroup, a suspended laptop) hears no
//! renewal. By any other clock all leases would have expired when it goes on, and their samples would be
//! delivered a second time. This clock does not count such a gap, as a restart gives each lease a whole
//! `lease_ttl`.
//!
//! Invariant: while the server runs, maintenance reads it several times in each [`STALL`].

use fletch_host::clock::BootTime;
use parking_lot::Mutex;
use std::time::Duration;

/// Two readings that are further apart have a stall between them.
const STALL: Duration = Duration::from_secs(2);

/// The clock of a server's leases. It begins at zero, and never goes back.
#[derive(Debug)]
pub struct LeaseClock(Mutex<Reading>);

#[derive(Debug, Clone, Copy)]
struct Reading {
    at: BootTime,
    served: Duration,
}

impl Reading {
    /// Reads the clock at `now`. Returns the gap that it does not count, if there is one.
    fn read(&mut self, now: BootTime) -> Option<Duration> {
        let gap = now.since(self.at);
        self.at = self.at.max(now);
        if gap > STALL {
            return Some(gap);
        }
        self.served += gap;
        None
    }
}

impl LeaseClock {
    /// Returns a clock that begins now.
    #[must_use]
    pub fn new() -> Self {
        LeaseClock(Mutex::new(Reading { at: BootTime::now(), served: Duration::ZERO }))
    }

    /// Returns the time in milliseconds.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        let mut reading = self.0.lock();
        let gap = reading.read(BootTime::now());
        let served = reading.served;
        drop(reading);
        if let Some(gap) = gap {
            tracing::warn!(?gap, "the server was paused; leases live on by that time");
        }
        u64::try_from(served.as_millis()).unwrap_or(u64::MAX)
    }
}

impl Default for LeaseClock {
    fn default() -> Self {
        LeaseClock::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_does_not_count() {
        let begun = BootTime::now();
        let at = |ms| begun.after(Duration::from_millis(ms));
        let mut reading = Reading { at: begun, served: Duration::ZERO };
        for ms in [250, 500, 2_400] {
            assert_eq!(reading.read(at(ms)), None);
        }
        assert_eq!(reading.served, Duration::from_millis(2_400));
        assert_eq!(reading.read(at(33_000)), Some(Duration::from_millis(30_600)));
        assert_eq!(reading.read(at(32_000)), None, "another thread read the time before");
        assert_eq!(reading.read(at(33_100)), None);
        assert_eq!(reading.served, Duration::from_millis(2_500));
    }
}
