//! The last pass of a pack: the tables of the version in both its layouts, the pack and the index
//! that tells a later run how the files looked.

use super::catalogue::{Catalogue, Fate, Fates, Row};
use super::faults::Faults;
use crate::failure::Failure;
use crate::index::outcome::Counters;
use fletch_core::Hash;
use fletch_core::manifest::sample::SampleMatcher;
use fletch_core::manifest::{Entry, EntryKind, LayoutParams, SampleRule, Slice};
use fletch_tables::{
    Fault, NewChunk, NewRow, PinRow, Provenance, TableError, TablesWriter, WrittenVersion, paths,
};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

/// What became of everything.
pub struct Packed<'a> {
    /// The rows.
    pub catalogue: &'a Catalogue,
    /// What became of each.
    pub fates: &'a Fates,
    /// Name and length of each chunk.
    pub chunks: &'a [(Hash, u32)],
}

/// The tables of both layouts.
pub struct Both {
    /// The packed one.
    pub pack: WrittenVersion,
    /// The index beside it.
    pub index: WrittenVersion,
}

struct Writers {
    pack: TablesWriter,
    index: TablesWriter,
    last: String,
}

impl Writers {
    fn push(&mut self, packed: NewRow, indexed: NewRow, faults: &mut Faults) -> Result<(), Failure> {
        let path = packed.entry.path.clone();
        let pushed = match packed.entry.as_ref().validate() {
            Ok(()) => self.pack.push(packed).and_then(|()| self.index.push(indexed)),
            Err(e) => Err(TableError::Entry(e)),
        };
        match pushed {
            Ok(()) => {
                self.last = path;
                Ok(())
            }
            Err(e @ (TableError::Entry(_) | TableError::Row { .. })) => {
                faults.push(Fault { path: path.escape_debug().to_string(), why: e.to_string() })
            }
            Err(e) => Err(e.into()),
        }
    }

    /// An entry that both layouts hold alike.
    fn alike(&mut self, row: NewRow, faults: &mut Faults) -> Result<(), Failure> {
        self.push(row.clone(), row, faults)
    }
}

/// A bit for each chunk whether a row has brought it.
struct Brought(Vec<u64>);

impl Brought {
    /// Whether it is the first time.
    fn first(&mut self, chunk: u32) -> bool {
        let (word, bit) = (chunk as usize / 64, 1u64 << (chunk % 64));
        let first = self.0[word] & bit == 0;
        self.0[word] |= bit;
        first
    }
}

/// Where an entry's bytes are at the dataset.
enum Whence {
    /// In an object of its own.
    Object(PinRow),
    /// In chunks of its shard: what they hash to, and where.
    Shard(Hash, Vec<Slice>),
}

fn in_shard(entry: Entry, slices: Vec<Slice>) -> NewRow {
    NewRow { entry, slices, chunks: Vec::new() }
}

/// Writes the tables into `scratch`.
///
/// # Errors
/// When the scratch files fail, or an entry breaks the format and the run ends with faults.
#[expect(clippy::too_many_arguments, reason = "the parts of one run, each used once")]
pub fn write(
    packed: &Packed<'_>,
    rule: &SampleRule,
    matcher: &SampleMatcher,
    params: &LayoutParams,
    scratch: &Path,
    about: Provenance,
    counters: &Counters,
    faults: Faults,
) -> Result<(Both, Vec<Fault>), Failure> {
    let mut faults = faults;
    let io = |e: std::io::Error| Failure::io("the list of files", &e);
    let dir = |name: &str| {
        let dir = scratch.join(name);
        std::fs::create_dir_all(&dir).map(|()| dir).map_err(|e| Failure::io("temporary tables", &e))
    };
    let mut writers = Writers {
        pack: TablesWriter::create(&dir("pack")?, rule.clone(), *params)?,
        index: TablesWriter::create(&dir("index")?, rule.clone(), LayoutParams::INDEX)?,
        last: String::new(),
    };
    let mut brought = Brought(vec![0; packed.chunks.len().div_ceil(64)]);
    for (number, row) in (0u64..).zip(packed.catalogue.iter()) {
        let row = row.map_err(io)?;
        counters.entries.fetch_add(1, Relaxed);
        let (path, size, kind, whence) = match row {
            Row::Link { path, target } => {
                writers.alike(NewRow::without_bytes(Entry::symlink(path, target)), &mut faults)?;
                continue;
            }
            Row::DirEnd { path } => {
                // A directory of which nothing was packed is an empty one.
                if !writers.last.strip_prefix(path.as_str()).is_some_and(|rest| rest.starts_with('/')) {
                    writers.alike(NewRow::without_bytes(Entry::empty_dir(path)), &mut faults)?;
                }
                continue;
            }
            Row::File { path, pin, .. } => (path, pin.size, EntryKind::File, Whence::Object(pin)),
            Row::Member { path, size, hash, slices, .. } => {
                (path, size, EntryKind::Member, Whence::Shard(hash, slices))
            }
        };
        let sample = matcher.sample(&path, kind);
        let entry = |hash| Entry { sample: sample.clone(), kind, ..Entry::file(path.clone(), size, hash) };
        match (packed.fates.get(number).map_err(io)?, whence) {
            (Fate::Empty, _) => writers.alike(NewRow::without_bytes(entry(Hash::of(&[]))), &mut faults)?,
            (Fate::Sliced(at), Whence::Object(pin)) => {
                let content = packed.fates.content(at).map_err(io)?;
                writers.alike(NewRow::indexed(entry(content.hash), content.slices, &pin), &mut faults)?;
            }
            (Fate::Grouped { hash, chunk, offset }, whence) => {
                let (name, chunk_len) = packed.chunks[chunk as usize];
                // What is grouped is at most 16 MiB.
                let len = u32::try_from(size).unwrap_or(u32::MAX);
                let new = NewChunk {
                    chunk: name,
                    len: chunk_len,
                    object: Some(paths::chunk(name)),
                    offset: 0,
                    // An object named by its content needs no other pin: what differs is no chunk.
                    pin: PinRow { size: chunk_len.into(), mtime_ns: None, etag: None },
                };
                let pack = NewRow {
                    entry: entry(hash),
                    slices: vec![Slice { chunk: name, chunk_offset: offset, len }],
                    chunks: if brought.first(chunk) { vec![new] } else { Vec::new() },
                };
                let index = match whence {
                    Whence::Object(pin) => {
                        NewRow::indexed(entry(hash), vec![Slice { chunk: hash, chunk_offset: 0, len }], &pin)
                    }
                    Whence::Shard(_, slices) => in_shard(entry(hash), slices),
                };
                writers.push(pack, index, &mut faults)?;
            }
            // A member too long to be grouped.
            (_, Whence::Shard(hash, slices)) if size > params.slice_bytes.into() => {
                writers.alike(in_shard(entry(hash), slices), &mut faults)?;
            }
            // It is at fault.
            _ => {}
        }
    }
    let faults = faults.finish();
    let about = Provenance { faults: faults.clone(), ..about };
    let both = Both { pack: writers.pack.finish(about.clone())?, index: writers.index.finish(about)? };
    Ok((both, faults))
}
