//! What a run found at the dataset before it read it: one row for each step of the walk, in path
//! order, in unnamed scratch files. Rows are found by their number, so that memory does not grow
//! with the dataset.

use crate::index::content::Content;
use fletch_core::Hash;
use fletch_core::manifest::Slice;
use fletch_tables::PinRow;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// One step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Row {
    /// A file.
    File {
        /// Its entry path.
        path: String,
        /// How it looked when it was found.
        pin: PinRow,
        /// Its bytes, where an earlier run named them and the pin tells that they are the same;
        /// of a shard always, because it was read for its members.
        known: Option<Content>,
    },
    /// A member of the shard in row `shard`.
    Member {
        /// Its entry path: the shard's, NUL, its name.
        path: String,
        /// The row of its shard.
        shard: u64,
        /// Where in the shard its bytes begin.
        offset: u64,
        /// How many bytes.
        size: u64,
        /// BLAKE3 of them, from when the shard was read.
        hash: Hash,
        /// Where they are in the shard's chunks.
        slices: Vec<Slice>,
    },
    /// A link.
    Link {
        /// Its entry path.
        path: String,
        /// Its target, verbatim.
        target: String,
    },
    /// Everything below this directory has come.
    DirEnd {
        /// Its path, without a closing slash.
        path: String,
    },
}

impl Row {
    /// The path of the step.
    #[must_use]
    pub fn path(&self) -> &str {
        match self {
            Row::File { path, .. }
            | Row::Member { path, .. }
            | Row::Link { path, .. }
            | Row::DirEnd { path } => path,
        }
    }
}

/// Writes the rows.
#[derive(Debug)]
pub struct CatalogueWriter {
    rows: BufWriter<File>,
    /// For each row where it ends, u64.
    ends: BufWriter<File>,
    at: u64,
    count: u64,
}

/// The rows, written.
#[derive(Debug)]
pub struct Catalogue {
    rows: File,
    ends: File,
    count: u64,
}

/// Rows read at once while reading them in order.
const BATCH: u64 = 4096;

impl CatalogueWriter {
    /// Begins one in `scratch`.
    ///
    /// # Errors
    /// When no file can be made there.
    pub fn new(scratch: &Path) -> io::Result<Self> {
        let file = || tempfile::tempfile_in(scratch).map(|f| BufWriter::with_capacity(1 << 20, f));
        Ok(CatalogueWriter { rows: file()?, ends: file()?, at: 0, count: 0 })
    }

    /// Number of rows so far: the number of the next one.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.count
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds a row.
    ///
    /// # Errors
    /// When the file system refuses the bytes.
    pub fn push(&mut self, row: &Row) -> io::Result<()> {
        let bytes = serde_json::to_vec(row)?;
        self.rows.write_all(&bytes)?;
        self.at += bytes.len() as u64;
        self.ends.write_all(&self.at.to_le_bytes())?;
        self.count += 1;
        Ok(())
    }

    /// Ends it.
    ///
    /// # Errors
    /// When the file system refuses the bytes.
    pub fn finish(self) -> io::Result<Catalogue> {
        let file = |w: BufWriter<File>| w.into_inner().map_err(io::IntoInnerError::into_error);
        Ok(Catalogue { rows: file(self.rows)?, ends: file(self.ends)?, count: self.count })
    }
}

impl Catalogue {
    /// Number of rows.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.count
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Rows `from` to before `to`.
    fn read(&self, from: u64, to: u64) -> io::Result<Vec<Row>> {
        let first = from.saturating_sub(1);
        let mut ends = vec![0; usize::try_from((to - first) * 8).unwrap_or(0)];
        self.ends.read_exact_at(&mut ends, first * 8)?;
        let mut ends: Vec<u64> = ends
            .chunks_exact(8)
            .map(|b| b.iter().rev().fold(0, |n, &byte| n << 8 | u64::from(byte)))
            .collect();
        if from == 0 {
            ends.insert(0, 0);
        }
        let (begin, end) = (ends[0], ends.last().copied().unwrap_or(0));
        let mut bytes = vec![0; usize::try_from(end - begin).unwrap_or(0)];
        self.rows.read_exact_at(&mut bytes, begin)?;
        let cut = |n: u64| usize::try_from(n - begin).unwrap_or(usize::MAX);
        let row = |w: &[u64]| serde_json::from_slice(&bytes[cut(w[0])..cut(w[1])]);
        Ok(ends.windows(2).map(row).collect::<Result<_, _>>()?)
    }

    /// One row.
    ///
    /// # Errors
    /// When there is no such row, or it cannot be read back.
    pub fn row(&self, number: u64) -> io::Result<Row> {
        if number >= self.count {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("there is no row {number}")));
        }
        let row = self.read(number, number + 1)?.pop();
        row.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))
    }

    /// All rows in order.
    pub fn iter(&self) -> impl Iterator<Item = io::Result<Row>> + '_ {
        (0..self.count.div_ceil(BATCH)).flat_map(move |batch| {
            let (from, to) = (batch * BATCH, ((batch + 1) * BATCH).min(self.count));
            let (rows, failed) = match self.read(from, to) {
                Ok(rows) => (rows, None),
                Err(e) => (Vec::new(), Some(Err(e))),
            };
            rows.into_iter().map(Ok).chain(failed)
        })
    }
}

/// What became of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Nothing yet, or nothing to do: links, directories, and what was left out.
    None,
    /// A file without bytes.
    Empty,
    /// It lies in a chunk of the pack.
    Grouped {
        /// BLAKE3 of its bytes.
        hash: Hash,
        /// Number of the chunk.
        chunk: u32,
        /// Where in the chunk.
        offset: u32,
    },
    /// It is cut into slices; which, is told by [`Fates::content`].
    Sliced(u64),
}

/// tag u8 · hash 32 · chunk u32 · offset u32 / place u64
const FATE_BYTES: usize = 41;

/// What became of every row, by number, in unnamed scratch files.
#[derive(Debug)]
pub struct Fates {
    rows: File,
    contents: File,
    end: u64,
}

impl Fates {
    /// Nothing yet for `count` rows.
    ///
    /// # Errors
    /// When no file can be made in `scratch`.
    pub fn new(scratch: &Path, count: u64) -> io::Result<Self> {
        let rows = tempfile::tempfile_in(scratch)?;
        // Sparse: what was never written reads as `None`.
        rows.set_len(count * FATE_BYTES as u64)?;
        Ok(Fates { rows, contents: tempfile::tempfile_in(scratch)?, end: 0 })
    }

    /// Says what became of a row.
    ///
    /// # Errors
    /// When the file system refuses the bytes.
    pub fn set(&self, row: u64, fate: Fate) -> io::Result<()> {
        let mut b = [0; FATE_BYTES];
        match fate {
            Fate::None => {}
            Fate::Empty => b[0] = 1,
            Fate::Grouped { hash, chunk, offset } => {
                b[0] = 2;
                b[1..33].copy_from_slice(hash.as_bytes());
                b[33..37].copy_from_slice(&chunk.to_le_bytes());
                b[37..].copy_from_slice(&offset.to_le_bytes());
            }
            Fate::Sliced(at) => {
                b[0] = 3;
                b[33..].copy_from_slice(&at.to_le_bytes());
            }
        }
        self.rows.write_all_at(&b, row * FATE_BYTES as u64)
    }

    /// Says that a row's file is cut into these slices.
    ///
    /// # Errors
    /// When the file system refuses the bytes.
    pub fn set_sliced(&mut self, row: u64, content: &Content) -> io::Result<()> {
        let bytes = serde_json::to_vec(content)?;
        self.contents.write_all_at(&(bytes.len() as u64).to_le_bytes(), self.end)?;
        self.contents.write_all_at(&bytes, self.end + 8)?;
        self.set(row, Fate::Sliced(self.end))?;
        self.end += 8 + bytes.len() as u64;
        Ok(())
    }

    /// What became of a row.
    ///
    /// # Errors
    /// When it cannot be read back.
    pub fn get(&self, row: u64) -> io::Result<Fate> {
        let mut b = [0; FATE_BYTES];
        self.rows.read_exact_at(&mut b, row * FATE_BYTES as u64)?;
        let (mut hash, mut chunk, mut offset, mut at) = ([0; 32], [0; 4], [0; 4], [0; 8]);
        hash.copy_from_slice(&b[1..33]);
        chunk.copy_from_slice(&b[33..37]);
        offset.copy_from_slice(&b[37..]);
        at.copy_from_slice(&b[33..]);
        Ok(match b[0] {
            0 => Fate::None,
            1 => Fate::Empty,
            2 => Fate::Grouped {
                hash: blake3::Hash::from_bytes(hash).into(),
                chunk: u32::from_le_bytes(chunk),
                offset: u32::from_le_bytes(offset),
            },
            _ => Fate::Sliced(u64::from_le_bytes(at)),
        })
    }

    /// The slices of a file that has [`Fate::Sliced`].
    ///
    /// # Errors
    /// When they cannot be read back.
    pub fn content(&self, at: u64) -> io::Result<Content> {
        let mut len = [0; 8];
        self.contents.read_exact_at(&mut len, at)?;
        let mut bytes = vec![0; usize::try_from(u64::from_le_bytes(len)).unwrap_or(0)];
        self.contents.read_exact_at(&mut bytes, at + 8)?;
        Ok(serde_json::from_slice(&bytes)?)
    }
}
