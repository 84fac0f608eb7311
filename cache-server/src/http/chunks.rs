//! `GET|HEAD /v1/versions/{root}/chunks/{hash}`.

use super::{
    access::access,
    admit::Admitted,
    body::{Piece, of_piece},
    parsed,
    problem::{Answer, Fault},
    range::{not_modified, unsatisfiable, wanted},
    read::{cache_status, cost, has, located_chunk},
};
use crate::server::Server;
use axum::{
    body::Body,
    extract::{Path, State, rejection::PathRejection},
    http::{HeaderMap, Method, header},
};
use fletch_api::{Problem, headers};
use fletch_core::{Hash, Root};
use std::sync::Arc;

const FOREVER: &str = "private, max-age=31536000, immutable";

/// A chunk of a version. The answer is always cut from a whole chunk that was hashed after it was
/// read. HEAD reads nothing from an origin.
#[utoipa::path(
    get, path = "/v1/versions/{root}/chunks/{hash}", tag = "bytes",
    params(
        ("root" = String, Path, description = "Root of the version, 64 hex digits"),
        ("hash" = String, Path, description = "BLAKE3 of the chunk, 64 hex digits"),
        ("Range" = Option<String>, Header, description = "One range of bytes"),
        ("Fletch-Job" = Option<String>, Header, description = "Job the bytes are for"),
        ("Fletch-View" = Option<u64>, Header, description = "Number of the view used"),
        ("Fletch-Component" = Option<String>, Header, description = "mount, loader, cli or peer"),
    ),
    responses(
        (status = 200, description = "The whole chunk", content_type = "application/octet-stream"),
        (status = 206, description = "The range", content_type = "application/octet-stream"),
        (status = 304, description = "If-None-Match named it"),
        (status = 404, description = "Not a chunk of a version of this domain", body = Problem, content_type = "application/problem+json"),
        (status = 416, description = "The range is past the end", body = Problem, content_type = "application/problem+json"),
        (status = 429, description = "At a limit", body = Problem, content_type = "application/problem+json"),
        (status = 502, description = "The origin changed, or is wrong", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The origin cannot be reached", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn get(
    State(server): State<Arc<Server>>,
    path: Result<Path<(String, String)>, PathRejection>,
    mut admitted: Admitted,
    method: Method,
    request: HeaderMap,
) -> Answer {
    let Path((root, hash)) = path.map_err(|e| Fault::bad(e.body_text()))?;
    let (root, hash): (Root, Hash) = (parsed(&root)?, parsed(&hash)?);
    let sources = access(&server, &admitted.principal, root).await?;
    let located = server.versions.locate(&sources, hash).await?;
    let (len, etag) = (u64::from(located.len), format!("\"{hash}\""));
    if let Some(same) = not_modified(&request, &etag) {
        return Ok(same);
    }
    let wanted = match wanted(&request, len, &etag) {
        Ok(w) => w,
        Err(fault) => return Ok(unsatisfiable(fault, len)),
    };
    let head = wanted
        .head(len, &etag)
        .header(header::CONTENT_TYPE, "application/octet-stream")
        .header(header::CACHE_CONTROL, FOREVER);
    if method == Method::HEAD {
        let cached = has(&server, &sources, hash, located.len);
        let status = if cached { "fletch; hit" } else { "fletch; fwd=miss" };
        return finish(head.header(headers::CACHE_STATUS, status), Body::empty());
    }
    let hit = located_chunk(&server, &sources, hash, &located, sources.number()).await?;
    let range = wanted.range(len);
    // The table's length agreed with the chunk's when it was checked, and a chunk is at most 16 MiB.
    let cut = |x: u64| usize::try_from(x).unwrap_or(usize::MAX);
    let Some(bytes) = hit.chunk.slice(cut(range.start)..cut(range.end)) else {
        return Err(fletch_tables_disagree(hash));
    };
    let charge = admitted.charges(&server, &sources, root)(cost(hit.tier));
    let n = bytes.len() as u64;
    let body = of_piece(&server, Piece::Content(bytes, charge), n, admitted.turn.take());
    finish(head.header(headers::CACHE_STATUS, cache_status(hit.tier)), body)
}

/// The chunk was cached under another layout's word for its length: that layout or this one lies.
fn fletch_tables_disagree(hash: Hash) -> Fault {
    let detail = format!("two tables disagree about the length of chunk {hash}");
    Fault::new(fletch_api::Code::TablesCorrupt, detail, "index the dataset again")
}

/// Builds an answer whose parts are all known to be valid.
pub fn finish(head: axum::http::response::Builder, body: Body) -> Answer {
    head.body(body).map_err(|e| Fault::new(fletch_api::Code::Internal, e.to_string(), "see the server's log"))
}
