//! A version's tables, for clients that read them by range. They are counted apart from content.

use super::{
    access::access,
    admission::Admitted,
    error::ApiResult,
    range::{precondition, range_error, requested_range},
    request::{OnePath, TwoPaths, parse_param},
    response_body::{BodyError, Piece, body_of_stream, respond},
};
use crate::{
    server::Server,
    versions::{Source, VersionError, table_blocks},
};
use axum::{
    body::Body,
    extract::{Path, State},
    http::{HeaderMap, Method, header},
};
use fletch_api::{Problem, headers};
use fletch_core::{LayoutId, Root};
use fletch_tables::Table;
use futures::{StreamExt as _, stream};
use std::sync::Arc;

/// Bytes of a table that are read at once, as the client takes them.
const PIECE_BYTES: u64 = 1 << 20;

struct TableRequest {
    server: Arc<Server>,
    admitted: Admitted,
    method: Method,
    headers: HeaderMap,
}

/// Reads the manifest of a version.
#[utoipa::path(
    get, path = "/v1/versions/{root}/manifest.json", tag = "tables",
    params(("root" = String, Path, description = "Root of the version, 64 hex digits")),
    responses(
        (status = 200, description = "The manifest", content_type = "application/json"),
        (status = 206, description = "The range", content_type = "application/json"),
        (status = 412, description = "`If-Match` names another representation", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The domain has no dataset with this version", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn manifest(
    State(server): State<Arc<Server>>,
    path: OnePath,
    admitted: Admitted,
    method: Method,
    headers: HeaderMap,
) -> ApiResult {
    root_table(Table::Manifest, path, TableRequest { server, admitted, method, headers }).await
}

/// Reads the table of a version's entries.
#[utoipa::path(
    get, path = "/v1/versions/{root}/entries.parquet", tag = "tables",
    params(("root" = String, Path, description = "Root of the version, 64 hex digits")),
    responses(
        (status = 200, description = "The table", content_type = "application/vnd.apache.parquet"),
        (status = 206, description = "The range", content_type = "application/vnd.apache.parquet"),
        (status = 412, description = "`If-Match` names another representation", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The domain has no dataset with this version", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn entries(
    State(server): State<Arc<Server>>,
    path: OnePath,
    admitted: Admitted,
    method: Method,
    headers: HeaderMap,
) -> ApiResult {
    root_table(Table::Entries, path, TableRequest { server, admitted, method, headers }).await
}

/// Reads the description of a layout.
#[utoipa::path(
    get, path = "/v1/versions/{root}/layouts/{layout}/layout.json", tag = "tables",
    params(
        ("root" = String, Path, description = "Root of the version, 64 hex digits"),
        ("layout" = String, Path, description = "Id of the layout, 64 hex digits"),
    ),
    responses(
        (status = 200, description = "The description", content_type = "application/json"),
        (status = 206, description = "The range", content_type = "application/json"),
        (status = 412, description = "`If-Match` names another representation", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The domain has no dataset with this version, or the version has no \
            such layout", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn layout(
    State(server): State<Arc<Server>>,
    path: TwoPaths,
    admitted: Admitted,
    method: Method,
    headers: HeaderMap,
) -> ApiResult {
    layout_table(Table::Layout, path, TableRequest { server, admitted, method, headers }).await
}

/// Reads the table that places a version's entries in the chunks of a layout.
#[utoipa::path(
    get, path = "/v1/versions/{root}/layouts/{layout}/placement.parquet", tag = "tables",
    params(
        ("root" = String, Path, description = "Root of the version, 64 hex digits"),
        ("layout" = String, Path, description = "Id of the layout, 64 hex digits"),
    ),
    responses(
        (status = 200, description = "The table", content_type = "application/vnd.apache.parquet"),
        (status = 206, description = "The range", content_type = "application/vnd.apache.parquet"),
        (status = 412, description = "`If-Match` names another representation", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The domain has no dataset with this version, or the version has no \
            such layout", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn placement(
    State(server): State<Arc<Server>>,
    path: TwoPaths,
    admitted: Admitted,
    method: Method,
    headers: HeaderMap,
) -> ApiResult {
    layout_table(Table::Placement, path, TableRequest { server, admitted, method, headers }).await
}

async fn root_table(table: Table, path: OnePath, request: TableRequest) -> ApiResult {
    let Path(root) = path?;
    let root: Root = parse_param(&root)?;
    let sources = access(&request.server, &request.admitted.principal, root).await?;
    let source = Arc::clone(&sources.first);
    let layout = source.version.layout();
    send(table, root, layout, &source, request).await
}

async fn layout_table(table: Table, path: TwoPaths, request: TableRequest) -> ApiResult {
    let Path((root, layout)) = path?;
    let (root, layout): (Root, LayoutId) = (parse_param(&root)?, parse_param(&layout)?);
    let sources = access(&request.server, &request.admitted.principal, root).await?;
    let source = request.server.versions.in_layout(&sources, layout).await?;
    send(table, root, layout, &source, request).await
}

async fn send(
    table: Table,
    root: Root,
    layout: LayoutId,
    source: &Source,
    request: TableRequest,
) -> ApiResult {
    let TableRequest { server, mut admitted, method, headers: request } = request;
    let path = table.path(root, layout);
    let (blocks, origin) = (source.blocks.clone(), source.tables.clone());
    let meta = blocks.meta(&origin, &path).await.map_err(VersionError::from)?;
    let etag = format!("\"{}\"", table_blocks::etag(&meta));
    if let Some(reply) = precondition(&request, &etag) {
        return Ok(reply);
    }
    let requested = match requested_range(&request, meta.size, &etag) {
        Ok(requested) => requested,
        Err(error) => return Ok(range_error(error, meta.size)),
    };
    let kind = match table {
        Table::Manifest | Table::Layout => "application/json",
        _ => "application/vnd.apache.parquet",
    };
    // A table of the same root may be written anew with other bytes, so that clients must revalidate.
    let head = requested
        .head(meta.size, &etag)
        .header(header::CONTENT_TYPE, kind)
        .header(header::CACHE_CONTROL, "private, no-cache")
        .header(headers::ROOT, root.to_string());
    if method == Method::HEAD {
        return respond(head, Body::empty());
    }
    let range = requested.range(meta.size);
    let len = range.end - range.start;
    // Read the first piece before the head is sent, so that an error of the origin becomes a status.
    let piece_at = move |at: u64| at..(at - at % PIECE_BYTES + PIECE_BYTES).min(range.end);
    let first = piece_at(range.start);
    let next = first.end;
    let bytes = blocks.read(&origin, &meta, first).await.map_err(VersionError::from)?;
    let end = range.end;
    let later = stream::try_unfold(next, move |at| {
        let (blocks, origin, meta) = (blocks.clone(), origin.clone(), meta.clone());
        async move {
            if at >= end {
                return Ok(None);
            }
            let r = piece_at(at);
            let next = r.end;
            let bytes = blocks.read(&origin, &meta, r).await.map_err(BodyError::from)?;
            Ok(Some((Piece::Table(bytes), next)))
        }
    });
    let pieces = stream::iter([Ok(Piece::Table(bytes))]).chain(later);
    respond(head, body_of_stream(&server, pieces, Some(len), admitted.permit.take()))
}
