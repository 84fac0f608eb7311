//! What the admin page needs beside the present state: the last hour, what each job waits for and since when,
//! what is wrong, and longer histories of a Prometheus (`docs/ADMIN-PAGE.md`).
//!
//! This room reads no part of the server: `overview` passes it values. It decides what a job's numbers mean
//! ([`JobWatches`]) and what is wrong ([`problems`]), from values to values.
//!
//! 1. (I6) Everything has a bound: [`history::SAMPLES_MAX`] samples, [`watch::WATCHED_MAX`] jobs, and for
//!    Prometheus a time, a length and a number of queries.
//! 2. Only the fixed queries of [`prometheus`] reach Prometheus. No caller passes a text into one.

pub mod bounds;
mod history;
mod problems;
mod prometheus;
mod watch;

use fletch_host::usage::HostUsage;
pub use history::{Counts, DatasetOf, History, SAMPLE_EVERY, Sample, Totals};
use parking_lot::{Mutex, MutexGuard};
pub use problems::{Counted, Findings, ReadDataset, problems};
pub use prometheus::{Prometheus, PrometheusError, PrometheusUrl, Range};
pub use watch::{JobReading, JobVerdict, JobWatches, Now};

use std::path::Path;

/// What the admin page needs beside the present state.
#[derive(Debug)]
pub struct DashboardState {
    history: Mutex<History>,
    watches: Mutex<JobWatches>,
    host: Mutex<HostUsage>,
    /// Held while the host is measured: a disk that does not answer delays one measurement only.
    measuring: Mutex<()>,
    /// The Prometheus of the settings.
    pub prometheus: Option<Prometheus>,
}

impl DashboardState {
    /// Returns an empty state.
    #[must_use]
    pub fn new(prometheus: Option<Prometheus>) -> Self {
        let (history, watches, host, measuring) = Default::default();
        DashboardState { history, watches, host, measuring, prometheus }
    }

    /// Returns the last hour.
    pub fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock()
    }

    /// Returns what the server used of its machine at the latest sample.
    #[must_use]
    pub fn host(&self) -> HostUsage {
        *self.host.lock()
    }

    /// Measures what the server uses, unless a measurement runs. Blocking.
    pub fn measure_host(&self, state_dir: &Path) {
        let Some(_running) = self.measuring.try_lock() else { return };
        let measured = HostUsage::of_process(state_dir);
        *self.host.lock() = measured;
    }

    /// Returns what is known of each job.
    pub fn watches(&self) -> MutexGuard<'_, JobWatches> {
        self.watches.lock()
    }
}
