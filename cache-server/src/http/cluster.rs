//! What this server is, who serves, and what was delivered.

use crate::{auth::Principal, metrics::disk_state, server::Server};
use axum::{Json, extract::State};
use fletch_api::{
    API_MAJOR, Account, Accounts, BATCH_ITEMS_MAX, Cluster, Formats, Info, InfoDisk, InfoLimits,
    frames::FRAMES_MAJOR,
};
use fletch_core::manifest::{CHUNK_BYTES_MAX, FORMAT_MAJOR};
use std::sync::Arc;

/// How the cache on disk does.
fn disk(server: &Server) -> Option<InfoDisk> {
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

/// The member view.
#[utoipa::path(
    get, path = "/v1/cluster", tag = "server",
    responses((status = 200, description = "The view", body = Cluster))
)]
pub async fn cluster(State(server): State<Arc<Server>>) -> Json<Cluster> {
    Json(server.cluster())
}

/// What this server speaks and accepts.
#[utoipa::path(
    get, path = "/v1/info", tag = "server",
    responses((status = 200, description = "Versions and limits", body = Info))
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
        disk: disk(&server),
    })
}

/// Bytes delivered, exactly, by job, version, result and tier.
#[utoipa::path(
    get, path = "/v1/accounts", tag = "server",
    responses((status = 200, description = "The tenant's accounts; those of all tenants for an admin", body = Accounts))
)]
pub async fn accounts(State(server): State<Arc<Server>>, who: Principal) -> Json<Accounts> {
    // Tables are counted for all together, which is no one tenant's business.
    let table_bytes = if who.role.sees_all() { server.accounts.table_bytes() } else { 0 };
    Json(Accounts { accounts: accounts_of(&server, &who), table_bytes })
}

/// The accounts that a principal may see.
pub fn accounts_of(server: &Server, who: &Principal) -> Vec<Account> {
    let all = who.role.sees_all();
    server.accounts.list(|domain, tenant| all || (*domain == who.domain && *tenant == who.tenant))
}
