//! How tables are reached: whoever has them (an origin, a server, a directory) implements
//! [`TableSource`] for one root and layout.

use crate::paths;
use async_trait::async_trait;
use bytes::Bytes;
use fletch_core::{Kind, LayoutId, Root};
use std::ops::Range;

/// Which file of a version and its layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Table {
    /// `manifest.json`
    Manifest,
    /// `entries.parquet`
    Entries,
    /// `layout.json`
    Layout,
    /// `placement.parquet`
    Placement,
    /// `chunks.parquet`
    Chunks,
}

impl Table {
    /// All of them.
    pub const ALL: [Table; 5] =
        [Table::Manifest, Table::Entries, Table::Layout, Table::Placement, Table::Chunks];

    /// The file's name.
    #[must_use]
    pub fn file_name(self) -> &'static str {
        match self {
            Table::Manifest => "manifest.json",
            Table::Entries => "entries.parquet",
            Table::Layout => "layout.json",
            Table::Placement => "placement.parquet",
            Table::Chunks => "chunks.parquet",
        }
    }

    /// Its path at rest (see [`paths`]).
    #[must_use]
    pub fn path(self, root: Root, layout: LayoutId) -> String {
        match self {
            Table::Manifest => paths::manifest(root),
            Table::Entries => paths::entries(root),
            Table::Layout => paths::layout(root, layout),
            Table::Placement => paths::placement(root, layout),
            Table::Chunks => paths::chunks(root, layout),
        }
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.file_name())
    }
}

/// Which bytes of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TableRange {
    /// The whole file; an implementer refuses more than [`DOCUMENT_BYTES_MAX`].
    All,
    /// Exactly these bytes; fewer are an error.
    Range(Range<u64>),
    /// The last n bytes, or the whole file when it is shorter.
    Suffix(u64),
}

/// No JSON document is longer.
pub const DOCUMENT_BYTES_MAX: u64 = 64 << 20;

/// A read of a table failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct SourceError {
    /// Who can act on it.
    pub kind: Kind,
    /// What happened, for people; names the file.
    pub message: String,
}

/// Reads of the tables of one (root, layout).
#[async_trait]
pub trait TableSource: Send + Sync {
    /// Reads bytes of a table. The caller believes nothing of them.
    ///
    /// # Errors
    /// [`SourceError`], also when a [`TableRange::Range`] reaches past the end.
    async fn read(&self, table: Table, range: TableRange) -> Result<Bytes, SourceError>;
}
