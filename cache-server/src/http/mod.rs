//! HTTP: the routes of the API. A handler parses a request, calls one method and maps one error.
//!
//! This room must never choose a sample, a source or a chunk to evict: rooms below do. Tests call the routes
//! through real connections (`tests/all`).

pub(crate) mod access;
pub(crate) mod admission;
mod allocation;
mod batch;
pub(crate) mod browser;
mod chunks;
mod cluster;
mod cluster_check;
pub(crate) mod context;
pub(crate) mod credentials;
mod dashboard;
mod datasets;
mod drafts;
mod epochs;
pub(crate) mod error;
mod files;
mod frames;
mod health;
mod hits;
mod job_right;
mod jobs;
mod leases;
mod mounts;
mod moves;
mod page;
mod peers;
pub mod range;
mod reclaim;
mod recovery;
pub(crate) mod reply_guard;
mod request;
pub(crate) mod response_body;
mod s3_credentials;
mod tables;
mod warmups;

use crate::{
    app::{limits::Limits, server::Server},
    cluster::groups::Owner,
    tenancy::connections::Refusal,
};
use axum::{
    Json, Router,
    extract::{MatchedPath, Request, State},
    http::{HeaderValue, Method, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
    routing::get,
};
pub use hits::{HIT_STACK_BYTES, HitSession};
pub use moves::give_drained;

use browser::BrowserRules;
use context::RequestContext;
use error::{ApiError, ApiResult};
use fletch_api::{Code, headers, routes};
use fletch_bounds::in_request;
use reply_guard::ReplyGuard;
use std::sync::Arc;
use utoipa::openapi::OpenApi;
use utoipa_axum::{router::OpenApiRouter, routes as documented};

#[derive(utoipa::OpenApi)]
#[openapi(
    info(
        title = "Fletch",
        description = "Fletch serves datasets by content hash. An error is an RFC 9457 problem, with a \
            stable `code`, a `hint` that says what to do, and `retryable`.",
        license(name = "Apache-2.0")
    ),
    // The router's path of this route is a wildcard, which OpenAPI cannot express.
    paths(files::get),
    components(schemas(fletch_api::Problem, fletch_api::Code))
)]
struct Contract;

fn api() -> (Router<Arc<Server>>, OpenApi) {
    OpenApiRouter::with_openapi(<Contract as utoipa::OpenApi>::openapi())
        .routes(documented!(chunks::get))
        .routes(documented!(chunks::groups))
        .routes(documented!(tables::manifest))
        .routes(documented!(tables::entries))
        .routes(documented!(tables::layout))
        .routes(documented!(tables::placement))
        .routes(documented!(access::get))
        .routes(documented!(batch::post))
        .routes(documented!(hits::get))
        .routes(documented!(datasets::list, datasets::register))
        .routes(documented!(datasets::get, drafts::put, datasets::unregister))
        .routes(documented!(datasets::version))
        .routes(documented!(datasets::tags))
        .routes(documented!(datasets::renewed_pins))
        .routes(documented!(drafts::learned))
        .routes(documented!(drafts::seal, drafts::sealing))
        .routes(documented!(drafts::listing))
        .routes(documented!(warmups::list, warmups::start))
        .routes(documented!(warmups::get, warmups::cancel))
        .routes(documented!(warmups::evict))
        .routes(documented!(jobs::list, jobs::start))
        .routes(documented!(jobs::get, jobs::delete))
        .routes(documented!(jobs::world))
        .routes(documented!(jobs::probe))
        .routes(documented!(reclaim::post))
        .routes(documented!(moves::post))
        .routes(documented!(reclaim::lost))
        .routes(documented!(reclaim::record))
        .routes(documented!(allocation::settings))
        .routes(documented!(leases::post))
        .routes(documented!(epochs::acks))
        .routes(documented!(epochs::state, epochs::put_state))
        .routes(documented!(epochs::checkpoint))
        .routes(documented!(epochs::rollback))
        .routes(documented!(epochs::receipt))
        .routes(documented!(epochs::ledger))
        .routes(documented!(mounts::list))
        .routes(documented!(mounts::announce, mounts::forget))
        .routes(documented!(cluster::cluster))
        .routes(documented!(cluster::drain))
        .routes(documented!(cluster_check::check))
        .routes(documented!(recovery::recover))
        .routes(documented!(recovery::held, recovery::write_back))
        .routes(documented!(peers::chunk, peers::offer))
        .routes(documented!(peers::file))
        .routes(documented!(peers::evict))
        .routes(documented!(peers::hold_warmup))
        .routes(documented!(moves::takes, moves::take))
        .routes(documented!(cluster::info))
        .routes(documented!(cluster::accounts))
        .routes(documented!(cluster::origins))
        .routes(documented!(allocation::get))
        .routes(documented!(credentials::list, credentials::give))
        .routes(documented!(s3_credentials::post))
        .routes(documented!(dashboard::get))
        .routes(documented!(dashboard::events))
        .routes(documented!(dashboard::history))
        .routes(documented!(dashboard::job))
        .routes(documented!(dashboard::receipt))
        .routes(documented!(dashboard::dataset))
        .routes(documented!(health::livez))
        .routes(documented!(health::startupz))
        .routes(documented!(health::readyz))
        .routes(documented!(health::metrics))
        .split_for_parts()
}

/// Returns the OpenAPI description, which is checked in as `docs/openapi.json`.
///
/// # Panics
/// Never: the description always serializes.
#[must_use]
pub fn openapi_json() -> String {
    let mut text = contract().to_pretty_json().expect("the description serializes");
    text.push('\n');
    text
}

fn contract() -> OpenApi {
    let (_, mut api) = api();
    api.info.version = env!("CARGO_PKG_VERSION").to_owned();
    api
}

/// Returns the router of all routes.
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
        .route(routes::PAGE, get(page::page))
        .route(routes::PAGE_FILE, get(page::file))
        .route(routes::RUNBOOK, get(page::runbook))
        .fallback(|| async {
            ApiError::new(Code::NotFound, "the server has no such route", "see /v1/openapi.json")
        })
        .method_not_allowed_fallback(|method: Method| async move {
            ApiError::new(
                Code::MethodNotAllowed,
                format!("the route does not take {method}"),
                "see /v1/openapi.json",
            )
        })
        .layer(middleware::from_fn_with_state(Arc::clone(&server), wrap_request))
        .with_state(server)
}

/// Whether a path is that of a probe, which is answered also where no connection is free.
pub fn is_probe(path: &str) -> bool {
    [routes::LIVEZ, routes::STARTUPZ, routes::READYZ].contains(&path)
}

/// Returns the 429 for a connection that is not served. The connection is closed after it.
pub fn refused(why: Refusal, limits: &Limits) -> Response {
    let mut response = admission::refusal(why, limits).into_response();
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Whether a request's body is stored in another form, such as gzip.
fn is_encoded(request: &Request) -> bool {
    let encoding = request.headers().get(header::CONTENT_ENCODING);
    encoding.is_some_and(|e| !e.as_bytes().eq_ignore_ascii_case(b"identity"))
}

/// Wraps every request: bounds its header, refuses those of foreign web pages, authenticates it, bounds the
/// time until the head of its reply, adds its id and the number of the view, and counts it.
async fn wrap_request(State(server): State<Arc<Server>>, request: Request, next: Next) -> Response {
    let context = RequestContext::of(&request);
    if !is_probe(request.uri().path()) {
        server.touch();
    }
    let route = request.extensions().get::<MatchedPath>().map(|m| m.as_str().to_owned());
    let header: usize = request.headers().iter().map(|(n, v)| n.as_str().len() + v.len() + 4).sum();
    let header = header + request.uri().path().len() + request.uri().query().map_or(0, str::len);
    let path = request.uri().path_and_query().map(ToString::to_string);
    let mut response = if header as u64 > server.limits.header_bytes {
        let detail =
            format!("the header has {header} bytes; at most {} are allowed", server.limits.header_bytes);
        ApiError::new(Code::HeaderTooLarge, detail, "send fewer or shorter headers").into_response()
    } else {
        let tokens = server.auth.tokens_number();
        match admit(&server, request) {
            Ok(request) => {
                let waits = context.waits(&server, &request);
                let guard = ReplyGuard::of_token(&server, &request, tokens);
                let mut response = in_request(Arc::clone(&waits), reply(&server, request, next)).await;
                if let Some(guard) = guard {
                    response = guard.guard(response).into_response();
                }
                server.read_watch.note_request(&waits, || route.as_deref().unwrap_or("none").to_owned());
                response
            }
            Err(error) => error.into_response(),
        }
    };
    if response.status() == StatusCode::TEMPORARY_REDIRECT {
        locate(&mut response, &path.unwrap_or_default());
    }
    response.headers_mut().insert(headers::VIEW, HeaderValue::from(server.cluster.view_number()));
    response.headers_mut().extend(context.header());
    let (route, took) = (route.as_deref().unwrap_or("none"), context.started.elapsed());
    server.requests.count(route, response.status().as_u16(), took);
    response
}

/// Adds the URL of a request at the server that has the job.
fn locate(response: &mut Response, path: &str) {
    let url = response.extensions().get::<Owner>().and_then(|owner| owner.url.as_deref());
    let location =
        url.and_then(|url| HeaderValue::try_from(format!("{}{path}", url.trim_end_matches('/'))).ok());
    if let Some(location) = location {
        response.headers_mut().insert(header::LOCATION, location);
    }
}

/// Refuses a request of a foreign web page or with an encoded body, and authenticates the others.
fn admit(server: &Server, request: Request) -> ApiResult<Request> {
    let (head, body) = request.into_parts();
    let peer = admission::peer_of(&head.extensions);
    let rules = BrowserRules {
        hosts: &server.hosts,
        needs_token: server.auth.needs_token(),
        tls: server.tls.is_some() && peer.may_be_browser(),
    };
    rules.check(peer, &head)?;
    admission::check_certificate(&head)?;
    let mut request = Request::from_parts(head, body);
    admission::identify(server, &mut request)?;
    if is_encoded(&request) {
        let hint = "send the body as it is, without Content-Encoding";
        return Err(ApiError::new(
            Code::BadRequest,
            "the body is encoded, and the server decodes none",
            hint,
        ));
    }
    Ok(request)
}

/// Runs the handler of a request, for at most the deadline.
async fn reply(server: &Server, request: Request, next: Next) -> Response {
    match tokio::time::timeout(server.limits.request_deadline(), next.run(request)).await {
        Ok(response) => response,
        Err(_) => {
            let detail = format!("the request took longer than {:?}", server.limits.request_deadline());
            let hint = "check that the origin can be reached; send a long body faster, or raise \
                    io.timeout; sending the request again is safe";
            ApiError::new(Code::Deadline, detail, hint).into_response()
        }
    }
}
