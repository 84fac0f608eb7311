//! `GET /v1/versions/{root}/learned`: what the server learned of a draft.

use super::{
    admission::ReadRequest,
    error::ApiResult,
    request::{OnePath, parse_param},
};
use crate::app::server::Server;
use axum::{
    Json,
    extract::{Path, Query, State, rejection::QueryRejection},
};
use fletch_api::{LearnedFiles, Problem};
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
