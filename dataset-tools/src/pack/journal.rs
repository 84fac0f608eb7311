//! The chunks that a run has made, so that one that was stopped does not make them again.
//!
//! A row of segment files, each a log of `fletch_core::record`. A record is found by the
//! fingerprint of what the chunk was made of: paths, sizes, times and etags of its entries, and
//! where each lies. It holds nothing that cannot be made again, so it is never synced to disk,
//! and a damaged segment only costs reading again.

use crate::index::content::Content;
use crate::index::known::trusted;
use fletch_core::Hash;
use fletch_core::record::{self, FILE_HEADER_BYTES, PAYLOAD_BYTES_MAX, RECORD_HEADER_BYTES};
use fletch_tables::PinRow;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const KIND_MADE: u8 = 1;
const SEGMENT_BYTES: u64 = 4 << 20;

/// Something that was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Made {
    /// A chunk, with the hashes of its members in order.
    Group {
        /// The chunk.
        chunk: Hash,
        /// Its length.
        len: u32,
        /// BLAKE3 of each member.
        members: Vec<Hash>,
    },
    /// A long file was read.
    Sliced(Content),
}

#[derive(Serialize, Deserialize)]
struct Record {
    fingerprint: Hash,
    /// When the run began that made it, nanoseconds since 1970.
    started_ns: u64,
    made: Made,
}

/// What a chunk is made of, as a hash.
#[derive(Debug, Default)]
pub struct Fingerprint(blake3::Hasher);

impl Fingerprint {
    /// Adds bytes `offset .. offset + len` of an object, to lie at `at` of the chunk.
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

    /// The hash.
    #[must_use]
    pub fn finish(&self) -> Hash {
        self.0.finalize().into()
    }
}

/// Where a record lies.
#[derive(Debug, Clone, Copy)]
struct At {
    segment: u32,
    offset: u32,
    len: u32,
}

/// Reads what earlier runs made, and writes what this one makes. Memory: 44 bytes a chunk.
#[derive(Debug)]
pub struct Journal {
    dir: PathBuf,
    made: HashMap<Hash, At>,
    started_ns: u64,
    next: u32,
    file: Option<(File, u64)>,
}

fn segment(dir: &Path, number: u32) -> PathBuf {
    dir.join(format!("{number:08}.log"))
}

impl Journal {
    /// Opens the journal in `dir`, which is made if there is none.
    ///
    /// # Errors
    /// When the directory cannot be made or read.
    pub fn open(dir: PathBuf, started_ns: u64) -> io::Result<Self> {
        fs::create_dir_all(&dir)?;
        let mut numbers: Vec<u32> = Vec::new();
        for item in fs::read_dir(&dir)? {
            let name = item?.file_name();
            numbers.extend(name.to_str().and_then(|n| n.strip_suffix(".log")?.parse::<u32>().ok()));
        }
        numbers.sort_unstable();
        let mut made = HashMap::new();
        for &number in &numbers {
            let bytes = fs::read(segment(&dir, number))?;
            // What cannot be read is made again.
            let Ok((records, _)) = record::read(&bytes) else { continue };
            let mut at = FILE_HEADER_BYTES;
            for r in records {
                let begin = at + RECORD_HEADER_BYTES;
                at = begin + r.payload.len();
                let fit = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
                if r.kind == KIND_MADE
                    && let Ok(record) = serde_json::from_slice::<Record>(r.payload)
                {
                    let place = At { segment: number, offset: fit(begin), len: fit(r.payload.len()) };
                    made.insert(record.fingerprint, place);
                }
            }
        }
        let next = numbers.last().map_or(0, |n| n + 1);
        Ok(Journal { dir, made, started_ns, next, file: None })
    }

    /// How much was made before.
    #[must_use]
    pub fn len(&self) -> usize {
        self.made.len()
    }

    /// Whether nothing was.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.made.is_empty()
    }

    /// What was made of exactly this, if the pins of the objects tell that nothing changed since.
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
        let same = record.fingerprint == fingerprint && pins.all(|p| trusted(p, record.started_ns, local));
        same.then_some(record.made)
    }

    /// Remembers what was made.
    ///
    /// # Errors
    /// When the state directory takes no more.
    pub fn push(&mut self, fingerprint: Hash, made: Made) -> io::Result<()> {
        let record = Record { fingerprint, started_ns: self.started_ns, made };
        let payload = serde_json::to_vec(&record)?;
        if payload.len() > PAYLOAD_BYTES_MAX as usize {
            // A file of half a terabyte is read again after a stop.
            return Ok(());
        }
        let mut out = Vec::with_capacity(payload.len() + 64);
        let (file, written) = match &mut self.file {
            Some((file, written)) if *written < SEGMENT_BYTES => (file, written),
            slot => {
                out.extend_from_slice(&record::file_header());
                let file = File::create_new(segment(&self.dir, self.next))?;
                self.next += 1;
                let (file, written) = slot.insert((file, 0));
                (file, written)
            }
        };
        record::append(&mut out, KIND_MADE, &payload);
        file.write_all(&out)?;
        *written += out.len() as u64;
        Ok(())
    }
}
