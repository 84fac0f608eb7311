//! A batch of pieces: divides it among the servers that own the chunks, and decodes the answers item by item.
//!
//! 1. The outcomes come in the order of the items, whichever server sends them.
//! 2. After a server broke off, the other servers are asked for what is missing, once for each part.

use crate::body::Responder;
use crate::call::Call;
use crate::client::to_json;
use crate::server::Server;
use crate::{Client, ClientError};
use bytes::{Bytes, BytesMut};
use fletch_api::frames::{Decoder, Frame};
use fletch_api::{BatchItem, BatchRequest, Problem, headers, routes};
use fletch_core::{Hash, Root};
use futures::future::join_all;
use http::{HeaderValue, Method, header};
use reqwest::Response;
use std::{collections::VecDeque, sync::Arc};
use tokio::time::{Instant, timeout_at};

/// An item of a batch, and the chunk that has its bytes.
#[derive(Debug, Clone)]
pub struct PlacedItem {
    /// The item.
    pub item: BatchItem,
    /// The chunk, by which the server is chosen. `None`: any server is asked.
    pub chunk: Option<Hash>,
}

impl From<BatchItem> for PlacedItem {
    fn from(item: BatchItem) -> Self {
        let chunk = match &item {
            BatchItem::Chunk(span) => Some(span.hash),
            _ => None,
        };
        PlacedItem { item, chunk }
    }
}

/// The outcome of one item.
#[derive(Debug)]
pub struct BatchPiece {
    /// The position of the item in the request.
    pub index: usize,
    /// The item's bytes, **not verified**, or the problem that the server reported for it.
    pub outcome: Result<Bytes, Box<Problem>>,
}

/// The answer to a batch while it arrives. Holds at most one item of each server in memory.
#[derive(Debug)]
pub struct Batch {
    client: Client,
    root: Root,
    items: Vec<PlacedItem>,
    item_bytes_max: u64,
    until: Instant,
    parts: Vec<Part>,
    /// Number of items whose outcome was returned.
    answered: usize,
}

/// The items that one server sends.
#[derive(Debug)]
struct Part {
    server: Arc<Server>,
    stream: PartStream,
    /// The positions of the items whose outcome is missing, in order.
    missing: VecDeque<usize>,
    /// Whether a server broke off, and another one sends the rest.
    is_second: bool,
}

impl Batch {
    /// Asks the owners of the chunks, all at once.
    pub(crate) async fn open(
        client: Client,
        root: Root,
        items: Vec<PlacedItem>,
        item_bytes_max: u64,
        until: Instant,
    ) -> Result<Self, ClientError> {
        // A server has few items in a batch, and a batch few servers.
        let mut split: Vec<(Option<Arc<Server>>, Vec<usize>)> = Vec::new();
        for (index, placed) in items.iter().enumerate() {
            let server = client.first_for(placed.chunk);
            let is_same = |known: &Option<Arc<Server>>| match (known, &server) {
                (Some(a), Some(b)) => Arc::ptr_eq(a, b),
                (a, b) => a.is_none() && b.is_none(),
            };
            match split.iter_mut().find(|part| is_same(&part.0)) {
                Some(part) => part.1.push(index),
                None => split.push((server, vec![index])),
            }
        }
        if split.is_empty() {
            split.push((None, Vec::new()));
        }
        let mut batch = Batch { client, root, items, item_bytes_max, until, parts: Vec::new(), answered: 0 };
        let opening = split.into_iter().map(|(_, indexes)| batch.part(indexes, false));
        let parts = join_all(opening).await;
        batch.parts = parts.into_iter().collect::<Result<_, _>>()?;
        Ok(batch)
    }

    /// Asks for some of the items: the first that owns their first chunk and answers.
    async fn part(&self, indexes: Vec<usize>, is_second: bool) -> Result<Part, ClientError> {
        let of = |i: &usize| self.items.get(*i);
        let items = indexes.iter().filter_map(of).map(|p| p.item.clone()).collect();
        let chunk = indexes.first().and_then(of).and_then(|placed| placed.chunk);
        let call = Call::new(Method::POST, routes::batch(self.root))
            .json(to_json(&BatchRequest { items })?)
            .header(header::ACCEPT, HeaderValue::from_static(headers::FRAMES))
            .about(chunk, self.client.skip());
        let (server, response) = self.client.open(&call, self.until).await?;
        let stream = PartStream {
            endpoint: server.shown.to_string(),
            response,
            decoder: Decoder::new(self.item_bytes_max.max(64 << 10)),
            open: None,
            items: indexes.len(),
            answered: 0,
            item_bytes_max: self.item_bytes_max,
        };
        Ok(Part { server, stream, missing: indexes.into(), is_second })
    }

    /// Returns the outcome of the next item, in the request's order, or `None` after the last.
    ///
    /// # Errors
    /// [`ClientError`]: the stream was cut off, missed its deadline, or breaks the format. The remaining
    /// items then have no outcome.
    pub async fn next(&mut self) -> Result<Option<BatchPiece>, ClientError> {
        let until = self.until;
        let next = self.answered;
        // After the last item, every part must end as it should.
        let at = self.parts.iter().position(|part| part.missing.front() == Some(&next));
        let Some(at) = at else {
            for part in &mut self.parts {
                if let Some(piece) = timed(until, &mut part.stream).await? {
                    let why = format!("item {} was not requested", piece.index);
                    return Err(Responder(&part.stream.endpoint).protocol(why));
                }
            }
            return Ok(None);
        };
        loop {
            let Some(part) = self.parts.get_mut(at) else { return Ok(None) };
            match timed(until, &mut part.stream).await {
                Ok(Some(piece)) => {
                    // A server that skips items is reported by the caller, which knows what it wants.
                    let index = match self.parts.len() {
                        1 if !self.parts[at].is_second => piece.index,
                        _ if piece.index + 1 == self.parts[at].stream.answered => next,
                        _ => {
                            let why = format!("item {} came out of order", piece.index);
                            return Err(Responder(&self.parts[at].stream.endpoint).protocol(why));
                        }
                    };
                    self.parts[at].missing.pop_front();
                    self.answered += 1;
                    return Ok(Some(BatchPiece { index, outcome: piece.outcome }));
                }
                Ok(None) => {
                    let (stream, missing) = (&part.stream, part.missing.len());
                    let why = format!("the batch ended, and {missing} items are missing");
                    return Err(Responder(&stream.endpoint).protocol(why));
                }
                Err(e) if e.is_unreachable() && !part.is_second && Instant::now() < until => {
                    self.client.broke_off(&part.server);
                    if !self.client.has_another(&part.server) {
                        return Err(e);
                    }
                    let missing = part.missing.iter().copied().collect();
                    tracing::debug!(error = %e, "asking other servers for the rest of a batch");
                    self.parts[at] = self.part(missing, true).await?;
                }
                Err(e) => return Err(e),
            }
        }
    }
}

async fn timed(until: Instant, stream: &mut PartStream) -> Result<Option<BatchPiece>, ClientError> {
    let next = timeout_at(until, stream.next()).await;
    next.unwrap_or_else(|_| {
        Err(Responder(&stream.endpoint).unreachable("the batch did not end before its deadline"))
    })
}

/// The answer of one server while it arrives.
#[derive(Debug)]
struct PartStream {
    endpoint: String,
    response: Response,
    decoder: Decoder,
    open: Option<BytesMut>,
    items: usize,
    /// Number of items whose outcome was returned.
    answered: usize,
    item_bytes_max: u64,
}

impl PartStream {
    async fn next(&mut self) -> Result<Option<BatchPiece>, ClientError> {
        let piece = self.advance().await?;
        self.answered += usize::from(piece.is_some());
        if piece.is_none() && self.answered != self.items {
            let why = format!("the batch has {} items, {} were requested", self.answered, self.items);
            return Err(Responder(&self.endpoint).protocol(why));
        }
        Ok(piece)
    }

    async fn advance(&mut self) -> Result<Option<BatchPiece>, ClientError> {
        let server = Responder(&self.endpoint);
        loop {
            match self.decoder.next_frame().map_err(|e| server.protocol(e.to_string()))? {
                Some(Frame::Data { index, whole, bytes }) => {
                    let have = self.open.as_ref().map_or(0, BytesMut::len) as u64;
                    if have + bytes.len() as u64 > self.item_bytes_max {
                        return Err(server
                            .protocol(format!("item {index} is longer than {} bytes", self.item_bytes_max)));
                    }
                    match (self.open.take(), whole) {
                        (None, true) => return Ok(Some(piece(index, Ok(bytes)))),
                        (open, whole) => {
                            let mut open = open.unwrap_or_default();
                            open.extend_from_slice(&bytes);
                            if whole {
                                return Ok(Some(piece(index, Ok(open.freeze()))));
                            }
                            self.open = Some(open);
                        }
                    }
                }
                Some(Frame::Error { index, problem, .. }) => {
                    self.open = None;
                    let problem = serde_json::from_slice(&problem)
                        .map_err(|e| server.protocol(format!("a problem document cannot be read: {e}")))?;
                    return Ok(Some(piece(index, Err(Box::new(problem)))));
                }
                // Frames of leases.
                Some(Frame::Grant { .. } | Frame::Sample { .. } | Frame::Ref { .. }) => {}
                Some(Frame::End { items }) if items as usize == self.items => return Ok(None),
                Some(Frame::End { items }) => {
                    return Err(server.protocol(format!(
                        "the batch says it has {items} items, {} were requested",
                        self.items
                    )));
                }
                None if self.decoder.ended() => return Ok(None),
                None => match self.response.chunk().await.map_err(|e| server.transport(&e))? {
                    Some(more) => self.decoder.feed(more),
                    None => {
                        self.decoder.finish().map_err(|e| server.unreachable(e.to_string()))?;
                    }
                },
            }
        }
    }
}

fn piece(index: u32, outcome: Result<Bytes, Box<Problem>>) -> BatchPiece {
    BatchPiece { index: index as usize, outcome }
}
