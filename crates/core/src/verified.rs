//! I1: the one gate for bytes.
//!
//! A [`Verified`] can be made only by hashing every byte of it. All code that stores or sends a chunk takes
//! this type, so unchecked bytes cannot be stored or sent.

use crate::Hash;
use bytes::Bytes;
use std::ops::Range;

/// The bytes that are read and then hashed at once. They fit in a second-level cache beside their copy, and
/// are enough for the hash to use all lanes.
const PIECE_BYTES: usize = 256 << 10;

/// A whole chunk whose bytes hash to its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    hash: Hash,
    bytes: Bytes,
}

/// Bytes do not have the expected hash.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes hash to {got}, expected {expected}")]
pub struct Mismatch {
    /// The expected hash.
    pub expected: Hash,
    /// The hash of the bytes.
    pub got: Hash,
    /// The number of bytes.
    pub len: usize,
}

impl Verified {
    /// Returns `bytes` as verified if their hash is `expected`. CPU-bound: large buffers belong on a blocking
    /// thread.
    ///
    /// # Errors
    /// [`Mismatch`] when the hash differs.
    pub fn check(expected: Hash, bytes: Bytes) -> Result<Self, Mismatch> {
        let got = Hash::of(&bytes);
        if got == expected {
            Ok(Verified { hash: got, bytes })
        } else {
            Err(Mismatch { expected, got, len: bytes.len() })
        }
    }

    /// Fills `buffer` piece by piece with `fill`, and returns it as verified if its hash is `expected`.
    ///
    /// `fill` gets the offset of each piece, from the first piece to the last. Each piece is hashed while it
    /// is still in the processor's cache. Blocks as long as `fill` does.
    ///
    /// # Errors
    /// The error of `fill`; the inner [`Mismatch`] when the hash differs.
    pub fn fill<B, E>(
        expected: Hash,
        mut buffer: B,
        mut fill: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<Result<Self, Mismatch>, E>
    where
        B: AsRef<[u8]> + AsMut<[u8]> + Send + 'static,
    {
        let mut hasher = blake3::Hasher::new();
        let mut at = 0;
        for piece in buffer.as_mut().chunks_mut(PIECE_BYTES) {
            fill(at, piece)?;
            hasher.update(piece);
            at += piece.len();
        }
        let got = Hash::from(hasher.finalize());
        let len = buffer.as_ref().len();
        if got != expected || len != at {
            return Ok(Err(Mismatch { expected, got, len }));
        }
        Ok(Ok(Verified { hash: got, bytes: Bytes::from_owner(buffer) }))
    }

    /// Hashes bytes and returns them under that hash.
    #[must_use]
    pub fn of(bytes: Bytes) -> Self {
        Verified { hash: Hash::of(&bytes), bytes }
    }

    /// Returns the chunk's hash.
    #[must_use]
    pub fn hash(&self) -> Hash {
        self.hash
    }

    /// Returns the whole chunk. A clone shares the memory.
    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Returns a part of the chunk, or `None` when the range reaches past the end.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Option<Bytes> {
        (range.start <= range.end && range.end <= self.bytes.len()).then(|| self.bytes.slice(range))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i1_only_matching_bytes_pass() {
        let v = Verified::of(Bytes::from_static(b"chunk"));
        assert_eq!(Verified::check(v.hash(), v.bytes().clone()), Ok(v.clone()));
        let err = Verified::check(v.hash(), Bytes::from_static(b"chunK")).expect_err("one flipped bit");
        assert_eq!((err.expected, err.len), (v.hash(), 5));
        assert_eq!(v.slice(1..3), Some(Bytes::from_static(b"hu")));
        assert_eq!(v.slice(3..6), None);
    }

    #[test]
    fn i1_bytes_filled_in_pieces_are_hashed() {
        let want: Vec<u8> = (0..3 * PIECE_BYTES + 5).map(|i| (i % 251) as u8).collect();
        let from = |want: &[u8], flip: Option<usize>| {
            let mut bytes = want.to_vec();
            if let Some(i) = flip {
                bytes[i] ^= 1;
            }
            move |at: usize, piece: &mut [u8]| -> Result<(), ()> {
                piece.copy_from_slice(bytes.get(at..at + piece.len()).ok_or(())?);
                Ok(())
            }
        };
        for len in [0, 1, PIECE_BYTES, PIECE_BYTES + 1, want.len()] {
            let (want, hash) = (&want[..len], Hash::of(&want[..len]));
            let v = Verified::fill(hash, vec![0; len], from(want, None)).expect("filled").expect("right");
            assert_eq!((v.bytes().as_ref(), v.hash()), (want, hash));
            for flip in [0, len / 2, len.saturating_sub(1)].into_iter().filter(|_| len > 0) {
                let wrong = Verified::fill(hash, vec![0; len], from(want, Some(flip))).expect("filled");
                assert_eq!(wrong.expect_err("one flipped bit").expected, hash);
            }
        }
        let short = Verified::fill(Hash::of(&want), vec![0; want.len()], from(&want[1..], None));
        assert_eq!(short, Err(()), "an error of `fill` is returned");
    }
}
