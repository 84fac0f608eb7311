//! What is simulated. Whether it can be is for [`Case::faults`].

use serde::{Deserialize, Serialize};

mod faults;

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

fn mix(z: u64) -> u64 {
    let mut z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Subset {
    /// Whether a sample is in it, of a dataset of `units` units.
    pub(crate) fn has(&self, units: usize, unit: u32, sample: u64) -> bool {
        let what = if self.whole_units { u64::from(unit) } else { units as u64 + sample };
        let h = mix(self.seed.wrapping_mul(7919) ^ what);
        (h >> 11) as f64 / (1u64 << 53) as f64 <= self.part
    }
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
    /// Samples it has been granted and not yet consumed, if others than the case says.
    #[serde(default)]
    pub leased: Option<usize>,
    /// Samples it is granted at once, as soon as `leased` has room for them; 0 is one by one.
    #[serde(default)]
    pub lease: u32,
    /// Strict: samples' worth of units it may hold ahead of need, beside the shared cache.
    #[serde(default)]
    pub prefetch: u64,
    /// Strict: its order goes by units, shuffled in blocks of so many samples; 0 is a flat shuffle.
    #[serde(default)]
    pub block: u32,
}

impl JobSpec {
    /// A job that reads everything for ever.
    #[must_use]
    pub fn new(rate: f64, start: f64) -> Self {
        JobSpec {
            rate,
            start,
            end: None,
            pauses: Vec::new(),
            reader: Reader::Substitute,
            subset: None,
            leased: None,
            lease: 0,
            prefetch: 0,
            block: 0,
        }
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
    /// So many requests it takes at once; any number if absent.
    #[serde(default)]
    pub requests: Option<u32>,
    /// So many requests it takes a second; any number if absent.
    #[serde(default)]
    pub requests_per_second: Option<f64>,
}

impl Origin {
    /// A link alone.
    #[must_use]
    pub fn new(bandwidth: f64, latency: f64) -> Self {
        Origin { bandwidth, latency, requests: None, requests_per_second: None }
    }
}

/// The way from each server to the jobs. Absent: no time passes for a hit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Samples a second that one server sends.
    pub bandwidth: f64,
    /// Seconds that a sample is under way.
    pub latency: f64,
}

/// One server of several.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    /// Its part of the cache, relative to the others'.
    #[serde(default = "unit_weight")]
    pub weight: f64,
    /// From when to when it is gone; it comes back empty.
    #[serde(default)]
    pub gone: Vec<(f64, f64)>,
}

fn unit_weight() -> f64 {
    1.0
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
    /// The servers; one that is always there if none is named.
    #[serde(default)]
    pub servers: Vec<Server>,
    /// What a hit costs.
    #[serde(default)]
    pub network: Option<Network>,
    /// Seconds until what happened to a server is known.
    #[serde(default)]
    pub news: f64,
    /// Part of the loads whose bytes turn out to be no good when they are there.
    #[serde(default)]
    pub failing: f64,
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
            servers: Vec::new(),
            network: None,
            news: 0.0,
            failing: 0.0,
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
}
