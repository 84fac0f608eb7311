//! The fault counters and their log lines. It counts every failure, but bounds the log lines: a reader that
//! retries in a loop must not fill the disk.

use crate::fs::error::{Fault, FsError};
use fletch_core::DatasetName;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// The shortest time between two log lines for one fault.
const LINE_EVERY: Duration = Duration::from_secs(10);
/// The shortest time between two log lines for one changed object.
const CHANGED_LINE_EVERY: Duration = Duration::from_mins(10);
/// The most changed objects that get a line within that time.
const CHANGED_OBJECTS_MAX: usize = 100;

#[derive(Debug, Default)]
struct LogState {
    last_line: Option<Instant>,
    suppressed: u64,
}

impl LogState {
    /// Returns `Some` if a log line is due, with the number of failures that got no line since the last one.
    fn line_due(&mut self, now: Instant, every: Duration) -> Option<u64> {
        if self.last_line.is_some_and(|at| now.duration_since(at) < every) {
            self.suppressed += 1;
            return None;
        }
        self.last_line = Some(now);
        Some(std::mem::take(&mut self.suppressed))
    }
}

/// The objects that changed since the index, each with the state of its log lines.
#[derive(Debug, Default)]
struct ChangedObjects {
    states: HashMap<String, LogState>,
}

impl ChangedObjects {
    /// As [`LogState::line_due`], for one object. Without a free place for it, no line is due.
    fn line_due(&mut self, path: &str, now: Instant) -> Option<u64> {
        if let Some(state) = self.states.get_mut(path) {
            return state.line_due(now, CHANGED_LINE_EVERY);
        }
        if self.states.len() >= CHANGED_OBJECTS_MAX {
            let young = |at: Instant| now.duration_since(at) < CHANGED_LINE_EVERY;
            self.states.retain(|_, state| state.last_line.is_some_and(young));
        }
        if self.states.len() >= CHANGED_OBJECTS_MAX {
            return None;
        }
        self.states.entry(path.to_owned()).or_default().line_due(now, CHANGED_LINE_EVERY)
    }
}

/// The failures so far, by fault.
#[derive(Debug, Default)]
pub struct Faults {
    dataset: Option<DatasetName>,
    counts: [AtomicU64; Fault::ALL.len()],
    log_states: Mutex<[LogState; Fault::ALL.len()]>,
    changed: Mutex<ChangedObjects>,
}

impl Faults {
    /// Returns the counters of a mount of `dataset`, at zero.
    #[must_use]
    pub fn new(dataset: Option<DatasetName>) -> Self {
        Faults { dataset, ..Faults::default() }
    }

    /// Counts a failure and logs it, unless it is an ordinary answer such as "no such name".
    pub fn record(&self, error: &FsError) {
        let Some(fault) = error.fault() else { return };
        self.counts[fault as usize].fetch_add(1, Relaxed);
        if let (Fault::Changed, FsError::Read { path, .. }) = (fault, error) {
            return self.log_changed(path, error);
        }
        let Some(suppressed) = self.log_line_due(fault, Instant::now()) else { return };
        tracing::error!(
            fault = fault.word(),
            errno = error.errno(),
            suppressed_lines = suppressed,
            "{error}; {}",
            fault.advice()
        );
    }

    /// Logs a changed object: one line for each object in [`CHANGED_LINE_EVERY`].
    fn log_changed(&self, path: &str, error: &FsError) {
        let due = self.changed.lock().line_due(path, Instant::now());
        let Some(suppressed) = due else { return };
        let dataset = self.dataset.as_ref().map_or("NAME", |name| name.as_str());
        tracing::error!(
            fault = Fault::Changed.word(),
            errno = error.errno(),
            suppressed_lines = suppressed,
            "{error}; 1 object changed since the index: `fletch refresh {dataset}`, then mount it again"
        );
    }

    /// Returns how often each fault happened.
    #[must_use]
    pub fn counts(&self) -> [(Fault, u64); Fault::ALL.len()] {
        Fault::ALL.map(|f| (f, self.counts[f as usize].load(Relaxed)))
    }

    fn log_line_due(&self, fault: Fault, now: Instant) -> Option<u64> {
        let mut log_states = self.log_states.lock();
        log_states[fault as usize].line_due(now, LINE_EVERY)
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

    #[test]
    fn each_changed_object_has_a_line_in_ten_minutes_and_all_are_bounded() {
        let (mut changed, now) = (ChangedObjects::default(), Instant::now());
        assert_eq!((changed.line_due("a", now), changed.line_due("b", now)), (Some(0), Some(0)));
        assert_eq!((changed.line_due("a", now), changed.line_due("a", now)), (None, None));
        for i in 0..2 * CHANGED_OBJECTS_MAX {
            let is_due = changed.line_due(&i.to_string(), now).is_some();
            assert_eq!(is_due, i + 2 < CHANGED_OBJECTS_MAX, "{i}");
        }
        let later = now + CHANGED_LINE_EVERY;
        assert_eq!(changed.line_due("a", later), Some(2));
        assert_eq!(changed.line_due("new", later), Some(0), "old ones make place");
    }
}
