//! `fletch.PendingRead`: files that are prefetched in the background.
//!
//! Invariants
//! 1. `views` returns what `Version.read_many` would return. It reads again what failed, or what was lost
//!    with the runtime that read it (at a fork).
//! 2. Dropping a pending read ends it.

use crate::buffer;
use crate::errors::Failure;
use crate::fetch::{Item, bytes_of, file_requests, read_all};
use crate::process::{Live, spawn_background, wait};
use crate::version_handle::VersionHandle;
use bytes::Bytes;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyList;
use std::sync::Arc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// A read of at most this many bytes starts beside an earlier read, because it hardly delays it.
const AT_ONCE_BYTES: u64 = 4 << 20;

type Task = AbortOnDropHandle<Result<Vec<Bytes>, Failure>>;

/// Whole files that are being read. `Version.prefetch` returns it.
#[pyclass(frozen, module = "fletch")]
#[derive(Debug)]
pub struct PendingRead {
    version: Arc<VersionHandle>,
    items: Arc<[Item]>,
    task: Mutex<Option<Live<Task>>>,
    /// Cancelled at the end of the task, also if it failed.
    over: CancellationToken,
}

impl PendingRead {
    /// Starts to read. A read of many bytes waits until `after` ends or is dropped.
    pub fn start(
        py: Python<'_>,
        version: Arc<VersionHandle>,
        items: Vec<Item>,
        after: Option<&PendingRead>,
    ) -> PyResult<Self> {
        let open = version.open(py)?;
        let items: Arc<[Item]> = items.into();
        let (asked, over) = (Arc::clone(&items), CancellationToken::new());
        let (before, end) = (after.map(|a| a.over.clone()), over.clone().drop_guard());
        let task = spawn_background(py, async move {
            let _end = end;
            let wanted = file_requests(&open, &asked).await?;
            if let Some(before) = before
                && bytes_of(&wanted) > AT_ONCE_BYTES
            {
                before.cancelled().await;
            }
            read_all(&open, wanted, Instant::now() + open.client.io_timeout()).await
        })?;
        let task = Mutex::new(Some(Live::new(AbortOnDropHandle::new(task))));
        Ok(PendingRead { version, items, task, over })
    }

    fn taken(&self, _gil: Python<'_>) -> Option<Live<Task>> {
        self.task.lock().take()
    }
}

#[pymethods]
impl PendingRead {
    /// Whether the read ended, so that `views` does not wait for it.
    fn done(&self, _py: Python<'_>) -> bool {
        let task = self.task.lock();
        task.as_ref().and_then(Live::get).is_some_and(AbortOnDropHandle::is_finished)
    }

    /// Waits for the files, and returns them as `Version.read_many` does.
    fn views<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let taken = self.taken(py);
        // A read may have failed because its runtime ended, so its error counts only if the runtime still
        // runs.
        let fresh = taken.as_ref().is_some_and(|t| t.get().is_some());
        let read = match taken.and_then(Live::take) {
            Some(task) => wait(py, async move { Ok::<_, Failure>(task.await.ok()) })?,
            None => None,
        };
        match read {
            Some(Ok(all)) => buffer::views(py, all),
            Some(Err(e)) if fresh && !e.kind().retryable() => Err(e.into()),
            // The read failed with an error that may have passed, or was lost.
            Some(Err(_)) | None => {
                self.version.read_all(py, Arc::clone(&self.items)).and_then(|all| buffer::views(py, all))
            }
        }
    }
}
