//! What is simulated.

use serde::{Deserialize, Serialize};

/// How a job reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Reader {
    /// The cache chooses its samples.
    #[default]
    Substitute,
    /// It reads an order of its own, and never changes what is cached.
    Strict,
}

/// A job's plan as part of the dataset: a pseudo-random subset.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Subset {
    /// Part of the samples, or of the units if `whole_units`.
    pub part: f64,
    /// Whether whole units are in or out.
    #[serde(default)]
    pub whole_units: bool,
    /// Which subset.
    #[serde(default)]
    pub seed: u64,
}

/// One job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobSpec {
    /// Samples a second when it never waits.
    pub rate: f64,
    /// When it starts, in seconds.
    #[serde(default)]
    pub start: f64,
    /// When it leaves, in seconds; never if absent.
    #[serde(default)]
    pub end: Option<f64>,
    /// From when to when it does nothing.
    #[serde(default)]
    pub pauses: Vec<(f64, f64)>,
    /// How it reads.
    #[serde(default)]
    pub reader: Reader,
    /// What it reads, if not everything.
    #[serde(default)]
    pub subset: Option<Subset>,
}

impl JobSpec {
    /// A job that reads everything for ever.
    #[must_use]
    pub fn new(rate: f64, start: f64) -> Self {
        JobSpec { rate, start, end: None, pauses: Vec::new(), reader: Reader::Substitute, subset: None }
    }
}

/// The way to the data. Absent: no time passes for a fetch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// Samples a second over its link (whole units count as their samples).
    pub bandwidth: f64,
    /// Seconds until the first byte of a request.
    pub latency: f64,
}

/// A dataset, its cache, its origin and its jobs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// What to call it.
    pub name: String,
    /// Samples in each unit; a file may say `{ count, samples }` for equal ones.
    #[serde(deserialize_with = "units")]
    pub units: Vec<u32>,
    /// The cache, as a part of the dataset.
    pub cache: f64,
    /// The jobs.
    pub jobs: Vec<JobSpec>,
    /// From when on is counted, in seconds.
    pub warm: f64,
    /// When everything ends, in seconds.
    pub end: f64,
    /// Everything random comes from it.
    #[serde(default = "one")]
    pub seed: u64,
    /// What a fetch costs.
    #[serde(default)]
    pub origin: Option<Origin>,
    /// Samples that each job has been granted and not yet consumed.
    #[serde(default)]
    pub leased: usize,
    /// Samples that are decided before they are granted, so that their fetch can start.
    #[serde(default)]
    pub ahead: usize,
    /// How many older decisions one whose bytes are here may overtake.
    #[serde(default)]
    pub overtake: usize,
    /// Whether the bound is computed (quadratic in the number of epochs).
    #[serde(default = "yes")]
    pub bound: bool,
}

fn yes() -> bool {
    true
}

fn one() -> u64 {
    1
}

/// Equal units, or the samples of each.
#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum Units {
    Each(Vec<u32>),
    Equal { count: u32, samples: u32 },
}

fn units<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<u32>, D::Error> {
    use serde::de::Error;
    match Units::deserialize(from) {
        Ok(Units::Each(each)) => Ok(each),
        Ok(Units::Equal { count, samples }) if u64::from(count) * u64::from(samples) <= 1 << 31 => {
            Ok(vec![samples; count as usize])
        }
        Ok(Units::Equal { .. }) => Err(D::Error::custom("units: more than 2^31 samples")),
        Err(_) => Err(D::Error::custom("units: a list of samples per unit, or { count, samples }")),
    }
}

impl Case {
    /// `units` units of `size` samples; jobs aligned or staggered evenly over an epoch; two
    /// epochs of the slowest to warm up, then six.
    #[must_use]
    pub fn plain(
        name: &str,
        units: usize,
        size: u32,
        cache: f64,
        staggered: bool,
        rates: &[f64],
        seed: u64,
    ) -> Case {
        let n = units as f64 * f64::from(size);
        let slowest = rates.iter().copied().fold(f64::MAX, f64::min);
        let k = rates.len() as f64;
        let start = |j: usize, r: f64| if staggered { j as f64 / k * n / r } else { 0.0 };
        Case {
            name: name.into(),
            units: vec![size; units],
            cache,
            jobs: rates.iter().enumerate().map(|(j, &r)| JobSpec::new(r, start(j, r))).collect(),
            warm: 2.0 * n / slowest,
            end: 8.0 * n / slowest,
            seed,
            origin: None,
            leased: 0,
            ahead: 0,
            overtake: 0,
            bound: true,
        }
    }

    /// How many samples the dataset has.
    #[must_use]
    pub fn samples(&self) -> usize {
        self.units.iter().map(|&u| u as usize).sum()
    }

    /// What the cache holds, in samples.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        (self.cache * self.samples() as f64 + 1e-6) as u64
    }

    /// Everything wrong with it, in words.
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        let mut f = Vec::new();
        if self.units.is_empty() || self.units.contains(&0) {
            f.push("units: at least one, each with at least one sample".into());
        }
        if self.samples() > 1 << 31 {
            f.push("units: more than 2^31 samples".into());
        }
        if !(0.0..=1.0).contains(&self.cache) {
            f.push(format!("cache: {} is not between 0 and 1", self.cache));
        }
        if self.jobs.is_empty() {
            f.push("jobs: at least one".into());
        }
        for (j, job) in self.jobs.iter().enumerate() {
            if !(job.rate.is_finite() && job.rate > 0.0) {
                f.push(format!("jobs[{j}].rate: {} is not a positive number", job.rate));
            }
            if !(job.start.is_finite() && job.start >= 0.0) {
                f.push(format!("jobs[{j}].start: {} is not a time", job.start));
            }
            if job.pauses.iter().any(|p| !(p.0 >= 0.0 && p.1 > p.0 && p.1.is_finite())) {
                f.push(format!("jobs[{j}].pauses: each is (from, to) with to after from"));
            }
            if job.subset.is_some_and(|s| !(s.part > 0.0 && s.part <= 1.0)) {
                f.push(format!("jobs[{j}].subset.part: not in (0, 1]"));
            }
        }
        if !(self.end.is_finite() && self.warm >= 0.0 && self.end > self.warm) {
            f.push(format!("warm, end: {} and {} are not an interval", self.warm, self.end));
        }
        if self.origin.is_some_and(|o| !(o.bandwidth > 0.0 && o.latency >= 0.0 && o.latency.is_finite())) {
            f.push("origin: a positive bandwidth and a latency".into());
        }
        f
    }
}
