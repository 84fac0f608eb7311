//! Planned moves: a running job goes to another server with its ledgers, and loses nothing.
//!
//! ```text
//! POST …/move, or a drain ─▶ stop the group's jobs ─▶ read their ledgers ─▶ etcd: another primary
//!                                                                 └▶ PUT /v1/peers/jobs/{id} ─▶ served there
//! ```
//! The other server is asked first whether it takes ledgers. The ranks wait for a moment. If this server dies
//! before the ledgers are there, they reclaim.

use super::{
    error::{ApiError, ApiResult},
    job_right::JobRight,
    jobs::{open_job, open_known},
    peers::PeerRead,
    request::{OnePath, parse_param, read_body, read_json},
};
use crate::{
    app::server::Server,
    cluster::{PeerOrder, groups::GroupError},
    tenancy::auth::{Principal, Role},
    training::jobs::MovedJob,
};
use axum::{
    Json,
    body::{Body, Bytes},
    extract::{Path, State},
    http::{Method, StatusCode},
};
use fletch_api::{Code, MoveJob, MovedJobs, Problem, routes};
use fletch_core::{Domain, MemberId};
use std::{sync::Arc, time::Duration};

/// How long the server that gets a job may take to open it.
const GIVE_WITHIN: Duration = Duration::from_secs(30);
/// How long that server may take to say that it takes jobs.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// How long that server waits for the news of etcd that it has the job.
const NEWS_WITHIN: Duration = Duration::from_secs(5);

/// Moves a job to another server of the cluster, while its ranks run.
///
/// The jobs that share its sweep move with it. Nothing is delivered twice: leases live on.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/move", tag = "jobs", request_body = MoveJob,
    params(("id" = String, Path, description = "Id of the job")),
    responses(
        (status = 200, description = "The other server has the jobs", body = MovedJobs),
        (status = 400, description = "No such member is up, or it has the job", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The tenant has no such job", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn post(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: OnePath,
    body: Body,
) -> ApiResult<Json<MovedJobs>> {
    let Path(id) = path?;
    open_job(&server, &principal, &id).await?;
    JobRight::begin(&server, &principal, &id)?.check()?;
    let ask: MoveJob = read_json(&server, &principal.tenant, body).await?;
    let to: MemberId = parse_param(&ask.to)?;
    if to == *server.cluster.own_id() {
        return Err(ApiError::bad_request(format!("server {to} has the job already")));
    }
    Ok(Json(MovedJobs { jobs: give(&server, id, to).await?, to: ask.to }))
}

/// Gives the groups of this server away, if it was taken out of the ring.
pub async fn give_drained(server: &Arc<Server>) {
    for (id, to) in server.groups.to_give() {
        match give(server, id, to.clone()).await {
            Ok(jobs) => tracing::info!(%to, jobs, "a drained server gave jobs away"),
            Err(error) => tracing::warn!(%to, %error, "a drained server keeps a job for now"),
        }
    }
}

/// Gives a job and those that share its group to a member. Returns how many. Goes on when the caller goes
/// away.
async fn give(server: &Arc<Server>, id: String, to: MemberId) -> ApiResult<u64> {
    let of = Arc::clone(server);
    let task = server.registry.context.tasks.spawn(async move { give_all(&of, &id, &to).await });
    task.await?
}

async fn give_all(server: &Server, id: &str, to: &MemberId) -> ApiResult<u64> {
    if server.cluster.view().incarnation_of(to).is_none() {
        return Err(GroupError::NoMember(to.to_string()).into());
    }
    // A server of an earlier release would have the jobs without their ledgers.
    let order = PeerOrder {
        method: Method::GET,
        path: routes::peer_job(id),
        domain: Domain::default_domain(),
        body: None,
    };
    if let Err(error) = server.cluster.order_one(to, &order, ANSWER_WITHIN).await {
        let told = format!("server {to} does not say that it takes jobs with their ledgers: {error}");
        let hint = "if it is of an earlier release, upgrade it first; `fletch cluster check` names its build";
        // No error that is tried again elsewhere: the others do not have the job.
        return Err(ApiError::new(Code::BadRequest, told, hint));
    }
    // One move at a time, and none while a job is restored here.
    let _one = server.reclaims.restoring.lock().await;
    // The ledgers stay where they are until the other server has them.
    let _still = server.groups.hold_still().await;
    let ids = server.groups.jobs_with(id);
    let mut taken = Vec::new();
    let mut failed = None;
    for id in &ids {
        match server.registry.take_out(id).await {
            Ok(moved) => taken.push(moved),
            Err(error) => failed = Some(ApiError::from(error)),
        }
    }
    if failed.is_none() {
        failed = server.groups.give(id, to).await.err().map(ApiError::from);
    }
    let put_back = || ids.iter().for_each(|id| server.registry.put_back(id));
    if let Some(error) = failed {
        put_back();
        return Err(error);
    }
    let mut unsent = None;
    for moved in &taken {
        let (id, domain) = (moved.record.id(), moved.record.domain.clone());
        let body = serde_json::to_vec(moved).map_err(|e| ApiError::internal(e.to_string()))?;
        let path = routes::peer_job(&id);
        let order = PeerOrder { method: Method::PUT, path, domain, body: Some(Bytes::from(body)) };
        if let Err(error) = server.cluster.order_one(to, &order, GIVE_WITHIN).await {
            tracing::error!(
                job = %moved.record.ask.name, %to, %error,
                "a job moved without its ledgers: its ranks say what they consumed; the ledgers stay here"
            );
            unsent = Some(moved.record.ask.name.to_string());
        }
    }
    put_back();
    server.groups.changed();
    match unsent {
        None => Ok(taken.len() as u64),
        Some(job) => {
            let told = format!("server {to} has job {job}, and did not take its ledgers");
            let hint = "its ranks bring the job along if they run; else load a saved state";
            Err(ApiError::new(Code::NotReady, told, hint))
        }
    }
}

/// Says that this server takes jobs of other servers with their ledgers. Earlier releases do not.
#[utoipa::path(
    get, path = "/v1/peers/jobs/{id}", tag = "peers",
    params(
        ("id" = String, Path, description = "Id of any job"),
        ("Fletch-Domain" = String, Header, description = "Any domain"),
        ("Fletch-View" = u64, Header, description = "Number of the view of the server that asks"),
    ),
    responses(
        (status = 204, description = "It takes jobs"),
        (status = 403, description = "The caller is no server of the cluster", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn takes(_asked: PeerRead) -> StatusCode {
    StatusCode::NO_CONTENT
}

/// Takes a job of another server, with its ledgers.
#[utoipa::path(
    put, path = "/v1/peers/jobs/{id}", tag = "peers",
    params(
        ("id" = String, Path, description = "Id of the job"),
        ("Fletch-Domain" = String, Header, description = "The domain of the job"),
        ("Fletch-View" = u64, Header, description = "Number of the view of the server that asks"),
    ),
    request_body(content_type = "application/json", description = "The job's record and its ledgers"),
    responses(
        (status = 204, description = "This server serves the job"),
        (status = 400, description = "The job is not the one of the path", body = Problem,
            content_type = "application/problem+json"),
        (status = 403, description = "The caller is no server of the cluster", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn take(
    State(server): State<Arc<Server>>,
    path: OnePath,
    asked: PeerRead,
    body: Body,
) -> ApiResult<StatusCode> {
    let Path(id) = path?;
    let most = usize::try_from(server.limits.job_bytes).unwrap_or(usize::MAX);
    let received = read_body(&server, asked.tenant(), body, most, "raise limits.job_bytes").await?;
    let (moved, _memory): (MovedJob, _) = received.json(&server, asked.tenant())?;
    let MovedJob { record, epochs } = moved;
    if record.id() != id || record.domain != *asked.domain() {
        return Err(ApiError::bad_request("the record is that of another job"));
    }
    let (domain, tenant) = (record.domain.clone(), record.tenant.clone());
    let principal = Principal { domain: domain.clone(), tenant: tenant.clone(), role: Role::User };
    let _one = server.reclaims.restoring.lock().await;
    server.groups.await_given(&domain, &tenant, &id, NEWS_WITHIN).await?;
    let job = open_known(&server, &principal, record).await?;
    let ledgers = epochs.into_iter().map(|of| (of.epoch, of.ledger.0.to_vec())).collect();
    job.adopt_ledgers(ledgers).await?;
    server.groups.revived(&server.registry, &id).await?;
    server.reclaims.forget(&id, false);
    Ok(StatusCode::NO_CONTENT)
}
