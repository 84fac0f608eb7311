//! The clock that goes on while the machine is suspended, for times after which a right ends.

use nix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// A time on `CLOCK_BOOTTIME`: since the start of the machine, suspension included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootTime(Duration);

impl BootTime {
    /// Returns the time now. A clock that cannot be read gives the last time of all, so every right ended.
    #[must_use]
    pub fn now() -> Self {
        BootTime(clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::MAX, Duration::from))
    }

    /// Returns the time that is later by `more`.
    #[must_use]
    pub fn after(self, more: Duration) -> Self {
        BootTime(self.0.saturating_add(more))
    }

    /// Returns the time that is earlier by `less`, or the start of the machine.
    #[must_use]
    pub fn before(self, less: Duration) -> Self {
        BootTime(self.0.saturating_sub(less))
    }

    /// Returns how long `earlier` was ago at this time. Zero if it was not earlier.
    #[must_use]
    pub fn since(self, earlier: BootTime) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Returns how long ago this time was.
    #[must_use]
    pub fn elapsed(self) -> Duration {
        BootTime::now().since(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_come_one_after_the_other() {
        let begun = BootTime::now();
        std::thread::sleep(Duration::from_millis(5));
        let now = BootTime::now();
        assert!(now > begun && now.since(begun) >= Duration::from_millis(5), "{begun:?} {now:?}");
        assert_eq!(begun.since(now), Duration::ZERO);
        assert_eq!(begun.after(Duration::from_secs(7)).since(begun), Duration::from_secs(7));
    }
}
