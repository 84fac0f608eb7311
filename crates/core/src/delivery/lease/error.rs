//! What is refused, and whose fault it is.

use crate::Kind;

/// Why a request or an ack changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    /// The world has no such rank.
    #[error("rank {rank} of a world of {ranks}")]
    Rank {
        /// The rank named.
        rank: u32,
        /// How many there are.
        ranks: u32,
    },
    /// The worker asked with a later sequence number already.
    #[error("sequence {got} after {last}")]
    Stale {
        /// What was asked with.
        got: u64,
        /// The latest.
        last: u64,
    },
    /// There is no such lease, or no longer: its entries may be someone else's by now.
    #[error("lease {0} has expired or never was; what it held is granted again")]
    Gone(u64),
    /// The lease belongs to another rank.
    #[error("lease {lease} belongs to rank {owner}, not {rank}")]
    Foreign {
        /// Which lease.
        lease: u64,
        /// Whose it is.
        owner: u32,
        /// Who spoke.
        rank: u32,
    },
    /// More than the lease holds.
    #[error("lease {lease} holds {entries} entries, not {upto}")]
    Beyond {
        /// Which lease.
        lease: u64,
        /// What it holds.
        entries: u32,
        /// What was acknowledged.
        upto: u32,
    },
    /// A world that cannot share its steps.
    #[error("{ranks} ranks cannot share a batch of {batch}")]
    World {
        /// Ranks.
        ranks: u32,
        /// Entries a step.
        batch: u32,
    },
    /// No such checkpoint is remembered.
    #[error("no commit {0} is remembered")]
    Commit(u64),
    /// Something that only a world without leases allows.
    #[error("lease {0} lives")]
    Busy(u64),
    /// An event names an entry that is not there to be granted.
    #[error("entry {0} is granted or acknowledged already, or not in the plan")]
    Entry(u32),
}

impl LeaseError {
    /// Who can act on it.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            LeaseError::Gone(_) | LeaseError::Commit(_) => Kind::NotFound,
            _ => Kind::Invalid,
        }
    }
}
