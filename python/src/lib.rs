//! The native half of the Python package `fletch`: the datasets of a server as Python objects.
//!
//! Owns: the translation between Python and `fletch-client`: arguments, results, errors, signals, forks.
//! Must never: hold the GIL while it waits for a socket, or use in a forked child a value that the parent
//! made.
//!
//! Invariants
//! 1. Bytes given to Python were hashed here after they arrived (I1), unless the caller leaves that to the
//!    server (`verify="server"`). They are not copied, with three exceptions: files of at most 16 KiB, which
//!    share a response; files that came in several pieces (all above 16 MiB); and short ranges of chunks.
//! 2. Every call ends within the client's timeout, or when a signal handler raises.
//! 3. Memory and threads are bounded: one runtime for each process, and tables up to
//!    [`version_handle::TABLES_BYTES`].

mod buffer;
mod client;
mod connections;
mod entry;
mod epochs;
mod errors;
mod fetch;
mod groups;
mod pending_read;
mod process;
mod ranges;
mod receipt_sum;
mod shared_job;
mod version;
mod version_handle;

use pyo3::prelude::*;

/// The native half of the package `fletch`. Import `fletch` instead.
#[pymodule]
#[pyo3(name = "_native")]
fn native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<client::Client>()?;
    m.add_class::<entry::Entry>()?;
    m.add_class::<entry::Sample>()?;
    m.add_class::<pending_read::PendingRead>()?;
    m.add_class::<version::Version>()?;
    m.add_class::<epochs::Job>()?;
    m.add_class::<epochs::Leased>()?;
    m.add_class::<epochs::Reader>()?;
    m.add_class::<receipt_sum::ReceiptSum>()?;
    m.add_function(wrap_pyfunction!(epochs::declare, m)?)?;
    m.add_function(wrap_pyfunction!(client::seal, m)?)?;
    m.add_function(wrap_pyfunction!(client::sealing, m)?)?;
    m.add_function(wrap_pyfunction!(epochs::unpickle_job, m)?)?;
    m.add_function(wrap_pyfunction!(epochs::describe, m)?)?;
    m.add_function(wrap_pyfunction!(epochs::move_job, m)?)?;
    m.add_function(wrap_pyfunction!(epochs::delete_job, m)?)?;
    m.add_function(wrap_pyfunction!(epochs::world_of, m)?)?;
    m.add_function(wrap_pyfunction!(epochs::select, m)?)?;
    m.add_function(wrap_pyfunction!(shared_job::after_fork_in_parent, m)?)?;
    m.add_function(wrap_pyfunction!(client::unpickle_client, m)?)?;
    m.add_function(wrap_pyfunction!(entry::unpickle_entry, m)?)?;
    m.add_function(wrap_pyfunction!(entry::unpickle_sample, m)?)?;
    m.add_function(wrap_pyfunction!(client::unpickle_version, m)?)?;
    m.add_function(wrap_pyfunction!(process::before_fork, m)?)?;
    m.add_function(wrap_pyfunction!(process::after_fork_in_child, m)?)?;
    m.add("LEASE_MAX", fletch_api::epochs::WANT_MAX)?;
    m.add("HELD_MAX", fletch_api::epochs::HELD_MAX)?;
    m.add("__version__", env!("CARGO_PKG_VERSION"))
}
