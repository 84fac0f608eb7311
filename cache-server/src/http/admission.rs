//! Admission: authenticates a request, checks its role, and gives a request for bytes its permit.
//!
//! [`identify`] runs before every handler. A handler takes a [`Principal`] to read, a [`WriteAccess`] to
//! change what the server does, and an [`Admitted`] to send content.

use super::{
    error::{ApiError, ApiResult},
    response_body::Charge,
};
use crate::{
    accounting::{Component, Cost, LiveJob},
    auth::{Principal, Role},
    connections::{Connection, Refusal},
    limits::Limits,
    server::Server,
    versions::Sources,
};
use axum::{
    extract::{FromRequestParts, Request},
    http::{HeaderMap, HeaderValue, header, request::Parts},
};
use fletch_api::{Code, headers, routes};
use fletch_core::{JobName, Root};
use fletch_store::ReaderKind;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// Routes without authentication: probes, which a kubelet sends, and the public description of the API.
const UNAUTHENTICATED_ROUTES: [&str; 3] = [routes::LIVEZ, routes::READYZ, routes::OPENAPI];

/// Authenticates a request and checks that its role may use the route.
///
/// # Errors
/// [`Code::Unauthorized`] and [`Code::Forbidden`].
pub fn identify(server: &Server, request: &mut Request) -> ApiResult<()> {
    let path = request.uri().path();
    if UNAUTHENTICATED_ROUTES.contains(&path) {
        return Ok(());
    }
    let principal = authenticate(server, request.headers())?;
    let allowed = match path {
        routes::METRICS => principal.role.may_read_metrics(),
        // The page shows the bytes of every tenant.
        "/" => principal.role.may_see_all_tenants(),
        _ => principal.role.may_read(),
    };
    if !allowed {
        return Err(forbidden(principal.role));
    }
    if let Some(connection) = request.extensions().get::<Arc<Connection>>() {
        // Without tokens all callers are one tenant, which may have all connections.
        let tenant = server.auth.is_required().then_some(&principal.tenant);
        connection.prove(tenant).map_err(|why| refusal(why, &server.limits))?;
    }
    request.extensions_mut().insert(principal);
    Ok(())
}

/// Returns the error of a connection that is not served.
pub fn refusal(why: Refusal, limits: &Limits) -> ApiError {
    let (detail, hint) = match why {
        Refusal::All => (
            format!("all {} connections of the server run requests", limits.connections),
            "wait and send the request again, or raise limits.connections (limits.socket_connections for the \
                unix socket)",
        ),
        Refusal::Source => (
            "this source has as many connections as one caller may have, and all run requests".to_owned(),
            "use fewer connections, or raise limits.connections_per_caller (limits.socket_connections for \
                the unix socket)",
        ),
        Refusal::Tenant => (
            format!("this tenant has {} connections, and all run requests", limits.connections_per_caller),
            "use fewer connections, or raise limits.connections_per_caller",
        ),
        Refusal::Memory => (
            "requests of this caller hold as much of the memory for requests as one caller may".to_owned(),
            "send fewer requests at once, and complete them; or raise --memory of the server",
        ),
    };
    ApiError::new(Code::Overloaded, detail, hint)
}

/// Returns the principal of the token in a request's headers.
///
/// # Errors
/// [`Code::Unauthorized`].
pub fn authenticate(server: &Server, headers: &HeaderMap) -> ApiResult<Principal> {
    let header = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    Ok(server.auth.authenticate(header)?)
}

fn forbidden(role: Role) -> ApiError {
    let detail = format!("the token has the role {role}, which may not use this route");
    ApiError::new(Code::Forbidden, detail, "ask the administrator for a token with a wider role")
}

fn principal_of(parts: &Parts) -> ApiResult<Principal> {
    let principal = parts.extensions.get::<Principal>().cloned();
    principal.ok_or_else(|| ApiError::internal("the request was not authenticated"))
}

impl FromRequestParts<Arc<Server>> for Principal {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Server>) -> ApiResult<Self> {
        principal_of(parts)
    }
}

/// A principal whose role may change what the server does for its domain.
pub struct WriteAccess(pub Principal);

impl FromRequestParts<Arc<Server>> for WriteAccess {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Server>) -> ApiResult<Self> {
        let principal = principal_of(parts)?;
        if principal.role.may_write() { Ok(WriteAccess(principal)) } else { Err(forbidden(principal.role)) }
    }
}

/// A request for bytes that was admitted.
pub struct Admitted {
    /// The principal of its token.
    pub principal: Principal,
    /// The job of its `Fletch-Job` header.
    pub job: Arc<LiveJob>,
    /// The program of its `Fletch-Component` header.
    pub component: Component,
    /// Its permit, which the response body holds until it is dropped.
    pub permit: Option<OwnedSemaphorePermit>,
}

/// Takes one of the `limits.requests` permits for requests for bytes.
///
/// # Errors
/// [`Code::Overloaded`] if none is free.
pub fn acquire_read_permit(server: &Server) -> ApiResult<OwnedSemaphorePermit> {
    Arc::clone(&server.read_permits).try_acquire_owned().map_err(|_| overloaded(server))
}

/// Returns the error of a request that finds no free permit.
pub fn overloaded(server: &Server) -> ApiError {
    let detail = format!("{} requests for bytes are running, which is the limit", server.limits.requests);
    ApiError::new(Code::Overloaded, detail, "wait and send the request again, or raise limits.requests")
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> ApiResult<Option<&'a str>> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    value.to_str().map(Some).map_err(|_| ApiError::bad_request(format!("header {name} is not ASCII text")))
}

impl FromRequestParts<Arc<Server>> for Admitted {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, server: &Arc<Server>) -> ApiResult<Self> {
        let h = &parts.headers;
        let principal = principal_of(parts)?;
        let name = text(h, headers::JOB)?.unwrap_or(headers::JOB_ANONYMOUS);
        let name = JobName::new(name).map_err(|e| {
            ApiError::new(Code::BadJob, e.to_string(), "send a valid Fletch-Job header, or leave it out")
        })?;
        if let Some(view) = text(h, headers::VIEW)? {
            view.parse::<u64>()
                .map_err(|_| ApiError::bad_request(format!("Fletch-View {view:?} is not a number")))?;
        }
        let component = Component::from_word(text(h, headers::COMPONENT)?.unwrap_or(""));
        let permit = acquire_read_permit(server)?;
        let job = server.live_jobs.touch(&principal.tenant, &name, server.now_ns())?;
        Ok(Admitted { principal, job, component, permit: Some(permit) })
    }
}

impl Admitted {
    /// Returns a function that makes the charge of a cost, for one version.
    ///
    /// Also notes that the version's dataset is being read, which gives it a share of the disk.
    pub fn charges(
        &self,
        server: &Server,
        sources: &Sources,
        root: Root,
    ) -> impl Fn(Cost) -> Charge + Clone + Send + 'static {
        let (dataset, footprint) = (sources.dataset_id(), sources.first.footprint_max());
        server.shares.note(dataset, root, footprint, ReaderKind::Plain, server.now_ns());
        let tally = server.accounts.tally(&self.principal.domain, &self.job, root, sources.first.dataset());
        let component = self.component;
        move |cost| Charge { tally: Arc::clone(&tally), component, cost }
    }
}
