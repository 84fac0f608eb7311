//! 32-byte BLAKE3 hashes that identify content and structures.
//!
//! Content and chunks use plain BLAKE3, so that `b3sum` agrees. Each structure uses BLAKE3's key derivation
//! mode with a context string of its own, so that no structure can be passed off as content or as another
//! structure.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{fmt, str::FromStr};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Context strings of format 1 (`docs/FORMATS.md`, "Contexts").
pub mod context {
    /// A part's canonical encoding.
    pub const PART: &str = "fletch 2026 part 1";
    /// The root over a sample rule and its parts.
    pub const ROOT: &str = "fletch 2026 root 1";
    /// A part's placement in a layout.
    pub const PLACEMENT: &str = "fletch 2026 placement 1";
    /// A layout's id.
    pub const LAYOUT: &str = "fletch 2026 layout 1";
    /// The check value of a record in an append-only log.
    pub const RECORD: &str = "fletch 2026 record 1";
    /// The hash of a plan.
    pub const PLAN: &str = "fletch 2026 plan 1";
    /// The key of an epoch's order.
    pub const ORDER: &str = "fletch 2026 order 1";
    /// The hash of a plan together with the buckets that it is divided into.
    pub const BUCKETS: &str = "fletch 2026 buckets 1";
    /// The name of bytes at a place of an origin, in a draft.
    pub const LOCATION: &str = "fletch 2026 location 1";
    /// The short form of a location name in a domain.
    pub const LEARNED: &str = "fletch 2026 learned 1";
    /// The name of a run of groups of a chunk.
    pub const GROUP_RUN: &str = "fletch 2026 group run 1";
    /// One delivered sample in a receipt.
    pub const RECEIPT: &str = "fletch 2026 receipt 1";
}

/// The BLAKE3 hash of some content, written as 64 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Hash(pub [u8; 32]);

/// A text that is not 64 lower-case hex digits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a hash (64 lower-case hex digits): {0:?}")]
pub struct BadHash(pub String);

impl Hash {
    /// Returns the plain BLAKE3 hash of `bytes`. About 8 GB/s a core from 1 MiB up.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Hash(*blake3::hash(bytes).as_bytes())
    }

    /// Returns the raw 32 bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Returns the first 12 hex digits, for people.
    #[must_use]
    pub fn short(&self) -> String {
        hex::encode(&self.0[..6])
    }
}

/// Hashes a structure that is encoded piece by piece.
///
/// BLAKE3 hashes 16 KiB at once several times as fast as the same bytes in short pieces. So pieces are
/// collected first.
#[derive(Debug)]
pub(crate) struct StructureHasher {
    hasher: blake3::Hasher,
    pieces: Vec<u8>,
}

impl StructureHasher {
    /// The bytes that are hashed at once: at most these and one piece are in memory.
    const COLLECTED: usize = 32 << 10;

    /// `context` is one of [`context`].
    pub fn new(context: &str) -> Self {
        StructureHasher { hasher: blake3::Hasher::new_derive_key(context), pieces: Vec::new() }
    }

    /// Adds the piece that `encode` appends.
    pub fn add(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        encode(&mut self.pieces);
        if self.pieces.len() >= Self::COLLECTED {
            self.hasher.update(&self.pieces);
            self.pieces.clear();
        }
    }

    /// Returns the hash of what was added, and starts again with nothing.
    pub fn finish(&mut self) -> Hash {
        self.hasher.update(&self.pieces);
        self.pieces.clear();
        let hash = self.hasher.finalize().into();
        self.hasher.reset();
        hash
    }
}

impl From<blake3::Hash> for Hash {
    fn from(h: blake3::Hash) -> Self {
        Hash(*h.as_bytes())
    }
}

impl TryFrom<&[u8]> for Hash {
    type Error = BadHash;
    fn try_from(b: &[u8]) -> Result<Self, BadHash> {
        b.try_into().map(Hash).map_err(|_| BadHash(hex::encode(b)))
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Hash {
    type Err = BadHash;
    fn from_str(s: &str) -> Result<Self, BadHash> {
        let bad = || BadHash(s.chars().take(80).collect());
        if s.len() != 64 || s.bytes().any(|b| b.is_ascii_uppercase()) {
            return Err(bad());
        }
        let mut out = [0; 32];
        hex::decode_to_slice(s, &mut out).map_err(|_| bad())?;
        Ok(Hash(out))
    }
}

impl Serialize for Hash {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(de::Error::custom)
    }
}

macro_rules! identity {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub Hash);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = BadHash;
            fn from_str(s: &str) -> Result<Self, BadHash> {
                s.parse().map($name)
            }
        }
    };
}

identity! {
    /// The identity of a version: its sample rule and entries, whatever the layout.
    Root
}
identity! {
    /// The identity of a layout: the placement of a version's bytes in chunks, wherever the chunks are
    /// stored.
    LayoutId
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_hash_as_the_whole() {
        let mut hasher = StructureHasher::new(context::PART);
        let collected = StructureHasher::COLLECTED;
        for pieces in
            [&[][..], &[0, 7], &[collected], &[collected - 1, 1, 1], &[100; 2000], &[3 * collected, 5]]
        {
            let whole: Vec<u8> = (0u32..).map(|i| i as u8).take(pieces.iter().sum()).collect();
            let mut rest = &whole[..];
            for len in pieces {
                let (piece, after) = rest.split_at(*len);
                hasher.add(|bytes| bytes.extend_from_slice(piece));
                rest = after;
            }
            assert_eq!(hasher.finish(), Hash(blake3::derive_key(context::PART, &whole)), "{pieces:?}");
        }
    }

    #[test]
    fn hex_round_trips_and_everything_else_is_rejected() {
        let h = Hash::of(b"abc");
        assert_eq!(h.to_string().parse::<Hash>(), Ok(h));
        assert_eq!(h.to_string(), "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85");
        for bad in ["", "6437", &h.to_string().to_uppercase(), &format!("{h}0"), &"g".repeat(64)] {
            assert!(bad.parse::<Hash>().is_err(), "{bad}");
        }
    }
}
