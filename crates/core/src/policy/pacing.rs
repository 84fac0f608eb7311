//! Pacing: fetch early, serve later, so that the way to the origin is busy all epoch (DESIGN §7,
//! FACTS §2). A job with compute rate f* that finds a share c of its data in the cache, on a way
//! that brings b, can run at min(f*, b / (1 − c)); reading hits first and misses last would take
//! c / f* + (1 − c) / min(f*, b) per sample instead.

/// How a job and the way to its origin go together. Rates in samples a second, or in bytes; all
/// three in the same unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// What the job could consume if it never waited (f*).
    pub compute: f64,
    /// What the origin brings (b).
    pub origin: f64,
    /// Share of what is delivered that is fetched for it: the backend bytes per delivered byte.
    pub fetched: f64,
}

impl Pace {
    /// The best rate it can have.
    #[must_use]
    pub fn best(&self) -> f64 {
        if self.fetched <= 0.0 { self.compute } else { self.compute.min(self.origin / self.fetched) }
    }

    /// Whether the origin is what it waits for.
    #[must_use]
    pub fn origin_bound(&self) -> bool {
        self.best() < self.compute
    }

    /// How many samples to decide ahead of service so that a fetch of `latency` seconds is over
    /// before its sample is due, with `margin` times that against jitter; at least 1, at most
    /// `most` (what the window allows).
    #[must_use]
    pub fn ahead(&self, latency: f64, margin: f64, most: usize) -> usize {
        let n = (self.best() * latency * margin).ceil();
        // Not a number, negative: nothing is known yet.
        if n >= 1.0 { (n as usize).min(most).max(1) } else { 1 }
    }
}

/// Bytes to keep in flight towards an origin that brings `origin` bytes a second after `latency`
/// seconds: twice what fits on the way, at least one unit of `unit` bytes, at most `most`.
#[must_use]
pub fn in_flight(origin: f64, latency: f64, unit: u64, most: u64) -> u64 {
    let way = (2.0 * origin * latency).max(0.0);
    (way as u64).max(unit).min(most.max(unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paced_beats_hits_first() {
        let p = Pace { compute: 1.0, origin: 0.5, fetched: 0.5 };
        assert_eq!((p.best(), p.origin_bound()), (1.0, false));
        let slower = Pace { origin: 0.4, ..p };
        assert!((slower.best() - 0.8).abs() < 1e-12 && slower.origin_bound());
        assert_eq!(Pace { fetched: 0.0, ..p }.best(), 1.0);
    }

    #[test]
    fn lookahead_covers_the_latency_within_bounds() {
        let p = Pace { compute: 1000.0, origin: 500.0, fetched: 0.5 };
        assert_eq!(p.ahead(0.025, 2.0, 10_000), 50);
        assert_eq!(p.ahead(0.025, 2.0, 20), 20);
        assert_eq!(p.ahead(0.0, 2.0, 20), 1);
        assert_eq!(Pace { compute: f64::NAN, ..p }.ahead(1.0, 1.0, 7), 7);
        assert_eq!(Pace { origin: f64::NAN, compute: f64::NAN, fetched: 1.0 }.ahead(1.0, 1.0, 7), 1);
    }

    #[test]
    fn bytes_in_flight() {
        assert_eq!(in_flight(1e9, 0.025, 4 << 20, 1 << 30), 50_000_000);
        assert_eq!(in_flight(1e6, 0.001, 4 << 20, 1 << 30), 4 << 20);
        assert_eq!(in_flight(1e12, 1.0, 4 << 20, 1 << 30), 1 << 30);
        assert_eq!(in_flight(f64::NAN, 1.0, 1, 10), 1);
    }
}
