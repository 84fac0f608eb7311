//! I1: the one gate for bytes.
//!
//! [`Verified`] can be made only by hashing every byte it holds. Everything that stores or
//! sends a chunk takes this type, so bytes that nobody checked cannot get there.

use crate::Hash;
use bytes::Bytes;
use std::ops::Range;

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
}
