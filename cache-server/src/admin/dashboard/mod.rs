//! What the admin page needs beside the present state: the last hour, what each job waits for and since when,
//! what is wrong, and longer histories of a Prometheus (`docs/ADMIN-PAGE.md`).
//!
//! This room reads no part of the server: `overview` passes it values. It decides what a job's numbers mean
//! ([`JobWatches`]) and what is wrong ([`problems`]), from values to values.
//!
//! 1. (I6) Everything has a bound: [`history::SAMPLES_MAX`] samples, [`watch::WATCHED_MAX`] jobs, and for
//!    Prometheus a time, a length and a number of queries.
//! 2. Only the fixed queries of [`prometheus`] reach Prometheus. No caller passes a text into one.

mod history;
mod problems;
mod prometheus;
mod watch;

pub use history::{Counts, History, SAMPLE_EVERY, Sample, Totals};
use parking_lot::{Mutex, MutexGuard};
pub use problems::{Findings, problems};
pub use prometheus::{Prometheus, PrometheusError, PrometheusUrl, Range};
pub use watch::{JobReading, JobVerdict, JobWatches, Now};

/// What the admin page needs beside the present state.
#[derive(Debug)]
pub struct DashboardState {
    history: Mutex<History>,
    watches: Mutex<JobWatches>,
    /// The Prometheus of the settings.
    pub prometheus: Option<Prometheus>,
}

impl DashboardState {
    /// Returns an empty state.
    #[must_use]
    pub fn new(prometheus: Option<Prometheus>) -> Self {
        DashboardState { history: Mutex::default(), watches: Mutex::default(), prometheus }
    }

    /// Returns the last hour.
    pub fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock()
    }

    /// Returns what is known of each job.
    pub fn watches(&self) -> MutexGuard<'_, JobWatches> {
        self.watches.lock()
    }
}
