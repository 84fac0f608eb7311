//! A version's tables, for clients that load them by range. Counted apart from content.

use super::{
    access::access,
    admit::Admitted,
    body::{Broken, Piece, of_stream},
    chunks::finish,
    parsed,
    problem::{Answer, Fault},
    range::{not_modified, unsatisfiable, wanted},
};
use crate::{
    server::Server,
    versions::{Source, blocks},
};
use axum::{
    body::Body,
    extract::{Path, State, rejection::PathRejection},
    http::{HeaderMap, Method, header},
};
use fletch_api::{Problem, headers};
use fletch_core::{LayoutId, Root};
use fletch_tables::Table;
use futures::stream;
use std::sync::Arc;

/// Bytes read ahead for a slow reader.
const STEP_BYTES: u64 = 1 << 20;

struct Ask {
    server: Arc<Server>,
    admitted: Admitted,
    method: Method,
    request: HeaderMap,
}

type OnePath = Result<Path<String>, PathRejection>;
type TwoPaths = Result<Path<(String, String)>, PathRejection>;

/// A version's manifest.
#[utoipa::path(
    get, path = "/v1/versions/{root}/manifest.json", tag = "tables",
    params(("root" = String, Path, description = "Root of the version, 64 hex digits")),
    responses(
        (status = 200, description = "The manifest", content_type = "application/json"),
        (status = 206, description = "A range of it", content_type = "application/json"),
        (status = 404, description = "Not a version of this domain", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn manifest(
    State(server): State<Arc<Server>>,
    path: OnePath,
    admitted: Admitted,
    method: Method,
    request: HeaderMap,
) -> Answer {
    of_root(Table::Manifest, path, Ask { server, admitted, method, request }).await
}

/// A version's entries.
#[utoipa::path(
    get, path = "/v1/versions/{root}/entries.parquet", tag = "tables",
    params(("root" = String, Path, description = "Root of the version, 64 hex digits")),
    responses(
        (status = 200, description = "The table", content_type = "application/vnd.apache.parquet"),
        (status = 206, description = "A range of it", content_type = "application/vnd.apache.parquet"),
        (status = 404, description = "Not a version of this domain", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn entries(
    State(server): State<Arc<Server>>,
    path: OnePath,
    admitted: Admitted,
    method: Method,
    request: HeaderMap,
) -> Answer {
    of_root(Table::Entries, path, Ask { server, admitted, method, request }).await
}

/// A layout's description.
#[utoipa::path(
    get, path = "/v1/versions/{root}/layouts/{layout}/layout.json", tag = "tables",
    params(
        ("root" = String, Path, description = "Root of the version, 64 hex digits"),
        ("layout" = String, Path, description = "Id of the layout, 64 hex digits"),
    ),
    responses(
        (status = 200, description = "The description", content_type = "application/json"),
        (status = 206, description = "A range of it", content_type = "application/json"),
        (status = 404, description = "Not a layout of a version of this domain", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn layout(
    State(server): State<Arc<Server>>,
    path: TwoPaths,
    admitted: Admitted,
    method: Method,
    request: HeaderMap,
) -> Answer {
    of_layout(Table::Layout, path, Ask { server, admitted, method, request }).await
}

/// Where entries lie in chunks.
#[utoipa::path(
    get, path = "/v1/versions/{root}/layouts/{layout}/placement.parquet", tag = "tables",
    params(
        ("root" = String, Path, description = "Root of the version, 64 hex digits"),
        ("layout" = String, Path, description = "Id of the layout, 64 hex digits"),
    ),
    responses(
        (status = 200, description = "The table", content_type = "application/vnd.apache.parquet"),
        (status = 206, description = "A range of it", content_type = "application/vnd.apache.parquet"),
        (status = 404, description = "Not a layout of a version of this domain", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn placement(
    State(server): State<Arc<Server>>,
    path: TwoPaths,
    admitted: Admitted,
    method: Method,
    request: HeaderMap,
) -> Answer {
    of_layout(Table::Placement, path, Ask { server, admitted, method, request }).await
}

async fn of_root(table: Table, path: OnePath, ask: Ask) -> Answer {
    let Path(root) = path.map_err(|e| Fault::bad(e.body_text()))?;
    let root: Root = parsed(&root)?;
    let sources = access(&ask.server, &ask.admitted.principal, root).await?;
    let source = Arc::clone(&sources.first);
    let layout = source.version.layout();
    send(table, root, layout, &source, ask).await
}

async fn of_layout(table: Table, path: TwoPaths, ask: Ask) -> Answer {
    let Path((root, layout)) = path.map_err(|e| Fault::bad(e.body_text()))?;
    let (root, layout): (Root, LayoutId) = (parsed(&root)?, parsed(&layout)?);
    let sources = access(&ask.server, &ask.admitted.principal, root).await?;
    let source = ask.server.versions.in_layout(&sources, layout).await?;
    send(table, root, layout, &source, ask).await
}

async fn send(table: Table, root: Root, layout: LayoutId, source: &Source, ask: Ask) -> Answer {
    let Ask { server, mut admitted, method, request } = ask;
    let path = table.path(root, layout);
    let (files, origin) = (source.blocks.clone(), source.tables.clone());
    let meta = files.meta(&origin, &path).await.map_err(crate::versions::VersionError::from)?;
    let etag = format!("\"{}\"", blocks::etag(&meta));
    if let Some(same) = not_modified(&request, &etag) {
        return Ok(same);
    }
    let wanted = match wanted(&request, meta.size, &etag) {
        Ok(w) => w,
        Err(fault) => return Ok(unsatisfiable(fault, meta.size)),
    };
    let kind = match table {
        Table::Manifest | Table::Layout => "application/json",
        _ => "application/vnd.apache.parquet",
    };
    // The bytes of a table may be written anew for the same root: revalidate.
    let head = wanted
        .head(meta.size, &etag)
        .header(header::CONTENT_TYPE, kind)
        .header(header::CACHE_CONTROL, "private, no-cache")
        .header(headers::ROOT, root.to_string());
    if method == Method::HEAD {
        return finish(head, Body::empty());
    }
    let range = wanted.range(meta.size);
    let len = range.end - range.start;
    // The first step is read before the head is sent, so that an origin's failure has a status.
    let step = move |at: u64| at..(at - at % STEP_BYTES + STEP_BYTES).min(range.end);
    let first = step(range.start);
    let next = first.end;
    let bytes = files.read(&origin, &meta, first).await.map_err(crate::versions::VersionError::from)?;
    let end = range.end;
    let later = stream::try_unfold(next, move |at| {
        let (files, origin, meta) = (files.clone(), origin.clone(), meta.clone());
        async move {
            if at >= end {
                return Ok(None);
            }
            let r = step(at);
            let next = r.end;
            let bytes = files.read(&origin, &meta, r).await.map_err(Broken::from)?;
            Ok(Some((Piece::Table(bytes), next)))
        }
    });
    let pieces = futures::StreamExt::chain(stream::iter([Ok(Piece::Table(bytes))]), later);
    finish(head, of_stream(&server, pieces, Some(len), admitted.turn.take()))
}
