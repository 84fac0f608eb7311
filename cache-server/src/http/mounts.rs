//! Mounts: announces, lists and forgets the mounts that read through this server.

use super::{
    error::{ApiError, ApiResult},
    request::{OnePath, parse_param, read_json},
};
use crate::{
    app::server::Server,
    tenancy::{
        auth::{Peer, Principal},
        mounts::{Announced, MountOwner, TooManyMounts},
    },
};
use axum::{
    Json,
    body::Body,
    extract::{Path, State},
    http::StatusCode,
};
use fletch_api::{
    AnnounceMount, Code, Mounts, Problem,
    mounts::{DIR_BYTES_MAX, PROBLEM_BYTES_MAX, WORD_BYTES_MAX},
};
use fletch_core::MountId;
use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

impl From<TooManyMounts> for ApiError {
    fn from(e: TooManyMounts) -> Self {
        ApiError::new(
            Code::Overloaded,
            e.to_string(),
            "unmount what nobody reads; the mounts go on without it",
        )
    }
}

fn owner(server: &Server, principal: &Principal, peer: Peer) -> MountOwner {
    MountOwner::of(principal, peer, server.auth.needs_token())
}

fn check(mount: &AnnounceMount) -> ApiResult<()> {
    let problem = mount.problem.as_deref().unwrap_or_default();
    let texts = [
        ("dir", &*mount.dir, DIR_BYTES_MAX),
        ("host", &*mount.host, WORD_BYTES_MAX),
        ("version", &*mount.version, WORD_BYTES_MAX),
        ("problem", problem, PROBLEM_BYTES_MAX),
    ];
    for (field, text, max) in texts {
        if text.len() > max {
            let detail = format!("{field} has {} bytes; at most {max} are allowed", text.len());
            return Err(ApiError::bad_request(detail));
        }
    }
    Ok(())
}

/// Announces a mount, or announces it again.
///
/// A mount announces itself every 10 s. The server forgets it 30 s after its last announcement. On a server
/// without tokens each user of the unix socket has mounts of its own.
#[utoipa::path(
    put, path = "/v1/mounts/{id}", tag = "mounts", request_body = AnnounceMount,
    params(("id" = String, Path, description = "Id that the mount chose: 1 to 128 of A-Z a-z 0-9 . _ -")),
    responses(
        (status = 204, description = "The server knows the mount"),
        (status = 400, description = "The request is not valid", body = Problem,
            content_type = "application/problem+json"),
        (status = 429, description = "The tenant has announced too many mounts", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn announce(
    State(server): State<Arc<Server>>,
    principal: Principal,
    peer: Peer,
    path: OnePath,
    body: Body,
) -> ApiResult<StatusCode> {
    let id: MountId = parse_param(&path?.0)?;
    let mount: AnnounceMount = read_json(&server, &principal.tenant, body).await?;
    check(&mount)?;
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let at =
        Announced { now_ns: server.now_ns(), unix_ns: u64::try_from(unix.as_nanos()).unwrap_or(u64::MAX) };
    server.mounts.announce(owner(&server, &principal, peer), id, mount, at)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Forgets a mount of the caller.
///
/// The answer is the same for a mount that the server does not know.
#[utoipa::path(
    delete, path = "/v1/mounts/{id}", tag = "mounts",
    params(("id" = String, Path, description = "Id of the mount")),
    responses(
        (status = 204, description = "The server does not know the mount any more"),
        (status = 400, description = "The id is not valid", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn forget(
    State(server): State<Arc<Server>>,
    principal: Principal,
    peer: Peer,
    path: OnePath,
) -> ApiResult<StatusCode> {
    let Path(id) = path?;
    server.mounts.forget(owner(&server, &principal, peer), parse_param(&id)?);
    Ok(StatusCode::NO_CONTENT)
}

/// Lists the mounts that announced themselves in the last 30 s.
///
/// An admin sees all mounts, every other role its own.
#[utoipa::path(
    get, path = "/v1/mounts", tag = "mounts",
    responses((status = 200, description = "The mounts, in the order of their ids", body = Mounts))
)]
pub async fn list(State(server): State<Arc<Server>>, principal: Principal, peer: Peer) -> Json<Mounts> {
    let own = (!principal.role.may_see_all_tenants()).then(|| owner(&server, &principal, peer));
    Json(Mounts { mounts: server.mounts.list(own.as_ref(), server.now_ns()) })
}
