//! Everything that can be wrong with a case.

use super::{Case, JobSpec, Reader, Subset};

/// A finite number above 0.
fn positive(x: f64) -> bool {
    x.is_finite() && x > 0.0
}

/// A time, in seconds from the beginning.
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
            f.push(format!("jobs[{j}].start, end: not times"));
        }
        if !self.pauses.iter().all(span) {
            f.push(format!("jobs[{j}].pauses: each is [from, to] with to after from"));
        }
        if self.subset.is_some_and(|s| !(s.part > 0.0 && s.part <= 1.0)) {
            f.push(format!("jobs[{j}].subset.part: not in (0, 1]"));
        }
        if self.reader != Reader::Strict && (self.prefetch > 0 || self.block > 0) {
            f.push(format!("jobs[{j}].prefetch, block: only with reader = \"strict\""));
        }
    }
}

impl Case {
    /// Whether any sample is in a subset.
    fn any(&self, subset: Subset) -> bool {
        let unit_of = (0u32..).zip(&self.units).flat_map(|(u, &g)| std::iter::repeat_n(u, g as usize));
        (0u64..).zip(unit_of).any(|(sample, unit)| subset.has(self.units.len(), unit, sample))
    }

    /// Everything wrong with it, in words.
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        let mut f = Vec::new();
        if self.units.is_empty() || self.units.contains(&0) {
            f.push("units: at least one, each with at least one sample".into());
        }
        let many = self.samples() > 1 << 31;
        if many {
            f.push("units: more than 2^31 samples".into());
        }
        if !(0.0..=1.0).contains(&self.cache) {
            f.push(format!("cache: {} is not between 0 and 1", self.cache));
        }
        if self.jobs.is_empty() {
            f.push("jobs: at least one".into());
        }
        for (j, job) in self.jobs.iter().enumerate() {
            job.faults(j, &mut f);
            // The clock must move at the very end, too, where numbers lie farthest apart.
            let end = job.end.map_or(self.end, |e| e.min(self.end));
            if positive(job.rate) && time(end) && end + 1.0 / job.rate <= end {
                f.push(format!(
                    "jobs[{j}].rate: {} is so high, or the end ({end}) so late, that the clock would stand still",
                    job.rate
                ));
            }
            if !many && job.subset.is_some_and(|s| s.part > 0.0 && !self.any(s)) {
                f.push(format!("jobs[{j}].subset: no sample is in it"));
            }
            let held = job.leased.unwrap_or(self.leased);
            if job.lease as usize > held.max(1) {
                f.push(format!(
                    "jobs[{j}].lease: {} samples at once, but it holds {held} (leased)",
                    job.lease
                ));
            }
        }
        if !(time(self.warm) && time(self.end) && self.end > self.warm) {
            f.push(format!("warm, end: {} and {} are not an interval", self.warm, self.end));
        }
        let rate = |r: Option<f64>| r.is_none_or(positive);
        if self.origin.is_some_and(|o| {
            !(positive(o.bandwidth) && time(o.latency) && rate(o.requests_per_second))
                || o.requests == Some(0)
        }) {
            f.push("origin: a positive bandwidth, a latency, and room for requests".into());
        }
        if self.network.is_some_and(|n| !(positive(n.bandwidth) && time(n.latency))) {
            f.push("network: a positive bandwidth and a latency".into());
        }
        if self.servers.len() > 1000
            || self.servers.iter().any(|s| !positive(s.weight) || !s.gone.iter().all(span))
        {
            f.push(
                "servers: at most 1,000, each with a positive weight, gone [from, to] with to after from"
                    .into(),
            );
        }
        if !time(self.news) {
            f.push("news: not a time".into());
        }
        if !(0.0..1.0).contains(&self.failing) {
            f.push(format!("failing: {} is not in [0, 1)", self.failing));
        }
        f
    }
}
