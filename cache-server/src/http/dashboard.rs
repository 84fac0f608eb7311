//! What the admin page reads: the state now, as one answer or as a stream of events, and its history.
//!
//! The stream ends when the server stops, and when its token or role no longer allows it.

use super::{
    admission::{authenticate, peer_of},
    datasets::find_dataset,
    error::{ApiError, ApiResult},
    jobs::{open_job, view},
    request::{OnePath, TwoPaths, parse_param},
};
use crate::{
    admin::{
        dashboard::{PrometheusError, Range},
        overview::{self, Viewer},
    },
    app::server::{Phase, Server},
    tenancy::{
        auth::{Peer, Principal},
        mounts::MountOwner,
        state::RegistrationHandle,
        tenants::{FairPermit, TenantLimit},
    },
    training::jobs::OpenJob,
};
use axum::{
    Json,
    extract::{Path, Query, State, rejection::QueryRejection},
    http::{Extensions, HeaderMap, header},
    response::{
        IntoResponse as _,
        sse::{Event, Sse},
    },
};
use fletch_api::{
    Code, EpochReceipt, Problem,
    dashboard::{
        Dashboard, DashboardDatasetDetail, DashboardHistory, DashboardJob, DashboardJobDetail, ROWS_DEFAULT,
        ROWS_MAX,
    },
};
use fletch_core::{DatasetName, Domain, Root, TagName};
use futures::{
    StreamExt as _,
    stream::{self, BoxStream},
};
use serde::Deserialize;
use std::{
    convert::Infallible,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{task::spawn_blocking, time::sleep};

/// The time between two events of a stream.
const EVENT_EVERY: Duration = Duration::from_secs(2);
/// Each so many rounds of events have the history, too.
const HISTORY_EACH: u64 = 5;
/// The most tags whose versions are looked up for one dataset.
const TAGS_MAX: usize = 20;

impl From<PrometheusError> for ApiError {
    fn from(e: PrometheusError) -> Self {
        if e == PrometheusError::Busy {
            return ApiError::new(Code::Overloaded, e.to_string(), "wait and ask again");
        }
        let hint = "check that Prometheus runs at dashboard.prometheus_url of the server's settings";
        ApiError::new(Code::PrometheusFailed, e.to_string(), hint)
    }
}

/// How many rows the tables have.
#[derive(Debug, Deserialize)]
pub struct RowsQuery {
    rows: Option<usize>,
}

impl RowsQuery {
    fn rows(&self) -> usize {
        self.rows.unwrap_or(ROWS_DEFAULT).min(ROWS_MAX)
    }
}

/// The range of a history.
#[derive(Debug, Deserialize)]
pub struct RangeQuery {
    range: Option<String>,
}

fn viewer(server: &Server, principal: Principal, peer: Peer) -> Viewer {
    let owner = MountOwner::of(&principal, peer, server.auth.needs_token());
    Viewer { principal, owner }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> ApiResult<T> {
    spawn_blocking(work).await.map_err(|_| ApiError::internal("a task was lost"))
}

/// Returns what the admin page shows: the state of the server, its datasets and jobs, and what is wrong.
///
/// An admin sees all domains and tenants. Every other role sees the datasets of its domain, the jobs of its
/// tenant and its own mounts.
#[utoipa::path(
    get, path = "/v1/dashboard", tag = "dashboard",
    params(("rows" = Option<u64>, Query, description = "Rows of each table, at most 2000; 100 by default")),
    responses((status = 200, description = "The state now", body = Dashboard))
)]
pub async fn get(
    State(server): State<Arc<Server>>,
    principal: Principal,
    peer: Peer,
    query: Result<Query<RowsQuery>, QueryRejection>,
) -> ApiResult<Json<Dashboard>> {
    let (rows, viewer) = (query?.rows(), viewer(&server, principal, peer));
    Ok(Json(blocking(move || overview::dashboard(&server, &viewer, rows)).await?))
}

/// Returns what the admin page shows, as server-sent events.
///
/// The first event is `history`, the last hour. Then `now` comes every two seconds, and `history` every ten
/// seconds. An event `end` says that the token no longer allows the stream.
#[utoipa::path(
    get, path = "/v1/dashboard/events", tag = "dashboard",
    params(("rows" = Option<u64>, Query, description = "Rows of each table, at most 2000; 100 by default")),
    responses(
        (status = 200, description = "The events", body = String, content_type = "text/event-stream"),
        (status = 429, description = "Too many pages are open", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn events(
    State(server): State<Arc<Server>>,
    principal: Principal,
    extensions: Extensions,
    headers: HeaderMap,
    query: Result<Query<RowsQuery>, QueryRejection>,
) -> ApiResult {
    let permit = server.tenants.page_streams.try_acquire(&principal.tenant, 1).map_err(|_| {
        server.tenants.count_refusal(&principal.tenant, TenantLimit::PageStreams);
        ApiError::new(Code::Overloaded, "too many admin pages are open", "close one, and reload the page")
    })?;
    let rows = query?.rows();
    let stream = EventStream { server, headers, peer: peer_of(&extensions), rows, sent: 0, _permit: permit };
    let events: BoxStream<'static, Result<Event, Infallible>> = stream.events();
    let mut response = Sse::new(events).into_response();
    response.headers_mut().insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    Ok(response)
}

/// A stream of events to one page.
struct EventStream {
    server: Arc<Server>,
    headers: HeaderMap,
    peer: Peer,
    rows: usize,
    /// The events that were sent.
    sent: u64,
    _permit: FairPermit,
}

impl EventStream {
    fn events(self) -> BoxStream<'static, Result<Event, Infallible>> {
        let rounds = stream::unfold(Some(self), |state| async move {
            let mut state = state?;
            match state.round().await {
                Some(events) => Some((events, Some(state))),
                None => Some((vec![Event::default().event("end").data("{}")], None)),
            }
        });
        rounds.flat_map(stream::iter).map(Ok).boxed()
    }

    /// Waits until events are due, and returns them. `None`: the stream is over.
    async fn round(&mut self) -> Option<Vec<Event>> {
        if self.sent > 0 {
            let mut changes = self.server.access_changes.subscribe();
            let due = sleep(EVENT_EVERY);
            tokio::pin!(due);
            loop {
                tokio::select! {
                    () = &mut due => break,
                    changed = changes.changed() => {
                        if changed.is_err() || self.server.phase() == Phase::Draining {
                            return None;
                        }
                    }
                }
            }
        }
        // The token may have been revoked, and its role may have changed.
        let principal = authenticate(&self.server, &self.headers, self.peer).ok()?;
        // The user of the server may have handed over credentials since.
        self.server.credentials.check_reader(self.peer).ok()?;
        if !principal.role.may_read() || self.server.phase() == Phase::Draining {
            return None;
        }
        let (server, rows) = (Arc::clone(&self.server), self.rows);
        let viewer = viewer(&server, principal, self.peer);
        let has_history = self.sent.is_multiple_of(HISTORY_EACH);
        self.sent += 1;
        let made = move || {
            let history = has_history.then(|| hour(&server, &viewer));
            (history, overview::dashboard(&server, &viewer, rows))
        };
        let (history, now) = spawn_blocking(made).await.ok()?;
        let history = history.and_then(|h| Event::default().event("history").json_data(h).ok());
        let now = Event::default().event("now").json_data(now).ok();
        Some(history.into_iter().chain(now).collect())
    }
}

fn hour(server: &Server, viewer: &Viewer) -> DashboardHistory {
    let domain = (!viewer.sees_all()).then_some(&viewer.principal.domain);
    server.dashboard.history().hour(domain)
}

/// Returns numbers over time: bytes delivered, read from origins and avoided, and errors.
///
/// Without a range, the last hour from the server's memory. With a range, the server asks the Prometheus of
/// its settings, for admins only.
#[utoipa::path(
    get, path = "/v1/dashboard/history", tag = "dashboard",
    params(("range" = Option<String>, Query, description = "`6h`, `24h`, `7d` or `30d`")),
    responses(
        (status = 200, description = "The history", body = DashboardHistory),
        (status = 400, description = "There is no such range, or no Prometheus is configured", body = Problem,
            content_type = "application/problem+json"),
        (status = 403, description = "A range is for admins", body = Problem,
            content_type = "application/problem+json"),
        (status = 503, description = "Prometheus did not answer", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn history(
    State(server): State<Arc<Server>>,
    principal: Principal,
    peer: Peer,
    query: Result<Query<RangeQuery>, QueryRejection>,
) -> ApiResult<Json<DashboardHistory>> {
    let Query(RangeQuery { range }) = query?;
    let viewer = viewer(&server, principal, peer);
    let Some(word) = range else { return Ok(Json(hour(&server, &viewer))) };
    if !viewer.sees_all() {
        return Err(super::admission::forbidden(&server, viewer.principal.role));
    }
    let range = Range::from_word(&word).ok_or_else(|| {
        ApiError::new(Code::BadRequest, format!("there is no range {word:?}"), "ask for 6h, 24h, 7d or 30d")
    })?;
    let prometheus = server.dashboard.prometheus.as_ref().ok_or_else(|| {
        let hint = "set dashboard.prometheus_url of the server's settings, and restart it";
        ApiError::new(Code::BadRequest, "no Prometheus is configured, so there is one hour only", hint)
    })?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    Ok(Json(prometheus.history(range, now).await?))
}

/// Returns the row of a job, and the job itself if it is in memory.
///
/// A job of the caller's tenant is opened if it is not; one of another tenant, which only an admin sees, is
/// not.
async fn find_job(
    server: &Arc<Server>,
    viewer: &Viewer,
    id: String,
) -> ApiResult<(DashboardJob, Option<Arc<OpenJob>>)> {
    let (of, who) = (Arc::clone(server), viewer.clone());
    let row = blocking(move || overview::job_row(&of, &who, &id)).await?.ok_or_else(ApiError::not_found)?;
    if !row.is_declared {
        return Ok((row, None));
    }
    let principal = &viewer.principal;
    let job = match row.domain == principal.domain && row.tenant == principal.tenant {
        // The origin may be down: the row is shown all the same.
        true => open_job(server, principal, &row.id).await.ok(),
        false => server.registry.peek(&row.id),
    };
    Ok((row, job))
}

/// Returns a job as the admin page shows it. Whoever may not see the job gets the answer for an absent one.
#[utoipa::path(
    get, path = "/v1/dashboard/jobs/{id}", tag = "dashboard",
    params(("id" = String, Path, description = "Id of the job's row")),
    responses(
        (status = 200, description = "The job", body = DashboardJobDetail),
        (status = 404, description = "The caller sees no job with that id", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn job(
    State(server): State<Arc<Server>>,
    principal: Principal,
    peer: Peer,
    path: OnePath,
) -> ApiResult<Json<DashboardJobDetail>> {
    let Path(id) = path?;
    let (row, job) = find_job(&server, &viewer(&server, principal, peer), id).await?;
    let job = match job {
        Some(job) => Some(view(&server, &job).await?),
        None => None,
    };
    let history = server.dashboard.watches().hour(&row.id);
    Ok(Json(DashboardJobDetail { row, job, history }))
}

/// Returns the receipt of a finished epoch of a job that the caller may see.
#[utoipa::path(
    get, path = "/v1/dashboard/jobs/{id}/epochs/{epoch}/receipt", tag = "dashboard",
    params(
        ("id" = String, Path, description = "Id of the job's row"),
        ("epoch" = u64, Path, description = "Number of the epoch"),
    ),
    responses(
        (status = 200, description = "The receipt and the shuffle certificate", body = EpochReceipt),
        (status = 404, description = "There is no such job, or no such epoch", body = Problem,
            content_type = "application/problem+json"),
        (status = 409, description = "The epoch is not finished", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn receipt(
    State(server): State<Arc<Server>>,
    principal: Principal,
    peer: Peer,
    path: TwoPaths,
) -> ApiResult<Json<EpochReceipt>> {
    let Path((id, epoch)) = path?;
    let epoch: u64 = parse_param(&epoch)?;
    let (_, job) = find_job(&server, &viewer(&server, principal, peer), id).await?;
    let job = job.ok_or_else(ApiError::not_found)?;
    let epoch = job.epoch(epoch).await?;
    Ok(Json(epoch.receipt(|| async { job.contents().await }).await?))
}

/// Returns a dataset as the admin page shows it: its versions and tags, its jobs and mounts.
///
/// The server lists the tags at the dataset's tables, for callers of the dataset's own domain.
#[utoipa::path(
    get, path = "/v1/dashboard/datasets/{domain}/{name}", tag = "dashboard",
    params(
        ("domain" = String, Path, description = "Domain of the dataset"),
        ("name" = String, Path, description = "Name of the dataset"),
    ),
    responses(
        (status = 200, description = "The dataset", body = DashboardDatasetDetail),
        (status = 404, description = "The caller sees no such dataset", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn dataset(
    State(server): State<Arc<Server>>,
    principal: Principal,
    peer: Peer,
    path: TwoPaths,
) -> ApiResult<Json<DashboardDatasetDetail>> {
    let Path((domain, name)) = path?;
    let (domain, dataset): (Domain, DatasetName) = (parse_param(&domain)?, parse_param(&name)?);
    let viewer = viewer(&server, principal, peer);
    if !viewer.sees_domain(&domain) {
        return Err(ApiError::not_found());
    }
    let entry = find_dataset(&server, &domain, &name)?;
    let (tags, tags_problem) = match domain == viewer.principal.domain {
        true => tagged(&server, &entry).await,
        false => (Vec::new(), None),
    };
    let made = move || {
        let of = (&domain, &dataset);
        let (row, jobs) = overview::dataset_row(&server, &viewer, of)?;
        let mut mounts = viewer.mounts(&server);
        mounts.retain(|m| m.announced.dataset == dataset);
        let versions = overview::known_versions(&server, &viewer, of, tags, &mounts);
        let (tables, registered_ns) = (entry.dataset.tables.clone(), entry.dataset.registered_ns);
        Some(DashboardDatasetDetail { row, tables, registered_ns, versions, tags_problem, jobs, mounts })
    };
    blocking(made).await?.map(Json).ok_or_else(ApiError::not_found)
}

/// Returns the tags of a dataset with the roots that they name, and why they are not complete.
async fn tagged(server: &Server, entry: &RegistrationHandle) -> (Vec<(TagName, Root)>, Option<String>) {
    let mut names = match server.versions.tags(entry, TAGS_MAX).await {
        Ok(names) => names,
        Err(e) => return (Vec::new(), Some(e.to_string())),
    };
    names.sort();
    let mut tags = Vec::new();
    for name in names {
        match server.versions.tag(entry, &name).await {
            Ok(doc) => tags.push((name, doc.root)),
            Err(e) => return (tags, Some(e.to_string())),
        }
    }
    (tags, None)
}
