//! How long reads wait at each gate: a histogram for all, and a log line for a read that is slow.

use super::event::Event;
use fletch_bounds::{Gate, MakeSpan, RecordWait, RequestId, Waits};
use prometheus::{Histogram, HistogramOpts, HistogramVec, Registry, proto::MetricFamily};
use std::{fmt::Display, sync::Arc, time::Duration};

/// Buckets of a wait. What is shorter does not show; the longest is that of a slow origin.
const BUCKETS: &[f64] =
    &[0.000_1, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// The waits of all reads of a server.
pub struct ReadWatch {
    registry: Registry,
    waits: Vec<Histogram>,
    slow_from: Duration,
    /// Slow reads by the gate at which they waited longest; the last one counts those that waited at none.
    slow: Vec<Event>,
}

impl RecordWait for ReadWatch {
    fn record_wait(&self, gate: Gate, waited: Duration) {
        self.waits[gate as usize].observe(waited.as_secs_f64());
    }
}

impl ReadWatch {
    /// Creates the histogram. A read that takes `slow_from` or longer gets a log line.
    ///
    /// # Panics
    /// When a name or label written here breaks Prometheus' rules: a defect that any test finds.
    #[must_use]
    pub fn new(slow_from: Duration) -> Arc<Self> {
        let registry = Registry::new();
        let help = "Time for which reads waited, by gate; a gate that is open at once is not counted";
        let options = HistogramOpts::new("fletch_read_wait_seconds", help).buckets(BUCKETS.to_vec());
        let waits = HistogramVec::new(options, &["gate"]).expect("constant options");
        registry.register(Box::new(waits.clone())).expect("registered once");
        let waits = Gate::ALL.map(|gate| waits.with_label_values(&[gate.as_str()])).to_vec();
        let slow = (0..=Gate::ALL.len()).map(|_| Event::default()).collect();
        Arc::new(ReadWatch { registry, waits, slow_from, slow })
    }

    /// Creates the waits of a request.
    #[must_use]
    pub fn waits_of(self: &Arc<Self>, request: RequestId, span: MakeSpan) -> Arc<Waits> {
        let above: Arc<dyn RecordWait> = Arc::clone(self) as _;
        Waits::of_request(above, request, span)
    }

    /// Creates the waits of work that no request waits for.
    #[must_use]
    pub fn waits_in_background(self: &Arc<Self>) -> Arc<Waits> {
        let above: Arc<dyn RecordWait> = Arc::clone(self) as _;
        Waits::in_background(above)
    }

    /// Logs a read or a request that took long. Returns whether it did.
    ///
    /// There is one line for each gate in ten seconds. `what` is called for a line only.
    pub fn note<W: Display>(&self, took: Duration, waits: &Waits, what: impl FnOnce() -> W) -> bool {
        if took < self.slow_from {
            return false;
        }
        let longest = waits.longest_first();
        let (at, gate) = match longest.first() {
            Some((gate, _)) => (*gate as usize, gate.as_str()),
            None => (Gate::ALL.len(), "none"),
        };
        if let Some(slow) = self.slow[at].count() {
            let shown: Vec<_> =
                longest.iter().map(|(gate, time)| format!("{} {time:.1?}", gate.as_str())).collect();
            // A read that is given up ends outside of its request's span.
            tracing::warn!(
                parent: &waits.span(), gate, waits = %shown.join(", "), took = ?took, slow,
                "a slow read of {}: it waited longest at the gate {gate} (`slow` counts since the last such \
                 line)",
                what()
            );
        }
        true
    }

    /// Logs a request that waited long outside of its reads: for memory, or for the tables of its version.
    pub fn note_request<W: Display>(&self, waits: &Waits, what: impl FnOnce() -> W) {
        if !waits.has_waited() {
            return;
        }
        let outside = [Gate::RequestMemory, Gate::Tables, Gate::ReplyMemory];
        let waited = outside.into_iter().map(|gate| waits.time_at(gate)).sum();
        if waited >= self.slow_from && waits.is_first_note() {
            self.note(waited, waits, what);
        }
    }

    /// Returns the metric families.
    #[must_use]
    pub fn gather(&self) -> Vec<MetricFamily> {
        self.registry.gather()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_read_that_takes_long_is_slow() {
        let watch = ReadWatch::new(Duration::from_secs(5));
        let waits = watch.waits_in_background();
        waits.record_wait(Gate::OriginPace, Duration::from_secs(4));
        waits.record_wait(Gate::Origin, Duration::from_secs(1));
        assert!(!watch.note(Duration::from_millis(4_999), &waits, || "chunk"));
        assert!(watch.note(Duration::from_secs(5), &waits, || "chunk"));
        let slow: Vec<u64> = watch.slow.iter().map(Event::total).collect();
        assert_eq!((slow.iter().sum::<u64>(), slow[Gate::OriginPace as usize]), (1, 1));
        let families = watch.gather();
        let metrics = families[0].get_metric();
        let waited = |gate: Gate| {
            let of_gate = metrics.iter().find(|m| m.get_label()[0].value() == gate.as_str());
            of_gate.map(|m| m.get_histogram().get_sample_count())
        };
        assert_eq!((waited(Gate::OriginPace), waited(Gate::Disk)), (Some(1), Some(0)));
    }
}
