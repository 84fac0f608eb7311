//! `POST /v1/versions/{root}/batch`: many items of a version in one stream, each with its own outcome.
//!
//! Items are sent in the order of the request. Several small items are read at once, ahead of being sent.

mod tar;

use super::{
    admission::ReadRequest,
    error::{ApiError, ApiResult},
    frames::{Content, Item, ItemResult, coalesce, frame_header, item_frames},
    request::{OnePath, parse_param, read_json},
    response_body::{BodyError, Charge, Piece, body_of_stream, respond},
};
use crate::{
    app::server::Server,
    data::{
        read_ahead::{READ_AHEAD_BYTES_MAX, Reservation, StreamBudget},
        reads::{Payer, Span, content_hash, spans},
        versions::{AskTables, Source, Sources},
    },
    tenancy::accounting::Cost,
};
use axum::{
    body::Body,
    extract::{Path, State},
    http::{HeaderMap, Response, StatusCode, header},
};
use fletch_api::{
    BATCH_ITEMS_MAX, BatchItem, BatchRequest, ChunkSpan, Code, Problem,
    frames::{FrameKind, PREFACE, WHOLE},
    headers,
};
use fletch_core::{
    Root,
    manifest::{Slice, locate::ChunkRange},
};
use fletch_tables::{Found, Resolved};
use futures::{
    FutureExt as _, Stream, StreamExt as _,
    future::{BoxFuture, Either, ready},
    stream,
};
use parking_lot::Mutex;
use std::sync::Arc;

/// Reads many items of one version.
///
/// An item is a file by path, an entry by ordinal, or a range of a chunk. By default the reply is a stream of
/// frames, in which each item has its own status. With `Accept: application/x-tar` the reply is a tar
/// archive.
#[utoipa::path(
    post, path = "/v1/versions/{root}/batch", tag = "bytes", request_body = BatchRequest,
    params(
        ("root" = String, Path, description = "Root of the version, 64 hex digits"),
        ("Accept" = Option<String>, Header,
            description = "`application/x-tar` for an archive. Anything else: frames"),
        ("Fletch-Job" = Option<String>, Header, description = "The job that the bytes are counted for"),
        ("Fletch-Dataset" = Option<String>, Header,
            description = "The dataset through which the client reads: its origin is asked first, and the \
                bytes are counted for it"),
    ),
    responses(
        (status = 200, description = "A stream of frames, with a status for each item. An archive leaves out \
            failed items and lists them in its last member, `fletch-problems.json`",
            content_type = "application/vnd.fletch.frames"),
        (status = 400, description = "The request is not valid, or has no item, or too many", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The domain has no dataset with this version", body = Problem,
            content_type = "application/problem+json"),
        (status = 413, description = "The request's body is too long", body = Problem,
            content_type = "application/problem+json"),
        (status = 429, description = "The server is at a limit. Wait for `Retry-After`, then retry",
            body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn post(
    State(server): State<Arc<Server>>,
    path: OnePath,
    asked: ReadRequest,
    headers_in: HeaderMap,
    body: Body,
) -> ApiResult {
    let Path(root) = path?;
    let root: Root = parse_param(&root)?;
    let (mut admitted, sources) = asked.access(&server, root).await?;
    sources.check_sealed()?;
    let request: BatchRequest = read_json(&server, &admitted.principal.tenant, body).await?;
    if request.items.is_empty() || request.items.len() > BATCH_ITEMS_MAX {
        let detail = format!("the batch has {} items; send 1 to {BATCH_ITEMS_MAX}", request.items.len());
        return Err(ApiError::bad_request(detail));
    }
    let charge = admitted.charges(&server, &sources, root);
    let count = u32::try_from(request.items.len()).unwrap_or(u32::MAX);
    let reader = BatchReader {
        server: Arc::clone(&server),
        payer: admitted.payer(&server, &sources, root),
        sources,
        bytes_left: Arc::new(Mutex::new(server.limits.batch_bytes)),
    };
    let costs = Arc::clone(&reader.payer.costs);
    let items = reader.items(request.items, charge);
    let as_tar = headers_in.get(header::ACCEPT).is_some_and(|a| a.as_bytes() == headers::TAR.as_bytes());
    let (kind, pieces) = if as_tar {
        (headers::TAR, tar::archive(items).boxed())
    } else {
        (headers::FRAMES, framed(items, count).boxed())
    };
    let body = body_of_stream(
        &server,
        coalesce(Arc::clone(&server.read_ahead), pieces),
        None,
        admitted.permit.take(),
        Some(&costs),
    );
    let head = Response::builder()
        .status(StatusCode::OK)
        .header(header::CONTENT_TYPE, kind)
        .header(header::CACHE_CONTROL, "no-store");
    respond(head, body)
}

#[derive(Clone)]
struct BatchReader {
    server: Arc<Server>,
    payer: Payer,
    sources: Arc<Sources>,
    /// Content bytes that this batch may still send.
    bytes_left: Arc<Mutex<u64>>,
}

/// What an item consists of, before it is read.
struct ItemSpans {
    name: String,
    len: u64,
    spans: Vec<Span>,
}

impl BatchReader {
    fn items(
        self,
        requested: Vec<BatchItem>,
        charge: impl Fn(Cost) -> Charge + Clone + Send + 'static,
    ) -> impl Stream<Item = Item> + Send + 'static {
        let at_once = self.server.limits.batch_ahead();
        let budget = Arc::new(StreamBudget::new(&self.server.read_ahead));
        let reads = stream::iter((0u32..).zip(requested)).map(move |(index, item)| {
            if let Some((name, result, reservation)) = self.try_read(&item, &charge, &budget, index) {
                return Either::Left(ready(Item { index, name, result, reservation }));
            }
            let (reader, charge, budget) = (self.clone(), charge.clone(), Arc::clone(&budget));
            let read: BoxFuture<'static, Item> = Box::pin(async move {
                let found = match reader.find(&item).await {
                    Ok(found) => found,
                    Err(error) => {
                        let reservation = budget.empty(index);
                        return Item { index, name: String::new(), result: Err(error), reservation };
                    }
                };
                let (name, len) = (found.name.clone(), found.len);
                let reservation = budget.reserve(index, len).await;
                let result = reader.read(found, charge).await.map(|content| (len, content));
                Item { index, name, result, reservation }
            });
            Either::Right(read)
        });
        reads.buffered(at_once)
    }

    /// Returns the item if everything that it needs is in memory.
    ///
    /// That is true for most samples of a warm job, for which a future would cost more than the copy.
    fn try_read(
        &self,
        item: &BatchItem,
        charge: &impl Fn(Cost) -> Charge,
        budget: &StreamBudget,
        index: u32,
    ) -> Option<(String, ItemResult, Reservation)> {
        let source = &self.sources.first;
        let version = &source.version;
        let found = match item {
            BatchItem::Chunk(span) => spans_of_chunk(span, u64::from(self.sources.try_len(span.hash)??)),
            BatchItem::Ordinal(ordinal) => spans_of_entry(source, &version.try_entry(*ordinal)??),
            BatchItem::Path(path) => match version.try_resolve(path)?? {
                Resolved::Entry(found) => spans_of_entry(source, &found),
                Resolved::Dir(_) => return None,
            },
        };
        let found = match found {
            Ok(found) if found.len <= READ_AHEAD_BYTES_MAX => found,
            Ok(_) => return None,
            Err(error) => return Some((String::new(), Err(error), budget.empty(index))),
        };
        let reservation = budget.try_reserve(index, found.len)?;
        let mut pieces = Vec::with_capacity(found.spans.len());
        for span in &found.spans {
            pieces.push(Piece::of_read(self.server.reads.span_in_memory(&self.sources, span)?, charge));
        }
        let result = self.take_bytes(found.len).map(|()| (found.len, Content::Buffered(pieces)));
        Some((found.name, result, reservation))
    }

    /// Takes an item's bytes from those that the batch may send.
    fn take_bytes(&self, len: u64) -> ApiResult<()> {
        let mut left = self.bytes_left.lock();
        let Some(rest) = left.checked_sub(len) else {
            let detail = format!("the batch has more than {} bytes", self.server.limits.batch_bytes);
            return Err(ApiError::new(Code::BodyTooLarge, detail, "request the rest in another batch"));
        };
        *left = rest;
        Ok(())
    }

    async fn find(&self, item: &BatchItem) -> ApiResult<ItemSpans> {
        let versions = &self.server.versions;
        let (source, found) = match item {
            BatchItem::Chunk(span) => {
                let len = u64::from(versions.locate(&self.sources, span.hash).await?.len);
                let found = spans_of_chunk(span, len)?;
                self.take_bytes(found.len)?;
                return Ok(found);
            }
            BatchItem::Path(path) => {
                let path = path.clone();
                let find: AskTables<_> = Box::new(move |source| {
                    let path = path.clone();
                    async move { Ok(source.version.find(&path).await?) }.boxed()
                });
                versions.ask_tables(&self.sources, None, find).await?
            }
            BatchItem::Ordinal(ordinal) => {
                let ordinal = *ordinal;
                let entry: AskTables<_> =
                    Box::new(move |source| async move { Ok(source.version.entry(ordinal).await?) }.boxed());
                versions.ask_tables(&self.sources, None, entry).await?
            }
        };
        let found = spans_of_entry(&source, &found.ok_or_else(ApiError::not_found)?)?;
        self.take_bytes(found.len)?;
        Ok(found)
    }

    /// Reads an item: now if it is small, while it is sent otherwise.
    async fn read(
        self,
        found: ItemSpans,
        charge: impl Fn(Cost) -> Charge + Clone + Send + 'static,
    ) -> ApiResult<Content> {
        if found.len <= READ_AHEAD_BYTES_MAX {
            let read = self.server.reads.buffered(&self.payer, &self.sources, found.spans).await?;
            return Ok(Content::Buffered(
                read.into_iter().map(|read| Piece::of_read(read, &charge)).collect(),
            ));
        }
        let reads = self.server.reads.spans(&self.payer, &self.sources, found.spans);
        Ok(Content::Streamed(reads.map(move |read| Ok(Piece::of_read(read?, &charge))).boxed()))
    }
}

/// Returns a range of a chunk of `len` bytes.
fn spans_of_chunk(span: &ChunkSpan, len: u64) -> ApiResult<ItemSpans> {
    let end = span.length.map_or(Some(len), |n| span.offset.checked_add(n));
    let Some(end) = end.filter(|&end| end <= len && span.offset <= end) else {
        let detail = format!("the range lies past the {len} bytes of chunk {}", span.hash);
        return Err(ApiError::new(Code::RangeNotSatisfiable, detail, "request bytes within the chunk"));
    };
    // A chunk is at most 16 MiB.
    let to_usize = |x: u64| usize::try_from(x).unwrap_or(usize::MAX);
    let slice = Slice { chunk: span.hash, chunk_offset: 0, len: u32::try_from(len).unwrap_or(u32::MAX) };
    let range = ChunkRange { slice, begin: 0, range: to_usize(span.offset)..to_usize(end) };
    let name = if end - span.offset == len {
        span.hash.to_string()
    } else {
        format!("{}-{}-{end}", span.hash, span.offset)
    };
    let spans = if end == span.offset { Vec::new() } else { vec![Span::Chunk(range)] };
    Ok(ItemSpans { name, len: end - span.offset, spans })
}

/// Returns a whole file.
fn spans_of_entry(source: &Source, found: &Found) -> ApiResult<ItemSpans> {
    let entry = found.entry();
    content_hash(&entry)?;
    let spans = spans(source, found, 0..entry.size);
    Ok(ItemSpans { name: entry.path.replace('\0', "/"), len: entry.size, spans })
}

/// Returns the items as a stream of frames (`fletch_api::frames`).
fn framed(
    items: impl Stream<Item = Item> + Send + 'static,
    count: u32,
) -> impl Stream<Item = Result<Piece, BodyError>> + Send + 'static {
    let begin = stream::iter([Ok(Piece::Framing(bytes::Bytes::from_static(&PREFACE)))]);
    let end = stream::iter([Ok(frame_header(FrameKind::End, WHOLE, count, 0))]);
    begin.chain(items.map(item_frames).flatten()).chain(end)
}
