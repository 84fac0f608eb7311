//! Jobs and epochs as the loader sees them: leases in, acks out.
//!
//! Invariants
//! 1. What was received and not acknowledged is renewed by this process for as long as it lives, whatever its
//!    threads do and however often it forks; in a forked child nothing is.
//! 2. What was received and got lost before the consumer had it is held until the consumer says what it has
//!    ([`Job::hold_only`]), and no longer.

use crate::buffer;
use crate::client::{Client, parsed};
use crate::errors::{Failure, Pickled};
use crate::process::{Slot, beside, wait, wait_telling};
use crate::sum::delivery;
use bytes::Bytes;
use fletch_api::{Ack, BatchTimes, StartJob, WorldSpec};
use fletch_client::epochs::{EpochReader, JobHandle, LeaseBatch, LeasedSample, Next};
use fletch_client::selection::{Columns, Selection};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::id;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio_util::sync::{CancellationToken, DropGuard};

/// A server that is gone is waited for; whoever wants less interrupts the wait.
const PATIENCE: Duration = Duration::from_secs(365 * 86_400);
/// After so long without an answer the server is asked whether it is there.
const SILENCE: Duration = Duration::from_secs(3);

/// A declared job, in this process.
#[derive(Debug, Clone)]
struct Declared {
    handle: JobHandle,
    /// Ends the renewals.
    _renewing: Arc<DropGuard>,
}

/// A declared job: what its workers and the process that steps share.
#[pyclass(frozen, module = "fletch._native")]
#[derive(Debug)]
pub struct Job(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    client: Py<Client>,
    spec: StartJob,
    live: Slot<Declared>,
    own: Mutex<Own>,
}

/// What one process knows and holds of a job, beyond the life of one runtime.
#[derive(Debug, Default)]
struct Own {
    pid: u32,
    /// The job, once this process declared it.
    job: Option<fletch_api::Job>,
    /// (epoch, rank, lease) → ttl in ms.
    held: BTreeMap<(u64, u32, u64), u64>,
}

/// All jobs that live, to go on with their renewals after a fork.
static JOBS: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

impl Inner {
    /// This process's own: what its parent held is not.
    fn own(&self) -> MutexGuard<'_, Own> {
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        if own.pid != id() {
            *own = Own { pid: id(), ..Own::default() };
        }
        own
    }

    /// The job over this process's connections. It is declared where this process did not do so before.
    fn live(&self, py: Python<'_>) -> PyResult<JobHandle> {
        if let Some(handle) = self.declared(py)? {
            return Ok(handle);
        }
        let client = self.client.get().live(py)?;
        let handle = wait(py, async { client.declare(&self.spec).await.map_err(Failure::from) })?;
        self.own().job = Some(handle.info().clone());
        self.renew(py, handle)
    }

    /// The same, if this process declared it before; nobody is asked.
    fn declared(&self, py: Python<'_>) -> PyResult<Option<JobHandle>> {
        if let Some(live) = self.live.get(py) {
            return Ok(Some(live.handle));
        }
        let Some(job) = self.own().job.clone() else { return Ok(None) };
        let handle = self.client.get().live(py)?.job_handle(job);
        self.renew(py, handle).map(Some)
    }

    /// Begins to renew what is held.
    fn renew(&self, py: Python<'_>, handle: JobHandle) -> PyResult<JobHandle> {
        for (&(epoch, rank, lease), &ttl) in &self.own().held {
            handle.held().hold(epoch, rank, lease, ttl);
        }
        let stop = CancellationToken::new();
        let (renewed, ended) = (handle.clone(), stop.clone());
        // It ends by itself only when the job is gone, which the next call says, too.
        drop(beside(py, async move { ended.run_until_cancelled(renewed.keep_alive()).await })?);
        self.live.set(py, Declared { handle: handle.clone(), _renewing: Arc::new(stop.drop_guard()) });
        Ok(handle)
    }

    fn keep(&self, key: (u64, u32, u64), ttl: u64) {
        self.own().held.insert(key, ttl);
    }

    fn give_up(&self, py: Python<'_>, key: (u64, u32, u64)) {
        self.own().held.remove(&key);
        if let Some(live) = self.live.get(py) {
            live.handle.held().release(key.0, key.1, key.2);
        }
    }
}

/// After a fork, in the process that forked: what it holds is renewed again.
#[pyfunction(name = "_after_fork_in_parent")]
pub fn after_fork_in_parent(py: Python<'_>) -> PyResult<()> {
    let jobs: Vec<_> = {
        let mut jobs = JOBS.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.retain(|job| job.strong_count() > 0);
        jobs.iter().filter_map(Weak::upgrade).collect()
    };
    for job in jobs {
        let holds = !job.own().held.is_empty();
        if holds {
            job.declared(py)?;
        }
    }
    Ok(())
}

/// Declares a job, or finds the one that was declared so.
#[pyfunction(name = "_declare")]
pub fn declare(py: Python<'_>, client: Py<Client>, spec: &str) -> PyResult<Job> {
    let job = revive_job(client, spec)?;
    job.0.live(py)?;
    Ok(job)
}

/// The base of a plan, as JSON text, from a selection file: columns of keys, numbers and weights, and draws.
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

/// Who shares the steps of a declared job now, as JSON text; `None` where no job has that name.
#[pyfunction(name = "_world")]
pub fn world_of(py: Python<'_>, client: Py<Client>, name: &str) -> PyResult<Option<String>> {
    let client = client.get().live(py)?;
    let world = wait(py, async {
        let jobs = client.jobs().await?;
        let Some(line) = jobs.iter().find(|j| j.name.as_str() == name) else { return Ok(None) };
        Ok::<_, Failure>(Some(client.job(&line.id).await?.info().world))
    })?;
    let text = world.map(|w| serde_json::to_string(&w)).transpose();
    Ok(text.map_err(|e| Failure::Invalid(e.to_string()))?)
}

/// A job from its pickled settings; it is declared again, which changes nothing, when it is first used.
#[pyfunction(name = "_job")]
pub fn revive_job(client: Py<Client>, spec: &str) -> PyResult<Job> {
    let spec = serde_json::from_str(spec).map_err(|e| Failure::Invalid(format!("job: {e}")))?;
    let job = Arc::new(Inner { client, spec, live: Slot::new(), own: Mutex::default() });
    let mut jobs = JOBS.lock().unwrap_or_else(PoisonError::into_inner);
    jobs.retain(|job| job.strong_count() > 0);
    jobs.push(Arc::downgrade(&job));
    Ok(Job(job))
}

#[pymethods]
impl Job {
    /// The job as it is now, with its epochs.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let job = self.0.live(py)?;
        let now = wait(py, async { job.current().await.map_err(Failure::from) })?;
        parsed(py, serde_json::to_string(&now))
    }

    /// Changes who shares a step.
    fn world<'py>(&self, py: Python<'py>, world: &str) -> PyResult<Bound<'py, PyAny>> {
        let job = self.0.live(py)?;
        let world: WorldSpec = serde_json::from_str(world).map_err(|e| Failure::Invalid(e.to_string()))?;
        let now = wait(py, async { job.set_world(world).await.map_err(Failure::from) })?;
        parsed(py, serde_json::to_string(&now))
    }

    /// One worker's side of an epoch; `ahead`: the next samples are received while the last ones are being used.
    fn reader(slf: Bound<'_, Self>, epoch: u64, rank: u32, worker: u32, ahead: bool) -> PyResult<Reader> {
        let reader = Reader {
            job: slf.clone().unbind(),
            who: Who { epoch, rank, worker, ahead },
            last: Arc::default(),
            live: Slot::new(),
        };
        reader.live(slf.py())?;
        Ok(reader)
    }

    /// A lease that another process received is held by this one from now on. Nobody is asked, where this process
    /// declared the job.
    fn hold(&self, py: Python<'_>, token: Token) -> PyResult<()> {
        let (epoch, rank, lease, _, ttl) = token;
        self.0.keep((epoch, rank, lease), ttl);
        self.0.live(py)?.held().hold(epoch, rank, lease, ttl);
        Ok(())
    }

    /// A whole lease was consumed; nanoseconds waited, prepared and stepped. Durable when this returns. `tell` as in
    /// `Reader.next`, until the client's timeout; `None` where there was no answer `within` so many seconds.
    #[pyo3(signature = (token, times, tell, within = None))]
    fn ack<'py>(
        &self,
        py: Python<'py>,
        token: Token,
        times: (u64, u64, u64),
        tell: Bound<'py, PyAny>,
        within: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let (epoch, rank, lease, entries, _) = token;
        let job = self.0.live(py)?;
        let (waited_ns, prepared_ns, stepped_ns) = times;
        let batch = BatchTimes { entries, waited_ns, prepared_ns, stepped_ns };
        let acks = [Ack { lease, upto: entries, batches: vec![batch] }];
        let client = self.0.client.get().live(py)?;
        let within = within.map_or(PATIENCE, |s| Duration::try_from_secs_f64(s).unwrap_or(Duration::ZERO));
        let acking = async {
            let acked = tokio::time::timeout(within, job.ack(epoch, rank, &acks));
            acked.await.ok().transpose().map_err(Failure::from)
        };
        let acked = wait_telling(
            py,
            acking,
            SILENCE,
            || gone(&client),
            |seconds, why| tell.call1((seconds, why)).map(drop),
        );
        let Some(acked) = acked? else { return Ok(None) };
        self.0.give_up(py, (epoch, rank, lease));
        parsed(py, serde_json::to_string(&acked)).map(Some)
    }

    /// A lease is given up: what it has is delivered again when it expires.
    fn drop_lease(&self, py: Python<'_>, token: Token) {
        let (epoch, rank, lease, _, _) = token;
        self.0.give_up(py, (epoch, rank, lease));
    }

    /// Of all that this process holds it goes on holding these leases. Others were received, and got lost on their way to the
    /// consumer: they are given up.
    fn hold_only(&self, py: Python<'_>, tokens: Vec<Token>) {
        let kept: BTreeSet<_> =
            tokens.into_iter().map(|(epoch, rank, lease, ..)| (epoch, rank, lease)).collect();
        let held: Vec<_> = self.0.own().held.keys().copied().collect();
        held.into_iter().filter(|key| !kept.contains(key)).for_each(|key| self.0.give_up(py, key));
    }

    /// The epoch's self-contained state.
    fn state<'py>(&self, py: Python<'py>, epoch: u64) -> PyResult<Bound<'py, PyBytes>> {
        let job = self.0.live(py)?;
        let state = wait(py, async { job.state(epoch).await.map_err(Failure::from) })?;
        Ok(PyBytes::new(py, &state))
    }

    /// The epoch's ledger, as far as it is durable.
    fn ledger<'py>(&self, py: Python<'py>, epoch: u64) -> PyResult<Bound<'py, PyBytes>> {
        let job = self.0.live(py)?;
        let ledger = wait(py, async { job.ledger(epoch).await.map_err(Failure::from) })?;
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
        let now = wait(py, async { job.put_state(epoch, state, replace).await.map_err(Failure::from) })?;
        parsed(py, serde_json::to_string(&now))
    }

    /// The model was saved: what is acknowledged is committed under this number.
    fn checkpoint<'py>(&self, py: Python<'py>, epoch: u64, commit: u64) -> PyResult<Bound<'py, PyAny>> {
        let job = self.0.live(py)?;
        let now = wait(py, async { job.checkpoint(epoch, commit).await.map_err(Failure::from) })?;
        parsed(py, serde_json::to_string(&now))
    }

    /// The model went back to a commit.
    fn rollback<'py>(&self, py: Python<'py>, epoch: u64, commit: u64) -> PyResult<Bound<'py, PyAny>> {
        let job = self.0.live(py)?;
        let now = wait(py, async { job.rollback(epoch, Some(commit)).await.map_err(Failure::from) })?;
        parsed(py, serde_json::to_string(&now))
    }

    /// The receipt and certificate of a finished epoch, as JSON text.
    fn receipt(&self, py: Python<'_>, epoch: u64) -> PyResult<String> {
        let job = self.0.live(py)?;
        let receipt = wait(py, async { job.receipt(epoch).await.map_err(Failure::from) })?;
        Ok(serde_json::to_string(&receipt).map_err(|e| Failure::Invalid(e.to_string()))?)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> Pickled<'py, (Py<Client>, String)> {
        let spec = serde_json::to_string(&self.0.spec).map_err(|e| Failure::Invalid(e.to_string()))?;
        Ok((py.import("fletch._native")?.getattr("_job")?, (self.0.client.clone_ref(py), spec)))
    }
}

/// Epoch, rank, lease, entries, ttl in ms: what acknowledging takes, for another process too.
type Token = (u64, u32, u64, u32, u64);

/// One worker's side of an epoch; of the process that made it.
#[pyclass(frozen, module = "fletch._native")]
#[derive(Debug)]
pub struct Reader {
    job: Py<Job>,
    who: Who,
    /// The number of the last request whose answer was handed out; 0 before that.
    last: Arc<AtomicU64>,
    /// Nothing once it was given up. In another process, or after a fork, it is made anew: what was received ahead was
    /// renewed by nobody since, and is asked for again.
    live: Slot<Arc<tokio::sync::Mutex<Option<EpochReader>>>>,
}

/// Whose leases a reader receives, and how.
#[derive(Debug, Clone, Copy)]
struct Who {
    epoch: u64,
    rank: u32,
    worker: u32,
    ahead: bool,
}

impl Reader {
    fn live(&self, py: Python<'_>) -> PyResult<Arc<tokio::sync::Mutex<Option<EpochReader>>>> {
        if let Some(live) = self.live.get(py) {
            return Ok(live);
        }
        let Who { epoch, rank, worker, ahead } = self.who;
        let mut reader =
            self.job.get().0.live(py)?.reader(epoch, rank, worker).patience(PATIENCE).prefetch(ahead);
        if let last @ 1.. = self.last.load(Relaxed) {
            reader = reader.after_sequence(last);
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

    /// The ordinal of its first entry in the version: with the root its id.
    #[getter]
    fn ordinal(&self) -> u64 {
        self.0.ordinal
    }

    /// Which copy of it this is, from 0; `None` for one that only fills up a last step.
    #[getter]
    fn copy(&self) -> Option<u32> {
        Some(self.0.copy).filter(|c| *c < 1 << 31)
    }

    /// Paths of its files.
    #[getter]
    fn paths(&self) -> Vec<String> {
        self.0.heads.iter().map(|f| f.path.clone()).collect()
    }

    /// The bytes of its files, as read-only views.
    fn views<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let views: PyResult<Vec<_>> = self.0.files().map(|(_, b)| buffer::view(py, b)).collect();
        PyList::new(py, views?)
    }
}

/// What is told of a batch: its token, its samples, and what they add to a receipt.
type Told<'py> = (Token, Vec<Leased>, Bound<'py, PyBytes>);

#[pymethods]
impl Reader {
    /// The next samples, at most `want`: `("batch", …)`, `("full", None)`, `("last", None)` or `("done", None)`. A
    /// server that is gone is waited for; `tell` is then called with the seconds waited so far and why, about once a second.
    #[pyo3(name = "next")]
    fn next_batch<'py>(
        &self,
        py: Python<'py>,
        want: u32,
        tell: Bound<'py, PyAny>,
    ) -> PyResult<(&'static str, Option<Told<'py>>)> {
        let job = &self.job.get().0;
        let client = job.client.get().live(py)?;
        let (reader, last) = (self.live(py)?, Arc::clone(&self.last));
        let next = async move {
            let mut reader = reader.lock().await;
            let given_up = || Failure::Invalid("this reader was given up".into());
            let reader = reader.as_mut().ok_or_else(given_up)?;
            let next = reader.next(want).await?;
            last.store(reader.sequence(), Relaxed);
            Ok::<_, Failure>(next)
        };
        let next = wait_telling(
            py,
            next,
            SILENCE,
            || gone(&client),
            |seconds, why| tell.call1((seconds, why)).map(drop),
        )?;
        let LeaseBatch { token: t, samples } = match next {
            Next::Batch(batch) => batch,
            Next::Full => return Ok(("full", None)),
            Next::Last => return Ok(("last", None)),
            Next::Done => return Ok(("done", None)),
        };
        job.keep((t.epoch, t.rank, t.lease), t.ttl_ms);
        let deliveries: Vec<u8> = samples.iter().flat_map(delivery).collect();
        let token = (t.epoch, t.rank, t.lease, t.entries, t.ttl_ms);
        let leased = samples.into_iter().map(Leased).collect();
        Ok(("batch", Some((token, leased, PyBytes::new(py, &deliveries)))))
    }

    /// Nothing more is asked for, and what was received ahead is not held any more.
    fn give_up(&self, py: Python<'_>) {
        // Where a call is under way, in another thread, its end is the end of what it holds.
        if let Some(live) = self.live.get(py)
            && let Ok(mut reader) = live.try_lock()
        {
            *reader = None;
        }
    }
}

/// What is wrong with a server that is silent, if anything is.
async fn gone(client: &fletch_client::Client) -> Option<String> {
    let client = client.within(Duration::from_secs(1)).fail_fast();
    client.info().await.err().map(|e| e.to_string())
}
