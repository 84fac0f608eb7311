//! A version in one layout as an epoch sees it: samples, and the units that they lie in.
//!
//! A unit is what one fetch brings: a chunk, with those further chunks that only its one sample needs. It is
//! built by one pass over the tables and kept for all jobs of the (domain, root, layout).
//!
//! Invariant: sample s of a unit has its first bytes there; a sample whose entries lie in chunks that others
//! need, too, reads those on the way, which costs a fetch and never a wrong byte.

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
    collections::{HashMap, HashSet},
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
    /// An entry that the tables promised is not in them.
    #[error("an entry of the sample is missing from the version's tables")]
    Lost,
}

/// A chunk, and where its row is.
#[derive(Debug, Clone, Copy)]
pub struct Chunk {
    /// Its name.
    pub hash: Hash,
    /// Its length in bytes.
    pub len: u32,
    /// The part of its row in `chunks.parquet`.
    pub part: u32,
    /// The row.
    pub row: u32,
}

/// See the module. About 20 bytes a sample, 12 a unit and 44 a chunk.
pub struct Samples {
    /// The ordinal of each sample's first entry, and how many ordinals it spans.
    firsts: Box<[u32]>,
    spans: Box<[u32]>,
    /// Bytes of each sample's files, at most 2^32 − 1.
    sizes: Box<[u32]>,
    /// The unit of each sample.
    unit_of: Box<[u32]>,
    /// Where each unit's chunks begin in `chunks`.
    starts: Box<[u32]>,
    /// Each unit's chunks.
    chunks: Box<[Chunk]>,
    /// The same as the orders see it. Lengths are what the chunks occupy on disk.
    pub unit_map: Arc<UnitMap>,
}

fn damaged(why: &str) -> SamplesError {
    let e = TableError::Damaged { table: Table::Chunks.file_name(), why: why.to_owned() };
    VersionError::from(e).into()
}

/// Grows sample by sample.
#[derive(Default)]
struct Build {
    firsts: Vec<u32>,
    spans: Vec<u32>,
    sizes: Vec<u32>,
    /// The key of the sample that may go on.
    open: Option<String>,
    /// First chunk of each sample; further ones as (sample, chunk).
    first_chunk: Vec<u32>,
    more: Vec<(u32, u32)>,
}

/// How many unknown keys an error names.
const NAMED: usize = 5;
/// A sample without bytes.
const NOWHERE: u32 = u32::MAX;

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
                self.first_chunk.push(NOWHERE);
            }
        }
        let s = self.firsts.len() - 1;
        self.spans[s] = ordinal - self.firsts[s] + 1;
        self.sizes[s] = self.sizes[s].saturating_add(u32::try_from(e.size).unwrap_or(u32::MAX));
        for c in chunks {
            if self.first_chunk[s] == NOWHERE {
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
    /// Those of the tables; [`SamplesError::Request`] when there is no sample.
    pub async fn load(source: &Source) -> Result<Self, SamplesError> {
        let version = &source.version;
        let parts = version.manifest().parts.len();
        // Chunks by hash, in the order of their rows; a chunk that stands twice is its first row.
        let mut known: HashMap<Hash, u32> = HashMap::new();
        let mut rows: Vec<Chunk> = Vec::new();
        for part in 0..parts {
            let number = u32::try_from(part).unwrap_or(u32::MAX);
            for (row, r) in (0u32..).zip(version.chunk_rows(part).await.map_err(VersionError::from)?.iter()) {
                let next = u32::try_from(rows.len()).map_err(|_| damaged("more than 2^32 chunks"))?;
                if known.try_insert_first(r.chunk, next) {
                    rows.push(Chunk { hash: r.chunk, len: r.len, part: number, row });
                }
            }
        }
        let mut build = Build::default();
        for part in 0..parts {
            let loaded = version.part(part).await.map_err(VersionError::from)?;
            for row in 0..loaded.entries.len() {
                let e = loaded.entries.get(row);
                let mut chunks = Vec::new();
                for s in loaded.placed.slices(row) {
                    chunks.push(
                        *known
                            .get(&s.chunk)
                            .ok_or_else(|| damaged("a placement names a chunk that is in no row"))?,
                    );
                }
                build.entry(loaded.entries.first_ordinal() + row as u64, &e, chunks.into_iter())?;
            }
        }
        drop(known);
        Self::lay(build, &rows)
    }

    fn lay(build: Build, rows: &[Chunk]) -> Result<Self, SamplesError> {
        let Build { firsts, spans, sizes, first_chunk, more, .. } = build;
        if firsts.is_empty() {
            return Err(SamplesError::Request(
                "the version has no samples; see --samples of fletch index".to_owned(),
            ));
        }
        // Which chunks several samples need, and which are somebody's first.
        let mut users = vec![0u8; rows.len()];
        let mut heads = vec![false; rows.len()];
        for &c in first_chunk.iter().filter(|&&c| c != NOWHERE) {
            users[c as usize] = users[c as usize].saturating_add(1);
            heads[c as usize] = true;
        }
        let distinct: HashSet<(u32, u32)> = more.iter().copied().collect();
        for &(_, c) in &distinct {
            users[c as usize] = users[c as usize].saturating_add(1);
        }
        let mut unit_of_chunk = vec![NOWHERE; rows.len()];
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
        // Samples without bytes share a unit without bytes.
        let nothing = u32::try_from(of_unit.len()).unwrap_or(u32::MAX);
        if first_chunk.contains(&NOWHERE) {
            of_unit.push(Vec::new());
        }
        let unit_of: Vec<u32> = first_chunk
            .iter()
            .map(|&c| if c == NOWHERE { nothing } else { unit_of_chunk[c as usize] })
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

    /// How many samples there are.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.firsts.len() as u64
    }

    /// The unit of a sample.
    #[must_use]
    pub fn unit(&self, sample: u32) -> u32 {
        self.unit_of[sample as usize]
    }

    /// The chunks of a unit.
    #[must_use]
    pub fn chunks(&self, unit: u32) -> &[Chunk] {
        let u = unit as usize;
        &self.chunks[self.starts[u] as usize..self.starts[u + 1] as usize]
    }

    /// The ordinal of a sample's first entry, and how many ordinals it spans.
    #[must_use]
    pub fn ordinals(&self, sample: u32) -> (u64, u32) {
        (u64::from(self.firsts[sample as usize]), self.spans[sample as usize])
    }

    /// Bytes of a sample's files, at most 2^32 − 1.
    #[must_use]
    pub fn bytes(&self, sample: u32) -> u64 {
        self.sizes[sample as usize].into()
    }

    /// The entries of a sample, in their order.
    ///
    /// # Errors
    /// Those of the tables; [`SamplesError::Lost`] when one of them is not there.
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
            // Between a sample's files may lie entries of none.
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

    /// The numbers of the samples with these keys, one for each.
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
            let first: Vec<String> = keys.iter().filter(lost).take(NAMED).map(|k| format!("{k:?}")).collect();
            let why = format!("{} keys are of no sample, among them {}", missing.len(), first.join(", "));
            return Err(SamplesError::Request(why));
        }
        Ok(keys.iter().filter_map(|k| wanted.get(k.as_str()).copied().flatten()).collect())
    }

    /// The key of every sample, in order.
    ///
    /// # Errors
    /// Those of the tables.
    pub async fn each_key(&self, source: &Source, mut see: impl FnMut(&str)) -> Result<(), SamplesError> {
        let mut s = 0;
        for part in 0..source.version.manifest().parts.len() {
            let loaded = source.version.part(part).await.map_err(VersionError::from)?;
            let first = loaded.entries.first_ordinal();
            let end = first + loaded.entries.len() as u64;
            while let Some(&ordinal) = self.firsts.get(s).filter(|&&o| u64::from(o) < end) {
                let row = usize::try_from(u64::from(ordinal) - first).unwrap_or(usize::MAX);
                let e = loaded.entries.get(row);
                see(if let SampleRef::Keyed(k) = e.sample { k } else { e.path });
                s += 1;
            }
        }
        Ok(())
    }

    /// The content hash of every sample, from the manifest.
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

    /// The length of every sample, all its files together, in bytes.
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

    /// Every entry of every sample, in order, and whether it is a sample's first.
    async fn each_entry(
        &self,
        source: &Source,
        mut see: impl FnMut(bool, &EntryRef<'_>) -> Result<(), SamplesError>,
    ) -> Result<(), SamplesError> {
        let mut open: Option<String> = None;
        for part in 0..source.version.manifest().parts.len() {
            let loaded = source.version.part(part).await.map_err(VersionError::from)?;
            for row in 0..loaded.entries.len() {
                let e = loaded.entries.get(row);
                let new = match e.sample {
                    SampleRef::None => continue,
                    SampleRef::Keyed(key) if open.as_deref() == Some(key) => false,
                    SampleRef::Single | SampleRef::Keyed(_) => {
                        open = if let SampleRef::Keyed(k) = e.sample { Some(k.to_owned()) } else { None };
                        true
                    }
                };
                see(new, &e)?;
            }
        }
        Ok(())
    }
}

trait First {
    fn try_insert_first(&mut self, hash: Hash, n: u32) -> bool;
}

impl First for HashMap<Hash, u32> {
    /// Inserts unless it is there; whether it was not.
    fn try_insert_first(&mut self, hash: Hash, n: u32) -> bool {
        let before = self.len();
        self.entry(hash).or_insert(n);
        self.len() > before
    }
}
