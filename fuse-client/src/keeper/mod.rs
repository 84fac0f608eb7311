//! A keeper holds the devices of mounts, so that they outlive the process that serves them.
//!
//! The process that a user starts is the keeper ([`run`]), unless `--survive false` says otherwise. It
//! starts a second one, the *worker*, which does all the work. When the worker dies, the programs that read
//! the mounts wait. The keeper has the kernel send all unanswered requests again, and starts another worker,
//! which answers them. A keeper for many processes ([`WorkerSource::Others`]) waits for a worker that
//! somebody else starts.
//!
//! ```text
//! event_loop ─┬─ child, listener       where workers come from
//!             ├─ messages, watch       what they ask; what the keeper waits for
//!             └─ mount_set ─┬─ kept_mount      a mount and its states: read this first
//!                           └─ worker_memory   the requests of a dead worker, on old kernels
//! worker ── the other end: runs in the worker
//! ```
//!
//! 1. The keeper has one thread, no connection and no token. It never touches a path inside its mounts.
//! 2. What a worker can do, the keeper does not do: agree with the kernel on the protocol, mount and unmount
//!    for itself, open versions. So the keeper is short, and seldom replaced.
//! 3. A worker answers as its predecessor: it serves the same root, with the same inode numbers
//!    ([`State`]).
//! 4. A mount ends when a signal asks for it, or when somebody unmounts it. The death of a worker never
//!    unmounts.
//! 5. `KEEPER_FILES` of the tests' `structure.rs` lists the files that run in a keeper that holds mounts.
//!    A test there fails when their code grows.

mod child;
mod event_loop;
mod file_pages;
mod kept_mount;
mod listener;
mod messages;
mod mount_set;
mod watch;
mod worker;
mod worker_memory;

pub use event_loop::{HoldSettings, WorkerSource, run};
pub(crate) use worker::begin;
pub use worker::{Keeper, MountSetName, State};

use nix::sys::signal::{SigSet, Signal};

/// The environment variable in which a worker finds the number of its socket to the keeper.
pub const SOCKET_VARIABLE: &str = "FLETCH_KEEPER_SOCKET";

/// Returns the signals that end a mount. A keeper blocks them and reads them from a descriptor. A worker
/// inherits that, and must let them in again.
fn end_signals() -> SigSet {
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect()
}
