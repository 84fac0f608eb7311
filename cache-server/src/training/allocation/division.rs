//! A decision about the disk, and the claims that carry it out.

use super::Reader;
use fletch_core::capacity::{Problem, Reason, byte_values, job_rates};
use fletch_store::{
    DatasetId, Split,
    disk::{Claim, split_by_claims},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

/// How a decision ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Outcome {
    /// No dataset is read by a measured job only.
    #[default]
    NotMeasured,
    /// The allocator decided.
    Decided(Reason),
    /// The problem had a number that cannot be used.
    Failed,
}

/// A decision about the disk.
#[derive(Debug, Clone, Default)]
pub struct Division {
    /// The bytes of each share that is divided by worth.
    pub shares: BTreeMap<DatasetId, u64>,
    /// The bytes that were divided.
    pub divided: u64,
    /// The shares of which nobody reads now.
    pub idle: BTreeSet<DatasetId>,
    /// The least bytes of each share, by the settings of jobs.
    pub least: BTreeMap<DatasetId, u64>,
    /// The share of each running job.
    pub share_of: BTreeMap<String, DatasetId>,
    /// How the decision ended.
    pub outcome: Outcome,
    /// When it was made; `None` before the first.
    pub at: Option<Instant>,
    /// The bytes that all decisions so far took away from datasets.
    pub moved: u64,
    /// The part of every least share that could be kept; 1 unless limits contradict each other.
    pub minimums_kept: f64,
    /// The running jobs as they were then.
    pub readers: Vec<Reader>,
    /// The problem as it was decided, with the shares and jobs of its lists.
    pub(super) problem: Problem,
    pub(super) ids: Vec<DatasetId>,
    pub(super) jobs: Vec<String>,
}

/// What a measured job has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JobRate {
    /// Its part of the weights of all measured jobs.
    pub weight_part: f64,
    /// The rate that the model predicts, as a part of its most rate.
    pub speed: f64,
}

/// Returns the bytes of each share by reads alone: first the least bytes that jobs set, then equally. Pure.
pub(super) fn by_reads(
    limited: &Split,
    capacity: u64,
    idle: &BTreeSet<DatasetId>,
    least: &BTreeMap<DatasetId, u64>,
) -> BTreeMap<DatasetId, u64> {
    let mut left = capacity;
    let mut first: BTreeMap<DatasetId, u64> = BTreeMap::new();
    let mut claims = limited.clone();
    let mut pools: BTreeMap<DatasetId, u64> = BTreeMap::new();
    for claim in &mut claims {
        if idle.contains(&claim.dataset) {
            claim.want = Some(0);
        }
        let most = claim.most.unwrap_or(u64::MAX);
        let bytes = least.get(&claim.dataset).copied().unwrap_or(0).min(most).min(left);
        left -= bytes;
        first.insert(claim.dataset, bytes);
        claim.want = claim.want.map(|want| want.saturating_sub(bytes));
        claim.most = claim.most.map(|most| most - bytes);
        let of_pool = pools.entry(claim.pool.plain).or_default();
        *of_pool = of_pool.saturating_add(bytes);
    }
    for claim in &mut claims {
        let bytes = pools.get(&claim.pool.plain).copied().unwrap_or(0);
        claim.pool.most = claim.pool.most.map(|most| most.saturating_sub(bytes));
    }
    for (id, bytes) in split_by_claims(left, &claims) {
        *first.entry(id).or_default() += bytes;
    }
    first
}

impl Division {
    /// Returns the bytes of each share by reads alone.
    #[must_use]
    pub fn by_reads(&self, limited: &Split, capacity: u64) -> BTreeMap<DatasetId, u64> {
        by_reads(limited, capacity, &self.idle, &self.least)
    }

    /// Returns the claims that give each dataset its share of a disk that may have changed since then.
    ///
    /// Datasets that are divided by worth have the same parts of the bytes that they have by reads today.
    #[must_use]
    pub fn claims(&self, limited: &Split, capacity: u64) -> Split {
        let by_reads = self.by_reads(limited, capacity);
        let of_reads = |id: &DatasetId| by_reads.get(id).copied().unwrap_or(0);
        let pool: u64 = self.shares.keys().map(of_reads).sum();
        let scale = if self.divided > 0 { pool as f64 / self.divided as f64 } else { 0.0 };
        let claim = |c: &Claim| {
            let share = match self.shares.get(&c.dataset) {
                Some(&share) => (share as f64 * scale) as u64,
                None => of_reads(&c.dataset),
            };
            Claim { want: Some(share), ..*c }
        };
        limited.iter().map(claim).collect()
    }

    /// Whether the division carries out the same as another.
    pub(super) fn is_same(&self, other: &Division) -> bool {
        (&self.shares, self.divided, &self.idle, &self.least)
            == (&other.shares, other.divided, &other.idle, &other.least)
    }

    fn in_force(&self) -> Vec<f64> {
        self.ids.iter().map(|id| self.shares.get(id).copied().unwrap_or(0) as f64).collect()
    }

    /// Returns what one byte more is worth to each share that is divided by worth, in weighted logarithms of
    /// rates.
    #[must_use]
    pub fn byte_values(&self) -> BTreeMap<DatasetId, f64> {
        self.ids.iter().copied().zip(byte_values(&self.problem, &self.in_force())).collect()
    }

    /// Returns what each measured job has, by its id.
    #[must_use]
    pub fn job_rates(&self) -> BTreeMap<&str, JobRate> {
        let rates = job_rates(&self.problem, &self.in_force());
        let all: f64 = self.problem.jobs.iter().map(|j| j.weight).sum();
        let jobs = self.jobs.iter().zip(&self.problem.jobs).zip(rates);
        jobs.map(|((id, job), rate)| {
            (id.as_str(), JobRate { weight_part: job.weight / all, speed: rate / job.most_rate })
        })
        .collect()
    }

    /// Returns the mean speed of a share's jobs, by weight, if the share had other bytes and all other shares
    /// stayed. A speed is a part of the most rate. `None` if the share is not divided by worth.
    #[must_use]
    pub fn speed_at(&self, share: DatasetId, bytes: u64) -> Option<f64> {
        let dataset = self.ids.iter().position(|id| *id == share)?;
        let mut shares = self.in_force();
        shares[dataset] = (bytes as f64).min(self.problem.datasets[dataset].size);
        let rates = job_rates(&self.problem, &shares);
        let of = self.problem.jobs.iter().zip(rates).filter(|(job, _)| job.dataset == dataset);
        let (mut sum, mut weights) = (0.0, 0.0);
        for (job, rate) in of {
            sum += job.weight * rate / job.most_rate;
            weights += job.weight;
        }
        (weights > 0.0).then(|| sum / weights)
    }

    /// Returns the bytes that a share can use, if it is divided by worth.
    #[must_use]
    pub fn size_of(&self, share: DatasetId) -> Option<u64> {
        let dataset = self.ids.iter().position(|id| *id == share)?;
        Some(self.problem.datasets[dataset].size as u64)
    }
}
