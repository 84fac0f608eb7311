//! The samples of a version in one layout, and the units that they lie in.
//!
//! A unit is what one fetch loads: a chunk, and further chunks that only one of its samples needs. The units
//! are built by one pass over the tables, and shared by all jobs of the (domain, root, layout).
//!
//! Invariant: the first bytes of each sample of a unit lie in that unit. A sample whose entries lie in chunks
//! that other samples need, too, reads those chunks while it is sent. That costs a fetch, and never a wrong
//! byte.

use super::{Source, VersionError};
use fletch_core::{
    Hash,
    delivery::receipt::content,
    manifest::{EntryRef, SampleRef},
    plan::{UnitMap, unit_map::BadUnitMap},
};
use fletch_store::disk::DiskEngine;
use fletch_tables::{Found, Table, TableError};
use std::{
    collections::{HashMap, HashSet, hash_map::Entry as MapEntry},
    sync::Arc,
};

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
#[derive(Debug, Clone, Copy)]
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

/// The samples and units of a version. Takes about 20 bytes a sample, 12 a unit and 44 a chunk.
pub struct Samples {
    /// The ordinal of each sample's first entry, and the number of ordinals that it spans.
    firsts: Box<[u32]>,
    spans: Box<[u32]>,
    /// Bytes of each sample's files, at most 2^32 − 1.
    sizes: Box<[u32]>,
    /// The unit of each sample.
    unit_of: Box<[u32]>,
    /// The index in `chunks` of each unit's first chunk, and the end.
    starts: Box<[u32]>,
    /// The chunks of each unit.
    chunks: Box<[Chunk]>,
    /// The units as the orders see them. Lengths are what the chunks occupy on disk.
    pub unit_map: Arc<UnitMap>,
}

fn damaged(why: &str) -> SamplesError {
    let e = TableError::Damaged { table: Table::Chunks.file_name(), why: why.to_owned() };
    VersionError::from(e).into()
}

/// Collects samples, entry by entry.
#[derive(Default)]
struct Build {
    firsts: Vec<u32>,
    spans: Vec<u32>,
    sizes: Vec<u32>,
    /// The key of the latest sample, to which the next entry may belong.
    open: Option<String>,
    /// The first chunk of each sample. Further ones are in `more`, as (sample, chunk).
    first_chunk: Vec<u32>,
    more: Vec<(u32, u32)>,
}

/// How many unknown keys an error names.
const NAMED_KEYS_MAX: usize = 5;
/// The chunk of a sample without bytes.
const NO_CHUNK: u32 = u32::MAX;

impl Build {
    fn entry(
        &mut self,
        ordinal: u64,
        e: &EntryRef<'_>,
        chunks: impl Iterator<Item = u32>,
    ) -> Result<(), SamplesError> {
        let ordinal = u32::try_from(ordinal).map_err(|_| damaged("more than 2^32 entries"))?;
        match e.sample {
            SampleRef::None => return Ok(()),
            SampleRef::Keyed(key) if self.open.as_deref() == Some(key) => {}
            SampleRef::Single | SampleRef::Keyed(_) => {
                self.open = if let SampleRef::Keyed(k) = e.sample { Some(k.to_owned()) } else { None };
                self.firsts.push(ordinal);
                self.spans.push(0);
                self.sizes.push(0);
                self.first_chunk.push(NO_CHUNK);
            }
        }
        let s = self.firsts.len() - 1;
        self.spans[s] = ordinal - self.firsts[s] + 1;
        self.sizes[s] = self.sizes[s].saturating_add(u32::try_from(e.size).unwrap_or(u32::MAX));
        for c in chunks {
            if self.first_chunk[s] == NO_CHUNK {
                self.first_chunk[s] = c;
            } else if self.first_chunk[s] != c {
                self.more.push((u32::try_from(s).unwrap_or(u32::MAX), c));
            }
        }
        Ok(())
    }
}

impl Samples {
    /// Reads the tables of a source, part by part.
    ///
    /// # Errors
    /// Those of the tables; [`SamplesError::Request`] if the version has no sample.
    pub async fn load(source: &Source) -> Result<Self, SamplesError> {
        let version = &source.version;
        let parts = version.manifest().parts.len();
        // Chunks by hash, in the order of their rows. A repeated chunk counts as its first row.
        let mut known: HashMap<Hash, u32> = HashMap::new();
        let mut rows: Vec<Chunk> = Vec::new();
        for part in 0..parts {
            let number = u32::try_from(part).unwrap_or(u32::MAX);
            for (row, r) in (0u32..).zip(version.chunk_rows(part).await.map_err(VersionError::from)?.iter()) {
                let next = u32::try_from(rows.len()).map_err(|_| damaged("more than 2^32 chunks"))?;
                if let MapEntry::Vacant(slot) = known.entry(r.chunk) {
                    slot.insert(next);
                    rows.push(Chunk { hash: r.chunk, len: r.len, part: number, row });
                }
            }
        }
        let mut build = Build::default();
        for part in 0..parts {
            let loaded = version.part(part).await.map_err(VersionError::from)?;
            for row in 0..loaded.len() {
                let e = loaded.entry(row);
                let mut chunks = Vec::new();
                for s in loaded.slices(row) {
                    chunks.push(
                        *known
                            .get(&s.chunk)
                            .ok_or_else(|| damaged("a placement names a chunk that is in no row"))?,
                    );
                }
                build.entry(loaded.first_ordinal() + row as u64, &e, chunks.into_iter())?;
            }
        }
        drop(known);
        Self::build_units(build, &rows)
    }

    fn build_units(build: Build, rows: &[Chunk]) -> Result<Self, SamplesError> {
        let Build { firsts, spans, sizes, first_chunk, more, .. } = build;
        if firsts.is_empty() {
            return Err(SamplesError::Request(
                "the version has no samples; see --samples of fletch index".to_owned(),
            ));
        }
        // How many samples need each chunk, and which chunks are a sample's first.
        let mut users = vec![0u8; rows.len()];
        let mut heads = vec![false; rows.len()];
        for &c in first_chunk.iter().filter(|&&c| c != NO_CHUNK) {
            users[c as usize] = users[c as usize].saturating_add(1);
            heads[c as usize] = true;
        }
        let distinct: HashSet<(u32, u32)> = more.iter().copied().collect();
        for &(_, c) in &distinct {
            users[c as usize] = users[c as usize].saturating_add(1);
        }
        let mut unit_of_chunk = vec![NO_CHUNK; rows.len()];
        let mut of_unit: Vec<Vec<u32>> = Vec::new();
        for (c, _) in heads.iter().enumerate().filter(|(_, h)| **h) {
            unit_of_chunk[c] = u32::try_from(of_unit.len()).unwrap_or(u32::MAX);
            of_unit.push(vec![u32::try_from(c).unwrap_or(u32::MAX)]);
        }
        let mut own: Vec<(u32, u32)> =
            distinct.into_iter().filter(|&(_, c)| users[c as usize] == 1 && !heads[c as usize]).collect();
        own.sort_unstable();
        for (s, c) in own {
            let u = unit_of_chunk[first_chunk[s as usize] as usize];
            of_unit[u as usize].push(c);
        }
        // Samples without bytes share one unit without chunks.
        let nothing = u32::try_from(of_unit.len()).unwrap_or(u32::MAX);
        if first_chunk.contains(&NO_CHUNK) {
            of_unit.push(Vec::new());
        }
        let unit_of: Vec<u32> = first_chunk
            .iter()
            .map(|&c| if c == NO_CHUNK { nothing } else { unit_of_chunk[c as usize] })
            .collect();
        let bytes = of_unit
            .iter()
            .map(|cs| cs.iter().map(|&c| DiskEngine::footprint(rows[c as usize].len)).sum())
            .collect();
        let unit_map = UnitMap::new(&unit_of, bytes)?;
        let mut starts = vec![0u32];
        let mut chunks = Vec::with_capacity(rows.len());
        for cs in &of_unit {
            chunks.extend(cs.iter().map(|&c| rows[c as usize]));
            starts.push(u32::try_from(chunks.len()).unwrap_or(u32::MAX));
        }
        Ok(Samples {
            firsts: firsts.into(),
            spans: spans.into(),
            sizes: sizes.into(),
            unit_of: unit_of.into(),
            starts: starts.into(),
            chunks: chunks.into(),
            unit_map: Arc::new(unit_map),
        })
    }

    /// Returns the number of samples.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.firsts.len() as u64
    }

    /// Returns the unit of a sample.
    #[must_use]
    pub fn unit(&self, sample: u32) -> u32 {
        self.unit_of[sample as usize]
    }

    /// Returns the chunks of a unit.
    #[must_use]
    pub fn chunks(&self, unit: u32) -> &[Chunk] {
        let u = unit as usize;
        &self.chunks[self.starts[u] as usize..self.starts[u + 1] as usize]
    }

    /// Returns the ordinal of a sample's first entry, and the number of ordinals that it spans.
    #[must_use]
    pub fn ordinals(&self, sample: u32) -> (u64, u32) {
        (u64::from(self.firsts[sample as usize]), self.spans[sample as usize])
    }

    /// Returns the bytes of a sample's files, at most 2^32 − 1.
    #[must_use]
    pub fn bytes(&self, sample: u32) -> u64 {
        self.sizes[sample as usize].into()
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
            while let Some(&ordinal) = self.firsts.get(s).filter(|&&o| u64::from(o) < end) {
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
