//! Files that are read before anybody waits for them.
//!
//! Invariants
//! 1. Whoever asks for the views gets what `Version.read_many` would have given: what failed on the way, or was lost with
//!    the runtime that read it (a fork), is read again.
//! 2. A reading that is dropped is ended.

use crate::buffer;
use crate::errors::Failure;
use crate::fetch::{Item, bytes_of, read_all, wanted};
use crate::process::{Live, beside, wait};
use crate::version::Version;
use bytes::Bytes;
use pyo3::prelude::*;
use pyo3::types::PyList;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// So many bytes are read beside what was begun before them: they delay it by nothing to speak of.
const AT_ONCE_BYTES: u64 = 4 << 20;

type Task = AbortOnDropHandle<Result<Vec<Bytes>, Failure>>;

/// Whole files on their way; `Version.read_ahead` makes it.
#[pyclass(frozen, module = "fletch")]
#[derive(Debug)]
pub struct Reading {
    version: Py<Version>,
    items: Arc<[Item]>,
    task: Mutex<Option<Live<Task>>>,
    /// Cancelled at the end of the task, whatever came of it.
    over: CancellationToken,
}

impl Reading {
    /// Begins to read; many bytes when `after` is done, or nobody waits for it any more.
    pub fn begin(
        py: Python<'_>,
        version: Py<Version>,
        items: Vec<Item>,
        after: Option<&Reading>,
    ) -> PyResult<Self> {
        let open = version.get().open(py)?;
        let items: Arc<[Item]> = items.into();
        let (asked, over) = (Arc::clone(&items), CancellationToken::new());
        let (before, end) = (after.map(|a| a.over.clone()), over.clone().drop_guard());
        let task = beside(py, async move {
            let _end = end;
            let wanted = wanted(&open, &asked).await?;
            if let Some(before) = before
                && bytes_of(&wanted) > AT_ONCE_BYTES
            {
                before.cancelled().await;
            }
            read_all(&open, wanted, Instant::now() + open.client.io_timeout()).await
        })?;
        let task = Mutex::new(Some(Live::new(AbortOnDropHandle::new(task))));
        Ok(Reading { version, items, task, over })
    }

    fn taken(&self, _gil: Python<'_>) -> Option<Live<Task>> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl Reading {
    /// Whether the views can be had without waiting for what is under way.
    fn done(&self, _py: Python<'_>) -> bool {
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        task.as_ref().and_then(Live::get).is_some_and(AbortOnDropHandle::is_finished)
    }

    /// The files, as `Version.read_many` has them, when all of them are here.
    fn views<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let taken = self.taken(py);
        // What failed in a runtime that is gone may have failed by that.
        let fresh = taken.as_ref().is_some_and(|t| t.get().is_some());
        let read = match taken.and_then(Live::take) {
            Some(task) => wait(py, async { Ok::<_, Failure>(task.await.ok()) })?,
            None => None,
        };
        match read {
            Some(Ok(all)) => buffer::views(py, all),
            Some(Err(e)) if fresh && !e.kind().retryable() => Err(e.into()),
            // It could not be had then, which says nothing of now; or was lost.
            Some(Err(_)) | None => {
                self.version.get().read_all(py, &self.items).and_then(|all| buffer::views(py, all))
            }
        }
    }
}
