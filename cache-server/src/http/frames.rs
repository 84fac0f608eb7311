//! Turns items into frames (`fletch_api::frames`), for batches and leases.

use super::{
    error::{ApiError, ApiResult},
    response_body::{BodyError, Charge, Piece},
};
use crate::data::read_ahead::{ReadAhead, Reservation};
use bytes::Bytes;
use fletch_api::frames::{FrameHeader, FrameKind, MORE, WHOLE};
use fletch_store::{Copies, Gathered};
use futures::{
    Stream, StreamExt as _,
    future::{Either, ready},
    stream,
    stream::BoxStream,
};
use serde::Serialize;
use std::{ops::Range, sync::Arc};

/// Pieces of at most this many bytes are copied together, so that 64 samples are a few writes.
const COPY_BYTES_MAX: usize = 32 << 10;
/// The length of a buffer of copied pieces. Fresh ones would cost a page fault for every 4 KiB.
const COPIED_BYTES: usize = 128 << 10;
/// The most pieces that [`coalesce`] takes at once, if they are ready.
const READY_PIECES_MAX: usize = 256;

/// An item of a batch or a lease, ready to be sent.
pub struct Item {
    /// The item's position in the request.
    pub index: u32,
    /// The item's name in an archive.
    pub name: String,
    /// The item's length and bytes, or why it has none.
    pub result: ItemResult,
    /// Memory for the item's bytes, until they are sent.
    pub reservation: Reservation,
}

/// An item's length and bytes, or why it has none.
pub type ItemResult = Result<(u64, Content), ApiError>;

/// The bytes of an item, in order.
pub enum Content {
    /// The bytes were read already.
    Buffered(Vec<Piece>),
    /// The bytes are read while they are sent.
    Streamed(BoxStream<'static, ApiResult<Piece>>),
}

/// Returns the header of a frame.
pub fn frame_header(kind: FrameKind, status: u16, index: u32, len: u64) -> Piece {
    Piece::Framing(Bytes::copy_from_slice(&FrameHeader::new(kind, status, index, len).encode()))
}

/// Returns a frame with a JSON document.
pub fn json_frame(kind: FrameKind, status: u16, index: u32, document: &impl Serialize) -> [Piece; 2] {
    // Text and numbers always serialize.
    let text = serde_json::to_vec(document).unwrap_or_default();
    [frame_header(kind, status, index, text.len() as u64), Piece::Framing(text.into())]
}

/// Returns a frame that says why an item has no bytes.
pub fn error_frame(index: u32, error: &ApiError) -> Vec<Piece> {
    json_frame(FrameKind::Error, error.0.status, index, &error.0).into()
}

/// Returns the frames of an item: its data, or one error. After an error follows nothing.
pub fn item_frames(item: Item) -> impl Stream<Item = Result<Piece, BodyError>> + Send + 'static {
    let Item { index, result, reservation, .. } = item;
    let buffered = |pieces: Vec<Piece>| Either::Left(stream::iter(pieces).map(Ok));
    let (len, content) = match result {
        Ok(content) => content,
        Err(error) => return reservation.until_sent(buffered(error_frame(index, &error))),
    };
    // The bytes that are left tell the last frame. `None` after an error.
    let mut left = Some(len);
    let mut frames = move |read: ApiResult<Piece>| -> Option<Vec<Piece>> {
        let before = left?;
        Some(match read {
            Ok(Piece::Content(bytes, charge)) => {
                let n = bytes.len() as u64;
                let rest = before.saturating_sub(n);
                left = Some(rest);
                let status = if rest == 0 { WHOLE } else { MORE };
                vec![frame_header(FrameKind::Data, status, index, n), Piece::Content(bytes, charge)]
            }
            Ok(other) => vec![other],
            Err(error) => {
                left = None;
                error_frame(index, &error)
            }
        })
    };
    let frames = match content {
        _ if len == 0 => buffered(vec![frame_header(FrameKind::Data, WHOLE, index, 0)]),
        Content::Buffered(pieces) => {
            buffered(pieces.into_iter().filter_map(|p| frames(Ok(p))).flatten().collect())
        }
        Content::Streamed(pieces) => {
            let frames = pieces.scan((), move |(), read| ready(frames(read)));
            Either::Right(frames.flat_map(|pieces| stream::iter(pieces).map(Ok)).boxed())
        }
    };
    reservation.until_sent(frames)
}

/// Copies neighbouring small pieces together, as far as they are ready. Waits for no piece.
pub fn coalesce(
    read_ahead: Arc<ReadAhead>,
    pieces: BoxStream<'static, Result<Piece, BodyError>>,
) -> impl Stream<Item = Result<Piece, BodyError>> + Send + 'static {
    let ready = pieces.ready_chunks(READY_PIECES_MAX);
    ready.flat_map(move |ready| stream::iter(copy_together(&read_ahead.framing, ready)))
}

fn is_small(piece: &Result<Piece, BodyError>) -> bool {
    matches!(piece, Ok(Piece::Framing(b) | Piece::Content(b, _)) if b.len() <= COPY_BYTES_MAX)
}

/// Copies each run of small pieces into one piece. All runs share a buffer, as far as they fit.
fn copy_together(copies: &Copies, ready: Vec<Result<Piece, BodyError>>) -> Vec<Result<Piece, BodyError>> {
    // A buffer for one header would be a waste.
    if ready.iter().filter(|piece| is_small(piece)).count() < 2 {
        return ready;
    }
    let mut copied = Copied { copies, sealed: Vec::new(), open: Vec::new(), bytes: None };
    for piece in ready {
        match piece {
            Ok(Piece::Framing(b)) if b.len() <= COPY_BYTES_MAX => copied.push(&b, None),
            Ok(Piece::Content(b, charge)) if b.len() <= COPY_BYTES_MAX => copied.push(&b, Some(charge)),
            other => copied.open.push(Part::AsItIs(other)),
        }
    }
    copied.seal();
    copied.sealed
}

/// A part of what is sent.
enum Part {
    AsItIs(Result<Piece, BodyError>),
    /// A run of small pieces: where its copy lies in the open buffer, and its charges.
    Run(Range<usize>, Vec<(Charge, u64)>),
}

/// Small pieces that are copied together, in their order among the others.
struct Copied<'a> {
    copies: &'a Copies,
    sealed: Vec<Result<Piece, BodyError>>,
    /// The parts whose copies lie in `bytes`, and those between them.
    open: Vec<Part>,
    bytes: Option<Gathered>,
}

impl Copied<'_> {
    /// Adds a piece of at most [`COPY_BYTES_MAX`] bytes.
    fn push(&mut self, piece: &[u8], charge: Option<Charge>) {
        if self.bytes.as_ref().is_some_and(|bytes| bytes.len() + piece.len() > COPIED_BYTES) {
            self.seal();
        }
        let bytes = self.bytes.get_or_insert_with(|| self.copies.gather(COPIED_BYTES));
        let begin = bytes.len();
        bytes.push(piece);
        let charge = charge.map(|charge| (charge, piece.len() as u64));
        match self.open.last_mut() {
            Some(Part::Run(range, charges)) => {
                range.end = bytes.len();
                charges.extend(charge);
            }
            _ => self.open.push(Part::Run(begin..bytes.len(), charge.into_iter().collect())),
        }
    }

    /// Ends the buffer, so that its runs can be sent.
    fn seal(&mut self) {
        let bytes = self.bytes.take().map(Gathered::into_bytes).unwrap_or_default();
        self.sealed.extend(self.open.drain(..).map(|part| match part {
            Part::AsItIs(piece) => piece,
            Part::Run(range, charges) => Ok(Piece::Mixed(bytes.slice(range), charges)),
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn framing(n: usize, len: usize) -> Result<Piece, BodyError> {
        Ok(Piece::Framing(vec![u8::try_from(n % 251).unwrap_or(0); len].into()))
    }

    fn bytes_of(pieces: &[Result<Piece, BodyError>]) -> Vec<Bytes> {
        let bytes = |piece: &Result<Piece, BodyError>| match piece {
            Ok(Piece::Framing(b) | Piece::Mixed(b, _)) => b.clone(),
            _ => panic!("another piece"),
        };
        pieces.iter().map(bytes).collect()
    }

    #[test]
    fn runs_of_small_pieces_share_one_buffer_and_keep_their_order() {
        let copies = Copies::new(1 << 20);
        let long = COPY_BYTES_MAX + 1;
        // As a lease has it: headers between the bytes of long samples.
        let pieces = |n: usize| -> Vec<_> {
            (0..n).flat_map(|i| [framing(i, 16), framing(i + 1, 300), framing(i + 2, long)]).collect()
        };
        let whole = bytes_of(&pieces(40)).concat();
        let sent = copy_together(&copies, pieces(40));
        let parts = bytes_of(&sent);
        assert_eq!((parts.len(), parts.concat()), (80, whole), "a run and a long piece for each");
        assert!(parts.iter().step_by(2).all(|run| run.len() == 316));
        assert!(copies.taken() <= 2 * COPIED_BYTES as u64, "I6: {} for 40 runs", copies.taken());
        drop((parts, sent));
        let small: Vec<_> = (0..256).map(|i| framing(i, 4096)).collect();
        let whole = bytes_of(&small).concat();
        let sent = bytes_of(&copy_together(&copies, small));
        assert_eq!((sent.len(), sent.concat()), ((256 * 4096usize).div_ceil(COPIED_BYTES), whole));
        let alone = bytes_of(&copy_together(&Copies::new(0), vec![framing(7, 16), framing(8, long)]));
        assert_eq!(alone.iter().map(Bytes::len).collect::<Vec<_>>(), [16, long]);
        let without_room = copy_together(&Copies::new(0), vec![framing(7, 16), framing(8, 17)]);
        assert_eq!(bytes_of(&without_room).concat().len(), 33);
    }
}
