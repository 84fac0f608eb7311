//! Received bytes as a Python buffer.
//!
//! This is the only file of the crate with unsafe code, for one slot of the buffer protocol.
//!
//! Invariant: a view's memory is the `Bytes` of the object that the view names as its owner. The memory never
//! changes, and lives as long as that object.

use bytes::Bytes;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyMemoryView};
use std::ffi::c_int;

/// Immutable received bytes, for `memoryview`.
#[pyclass(frozen, module = "fletch")]
#[derive(Debug)]
pub struct Buffer(Bytes);

#[pymethods]
impl Buffer {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    #[expect(unsafe_code, reason = "the buffer protocol is a table of C functions")]
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let bytes = &slf.get().0;
        let len = ffi::Py_ssize_t::try_from(bytes.len())?;
        let memory = bytes.as_ptr().cast_mut().cast();
        // SAFETY: `view` is the interpreter's to fill; the memory is read-only (the 1), belongs to
        // `slf`, of which the view takes a reference, and `slf` is frozen.
        let done = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), memory, len, 1, flags) };
        if done == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// Returns a list of read-only views, without a copy of the bytes.
pub fn views(py: Python<'_>, all: Vec<Bytes>) -> PyResult<Bound<'_, PyList>> {
    let views: PyResult<Vec<_>> = all.into_iter().map(|b| view(py, b)).collect();
    PyList::new(py, views?)
}

/// Returns a read-only `memoryview` of the bytes, without a copy.
pub fn view(py: Python<'_>, bytes: Bytes) -> PyResult<Bound<'_, PyMemoryView>> {
    PyMemoryView::from(Bound::new(py, Buffer(bytes))?.as_any())
}
