//! Frames: the answer to a batch or a lease request, as a stream of self-describing pieces (`docs/FORMATS.md`,
//! "Frames").
//!
//! A stream is the [`PREFACE`] and then frames: a header of 16 bytes, little-endian,
//! `kind u8 · version u8 · status u16 · index u32 · len u64`, and `len` bytes of payload.
//!
//! 1. An item's frames are neighbours and items come in the request's order.
//! 2. An item is data frames with status [`MORE`], closed by a data frame with status [`WHOLE`];
//!    or it is closed at any point by one error frame whose status is the HTTP status and whose
//!    payload is a [`crate::Problem`] in JSON. What came before an error frame is void.
//! 3. The end frame has the number of items as its index and no payload; a stream without
//!    it was cut off.
//! 4. Unknown kinds are skipped by their length. An unknown major in the preface is an error.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// First bytes of every stream: six of magic, then the major version as u16.
pub const PREFACE: [u8; 8] = *b"FLTFRM\x01\x00";
/// The major version this build speaks.
pub const FRAMES_MAJOR: u16 = 1;
/// Bytes of a frame header.
pub const HEADER_BYTES: usize = 16;
/// The version byte of frames of major 1; informational, readers accept any.
pub const FRAME_VERSION: u8 = 1;
/// Status of a data frame that closes its item.
pub const WHOLE: u16 = 200;
/// Status of a data frame after which the item goes on.
pub const MORE: u16 = 206;

/// What a frame is. The numbers are part of format 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// Bytes of an item.
    Data = 1,
    /// The item failed.
    Error = 2,
    /// All items were answered.
    End = 3,
    /// Of a lease: where the bytes of an item are, instead of the bytes ([`crate::SampleRef`] in JSON).
    /// It closes the item.
    Ref = 4,
    /// Nothing but a sign of life; readers skip it.
    Heartbeat = 5,
    /// Of a lease: what was granted ([`crate::LeaseGrant`] in JSON), before every item.
    Grant = 6,
    /// Of a lease: what the item's bytes are ([`crate::SampleHead`] in JSON), before them.
    Sample = 7,
}

/// A frame's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// What it is, as on the wire; see [`FrameKind`].
    pub kind: u8,
    /// [`WHOLE`], [`MORE`], or an HTTP error status.
    pub status: u16,
    /// Which item of the request.
    pub index: u32,
    /// Bytes of payload.
    pub len: u64,
}

impl FrameHeader {
    /// A header of a known kind.
    #[must_use]
    pub fn new(kind: FrameKind, status: u16, index: u32, len: u64) -> Self {
        FrameHeader { kind: kind as u8, status, index, len }
    }

    /// The 16 bytes on the wire.
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

/// One frame as read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// Bytes of item `index`; `whole` when they close it.
    Data {
        /// Which item.
        index: u32,
        /// Whether this frame closes the item.
        whole: bool,
        /// The bytes.
        bytes: Bytes,
    },
    /// Item `index` failed.
    Error {
        /// Which item.
        index: u32,
        /// The HTTP status it would have had alone.
        status: u16,
        /// A [`crate::Problem`] in JSON.
        problem: Bytes,
    },
    /// What was granted.
    Grant {
        /// A [`crate::LeaseGrant`] in JSON.
        grant: Bytes,
    },
    /// What the bytes of item `index` are.
    Sample {
        /// Which item.
        index: u32,
        /// A [`crate::SampleHead`] in JSON.
        head: Bytes,
    },
    /// Where the bytes of item `index` are.
    Ref {
        /// Which item.
        index: u32,
        /// A [`crate::SampleRef`] in JSON.
        location: Bytes,
    },
    /// Every item was answered.
    End {
        /// How many items.
        items: u32,
    },
}

/// Why a stream cannot be read on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadFrames {
    /// Not a stream of frames.
    #[error("not a stream of Fletch frames")]
    Magic,
    /// A newer major version.
    #[error("frames of major {0}, this build reads 1; use a newer build")]
    Major(u16),
    /// A payload is longer than the reader allows.
    #[error("frame of {len} bytes, at most {max} are allowed")]
    TooLong {
        /// What the header says.
        len: u64,
        /// What the reader allows.
        max: u64,
    },
    /// Bytes after the end frame.
    #[error("bytes after the end of the stream")]
    AfterEnd,
    /// The stream stopped before its end frame.
    #[error("the stream was cut off")]
    Cut,
}

impl BadFrames {
    /// Who can act on it.
    #[must_use]
    pub fn kind(&self) -> fletch_core::Kind {
        match self {
            BadFrames::Cut => fletch_core::Kind::Unavailable,
            _ => fletch_core::Kind::Corrupt,
        }
    }
}

/// Reads a stream piece by piece, however it was cut in transit. Holds at most one frame and
/// what was fed beside it; a payload that lies inside one fed piece is not copied.
#[derive(Debug)]
pub struct Decoder {
    pieces: std::collections::VecDeque<Bytes>,
    held: u64,
    payload_max: u64,
    begun: bool,
    ended: bool,
    /// Bytes of a frame of unknown kind still to be dropped.
    skip: u64,
    head: Option<FrameHeader>,
}

impl Decoder {
    /// A decoder that refuses payloads over `payload_max` bytes.
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

    /// Adds what came next.
    pub fn feed(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.held += piece.len() as u64;
            self.pieces.push_back(piece);
        }
    }

    /// The next frame; `None` when more must be fed first (or the stream is over).
    ///
    /// # Errors
    /// [`BadFrames`]; the decoder is of no more use then.
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
            self.drop_skipped();
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

    /// Whether the end frame was read.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// To be called when the transport says that nothing more comes.
    ///
    /// # Errors
    /// [`BadFrames::Cut`] when the end frame was not read.
    pub fn finish(&self) -> Result<(), BadFrames> {
        if self.ended && self.held == 0 { Ok(()) } else { Err(BadFrames::Cut) }
    }

    fn drop_skipped(&mut self) {
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

    /// Exactly `n` bytes, if that many are held.
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
