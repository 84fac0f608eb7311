//! What cache is worth to a job (`docs/BENEFIT.md`).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What cache is worth to a job, from its acks and the server's clocks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobBenefit {
    /// The steps of all ranks that tell it, at most the latest 256.
    pub steps: u64,
    /// Why there is no estimate. Absent with an estimate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_measured: Option<String>,
    /// The estimate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub estimate: Option<BenefitEstimate>,
    /// The latest probe, since the server began. Absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<JobProbe>,
}

/// A probe: the job gets cached samples only, so that its steps show how fast it is if it waits for no
/// origin.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobProbe {
    /// Samples that were acknowledged since it began, at most `of_entries`.
    pub entries: u64,
    /// The samples that it takes.
    pub of_entries: u64,
    /// Seconds since it began.
    pub age_s: f64,
    /// Whether it is over.
    pub is_over: bool,
    /// The rate that it found, in samples a second of all ranks. Absent while it runs, and if it found none:
    /// the disk or the server was the limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_rate: Option<f64>,
}

/// An estimate. Rates are samples a second of all ranks together; parts are 0 to 1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BenefitEstimate {
    /// The rate now.
    pub rate: f64,
    /// The rate if the job never waited for data.
    pub most_rate: f64,
    /// Whether `most_rate` is a value. If not, it is an upper bound.
    pub is_sure: bool,
    /// The rate of the origin while it is busy. Absent if nothing was read from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin_rate: Option<f64>,
    /// The rate of the disk while it is busy. Absent if nothing was read from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_rate: Option<f64>,
    /// The part of the time in which the job computes.
    pub compute: f64,
    /// The part of the time in which it waits for its own workers, or prepares batches itself.
    pub preparation: f64,
    /// The part of the time in which it waits for the origin, the disk or the server.
    pub fetch: f64,
    /// What it waits for most, by the latest 64 steps.
    pub verdict: BenefitVerdict,
    /// The part of its bytes that the server did not read from the origin for it.
    pub cached: f64,
    /// The mean bytes of a sample. 0 in the answers of older servers.
    #[serde(default)]
    pub sample_bytes: f64,
    /// The predicted rate if more came from the cache.
    pub what_if: Vec<WhatIf>,
}

impl BenefitEstimate {
    /// Returns whether more cache makes the job slower. Only a disk that becomes the limit does that.
    #[must_use]
    pub fn slows_with_cache(&self) -> bool {
        let rates = || std::iter::once(self.rate).chain(self.what_if.iter().map(|w| w.rate));
        rates().zip(rates().skip(1)).any(|(less, more)| more < SLOWER * less)
    }
}

/// A predicted rate below this part of the rate with less cache is slower, and not only rounded.
const SLOWER: f64 = 0.99;

/// What a job waits for most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum BenefitVerdict {
    /// It hardly waits.
    Compute,
    /// Its own workers, which decode and transform.
    Preparation,
    /// The origin.
    Origin,
    /// The server's disk.
    Disk,
    /// The server itself, or the network to it.
    Queue,
}

impl BenefitVerdict {
    /// Returns the end of a sentence about the job: "it …".
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            BenefitVerdict::Compute => "hardly waits for data",
            BenefitVerdict::Preparation => "waits for its own preparation",
            BenefitVerdict::Origin => "waits for the origin",
            BenefitVerdict::Disk => "waits for the server's disk",
            BenefitVerdict::Queue => "waits for the server",
        }
    }
}

/// A predicted rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WhatIf {
    /// The part of the job's bytes that come from the cache, 0 to 1.
    pub cached: f64,
    /// The rate then, in samples a second.
    pub rate: f64,
}
