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
//!    holds leases ([`crate::shared_job::after_fork_in_parent`]).
//! 3. A [`Live`] value of another process or of an older runtime is never returned.

use futures::FutureExt as _;
use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::future::Future;
use std::process::id;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, sync_channel};
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
/// The threads that drive connections, calls and background reads. The calling thread only waits.
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
        self.0.lock().as_ref().and_then(Live::get).cloned()
    }

    /// Stores a value. Needs the GIL.
    pub fn set(&self, _gil: Python<'_>, value: T) {
        *self.0.lock() = Some(Live::new(value));
    }
}

/// Returns this process's runtime, and starts it if necessary.
fn io(_gil: Python<'_>) -> PyResult<Arc<Io>> {
    let mut kept = RUNTIME.lock();
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

/// A future that runs as a task of the runtime, and whose result a thread waits for.
///
/// Dropping it drops the future before it returns.
struct Call<T> {
    io: Arc<Io>,
    task: Option<JoinHandle<()>>,
    result: Receiver<T>,
}

impl<T: Send + 'static> Call<T> {
    fn start(io: &Arc<Io>, work: impl Future<Output = T> + Send + 'static) -> Self {
        let (sender, result) = sync_channel(1);
        let run = async move {
            // No thread waits any more if the send fails, so nobody misses the result.
            let _ = sender.send(work.await);
        };
        let task = Some(io.tasks.spawn_on(run, io.runtime.handle()));
        Call { io: Arc::clone(io), task, result }
    }

    /// Waits for the result for at most one tick.
    fn tick(&mut self) -> PyResult<Option<T>> {
        match self.result.recv_timeout(TICK) {
            Ok(done) => {
                self.task = None;
                Ok(Some(done))
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(self.lost()),
        }
    }

    /// Returns the result if it is there.
    fn result(&mut self) -> PyResult<Option<T>> {
        match self.result.try_recv() {
            Ok(done) => {
                self.task = None;
                Ok(Some(done))
            }
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(self.lost()),
        }
    }

    /// Returns the error of a task that ended without a result. Continues the task's panic.
    fn lost(&mut self) -> PyErr {
        let ended = self.task.take().map(|task| self.io.runtime.block_on(task));
        if let Some(Err(e)) = ended
            && e.is_panic()
        {
            std::panic::resume_unwind(e.into_panic());
        }
        PyRuntimeError::new_err("a call of fletch ended without a result, because its IO threads ended")
    }
}

impl<T> Drop for Call<T> {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
            // An error says that the task was aborted, or that it panicked after its caller left.
            let _ = self.io.runtime.block_on(task);
        }
    }
}

/// Runs `work` as one task of the runtime, and waits for its result with the GIL released.
///
/// The wake-ups inside of `work` stay on the runtime's threads, and the calling thread wakes once. Work that
/// is ready at once starts no task. A signal handler that raises (Ctrl-C) ends the wait and drops the work.
///
/// # Errors
/// The error of `work`, or the exception of a signal handler.
pub fn wait<T: Send + 'static, E: Into<PyErr> + Send + 'static>(
    py: Python<'_>,
    work: impl Future<Output = Result<T, E>> + Send + 'static,
) -> PyResult<T> {
    wait_with(py, work, |_| Ok(()))
}

/// [`wait`] that reports a server that is gone.
///
/// After `silence` without an answer it runs `probe` about once a second, beside the work. The problem that
/// `probe` returns goes to `report`, with the seconds waited.
///
/// # Errors
/// As [`wait`], and the exception of `report`.
pub fn wait_reporting<T, E, P>(
    py: Python<'_>,
    work: impl Future<Output = Result<T, E>> + Send + 'static,
    silence: Duration,
    probe: impl Fn() -> P,
    mut report: impl FnMut(f64, String) -> PyResult<()>,
) -> PyResult<T>
where
    T: Send + 'static,
    E: Into<PyErr> + Send + 'static,
    P: Future<Output = Option<String>> + Send + 'static,
{
    let begun = Instant::now();
    let mut probe_at = begun + silence;
    let mut probing: Option<Call<Option<String>>> = None;
    wait_with(py, work, |io| {
        let Some(running) = &mut probing else {
            if Instant::now() >= probe_at {
                probing = Some(Call::start(io, probe()));
            }
            return Ok(());
        };
        if let Some(problem) = running.result()? {
            probing = None;
            probe_at = Instant::now() + PROBE_EVERY;
            problem.map_or(Ok(()), |why| report(begun.elapsed().as_secs_f64(), why))?;
        }
        Ok(())
    })
}

/// Runs `work` as a task, and calls `each_tick` while it runs.
fn wait_with<T: Send + 'static, E: Into<PyErr> + Send + 'static>(
    py: Python<'_>,
    work: impl Future<Output = Result<T, E>> + Send + 'static,
    mut each_tick: impl FnMut(&Arc<Io>) -> PyResult<()>,
) -> PyResult<T> {
    let io = io(py)?;
    let _waiting = Waiting::new();
    let begun = py.detach(|| {
        let _context = io.runtime.enter();
        let mut work = Box::pin(work);
        match work.as_mut().now_or_never() {
            Some(done) => Err(done),
            None => Ok(Call::start(&io, work)),
        }
    });
    let mut call = match begun {
        Ok(call) => call,
        Err(done) => return done.map_err(Into::into),
    };
    loop {
        match py.detach(|| call.tick())? {
            Some(done) => return done.map_err(Into::into),
            None => {
                if let Err(raised) = py.check_signals().and_then(|()| each_tick(&io)) {
                    py.detach(|| drop(call));
                    return Err(raised);
                }
            }
        }
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
    let kept = RUNTIME.lock().take();
    let Some(io) = kept.and_then(Live::take) else { return };
    ERA.fetch_add(1, SeqCst);
    // No call waits, so this is the last reference. The GIL is kept, so that no call begins before the fork.
    if let Some(io) = Arc::into_inner(io) {
        io.runtime.shutdown_timeout(END_WITHIN);
    }
    fletch_client::hits::close_idle();
}

/// Resets the state in the child of a fork: it has no waiting calls, whatever its parent's threads did.
#[pyfunction(name = "_after_fork_in_child")]
pub fn after_fork_in_child() {
    WAITING.store(0, SeqCst);
    ERA.fetch_add(1, SeqCst);
}
