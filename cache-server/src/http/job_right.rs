//! The right by which a server answers for a job: checked when a request begins, and again before its answer.
//!
//! The server answers a grant, an ack, a state, a world or a commit only while it is the primary of the job,
//! by the same term as when the request began. On a server that is alone nothing is checked.

use super::error::ApiResult;
use crate::{app::server::Server, cluster::groups::GroupError, tenancy::auth::Principal};
use axum::{
    http::HeaderValue,
    response::{IntoResponse, Response},
};
use fletch_api::{TermStamp, headers};
use fletch_core::{Domain, Tenant};
use std::sync::Arc;

/// The right by which a request is answered.
pub(super) struct JobRight {
    server: Arc<Server>,
    /// `None` on a server that is alone.
    begun: Option<Begun>,
}

struct Begun {
    domain: Domain,
    tenant: Tenant,
    id: String,
    stamp: TermStamp,
}

impl JobRight {
    /// Checks that this server may answer for a job now.
    ///
    /// # Errors
    /// Those of [`crate::cluster::groups::Groups::right`].
    pub fn begin(server: &Arc<Server>, principal: &Principal, id: &str) -> ApiResult<Self> {
        let stamp = server.groups.right(&principal.domain, &principal.tenant, id)?;
        let begun = stamp.map(|stamp| Begun {
            domain: principal.domain.clone(),
            tenant: principal.tenant.clone(),
            id: id.to_owned(),
            stamp,
        });
        Ok(JobRight { server: Arc::clone(server), begun })
    }

    /// Checks that the right still holds, after everything that the answer says is durable.
    ///
    /// # Errors
    /// As [`JobRight::begin`], and a retryable error if the job was elsewhere meanwhile.
    pub fn check(&self) -> ApiResult<Option<TermStamp>> {
        let Some(Begun { domain, tenant, id, stamp }) = &self.begun else { return Ok(None) };
        match self.server.groups.right(domain, tenant, id)? {
            Some(now) if (&now.group, now.term) == (&stamp.group, stamp.term) => Ok(Some(now)),
            _ => {
                let why = "the job was at another server meanwhile";
                Err(GroupError::Unproven { job: id.clone(), why }.into())
            }
        }
    }

    /// Returns an answer that names the right, if it still holds.
    ///
    /// # Errors
    /// As [`JobRight::check`].
    pub fn answer(&self, answer: impl IntoResponse) -> ApiResult {
        let stamp = self.check()?;
        Ok(stamped(answer.into_response(), stamp))
    }
}

/// Adds the header that names a right to an answer.
pub(super) fn stamped(mut response: Response, stamp: Option<TermStamp>) -> Response {
    if let Some(value) = stamp.and_then(|stamp| HeaderValue::try_from(stamp.to_string()).ok()) {
        response.headers_mut().insert(headers::TERM, value);
    }
    response
}
