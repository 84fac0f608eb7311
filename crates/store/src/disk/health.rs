//! What goes wrong with a disk, and whether the tier is on.
//!
//! I5: a disk that fails costs speed only. A failed write turns the tier off; what can still be
//! read is read on; `probe` turns it on again.

use fletch_core::Kind;
use std::{io, path::PathBuf, time::SystemTime};

/// Why a tier is off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Why {
    /// No space (ENOSPC, EDQUOT), or less than the floor: nothing is written, hits go on.
    Full,
    /// The file system became read-only: nothing is written, hits go on.
    ReadOnly,
    /// The device fails (EIO and the like).
    Io,
    /// Permission was taken away.
    Denied,
    /// The directory is gone, or another one lies in its place.
    Vanished,
    /// `close` was called.
    Closed,
}

impl Why {
    /// Whether records can still be read.
    #[must_use]
    pub fn reads_on(self) -> bool {
        matches!(self, Why::Full | Why::ReadOnly)
    }

    /// Every one, in no order that means anything.
    pub const ALL: [Why; 6] = [Why::Full, Why::ReadOnly, Why::Io, Why::Denied, Why::Vanished, Why::Closed];

    /// One word for it, for metrics.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Why::Full => "full",
            Why::ReadOnly => "read_only",
            Why::Io => "io",
            Why::Denied => "denied",
            Why::Vanished => "vanished",
            Why::Closed => "closed",
        }
    }
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Why::Full => "no space is left",
            Why::ReadOnly => "the file system is read-only",
            Why::Io => "the device fails",
            Why::Denied => "permission was denied",
            Why::Vanished => "the directory is gone",
            Why::Closed => "the tier was closed",
        })
    }
}

/// Whether a tier keeps chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// It does.
    On,
    /// It keeps nothing new; `probe` may bring it back.
    Off {
        /// What happened.
        why: Why,
        /// When (the last `now` that the tier was told before it happened).
        since: SystemTime,
    },
}

/// Why a disk tier could not do something. Whoever reads takes it as a miss.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// Another process, or another tier of this one, uses the directory.
    #[error(
        "{dir} is in use by another process{holder}; every server and mount needs a cache directory of its own"
    )]
    Locked {
        /// The directory.
        dir: PathBuf,
        /// ` (pid …)`, as far as it is known.
        holder: String,
    },
    /// Settings that cannot be.
    #[error("{0}")]
    Invalid(String),
    /// The tier is off.
    #[error("the disk tier is off: {0}")]
    Off(Why),
    /// An operation on a file failed.
    #[error("{op} {path}: {source}")]
    Io {
        /// What was done.
        op: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl DiskError {
    /// Who can act on it.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            DiskError::Locked { .. } | DiskError::Invalid(_) => Kind::Invalid,
            DiskError::Off(_) | DiskError::Io { .. } => Kind::Unavailable,
        }
    }

    pub(crate) fn io(op: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        DiskError::Io { op, path: path.into(), source }
    }
}

/// What a failed operation says about the disk; `None` when it says nothing (an interrupted
/// call, a record that ends early).
pub(crate) fn verdict(e: &io::Error) -> Option<Why> {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(e)?;
    Some(match errno {
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => Why::Full,
        Errno::ROFS => Why::ReadOnly,
        Errno::ACCESS | Errno::PERM => Why::Denied,
        Errno::NOENT | Errno::NOTDIR | Errno::STALE => Why::Vanished,
        Errno::INTR | Errno::AGAIN | Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::EXIST => {
            return None;
        }
        _ => Why::Io,
    })
}
