//! Tenants: what each may use of the server at once, what it uses, and how often it was refused.
//!
//! A limit of one tenant comes from its quota in the tokens file, and else from the settings. What all
//! tenants share ([`FairPermits`]) is divided so that no tenant can take the part of another.
//!
//! Invariants:
//! 1. A request of a tenant within its guaranteed part is never refused because of other tenants.
//! 2. A refusal is counted under its tenant and its limit. Both take few values: tenants are those of the
//!    tokens file.

mod fair_permits;
mod fair_queue;
mod fair_share;
mod memory;
mod origin;
mod state_bytes;
mod stream_turns;

pub use fair_permits::{FairPermit, FairPermits};
pub use fair_queue::Stream;
pub use fair_share::{Refused, ShareUse};
pub use memory::{ChunkMemory, HeldMemory, NoChunkMemory, bind_memory};
use origin::OriginShares;
pub use origin::{ColdChunk, NoOriginPermit, OriginPermits};
pub use state_bytes::{FileCharge, JobCharges, StateBytes};

use crate::{
    app::limits::{
        DECLARED_MAX, HIT_CONNECTIONS_MAX, Limits, MOUNT_BYTES_MAX, MOUNTS_BYTES, PAGE_STREAMS_MAX,
        VIEW_WAITS_MAX,
    },
    tenancy::auth::Quota,
};
use fletch_core::Tenant;
use parking_lot::{Mutex, RwLock};
use std::{collections::BTreeMap, sync::Arc};

/// A limit of a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TenantLimit {
    /// Running requests for bytes.
    Requests,
    /// Known jobs, declared or not.
    Jobs,
    /// Declared jobs.
    DeclaredJobs,
    /// Bytes of job records and ledgers.
    StateBytes,
    /// Chunks that are being read from origins.
    OriginRequests,
    /// Bytes of chunks that are being fetched, or held by replies.
    MemoryBytes,
    /// Bytes of the announcements of mounts.
    MountBytes,
    /// Requests that wait for another view of the cluster.
    ViewWaits,
    /// Streams of events to admin pages.
    PageStreams,
    /// Hit connections.
    HitConnections,
}

impl TenantLimit {
    /// Every limit.
    pub const ALL: [TenantLimit; 10] = [
        TenantLimit::Requests,
        TenantLimit::Jobs,
        TenantLimit::DeclaredJobs,
        TenantLimit::StateBytes,
        TenantLimit::OriginRequests,
        TenantLimit::MemoryBytes,
        TenantLimit::MountBytes,
        TenantLimit::ViewWaits,
        TenantLimit::PageStreams,
        TenantLimit::HitConnections,
    ];

    /// Returns the limit's label in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            TenantLimit::Requests => "requests",
            TenantLimit::Jobs => "jobs",
            TenantLimit::DeclaredJobs => "declared_jobs",
            TenantLimit::StateBytes => "state_bytes",
            TenantLimit::OriginRequests => "origin_requests",
            TenantLimit::MemoryBytes => "memory_bytes",
            TenantLimit::MountBytes => "mount_bytes",
            TenantLimit::ViewWaits => "view_waits",
            TenantLimit::PageStreams => "page_streams",
            TenantLimit::HitConnections => "hit_connections",
        }
    }
}

/// The limits of every tenant, and what each uses of them.
#[derive(Debug)]
pub struct Tenants {
    limits: Limits,
    quotas: RwLock<Arc<BTreeMap<Tenant, Quota>>>,
    /// Permits for requests for bytes.
    pub requests: Arc<FairPermits>,
    /// Places of declared jobs.
    pub declared_jobs: Arc<FairPermits>,
    /// Permits for chunks that are being read from origins.
    pub origin_requests: Arc<FairPermits>,
    origin_shares: OriginShares,
    /// Memory for chunks that reads fetch and replies hold.
    pub memory: Arc<ChunkMemory>,
    /// Memory for clients' reads that wait for another server of the cluster, in bytes. Part of `memory`.
    pub peer_waits: Arc<FairPermits>,
    /// Memory for reads of other servers that wait for a chunk's former owner, in bytes. Part of `memory`.
    pub former_owner_waits: Arc<FairPermits>,
    /// Permits for requests of other servers of the cluster, by the name of the domain.
    pub peer_requests: Arc<FairPermits>,
    /// Bytes of job records and ledgers.
    pub state_bytes: StateBytes,
    /// Bytes of the announcements of mounts.
    pub mount_bytes: Arc<FairPermits>,
    /// Permits for requests that wait for another view of the cluster.
    pub view_waits: Arc<FairPermits>,
    /// Permits for hit connections.
    pub hit_connections: Arc<FairPermits>,
    /// Permits for streams of events to admin pages.
    pub page_streams: Arc<FairPermits>,
    refused: Mutex<BTreeMap<(Tenant, TenantLimit), u64>>,
}

fn to_u64(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}

fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

impl Tenants {
    /// Creates the limits of the tenants that are known now.
    #[must_use]
    pub fn new(limits: Limits, known: Vec<(Tenant, Quota)>) -> Arc<Self> {
        let this = Arc::new(Tenants {
            limits,
            quotas: RwLock::default(),
            requests: FairPermits::new(to_u64(limits.requests), 1),
            declared_jobs: FairPermits::new(to_u64(DECLARED_MAX), 1),
            origin_requests: FairPermits::new(to_u64(limits.origin_requests), 1),
            origin_shares: OriginShares::default(),
            memory: ChunkMemory::new(limits.chunk_bytes()),
            // Without guaranteed parts, so that the largest chunk fits whatever tenants there are.
            peer_waits: FairPermits::new(limits.peer_wait_bytes(), 1),
            former_owner_waits: FairPermits::new(limits.former_owner_wait_bytes(), 1),
            peer_requests: FairPermits::new(to_u64(limits.requests), 1),
            state_bytes: StateBytes::default(),
            mount_bytes: FairPermits::new(MOUNTS_BYTES, MOUNT_BYTES_MAX),
            view_waits: FairPermits::new(VIEW_WAITS_MAX, 1),
            hit_connections: FairPermits::new(HIT_CONNECTIONS_MAX, 1),
            page_streams: FairPermits::new(PAGE_STREAMS_MAX, 1),
            refused: Mutex::default(),
        });
        this.set_known(known);
        this
    }

    /// Sets the known tenants and their quotas. Call it when the tokens file changed.
    pub fn set_known(&self, known: Vec<(Tenant, Quota)>) {
        let most = |of: fn(&Quota) -> Option<u64>| {
            known.iter().map(|(tenant, quota)| (tenant.clone(), of(quota))).collect::<Vec<_>>()
        };
        self.requests.set_tenants(&most(|quota| quota.requests));
        self.origin_requests.set_tenants(&most(|quota| quota.origin_requests));
        self.memory.permits.set_tenants(&most(|_| None));
        for permits in [&self.mount_bytes, &self.view_waits, &self.page_streams, &self.hit_connections] {
            permits.set_tenants(&most(|_| None));
        }
        // A domain is named like its tenant, unless several tenants share it.
        self.peer_requests.set_tenants(&most(|_| None));
        let own = to_u64(self.limits.tenant_declared_jobs);
        let declared: Vec<_> =
            known.iter().map(|(t, q)| (t.clone(), Some(q.declared_jobs.unwrap_or(own)))).collect();
        self.declared_jobs.set_tenants(&declared);
        let tenants = known.len();
        if tenants > self.limits.requests || tenants > self.limits.origin_requests {
            tracing::warn!(
                tenants,
                requests = self.limits.requests,
                origin_requests = self.limits.origin_requests,
                "there are more tenants than limits.requests or limits.origin_requests, so that no tenant is \
                 guaranteed a part; raise the limit"
            );
        }
        *self.quotas.write() = Arc::new(known.into_iter().collect());
    }

    fn quotas(&self) -> Arc<BTreeMap<Tenant, Quota>> {
        Arc::clone(&self.quotas.read())
    }

    fn quota(&self, tenant: &Tenant) -> Quota {
        self.quotas().get(tenant).copied().unwrap_or_default()
    }

    /// Returns whether there is at most one tenant, so that none needs protection from another.
    fn are_alone(&self) -> bool {
        self.quotas().len() <= 1
    }

    /// Returns the known tenants.
    #[must_use]
    pub fn known(&self) -> Vec<Tenant> {
        self.quotas().keys().cloned().collect()
    }

    /// Returns the most known jobs of a tenant: its limit, and at most an equal part of all jobs.
    #[must_use]
    pub fn jobs_max(&self, tenant: &Tenant) -> usize {
        let quotas = self.quotas();
        let own = quotas.get(tenant).and_then(|quota| quota.jobs).map(to_usize);
        let part = (self.limits.jobs / quotas.len().max(1)).max(1);
        own.unwrap_or(self.limits.tenant_jobs).min(part)
    }

    /// Returns the most jobs of a tenant that have a metric label of their own: an equal part of `all`.
    #[must_use]
    pub fn job_labels_max(&self, all: usize) -> usize {
        (all / self.quotas().len().max(1)).max(1)
    }

    /// Returns the most bytes of job records and ledgers of a tenant.
    #[must_use]
    pub fn state_bytes_max(&self, tenant: &Tenant) -> u64 {
        self.quota(tenant).state.unwrap_or(self.limits.tenant_state_bytes)
    }

    /// Checks whether a tenant's job records and ledgers may grow by `more` bytes.
    ///
    /// # Errors
    /// [`StateFull`], which is counted.
    pub fn check_state_bytes(&self, tenant: &Tenant, more: u64) -> Result<(), StateFull> {
        let (used, most) = (self.state_bytes.used(tenant), self.state_bytes_max(tenant));
        if used.saturating_add(more) <= most {
            return Ok(());
        }
        self.count_refusal(tenant, TenantLimit::StateBytes);
        Err(StateFull { used, more, most })
    }

    /// Counts a refusal.
    pub fn count_refusal(&self, tenant: &Tenant, limit: TenantLimit) {
        let mut refused = self.refused.lock();
        *refused.entry((tenant.clone(), limit)).or_default() += 1;
    }

    /// Returns the refusals so far, in order: those of every known tenant, and of tenants that were removed.
    #[must_use]
    pub fn refusals(&self) -> Vec<(Tenant, TenantLimit, u64)> {
        let known = self.known();
        let none = known.iter().flat_map(|t| TenantLimit::ALL.map(|limit| ((t.clone(), limit), 0)));
        let mut all: BTreeMap<_, _> = none.collect();
        all.extend(self.refused.lock().clone());
        all.into_iter().map(|((tenant, limit), n)| (tenant, limit, n)).collect()
    }
}

/// A tenant's job records and ledgers have reached their limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the job records and ledgers of this tenant have {used} bytes, and {more} more would exceed its limit of \
     {most} bytes"
)]
pub struct StateFull {
    /// Bytes that the tenant uses.
    pub used: u64,
    /// Bytes that the request would add, at least.
    pub more: u64,
    /// The limit.
    pub most: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::app::config::{Action, Environment, read};

    fn default_limits() -> Limits {
        let environment = Environment { home: Some("/home/u".into()), ..Environment::default() };
        match read(["fletch-server"], &environment) {
            Ok(Action::Serve(config)) => config.limits,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_quota_replaces_the_setting_and_no_tenant_gets_more_than_its_part() {
        let limits = Limits { jobs: 900, tenant_jobs: 500, tenant_state_bytes: 77, ..default_limits() };
        let name = |n: &str| Tenant::new(n).expect("a name");
        let quota = |jobs, state| Quota { jobs, state, ..Quota::default() };
        let tenants = Tenants::new(
            limits,
            vec![
                (name("a"), quota(None, None)),
                (name("b"), quota(Some(20), Some(5))),
                (name("c"), quota(Some(10_000), None)),
            ],
        );
        assert_eq!(["a", "b", "c"].map(|t| tenants.jobs_max(&name(t))), [300, 20, 300]);
        assert_eq!(["a", "b", "gone"].map(|t| tenants.state_bytes_max(&name(t))), [77, 5, 77]);
        let (a, b) = (name("a"), name("b"));
        let job = tenants.state_bytes.job(&b, tenants.declared_jobs.force(&b, 1));
        job.record().set(4);
        assert_eq!(tenants.check_state_bytes(&b, 1), Ok(()));
        assert_eq!(tenants.check_state_bytes(&b, 2), Err(StateFull { used: 4, more: 2, most: 5 }));
        assert_eq!(tenants.check_state_bytes(&a, 77), Ok(()));
        let counted: Vec<_> = tenants.refusals().into_iter().filter(|(_, _, n)| *n > 0).collect();
        assert_eq!(counted, [(b, TenantLimit::StateBytes, 1)]);
        assert_eq!(tenants.refusals().len(), 3 * TenantLimit::ALL.len());
    }
}
