//! Warm-ups and evictions.

use super::{
    access::access,
    admit::Changer,
    datasets::{entry, source_of},
    json,
    problem::{Answer, Fault},
};
use crate::{auth::Principal, server::Server, warmups::Order};
use axum::{
    Json,
    body::Body,
    extract::{Path, State, rejection::PathRejection},
    http::{StatusCode, header},
    response::IntoResponse as _,
};
use fletch_api::{Evicted, Problem, StartWarmup, Warmup, Warmups, routes, warmups::LEASE_S_MAX};
use fletch_core::Root;
use fletch_store::ReaderKind;
use std::{sync::Arc, time::Duration};

type OnePath = Result<Path<String>, PathRejection>;

/// Begins to bring a version's chunks, or to look whether they are there. It goes on whoever goes
/// away; the same that is under way already is that one.
#[utoipa::path(
    post, path = "/v1/warmups", tag = "warmups", request_body = StartWarmup,
    responses(
        (status = 202, description = "Begun, or under way already; Location names it", body = Warmup),
        (status = 400, description = "No such request", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such dataset or version in this domain", body = Problem, content_type = "application/problem+json"),
        (status = 429, description = "Too many are under way", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn start(State(server): State<Arc<Server>>, Changer(who): Changer, body: Body) -> Answer {
    let ask: StartWarmup = json(&server, body).await?;
    if ask.lease_s > LEASE_S_MAX {
        return Err(Fault::bad(format!("lease_s is {}; at most {LEASE_S_MAX} (a week)", ask.lease_s)));
    }
    let dataset = entry(&server, &who.domain, Ok(Path(ask.dataset.to_string())))?;
    let (source, _) = source_of(&server, &dataset, ask.version.as_deref().unwrap_or("latest")).await?;
    let root = source.version.root();
    let sources = access(&server, &who, root).await?;
    // A layout beside the one that is read is as much again.
    let read = if source.is_same(&sources.first) { root } else { Root(source.version.layout().0) };
    let (footprint, now) = (source.footprint_max(), server.now_ns());
    server.shares.note(sources.number(), read, footprint, ReaderKind::Plain, now);
    let order = Order { sources, source, root, check: ask.check, lease: Duration::from_secs(ask.lease_s) };
    let warmup = server.warmups.start(order)?;
    let at = [(header::LOCATION, routes::warmup(&warmup.id))];
    Ok((StatusCode::ACCEPTED, at, Json(warmup)).into_response())
}

/// The domain's warm-ups, the last first.
#[utoipa::path(
    get, path = "/v1/warmups", tag = "warmups",
    responses((status = 200, description = "Those that are remembered", body = Warmups))
)]
pub async fn list(State(server): State<Arc<Server>>, who: Principal) -> Json<Warmups> {
    Json(Warmups { warmups: server.warmups.list(&who.domain) })
}

/// One warm-up.
#[utoipa::path(
    get, path = "/v1/warmups/{id}", tag = "warmups",
    params(("id" = String, Path, description = "Its id")),
    responses(
        (status = 200, description = "As it is now", body = Warmup),
        (status = 404, description = "None of that id in this domain; a server that restarted has forgotten it", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn get(State(server): State<Arc<Server>>, who: Principal, path: OnePath) -> Answer<Json<Warmup>> {
    let Path(id) = path.map_err(|e| Fault::bad(e.body_text()))?;
    server.warmups.get(&who.domain, &id).map(Json).ok_or_else(Fault::not_found)
}

/// Cancels a warm-up, or ends the protection of one that is over. What it brought stays.
#[utoipa::path(
    delete, path = "/v1/warmups/{id}", tag = "warmups",
    params(("id" = String, Path, description = "Its id")),
    responses(
        (status = 202, description = "It ends", body = Warmup),
        (status = 404, description = "None of that id in this domain", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn cancel(State(server): State<Arc<Server>>, Changer(who): Changer, path: OnePath) -> Answer {
    let Path(id) = path.map_err(|e| Fault::bad(e.body_text()))?;
    let warmup = server.warmups.cancel(&who.domain, &id).ok_or_else(Fault::not_found)?;
    Ok((StatusCode::ACCEPTED, Json(warmup)).into_response())
}

/// Evicts a dataset's chunks from this server's disk, and ends its warm-ups. What is in memory goes
/// when others need the room.
#[utoipa::path(
    delete, path = "/v1/datasets/{name}/chunks", tag = "warmups",
    params(("name" = String, Path, description = "Name of the dataset")),
    responses(
        (status = 200, description = "How many left", body = Evicted),
        (status = 404, description = "None of that name in this domain", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn evict(
    State(server): State<Arc<Server>>,
    Changer(who): Changer,
    path: OnePath,
) -> Answer<Json<Evicted>> {
    let name = entry(&server, &who.domain, path)?.dataset.name.clone();
    let (warmups, domain) = (Arc::clone(&server.warmups), who.domain);
    let chunks = super::datasets::blocking(move || warmups.evict(&domain, &name)).await?;
    Ok(Json(Evicted { chunks: chunks.unwrap_or(0) }))
}
