//! Datasets: registering, listing, forgetting, and what their tags name.

use super::{
    admit::Changer,
    json, parsed,
    problem::{Answer, Fault},
};
use crate::{auth::Principal, server::Server, state::Entry};
use axum::{
    Json,
    body::Body,
    extract::{Path, State, rejection::PathRejection},
    http::StatusCode,
    response::IntoResponse as _,
};
use fletch_api::{Code, Dataset, Datasets, Problem, RegisterDataset, ResolvedVersion};
use fletch_core::{DatasetName, Domain, Root, TagName};
use fletch_origin::OriginUri;
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
        (status = 403, description = "This server may not read that URI", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "The name is taken", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn register(State(server): State<Arc<Server>>, Changer(who): Changer, body: Body) -> Answer {
    let ask: RegisterDataset = json(&server, body).await?;
    let uri = allowed(&server, &ask.uri)?;
    let tables = match &ask.tables {
        Some(tables) => allowed(&server, tables)?,
        None => uri.clone(),
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let dataset = Dataset {
        name: ask.name,
        uri: uri.to_string(),
        tables: tables.to_string(),
        registered_ns: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
    };
    let entry = Entry { domain: who.domain, dataset };
    let registrations = Arc::clone(&server.registrations);
    let (entry, new) = blocking(move || registrations.register(entry)).await??;
    server.versions.registrations_changed();
    if new {
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
    server.versions.registrations_changed();
    if !was {
        return Err(Fault::not_found());
    }
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
    let (source, tag) = match version.parse::<Root>() {
        Ok(root) => (server.versions.resolve(&entry, root, None).await?, None),
        Err(_) => {
            let tag: TagName = parsed(&version)?;
            (server.versions.resolve_tag(&entry, &tag).await?, Some(tag))
        }
    };
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

fn entry(server: &Server, domain: &Domain, path: OnePath) -> Answer<Arc<Entry>> {
    let Path(name) = path.map_err(|e| Fault::bad(e.body_text()))?;
    let name: DatasetName = parsed(&name)?;
    server.registrations.get(domain, &name).ok_or_else(Fault::not_found)
}

/// Runs what waits for the disk.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Answer<T> {
    let lost = |_| Fault::new(Code::Internal, "a task was lost", "see the server's log");
    tokio::task::spawn_blocking(work).await.map_err(lost)
}

/// A URI that this server may read: under a configured origin; a directory under one of
/// `local.dirs`, or any where that is empty and everybody who can ask is on this machine.
fn allowed(server: &Server, text: &str) -> Answer<OriginUri> {
    if !text.contains("://") && !text.starts_with('/') {
        return Err(Fault::bad(format!("{text:?} is a relative path; give an absolute path or a URI")));
    }
    let uri = OriginUri::parse(text).map_err(|e| Fault::bad(e.to_string()))?;
    let Some(dir) = uri.as_local() else {
        if server.versions.origins().is_configured(&uri) {
            return Ok(uri);
        }
        let hint = format!("add an [[origin]] with a prefix of {uri} to the server's settings");
        return Err(Fault::new(Code::UriNotAllowed, format!("{uri} is under no configured origin"), hint));
    };
    // With tokens a principal may be on another machine, and a file of this one is nobody's by default.
    if server.local_dirs.is_empty() && !server.auth.is_on() {
        return Ok(uri);
    }
    // Links are followed, or one of them would lead out.
    let real = std::fs::canonicalize(dir).ok().and_then(|real| OriginUri::local(&real).ok());
    let inside = real.filter(|real| server.local_dirs.iter().any(|d| d.contains(real)));
    // An absent directory and one outside get the same answer: it tells nothing about this machine.
    inside.ok_or_else(|| {
        let detail = format!("{uri} is not a directory under one of local.dirs");
        Fault::new(Code::UriNotAllowed, detail, "add it to local.dirs in the server's settings")
    })
}
