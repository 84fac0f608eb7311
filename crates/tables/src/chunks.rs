//! Where chunks are at the origin: rows of `chunks.parquet`, and an index from a chunk's hash
//! to its rows.

use crate::cache::{Kept, Shelf};
use crate::footer::{Footer, blocking};
use crate::schema::{self, CHUNKS_SCHEMA, ROWS_PER_PART_MAX};
use crate::version::Version;
use crate::{Table, TableError, decode};
use fletch_core::Hash;
use futures::StreamExt;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The object that holds a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObjectRef {
    /// The object of an entry of the same part, by its row in the part; its path is the key.
    Entry {
        /// Row in the part.
        row: u32,
    },
    /// An object by its own key, relative to the place of the tables: a chunk of a pack.
    Key(String),
}

/// What the object was when it was read: who reads it later compares.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinRow {
    /// Its length in bytes.
    pub size: u64,
    /// Its modification time, nanoseconds since 1970 UTC, where the origin tells.
    pub mtime_ns: Option<i64>,
    /// Its entity tag, where the origin has them.
    pub etag: Option<String>,
}

/// One place where a chunk is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkRow {
    /// Which chunk.
    pub chunk: Hash,
    /// Its length in bytes, 1 to 16 MiB.
    pub len: u32,
    /// The object it is in.
    pub object: ObjectRef,
    /// Where in the object it begins; with `len` it lies within `pin.size`.
    pub offset: u64,
    /// What the object was when it was read.
    pub pin: PinRow,
}

impl ChunkRow {
    pub(crate) fn footprint(&self) -> usize {
        let key = if let ObjectRef::Key(k) = &self.object { k.capacity() } else { 0 };
        size_of::<Self>() + key + self.pin.etag.as_ref().map_or(0, String::capacity)
    }
}

/// From a chunk's hash to the rows that may hold it: 16 bytes a row, sorted.
#[derive(Debug, Clone, Default)]
pub struct ChunkIndex {
    rows: Vec<Slot>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Slot {
    key: [u8; 8],
    part: u32,
    row: u32,
}

fn key_of(hash: &Hash) -> [u8; 8] {
    let mut key = [0; 8];
    key.copy_from_slice(&hash.as_bytes()[..8]);
    key
}

impl ChunkIndex {
    /// Number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether it has no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Rows that may be of this chunk, as (part, row) in ascending order. The first 8 bytes of
    /// the hash agree; the caller compares the whole hash with the row's.
    pub fn find(&self, hash: Hash) -> impl Iterator<Item = (usize, usize)> + '_ {
        let key = key_of(&hash);
        let from = self.rows.partition_point(|s| s.key < key);
        self.rows[from..].iter().take_while(move |s| s.key == key).map(|s| (s.part as usize, s.row as usize))
    }

    /// Approximate bytes of memory it holds.
    #[must_use]
    pub fn footprint(&self) -> usize {
        self.rows.capacity() * size_of::<Slot>()
    }
}

impl Version {
    async fn chunks_footer(&self) -> Result<&Footer, TableError> {
        let inner = &self.0;
        inner
            .chunks
            .get_or_try_init(|| {
                Footer::read(&*inner.source, &CHUNKS_SCHEMA, inner.manifest.parts.len(), ROWS_PER_PART_MAX)
            })
            .await
    }

    /// The origin rows of a part, if they are in memory.
    #[must_use]
    pub fn try_chunk_rows(&self, part: usize) -> Option<Arc<Vec<ChunkRow>>> {
        match self.0.cache.get(&self.key(Shelf::Chunks, part)) {
            Some(Kept::Chunks(rows)) => Some(rows),
            _ => None,
        }
    }

    /// The origin rows of a part, in the order of the slices that brought them. Not covered by
    /// any hash: what is read by them is hashed before it is used.
    ///
    /// # Errors
    /// [`TableError`] when they cannot be read or are outside the format's limits;
    /// [`TableError::Internal`] when there is no such part.
    pub async fn chunk_rows(&self, part: usize) -> Result<Arc<Vec<ChunkRow>>, TableError> {
        if part >= self.0.manifest.parts.len() {
            return Err(TableError::Internal(format!("there is no part {part}")));
        }
        let load = || {
            let this = self.clone();
            async move {
                let footer = this.chunks_footer().await?;
                let columns = 0..CHUNKS_SCHEMA.columns.num_columns();
                let group = footer.fetch(&*this.0.source, part, columns).await?;
                let this = this.clone();
                let rows = blocking(move || {
                    let footer = this.0.chunks.get().ok_or_else(lost_footer)?;
                    decode::chunk_rows(&this.0, footer, part, &group)
                });
                Ok(Kept::Chunks(Arc::new(rows.await?)))
            }
        };
        match self.0.cache.get_or_load(self.key(Shelf::Chunks, part), load).await? {
            Kept::Chunks(rows) => Ok(rows),
            Kept::Part(_) => Err(TableError::Internal("the cache mixed up its shelves".into())),
        }
    }

    /// Reads the hashes of all chunks, part by part, and sorts them.
    ///
    /// # Errors
    /// [`TableError`] when the table cannot be read, or has another number of rows than the
    /// layout says.
    pub async fn chunk_index(&self) -> Result<ChunkIndex, TableError> {
        let footer = self.chunks_footer().await?;
        let total: u64 = (0..footer.groups()).map(|g| u64::from(footer.rows(g))).sum();
        if total != self.0.doc.chunks {
            let why = format!("it has {total} rows, layout.json says {}", self.0.doc.chunks);
            return Err(TableError::damaged(Table::Chunks, why));
        }
        let mut reads = futures::stream::iter(0..footer.groups())
            .map(|part| async move {
                let column = schema::chunks::CHUNK;
                Ok::<_, TableError>((part, footer.fetch(&*self.0.source, part, column..column + 1).await?))
            })
            .buffered(INDEX_READS);
        // Grown as rows come: a count alone takes no memory.
        let mut rows: Vec<Slot> = Vec::new();
        while let Some(group) = reads.next().await {
            let (part, group) = group?;
            let this = self.clone();
            let hashes = blocking(move || {
                let footer = this.0.chunks.get().ok_or_else(lost_footer)?;
                group.first().map_or(Ok(Vec::new()), |column| decode::chunk_hashes(footer, part, column))
            })
            .await?;
            let number = u32::try_from(part).unwrap_or(u32::MAX);
            rows.reserve(hashes.len());
            rows.extend((0u32..).zip(&hashes).map(|(row, h)| Slot { key: key_of(h), part: number, row }));
        }
        blocking(move || {
            rows.sort_unstable();
            rows.shrink_to_fit();
            Ok(ChunkIndex { rows })
        })
        .await
    }
}

/// How many row groups are read at once for the index.
const INDEX_READS: usize = 8;

fn lost_footer() -> TableError {
    TableError::Internal("a footer that was read is gone".into())
}
