//! Declared jobs: declares, lists, opens and deletes them.

use super::{
    access::access,
    allocation::share_of,
    datasets::{find_dataset, resolve_version},
    error::{ApiError, ApiResult},
    job_right::JobRight,
    request::{OnePath, read_body, read_json},
};
use crate::{
    admin::overview,
    app::server::Server,
    cluster::groups::{KnownJob, NewJob},
    data::versions::{Source, Sources},
    tenancy::{accounting::CostsOf, auth::Principal},
    training::jobs::{OpenJob, Record},
};
use axum::{
    Json,
    body::Body,
    extract::{Path, Query, State, rejection::QueryRejection},
    http::{StatusCode, header},
    response::IntoResponse as _,
};
use fletch_api::{Code, GateWait, Job, JobList, Problem, StartJob, WorldSpec, routes};
use fletch_bounds::Gate;
use fletch_core::{DatasetName, LayoutId, Root};
use serde::Deserialize;
use std::{sync::Arc, time::Duration};

/// Returns the sources of a version, and the one of a layout.
async fn sources_of(
    server: &Server,
    principal: &Principal,
    root: Root,
    layout: Option<LayoutId>,
    dataset: Option<&DatasetName>,
) -> ApiResult<(Arc<Sources>, Arc<Source>)> {
    let sources = access(server, principal, root, dataset).await?;
    sources.check_sealed()?;
    let source = match layout {
        Some(layout) => server.versions.in_layout(&sources, layout).await?,
        None => Arc::clone(&sources.first),
    };
    Ok((sources, source))
}

/// Opens a declared job of the caller's tenant.
///
/// # Errors
/// [`fletch_api::Code::NotFound`]; those of the registry, the origin and the tables.
pub async fn open_job(server: &Server, principal: &Principal, id: &str) -> ApiResult<Arc<OpenJob>> {
    let (domain, tenant, registry) = (&principal.domain, &principal.tenant, &server.registry);
    server.groups.check(domain, tenant, id)?;
    if let Some(open) = registry.opened(domain, tenant, id)? {
        if open.sources.is_registered() {
            return Ok(open);
        }
        registry.close(id, &open).await;
    }
    let place = registry.place(domain, tenant, id)?;
    let (root, layout) = (place.root, Some(place.layout));
    let (sources, source) = sources_of(server, principal, root, layout, Some(&place.dataset)).await?;
    Ok(registry.get(domain, tenant, id, &sources, &source).await?)
}

/// Opens a declared job that gets a state in place of its ledgers. A job whose server is gone comes to this
/// server. Returns whether it came.
///
/// # Errors
/// Those of [`open_job`], and of the groups.
pub async fn open_to_replace(
    server: &Server,
    principal: &Principal,
    id: &str,
) -> ApiResult<(Arc<OpenJob>, bool)> {
    let (domain, tenant) = (&principal.domain, &principal.tenant);
    let Some(known) = server.groups.take_over(domain, tenant, id).await? else {
        return Ok((open_job(server, principal, id).await?, false));
    };
    Ok((open_known(server, principal, known.whole()?).await?, true))
}

/// Opens a job that the cluster knows, and of which this server has no ledger yet.
///
/// # Errors
/// Those of the registry, the origin and the tables.
pub async fn open_known(server: &Server, principal: &Principal, record: Record) -> ApiResult<Arc<OpenJob>> {
    let (domain, tenant) = (&principal.domain, &principal.tenant);
    let (root, layout) = (record.root, Some(record.layout));
    let (sources, source) = sources_of(server, principal, root, layout, Some(&record.dataset)).await?;
    let known = |_| async { Ok(()) };
    Ok(server.registry.declare((domain, tenant), record.ask, &sources, &source, known).await?.0)
}

/// Returns a job as the API shows it, with its share of the disk and its waits.
///
/// # Errors
/// What a ledger says.
pub async fn view(server: &Server, job: &Arc<OpenJob>) -> ApiResult<Job> {
    let mut shown = job.view().await?;
    shown.share = share_of(server, job);
    shown.doing = Some(overview::job_doing(server, &shown.id));
    let costs = server.accounts.costs.find(&CostsOf {
        domain: job.sources.domain.clone(),
        tenant: job.setup.tenant.clone(),
        job: job.name(),
        dataset: job.sources.dataset().clone(),
    });
    if let Some(costs) = costs {
        let wait = |(gate, time): (Gate, Duration)| GateWait {
            gate: gate.as_str().to_owned(),
            seconds: time.as_secs_f64(),
        };
        shown.waits = costs.gates().into_iter().map(wait).collect();
    }
    Ok(shown)
}

/// Query of [`start`].
#[derive(Debug, Deserialize)]
pub struct StartQuery {
    #[serde(default)]
    describe: bool,
}

/// Declares a job.
///
/// Declaring the same name with the same settings again returns that job. A tag is resolved once, when the
/// job is declared.
#[utoipa::path(
    post, path = "/v1/jobs", tag = "jobs", request_body = StartJob,
    params(("describe" = Option<bool>, Query,
        description = "Answer 202 in place of 503 if the server that has the job is away")),
    responses(
        (status = 201, description = "The job is declared. `Location` has its URL", body = Job),
        (status = 200, description = "The same job was declared before", body = Job),
        (status = 202, description = "The server that has the job is away, and `describe` is true: the job \
            as it was declared, without its epochs", body = Job),
        (status = 307, description = "Another server of the cluster has the job, or is to have it. \
            `Location` is the request there. All routes of a job answer so", body = Problem,
            content_type = "application/problem+json"),
        (status = 400,
            description = "The request is not valid, for example its plan or its world", body = Problem,
            content_type = "application/problem+json"),
        (status = 404,
            description = "The domain has no such dataset, or the dataset has no such \
            version", body = Problem,
            content_type = "application/problem+json"),
        (status = 409, description = "A job of that name exists with other settings", body = Problem,
            content_type = "application/problem+json"),
        (status = 413, description = "The request's body is too long", body = Problem,
            content_type = "application/problem+json"),
        (status = 429, description = "The tenant is at its limit of declared jobs", body = Problem,
            content_type = "application/problem+json"),
        (status = 507, description = "The job records and ledgers of the tenant are at their limit",
            body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The server that has the job is away (`job_waits`): all routes of a job \
            answer so. Or etcd is away, and the job is not declared", body = Problem,
            content_type = "application/problem+json"),
        (status = 504, description = "The client sent a long body too slowly", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn start(
    State(server): State<Arc<Server>>,
    principal: Principal,
    query: Result<Query<StartQuery>, QueryRejection>,
    body: Body,
) -> ApiResult {
    let Query(query) = query?;
    let hint = "send a shorter plan, or raise limits.job_bytes";
    let most = usize::try_from(server.limits.job_bytes).unwrap_or(usize::MAX);
    let received = read_body(&server, &principal.tenant, body, most, hint).await?;
    // The memory of the parsed plan is held until the job is declared.
    let (request, memory): (StartJob, _) = received.json(&server, &principal.tenant)?;
    if request.dataset.is_some() == request.root.is_some() {
        return Err(ApiError::bad_request(
            "a job names either a dataset or a root; this request names both or none",
        ));
    }
    let (domain, tenant) = (&principal.domain, &principal.tenant);
    let known = Record::id_of(domain, tenant, request.name.as_str());
    if let Err(error) = server.groups.check(domain, tenant, &known) {
        let error = ApiError::from(error);
        return match server.groups.known(domain, tenant, &known) {
            Some(known) if query.describe && error.code() == Code::JobWaits => {
                let job = describe(&server, &principal, known, request).await?;
                Ok((StatusCode::ACCEPTED, Json(job)).into_response())
            }
            _ => Err(error),
        };
    }
    let (sources, source) =
        match server.registry.declared(&principal.domain, &principal.tenant, request.name.as_str()) {
            // The job keeps the version that its tag named when it was declared.
            Some(place) => {
                let (root, layout) = (place.root, Some(place.layout));
                sources_of(&server, &principal, root, layout, Some(&place.dataset)).await?
            }
            None => {
                let root = match (&request.dataset, request.root) {
                    (Some(name), _) => {
                        let dataset = find_dataset(&server, &principal.domain, name.as_str())?;
                        let version = request.version.as_deref().unwrap_or("latest");
                        let (source, _) = resolve_version(&server, &dataset, version).await?;
                        (source.version.root(), request.layout.or(Some(source.version.layout())))
                    }
                    (None, Some(root)) => (root, request.layout),
                    (None, None) => return Err(ApiError::not_found()),
                };
                sources_of(&server, &principal, root.0, root.1, request.dataset.as_ref()).await?
            }
        };
    // After the access check: what the answer says depends on the version.
    server.groups.check_new(&NewJob {
        domain,
        tenant,
        name: request.name.as_str(),
        order: request.order,
        root: source.version.root(),
        layout: source.version.layout(),
    })?;
    let groups = Arc::clone(&server.groups);
    let record = move |job| async move { groups.record(job).await };
    let (job, new) = server.registry.declare((domain, tenant), request, &sources, &source, record).await?;
    drop(memory);
    let job = view(&server, &job).await?;
    let status = if new { StatusCode::CREATED } else { StatusCode::OK };
    let at = [(header::LOCATION, routes::job(&job.id))];
    Ok((status, at, Json(job)).into_response())
}

/// Returns a job whose server is away, as it was declared.
async fn describe(
    server: &Server,
    principal: &Principal,
    known: KnownJob,
    request: StartJob,
) -> ApiResult<Job> {
    let (root, layout) = (known.record.root, Some(known.record.layout));
    let (sources, source) = sources_of(server, principal, root, layout, Some(&known.record.dataset)).await?;
    let KnownJob { record, is_long, .. } = known;
    Ok(server.registry.describe((record, is_long), request, &sources, &source).await?)
}

/// Lists the declared jobs of the caller's tenant. In a cluster, those of the server that is asked, and those
/// whose server is away.
#[utoipa::path(
    get, path = "/v1/jobs", tag = "jobs",
    responses((status = 200, description = "The jobs, sorted by name", body = JobList))
)]
pub async fn list(State(server): State<Arc<Server>>, principal: Principal) -> Json<JobList> {
    let (domain, tenant) = (&principal.domain, &principal.tenant);
    let jobs = server.registry.list(domain, tenant);
    let mut waiting = server.groups.waiting(|d, t| d == domain && t == tenant);
    for job in &mut waiting {
        job.waits_for = server.reclaims.waits_for(&job.id);
    }
    Json(JobList { jobs, waiting })
}

/// Returns a job and its epochs.
#[utoipa::path(
    get, path = "/v1/jobs/{id}", tag = "jobs",
    params(("id" = String, Path, description = "Id of the job")),
    responses(
        (status = 200, description = "The job", body = Job),
        (status = 404, description = "The tenant has no job with that id", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn get(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: OnePath,
) -> ApiResult<Json<Job>> {
    let Path(id) = path?;
    let job = open_job(&server, &principal, &id).await?;
    Ok(Json(view(&server, &job).await?))
}

/// Probes a job: its next samples come from the cache, until its steps show how fast it is if it waits for no
/// origin.
///
/// What it found stands in `benefit.probe` of the job. Later samples of the epoch come from the origin
/// instead, so the job reads as much from there as without a probe.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/probe", tag = "jobs",
    params(("id" = String, Path, description = "Id of the job")),
    responses(
        (status = 200, description = "The job, which is probed from now on", body = Job),
        (status = 400, description = "The job does not train under the order `substitute` now, or too few \
            of the samples that its epoch needs are cached", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The tenant has no job with that id", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn probe(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: OnePath,
) -> ApiResult<Json<Job>> {
    let Path(id) = path?;
    let job = open_job(&server, &principal, &id).await?;
    job.probe()?;
    Ok(Json(view(&server, &job).await?))
}

/// Changes the world of a job: how many ranks share its steps.
///
/// The leases of the open epoch become void, and the new ranks share its unacknowledged samples. Later epochs
/// begin in the new world.
#[utoipa::path(
    put, path = "/v1/jobs/{id}/world", tag = "jobs", request_body = WorldSpec,
    params(("id" = String, Path, description = "Id of the job")),
    responses(
        (status = 200, description = "The job in its new world", body = Job),
        (status = 400, description = "The world is not valid for the job", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The tenant has no job with that id", body = Problem,
            content_type = "application/problem+json"),
        (status = 409, description = "A bucketed epoch is in the middle of a step, or the change would \
            alter its batch or tail", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn world(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: OnePath,
    body: Body,
) -> ApiResult {
    let Path(id) = path?;
    let job = open_job(&server, &principal, &id).await?;
    let right = JobRight::begin(&server, &principal, &id)?;
    let world: WorldSpec = read_json(&server, &principal.tenant, body).await?;
    job.change_world(world).await?;
    server.groups.changed();
    right.answer(Json(view(&server, &job).await?))
}

/// Deletes a job and its ledgers.
#[utoipa::path(
    delete, path = "/v1/jobs/{id}", tag = "jobs",
    params(("id" = String, Path, description = "Id of the job")),
    responses(
        (status = 204, description = "The job is deleted"),
        (status = 404, description = "The tenant has no job with that id", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn delete(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: OnePath,
) -> ApiResult<StatusCode> {
    let Path(id) = path?;
    server.groups.delete(&server.registry, &principal.domain, &principal.tenant, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}
