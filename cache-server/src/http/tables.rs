//! A version's tables, for clients that read them by range. They are counted apart from content.

use super::{
    admission::ReadRequest,
    error::ApiResult,
    range::{Requested, precondition, range_error, requested_range},
    request::{OnePath, TwoPaths, parse_param},
    response_body::{BodyError, Piece, body_of_stream, respond},
};
use crate::{
    app::server::Server,
    data::versions::{AskTables, Source, VersionError, table_blocks},
};
use axum::{
    body::{Body, Bytes},
    extract::{Path, State},
    http::{HeaderMap, Method, header},
};
use fletch_api::{Problem, headers};
use fletch_core::{LayoutId, Root};
use fletch_origin::ObjectMeta;
use fletch_tables::Table;
use futures::{FutureExt as _, StreamExt as _, stream};
use std::sync::Arc;

/// Bytes of a table that are read at once, as the client takes them.
const PIECE_BYTES: u64 = 1 << 20;

struct TableRequest {
    server: Arc<Server>,
    asked: ReadRequest,
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
    asked: ReadRequest,
    method: Method,
    headers: HeaderMap,
) -> ApiResult {
    root_table(Table::Manifest, path, TableRequest { server, asked, method, headers }).await
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
    asked: ReadRequest,
    method: Method,
    headers: HeaderMap,
) -> ApiResult {
    root_table(Table::Entries, path, TableRequest { server, asked, method, headers }).await
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
    asked: ReadRequest,
    method: Method,
    headers: HeaderMap,
) -> ApiResult {
    layout_table(Table::Layout, path, TableRequest { server, asked, method, headers }).await
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
    asked: ReadRequest,
    method: Method,
    headers: HeaderMap,
) -> ApiResult {
    layout_table(Table::Placement, path, TableRequest { server, asked, method, headers }).await
}

async fn root_table(table: Table, path: OnePath, request: TableRequest) -> ApiResult {
    let Path(root) = path?;
    send(table, root, None, request).await
}

async fn layout_table(table: Table, path: TwoPaths, request: TableRequest) -> ApiResult {
    let Path((root, layout)) = path?;
    send(table, root, Some(parse_param(&layout)?), request).await
}

/// A table's metadata, the bytes that the client asked for, and the first piece of them.
struct FirstPiece {
    meta: ObjectMeta,
    requested: ApiResult<Requested>,
    bytes: Bytes,
}

/// Reads the first piece of a table, so that an error of the origin becomes a status.
async fn first_piece(source: &Source, path: &str, client: &TableHead) -> Result<FirstPiece, VersionError> {
    let meta = source.blocks.meta(&source.tables, path).await?;
    let etag = etag_of(&meta);
    let requested = requested_range(&client.headers, meta.size, &etag);
    let unread = client.is_head || precondition(&client.headers, &etag).is_some();
    let bytes = match &requested {
        Ok(requested) if !unread => {
            let range = requested.range(meta.size);
            let end = piece_end(range.start, range.end);
            source.blocks.read(&source.tables, &meta, range.start..end).await?
        }
        _ => Bytes::new(),
    };
    Ok(FirstPiece { meta, requested, bytes })
}

/// Returns the end of the piece that begins at `at`, in a range that ends at `end`.
fn piece_end(at: u64, end: u64) -> u64 {
    (at - at % PIECE_BYTES + PIECE_BYTES).min(end)
}

fn etag_of(meta: &ObjectMeta) -> String {
    format!("\"{}\"", table_blocks::etag(meta))
}

/// What the client asks for.
struct TableHead {
    headers: HeaderMap,
    is_head: bool,
}

async fn send(table: Table, root: String, layout: Option<LayoutId>, request: TableRequest) -> ApiResult {
    let root: Root = parse_param(&root)?;
    let TableRequest { server, asked, method, headers } = request;
    let (mut admitted, sources) = asked.access(&server, root).await?;
    let client = Arc::new(TableHead { headers, is_head: method == Method::HEAD });
    let head = Arc::clone(&client);
    let first: AskTables<_> = Box::new(move |source| {
        let client = Arc::clone(&head);
        async move {
            let path = table.path(root, source.version.layout());
            first_piece(&source, &path, &client).await
        }
        .boxed()
    });
    let (source, FirstPiece { meta, requested, bytes }) =
        server.versions.ask_tables(&sources, layout, first).await?;
    let (blocks, origin) = (source.blocks.clone(), source.tables.clone());
    let etag = etag_of(&meta);
    if let Some(reply) = precondition(&client.headers, &etag) {
        return Ok(reply);
    }
    let requested = match requested {
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
    let next = piece_end(range.start, range.end);
    let end = range.end;
    let later = stream::try_unfold(next, move |at| {
        let (blocks, origin, meta) = (blocks.clone(), origin.clone(), meta.clone());
        async move {
            if at >= end {
                return Ok(None);
            }
            let next = piece_end(at, end);
            let bytes = blocks.read(&origin, &meta, at..next).await.map_err(BodyError::from)?;
            Ok(Some((Piece::Table(bytes), next)))
        }
    });
    let pieces = stream::iter([Ok(Piece::Table(bytes))]).chain(later);
    respond(head, body_of_stream(&server, pieces, Some(len), admitted.permit.take(), None))
}
