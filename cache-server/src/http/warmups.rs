//! Warm-ups: starts, lists and cancels them, and evicts a dataset's chunks.

use super::{
    access::access,
    admission::WriteAccess,
    datasets::{find_dataset, resolve_version},
    error::{ApiError, ApiResult},
    request::{OnePath, parse_param, read_json},
};
use crate::{
    app::server::Server, cluster::PeerOrder, data::warmups::WarmupRequest, tenancy::auth::Principal,
};
use axum::{
    Json,
    body::Body,
    extract::{Path, Query, State, rejection::QueryRejection},
    http::{Method, StatusCode, header},
    response::IntoResponse as _,
};
use fletch_api::{Evicted, Problem, StartWarmup, Warmup, Warmups, routes, warmups::PIN_S_MAX};
use fletch_core::{DatasetName, Domain, Hash, Root, StoreKey};
use fletch_store::ReaderKind;
use serde::Deserialize;
use std::{sync::Arc, time::Duration};

/// How long the other servers of the cluster may take to evict chunks. A warm-up that ends first takes 5 s.
const EVICT_WITHIN: Duration = Duration::from_secs(10);

/// The most chunks that one request names.
const ERASED_MAX: usize = 64;

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

/// Query of [`evict`].
#[derive(Debug, Default, Deserialize)]
pub struct EvictQuery {
    chunks: Option<String>,
}

impl EvictQuery {
    /// Returns the keys of the named chunks. `None` means all chunks of the dataset.
    pub fn keys(&self, domain: &Domain) -> ApiResult<Option<Vec<StoreKey>>> {
        let Some(text) = &self.chunks else { return Ok(None) };
        let hashes: Vec<Hash> = text.split(',').map(parse_param).collect::<ApiResult<_>>()?;
        if hashes.len() > ERASED_MAX {
            return Err(ApiError::bad_request(format!("name at most {ERASED_MAX} chunks")));
        }
        Ok(Some(hashes.into_iter().map(|hash| StoreKey { domain: domain.clone(), hash }).collect()))
    }
}

/// Evicts chunks of a dataset at this server. Returns their number, 0 without a disk tier.
pub async fn evict_here(
    server: &Arc<Server>,
    domain: &Domain,
    name: &DatasetName,
    keys: Option<Vec<StoreKey>>,
) -> ApiResult<u64> {
    let (server, domain, name) = (Arc::clone(server), domain.clone(), name.clone());
    let evict = move || match keys {
        Some(mut keys) => {
            // What a draft names by its place is kept by its content.
            let learned = server.versions.learned();
            let contents = keys.iter().filter_map(|name| learned.content(name));
            let contents: Vec<Hash> = contents.collect();
            keys.extend(contents.into_iter().map(|hash| StoreKey { domain: domain.clone(), hash }));
            server.store.erase(&keys).map_err(|e| ApiError::internal(e.to_string()))
        }
        None => {
            let kept = server.registry.sweeps_of(&domain, &name);
            Ok(server.warmups.evict(&domain, &name, &kept).unwrap_or(0))
        }
    };
    tokio::task::spawn_blocking(evict).await?
}

/// Evicts a dataset's chunks from the disks of all servers, and cancels its warm-ups.
///
/// With `chunks`, it removes only these chunks of the domain, from disk and memory, also those that are
/// protected. `unconfirmed` names the servers of the cluster that did not confirm it within 10 s. Without
/// `chunks`, what is in memory stays until other chunks need the memory.
#[utoipa::path(
    delete, path = "/v1/datasets/{name}/chunks", tag = "warmups",
    params(
        ("name" = String, Path, description = "Name of the dataset"),
        ("chunks" = Option<String>, Query, description = "Hashes with commas between them, at most 64"),
    ),
    responses(
        (status = 200, description = "The number of evicted chunks", body = Evicted),
        (status = 400, description = "A hash is not valid", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The domain has no dataset of that name", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn evict(
    State(server): State<Arc<Server>>,
    WriteAccess(principal): WriteAccess,
    path: OnePath,
    query: Result<Query<EvictQuery>, QueryRejection>,
) -> ApiResult<Json<Evicted>> {
    let (Path(name), Query(query)) = (path?, query?);
    let name = find_dataset(&server, &principal.domain, &name)?.dataset.name.clone();
    let domain = principal.domain;
    let (keys, mut path) = (query.keys(&domain)?, routes::peer_dataset_chunks(&name));
    if let Some(chunks) = &query.chunks {
        path.push_str(&format!("?chunks={chunks}"));
    }
    let order = PeerOrder { method: Method::DELETE, path, domain: domain.clone(), body: None };
    // First here: a warm-up of this server would have the others keep chunks that they just evicted.
    let here = evict_here(&server, &domain, &name, keys).await?;
    let elsewhere = server.cluster.order_all(&order, EVICT_WITHIN).await;
    let bodies = elsewhere.bodies.iter().filter_map(|body| serde_json::from_slice::<Evicted>(body).ok());
    let chunks = here + bodies.map(|evicted| evicted.chunks).sum::<u64>();
    let unconfirmed = elsewhere.unconfirmed.iter().map(ToString::to_string).collect();
    Ok(Json(Evicted { chunks, unconfirmed }))
}
