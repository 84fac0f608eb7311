//! Frames: the stream format of the answers to batches and lease requests (`docs/FORMATS.md`, "Frames").
//!
//! A stream is the [`PREFACE`] and then frames. A frame is a header of 16 bytes, little-endian,
//! `kind u8 · version u8 · status u16 · index u32 · len u64`, and `len` bytes of payload.
//!
//! 1. The frames of an item are adjacent, and items come in the order of the request.
//! 2. An item is any number of data frames with status [`MORE`] and one with status [`WHOLE`], which closes
//!    it. Or one error frame closes it at any point. The error frame has the HTTP status as its status and a
//!    [`crate::Problem`] in JSON as its payload. It makes the item's earlier frames void.
//! 3. The end frame has the number of items as its index and no payload. A stream without it was cut off.
//! 4. A reader skips an unknown kind by its length. An unknown major version in the preface is an error.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// The first bytes of every stream: six bytes of magic, then the major version as u16.
pub const PREFACE: [u8; 8] = *b"FLTFRM\x01\x00";
/// The major version that this build supports.
pub const FRAMES_MAJOR: u16 = 1;
/// The length of a frame header, in bytes.
pub const HEADER_BYTES: usize = 16;
/// The version byte of frames of major version 1. Readers ignore it.
pub const FRAME_VERSION: u8 = 1;
/// The status of a data frame that closes its item.
pub const WHOLE: u16 = 200;
/// The status of a data frame that more data frames of its item follow.
pub const MORE: u16 = 206;

/// The kind of a frame. The numbers are part of format 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// Bytes of an item.
    Data = 1,
    /// The item failed.
    Error = 2,
    /// All items were answered.
    End = 3,
    /// In a lease: the location of an item's bytes, a [`crate::SampleRef`] in JSON. It closes the item.
    Ref = 4,
    /// A heartbeat without content. Readers skip it.
    Heartbeat = 5,
    /// In a lease: the grant, a [`crate::LeaseGrant`] in JSON. It comes before every item.
    Grant = 6,
    /// In a lease: the description of an item, a [`crate::SampleHead`] in JSON.
    ///
    /// It comes before the item's bytes.
    Sample = 7,
}

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// The kind of the frame, a number of [`FrameKind`].
    pub kind: u8,
    /// [`WHOLE`], [`MORE`], or an HTTP error status.
    pub status: u16,
    /// The position of the item in the request.
    pub index: u32,
    /// The length of the payload, in bytes.
    pub len: u64,
}

impl FrameHeader {
    /// Returns a header of a known kind.
    #[must_use]
    pub fn new(kind: FrameKind, status: u16, index: u32, len: u64) -> Self {
        FrameHeader { kind: kind as u8, status, index, len }
    }

    /// Returns the 16 bytes of the header.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        let mut w = &mut out[..];
        w.put_u8(self.kind);
        w.put_u8(FRAME_VERSION);
        w.put_u16_le(self.status);
        w.put_u32_le(self.index);
        w.put_u64_le(self.len);
        out
    }

    fn decode(mut b: &[u8]) -> Self {
        let kind = b.get_u8();
        b.advance(1);
        FrameHeader { kind, status: b.get_u16_le(), index: b.get_u32_le(), len: b.get_u64_le() }
    }
}

/// A frame that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// Bytes of an item.
    Data {
        /// The position of the item in the request.
        index: u32,
        /// Whether this frame closes the item.
        whole: bool,
        /// The bytes.
        bytes: Bytes,
    },
    /// The item failed.
    Error {
        /// The position of the item in the request.
        index: u32,
        /// The HTTP status of a request for this item alone.
        status: u16,
        /// A [`crate::Problem`] in JSON.
        problem: Bytes,
    },
    /// The grant of a lease.
    Grant {
        /// A [`crate::LeaseGrant`] in JSON.
        grant: Bytes,
    },
    /// The description of an item.
    Sample {
        /// The position of the item in the request.
        index: u32,
        /// A [`crate::SampleHead`] in JSON.
        head: Bytes,
    },
    /// The location of an item's bytes.
    Ref {
        /// The position of the item in the request.
        index: u32,
        /// A [`crate::SampleRef`] in JSON.
        location: Bytes,
    },
    /// Every item was answered.
    End {
        /// The number of items.
        items: u32,
    },
}

/// Why a stream cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadFrames {
    /// The stream does not begin with the preface.
    #[error("the answer is not a stream of Fletch frames")]
    Magic,
    /// The stream has another major version.
    #[error("the stream has frames of major version {0}, this build supports 1; use a newer build")]
    Major(u16),
    /// A payload is longer than the reader allows.
    #[error("a frame has {len} bytes, at most {max} are allowed")]
    TooLong {
        /// The length of the payload, in bytes.
        len: u64,
        /// The longest payload that the reader allows, in bytes.
        max: u64,
    },
    /// Bytes follow the end frame.
    #[error("bytes follow the end of the stream")]
    AfterEnd,
    /// The stream ended before its end frame.
    #[error("the stream was cut off before its end frame")]
    Cut,
}

impl BadFrames {
    /// Returns who can act on the error.
    #[must_use]
    pub fn kind(&self) -> fletch_core::Kind {
        match self {
            BadFrames::Cut => fletch_core::Kind::Unavailable,
            _ => fletch_core::Kind::Corrupt,
        }
    }
}

/// Decodes a stream from pieces of any length.
///
/// Holds at most one frame and the rest of the last piece. Does not copy a payload that lies in one piece.
#[derive(Debug)]
pub struct Decoder {
    pieces: std::collections::VecDeque<Bytes>,
    held: u64,
    payload_max: u64,
    begun: bool,
    ended: bool,
    /// The bytes of a frame of unknown kind that are still to be skipped.
    skip: u64,
    head: Option<FrameHeader>,
}

impl Decoder {
    /// Returns a decoder that rejects payloads longer than `payload_max` bytes.
    #[must_use]
    pub fn new(payload_max: u64) -> Self {
        Decoder {
            pieces: std::collections::VecDeque::new(),
            held: 0,
            payload_max,
            begun: false,
            ended: false,
            skip: 0,
            head: None,
        }
    }

    /// Adds the next piece of the stream.
    pub fn feed(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.held += piece.len() as u64;
            self.pieces.push_back(piece);
        }
    }

    /// Returns the next frame, or `None` if the decoder needs more pieces or the stream has ended.
    ///
    /// # Errors
    /// [`BadFrames`]. The decoder cannot be used after an error.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, BadFrames> {
        loop {
            if self.ended {
                return if self.held == 0 { Ok(None) } else { Err(BadFrames::AfterEnd) };
            }
            if !self.begun {
                let Some(b) = self.take(PREFACE.len() as u64) else { return Ok(None) };
                if b[..6] != PREFACE[..6] {
                    return Err(BadFrames::Magic);
                }
                let major = u16::from_le_bytes([b[6], b[7]]);
                if major != FRAMES_MAJOR {
                    return Err(BadFrames::Major(major));
                }
                self.begun = true;
            }
            self.skip_unknown();
            if self.skip > 0 {
                return Ok(None);
            }
            let head = match self.head {
                Some(h) => h,
                None => {
                    let Some(b) = self.take(HEADER_BYTES as u64) else { return Ok(None) };
                    FrameHeader::decode(&b)
                }
            };
            const DATA: u8 = FrameKind::Data as u8;
            const ERROR: u8 = FrameKind::Error as u8;
            const END: u8 = FrameKind::End as u8;
            const REF: u8 = FrameKind::Ref as u8;
            const GRANT: u8 = FrameKind::Grant as u8;
            const SAMPLE: u8 = FrameKind::Sample as u8;
            if !matches!(head.kind, DATA | ERROR | END | REF | GRANT | SAMPLE) {
                self.skip = head.len;
                continue;
            }
            if head.len > self.payload_max {
                return Err(BadFrames::TooLong { len: head.len, max: self.payload_max });
            }
            self.head = Some(head);
            let Some(bytes) = self.take(head.len) else { return Ok(None) };
            self.head = None;
            let FrameHeader { status, index, .. } = head;
            return Ok(Some(match head.kind {
                DATA => Frame::Data { index, whole: status != MORE, bytes },
                ERROR => Frame::Error { index, status, problem: bytes },
                REF => Frame::Ref { index, location: bytes },
                GRANT => Frame::Grant { grant: bytes },
                SAMPLE => Frame::Sample { index, head: bytes },
                _ => {
                    self.ended = true;
                    Frame::End { items: index }
                }
            }));
        }
    }

    /// Returns whether the end frame was read.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Checks that the stream is complete. Call it when the transport reports the end of the answer.
    ///
    /// # Errors
    /// [`BadFrames::Cut`] if the end frame was not read.
    pub fn finish(&self) -> Result<(), BadFrames> {
        if self.ended && self.held == 0 { Ok(()) } else { Err(BadFrames::Cut) }
    }

    fn skip_unknown(&mut self) {
        while self.skip > 0 {
            let Some(front) = self.pieces.front_mut() else { return };
            let n = usize::try_from(self.skip).map_or(front.len(), |s| s.min(front.len()));
            front.advance(n);
            self.skip -= n as u64;
            self.held -= n as u64;
            if front.is_empty() {
                self.pieces.pop_front();
            }
        }
    }

    /// Returns exactly `n` bytes, if the decoder holds that many.
    fn take(&mut self, n: u64) -> Option<Bytes> {
        if self.held < n {
            return None;
        }
        self.held -= n;
        // Held bytes fit in memory, so n does.
        let n = usize::try_from(n).unwrap_or(usize::MAX);
        if n == 0 {
            return Some(Bytes::new());
        }
        let front = self.pieces.front_mut()?;
        let out = if front.len() >= n {
            front.split_to(n)
        } else {
            let mut out = BytesMut::with_capacity(n);
            while out.len() < n {
                let front = self.pieces.front_mut()?;
                let m = front.len().min(n - out.len());
                out.extend_from_slice(&front.split_to(m));
                if front.is_empty() {
                    self.pieces.pop_front();
                }
            }
            out.freeze()
        };
        if self.pieces.front().is_some_and(Bytes::is_empty) {
            self.pieces.pop_front();
        }
        Some(out)
    }
}

#[cfg(test)]
mod tests;
