//! The runtime of a process, the waiting for its tasks, and forks.
//!
//! A forked child has its parent's memory but none of its threads. So it abandons the values that these
//! threads owned: it never uses them, and never drops them. A drop would wake threads that do not exist, over
//! descriptors that the parent still uses.
//!
//! Invariants
//! 1. A thread takes a lock of this crate only while it holds the GIL, and releases the lock before the GIL.
//!    So at a fork that Python makes, no thread but the forking one can hold a lock.
//! 2. At such a fork, if no call is in progress, this process has no connection and no runtime thread, so the
//!    child inherits neither. Both come back with the next call, or right after the fork in a process that
//!    holds leases ([`crate::epochs::after_fork_in_parent`]).
//! 3. A [`Live`] value of another process or of an older runtime is never returned.

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

/// The period at which a wait checks for signals (Ctrl-C).
const TICK: Duration = Duration::from_millis(100);
/// The period at which a silent server is probed.
const PROBE_EVERY: Duration = Duration::from_secs(1);
/// The time within which an idle runtime must end before a fork.
const END_WITHIN: Duration = Duration::from_secs(1);
/// The threads that drive connections and background reads, in addition to the thread that waits.
const WORKERS: usize = 2;

/// The number of the current runtime. It increases when a runtime ends.
static ERA: AtomicU64 = AtomicU64::new(1);
/// The number of calls that wait with the GIL released.
static WAITING: AtomicUsize = AtomicUsize::new(0);
static RUNTIME: Mutex<Option<Live<Arc<Io>>>> = Mutex::new(None);

/// The runtime of a process, and its background tasks.
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
    /// Creates a value of this process and of the current runtime.
    pub fn new(value: T) -> Self {
        Live { pid: id(), era: ERA.load(SeqCst), value: Some(value) }
    }

    /// Returns the value if it belongs to this process and to the current runtime.
    pub fn get(&self) -> Option<&T> {
        self.value.as_ref().filter(|_| self.pid == id() && self.era == ERA.load(SeqCst))
    }

    /// Returns the value if it was made in this process.
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

/// A mutable cell for a [`Live`] value.
#[derive(Debug)]
pub struct Slot<T>(Mutex<Option<Live<T>>>);

impl<T: Clone> Slot<T> {
    /// Creates an empty slot.
    pub const fn new() -> Self {
        Slot(Mutex::new(None))
    }

    /// Returns a clone of the value if it belongs to this process and the current runtime. Needs the GIL.
    pub fn get(&self, _gil: Python<'_>) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().and_then(Live::get).cloned()
    }

    /// Stores a value. Needs the GIL.
    pub fn set(&self, _gil: Python<'_>, value: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Live::new(value));
    }
}

/// Returns this process's runtime, and starts it if necessary.
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

/// Waits for `work` with the GIL released.
///
/// A signal handler that raises (Ctrl-C) ends the wait and drops the work.
///
/// # Errors
/// The error of `work`, or the exception of a signal handler.
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

/// [`wait`] that reports a server that is gone.
///
/// After `silence` without an answer it runs `probe` about once a second, beside the work. The problem that
/// `probe` returns goes to `report`, with the seconds waited.
///
/// # Errors
/// As [`wait`], and the exception of `report`.
pub fn wait_reporting<T: Send, E: Into<PyErr> + Send, P: Future<Output = Option<String>> + Send>(
    py: Python<'_>,
    work: impl Future<Output = Result<T, E>> + Send,
    silence: Duration,
    probe: impl Fn() -> P + Sync,
    mut report: impl FnMut(f64, String) -> PyResult<()>,
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
            Err(Some(why)) => report(begun.elapsed().as_secs_f64(), why)?,
            Err(None) => {}
        }
        if due {
            probed = Instant::now();
        }
        py.check_signals()?;
    }
}

/// Runs a background task until it ends or this process forks.
///
/// # Errors
/// The runtime cannot be started.
pub fn spawn_background<T: Send + 'static>(
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

/// Ends an idle runtime with its connections before Python forks, so that the child inherits none.
///
/// While another thread is inside a call, nothing can be ended. Then the child inherits the connections and
/// never uses them.
#[pyfunction(name = "_before_fork")]
pub fn before_fork() {
    if WAITING.load(SeqCst) > 0 {
        return;
    }
    let kept = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(io) = kept.and_then(Live::take) else { return };
    ERA.fetch_add(1, SeqCst);
    // No call waits, so this is the last reference. The GIL is kept, so that no call begins before the fork.
    if let Some(io) = Arc::into_inner(io) {
        io.runtime.shutdown_timeout(END_WITHIN);
    }
}

/// Resets the state in the child of a fork: it has no waiting calls, whatever its parent's threads did.
#[pyfunction(name = "_after_fork_in_child")]
pub fn after_fork_in_child() {
    WAITING.store(0, SeqCst);
    ERA.fetch_add(1, SeqCst);
}
