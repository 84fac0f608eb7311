//! A source: one way to a version's bytes, by a dataset's objects and one layout.

use super::{HomeOrigin, VersionError, prove::ProvenFiles, table_blocks::TableBlocks};
use crate::tenancy::state::RegistrationHandle;
use fletch_core::Hash;
use fletch_origin::Pin;
use fletch_store::{Footprint, disk::DiskEngine};
use fletch_tables::{ChunkRow, ObjectRef, Table, Version};
use std::sync::Arc;

/// One way to a version's bytes.
pub struct Source {
    /// The registration through which the version is read.
    pub registered: Arc<RegistrationHandle>,
    /// The version in this layout.
    pub version: Version,
    /// The origin of the objects.
    pub data: HomeOrigin,
    /// The origin of the tables.
    pub tables: HomeOrigin,
    /// The cached raw blocks of the tables.
    pub blocks: TableBlocks,
    /// The entries that were proven to lie where the layout says.
    pub proven: Arc<ProvenFiles>,
}

/// A row of a part's chunk table.
#[derive(Debug, Clone)]
pub struct PartRow {
    pub part: usize,
    pub row: ChunkRow,
}

/// An object, and what it was when it was indexed.
#[derive(Debug, Clone)]
pub struct ObjectLocation {
    pub origin: HomeOrigin,
    /// The object's path.
    pub path: String,
    /// The object's size, time and etag when it was indexed.
    pub pin: Pin,
}

impl ObjectLocation {
    /// Returns the object's URI, as errors show it.
    #[must_use]
    pub fn name(&self) -> String {
        let shown: String = self.path.chars().take(4096).collect();
        format!("{}/{}", self.origin.uri(), shown.escape_debug())
    }
}

impl Source {
    pub(super) fn new(
        registered: Arc<RegistrationHandle>,
        version: Version,
        data: HomeOrigin,
        tables: HomeOrigin,
        blocks: TableBlocks,
    ) -> Self {
        let proven = Arc::new(ProvenFiles::new(version.manifest().entries));
        Source { registered, version, data, tables, blocks, proven }
    }

    /// Returns whether the dataset is still registered.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        self.registered.is_registered()
    }

    /// Returns whether the version is a draft.
    #[must_use]
    pub fn is_draft(&self) -> bool {
        self.version.is_draft()
    }

    /// Returns what its chunks occupy on disk at most. Equal chunks are kept once.
    #[must_use]
    pub fn footprint(&self) -> Footprint {
        let doc = self.version.layout_doc();
        Footprint { bytes: DiskEngine::footprint_max(doc.bytes, doc.chunks), chunks: doc.chunks }
    }

    /// Returns whether both are the same dataset and layout.
    #[must_use]
    pub fn is_same(&self, other: &Source) -> bool {
        Arc::ptr_eq(&self.registered, &other.registered) && self.version.layout() == other.version.layout()
    }

    /// Returns at most `max` rows of a chunk. Empty if the layout has no such chunk.
    pub async fn rows(&self, hash: Hash, max: usize) -> Result<Vec<PartRow>, VersionError> {
        let mut found = Vec::new();
        for (part, row) in self.version.find_chunk(hash).await? {
            // The index compares eight bytes of the hash; compare all of them.
            if let Some(row) = self.version.chunk_row(part, row).await?.filter(|r| r.chunk == hash) {
                found.push(PartRow { part, row });
                if found.len() == max {
                    break;
                }
            }
        }
        Ok(found)
    }

    /// Returns the first row of a chunk, if it is in memory or in a local file.
    ///
    /// The outer `None` says that the tables are not at hand.
    #[must_use]
    pub fn try_row(&self, hash: Hash) -> Option<Option<PartRow>> {
        for (part, row) in self.version.try_find_chunk(hash)? {
            if let Some(row) = self.version.try_chunk_row(part, row)?.filter(|r| r.chunk == hash) {
                return Some(Some(PartRow { part, row }));
            }
        }
        Some(None)
    }

    /// Makes a small call to the home of the tables, to find out whether it answers.
    pub(super) async fn probe_tables(&self) {
        let path = Table::Manifest.path(self.version.root(), self.version.layout());
        self.tables.probe_head(&path).await;
    }

    /// Returns the object that a row names.
    pub async fn object_of(&self, row: &PartRow) -> Result<ObjectLocation, VersionError> {
        let pin = &row.row.pin;
        let pin = Pin { size: pin.size, mtime_ns: pin.mtime_ns, etag: pin.etag.clone() };
        match &row.row.object {
            ObjectRef::Key(key) => {
                // Packs lie beside the tables, wherever the data is.
                Ok(ObjectLocation { origin: self.tables.clone(), path: key.clone(), pin })
            }
            ObjectRef::Entry { row: entry } => {
                let found = self.version.entry_in(row.part, *entry as usize).await?;
                let Some(found) = found else {
                    let why = format!("part {}: a chunk names entry {entry}, past the end", row.part);
                    return Err(fletch_tables::TableError::Damaged { table: "chunks.parquet", why }.into());
                };
                Ok(ObjectLocation { origin: self.data.clone(), path: found.entry().path.to_owned(), pin })
            }
        }
    }
}
