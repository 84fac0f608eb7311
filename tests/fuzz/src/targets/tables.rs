//! The Parquet tables of a version: entries, placement and chunks.

use crate::plant;
use async_trait::async_trait;
use bytes::Bytes;
use fletch_core::{
    Hash, Kind,
    manifest::{Entry, LayoutParams, SampleRule, Slice},
};
use fletch_tables::{
    ChunkRow, NewRow, PartCache, PinRow, Provenance, SourceError, Table, TableError, TableRange, TableSource,
    TablesWriter, Version, WrittenVersion,
};
use std::{
    collections::HashMap,
    sync::{Arc, LazyLock},
};
use tokio::runtime::{Builder, Runtime};

/// The tables that an input replaces. Its first byte says which.
const REPLACED: [Table; 3] = [Table::Entries, Table::Placement, Table::Chunks];

/// The tables of a version, in memory.
#[derive(Clone)]
struct Files(HashMap<Table, Bytes>);

#[async_trait]
impl TableSource for Files {
    async fn read(&self, table: Table, range: TableRange) -> Result<Bytes, SourceError> {
        let file = &self.0[&table];
        let len = file.len() as u64;
        let range = match range {
            TableRange::All => 0..len,
            TableRange::Range(r) => r,
            TableRange::Suffix(n) => len.saturating_sub(n)..len,
        };
        if range.start > range.end || range.end > len {
            return Err(SourceError { kind: Kind::Corrupt, message: format!("{table}: past the end") });
        }
        let at = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        Ok(file.slice(at(range.start)..at(range.end)))
    }
}

type Rows = Vec<(Entry, Vec<Slice>)>;

/// A version, and what its tables say.
struct Made {
    written: WrittenVersion,
    files: Files,
    rows: Rows,
    chunks: Vec<ChunkRow>,
}

static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_current_thread().enable_all().build().expect("a runtime"));

static MADE: LazyLock<Made> = LazyLock::new(|| {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let params = LayoutParams { slice_bytes: 1 << 20, ..LayoutParams::INDEX };
    let mut writer = TablesWriter::create(scratch.path(), SampleRule::file(), params).expect("a writer");
    for i in 0..40u64 {
        let path = format!("d{}/{i:03}.jpg", i / 16);
        let entry = Entry::file(path.as_str(), i * 100_000, Hash::of(path.as_bytes()));
        let lengths = params.slice_lengths(entry.size);
        let cut = |(n, len): (usize, u32)| Slice {
            chunk: Hash::of(format!("{path}{n}").as_bytes()),
            chunk_offset: 0,
            len,
        };
        let mut slices: Vec<Slice> = lengths.enumerate().map(cut).collect();
        if let ([one], Some(hash)) = (&mut slices[..], entry.hash) {
            one.chunk = hash;
        }
        let pin = PinRow { size: entry.size, mtime_ns: Some(-5), etag: Some(format!("\"{i}\"")) };
        writer.push(NewRow::indexed(entry, slices, &pin)).expect("a row");
    }
    let written = writer
        .finish(Provenance {
            created_unix_ns: 1_767_225_600_000_000_001,
            indexed_at_ns: 1_767_225_500_000_000_000,
            tool: "fletch-fuzz".into(),
            origin: None,
            faults: Vec::new(),
        })
        .expect("written tables");
    let file = |t: Table| {
        let name = t.path(written.root, written.layout);
        let (_, at) = written.files.iter().find(|(p, _)| *p == name).expect("every table");
        (t, Bytes::from(std::fs::read(at).expect("a table")))
    };
    let files = Files(Table::ALL.map(file).into_iter().collect());
    let read = RUNTIME.block_on(read_all(&files, &written));
    let (rows, chunks) = (read.0.expect("sound tables"), read.1.expect("sound tables"));
    Made { written, files, rows, chunks }
});

type Read<T> = Result<T, TableError>;

/// Reads every entry with its slices, and every chunk row.
async fn read_all(files: &Files, of: &WrittenVersion) -> (Read<Rows>, Read<Vec<ChunkRow>>) {
    let source = Arc::new(files.clone());
    let version = match Version::open(source, of.root, of.layout, PartCache::new(8 << 20)).await {
        Ok(version) => version,
        Err(e) => return (Err(e.clone()), Err(e)),
    };
    let (mut rows, mut chunks) = (Ok(Vec::new()), Ok(Vec::new()));
    for i in 0..version.index().parts().len() {
        match version.part(i).await {
            Ok(part) => {
                let row = |r| (part.entry(r).to_owned(), part.slices(r).to_vec());
                if let Ok(rows) = &mut rows {
                    rows.extend((0..part.len()).map(row));
                }
            }
            Err(e) => rows = Err(e),
        }
        match version.chunk_rows(i).await {
            Ok(found) => {
                if let Ok(chunks) = &mut chunks {
                    chunks.extend(found.iter().cloned());
                }
            }
            Err(e) => chunks = Err(e),
        }
    }
    // Its rows are hints, which the hash of a chunk proves.
    drop(version.chunk_index().await);
    (rows, chunks)
}

pub fn seeds() -> Vec<Vec<u8>> {
    let with = |i: usize| {
        let number = u8::try_from(i).unwrap_or(0);
        [&[number], &MADE.files.0[&REPLACED[i]][..]].concat()
    };
    (0..REPLACED.len()).map(with).collect()
}

/// A version with one replaced table gives an error or the rows that its root and layout cover (I1).
pub fn run(input: &[u8]) -> bool {
    let Some((&which, bytes)) = input.split_first() else { return false };
    let mut files = MADE.files.clone();
    let table = REPLACED[usize::from(which) % REPLACED.len()];
    files.0.insert(table, Bytes::copy_from_slice(bytes));
    let (rows, chunks) = RUNTIME.block_on(read_all(&files, &MADE.written));
    if let Ok(rows) = &rows {
        assert!(*rows == MADE.rows, "other rows than the root and the layout cover");
    }
    // Chunk rows are hints: a wrong one costs a fetch whose hash is wrong. So other rows are no fault.
    plant::bug(rows.is_ok() && chunks.as_ref().map_or(true, |chunks| *chunks != MADE.chunks));
    rows.is_ok() && chunks.is_ok()
}
