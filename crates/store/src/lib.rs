//! The chunk store of servers and mounts: it finds, fetches, verifies and keeps chunks.
//!
//! [`Store::read`] is THE read. The store owns memory and flights. It asks the disk tier that its owner
//! passed in. It knows no HTTP, no jobs and no origin: the caller passes in a [`Fetch`] that gets the bytes.
//!
//! | file | holds |
//! |---|---|
//! | `read`, `outcome`, `flight`, `memory`, `buffer_pool`, `copies` | the read path in memory |
//! | `read/runs` | reads of a part of a long chunk, by the hashes of its groups |
//! | `no_wait` | reads that never wait, on the calling thread |
//! | `disk_tier` | the handle of the disk tier, always present, that reads use |
//! | `disk` | the engine of an open disk tier: slabs, index, eviction, recovery |
//! | `maintenance`, `shares` | background work of the tier's owner; the division of the disk among datasets |
//! | `warm`, `pins` | chunks that are kept ahead of need |
//!
//! Invariants, quoted by the tests:
//! 1. (I1) the store returns only [`fletch_core::Verified`], hashed after it was fetched;
//! 2. (I3) for one key at most one fetch runs, in a task of its own that no departing reader ends.
//!    All waiting readers get its outcome. The store does not keep an error. A chunk that comes at once
//!    ([`AtOnce`]) needs no task;
//! 3. (I6) `memory_bytes` bounds all live buffers: cached, in flight, or still held by a reader. A fetch
//!    takes a buffer's permit before it begins, and the last clone of the buffer returns the permit;
//! 4. (I6) a read ends within `deadline`. It ends with [`ReadError::Overloaded`] while it waits for memory,
//!    and with [`ReadError::Deadline`] while it waits for its fetch. A flight ends within `deadline` of its
//!    own start, so a flight that a reader began late in its time may outlive the reader. A reader that
//!    joined a flight gives up soon after its deadline, whatever holds the flight;
//! 5. (I1) bytes that are read by another name than their hash ([`Store::learn`]) are hashed, and kept under
//!    their hash;
//! 6. (I5) a disk tier that is absent, off, broken, full or slow costs speed only: reads skip it.

#![warn(missing_docs)]

pub mod allocator;
mod buffer_pool;
mod copies;
mod dataset_id;
pub mod disk;
mod disk_tier;
mod flight;
pub mod maintenance;
mod memory;
mod no_wait;
mod outcome;
mod pins;
mod read;
mod shares;
mod stats;
mod warm;

pub use copies::{Copies, Gathered};
pub use dataset_id::DatasetId;
pub use disk_tier::{DiskReport, DiskState, DiskTier};
pub use maintenance::DiskOwner;
pub use outcome::{AtPeer, FetchError, Hit, PartHit, ReadError, Tier};
pub use pins::Pinned;
pub use read::{AtOnce, Brought, Fetch, Names, Store, StoreLimits};
pub use shares::{
    Footprint, Part, QuotaUse, ReaderKind, Shares, Split, TenantQuota, VersionIds, apply_quotas,
};
pub use stats::StoreStats;
pub use warm::{ChunkCheck, Warmed};

pub use fletch_core::{Kind, StoreKey, Verified};
