//! Which dataset has how much of the disk, and why (`docs/ALLOCATION.md`).

use crate::benefit::BenefitVerdict;
use fletch_core::{DatasetName, Domain, JobName, Tenant};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The least weight of a job or a tenant.
pub const WEIGHT_MIN: f64 = 0.001;
/// The largest weight of a job or a tenant.
pub const WEIGHT_MAX: f64 = 1000.0;

/// What a user sets of a job. An absent setting has its default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JobSettings {
    /// The job's part of its tenant's weight, beside the weights of the tenant's other jobs: 0.001 to 1000, 1
    /// by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// The bytes that the job's dataset gets at least while the job runs; none by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_share_bytes: Option<u64>,
}

impl JobSettings {
    /// Returns the weight.
    #[must_use]
    pub fn weight(&self) -> f64 {
        self.weight.unwrap_or(1.0)
    }
}

/// Checks a weight.
///
/// # Errors
/// A sentence that says which weights there are.
pub fn check_weight(weight: f64) -> Result<(), String> {
    if (WEIGHT_MIN..=WEIGHT_MAX).contains(&weight) {
        return Ok(());
    }
    Err(format!("the weight is {weight}, but must be within {WEIGHT_MIN} and {WEIGHT_MAX}"))
}

/// The division of the disk among datasets.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Allocation {
    /// The time between two decisions, in seconds.
    pub interval_s: f64,
    /// The seconds since the last decision. Absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age_s: Option<f64>,
    /// Why the last decision changed or kept the division. Absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<AllocationReason>,
    /// The bytes that can be divided among datasets.
    pub capacity_bytes: u64,
    /// Of these, the bytes that are divided by what they are worth to measured jobs.
    pub divided_bytes: u64,
    /// The bytes that all decisions since the start took away from datasets.
    pub moved_bytes: u64,
    /// The datasets with a share, the most valuable byte first.
    pub datasets: Vec<DatasetShare>,
    /// The jobs of these datasets that the caller may see, by name.
    pub jobs: Vec<JobShare>,
}

/// Why a decision changed or kept the division.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AllocationReason {
    /// No job is measured: datasets have shares by what is read of them.
    NotMeasured,
    /// There was no division that kept all limits.
    First,
    /// The new division gains more than it costs to move.
    Gain,
    /// The old division was worth less than an equal one.
    BelowEqual,
    /// A new division would gain too little.
    SmallGain,
    /// A new division would gain little, and enough was moved in this hour.
    BudgetSpent,
    /// The limits of tenants and jobs contradict each other, or a number cannot be used.
    Failed,
}

impl AllocationReason {
    /// Returns the reason as a clause about the last decision.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            AllocationReason::NotMeasured => "no job is measured, so shares follow what is read",
            AllocationReason::First => "it made the first division",
            AllocationReason::Gain => "it changed the division, because jobs gain more than that costs",
            AllocationReason::BelowEqual => {
                "it changed the division, because equal shares would have been better"
            }
            AllocationReason::SmallGain => "it kept the division, because a new one would gain too little",
            AllocationReason::BudgetSpent => {
                "it kept the division: a new one would gain little, and enough was moved in this hour"
            }
            AllocationReason::Failed => "it failed, so shares follow what is read; the server's log says why",
        }
    }
}

/// By what a dataset got its share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ShareBasis {
    /// By what the bytes are worth to its jobs.
    Benefit,
    /// By what is read of it: it has plain readers, or its jobs are not measured.
    Reads,
    /// Nobody reads it now: it has what the others leave.
    Idle,
}

/// The share of one dataset: of its plain readers, and of the sweeps over it. Each chunk counts once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DatasetShare {
    /// The domain.
    #[schema(value_type = String)]
    pub domain: Domain,
    /// The dataset.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// Whether a sweep has a part of it, which jobs under the order `substitute` use together.
    pub is_sweep: bool,
    /// The bytes that it can use.
    pub size_bytes: u64,
    /// The bytes that it may occupy.
    pub share_bytes: u64,
    /// Of these, the bytes of its sweeps. The rest is for its plain readers.
    #[serde(default)]
    pub sweep_share_bytes: u64,
    /// The bytes that it would have in a division by reads alone.
    pub by_reads_bytes: u64,
    /// The bytes that it occupies.
    pub cached_bytes: u64,
    /// Of these, the bytes that count for the share of its sweeps.
    #[serde(default)]
    pub sweep_cached_bytes: u64,
    /// By what it got the share.
    pub basis: ShareBasis,
    /// Its place by the value of one byte more, from 1. Absent unless the basis is benefit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u64>,
    /// What one GiB more is worth: the speed that its jobs gain, as a part of their speed, weighted and
    /// summed. Absent unless the basis is benefit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gain_per_gib: Option<f64>,
    /// Running jobs of any tenant that read it.
    pub jobs: u64,
    /// The speed of its jobs with other shares. Empty unless the basis is benefit.
    #[serde(default)]
    pub curve: Vec<CurvePoint>,
}

/// The predicted speed of a dataset's jobs with a share.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CurvePoint {
    /// The share.
    pub share_bytes: u64,
    /// The mean speed of its jobs, by weight, as a part of the speed without waits for data: 0 to 1.
    pub speed: f64,
}

/// What a job has of the disk, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobShare {
    /// The job's id.
    pub id: String,
    /// The job's name.
    #[schema(value_type = String)]
    pub name: JobName,
    /// The job's tenant.
    #[schema(value_type = String)]
    pub tenant: Tenant,
    /// The dataset that it reads.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// Its rate, as a part of the rate that it would have if it never waited: 0 to 1. Absent if it is not
    /// measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<f64>,
    /// What it waits for most. Absent if it is not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<BenefitVerdict>,
    /// Its part of the weights of all running jobs, 0 to 1. Absent if it is not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_part: Option<f64>,
    /// The bytes of its dataset's share, which all jobs of the dataset use. Absent if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_bytes: Option<u64>,
    /// The bytes that its dataset can use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// By what its dataset got the share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub basis: Option<ShareBasis>,
    /// The place of its dataset by the value of one byte more, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u64>,
    /// The number of datasets that have a place.
    pub ranks: u64,
    /// As [`DatasetShare::gain_per_gib`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gain_per_gib: Option<f64>,
    /// The other running jobs that read the same dataset.
    pub others: u64,
    /// The rate that the model predicts with the share once it is filled, in samples a second. Absent if the
    /// job is not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound_rate: Option<f64>,
}
