//! One store for server and mount: where a chunk is looked for, fetched once, checked and kept.
//!
//! [`Store::read`] is THE read. It owns memory and flights, and asks the disk tier that it was
//! given; it knows no HTTP, no jobs and no origin: what brings bytes is passed in as a [`Fetch`].
//!
//! Invariants, quoted by the tests:
//! 1. (I1) what leaves is [`fletch_core::Verified`], hashed after it was fetched;
//! 2. (I3) for one key at most one fetch runs, in a task of its own, so that no reader's going
//!    away ends it; its outcome reaches everyone who waits, and an error is not kept;
//! 3. (I6) `memory_bytes` bounds every buffer alive: cached, in flight, or still held by a
//!    reader. A buffer's permit is taken before its fetch begins and returned when its last
//!    clone is dropped;
//! 4. (I6) a read ends within `deadline`: as [`ReadError::Overloaded`] while it waits for
//!    memory, as [`ReadError::Deadline`] while it waits for its fetch;
//! 5. (I5) a disk tier that is absent, off, broken, full or slow costs speed only: reads pass it by.

pub mod allocator;
mod buffer_pool;
mod copies;
mod dataset_id;
pub mod disk;
mod disk_tier;
mod flight;
pub mod maintenance;
mod memory;
mod pins;
mod read;
mod shares;
mod stats;
mod warm;

pub use copies::Copies;
pub use dataset_id::DatasetId;
pub use disk_tier::{DiskReport, DiskState, DiskTier};
pub use maintenance::DiskOwner;
pub use pins::Pinned;
pub use read::{Fetch, FetchError, Hit, ReadError, Store, StoreLimits, Tier};
pub use shares::{ReaderKind, Shares, Split, TenantQuota, apply_quotas};
pub use stats::StoreStats;
pub use warm::{ChunkCheck, Warmed};

pub use fletch_core::{Kind, StoreKey, Verified};
