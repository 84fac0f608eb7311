//! Counts events of one kind, and says when the log should tell of one.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// How often the log has a line for the same kind.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Events of one kind.
#[derive(Debug)]
pub struct Event {
    began: Instant,
    count: AtomicU64,
    /// When the log last told of one, in milliseconds from `began`, from 1. 0: never.
    told_at: AtomicU64,
    told: AtomicU64,
}

impl Default for Event {
    fn default() -> Self {
        let (count, told_at, told) = Default::default();
        Event { began: Instant::now(), count, told_at, told }
    }
}

impl Event {
    /// Counts an event. Returns how many are new since the last line of the log, if it is time for one.
    pub fn count(&self) -> Option<u64> {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX - 1) + 1;
        self.count_at(now)
    }

    fn count_at(&self, now: u64) -> Option<u64> {
        let count = self.count.fetch_add(1, Relaxed) + 1;
        let last = self.told_at.load(Relaxed);
        let due = last == 0 || u128::from(now.saturating_sub(last)) >= LOG_INTERVAL.as_millis();
        let first = due && self.told_at.compare_exchange(last, now, Relaxed, Relaxed).is_ok();
        first.then(|| count.saturating_sub(self.told.swap(count, Relaxed)))
    }

    /// Returns the number of events.
    pub fn total(&self) -> u64 {
        self.count.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_tells_at_once_and_then_at_intervals() {
        let event = Event::default();
        assert_eq!(event.count_at(1), Some(1));
        assert_eq!((event.count_at(2), event.count_at(9_000)), (None, None));
        assert_eq!(event.count_at(10_001), Some(3));
        assert_eq!(event.total(), 4);
    }
}
