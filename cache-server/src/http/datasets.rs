//! Datasets: registers, lists and unregisters them, and resolves their tags.

use super::{
    access::within_quota,
    admission::WriteAccess,
    error::{ApiError, ApiResult},
    request::{OnePath, TwoPaths, parse_param, read_json},
};
use crate::{
    app::server::Server,
    data::versions::{SamplesError, Source, UriNotAllowed, VersionError, dataset_bytes},
    tenancy::{
        auth::Principal,
        state::{RegisterChange, Registration, RegistrationHandle},
    },
};
use axum::{
    Json,
    body::Body,
    extract::{Path, Query, State, rejection::QueryRejection},
    http::StatusCode,
    response::IntoResponse as _,
};
use fletch_api::{
    Code, Dataset, Datasets, ListedDataset, Problem, RegisterDataset, RegisteredDataset, RenewedPins,
    ResolvedVersion, Tags, Unconfirmed,
};
use fletch_core::{DatasetName, Domain, MemberId, Root, TagName};
use serde::Deserialize;
use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};
use tokio::task::spawn_blocking;

/// A version with fewer samples is worked out in a tenth of a second, when its first job is declared.
const SAMPLES_PREPARED_MIN: u64 = 100_000;
/// The most tags that an error names.
const TAGS_NAMED: usize = 8;
/// The most tags that a list has.
const TAGS_LISTED: usize = 1000;
/// The most objects of a page of renewed pins.
const RENEWED_PINS_MAX: usize = 1000;

/// Lists the datasets of the caller's domain.
#[utoipa::path(
    get, path = "/v1/datasets", tag = "datasets",
    responses((status = 200, description = "The datasets, sorted by name", body = Datasets))
)]
pub async fn list(State(server): State<Arc<Server>>, principal: Principal) -> Json<Datasets> {
    let sizes = server.versions.sizes();
    let listed = |entry: &Arc<RegistrationHandle>| {
        let key = (entry.domain.clone(), entry.dataset.name.clone());
        ListedDataset { bytes: dataset_bytes(entry, sizes.get(&key)), dataset: entry.dataset.clone() }
    };
    let datasets = server.registrations.list(&principal.domain).iter().map(listed).collect();
    Json(Datasets { datasets, drafts: server.seals.drafts(&principal.domain) })
}

/// Registers a dataset.
///
/// The dataset belongs to the caller's domain, and its name is unique there. Registering the same name, URI
/// and tables again changes nothing. Other tables replace the registration, and another URI does with
/// `replace`; running replies then end at their next chunk.
#[utoipa::path(
    post, path = "/v1/datasets", tag = "datasets", request_body = RegisterDataset,
    responses(
        (status = 201, description = "The dataset is registered", body = RegisteredDataset),
        (status = 200, description = "The same dataset was registered before, or this one replaced it",
            body = RegisteredDataset),
        (status = 400, description = "The name or a URI is not valid", body = Problem,
            content_type = "application/problem+json"),
        (status = 403,
            description = "The server may not read the URI, or the tenant is over its quota", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "`check` is set, and the tables have no tag", body = Problem,
            content_type = "application/problem+json"),
        (status = 409,
            description = "The name is registered for another URI, and `replace` is not set", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn register(
    State(server): State<Arc<Server>>,
    WriteAccess(principal): WriteAccess,
    body: Body,
) -> ApiResult {
    let request: RegisterDataset = read_json(&server, &principal.tenant, body).await?;
    let (versions, domain) = (Arc::clone(&server.versions), principal.domain.clone());
    let (uri, tables, replace) = (request.uri, request.tables, request.replace);
    // Blocking: directories are looked up.
    let check = move || {
        let uri = versions.allowed().check(&domain, &uri)?;
        let tables = tables.map(|t| versions.allowed().check(&domain, &t)).transpose()?;
        Ok::<_, UriNotAllowed>((tables.unwrap_or_else(|| uri.clone()), uri))
    };
    let (tables, uri) = spawn_blocking(check).await??;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let dataset = Dataset {
        name: request.name,
        uri: uri.to_string(),
        tables: tables.to_string(),
        registered_ns: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
    };
    let domain = principal.domain.clone();
    let entry = Registration { domain: principal.domain, tenant: principal.tenant, dataset };
    if request.check && server.versions.tags(&entry, 1).await?.is_empty() {
        return Err(not_indexed(&entry.dataset));
    }
    let quota = server.auth.quota(&entry.tenant).registered;
    // Without a quota the size decides nothing. Do not ask the origin for it: the origin may be down.
    let bytes = match quota {
        Some(_) => server.versions.bytes_of_latest(&entry).await?,
        None => 0,
    };
    let done = server.catalog.register(entry, bytes, quota, replace).await?;
    server.versions.changed_objects().forget(&domain, &done.dataset.name);
    if done.change != RegisterChange::Unchanged {
        let Dataset { name, uri, tables, .. } = &done.dataset;
        let replaced = done.change == RegisterChange::Replaced;
        tracing::info!(dataset = %name, %uri, %tables, replaced, "a dataset was registered");
    }
    if let Some(entry) = server.registrations.get(&domain, &done.dataset.name) {
        prepare_jobs(&server, entry);
    }
    let status = if done.change == RegisterChange::New { StatusCode::CREATED } else { StatusCode::OK };
    let unconfirmed = unconfirmed(&done.unconfirmed);
    Ok((status, Json(RegisteredDataset { dataset: done.dataset, unconfirmed })).into_response())
}

/// Works out the samples of a large version in the background, so that its first job need not wait for it.
fn prepare_jobs(server: &Arc<Server>, entry: Arc<RegistrationHandle>) {
    if !server.versions.keeps_samples() {
        return;
    }
    let of = Arc::clone(server);
    server.tasks.spawn(async move {
        // Whatever fails here fails again for a job, which gets the error.
        if let Err(error) = prepare_jobs_of_latest(&of, &entry).await {
            let dataset = &entry.dataset.name;
            tracing::info!(%dataset, %error, "the samples of a dataset are not prepared");
        }
    });
}

async fn prepare_jobs_of_latest(
    server: &Arc<Server>,
    entry: &Arc<RegistrationHandle>,
) -> Result<(), SamplesError> {
    let Some(_permit) = server.registry.wait_to_prepare(&entry.domain, &entry.dataset.name).await else {
        return Ok(());
    };
    if server.versions.samples_of_latest(entry).await? >= SAMPLES_PREPARED_MIN {
        let source = server.versions.resolve_tag(entry, &TagName::latest()).await?;
        server.registry.prepare(&entry.domain, &source).await?;
        let (dataset, root) = (&entry.dataset.name, source.version.root());
        tracing::info!(%dataset, %root, "samples are prepared");
    }
    Ok(())
}

/// Returns a dataset.
#[utoipa::path(
    get, path = "/v1/datasets/{name}", tag = "datasets",
    params(("name" = String, Path, description = "Name of the dataset")),
    responses(
        (status = 200, description = "The dataset", body = Dataset),
        (status = 404, description = "The domain has no dataset of that name", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn get(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: OnePath,
) -> ApiResult<Json<Dataset>> {
    let Path(name) = path?;
    Ok(Json(find_dataset(&server, &principal.domain, &name)?.dataset.clone()))
}

/// Unregisters a dataset.
///
/// The dataset's objects and tables stay at their origin. When the reply arrives, the server rejects new
/// requests for the dataset, and running replies end at their next chunk.
///
/// In a cluster the reply waits until all members reject requests, at most for `cluster.member_ttl`. It names
/// those that did not confirm it.
#[utoipa::path(
    delete, path = "/v1/datasets/{name}", tag = "datasets",
    params(("name" = String, Path, description = "Name of the dataset")),
    responses(
        (status = 200, description = "The dataset is unregistered, but not all members confirmed it",
            body = Unconfirmed),
        (status = 204, description = "The dataset is unregistered"),
        (status = 404, description = "The domain has no dataset of that name", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn unregister(
    State(server): State<Arc<Server>>,
    WriteAccess(principal): WriteAccess,
    path: OnePath,
) -> ApiResult {
    let Path(name) = path?;
    let name = find_dataset(&server, &principal.domain, &name)?.dataset.name.clone();
    let members = server.catalog.unregister(&principal.domain, &name).await?;
    let members = members.ok_or_else(ApiError::not_found)?;
    tracing::info!(dataset = %name, "a dataset was unregistered");
    if members.is_empty() {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    Ok(Json(unconfirmed(&members)).into_response())
}

fn unconfirmed(members: &[MemberId]) -> Unconfirmed {
    Unconfirmed { unconfirmed: members.iter().map(MemberId::to_string).collect() }
}

/// Lists the tags of a dataset.
///
/// The server lists them at the dataset's tables at every call. At a plain HTTP server, which has no listing,
/// it looks for the tag `latest` only.
#[utoipa::path(
    get, path = "/v1/datasets/{name}/tags", tag = "datasets",
    params(("name" = String, Path, description = "Name of the dataset")),
    responses(
        (status = 200, description = "At most 1000 tags, sorted by name", body = Tags),
        (status = 404, description = "The domain has no dataset of that name", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn tags(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: OnePath,
) -> ApiResult<Json<Tags>> {
    let Path(name) = path?;
    let entry = find_dataset(&server, &principal.domain, &name)?;
    let mut tags = server.versions.tags(&entry, TAGS_LISTED).await?;
    tags.sort();
    Ok(Json(Tags { tags }))
}

/// The query of a page of renewed pins.
#[derive(Debug, Deserialize)]
pub struct RenewedPinsQuery {
    after: Option<String>,
}

/// Lists the objects of a dataset that have the indexed bytes under another entity tag.
///
/// The server read every byte of these objects under the new tag, and found the hashes of the tables. So the
/// next index of the dataset need not read them. The list is soft: a restart forgets it.
#[utoipa::path(
    get, path = "/v1/datasets/{name}/renewed-pins", tag = "datasets",
    params(
        ("name" = String, Path, description = "Name of the dataset"),
        ("after" = Option<String>, Query, description = "Lists the objects after this path only"),
    ),
    responses(
        (status = 200, description = "At most 1000 objects, in path order", body = RenewedPins),
        (status = 404, description = "The domain has no dataset of that name", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn renewed_pins(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: OnePath,
    query: Result<Query<RenewedPinsQuery>, QueryRejection>,
) -> ApiResult<Json<RenewedPins>> {
    let (Path(name), Query(query)) = (path?, query?);
    let entry = find_dataset(&server, &principal.domain, &name)?;
    let (pins, after) = (server.versions.renewed_pins(), query.after.as_deref());
    let (objects, more) = pins.complete(&entry.domain, &entry.dataset.uri, after, RENEWED_PINS_MAX);
    let next = objects.last().filter(|_| more).map(|last| last.path.clone());
    Ok(Json(RenewedPins { objects, next }))
}

/// Resolves a tag or a root of a dataset.
///
/// The server reads a tag from the dataset's tables at every call.
#[utoipa::path(
    get, path = "/v1/datasets/{name}/versions/{version}", tag = "datasets",
    params(
        ("name" = String, Path, description = "Name of the dataset"),
        ("version" = String, Path, description = "A tag, or a root of 64 hex digits"),
    ),
    responses(
        (status = 200, description = "The version", body = ResolvedVersion),
        (status = 404,
            description = "The domain has no such dataset, or the dataset has no such tag or root",
            body = Problem, content_type = "application/problem+json"),
        (status = 502, description = "The dataset's tables are damaged", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn version(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: TwoPaths,
) -> ApiResult<Json<ResolvedVersion>> {
    let Path((name, version)) = path?;
    let entry = find_dataset(&server, &principal.domain, &name)?;
    let (source, tag) = resolve_version(&server, &entry, &version).await?;
    let manifest = source.version.manifest();
    let shown = manifest.shown();
    Ok(Json(ResolvedVersion {
        dataset: entry.dataset.name.clone(),
        root: source.version.root(),
        layout: source.version.layout(),
        tag,
        entries: manifest.entries,
        files: Some(shown.files),
        bytes: shown.bytes,
        created_ns: manifest.created_ns(),
        draft: source.is_draft(),
    }))
}

/// Returns the source of a root or a tag of a dataset, and the tag.
///
/// # Errors
/// [`fletch_api::Code::NotFound`]; those of the origin, the tables and the quota.
pub async fn resolve_version(
    server: &Server,
    entry: &Arc<RegistrationHandle>,
    version: &str,
) -> ApiResult<(Arc<Source>, Option<TagName>)> {
    let (source, tag) = match version.parse::<Root>() {
        Ok(root) => match server.versions.resolve(entry, root, None).await {
            Err(VersionError::NotFound) => return Err(no_root(&entry.dataset, root)),
            source => (source?, None),
        },
        Err(_) => {
            let tag: TagName = parse_param(version)?;
            match server.versions.resolve_tag(entry, &tag).await {
                Err(VersionError::NotFound) => {
                    let tags = server.versions.tags(entry, TAGS_NAMED).await?;
                    return Err(no_tag(&entry.dataset, &tag, &tags));
                }
                source => (source?, Some(tag)),
            }
        }
    };
    within_quota(server, &source).await?;
    if tag == Some(TagName::latest()) {
        server.listings.forget_failed(&entry.domain, &entry.dataset.name);
        server.seals.forget_failed(&entry.domain, &entry.dataset.name, source.version.root());
    }
    Ok((source, tag))
}

/// Returns the error of a dataset whose tables have no tag.
fn not_indexed(dataset: &Dataset) -> ApiError {
    let Dataset { uri, tables, .. } = dataset;
    let hint = if uri == tables {
        format!("run `fletch index {uri}`; if its tables are elsewhere, register it with `--tables URI`")
    } else {
        format!(
            "run `fletch index {uri} --tables {tables}`, or register it with the tables that it has \
             (`--tables URI`)"
        )
    };
    ApiError::new(Code::NotIndexed, format!("there is no version of {uri} at its tables, {tables}"), hint)
}

fn no_root(dataset: &Dataset, root: Root) -> ApiError {
    let Dataset { name, tables, .. } = dataset;
    let detail = format!("dataset {name} has no version {root} at its tables, {tables}");
    ApiError::new(Code::NotFound, detail, "check the root; `fletch tag URI` lists the tagged versions")
}

/// Returns the error of a tag that cannot be resolved, although the tables have `tags`.
fn no_tag(dataset: &Dataset, tag: &TagName, tags: &[TagName]) -> ApiError {
    let Dataset { name, uri, tables, .. } = dataset;
    if tags.is_empty() {
        return not_indexed(dataset);
    }
    if tags.contains(tag) {
        let detail =
            format!("tag {tag} of dataset {name} names a version that is not at its tables, {tables}");
        return ApiError::new(Code::NotFound, detail, format!("run `fletch index {uri}` again"));
    }
    let known = tags.iter().map(TagName::as_str).collect::<Vec<_>>().join(", ");
    let hint = format!("its tags are: {known}; `fletch tag {tables}` lists all");
    ApiError::new(Code::NotFound, format!("dataset {name} has no tag {tag}"), hint)
}

/// Returns a dataset of the domain.
///
/// The error is the same for a name of another domain and for a name that no domain has (I7).
pub fn find_dataset(server: &Server, domain: &Domain, name: &str) -> ApiResult<Arc<RegistrationHandle>> {
    let name: DatasetName = parse_param(name)?;
    server.registrations.get(domain, &name).ok_or_else(|| {
        ApiError::new(
            Code::NotFound,
            format!("no dataset {name} is registered here"),
            "`fletch datasets` lists the datasets; `fletch register NAME SOURCE` adds one",
        )
    })
}
