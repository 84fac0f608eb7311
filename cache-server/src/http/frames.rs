//! Turns items into frames (`fletch_api::frames`), for batches and leases.

use super::{
    error::{ApiError, ApiResult},
    response_body::{BodyError, Charge, Piece},
};
use crate::read_ahead::{ReadAhead, Reservation};
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
use std::sync::Arc;

/// Pieces of at most this many bytes are copied together, so that 64 samples are a few writes.
const COPY_BYTES_MAX: usize = 32 << 10;
/// A buffer of copied pieces is sent when it has this many bytes.
const FLUSH_BYTES: usize = 64 << 10;
/// The length of such a buffer. It comes from the pool of copies: fresh ones cost a page fault for every 4
/// KiB.
const COPIED_BYTES: usize = FLUSH_BYTES + 2 * COPY_BYTES_MAX;
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

fn error_frame(index: u32, error: &ApiError) -> Vec<Piece> {
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
    pieces.ready_chunks(READY_PIECES_MAX).flat_map(move |ready| {
        let mut copied = Copied::new(&read_ahead.copies);
        for piece in ready {
            match piece {
                Ok(Piece::Framing(b)) if b.len() <= COPY_BYTES_MAX => copied.push(b, None),
                Ok(Piece::Content(b, charge)) if b.len() <= COPY_BYTES_MAX => copied.push(b, Some(charge)),
                other => {
                    copied.flush();
                    copied.out.push(other);
                }
            }
        }
        copied.flush();
        stream::iter(copied.out)
    })
}

/// Small pieces that are copied together, and what goes before them.
struct Copied<'a> {
    copies: &'a Copies,
    out: Vec<Result<Piece, BodyError>>,
    /// A piece that may stay alone, and is then sent as it is.
    first: Option<(Bytes, Option<Charge>)>,
    /// The pieces from the second one on. Its buffer is taken when that one comes.
    bytes: Option<Gathered>,
    charges: Vec<(Charge, u64)>,
}

impl<'a> Copied<'a> {
    fn new(copies: &'a Copies) -> Self {
        Copied { copies, out: Vec::new(), first: None, bytes: None, charges: Vec::new() }
    }

    /// Adds a piece of at most [`COPY_BYTES_MAX`] bytes.
    fn push(&mut self, piece: Bytes, charge: Option<Charge>) {
        if self.first.is_none() && self.bytes.is_none() {
            self.first = Some((piece, charge));
            return;
        }
        if let Some((bytes, charge)) = self.first.take() {
            self.copy(&bytes, charge);
        }
        self.copy(&piece, charge);
        if self.bytes.as_ref().is_some_and(|bytes| bytes.len() >= FLUSH_BYTES) {
            self.flush();
        }
    }

    fn copy(&mut self, piece: &[u8], charge: Option<Charge>) {
        let bytes = self.bytes.get_or_insert_with(|| self.copies.gather(COPIED_BYTES));
        // It is flushed at FLUSH_BYTES, so that the longest piece still fits.
        bytes.push(piece);
        self.charges.extend(charge.map(|charge| (charge, piece.len() as u64)));
    }

    fn flush(&mut self) {
        if let Some((bytes, charge)) = self.first.take() {
            self.out.push(Ok(match charge {
                Some(charge) => Piece::Content(bytes, charge),
                None => Piece::Framing(bytes),
            }));
        }
        if let Some(bytes) = self.bytes.take() {
            self.out.push(Ok(Piece::Mixed(bytes.into_bytes(), std::mem::take(&mut self.charges))));
        }
    }
}
