//! Errors as answers: the one place where an error of a boundary becomes a code and a status.

use crate::{
    accounting::TooManyJobs,
    auth::Refused,
    state::RegisterError,
    versions::{UriNotAllowed, VersionError},
    warmups::TooManyWarmups,
};
use axum::{
    body::Body,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use fletch_api::{Code, Problem, headers};
use fletch_store::ReadError;

/// Seconds a client is asked to wait after a 429.
const RETRY_AFTER_S: &str = "1";

/// A problem on its way out.
#[derive(Debug, Clone)]
pub struct Fault(pub Box<Problem>);

/// What a handler returns.
pub type Answer<T = Response> = Result<T, Fault>;

impl Fault {
    /// A problem of a code.
    pub fn new(
        code: Code,
        detail: impl Into<String>,
        hint: impl Into<std::borrow::Cow<'static, str>>,
    ) -> Self {
        Fault(Box::new(Problem::new(code, detail, hint)))
    }

    /// A request that cannot be understood.
    pub fn bad(detail: impl Into<String>) -> Self {
        Fault::new(Code::BadRequest, detail, "see /v1/openapi.json")
    }

    /// The one answer for whatever is absent or not this principal's.
    pub fn not_found() -> Self {
        VersionError::NotFound.into()
    }

    /// Its code.
    #[must_use]
    pub fn code(&self) -> Code {
        self.0.code
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Fault {}

impl IntoResponse for Fault {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        if status.is_server_error() {
            tracing::warn!(code = %self.0.code, detail = %self.0.detail, "request failed");
        }
        // Plain fields of text and numbers always serialize.
        let body = serde_json::to_vec(&self.0).unwrap_or_default();
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = status;
        let h = response.headers_mut();
        h.insert(header::CONTENT_TYPE, HeaderValue::from_static(headers::PROBLEM));
        h.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if self.0.code == Code::Overloaded || self.0.code == Code::NotReady {
            h.insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER_S));
        }
        if self.0.code == Code::Unauthorized {
            h.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<VersionError> for Fault {
    fn from(e: VersionError) -> Self {
        Fault::new(e.code(), e.to_string(), e.hint())
    }
}

impl From<ReadError> for Fault {
    fn from(e: ReadError) -> Self {
        let (code, hint) = match &e {
            ReadError::Fetch(f) => match f.source.downcast_ref::<VersionError>() {
                Some(v) => return v.clone().into(),
                None => (Code::Internal, "see the server's log"),
            },
            ReadError::Corrupt(_) => (Code::OriginCorrupt, "the storage returned wrong bytes: check it"),
            ReadError::Overloaded { .. } => {
                (Code::Overloaded, "wait and ask again; if this lasts, give the server more --memory")
            }
            ReadError::Deadline(_) => {
                (Code::OriginUnavailable, "check that the origin can be reached; asking again is safe")
            }
            ReadError::Lost => (Code::Internal, "see the server's log"),
        };
        Fault::new(code, e.to_string(), hint)
    }
}

impl From<RegisterError> for Fault {
    fn from(e: RegisterError) -> Self {
        let (code, hint) = match &e {
            RegisterError::Conflict { .. } => {
                (Code::Conflict, "choose another name, or delete that registration first")
            }
            RegisterError::Quota { .. } => (
                Code::QuotaExceeded,
                "unregister what is not needed, or ask the administrator for a larger quota",
            ),
            RegisterError::Full(_) => (Code::Overloaded, "delete registrations, or raise limits.datasets"),
            RegisterError::Io { .. } => (Code::Internal, "check the disk of --state-dir"),
        };
        Fault::new(code, e.to_string(), hint)
    }
}

impl From<UriNotAllowed> for Fault {
    fn from(e: UriNotAllowed) -> Self {
        Fault::new(e.code(), e.to_string(), e.hint())
    }
}

impl From<Refused> for Fault {
    fn from(e: Refused) -> Self {
        let hint = "send `Authorization: Bearer TOKEN` with a token of this server's tokens file";
        Fault::new(Code::Unauthorized, e.to_string(), hint)
    }
}

impl From<TooManyWarmups> for Fault {
    fn from(e: TooManyWarmups) -> Self {
        Fault::new(Code::Overloaded, e.to_string(), "wait until one has ended, or cancel one")
    }
}

impl From<TooManyJobs> for Fault {
    fn from(e: TooManyJobs) -> Self {
        Fault::new(Code::Overloaded, e.to_string(), "name jobs by run, not by process")
    }
}
