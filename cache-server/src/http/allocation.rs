//! The division of the disk: which dataset has how much, and why; and the settings of jobs that change it.

use super::{
    admission::{WriteAccess, forbidden},
    error::{ApiError, ApiResult},
    jobs::{open_job, view},
    request::{OnePath, read_json},
};
use crate::{
    app::server::Server,
    tenancy::auth::Principal,
    training::{
        allocation::{Division, JobRate, Outcome, Reader},
        epochs::JobError,
        jobs::OpenJob,
    },
};
use axum::{
    Json,
    body::Body,
    extract::{Path, State},
};
use fletch_api::{
    Allocation, AllocationReason, CurvePoint, DatasetShare, Job, JobSettings, JobShare, Problem, ShareBasis,
};
use fletch_core::{DatasetName, Domain, capacity::Reason};
use fletch_settings::ByteSize;
use fletch_store::{DatasetId, disk::DatasetUsage};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};
use tokio::task::spawn_blocking;

/// Points of a dataset's curve.
const CURVE_POINTS: u64 = 8;
const MIB: u64 = 1 << 20;
const GIB: f64 = (1 << 30) as f64;

fn reason(outcome: Outcome) -> AllocationReason {
    match outcome {
        Outcome::NotMeasured => AllocationReason::NotMeasured,
        Outcome::Failed => AllocationReason::Failed,
        Outcome::Decided(Reason::First) => AllocationReason::First,
        Outcome::Decided(Reason::Gain) => AllocationReason::Gain,
        Outcome::Decided(Reason::BelowEqual) => AllocationReason::BelowEqual,
        Outcome::Decided(Reason::SmallGain) => AllocationReason::SmallGain,
        Outcome::Decided(Reason::BudgetSpent) => AllocationReason::BudgetSpent,
    }
}

/// The bytes of one share: that of a dataset's plain readers, or of a sweep over it.
#[derive(Debug, Clone, Copy)]
struct ShareBytes {
    /// The dataset of the plain readers with which it shares chunks.
    plain: DatasetId,
    /// The bytes that it has for itself. Those of one dataset add up.
    part: u64,
    /// The bytes that its readers may use.
    usable: u64,
    /// The bytes that it would have by reads.
    by_reads: u64,
    /// The bytes that it can use.
    size: u64,
    /// The bytes that all shares of the dataset can use together.
    pool_size: u64,
}

/// What the views of shares and jobs need of one decision.
struct Shares {
    division: Arc<Division>,
    capacity: u64,
    /// The shares.
    bytes: BTreeMap<DatasetId, ShareBytes>,
    values: BTreeMap<DatasetId, f64>,
    /// The place of each share by value, from 1.
    ranks: BTreeMap<DatasetId, u64>,
    /// The running jobs of each share.
    jobs: BTreeMap<DatasetId, u64>,
}

impl Shares {
    fn of(server: &Server) -> Shares {
        let division = server.allocator.current();
        let (mut limited, capacity) = server.allocator.claims();
        if server.divided_capacity().is_none() {
            limited.clear();
        }
        let by_reads = division.by_reads(&limited, capacity);
        let claims = division.claims(&limited, capacity);
        let disk = server.store.disk();
        let bytes = claims.iter().map(|c| {
            let size = division.size_of(c.dataset).or(c.most).unwrap_or(capacity);
            // What is in force is what the disk says; it takes on a new division within a second.
            let part = disk.and_then(|d| d.part_of(c.dataset)).or(c.want).unwrap_or(0);
            let bytes = ShareBytes {
                plain: c.pool.plain,
                part,
                usable: disk.and_then(|d| d.share_of(c.dataset)).unwrap_or(part).min(size),
                by_reads: by_reads.get(&c.dataset).copied().unwrap_or(0),
                size,
                pool_size: c.pool.most.unwrap_or(size).max(size),
            };
            (c.dataset, bytes)
        });
        let bytes = bytes.collect();
        let values = division.byte_values();
        let mut by_value: Vec<_> = values.iter().map(|(id, value)| (*id, *value)).collect();
        by_value.sort_by(|a, b| b.1.total_cmp(&a.1));
        let ranks = by_value.iter().zip(1..).map(|((id, _), rank)| (*id, rank)).collect();
        let mut jobs: BTreeMap<DatasetId, u64> = BTreeMap::new();
        division.share_of.values().for_each(|id| *jobs.entry(*id).or_default() += 1);
        Shares { division, capacity, bytes, values, ranks, jobs }
    }

    fn basis(&self, id: DatasetId) -> ShareBasis {
        match () {
            () if self.division.shares.contains_key(&id) => ShareBasis::Benefit,
            () if self.division.idle.contains(&id) => ShareBasis::Idle,
            () => ShareBasis::Reads,
        }
    }

    /// Returns the line of a dataset: the sum of the share of its plain readers and those of its sweeps.
    fn dataset(
        &self,
        plain: DatasetId,
        (domain, dataset): (Domain, DatasetName),
        usage: &[DatasetUsage],
    ) -> DatasetShare {
        let members: Vec<(DatasetId, ShareBytes)> =
            self.bytes.iter().filter(|(_, bytes)| bytes.plain == plain).map(|(id, b)| (*id, *b)).collect();
        let of_sweeps = |id: DatasetId| id != plain;
        let cached = |wanted: &dyn Fn(DatasetId) -> bool| -> u64 {
            usage.iter().filter(|u| u.plain == plain && wanted(u.dataset)).map(|u| u.bytes).sum()
        };
        // The share whose byte is worth most speaks for the dataset.
        let rank = |id: &DatasetId| self.ranks.get(id).copied();
        let first = members.iter().map(|(id, _)| *id).min_by_key(|id| (rank(id).unwrap_or(u64::MAX), *id));
        let first = first.unwrap_or(plain);
        let size_of_first = self.bytes.get(&first).map_or(0, |b| b.size);
        let point = |i: u64| {
            let share_bytes = size_of_first / CURVE_POINTS * i;
            Some(CurvePoint { share_bytes, speed: self.division.speed_at(first, share_bytes)? })
        };
        let sum = |of: &dyn Fn(&(DatasetId, ShareBytes)) -> u64| members.iter().map(of).sum::<u64>();
        DatasetShare {
            domain,
            dataset,
            is_sweep: members.iter().any(|(id, _)| of_sweeps(*id)),
            size_bytes: members.iter().map(|(_, b)| b.pool_size).max().unwrap_or(0),
            share_bytes: sum(&|(_, b)| b.part),
            sweep_share_bytes: sum(&|(id, b)| if of_sweeps(*id) { b.part } else { 0 }),
            by_reads_bytes: sum(&|(_, b)| b.by_reads),
            cached_bytes: cached(&|_| true),
            sweep_cached_bytes: cached(&of_sweeps),
            basis: self.basis(first),
            rank: rank(&first),
            gain_per_gib: self.values.get(&first).map(|value| value * GIB),
            jobs: sum(&|(id, _)| self.jobs.get(id).copied().unwrap_or(0)),
            curve: (0..=CURVE_POINTS).filter_map(point).collect(),
        }
    }

    fn job(&self, reader: &Reader, rates: &BTreeMap<&str, JobRate>) -> JobShare {
        let share = self.division.share_of.get(&reader.id).copied();
        let share = share.or_else(|| reader.shares.iter().copied().find(|id| self.bytes.contains_key(id)));
        let rate = rates.get(reader.id.as_str());
        let most_rate = reader.measured.map(|m| m.most_rate);
        let jobs = share.and_then(|id| self.jobs.get(&id)).copied().unwrap_or(0);
        JobShare {
            id: reader.id.clone(),
            name: reader.name.clone(),
            tenant: reader.tenant.clone(),
            dataset: reader.dataset.clone(),
            speed: reader.measured.map(|m| (m.rate / m.most_rate).clamp(0.0, 1.0)),
            verdict: reader.measured.map(|m| m.verdict),
            weight_part: rate.map(|r| r.weight_part),
            share_bytes: share.and_then(|id| Some(self.bytes.get(&id)?.usable)),
            size_bytes: share.and_then(|id| Some(self.bytes.get(&id)?.size)),
            basis: share.map(|id| self.basis(id)),
            rank: share.and_then(|id| self.ranks.get(&id).copied()),
            ranks: self.ranks.len() as u64,
            gain_per_gib: share.and_then(|id| Some(self.values.get(&id)? * GIB)),
            others: jobs.saturating_sub(1),
            bound_rate: rate.and_then(|r| Some(r.speed * most_rate?)),
        }
    }
}

/// Returns what a job has of the disk. `None` while it does not run.
pub(super) fn share_of(server: &Server, job: &OpenJob) -> Option<JobShare> {
    let shares = Shares::of(server);
    let reader = job.is_running().then(|| job.reader(|_| None))?;
    Some(shares.job(&reader, &shares.division.job_rates()))
}

fn allocation(server: &Server, principal: &Principal) -> Allocation {
    let all = principal.role.may_see_all_tenants();
    let shares = Shares::of(server);
    let tier = server.store.disk().and_then(|d| d.engine()).map(|t| t.stats());
    let usage = tier.map(|t| t.datasets).unwrap_or_default();
    let names = server.share_names();
    let lines: BTreeSet<DatasetId> = shares.bytes.values().map(|bytes| bytes.plain).collect();
    let line = |plain: DatasetId| {
        let (domain, dataset) = names.get(&plain).filter(|(domain, _)| all || *domain == principal.domain)?;
        Some(shares.dataset(plain, (domain.clone(), dataset.clone()), &usage))
    };
    let mut datasets: Vec<DatasetShare> = lines.into_iter().filter_map(line).collect();
    datasets.sort_by(|a, b| {
        let key = |d: &DatasetShare| (d.rank.unwrap_or(u64::MAX), Reverse(d.share_bytes));
        key(a).cmp(&key(b)).then_with(|| (&a.dataset, &a.domain).cmp(&(&b.dataset, &b.domain)))
    });
    let rates = shares.division.job_rates();
    let own = |r: &&Reader| all || (r.domain == principal.domain && r.tenant == principal.tenant);
    let readers = server.registry.readers();
    let mut jobs: Vec<JobShare> = readers.iter().filter(own).map(|r| shares.job(r, &rates)).collect();
    jobs.sort_by(|a, b| (&a.name, &a.tenant).cmp(&(&b.name, &b.tenant)));
    Allocation {
        interval_s: server.cache.decision_interval.as_secs_f64(),
        age_s: shares.division.at.map(|at| at.elapsed().as_secs_f64()),
        reason: shares.division.at.map(|_| reason(shares.division.outcome)),
        capacity_bytes: shares.capacity,
        divided_bytes: shares.division.divided,
        moved_bytes: shares.division.moved,
        datasets,
        jobs,
    }
}

/// Returns the division of the disk: which dataset has how much, and why.
///
/// An admin sees all datasets and jobs, every other role the datasets of its domain and the jobs of its
/// tenant.
#[utoipa::path(
    get, path = "/v1/allocation", tag = "server",
    responses((status = 200, description = "The division", body = Allocation))
)]
pub async fn get(State(server): State<Arc<Server>>, principal: Principal) -> ApiResult<Json<Allocation>> {
    // Curves of many datasets take a while.
    let made = spawn_blocking(move || allocation(&server, &principal)).await;
    made.map(Json).map_err(|_| ApiError::internal("a task was lost"))
}

/// Changes the settings of a job. A setting that the body lacks gets its default.
///
/// A least share takes bytes from the datasets of all tenants, so only an admin may change it.
#[utoipa::path(
    put, path = "/v1/jobs/{id}/settings", tag = "jobs", request_body = JobSettings,
    params(("id" = String, Path, description = "Id of the job")),
    responses(
        (status = 200, description = "The job with its new settings", body = Job),
        (status = 400, description = "A setting is not valid, or the least shares exceed the disk",
            body = Problem, content_type = "application/problem+json"),
        (status = 403, description = "The role may not change this setting", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The tenant has no job with that id", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn settings(
    State(server): State<Arc<Server>>,
    WriteAccess(principal): WriteAccess,
    path: OnePath,
    body: Body,
) -> ApiResult<Json<Job>> {
    let Path(id) = path?;
    let job = open_job(&server, &principal, &id).await?;
    let new: JobSettings = read_json(&server, &principal.tenant, body).await?;
    if new.min_share_bytes != job.settings.get().min_share_bytes && !principal.role.may_see_all_tenants() {
        return Err(forbidden(&server, principal.role));
    }
    let (capacity, of_tenants) = (server.divided_capacity(), server.tenant_min_shares());
    let check = move |of_jobs: u64| {
        let Some(least) = new.min_share_bytes.filter(|least| *least > 0) else { return Ok(()) };
        let Some(capacity) = capacity else {
            let why = "the server divides no disk among datasets: it has no disk tier now, or \
                cache.policy is not fletch";
            return Err(JobError::BadSettings(why.to_owned()));
        };
        let others = of_jobs.saturating_add(of_tenants);
        if others.saturating_add(least) <= capacity {
            return Ok(());
        }
        // Whole MiB, unless there is less than one.
        let whole = capacity - if capacity >= MIB { capacity % MIB } else { 0 };
        let (least, others, capacity) = (ByteSize(least), ByteSize(others), ByteSize(whole));
        Err(JobError::BadSettings(format!(
            "a least share of {least} beside {others} that other jobs and tenants have set exceeds the disk, \
             which can divide {capacity}"
        )))
    };
    server.registry.change_settings(&principal.domain, &principal.tenant, &id, new, check).await?;
    Ok(Json(view(&server, &job).await?))
}
