//! Admission: who asks, for which job, and whether there is room. Every request for bytes passes here.

use super::problem::{Answer, Fault};
use crate::{
    jobs::{Component, Job},
    server::Server,
    versions::Sources,
};
use axum::{
    extract::FromRequestParts,
    http::{HeaderMap, request::Parts},
};
use fletch_api::{ByteTier, Code, headers};
use fletch_core::{Domain, JobName, Root, Tenant};
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// Who is asking. Without configured tokens everybody on this machine is the one default
/// principal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    /// Who may share bytes with them.
    pub domain: Domain,
    /// Who owns jobs and quota.
    pub tenant: Tenant,
}

impl Principal {
    fn of(_headers: &HeaderMap) -> Self {
        Principal { domain: Domain::default_domain(), tenant: Tenant::default_tenant() }
    }
}

impl FromRequestParts<Arc<Server>> for Principal {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Server>) -> Answer<Self> {
        Ok(Principal::of(&parts.headers))
    }
}

/// A request for bytes that may go on.
pub struct Admitted {
    /// Who asks.
    pub principal: Principal,
    /// For which job.
    pub job: Arc<Job>,
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
        let principal = Principal::of(h);
        let name = text(h, headers::JOB)?.unwrap_or(headers::JOB_ANONYMOUS);
        let name = JobName::new(name).map_err(|e| {
            Fault::new(Code::BadJob, e.to_string(), "send a valid Fletch-Job, or leave it out")
        })?;
        if let Some(view) = text(h, headers::VIEW)? {
            view.parse::<u64>().map_err(|_| Fault::bad(format!("Fletch-View {view:?} is not a number")))?;
        }
        let component = Component::from_word(text(h, headers::COMPONENT)?.unwrap_or(""));
        let turn = Arc::clone(&server.turns).try_acquire_owned().map_err(|_| {
            let detail = format!("{} requests for bytes are under way", server.limits.requests);
            Fault::new(Code::Overloaded, detail, "wait and ask again, or raise limits.requests")
        })?;
        let job = server.jobs.touch(&principal.tenant, &name, server.now_ns())?;
        Ok(Admitted { principal, job, component, turn: Some(turn) })
    }
}

impl Admitted {
    /// Makes a charge for each tier, for one version.
    pub fn charges(
        &self,
        server: &Server,
        sources: &Sources,
        root: Root,
    ) -> impl Fn(ByteTier) -> super::body::Charge + Clone + Send + 'static {
        let tally = server.accounts.tally(&self.principal.domain, &self.job, root, &sources.first.dataset);
        let component = self.component;
        move |tier| super::body::Charge { tally: Arc::clone(&tally), component, tier }
    }
}
