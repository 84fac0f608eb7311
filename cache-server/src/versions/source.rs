//! One way to a version's bytes: a dataset's objects, by one layout.

use super::{VersionError, blocks::Blocks, prove::ProvenFiles};
use crate::state::Registered;
use fletch_core::{DatasetName, Hash};
use fletch_origin::{Origin, Pin};
use fletch_store::disk::DiskEngine;
use fletch_tables::{ChunkIndex, ChunkRow, ObjectRef, Version};
use std::sync::Arc;
use tokio::sync::OnceCell;

/// See the module.
pub struct Source {
    /// The registration it is reached through.
    pub registered: Arc<Registered>,
    /// The version in this layout.
    pub version: Version,
    /// Where the objects are.
    pub data: Origin,
    /// Where the tables are.
    pub tables: Origin,
    /// The tables as they lie.
    pub blocks: Blocks,
    /// Which entries were found where the layout says.
    pub proven: Arc<ProvenFiles>,
    index: OnceCell<ChunkIndex>,
}

/// Where a chunk lies.
#[derive(Debug, Clone)]
pub struct Row {
    /// The part.
    pub part: usize,
    /// What its table says.
    pub row: ChunkRow,
}

/// One object's bytes, and what it was when they were indexed.
#[derive(Debug, Clone)]
pub struct At {
    /// Where.
    pub origin: Origin,
    /// Which object.
    pub path: String,
    /// What it was.
    pub pin: Pin,
}

impl Source {
    pub(super) fn new(
        registered: Arc<Registered>,
        version: Version,
        data: Origin,
        tables: Origin,
        blocks: Blocks,
    ) -> Self {
        let proven = Arc::new(ProvenFiles::new(version.manifest().entries));
        Source { registered, version, data, tables, blocks, proven, index: OnceCell::new() }
    }

    /// Which dataset.
    #[must_use]
    pub fn dataset(&self) -> &DatasetName {
        &self.registered.dataset.name
    }

    /// What its chunks occupy on disk together, at most: of equal ones only one is kept.
    #[must_use]
    pub fn footprint_max(&self) -> u64 {
        let doc = self.version.layout_doc();
        DiskEngine::footprint_max(doc.bytes, doc.chunks)
    }

    /// Whether both are the same way.
    #[must_use]
    pub fn is_same(&self, other: &Source) -> bool {
        Arc::ptr_eq(&self.registered, &other.registered) && self.version.layout() == other.version.layout()
    }

    /// At most `max` rows of a chunk; empty when it is none of this version's.
    pub async fn rows(&self, hash: Hash, max: usize) -> Result<Vec<Row>, VersionError> {
        let index = self.index.get_or_try_init(|| self.version.chunk_index()).await?;
        let mut found = Vec::new();
        for (part, row) in index.find(hash) {
            let rows = match self.version.try_chunk_rows(part) {
                Some(rows) => rows,
                None => self.version.chunk_rows(part).await?,
            };
            // Eight bytes of the hash agree; only all of them mean anything.
            if let Some(row) = rows.get(row).filter(|r| r.chunk == hash) {
                found.push(Row { part, row: row.clone() });
                if found.len() == max {
                    break;
                }
            }
        }
        Ok(found)
    }

    /// The length of a chunk, only from memory: the outer `None` means "not in memory".
    #[must_use]
    pub fn try_len(&self, hash: Hash) -> Option<Option<u32>> {
        for (part, row) in self.index.get()?.find(hash) {
            let rows = self.version.try_chunk_rows(part)?;
            if let Some(row) = rows.get(row).filter(|r| r.chunk == hash) {
                return Some(Some(row.len));
            }
        }
        Some(None)
    }

    /// The object that a row names.
    pub async fn at(&self, row: &Row) -> Result<At, VersionError> {
        let pin = &row.row.pin;
        let pin = Pin { size: pin.size, mtime_ns: pin.mtime_ns, etag: pin.etag.clone() };
        match &row.row.object {
            ObjectRef::Key(key) => {
                // Chunks of packs lie beside the tables, wherever the data is.
                Ok(At { origin: self.tables.clone(), path: key.clone(), pin })
            }
            ObjectRef::Entry { row: entry } => {
                let part = match self.version.try_part(row.part) {
                    Some(part) => part,
                    None => self.version.part(row.part).await?,
                };
                let entry = *entry as usize;
                if entry >= part.entries.len() {
                    let why = format!("part {}: a chunk names entry {entry}, past the end", row.part);
                    return Err(fletch_tables::TableError::Damaged { table: "chunks.parquet", why }.into());
                }
                Ok(At { origin: self.data.clone(), path: part.entries.path(entry).to_owned(), pin })
            }
        }
    }
}
