//! The metric families of tenants: what each uses of its limits, and how often it was refused.

use super::page::{MetricsError, Page};
use crate::{
    app::server::Server,
    tenancy::tenants::{ShareUse, TenantLimit},
};
use fletch_core::Tenant;

/// Returns what a tenant uses of a limit.
fn use_of(server: &Server, tenant: &Tenant, limit: TenantLimit) -> ShareUse {
    let tenants = &server.tenants;
    let alone = |used, max| ShareUse { used, guaranteed: max, max };
    match limit {
        TenantLimit::Requests => tenants.requests.of(tenant),
        TenantLimit::Jobs => alone(server.live_jobs.len_of(tenant) as u64, tenants.jobs_max(tenant) as u64),
        TenantLimit::DeclaredJobs => tenants.declared_jobs.of(tenant),
        TenantLimit::StateBytes => alone(tenants.state_bytes.used(tenant), tenants.state_bytes_max(tenant)),
        TenantLimit::OriginRequests => tenants.origin_requests.of(tenant),
        TenantLimit::MountBytes => tenants.mount_bytes.of(tenant),
        TenantLimit::ViewWaits => tenants.view_waits.of(tenant),
        TenantLimit::HitConnections => tenants.hit_connections.of(tenant),
        TenantLimit::PageStreams => tenants.page_streams.of(tenant),
        TenantLimit::MemoryBytes => tenants.memory.permits.of(tenant),
    }
}

/// Adds the families.
pub(super) fn families(page: &Page, server: &Server) -> Result<(), MetricsError> {
    let known = server.tenants.known();
    let uses: Vec<_> = known
        .iter()
        .flat_map(|tenant| TenantLimit::ALL.map(|limit| (tenant, limit, use_of(server, tenant, limit))))
        .collect();
    let rows = |of: fn(&ShareUse) -> u64| -> Vec<_> {
        uses.iter().map(|(tenant, limit, u)| (vec![tenant.as_str(), limit.as_str()], of(u))).collect()
    };
    let labels = ["tenant", "limit"];
    page.gauge("fletch_tenant_used", "What tenants use of their limits", &labels, &rows(|u| u.used))?;
    page.gauge("fletch_tenant_limit", "Limits of tenants", &labels, &rows(|u| u.max))?;
    page.gauge(
        "fletch_tenant_guaranteed",
        "The part of a limit that a tenant gets whatever other tenants do",
        &labels,
        &rows(|u| u.guaranteed),
    )?;
    let refusals = server.tenants.refusals();
    let rows: Vec<_> = refusals.iter().map(|(t, limit, n)| (vec![t.as_str(), limit.as_str()], *n)).collect();
    page.counter(
        "fletch_refused_total",
        "Requests that were rejected because their tenant was at a limit",
        &labels,
        &rows,
    )
}
