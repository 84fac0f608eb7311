//! Drafts: what the server learned of them, and their sealing.

use super::{
    admission::{ReadRequest, WriteAccess},
    datasets::find_dataset,
    error::{ApiError, ApiResult},
    request::{OnePath, parse_param},
};
use crate::{
    app::server::Server,
    data::seals::{SealError, StartedSeal},
    tenancy::auth::Principal,
};
use axum::{
    Json,
    extract::{Path, Query, State, rejection::QueryRejection},
    http::StatusCode,
    response::IntoResponse as _,
};
use fletch_api::{Code, LearnedFiles, Problem, SealState, Sealing};
use fletch_core::Root;
use serde::Deserialize;
use std::sync::Arc;

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
    let dataset = entry.dataset.name.clone();
    Ok(match server.seals.start(&entry).await? {
        StartedSeal::Runs(sealing) => (StatusCode::ACCEPTED, Json(sealing)).into_response(),
        StartedSeal::Sealed { root, entries, bytes } => {
            let now_ns = server.now_ns();
            let done = Sealing {
                dataset,
                draft: root,
                state: SealState::Done,
                entries,
                bytes,
                entries_done: entries,
                bytes_known: bytes,
                bytes_read: 0,
                started_ns: now_ns,
                ended_ns: Some(now_ns),
                root: Some(root),
                error: None,
            };
            (StatusCode::OK, Json(done)).into_response()
        }
    })
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
