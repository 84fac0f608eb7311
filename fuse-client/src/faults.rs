//! The fault counters and their log lines. It counts every failure, but bounds the log lines: a reader that
//! retries in a loop must not fill the disk.

use crate::fs::error::{Fault, FsError};
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// The shortest time between two log lines for one fault.
const LINE_EVERY: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
struct LogState {
    last_line: Option<Instant>,
    suppressed: u64,
}

/// The failures so far, by fault.
#[derive(Debug, Default)]
pub struct Faults {
    counts: [AtomicU64; Fault::ALL.len()],
    log_states: Mutex<[LogState; Fault::ALL.len()]>,
}

impl Faults {
    /// Counts a failure and logs it, unless it is an ordinary answer such as "no such name".
    pub fn record(&self, error: &FsError) {
        let Some(fault) = error.fault() else { return };
        self.counts[fault as usize].fetch_add(1, Relaxed);
        let Some(suppressed) = self.log_line_due(fault, Instant::now()) else { return };
        tracing::error!(
            fault = fault.word(),
            errno = error.errno(),
            suppressed_lines = suppressed,
            "{error}; {}",
            fault.advice()
        );
    }

    /// Returns how often each fault happened.
    #[must_use]
    pub fn counts(&self) -> [(Fault, u64); Fault::ALL.len()] {
        Fault::ALL.map(|f| (f, self.counts[f as usize].load(Relaxed)))
    }

    /// Returns `Some` if a log line is due, with the number of failures that got no line since the last one.
    fn log_line_due(&self, fault: Fault, now: Instant) -> Option<u64> {
        let mut log_states = self.log_states.lock().unwrap_or_else(PoisonError::into_inner);
        let s = &mut log_states[fault as usize];
        if s.last_line.is_some_and(|at| now.duration_since(at) < LINE_EVERY) {
            s.suppressed += 1;
            return None;
        }
        s.last_line = Some(now);
        Some(std::mem::take(&mut s.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines_are_bounded_and_counts_exact() {
        let faults = Faults::default();
        let late = FsError::Late(Duration::from_secs(1));
        for _ in 0..1000 {
            faults.record(&late);
        }
        faults.record(&FsError::NotFound);
        assert_eq!(faults.counts().iter().map(|(_, n)| n).sum::<u64>(), 1000);
        let now = Instant::now() + LINE_EVERY + Duration::from_secs(1);
        assert_eq!(faults.log_line_due(Fault::Unavailable, now), Some(999));
        assert_eq!(faults.log_line_due(Fault::Unavailable, now), None);
        assert_eq!(faults.log_line_due(Fault::Gone, now), Some(0));
    }
}
