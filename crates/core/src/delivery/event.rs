//! Events: the changes of an epoch, and their records in a ledger (`docs/FORMATS-epochs.md`, "Ledger").
//!
//! [`super::lease::Leases`] makes and applies events; [`super::ledger`] reads and writes them.

use crate::plan::{Tail, World};
use crate::record;
use crate::varint::{get, get_list, get32, put, put_list};

const LOAD: u8 = 2;
const GRANT: u8 = 3;
const ACK: u8 = 4;
const EXPIRE: u8 = 5;
const COMMIT: u8 = 6;
const ROLLBACK: u8 = 7;
const WORLD: u8 = 8;
const END: u8 = 9;
pub(super) const RESUME: u8 = 10;
const RECLAIM: u8 = 11;

/// A worker's request for a lease. The same request again gets the same lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Request {
    /// The rank that asks.
    pub rank: u32,
    /// The rank's worker.
    pub worker: u32,
    /// The worker's number of this request. It counts up.
    pub sequence: u64,
}

/// A change of an epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The sweep loaded units for this epoch. It explains an order; nothing depends on it.
    Load {
        /// The units, in order.
        units: Vec<u32>,
    },
    /// Entries were granted.
    Grant {
        /// The lease's number.
        lease: u64,
        /// The request.
        request: Request,
        /// The granted entries, in the order of delivery.
        entries: Vec<u32>,
    },
    /// The first `upto` entries of a lease were acknowledged.
    Ack {
        /// The lease.
        lease: u64,
        /// How many of its entries, from the first.
        upto: u32,
    },
    /// A lease expired, or was released, with entries unacknowledged.
    Expire {
        /// The lease.
        lease: u64,
    },
    /// A checkpoint was committed.
    Commit {
        /// The caller's number of it.
        commit: u64,
    },
    /// The epoch was rolled back.
    Rollback {
        /// The commit to which it returned.
        commit: u64,
    },
    /// The world changed.
    World {
        /// The new world.
        world: World,
    },
    /// A piece of the bitmap of entries that were acknowledged before this ledger began.
    Resume {
        /// The piece's first byte in the bitmap.
        byte: u64,
        /// The piece's bytes.
        bits: Vec<u8>,
    },
    /// The epoch ended.
    End {
        /// Entries delivered.
        delivered: u64,
        /// How many of them were delivered again.
        redelivered: u64,
    },
    /// The ledger was lost, and what stands before this event was restored from what the ranks knew.
    Reclaim(Loss),
}

/// The loss of a ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// The term of the server that restored the epoch.
    pub term: u64,
    /// Later leases have higher numbers: it is above those of the lost ledger.
    pub last_lease: u64,
    /// The ranks whose processes were gone, too, or did not know what their rank had consumed. Ascending.
    ///
    /// What only they knew to be consumed is delivered again.
    pub unknown: Vec<u32>,
}

impl Event {
    /// Appends the event to a log, as a record.
    pub fn append(&self, out: &mut Vec<u8>) {
        let mut p = Vec::new();
        let kind = match self {
            Event::Load { units } => {
                put_list(&mut p, units);
                LOAD
            }
            Event::Grant { lease, request, entries } => {
                put(&mut p, *lease);
                put(&mut p, u64::from(request.rank));
                put(&mut p, u64::from(request.worker));
                put(&mut p, request.sequence);
                put_list(&mut p, entries);
                GRANT
            }
            Event::Ack { lease, upto } => {
                put(&mut p, *lease);
                put(&mut p, u64::from(*upto));
                ACK
            }
            Event::Expire { lease } => {
                put(&mut p, *lease);
                EXPIRE
            }
            Event::Commit { commit } => {
                put(&mut p, *commit);
                COMMIT
            }
            Event::Rollback { commit } => {
                put(&mut p, *commit);
                ROLLBACK
            }
            Event::World { world } => {
                put_world(&mut p, *world);
                WORLD
            }
            Event::Resume { byte, bits } => {
                put(&mut p, *byte);
                p.extend_from_slice(bits);
                RESUME
            }
            Event::End { delivered, redelivered } => {
                put(&mut p, *delivered);
                put(&mut p, *redelivered);
                END
            }
            Event::Reclaim(Loss { term, last_lease, unknown }) => {
                put(&mut p, *term);
                put(&mut p, *last_lease);
                put_list(&mut p, unknown);
                RECLAIM
            }
        };
        record::append(out, kind, &p);
    }

    /// Reads an event. Returns `Some(None)` for a kind that this build does not know, and `None` for bad
    /// bytes.
    pub(super) fn read(kind: u8, mut p: &[u8]) -> Option<Option<Event>> {
        let at = &mut p;
        let event = match kind {
            LOAD => Event::Load { units: get_list(at)? },
            GRANT => Event::Grant {
                lease: get(at)?,
                request: Request { rank: get32(at)?, worker: get32(at)?, sequence: get(at)? },
                entries: get_list(at)?,
            },
            ACK => Event::Ack { lease: get(at)?, upto: get32(at)? },
            EXPIRE => Event::Expire { lease: get(at)? },
            COMMIT => Event::Commit { commit: get(at)? },
            ROLLBACK => Event::Rollback { commit: get(at)? },
            WORLD => Event::World { world: get_world(at)? },
            RESUME => {
                let byte = get(at)?;
                Event::Resume { byte, bits: std::mem::take(at).to_vec() }
            }
            END => Event::End { delivered: get(at)?, redelivered: get(at)? },
            RECLAIM => {
                let (term, last_lease) = (get(at)?, get(at)?);
                Event::Reclaim(Loss { term, last_lease, unknown: get_list(at)? })
            }
            _ => return Some(None),
        };
        at.is_empty().then_some(Some(event))
    }
}

pub(super) fn put_world(out: &mut Vec<u8>, world: World) {
    put(out, u64::from(world.ranks));
    put(out, u64::from(world.batch));
    out.push(match world.tail {
        Tail::Keep => 0,
        Tail::Drop => 1,
        Tail::Pad => 2,
    });
}

pub(super) fn get_world(at: &mut &[u8]) -> Option<World> {
    let (ranks, batch) = (get32(at)?, get32(at)?);
    let tail = match get(at)? {
        0 => Tail::Keep,
        1 => Tail::Drop,
        2 => Tail::Pad,
        _ => return None,
    };
    Some(World { batch, ranks, tail })
}
