//! `POST /v1/versions/{root}/batch`: many pieces of a version in one stream, each with its own
//! outcome. Items are answered in the request's order; small ones are read ahead together.

mod tar;

use super::{
    access::access,
    admit::Admitted,
    body::{Broken, Charge, Piece, of_stream},
    chunks::finish,
    entry::{Span, spans},
    files::{content, piece, read_all, read_now},
    json, parsed,
    problem::{Answer, Fault},
};
use crate::{
    accounting::Cost,
    read_ahead::{AHEAD_BYTES_MAX, Held, Room},
    server::Server,
    versions::{Source, Sources, VersionError},
};
use axum::{
    body::Body,
    extract::{Path, State, rejection::PathRejection},
    http::{HeaderMap, Response, StatusCode, header},
};
use bytes::{BufMut as _, BytesMut};
use fletch_api::{
    BATCH_ITEMS_MAX, BatchItem, BatchRequest, ChunkSpan, Code, Problem,
    frames::{FrameHeader, FrameKind, HEADER_BYTES, MORE, PREFACE, WHOLE},
    headers,
};
use fletch_core::{
    Root,
    manifest::{Slice, locate::ChunkRange},
};
use fletch_tables::{Found, Resolved};
use futures::{
    Stream, StreamExt as _,
    future::{BoxFuture, Either, ready},
    stream,
    stream::BoxStream,
};
use std::sync::{Arc, Mutex, PoisonError};

/// Pieces up to this many bytes are copied together, so that 64 samples are a few writes.
const COPY_BYTES_MAX: usize = 32 << 10;
/// Bytes after which copied pieces are sent. With one more piece it stays below what allocators
/// map anew each time, which would cost a page fault for every 4 KiB.
const FLUSH_BYTES: usize = 64 << 10;
/// Pieces that are looked at together when they are ready.
const READY_PIECES: usize = 256;

/// Many pieces of one version.
#[utoipa::path(
    post, path = "/v1/versions/{root}/batch", tag = "bytes", request_body = BatchRequest,
    params(
        ("root" = String, Path, description = "Root of the version, 64 hex digits"),
        ("Accept" = Option<String>, Header, description = "application/x-tar for an archive; frames otherwise"),
        ("Fletch-Job" = Option<String>, Header, description = "Job the bytes are for"),
    ),
    responses(
        (status = 200, description = "A stream of frames, each item with its own status; or a tar archive, in which failed items are left out and listed in a last member `fletch-problems.json`", content_type = "application/vnd.fletch.frames"),
        (status = 400, description = "No such request", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "Not a version of this domain", body = Problem, content_type = "application/problem+json"),
        (status = 413, description = "The request is too long", body = Problem, content_type = "application/problem+json"),
        (status = 429, description = "At a limit", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn post(
    State(server): State<Arc<Server>>,
    path: Result<Path<String>, PathRejection>,
    mut admitted: Admitted,
    request: HeaderMap,
    body: Body,
) -> Answer {
    let Path(root) = path.map_err(|e| Fault::bad(e.body_text()))?;
    let root: Root = parsed(&root)?;
    let ask: BatchRequest = json(&server, body).await?;
    if ask.items.is_empty() || ask.items.len() > BATCH_ITEMS_MAX {
        return Err(Fault::bad(format!("{} items; a batch has 1 to {BATCH_ITEMS_MAX}", ask.items.len())));
    }
    let sources = access(&server, &admitted.principal, root).await?;
    let charge = admitted.charges(&server, &sources, root);
    let count = u32::try_from(ask.items.len()).unwrap_or(u32::MAX);
    let reader = Reader {
        server: Arc::clone(&server),
        sources,
        left: Arc::new(Mutex::new(server.limits.batch_bytes)),
    };
    let items = reader.items(ask.items, charge);
    let as_tar = request.get(header::ACCEPT).is_some_and(|a| a.as_bytes() == headers::TAR.as_bytes());
    let (kind, pieces) = if as_tar {
        (headers::TAR, tar::archive(items).boxed())
    } else {
        (headers::FRAMES, framed(items, count).boxed())
    };
    let pieces = together(pieces);
    let body = of_stream(&server, pieces, None, admitted.turn.take());
    let head = Response::builder()
        .status(StatusCode::OK)
        .header(header::CONTENT_TYPE, kind)
        .header(header::CACHE_CONTROL, "no-store");
    finish(head, body)
}

/// One item on its way.
pub(super) struct Item {
    /// Its place in the request.
    pub index: u32,
    /// What an archive calls it.
    pub name: String,
    /// Its length, and its bytes in order; or why it has none.
    pub what: What,
    /// Room for its bytes, until they are sent.
    pub held: Held,
}

pub(super) type What = Result<(u64, Content), Fault>;

/// An item's bytes in order.
pub(super) enum Content {
    /// Read already.
    Ready(Vec<Piece>),
    /// Read as they are sent.
    Later(BoxStream<'static, Answer<Piece>>),
}

#[derive(Clone)]
struct Reader {
    server: Arc<Server>,
    sources: Arc<Sources>,
    /// Content bytes that this batch may still send.
    left: Arc<Mutex<u64>>,
}

/// What an item is, before it is read.
struct Plan {
    name: String,
    len: u64,
    pieces: Vec<Span>,
}

impl Reader {
    fn items(
        self,
        asked: Vec<BatchItem>,
        charge: impl Fn(Cost) -> Charge + Clone + Send + 'static,
    ) -> impl Stream<Item = Item> + Send + 'static {
        let ahead = self.server.limits.batch_ahead();
        let room = Arc::new(Room::new(&self.server.read_ahead));
        let reads = stream::iter((0u32..).zip(asked)).map(move |(index, item)| {
            if let Some((name, what, held)) = self.at_once(&item, &charge, &room, index) {
                return Either::Left(ready(Item { index, name, what, held }));
            }
            let (reader, charge, room) = (self.clone(), charge.clone(), Arc::clone(&room));
            let read: BoxFuture<'static, Item> = Box::pin(async move {
                let plan = match reader.plan(&item).await {
                    Ok(plan) => plan,
                    Err(fault) => {
                        return Item { index, name: String::new(), what: Err(fault), held: room.none(index) };
                    }
                };
                let (name, len) = (plan.name.clone(), plan.len);
                let held = room.take(index, len).await;
                let what = reader.read(plan, charge).await.map(|content| (len, content));
                Item { index, name, what, held }
            });
            Either::Right(read)
        });
        reads.buffered(ahead)
    }

    /// The item, if all it needs is in memory: most samples of a warm job, for which waiting
    /// machinery would cost more than the copy.
    fn at_once(
        &self,
        item: &BatchItem,
        charge: &impl Fn(Cost) -> Charge,
        room: &Room,
        index: u32,
    ) -> Option<(String, What, Held)> {
        let source = &self.sources.first;
        let version = &source.version;
        let plan = match item {
            BatchItem::Chunk(span) => plan_of_span(span, u64::from(self.sources.try_len(span.hash)??)),
            BatchItem::Ordinal(ordinal) => plan_of_entry(source, &version.try_entry(*ordinal)??),
            BatchItem::Path(path) => match version.try_resolve(path)?? {
                Resolved::Entry(found) => plan_of_entry(source, &found),
                Resolved::Dir(_) => return None,
            },
        };
        let plan = match plan {
            Ok(plan) if plan.len <= AHEAD_BYTES_MAX => plan,
            Ok(_) => return None,
            Err(fault) => return Some((String::new(), Err(fault), room.none(index))),
        };
        let held = room.try_take(index, plan.len)?;
        let mut pieces = Vec::with_capacity(plan.pieces.len());
        for r in &plan.pieces {
            pieces.push(piece(r.ready(&self.server, &self.sources)?, charge));
        }
        let what = self.afford(plan.len).map(|()| (plan.len, Content::Ready(pieces)));
        Some((plan.name, what, held))
    }

    /// Takes an item's bytes from what the batch may send.
    fn afford(&self, len: u64) -> Answer<()> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(rest) = left.checked_sub(len) else {
            let detail = format!("the batch has more than {} bytes", self.server.limits.batch_bytes);
            return Err(Fault::new(Code::BodyTooLarge, detail, "ask for the rest in another batch"));
        };
        *left = rest;
        Ok(())
    }

    async fn plan(&self, item: &BatchItem) -> Answer<Plan> {
        let version = &self.sources.first.version;
        let found = match item {
            BatchItem::Chunk(span) => {
                let len = u64::from(self.server.versions.locate(&self.sources, span.hash).await?.len);
                let plan = plan_of_span(span, len)?;
                self.afford(plan.len)?;
                return Ok(plan);
            }
            BatchItem::Path(path) => version.find(path).await,
            BatchItem::Ordinal(ordinal) => version.entry(*ordinal).await,
        };
        let found = found.map_err(VersionError::from)?.ok_or_else(Fault::not_found)?;
        let plan = plan_of_entry(&self.sources.first, &found)?;
        self.afford(plan.len)?;
        Ok(plan)
    }

    /// The item's bytes: read now if they are few, as they are sent otherwise.
    async fn read(
        self,
        plan: Plan,
        charge: impl Fn(Cost) -> Charge + Clone + Send + 'static,
    ) -> Answer<Content> {
        if plan.len <= AHEAD_BYTES_MAX {
            return Ok(Content::Ready(read_now(&self.server, &self.sources, plan.pieces, charge).await?));
        }
        let reads = read_all(self.server, self.sources, plan.pieces);
        Ok(Content::Later(reads.map(move |read| Ok(piece(read?, &charge))).boxed()))
    }
}

/// A range of a chunk of `len` bytes.
fn plan_of_span(span: &ChunkSpan, len: u64) -> Answer<Plan> {
    let end = span.length.map_or(Some(len), |n| span.offset.checked_add(n));
    let Some(end) = end.filter(|&end| end <= len && span.offset <= end) else {
        let detail = format!("the span lies past the {len} bytes of the chunk");
        return Err(Fault::new(Code::RangeNotSatisfiable, detail, "ask for bytes that exist"));
    };
    // A chunk is at most 16 MiB.
    let cut = |x: u64| usize::try_from(x).unwrap_or(usize::MAX);
    let slice = Slice { chunk: span.hash, chunk_offset: 0, len: u32::try_from(len).unwrap_or(u32::MAX) };
    let range = ChunkRange { slice, begin: 0, range: cut(span.offset)..cut(end) };
    let name = if end - span.offset == len {
        span.hash.to_string()
    } else {
        format!("{}-{}-{end}", span.hash, span.offset)
    };
    let pieces = if end == span.offset { Vec::new() } else { vec![Span::Chunk(range)] };
    Ok(Plan { name, len: end - span.offset, pieces })
}

/// A whole file.
fn plan_of_entry(source: &Source, found: &Found) -> Answer<Plan> {
    let entry = found.entry();
    content(&entry)?;
    let pieces = spans(source, found, 0..entry.size);
    Ok(Plan { name: entry.path.replace('\0', "/"), len: entry.size, pieces })
}

pub(super) fn header(kind: FrameKind, status: u16, index: u32, len: u64) -> Piece {
    Piece::Framing(bytes::Bytes::copy_from_slice(&FrameHeader::new(kind, status, index, len).encode()))
}

/// A stream of frames (`fletch_api::frames`).
fn framed(
    items: impl Stream<Item = Item> + Send + 'static,
    count: u32,
) -> impl Stream<Item = Result<Piece, Broken>> + Send + 'static {
    let begin = stream::iter([Ok(Piece::Framing(bytes::Bytes::from_static(&PREFACE)))]);
    let end = stream::iter([Ok(header(FrameKind::End, WHOLE, count, 0))]);
    begin.chain(items.map(frames_of).flatten()).chain(end)
}

fn error_frame(index: u32, fault: &Fault) -> Vec<Piece> {
    // Plain fields of text and numbers always serialize.
    let problem = serde_json::to_vec(&fault.0).unwrap_or_default();
    let head = header(FrameKind::Error, fault.0.status, index, problem.len() as u64);
    vec![head, Piece::Framing(problem.into())]
}

pub(super) fn frames_of(item: Item) -> impl Stream<Item = Result<Piece, Broken>> + Send + 'static {
    let Item { index, what, held, .. } = item;
    let at_once = |pieces: Vec<Piece>| Either::Left(stream::iter(pieces).map(Ok));
    let (len, content) = match what {
        Ok(what) => what,
        Err(fault) => return held.until_sent(at_once(error_frame(index, &fault))),
    };
    // What is left of the item says which frame is its last; after an error nothing follows.
    let mut left = Some(len);
    let mut frames = move |read: Answer<Piece>| -> Option<Vec<Piece>> {
        let before = left?;
        Some(match read {
            Ok(Piece::Content(bytes, charge)) => {
                let n = bytes.len() as u64;
                let rest = before.saturating_sub(n);
                left = Some(rest);
                let status = if rest == 0 { WHOLE } else { MORE };
                vec![header(FrameKind::Data, status, index, n), Piece::Content(bytes, charge)]
            }
            Ok(other) => vec![other],
            Err(fault) => {
                left = None;
                error_frame(index, &fault)
            }
        })
    };
    let frames = match content {
        _ if len == 0 => at_once(vec![header(FrameKind::Data, WHOLE, index, 0)]),
        Content::Ready(pieces) => {
            at_once(pieces.into_iter().filter_map(|p| frames(Ok(p))).flatten().collect())
        }
        Content::Later(pieces) => {
            let frames = pieces.scan((), move |(), read| ready(frames(read)));
            Either::Right(frames.flat_map(|pieces| stream::iter(pieces).map(Ok)).boxed())
        }
    };
    held.until_sent(frames)
}

/// Copies neighbouring small pieces together, as far as they are ready: nothing waits for
/// something that is still being read.
pub(super) fn together(
    pieces: BoxStream<'static, Result<Piece, Broken>>,
) -> impl Stream<Item = Result<Piece, Broken>> + Send + 'static {
    pieces.ready_chunks(READY_PIECES).flat_map(|ready| {
        let mut out = Vec::new();
        let room = if ready.len() > 2 { FLUSH_BYTES + COPY_BYTES_MAX } else { HEADER_BYTES };
        let (mut copied, mut charges) = (BytesMut::with_capacity(room), Vec::new());
        for piece in ready {
            match piece {
                Ok(Piece::Framing(b)) if b.len() <= COPY_BYTES_MAX => copied.put(b),
                Ok(Piece::Content(b, charge)) if b.len() <= COPY_BYTES_MAX => {
                    charges.push((charge, b.len() as u64));
                    copied.put(b);
                }
                other => {
                    flush(&mut copied, &mut charges, &mut out);
                    out.push(other);
                }
            }
            if copied.len() >= FLUSH_BYTES {
                flush(&mut copied, &mut charges, &mut out);
            }
        }
        flush(&mut copied, &mut charges, &mut out);
        stream::iter(out)
    })
}

fn flush(copied: &mut BytesMut, charges: &mut Vec<(Charge, u64)>, out: &mut Vec<Result<Piece, Broken>>) {
    if !copied.is_empty() {
        out.push(Ok(Piece::Mixed(copied.split().freeze(), std::mem::take(charges))));
        copied.reserve(FLUSH_BYTES + COPY_BYTES_MAX + HEADER_BYTES);
    }
}
