//! Jobs and epochs for the loaders: receives leases, renews them, and sends acks.
//!
//! Invariants
//! 1. This process renews every lease that it received and that is not acknowledged, for as long as it lives,
//!    whatever its threads do and however often it forks. A forked child renews none of them.
//! 2. A lease that was received and lost before the consumer got it is held until the consumer names the
//!    leases that it has ([`Job::hold_only`]), and no longer.
//! 3. The server is told of every lease that this process drops, also after a fork. If it does not answer,
//!    the lease expires.

use crate::buffer;
use crate::client::{Client, parsed};
use crate::errors::{Failure, Pickled};
use crate::process::{Slot, spawn_background, wait, wait_reporting};
use crate::receipt_sum::delivery;
use crate::shared_job::{self, ProcessState, SharedJob};
use bytes::Bytes;
use fletch_api::{Ack, BatchTimes, StartJob, WorldSpec};
use fletch_client::ClientError;
use fletch_client::epochs::{
    AckToken, EpochReader, GrantRecord, LeaseBatch, LeaseJournal, LeasedSample, Next,
};
use fletch_client::selection::{Columns, Selection};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::id;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The time for which a call waits for a server that is gone: practically for ever.
///
/// A caller interrupts the wait.
const PATIENCE: Duration = Duration::from_secs(365 * 86_400);
/// The longest time for a request in the background that gives a rank up, in seconds.
const LEAVE_SECONDS: f64 = 10.0;
/// Of so many probes in a cluster, one asks for the job.
const JOB_PROBE_EVERY: u64 = 8;
/// The time without an answer after which the server is probed.
const SILENCE: Duration = Duration::from_secs(3);

/// A declared job. It renews the leases that this process holds.
#[pyclass(frozen, module = "fletch._native")]
#[derive(Debug)]
pub struct Job(Arc<SharedJob>);

/// Declares a job, or finds the job of that name with these settings.
#[pyfunction(name = "_declare")]
pub fn declare(py: Python<'_>, client: Py<Client>, spec: &str, loader: &str) -> PyResult<Job> {
    let job = unpickle_job(client, spec, loader, None)?;
    job.0.live(py)?;
    Ok(job)
}

/// Reads a selection file. Returns the base of a plan, as JSON text.
#[pyfunction(name = "_select")]
#[pyo3(signature = (path, keys, numbers, weights, draws))]
pub fn select(
    py: Python<'_>,
    path: PathBuf,
    keys: Option<String>,
    numbers: Option<String>,
    weights: Option<String>,
    draws: Option<u64>,
) -> PyResult<String> {
    let columns = Columns { keys, numbers, weights };
    let read = py.detach(|| Selection::read(&path, &columns)).map_err(Failure::from)?;
    Ok(serde_json::to_string(&read.base(draws)).map_err(|e| Failure::Invalid(e.to_string()))?)
}

/// Returns the world of a declared job, as JSON text; `None` if no job has that name.
#[pyfunction(name = "_world")]
pub fn world_of(py: Python<'_>, client: Py<Client>, name: &str) -> PyResult<Option<String>> {
    let (client, name) = (client.get().live(py)?, name.to_owned());
    let world = wait(py, async move {
        let jobs = client.jobs().await?;
        let Some(line) = jobs.iter().find(|j| j.name.as_str() == name.as_str()) else { return Ok(None) };
        Ok::<_, Failure>(Some(client.job(&line.id).await?.info().world))
    })?;
    let text = world.map(|w| serde_json::to_string(&w)).transpose();
    Ok(text.map_err(|e| Failure::Invalid(e.to_string()))?)
}

/// Returns a job whose server is away, as JSON text, without its epochs; `None` if a server has the job.
#[pyfunction(name = "_describe")]
pub fn describe(py: Python<'_>, client: Py<Client>, spec: &str) -> PyResult<Option<String>> {
    let spec: StartJob = serde_json::from_str(spec).map_err(|e| Failure::Invalid(format!("job: {e}")))?;
    let client = client.get().live(py)?;
    let described = wait(py, async move { client.describe(&spec).await.map_err(Failure::from) })?;
    let text = described.map(|job| serde_json::to_string(&job)).transpose();
    Ok(text.map_err(|e| Failure::Invalid(e.to_string()))?)
}

/// Continues an epoch from a state, by the job's id. If the job's server is gone, the job moves.
#[pyfunction(name = "_move_job")]
pub fn move_job(py: Python<'_>, client: Py<Client>, id: String, epoch: u64, state: Vec<u8>) -> PyResult<()> {
    let client = client.get().live(py)?;
    let moving = async move { client.move_job(&id, epoch, Bytes::from(state)).await };
    wait(py, async move { moving.await.map(drop).map_err(Failure::from) })
}

/// Deletes a job and its ledgers.
#[pyfunction(name = "_delete_job")]
pub fn delete_job(py: Python<'_>, client: Py<Client>, id: String) -> PyResult<()> {
    let client = client.get().live(py)?;
    wait(py, async move { client.delete_job(&id).await.map_err(Failure::from) })
}

/// Creates a job from its pickled settings. Its first use declares it again, which changes nothing.
#[pyfunction(name = "_job")]
#[pyo3(signature = (client, spec, loader, server=None))]
pub fn unpickle_job(client: Py<Client>, spec: &str, loader: &str, server: Option<String>) -> PyResult<Job> {
    let spec = serde_json::from_str(spec).map_err(|e| Failure::Invalid(format!("job: {e}")))?;
    let loader = serde_json::from_str(loader).map_err(|e| Failure::Invalid(format!("loader: {e}")))?;
    let process = ProcessState { pid: id(), server, ..ProcessState::default() };
    let job = Arc::new(SharedJob { client, spec, loader, live: Slot::new(), process: Mutex::new(process) });
    shared_job::remember(&job);
    Ok(Job(job))
}

#[pymethods]
impl Job {
    /// The job's current state, with its epochs.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let job = self.0.live(py)?;
        let now = wait(py, async move { job.current().await.map_err(Failure::from) })?;
        parsed(py, serde_json::to_string(&now))
    }

    /// Changes the job's world: ranks, batch and tail, as JSON text.
    fn world<'py>(&self, py: Python<'py>, world: &str) -> PyResult<Bound<'py, PyAny>> {
        let job = self.0.live(py)?;
        let world: WorldSpec = serde_json::from_str(world).map_err(|e| Failure::Invalid(e.to_string()))?;
        let now = wait(py, async move { job.set_world(world).await.map_err(Failure::from) })?;
        parsed(py, serde_json::to_string(&now))
    }

    /// The reader of one worker. It asks for `leases_ahead` leases while the caller uses the last one.
    ///
    /// `journal` is a file descriptor, the first slot and the number of slots for the numbers of its leases.
    #[pyo3(signature = (epoch, rank, worker, leases_ahead, journal = None))]
    fn reader(
        slf: Bound<'_, Self>,
        epoch: u64,
        rank: u32,
        worker: u32,
        leases_ahead: usize,
        journal: Option<JournalSlots>,
    ) -> PyResult<Reader> {
        slf.get().0.process().ranks.insert(rank, epoch);
        let reader = Reader {
            job: slf.clone().unbind(),
            params: ReaderParams { epoch, rank, worker, leases_ahead, journal },
            last: Arc::default(),
            live: Slot::new(),
        };
        reader.live(slf.py())?;
        Ok(reader)
    }

    /// Begins to keep a record of what this process consumes as a rank: if the job's server is lost, the job
    /// goes on with it at another server. Only for the process that acknowledges all batches of the rank.
    fn join(&self, py: Python<'_>, epoch: u64, rank: u32) -> PyResult<()> {
        let job = self.0.live(py)?;
        wait(py, async move { job.join(epoch, rank).await.map_err(Failure::from) })
    }

    /// Renews a lease that another process received, and notes `grant`, what the server granted. Returns
    /// whether the batch counts: not if its server was lost since. Its samples come again then.
    #[pyo3(signature = (token, grant = Vec::new()))]
    fn hold(&self, py: Python<'_>, token: Token, grant: Vec<u8>) -> PyResult<bool> {
        let (epoch, rank, lease, entries, ttl_ms) = token;
        let unread = || Failure::Invalid("the record of a grant is of another build".to_owned());
        let grant = GrantRecord::from_bytes(&grant).ok_or_else(unread)?;
        let job = self.0.live(py)?;
        let (holder, token) = (job.clone(), AckToken { epoch, rank, lease, entries, ttl_ms });
        let counts = match job.records().needs_request(epoch, rank, &grant) {
            // No request, so no wait in which a signal may end the call.
            false => job.hold_now(&token, &grant),
            true => wait(py, async move { holder.hold(&token, &grant).await.map_err(Failure::from) })?,
        };
        if counts {
            self.0.record_held((epoch, rank, lease), ttl_ms);
            job.held().hold(epoch, rank, lease, ttl_ms);
        }
        Ok(counts)
    }

    /// Acknowledges a whole lease. `times` are the nanoseconds waited, prepared and stepped, the device's
    /// time of this step or of an earlier one, and how long the process that prepared the batch waited for
    /// its lease. `in_loop` says that the loop itself prepares batches.
    ///
    /// The ack is durable when this returns. `report` is called as in `Reader.next`. `None` means that the
    /// server did not answer `within` this many seconds.
    #[pyo3(signature = (token, times, report, within = None, in_loop = false))]
    fn ack<'py>(
        &self,
        py: Python<'py>,
        token: Token,
        times: (u64, u64, u64, Option<u64>, Option<u64>),
        report: Bound<'py, PyAny>,
        within: Option<f64>,
        in_loop: bool,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let (epoch, rank, lease, entries, _) = token;
        let job = self.0.live(py)?;
        let (waited_ns, prepared_ns, stepped_ns, device_ns, received_ns) = times;
        let batch =
            BatchTimes { entries, waited_ns, received_ns, prepared_ns, stepped_ns, device_ns, in_loop };
        let acks = [Ack { lease, upto: entries, batches: vec![batch] }];
        let handle = job.clone();
        let live_id = job.info().id.clone();
        let client = self.0.client.get().live(py)?;
        let within = within.map_or(PATIENCE, |s| Duration::try_from_secs_f64(s).unwrap_or(Duration::ZERO));
        let acking = async move {
            let acked = tokio::time::timeout(within, job.ack(epoch, rank, &acks));
            acked.await.ok().transpose().map_err(Failure::from)
        };
        let probes = Probes::new(client, live_id);
        let acked = wait_reporting(
            py,
            acking,
            SILENCE,
            || probes.next(),
            |seconds, why| report.call1((seconds, why)).map(drop),
        );
        let Some(acked) = acked? else { return Ok(None) };
        self.0.forget_lease(py, (epoch, rank, lease));
        self.0.note_server(&handle);
        parsed(py, serde_json::to_string(&acked)).map(Some)
    }

    /// Drops a lease that this process holds. The server delivers its samples again, at once if it answers.
    fn drop_lease(&self, py: Python<'_>, token: Token) -> PyResult<()> {
        let (epoch, rank, lease, _, _) = token;
        let is_held = self.0.process().held.contains_key(&(epoch, rank, lease));
        self.0.release(py, is_held.then_some((epoch, rank, lease)))
    }

    /// Stops renewing a lease of which the server said that it is gone.
    fn forget_lease(&self, py: Python<'_>, token: Token) {
        let (epoch, rank, lease, _, _) = token;
        self.0.forget_lease(py, (epoch, rank, lease));
    }

    /// Drops all held leases but these. The others were lost on their way to the consumer.
    fn hold_only(&self, py: Python<'_>, tokens: Vec<Token>) -> PyResult<()> {
        let kept: BTreeSet<_> =
            tokens.into_iter().map(|(epoch, rank, lease, ..)| (epoch, rank, lease)).collect();
        let held: Vec<_> = self.0.process().held.keys().copied().collect();
        self.0.release(py, held.into_iter().filter(|key| !kept.contains(key)))
    }

    /// Releases leases that other processes received for this one and that it will not use.
    fn release(&self, py: Python<'_>, epoch: u64, rank: u32, leases: Vec<u64>) -> PyResult<()> {
        self.0.release(py, leases.into_iter().map(|lease| (epoch, rank, lease)))
    }

    /// Waits until the server knows of every dropped lease, at most `within` seconds. Returns whether it
    /// does.
    ///
    /// Returns at once if no lease was dropped.
    fn settle(&self, py: Python<'_>, within: f64) -> PyResult<bool> {
        let Some(live) = self.0.live.get(py) else { return Ok(self.0.process().dropped.is_empty()) };
        let held = Arc::clone(live.handle.held());
        let within = Duration::try_from_secs_f64(within).unwrap_or(Duration::ZERO);
        let waiting = Arc::clone(&held);
        let settled = async move {
            let settled = tokio::time::timeout(within, waiting.settled());
            Ok::<_, Failure>(waiting.is_settled() || settled.await.is_ok())
        };
        let is_settled = wait(py, settled)?;
        self.0.process().dropped.retain(|&(epoch, rank, lease)| held.is_releasing(epoch, rank, lease));
        Ok(is_settled)
    }

    /// Gives up every rank as which this process read, with its leases.
    ///
    /// Waits `within` so many seconds for the answer. Without it the request is made in the background; if it
    /// fails, the leases expire by themselves. Then it also starts no threads: a job may be freed at any
    /// time, and a process that forked has none.
    #[pyo3(signature = (within = None))]
    fn leave(&self, py: Python<'_>, within: Option<f64>) -> PyResult<()> {
        if within.is_none() && self.0.live.get(py).is_none() {
            return Ok(());
        }
        let (ranks, held) = {
            let mut own = self.0.process();
            (std::mem::take(&mut own.ranks), std::mem::take(&mut own.held))
        };
        let Some(job) = self.0.declared(py)?.filter(|_| !ranks.is_empty()) else { return Ok(()) };
        // The server ends them when the process leaves.
        for (epoch, rank, lease) in held.into_keys() {
            job.held().forget(epoch, rank, lease);
        }
        let most = Duration::try_from_secs_f64(within.unwrap_or(LEAVE_SECONDS)).unwrap_or(Duration::ZERO);
        let leaving = async move {
            for (rank, epoch) in ranks {
                job.leave(epoch, rank).await?;
            }
            Ok::<_, ClientError>(())
        };
        // The timer needs a runtime, so it begins inside of the task.
        let leaving = async move { tokio::time::timeout(most, leaving).await };
        if within.is_none() {
            // Nobody waits for it, and a lease that nobody renews expires.
            drop(spawn_background(py, leaving)?);
            return Ok(());
        }
        wait(py, async move {
            match leaving.await {
                Ok(left) => left.map_err(Failure::from),
                Err(_) => Err(Failure::from(ClientError::Unreachable {
                    endpoint: "the server".to_owned(),
                    why: format!("no answer within {most:?}"),
                    refused: false,
                })),
            }
        })
    }

    /// The epoch's self-contained state.
    fn state<'py>(&self, py: Python<'py>, epoch: u64) -> PyResult<Bound<'py, PyBytes>> {
        let job = self.0.live(py)?;
        let state = wait(py, async move { job.state(epoch).await.map_err(Failure::from) })?;
        Ok(PyBytes::new(py, &state))
    }

    /// The durable part of the epoch's ledger.
    fn ledger<'py>(&self, py: Python<'py>, epoch: u64) -> PyResult<Bound<'py, PyBytes>> {
        let job = self.0.live(py)?;
        let ledger = wait(py, async move { job.ledger(epoch).await.map_err(Failure::from) })?;
        Ok(PyBytes::new(py, &ledger))
    }

    /// Continues an epoch from a state.
    fn put_state<'py>(
        &self,
        py: Python<'py>,
        epoch: u64,
        state: Vec<u8>,
        replace: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let job = self.0.live(py)?;
        let state = Bytes::from(state);
        let now = wait(py, async move { job.put_state(epoch, state, replace).await.map_err(Failure::from) })?;
        parsed(py, serde_json::to_string(&now))
    }

    /// Commits the acknowledged samples under this number, because the model was saved.
    fn checkpoint<'py>(&self, py: Python<'py>, epoch: u64, commit: u64) -> PyResult<Bound<'py, PyAny>> {
        let job = self.0.live(py)?;
        let now = wait(py, async move { job.checkpoint(epoch, commit).await.map_err(Failure::from) })?;
        parsed(py, serde_json::to_string(&now))
    }

    /// Rolls the epoch back to a commit.
    fn rollback<'py>(&self, py: Python<'py>, epoch: u64, commit: u64) -> PyResult<Bound<'py, PyAny>> {
        let job = self.0.live(py)?;
        let now = wait(py, async move { job.rollback(epoch, Some(commit)).await.map_err(Failure::from) })?;
        parsed(py, serde_json::to_string(&now))
    }

    /// The receipt and certificate of a finished epoch, as JSON text.
    fn receipt(&self, py: Python<'_>, epoch: u64) -> PyResult<String> {
        let job = self.0.live(py)?;
        let receipt = wait(py, async move { job.receipt(epoch).await.map_err(Failure::from) })?;
        Ok(serde_json::to_string(&receipt).map_err(|e| Failure::Invalid(e.to_string()))?)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> Pickled<'py, (Py<Client>, String, String, Option<String>)> {
        let spec = serde_json::to_string(&self.0.spec).map_err(|e| Failure::Invalid(e.to_string()))?;
        let loader = serde_json::to_string(&self.0.loader).map_err(|e| Failure::Invalid(e.to_string()))?;
        let server = self.0.process().server.clone();
        let parts = (self.0.client.clone_ref(py), spec, loader, server);
        Ok((py.import("fletch._native")?.getattr("_job")?, parts))
    }
}

/// Epoch, rank, lease, entries, and the lease's lifetime in ms.
///
/// Any process can acknowledge the lease with it.
type Token = (u64, u32, u64, u32, u64);

/// A file descriptor, the first slot and the number of slots of a [`LeaseJournal`].
type JournalSlots = (i32, u64, u64);

/// Receives the leases of one worker of an epoch.
#[pyclass(frozen, module = "fletch._native")]
#[derive(Debug)]
pub struct Reader {
    job: Py<Job>,
    params: ReaderParams,
    /// The number of the last request whose answer the caller got; 0 before the first.
    last: Arc<AtomicU64>,
    /// The reader; `None` after `close`.
    ///
    /// In another process, or after a fork, a new reader is made. Its predecessor's prefetched leases were
    /// not renewed, so the new reader requests them again.
    live: Slot<Arc<tokio::sync::Mutex<Option<EpochReader>>>>,
}

/// The parameters of a reader.
#[derive(Debug, Clone, Copy)]
struct ReaderParams {
    epoch: u64,
    rank: u32,
    worker: u32,
    leases_ahead: usize,
    journal: Option<JournalSlots>,
}

impl Reader {
    fn live(&self, py: Python<'_>) -> PyResult<Arc<tokio::sync::Mutex<Option<EpochReader>>>> {
        if let Some(live) = self.live.get(py) {
            return Ok(live);
        }
        let ReaderParams { epoch, rank, worker, leases_ahead, journal } = self.params;
        let mut reader =
            self.job.get().0.live(py)?.reader(epoch, rank, worker).patience(PATIENCE).prefetch(leases_ahead);
        if let last @ 1.. = self.last.load(Relaxed) {
            reader = reader.after_sequence(last);
        }
        if let Some((fd, first, slots)) = journal {
            let path = PathBuf::from(format!("/proc/self/fd/{fd}"));
            reader = reader.journal(LeaseJournal::open(&path, first, slots)?);
        }
        let made = Arc::new(tokio::sync::Mutex::new(Some(reader)));
        self.live.set(py, Arc::clone(&made));
        Ok(made)
    }
}

/// One leased sample.
#[pyclass(frozen, module = "fletch")]
#[derive(Debug)]
pub struct Leased(LeasedSample);

#[pymethods]
impl Leased {
    /// The sample's number in the version.
    #[getter]
    fn number(&self) -> u32 {
        self.0.sample
    }

    /// The ordinal of the sample's first entry. Root and ordinal identify the sample.
    #[getter]
    fn ordinal(&self) -> u64 {
        self.0.ordinal
    }

    /// The number of this copy of the sample, from 0; `None` for one that only pads a last step.
    #[getter]
    fn copy(&self) -> Option<u32> {
        Some(self.0.copy).filter(|c| *c < 1 << 31)
    }

    /// The paths of the sample's files.
    #[getter]
    fn paths(&self) -> Vec<String> {
        self.0.heads.iter().map(|f| f.path.clone()).collect()
    }

    /// How many of its bytes another job, or an earlier epoch, had brought to the server.
    #[getter]
    fn shared(&self) -> u64 {
        self.0.shared
    }

    /// The bytes of the sample's files, as read-only views.
    fn views<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let views: PyResult<Vec<_>> = self.0.files().map(|(_, b)| buffer::view(py, b)).collect();
        PyList::new(py, views?)
    }
}

/// A received lease: its token, its samples, their deliveries, which a receipt sum adds, and what the server
/// granted, for [`Job::hold`].
type ReceivedLease<'py> = (Token, Vec<Leased>, Bound<'py, PyBytes>, Bound<'py, PyBytes>);

#[pymethods]
impl Reader {
    /// Receives a lease of at most `want` samples.
    ///
    /// Returns `("batch", …)`, `("full", None)`, `("last", None)` or `("done", None)`.
    ///
    /// While the server is gone it waits, and calls `report` about once a second with the seconds waited and
    /// the reason.
    #[pyo3(name = "next")]
    fn next_batch<'py>(
        &self,
        py: Python<'py>,
        want: u32,
        report: Bound<'py, PyAny>,
    ) -> PyResult<(&'static str, Option<ReceivedLease<'py>>)> {
        let job = &self.job.get().0;
        let client = job.client.get().live(py)?;
        let (reader, last) = (self.live(py)?, Arc::clone(&self.last));
        let next = async move {
            let mut reader = reader.lock().await;
            let closed = || Failure::Invalid("this reader is closed".into());
            let reader = reader.as_mut().ok_or_else(closed)?;
            let next = reader.next(want).await?;
            last.store(reader.sequence(), Relaxed);
            Ok::<_, Failure>(next)
        };
        let probes = Probes::new(client, job.live(py)?.info().id.clone());
        let next = wait_reporting(
            py,
            next,
            SILENCE,
            || probes.next(),
            |seconds, why| report.call1((seconds, why)).map(drop),
        )?;
        let LeaseBatch { token: t, grant, samples, .. } = match next {
            Next::Batch(batch) => batch,
            Next::Full => return Ok(("full", None)),
            Next::Last => return Ok(("last", None)),
            Next::Done => return Ok(("done", None)),
        };
        job.record_held((t.epoch, t.rank, t.lease), t.ttl_ms);
        let deliveries: Vec<u8> = samples.iter().flat_map(delivery).collect();
        let token = (t.epoch, t.rank, t.lease, t.entries, t.ttl_ms);
        let leased = samples.into_iter().map(Leased).collect();
        let grant = PyBytes::new(py, &grant.to_bytes());
        Ok(("batch", Some((token, leased, PyBytes::new(py, &deliveries), grant))))
    }

    /// Ends the reader. It requests no more leases, and releases those that it prefetched.
    fn close(&self, py: Python<'_>) {
        // If another thread's call is in progress, the reader and its leases end with that call.
        if let Some(live) = self.live.get(py)
            && let Ok(mut reader) = live.try_lock()
        {
            *reader = None;
        }
    }
}

/// The probes of a call that gets no answer.
///
/// In a cluster any server answers the plain probe, also while the job's own server is gone. So some of the
/// probes ask for the job.
struct Probes {
    client: fletch_client::Client,
    job: String,
    made: AtomicU64,
}

impl Probes {
    fn new(client: fletch_client::Client, job: String) -> Self {
        Probes { client, job, made: AtomicU64::new(0) }
    }

    /// Probes once. Returns the problem, or `None` if the server answers.
    fn next(&self) -> impl Future<Output = Option<String>> + Send + 'static {
        let asks_for_job = self.made.fetch_add(1, Relaxed).is_multiple_of(JOB_PROBE_EVERY);
        let (client, job) = (self.client.within(Duration::from_secs(1)).fail_fast(), self.job.clone());
        async move {
            let failed = match asks_for_job && client.members().len() > 1 {
                true => client.job(&job).await.err(),
                false => client.info().await.err(),
            };
            failed.filter(|e| e.kind().retryable()).map(|e| e.to_string())
        }
    }
}
