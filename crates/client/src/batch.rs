//! Decodes the answer to a batch request, item by item.

use crate::ClientError;
use crate::body::Responder;
use bytes::{Bytes, BytesMut};
use fletch_api::Problem;
use fletch_api::frames::{Decoder, Frame};
use reqwest::Response;
use tokio::time::{Instant, timeout_at};

/// The outcome of one item.
#[derive(Debug)]
pub struct BatchPiece {
    /// The position of the item in the request.
    pub index: usize,
    /// The item's bytes, **not verified**, or the problem that the server reported for it.
    pub outcome: Result<Bytes, Box<Problem>>,
}

/// The answer to a batch while it arrives. Holds at most one item in memory.
#[derive(Debug)]
pub struct Batch {
    endpoint: String,
    response: Response,
    decoder: Decoder,
    open: Option<BytesMut>,
    items: usize,
    /// Number of items whose outcome was returned.
    answered: usize,
    item_bytes_max: u64,
    until: Instant,
}

impl Batch {
    pub(crate) fn new(
        endpoint: String,
        response: Response,
        items: usize,
        item_bytes_max: u64,
        until: Instant,
    ) -> Self {
        let decoder = Decoder::new(item_bytes_max.max(64 << 10));
        Batch { endpoint, response, decoder, open: None, items, answered: 0, item_bytes_max, until }
    }

    /// Returns the outcome of the next item, in the request's order, or `None` after the last.
    ///
    /// # Errors
    /// [`ClientError`]: the stream was cut off, missed its deadline, or breaks the format. The remaining
    /// items then have no outcome.
    pub async fn next(&mut self) -> Result<Option<BatchPiece>, ClientError> {
        let until = self.until;
        let piece = timeout_at(until, self.advance()).await.unwrap_or_else(|_| {
            Err(Responder(&self.endpoint).unreachable("the batch did not end before its deadline"))
        })?;
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
