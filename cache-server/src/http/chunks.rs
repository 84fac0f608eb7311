//! `GET|HEAD /v1/versions/{root}/chunks/{hash}`: one chunk by its hash, or a part of it; `…/groups`: the
//! hashes by which a client checks a part.

use super::{
    admission::{Admitted, ReadRequest},
    error::{ApiError, ApiResult},
    range::{Requested, precondition, range_error, requested_range},
    request::{TwoPaths, parse_param},
    response_body::{Piece, body_of_piece, cache_status, respond},
};
use crate::{
    app::server::Server,
    data::{
        reads::{Span, cost_of},
        versions::Sources,
    },
    tenancy::tenants::bind_memory,
};
use axum::{
    body::Body,
    extract::{Path, State},
    http::{HeaderMap, Method, header, response::Builder},
    response::Response,
};
use fletch_api::{Code, Problem, headers};
use fletch_core::{
    Hash, Root,
    manifest::{Slice, locate::ranges},
};
use futures::StreamExt as _;
use std::{ops::Range, sync::Arc};

const FOREVER: &str = "private, max-age=31536000, immutable";

/// Reads a chunk of a version.
///
/// The server hashes the whole chunk, or, for a small range, the groups of 16 KiB that have the range. `HEAD`
/// reads nothing from the origin. In a draft, `hash` is the name of a place, and `Fletch-Content` is the hash
/// of the whole chunk there.
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
    if let (Requested::Part(range), false) = (&requested, sources.is_draft()) {
        return part(&server, (admitted, &sources), (root, hash, located.len), range, head).await;
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

/// Sends a part of a chunk.
async fn part(
    server: &Arc<Server>,
    (mut admitted, sources): (Admitted, &Arc<Sources>),
    (root, hash, len): (Root, Hash, u32),
    range: &Range<u64>,
    head: Builder,
) -> ApiResult {
    let slice = Slice { chunk: hash, chunk_offset: 0, len };
    let Some(range) = ranges(&[slice], range.clone()).next() else { return Err(ApiError::not_found()) };
    let payer = admitted.payer(server, sources, root);
    let costs = Arc::clone(&payer.costs);
    let waiting = costs.wait();
    let mut reads = Box::pin(server.reads.spans(&payer, sources, vec![Span::Chunk(range)]));
    let read = reads.next().await.transpose()?.ok_or_else(ApiError::not_found)?;
    drop(waiting);
    let (n, tier) = (read.bytes.len() as u64, read.tier);
    let piece = Piece::of_read(read, &admitted.charges(server, sources, root));
    let body = body_of_piece(server, piece, n, admitted.permit.take());
    respond(head.header(headers::CACHE_STATUS, cache_status(tier)), body)
}

/// Reads the hashes of the groups of a chunk.
///
/// 32 bytes for each group of 16 KiB, in order. They are the inner hashes of BLAKE3: with them a client
/// checks a range of the chunk under the chunk's name. The server reads the chunk if it does not know them.
#[utoipa::path(
    get, path = "/v1/versions/{root}/chunks/{hash}/groups", tag = "bytes",
    params(
        ("root" = String, Path, description = "Root of the version, 64 hex digits"),
        ("hash" = String, Path, description = "BLAKE3 of the chunk, 64 hex digits"),
        ("Fletch-Job" = Option<String>, Header, description = "The job that a fetch is counted for"),
        ("Fletch-Dataset" = Option<String>, Header,
            description = "The dataset through which the client reads: its origin is asked first"),
    ),
    responses(
        (status = 200, description = "The hashes", content_type = "application/octet-stream"),
        (status = 400, description = "The chunk is so short that it is always read whole, or the version is \
            a draft", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "The domain has no dataset with this version, or the version has no \
            such chunk", body = Problem, content_type = "application/problem+json"),
        (status = 429, description = "The server is at a limit. Wait for `Retry-After`, then retry",
            body = Problem, content_type = "application/problem+json"),
        (status = 502, description = "The object changed, is gone or has wrong bytes", body = Problem,
            content_type = "application/problem+json"),
        (status = 503, description = "The server cannot reach the origin", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn groups(State(server): State<Arc<Server>>, path: TwoPaths, asked: ReadRequest) -> ApiResult {
    let Path((root, hash)) = path?;
    let (root, hash): (Root, Hash) = (parse_param(&root)?, parse_param(&hash)?);
    let (admitted, sources) = asked.access(&server, root).await?;
    sources.check_sealed()?;
    let payer = admitted.payer(&server, &sources, root);
    let waiting = payer.costs.wait();
    let groups = server.reads.groups(&payer, &sources, hash).await?;
    drop(waiting);
    let bytes = groups.as_bytes().to_vec();
    let head = Response::builder()
        .header(header::CONTENT_TYPE, "application/octet-stream")
        .header(header::CACHE_CONTROL, FOREVER)
        .header(header::CONTENT_LENGTH, bytes.len());
    respond(head, Body::from(bytes))
}
