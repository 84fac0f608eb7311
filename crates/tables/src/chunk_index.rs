//! The index of chunks by hash: which rows of `chunks.parquet` may describe a chunk.
//!
//! With local tables the rows of the index are sorted into files, by the first bits of the hash, and a search
//! reads one leaf. So the index of a version takes as much memory as was used of it. Without local tables,
//! and for a small version, it is in memory.

use crate::leaf::Buffer;
use crate::local::{Directory, LocalTable, LocalTables, NewLeaf};
use crate::untrusted::blocking;
use crate::version::lost_footer;
use crate::{Table, TableError, Version, decode, schema};
use fletch_core::Hash;
use futures::StreamExt as _;
use std::fs::File;
use std::io::{self, BufWriter, Read as _, Seek as _, Write as _};
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The row groups that are read at once.
const GROUPS_AHEAD: usize = 8;
/// A version with fewer chunks has its index in memory: 64 KiB.
const FILED_ROWS_MIN: u64 = 4096;
/// The rows that a file of the index has about. They are sorted in memory.
const SHARD_ROWS: u64 = 1 << 20;
/// The rows of a leaf: 8 KiB.
const LEAF_ROWS: usize = 512;

/// An index from a chunk's hash to the rows that may describe it: 16 bytes a row, sorted.
#[derive(Debug, Clone, Default)]
pub struct ChunkIndex {
    rows: Vec<IndexRow>,
}

/// The position of a chunk's row. Sorted by key, then by position.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
struct IndexRow {
    /// The first 8 bytes of the chunk's hash.
    key: [u8; 8],
    part: u32,
    row: u32,
}

impl IndexRow {
    fn place(&self) -> (usize, usize) {
        (self.part as usize, self.row as usize)
    }
}

fn key_of(hash: &Hash) -> [u8; 8] {
    let mut key = [0; 8];
    key.copy_from_slice(&hash.as_bytes()[..8]);
    key
}

fn rows_of(part: usize, hashes: &[Hash]) -> impl Iterator<Item = IndexRow> {
    let part = u32::try_from(part).unwrap_or(u32::MAX);
    (0u32..).zip(hashes).map(move |(row, h)| IndexRow { key: key_of(h), part, row })
}

impl ChunkIndex {
    /// Adds the rows of a part, given its chunk hashes in row order. [`Self::sorted`] ends the index.
    pub(crate) fn add_part(&mut self, part: usize, hashes: &[Hash]) {
        self.rows.reserve(hashes.len());
        self.rows.extend(rows_of(part, hashes));
    }

    /// Returns the index, ready to be searched.
    pub(crate) fn sorted(mut self) -> Self {
        self.rows.sort_unstable();
        self.rows.shrink_to_fit();
        self
    }

    /// The number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether the index has no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the rows that may describe this chunk, as (part, row) in ascending order.
    ///
    /// The index compares only the first 8 bytes of the hash. The caller compares the row's whole hash.
    pub fn find(&self, hash: Hash) -> impl Iterator<Item = (usize, usize)> + '_ {
        let key = key_of(&hash);
        let from = self.rows.partition_point(|s| s.key < key);
        self.rows[from..].iter().take_while(move |s| s.key == key).map(IndexRow::place)
    }

    /// The approximate size of the index in memory, in bytes.
    #[must_use]
    pub fn footprint(&self) -> usize {
        self.rows.capacity() * size_of::<IndexRow>()
    }
}

/// Rows of the index that follow each other in a file.
#[derive(Debug)]
pub(crate) struct IndexLeaf(Box<[IndexRow]>);

impl IndexLeaf {
    fn parse(buffer: Buffer) -> Option<IndexLeaf> {
        let rows = buffer.bytes().chunks_exact(size_of::<IndexRow>());
        rows.map(|row| IndexRow::read_from_bytes(row).ok()).collect::<Option<_>>().map(IndexLeaf)
    }

    /// The size in memory, in bytes.
    pub fn footprint(&self) -> usize {
        size_of_val(&*self.0)
    }
}

/// Unsorted rows on their way into the files of the index, by file. The temporary files have no name.
struct Shards(Vec<BufWriter<File>>);

impl Shards {
    fn add(&mut self, part: usize, hashes: &[Hash]) -> io::Result<()> {
        let shards = self.0.len();
        rows_of(part, hashes).try_for_each(|row| self.0[shard_of(row.key, shards)].write_all(row.as_bytes()))
    }
}

/// Returns the file of a key, among a power of two of files that is at most 2^16.
fn shard_of(key: [u8; 8], shards: usize) -> usize {
    (usize::from(u16::from_be_bytes([key[0], key[1]])) * shards) >> 16
}

/// Returns how many leaves begin below a key.
fn count_below(directory: &Directory, key: &[u8]) -> usize {
    let (mut low, mut high) = (0, directory.len());
    while low < high {
        let mid = low + (high - low) / 2;
        if directory.first(mid) < key {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    low
}

/// Returns the rows of a temporary file, sorted.
fn sorted_rows(shard: BufWriter<File>) -> io::Result<Vec<IndexRow>> {
    let mut file = shard.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.rewind()?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let rows = bytes.chunks_exact(size_of::<IndexRow>());
    let mut rows: Vec<_> = rows.filter_map(|row| IndexRow::read_from_bytes(row).ok()).collect();
    rows.sort_unstable();
    Ok(rows)
}

impl Version {
    /// Reads the hashes of all chunks, and returns an index of them in memory. [`Version::find_chunk`] keeps
    /// the index in local files instead.
    ///
    /// # Errors
    /// [`TableError`] if the table cannot be read, or if its row count differs from the layout's.
    pub async fn chunk_index(&self) -> Result<ChunkIndex, TableError> {
        // It grows as rows are decoded: a count that only a footer claims takes no memory.
        let mut index = ChunkIndex::default();
        self.each_chunk_hashes(|part, hashes| index.add_part(part, &hashes)).await?;
        blocking(move || Ok(index.sorted())).await
    }

    /// Visits the hashes of all chunks, part by part.
    ///
    /// # Errors
    /// As [`Version::chunk_index`].
    pub(crate) async fn each_chunk_hashes(
        &self,
        mut visit: impl FnMut(usize, Vec<Hash>),
    ) -> Result<(), TableError> {
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
            .buffered(GROUPS_AHEAD);
        while let Some(group) = reads.next().await {
            let (part, group) = group?;
            let this = self.clone();
            let hashes = blocking(move || {
                let footer = this.0.chunks.get().ok_or_else(lost_footer)?;
                group.first().map_or(Ok(Vec::new()), |column| decode::chunk_hashes(footer, part, column))
            })
            .await?;
            visit(part, hashes);
        }
        Ok(())
    }

    /// Returns the rows that may describe this chunk, as (part, row) in ascending order. Makes the index
    /// unless it is there.
    ///
    /// As [`ChunkIndex::find`], it compares 8 bytes of the hash.
    ///
    /// # Errors
    /// As [`Version::chunk_index`].
    pub async fn find_chunk(&self, hash: Hash) -> Result<Vec<(usize, usize)>, TableError> {
        if let Some(found) = self.try_find_chunk(hash) {
            return Ok(found);
        }
        let _one_at_a_time = self.0.chunk_index_lock.lock().await;
        if let Some(found) = self.try_find_chunk(hash) {
            return Ok(found);
        }
        if self.file_chunk_index().await?
            && let Some(found) = self.try_find_chunk(hash)
        {
            return Ok(found);
        }
        let index = self.0.chunk_index.get_or_try_init(|| self.chunk_index()).await?;
        Ok(index.find(hash).collect())
    }

    /// [`Version::find_chunk`] in what is at hand; `None` if the index is not.
    #[must_use]
    pub fn try_find_chunk(&self, hash: Hash) -> Option<Vec<(usize, usize)>> {
        if let Some(index) = self.0.chunk_index.get() {
            return Some(index.find(hash).collect());
        }
        let (key, mut found) = (key_of(&hash), Vec::new());
        let shard = shard_of(key, self.index_files()?);
        let directory = self.directory_of(LocalTable::ChunkIndex, shard)?;
        // Rows of one key may begin at the end of a leaf and go on in others.
        let from = count_below(&directory, &key).saturating_sub(1);
        let may_have = |leaf: &usize| *leaf == from || directory.first(*leaf) <= &key[..];
        for leaf in (from..directory.len()).take_while(may_have) {
            let rows = self.try_index_leaf(shard, &directory, leaf)?;
            let start = rows.0.partition_point(|row| row.key < key);
            found.extend(rows.0[start..].iter().take_while(|row| row.key == key).map(IndexRow::place));
        }
        Some(found)
    }

    /// The number of files of the index; `None` if it is in memory.
    fn index_files(&self) -> Option<usize> {
        let chunks = self.layout_doc().chunks;
        self.0.cache.local().filter(|_| chunks >= FILED_ROWS_MIN)?;
        usize::try_from(chunks.div_ceil(SHARD_ROWS).next_power_of_two().min(1 << 16)).ok()
    }

    fn try_index_leaf(&self, shard: usize, directory: &Directory, leaf: usize) -> Option<Arc<IndexLeaf>> {
        self.try_leaf_of(LocalTable::ChunkIndex, shard, directory, leaf, 0, IndexLeaf::parse)
    }

    /// Writes the files of the index. Returns whether they are there. It holds the rows of one file at once.
    async fn file_chunk_index(&self) -> Result<bool, TableError> {
        let (Some(files), Some(local)) = (self.index_files(), self.0.cache.local().cloned()) else {
            return Ok(false);
        };
        let scratch =
            |shard| local.scratch(&self.identity(LocalTable::ChunkIndex, shard)).map(BufWriter::new);
        // What the directory cannot keep is kept in memory; `LocalTables` says why, once.
        let Ok(shards) = (0..files).map(scratch).collect::<io::Result<Vec<_>>>() else { return Ok(false) };
        let mut shards = Ok(Shards(shards));
        self.each_chunk_hashes(|part, hashes| {
            let before = std::mem::replace(&mut shards, Err(io::ErrorKind::Interrupted.into()));
            shards = before.and_then(|mut shards| shards.add(part, &hashes).map(|()| shards));
        })
        .await?;
        let Ok(Shards(shards)) = shards else { return Ok(false) };
        let this = self.clone();
        blocking(move || {
            let mut rows = shards.into_iter().map(sorted_rows).enumerate();
            Ok(rows.all(|(shard, rows)| rows.is_ok_and(|rows| this.file_index(&local, shard, &rows))))
        })
        .await
    }

    fn file_index(&self, local: &LocalTables, shard: usize, rows: &[IndexRow]) -> bool {
        let of = self.identity(LocalTable::ChunkIndex, shard);
        // A file without rows has one leaf without rows.
        let leaves: Vec<&[IndexRow]> =
            if rows.is_empty() { vec![rows] } else { rows.chunks(LEAF_ROWS).collect() };
        let first = |leaf: &[IndexRow]| leaf.first().map_or([0; 8], |row| row.key);
        let firsts: Vec<[u8; 8]> = leaves.iter().map(|leaf| first(leaf)).collect();
        let new = leaves.iter().zip(&firsts);
        local.write(&of, new.map(|(leaf, first)| NewLeaf { first, bytes: leaf.as_bytes() }))
    }
}
