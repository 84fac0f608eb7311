//! What the server gives to jobs and their epochs, and what it counts of them.

use super::LeaseClock;
use crate::{
    tenancy::tenants::Tenants,
    training::{benefit::ServiceLog, prefetch::PrefetchContext, sweep::SweepContext},
};
use std::{
    sync::{Arc, atomic::AtomicU64},
    time::{Duration, Instant},
};
use tokio_util::task::TaskTracker;

/// What all jobs of a server share.
pub struct JobContext {
    /// What sweeps share.
    pub sweep: Arc<SweepContext>,
    /// What prefetchers share.
    pub prefetch: Arc<PrefetchContext>,
    /// What each tenant may use.
    pub tenants: Arc<Tenants>,
    /// Owns the jobs' tasks.
    pub tasks: TaskTracker,
    /// How long a lease lives without a sign of life.
    pub lease_ttl: Duration,
    /// Most bytes of one epoch's ledger.
    pub ledger_bytes: u64,
    /// How long a job stays open without a request.
    pub job_ttl: Duration,
    /// When the server started.
    pub since: Instant,
    /// The clock of leases.
    pub lease_clock: LeaseClock,
    /// The latest reads of the disk for leases.
    pub disk_reads: ServiceLog,
    /// Totals since the server started.
    pub counts: EpochCounts,
}

/// Totals of all epochs since the server started.
#[derive(Debug, Default)]
pub struct EpochCounts {
    /// Entries granted, entries granted again included.
    pub granted: AtomicU64,
    /// Entries acknowledged.
    pub acked: AtomicU64,
    /// Entries whose lease expired.
    pub expired: AtomicU64,
    /// Entries whose lease the client released, or whose process left or was replaced.
    pub released: AtomicU64,
    /// Acks that came after their lease was gone. The consumer may have used the entries, and gets them
    /// again.
    pub late_acks: AtomicU64,
    /// Epochs that their job left before it had acknowledged all entries.
    pub abandoned: AtomicU64,
    /// Times that an epoch could not be opened because its ledger is damaged.
    pub damaged: AtomicU64,
    /// Finished epochs that were shuffled well.
    pub well: AtomicU64,
    /// Finished epochs whose certificate says that they were shuffled poorly.
    pub poor: AtomicU64,
}
