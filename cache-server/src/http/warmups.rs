//! Warm-ups: starts, lists and cancels them, and evicts a dataset's chunks.

use super::{
    access::access,
    admission::WriteAccess,
    datasets::{find_dataset, resolve_version},
    error::{ApiError, ApiResult},
    request::{OnePath, read_json},
};
use crate::{
    app::server::Server, cluster::PeerOrder, data::warmups::WarmupRequest, tenancy::auth::Principal,
};
use axum::{
    Json,
    body::Body,
    extract::{Path, State},
    http::{Method, StatusCode, header},
    response::IntoResponse as _,
};
use fletch_api::{Evicted, Problem, StartWarmup, Warmup, Warmups, routes, warmups::PIN_S_MAX};
use fletch_core::Root;
use fletch_store::ReaderKind;
use std::{sync::Arc, time::Duration};

/// How long the other servers of the cluster may take to evict chunks. A warm-up that ends first takes 5 s.
const EVICT_WITHIN: Duration = Duration::from_secs(10);

/// Starts a warm-up.
///
/// The server fetches the chunks of a version to its disk, or reads and hashes those that it has (`check`).
/// The warm-up goes on when the client disconnects. If the same warm-up is running already, the reply is that
/// one.
#[utoipa::path(
    post, path = "/v1/warmups", tag = "warmups", request_body = StartWarmup,
    responses(
        (status = 202,
            description = "The warm-up was started, or was running already. `Location` has its URL",
            body = Warmup),
        (status = 400, description = "The request is not valid", body = Problem,
            content_type = "application/problem+json"),
        (status = 404,
            description = "The domain has no such dataset, or the dataset has no such \
            version", body = Problem,
            content_type = "application/problem+json"),
        (status = 429, description = "The server is at its limit of warm-ups", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn start(
    State(server): State<Arc<Server>>,
    WriteAccess(principal): WriteAccess,
    body: Body,
) -> ApiResult {
    let request: StartWarmup = read_json(&server, &principal.tenant, body).await?;
    if request.pin_s > PIN_S_MAX {
        return Err(ApiError::bad_request(format!(
            "pin_s is {}; at most {PIN_S_MAX} (a week)",
            request.pin_s
        )));
    }
    let dataset = find_dataset(&server, &principal.domain, request.dataset.as_str())?;
    let (source, _) =
        resolve_version(&server, &dataset, request.version.as_deref().unwrap_or("latest")).await?;
    let root = source.version.root();
    let sources = access(&server, &principal, root, Some(&request.dataset)).await?;
    // Chunks of a layout that is not the one in use take room of their own.
    let read = if source.is_same(&sources.first) { root } else { Root(source.version.layout().0) };
    let (footprint, now) = (source.footprint(), server.now_ns());
    server.shares.note(sources.version_ids_in(&source), read, footprint, ReaderKind::Warmup, now);
    let pin = Duration::from_secs(request.pin_s);
    let tenant = principal.tenant;
    let request = WarmupRequest { tenant, sources, source, root, check: request.check, pin };
    let warmup = server.warmups.start(request)?;
    let at = [(header::LOCATION, routes::warmup(&warmup.id))];
    Ok((StatusCode::ACCEPTED, at, Json(warmup)).into_response())
}

/// Lists the warm-ups of the caller's domain.
///
/// The server remembers the latest ones until it restarts.
#[utoipa::path(
    get, path = "/v1/warmups", tag = "warmups",
    responses((status = 200, description = "The warm-ups, the latest first", body = Warmups))
)]
pub async fn list(State(server): State<Arc<Server>>, principal: Principal) -> Json<Warmups> {
    Json(Warmups { warmups: server.warmups.list(&principal.domain) })
}

/// Returns a warm-up and its progress.
#[utoipa::path(
    get, path = "/v1/warmups/{id}", tag = "warmups",
    params(("id" = String, Path, description = "Id of the warm-up")),
    responses(
        (status = 200, description = "The warm-up", body = Warmup),
        (status = 404,
            description = "The domain has no warm-up with that id. A server forgets its \
            warm-ups at a restart",
            body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn get(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: OnePath,
) -> ApiResult<Json<Warmup>> {
    let Path(id) = path?;
    server.warmups.get(&principal.domain, &id).map(Json).ok_or_else(ApiError::not_found)
}

/// Cancels a warm-up, or ends the protection of its chunks.
///
/// The chunks that it fetched stay on disk, until the cache evicts them.
#[utoipa::path(
    delete, path = "/v1/warmups/{id}", tag = "warmups",
    params(("id" = String, Path, description = "Id of the warm-up")),
    responses(
        (status = 202, description = "The warm-up ends", body = Warmup),
        (status = 404, description = "The domain has no warm-up with that id", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn cancel(
    State(server): State<Arc<Server>>,
    WriteAccess(principal): WriteAccess,
    path: OnePath,
) -> ApiResult {
    let Path(id) = path?;
    let warmup = server.warmups.cancel(&principal.domain, &id).ok_or_else(ApiError::not_found)?;
    Ok((StatusCode::ACCEPTED, Json(warmup)).into_response())
}

/// Evicts a dataset's chunks from the disks of all servers, and cancels its warm-ups.
///
/// `unconfirmed` names the servers of the cluster that did not confirm it within 10 s. Chunks in
/// memory stay until other chunks need the memory.
#[utoipa::path(
    delete, path = "/v1/datasets/{name}/chunks", tag = "warmups",
    params(("name" = String, Path, description = "Name of the dataset")),
    responses(
        (status = 200, description = "The number of evicted chunks", body = Evicted),
        (status = 404, description = "The domain has no dataset of that name", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn evict(
    State(server): State<Arc<Server>>,
    WriteAccess(principal): WriteAccess,
    path: OnePath,
) -> ApiResult<Json<Evicted>> {
    let Path(name) = path?;
    let name = find_dataset(&server, &principal.domain, &name)?.dataset.name.clone();
    let (method, path) = (Method::DELETE, routes::peer_dataset_chunks(&name));
    let order = PeerOrder { method, path, domain: principal.domain.clone() };
    let (warmups, domain) = (Arc::clone(&server.warmups), principal.domain);
    let kept = server.registry.sweeps_of(&domain, &name);
    // First here: a warm-up of this server would have the others keep chunks that they just evicted.
    let here = tokio::task::spawn_blocking(move || warmups.evict(&domain, &name, &kept)).await?;
    let elsewhere = server.cluster.order_all(&order, EVICT_WITHIN).await;
    let bodies = elsewhere.bodies.iter().filter_map(|body| serde_json::from_slice::<Evicted>(body).ok());
    let chunks = here.unwrap_or(0) + bodies.map(|evicted| evicted.chunks).sum::<u64>();
    let unconfirmed = elsewhere.unconfirmed.iter().map(ToString::to_string).collect();
    Ok(Json(Evicted { chunks, unconfirmed }))
}
