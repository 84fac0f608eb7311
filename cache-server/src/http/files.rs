//! `GET|HEAD /v1/versions/{root}/files/{path}`: whole files, for example for `curl`.

use super::{
    admission::ReadRequest,
    error::{ApiError, ApiResult},
    range::{precondition, range_error, requested_range},
    request::{TwoPaths, parse_param},
    response_body::{BodyError, Piece, body_of_stream, cache_status, respond},
};
use crate::{
    app::server::Server,
    data::{
        reads::{content_hash, spans},
        versions::AskTables,
    },
};
use axum::{
    body::Body,
    extract::{Path, State},
    http::{HeaderMap, Method, header},
};
use fletch_api::{Problem, headers};
use fletch_core::Root;
use futures::{FutureExt as _, StreamExt as _, stream};
use std::sync::Arc;

/// Reads a file of a version.
///
/// The server hashes each chunk, or the whole file, before it sends bytes of it.
#[utoipa::path(
    get, path = "/v1/versions/{root}/files/{path}", tag = "bytes",
    params(
        ("root" = String, Path, description = "Root of the version, 64 hex digits"),
        ("path" = String, Path, description = "Path of the file in the version, with slashes"),
        ("Range" = Option<String>, Header, description = "One range of bytes"),
        ("Fletch-Job" = Option<String>, Header, description = "The job that the bytes are counted for"),
        ("Fletch-Dataset" = Option<String>, Header,
            description = "The dataset through which the client reads: its origin is asked first, and the \
                bytes are counted for it"),
    ),
    responses(
        (status = 200, description = "The file", content_type = "application/octet-stream"),
        (status = 206, description = "The range", content_type = "application/octet-stream"),
        (status = 400, description = "The path names a symbolic link or a directory", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The domain has no dataset with this version, or the version has no \
            such file", body = Problem, content_type = "application/problem+json"),
        (status = 412, description = "`If-Match` names another representation", body = Problem,
            content_type = "application/problem+json"),
        (status = 416, description = "The range lies past the end of the file", body = Problem,
            content_type = "application/problem+json"),
        (status = 502, description = "The object changed, is gone or has wrong bytes", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn get(
    State(server): State<Arc<Server>>,
    path: TwoPaths,
    asked: ReadRequest,
    method: Method,
    request: HeaderMap,
) -> ApiResult {
    let Path((root, path)) = path?;
    let root: Root = parse_param(&root)?;
    let (mut admitted, sources) = asked.access(&server, root).await?;
    let path: Arc<str> = path.into();
    let find: AskTables<_> = Box::new(move |source| {
        let path = Arc::clone(&path);
        async move { Ok(source.version.find(&path).await?) }.boxed()
    });
    let (source, found) = server.versions.ask_tables(&sources, None, find).await?;
    let found = found.ok_or_else(ApiError::not_found)?;
    let entry = found.entry();
    let hash = content_hash(&entry)?;
    let (len, etag) = (entry.size, format!("\"{hash}\""));
    if let Some(reply) = precondition(&request, &etag) {
        return Ok(reply);
    }
    let requested = match requested_range(&request, len, &etag) {
        Ok(requested) => requested,
        Err(error) => return Ok(range_error(error, len)),
    };
    let head = requested
        .head(len, &etag)
        .header(header::CONTENT_TYPE, "application/octet-stream")
        .header(header::CACHE_CONTROL, "private, no-cache");
    if method == Method::HEAD {
        return respond(head, Body::empty());
    }
    let range = requested.range(len);
    let n = range.end - range.start;
    let spans = spans(&source, &found, range);
    let charge = admitted.charges(&server, &sources, root);
    let payer = admitted.payer(&server, &sources, root);
    let costs = Arc::clone(&payer.costs);
    let waiting = costs.wait();
    let mut reads = Box::pin(server.reads.spans(&payer, &sources, spans));
    // Read the first span before the head is sent, so that its failure becomes a status.
    let first = reads.next().await.transpose()?;
    drop(waiting);
    let status = first.as_ref().map_or("fletch; hit", |read| cache_status(read.tier));
    let all = stream::iter(first.map(Ok)).chain(reads);
    let pieces =
        all.map(move |read| Ok::<_, BodyError>(Piece::of_read(read.map_err(ApiError::from)?, &charge)));
    let body = body_of_stream(&server, pieces, Some(n), admitted.permit.take(), Some(&costs));
    respond(head.header(headers::CACHE_STATUS, status), body)
}
