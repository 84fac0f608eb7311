//! The problem that a decision solves, from claims, running jobs and limits.

use super::{Reader, division::by_reads};
use fletch_api::jobs::SWEEP_UNITS_MIN;
use fletch_core::{
    Hash, Tenant,
    capacity::{DatasetDemand, FIRST_PASS_WEIGHT, JobDemand, Limit, Link, Problem},
};
use fletch_store::{DatasetId, Split, TenantQuota};
use std::collections::{BTreeMap, BTreeSet};

/// The units with which a sweep shuffles well: it gets room for as many, if that is little of the disk.
const SWEEP_UNITS_GOOD: u64 = 13;
/// The part of the divided bytes that is little.
const LITTLE_PART: u64 = 20;

/// What the administrator set of a tenant.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TenantShare {
    /// Its weight, which its jobs divide among themselves.
    pub weight: f64,
    /// The bytes that the datasets of its running jobs get at least together.
    pub min_share: u64,
}

impl Default for TenantShare {
    fn default() -> Self {
        TenantShare { weight: 1.0, min_share: 0 }
    }
}

/// What the disk is divided by.
#[derive(Debug, Clone, Default)]
pub(super) struct Demand {
    /// The claims by reads, before any quota.
    pub claims: Split,
    /// The claims, limited by the quotas of tenants.
    pub limited: Split,
    /// The capacity of the disk.
    pub capacity: u64,
    /// The tenants' quotas on disk.
    pub quotas: Vec<TenantQuota>,
}

/// A problem, and which shares and jobs its datasets and jobs are.
#[derive(Debug, Clone, Default)]
pub(super) struct Built {
    pub problem: Problem,
    /// The share of each dataset of the problem.
    pub ids: Vec<DatasetId>,
    /// The id of each job of the problem.
    pub jobs: Vec<String>,
    /// The least bytes of each share, by the settings of jobs.
    pub least: BTreeMap<DatasetId, u64>,
    /// The shares of which nobody reads now.
    pub idle: BTreeSet<DatasetId>,
    /// The share of each running job.
    pub share_of: BTreeMap<String, DatasetId>,
}

/// The running jobs of each share.
type ReadersOf<'a> = BTreeMap<DatasetId, Vec<&'a Reader>>;

/// Returns an identity for the core, from a name.
fn id_of(name: &str) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&Hash::of(name.as_bytes()).as_bytes()[..8]);
    u64::from_le_bytes(first)
}

/// Builds the problem. `plain` are the shares with plain readers, and `bandwidths` what links were last known
/// to carry, in bytes a second.
pub(super) fn build(
    demand: &Demand,
    readers: &[Reader],
    tenants: &BTreeMap<Tenant, TenantShare>,
    plain: &BTreeSet<DatasetId>,
    bandwidths: &BTreeMap<String, f64>,
) -> Built {
    let known: BTreeSet<DatasetId> = demand.claims.iter().map(|c| c.dataset).collect();
    let mut of: ReadersOf<'_> = BTreeMap::new();
    let mut built = Built::default();
    for reader in readers {
        let Some(&share) = reader.shares.iter().find(|share| known.contains(share)) else { continue };
        of.entry(share).or_default().push(reader);
        built.share_of.insert(reader.id.clone(), share);
        let least = built.least.entry(share).or_default();
        // Jobs of one dataset use the same bytes.
        *least = (*least).max(reader.settings.min_share_bytes.unwrap_or(0));
    }
    built.idle = known.iter().copied().filter(|id| !of.contains_key(id) && !plain.contains(id)).collect();
    let by_reads = by_reads(&demand.limited, demand.capacity, &built.idle, &built.least);
    let is_divided = |id: &DatasetId, jobs: &[&Reader]| {
        // One link may serve several datasets, so any of its reads tells what it carries.
        !plain.contains(id)
            && jobs.iter().any(|r| r.most_bytes().is_some())
            && jobs.iter().all(|r| bandwidths.contains_key(&r.link))
    };
    of.retain(|id, jobs| is_divided(id, jobs));
    let divided: Vec<&Reader> = of.values().flatten().copied().filter(|r| r.most_bytes().is_some()).collect();
    let weights = weights(&divided, tenants);
    let problem = &mut built.problem;
    problem.capacity = of.keys().map(|id| by_reads.get(id).copied().unwrap_or(0) as f64).sum();
    let mut links: Vec<&str> = of.values().flatten().map(|r| r.link.as_str()).collect();
    links.sort_unstable();
    links.dedup();
    problem.links = links.iter().map(|link| Link { id: id_of(link), bandwidth: bandwidths[*link] }).collect();
    let divided_bytes = problem.capacity as u64;
    let mut rooms = Vec::new();
    for (&id, jobs) in &of {
        let size = demand.claims.iter().find(|c| c.dataset == id).and_then(|c| c.most).unwrap_or(u64::MAX);
        let index = problem.datasets.len();
        let first = jobs[0];
        let window = SWEEP_UNITS_MIN.saturating_mul(first.unit_bytes).min(size);
        let is_swept = jobs.iter().any(|r| !r.is_strict);
        problem.datasets.push(DatasetDemand {
            id: id.0,
            size: size.max(1) as f64,
            link: links.iter().position(|link| *link == first.link).unwrap_or(0),
            window: if is_swept { window as f64 } else { 0.0 },
            pinned: 0.0,
        });
        built.ids.push(id);
        if is_swept {
            // A sweep without room reads each sample by itself, which costs the origin and the job more than
            // the few bytes are worth to anybody else.
            let good = SWEEP_UNITS_GOOD.saturating_mul(first.unit_bytes).min(size);
            let little = divided_bytes / LITTLE_PART;
            let all = divided_bytes / 2 / of.len() as u64;
            let room = good.min(little.max(window)).min(all);
            rooms.push((index, room));
        }
        for reader in jobs {
            let Some(most_rate) = reader.most_bytes() else { continue };
            let doubtful = jobs.len() == 1 && reader.is_first_pass;
            let weight = weights[&reader.id] * if doubtful { FIRST_PASS_WEIGHT } else { 1.0 };
            let (id, strict) = (id_of(&reader.id), reader.is_strict);
            problem.jobs.push(JobDemand { id, dataset: index, most_rate, weight, strict });
            built.jobs.push(reader.id.clone());
        }
    }
    built.limits(demand, (&of, &rooms), tenants);
    built
}

/// Returns the weight of each job: its part of its tenant's weight.
fn weights(readers: &[&Reader], tenants: &BTreeMap<Tenant, TenantShare>) -> BTreeMap<String, f64> {
    let mut sums: BTreeMap<&Tenant, f64> = BTreeMap::new();
    for r in readers {
        *sums.entry(&r.tenant).or_default() += r.settings.weight();
    }
    let of = |r: &&Reader| {
        let tenant = tenants.get(&r.tenant).copied().unwrap_or_default();
        (r.id.clone(), tenant.weight * r.settings.weight() / sums[&r.tenant])
    };
    readers.iter().map(of).collect()
}

impl Built {
    /// Adds the limits of jobs and tenants.
    fn limits(
        &mut self,
        demand: &Demand,
        (of, rooms): (&ReadersOf<'_>, &[(usize, u64)]),
        tenants: &BTreeMap<Tenant, TenantShare>,
    ) {
        let index = |id: &DatasetId| self.ids.iter().position(|known| known == id);
        let least_of = |(dataset, bytes): &(usize, u64)| {
            let (datasets, least) = (vec![*dataset], *bytes as f64);
            Limit { id: 0, datasets, least, most: f64::INFINITY }
        };
        let mut limits: Vec<Limit> = rooms.iter().map(least_of).collect();
        for (id, &least) in &self.least {
            if let (Some(dataset), true) = (index(id), least > 0) {
                limits.push(least_of(&(dataset, least)));
            }
        }
        for (tenant, share) in tenants.iter().filter(|(_, share)| share.min_share > 0) {
            let read = |id: &&DatasetId| of[*id].iter().any(|r| r.tenant == *tenant);
            let datasets: Vec<usize> = of.keys().filter(read).filter_map(index).collect();
            if !datasets.is_empty() {
                limits.push(Limit { id: 0, datasets, least: share.min_share as f64, most: f64::INFINITY });
            }
        }
        for (_, uses) in &demand.quotas {
            let parts = demand.limited.iter().filter(|c| uses.iter().any(|d| d.dataset == c.dataset));
            let parts: Vec<(usize, u64)> =
                parts.filter_map(|c| Some((index(&c.dataset)?, c.most?))).collect();
            if !parts.is_empty() {
                let datasets = parts.iter().map(|(dataset, _)| *dataset).collect();
                let most = parts.iter().map(|(_, part)| *part as f64).sum();
                limits.push(Limit { id: 0, datasets, least: 0.0, most });
            }
        }
        for (i, limit) in limits.iter_mut().enumerate() {
            limit.id = i as u64;
        }
        self.problem.limits = limits;
    }
}
