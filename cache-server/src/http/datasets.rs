//! Datasets: registering, listing, forgetting, and what their tags name.

use super::{
    access::within_quota,
    admit::Changer,
    json, parsed,
    problem::{Answer, Fault},
};
use crate::{
    auth::Principal,
    server::Server,
    state::{Entry, Registered},
    versions::{Source, UriNotAllowed},
};
use axum::{
    Json,
    body::Body,
    extract::{Path, State, rejection::PathRejection},
    http::StatusCode,
    response::IntoResponse as _,
};
use fletch_api::{Code, Dataset, Datasets, Problem, RegisterDataset, ResolvedVersion};
use fletch_core::{DatasetName, Domain, Root, TagName};
use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

type OnePath = Result<Path<String>, PathRejection>;
type TwoPaths = Result<Path<(String, String)>, PathRejection>;

/// All datasets of the domain.
#[utoipa::path(
    get, path = "/v1/datasets", tag = "datasets",
    responses((status = 200, description = "By name", body = Datasets))
)]
pub async fn list(State(server): State<Arc<Server>>, who: Principal) -> Json<Datasets> {
    let datasets = server.registrations.list(&who.domain).iter().map(|e| e.dataset.clone()).collect();
    Json(Datasets { datasets })
}

/// Registers a dataset; the same again is no error.
#[utoipa::path(
    post, path = "/v1/datasets", tag = "datasets", request_body = RegisterDataset,
    responses(
        (status = 201, description = "Registered", body = Dataset),
        (status = 200, description = "Was registered so already", body = Dataset),
        (status = 400, description = "No such form of URI or name", body = Problem, content_type = "application/problem+json"),
        (status = 403, description = "This server may not read that URI, or it is over the tenant's quota", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "The name is taken", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn register(State(server): State<Arc<Server>>, Changer(who): Changer, body: Body) -> Answer {
    let ask: RegisterDataset = json(&server, body).await?;
    let (versions, domain) = (Arc::clone(&server.versions), who.domain.clone());
    let (uri, tables) = (ask.uri, ask.tables);
    // On a thread that may wait: directories are looked up.
    let places = move || {
        let uri = versions.allowed().check(&domain, &uri)?;
        let tables = tables.map(|t| versions.allowed().check(&domain, &t)).transpose()?;
        Ok::<_, UriNotAllowed>((tables.unwrap_or_else(|| uri.clone()), uri))
    };
    let (tables, uri) = blocking(places).await??;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let dataset = Dataset {
        name: ask.name,
        uri: uri.to_string(),
        tables: tables.to_string(),
        registered_ns: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
    };
    let entry = Entry { domain: who.domain, tenant: who.tenant, dataset };
    let quota = server.auth.quota(&entry.tenant).registered;
    // Its size is only asked for where it decides something: the origin may be away.
    let bytes = match quota {
        Some(_) => server.versions.bytes_of_latest(&entry).await?,
        None => 0,
    };
    let registrations = Arc::clone(&server.registrations);
    let (entry, new) = blocking(move || registrations.register(entry, bytes, quota)).await??;
    if new {
        server.versions.registered(&entry.domain);
        tracing::info!(dataset = %entry.dataset.name, uri = %entry.dataset.uri, tables = %entry.dataset.tables, "registered");
    }
    let status = if new { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(entry.dataset.clone())).into_response())
}

/// One dataset.
#[utoipa::path(
    get, path = "/v1/datasets/{name}", tag = "datasets",
    params(("name" = String, Path, description = "Name of the dataset")),
    responses(
        (status = 200, description = "The dataset", body = Dataset),
        (status = 404, description = "None of that name in this domain", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn get(State(server): State<Arc<Server>>, who: Principal, path: OnePath) -> Answer<Json<Dataset>> {
    Ok(Json(entry(&server, &who.domain, path)?.dataset.clone()))
}

/// Forgets a dataset. Its objects and tables stay as they are.
#[utoipa::path(
    delete, path = "/v1/datasets/{name}", tag = "datasets",
    params(("name" = String, Path, description = "Name of the dataset")),
    responses(
        (status = 204, description = "Forgotten"),
        (status = 404, description = "None of that name in this domain", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn unregister(
    State(server): State<Arc<Server>>,
    Changer(who): Changer,
    path: OnePath,
) -> Answer<StatusCode> {
    let name = entry(&server, &who.domain, path)?.dataset.name.clone();
    let (registrations, of) = (Arc::clone(&server.registrations), name.clone());
    let was = blocking(move || registrations.unregister(&who.domain, &of)).await??;
    if !was {
        return Err(Fault::not_found());
    }
    server.changes.send_replace(());
    tracing::info!(dataset = %name, "unregistered");
    Ok(StatusCode::NO_CONTENT)
}

/// What a tag, or a root, of a dataset is now.
#[utoipa::path(
    get, path = "/v1/datasets/{name}/versions/{version}", tag = "datasets",
    params(
        ("name" = String, Path, description = "Name of the dataset"),
        ("version" = String, Path, description = "A tag, or a root of 64 hex digits"),
    ),
    responses(
        (status = 200, description = "The version", body = ResolvedVersion),
        (status = 404, description = "No such dataset, tag or root in this domain", body = Problem, content_type = "application/problem+json"),
        (status = 502, description = "The tables are damaged", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn version(
    State(server): State<Arc<Server>>,
    who: Principal,
    path: TwoPaths,
) -> Answer<Json<ResolvedVersion>> {
    let Path((name, version)) = path.map_err(|e| Fault::bad(e.body_text()))?;
    let entry = entry(&server, &who.domain, Ok(Path(name)))?;
    let (source, tag) = source_of(&server, &entry, &version).await?;
    let manifest = source.version.manifest();
    Ok(Json(ResolvedVersion {
        dataset: entry.dataset.name.clone(),
        root: source.version.root(),
        layout: source.version.layout(),
        tag,
        entries: manifest.entries,
        bytes: manifest.bytes,
        created_ns: manifest.created_ns(),
    }))
}

/// What a root or a tag of a dataset is now, and the tag.
pub async fn source_of(
    server: &Server,
    entry: &Arc<Registered>,
    version: &str,
) -> Answer<(Arc<Source>, Option<TagName>)> {
    let (source, tag) = match version.parse::<Root>() {
        Ok(root) => (server.versions.resolve(entry, root, None).await?, None),
        Err(_) => {
            let tag: TagName = parsed(version)?;
            (server.versions.resolve_tag(entry, &tag).await?, Some(tag))
        }
    };
    within_quota(server, &source).await?;
    Ok((source, tag))
}

/// A dataset of the domain.
pub fn entry(server: &Server, domain: &Domain, path: OnePath) -> Answer<Arc<Registered>> {
    let Path(name) = path.map_err(|e| Fault::bad(e.body_text()))?;
    let name: DatasetName = parsed(&name)?;
    server.registrations.get(domain, &name).ok_or_else(Fault::not_found)
}

/// Runs what waits for the disk.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Answer<T> {
    let lost = |_| Fault::new(Code::Internal, "a task was lost", "see the server's log");
    tokio::task::spawn_blocking(work).await.map_err(lost)
}
