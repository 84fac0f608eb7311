//! The outcome of a read: a verified chunk and the tier that it came from, or an error.

use bytes::Bytes;
use fletch_core::{Kind, Mismatch, Verified};
use std::{error::Error, ops::Range, sync::Arc, time::Duration};

/// Why a fetch failed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{source}")]
pub struct FetchError {
    /// Says who can act on the error.
    pub kind: Kind,
    /// The fetcher's own error. Code that knows its type downcasts it.
    pub source: Arc<dyn Error + Send + Sync>,
}

impl FetchError {
    /// Wraps the fetcher's own error.
    pub fn new(kind: Kind, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        FetchError { kind, source: Arc::from(source.into()) }
    }
}

/// Why a read failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ReadError {
    /// The fetch failed.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// Every attempt of the fetch returned wrong bytes.
    #[error("{0}")]
    Corrupt(Mismatch),
    /// No memory came free before the deadline.
    #[error("no memory for {len} bytes came free within {within:?}")]
    Overloaded {
        /// Bytes that the read needed.
        len: u32,
        /// How long the read waited.
        within: Duration,
    },
    /// The fetch did not end before the deadline.
    #[error("the fetch did not end within {0:?}")]
    Deadline(Duration),
    /// The fetch's task ended without an outcome: it panicked, or the runtime is shutting down.
    #[error("the task of the fetch ended without an outcome; try again")]
    Lost,
}

impl ReadError {
    /// Says who can act on the error.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            ReadError::Fetch(e) => e.kind,
            ReadError::Corrupt(_) => Kind::Corrupt,
            ReadError::Overloaded { .. } => Kind::Overloaded,
            ReadError::Deadline(_) => Kind::Unavailable,
            ReadError::Lost => Kind::Internal,
        }
    }
}

/// Where a chunk came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tier {
    /// Memory held the chunk.
    Memory,
    /// The disk tier held the chunk.
    Disk,
    /// Another reader's fetch was in progress, and this read waited for it.
    Flight,
    /// This read fetched the chunk, and the store keeps it.
    Origin,
    /// This read fetched the chunk, and the disk tier does not keep it.
    Bypass,
    /// This read fetched the chunk from another server. The store never says so: only its caller knows.
    Peer(AtPeer),
}

/// What another server did for a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AtPeer {
    /// It had the chunk.
    Hit,
    /// It fetched the chunk and keeps it.
    Miss,
    /// It fetched the chunk and does not keep it.
    Bypass,
}

impl AtPeer {
    /// Returns the word of a header.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            AtPeer::Hit => "hit",
            AtPeer::Miss => "miss",
            AtPeer::Bypass => "bypass",
        }
    }

    /// Returns what a word of a header says.
    #[must_use]
    pub fn from_word(word: &str) -> Option<Self> {
        [AtPeer::Hit, AtPeer::Miss, AtPeer::Bypass].into_iter().find(|at| at.as_str() == word)
    }
}

impl Tier {
    /// Returns what a server that read a chunk from this tier did for the server that asked it.
    #[must_use]
    pub fn at_peer(self) -> AtPeer {
        match self {
            Tier::Memory | Tier::Disk | Tier::Flight => AtPeer::Hit,
            Tier::Origin => AtPeer::Miss,
            Tier::Bypass => AtPeer::Bypass,
            Tier::Peer(at) => at,
        }
    }
}

/// A chunk, and the tier that it came from.
#[derive(Debug, Clone)]
pub struct Hit {
    /// The whole chunk.
    pub chunk: Verified,
    /// The tier that it came from.
    pub tier: Tier,
}

/// Verified bytes of a chunk: all of it, or the groups that a reader needs.
#[derive(Debug, Clone)]
pub struct PartHit {
    /// The bytes, and their tier.
    pub hit: Hit,
    /// Where they begin in the chunk.
    pub begins: usize,
}

impl PartHit {
    /// Returns the bytes `range` of the chunk, or `None` if they are not all there.
    #[must_use]
    pub fn slice(&self, range: &Range<usize>) -> Option<Bytes> {
        let from = range.start.checked_sub(self.begins)?;
        self.hit.chunk.slice(from..from + range.len())
    }
}
