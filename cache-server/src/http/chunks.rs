//! `GET|HEAD /v1/versions/{root}/chunks/{hash}`: one chunk by its hash.

use super::{
    admission::ReadRequest,
    error::{ApiError, ApiResult},
    range::{precondition, range_error, requested_range},
    request::{TwoPaths, parse_param},
    response_body::{Piece, body_of_piece, cache_status, respond},
};
use crate::{app::server::Server, data::reads::cost_of, tenancy::tenants::bind_memory};
use axum::{
    body::Body,
    extract::{Path, State},
    http::{HeaderMap, Method, header},
};
use fletch_api::{Code, Problem, headers};
use fletch_core::{Hash, Root};
use std::sync::Arc;

const FOREVER: &str = "private, max-age=31536000, immutable";

/// Reads a chunk of a version.
///
/// The server reads and hashes the whole chunk, also for a range. `HEAD` reads nothing from the origin. In a
/// draft, `hash` is the name of a place, and `Fletch-Content` is the hash of the whole chunk there.
#[utoipa::path(
    get, path = "/v1/versions/{root}/chunks/{hash}", tag = "bytes",
    params(
        ("root" = String, Path, description = "Root of the version, 64 hex digits"),
        ("hash" = String, Path, description = "BLAKE3 of the chunk, 64 hex digits"),
        ("Range" = Option<String>, Header, description = "One range of bytes"),
        ("Fletch-Job" = Option<String>, Header, description = "The job that the bytes are counted for"),
        ("Fletch-Dataset" = Option<String>, Header,
            description = "The dataset through which the client reads: its origin is asked first, and the \
                bytes are counted for it"),
        ("Fletch-View" = Option<u64>, Header,
            description = "Number of the cluster view by which the client chose this server"),
        ("Fletch-Component" = Option<String>, Header,
            description = "The program that reads: `mount`, `loader`, `cli` or `peer`"),
    ),
    responses(
        (status = 200, description = "The whole chunk", content_type = "application/octet-stream"),
        (status = 206, description = "The range", content_type = "application/octet-stream"),
        (status = 304, description = "The client has the chunk: `If-None-Match` named it"),
        (status = 404, description = "The domain has no dataset with this version, or the version has no \
            such chunk", body = Problem, content_type = "application/problem+json"),
        (status = 412, description = "`If-Match` names another representation", body = Problem,
            content_type = "application/problem+json"),
        (status = 416, description = "The range lies past the end of the chunk", body = Problem,
            content_type = "application/problem+json"),
        (status = 429, description = "The server is at a limit. Wait for `Retry-After`, then retry",
            body = Problem, content_type = "application/problem+json"),
        (status = 502, description = "The object changed, is gone or has wrong bytes", body = Problem,
            content_type = "application/problem+json"),
        (status = 503, description = "The server cannot reach the origin", body = Problem,
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
    let Path((root, hash)) = path?;
    let (root, hash): (Root, Hash) = (parse_param(&root)?, parse_param(&hash)?);
    let (mut admitted, sources) = asked.access(&server, root).await?;
    let located = server.versions.locate(&sources, hash).await?;
    let (len, etag) = (u64::from(located.len), format!("\"{hash}\""));
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
        .header(header::CACHE_CONTROL, FOREVER);
    if method == Method::HEAD {
        let cached = server.reads.has(&sources, hash, located.len);
        let status = if cached { "fletch; hit" } else { "fletch; fwd=miss" };
        return respond(head.header(headers::CACHE_STATUS, status), Body::empty());
    }
    let tenant = &admitted.principal.tenant;
    let held = server.tenants.hold_memory(tenant, hash, located.len.into()).await?;
    let payer = admitted.payer(&server, &sources, root);
    let waiting = payer.costs.wait();
    let hit = server.reads.located(&payer, &sources, hash, &located).await?;
    drop(waiting);
    let range = requested.range(len);
    // A chunk is at most 16 MiB.
    let to_usize = |x: u64| usize::try_from(x).unwrap_or(usize::MAX);
    let Some(bytes) = hit.chunk.slice(to_usize(range.start)..to_usize(range.end)) else {
        // The chunk was cached with the length that another layout gives.
        let detail = format!("two layouts disagree about the length of chunk {hash}");
        return Err(ApiError::new(Code::TablesCorrupt, detail, "index the dataset again"));
    };
    let head = match sources.is_draft() {
        true => head.header(headers::CONTENT, hit.chunk.hash().to_string()),
        false => head,
    };
    let charge = admitted.charges(&server, &sources, root)(cost_of(hit.tier));
    let (n, bytes) = (bytes.len() as u64, bind_memory(bytes, held));
    let body = body_of_piece(&server, Piece::Content(bytes, charge), n, admitted.permit.take());
    respond(head.header(headers::CACHE_STATUS, cache_status(hit.tier)), body)
}
