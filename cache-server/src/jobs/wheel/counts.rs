//! What was counted.

use std::sync::atomic::AtomicU64;

/// Totals since the server started.
#[derive(Debug, Default)]
pub struct Counts {
    /// Bytes that sweeps brought, as they occupy the disk.
    pub loaded_bytes: AtomicU64,
    /// Units that sweeps dropped.
    pub dropped: AtomicU64,
    /// Units that did not come, or were not kept.
    pub failed: AtomicU64,
    /// Times that the disk kept less than a sweep's share, and something else left for a unit.
    pub gave_way: AtomicU64,
    /// Samples that sweeps chose whose unit was here.
    pub picked_here: AtomicU64,
    /// ... whose unit was not, although a sample of the reserve was left, or one that was decided lay further back.
    pub picked_over: AtomicU64,
    /// ... whose unit was not, and there was neither of these.
    pub picked_away: AtomicU64,
    /// Entries granted, those granted again included.
    pub granted: AtomicU64,
    /// Entries acknowledged.
    pub acked: AtomicU64,
    /// Entries that came back because their lease expired.
    pub expired: AtomicU64,
    /// Epochs that ended and were shuffled well.
    pub well: AtomicU64,
    /// Epochs that ended and whose certificate says that they were shuffled poorly.
    pub poor: AtomicU64,
}
