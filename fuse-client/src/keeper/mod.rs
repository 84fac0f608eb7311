//! A keeper holds the devices of mounts, so that they outlive the process that serves them.
//!
//! The process that a user starts is the keeper ([`run`]), unless `--survive false` says otherwise. It
//! starts a second one, the *worker*, which does all the work. When the worker dies, the programs that read
//! the mounts wait. The keeper has the kernel send all unanswered requests again, and starts another worker,
//! which answers them.
//!
//! | a mount is | because | a program that reads |
//! |---|---|---|
//! | served | a worker has the device | gets data |
//! | waiting | the worker died | gets what the kernel caches; else waits, and can be killed |
//! | failing | no worker took it over within `--io-timeout` | gets what the kernel caches, else EIO, until then |
//!
//! 1. The keeper has one thread, no connection and no token. It never touches a path inside its mounts.
//! 2. A worker answers as its predecessor: it serves the same root, with the same inode numbers
//!    ([`State`]).
//! 3. A mount ends when a signal asks for it, or when somebody unmounts it. The death of a worker never
//!    unmounts.
//! 4. A kernel before Linux 6.9 does not send requests again. There the keeper finds them in the memory of
//!    the dead worker ([`crate::request_memory`]), and hands them to the next one.

mod file_pages;
mod hold;
mod keep;
mod mount_set;
mod worker;
mod worker_memory;

pub use hold::{HoldSettings, hold};
pub use keep::{Rules, run};
pub(crate) use worker::begin;
pub use worker::{Keeper, MountSetName};

use crate::handshake::Agreed;
use fletch_core::{DatasetName, LayoutId, Root};
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
    pub layout: LayoutId,
    /// The dataset through which the mount reads.
    pub dataset: DatasetName,
    /// The directory, without links.
    pub dir: PathBuf,
    /// [`crate::fs::inode::ENCODING`].
    pub inode_encoding: u32,
}

/// What a worker asks its keeper.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Ask {
    /// The first message to a keeper of many processes: the name of a set of mounts, and how long a mount of
    /// it may wait for a worker. `links`: the name is the directory of a file system with links.
    Hello { name: PathBuf, io_timeout_ms: u64, links: bool },
    /// I live.
    Alive,
    /// What is kept? The answer is one mount: the first after this directory.
    Kept { after: Option<PathBuf> },
    /// Mount, and give me the device.
    Mount { source: String, allow_other: bool, state: State },
    /// Give me the device of the mount at this directory.
    Attach { dir: PathBuf },
    /// You were started again: the device of this mount comes with this message.
    Back { state: State, agreed: Agreed },
    /// Mount a file system for links at this directory.
    MountLinks { dir: PathBuf },
    /// Unmount this directory.
    Unmount { dir: PathBuf, detach: bool },
    /// Nobody will serve the mount at this directory: let its readers fail.
    GiveUp { dir: PathBuf },
    /// Hold the descriptor that comes with this message for the next worker.
    Hold,
    /// Give me the descriptor that an earlier worker had you hold.
    Held,
    /// The memory with my requests comes with this message.
    Memory,
    /// I have the request with the number `taken`. Give me the next one that no worker answered.
    Unanswered { dir: PathBuf, taken: Option<u64> },
}

/// What the keeper answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Kept(Option<State>),
    Done,
    /// As `Done`. There are requests of these mounts that no worker answered.
    Waiting {
        dirs: Vec<PathBuf>,
    },
    Unanswered(Option<Vec<u8>>),
    /// A device comes with this message.
    Device(Agreed),
    /// A descriptor comes with this message if it is held.
    Held,
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
