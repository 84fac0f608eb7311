//! Works out the samples and units of a version by one pass over its tables.
//!
//! It holds what [`Samples`] will hold, the chunks by hash, and a few parts: a list of numbers is packed
//! while it grows.

use super::{Chunk, Samples, SamplesError, damaged};
use crate::data::versions::{Source, VersionError};
use fletch_core::{
    Hash,
    manifest::{EntryRef, SampleRef},
    plan::{PackedInts, PackedIntsBuilder},
};
use futures::{StreamExt as _, TryStreamExt as _};
use std::collections::{HashMap, HashSet, hash_map::Entry as MapEntry};

/// The most parts that are read at once, of some hundred kilobytes each. Decoding one takes a core.
const PARTS_AHEAD_MAX: usize = 16;
/// The chunk of a sample without bytes.
const NO_CHUNK: u32 = u32::MAX;

/// Collects samples, entry by entry.
#[derive(Default)]
struct Build {
    firsts: PackedIntsBuilder,
    spans: PackedIntsBuilder,
    sizes: PackedIntsBuilder,
    /// The first chunk of each sample. Further ones are in `more`, as (sample, chunk).
    first_chunk: PackedIntsBuilder,
    more: HashSet<(u32, u32)>,
    /// The latest sample, to which the next entry may belong.
    open: Option<Open>,
}

/// A sample whose last entry may still follow.
struct Open {
    /// The key that its entries share; `None` for a sample of one entry.
    key: Option<String>,
    first: u32,
    span: u32,
    size: u32,
    first_chunk: u32,
}

impl Build {
    fn entry(
        &mut self,
        ordinal: u64,
        e: &EntryRef<'_>,
        chunks: impl Iterator<Item = Result<u32, SamplesError>>,
    ) -> Result<(), SamplesError> {
        let ordinal = u32::try_from(ordinal).map_err(|_| damaged("more than 2^32 entries"))?;
        let key = match e.sample {
            SampleRef::None => return Ok(()),
            SampleRef::Keyed(key) => Some(key),
            SampleRef::Single => None,
        };
        let belongs = |open: &Open| key.is_some() && open.key.as_deref() == key;
        if !self.open.as_ref().is_some_and(belongs) {
            self.close();
        }
        let sample = u32::try_from(self.firsts.len()).unwrap_or(u32::MAX);
        let open = self.open.get_or_insert_with(|| Open {
            key: key.map(str::to_owned),
            first: ordinal,
            span: 0,
            size: 0,
            first_chunk: NO_CHUNK,
        });
        open.span = ordinal - open.first + 1;
        open.size = open.size.saturating_add(u32::try_from(e.size).unwrap_or(u32::MAX));
        for chunk in chunks {
            let chunk = chunk?;
            if open.first_chunk == NO_CHUNK {
                open.first_chunk = chunk;
            } else if open.first_chunk != chunk {
                self.more.insert((sample, chunk));
            }
        }
        Ok(())
    }

    fn close(&mut self) {
        let Some(open) = self.open.take() else { return };
        self.firsts.push(open.first);
        self.spans.push(open.span);
        self.sizes.push(open.size);
        self.first_chunk.push(open.first_chunk);
    }
}

/// Reads the tables of a source, part by part.
pub(super) async fn build(source: &Source) -> Result<Samples, SamplesError> {
    let version = &source.version;
    let parts = || futures::stream::iter(0..version.manifest().parts.len());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let ahead = (2 * cores).min(PARTS_AHEAD_MAX);
    // Chunks by hash, in the order of their rows. A repeated chunk counts as its first row.
    let mut known: HashMap<Hash, u32> = HashMap::new();
    let mut rows: Vec<Chunk> = Vec::new();
    let read = |part| async move { Ok::<_, VersionError>((part, version.chunk_rows(part).await?)) };
    let mut reads = parts().map(read).buffered(ahead);
    while let Some((part, found)) = reads.try_next().await? {
        let part = u32::try_from(part).unwrap_or(u32::MAX);
        for (row, r) in (0u32..).zip(found.iter()) {
            let next = u32::try_from(rows.len()).map_err(|_| damaged("more than 2^32 chunks"))?;
            if let MapEntry::Vacant(slot) = known.entry(r.chunk) {
                slot.insert(next);
                rows.push(Chunk { hash: r.chunk, len: r.len, part, row });
            }
        }
    }
    let mut build = Build::default();
    let mut reads =
        parts().map(|part| async move { Ok::<_, VersionError>(version.part(part).await?) }).buffered(ahead);
    while let Some(part) = reads.try_next().await? {
        if !source.is_registered() {
            return Err(VersionError::NotFound.into());
        }
        for row in 0..part.len() {
            let chunks = part.slices(row).iter().map(|s| match known.get(&s.chunk) {
                Some(chunk) => Ok(*chunk),
                None => Err(damaged("a placement names a chunk that is in no row")),
            });
            build.entry(part.first_ordinal() + row as u64, &part.entry(row), chunks)?;
        }
    }
    build.close();
    drop(known);
    units(build, &rows)
}

/// Divides the chunks among units.
fn units(build: Build, rows: &[Chunk]) -> Result<Samples, SamplesError> {
    let Build { firsts, spans, sizes, first_chunk, more, .. } = build;
    let first_chunk = first_chunk.finish();
    if firsts.is_empty() {
        return Err(SamplesError::Request(
            "the version has no samples; see --samples of fletch index".to_owned(),
        ));
    }
    // How many samples need each chunk, and which chunks are a sample's first.
    let mut users = vec![0u8; rows.len()];
    let mut heads = vec![false; rows.len()];
    for c in first_chunk.iter().filter(|&c| c != NO_CHUNK) {
        users[c as usize] = users[c as usize].saturating_add(1);
        heads[c as usize] = true;
    }
    for &(_, c) in &more {
        users[c as usize] = users[c as usize].saturating_add(1);
    }
    let mut own: Vec<(u32, u32)> =
        more.into_iter().filter(|&(_, c)| users[c as usize] == 1 && !heads[c as usize]).collect();
    // By unit, then by sample: a unit's own chunks follow its first.
    own.sort_unstable_by_key(|&(s, c)| (first_chunk.get(s as usize), s, c));
    let mut own = own.into_iter().peekable();
    let mut unit_of_chunk = vec![NO_CHUNK; rows.len()];
    let mut starts = PackedIntsBuilder::default();
    let mut chunks = Vec::with_capacity(rows.len());
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    for (c, _) in heads.iter().enumerate().filter(|(_, h)| **h) {
        unit_of_chunk[c] = number(starts.len());
        starts.push(number(chunks.len()));
        chunks.push(rows[c]);
        while let Some((_, c)) = own.next_if(|&(s, _)| first_chunk.get(s as usize) == number(c)) {
            chunks.push(rows[c as usize]);
        }
    }
    // Samples without bytes share one unit without chunks.
    let nothing = number(starts.len());
    if first_chunk.iter().any(|c| c == NO_CHUNK) {
        starts.push(number(chunks.len()));
    }
    starts.push(number(chunks.len()));
    let unit = |c: u32| if c == NO_CHUNK { nothing } else { unit_of_chunk[c as usize] };
    let unit_of: PackedInts = first_chunk.iter().map(unit).collect();
    let lists = [firsts.finish(), spans.finish(), sizes.finish(), unit_of, starts.finish()];
    Ok(Samples::new(lists, chunks.into())?)
}

#[cfg(test)]
mod tests;
