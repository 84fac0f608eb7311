//! What sweeps, and the jobs that share them, are given by the server.

use super::{Counts, Recorder};
use crate::{jobs::ahead::Pool, versions::Versions};
use fletch_store::{Shares, Store};
use std::{
    sync::{Arc, atomic::AtomicUsize},
    time::{Duration, Instant},
};
use tokio_util::task::TaskTracker;

/// What jobs are served with.
pub struct Means {
    /// Where chunks stay.
    pub store: Arc<Store>,
    /// Where they come from.
    pub versions: Arc<Versions>,
    /// Who divides the disk.
    pub shares: Arc<Shares>,
    /// Where work runs.
    pub tasks: TaskTracker,
    /// Bytes of memory for sweeps where there is no disk tier.
    pub memory_bytes: u64,
    /// Memory for what is fetched ahead of epochs whose order is known.
    pub ahead: Arc<Pool>,
    /// Units brought at once.
    pub loads_max: usize,
    /// Bytes of chunks brought at once.
    pub loads_bytes: u64,
    /// How long a lease lives without a sign of life.
    pub lease_ttl: Duration,
    /// No epoch's ledger is longer.
    pub ledger_bytes: u64,
    /// How long a job stays open that nobody comes for.
    pub job_ttl: Duration,
    /// Where sweeps are recorded, if they are.
    pub recorder: Option<Arc<Recorder>>,
    /// When the server started.
    pub since: Instant,
    /// How many sweeps there are.
    pub wheels: AtomicUsize,
    /// What was counted.
    pub counts: Counts,
}
