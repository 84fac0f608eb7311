//! The answer to a batch, piece by piece.

use crate::ClientError;
use crate::body::From;
use bytes::{Bytes, BytesMut};
use fletch_api::Problem;
use fletch_api::frames::{Decoder, Frame};
use reqwest::Response;
use tokio::time::{Instant, timeout_at};

/// One item's outcome.
#[derive(Debug)]
pub struct BatchPiece {
    /// Which item of the request.
    pub index: usize,
    /// Its bytes, which **nobody checked**, or why there are none.
    pub outcome: Result<Bytes, Box<Problem>>,
}

/// A batch that is being answered; holds at most one item.
#[derive(Debug)]
pub struct Batch {
    endpoint: String,
    response: Response,
    decoder: Decoder,
    open: Option<BytesMut>,
    items: usize,
    /// Items whose outcome was handed out.
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

    /// The next item's outcome, in the request's order; `None` when all were answered.
    ///
    /// # Errors
    /// [`ClientError`]: the stream was cut off, is late, or breaks the format. Items not seen until
    /// then have no outcome.
    pub async fn next(&mut self) -> Result<Option<BatchPiece>, ClientError> {
        let until = self.until;
        let piece = timeout_at(until, self.advance())
            .await
            .unwrap_or_else(|_| Err(From(&self.endpoint).gone("the batch did not end in time")))?;
        self.answered += usize::from(piece.is_some());
        if piece.is_none() && self.answered != self.items {
            let why = format!("{} items came, {} were asked", self.answered, self.items);
            return Err(From(&self.endpoint).protocol(why));
        }
        Ok(piece)
    }

    async fn advance(&mut self) -> Result<Option<BatchPiece>, ClientError> {
        let from = From(&self.endpoint);
        loop {
            match self.decoder.next_frame().map_err(|e| from.protocol(e.to_string()))? {
                Some(Frame::Data { index, whole, bytes }) => {
                    let have = self.open.as_ref().map_or(0, BytesMut::len) as u64;
                    if have + bytes.len() as u64 > self.item_bytes_max {
                        return Err(from
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
                        .map_err(|e| from.protocol(format!("unreadable problem: {e}")))?;
                    return Ok(Some(piece(index, Err(Box::new(problem)))));
                }
                // Of leases; a batch has none.
                Some(Frame::Grant { .. } | Frame::Sample { .. } | Frame::Ref { .. }) => {}
                Some(Frame::End { items }) if items as usize == self.items => return Ok(None),
                Some(Frame::End { items }) => {
                    return Err(from.protocol(format!("{items} items answered, {} asked", self.items)));
                }
                None if self.decoder.ended() => return Ok(None),
                None => match self.response.chunk().await.map_err(|e| from.unreachable(&e))? {
                    Some(more) => self.decoder.feed(more),
                    None => {
                        self.decoder.finish().map_err(|e| from.gone(e.to_string()))?;
                    }
                },
            }
        }
    }
}

fn piece(index: u32, outcome: Result<Bytes, Box<Problem>>) -> BatchPiece {
    BatchPiece { index: index as usize, outcome }
}
