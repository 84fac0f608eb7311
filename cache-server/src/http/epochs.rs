//! An epoch: acks, state, checkpoints, receipt and ledger.

use super::{
    admission::acquire_read_permit,
    error::{ApiError, ApiResult},
    job_right::JobRight,
    jobs::{open_job, open_to_replace},
    request::{read_body, read_json},
    response_body::{BodyError, Piece, body_of_piece, body_of_stream},
};
use crate::{
    app::server::Server,
    tenancy::auth::Principal,
    training::{
        epochs::{Epoch, JobError},
        jobs::OpenJob,
    },
};
use axum::{
    Json,
    body::{Body, Bytes},
    extract::{
        Path, Query, State,
        rejection::{PathRejection, QueryRejection},
    },
    http::{HeaderName, header},
    response::IntoResponse as _,
};
use bytes::BytesMut;
use fletch_api::{Acked, Acks, Checkpoint, Code, Epoch as View, EpochReceipt, Problem, Rollback, headers};
use futures::stream;
use serde::Deserialize;
use std::{io::Read as _, sync::Arc};
use tokio::task::spawn_blocking;

/// The job and the epoch that a path names.
pub(super) type EpochPath = Result<Path<(String, u64)>, PathRejection>;

/// The longest state: a bit for each of 2^31 entries, and its header.
const STATE_BYTES_MAX: usize = (1 << 28) + (1 << 20);
/// Bytes of a ledger that are read at once, as the client takes them.
const LEDGER_READ_BYTES: u64 = 256 << 10;

/// Returns the job that a path names, and the number of the epoch.
pub(super) async fn job_of(
    server: &Server,
    principal: &Principal,
    path: EpochPath,
) -> ApiResult<(Arc<OpenJob>, u64)> {
    let Path((id, number)) = path?;
    Ok((open_job(server, principal, &id).await?, number))
}

/// Returns the job that a path names, the number of the epoch, and the right by which this server answers.
pub(super) async fn job_to_change(
    server: &Arc<Server>,
    principal: &Principal,
    path: EpochPath,
) -> ApiResult<(Arc<OpenJob>, u64, JobRight)> {
    let Path((id, number)) = path?;
    let job = open_job(server, principal, &id).await?;
    Ok((job, number, JobRight::begin(server, principal, &id)?))
}

/// Returns the job and the epoch that a path names. The epoch must have begun.
async fn epoch_of(
    server: &Server,
    principal: &Principal,
    path: EpochPath,
) -> ApiResult<(Arc<OpenJob>, Arc<Epoch>)> {
    let (job, number) = job_of(server, principal, path).await?;
    let epoch = job.epoch(number).await?;
    Ok((job, epoch))
}

/// Acknowledges samples, and renews the leases that the client still holds.
///
/// The server applies all acks of a request or none. The reply comes when the acks are durable.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/epochs/{epoch}/acks", tag = "jobs", request_body = Acks,
    params(
        ("id" = String, Path, description = "Id of the job"),
        ("epoch" = u64, Path, description = "Number of the epoch, from 0"),
    ),
    responses(
        (status = 200, description = "The acks are durable", body = Acked),
        (status = 400,
            description = "The world has no such rank, or an ack names more samples than its lease",
            body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "The tenant has no such job, or the epoch has not begun", body = Problem,
            content_type = "application/problem+json"),
        (status = 409,
            description = "The lease belongs to another rank, the epoch is closed, or another process is \
            this rank", body = Problem,
            content_type = "application/problem+json"),
        (status = 429,
            description = "The rank waits for its former process. Wait for `Retry-After`, then retry",
            body = Problem, content_type = "application/problem+json"),
        (status = 410, description = "The lease expired, and its samples are granted again", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn acks(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: EpochPath,
    body: Body,
) -> ApiResult {
    let (job, number, right) = job_to_change(&server, &principal, path).await?;
    let request: Acks = read_json(&server, &principal.tenant, body).await?;
    job.admit_acks(&request)?;
    let acked = acks_of(&job, number, &request).await;
    // Also if an ack is refused: the process has ended.
    if let Some(loader) = request.loader.as_ref().filter(|loader| loader.leave) {
        job.leave(request.rank, loader);
    }
    right.answer(Json(acked?))
}

async fn acks_of(job: &Arc<OpenJob>, number: u64, request: &Acks) -> ApiResult<Acked> {
    Ok(job.epoch(number).await?.acks(request).await?)
}

/// Returns the state of an epoch: which entries were acknowledged.
///
/// The state is self-contained. `PUT` continues the epoch from it, also on another server. The epoch begins
/// if it is the job's first, or if the epoch before it is finished.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/epochs/{epoch}/state", tag = "jobs",
    params(
        ("id" = String, Path, description = "Id of the job"),
        ("epoch" = u64, Path, description = "Number of the epoch, from 0"),
    ),
    responses(
        (status = 200,
            description = "The state: a ledger with a header and one resume record",
            content_type = "application/vnd.fletch.ledger"),
        (status = 404, description = "The tenant has no such job, or the epoch has not begun", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn state(State(server): State<Arc<Server>>, principal: Principal, path: EpochPath) -> ApiResult {
    // A state is in memory until the client has read it.
    let permit = acquire_read_permit(&server, &principal.tenant)?;
    let (job, number, right) = job_to_change(&server, &principal, path).await?;
    let epoch = job.epoch_for_state(number).await?;
    let of = Arc::clone(&epoch);
    let made = spawn_blocking(move || of.state()).await.map_err(|_| JobError::TaskLost)?;
    // An epoch that continues from the state must not know acks that a crash can undo.
    epoch.durable().await?;
    let len = made.len() as u64;
    let body = body_of_piece(&server, Piece::Framing(Bytes::from(made)), len, Some(permit));
    right.answer((LEDGER_HEADERS, body))
}

pub(super) const LEDGER_HEADERS: [(HeaderName, &str); 2] =
    [(header::CONTENT_TYPE, headers::LEDGER), (header::CACHE_CONTROL, "no-store")];

/// Query of [`put_state`].
#[derive(Debug, Deserialize)]
pub struct PutQuery {
    /// Whether to discard what the epoch delivered after the state.
    #[serde(default)]
    replace: bool,
}

/// Continues an epoch from a state.
///
/// The epoch begins if it has not begun. With `replace`, an epoch that delivered more than the state says
/// discards the difference and delivers it again. In a cluster it also moves the job to another server if the
/// job's server is gone.
#[utoipa::path(
    put, path = "/v1/jobs/{id}/epochs/{epoch}/state", tag = "jobs",
    request_body(content_type = "application/vnd.fletch.ledger",
            description = "The state that `GET` returned"),
    params(
        ("id" = String, Path, description = "Id of the job"),
        ("epoch" = u64, Path, description = "Number of the epoch, from 0"),
        ("replace" = Option<bool>, Query, description = "Discard what the epoch delivered after the state"),
    ),
    responses(
        (status = 200, description = "The epoch, as the state says", body = View),
        (status = 400, description = "The body is not a state", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The tenant has no such job", body = Problem,
            content_type = "application/problem+json"),
        (status = 409, description = "The state is of another root, plan, order, seed, epoch or (strict \
            order on packs) layout; or the epoch differs from it; or a bucketed step is not complete",
            body = Problem, content_type = "application/problem+json"),
        (status = 504, description = "The client sent a long state too slowly", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn put_state(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: EpochPath,
    query: Result<Query<PutQuery>, QueryRejection>,
    body: Body,
) -> ApiResult {
    let (Query(query), Path((id, number))) = (query?, path?);
    let opened = match query.replace {
        true => open_to_replace(&server, &principal, &id).await,
        false => open_job(&server, &principal, &id).await.map(|job| (job, false)),
    };
    let is_elsewhere = |e: &ApiError| e.code() == Code::JobElsewhere;
    if let Some(error) = opened.as_ref().err().filter(|e| !is_elsewhere(e)) {
        return Err(error.clone());
    }
    // Also of a request that belongs elsewhere: a client that still sends may miss the answer.
    let hint = "send a state as it was saved";
    let received = read_body(&server, &principal.tenant, body, STATE_BYTES_MAX, hint).await?;
    let (job, came) = opened?;
    let begun = if came { None } else { Some(JobRight::begin(&server, &principal, &id)?) };
    let epoch = job.put_state(number, &received.bytes, query.replace).await?;
    let right = match begun {
        Some(begun) => begun,
        None => {
            server.groups.revived(&server.registry, &id).await?;
            server.reclaims.forget(&id, false);
            JobRight::begin(&server, &principal, &id)?
        }
    };
    right.answer(Json(epoch.view()))
}

/// Commits a checkpoint: what is acknowledged now is consumed.
///
/// Call it when the model was saved. Repeating a commit that the server remembers changes nothing.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/epochs/{epoch}/checkpoint", tag = "jobs", request_body = Checkpoint,
    params(
        ("id" = String, Path, description = "Id of the job"),
        ("epoch" = u64, Path, description = "Number of the epoch, from 0"),
    ),
    responses(
        (status = 200, description = "The commit is durable", body = View),
        (status = 404, description = "The tenant has no such job, or the epoch has not begun", body = Problem,
            content_type = "application/problem+json"),
        (status = 409,
            description = "The job's visitation is not `checkpoint`, or the epoch is closed", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn checkpoint(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: EpochPath,
    body: Body,
) -> ApiResult {
    let (job, number, right) = job_to_change(&server, &principal, path).await?;
    let request: Checkpoint = read_json(&server, &principal.tenant, body).await?;
    let epoch = job.epoch_for_commit(number).await?;
    epoch.commit(request.commit).await?;
    right.answer(Json(epoch.view()))
}

/// Rolls a job back to a checkpoint.
///
/// The server delivers again what was acknowledged after the checkpoint, and deletes later epochs. Call it
/// when the model was loaded from that checkpoint.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/epochs/{epoch}/rollback", tag = "jobs", request_body = Rollback,
    params(
        ("id" = String, Path, description = "Id of the job"),
        ("epoch" = u64, Path, description = "Number of the epoch, from 0"),
    ),
    responses(
        (status = 200, description = "The epoch, as it was at the checkpoint", body = View),
        (status = 404, description = "The tenant has no such job, or the epoch has not begun", body = Problem,
            content_type = "application/problem+json"),
        (status = 409, description = "The server does not remember the commit", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn rollback(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: EpochPath,
    body: Body,
) -> ApiResult {
    let (job, number, right) = job_to_change(&server, &principal, path).await?;
    let request: Rollback = read_json(&server, &principal.tenant, body).await?;
    right.answer(Json(job.roll_back(number, request.commit).await?.view()))
}

/// Returns the receipt of a finished epoch.
///
/// The receipt proves which plan was delivered. `fletch receipt verify` compares it with what consumers
/// received.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/epochs/{epoch}/receipt", tag = "jobs",
    params(
        ("id" = String, Path, description = "Id of the job"),
        ("epoch" = u64, Path, description = "Number of the epoch, from 0"),
    ),
    responses(
        (status = 200, description = "The receipt and the shuffle certificate", body = EpochReceipt),
        (status = 404, description = "The tenant has no such job, or the epoch has not begun", body = Problem,
            content_type = "application/problem+json"),
        (status = 409, description = "The epoch is not finished, or it was abandoned", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn receipt(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: EpochPath,
) -> ApiResult<Json<EpochReceipt>> {
    let (job, epoch) = epoch_of(&server, &principal, path).await?;
    Ok(Json(epoch.receipt(|| async move { job.contents().await }).await?))
}

/// Returns the durable part of an epoch's ledger.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/epochs/{epoch}/ledger", tag = "jobs",
    params(
        ("id" = String, Path, description = "Id of the job"),
        ("epoch" = u64, Path, description = "Number of the epoch, from 0"),
    ),
    responses(
        (status = 200, description = "The ledger", content_type = "application/vnd.fletch.ledger"),
        (status = 404, description = "The tenant has no such job, or the epoch has not begun", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn ledger(State(server): State<Arc<Server>>, principal: Principal, path: EpochPath) -> ApiResult {
    let permit = acquire_read_permit(&server, &principal.tenant)?;
    let (_, epoch) = epoch_of(&server, &principal, path).await?;
    let Some(len) = epoch.ledger().durable_len() else { return Err(JobError::Reopening.into()) };
    let at = epoch.ledger().path().to_owned();
    let failed = move |error| JobError::Io { path: at.clone(), error };
    let path = epoch.ledger().path().to_owned();
    let file = spawn_blocking(move || std::fs::File::open(path)).await.map_err(|_| JobError::TaskLost)?;
    let file = file.map_err(failed)?;
    let pieces = stream::try_unfold((file, len), |(file, left)| async move {
        if left == 0 {
            return Ok::<_, BodyError>(None);
        }
        let read = spawn_blocking(move || {
            let mut piece = BytesMut::zeroed(usize::try_from(left.min(LEDGER_READ_BYTES)).unwrap_or(0));
            (&file).read_exact(&mut piece).map(|()| (file, piece.freeze()))
        });
        let (file, piece) = read.await.map_err(std::io::Error::other)??;
        let left = left - piece.len() as u64;
        Ok(Some((Piece::Framing(piece), (file, left))))
    });
    let body = body_of_stream(&server, pieces, Some(len), Some(permit), None);
    Ok((LEDGER_HEADERS, body).into_response())
}
