//! What can go wrong with tables.

use crate::{SourceError, Table};
use fletch_core::manifest::entries::BadEntry;
use fletch_core::manifest::layout::BadPlacement;
use fletch_core::manifest::part::BadPart;
use fletch_core::{Kind, LayoutId, Root};

/// A table cannot be read, believed or written. Cheap to clone: one flight's error reaches all
/// who waited for it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// The source failed.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// Not one of our files, or damaged beyond reading.
    #[error("{table} is damaged: {why}")]
    Damaged {
        /// Which file.
        table: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// Written by a newer Fletch.
    #[error("{table} has format {major}, this build reads {known}; use a newer build")]
    Newer {
        /// Which file.
        table: &'static str,
        /// The major it names.
        major: u32,
        /// The major this build knows.
        known: u32,
    },
    /// The manifest's parts do not fold into the root that was asked for.
    #[error("manifest folds into root {got}, expected {expected}")]
    Root {
        /// What was asked for.
        expected: Root,
        /// What the manifest describes.
        got: Root,
    },
    /// The layout's placements do not fold into the layout that was asked for.
    #[error("layout.json folds into layout {got}, expected {expected}")]
    Layout {
        /// What was asked for.
        expected: LayoutId,
        /// What the document describes.
        got: LayoutId,
    },
    /// A part's rows are not the ones the root names.
    #[error("entries.parquet, part {part}: {why}")]
    Part {
        /// Which part.
        part: usize,
        /// What is wrong with it.
        why: Box<BadPart>,
    },
    /// A part's placement is not the one the layout names.
    #[error("placement.parquet, part {part}: {why}")]
    Placement {
        /// Which part.
        part: usize,
        /// What is wrong with it.
        why: Box<BadPlacement>,
    },
    /// A row that cannot be written.
    #[error(transparent)]
    Entry(#[from] BadEntry),
    /// A row that cannot be written: its slices or chunks are outside the format's limits.
    #[error("{path:?}: {why}")]
    Row {
        /// Whose row.
        path: String,
        /// Which rule it breaks.
        why: String,
    },
    /// No layout can have these parameters.
    #[error("layout parameters: {0}")]
    Params(String),
    /// A limit of the format or of this reader was reached.
    #[error("{table}: {what} is {got}, the limit is {limit}")]
    Limit {
        /// Which file.
        table: &'static str,
        /// Which quantity.
        what: &'static str,
        /// How much it is.
        got: u64,
        /// How much it may be.
        limit: u64,
    },
    /// A scratch file of the writer failed.
    #[error("{path}: {message}")]
    Io {
        /// Which file.
        path: String,
        /// What the system said.
        message: String,
    },
    /// A defect of ours (a blocking task that vanished).
    #[error("internal: {0}")]
    Internal(String),
}

impl TableError {
    pub(crate) fn damaged(table: Table, why: impl std::fmt::Display) -> Self {
        TableError::Damaged { table: table.file_name(), why: why.to_string() }
    }

    /// Who can act on it.
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
