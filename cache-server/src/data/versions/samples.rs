//! The samples of a version in one layout, and the units that they lie in.
//!
//! A unit is what one fetch loads: a chunk, and further chunks that only one of its samples needs. One pass
//! over the tables finds the units (`samples/build.rs`). What it found is kept beside the local tables, and
//! shared by all jobs of the (domain, root, layout).
//!
//! Invariant: the first bytes of each sample of a unit lie in that unit. A sample whose entries lie in chunks
//! that other samples need, too, reads those chunks while it is sent. That costs a fetch, and never a wrong
//! byte.

mod build;

use super::{Source, VersionError};
use fletch_core::{
    Hash,
    delivery::receipt::content,
    manifest::{EntryRef, SampleRef},
    plan::{PackedInts, UnitMap, unit_map::BadUnitMap},
};
use fletch_store::disk::DiskEngine;
use fletch_tables::{Found, Table, TableError};
use std::{collections::HashMap, sync::Arc};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Why a version's samples cannot be listed or found.
#[derive(Debug, thiserror::Error)]
pub enum SamplesError {
    /// The version's tables cannot be read.
    #[error(transparent)]
    Version(#[from] VersionError),
    /// The request names samples that the version does not have, or the version has no sample.
    #[error("{0}")]
    Request(String),
    /// The version's tables contradict themselves.
    #[error(transparent)]
    UnitMap(#[from] BadUnitMap),
    /// An entry that the sample table names is missing from the tables.
    #[error("an entry of the sample is missing from the version's tables")]
    Lost,
}

/// A chunk, and the position of its row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Chunk {
    /// The hash.
    pub hash: Hash,
    /// The length in bytes.
    pub len: u32,
    /// The part of its row in `chunks.parquet`.
    pub part: u32,
    /// The number of the row in that part.
    pub row: u32,
}

/// The samples and units of a version.
///
/// Takes 44 bytes a chunk, 8 a unit, and what a sample's length takes packed: about two bytes for
/// photographs. The other numbers of a sample take up to 16 bytes where samples and their chunks lie in
/// disorder, and next to nothing in a pack.
#[derive(Debug, PartialEq, Eq)]
pub struct Samples {
    /// The ordinal of each sample's first entry, and the number of ordinals that it spans.
    firsts: PackedInts,
    spans: PackedInts,
    /// Bytes of each sample's files, at most 2^32 − 1.
    sizes: PackedInts,
    /// The unit of each sample.
    unit_of: PackedInts,
    /// The index in `chunks` of each unit's first chunk, and the end.
    starts: PackedInts,
    /// The chunks of each unit.
    chunks: Box<[Chunk]>,
    /// The units as the orders see them. Lengths are what the chunks occupy on disk.
    pub unit_map: Arc<UnitMap>,
}

fn damaged(why: &str) -> SamplesError {
    let e = TableError::Damaged { table: Table::Chunks.file_name(), why: why.to_owned() };
    VersionError::from(e).into()
}

/// How many unknown keys an error names.
const NAMED_KEYS_MAX: usize = 5;
/// The first bytes of what is kept: its form.
const KEPT_FORM: &[u8; 8] = b"fltsmpl1";

impl Samples {
    /// Returns what is kept of a source's samples. Else reads its tables part by part, and keeps the result.
    ///
    /// # Errors
    /// Those of the tables; [`SamplesError::Request`] if the version has no sample.
    pub async fn load(source: &Source) -> Result<Self, SamplesError> {
        let version = &source.version;
        let samples = version.manifest().samples;
        let kept = move |pieces: Vec<_>| Self::of_pieces(&pieces).filter(|kept| kept.len() == samples);
        if let Some(kept) = version.kept_samples(kept).await {
            return Ok(kept);
        }
        let built = build::build(source).await?;
        version.keep_samples(built.to_pieces()).await;
        Ok(built)
    }

    fn to_pieces(&self) -> Vec<Vec<u8>> {
        let mut pieces = vec![KEPT_FORM.to_vec()];
        pieces.extend(self.lists().map(PackedInts::to_bytes));
        pieces.push(self.chunks.as_bytes().to_vec());
        pieces
    }

    fn lists(&self) -> [&PackedInts; 5] {
        [&self.firsts, &self.spans, &self.sizes, &self.unit_of, &self.starts]
    }

    /// Returns the samples of [`Samples::to_pieces`]; `None` if the pieces are not of this form.
    fn of_pieces(pieces: &[Vec<u8>]) -> Option<Self> {
        let [form, lists @ .., chunks] = pieces else { return None };
        let lists: Option<Vec<PackedInts>> = lists.iter().map(|list| PackedInts::of_bytes(list)).collect();
        let [firsts, spans, sizes, unit_of, starts] = <[PackedInts; 5]>::try_from(lists?).ok()?;
        let chunks = chunks.chunks_exact(size_of::<Chunk>()).map(|chunk| Chunk::read_from_bytes(chunk).ok());
        let chunks: Box<[Chunk]> = chunks.collect::<Option<_>>()?;
        let same_length = [&firsts, &spans, &sizes].iter().all(|list| list.len() == unit_of.len());
        let whole = starts.iter().is_sorted() && starts.iter().last()? as usize == chunks.len();
        if form != KEPT_FORM || !same_length || !whole {
            return None;
        }
        Self::new([firsts, spans, sizes, unit_of, starts], chunks).ok()
    }

    /// Adds up the units' lengths, and checks that each sample's unit exists.
    fn new(lists: [PackedInts; 5], chunks: Box<[Chunk]>) -> Result<Self, BadUnitMap> {
        let [firsts, spans, sizes, unit_of, starts] = lists;
        let ends = starts.iter().zip(starts.iter().skip(1));
        let of_unit = |(start, end)| &chunks[start as usize..end as usize];
        let bytes = ends.map(|ends| of_unit(ends).iter().map(|c| DiskEngine::footprint(c.len)).sum());
        let unit_map = Arc::new(UnitMap::of_iter(unit_of.iter(), bytes.collect())?);
        Ok(Samples { firsts, spans, sizes, unit_of, starts, chunks, unit_map })
    }

    /// Returns the number of samples.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.firsts.len() as u64
    }

    /// Returns the unit of a sample.
    #[must_use]
    pub fn unit(&self, sample: u32) -> u32 {
        self.unit_of.get(sample as usize)
    }

    /// Returns the chunks of a unit.
    #[must_use]
    pub fn chunks(&self, unit: u32) -> &[Chunk] {
        let u = unit as usize;
        &self.chunks[self.starts.get(u) as usize..self.starts.get(u + 1) as usize]
    }

    /// Returns the ordinal of a sample's first entry, and the number of ordinals that it spans.
    #[must_use]
    pub fn ordinals(&self, sample: u32) -> (u64, u32) {
        (u64::from(self.firsts.get(sample as usize)), self.spans.get(sample as usize))
    }

    /// Returns the bytes of a sample's files, at most 2^32 − 1.
    #[must_use]
    pub fn bytes(&self, sample: u32) -> u64 {
        self.sizes.get(sample as usize).into()
    }

    /// Returns the entries of a sample, in order.
    ///
    /// # Errors
    /// Those of the tables; [`SamplesError::Lost`] if an entry is missing.
    pub async fn files(&self, source: &Source, sample: u32) -> Result<Vec<Found>, SamplesError> {
        let (first, span) = self.ordinals(sample);
        let version = &source.version;
        let mut files: Vec<Found> = Vec::new();
        for ordinal in first..first + u64::from(span) {
            let found = match version.try_entry(ordinal) {
                Some(found) => found,
                None => version.entry(ordinal).await.map_err(VersionError::from)?,
            };
            let found = found.ok_or(SamplesError::Lost)?;
            // Entries that belong to no sample may lie between a sample's files.
            let belongs = match (files.first().map(|f| f.entry().sample), found.entry().sample) {
                (None, _) => true,
                (Some(SampleRef::Keyed(a)), SampleRef::Keyed(b)) => a == b,
                _ => false,
            };
            if belongs {
                files.push(found);
            }
        }
        Ok(files)
    }

    /// Returns the number of the sample for each key.
    ///
    /// # Errors
    /// [`SamplesError::Request`] naming the first few keys that no sample has; those of the tables.
    pub async fn numbers(&self, source: &Source, keys: &[String]) -> Result<Vec<u64>, SamplesError> {
        let mut wanted: HashMap<&str, Option<u64>> = keys.iter().map(|k| (k.as_str(), None)).collect();
        let mut s = 0;
        self.each_key(source, |key| {
            if let Some(number) = wanted.get_mut(key) {
                *number = Some(s);
            }
            s += 1;
        })
        .await?;
        let missing: Vec<&str> = wanted.iter().filter(|(_, n)| n.is_none()).map(|(k, _)| *k).collect();
        if !missing.is_empty() {
            let lost = |k: &&String| wanted.get(k.as_str()).is_some_and(Option::is_none);
            let first: Vec<String> =
                keys.iter().filter(lost).take(NAMED_KEYS_MAX).map(|k| format!("{k:?}")).collect();
            let why = format!(
                "{} keys name no sample of the version, among them {}",
                missing.len(),
                first.join(", ")
            );
            return Err(SamplesError::Request(why));
        }
        Ok(keys.iter().filter_map(|k| wanted.get(k.as_str()).copied().flatten()).collect())
    }

    /// Visits the key of every sample, in order.
    ///
    /// # Errors
    /// Those of the tables.
    pub async fn each_key(&self, source: &Source, mut visit: impl FnMut(&str)) -> Result<(), SamplesError> {
        let mut s = 0;
        for part in 0..source.version.manifest().parts.len() {
            let loaded = source.version.part(part).await.map_err(VersionError::from)?;
            let first = loaded.first_ordinal();
            let end = first + loaded.len() as u64;
            while s < self.firsts.len() {
                let ordinal = self.firsts.get(s);
                if u64::from(ordinal) >= end {
                    break;
                }
                let row = usize::try_from(u64::from(ordinal) - first).unwrap_or(usize::MAX);
                let e = loaded.entry(row);
                visit(if let SampleRef::Keyed(k) = e.sample { k } else { e.path });
                s += 1;
            }
        }
        Ok(())
    }

    /// Returns the content hash of every sample, from the manifest.
    ///
    /// # Errors
    /// Those of the tables.
    pub async fn contents(&self, source: &Source) -> Result<Vec<Hash>, SamplesError> {
        let (mut out, mut hashes) = (Vec::with_capacity(self.firsts.len()), Vec::new());
        self.each_entry(source, |new, e| {
            if new && !hashes.is_empty() {
                out.push(content(&hashes));
                hashes.clear();
            }
            hashes.push(e.hash.ok_or_else(|| damaged("a sample's entry has no content"))?);
            Ok(())
        })
        .await?;
        if !hashes.is_empty() {
            out.push(content(&hashes));
        }
        Ok(out)
    }

    /// Returns the length of every sample in bytes, all its files together.
    ///
    /// # Errors
    /// Those of the tables.
    pub async fn lengths(&self, source: &Source) -> Result<Vec<u64>, SamplesError> {
        let mut out: Vec<u64> = Vec::with_capacity(self.firsts.len());
        self.each_entry(source, |new, e| {
            match out.last_mut().filter(|_| !new) {
                Some(sum) => *sum = sum.saturating_add(e.size),
                None => out.push(e.size),
            }
            Ok(())
        })
        .await?;
        Ok(out)
    }

    /// Visits every entry of every sample, in order, with whether it is the sample's first.
    async fn each_entry(
        &self,
        source: &Source,
        mut visit: impl FnMut(bool, &EntryRef<'_>) -> Result<(), SamplesError>,
    ) -> Result<(), SamplesError> {
        let mut open: Option<String> = None;
        for part in 0..source.version.manifest().parts.len() {
            let loaded = source.version.part(part).await.map_err(VersionError::from)?;
            for row in 0..loaded.len() {
                let e = loaded.entry(row);
                let new = match e.sample {
                    SampleRef::None => continue,
                    SampleRef::Keyed(key) if open.as_deref() == Some(key) => false,
                    SampleRef::Single | SampleRef::Keyed(_) => {
                        open = if let SampleRef::Keyed(k) = e.sample { Some(k.to_owned()) } else { None };
                        true
                    }
                };
                visit(new, &e)?;
            }
        }
        Ok(())
    }
}
