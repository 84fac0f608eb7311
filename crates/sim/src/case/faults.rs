//! The faults of a case.

use super::{Case, JobSpec, Reader, Subset};

/// Returns whether `x` is a finite number above 0.
fn positive(x: f64) -> bool {
    x.is_finite() && x > 0.0
}

/// Returns whether `x` is a time: finite seconds, not negative.
fn time(x: f64) -> bool {
    x.is_finite() && x >= 0.0
}

fn span(&(from, to): &(f64, f64)) -> bool {
    time(from) && time(to) && to > from
}

impl JobSpec {
    fn faults(&self, j: usize, f: &mut Vec<String>) {
        if !positive(self.rate) {
            f.push(format!("jobs[{j}].rate: {} is not a positive number", self.rate));
        }
        if !time(self.start) || self.end.is_some_and(|e| !time(e)) {
            f.push(format!("jobs[{j}].start, end: give finite seconds, at least 0"));
        }
        if !self.pauses.iter().all(span) {
            f.push(format!("jobs[{j}].pauses: give [from, to] in seconds, with to after from"));
        }
        if self.subset.is_some_and(|s| !(s.part > 0.0 && s.part <= 1.0)) {
            f.push(format!("jobs[{j}].subset.part: give more than 0, at most 1"));
        }
        if self.reader != Reader::Strict && (self.prefetch > 0 || self.block > 0) {
            f.push(format!("jobs[{j}].prefetch, block: these need reader = \"strict\""));
        }
    }
}

impl Case {
    /// Returns whether any sample is in a subset.
    fn any(&self, subset: Subset) -> bool {
        let unit_of = (0u32..).zip(&self.units).flat_map(|(u, &g)| std::iter::repeat_n(u, g as usize));
        (0u64..).zip(unit_of).any(|(sample, unit)| subset.has(self.units.len(), unit, sample))
    }

    /// Returns all faults of the case, as text. Empty when it can be simulated.
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        let mut f = Vec::new();
        if self.units.is_empty() || self.units.contains(&0) {
            f.push("units: give at least one, each with at least one sample".into());
        }
        let many = self.samples() > 1 << 31;
        if many {
            f.push("units: more than 2^31 samples; give fewer or smaller units".into());
        }
        if !(0.0..=1.0).contains(&self.cache) {
            f.push(format!("cache: {} is not between 0 and 1", self.cache));
        }
        if self.jobs.is_empty() {
            f.push("jobs: give at least one".into());
        }
        for (j, job) in self.jobs.iter().enumerate() {
            job.faults(j, &mut f);
            // The clock must move at the very end, too, where numbers lie farthest apart.
            let end = job.end.map_or(self.end, |e| e.min(self.end));
            if positive(job.rate) && time(end) && end + 1.0 / job.rate <= end {
                f.push(format!(
                    "jobs[{j}].rate: at {} a second until {end} the clock would not advance; lower either",
                    job.rate
                ));
            }
            if !many && job.subset.is_some_and(|s| s.part > 0.0 && !self.any(s)) {
                f.push(format!(
                    "jobs[{j}].subset: it contains no sample; give a larger part or another seed"
                ));
            }
            let held = job.leased.unwrap_or(self.leased);
            if job.lease as usize > held.max(1) {
                f.push(format!(
                    "jobs[{j}].lease: {} samples at once are more than leased ({held})",
                    job.lease
                ));
            }
        }
        if !(time(self.warm) && time(self.end) && self.end > self.warm) {
            f.push(format!(
                "warm, end: {} and {} are no interval; give times with end after warm",
                self.warm, self.end
            ));
        }
        let rate = |r: Option<f64>| r.is_none_or(positive);
        if self.origin.is_some_and(|o| {
            !(positive(o.bandwidth) && time(o.latency) && rate(o.requests_per_second))
                || o.requests == Some(0)
        }) {
            f.push(
                "origin: give a positive bandwidth, a latency of at least 0, and positive limits of requests"
                    .into(),
            );
        }
        if self.network.is_some_and(|n| !(positive(n.bandwidth) && time(n.latency))) {
            f.push("network: give a positive bandwidth and a latency of at least 0".into());
        }
        if self.servers.len() > 1000
            || self.servers.iter().any(|s| !positive(s.weight) || !s.gone.iter().all(span))
        {
            f.push(
                "servers: give at most 1,000, with positive weights, and gone as [from, to], to after from"
                    .into(),
            );
        }
        if !time(self.news) {
            f.push("news: give finite seconds, at least 0".into());
        }
        if !(0.0..1.0).contains(&self.failing) {
            f.push(format!("failing: {} is not in [0, 1)", self.failing));
        }
        f
    }
}
