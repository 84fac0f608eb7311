//! A case: the dataset, the cache, the jobs, the servers and the origin of a simulation. [`Case::faults`]
//! checks it.

use serde::{Deserialize, Serialize};

mod faults;

/// How a job reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Reader {
    /// The cache chooses the next sample.
    #[default]
    Substitute,
    /// The job reads a fixed order, and never changes what is cached.
    Strict,
}

/// A job's plan as part of the dataset: a pseudo-random subset.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Subset {
    /// The part of the samples, or of the units if `whole_units`.
    pub part: f64,
    /// Whether to choose whole units.
    #[serde(default)]
    pub whole_units: bool,
    /// Selects one of many such subsets.
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
    /// Returns whether a sample is in the subset, for a dataset of `units` units.
    pub(crate) fn has(&self, units: usize, unit: u32, sample: u64) -> bool {
        let what = if self.whole_units { u64::from(unit) } else { units as u64 + sample };
        let h = mix(self.seed.wrapping_mul(7919) ^ what);
        (h >> 11) as f64 / (1u64 << 53) as f64 <= self.part
    }
}

/// A job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobSpec {
    /// Samples a second when it never waits.
    pub rate: f64,
    /// Start, in seconds.
    #[serde(default)]
    pub start: f64,
    /// End, in seconds; without it the job never leaves.
    #[serde(default)]
    pub end: Option<f64>,
    /// Pauses, each from and to, in seconds.
    #[serde(default)]
    pub pauses: Vec<(f64, f64)>,
    /// Order of its samples.
    #[serde(default)]
    pub reader: Reader,
    /// Subset that it reads; without it the whole dataset.
    #[serde(default)]
    pub subset: Option<Subset>,
    /// Most samples granted and not consumed; the case's `leased` without it.
    #[serde(default)]
    pub leased: Option<usize>,
    /// Samples granted at once, as soon as `leased` has room for them; 0 grants one by one.
    #[serde(default)]
    pub lease: u32,
    /// Strict jobs: samples' worth of units that it may prefetch, beside the shared cache.
    #[serde(default)]
    pub prefetch: u64,
    /// Strict jobs: orders units in blocks of so many samples and shuffles each block; 0 is a flat shuffle.
    #[serde(default)]
    pub block: u32,
}

impl JobSpec {
    /// Makes a job that reads everything, for ever.
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

/// The origin and its link. Without it a fetch takes no time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// Bandwidth in samples a second. A unit counts as its samples.
    pub bandwidth: f64,
    /// Seconds until the first byte of a request.
    pub latency: f64,
    /// Most concurrent requests; unlimited without it.
    #[serde(default)]
    pub requests: Option<u32>,
    /// Most requests a second; unlimited without it.
    #[serde(default)]
    pub requests_per_second: Option<f64>,
}

impl Origin {
    /// Makes an origin without limits on requests.
    #[must_use]
    pub fn new(bandwidth: f64, latency: f64) -> Self {
        Origin { bandwidth, latency, requests: None, requests_per_second: None }
    }
}

/// The link from each server to the jobs. Without it a hit takes no time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Bandwidth of one server, in samples a second.
    pub bandwidth: f64,
    /// Latency in seconds.
    pub latency: f64,
}

/// A server of several.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    /// Its part of the cache, relative to the other servers.
    #[serde(default = "unit_weight")]
    pub weight: f64,
    /// Times at which it is down, each from and to, in seconds. It returns empty.
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
    /// Name, shown in outcomes.
    pub name: String,
    /// Samples in each unit; a file may say `{ count, samples }` for equal ones.
    #[serde(deserialize_with = "units")]
    pub units: Vec<u32>,
    /// Cache size as a part of the dataset.
    pub cache: f64,
    pub jobs: Vec<JobSpec>,
    /// Start of the measured time, in seconds.
    pub warm: f64,
    /// End of the measured time and of the run, in seconds.
    pub end: f64,
    /// Seed of all random choices.
    #[serde(default = "one")]
    pub seed: u64,
    /// The origin.
    #[serde(default)]
    pub origin: Option<Origin>,
    /// The servers; without any, one that is always up.
    #[serde(default)]
    pub servers: Vec<Server>,
    /// The link from each server to the jobs.
    #[serde(default)]
    pub network: Option<Network>,
    /// Seconds until the others learn of a server's change.
    #[serde(default)]
    pub news: f64,
    /// Part of the loads whose bytes prove wrong when they arrive.
    #[serde(default)]
    pub failing: f64,
    /// Most samples that each job has been granted and has not consumed.
    #[serde(default)]
    pub leased: usize,
    /// Samples decided before their grant, so that their fetch can start.
    #[serde(default)]
    pub ahead: usize,
    /// Most older picks that one whose bytes are cached may overtake.
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

/// The most units of a file that says only how many there are.
const UNITS_MAX: u32 = 1 << 24;

/// Units as a file writes them: equal ones, or the samples of each.
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
        Ok(Units::Equal { count, samples })
            if count <= UNITS_MAX && u64::from(count) * u64::from(samples) <= 1 << 31 =>
        {
            Ok(vec![samples; count as usize])
        }
        Ok(Units::Equal { .. }) => Err(D::Error::custom("units: more than 2^24 units or 2^31 samples")),
        Err(_) => Err(D::Error::custom("units: a list of samples per unit, or { count, samples }")),
    }
}

impl Case {
    /// Makes a case of `units` units of `size` samples, with jobs aligned or staggered evenly over an epoch.
    /// Two epochs of the slowest job warm up, six are measured.
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

    /// Returns the number of samples of the dataset.
    #[must_use]
    pub fn samples(&self) -> usize {
        self.units.iter().map(|&u| u as usize).sum()
    }

    /// Returns the cache's capacity in samples.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        (self.cache * self.samples() as f64 + 1e-6) as u64
    }
}
