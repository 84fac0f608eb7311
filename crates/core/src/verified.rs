//! I1: the one gate for bytes.
//!
//! [`Verified`] can be made only by hashing every byte it holds. Everything that stores or
//! sends a chunk takes this type, so bytes that nobody checked cannot get there.

use crate::Hash;
use bytes::Bytes;
use std::ops::Range;

/// How much is brought and then hashed at once: fits a second-level cache beside its copy, and
/// is long enough for the hash to use all lanes.
const PIECE_BYTES: usize = 256 << 10;

/// A whole chunk whose bytes hash to its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    hash: Hash,
    bytes: Bytes,
}

/// The bytes are not the ones that were asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes hash to {got}, expected {expected}")]
pub struct Mismatch {
    /// The name that was asked for.
    pub expected: Hash,
    /// What the bytes hash to.
    pub got: Hash,
    /// How many bytes came.
    pub len: usize,
}

impl Verified {
    /// Hashes `bytes` (CPU-bound: large buffers belong on a blocking thread) and keeps
    /// them only if they are `expected`.
    ///
    /// # Errors
    /// [`Mismatch`] when they are not.
    pub fn check(expected: Hash, bytes: Bytes) -> Result<Self, Mismatch> {
        let got = Hash::of(&bytes);
        if got == expected {
            Ok(Verified { hash: got, bytes })
        } else {
            Err(Mismatch { expected, got, len: bytes.len() })
        }
    }

    /// Has `fill` bring the bytes of `buffer` from the first to the last, in pieces (it is told where each
    /// begins), and hashes each while it is warm in a cache of the processor. Keeps them only
    /// if they are `expected`. Blocks as long as `fill` does.
    ///
    /// # Errors
    /// What `fill` says; the inner one when the bytes are not the chunk.
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

    /// Names bytes by hashing them.
    #[must_use]
    pub fn of(bytes: Bytes) -> Self {
        Verified { hash: Hash::of(&bytes), bytes }
    }

    /// The chunk's name.
    #[must_use]
    pub fn hash(&self) -> Hash {
        self.hash
    }

    /// The whole chunk; cloning shares it.
    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// A part of the chunk, or `None` when it reaches past the end.
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
    fn i1_what_is_filled_in_pieces_is_what_is_hashed() {
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
        assert_eq!(short, Err(()), "an error of the source is handed on");
    }
}
