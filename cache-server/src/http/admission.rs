//! Admission: authenticates a request, checks its role, and gives a request for bytes its permit.
//!
//! [`identify`] runs before every handler. A handler takes a [`Principal`] to read, a [`WriteAccess`] to
//! change what the server does, and a [`ReadRequest`] to send content. The server remembers nothing of a
//! request for bytes, not even its job, before [`ReadRequest::access`] decided that it may read the root.

use super::{
    access::access,
    error::{ApiError, ApiResult},
    is_probe,
    page::is_public,
    response_body::Charge,
};
use crate::{
    app::{limits::Limits, server::Server},
    data::{chunk_reads::Asker, reads::Payer, versions::Sources},
    tenancy::{
        accounting::{Component, Cost, JobCosts, LiveJob, Tally},
        auth::{Peer, Principal, Role},
        connections::{Connection, Refusal},
        tenants::{FairPermit, Refused, TenantLimit},
    },
};
use axum::{
    extract::{FromRequestParts, Request},
    http::{Extensions, HeaderMap, HeaderValue, header, request::Parts},
};
use fletch_api::{Code, headers, routes};
use fletch_bounds::Waits;
use fletch_core::{DatasetName, JobName, Root, Tenant};
use fletch_store::ReaderKind;
use std::{convert::Infallible, sync::Arc};

/// The routes that a server answers after `cluster.stale_max` without etcd: they show nothing of datasets.
const SERVED_STALE: &[&str] = &[routes::METRICS, routes::CLUSTER, routes::INFO];

/// Routes without authentication: probes, which a kubelet sends, and the public description of the API. The
/// files of the admin page need none either.
const UNAUTHENTICATED_ROUTES: [&str; 4] = [routes::LIVEZ, routes::STARTUPZ, routes::READYZ, routes::OPENAPI];

/// Refuses a request without the client certificate that the server requires. Probes need none.
///
/// # Errors
/// [`Code::CertificateRequired`].
pub fn check_certificate(head: &Parts) -> ApiResult<()> {
    let lacks = head.extensions.get::<Arc<Connection>>().is_some_and(|c| c.lacks_certificate());
    if !lacks || is_probe(head.uri.path()) {
        return Ok(());
    }
    let detail = "the connection has no client certificate, and this server requires one for every request";
    let hint = "give a certificate of a CA that the server knows, with its key: --cert-file and --key-file";
    Err(ApiError::new(Code::CertificateRequired, detail, hint))
}

/// Authenticates a request and checks that its role may use the route.
///
/// # Errors
/// [`Code::Unauthorized`] and [`Code::Forbidden`].
pub fn identify(server: &Server, request: &mut Request) -> ApiResult<()> {
    let path = request.uri().path();
    if UNAUTHENTICATED_ROUTES.contains(&path) || is_public(path) {
        return Ok(());
    }
    let peer = peer_of(request.extensions());
    let principal = authenticate(server, request.headers(), peer)?;
    server.credentials.check_reader(peer)?;
    let allowed = match path {
        routes::METRICS => principal.role.may_read_metrics(),
        // Without tokens, whoever may connect is as near as a server of the cluster.
        _ if path.starts_with(routes::PEERS) && server.auth.is_required() => principal.role.may_ask_as_peer(),
        _ => principal.role.may_read(),
    };
    if !allowed {
        return Err(forbidden(server, principal.role));
    }
    if !SERVED_STALE.iter().any(|served| path.starts_with(served)) {
        check_contact(server)?;
    }
    prove(server, request.extensions(), &principal)?;
    request.extensions_mut().insert(principal);
    Ok(())
}

/// Refuses requests for datasets and jobs while this server may have missed what was revoked.
///
/// # Errors
/// [`Code::NotReady`].
pub fn check_contact(server: &Server) -> ApiResult<()> {
    if !server.cluster.is_stale() {
        return Ok(());
    }
    let detail = "this server has had no contact with etcd for cluster.stale_max, so it may have missed \
        what was revoked";
    let hint = "ask another server of the cluster; check that this one can reach etcd";
    Err(ApiError::new(Code::NotReady, detail, hint))
}

/// Counts the connection of a request for the tenant that its first request proved.
///
/// # Errors
/// [`Code::Overloaded`] if the tenant has too many connections.
pub fn prove(server: &Server, extensions: &Extensions, principal: &Principal) -> ApiResult<()> {
    let Some(connection) = extensions.get::<Arc<Connection>>() else { return Ok(()) };
    // Without tokens all callers are one tenant, which may have all connections. A peer is no tenant.
    let is_tenant = server.auth.is_required() && !principal.role.may_ask_as_peer();
    let tenant = is_tenant.then_some(&principal.tenant);
    connection.prove(tenant).map_err(|why| refusal(why, &server.limits))
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

/// Returns the other end of the connection of a request. A request without a connection counts as TCP.
pub fn peer_of(extensions: &Extensions) -> Peer {
    extensions.get().copied().unwrap_or(Peer::Tcp)
}

/// Returns the principal of the token in a request's headers. Without tokens, that of the peer.
///
/// # Errors
/// [`Code::Unauthorized`].
pub fn authenticate(server: &Server, headers: &HeaderMap, peer: Peer) -> ApiResult<Principal> {
    let header = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    Ok(server.auth.authenticate(header, peer)?)
}

/// Returns the error of a role that may not use a route.
pub fn forbidden(server: &Server, role: Role) -> ApiError {
    if !server.auth.needs_token() {
        let detail =
            format!("on the unix socket your user has the role {role}, which may not use this route");
        let hint = "ask as the user that runs the server, or as root, or add your uid to auth.socket_admins \
            of the server's settings";
        return ApiError::new(Code::Forbidden, detail, hint);
    }
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

impl FromRequestParts<Arc<Server>> for Peer {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Server>) -> Result<Self, Infallible> {
        Ok(peer_of(&parts.extensions))
    }
}

/// A principal whose role may change what the server does for its domain.
pub struct WriteAccess(pub Principal);

impl FromRequestParts<Arc<Server>> for WriteAccess {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, server: &Arc<Server>) -> ApiResult<Self> {
        let principal = principal_of(parts)?;
        let allowed = principal.role.may_write();
        if allowed { Ok(WriteAccess(principal)) } else { Err(forbidden(server, principal.role)) }
    }
}

/// A request for bytes that has its permit, and whose access is not decided yet.
pub struct ReadRequest {
    principal: Principal,
    job: JobName,
    dataset: Option<DatasetName>,
    component: Component,
    permit: FairPermit,
}

/// A request for bytes that was admitted: its principal may read the root.
pub struct Admitted {
    /// The principal of its token.
    pub principal: Principal,
    /// The job of its `Fletch-Job` header.
    pub job: Arc<LiveJob>,
    /// The program of its `Fletch-Component` header.
    pub component: Component,
    /// Its permit, which the response body holds until it is dropped.
    pub permit: Option<FairPermit>,
}

/// Takes one of the tenant's permits for requests for bytes.
///
/// # Errors
/// [`Code::Overloaded`] if none is free.
pub fn acquire_read_permit(server: &Server, tenant: &Tenant) -> ApiResult<FairPermit> {
    server.tenants.requests.try_acquire(tenant, 1).map_err(|why| overloaded(server, tenant, why))
}

/// Checks whether a read permit is free for the tenant now.
///
/// # Errors
/// [`Code::Overloaded`].
pub fn check_read_permit(server: &Server, tenant: &Tenant) -> ApiResult<()> {
    server.tenants.requests.check(tenant, 1).map_err(|why| overloaded(server, tenant, why))
}

/// Returns the error of a request that finds no free permit, and counts it.
fn overloaded(server: &Server, tenant: &Tenant, why: Refused) -> ApiError {
    server.tenants.count_refusal(tenant, TenantLimit::Requests);
    let used = server.tenants.requests.of(tenant).used;
    let (detail, hint) = match why {
        Refused::OwnLimit => (
            format!("{used} requests for bytes of this tenant are running, which is its limit"),
            "wait and send the request again, or raise the tenant's quota `requests` or limits.requests",
        ),
        // How much other tenants use is not this tenant's business (I7).
        Refused::Shared => (
            format!(
                "{used} requests for bytes of this tenant are running; the rest of the limit of {} is in use \
                 or kept for other tenants",
                server.limits.requests
            ),
            "wait and send the request again, or raise limits.requests",
        ),
    };
    ApiError::new(Code::Overloaded, detail, hint)
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> ApiResult<Option<&'a str>> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    value.to_str().map(Some).map_err(|_| ApiError::bad_request(format!("header {name} is not ASCII text")))
}

/// Returns the dataset of a request's `Fletch-Dataset` header.
///
/// # Errors
/// [`Code::BadRequest`] for a name that no dataset can have.
pub fn named_dataset(request: &HeaderMap) -> ApiResult<Option<DatasetName>> {
    let name = text(request, headers::DATASET)?.map(DatasetName::new).transpose();
    name.map_err(|e| ApiError::bad_request(format!("header {}: {e}", headers::DATASET)))
}

impl FromRequestParts<Arc<Server>> for ReadRequest {
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
        let dataset = named_dataset(h)?;
        let component = Component::from_word(text(h, headers::COMPONENT)?.unwrap_or(""));
        // Before the access is decided, so that a tenant has a bounded number of undecided requests.
        let permit = acquire_read_permit(server, &principal.tenant)?;
        Ok(ReadRequest { principal, job: name, dataset, component, permit })
    }
}

impl ReadRequest {
    /// Decides whether the principal may read the root, and only then remembers the job.
    ///
    /// # Errors
    /// Those of [`access`]; [`Code::Overloaded`] if the tenant reads as too many jobs at once.
    pub async fn access(self, server: &Server, root: Root) -> ApiResult<(Admitted, Arc<Sources>)> {
        let ReadRequest { principal, job, dataset, component, permit } = self;
        let sources = access(server, &principal, root, dataset.as_ref()).await?;
        let job = server.live_job(&principal.tenant, &job)?;
        Ok((Admitted { principal, job, component, permit: Some(permit) }, sources))
    }
}

/// Adds the later waits of the current request to those of a job.
pub fn record_waits_for(costs: &Arc<JobCosts>) {
    if let Some(waits) = Waits::current() {
        waits.record_for_job(costs);
    }
}

impl Admitted {
    fn tally(&self, server: &Server, sources: &Sources, root: Root) -> Arc<Tally> {
        server.accounts.tally(&self.principal.domain, &self.job, root, sources.dataset())
    }

    /// Returns who pays for the reads of one version.
    pub fn payer(&self, server: &Server, sources: &Sources, root: Root) -> Payer {
        let costs = Arc::clone(self.tally(server, sources, root).costs());
        record_waits_for(&costs);
        Payer { asker: Asker::Client, tenant: self.principal.tenant.clone(), costs }
    }

    /// Returns a function that makes the charge of a cost, for one version.
    ///
    /// Also notes that the version's dataset is being read, which gives it a share of the disk.
    pub fn charges(
        &self,
        server: &Server,
        sources: &Sources,
        root: Root,
    ) -> impl Fn(Cost) -> Charge + Clone + Send + 'static {
        let (ids, footprint) = (sources.version_ids(), sources.first.footprint());
        server.shares.note(ids, root, footprint, ReaderKind::Plain, server.now_ns());
        let (tally, component) = (self.tally(server, sources, root), self.component);
        move |cost| Charge { tally: Arc::clone(&tally), component, cost }
    }
}
