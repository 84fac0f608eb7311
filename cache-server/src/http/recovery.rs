//! Writes the keys of a cluster back to an etcd that lost them.

use super::{
    admission::forbidden,
    error::{ApiError, ApiResult},
    peers::PeerRead,
};
use crate::{
    app::server::{RecoverPlan, Server},
    cluster::RecoverError,
    tenancy::auth::Principal,
};
use axum::{
    Json,
    extract::{Query, State, rejection::QueryRejection},
    http::StatusCode,
};
use fletch_api::{
    Code, Problem,
    cluster::{HeldKeys, Recovery},
};
use serde::Deserialize;
use std::sync::Arc;

/// Query of [`recover`].
#[derive(Debug, Deserialize)]
pub struct RecoverQuery {
    #[serde(default)]
    dry_run: bool,
    #[serde(default)]
    without_silent: bool,
    datasets_from: Option<String>,
}

/// Writes registrations, ring, jobs and groups back to an etcd that lost the keys of the cluster. For admins.
///
/// The server asks the members of its last view what they hold, and each writes its part. Nothing is written
/// while etcd has a cluster of this name.
#[utoipa::path(
    post, path = "/v1/cluster/recover", tag = "server",
    params(
        ("dry_run" = Option<bool>, Query, description = "Whether to write nothing"),
        ("without_silent" = Option<bool>, Query,
            description = "Whether to go on without members that do not answer"),
        ("datasets_from" = Option<String>, Query,
            description = "The member whose datasets count, if the members differ"),
    ),
    responses(
        (status = 200, description = "What was written, or would be", body = Recovery),
        (status = 400, description = "No member has the id", body = Problem,
            content_type = "application/problem+json"),
        (status = 403, description = "The caller is no admin", body = Problem,
            content_type = "application/problem+json"),
        (status = 409, description = "etcd has a cluster of this name, members do not answer, or their \
            datasets differ", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The coordinator did not answer, or a member did not write its part",
            body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn recover(
    State(server): State<Arc<Server>>,
    principal: Principal,
    query: Result<Query<RecoverQuery>, QueryRejection>,
) -> ApiResult<Json<Recovery>> {
    if !principal.role.may_see_all_tenants() {
        return Err(forbidden(&server, principal.role));
    }
    let Query(RecoverQuery { dry_run: is_dry, without_silent, datasets_from }) = query?;
    let plan = RecoverPlan { is_dry, without_silent, datasets_from };
    Ok(Json(server.recover(&plan).await?))
}

/// Returns what this server holds of its cluster, for another server that recovers it.
#[utoipa::path(
    get, path = "/v1/peers/cluster/keys", tag = "peers",
    params(
        ("Fletch-Domain" = String, Header, description = "Any domain"),
        ("Fletch-View" = u64, Header, description = "Number of the view of the server that asks"),
    ),
    responses(
        (status = 200, description = "What the server holds", body = HeldKeys),
        (status = 403, description = "The caller is no server of the cluster", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn held(State(server): State<Arc<Server>>, _asked: PeerRead) -> Json<HeldKeys> {
    Json(server.held_keys())
}

/// Query of [`write_back`].
#[derive(Debug, Deserialize)]
pub struct WriteBackQuery {
    #[serde(default)]
    datasets: bool,
}

/// Writes what this server holds of its cluster to etcd, where a recovery runs.
#[utoipa::path(
    put, path = "/v1/peers/cluster/keys", tag = "peers",
    params(
        ("datasets" = Option<bool>, Query, description = "Whether to write the datasets, too"),
        ("Fletch-Domain" = String, Header, description = "Any domain"),
        ("Fletch-View" = u64, Header, description = "Number of the view of the server that asks"),
    ),
    responses(
        (status = 204, description = "All is written"),
        (status = 403, description = "The caller is no server of the cluster", body = Problem,
            content_type = "application/problem+json"),
        (status = 409, description = "etcd has a cluster of this name", body = Problem,
            content_type = "application/problem+json"),
        (status = 503, description = "No recovery runs, or the coordinator did not answer", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn write_back(
    State(server): State<Arc<Server>>,
    query: Result<Query<WriteBackQuery>, QueryRejection>,
    _asked: PeerRead,
) -> ApiResult<StatusCode> {
    let Query(query) = query?;
    server.write_back(query.datasets).await?;
    Ok(StatusCode::NO_CONTENT)
}

impl From<RecoverError> for ApiError {
    fn from(e: RecoverError) -> Self {
        let (code, hint) = match &e {
            RecoverError::Embedded => (Code::Conflict, "a server that is alone has no coordinator"),
            RecoverError::NeverJoined => (Code::Conflict, "ask a server that was a member of the cluster"),
            RecoverError::Alive(_) => {
                (Code::Conflict, "`fletch cluster check` says which server does not reach etcd, and why")
            }
            RecoverError::OtherCluster { .. } => (
                Code::Conflict,
                "check cluster.endpoints and cluster.name; if that cluster is there by mistake, stop its \
                 servers, delete its keys (etcdctl del --prefix /fletch/NAME/), and recover again",
            ),
            RecoverError::Remains(_) => (
                Code::Conflict,
                "restore etcd from a backup; if the keys are only remains, delete them (etcdctl del --prefix \
                 /fletch/NAME/), and recover again",
            ),
            RecoverError::Silent(_) => (
                Code::Conflict,
                "start them, because what only they know is not written back; or leave them out: \
                 `fletch cluster recover --without-silent`",
            ),
            RecoverError::DatasetsDiffer(_) => (
                Code::Conflict,
                "name the server whose datasets count: `fletch cluster recover --datasets-from ID`",
            ),
            RecoverError::NoMember(_) => (Code::BadRequest, "`fletch cluster status` lists the members"),
            RecoverError::Etcd(_) => {
                (Code::NotReady, "check that etcd runs and can be reached, then recover")
            }
            RecoverError::Part(..) | RecoverError::Overtaken => {
                (Code::NotReady, "recover again: the recovery goes on where it ended")
            }
        };
        ApiError::new(code, e.to_string(), hint)
    }
}
