//! What belongs to one process: the runtime, the wait for it, and forks.
//!
//! A forked child has its parent's memory but none of its threads, so whatever those owned is
//! abandoned in it: never used, never dropped (a drop would wake threads that do not exist, over
//! descriptors that the parent still uses).
//!
//! Invariants
//! 1. Locks of this crate are taken only with the GIL held and given back before it is: no thread
//!    but the forking one can hold one at a fork that Python makes.
//! 2. At such a fork, if no call is under way, this process has no connection and no runtime
//!    thread, so that the child inherits neither. Both come back with the next call, or right after the fork in a
//!    process that holds leases ([`crate::epochs::after_fork_in_parent`]).
//! 3. A [`Live`] value of another process or of an older runtime is not handed out.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::future::Future;
use std::pin::pin;
use std::process::id;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;

/// How often a wait looks for signals (Ctrl-C).
const TICK: Duration = Duration::from_millis(100);
/// How often a server that is silent is asked whether it is there.
const PROBE_EVERY: Duration = Duration::from_secs(1);
/// How long the end of an idle runtime may take before a fork.
const END_WITHIN: Duration = Duration::from_secs(1);
/// Threads that drive connections and what was begun ahead, beside the one that waits.
const WORKERS: usize = 2;

/// Which runtime something belongs to: counted up whenever one ends.
static ERA: AtomicU64 = AtomicU64::new(1);
/// Calls that wait with the GIL released.
static WAITING: AtomicUsize = AtomicUsize::new(0);
static RUNTIME: Mutex<Option<Live<Arc<Io>>>> = Mutex::new(None);

/// A process's runtime, and the tasks that run beside its calls.
#[derive(Debug)]
struct Io {
    runtime: Runtime,
    tasks: TaskTracker,
}

/// A value that is dropped only in the process that made it.
#[derive(Debug)]
pub struct Live<T> {
    pid: u32,
    era: u64,
    /// Present until it is taken or abandoned.
    value: Option<T>,
}

impl<T> Live<T> {
    /// Made now.
    pub fn new(value: T) -> Self {
        Live { pid: id(), era: ERA.load(SeqCst), value: Some(value) }
    }

    /// The value, if it may be used here and now.
    pub fn get(&self) -> Option<&T> {
        self.value.as_ref().filter(|_| self.pid == id() && self.era == ERA.load(SeqCst))
    }

    /// The value, if it was made in this process.
    pub fn take(mut self) -> Option<T> {
        if self.pid == id() { self.value.take() } else { None }
    }
}

impl<T> Drop for Live<T> {
    fn drop(&mut self) {
        if self.pid != id() {
            std::mem::forget(self.value.take());
        }
    }
}

/// A place for a [`Live`] value.
#[derive(Debug)]
pub struct Slot<T>(Mutex<Option<Live<T>>>);

impl<T: Clone> Slot<T> {
    /// An empty one.
    pub const fn new() -> Self {
        Slot(Mutex::new(None))
    }

    /// A clone of the value, if it may be used here and now. To be called with the GIL held.
    pub fn get(&self, _gil: Python<'_>) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().and_then(Live::get).cloned()
    }

    /// Keeps a value. To be called with the GIL held.
    pub fn set(&self, _gil: Python<'_>, value: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Live::new(value));
    }
}

/// This process's runtime.
fn io(_gil: Python<'_>) -> PyResult<Arc<Io>> {
    let mut kept = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(io) = kept.as_ref().and_then(Live::get) {
        return Ok(Arc::clone(io));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(4)
        .thread_name("fletch-io")
        .enable_all()
        .build()
        .map_err(|e| PyRuntimeError::new_err(format!("fletch cannot start its IO threads: {e}")))?;
    let made = Arc::new(Io { runtime, tasks: TaskTracker::new() });
    *kept = Some(Live::new(Arc::clone(&made)));
    Ok(made)
}

/// Waits for `work` with the GIL released. A signal whose handler raises (Ctrl-C) ends the wait and
/// drops the work.
///
/// # Errors
/// What `work` ends with, or what a signal's handler raised.
pub fn wait<T: Send, E: Into<PyErr> + Send>(
    py: Python<'_>,
    work: impl Future<Output = Result<T, E>> + Send,
) -> PyResult<T> {
    let io = io(py)?;
    let _waiting = Waiting::new();
    let mut work = pin!(work);
    loop {
        let tick = async { tokio::time::timeout(TICK, work.as_mut()).await };
        match py.detach(|| io.runtime.block_on(tick)) {
            Ok(done) => return done.map_err(Into::into),
            Err(_) => py.check_signals()?,
        }
    }
}

/// [`wait`], which looks after its server: when there was no answer for `silence`, `probe` is asked about once
/// a second what is wrong, beside the work, and what it says goes to `tell` with the seconds waited.
///
/// # Errors
/// As [`wait`], and what `tell` raises.
pub fn wait_telling<T: Send, E: Into<PyErr> + Send, P: Future<Output = Option<String>> + Send>(
    py: Python<'_>,
    work: impl Future<Output = Result<T, E>> + Send,
    silence: Duration,
    probe: impl Fn() -> P + Sync,
    mut tell: impl FnMut(f64, String) -> PyResult<()>,
) -> PyResult<T> {
    let io = io(py)?;
    let _waiting = Waiting::new();
    let mut work = pin!(work);
    let (begun, mut probed) = (Instant::now(), Instant::now());
    loop {
        let due = begun.elapsed() >= silence && probed.elapsed() >= PROBE_EVERY;
        let tick = async {
            tokio::select! {
                biased;
                done = work.as_mut() => Ok(done),
                why = probe(), if due => Err(why),
                () = tokio::time::sleep(TICK), if !due => Err(None),
            }
        };
        match py.detach(|| io.runtime.block_on(tick)) {
            Ok(done) => return done.map_err(Into::into),
            Err(Some(why)) => tell(begun.elapsed().as_secs_f64(), why)?,
            Err(None) => {}
        }
        if due {
            probed = Instant::now();
        }
        py.check_signals()?;
    }
}

/// Runs a task beside this process's calls, until it ends or this process forks.
///
/// # Errors
/// The runtime cannot be started.
pub fn beside<T: Send + 'static>(
    py: Python<'_>,
    task: impl Future<Output = T> + Send + 'static,
) -> PyResult<JoinHandle<T>> {
    let io = io(py)?;
    Ok(io.tasks.spawn_on(task, io.runtime.handle()))
}

struct Waiting;

impl Waiting {
    fn new() -> Self {
        WAITING.fetch_add(1, SeqCst);
        Waiting
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        WAITING.fetch_sub(1, SeqCst);
    }
}

/// Before Python forks: ends an idle runtime with its connections, so that none is inherited.
/// While another thread is inside a call nothing can be ended; what the child inherits then, it
/// never uses.
#[pyfunction(name = "_before_fork")]
pub fn before_fork() {
    if WAITING.load(SeqCst) > 0 {
        return;
    }
    let kept = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(io) = kept.and_then(Live::take) else { return };
    ERA.fetch_add(1, SeqCst);
    // Nobody waits, so nobody else holds it. The GIL is kept: no call may begin before the fork.
    if let Some(io) = Arc::into_inner(io) {
        io.runtime.shutdown_timeout(END_WITHIN);
    }
}

/// In the child of a fork: nobody waits in it, whatever its parent's threads did.
#[pyfunction(name = "_after_fork_in_child")]
pub fn after_fork_in_child() {
    WAITING.store(0, SeqCst);
    ERA.fetch_add(1, SeqCst);
}
