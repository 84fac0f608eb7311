//! Admission: who asks, for which job, and whether there is room. Every request for bytes passes here.

use super::problem::{Answer, Fault};
use crate::{
    accounting::{Component, Cost, LiveJob},
    auth::{Principal, Role},
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

/// What needs no token: probes, which a kubelet sends, and the description, which is in the docs.
const OPEN: [&str; 3] = [routes::LIVEZ, routes::READYZ, routes::OPENAPI];

/// Finds out who asks, for everything but [`OPEN`]. The one place where a request gets in.
pub fn identify(server: &Server, request: &mut Request) -> Answer<()> {
    let path = request.uri().path();
    if OPEN.contains(&path) {
        return Ok(());
    }
    let who = who(server, request.headers())?;
    let fits = match path {
        routes::METRICS => who.role.measures(),
        // The page shows what everybody does.
        "/" => who.role.sees_all(),
        _ => who.role.reads(),
    };
    if !fits {
        return Err(forbidden(who.role));
    }
    request.extensions_mut().insert(who);
    Ok(())
}

/// Who asks, by the headers.
pub fn who(server: &Server, headers: &HeaderMap) -> Answer<Principal> {
    let header = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    Ok(server.auth.authenticate(header)?)
}

fn forbidden(role: Role) -> Fault {
    let detail = format!("the role of this token is {role}");
    Fault::new(Code::Forbidden, detail, "ask the administrator for a token with a wider role")
}

fn principal(parts: &Parts) -> Answer<Principal> {
    let who = parts.extensions.get::<Principal>().cloned();
    who.ok_or_else(|| Fault::new(Code::Internal, "nobody was identified", "see the server's log"))
}

impl FromRequestParts<Arc<Server>> for Principal {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Server>) -> Answer<Self> {
        principal(parts)
    }
}

/// A principal whose role may change what the server does for its domain.
pub struct Changer(pub Principal);

impl FromRequestParts<Arc<Server>> for Changer {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Server>) -> Answer<Self> {
        let who = principal(parts)?;
        if who.role.changes() { Ok(Changer(who)) } else { Err(forbidden(who.role)) }
    }
}

/// A request for bytes that may go on.
pub struct Admitted {
    /// Who asks.
    pub principal: Principal,
    /// For which job.
    pub job: Arc<LiveJob>,
    /// With what.
    pub component: Component,
    /// Its turn, to be held until the answer's body is dropped.
    pub turn: Option<OwnedSemaphorePermit>,
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Answer<Option<&'a str>> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    value.to_str().map(Some).map_err(|_| Fault::bad(format!("header {name} is not ASCII text")))
}

impl FromRequestParts<Arc<Server>> for Admitted {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, server: &Arc<Server>) -> Answer<Self> {
        let h = &parts.headers;
        let principal = principal(parts)?;
        let name = text(h, headers::JOB)?.unwrap_or(headers::JOB_ANONYMOUS);
        let name = JobName::new(name).map_err(|e| {
            Fault::new(Code::BadJob, e.to_string(), "send a valid Fletch-LiveJob, or leave it out")
        })?;
        if let Some(view) = text(h, headers::VIEW)? {
            view.parse::<u64>().map_err(|_| Fault::bad(format!("Fletch-View {view:?} is not a number")))?;
        }
        let component = Component::from_word(text(h, headers::COMPONENT)?.unwrap_or(""));
        let turn = Arc::clone(&server.turns).try_acquire_owned().map_err(|_| {
            let detail = format!("{} requests for bytes are under way", server.limits.requests);
            Fault::new(Code::Overloaded, detail, "wait and ask again, or raise limits.requests")
        })?;
        let job = server.live_jobs.touch(&principal.tenant, &name, server.now_ns())?;
        Ok(Admitted { principal, job, component, turn: Some(turn) })
    }
}

impl Admitted {
    /// Makes a charge for each cost, for one version, which is thereby being read.
    pub fn charges(
        &self,
        server: &Server,
        sources: &Sources,
        root: Root,
    ) -> impl Fn(Cost) -> super::body::Charge + Clone + Send + 'static {
        let (dataset, footprint) = (sources.number(), sources.first.footprint_max());
        server.shares.note(dataset, root, footprint, ReaderKind::Plain, server.now_ns());
        let tally = server.accounts.tally(&self.principal.domain, &self.job, root, sources.first.dataset());
        let component = self.component;
        move |cost| super::body::Charge { tally: Arc::clone(&tally), component, cost }
    }
}
