//! Turns items into frames (`fletch_api::frames`), for batches and leases.

use super::{
    error::{ApiError, ApiResult},
    response_body::{BodyError, Charge, Piece},
};
use crate::read_ahead::Reservation;
use bytes::{BufMut as _, Bytes, BytesMut};
use fletch_api::frames::{FrameHeader, FrameKind, HEADER_BYTES, MORE, WHOLE};
use futures::{
    Stream, StreamExt as _,
    future::{Either, ready},
    stream,
    stream::BoxStream,
};
use serde::Serialize;

/// Pieces of at most this many bytes are copied together, so that 64 samples are a few writes.
const COPY_BYTES_MAX: usize = 32 << 10;
/// A buffer of copied pieces is sent when it has this many bytes.
///
/// With one more piece it stays below the size that allocators map anew each time, which would cost a page
/// fault for every 4 KiB.
const FLUSH_BYTES: usize = 64 << 10;
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
    pieces: BoxStream<'static, Result<Piece, BodyError>>,
) -> impl Stream<Item = Result<Piece, BodyError>> + Send + 'static {
    pieces.ready_chunks(READY_PIECES_MAX).flat_map(|ready| {
        let mut out = Vec::new();
        let capacity = if ready.len() > 2 { FLUSH_BYTES + COPY_BYTES_MAX } else { HEADER_BYTES };
        let (mut copied, mut charges) = (BytesMut::with_capacity(capacity), Vec::new());
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

fn flush(copied: &mut BytesMut, charges: &mut Vec<(Charge, u64)>, out: &mut Vec<Result<Piece, BodyError>>) {
    if !copied.is_empty() {
        out.push(Ok(Piece::Mixed(copied.split().freeze(), std::mem::take(charges))));
        copied.reserve(FLUSH_BYTES + COPY_BYTES_MAX + HEADER_BYTES);
    }
}
