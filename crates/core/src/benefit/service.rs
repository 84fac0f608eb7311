//! How fast a link or disk is while it is busy.

use super::observation::Served;

/// Requests in a row without a pause, from which a busy time shows the rate. A single request shows its
/// latency.
const ROW: usize = 4;

/// What a link or disk did over a time.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Service {
    /// Samples a second while it was busy; `None` if it served nothing.
    pub rate: Option<f64>,
    /// The part of the time for which it was busy, 0 to 1.
    pub busy: f64,
}

/// A time without a pause.
#[derive(Debug, Clone, Copy, Default)]
struct Busy {
    samples: f64,
    seconds: f64,
}

impl Busy {
    fn add(&mut self, samples: f64, seconds: f64) {
        self.samples += samples;
        self.seconds += seconds;
    }
}

/// Returns the service of requests that ended between two times.
///
/// Requests that overlap count as one busy time. So a server that answers several at once has the sum of
/// their samples over the time of all.
#[must_use]
pub fn service(served: &[Served], from: f64, to: f64) -> Service {
    let mut served: Vec<&Served> = served.iter().filter(|s| s.end >= from && s.end <= to).collect();
    served.sort_by(|a, b| a.start.total_cmp(&b.start));
    let (mut rows, mut singles) = (Busy::default(), Busy::default());
    let mut at = 0;
    while at < served.len() {
        let (start, mut end, mut samples) = (served[at].start, served[at].end, 0.0);
        let first = at;
        while at < served.len() && (at == first || served[at].start <= end) {
            end = end.max(served[at].end);
            samples += served[at].samples;
            at += 1;
        }
        let kind = if at - first >= ROW { &mut rows } else { &mut singles };
        kind.add(samples, end - start);
    }
    let shown = if rows.seconds > 0.0 { rows } else { singles };
    let rate = (shown.seconds > 0.0 && shown.samples > 0.0).then(|| shown.samples / shown.seconds);
    let busy = (rows.seconds + singles.seconds) / (to - from);
    Service { rate, busy: if busy.is_finite() { busy.clamp(0.0, 1.0) } else { 0.0 } }
}
