//! The jobs of the admin page: declared ones, and those that only read.

use super::Viewer;
use crate::{
    admin::dashboard::{JobReading, JobVerdict},
    app::server::Server,
    tenancy::accounting::{CostsOf, EXPIRED, NO_JOB, PEERS, WARMUP},
    training::allocation::Measured,
};
use fletch_api::{
    EpochState, JobUse,
    dashboard::{DashboardJob, EpochProgress, JobDoing, JobState},
};
use fletch_core::Hash;
use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

/// A job: what it received, its id, and its latest epoch.
struct Known {
    id: String,
    is_declared: bool,
    epoch: Option<EpochProgress>,
    usage: JobUse,
}

/// Returns the id of a job that only reads.
fn id_of_reads(of: &CostsOf) -> String {
    let text = format!("{}\0{}\0{}\0{}", of.domain, of.tenant, of.job, of.dataset);
    format!("reads-{}", Hash::of(text.as_bytes()).short())
}

fn progress(epoch: &fletch_api::Epoch) -> EpochProgress {
    EpochProgress {
        epoch: epoch.epoch,
        state: epoch.state,
        planned: epoch.planned,
        acked: epoch.acked,
        held: epoch.held,
        redelivered: epoch.redelivered,
    }
}

/// Returns all jobs that a caller may see; without a caller, all jobs.
fn known(server: &Server, viewer: Option<&Viewer>) -> BTreeMap<CostsOf, Known> {
    let sees = |domain: &_, tenant: &_| viewer.is_none_or(|v| v.sees_tenant(domain, tenant));
    let mut uses = server.accounts.jobs_by_domain(sees);
    // These words of the accounts are no jobs.
    uses.retain(|of, _| ![NO_JOB, WARMUP, PEERS, EXPIRED].contains(&of.job.as_str()));
    let mut all = BTreeMap::new();
    for (domain, tenant, line) in server.registry.all() {
        if !sees(&domain, &tenant) {
            continue;
        }
        let of = CostsOf { domain, tenant, job: line.name, dataset: line.dataset };
        let usage = uses.remove(&of).unwrap_or_else(|| unused(&of));
        let epoch = line.epoch.as_ref().map(progress);
        all.insert(of, Known { id: line.id, is_declared: true, epoch, usage });
    }
    for (of, usage) in uses {
        let id = id_of_reads(&of);
        all.insert(of, Known { id, is_declared: false, epoch: None, usage });
    }
    all
}

fn unused(of: &CostsOf) -> JobUse {
    JobUse {
        tenant: of.tenant.clone(),
        job: of.job.clone(),
        dataset: of.dataset.clone(),
        hit_bytes: 0,
        substituted_bytes: 0,
        miss_bytes: 0,
        bypass_bytes: 0,
        origin_bytes: 0,
        stalled_ms: 0,
    }
}

/// Returns what the latest decision about the disk knew of the running jobs, by their ids.
fn measured(server: &Server) -> HashMap<String, Measured> {
    let division = server.allocator.current();
    division.readers.iter().filter_map(|r| Some((r.id.clone(), r.measured?))).collect()
}

/// Returns the numbers of all jobs, for their watches.
pub(super) fn readings(server: &Server) -> Vec<JobReading> {
    let (origins, measured) = (super::origin_reads(server), measured(server));
    let reading = |(of, job): (CostsOf, Known)| JobReading {
        verdict: measured.get(&job.id).map(|m| m.verdict),
        is_origin_failing: origins.is_failing(&(of.domain, of.dataset)),
        id: job.id,
        epoch: job.epoch,
        delivered: job.usage.delivered_bytes(),
        stalled: Duration::from_millis(job.usage.stalled_ms),
    };
    let mut readings: Vec<_> = known(server, None).into_iter().map(reading).collect();
    // Where there are too many jobs to watch, those with an epoch are watched.
    readings.sort_by_key(|r| r.epoch.is_none());
    readings
}

/// Returns the jobs that a caller may see: those that are stalled first, then those that wait.
#[must_use]
pub fn jobs_of(server: &Server, viewer: &Viewer) -> Vec<DashboardJob> {
    let measured = measured(server);
    let known = known(server, Some(viewer));
    let watches = server.dashboard.watches();
    let row = |(of, job): (CostsOf, Known)| {
        let verdict = watches.verdict(&job.id, super::unix_ns(std::time::SystemTime::now()));
        view(of, job, &measured, verdict)
    };
    let mut rows: Vec<_> = known.into_iter().map(row).collect();
    drop(watches);
    rows.sort_by(|a, b| {
        let key = |j: &DashboardJob| (j.doing.state, !j.is_declared);
        // Of those that wait, the one that has waited for longest comes first.
        let since = |j: &DashboardJob| match j.doing.state {
            JobState::Stalled | JobState::Waiting => j.doing.since_ns,
            JobState::Running | JobState::Idle => 0,
        };
        (key(a), since(a), &a.name).cmp(&(key(b), since(b), &b.name))
    });
    rows
}

/// Takes over what the latest decision about the disk knows of the jobs. Blocking.
pub fn remeasure(server: &Server) {
    let verdicts = measured(server).into_iter().map(|(id, of)| (id, of.verdict)).collect();
    server.dashboard.watches().remeasure(super::unix_ns(std::time::SystemTime::now()), &verdicts);
}

/// Returns what a job does now, by its id: the verdict of the admin page.
#[must_use]
pub fn job_doing(server: &Server, id: &str) -> JobDoing {
    server.dashboard.watches().verdict(id, super::unix_ns(std::time::SystemTime::now())).doing()
}

/// Returns one job that a caller may see.
#[must_use]
pub fn job_row(server: &Server, viewer: &Viewer, id: &str) -> Option<DashboardJob> {
    jobs_of(server, viewer).into_iter().find(|j| j.id == id)
}

fn view(of: CostsOf, job: Known, measured: &HashMap<String, Measured>, verdict: JobVerdict) -> DashboardJob {
    let Known { id, is_declared, epoch, usage } = job;
    let left = epoch.filter(|e| e.state == EpochState::Open).map(|e| e.planned.saturating_sub(e.acked));
    let rate = verdict.rate.filter(|rate| *rate > 0.0);
    let CostsOf { domain, tenant, job: name, dataset } = of;
    DashboardJob {
        speed: measured.get(&id).map(|m| (m.rate / m.most_rate).clamp(0.0, 1.0)),
        id,
        is_declared,
        name,
        tenant,
        domain,
        dataset,
        doing: verdict.doing(),
        epoch,
        rate: verdict.rate,
        bytes_rate: verdict.bytes_rate,
        eta_s: left.zip(rate).map(|(left, rate)| left as f64 / rate),
        stall_part: verdict.stall_part,
        hit_bytes: usage.hit_bytes,
        substituted_bytes: usage.substituted_bytes,
        miss_bytes: usage.miss_bytes,
        bypass_bytes: usage.bypass_bytes,
        origin_bytes: usage.origin_bytes,
        stalled_ms: usage.stalled_ms,
    }
}
