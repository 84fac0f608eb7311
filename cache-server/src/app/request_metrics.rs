//! Counts requests and their durations, by route and status, and the durations of reads of chunks, by tier.
//! `metrics` writes them out.

use fletch_store::{AtPeer, Tier};
use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounterVec, Opts, Registry, proto::MetricFamily,
};
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

const BUCKETS: &[f64] =
    &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// Buckets of a read: memory takes microseconds, and an origin takes up to `io.timeout`.
const READ_BUCKETS: &[f64] = &[
    0.000_01, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0, 30.0,
];

/// Requests by route and status, and reads of chunks by tier.
pub struct RequestMetrics {
    registry: Registry,
    total: IntCounterVec,
    seconds: HistogramVec,
    reads: ReadSeconds,
    /// Requests of all routes, and those of them with a status from 500 on.
    sums: [AtomicU64; 2],
}

/// How long reads of chunks took, by the tier that had the chunk.
struct ReadSeconds {
    memory: Histogram,
    disk: Histogram,
    flight: Histogram,
    origin: Histogram,
    peer: Histogram,
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
        let reads = HistogramVec::new(
            HistogramOpts::new(
                "fletch_chunk_read_seconds",
                "Time for which a request waited for a chunk, by tier",
            )
            .buckets(READ_BUCKETS.to_vec()),
            &["tier"],
        )
        .expect("constant options");
        registry.register(Box::new(total.clone())).expect("registered once");
        registry.register(Box::new(seconds.clone())).expect("registered once");
        registry.register(Box::new(reads.clone())).expect("registered once");
        let of = |tier: Tier| reads.with_label_values(&[word(tier)]);
        let reads = ReadSeconds {
            memory: of(Tier::Memory),
            disk: of(Tier::Disk),
            flight: of(Tier::Flight),
            origin: of(Tier::Origin),
            peer: of(Tier::Peer(AtPeer::Hit)),
        };
        RequestMetrics { registry, total, seconds, reads, sums: Default::default() }
    }

    /// Counts a read of a chunk, which took so long from the request for the chunk until its bytes were here.
    pub fn count_read(&self, tier: Tier, took: Duration) {
        let reads = &self.reads;
        let of_tier = match tier {
            Tier::Memory => &reads.memory,
            Tier::Disk => &reads.disk,
            Tier::Flight => &reads.flight,
            Tier::Origin | Tier::Bypass => &reads.origin,
            Tier::Peer(_) => &reads.peer,
        };
        of_tier.observe(took.as_secs_f64());
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

/// Returns the label of a tier. A chunk that the disk does not keep came from the origin.
fn word(tier: Tier) -> &'static str {
    match tier {
        Tier::Memory => "memory",
        Tier::Disk => "disk",
        Tier::Flight => "flight",
        Tier::Origin | Tier::Bypass => "origin",
        Tier::Peer(_) => "peer",
    }
}
