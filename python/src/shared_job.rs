//! What a process knows of a job: its connections, and the leases that it holds and has dropped.
//!
//! 1. The leases outlive a fork: the process that forked goes on with them, and a child has none of them.
//! 2. The server is told of every lease that was dropped, also after a fork. If it does not answer, the lease
//!    expires.

use crate::client::Client;
use crate::errors::Failure;
use crate::process::{Slot, spawn_background, wait};
use fletch_api::{Loader, StartJob};
use fletch_client::epochs::{JobHandle, RankRecords};
use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::process::id;
use std::sync::{Arc, Weak};
use tokio_util::sync::{CancellationToken, DropGuard};

/// A job that this process declared over its connections.
#[derive(Debug, Clone)]
pub struct LiveJob {
    pub handle: JobHandle,
    /// Dropping it ends the renewals.
    _renewing: Arc<DropGuard>,
}

/// A job as all its Python objects of this process share it.
#[derive(Debug)]
pub struct SharedJob {
    pub client: Py<Client>,
    pub spec: StartJob,
    /// The name of the process that made the job, as a rank. Its workers inherit it.
    pub loader: Loader,
    pub live: Slot<LiveJob>,
    pub process: Mutex<ProcessState>,
}

/// The job and the leases that one process has. It outlives a runtime.
#[derive(Debug, Default)]
pub struct ProcessState {
    pub pid: u32,
    /// The job, after this process declared it.
    pub job: Option<fletch_api::Job>,
    /// The server where the job lives, as far as this process or an earlier one knows.
    pub server: Option<String>,
    /// The held leases: (epoch, rank, lease) → lifetime in ms.
    pub held: BTreeMap<(u64, u32, u64), u64>,
    /// The dropped leases of which the server may not know yet.
    pub dropped: BTreeSet<(u64, u32, u64)>,
    /// The ranks as which this process read: rank → its latest epoch.
    pub ranks: BTreeMap<u32, u64>,
    /// What this process consumed as its ranks.
    pub records: Arc<RankRecords>,
}

/// All live jobs. After a fork their renewals continue.
static JOBS: Mutex<Vec<Weak<SharedJob>>> = Mutex::new(Vec::new());

impl SharedJob {
    /// Returns this process's state. Of a parent process only the server of the job is kept.
    pub fn process(&self) -> MutexGuard<'_, ProcessState> {
        let mut own = self.process.lock();
        if own.pid != id() {
            *own = ProcessState { pid: id(), server: own.server.take(), ..ProcessState::default() };
        }
        own
    }

    /// Returns the client of the server where the job lives. Before the job is declared, the client chooses.
    ///
    /// All processes of a rank use one server: the job at another server would be another job.
    fn client(&self, py: Python<'_>) -> PyResult<fletch_client::Client> {
        let client = self.client.get().live(py)?;
        let server = self.process().server.clone();
        Ok(server.map_or_else(|| client.clone(), |server| client.at(&server)))
    }

    /// Returns the job over this process's connections. Declares it if this process has not done so.
    pub fn live(&self, py: Python<'_>) -> PyResult<JobHandle> {
        if let Some(handle) = self.declared(py)? {
            return Ok(handle);
        }
        let (client, spec) = (self.client(py)?, self.spec.clone());
        let handle = wait(py, async move { client.declare(&spec).await.map_err(Failure::from) })?;
        let records = Arc::clone(&self.process().records);
        let handle = handle.with_loader(self.loader.clone()).with_records(records);
        let mut own = self.process();
        own.job = Some(handle.info().clone());
        own.server = Some(handle.server());
        drop(own);
        self.start_renewals(py, handle)
    }

    /// Returns the job if this process declared it before. Sends no request.
    pub fn declared(&self, py: Python<'_>) -> PyResult<Option<JobHandle>> {
        if let Some(live) = self.live.get(py) {
            return Ok(Some(live.handle));
        }
        let Some(job) = self.process().job.clone() else { return Ok(None) };
        let records = Arc::clone(&self.process().records);
        let handle = self.client(py)?.job_handle(job).with_loader(self.loader.clone()).with_records(records);
        let handle = handle.with_declaration(self.spec.clone());
        self.start_renewals(py, handle).map(Some)
    }

    /// Starts renewing the held leases, and releasing the dropped ones.
    fn start_renewals(&self, py: Python<'_>, handle: JobHandle) -> PyResult<JobHandle> {
        for (&(epoch, rank, lease), &ttl) in &self.process().held {
            handle.held().hold(epoch, rank, lease, ttl);
        }
        for &(epoch, rank, lease) in &self.process().dropped {
            handle.held().release(epoch, rank, lease);
        }
        let stop = CancellationToken::new();
        let (renewed, ended) = (handle.clone(), stop.clone());
        // It ends by itself only if the job is gone. The next call then returns that error.
        drop(spawn_background(py, async move { ended.run_until_cancelled(renewed.keep_alive()).await })?);
        self.live.set(py, LiveJob { handle: handle.clone(), _renewing: Arc::new(stop.drop_guard()) });
        Ok(handle)
    }

    pub fn record_held(&self, key: (u64, u32, u64), ttl: u64) {
        let mut own = self.process();
        own.dropped.remove(&key);
        own.held.insert(key, ttl);
        own.ranks.insert(key.1, key.0);
    }

    /// Notes the server that has the job now, for workers that start later: the job may have moved.
    pub fn note_server(&self, job: &JobHandle) {
        let mut own = self.process();
        let server = job.server();
        if own.server.as_deref() != Some(server.as_str()) {
            own.server = Some(server);
        }
    }

    /// Stops renewing a lease that was acknowledged or is gone.
    pub fn forget_lease(&self, py: Python<'_>, key: (u64, u32, u64)) {
        self.process().held.remove(&key);
        if let Some(live) = self.live.get(py) {
            live.handle.held().forget(key.0, key.1, key.2);
        }
        // An acknowledged lease has left the records already.
        Arc::clone(&self.process().records).ended(key.0, key.1, key.2);
    }

    /// Stops renewing leases, and tells the server in the background that their samples are not used.
    pub fn release(&self, py: Python<'_>, leases: impl IntoIterator<Item = (u64, u32, u64)>) -> PyResult<()> {
        let live = self.live.get(py);
        let mut own = self.process();
        if let Some(live) = &live {
            let held = live.handle.held();
            own.dropped.retain(|&(epoch, rank, lease)| held.is_releasing(epoch, rank, lease));
        }
        let mut more = false;
        for key in leases {
            own.held.remove(&key);
            own.dropped.insert(key);
            own.records.ended(key.0, key.1, key.2);
            if let Some(live) = &live {
                live.handle.held().release(key.0, key.1, key.2);
            }
            more = true;
        }
        drop(own);
        if more && live.is_none() {
            // This process forked since it used the job. If it never declared the job, it holds no lease.
            self.declared(py)?;
        }
        Ok(())
    }
}

/// Continues the renewals after a fork, in the process that forked.
#[pyfunction(name = "_after_fork_in_parent")]
pub fn after_fork_in_parent(py: Python<'_>) -> PyResult<()> {
    let jobs: Vec<_> = {
        let mut jobs = JOBS.lock();
        jobs.retain(|job| job.strong_count() > 0);
        jobs.iter().filter_map(Weak::upgrade).collect()
    };
    for job in jobs {
        let own = job.process();
        let is_used = !own.held.is_empty() || !own.dropped.is_empty();
        drop(own);
        if is_used {
            job.declared(py)?;
        }
    }
    Ok(())
}

/// Remembers a job, so that its renewals continue after a fork.
pub fn remember(job: &Arc<SharedJob>) {
    let mut jobs = JOBS.lock();
    jobs.retain(|job| job.strong_count() > 0);
    jobs.push(Arc::downgrade(job));
}
