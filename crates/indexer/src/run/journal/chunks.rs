//! The journal of `pack`: chunks that were written and long files that were read, by fingerprint.
//!
//! The fingerprint of a chunk covers everything it was made of: path, pin and place of each member. Each
//! record says when its run began, which decides what the pins prove.

use super::{SegmentWriter, segment, segments};
use crate::source::content::Content;
use crate::source::pin::proves_unchanged;
use fletch_core::Hash;
use fletch_core::record::{self, FILE_HEADER_BYTES, PAYLOAD_BYTES_MAX, RECORD_HEADER_BYTES};
use fletch_tables::PinRow;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

const KIND_MADE: u8 = 1;

/// A result that the next run can use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Made {
    /// A chunk, with the hashes of its members in order.
    Group {
        /// BLAKE3 of the chunk.
        chunk: Hash,
        /// Its length in bytes.
        len: u32,
        /// BLAKE3 of each member.
        members: Vec<Hash>,
    },
    /// A long file, with the hashes of its slices.
    Sliced(Content),
}

#[derive(Serialize, Deserialize)]
struct Record {
    fingerprint: Hash,
    /// When the run of this record began, nanoseconds since 1970.
    started_ns: u64,
    made: Made,
}

/// The hash of everything that a chunk is made of.
#[derive(Debug, Default)]
pub struct Fingerprint(blake3::Hasher);

impl Fingerprint {
    /// Adds a member: bytes `offset .. offset + len` of an object, at offset `at` of the chunk.
    pub fn add(&mut self, path: &str, pin: &PinRow, (offset, len): (u64, u64), at: u32) {
        let text = |h: &mut blake3::Hasher, s: &str| {
            h.update(&(s.len() as u64).to_le_bytes());
            h.update(s.as_bytes());
        };
        text(&mut self.0, path);
        for n in [pin.size, offset, len, at.into()] {
            self.0.update(&n.to_le_bytes());
        }
        self.0.update(&[pin.mtime_ns.is_some().into(), pin.etag.is_some().into()]);
        self.0.update(&pin.mtime_ns.unwrap_or(0).to_le_bytes());
        text(&mut self.0, pin.etag.as_deref().unwrap_or(""));
    }

    /// Returns the fingerprint.
    #[must_use]
    pub fn finish(&self) -> Hash {
        self.0.finalize().into()
    }
}

/// Where a payload is in the journal.
#[derive(Debug, Clone, Copy)]
struct RecordLocation {
    segment: u32,
    offset: u32,
    len: u32,
}

/// Reads the results of stopped runs and writes those of this run. Memory: 44 bytes a result.
#[derive(Debug)]
pub struct ChunkJournal {
    dir: PathBuf,
    made: HashMap<Hash, RecordLocation>,
    started_ns: u64,
    writer: SegmentWriter,
}

impl ChunkJournal {
    /// Opens the journal in `dir` for a run that began at `started_ns`. Creates the directory.
    ///
    /// # Errors
    /// When the directory cannot be created or read.
    pub fn open(dir: PathBuf, started_ns: u64) -> io::Result<Self> {
        fs::create_dir_all(&dir)?;
        let numbers = segments(&dir)?;
        let mut made = HashMap::new();
        for &number in &numbers {
            let bytes = fs::read(segment(&dir, number))?;
            // Chunks of a damaged segment are made again.
            let Ok((records, _)) = record::read(&bytes) else { continue };
            let mut at = FILE_HEADER_BYTES;
            for r in records {
                let begin = at + RECORD_HEADER_BYTES;
                at = begin + r.payload.len();
                let fit = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
                if r.kind == KIND_MADE
                    && let Ok(record) = serde_json::from_slice::<Record>(r.payload)
                {
                    let at =
                        RecordLocation { segment: number, offset: fit(begin), len: fit(r.payload.len()) };
                    made.insert(record.fingerprint, at);
                }
            }
        }
        let next = numbers.last().map_or(0, |n| n + 1);
        let writer = SegmentWriter::new(dir.clone(), next);
        Ok(ChunkJournal { dir, made, started_ns, writer })
    }

    /// The number of results of stopped runs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.made.len()
    }

    /// Whether stopped runs left no result.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.made.is_empty()
    }

    /// Returns the result with this fingerprint, if the pins prove that no object has changed since.
    #[must_use]
    pub fn find<'a>(
        &self,
        fingerprint: Hash,
        mut pins: impl Iterator<Item = &'a PinRow>,
        local: bool,
    ) -> Option<Made> {
        let at = self.made.get(&fingerprint)?;
        let mut bytes = vec![0; at.len as usize];
        let file = File::open(segment(&self.dir, at.segment)).ok()?;
        file.read_exact_at(&mut bytes, at.offset.into()).ok()?;
        let record: Record = serde_json::from_slice(&bytes).ok()?;
        let same =
            record.fingerprint == fingerprint && pins.all(|p| proves_unchanged(p, record.started_ns, local));
        same.then_some(record.made)
    }

    /// Adds a result.
    ///
    /// # Errors
    /// When the state directory cannot be written.
    pub fn push(&mut self, fingerprint: Hash, made: Made) -> io::Result<()> {
        let record = Record { fingerprint, started_ns: self.started_ns, made };
        let payload = serde_json::to_vec(&record)?;
        // A file of half a terabyte does not fit one record and is read again after a stop.
        if payload.len() > PAYLOAD_BYTES_MAX as usize {
            return Ok(());
        }
        self.writer.append(KIND_MADE, &payload, None)
    }
}
