//! Describes the server: its cluster view, its formats and limits, and the accounts of delivered bytes.

use super::{admission::forbidden, error::ApiResult};
use crate::{
    auth::{Peer, Principal},
    connections::Connection,
    overview::{disk_info, origin_view},
    server::{PublishPlace, Server},
};
use axum::{Extension, Json, extract::State};
use fletch_api::{
    API_MAJOR, Account, Accounts, BATCH_ITEMS_MAX, Cluster, Formats, Info, InfoLimits, OriginList,
    OriginView, Problem, Publish, frames::FRAMES_MAJOR,
};
use fletch_core::manifest::{CHUNK_BYTES_MAX, FORMAT_MAJOR};
use fletch_core::{Domain, Tenant};
use fletch_origin::OriginUri;
use std::sync::Arc;

/// Returns where a client writes version tables when it names no place.
///
/// The directory of the server is for clients of this machine. A user of the socket gets it only if that user
/// can write there. A TCP connection shows no user.
fn publish_info(place: &PublishPlace, peer: Peer, is_near: bool, own_uid: u32) -> Option<Publish> {
    let writes = match peer {
        Peer::Unix { uid, .. } => uid == own_uid || uid == 0,
        Peer::Tcp => is_near,
    };
    match place {
        PublishPlace::Everywhere(uri) => Some(Publish { uri: uri.to_string() }),
        PublishPlace::OwnMachine(dir) if writes => {
            OriginUri::local(dir).ok().map(|uri| Publish { uri: uri.to_string() })
        }
        PublishPlace::OwnMachine(_) | PublishPlace::None => None,
    }
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
///
/// An admin sees the disk of the whole server, every other role the chunks of its own domain.
#[utoipa::path(
    get, path = "/v1/info", tag = "server",
    responses((status = 200, description = "The description of the server", body = Info))
)]
pub async fn info(
    State(server): State<Arc<Server>>,
    principal: Principal,
    peer: Peer,
    connection: Option<Extension<Arc<Connection>>>,
) -> Json<Info> {
    let is_near = connection.is_some_and(|c| c.source().is_own_machine());
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
        uptime_s: server.uptime().as_secs(),
        disk: disk_info(&server, &principal),
        publish: publish_info(&server.publish, peer, is_near, server.auth.own_uid()),
    })
}

/// Returns the exact number of delivered bytes, by job, version, result and tier.
///
/// Also returns what each dataset and job cost, and what the cache saved.
/// An admin sees the accounts of all tenants, every other role those of its own tenant.
#[utoipa::path(
    get, path = "/v1/accounts", tag = "server",
    responses((status = 200, description = "The accounts", body = Accounts))
)]
pub async fn accounts(State(server): State<Arc<Server>>, principal: Principal) -> Json<Accounts> {
    // Tables are counted for all tenants together, so only an admin may see the number.
    let table_bytes = if principal.role.may_see_all_tenants() { server.accounts.table_bytes() } else { 0 };
    let all = principal.role.may_see_all_tenants();
    let own = |d: &Domain, t: &Tenant| all || (*d == principal.domain && *t == principal.tenant);
    Json(Accounts {
        accounts: accounts_of(&server, &principal),
        table_bytes,
        datasets: server.dataset_uses(|domain| all || *domain == principal.domain),
        jobs: server.accounts.jobs(own),
    })
}

/// Returns the origins of registered datasets, whether they work, and their last errors. For admins.
#[utoipa::path(
    get, path = "/v1/origins", tag = "server",
    responses(
        (status = 200, description = "The origins", body = OriginList),
        (status = 403, description = "The caller is no admin", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn origins(State(server): State<Arc<Server>>, principal: Principal) -> ApiResult<Json<OriginList>> {
    if !principal.role.may_see_all_tenants() {
        return Err(forbidden(&server, principal.role));
    }
    Ok(Json(OriginList { origins: origin_views(&server) }))
}

/// Returns the origins of registered datasets, sorted by domain and URI.
pub fn origin_views(server: &Server) -> Vec<OriginView> {
    server.versions.conditions().into_iter().map(origin_view).collect()
}

/// Returns the accounts that a principal may see.
pub fn accounts_of(server: &Server, principal: &Principal) -> Vec<Account> {
    let all = principal.role.may_see_all_tenants();
    server.accounts.list(|domain, tenant| all || (*domain == principal.domain && *tenant == principal.tenant))
}
