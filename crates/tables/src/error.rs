//! The errors of reading and writing tables.

use crate::{SourceError, Table};
use fletch_core::manifest::entries::BadEntry;
use fletch_core::manifest::layout::BadPlacement;
use fletch_core::manifest::part::BadPart;
use fletch_core::{Kind, LayoutId, Root};

/// A table cannot be read, does not pass its checks, or cannot be written.
///
/// It is cheap to clone, because every waiter of a shared load gets the load's error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// The source failed.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The file is not of Fletch's format, or is damaged.
    #[error("{table} is damaged: {why}")]
    Damaged {
        /// The file's name.
        table: &'static str,
        /// What is wrong.
        why: String,
    },
    /// A newer Fletch wrote the file.
    #[error(
        "{table} has format version {major}, this build reads version {known}; use a newer build of Fletch"
    )]
    Newer {
        /// The file's name.
        table: &'static str,
        /// The major version that the file names.
        major: u32,
        /// The major version that this build reads.
        known: u32,
    },
    /// The hash of the manifest's parts is not the root that the caller asked for.
    #[error("manifest.json describes root {got}, expected {expected}")]
    Root {
        /// The root that the caller asked for.
        expected: Root,
        /// The root of the manifest's parts.
        got: Root,
    },
    /// The hash of the layout's placements is not the layout id that the caller asked for.
    #[error("layout.json describes layout {got}, expected {expected}")]
    Layout {
        /// The layout id that the caller asked for.
        expected: LayoutId,
        /// The layout id of the document's placements.
        got: LayoutId,
    },
    /// The hash of a part's rows is not the one in the manifest.
    #[error("entries.parquet, part {part}: {why}")]
    Part {
        /// The part's number.
        part: usize,
        /// What is wrong.
        why: Box<BadPart>,
    },
    /// The hash of a part's placement is not the one in the layout.
    #[error("placement.parquet, part {part}: {why}")]
    Placement {
        /// The part's number.
        part: usize,
        /// What is wrong.
        why: Box<BadPlacement>,
    },
    /// The writer refuses an entry.
    #[error(transparent)]
    Entry(#[from] BadEntry),
    /// The writer refuses a row: its slices or chunks break the limits of the format.
    #[error("{path:?}: {why}")]
    Row {
        /// The entry's path.
        path: String,
        /// The rule that the row breaks.
        why: String,
    },
    /// The layout parameters are not valid.
    #[error("the layout parameters are not valid: {0}")]
    Params(String),
    /// A quantity exceeds a limit of the format or of this reader.
    #[error("{table} has {got} {what}, the limit is {limit}")]
    Limit {
        /// The file's name.
        table: &'static str,
        /// The quantity.
        what: &'static str,
        /// Its value.
        got: u64,
        /// Its largest permitted value.
        limit: u64,
    },
    /// The writer could not create or write a scratch file.
    #[error("{path}: {message}")]
    Io {
        /// The file's name.
        path: String,
        /// The system's error message.
        message: String,
    },
    /// A defect of Fletch, such as a blocking task that did not return.
    #[error("internal: {0}")]
    Internal(String),
}

impl TableError {
    pub(crate) fn damaged(table: Table, why: impl std::fmt::Display) -> Self {
        TableError::Damaged { table: table.file_name(), why: why.to_string() }
    }

    /// Returns the kind of the error, which says who can act on it.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            TableError::Source(e) => e.kind,
            TableError::Damaged { .. }
            | TableError::Root { .. }
            | TableError::Layout { .. }
            | TableError::Part { .. }
            | TableError::Placement { .. } => Kind::Corrupt,
            TableError::Newer { .. }
            | TableError::Entry(_)
            | TableError::Row { .. }
            | TableError::Params(_)
            | TableError::Limit { .. } => Kind::Invalid,
            TableError::Io { .. } => Kind::Unavailable,
            TableError::Internal(_) => Kind::Internal,
        }
    }
}
