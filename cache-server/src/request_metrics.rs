//! Counts requests and their durations, by route and status. `metrics` writes them out.

use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, Opts, Registry, proto::MetricFamily};
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

const BUCKETS: &[f64] =
    &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// Requests by route and status.
pub struct RequestMetrics {
    registry: Registry,
    total: IntCounterVec,
    seconds: HistogramVec,
    /// Requests of all routes, and those of them with a status from 500 on.
    sums: [AtomicU64; 2],
}

impl RequestMetrics {
    /// Creates the counters, all 0.
    ///
    /// # Panics
    /// When a name or label written here breaks Prometheus' rules: a defect that any test finds.
    #[must_use]
    pub fn new() -> Self {
        let registry = Registry::new();
        let total = IntCounterVec::new(
            Opts::new("fletch_requests_total", "Requests answered, by route and status"),
            &["route", "status"],
        )
        .expect("constant options");
        let seconds = HistogramVec::new(
            HistogramOpts::new("fletch_request_seconds", "Time until the head of the reply")
                .buckets(BUCKETS.to_vec()),
            &["route"],
        )
        .expect("constant options");
        registry.register(Box::new(total.clone())).expect("registered once");
        registry.register(Box::new(seconds.clone())).expect("registered once");
        RequestMetrics { registry, total, seconds, sums: Default::default() }
    }

    /// Counts a request when the head of its reply is ready. `route` is a template, so labels are bounded.
    pub fn count(&self, route: &str, status: u16, took: Duration) {
        self.total.with_label_values(&[route, status.to_string().as_str()]).inc();
        self.seconds.with_label_values(&[route]).observe(took.as_secs_f64());
        self.sums[0].fetch_add(1, Relaxed);
        self.sums[1].fetch_add(u64::from(status >= 500), Relaxed);
    }

    /// Returns the number of requests, and of those with a status from 500 on.
    #[must_use]
    pub fn sums(&self) -> (u64, u64) {
        (self.sums[0].load(Relaxed), self.sums[1].load(Relaxed))
    }

    /// Returns the metric families.
    #[must_use]
    pub fn gather(&self) -> Vec<MetricFamily> {
        self.registry.gather()
    }
}
