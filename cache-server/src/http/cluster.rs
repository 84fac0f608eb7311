//! Describes the server: its cluster view, its formats and limits, and the accounts of delivered bytes.

use crate::{auth::Principal, metrics::disk_state, server::Server};
use axum::{Json, extract::State};
use fletch_api::{
    API_MAJOR, Account, Accounts, BATCH_ITEMS_MAX, Cluster, Formats, Info, InfoDisk, InfoLimits,
    frames::FRAMES_MAJOR,
};
use fletch_core::manifest::{CHUNK_BYTES_MAX, FORMAT_MAJOR};
use std::sync::Arc;

/// Returns the state of the disk tier.
fn disk_info(server: &Server) -> Option<InfoDisk> {
    let report = server.store.disk()?.report();
    let (state, detail) = disk_state(&report.state);
    let tier = report.engine.as_ref();
    Some(InfoDisk {
        state: state.to_owned(),
        detail,
        policy: server.cache.policy.to_string(),
        limit_bytes: tier.map(|t| t.limit),
        chunk_bytes: tier.map_or(0, |t| t.bytes),
        chunks: tier.map_or(0, |t| t.chunks),
    })
}

/// Returns the view of the cluster: its members, and the number of the view.
///
/// Clients choose the owner of a chunk by the view, and send its number as `Fletch-View`.
#[utoipa::path(
    get, path = "/v1/cluster", tag = "server",
    responses((status = 200, description = "The view", body = Cluster))
)]
pub async fn cluster(State(server): State<Arc<Server>>) -> Json<Cluster> {
    Json(server.cluster())
}

/// Returns the server's version, formats, limits and disk state.
#[utoipa::path(
    get, path = "/v1/info", tag = "server",
    responses((status = 200, description = "The description of the server", body = Info))
)]
pub async fn info(State(server): State<Arc<Server>>) -> Json<Info> {
    Json(Info {
        name: "fletch-server".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        formats: Formats {
            api: vec![API_MAJOR],
            versions: vec![FORMAT_MAJOR],
            frames: vec![u32::from(FRAMES_MAJOR)],
        },
        limits: InfoLimits {
            batch_items: BATCH_ITEMS_MAX as u64,
            batch_bytes: server.limits.batch_bytes,
            chunk_bytes: u64::from(CHUNK_BYTES_MAX),
        },
        disk: disk_info(&server),
    })
}

/// Returns the exact number of delivered bytes, by job, version, result and tier.
///
/// An admin sees the accounts of all tenants, every other role those of its own tenant.
#[utoipa::path(
    get, path = "/v1/accounts", tag = "server",
    responses((status = 200, description = "The accounts", body = Accounts))
)]
pub async fn accounts(State(server): State<Arc<Server>>, principal: Principal) -> Json<Accounts> {
    // Tables are counted for all tenants together, so only an admin may see the number.
    let table_bytes = if principal.role.may_see_all_tenants() { server.accounts.table_bytes() } else { 0 };
    Json(Accounts { accounts: accounts_of(&server, &principal), table_bytes })
}

/// Returns the accounts that a principal may see.
pub fn accounts_of(server: &Server, principal: &Principal) -> Vec<Account> {
    let all = principal.role.may_see_all_tenants();
    server.accounts.list(|domain, tenant| all || (*domain == principal.domain && *tenant == principal.tenant))
}
