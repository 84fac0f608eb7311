//! The catalogue of a pack: one row for each step of the walk, in path order, and the placement of each row.
//!
//! Both are in unnamed scratch files and addressed by row number, so memory does not grow with the dataset.

use crate::source::content::Content;
use fletch_core::Hash;
use fletch_core::manifest::Slice;
use fletch_tables::PinRow;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// One step of the walk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Row {
    File {
        /// Its entry path.
        path: String,
        /// How it looked in the first pass.
        pin: PinRow,
        /// Its hashes: of an unchanged file those of the parent, of a shard those of the first pass.
        known: Option<Content>,
    },
    /// A member of the shard in row `shard`.
    Member {
        /// Its entry path: the path of the shard, NUL, its name.
        path: String,
        /// The row of its shard.
        shard: u64,
        /// Where its bytes begin in the shard.
        offset: u64,
        /// Its length in bytes.
        size: u64,
        /// BLAKE3 of its bytes, from the first pass.
        hash: Hash,
        /// Where its bytes are in the chunks of the shard.
        slices: Vec<Slice>,
    },
    /// A symbolic link.
    Link {
        /// Its entry path.
        path: String,
        /// Its target, verbatim.
        target: String,
    },
    /// The end of a directory: all entries below it came before.
    DirEnd {
        /// Its path, without a slash at the end.
        path: String,
    },
}

impl Row {
    /// Returns the path of the step.
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

/// Writes the rows of a catalogue.
#[derive(Debug)]
pub struct CatalogueWriter {
    rows: BufWriter<File>,
    /// The end of each row, u64.
    ends: BufWriter<File>,
    at: u64,
    count: u64,
}

/// The rows of a catalogue, for reading.
#[derive(Debug)]
pub struct Catalogue {
    rows: File,
    ends: File,
    count: u64,
}

/// Rows that a reader in order reads at once.
const BATCH: u64 = 4096;

impl CatalogueWriter {
    /// Starts a catalogue in `scratch`.
    ///
    /// # Errors
    /// When the scratch files cannot be created.
    pub fn new(scratch: &Path) -> io::Result<Self> {
        let file = || tempfile::tempfile_in(scratch).map(|f| BufWriter::with_capacity(1 << 20, f));
        Ok(CatalogueWriter { rows: file()?, ends: file()?, at: 0, count: 0 })
    }

    /// Returns the number of rows so far, which is the number of the next row.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.count
    }

    /// Whether there is no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds a row.
    ///
    /// # Errors
    /// When the scratch file cannot be written.
    pub fn push(&mut self, row: &Row) -> io::Result<()> {
        let bytes = serde_json::to_vec(row)?;
        self.rows.write_all(&bytes)?;
        self.at += bytes.len() as u64;
        self.ends.write_all(&self.at.to_le_bytes())?;
        self.count += 1;
        Ok(())
    }

    /// Ends the writing.
    ///
    /// # Errors
    /// When the scratch file cannot be written.
    pub fn finish(self) -> io::Result<Catalogue> {
        let file = |w: BufWriter<File>| w.into_inner().map_err(io::IntoInnerError::into_error);
        Ok(Catalogue { rows: file(self.rows)?, ends: file(self.ends)?, count: self.count })
    }
}

impl Catalogue {
    /// Returns the number of rows.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.count
    }

    /// Whether there is no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

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

    /// Reads one row.
    ///
    /// # Errors
    /// When the row does not exist or cannot be read.
    pub fn row(&self, number: u64) -> io::Result<Row> {
        if number >= self.count {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("the catalogue has no row {number}"),
            ));
        }
        let row = self.read(number, number + 1)?.pop();
        row.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))
    }

    /// Reads all rows in order.
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

/// Where the bytes of a row are in the pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Nowhere: a link, a directory, an entry that was left out, or a row that is not placed yet.
    None,
    /// A file without bytes.
    Empty,
    /// In a chunk of the pack.
    Grouped {
        /// BLAKE3 of its bytes.
        hash: Hash,
        /// The number of the chunk.
        chunk: u32,
        /// The offset in the chunk, in bytes.
        offset: u32,
    },
    /// In slices of the file itself. [`Placements::content`] returns them.
    Sliced(u64),
}

/// tag u8 · hash 32 · chunk u32 · offset u32, or tag u8 · unused 32 · position of the content u64
const PLACEMENT_BYTES: usize = 41;

/// The placement of every row, by row number, in unnamed scratch files.
#[derive(Debug)]
pub struct Placements {
    rows: File,
    contents: File,
    end: u64,
}

impl Placements {
    /// Starts with no placement for `count` rows.
    ///
    /// # Errors
    /// When the scratch files cannot be created.
    pub fn new(scratch: &Path, count: u64) -> io::Result<Self> {
        let rows = tempfile::tempfile_in(scratch)?;
        // A sparse file: a row that was never written reads as `None`.
        rows.set_len(count * PLACEMENT_BYTES as u64)?;
        Ok(Placements { rows, contents: tempfile::tempfile_in(scratch)?, end: 0 })
    }

    /// Sets the placement of a row.
    ///
    /// # Errors
    /// When the scratch file cannot be written.
    pub fn set(&self, row: u64, placement: Placement) -> io::Result<()> {
        let mut b = [0; PLACEMENT_BYTES];
        match placement {
            Placement::None => {}
            Placement::Empty => b[0] = 1,
            Placement::Grouped { hash, chunk, offset } => {
                b[0] = 2;
                b[1..33].copy_from_slice(hash.as_bytes());
                b[33..37].copy_from_slice(&chunk.to_le_bytes());
                b[37..].copy_from_slice(&offset.to_le_bytes());
            }
            Placement::Sliced(at) => {
                b[0] = 3;
                b[33..].copy_from_slice(&at.to_le_bytes());
            }
        }
        self.rows.write_all_at(&b, row * PLACEMENT_BYTES as u64)
    }

    /// Sets the slices of a row's file.
    ///
    /// # Errors
    /// When the scratch file cannot be written.
    pub fn set_sliced(&mut self, row: u64, content: &Content) -> io::Result<()> {
        let bytes = serde_json::to_vec(content)?;
        self.contents.write_all_at(&(bytes.len() as u64).to_le_bytes(), self.end)?;
        self.contents.write_all_at(&bytes, self.end + 8)?;
        self.set(row, Placement::Sliced(self.end))?;
        self.end += 8 + bytes.len() as u64;
        Ok(())
    }

    /// Reads the placement of a row.
    ///
    /// # Errors
    /// When the scratch file cannot be read.
    pub fn get(&self, row: u64) -> io::Result<Placement> {
        let mut b = [0; PLACEMENT_BYTES];
        self.rows.read_exact_at(&mut b, row * PLACEMENT_BYTES as u64)?;
        let (mut hash, mut chunk, mut offset, mut at) = ([0; 32], [0; 4], [0; 4], [0; 8]);
        hash.copy_from_slice(&b[1..33]);
        chunk.copy_from_slice(&b[33..37]);
        offset.copy_from_slice(&b[37..]);
        at.copy_from_slice(&b[33..]);
        Ok(match b[0] {
            0 => Placement::None,
            1 => Placement::Empty,
            2 => Placement::Grouped {
                hash: blake3::Hash::from_bytes(hash).into(),
                chunk: u32::from_le_bytes(chunk),
                offset: u32::from_le_bytes(offset),
            },
            _ => Placement::Sliced(u64::from_le_bytes(at)),
        })
    }

    /// Reads the content of a file with [`Placement::Sliced`].
    ///
    /// # Errors
    /// When the scratch file cannot be read.
    pub fn content(&self, at: u64) -> io::Result<Content> {
        let mut len = [0; 8];
        self.contents.read_exact_at(&mut len, at)?;
        let mut bytes = vec![0; usize::try_from(u64::from_le_bytes(len)).unwrap_or(0)];
        self.contents.read_exact_at(&mut bytes, at + 8)?;
        Ok(serde_json::from_slice(&bytes)?)
    }
}
