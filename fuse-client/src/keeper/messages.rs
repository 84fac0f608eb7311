//! The messages between a keeper and its workers: one question of a worker, and one answer.

use crate::{handshake::Agreed, passed_device};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
    path::PathBuf,
};

/// The longest message.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// What a worker asks its keeper.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Ask {
    /// The first message: the name of a set of mounts, and how long a mount of it may wait for a worker.
    /// `links`: the name is the directory of a file system with links.
    Hello { name: PathBuf, io_timeout_ms: u64, links: bool },
    /// I live.
    Alive,
    /// What is kept? The answer is one mount: the first after this directory.
    Kept { after: Option<PathBuf> },
    /// Mount, and give me the device. I give it back ([`Ask::Back`]) once I agreed with the kernel.
    Mount { source: String, allow_other: bool, dir: PathBuf, state: Value },
    /// Give me the device of the mount at this directory.
    Attach { dir: PathBuf },
    /// Keep this mount, which I serve. Its device comes with this message. The next worker gets `state`.
    Back { dir: PathBuf, state: Value, agreed: Agreed },
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
    /// I have the request with this number, of the mount at this directory. Give me the next one that no
    /// worker answered.
    Unanswered { taken: Option<(PathBuf, u64)> },
}

/// What the keeper answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    Done,
    Kept(Option<(PathBuf, Value)>),
    /// A device comes with this message, on which nobody spoke with the kernel yet.
    Mounted,
    /// A device comes with this message.
    Device(Agreed),
    /// A descriptor comes with this message if it is held.
    Held,
    /// A request, and the directory of its mount.
    Unanswered(Option<(PathBuf, Vec<u8>)>),
    Failed {
        errno: Option<i32>,
        is_denied: bool,
        why: String,
    },
}

impl From<io::Error> for Answer {
    fn from(error: io::Error) -> Self {
        let is_denied = error.kind() == io::ErrorKind::PermissionDenied;
        Answer::Failed { errno: error.raw_os_error(), is_denied, why: error.to_string() }
    }
}

/// Sends a message, and a descriptor with it. Does not wait: a process that does not read its messages must
/// not stop the other one.
pub(super) fn send<T: Serialize>(
    socket: &OwnedFd,
    message: &T,
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    passed_device::send(socket, &serde_json::to_vec(message)?, descriptor)
}

/// Receives a message, and what came with it; `None` if the other process is gone. A later build may send
/// what this one does not know.
pub(super) fn receive<T: DeserializeOwned>(
    socket: &OwnedFd,
) -> io::Result<Option<(serde_json::Result<T>, Option<OwnedFd>)>> {
    let mut buffer = vec![0; MESSAGE_BYTES_MAX];
    let (len, descriptor) = passed_device::receive(socket, &mut buffer)?;
    Ok((len > 0).then(|| (serde_json::from_slice(&buffer[..len]), descriptor)))
}
