//! What the readers of a dataset, local or remote, give to the taker.

use super::content::Content;
use fletch_tables::PinRow;
use std::sync::atomic::AtomicU64;

/// What became of one step of the walk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// A file.
    File {
        /// Its entry path.
        path: String,
        /// How it looked while it was read.
        pin: PinRow,
        /// Its bytes, named.
        content: Content,
        /// Whether the names came from an earlier run.
        reused: bool,
        /// Why a tar shard is a file like any other.
        plain: Option<String>,
    },
    /// A link.
    Link {
        /// Its entry path.
        path: String,
        /// Its target, verbatim.
        target: String,
    },
    /// The end of a directory.
    DirEnd {
        /// Its path.
        path: String,
    },
    /// No entry.
    Fault {
        /// Where, printable.
        path: String,
        /// Why, and what to do.
        why: String,
    },
}

/// What a run has done so far; read by the progress display.
#[derive(Debug, Default)]
pub struct Counters {
    /// Entries taken.
    pub entries: AtomicU64,
    /// Files whose bytes were read.
    pub files_read: AtomicU64,
    /// Bytes read.
    pub bytes_read: AtomicU64,
    /// Files that an earlier run knew.
    pub files_reused: AtomicU64,
    /// Their bytes.
    pub bytes_reused: AtomicU64,
}
