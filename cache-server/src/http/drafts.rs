//! Datasets by their URIs alone, what the server learned of drafts, and their sealing.

use super::{
    admission::{ReadRequest, WriteAccess},
    datasets::find_dataset,
    error::{ApiError, ApiResult},
    request::{OnePath, parse_param, read_json},
};
use crate::{
    app::server::{NoPlace, Server},
    data::drafts::{SealError, TooManyListings},
    tenancy::{
        auth::Principal,
        state::{Registration, RegistrationHandle},
    },
};
use axum::{
    Json,
    body::Body,
    extract::{Path, Query, State, rejection::QueryRejection},
    http::StatusCode,
    response::IntoResponse as _,
};
use fletch_api::{Code, Dataset, LearnedFiles, Listing, Problem, PutDataset, RunState, Sealing};
use fletch_core::{DatasetName, Root};
use fletch_origin::OriginUri;
use serde::Deserialize;
use std::sync::Arc;
use tokio::task::spawn_blocking;

/// The query of a page.
#[derive(Debug, Deserialize)]
pub struct LearnedQuery {
    #[serde(default)]
    after: u64,
}

/// Lists the files of a draft of which the server has read every byte.
///
/// `fletch seal` makes a version of them without reading them again.
#[utoipa::path(
    get, path = "/v1/versions/{root}/learned", tag = "tables",
    params(
        ("root" = String, Path, description = "Root of the draft, 64 hex digits"),
        ("after" = Option<u64>, Query, description = "The ordinal of the first entry of the page"),
    ),
    responses(
        (status = 200, description = "The files among at most 1024 entries", body = LearnedFiles),
        (status = 404, description = "The domain has no dataset with this version, or it is no draft",
            body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn learned(
    State(server): State<Arc<Server>>,
    path: OnePath,
    query: Result<Query<LearnedQuery>, QueryRejection>,
    asked: ReadRequest,
) -> ApiResult<Json<LearnedFiles>> {
    let (Path(root), Query(query)) = (path?, query?);
    let root: Root = parse_param(&root)?;
    let (_admitted, sources) = asked.access(&server, root).await?;
    Ok(Json(server.versions.learned_files(&sources, query.after).await?))
}

/// Seals the draft that the tag `latest` of a dataset names.
///
/// The server reads what it has not read of the draft, writes the tables of the version beside those of the
/// draft, and moves the tag. The sealing goes on when the client disconnects. If it runs already, the reply
/// is that one. A dataset whose latest version is no draft is done.
#[utoipa::path(
    post, path = "/v1/datasets/{name}/seal", tag = "datasets",
    params(("name" = String, Path, description = "Name of the dataset")),
    responses(
        (status = 200, description = "The latest version of the dataset is no draft", body = Sealing),
        (status = 202, description = "The draft is being sealed", body = Sealing),
        (status = 404, description = "The domain has no dataset of that name, or it has no version",
            body = Problem, content_type = "application/problem+json"),
        (status = 429, description = "Too many drafts are being sealed", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn seal(
    State(server): State<Arc<Server>>,
    WriteAccess(principal): WriteAccess,
    path: OnePath,
) -> ApiResult {
    let Path(name) = path?;
    let entry = find_dataset(&server, &principal.domain, &name)?;
    let sealing = server.seals.start(&entry).await?;
    let status = if sealing.state == RunState::Done { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((status, Json(sealing)).into_response())
}

/// Returns the last sealing of a dataset.
///
/// The server remembers it until it restarts.
#[utoipa::path(
    get, path = "/v1/datasets/{name}/seal", tag = "datasets",
    params(("name" = String, Path, description = "Name of the dataset")),
    responses(
        (status = 200, description = "The sealing, and how far it is", body = Sealing),
        (status = 404, description = "The domain has no dataset of that name, or it was not sealed since the \
            start of the server", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn sealing(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: OnePath,
) -> ApiResult<Json<Sealing>> {
    let Path(name) = path?;
    let entry = find_dataset(&server, &principal.domain, &name)?;
    let sealing = server.seals.get(&entry.domain, &entry.dataset.name);
    sealing.map(Json).ok_or_else(|| {
        let detail = format!("dataset {name} was not sealed since the server started");
        ApiError::new(Code::NotFound, detail, format!("`fletch seal {name}` seals it"))
    })
}

/// Registers a dataset by the URI of its objects alone.
///
/// If its tables are at the URI, or where the server keeps tables for clients, the dataset is ready.
/// Otherwise the server lists the objects, which reads none of them, and writes the tables of a draft to that
/// place. The listing goes on when the client disconnects; the same request shows how far it is, and goes on
/// with a listing that a restart or an error ended.
#[utoipa::path(
    put, path = "/v1/datasets/{name}", tag = "datasets", request_body = PutDataset,
    params(("name" = String, Path, description = "Name of the dataset")),
    responses(
        (status = 200, description = "The dataset is registered, and has a version", body = Dataset),
        (status = 202, description = "The dataset is registered, and is being listed", body = Listing),
        (status = 400,
            description = "The name or the URI is not valid, or the server has no place for tables",
            body = Problem, content_type = "application/problem+json"),
        (status = 403, description = "The server may not read the URI, or the tenant is over its quota",
            body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "The name is registered for another URI", body = Problem,
            content_type = "application/problem+json"),
        (status = 429, description = "Too many datasets are being listed", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn put(
    State(server): State<Arc<Server>>,
    WriteAccess(principal): WriteAccess,
    path: OnePath,
    body: Body,
) -> ApiResult {
    let Path(name) = path?;
    let name: DatasetName = parse_param(&name)?;
    let PutDataset { uri } = read_json(&server, &principal.tenant, body).await?;
    let (versions, domain) = (Arc::clone(&server.versions), principal.domain.clone());
    // Blocking: directories are looked up.
    let uri = spawn_blocking(move || versions.allowed().check(&domain, &uri)).await??;
    let is_registered = |entry: &Arc<RegistrationHandle>| entry.dataset.uri == uri.to_string();
    let known = server.registrations.get(&principal.domain, &name).filter(is_registered);
    let entry = match known {
        Some(entry) => entry,
        None => register_by_uri(&server, &principal, &name, &uri).await?,
    };
    if server.versions.tags(&entry, 1).await?.is_empty() {
        let listing = server.listings.start(&entry)?;
        return Ok((StatusCode::ACCEPTED, Json(listing)).into_response());
    }
    Ok(Json(entry.dataset.clone()).into_response())
}

/// Registers a dataset with the tables at its URI, if they have a tag, else at the server's place.
async fn register_by_uri(
    server: &Arc<Server>,
    principal: &Principal,
    name: &DatasetName,
    uri: &OriginUri,
) -> ApiResult<Arc<RegistrationHandle>> {
    let registration = |tables: &OriginUri| Registration {
        domain: principal.domain.clone(),
        tenant: principal.tenant.clone(),
        dataset: Dataset {
            name: name.clone(),
            uri: uri.to_string(),
            tables: tables.to_string(),
            registered_ns: server.now_ns(),
        },
    };
    let beside = registration(uri);
    let entry = match server.versions.tags(&beside, 1).await?.is_empty() {
        true => registration(&server.place_of_tables(uri).map_err(no_place)?),
        false => beside,
    };
    let (versions, domain) = (Arc::clone(&server.versions), principal.domain.clone());
    let tables = entry.dataset.tables.clone();
    spawn_blocking(move || versions.allowed().check(&domain, &tables)).await??;
    let quota = server.auth.quota(&entry.tenant).registered;
    let bytes = match quota {
        Some(_) => server.versions.bytes_of_latest(&entry).await?,
        None => 0,
    };
    let done = server.catalog.register(entry, bytes, quota, false).await?;
    let tables = &done.dataset.tables;
    tracing::info!(dataset = %name, %uri, %tables, "a dataset was registered by its URI");
    find_dataset(server, &principal.domain, name.as_str())
}

fn no_place(why: NoPlace) -> ApiError {
    ApiError::new(
        Code::BadRequest,
        why.to_string(),
        "set publish.uri at the server, or run `fletch index` and `fletch register` with --tables URI",
    )
}

/// Returns the last listing of a dataset by the server.
///
/// The server remembers it until it restarts.
#[utoipa::path(
    get, path = "/v1/datasets/{name}/listing", tag = "datasets",
    params(("name" = String, Path, description = "Name of the dataset")),
    responses(
        (status = 200, description = "The listing, and how far it is", body = Listing),
        (status = 404, description = "The domain has no dataset of that name, or the server did not list it \
            since its start", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn listing(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: OnePath,
) -> ApiResult<Json<Listing>> {
    let Path(name) = path?;
    let entry = find_dataset(&server, &principal.domain, &name)?;
    let listing = server.listings.get(&entry.domain, &entry.dataset.name);
    listing.map(Json).ok_or_else(|| {
        let detail = format!("the server did not list dataset {name} since it started");
        let hint = format!("`PUT /v1/datasets/{name}` with its URI lists a dataset that has no version");
        ApiError::new(Code::NotFound, detail, hint)
    })
}

impl From<TooManyListings> for ApiError {
    fn from(e: TooManyListings) -> Self {
        ApiError::new(Code::Overloaded, e.to_string(), "wait until one of them has ended")
    }
}

impl From<SealError> for ApiError {
    fn from(e: SealError) -> Self {
        match e {
            SealError::Version(e) => e.into(),
            SealError::TooMany(e) => {
                ApiError::new(Code::Overloaded, e.to_string(), "wait until one of them has ended")
            }
        }
    }
}
