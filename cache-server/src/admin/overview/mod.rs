//! What the admin page shows: reads the state of all rooms, as far as a caller may see it (I7).
//!
//! An admin sees everything. Every other caller sees the datasets of its domain, the jobs of its tenant and
//! its own mounts, and nothing about the server's disk and origins but whether its own datasets work.
//!
//! Every function here blocks for milliseconds: call it on a blocking thread.

mod datasets;
mod jobs;
mod samples;

pub use datasets::{dataset_row, known_versions};
pub use jobs::{job_doing, job_row, jobs_of, remeasure};
pub use samples::sample;

use crate::{
    admin::{
        dashboard::{Counted, Findings, ReadDataset, bounds, problems},
        metrics::disk_state,
    },
    app::server::Server,
    data::versions::OriginCondition,
    tenancy::{auth::Principal, mounts::MountOwner},
};
use datasets::{OriginReads, dataset_rows};
use fletch_api::{
    InfoDisk, Mount, OriginFailure, OriginState, OriginView,
    dashboard::{Dashboard, DashboardDataset, DashboardJob, DashboardServer, JobState, JobsByState, Savings},
};
use fletch_core::{Domain, Tenant};
use fletch_host::usage::HostUsage;
use std::time::{SystemTime, UNIX_EPOCH};

/// A caller, and what it may see.
#[derive(Debug, Clone)]
pub struct Viewer {
    /// The caller.
    pub principal: Principal,
    /// The owner of the caller's mounts.
    pub owner: MountOwner,
}

impl Viewer {
    /// Returns whether the caller may see all domains and tenants.
    #[must_use]
    pub fn sees_all(&self) -> bool {
        self.principal.role.may_see_all_tenants()
    }

    /// Returns whether the caller may see a domain's datasets.
    #[must_use]
    pub fn sees_domain(&self, domain: &Domain) -> bool {
        self.sees_all() || *domain == self.principal.domain
    }

    /// Returns whether the caller may see a tenant's jobs.
    #[must_use]
    pub fn sees_tenant(&self, domain: &Domain, tenant: &Tenant) -> bool {
        self.sees_all() || (*domain == self.principal.domain && *tenant == self.principal.tenant)
    }

    /// Returns the mounts that the caller may see.
    #[must_use]
    pub fn mounts(&self, server: &Server) -> Vec<Mount> {
        server.mounts.list((!self.sees_all()).then_some(&self.owner), server.now_ns())
    }
}

/// Returns the nanoseconds since 1970.
#[must_use]
pub fn unix_ns(at: SystemTime) -> u64 {
    u64::try_from(at.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos()).unwrap_or(u64::MAX)
}

fn origin_reads(server: &Server) -> OriginReads {
    OriginReads::of(&server.versions.conditions(), server.accounts.costs.requests_before())
}

/// Writes what the cache saved of each dataset to the state directory. Blocking.
pub fn write_savings(server: &Server) {
    server.savings.write(&server.accounts.costs, origin_reads(server).sums());
}

/// Returns an origin as the API shows it.
#[must_use]
pub fn origin_view(o: OriginCondition) -> OriginView {
    OriginView {
        uri: o.uri,
        domain: o.domain,
        datasets: o.datasets,
        state: if o.condition.failing { OriginState::Failing } else { OriginState::Ok },
        requests: o.condition.calls,
        failed: o.condition.failed,
        last_error: o.condition.last_error.map(|e| OriginFailure { why: e.why, at_ns: unix_ns(e.at) }),
    }
}

/// Returns the state of the disk tier, with the chunks that a principal may know of (I7).
///
/// An admin sees the counts of the whole server and the details of a failure. Every other role sees the
/// chunks of its own domain's datasets.
#[must_use]
pub fn disk_info(server: &Server, principal: &Principal) -> Option<InfoDisk> {
    let report = server.store.disk()?.report();
    let (state, detail) = disk_state(&report.state);
    let tier = report.engine.as_ref();
    let all = principal.role.may_see_all_tenants();
    let (chunk_bytes, chunks) = match tier {
        None => (0, 0),
        Some(tier) if all => (tier.bytes, tier.chunks),
        Some(tier) => {
            let own = server.datasets_of(&principal.domain);
            let own = tier.datasets.iter().filter(|d| own.contains(&d.plain));
            own.fold((0, 0), |(bytes, chunks), d| (bytes + d.bytes, chunks + d.chunks))
        }
    };
    Some(InfoDisk {
        state: state.to_owned(),
        detail: detail.filter(|_| all),
        policy: server.cache.policy.to_string(),
        limit_bytes: tier.map(|t| t.limit).filter(|_| all),
        capacity_bytes: tier.map(|t| t.capacity).filter(|_| all),
        chunk_bytes,
        chunks,
    })
}

/// Returns the server's state for a caller, with at most `rows` rows in each table.
#[must_use]
pub fn dashboard(server: &Server, viewer: &Viewer, rows: usize) -> Dashboard {
    let conditions = server.versions.conditions();
    let reads = OriginReads::of(&conditions, server.accounts.costs.requests_before());
    let mut jobs = jobs_of(server, viewer);
    let mut datasets = dataset_rows(server, viewer, &reads, &jobs);
    let seen = conditions.into_iter().filter(|o| viewer.sees_domain(&o.domain));
    let mut origins: Vec<_> = seen.map(|o| as_seen(viewer, origin_view(o))).collect();
    origins.sort_by_key(|o| o.state == OriginState::Ok);
    let mut mounts = viewer.mounts(server);
    mounts.sort_by_key(|m| m.announced.problem.is_none());
    let disk = disk_info(server, &viewer.principal);
    let counted = viewer.sees_all().then(|| counted(server, &datasets));
    let credentials = if viewer.sees_all() { server.credentials.list() } else { Vec::new() };
    let mut refreshes = [server.listings.failed(), server.seals.failed()].concat();
    refreshes.retain(|of| viewer.sees_domain(&of.domain));
    let refreshes: Vec<_> = refreshes.into_iter().map(|of| (of.dataset, of.problem)).collect();
    let waiting = server.groups.waiting(|domain, tenant| viewer.sees_tenant(domain, tenant));
    let at_ns = unix_ns(SystemTime::now());
    let problems = problems(&Findings {
        at_ns,
        disk: disk.as_ref().filter(|_| viewer.sees_all()).map(|d| (d.state.as_str(), d.detail.as_deref())),
        origins: &origins,
        jobs: &jobs,
        mounts: &mounts,
        counted,
        host: if viewer.sees_all() { server.dashboard.host() } else { HostUsage::default() },
        credentials: &credentials,
        refreshes: &refreshes,
        waiting: &waiting,
        certificate_expires_s: server.tls.as_ref().map(|tls| tls.stats().expires_s),
    });
    if !viewer.sees_all() {
        origins.clear();
    }
    let requests: Vec<u64> = datasets.iter().filter_map(|d| d.avoided_requests).collect();
    let avoided_requests = (!requests.is_empty()).then(|| requests.iter().sum());
    let mut savings = Savings { avoided_requests, ..Savings::default() };
    // Datasets that were unregistered count, as they do in the metrics.
    for (_, bytes) in server.accounts.costs.datasets().iter().filter(|((d, _), _)| viewer.sees_domain(d)) {
        savings.delivered_bytes += bytes.delivered;
        savings.origin_bytes += bytes.read;
        savings.avoided_bytes += bytes.avoided;
    }
    let total = |n: usize| n as u64;
    let (datasets_total, jobs_total) = (total(datasets.len()), total(jobs.len()));
    let (origins_total, mounts_total) = (total(origins.len()), total(mounts.len()));
    let jobs_by_state = count_states(&jobs);
    datasets.truncate(rows);
    jobs.truncate(rows);
    origins.truncate(rows);
    mounts.truncate(rows);
    Dashboard {
        at_ns,
        server: server_view(server, viewer),
        disk,
        savings,
        problems,
        datasets,
        datasets_total,
        jobs,
        jobs_total,
        jobs_by_state,
        origins,
        origins_total,
        mounts,
        mounts_total,
    }
}

/// Returns what the server counted, in the windows of the rules.
fn counted(server: &Server, datasets: &[DashboardDataset]) -> Counted {
    let history = server.dashboard.history();
    let last = |window| history.last(window).0;
    let (recent, disk, hour) =
        (last(bounds::PAUSES_WITHIN), last(bounds::DISK_ERRORS_WITHIN), last(bounds::HOUR));
    let read = history.datasets_hour();
    drop(history);
    let of = |d: &DashboardDataset| {
        let bytes = *read.get(&(d.usage.domain.clone(), d.usage.dataset.clone()))?;
        let version_bytes = d.usage.version_bytes?;
        Some(ReadDataset { name: d.usage.dataset.clone(), version_bytes, bytes })
    };
    Counted { recent, disk, hour, datasets: datasets.iter().filter_map(of).collect() }
}

/// Returns an origin as the caller may see it: only an admin sees its URI and its errors.
fn as_seen(viewer: &Viewer, mut origin: OriginView) -> OriginView {
    if !viewer.sees_all() {
        origin.uri = origin.datasets.first().map(|d| d.to_string()).unwrap_or_default();
        origin.last_error = None;
    }
    origin
}

fn count_states(jobs: &[DashboardJob]) -> JobsByState {
    let count = |state| jobs.iter().filter(|j| j.doing.state == state).count() as u64;
    JobsByState {
        stalled: count(JobState::Stalled),
        waiting: count(JobState::Waiting),
        running: count(JobState::Running),
        idle: count(JobState::Idle),
    }
}

fn server_view(server: &Server, viewer: &Viewer) -> DashboardServer {
    DashboardServer {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        url: server.url.clone(),
        phase: server.phase_word().to_owned(),
        uptime_s: server.uptime().as_secs(),
        connections: viewer.sees_all().then(|| server.connections.open()),
        domain: viewer.principal.domain.clone(),
        tenant: viewer.principal.tenant.clone(),
        role: viewer.principal.role.to_string(),
        is_admin: viewer.sees_all(),
        has_prometheus: viewer.sees_all() && server.dashboard.prometheus.is_some(),
    }
}
