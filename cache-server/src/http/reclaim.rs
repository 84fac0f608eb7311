//! Reclaim: the ranks of a job whose server is lost bring it to this server, with what they consumed.

use super::{
    admission::acquire_read_permit,
    epochs::{EpochPath, LEDGER_HEADERS, job_to_change},
    error::{ApiError, ApiResult},
    job_right::JobRight,
    jobs::{open_job, open_known},
    request::{OnePath, read_body, read_json},
    response_body::{Piece, body_of_piece},
};
use crate::{
    app::server::Server,
    cluster::groups::KnownJob,
    tenancy::auth::Principal,
    training::{
        epochs::{JobError, world_spec},
        jobs::{Reclaims, Record},
    },
};
use axum::{
    Json,
    body::{Body, Bytes},
    extract::{Path, Query, State, rejection::QueryRejection},
    response::IntoResponse as _,
};
use fletch_api::{Code, LostRank, Problem, Reclaim, Reclaimed, Visitation};
use serde::Deserialize;
use std::sync::Arc;

/// Query of [`record`].
#[derive(Debug, Deserialize)]
pub struct RecordQuery {
    rank: u32,
}

/// Returns what a rank acknowledged in an epoch since its present world began.
///
/// A process that begins to read as this rank keeps the record, and adds what it acknowledges itself. If the
/// server is lost, it reclaims with it.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/epochs/{epoch}/record", tag = "jobs",
    params(
        ("id" = String, Path, description = "Id of the job"),
        ("epoch" = u64, Path, description = "Number of the epoch, from 0"),
        ("rank" = u32, Query, description = "The rank"),
    ),
    responses(
        (status = 200, description = "The record: a ledger with the events of this rank",
            content_type = "application/vnd.fletch.ledger"),
        (status = 400, description = "The world has no such rank", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The tenant has no such job, or the epoch has not begun", body = Problem,
            content_type = "application/problem+json"),
        (status = 409, description = "The server is in no cluster, so nobody needs a record", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn record(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: EpochPath,
    query: Result<Query<RecordQuery>, QueryRejection>,
) -> ApiResult {
    let Query(query) = query?;
    if server.groups.stats().is_none() {
        let told = "this server is in no cluster: its ledger is all there is of an epoch";
        return Err(ApiError::new(Code::Conflict, told, "no rank needs to keep a record"));
    }
    // It is in memory until the client has read it.
    let permit = acquire_read_permit(&server, &principal.tenant)?;
    let (job, number, right) = job_to_change(&server, &principal, path).await?;
    let made = job.epoch(number).await?.rank_record(query.rank).await?;
    let len = made.len() as u64;
    let body = body_of_piece(&server, Piece::Framing(Bytes::from(made)), len, Some(permit));
    right.answer((LEDGER_HEADERS, body))
}

/// Says what a rank's process consumed, for a job whose server is lost.
///
/// The job comes to this server, or to the one that the answer 307 names. It goes on when the processes of
/// all its ranks have said so: until then the answer names the missing ones. While the job's server may come
/// back, the answer is 503 (`job_waits`). If the job is served, nothing changes.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/reclaim", tag = "jobs", request_body = Reclaim,
    params(("id" = String, Path, description = "Id of the job")),
    responses(
        (status = 200, description = "The server noted it, or the job is served", body = Reclaimed),
        (status = 400, description = "A record cannot be read, or contradicts that of another rank",
            body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "The tenant has no such job", body = Problem,
            content_type = "application/problem+json"),
        (status = 409, description = "Another process has the rank; or the job was declared with lists, and \
            the request has no declaration; or its visitation is `at-most-once`, and the process has no \
            record", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn post(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: OnePath,
    body: Body,
) -> ApiResult {
    let Path(id) = path?;
    let known = server.groups.take_over(&principal.domain, &principal.tenant, &id).await;
    let known = known.map_err(ApiError::from);
    if let Some(error) = known.as_ref().err().filter(|e| e.code() != Code::JobElsewhere) {
        return Err(error.clone());
    }
    // Also of a request that belongs elsewhere: a client that still sends may miss the answer.
    let most = usize::try_from(server.limits.job_bytes).unwrap_or(usize::MAX);
    let hint = "raise limits.job_bytes, or load a saved state of the job";
    let received = read_body(&server, &principal.tenant, body, most, hint).await?;
    let (ask, _memory): (Reclaim, _) = received.json(&server, &principal.tenant)?;
    let Some(known) = known? else {
        return served(&server, &principal, &id, ask.rank).await;
    };
    check_visitation(&known, ask.unserved)?;
    let term = known.term;
    let record = record_of(known, &ask)?;
    let missing = server.reclaims.report(&id, &record, &ask)?;
    go_on(&server, &principal, &id, (record, term), (ask.rank, missing)).await
}

/// Says that the process of a rank is lost, too, so that its job need not wait for it.
///
/// What only that process knew to be consumed is delivered again.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/lost", tag = "jobs", request_body = LostRank,
    params(("id" = String, Path, description = "Id of the job")),
    responses(
        (status = 200, description = "The job waits for this rank no longer", body = Reclaimed),
        (status = 400, description = "The world has no such rank", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The tenant has no such job", body = Problem,
            content_type = "application/problem+json"),
        (status = 409, description = "The job waits for no rank: it is served, or was declared with lists. \
            Or its visitation is `at-most-once`",
            body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn lost(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: OnePath,
    body: Body,
) -> ApiResult {
    let Path(id) = path?;
    let known = server.groups.take_over(&principal.domain, &principal.tenant, &id).await?;
    let ask: LostRank = read_json(&server, &principal.tenant, body).await?;
    let Some(known) = known else {
        let job = open_job(&server, &principal, &id).await?;
        let told = format!("job {} waits for no rank: this server serves it", job.name());
        return Err(ApiError::new(Code::Conflict, told, "`fletch jobs show NAME` shows its ranks"));
    };
    let waits_for = server.reclaims.waits_for(&id);
    if !waits_for.is_empty() && !waits_for.contains(&ask.rank) {
        let told = format!("the job does not wait for rank {}: {waits_for:?} are missing", ask.rank);
        return Err(ApiError::new(Code::BadRank, told, "`fletch jobs list` names the missing ranks"));
    }
    check_visitation(&known, true)?;
    let term = known.term;
    let record = known.whole()?;
    let missing = server.reclaims.lost(&id, &record, ask.rank)?;
    go_on(&server, &principal, &id, (record, term), (ask.rank, missing)).await
}

/// Checks that a job may go on. Under `at-most-once` nothing comes again, so what each rank consumed must be
/// known.
fn check_visitation(known: &KnownJob, is_unknown: bool) -> ApiResult<()> {
    if !is_unknown || known.record.ask.visitation != Visitation::AtMostOnce {
        return Ok(());
    }
    let told = "the visitation is at-most-once, and nobody knows which samples the rank consumed";
    let hint = "load a saved state of the job (`fletch jobs restore`), or delete the job";
    Err(ApiError::new(Code::Conflict, told, hint))
}

/// Returns the record of a job, with the lists that the request has.
fn record_of(known: KnownJob, ask: &Reclaim) -> ApiResult<Record> {
    let Some(declaration) = ask.declaration.as_ref().filter(|_| known.is_long) else {
        return Ok(known.whole()?);
    };
    let (name, world) = (known.record.ask.name.clone(), known.record.ask.world);
    if declaration.name != name {
        return Err(JobError::Differs { name: name.to_string(), what: "name" }.into());
    }
    let mut declared = (**declaration).clone();
    declared.world = world;
    Ok(Record { ask: declared, ..known.record })
}

/// Serves a job if no rank is missing. Answers which ranks are.
async fn go_on(
    server: &Arc<Server>,
    principal: &Principal,
    id: &str,
    (mut record, term): (Record, u64),
    (rank, missing): (u32, Vec<u32>),
) -> ApiResult {
    if !missing.is_empty() {
        return Ok(Json(Reclaimed { waits_for: missing, ..Reclaimed::default() }).into_response());
    }
    let reclaims: &Reclaims = &server.reclaims;
    let _one = reclaims.restoring.lock().await;
    // Another request may have done it meanwhile.
    if server.groups.take_over(&principal.domain, &principal.tenant, id).await?.is_none() {
        return served(server, principal, id, rank).await;
    }
    let Some(all) = reclaims.complete(id) else {
        let waits_for = reclaims.waits_for(id);
        return Ok(Json(Reclaimed { waits_for, ..Reclaimed::default() }).into_response());
    };
    if let Some(world) = all.world {
        record.ask.world = world_spec(world);
    }
    let job = open_known(server, principal, record).await?;
    // One of the ranks may have known of a change that the others did not.
    job.restore_epochs(all, term).await.inspect_err(|_| reclaims.clear(id))?;
    server.groups.revived(&server.registry, id).await?;
    reclaims.forget(id, true);
    served(server, principal, id, rank).await
}

async fn served(server: &Arc<Server>, principal: &Principal, id: &str, rank: u32) -> ApiResult {
    let job = open_job(server, principal, id).await?;
    let right = JobRight::begin(server, principal, id)?;
    let (leases, unknown) = (job.leases_of(rank), job.unknown_ranks());
    right.answer(Json(Reclaimed { waits_for: Vec::new(), leases, unknown }))
}
