//! Acks, state, receipt and ledger of an epoch.

use super::{
    jobs::opened,
    json, long,
    problem::{Answer, Fault},
};
use crate::{
    auth::Principal,
    epochs::{Epoch, JobError},
    jobs::OpenJob,
    server::Server,
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
use fletch_api::{Acked, Acks, Checkpoint, Epoch as View, EpochReceipt, Problem, Rollback, headers};
use futures::stream;
use serde::Deserialize;
use std::{io::Read as _, sync::Arc};
use tokio::task::spawn_blocking;

pub(super) type TwoPaths = Result<Path<(String, u64)>, PathRejection>;

/// The longest state: a bit for each of 2^31 entries, and what is around them.
const STATE_BYTES_MAX: usize = (1 << 28) + (1 << 20);
/// Bytes of a ledger that are read at once.
const LEDGER_READ_BYTES: u64 = 256 << 10;

/// The job that a path names, and the number of its epoch.
pub(super) async fn job_of(server: &Server, who: &Principal, path: TwoPaths) -> Answer<(Arc<OpenJob>, u64)> {
    let Path((id, number)) = path.map_err(|e| Fault::bad(e.body_text()))?;
    Ok((opened(server, who, &id).await?, number))
}

/// The job that a path names, and its epoch, which has begun.
async fn epoch_of(server: &Server, who: &Principal, path: TwoPaths) -> Answer<(Arc<OpenJob>, Arc<Epoch>)> {
    let (job, number) = job_of(server, who, path).await?;
    let epoch = job.epoch(number).await?;
    Ok((job, epoch))
}

/// Says what was consumed, and what is still held. All of it or nothing.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/epochs/{epoch}/acks", tag = "jobs", request_body = Acks,
    params(("id" = String, Path, description = "The job"), ("epoch" = u64, Path, description = "Which epoch")),
    responses(
        (status = 200, description = "Durable", body = Acked),
        (status = 400, description = "No such rank, or more than the lease holds", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such job or epoch", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "Another rank's lease, or a closed epoch", body = Problem, content_type = "application/problem+json"),
        (status = 410, description = "The lease is gone", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn acks(
    State(server): State<Arc<Server>>,
    who: Principal,
    path: TwoPaths,
    body: Body,
) -> Answer<Json<Acked>> {
    let ask: Acks = json(&server, body).await?;
    let (_, epoch) = epoch_of(&server, &who, path).await?;
    Ok(Json(epoch.acks(&ask).await?))
}

/// What was acknowledged, self-contained.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/epochs/{epoch}/state", tag = "jobs",
    params(("id" = String, Path, description = "The job"), ("epoch" = u64, Path, description = "Which epoch")),
    responses(
        (status = 200, description = "A ledger of header and resume records", content_type = "application/vnd.fletch.ledger"),
        (status = 404, description = "No such job or epoch", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn state(State(server): State<Arc<Server>>, who: Principal, path: TwoPaths) -> Answer {
    let (_, epoch) = epoch_of(&server, &who, path).await?;
    let of = Arc::clone(&epoch);
    let made = spawn_blocking(move || of.state()).await.map_err(|_| JobError::TaskLost)?;
    // Whoever goes on from it goes on from what stays so.
    epoch.durable().await?;
    Ok((KINDS, Bytes::from(made)).into_response())
}

const KINDS: [(HeaderName, &str); 2] =
    [(header::CONTENT_TYPE, headers::LEDGER), (header::CACHE_CONTROL, "no-store")];

/// How a state is put.
#[derive(Debug, Deserialize)]
pub struct Put {
    /// Whether what was delivered since is to be forgotten.
    #[serde(default)]
    replace: bool,
}

/// Continues an epoch from a state.
#[utoipa::path(
    put, path = "/v1/jobs/{id}/epochs/{epoch}/state", tag = "jobs",
    request_body(content_type = "application/vnd.fletch.ledger", description = "What GET gave"),
    params(
        ("id" = String, Path, description = "The job"),
        ("epoch" = u64, Path, description = "Which epoch"),
        ("replace" = Option<bool>, Query, description = "Forget what was delivered since"),
    ),
    responses(
        (status = 200, description = "The epoch is as the state says", body = View),
        (status = 400, description = "Not a state", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such job", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "Of another root, plan, order, seed, epoch or (strict, on packs) layout; the epoch is not as the state says, or in the middle of a bucketed step", body = Problem, content_type = "application/problem+json"),
        (status = 504, description = "A long state came too slowly", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn put_state(
    State(server): State<Arc<Server>>,
    who: Principal,
    path: TwoPaths,
    put: Result<Query<Put>, QueryRejection>,
    body: Body,
) -> Answer<Json<View>> {
    let Query(put) = put.map_err(|e| Fault::bad(e.body_text()))?;
    let (job, number) = job_of(&server, &who, path).await?;
    let (bytes, permit) = long::read(&server, body, STATE_BYTES_MAX, "put what GET …/state gave").await?;
    let epoch = job.put_state(number, &bytes, put.replace).await?;
    drop(permit);
    Ok(Json(epoch.view()))
}

/// The model was saved: what is acknowledged now is committed.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/epochs/{epoch}/checkpoint", tag = "jobs", request_body = Checkpoint,
    params(("id" = String, Path, description = "The job"), ("epoch" = u64, Path, description = "Which epoch")),
    responses(
        (status = 200, description = "Durable; a number that was remembered changed nothing", body = View),
        (status = 404, description = "No such job or epoch", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "The job's visitation is not checkpoint, or a closed epoch", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn checkpoint(
    State(server): State<Arc<Server>>,
    who: Principal,
    path: TwoPaths,
    body: Body,
) -> Answer<Json<View>> {
    let ask: Checkpoint = json(&server, body).await?;
    let (job, number) = job_of(&server, &who, path).await?;
    let epoch = job.epoch_for_commit(number).await?;
    epoch.commit(ask.commit).await?;
    Ok(Json(epoch.view()))
}

/// The model went back to a checkpoint: what was acknowledged after it is delivered again.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/epochs/{epoch}/rollback", tag = "jobs", request_body = Rollback,
    params(("id" = String, Path, description = "The job"), ("epoch" = u64, Path, description = "Which epoch")),
    responses(
        (status = 200, description = "The epoch is as it was then, and later ones have not begun", body = View),
        (status = 404, description = "No such job or epoch", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "No such commit is remembered", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn rollback(
    State(server): State<Arc<Server>>,
    who: Principal,
    path: TwoPaths,
    body: Body,
) -> Answer<Json<View>> {
    let ask: Rollback = json(&server, body).await?;
    let (job, number) = job_of(&server, &who, path).await?;
    Ok(Json(job.roll_back(number, ask.commit).await?.view()))
}

/// The receipt of a finished epoch.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/epochs/{epoch}/receipt", tag = "jobs",
    params(("id" = String, Path, description = "The job"), ("epoch" = u64, Path, description = "Which epoch")),
    responses(
        (status = 200, description = "What the plan says, and how well shuffled it was", body = EpochReceipt),
        (status = 404, description = "No such job or epoch", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "The epoch is not finished, or was abandoned", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn receipt(
    State(server): State<Arc<Server>>,
    who: Principal,
    path: TwoPaths,
) -> Answer<Json<EpochReceipt>> {
    let (job, epoch) = epoch_of(&server, &who, path).await?;
    Ok(Json(epoch.receipt(|| async move { job.contents().await }).await?))
}

/// The ledger, as far as it is durable.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/epochs/{epoch}/ledger", tag = "jobs",
    params(("id" = String, Path, description = "The job"), ("epoch" = u64, Path, description = "Which epoch")),
    responses(
        (status = 200, description = "The log", content_type = "application/vnd.fletch.ledger"),
        (status = 404, description = "No such job or epoch", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn ledger(State(server): State<Arc<Server>>, who: Principal, path: TwoPaths) -> Answer {
    let (_, epoch) = epoch_of(&server, &who, path).await?;
    let Some(len) = epoch.ledger().durable_len() else { return Err(JobError::Reopening.into()) };
    let at = epoch.ledger().path().to_owned();
    let failed = move |error| JobError::Io { path: at.clone(), error };
    let path = epoch.ledger().path().to_owned();
    let file = spawn_blocking(move || std::fs::File::open(path)).await.map_err(|_| JobError::TaskLost)?;
    let file = file.map_err(failed)?;
    let pieces = stream::try_unfold((file, len), |(file, left)| async move {
        if left == 0 {
            return Ok::<_, std::io::Error>(None);
        }
        let read = spawn_blocking(move || {
            let mut piece = BytesMut::zeroed(usize::try_from(left.min(LEDGER_READ_BYTES)).unwrap_or(0));
            (&file).read_exact(&mut piece).map(|()| (file, piece.freeze()))
        });
        let (file, piece) = read.await.map_err(std::io::Error::other)??;
        let left = left - piece.len() as u64;
        Ok(Some((piece, (file, left))))
    });
    let length = [(header::CONTENT_LENGTH, len.to_string())];
    Ok((KINDS, length, Body::from_stream(pieces)).into_response())
}
