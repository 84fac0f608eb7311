//! Probes and metrics, for orchestrators and monitoring systems.

use super::{
    admission::{authenticate, peer_of},
    cluster::origin_views,
    error::{ApiError, ApiResult},
};
use crate::{
    admin::metrics,
    app::server::{Phase, Server},
    cluster::NotReady,
};
use axum::{
    extract::{RawQuery, Request, State},
    http::header,
    response::{IntoResponse as _, Response},
};
use fletch_api::{Code, OriginState, Problem};
use std::sync::Arc;

/// The most failing origins that `/readyz?verbose` names.
const FAILING_MAX: usize = 100;

/// Checks that the process runs.
#[utoipa::path(
    get, path = "/livez", tag = "server",
    responses((status = 200, description = "The process runs", body = String, content_type = "text/plain"))
)]
pub async fn livez() -> &'static str {
    "ok\n"
}

/// Checks that the server has started: it has opened its state and its cache.
///
/// A server that stops has started, too, so an orchestrator that asks late does not kill it.
#[utoipa::path(
    get, path = "/startupz", tag = "server",
    responses(
        (status = 200, description = "The server has started", body = String, content_type = "text/plain"),
        (status = 503, description = "The server is starting", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn startupz(State(server): State<Arc<Server>>) -> ApiResult<&'static str> {
    match server.phase() {
        Phase::Starting => Err(not_ready("the server is starting")),
        Phase::Ready | Phase::Draining => Ok("ok\n"),
    }
}

/// Checks that the server takes requests.
///
/// With `verbose`, one line for each part that can fail: the disk, and every origin. A part that fails does
/// not change the status, because the server delivers what it has cached. Only the roles that may read
/// metrics get names and errors.
#[utoipa::path(
    get, path = "/readyz", tag = "server",
    params(("verbose" = Option<String>, Query, description = "Add a line for each part of the server")),
    responses(
        (status = 200, description = "The server takes requests", body = String, content_type = "text/plain"),
        (status = 503, description = "The server starts, stops or waits for its cluster", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn readyz(
    State(server): State<Arc<Server>>,
    RawQuery(query): RawQuery,
    request: Request,
) -> ApiResult<String> {
    let verbose = query.is_some_and(|q| q.split('&').any(|p| p.split('=').next() == Some("verbose")));
    // The route needs no token: without a role that may read metrics, names stay secret (I7).
    let may_see_names = || {
        let principal = authenticate(&server, request.headers(), peer_of(request.extensions()));
        principal.is_ok_and(|p| p.role.may_read_metrics())
    };
    let detail = match server.phase() {
        Phase::Ready => match server.cluster.not_ready() {
            Some(NotReady { what, failure }) if may_see_names() => {
                return Err(not_ready(&format!("{what}: {failure}")));
            }
            Some(NotReady { what, .. }) => what,
            None if verbose => return Ok(parts(&server, may_see_names())),
            None => return Ok("ok\n".to_owned()),
        },
        Phase::Starting => "the server is starting",
        Phase::Draining => "the server is stopping",
    };
    Err(not_ready(detail))
}

fn not_ready(detail: &str) -> ApiError {
    ApiError::new(Code::NotReady, detail, "wait, or use another server")
}

/// Returns a line for each part of a ready server that can fail.
fn parts(server: &Server, names: bool) -> String {
    let mut out = String::from("ok\n");
    if let Some(disk) = server.store.disk() {
        let (state, detail) = metrics::disk_state(&disk.report().state);
        let detail = detail.filter(|_| names).map(|d| format!(": {d}")).unwrap_or_default();
        out += &format!("disk {state}{detail}\n");
    }
    let origins = origin_views(server);
    let failing = origins.iter().filter(|o| o.state == OriginState::Failing);
    out += &format!("origins {} of {} failing\n", failing.clone().count(), origins.len());
    for origin in failing.filter(|_| names).take(FAILING_MAX) {
        let why = origin.last_error.as_ref().map_or("it does not answer", |e| e.why.as_str());
        out += &format!("origin {} failing: {}\n", origin.uri, why.replace('\n', " "));
    }
    out
}

/// Returns the metrics.
///
/// With tokens, only the roles `admin` and `monitor` may read them.
#[utoipa::path(
    get, path = "/metrics", tag = "server",
    responses((status = 200,
            description = "Metrics in Prometheus' text format", body = String, content_type = "text/plain"))
)]
pub async fn metrics(State(server): State<Arc<Server>>) -> ApiResult<Response> {
    let page = metrics::render(&server).map_err(|e| ApiError::internal(e.to_string()))?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::app::config::{self, Action, Environment};
    use axum::http::Request;
    use tower::ServiceExt as _;

    /// Calls the router without a connection, because a draining server accepts none.
    #[tokio::test]
    async fn probes_follow_the_phases() {
        let dir = tempfile::tempdir().expect("tempdir");
        let at = |name: &str| format!("--{name}={}/{name}", dir.path().display());
        let args = ["fletch-server".to_owned(), at("state-dir"), at("cache-dir"), at("socket")];
        let Ok(Action::Serve(config)) = config::read(args, &Environment::default()) else {
            panic!("settings")
        };
        let server =
            Server::open(&config, String::new(), None, tokio_util::task::TaskTracker::new()).expect("open");
        let router = super::super::router(Arc::clone(&server));
        let ask = async |path: &str| {
            let request = Request::get(path).body(axum::body::Body::empty()).expect("request");
            router.clone().oneshot(request).await.expect("answer").status().as_u16()
        };
        assert_eq!((ask("/startupz").await, ask("/readyz").await), (503, 503), "starting");
        server.enter(Phase::Ready);
        assert_eq!((ask("/startupz").await, ask("/readyz").await), (200, 200));
        server.enter(Phase::Draining);
        assert_eq!((ask("/startupz").await, ask("/readyz").await), (200, 503), "draining");
        server.enter(Phase::Ready);
        assert_eq!(ask("/readyz").await, 503, "a server that drains never becomes ready again");
    }
}
