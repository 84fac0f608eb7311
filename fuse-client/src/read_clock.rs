//! The time in which programs wait for READs of a mount, and the time between READs.
//!
//! 1. Every moment since the first READ belongs to the read time, the think time or a pause.
//! 2. The clock costs a READ two short locks, and holds none while the READ waits.

use parking_lot::{Mutex, MutexGuard};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// A longer time without a READ is a pause: a checkpoint, an evaluation, or the end of a program.
pub const PAUSE_MIN: Duration = Duration::from_secs(10);

/// What a clock measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadTimes {
    /// The time in which at least one READ was under way.
    pub read: Duration,
    /// The time between two READs, without pauses.
    pub think: Duration,
}

/// The clock of one mount.
#[derive(Debug, Default)]
pub struct ReadClock(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    in_flight: u64,
    /// When `in_flight` last changed from or to 0; `None` before the first READ.
    since: Option<Instant>,
    times: ReadTimes,
}

/// Counts one READ as under way until it is dropped, after the reply was sent.
#[derive(Debug)]
pub struct ReadGuard(Arc<ReadClock>);

impl Drop for ReadGuard {
    fn drop(&mut self) {
        self.0.end(Instant::now());
    }
}

impl ReadClock {
    fn state(&self) -> MutexGuard<'_, State> {
        // Each change leaves the state consistent, so a panic elsewhere does no harm.
        self.0.lock()
    }

    /// Counts a READ as under way until the guard is dropped.
    #[must_use]
    pub fn enter(self: &Arc<Self>) -> ReadGuard {
        self.begin(Instant::now());
        ReadGuard(Arc::clone(self))
    }

    fn begin(&self, now: Instant) {
        let mut state = self.state();
        if state.in_flight == 0 {
            let between = state.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
            if between < PAUSE_MIN {
                state.times.think += between;
            }
            state.since = Some(now);
        }
        state.in_flight += 1;
    }

    fn end(&self, now: Instant) {
        let mut state = self.state();
        state.in_flight = state.in_flight.saturating_sub(1);
        if state.in_flight == 0 {
            let under_way = state.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
            state.times.read += under_way;
            state.since = Some(now);
        }
    }

    /// Returns the times until now. The time since the last READ counts when the next one begins.
    #[must_use]
    pub fn times(&self) -> ReadTimes {
        self.times_at(Instant::now())
    }

    fn times_at(&self, now: Instant) -> ReadTimes {
        let state = self.state();
        let mut times = state.times;
        if let Some(since) = state.since.filter(|_| state.in_flight > 0) {
            times.read += now.saturating_duration_since(since);
        }
        times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_divided_into_reads_thinking_and_pauses() {
        let (clock, start) = (ReadClock::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let seen = |ms| {
            let times = clock.times_at(at(ms));
            (times.read.as_millis(), times.think.as_millis())
        };
        clock.begin(at(1000));
        // Two READs at once count once.
        clock.begin(at(1010));
        assert_eq!(seen(1015), (15, 0), "one that is under way counts");
        clock.end(at(1020));
        clock.end(at(1030));
        assert_eq!(seen(1900), (30, 0), "nobody knows yet whether the program goes on");
        clock.begin(at(2030));
        clock.end(at(2034));
        assert_eq!(seen(2034), (34, 1000));
        clock.begin(at(12_034));
        clock.end(at(12_035));
        assert_eq!(seen(12_035), (35, 1000), "10 s are a pause");
    }

    #[test]
    fn a_guard_counts_until_it_is_dropped() {
        let clock = Arc::<ReadClock>::default();
        assert_eq!(clock.times(), ReadTimes::default());
        let (one, two) = (clock.enter(), clock.enter());
        std::thread::sleep(Duration::from_millis(20));
        drop(one);
        assert!(clock.times().read >= Duration::from_millis(20));
        drop(two);
        let read = clock.times().read;
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(clock.times().read, read);
    }
}
