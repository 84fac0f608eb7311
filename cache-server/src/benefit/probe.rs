//! A probe of a job: batches of cached samples, from which its most rate follows.
//!
//! The idea is that of Quiver's profiler (FAST '20), which serves a job from the cache only for a while. What
//! was on its way when the probe began does not count.

use fletch_api::benefit::JobProbe;
use fletch_core::benefit::{BatchObservation, Estimate};
use std::time::Instant;

/// What a probe found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Found {
    /// Samples a second of all ranks if the job waited for no origin.
    pub most_rate: f64,
    /// Whether that is a value and not a bound.
    pub is_sure: bool,
}

/// A probe.
#[derive(Debug)]
pub(super) struct Probe {
    begun: Instant,
    entries: u64,
    of_entries: u64,
    /// The last batches of the probe, until they are looked at.
    batches: Option<Vec<BatchObservation>>,
    found: Option<Found>,
}

impl Probe {
    /// Begins a probe that ends when `of_entries` samples were acknowledged.
    pub fn new(of_entries: u64) -> Self {
        Probe { begun: Instant::now(), entries: 0, of_entries, batches: None, found: None }
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

    /// Notes what the steps tell.
    pub fn conclude(&mut self, estimate: Option<&Estimate>) {
        let of = |e: &Estimate| Found { most_rate: e.most_rate, is_sure: e.is_sure };
        self.found = Some(estimate.map_or(Found { most_rate: f64::MAX, is_sure: false }, of));
    }

    /// Returns what it found, if that is a value.
    pub fn most_rate(&self) -> Option<f64> {
        self.found.filter(|found| found.is_sure).map(|found| found.most_rate)
    }

    /// Returns the probe as the API shows it.
    pub fn view(&self) -> JobProbe {
        JobProbe {
            entries: self.entries,
            of_entries: self.of_entries,
            age_s: self.begun.elapsed().as_secs_f64(),
            most_rate: self.found.map(|found| found.most_rate),
            is_sure: self.found.is_some_and(|found| found.is_sure),
        }
    }
}
