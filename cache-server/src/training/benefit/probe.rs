//! A probe of a job: batches of cached samples, from which its most rate follows.
//!
//! The idea is that of Quiver's profiler (FAST '20), which serves a job from the cache only for a while. What
//! was on its way when the probe began does not count.

use fletch_api::benefit::JobProbe;
use fletch_core::benefit::{BatchObservation, Estimate};
use std::time::Instant;

#[derive(Debug)]
pub(super) struct Probe {
    begun: Instant,
    entries: u64,
    of_entries: u64,
    /// The last batches of the probe, until they are looked at.
    batches: Option<Vec<BatchObservation>>,
    is_over: bool,
    /// Samples a second of all ranks if the job waits for no origin.
    most_rate: Option<f64>,
}

impl Probe {
    /// Begins a probe that ends when `of_entries` samples were acknowledged.
    pub fn new(of_entries: u64) -> Self {
        Probe {
            begun: Instant::now(),
            entries: 0,
            of_entries,
            batches: None,
            is_over: false,
            most_rate: None,
        }
    }

    /// Counts acknowledged samples. At the end it takes what `latest` returns: the steps that count.
    pub fn count(&mut self, entries: u64, latest: impl FnOnce() -> Vec<BatchObservation>) {
        if self.entries >= self.of_entries {
            return;
        }
        self.entries = self.entries.saturating_add(entries).min(self.of_entries);
        if self.entries == self.of_entries {
            self.batches = Some(latest());
        }
    }

    /// Takes the steps that count, once there are any.
    pub fn take_batches(&mut self) -> Option<Vec<BatchObservation>> {
        self.batches.take()
    }

    /// Ends the probe with what its steps tell. A bound is no value.
    pub fn conclude(&mut self, estimate: Option<&Estimate>) {
        self.is_over = true;
        self.most_rate = estimate.filter(|e| e.is_sure).map(|e| e.most_rate);
    }

    /// Returns the rate that it found.
    pub fn most_rate(&self) -> Option<f64> {
        self.most_rate
    }

    /// Returns the probe as the API shows it.
    pub fn view(&self) -> JobProbe {
        JobProbe {
            entries: self.entries,
            of_entries: self.of_entries,
            age_s: self.begun.elapsed().as_secs_f64(),
            is_over: self.is_over,
            most_rate: self.most_rate,
        }
    }
}
