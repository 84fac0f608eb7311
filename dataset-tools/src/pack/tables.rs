//! The last pass of a pack: writes the tables of the version in two layouts, the pack and the index.
//!
//! The index layout has the pins that a later run compares with.

use super::catalogue::{Catalogue, Placement, Placements, Row};
use crate::failure::Failure;
use crate::run::Run;
use crate::run::faults::Faults;
use crate::run::groups::RunGroups;
use fletch_core::Hash;
use fletch_core::manifest::{Entry, EntryKind, LayoutParams, Slice};
use fletch_tables::{
    Fault, NewChunk, NewRow, PinRow, TableError, TablesWriter, Version, WrittenVersion, paths,
};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

/// The entries of a pack, and where their bytes are.
pub struct Packed<'a> {
    /// The rows.
    pub catalogue: &'a Catalogue,
    /// The placement of each row.
    pub placements: &'a Placements,
    /// Hash and length of each chunk.
    pub chunks: &'a [(Hash, u32)],
}

/// The tables of both layouts.
pub struct PackTables {
    /// The packed layout.
    pub pack: WrittenVersion,
    /// The index layout.
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

    /// Adds an entry whose row is the same in both layouts.
    fn push_same(&mut self, row: NewRow, faults: &mut Faults) -> Result<(), Failure> {
        self.push(row.clone(), row, faults)
    }
}

/// The chunks that a row has named already: one bit for each chunk.
struct SeenChunks(Vec<u64>);

impl SeenChunks {
    /// Marks a chunk, and returns whether it was not marked before.
    fn insert(&mut self, chunk: u32) -> bool {
        let (word, bit) = (chunk as usize / 64, 1u64 << (chunk % 64));
        let first = self.0[word] & bit == 0;
        self.0[word] |= bit;
        first
    }
}

/// Where the bytes of an entry are at the dataset.
enum BytesSource {
    /// In an object of its own.
    Object(PinRow),
    /// In chunks of its shard: their BLAKE3, and the slices.
    Shard(Hash, Vec<Slice>),
}

fn in_shard(entry: Entry, slices: Vec<Slice>) -> NewRow {
    NewRow { entry, slices, chunks: Vec::new() }
}

/// Writes the tables of both layouts into `scratch`. Returns them with all faults of the run.
///
/// # Errors
/// [`Failure`] when the scratch files fail, or an entry breaks the format and faults end the run.
pub fn write(
    packed: &Packed<'_>,
    run: &Run<'_>,
    params: &LayoutParams,
    (scratch, (groups, parent)): (&Path, (&RunGroups, Option<&Version>)),
    mut faults: Faults,
) -> Result<(PackTables, Vec<Fault>), Failure> {
    let (rule, sampler) = (&run.options.rule, run.sampler()?);
    let io = |e: std::io::Error| Failure::scratch(&e);
    let dir = |name: &str| {
        let dir = scratch.join(name);
        std::fs::create_dir_all(&dir).map(|()| dir).map_err(io)
    };
    let mut writers = Writers {
        pack: TablesWriter::create(&dir("pack")?, rule.clone(), *params)?,
        index: TablesWriter::create(&dir("index")?, rule.clone(), LayoutParams::INDEX)?,
        last: String::new(),
    };
    groups.keep_in(&mut writers.pack);
    groups.keep_in(&mut writers.index);
    let mut seen = SeenChunks(vec![0; packed.chunks.len().div_ceil(64)]);
    for (number, row) in (0u64..).zip(packed.catalogue.iter()) {
        let row = row.map_err(io)?;
        run.ctx.counters.entries.fetch_add(1, Relaxed);
        let (path, size, kind, source) = match row {
            Row::Link { path, target } => {
                writers.push_same(NewRow::without_bytes(Entry::symlink(path, target)), &mut faults)?;
                continue;
            }
            Row::DirEnd { path } => {
                // A directory without entries is an entry itself.
                if !writers.last.strip_prefix(path.as_str()).is_some_and(|rest| rest.starts_with('/')) {
                    writers.push_same(NewRow::without_bytes(Entry::empty_dir(path)), &mut faults)?;
                }
                continue;
            }
            Row::File { path, pin, .. } => (path, pin.size, EntryKind::File, BytesSource::Object(pin)),
            Row::Member { path, size, hash, slices, .. } => {
                (path, size, EntryKind::Member, BytesSource::Shard(hash, slices))
            }
        };
        let sample = sampler.sample(&path, kind);
        let entry = |hash| Entry { sample: sample.clone(), kind, ..Entry::file(path.clone(), size, hash) };
        match (packed.placements.get(number).map_err(io)?, source) {
            (Placement::Empty, _) => {
                writers.push_same(NewRow::without_bytes(entry(Hash::of(&[]))), &mut faults)?
            }
            (Placement::Sliced(at), BytesSource::Object(pin)) => {
                let content = packed.placements.content(at).map_err(io)?;
                writers.push_same(NewRow::indexed(entry(content.hash), content.slices, &pin), &mut faults)?;
            }
            (Placement::Grouped { hash, chunk, offset }, source) => {
                let (name, chunk_len) = packed.chunks[chunk as usize];
                // A grouped entry has at most 16 MiB.
                let len = u32::try_from(size).unwrap_or(u32::MAX);
                let new = NewChunk {
                    chunk: name,
                    len: chunk_len,
                    object: Some(paths::chunk(name)),
                    offset: 0,
                    // The object is named by its hash, so it needs no other pin.
                    pin: PinRow { size: chunk_len.into(), mtime_ns: None, etag: None },
                };
                let pack = NewRow {
                    entry: entry(hash),
                    slices: vec![Slice { chunk: name, chunk_offset: offset, len }],
                    chunks: if seen.insert(chunk) { vec![new] } else { Vec::new() },
                };
                let index = match source {
                    BytesSource::Object(pin) => {
                        NewRow::indexed(entry(hash), vec![Slice { chunk: hash, chunk_offset: 0, len }], &pin)
                    }
                    BytesSource::Shard(_, slices) => in_shard(entry(hash), slices),
                };
                writers.push(pack, index, &mut faults)?;
            }
            // A member too long to be grouped.
            (_, BytesSource::Shard(hash, slices)) if size > params.slice_bytes.into() => {
                writers.push_same(in_shard(entry(hash), slices), &mut faults)?;
            }
            // Faults have no row.
            _ => {}
        }
    }
    let faults = faults.finish();
    groups.complete(run, &[&writers.pack, &writers.index], parent);
    let created = run.created(faults.clone());
    let tables =
        PackTables { pack: writers.pack.finish(created.clone())?, index: writers.index.finish(created)? };
    Ok((tables, faults))
}
