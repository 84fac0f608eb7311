//! Why a call on leases is rejected.

use crate::Kind;

/// Why a request, an ack or an event was rejected. It changed nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    /// The world has no such rank.
    #[error("there is no rank {rank}: the world has {ranks} ranks, numbered from 0")]
    Rank {
        /// The rank that was named.
        rank: u32,
        /// How many ranks the world has.
        ranks: u32,
    },
    /// The worker got a lease with a later sequence number before, and none with this one that expired.
    #[error("sequence number {got} is too old: the worker has used {last}")]
    Stale {
        /// The sequence number of the request.
        got: u64,
        /// The worker's latest sequence number.
        last: u64,
    },
    /// No such lease is live. Its entries may be leased to another worker by now.
    #[error("lease {0} has expired, was released or never existed; its entries are granted again")]
    Gone(u64),
    /// The lease belongs to another rank.
    #[error("lease {lease} belongs to rank {owner}, not {rank}")]
    Foreign {
        /// The lease.
        lease: u64,
        /// The rank that holds it.
        owner: u32,
        /// The rank that acknowledged or released it.
        rank: u32,
    },
    /// The ack covers more entries than the lease holds.
    #[error("lease {lease} holds {entries} entries, not {upto}")]
    Beyond {
        /// The lease.
        lease: u64,
        /// How many entries it holds.
        entries: u32,
        /// How many entries the ack covers.
        upto: u32,
    },
    /// The ranks of a world cannot share its batch equally.
    #[error("{ranks} ranks cannot share a batch of {batch}")]
    World {
        /// The world's ranks.
        ranks: u32,
        /// The world's global batch size.
        batch: u32,
    },
    /// The epoch has no such commit, or keeps it no longer.
    #[error("the epoch has no commit {0}, or keeps it no longer")]
    Commit(u64),
    /// The change is only possible while no lease is live.
    #[error("lease {0} is live; wait until it is acknowledged or expires")]
    Busy(u64),
    /// An event names an entry that is not free.
    #[error("entry {0} is granted or acknowledged already, or not in the plan")]
    Entry(u32),
}

impl LeaseError {
    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            LeaseError::Gone(_) | LeaseError::Commit(_) => Kind::NotFound,
            _ => Kind::Invalid,
        }
    }
}
