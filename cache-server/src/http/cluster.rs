//! Describes the server: its cluster view, its formats and limits, and the accounts of delivered bytes.

use super::{
    admission::forbidden,
    error::{ApiError, ApiResult},
    request::{OnePath, parse_param},
    s3_credentials::door,
};
use crate::{
    admin::overview::{disk_info, origin_view},
    app::server::{Phase, PublishPlace, Server},
    cluster::{ClusterView, DrainError},
    tenancy::{
        auth::{Peer, Principal},
        connections::Connection,
        tenants::TenantLimit,
    },
};
use axum::{
    Extension, Json,
    extract::{Path, Query, State, rejection::QueryRejection},
    http::{HeaderMap, StatusCode, header},
    response::IntoResponse as _,
};
use fletch_api::{
    API_MAJOR, Account, Accounts, BATCH_ITEMS_MAX, Cluster, Code, Formats, Info, InfoLimits, OriginList,
    OriginView, Problem, Publish, frames::FRAMES_MAJOR,
};
use fletch_core::manifest::{CHUNK_BYTES_MAX, FORMAT_MAJOR};
use fletch_core::{Domain, Tenant};
use fletch_origin::OriginUri;
use serde::Deserialize;
use std::{sync::Arc, time::Duration};

/// The longest time for which the server holds a view back.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// Returns where a client writes version tables when it names no place.
///
/// The directory of the server is for clients of this machine. A user of the socket gets it only if that user
/// can write there. A TCP connection shows no user.
fn publish_info(place: &PublishPlace, peer: Peer, is_near: bool, own_user: Option<u32>) -> Option<Publish> {
    let writes = match peer {
        Peer::Unix { uid, .. } => own_user == Some(uid) || uid == 0,
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

/// Query of [`cluster`].
#[derive(Debug, Deserialize)]
pub struct ClusterQuery {
    after: Option<u64>,
    #[serde(default)]
    wait_ms: u64,
}

/// Returns the view of the cluster: its members, and the number of the view.
///
/// Clients choose the owner of a chunk by the view, and send its number as `Fletch-View`. Every reply of the
/// server has the number of its view in that header. With `after`, the server holds the reply back until its
/// view has a higher number. With `If-None-Match`, it holds the reply back until a member comes, goes or
/// changes. At the end of `wait_ms` it replies in any case.
#[utoipa::path(
    get, path = "/v1/cluster", tag = "server",
    params(
        ("after" = Option<u64>, Query, description = "The number of the view that the client has"),
        ("wait_ms" = Option<u64>, Query,
            description = "How long to wait for another view, in milliseconds. At most 10,000"),
        ("If-None-Match" = Option<String>, Header, description = "The entity tag of the client's view"),
    ),
    responses(
        (status = 200, description = "The view, with its entity tag", body = Cluster),
        (status = 304, description = "The view is the one that `If-None-Match` names"),
        (status = 429, description = "Too many clients wait for another view", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn cluster(
    State(server): State<Arc<Server>>,
    principal: Principal,
    query: Result<Query<ClusterQuery>, QueryRejection>,
    request: HeaderMap,
) -> ApiResult {
    let Query(query) = query?;
    let known = request.get(header::IF_NONE_MATCH).and_then(|tag| tag.to_str().ok());
    let is_news = |view: &ClusterView| match (query.after, known) {
        (Some(after), _) => view.core.number() > after,
        (None, Some(known)) => view.etag() != known,
        (None, None) => true,
    };
    let mut views = server.cluster.subscribe();
    let wait = Duration::from_millis(query.wait_ms).min(WAIT_MAX).min(server.limits.io_timeout);
    let seen = Arc::clone(&views.borrow_and_update());
    if !wait.is_zero() && !is_news(&seen) {
        let permit = server.tenants.view_waits.try_acquire(&principal.tenant, 1).map_err(|_| {
            server.tenants.count_refusal(&principal.tenant, TenantLimit::ViewWaits);
            let hint = "wait and send the request again, or send it without wait_ms";
            ApiError::new(Code::Overloaded, "too many requests wait for another view", hint)
        })?;
        // A server that stops ends its waits.
        let mut phases = server.access_changes.subscribe();
        let stopping = async { while server.phase() != Phase::Draining && phases.changed().await.is_ok() {} };
        tokio::select! {
            _ = views.wait_for(|view| is_news(view)) => {}
            () = stopping => {}
            () = tokio::time::sleep(wait) => {}
        }
        drop(permit);
    }
    let view = server.cluster.view();
    let etag = view.etag();
    if known == Some(&*etag) && query.after.is_none() {
        return Ok((StatusCode::NOT_MODIFIED, [(header::ETAG, etag)]).into_response());
    }
    let answer = Cluster { domain: Some(principal.domain), ..view.to_api() };
    Ok(([(header::ETAG, etag)], Json(answer)).into_response())
}

/// Takes a member out of the ring. It stays up, and owns chunks again after it restarts. For admins.
#[utoipa::path(
    post, path = "/v1/cluster/members/{id}/drain", tag = "server",
    params(("id" = String, Path, description = "Id of the member")),
    responses(
        (status = 200, description = "The view without the member", body = Cluster),
        (status = 403, description = "The caller is no admin", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The ring has no such member", body = Problem,
            content_type = "application/problem+json"),
        (status = 409, description = "The server is its only member", body = Problem,
            content_type = "application/problem+json"),
        (status = 503, description = "The coordinator did not answer", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn drain(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: OnePath,
) -> ApiResult<Json<Cluster>> {
    if !principal.role.may_see_all_tenants() {
        return Err(forbidden(&server, principal.role));
    }
    let Path(id) = path?;
    server.cluster.drain(&parse_param(&id)?).await?;
    Ok(Json(Cluster { domain: Some(principal.domain), ..server.cluster.view().to_api() }))
}

impl From<DrainError> for ApiError {
    fn from(e: DrainError) -> Self {
        let (code, hint) = match &e {
            DrainError::Embedded => {
                (Code::Conflict, "stop the server; a single server has nobody to take over")
            }
            DrainError::NoMember(_) => (Code::NotFound, "`fletch cluster status` lists the members"),
            DrainError::Failed(_) => (Code::NotReady, "check that etcd can be reached, and drain again"),
        };
        ApiError::new(code, e.to_string(), hint)
    }
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
        publish: publish_info(&server.publish, peer, is_near, server.auth.own_user()),
        s3: door(&server),
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
