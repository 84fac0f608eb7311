//! The error of every handler: the one place where an error of another room becomes a code and a status.

use crate::{
    cluster::{
        catalog::CatalogError,
        groups::{GroupError, Owner},
    },
    data::{
        reads::ContentError,
        versions::{UriNotAllowed, VersionError},
        warmups::TooManyWarmups,
    },
    tenancy::{accounting::TooManyJobs, auth::Unauthenticated, state::RegisterError, tenants::NoChunkMemory},
    training::epochs::JobError,
};
use axum::{
    body::Body,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use fletch_api::{Code, Problem, headers};
use fletch_store::ReadError;
use tokio::task::JoinError;

/// The `Retry-After` of a 429 or 503, in seconds.
const RETRY_AFTER_S: &str = "1";

/// The hint of errors that only the log explains.
const SEE_LOG: &str = "see the server's log";

/// The error of a handler, sent as RFC 9457 problem JSON.
#[derive(Debug, Clone)]
pub struct ApiError(pub Box<Problem>, Option<Box<Owner>>);

/// The result of a handler.
pub type ApiResult<T = Response> = Result<T, ApiError>;

impl ApiError {
    /// Returns an error with a code, a detail and a hint.
    pub fn new(
        code: Code,
        detail: impl Into<String>,
        hint: impl Into<std::borrow::Cow<'static, str>>,
    ) -> Self {
        ApiError(Box::new(Problem::new(code, detail, hint)), None)
    }

    /// Returns the error with the server that has the job.
    fn owned_by(self, owner: Owner) -> Self {
        ApiError(self.0, Some(Box::new(owner)))
    }

    /// Returns the error of a request that cannot be parsed.
    pub fn bad_request(detail: impl Into<String>) -> Self {
        ApiError::new(Code::BadRequest, detail, "see /v1/openapi.json")
    }

    /// Returns the one error for what is absent and for what belongs to another domain (I7).
    pub fn not_found() -> Self {
        VersionError::NotFound.into()
    }

    /// Returns the error of a defect of this server; its log has more.
    pub fn internal(detail: impl Into<String>) -> Self {
        ApiError::new(Code::Internal, detail, SEE_LOG)
    }

    #[must_use]
    pub fn code(&self) -> Code {
        self.0.code
    }
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for ApiError {}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        // A tenant that is full could fill the log; metrics count its refusals.
        if status.is_server_error() && self.0.code != Code::StateFull {
            tracing::warn!(code = %self.0.code, detail = %self.0.detail, "a request failed");
        }
        // Text and numbers always serialize.
        let body = serde_json::to_vec(&self.0).unwrap_or_default();
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = status;
        let h = response.headers_mut();
        h.insert(header::CONTENT_TYPE, HeaderValue::from_static(headers::PROBLEM));
        h.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if [Code::Overloaded, Code::NotReady, Code::JobWaits, Code::RankWaits].contains(&self.0.code) {
            h.insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER_S));
        }
        if self.0.code == Code::Unauthorized {
            h.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(owner) = self.1 {
            if let Ok(id) = HeaderValue::try_from(owner.id.as_str()) {
                h.insert(headers::OWNER, id);
            }
            // The path is known outside of the handler.
            response.extensions_mut().insert(*owner);
        }
        response
    }
}

impl From<VersionError> for ApiError {
    fn from(e: VersionError) -> Self {
        ApiError::new(e.code(), e.to_string(), e.hint())
    }
}

impl From<ContentError> for ApiError {
    fn from(e: ContentError) -> Self {
        ApiError::new(e.code(), e.to_string(), e.hint())
    }
}

impl From<ReadError> for ApiError {
    fn from(e: ReadError) -> Self {
        ContentError::from(e).into()
    }
}

impl From<RegisterError> for ApiError {
    fn from(e: RegisterError) -> Self {
        let (code, hint) = match &e {
            RegisterError::Conflict { .. } => (
                Code::Conflict,
                "choose another name, or register with `--replace` (`replace` in the request)",
            ),
            RegisterError::Quota { .. } => (
                Code::QuotaExceeded,
                "unregister a dataset that is not needed, or ask the administrator for a larger quota",
            ),
            RegisterError::Full(_) => (Code::Overloaded, "unregister datasets, or raise limits.datasets"),
            RegisterError::Io { .. } => (Code::Internal, "check the disk of --state-dir"),
        };
        ApiError::new(code, e.to_string(), hint)
    }
}

impl From<CatalogError> for ApiError {
    fn from(e: CatalogError) -> Self {
        let hint = "check that etcd can be reached, and send the request again; reads go on meanwhile";
        match e {
            CatalogError::Register(e) => e.into(),
            CatalogError::Stopped(e) => e.into(),
            CatalogError::Etcd(ref why) => {
                // Its text names hosts.
                tracing::warn!(error = %why, "a change of the cluster's datasets failed");
                ApiError::new(Code::NotReady, e.to_string(), hint)
            }
            CatalogError::NoCluster | CatalogError::WentBack | CatalogError::Contended => {
                ApiError::new(Code::NotReady, e.to_string(), hint)
            }
            CatalogError::Record(..) => {
                let hint = "a newer server wrote it: bring this server to the same version";
                ApiError::new(Code::NotReady, e.to_string(), hint)
            }
        }
    }
}

impl From<NoChunkMemory> for ApiError {
    fn from(e: NoChunkMemory) -> Self {
        ApiError::new(Code::Overloaded, e.to_string(), NoChunkMemory::HINT)
    }
}

impl From<JoinError> for ApiError {
    fn from(e: JoinError) -> Self {
        ApiError::internal(format!("a task of the server was lost: {e}"))
    }
}

impl From<UriNotAllowed> for ApiError {
    fn from(e: UriNotAllowed) -> Self {
        ApiError::new(e.code(), e.to_string(), e.hint())
    }
}

impl From<Unauthenticated> for ApiError {
    fn from(e: Unauthenticated) -> Self {
        let hint = "send `Authorization: Bearer TOKEN` with a token of this server's tokens file";
        ApiError::new(Code::Unauthorized, e.to_string(), hint)
    }
}

impl From<TooManyWarmups> for ApiError {
    fn from(e: TooManyWarmups) -> Self {
        ApiError::new(Code::Overloaded, e.to_string(), "wait until a warm-up has ended, or cancel one")
    }
}

impl From<TooManyJobs> for ApiError {
    fn from(e: TooManyJobs) -> Self {
        let hint = "name jobs by training run, not by process; or raise the tenant's quota `jobs`, \
            limits.tenant_jobs or limits.jobs";
        ApiError::new(Code::Overloaded, e.to_string(), hint)
    }
}

impl From<GroupError> for ApiError {
    fn from(e: GroupError) -> Self {
        let told = e.to_string();
        let on_etcd =
            "check that etcd can be reached, and send the request again; declared jobs go on meanwhile";
        match e {
            GroupError::Elsewhere { owner, .. } => {
                let hint = "send the request to the URL in Location; fletch and the Python package do so";
                ApiError::new(Code::JobElsewhere, told, hint).owned_by(owner)
            }
            GroupError::Waits { owner, is_gone, .. } => {
                let hint = match is_gone {
                    true => {
                        "start that server again with its state directory, and the job goes on; without it, \
                         load a saved state of the job's epoch (PUT …/state?replace=true) or delete the job, \
                         at any server"
                    }
                    false => "the server is expected back soon; the job goes on then",
                };
                ApiError::new(Code::JobWaits, told, hint).owned_by(owner)
            }
            GroupError::Lost { .. } => {
                let hint = "loaders of this version reclaim by themselves, and `fletch jobs list` names \
                    the missing ranks; if a process is gone: `fletch jobs lost JOB --rank R`, a saved \
                    state (`fletch jobs restore`), or delete the job and declare it again";
                ApiError::new(Code::JobWaits, told, hint)
            }
            GroupError::Long { .. } => {
                let hint = "delete the job, declare it again with its lists, then load the state";
                ApiError::new(Code::Conflict, told, hint)
            }
            GroupError::NoMember(_) => {
                ApiError::new(Code::BadRequest, told, "`fletch cluster status` lists the members")
            }
            GroupError::Job(e) => e.into(),
            GroupError::Etcd(why) => {
                // Its text names hosts.
                tracing::warn!(error = %why, "a change of the cluster's jobs failed");
                ApiError::new(Code::NotReady, told, on_etcd)
            }
            GroupError::Unproven { .. } => {
                let hint = "send the request again: the job goes on when this server reaches etcd, or at the \
                    server that has the job then";
                ApiError::new(Code::NotReady, told, hint)
            }
            GroupError::NoCluster | GroupError::Contended => ApiError::new(Code::NotReady, told, on_etcd),
            GroupError::Record(..) => {
                let hint = "a newer server wrote it: bring this server to the same version";
                ApiError::new(Code::NotReady, told, hint)
            }
        }
    }
}

impl From<JobError> for ApiError {
    fn from(e: JobError) -> Self {
        if e.code() == Code::Internal {
            tracing::error!(error = %e, "a job failed");
        }
        ApiError::new(e.code(), e.to_string(), e.hint())
    }
}
