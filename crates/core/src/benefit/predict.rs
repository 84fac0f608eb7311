//! The rate of a job with another part of its data in the cache.

use super::estimate::Estimate;

/// An overlap exponent from which computing and fetching count as fully overlapped.
pub(super) const FULL_OVERLAP: f64 = 63.0;
/// The largest overlap exponent.
pub(super) const OVERLAP_MAX: f64 = 64.0;
/// The least part of the data that is missing: a prediction for 1 would divide by 0.
const MISSING_LEAST: f64 = 1e-9;

impl Estimate {
    /// Returns the rate with a part of the data in the cache that is larger than the present one.
    ///
    /// It is below the present rate, or falls with `cached`, only where the disk is the limit.
    #[must_use]
    pub fn rate_with_more(&self, cached: f64) -> f64 {
        let rate = self.rate_at(cached);
        let disk_limits = self.disk_rate.is_some_and(|disk| disk / cached < self.rate);
        if disk_limits { rate } else { rate.max(self.rate) }
    }

    /// Returns the rate with the part `cached` (0 to 1) of the data in the cache, in samples a second.
    ///
    /// It is the least of three: what computing, preparing and the origin allow together, what the disk
    /// gives, and what the receivers get, each of which waits for the queue and the first byte.
    #[must_use]
    pub fn rate_at(&self, cached: f64) -> f64 {
        let compute = 1.0 / self.most_rate;
        let missing = (1.0 - cached).max(MISSING_LEAST);
        let fetch = self.origin_rate.map_or(0.0, |rate| missing / rate);
        let together = if self.overlap >= FULL_OVERLAP || fetch == 0.0 {
            compute.max(fetch)
        } else {
            (compute.powf(self.overlap) + fetch.powf(self.overlap)).powf(1.0 / self.overlap)
        };
        let disk = self.disk_rate.map_or(0.0, |rate| cached / rate);
        1.0 / together.max(disk).max(self.latency + fetch / self.lanes)
    }
}
