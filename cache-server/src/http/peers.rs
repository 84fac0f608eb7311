//! `GET /v1/peers/versions/{root}/…`: chunks and files for other servers of the cluster.
//!
//! The server reads from memory, a flight, disk and the origin, and asks no other server (I1 of
//! `chunk_reads`). Access is decided for the domain that the other server names, as for a client of that
//! domain: foreign, absent and unregistered are one answer (I7). Bytes are counted where the client is, so no
//! account has those that are sent here (I8).

use super::{
    access::access,
    admission::named_dataset,
    error::{ApiError, ApiResult},
    range::{range_error, requested_range},
    request::{OnePath, TwoPaths, parse_param, read_body},
    response_body::{Piece, body_of_piece, respond},
    warmups::{EvictQuery, evict_here},
};
use crate::{
    app::server::Server,
    cluster::PinOrder,
    data::{
        chunk_reads::{Asker, ChunkRead, Kept},
        reads::{Payer, Span, SpanBytes, spans},
        versions::{AskTables, LocatedChunk, Sources},
    },
    tenancy::{
        accounting::{JobCosts, PEERS},
        auth::{Principal, Role},
        tenants::FairPermit,
    },
};
use axum::{
    Json,
    body::Body,
    extract::{FromRequestParts, Path, Query, State, rejection::QueryRejection},
    http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header, request::Parts, response::Builder},
    response::IntoResponse as _,
};
use fletch_api::{Code, Evicted, Problem, headers, warmups::PIN_S_MAX};
use fletch_core::{
    DatasetName, Domain, Hash, Root, StoreKey, Tenant,
    manifest::{Slice, locate::ChunkRange},
};
use fletch_store::{AtPeer, ChunkCheck, DatasetId, Fetch, ReaderKind, Warmed};
use futures::FutureExt as _;
use serde::Deserialize;
use std::{sync::Arc, time::Duration};

/// How long a chunk that is to be kept waits until its dataset has a share of the disk.
const SHARE_WITHIN: Duration = Duration::from_secs(2);
const SHARE_POLL: Duration = Duration::from_millis(10);

/// A request of another server, with its permit. Whether the domain has the version is not decided yet.
pub struct PeerRead {
    domain: Domain,
    /// The tenant that is named like the domain: its permits and searches are those of the domain's peers.
    tenant: Tenant,
    dataset: Option<DatasetName>,
    view: u64,
    only_if_cached: bool,
    /// For which warm-up the chunk is to be protected, and how long.
    pin: Option<PinOrder>,
    permit: FairPermit,
}

impl PeerRead {
    /// Returns the domain that the request names.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// Returns the tenant to which the memory of the request counts.
    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }
}

fn required<T: std::str::FromStr<Err: std::fmt::Display>>(h: &HeaderMap, name: &str) -> ApiResult<T> {
    let text = h.get(name).and_then(|v| v.to_str().ok());
    let text = text.ok_or_else(|| ApiError::bad_request(format!("the header {name} is missing")))?;
    parse_param(text)
}

/// Parses the header `Fletch-Pin`.
fn pin_order(value: &HeaderValue) -> ApiResult<PinOrder> {
    let parsed = value.to_str().ok().and_then(|text| {
        let (warmup, seconds) = text.split_once(' ')?;
        let hold = hold(seconds.parse().ok()?)?;
        is_warmup_id(warmup).then(|| PinOrder { warmup: warmup.to_owned(), hold })
    });
    parsed.ok_or_else(|| ApiError::bad_request(format!("the header {} is not valid", headers::PIN)))
}

fn is_warmup_id(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric())
}

/// Returns how long chunks are protected, if the time is not too long.
fn hold(seconds: u64) -> Option<Duration> {
    (seconds <= PIN_S_MAX).then(|| Duration::from_secs(seconds))
}

impl FromRequestParts<Arc<Server>> for PeerRead {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, server: &Arc<Server>) -> ApiResult<Self> {
        if server.cluster.peers().is_none() {
            return Err(ApiError::not_found());
        }
        let h = &parts.headers;
        let domain: Domain = required(h, headers::DOMAIN)?;
        let tenant: Tenant = parse_param(domain.as_str())?;
        let (view, dataset) = (required(h, headers::VIEW)?, named_dataset(h)?);
        let only_if_cached = h.get(header::CACHE_CONTROL).is_some_and(|v| v.as_bytes() == b"only-if-cached");
        let permit = server.tenants.peer_requests.try_acquire(&tenant, 1).map_err(|_| {
            let detail = "as many requests of other servers for this domain are running as may at once";
            ApiError::new(Code::Overloaded, detail, "wait and send the request again")
        })?;
        let pin = h.get(headers::PIN).map(pin_order).transpose()?;
        Ok(PeerRead { domain, tenant, dataset, view, only_if_cached, pin, permit })
    }
}

/// Decides whether the domain of a request may read the root. Notes the dataset as read, which gives it a
/// share of the disk, unless the request asks only for what this server has.
async fn peer_access(asked: &PeerRead, server: &Server, root: Root) -> ApiResult<Arc<Sources>> {
    let (domain, tenant) = (asked.domain.clone(), asked.tenant.clone());
    let principal = Principal { domain, tenant, role: Role::Reader };
    let sources = access(server, &principal, root, asked.dataset.as_ref()).await?;
    if !asked.only_if_cached {
        let footprint = sources.first.footprint();
        server.shares.note(sources.version_ids(), root, footprint, ReaderKind::Plain, server.now_ns());
    }
    Ok(sources)
}

/// Who owns the chunk of a request, by the view of this server.
struct Owner {
    is_own: bool,
    /// The value of the header `Fletch-Owner`.
    name: Option<HeaderValue>,
    view: u64,
}

impl PeerRead {
    /// The fetches take the permits of the tenant that registered the dataset, as those of a sweep do.
    fn payer(&self, server: &Server, sources: &Sources) -> Payer {
        let tenant = sources.registrar().clone();
        let costs = server.accounts.costs.of_server((&self.domain, &tenant), sources.dataset(), PEERS);
        Payer { asker: Asker::Peer, tenant, costs }
    }

    fn owner(&self, server: &Server, chunk: Hash) -> Owner {
        let view = server.cluster.view();
        let owner = view.core.owner(&StoreKey { domain: self.domain.clone(), hash: chunk });
        let is_own = owner.is_some_and(|m| m.id == *server.cluster.own_id());
        let address = owner.and_then(|m| view.address(&m.id));
        let name = address.and_then(|to| HeaderValue::from_str(&format!("{} {}", to.id, to.url)).ok());
        Owner { is_own, name, view: view.core.number() }
    }

    /// Decides whether to serve a chunk, of which this server has something or not. Returns the refusal.
    ///
    /// A server that asks by an older view is told who the owner is, unless this server has the bytes. One
    /// with the same view or a newer one could not reach the owner, or knows better: this server serves it.
    fn refusal(&self, owner: &Owner, has: bool) -> Option<axum::response::Response> {
        if has {
            return None;
        }
        if self.only_if_cached {
            return Some(ApiError::not_found().into_response());
        }
        if owner.is_own || owner.view <= self.view {
            return None;
        }
        let detail = format!("this server does not own the chunk by the view {}", owner.view);
        let hint = "look at the view of the cluster again, or ask the server of the header Fletch-Owner";
        let mut refusal = ApiError::new(Code::WrongServer, detail, hint).into_response();
        if let Some(name) = owner.name.clone() {
            refusal.headers_mut().insert(headers::OWNER, name);
        }
        Some(refusal)
    }

    fn reply(
        self,
        server: &Arc<Server>,
        costs: Arc<JobCosts>,
        read: SpanBytes,
        owner: &Owner,
        head: Builder,
    ) -> ApiResult {
        let SpanBytes { bytes, tier } = read;
        let at = tier.at_peer();
        if let Some(peers) = server.cluster.peers().filter(|_| !owner.is_own && at != AtPeer::Hit) {
            peers.add_foreign_fill();
        }
        let n = bytes.len() as u64;
        let head = head
            .header(header::CONTENT_TYPE, "application/octet-stream")
            .header(headers::RESULT, at.as_str());
        respond(head, body_of_piece(server, Piece::Peer(bytes, costs), n, Some(self.permit)))
    }
}

/// Reads a chunk for another server of the cluster.
///
/// With `Cache-Control: only-if-cached` the server reads nothing from the origin. `HEAD` keeps the chunk on
/// the server's disk and sends no bytes; with `only-if-cached` it reads and hashes the chunk there.
#[utoipa::path(
    get, path = "/v1/peers/versions/{root}/chunks/{hash}", tag = "peers",
    params(
        ("root" = String, Path, description = "Root of the version, 64 hex digits"),
        ("hash" = String, Path, description = "BLAKE3 of the chunk, 64 hex digits"),
        ("Fletch-Domain" = String, Header, description = "The domain that the bytes belong to"),
        ("Fletch-View" = u64, Header, description = "Number of the view by which the server was chosen"),
        ("Fletch-Dataset" = Option<String>, Header, description = "The dataset that the client named"),
        ("Cache-Control" = Option<String>, Header, description = "`only-if-cached`"),
        ("Range" = Option<String>, Header, description = "One range of bytes of the chunk"),
    ),
    responses(
        (status = 200, description = "The chunk. `Fletch-Result` says what its bytes count as: `hit`, \
            `miss` or `bypass`", content_type = "application/octet-stream"),
        (status = 206, description = "The range of the chunk", content_type = "application/octet-stream"),
        (status = 403, description = "The caller is no server of the cluster", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The domain has no such version, the version has no such chunk, or the \
            server does not have it", body = Problem, content_type = "application/problem+json"),
        (status = 416, description = "The range lies past the end of the chunk", body = Problem,
            content_type = "application/problem+json"),
        (status = 421, description = "Another server owns the chunk by a newer view, and `Fletch-Owner` \
            names it", body = Problem, content_type = "application/problem+json"),
        (status = 429, description = "The server is at a limit. Wait for `Retry-After`, then retry",
            body = Problem, content_type = "application/problem+json"),
        (status = 502, description = "The object changed, is gone or has wrong bytes", body = Problem,
            content_type = "application/problem+json"),
        (status = 503, description = "The server cannot reach the origin", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn chunk(
    State(server): State<Arc<Server>>,
    path: TwoPaths,
    asked: PeerRead,
    method: Method,
    headers: HeaderMap,
) -> ApiResult {
    let Path((root, hash)) = path?;
    let (root, hash): (Root, Hash) = (parse_param(&root)?, parse_param(&hash)?);
    let sources = peer_access(&asked, &server, root).await?;
    let located = server.versions.locate(&sources, hash).await?;
    let owner = asked.owner(&server, hash);
    if let Some(refusal) = asked.refusal(&owner, server.reads.has(&sources, hash, located.len)) {
        return Ok(refusal);
    }
    let payer = asked.payer(&server, &sources);
    if method == Method::HEAD {
        let kept = keep(&server, &payer, &sources, (hash, &located), asked.only_if_cached).await?;
        if let Some(pin) = asked.pin.as_ref().filter(|_| kept != AtPeer::Bypass) {
            server.warmups.pin_for_peer((&sources.domain, sources.dataset()), pin, hash);
        }
        let head = Response::builder().header(headers::RESULT, kept.as_str());
        return respond(head, Body::empty());
    }
    let (len, etag) = (u64::from(located.len), format!("\"{hash}\""));
    let requested = match requested_range(&headers, len, &etag) {
        Ok(requested) => requested,
        Err(error) => return Ok(range_error(error, len)),
    };
    let range = requested.range(len);
    // A chunk has less than 4 GiB.
    let at = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let range = at(range.start)..at(range.end);
    let read = if asked.only_if_cached {
        let hit = server.reads.kept(&sources, hash, located.len).await?;
        let bytes = hit.chunk.slice(range).ok_or_else(ApiError::not_found)?;
        SpanBytes { bytes, tier: hit.tier }
    } else {
        let slice = Slice { chunk: hash, chunk_offset: 0, len: located.len };
        server.reads.span(&payer, &sources, Span::Chunk(ChunkRange { slice, begin: 0, range }), None).await?
    };
    asked.reply(&server, payer.costs, read, &owner, requested.head(len, &etag))
}

/// Keeps a chunk on this server's disk, or reads and hashes the one that is there (`only_check`).
async fn keep(
    server: &Server,
    payer: &Payer,
    sources: &Arc<Sources>,
    (hash, located): (Hash, &LocatedChunk),
    only_check: bool,
) -> ApiResult<AtPeer> {
    let (asker, tenant, costs, dataset) = (Asker::Peer, &payer.tenant, &payer.costs, sources.dataset_id());
    let read = ChunkRead { asker, tenant, costs, sources, hash, located, dataset, part: None, run: None };
    if only_check {
        return match server.reads.chunks.check(&read).await {
            ChunkCheck::Whole => Ok(AtPeer::Hit),
            ChunkCheck::Missing | ChunkCheck::Damaged => Err(ApiError::not_found()),
            ChunkCheck::Unread => Err(ApiError::new(Code::Overloaded, "the disk is busy", "ask again")),
        };
    }
    wait_for_share(server, dataset).await;
    let (Kept::Here(kept) | Kept::Elsewhere(kept)) = server.reads.chunks.keep(&read, None).await?;
    Ok(result_of(kept))
}

/// Takes a chunk that another server owns and has no room for.
///
/// The server keeps it if its dataset has room here, and displaces nothing. `Fletch-Result` is `bypass` if it
/// does not keep it.
#[utoipa::path(
    put, path = "/v1/peers/versions/{root}/chunks/{hash}", tag = "peers",
    params(
        ("root" = String, Path, description = "Root of the version, 64 hex digits"),
        ("hash" = String, Path, description = "BLAKE3 of the chunk, 64 hex digits"),
        ("Fletch-Domain" = String, Header, description = "The domain that the bytes belong to"),
        ("Fletch-View" = u64, Header, description = "Number of the view by which the server was chosen"),
        ("Fletch-Dataset" = Option<String>, Header, description = "The dataset that the client named"),
    ),
    responses(
        (status = 200, description = "`Fletch-Result` says whether the server has the chunk now"),
        (status = 400, description = "The body is not the chunk", body = Problem,
            content_type = "application/problem+json"),
        (status = 403, description = "The caller is no server of the cluster", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The domain has no such version, or the version has no such chunk",
            body = Problem, content_type = "application/problem+json"),
        (status = 429, description = "The server is at a limit", body = Problem,
            content_type = "application/problem+json"),
        (status = 504, description = "The other server sent the chunk too slowly", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn offer(
    State(server): State<Arc<Server>>,
    path: TwoPaths,
    asked: PeerRead,
    body: Body,
) -> ApiResult {
    let Path((root, hash)) = path?;
    let (root, hash): (Root, Hash) = (parse_param(&root)?, parse_param(&hash)?);
    let sources = peer_access(&asked, &server, root).await?;
    let len = server.versions.locate(&sources, hash).await?.len;
    let hint = "send the chunk as the version has it";
    let received = read_body(&server, &asked.tenant, body, len as usize, hint).await?;
    let bytes = received.bytes.clone();
    if bytes.len() != len as usize || Hash::of(&bytes) != hash {
        return Err(ApiError::bad_request(format!("the body is not the chunk {hash} of {len} bytes")));
    }
    let (key, dataset) = (StoreKey { domain: asked.domain.clone(), hash }, sources.dataset_id());
    wait_for_share(&server, dataset).await;
    let offered: Fetch = Arc::new(move |_| std::future::ready(Ok(bytes.clone())).boxed());
    let kept = server.store.warm_to_disk(&key, len, dataset, offered).await?;
    let head = Response::builder().header(headers::RESULT, result_of(kept).as_str());
    respond(head, Body::empty())
}

/// Evicts a dataset's chunks from this server's disk only, and cancels its warm-ups here.
#[utoipa::path(
    delete, path = "/v1/peers/datasets/{name}/chunks", tag = "peers",
    params(
        ("name" = String, Path, description = "Name of the dataset"),
        ("chunks" = Option<String>, Query, description = "Hashes with commas between them, at most 64"),
        ("Fletch-Domain" = String, Header, description = "The domain that the dataset belongs to"),
        ("Fletch-View" = u64, Header, description = "Number of the view of the server that asks"),
    ),
    responses(
        (status = 200, description = "The number of evicted chunks", body = Evicted),
        (status = 403, description = "The caller is no server of the cluster", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn evict(
    State(server): State<Arc<Server>>,
    path: OnePath,
    query: Result<Query<EvictQuery>, QueryRejection>,
    asked: PeerRead,
) -> ApiResult<Json<Evicted>> {
    let (Path(name), Query(query)) = (path?, query?);
    let name: DatasetName = parse_param(&name)?;
    let chunks = evict_here(&server, &asked.domain, &name, query.keys(&asked.domain)?).await?;
    Ok(Json(Evicted { chunks, unconfirmed: Vec::new() }))
}

/// Query of [`hold_warmup`].
#[derive(Debug, Deserialize)]
pub struct HoldQuery {
    hold_s: u64,
}

/// Sets how long this server protects the chunks of another server's warm-up from now on.
#[utoipa::path(
    put, path = "/v1/peers/warmups/{id}", tag = "peers",
    params(
        ("id" = String, Path, description = "Id of the warm-up at the other server"),
        ("hold_s" = u64, Query, description = "How long the chunks stay protected, in seconds. 0 ends it"),
        ("Fletch-Domain" = String, Header, description = "The domain that the warm-up belongs to"),
        ("Fletch-View" = u64, Header, description = "Number of the view of the server that asks"),
    ),
    responses(
        (status = 204, description = "The time is set. A server that protects nothing for it says so, too"),
        (status = 400, description = "The id or the time is not valid", body = Problem,
            content_type = "application/problem+json"),
        (status = 403, description = "The caller is no server of the cluster", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn hold_warmup(
    State(server): State<Arc<Server>>,
    path: OnePath,
    query: Result<Query<HoldQuery>, QueryRejection>,
    asked: PeerRead,
) -> ApiResult<StatusCode> {
    let (Path(warmup), Query(query)) = (path?, query?);
    let hold = hold(query.hold_s).filter(|_| is_warmup_id(&warmup));
    let hold = hold.ok_or_else(|| ApiError::bad_request("the id or hold_s is not valid".to_owned()))?;
    server.warmups.hold_for_peer(&asked.domain, &PinOrder { warmup, hold });
    Ok(StatusCode::NO_CONTENT)
}

fn result_of(kept: Warmed) -> AtPeer {
    match kept {
        Warmed::Already => AtPeer::Hit,
        Warmed::Fetched => AtPeer::Miss,
        Warmed::Refused => AtPeer::Bypass,
    }
}

/// Waits until a dataset that was just noted as read has a share. Without one the disk refuses its chunks.
async fn wait_for_share(server: &Server, dataset: DatasetId) {
    if let Some(disk) = server.store.disk() {
        let shared = async {
            while !disk.has_share(dataset, 1) {
                tokio::time::sleep(SHARE_POLL).await;
            }
        };
        tokio::time::timeout(SHARE_WITHIN, shared).await.ok();
    }
}

/// Reads a file that lies in a chunk with others, for another server of the cluster.
///
/// The owner of the chunk decides whether it fetches the whole chunk, or the file alone.
#[utoipa::path(
    get, path = "/v1/peers/versions/{root}/files/{ordinal}", tag = "peers",
    params(
        ("root" = String, Path, description = "Root of the version, 64 hex digits"),
        ("ordinal" = u64, Path, description = "Ordinal of the file's entry"),
        ("Fletch-Domain" = String, Header, description = "The domain that the bytes belong to"),
        ("Fletch-View" = u64, Header, description = "Number of the view by which the server was chosen"),
        ("Fletch-Dataset" = Option<String>, Header, description = "The dataset that the client named"),
        ("Cache-Control" = Option<String>, Header, description = "`only-if-cached`"),
    ),
    responses(
        (status = 200, description = "The file. `Fletch-Result` says what its bytes count as",
            content_type = "application/octet-stream"),
        (status = 400, description = "The entry does not lie in a chunk with others", body = Problem,
            content_type = "application/problem+json"),
        (status = 403, description = "The caller is no server of the cluster", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The domain has no such version, or the version has no such entry",
            body = Problem, content_type = "application/problem+json"),
        (status = 421, description = "Another server owns the chunk by a newer view", body = Problem,
            content_type = "application/problem+json"),
        (status = 429, description = "The server is at a limit. Wait for `Retry-After`, then retry",
            body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn file(State(server): State<Arc<Server>>, path: TwoPaths, asked: PeerRead) -> ApiResult {
    let Path((root, ordinal)) = path?;
    let (root, ordinal): (Root, u64) = (parse_param(&root)?, parse_param(&ordinal)?);
    let sources = peer_access(&asked, &server, root).await?;
    let entry: AskTables<_> =
        Box::new(move |source| async move { Ok(source.version.entry(ordinal).await?) }.boxed());
    let (source, found) = server.versions.ask_tables(&sources, None, entry).await?;
    let found = found.ok_or_else(ApiError::not_found)?;
    let mut spans = spans(&source, &found, 0..found.entry().size);
    let (Some(Span::PackedFile(file)), true) = (spans.pop(), spans.is_empty()) else {
        return Err(ApiError::bad_request("the entry does not lie in a chunk with others"));
    };
    let owner = asked.owner(&server, file.chunk().chunk);
    if let Some(refusal) = asked.refusal(&owner, server.reads.has_packed_file(&sources, &file)) {
        return Ok(refusal);
    }
    let payer = asked.payer(&server, &sources);
    let read = server.reads.span(&payer, &sources, Span::PackedFile(file), None).await?;
    let head = Response::builder().header(header::CONTENT_LENGTH, read.bytes.len());
    asked.reply(&server, payer.costs, read, &owner, head)
}
