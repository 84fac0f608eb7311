//! What the server gives to its sweeps, and what it counts of them.

use super::Recorder;
use crate::{app::telemetry::ReadWatch, data::chunk_reads::ChunkReads, tenancy::accounting::Accounts};
use fletch_store::{Shares, Store};
use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize},
};
use tokio_util::task::TaskTracker;

/// What all sweeps of a server share.
pub struct SweepContext {
    /// Where chunks are kept.
    pub store: Arc<Store>,
    pub reads: Arc<ChunkReads>,
    /// Counts what the sweeps read.
    pub accounts: Arc<Accounts>,
    /// Divides the disk between datasets.
    pub shares: Arc<Shares>,
    /// Gets the waits of the fetches.
    pub watch: Arc<ReadWatch>,
    /// Owns the fetches' tasks.
    pub tasks: TaskTracker,
    /// Memory for all sweeps together where the server has no disk tier, in bytes.
    pub memory_bytes: u64,
    /// Most units that one sweep fetches at once.
    pub fetches_max: usize,
    /// Most bytes of chunks that one sweep fetches at once.
    pub fetch_bytes_max: u64,
    /// Records sweeps, if the server was told to.
    pub recorder: Option<Arc<Recorder>>,
    /// Number of sweeps.
    pub sweeps: AtomicUsize,
    /// Totals since the server started.
    pub counts: SweepCounts,
}

/// Totals of all sweeps since the server started.
#[derive(Debug, Default)]
pub struct SweepCounts {
    /// Bytes that sweeps loaded, as they occupy the disk.
    pub loaded_bytes: AtomicU64,
    /// Units that sweeps evicted.
    pub evicted: AtomicU64,
    /// Units whose fetch failed, or that the disk did not keep.
    pub failed: AtomicU64,
    /// Times that a sweep evicted another unit because the disk kept less than the sweep's share.
    pub displaced: AtomicU64,
    /// Samples that sweeps picked and whose unit was resident.
    pub picked_resident: AtomicU64,
    /// Samples that sweeps picked and whose unit was not resident, although a sample of the reserve was left
    /// or a resident pick stood further back in the queue.
    pub picked_held_back: AtomicU64,
    /// Samples that sweeps picked and whose unit was not resident, when no resident sample was left.
    pub picked_absent: AtomicU64,
}
