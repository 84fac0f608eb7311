//! Reads ranges of files in few requests.
//!
//! With `verify="client"` it reads the chunks that the ranges touch, each once, and hashes them. Of a chunk
//! of which little is wanted it reads and hashes some groups (`groups.rs`). With `verify="server"` it reads
//! the ranges alone, which the server has compared with the version.
//!
//! Invariants
//! 1. With `verify="client"` a range has only bytes that this process hashed (I1).
//! 2. Memory in flight is bounded: [`RUN_BYTES`] of chunks, those that were read last, and the result.

use crate::entry::shown;
use crate::errors::Failure;
use crate::fetch::{FileRequest, Item, OpenVersion, Portion, find, read_all, readable};
use crate::groups::{KnownGroups, Wanted};
use bytes::{Bytes, BytesMut};
use fletch_client::hits::Verify;
use fletch_core::Hash;
use fletch_core::groups::GroupHashes;
use fletch_core::manifest::EntryKind;
use fletch_core::manifest::locate::{ChunkRange, ranges};
use fletch_tables::Found;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use tokio::time::Instant;

/// The longest range.
const RANGE_BYTES_MAX: u64 = 4 << 30;
/// The bytes of chunks that are in memory at once while ranges are cut out of them.
const RUN_BYTES: u64 = 64 << 20;
/// The bytes of chunks that stay in memory for the next call.
const RECENT_BYTES: usize = 32 << 20;

/// A range that a caller wants: the file, the first byte, and the byte after the last one. Without the last
/// number, up to the end of the file.
pub type WantedRange = (Item, u64, Option<u64>);

/// The chunks and small files that were hashed last, the newest last, by their hashes.
pub type Recent = Vec<(Hash, Bytes)>;

/// Where some bytes of a result come from.
struct Cut {
    /// The position of the range in the result.
    range: usize,
    /// The offset in the range.
    offset: usize,
    /// The bytes of what is read.
    from: Range<usize>,
}

/// The portions to read, each once, and the results that are cut out of them.
#[derive(Default)]
struct Plan {
    reads: Vec<FileRequest>,
    cuts: Vec<Vec<Cut>>,
    positions: HashMap<(Hash, Range<usize>), usize>,
}

/// Reads ranges within the client's timeout. Returns them in the order of `wanted`, and the chunks that were
/// hashed last.
///
/// A range is cut at the end of its file, as a slice of a Python sequence.
///
/// # Errors
/// The error of the first range that cannot be read.
pub async fn read_ranges(
    open: &OpenVersion,
    wanted: &[WantedRange],
    mut recent: Recent,
    known: &KnownGroups,
) -> Result<(Vec<Bytes>, Recent), Failure> {
    let until = Instant::now() + open.client.io_timeout();
    let (parts, lengths) = parts(open, wanted).await?;
    let mut few = of_chunks(&parts, open.verify);
    few.retain(|chunk, _| recent.iter().all(|(hash, _)| hash != chunk));
    let groups = known.of(open, few, until).await;
    let mut plan = Plan::default();
    for part in parts {
        plan.add(part, open.verify, &groups);
    }
    let Plan { reads, cuts, .. } = plan;
    let mut results = Results::new(lengths);
    let mut left = Vec::new();
    for (read, cuts) in reads.into_iter().zip(cuts) {
        match recent.iter().position(|(hash, _)| checked_hash(&read) == Some(*hash)) {
            Some(at) => {
                let used = recent.remove(at);
                results.take(&used.1, &cuts)?;
                recent.push(used);
            }
            None => left.push((read, cuts)),
        }
    }
    let mut left = left.into_iter().peekable();
    while left.peek().is_some() {
        let (mut run, mut cuts, mut hashes, mut bytes) = (Vec::new(), Vec::new(), Vec::new(), 0);
        while let Some((next, _)) = left.peek()
            && (run.is_empty() || bytes + next.size() <= RUN_BYTES)
            && let Some((mut read, cut)) = left.next()
        {
            bytes += read.size();
            read.at = run.len();
            hashes.push(checked_hash(&read));
            run.push(read);
            cuts.push(cut);
        }
        let got = read_all(open, run, until).await?;
        for ((bytes, cuts), hash) in got.into_iter().zip(cuts).zip(hashes) {
            results.take(&bytes, &cuts)?;
            if let Some(hash) = hash {
                keep(&mut recent, hash, bytes);
            }
        }
    }
    Ok((results.finish(), recent))
}

/// Keeps a chunk for the next call, and drops the oldest ones.
fn keep(recent: &mut Recent, hash: Hash, bytes: Bytes) {
    recent.push((hash, bytes));
    let mut all: usize = recent.iter().map(|(_, bytes)| bytes.len()).sum();
    while all > RECENT_BYTES && recent.len() > 1 {
        all -= recent.remove(0).1.len();
    }
}

/// Returns the hash with which this process compares the bytes; `None` if it does not.
fn checked_hash(read: &FileRequest) -> Option<Hash> {
    match &read.portion {
        Portion::Whole => read.found.entry().hash,
        Portion::Chunk(slice) => Some(slice.chunk),
        Portion::Groups(_) | Portion::Span(_) => None,
    }
}

/// A part of a range that lies in one chunk.
struct Part {
    /// The position of the range in the result.
    range: usize,
    /// The offset in the range.
    offset: usize,
    found: Found,
    of: ChunkRange,
}

impl Part {
    /// Returns the hash of a file that shares its chunk with others.
    fn shares_its_chunk(&self) -> Option<Hash> {
        let hash = self.found.entry().hash?;
        (self.found.slices().len() == 1 && hash != self.of.slice.chunk).then_some(hash)
    }
}

/// Returns the parts of all ranges, and the lengths of the ranges.
async fn parts(open: &OpenVersion, wanted: &[WantedRange]) -> Result<(Vec<Part>, Vec<usize>), Failure> {
    let (mut parts, mut lengths) = (Vec::new(), Vec::new());
    for (range, (item, start, stop)) in wanted.iter().enumerate() {
        let found = find(open, item).await?;
        readable(&found)?;
        let size = found.entry().size;
        if let Some(stop) = stop
            && start > stop
        {
            let path = shown(found.entry().path);
            return Err(Failure::Invalid(format!(
                "{path:?}: the range {start}..{stop} ends before it begins"
            )));
        }
        let bytes = (*start).min(size)..stop.unwrap_or(size).min(size);
        if bytes.end - bytes.start > RANGE_BYTES_MAX {
            let (path, long) = (shown(found.entry().path), bytes.end - bytes.start);
            return Err(Failure::Invalid(format!(
                "{path:?}: a range of {long} bytes is longer than {RANGE_BYTES_MAX}; read it in several calls"
            )));
        }
        // The length is at most 4 GiB.
        lengths.push(usize::try_from(bytes.end - bytes.start).unwrap_or(usize::MAX));
        let mut offset = 0;
        for of in ranges(found.slices(), bytes) {
            let length = of.range.len();
            parts.push(Part { range, offset, found: found.clone(), of });
            offset += length;
        }
    }
    Ok((parts, lengths))
}

/// Returns what is wanted of each chunk that may be read by groups: of files that lie in chunks of their own,
/// whose lengths are known.
fn of_chunks(parts: &[Part], verify: Verify) -> HashMap<Hash, Wanted> {
    let mut chunks: HashMap<Hash, Wanted> = HashMap::new();
    let is_own = |part: &&Part| {
        let is_file = part.found.entry().kind == EntryKind::File && part.of.slice.chunk_offset == 0;
        verify == Verify::Client && is_file && part.shares_its_chunk().is_none()
    };
    for Part { of, .. } in parts.iter().filter(is_own) {
        let ChunkRange { slice, range, .. } = of;
        let (start, end) = (range.start as u64, range.end as u64);
        let new = || Wanted { len: slice.len, within: start..end, bytes: 0 };
        let wanted = chunks.entry(slice.chunk).or_insert_with(new);
        wanted.within = wanted.within.start.min(start)..wanted.within.end.max(end);
        wanted.bytes += end - start;
    }
    chunks
}

impl Plan {
    /// Adds the read that a part of a range needs. `groups` has the chunks that are read by groups.
    fn add(&mut self, part: Part, verify: Verify, groups: &HashMap<Hash, Arc<GroupHashes>>) {
        let alone = part.shares_its_chunk();
        let Part { range, offset, found, of } = part;
        let ChunkRange { slice, .. } = of;
        let from = |base: usize| of.range.start - base..of.range.end - base;
        let run = groups.get(&slice.chunk).and_then(|groups| groups.run(&of.range));
        let (portion, key, from) = match (verify, alone, run) {
            (Verify::Server, ..) => {
                (Portion::Span(of.clone()), (slice.chunk, of.range.clone()), 0..of.range.len())
            }
            // It is read alone, and checked by its own hash.
            (Verify::Client, Some(hash), _) => {
                (Portion::Whole, (hash, 0..0), from(slice.chunk_offset as usize))
            }
            (Verify::Client, None, Some(run)) => {
                let read = run.range();
                let from = from(read.start);
                (Portion::Groups(run), (slice.chunk, read), from)
            }
            (Verify::Client, None, None) => (Portion::Chunk(slice), (slice.chunk, 0..0), from(0)),
        };
        let next = self.reads.len();
        let at = *self.positions.entry(key).or_insert(next);
        if at == next {
            self.reads.push(FileRequest { at, found, portion });
            self.cuts.push(Vec::new());
        }
        self.cuts[at].push(Cut { range, offset, from });
    }
}

/// The ranges while their bytes arrive.
struct Results {
    lengths: Vec<usize>,
    whole: Vec<Option<Bytes>>,
    parts: Vec<Option<BytesMut>>,
}

impl Results {
    fn new(lengths: Vec<usize>) -> Self {
        let (whole, parts) = (vec![None; lengths.len()], vec![None; lengths.len()]);
        Results { lengths, whole, parts }
    }

    /// Cuts what some ranges need out of bytes that were read.
    fn take(&mut self, bytes: &Bytes, cuts: &[Cut]) -> Result<(), Failure> {
        for Cut { range, offset, from } in cuts {
            let Some(cut) = bytes.get(from.clone()) else {
                let why = format!("it has {} bytes, and its slices have more", bytes.len());
                return Err(Failure::Protocol { path: "chunk".into(), why });
            };
            let length = self.lengths[*range];
            if cut.len() == length && cut.len() * 2 >= bytes.len() {
                self.whole[*range] = Some(bytes.slice(from.clone()));
                continue;
            }
            // A view of a short range must not keep a whole chunk in memory.
            let part = self.parts[*range].get_or_insert_with(|| BytesMut::zeroed(length));
            part[*offset..*offset + cut.len()].copy_from_slice(cut);
        }
        Ok(())
    }

    fn finish(self) -> Vec<Bytes> {
        let parts = self.parts.into_iter().map(|part| part.unwrap_or_default().freeze());
        self.whole.into_iter().zip(parts).map(|(whole, part)| whole.unwrap_or(part)).collect()
    }
}
