//! HTTP: adapters that parse, call one method and map one error. Chunks, tables, files and
//! batches are tested through a real connection in `tests/`.

mod access;
mod admit;
mod batch;
mod body;
mod chunks;
mod cluster;
mod datasets;
mod entry;
mod epochs;
mod files;
mod health;
mod jobs;
mod leases;
mod long;
mod page;
mod problem;
mod range;
mod read;
mod tables;
mod warmups;

use crate::server::Server;
use axum::{
    BoxError, Json, Router,
    body::Body,
    extract::{MatchedPath, Request, State},
    http::Method,
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
    routing::get,
};
use fletch_api::{Code, routes};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use problem::{Answer, Fault};
use serde::de::DeserializeOwned;
use std::{str::FromStr, sync::Arc, time::Instant};
use utoipa::openapi::OpenApi;
use utoipa_axum::{router::OpenApiRouter, routes as documented};

#[derive(utoipa::OpenApi)]
#[openapi(
    info(
        title = "Fletch",
        description = "Datasets by content hash. Errors are RFC 9457 problems with a stable code, a hint, and whether asking again may help.",
        license(name = "Apache-2.0")
    ),
    // The router's own path of it is a wildcard, which the description has no word for.
    paths(files::get),
    components(schemas(fletch_api::Problem, fletch_api::Code))
)]
struct Contract;

/// A value of a path or query.
fn parsed<T: FromStr<Err: std::fmt::Display>>(s: &str) -> Answer<T> {
    s.parse().map_err(|e: T::Err| Fault::bad(e.to_string()))
}

/// A request's body as JSON, bounded.
async fn json<T: DeserializeOwned>(server: &Server, body: Body) -> Answer<T> {
    let max = usize::try_from(server.limits.body_bytes).unwrap_or(usize::MAX);
    let hint = "ask for less, or raise limits.body_bytes";
    let bytes = Limited::new(body, max).collect().await.map_err(|e| not_whole(&e, max, hint))?;
    of_json(&bytes.to_bytes())
}

/// Why a body of at most `max` bytes did not come; `hint` says what to do about one that is longer.
fn not_whole(e: &BoxError, max: usize, hint: &'static str) -> Fault {
    if e.is::<LengthLimitError>() {
        return Fault::new(Code::BodyTooLarge, format!("the body is longer than {max} bytes"), hint);
    }
    Fault::bad(format!("the body did not come whole: {e}"))
}

fn of_json<T: DeserializeOwned>(bytes: &[u8]) -> Answer<T> {
    serde_json::from_slice(bytes).map_err(|e| Fault::bad(format!("the body is not valid: {e}")))
}

fn api() -> (Router<Arc<Server>>, OpenApi) {
    OpenApiRouter::with_openapi(<Contract as utoipa::OpenApi>::openapi())
        .routes(documented!(chunks::get))
        .routes(documented!(tables::manifest))
        .routes(documented!(tables::entries))
        .routes(documented!(tables::layout))
        .routes(documented!(tables::placement))
        .routes(documented!(access::get))
        .routes(documented!(batch::post))
        .routes(documented!(datasets::list, datasets::register))
        .routes(documented!(datasets::get, datasets::unregister))
        .routes(documented!(datasets::version))
        .routes(documented!(warmups::list, warmups::start))
        .routes(documented!(warmups::get, warmups::cancel))
        .routes(documented!(warmups::evict))
        .routes(documented!(jobs::list, jobs::start))
        .routes(documented!(jobs::get, jobs::delete))
        .routes(documented!(jobs::world))
        .routes(documented!(leases::post))
        .routes(documented!(epochs::acks))
        .routes(documented!(epochs::state, epochs::put_state))
        .routes(documented!(epochs::checkpoint))
        .routes(documented!(epochs::rollback))
        .routes(documented!(epochs::receipt))
        .routes(documented!(epochs::ledger))
        .routes(documented!(cluster::cluster))
        .routes(documented!(cluster::info))
        .routes(documented!(cluster::accounts))
        .routes(documented!(health::livez))
        .routes(documented!(health::readyz))
        .routes(documented!(health::metrics))
        .split_for_parts()
}

/// The description of the API, as checked in at `docs/openapi.json`.
///
/// # Panics
/// Never: the description is plain data.
#[must_use]
pub fn openapi_json() -> String {
    let mut text = contract().to_pretty_json().expect("plain data serializes");
    text.push('\n');
    text
}

fn contract() -> OpenApi {
    let (_, mut api) = api();
    api.info.version = env!("CARGO_PKG_VERSION").to_owned();
    api
}

/// Every route.
pub fn router(server: Arc<Server>) -> Router {
    let (router, _) = api();
    let description = Arc::new(contract());
    router
        .route(routes::FILE, get(files::get))
        .route(
            routes::OPENAPI,
            get(move || {
                let description = Arc::clone(&description);
                async move { Json((*description).clone()) }
            }),
        )
        .route("/", get(page::page))
        .fallback(|| async { Fault::new(Code::NotFound, "no such route", "see /v1/openapi.json") })
        .method_not_allowed_fallback(|method: Method| async move {
            Fault::new(
                Code::MethodNotAllowed,
                format!("{method} is not for this route"),
                "see /v1/openapi.json",
            )
        })
        .layer(middleware::from_fn_with_state(Arc::clone(&server), around))
        .with_state(server)
}

/// What holds for every request: a bound on its header, somebody who asks, a bound on the time until the answer's
/// head, and a line in the metrics.
async fn around(State(server): State<Arc<Server>>, mut request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let route = request.extensions().get::<MatchedPath>().map(|m| m.as_str().to_owned());
    let header: usize = request.headers().iter().map(|(n, v)| n.as_str().len() + v.len() + 4).sum();
    let header = header + request.uri().path().len() + request.uri().query().map_or(0, str::len);
    let response = if header as u64 > server.limits.header_bytes {
        let detail = format!("{header} bytes, at most {} are read", server.limits.header_bytes);
        Fault::new(Code::HeaderTooLarge, detail, "send fewer or shorter headers").into_response()
    } else if let Err(fault) = admit::identify(&server, &mut request) {
        fault.into_response()
    } else {
        match tokio::time::timeout(server.limits.request_deadline(), next.run(request)).await {
            Ok(response) => response,
            Err(_) => {
                let detail = format!("no answer within {:?}", server.limits.request_deadline());
                Fault::new(
                    Code::Deadline,
                    detail,
                    "check that the origin can be reached; a long body is to come faster, or io.timeout to be raised; asking again is safe",
                )
                .into_response()
            }
        }
    };
    server.requests.answered(route.as_deref().unwrap_or("none"), response.status().as_u16(), begun.elapsed());
    response
}
