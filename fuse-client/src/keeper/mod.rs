//! A keeper holds the device of a mount, so that the mount outlives the process that serves it.
//!
//! With `--survive` the process that a user starts is the keeper ([`run`]). It starts a second one, the
//! *worker*, which does all the work. When the worker dies, the programs that read the mount wait. The keeper
//! has the kernel send all unanswered requests again, and starts another worker, which answers them.
//!
//! | the mount is | because | a program that reads |
//! |---|---|---|
//! | served | a worker has the device | gets data |
//! | waiting | the worker died | gets what the kernel caches; else waits, and can be killed |
//! | failing | no worker came within `--io-timeout` | gets what the kernel caches, else EIO, until a worker comes |
//!
//! 1. The keeper has one thread, no connection and no token. It never touches a path inside its mount.
//! 2. A worker answers as its predecessor: it serves the same root, with the same inode numbers
//!    ([`State`]).
//! 3. A mount ends when a signal asks for it, or when somebody unmounts it. The death of a worker never
//!    unmounts.

mod keep;
mod worker;

pub use keep::run;
pub use worker::Keeper;

use crate::handshake::Agreed;
use fletch_core::Root;
use nix::sys::signal::{SigSet, Signal};
use serde::{Deserialize, Serialize};
use std::{io, path::PathBuf};

/// The environment variable in which a worker finds the number of its socket to the keeper.
pub const SOCKET_VARIABLE: &str = "FLETCH_KEEPER_SOCKET";
/// The longest message between the two.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// Returns the signals that end a mount. A keeper blocks them and reads them from a descriptor. A worker
/// inherits that, and must let them in again.
fn end_signals() -> SigSet {
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect()
}

/// What a worker must know to answer exactly as its predecessor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The root of the mounted version. A tag may name another one by now.
    pub root: Root,
    /// The directory, without links.
    pub dir: PathBuf,
    /// [`crate::fs::inode::ENCODING`].
    pub inode_encoding: u32,
}

/// What a worker asks its keeper.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Ask {
    /// What is kept?
    Hello,
    /// Mount, and give me the device.
    Mount { source: String, allow_other: bool, state: State },
    /// Give me the device of what is kept.
    Attach,
}

/// What the keeper answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Kept(Option<State>),
    /// A device comes with this message.
    Device(Agreed),
    Failed {
        errno: Option<i32>,
        is_denied: bool,
        why: String,
    },
}

impl Answer {
    fn failed(error: &io::Error) -> Self {
        let is_denied = error.kind() == io::ErrorKind::PermissionDenied;
        Answer::Failed { errno: error.raw_os_error(), is_denied, why: error.to_string() }
    }
}
