//! Received bytes as a Python buffer.
//!
//! This is the only file of the crate with unsafe code: a type with two slots that are C functions.
//!
//! The package has one binary for Python 3.9 and later, so it uses the stable ABI of 3.9. Buffers belong to
//! the stable ABI since 3.11. CPython 3.9 and 3.10 have the same structure, slot numbers and function
//! `PyBuffer_FillInfo`, only without that promise. Both releases get no changes any more.
//!
//! 1. A view's memory is the `Bytes` of the object that the view names as its owner. The memory never
//!    changes, and lives as long as that object.
//! 2. Python code cannot make an object, which would have no `Bytes`: the slot `tp_new` raises TypeError. The
//!    type has no subclasses.

use bytes::Bytes;
use pyo3::{
    exceptions::{PySystemError, PyTypeError},
    ffi,
    prelude::*,
    sync::PyOnceLock,
    types::{PyList, PyMemoryView, PyType},
};
use std::{
    ffi::{c_char, c_int, c_uint, c_ulong, c_void},
    ptr,
};

/// The number of the slot for `bf_getbuffer` in every CPython.
const BF_GETBUFFER: c_int = 1;

/// The structure of a request for a buffer, as every CPython since 3.3 has it. The interpreter owns it.
#[repr(C)]
struct View {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: ffi::Py_ssize_t,
    itemsize: ffi::Py_ssize_t,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut ffi::Py_ssize_t,
    strides: *mut ffi::Py_ssize_t,
    suboffsets: *mut ffi::Py_ssize_t,
    internal: *mut c_void,
}

#[expect(unsafe_code, reason = "a function of the interpreter that the stable ABI of 3.9 does not declare")]
unsafe extern "C" {
    fn PyBuffer_FillInfo(
        view: *mut View,
        owner: *mut ffi::PyObject,
        memory: *mut c_void,
        len: ffi::Py_ssize_t,
        readonly: c_int,
        flags: c_int,
    ) -> c_int;
}

/// An object of the type: what every Python object begins with, and the bytes.
#[repr(C)]
struct Buffer {
    head: ffi::PyObject,
    bytes: Bytes,
}

#[expect(unsafe_code, reason = "a slot of the type")]
unsafe extern "C" fn get_buffer(slf: *mut ffi::PyObject, view: *mut View, flags: c_int) -> c_int {
    // SAFETY: the slot is called with an object of the type, and `new` put the bytes there. The view takes a
    // reference to the object. The memory is read-only (the 1).
    unsafe {
        let bytes = &(*slf.cast::<Buffer>()).bytes;
        // No allocation is longer than isize::MAX.
        let len = bytes.len() as ffi::Py_ssize_t;
        PyBuffer_FillInfo(view, slf, bytes.as_ptr().cast_mut().cast(), len, 1, flags)
    }
}

#[expect(unsafe_code, reason = "a slot of the type")]
unsafe extern "C" fn dealloc(slf: *mut ffi::PyObject) {
    // SAFETY: the interpreter calls the slot once, with an object of the type that nobody holds. The slot
    // tp_free belongs to the allocation in `new`. An object of a type that is made at run time holds a
    // reference to it.
    unsafe {
        let kind = ffi::Py_TYPE(slf);
        ptr::drop_in_place(&raw mut (*slf.cast::<Buffer>()).bytes);
        let free: ffi::freefunc = std::mem::transmute(ffi::PyType_GetSlot(kind, ffi::Py_tp_free));
        free(slf.cast());
        ffi::Py_DECREF(kind.cast());
    }
}

#[expect(unsafe_code, reason = "a slot of the type")]
unsafe extern "C" fn refuse_new(
    _kind: *mut ffi::PyTypeObject,
    _args: *mut ffi::PyObject,
    _names: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: the interpreter calls the slot while this thread is attached to it.
    let py = unsafe { Python::assume_attached() };
    PyTypeError::new_err("a Buffer belongs to a read; it cannot be made").restore(py);
    ptr::null_mut()
}

/// Makes the type, once.
#[expect(unsafe_code, reason = "a type with C functions is made by a C function")]
fn kind(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static KIND: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let made = KIND.get_or_try_init(py, || {
        let slot = |slot, pfunc| ffi::PyType_Slot { slot, pfunc };
        let mut slots = [
            slot(ffi::Py_tp_dealloc, dealloc as *mut c_void),
            slot(ffi::Py_tp_new, refuse_new as *mut c_void),
            slot(BF_GETBUFFER, get_buffer as *mut c_void),
            slot(0, ptr::null_mut()),
        ];
        let mut spec = ffi::PyType_Spec {
            name: c"fletch._native.Buffer".as_ptr(),
            basicsize: c_int::try_from(size_of::<Buffer>())?,
            itemsize: 0,
            flags: c_uint::try_from(ffi::Py_TPFLAGS_DEFAULT as c_ulong)?,
            slots: slots.as_mut_ptr(),
        };
        // SAFETY: the name is static, and the interpreter copies the specification and its slots.
        let made = unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyType_FromSpec(&raw mut spec)) }?;
        Ok::<_, PyErr>(made.cast_into::<PyType>()?.unbind())
    })?;
    Ok(made.bind(py))
}

/// Returns an object that owns the bytes.
#[expect(unsafe_code, reason = "an object of a type with C functions is made by a C function")]
fn new(py: Python<'_>, bytes: Bytes) -> PyResult<Bound<'_, PyAny>> {
    let kind = kind(py)?;
    // SAFETY: the allocation has the size of `Buffer` and a valid head. Nobody sees the object before the
    // bytes are written.
    unsafe {
        let made = ffi::PyType_GenericAlloc(kind.as_ptr().cast(), 0);
        if made.is_null() {
            return Err(PyErr::take(py).unwrap_or_else(|| PySystemError::new_err("no object was made")));
        }
        ptr::write(&raw mut (*made.cast::<Buffer>()).bytes, bytes);
        Ok(Bound::from_owned_ptr(py, made))
    }
}

/// Returns a list of read-only views, without a copy of the bytes.
pub fn views(py: Python<'_>, all: Vec<Bytes>) -> PyResult<Bound<'_, PyList>> {
    let views: PyResult<Vec<_>> = all.into_iter().map(|b| view(py, b)).collect();
    PyList::new(py, views?)
}

/// Returns a read-only `memoryview` of the bytes, without a copy.
pub fn view(py: Python<'_>, bytes: Bytes) -> PyResult<Bound<'_, PyMemoryView>> {
    PyMemoryView::from(&new(py, bytes)?)
}
