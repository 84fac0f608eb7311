//! Versions in memory for the tests of this crate.
#![expect(dead_code, reason = "each test file uses some of it")]

use async_trait::async_trait;
use bytes::Bytes;
use fletch_core::manifest::{Entry, LayoutParams, SampleRule, Slice};
use fletch_core::{Hash, Kind};
use fletch_tables::{
    NewRow, PartCache, PinRow, Provenance, SourceError, Table, TableError, TableRange, TableSource,
    TablesWriter, Version, WrittenVersion,
};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The five files of a version in memory, with counters of reads and with faults.
#[derive(Default)]
pub struct Files {
    pub files: HashMap<Table, Bytes>,
    pub reads: AtomicU64,
    pub reads_of_entries: AtomicU64,
    pub fail: Mutex<Option<SourceError>>,
    pub slow: bool,
}

impl Files {
    pub fn load(written: &WrittenVersion) -> Self {
        let files = Table::ALL.map(|t| {
            let rest = t.path(written.root, written.layout);
            let (_, at) = written.files.iter().find(|(p, _)| *p == rest).expect("every table was written");
            (t, Bytes::from(std::fs::read(at).expect("scratch file")))
        });
        Files { files: HashMap::from(files), ..Files::default() }
    }

    pub fn with(&self, table: Table, bytes: impl Into<Bytes>) -> Self {
        let mut files = self.files.clone();
        files.insert(table, bytes.into());
        Files { files, ..Files::default() }
    }
}

#[async_trait]
impl TableSource for Files {
    async fn read(&self, table: Table, range: TableRange) -> Result<Bytes, SourceError> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        if table == Table::Entries {
            self.reads_of_entries.fetch_add(1, Ordering::Relaxed);
        }
        if self.slow {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        if let Some(e) = self.fail.lock().clone() {
            return Err(e);
        }
        let file = &self.files[&table];
        let len = file.len() as u64;
        let range = match range {
            TableRange::All => 0..len,
            TableRange::Range(r) => r,
            TableRange::Suffix(n) => len.saturating_sub(n)..len,
        };
        if range.start > range.end || range.end > len {
            return Err(SourceError { kind: Kind::Corrupt, message: format!("{table}: past the end") });
        }
        Ok(file.slice(range.start as usize..range.end as usize))
    }
}

pub fn about() -> Provenance {
    Provenance {
        created_unix_ns: 1_767_225_600_000_000_001,
        indexed_at_ns: 1_767_225_500_000_000_000,
        tool: "fletch-tables tests".into(),
        origin: None,
        faults: Vec::new(),
    }
}

/// Returns the slices of an entry in an index: one chunk, or slices with hashes made from their number.
pub fn slices(e: &Entry, params: LayoutParams) -> Vec<Slice> {
    let Some(hash) = e.hash else { return Vec::new() };
    let lengths: Vec<u32> = params.slice_lengths(e.size).collect();
    let whole = lengths.len() == 1;
    lengths
        .into_iter()
        .enumerate()
        .map(|(i, len)| {
            let chunk = if whole { hash } else { Hash::of(format!("{hash}{i}").as_bytes()) };
            Slice { chunk, chunk_offset: 0, len }
        })
        .collect()
}

pub fn row(e: &Entry, params: LayoutParams) -> NewRow {
    let pin = PinRow { size: e.size, mtime_ns: Some(-5), etag: Some(format!("\"{}\"", e.path.len())) };
    NewRow::indexed(e.clone(), slices(e, params), &pin)
}

pub fn write(scratch: &Path, entries: &[Entry]) -> WrittenVersion {
    let mut w = TablesWriter::create(scratch, SampleRule::file(), LayoutParams::INDEX).expect("scratch");
    for e in entries {
        w.push(row(e, LayoutParams::INDEX)).expect("a good entry");
    }
    w.finish(about()).expect("written")
}

/// A version in memory.
pub struct Made {
    pub written: WrittenVersion,
    pub files: Arc<Files>,
}

pub fn make(entries: &[Entry]) -> Made {
    let scratch = tempfile::tempdir().expect("scratch");
    let written = write(scratch.path(), entries);
    let files = Arc::new(Files::load(&written));
    Made { written, files }
}

impl Made {
    pub async fn open_with(&self, files: Arc<Files>, cache: PartCache) -> Result<Version, TableError> {
        Version::open(files, self.written.root, self.written.layout, cache).await
    }

    pub async fn open(&self) -> Version {
        self.open_with(self.files.clone(), PartCache::new(64 << 20)).await.expect("a good version")
    }
}

/// Returns every entry of a version with its slices.
pub async fn read_all(v: &Version) -> Result<Vec<(Entry, Vec<Slice>)>, TableError> {
    let mut out = Vec::new();
    for i in 0..v.index().parts().len() {
        let part = v.part(i).await?;
        for row in 0..part.len() {
            out.push((part.entry(row).to_owned(), part.slices(row).to_vec()));
        }
    }
    Ok(out)
}

pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime")
}
