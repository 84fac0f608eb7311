//! The native half of the Python package `fletch`: a server's datasets as Python objects.
//!
//! Owns the translation between Python and `fletch-client`: arguments, results, errors, signals,
//! forks. Must never hold the GIL while it waits for a socket, and must never use in a forked
//! child what its parent made.
//!
//! Invariants
//! 1. Bytes handed to Python were hashed here after they came (I1). They are not copied on the
//!    way, but for files of at most 16 KiB, out of an answer that others share, and those that came in several pieces (all of
//!    more than 16 MiB), which are put together.
//! 2. Every call ends within the client's timeout, or at the next signal that raises.
//! 3. What is here is bounded: one runtime a process, tables up to [`version::TABLES_BYTES`].

mod buffer;
mod client;
mod entry;
mod epochs;
mod errors;
mod fetch;
mod process;
mod reading;
mod sum;
mod version;

use pyo3::prelude::*;

/// The native half of the package `fletch`; import that instead.
#[pymodule]
#[pyo3(name = "_native")]
fn native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<buffer::Buffer>()?;
    m.add_class::<client::Client>()?;
    m.add_class::<entry::Entry>()?;
    m.add_class::<entry::Sample>()?;
    m.add_class::<reading::Reading>()?;
    m.add_class::<version::Version>()?;
    m.add_class::<epochs::Job>()?;
    m.add_class::<epochs::Leased>()?;
    m.add_class::<epochs::Reader>()?;
    m.add_class::<sum::Sum>()?;
    m.add_function(wrap_pyfunction!(epochs::declare, m)?)?;
    m.add_function(wrap_pyfunction!(epochs::revive_job, m)?)?;
    m.add_function(wrap_pyfunction!(epochs::world_of, m)?)?;
    m.add_function(wrap_pyfunction!(epochs::select, m)?)?;
    m.add_function(wrap_pyfunction!(epochs::after_fork_in_parent, m)?)?;
    m.add_function(wrap_pyfunction!(client::revive_client, m)?)?;
    m.add_function(wrap_pyfunction!(entry::revive_entry, m)?)?;
    m.add_function(wrap_pyfunction!(entry::revive_sample, m)?)?;
    m.add_function(wrap_pyfunction!(version::revive_version, m)?)?;
    m.add_function(wrap_pyfunction!(process::before_fork, m)?)?;
    m.add_function(wrap_pyfunction!(process::after_fork_in_child, m)?)?;
    m.add("LEASE_MAX", fletch_api::epochs::WANT_MAX)?;
    m.add("HELD_MAX", fletch_api::epochs::HELD_MAX)?;
    m.add("__version__", env!("CARGO_PKG_VERSION"))
}
