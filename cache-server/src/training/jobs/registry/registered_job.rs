//! One declared job in the registry, and how it is closed.

use crate::tenancy::tenants::JobCharges;
use crate::training::{
    epochs::JobContext,
    jobs::{
        open_job::{OpenJob, epoch_of_file},
        record::{RECORD_FILE, RecordSummary},
        settings::StoredSettings,
    },
};
use fletch_api::JobLine;
use fletch_core::Tenant;
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
};
use tokio::sync::OnceCell;

/// A declared job, open or not.
pub(super) struct RegisteredJob {
    pub known: RecordSummary,
    pub charges: Arc<JobCharges>,
    pub settings: Arc<StoredSettings>,
    pub opened: OnceCell<Arc<OpenJob>>,
    /// Time of the last request as far as maintenance has seen it, in nanoseconds since the start.
    seen_ns: AtomicU64,
    /// A request came since the last maintenance.
    pub asked: AtomicBool,
    /// The job is being closed.
    pub closing: AtomicBool,
}

impl RegisteredJob {
    pub fn new(
        known: RecordSummary,
        charges: Arc<JobCharges>,
        settings: Arc<StoredSettings>,
        opened: OnceCell<Arc<OpenJob>>,
    ) -> Arc<Self> {
        Arc::new(RegisteredJob {
            known,
            charges,
            settings,
            opened,
            seen_ns: AtomicU64::new(0),
            asked: AtomicBool::new(true),
            closing: AtomicBool::new(false),
        })
    }

    /// Returns the job as it is when it is not open. `known` is what its record says.
    pub fn closed(&self, known: RecordSummary) -> Arc<Self> {
        let (charges, settings) = (Arc::clone(&self.charges), Arc::clone(&self.settings));
        RegisteredJob::new(known, charges, settings, OnceCell::new())
    }

    pub fn line(&self) -> JobLine {
        JobLine {
            id: self.known.id(),
            name: self.known.ask.name.clone(),
            dataset: self.known.dataset.clone(),
            root: self.known.root,
            epoch: self.opened.get().and_then(|job| job.last_epoch()),
            sweep: self.opened.get().and_then(|job| job.sweep_size()),
        }
    }

    /// Returns whether the job is open and nobody uses it: its dataset is gone, or it had no request and no
    /// live lease for longer than `ttl_ns`.
    pub fn is_unused(&self, now_ns: u64, ttl_ns: u64) -> bool {
        let Some(opened) = self.opened.get() else { return false };
        // Its processes may have heard so from a read, and never ask again.
        if !opened.sources.is_registered() {
            return true;
        }
        if self.asked.swap(false, SeqCst) || opened.has_leases() {
            self.seen_ns.store(now_ns, Relaxed);
        }
        now_ns.saturating_sub(self.seen_ns.load(Relaxed)) > ttl_ns
    }
}

/// The declared jobs, by id.
pub(super) type RegisteredJobs = Mutex<BTreeMap<String, Arc<RegisteredJob>>>;

/// Returns the charges of a job that was declared before the server started, by the lengths of its files.
/// Blocking.
pub(super) fn charges_of(context: &JobContext, tenant: &Tenant, dir: &Path) -> Arc<JobCharges> {
    let tenants = &context.tenants;
    let charges = tenants.state_bytes.job(tenant, tenants.declared_jobs.force(tenant, 1));
    let charge = || -> std::io::Result<()> {
        for file in std::fs::read_dir(dir)? {
            let file = file?;
            let name = file.file_name();
            let Some(name) = name.to_str() else { continue };
            let bytes = file.metadata()?.len();
            match epoch_of_file(name) {
                Some(epoch) => charges.ledger(epoch).set(bytes),
                None if name == RECORD_FILE => charges.record().set(bytes),
                None => {}
            }
        }
        Ok(())
    };
    // One file that cannot be read keeps no job from starting.
    if let Err(error) = charge() {
        tracing::error!(
            dir = %dir.display(), %error,
            "the length of a job's file cannot be read; the tenant is charged for less than it has"
        );
    }
    charges
}

/// Closes an open job; the next request opens it anew.
pub(super) async fn close(jobs: &RegisteredJobs, id: &str, stale: &Arc<OpenJob>) {
    // The files come first: nothing opens them anew while this job writes.
    stale.close().await;
    let mut jobs = jobs.lock();
    let is_stale =
        |job: &&Arc<RegisteredJob>| job.opened.get().is_some_and(|there| Arc::ptr_eq(there, stale));
    if let Some(closed) = jobs.get(id).filter(is_stale).map(|job| job.closed(stale.known())) {
        jobs.insert(id.to_owned(), closed);
    }
}
