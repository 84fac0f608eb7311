//! Where tables come from: an origin, a server or a directory implements [`TableSource`].

use crate::paths;
use async_trait::async_trait;
use bytes::Bytes;
use fletch_core::{Kind, LayoutId, Root};
use std::ops::Range;

/// A file of a version or of its layout.
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
    /// `groups.bin`, which a layout may lack.
    Groups,
}

impl Table {
    /// The tables that each version in each layout has.
    pub const ALL: [Table; 5] =
        [Table::Manifest, Table::Entries, Table::Layout, Table::Placement, Table::Chunks];

    /// The number of kinds of tables.
    pub const COUNT: usize = Table::ALL.len() + 1;

    /// Returns the file's name.
    #[must_use]
    pub fn file_name(self) -> &'static str {
        match self {
            Table::Manifest => "manifest.json",
            Table::Entries => "entries.parquet",
            Table::Layout => "layout.json",
            Table::Placement => "placement.parquet",
            Table::Chunks => "chunks.parquet",
            Table::Groups => "groups.bin",
        }
    }

    /// Returns the file's path at rest. See [`paths`].
    #[must_use]
    pub fn path(self, root: Root, layout: LayoutId) -> String {
        match self {
            Table::Manifest => paths::manifest(root),
            Table::Entries => paths::entries(root),
            Table::Layout => paths::layout(root, layout),
            Table::Placement => paths::placement(root, layout),
            Table::Chunks => paths::chunks(root, layout),
            Table::Groups => paths::groups(root, layout),
        }
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.file_name())
    }
}

/// The bytes to read of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TableRange {
    /// The whole file. An implementation refuses a file above [`DOCUMENT_BYTES_MAX`].
    All,
    /// Exactly these bytes. An implementation returns an error if the file has fewer.
    Range(Range<u64>),
    /// The last n bytes, or the whole file if it is shorter.
    Suffix(u64),
}

/// The longest JSON document, in bytes.
pub const DOCUMENT_BYTES_MAX: u64 = 64 << 20;

/// A read of a table failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct SourceError {
    /// The kind of the error, which says who can act on it.
    pub kind: Kind,
    /// What happened, for people. Names the file.
    pub message: String,
}

/// Reads the tables of one root and layout.
#[async_trait]
pub trait TableSource: Send + Sync {
    /// Reads bytes of a table. The caller checks them.
    ///
    /// # Errors
    /// [`SourceError`], also if a [`TableRange::Range`] reaches past the end of the file.
    async fn read(&self, table: Table, range: TableRange) -> Result<Bytes, SourceError>;
}
