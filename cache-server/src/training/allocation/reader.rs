//! A running job, as the allocation sees it.

use fletch_api::{JobSettings, benefit::BenefitVerdict};
use fletch_core::{DatasetName, Domain, JobName, Tenant};
use fletch_store::DatasetId;
use std::time::Duration;

/// How long a job counts as running after its last ack: longer than most checkpoints and validations take.
pub const RUNNING_FOR: Duration = Duration::from_secs(300);

/// No job reads more bytes a second. A bound without meaning is larger.
const BYTES_PER_S_MAX: f64 = 1e13;

/// What a job's acks tell. Rates are samples a second of all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// The rate now.
    pub rate: f64,
    /// The rate if the job never waited for data, or an upper bound.
    pub most_rate: f64,
    /// The mean bytes of a sample.
    pub sample_bytes: f64,
    /// What it waits for most.
    pub verdict: BenefitVerdict,
    /// The parts of the time in which it computes, prepares batches, and waits for data.
    pub parts: [f64; 3],
    /// The part of its bytes that the server did not read from the origin for it.
    pub cached: f64,
    /// The rate of the origin while it is busy, if anything was read from it.
    pub origin_rate: Option<f64>,
    /// The rate of the disk while it is busy, if anything was read from it.
    pub disk_rate: Option<f64>,
}

/// A running job.
#[derive(Debug, Clone)]
pub struct Reader {
    pub id: String,
    pub name: JobName,
    pub tenant: Tenant,
    /// The domain of its dataset.
    pub domain: Domain,
    /// The dataset that it reads.
    pub dataset: DatasetName,
    /// The shares of the disk that its reads can hit. The first that exists counts.
    pub shares: Vec<DatasetId>,
    /// Whether it reads in an order of its own, so that no sweep serves it.
    pub is_strict: bool,
    /// Whether it has not begun a second epoch, so that nobody knows whether it reads anything twice.
    pub is_first_pass: bool,
    /// What users set.
    pub settings: JobSettings,
    /// The mean bytes of a unit of its dataset.
    pub unit_bytes: u64,
    /// The name of the link to its origin.
    pub link: String,
    /// What the link carries while requests queue for it, in bytes a second, if it carried anything.
    pub bandwidth: Option<f64>,
    /// What its acks tell, if they tell enough.
    pub measured: Option<Measured>,
}

impl Reader {
    /// Returns the rate that it would have if it never waited for data, in bytes a second; or a bound.
    ///
    /// A bound is good enough to divide by. A job with a bound waits. Until it gets so much that it waits
    /// less, its bytes are worth the same, whatever its most rate is; and then it shows that rate.
    pub(super) fn most_bytes(&self) -> Option<f64> {
        let bytes = self.measured.map(|m| m.most_rate * m.sample_bytes)?;
        (bytes.is_finite() && bytes > 0.0).then_some(bytes.min(BYTES_PER_S_MAX))
    }
}
