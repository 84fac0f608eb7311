//! `groups.bin`: the hashes of the groups of a layout's long chunks.
//!
//! The rows are sorted by the chunk's hash. Hashes are uniform, so a reader guesses where a row is, and
//! mostly finds it in the first [`WINDOW_ROWS`] rows that it reads.
//!
//! No hash covers this file, and none has to: the hashes of a chunk's groups make its name, or they are wrong
//! ([`GroupHashes::check`]).

use crate::group_lists::{HEAD_BYTES, ROW_BYTES};
use crate::{Table, TableError, TableRange, Version};
use bytes::Bytes;
use fletch_core::Hash;
use fletch_core::groups::{GroupHashes, group_hash_bytes};
use fletch_core::manifest::CHUNK_BYTES_MAX;
use futures::StreamExt as _;
use std::collections::HashSet;
use std::ops::Range;
use zerocopy::{FromBytes, Immutable, KnownLayout, little_endian};

/// The rows that a search reads at once: 48 KiB.
const WINDOW_ROWS: u64 = 1024;
/// The most windows that a search reads. Each halves what is left at least.
const WINDOWS_MAX: u32 = 40;
/// The lists that a copy reads at once.
const LISTS_AHEAD: usize = 8;

/// A row of `groups.bin`.
#[derive(FromBytes, Immutable, KnownLayout, Clone, Copy)]
#[repr(C)]
struct Row {
    chunk: [u8; 32],
    at: little_endian::U64,
    len: little_endian::U32,
    _zero: [u8; 4],
}

impl Row {
    /// Returns where the list of a chunk of this length is in the file.
    fn list(&self, len: u32) -> Option<Range<u64>> {
        if self.len.get() != len || len > CHUNK_BYTES_MAX {
            return None;
        }
        let at = self.at.get();
        Some(at..at.checked_add(group_hash_bytes(len).into())?)
    }
}

fn damaged(why: &str) -> TableError {
    TableError::damaged(Table::Groups, why)
}

/// Returns about where a hash is among `rows` sorted ones.
fn guess(chunk: &Hash, rows: u64) -> u64 {
    let (first, _) = chunk.as_bytes().split_at(8);
    let first = first.iter().fold(0u64, |n, byte| n << 8 | u64::from(*byte));
    let at = (u128::from(first) * u128::from(rows)) >> 64;
    u64::try_from(at).unwrap_or(rows)
}

impl Version {
    /// Returns the hashes of the groups of a chunk of `len` bytes, if the layout has them at rest.
    ///
    /// # Errors
    /// [`TableError`]: the file cannot be read, or is damaged. The chunk itself can be read all the same.
    pub async fn group_hashes(&self, chunk: Hash, len: u32) -> Result<Option<GroupHashes>, TableError> {
        let Some(row) = self.group_row(chunk).await? else { return Ok(None) };
        let list =
            row.list(len).ok_or_else(|| damaged("a chunk has another length than in chunks.parquet"))?;
        let bytes = self.0.source.read(Table::Groups, TableRange::Range(list)).await?;
        let groups = GroupHashes::check(chunk, len, &bytes);
        groups.map(Some).map_err(|wrong| damaged(&wrong.to_string()))
    }

    async fn group_row(&self, chunk: Hash) -> Result<Option<Row>, TableError> {
        let rows = self.0.doc.grouped_chunks.unwrap_or(0);
        let mut left = 0..rows;
        for _ in 0..WINDOWS_MAX {
            if left.is_empty() {
                return Ok(None);
            }
            let middle = guess(&chunk, rows).clamp(left.start, left.end - 1);
            let from = middle.saturating_sub(WINDOW_ROWS / 2).max(left.start);
            let window = from..(from + WINDOW_ROWS).min(left.end);
            let bytes = self.group_rows(window.clone()).await?;
            let read = <[Row]>::ref_from_bytes(&bytes).map_err(|_| damaged("its rows end too early"))?;
            match (read.first(), read.last()) {
                (Some(first), _) if chunk.as_bytes() < &first.chunk => left.end = window.start,
                (_, Some(last)) if chunk.as_bytes() > &last.chunk => left.start = window.end,
                _ => {
                    let at = read.binary_search_by(|row| row.chunk.cmp(chunk.as_bytes()));
                    return Ok(at.ok().map(|at| read[at]));
                }
            }
        }
        Err(damaged("its rows are not sorted"))
    }

    async fn group_rows(&self, rows: Range<u64>) -> Result<Bytes, TableError> {
        let byte = |row: u64| {
            let rows = row.checked_mul(ROW_BYTES as u64);
            rows.and_then(|n| n.checked_add(HEAD_BYTES as u64)).ok_or_else(|| damaged("too many rows"))
        };
        let range = byte(rows.start)?..byte(rows.end)?;
        Ok(self.0.source.read(Table::Groups, TableRange::Range(range)).await?)
    }

    /// Passes the hashes of the groups of these chunks to `each`, as far as the layout has them at rest.
    ///
    /// # Errors
    /// [`TableError`], as [`Version::group_hashes`].
    pub async fn each_group_hashes(
        &self,
        wanted: &HashSet<Hash>,
        mut each: impl FnMut(&GroupHashes),
    ) -> Result<(), TableError> {
        let rows = self.0.doc.grouped_chunks.unwrap_or(0);
        let mut from = 0;
        while from < rows && !wanted.is_empty() {
            let to = (from + WINDOW_ROWS).min(rows);
            let bytes = self.group_rows(from..to).await?;
            let read = <[Row]>::ref_from_bytes(&bytes).map_err(|_| damaged("its rows end too early"))?;
            let wanted = |row: &&Row| wanted.contains(&Hash(row.chunk));
            let mut lists = futures::stream::iter(read.iter().filter(wanted))
                .map(|row| async move {
                    let (chunk, len) = (Hash(row.chunk), row.len.get());
                    let list = row.list(len).ok_or_else(|| damaged("a chunk is too long"))?;
                    let bytes = self.0.source.read(Table::Groups, TableRange::Range(list)).await?;
                    let groups = GroupHashes::check(chunk, len, &bytes);
                    groups.map_err(|wrong| damaged(&wrong.to_string()))
                })
                .buffered(LISTS_AHEAD);
            while let Some(groups) = lists.next().await {
                each(&groups?);
            }
            from = to;
        }
        Ok(())
    }
}
