//! What a version reads from local files, and writes to them.
//!
//! The `try_` functions read a file on the thread of the caller: a leaf of some kilobytes that the page cache
//! usually has. So a thread that must not wait for a server can search a version that does not fit in memory.

use crate::cache::{Cached, CachedKind, CachedLeaf};
use crate::chunk_leaf::ChunkLeaf;
use crate::chunks::ChunkRow;
use crate::leaf::{Buffer, LEAF_ROWS, Leaf};
use crate::local::{Directory, Identity, LocalTable, LocalTables, NewLeaf};
use crate::untrusted::blocking;
use crate::{LoadedPart, TableError, Version};
use std::sync::Arc;

impl Version {
    fn local(&self) -> Option<&LocalTables> {
        self.0.cache.local()
    }

    pub(crate) fn identity(&self, table: LocalTable, part: usize) -> Identity {
        Identity { version: self.version_hash(table != LocalTable::Entries), part, table }
    }

    /// Returns the directory of a part's local file of entries.
    pub(crate) fn try_directory(&self, part: usize) -> Option<Arc<Directory>> {
        self.directory_of(LocalTable::Entries, part)
    }

    pub(crate) fn directory_of(&self, table: LocalTable, part: usize) -> Option<Arc<Directory>> {
        let local = self.local()?;
        let key = self.key(CachedKind::Directory(table), part);
        if let Some(Cached::Directory(directory)) = self.0.cache.get(&key) {
            return Some(directory);
        }
        let directory = Arc::new(local.directory(&self.identity(table, part))?);
        // The table at rest may have other rows: its footer was read, and not checked, when it was opened.
        if table == LocalTable::Entries && directory.len() != self.leaves(part) {
            return None;
        }
        self.0.cache.insert(key, Cached::Directory(Arc::clone(&directory)));
        Some(directory)
    }

    /// The number of leaves of a part's entries.
    fn leaves(&self, part: usize) -> usize {
        (self.0.index.parts()[part].entries as usize).div_ceil(LEAF_ROWS)
    }

    /// Returns a leaf of a part's local file of entries. A leaf that is not in memory is read with the
    /// `ahead` leaves that follow.
    pub(crate) fn try_leaf(
        &self,
        part: usize,
        directory: &Directory,
        leaf: usize,
        ahead: usize,
    ) -> Option<Arc<Leaf>> {
        self.try_leaf_of(LocalTable::Entries, part, directory, leaf, ahead, Leaf::parse)
    }

    fn try_chunk_leaf(&self, part: usize, directory: &Directory, leaf: usize) -> Option<Arc<ChunkLeaf>> {
        self.try_leaf_of(LocalTable::Chunks, part, directory, leaf, 0, ChunkLeaf::parse)
    }

    /// Returns a leaf of a local file: from memory, else as `parse` reads its bytes. Then the `ahead` leaves
    /// that follow are read, too, if they are short: to open the file costs as much as to read a leaf.
    pub(crate) fn try_leaf_of<T: CachedLeaf>(
        &self,
        table: LocalTable,
        part: usize,
        directory: &Directory,
        leaf: usize,
        ahead: usize,
        parse: impl Fn(Buffer) -> Option<T>,
    ) -> Option<Arc<T>> {
        let key = self.key(CachedKind::Leaf(table, leaf), part);
        if let Some(cached) = self.0.cache.get(&key) {
            return T::of_cached(cached);
        }
        let of = self.identity(table, part);
        let Some(read) = self.local()?.leaves(&of, directory, directory.run(leaf, ahead), parse) else {
            self.0.cache.remove(&self.key(CachedKind::Directory(table), part));
            return None;
        };
        let read: Vec<Arc<T>> = read.into_iter().map(Arc::new).collect();
        for (number, read) in (leaf..).zip(&read) {
            let key = self.key(CachedKind::Leaf(table, number), part);
            self.0.cache.insert(key, T::cached(Arc::clone(read)));
        }
        read.into_iter().next()
    }

    /// Returns one row of a part's `chunks.parquet`, if the row is at hand. The outer `None` says that it is
    /// not; the inner one, that there is no such row.
    #[must_use]
    pub fn try_chunk_row(&self, part: usize, row: usize) -> Option<Option<ChunkRow>> {
        if let Some(directory) = self.directory_of(LocalTable::Chunks, part) {
            if row / LEAF_ROWS >= directory.len() {
                return Some(None);
            }
            let leaf = self.try_chunk_leaf(part, &directory, row / LEAF_ROWS)?;
            return Some(leaf.get(row % LEAF_ROWS));
        }
        match self.0.cache.get(&self.key(CachedKind::Chunks, part)) {
            Some(Cached::Chunks(rows)) => Some(rows.get(row).cloned()),
            _ => None,
        }
    }

    /// Returns one row of a part's `chunks.parquet`; `None` past the end.
    ///
    /// # Errors
    /// As [`Version::chunk_rows`].
    pub async fn chunk_row(&self, part: usize, row: usize) -> Result<Option<ChunkRow>, TableError> {
        self.check_part(part)?;
        match self.try_chunk_row(part, row) {
            Some(found) => Ok(found),
            None => Ok(self.load_chunk_rows(part).await?.get(row).cloned()),
        }
    }

    /// Returns a whole part from its local file.
    pub(crate) async fn filed_part(&self, part: usize) -> Result<Option<LoadedPart>, TableError> {
        let Some(local) = self.local().cloned() else { return Ok(None) };
        let (of, leaves) = (self.identity(LocalTable::Entries, part), self.leaves(part));
        let first = self.0.index.first_ordinal(part);
        blocking(move || {
            let Some(directory) = local.directory(&of).filter(|d| d.len() == leaves) else { return Ok(None) };
            let read = local.leaves(&of, &directory, 0..leaves, |bytes| Leaf::parse(bytes).map(Arc::new));
            Ok(read.and_then(|leaves| LoadedPart::of_leaves(first, leaves)))
        })
        .await
    }

    /// Returns a part's rows of `chunks.parquet` from their local file.
    pub(crate) async fn filed_chunk_rows(&self, part: usize) -> Result<Option<Vec<ChunkRow>>, TableError> {
        let Some(local) = self.local().cloned() else { return Ok(None) };
        let of = self.identity(LocalTable::Chunks, part);
        blocking(move || {
            let Some(directory) = local.directory(&of) else { return Ok(None) };
            let rows_of = |leaf: ChunkLeaf| (0..LEAF_ROWS).map_while(|row| leaf.get(row)).collect::<Vec<_>>();
            let rows = |bytes| ChunkLeaf::parse(bytes).map(rows_of);
            let read = local.leaves(&of, &directory, 0..directory.len(), rows);
            Ok(read.map(|leaves| leaves.into_iter().flatten().collect()))
        })
        .await
    }

    /// Keeps what was worked out about the samples of all parts, in pieces that are hashed one by one.
    /// Returns whether it is kept: without local tables, or without room for it, it is worked out again.
    ///
    /// No later index of the same layout finds it.
    pub async fn keep_samples(&self, pieces: Vec<Vec<u8>>) -> bool {
        let Some(local) = self.local().cloned() else { return false };
        let of = self.identity(LocalTable::Samples, 0);
        let write = move || {
            let new = pieces.iter().map(|bytes| NewLeaf { first: b"", bytes });
            Ok(local.write(&of, new))
        };
        blocking(write).await.unwrap_or(false)
    }

    /// Returns what `parse` makes of the pieces of [`Version::keep_samples`], if they are kept and undamaged.
    pub async fn kept_samples<T: Send + 'static>(
        &self,
        parse: impl FnOnce(Vec<Vec<u8>>) -> Option<T> + Send + 'static,
    ) -> Option<T> {
        let (local, of) = (self.local()?.clone(), self.identity(LocalTable::Samples, 0));
        let read = move || {
            let Some(directory) = local.directory(&of) else { return Ok(None) };
            let piece = |bytes: Buffer| Some(bytes.bytes().to_vec());
            Ok(local.leaves(&of, &directory, 0..directory.len(), piece).and_then(parse))
        };
        blocking(read).await.unwrap_or(None)
    }

    /// Writes a part's local file. Returns whether it is there. Blocking.
    pub(crate) fn file_part(&self, part: usize, loaded: &LoadedPart) -> bool {
        let leaves = loaded.leaves().iter();
        let leaves = leaves.map(|leaf| NewLeaf { first: leaf.first_path(), bytes: leaf.bytes() });
        let of = self.identity(LocalTable::Entries, part);
        self.local().is_some_and(|local| local.write(&of, leaves))
    }

    /// Writes the local file of a part's rows of `chunks.parquet`. Returns whether it is there. Blocking.
    pub(crate) fn file_chunk_rows(&self, part: usize, rows: &[ChunkRow]) -> bool {
        let Some(local) = self.local() else { return false };
        // A part without chunks has no leaf, and nothing to keep.
        let leaves = ChunkLeaf::of_rows(rows);
        let new = leaves.iter().map(|leaf| NewLeaf { first: b"", bytes: leaf.bytes() });
        !leaves.is_empty() && local.write(&self.identity(LocalTable::Chunks, part), new)
    }
}
