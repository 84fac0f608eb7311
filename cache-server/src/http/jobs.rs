//! Declared jobs.

use super::{
    access::access,
    datasets::{entry, source_of},
    json, long, of_json,
    problem::{Answer, Fault},
};
use crate::{
    auth::Principal,
    epochs::JobError,
    jobs::{OpenJob, is_long},
    server::Server,
    versions::{Source, Sources},
};
use axum::{
    Json,
    body::Body,
    extract::{Path, State, rejection::PathRejection},
    http::{StatusCode, header},
    response::IntoResponse as _,
};
use fletch_api::{Code, Job, JobList, Problem, StartJob, WorldSpec, jobs::JOB_BODY_BYTES_MAX, routes};
use fletch_core::{LayoutId, Root};
use std::sync::Arc;

type OnePath = Result<Path<String>, PathRejection>;

/// The ways to a version's bytes, and the one in a layout.
async fn ways(
    server: &Server,
    who: &Principal,
    root: Root,
    layout: Option<LayoutId>,
) -> Answer<(Arc<Sources>, Arc<Source>)> {
    let sources = access(server, who, root).await?;
    let source = match layout {
        Some(layout) => server.versions.in_layout(&sources, layout).await?,
        None => Arc::clone(&sources.first),
    };
    Ok((sources, source))
}

/// A declared job of the tenant, opened.
pub async fn opened(server: &Server, who: &Principal, id: &str) -> Answer<Arc<OpenJob>> {
    let (domain, tenant, all) = (&who.domain, &who.tenant, &server.registry);
    if let Some(open) = all.opened(domain, tenant, id)? {
        if open.sources.stand() {
            return Ok(open);
        }
        all.close(id, &open).await;
    }
    let (root, layout) = all.place(domain, tenant, id)?;
    let (sources, source) = ways(server, who, root, Some(layout)).await?;
    Ok(all.get(domain, tenant, id, &sources, &source).await?)
}

/// Declares a job; the same again is that job.
#[utoipa::path(
    post, path = "/v1/jobs", tag = "jobs", request_body = StartJob,
    responses(
        (status = 201, description = "Declared; Location names it", body = Job),
        (status = 200, description = "Was declared so already", body = Job),
        (status = 400, description = "No such plan or world", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such dataset or version in this domain", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "A job of that name has other settings", body = Problem, content_type = "application/problem+json"),
        (status = 413, description = "The request is too long", body = Problem, content_type = "application/problem+json"),
        (status = 429, description = "As many jobs are declared as may be", body = Problem, content_type = "application/problem+json"),
        (status = 504, description = "A long request came too slowly", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn start(State(server): State<Arc<Server>>, who: Principal, body: Body) -> Answer {
    let (bytes, held) = long::read(&server, body, JOB_BODY_BYTES_MAX, "ask for less").await?;
    let ask: StartJob = of_json(&bytes)?;
    drop(bytes);
    // What is short keeps nobody from being read while an origin is slow.
    let permit = held.filter(|_| is_long(&ask));
    if ask.dataset.is_some() == ask.root.is_some() {
        return Err(Fault::bad("a job names a dataset, or a root, and not both"));
    }
    let (sources, source) = match server.registry.declared(&who.domain, &who.tenant, ask.name.as_str()) {
        // What its names meant when it was declared.
        Some((root, layout)) => ways(&server, &who, root, Some(layout)).await?,
        None => {
            let root = match (&ask.dataset, ask.root) {
                (Some(name), _) => {
                    let dataset = entry(&server, &who.domain, Ok(Path(name.to_string())))?;
                    let version = ask.version.as_deref().unwrap_or("latest");
                    let (source, _) = source_of(&server, &dataset, version).await?;
                    (source.version.root(), ask.layout.or(Some(source.version.layout())))
                }
                (None, Some(root)) => (root, ask.layout),
                (None, None) => return Err(Fault::not_found()),
            };
            ways(&server, &who, root.0, root.1).await?
        }
    };
    let (job, new) = server.registry.declare(&who.domain, &who.tenant, ask, &sources, &source).await?;
    drop(permit);
    let job = job.view().await?;
    let status = if new { StatusCode::CREATED } else { StatusCode::OK };
    let at = [(header::LOCATION, routes::job(&job.id))];
    Ok((status, at, Json(job)).into_response())
}

/// The tenant's jobs.
#[utoipa::path(
    get, path = "/v1/jobs", tag = "jobs",
    responses((status = 200, description = "By name", body = JobList))
)]
pub async fn list(State(server): State<Arc<Server>>, who: Principal) -> Json<JobList> {
    Json(JobList { jobs: server.registry.list(&who.domain, &who.tenant) })
}

/// One job, with its epochs.
#[utoipa::path(
    get, path = "/v1/jobs/{id}", tag = "jobs",
    params(("id" = String, Path, description = "Its id")),
    responses(
        (status = 200, description = "As it is now", body = Job),
        (status = 404, description = "None of that id of this tenant", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn get(State(server): State<Arc<Server>>, who: Principal, path: OnePath) -> Answer<Json<Job>> {
    let Path(id) = path.map_err(|e| Fault::bad(e.body_text()))?;
    Ok(Json(opened(&server, &who, &id).await?.view().await?))
}

/// Changes who shares a job's steps, in this epoch and all later ones.
#[utoipa::path(
    put, path = "/v1/jobs/{id}/world", tag = "jobs", request_body = WorldSpec,
    params(("id" = String, Path, description = "Its id")),
    responses(
        (status = 200, description = "It is so now", body = Job),
        (status = 400, description = "No such world", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "None of that id of this tenant", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "A bucketed epoch is in the middle of a step, or its batch or tail would change", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn world(
    State(server): State<Arc<Server>>,
    who: Principal,
    path: OnePath,
    body: Body,
) -> Answer<Json<Job>> {
    let Path(id) = path.map_err(|e| Fault::bad(e.body_text()))?;
    let world: WorldSpec = json(&server, body).await?;
    let job = opened(&server, &who, &id).await?;
    job.change_world(world).await?;
    Ok(Json(job.view().await?))
}

/// Forgets a job and its ledgers.
#[utoipa::path(
    delete, path = "/v1/jobs/{id}", tag = "jobs",
    params(("id" = String, Path, description = "Its id")),
    responses(
        (status = 204, description = "Forgotten"),
        (status = 404, description = "None of that id of this tenant", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn delete(State(server): State<Arc<Server>>, who: Principal, path: OnePath) -> Answer<StatusCode> {
    let Path(id) = path.map_err(|e| Fault::bad(e.body_text()))?;
    server.registry.delete(&who.domain, &who.tenant, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

impl From<JobError> for Fault {
    fn from(e: JobError) -> Self {
        if e.code() == Code::Internal {
            tracing::error!(error = %e, "a job failed");
        }
        Fault::new(e.code(), e.to_string(), e.hint())
    }
}
