//! Probes and metrics.

use super::problem::{Answer, Fault};
use crate::{
    metrics,
    server::{Phase, Server},
};
use axum::{
    extract::State,
    http::header,
    response::{IntoResponse as _, Response},
};
use fletch_api::{Code, Problem};
use std::sync::Arc;

/// Whether the process runs.
#[utoipa::path(
    get, path = "/livez", tag = "server",
    responses((status = 200, description = "It does", body = String, content_type = "text/plain"))
)]
pub async fn livez() -> &'static str {
    "ok\n"
}

/// Whether it wants requests.
#[utoipa::path(
    get, path = "/readyz", tag = "server",
    responses(
        (status = 200, description = "It does", body = String, content_type = "text/plain"),
        (status = 503, description = "It is starting or stopping", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn readyz(State(server): State<Arc<Server>>) -> Answer<&'static str> {
    let why = match server.phase() {
        Phase::Ready => return Ok("ok\n"),
        Phase::Starting => "the server is starting",
        Phase::Draining => "the server is stopping",
    };
    Err(Fault::new(Code::NotReady, why, "ask another server, or wait"))
}

/// Everything that was counted.
#[utoipa::path(
    get, path = "/metrics", tag = "server",
    responses((status = 200, description = "Prometheus' text format", body = String, content_type = "text/plain"))
)]
pub async fn metrics(State(server): State<Arc<Server>>) -> Answer<Response> {
    let page = metrics::render(&server)
        .map_err(|e| Fault::new(Code::Internal, e.to_string(), "see the server's log"))?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response())
}
