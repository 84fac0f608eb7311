//! Errors of the disk tier, and what an error of the operating system says about the disk.

use fletch_core::Kind;
use std::{io, path::PathBuf};

/// Why the disk tier is off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OffReason {
    /// No space (ENOSPC, EDQUOT), or less free space than the floor. Writes stop, hits go on.
    Full,
    /// The file system became read-only. Writes stop, hits go on.
    ReadOnly,
    /// The device fails (EIO and similar errors).
    Io,
    /// The process may no longer use the directory.
    Denied,
    /// The directory is gone, or another directory lies in its place.
    Vanished,
    /// The owner called `close`.
    Closed,
}

impl OffReason {
    /// All reasons. The order has no meaning.
    pub const ALL: [OffReason; 6] = [
        OffReason::Full,
        OffReason::ReadOnly,
        OffReason::Io,
        OffReason::Denied,
        OffReason::Vanished,
        OffReason::Closed,
    ];

    /// Whether the tier still serves reads.
    #[must_use]
    pub fn allows_reads(self) -> bool {
        matches!(self, OffReason::Full | OffReason::ReadOnly)
    }

    /// Returns the reason as one word, for metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            OffReason::Full => "full",
            OffReason::ReadOnly => "read_only",
            OffReason::Io => "io",
            OffReason::Denied => "denied",
            OffReason::Vanished => "vanished",
            OffReason::Closed => "closed",
        }
    }
}

impl std::fmt::Display for OffReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            OffReason::Full => "the file system has no space left",
            OffReason::ReadOnly => "the file system is read-only",
            OffReason::Io => "the device fails",
            OffReason::Denied => "permission was denied",
            OffReason::Vanished => "the directory is gone",
            OffReason::Closed => "the tier was closed",
        })
    }
}

/// Why the disk tier failed. A reader treats every such error as a miss.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// Another process, or another tier of this process, uses the directory.
    #[error(
        "{dir} is in use by another process{holder}; give every server and mount a cache directory of its own"
    )]
    Locked {
        /// The directory.
        dir: PathBuf,
        /// ` (pid …)`, if the lock file names the process.
        holder: String,
    },
    /// The file system of the directory is not mounted.
    #[error(
        "{dir} lay on the file system mounted at {mount_point}, which is not mounted now; mount it again, or \
         remove {record} to begin a new cache on the file system that is there"
    )]
    Unmounted {
        /// The directory.
        dir: PathBuf,
        /// The mount point that was remembered.
        mount_point: PathBuf,
        /// The file that remembers it.
        record: PathBuf,
    },
    /// The settings are invalid.
    #[error("{0}")]
    Invalid(String),
    /// The tier is off.
    #[error("the disk tier is off: {0}")]
    Off(OffReason),
    /// An operation on a file failed.
    #[error("{op} {path}: {source}")]
    Io {
        /// The operation.
        op: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl DiskError {
    /// Says who can act on the error.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            DiskError::Locked { .. } | DiskError::Invalid(_) => Kind::Invalid,
            DiskError::Unmounted { .. } | DiskError::Off(_) | DiskError::Io { .. } => Kind::Unavailable,
        }
    }

    pub(crate) fn io(op: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        DiskError::Io { op, path: path.into(), source }
    }
}

/// Returns the reason to turn the tier off after a failed operation.
///
/// `None` if the error says nothing about the disk, such as an interrupted call or a record that ends early.
pub(crate) fn off_reason_for(e: &io::Error) -> Option<OffReason> {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(e)?;
    Some(match errno {
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => OffReason::Full,
        Errno::ROFS => OffReason::ReadOnly,
        Errno::ACCESS | Errno::PERM => OffReason::Denied,
        Errno::NOENT | Errno::NOTDIR | Errno::STALE => OffReason::Vanished,
        Errno::INTR | Errno::AGAIN | Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::EXIST => {
            return None;
        }
        _ => OffReason::Io,
    })
}
