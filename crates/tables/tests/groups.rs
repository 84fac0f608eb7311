//! `groups.bin`: written with the other tables, searched by ranges, and never believed.

use async_trait::async_trait;
use bytes::Bytes;
use fletch_core::groups::GroupHashes;
use fletch_core::manifest::{Entry, LayoutParams, SampleRule, Slice};
use fletch_core::{Hash, Kind, Verified};
use fletch_tables::{
    GroupLists, NewRow, PartCache, PinRow, Provenance, SourceError, Table, TableRange, TableSource,
    TablesWriter, Version, WrittenVersion,
};
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Tables in memory. It counts the reads of `groups.bin`.
struct Tables {
    files: Mutex<HashMap<Table, Bytes>>,
    reads: Mutex<Vec<u64>>,
}

#[async_trait]
impl TableSource for Tables {
    async fn read(&self, table: Table, range: TableRange) -> Result<Bytes, SourceError> {
        let file = self.files.lock().expect("no panic").get(&table).cloned();
        let gone = |why: &str| SourceError { kind: Kind::NotFound, message: format!("{table}: {why}") };
        let file = file.ok_or_else(|| gone("there is none"))?;
        let len = file.len() as u64;
        let range = match range {
            TableRange::All => 0..len,
            TableRange::Range(range) => range,
            TableRange::Suffix(n) => len.saturating_sub(n)..len,
        };
        if range.end > len {
            return Err(gone("it is shorter"));
        }
        if table == Table::Groups {
            self.reads.lock().expect("no panic").push(range.end - range.start);
        }
        Ok(file.slice(range.start as usize..range.end as usize))
    }
}

fn content(n: u64) -> (Bytes, GroupHashes) {
    let mut bytes = vec![0; 260 << 10];
    blake3::Hasher::new().update(&n.to_le_bytes()).finalize_xof().fill(&mut bytes);
    let bytes = Bytes::from(bytes);
    let (_, groups) = Verified::check_grouped(Hash::of(&bytes), bytes.clone()).expect("right");
    (bytes, groups.expect("long enough"))
}

/// Writes a version of files of one chunk each, with the hashes of the groups of all but the last.
fn write(scratch: &Path, all: &[GroupHashes]) -> WrittenVersion {
    let lists = Arc::new(GroupLists::open(&scratch.join("lists")).expect("opened"));
    let mut writer = TablesWriter::create(scratch, SampleRule::file(), LayoutParams::INDEX).expect("scratch");
    writer.keep_groups(&lists);
    for (n, groups) in all.iter().enumerate() {
        let (hash, len) = (groups.chunk(), groups.chunk_len());
        let pin = PinRow { size: len.into(), mtime_ns: Some(1), etag: None };
        let entry = Entry::file(format!("f{n:06}"), len.into(), hash);
        let slices = vec![Slice { chunk: hash, chunk_offset: 0, len }];
        writer.push(NewRow::indexed(entry, slices, &pin)).expect("pushed");
    }
    let (last, others) = all.split_last().expect("some");
    others.iter().for_each(|groups| lists.add(groups));
    assert_eq!(writer.chunks_without(&lists), HashSet::from([last.chunk()]));
    let about = Provenance {
        created_unix_ns: 1,
        indexed_at_ns: 1,
        tool: "test".into(),
        origin: None,
        faults: Vec::new(),
    };
    writer.finish(about).expect("written")
}

async fn open(written: &WrittenVersion) -> (Version, Arc<Tables>) {
    let all = Table::ALL.into_iter().chain([Table::Groups]);
    let file = |table: Table| {
        let path = table.path(written.root, written.layout);
        let (_, file) = written.files.iter().find(|(at, _)| *at == path)?;
        Some((table, Bytes::from(std::fs::read(file).expect("read"))))
    };
    let files = Mutex::new(all.filter_map(file).collect());
    let tables = Arc::new(Tables { files, reads: Mutex::default() });
    let opened = Version::open(tables.clone(), written.root, written.layout, PartCache::new(1 << 20)).await;
    (opened.expect("opens"), tables)
}

#[tokio::test]
async fn the_hashes_of_each_chunk_are_found_in_two_reads() {
    let dir = tempfile::tempdir().expect("a directory");
    let all: Vec<GroupHashes> = (0..3000).map(|n| content(n).1).collect();
    let written = write(dir.path(), &all);
    let (version, tables) = open(&written).await;
    assert_eq!(version.layout_doc().grouped_chunks, Some(2999));
    let (last, others) = all.split_last().expect("some");
    for groups in others.iter().step_by(7) {
        let found = version.group_hashes(groups.chunk(), groups.chunk_len()).await.expect("read");
        assert_eq!(found.as_ref(), Some(groups));
    }
    let reads = std::mem::take(&mut *tables.reads.lock().expect("no panic"));
    assert_eq!(reads.len(), 2 * others.iter().step_by(7).count(), "a window of rows, and the list");
    assert_eq!(version.group_hashes(last.chunk(), last.chunk_len()).await.expect("read"), None);
    let absent = Hash::of(b"no chunk");
    assert_eq!(version.group_hashes(absent, 300_000).await.expect("read"), None);
    let wanted: HashSet<Hash> = all.iter().step_by(100).map(GroupHashes::chunk).collect();
    let mut copied = HashSet::new();
    let each = |groups: &GroupHashes| assert!(copied.insert(groups.chunk()), "once");
    version.each_group_hashes(&wanted, each).await.expect("read");
    assert_eq!(copied, wanted);
}

#[tokio::test]
async fn i1_wrong_hashes_are_an_error_and_never_an_answer() {
    let dir = tempfile::tempdir().expect("a directory");
    let all: Vec<GroupHashes> = (0..40).map(|n| content(n).1).collect();
    let written = write(dir.path(), &all);
    let (version, tables) = open(&written).await;
    let file = tables.files.lock().expect("no panic")[&Table::Groups].clone();
    let mut answers = 0;
    for at in (0..file.len()).step_by(61) {
        let mut wrong = file.to_vec();
        wrong[at] ^= 0x10;
        tables.files.lock().expect("no panic").insert(Table::Groups, wrong.into());
        for groups in &all[..39] {
            // A damaged row may hide its neighbours; a damaged list is noticed.
            if let Ok(Some(found)) = version.group_hashes(groups.chunk(), groups.chunk_len()).await {
                assert_eq!(&found, groups, "byte {at}");
                answers += 1;
            }
        }
    }
    assert!(answers > 1000, "{answers}");
    for len in [0, 10, 100, file.len() - 1] {
        tables.files.lock().expect("no panic").insert(Table::Groups, file.slice(..len));
        let found =
            futures::future::join_all(all.iter().map(|g| version.group_hashes(g.chunk(), g.chunk_len())));
        assert!(found.await.iter().any(Result::is_err), "{len}");
    }
    tables.files.lock().expect("no panic").remove(&Table::Groups);
    assert!(version.group_hashes(all[0].chunk(), all[0].chunk_len()).await.is_err());
}

#[tokio::test]
async fn tables_without_the_file_say_so() {
    let dir = tempfile::tempdir().expect("a directory");
    let one = content(1).1;
    let written = write(dir.path(), std::slice::from_ref(&one));
    let (version, tables) = open(&written).await;
    assert_eq!(version.layout_doc().grouped_chunks, None, "no list, no file");
    assert_eq!(written.files.len(), 5);
    assert_eq!(version.group_hashes(one.chunk(), one.chunk_len()).await.expect("nothing to read"), None);
    assert!(tables.reads.lock().expect("no panic").is_empty());
}

/// The second implementation of the formats reads this file too.
#[test]
fn the_format_is_the_golden_file() {
    let chunk =
        |len: usize, n: usize| Bytes::from_iter((0..len).map(|i| u8::try_from(i % n).expect("small")));
    let all: Vec<GroupHashes> = [(300_000, 251), (262_144, 241), (262_145, 239), (300_000, 233)]
        .into_iter()
        .map(|(len, n)| {
            let bytes = chunk(len, n);
            let (_, groups) = Verified::check_grouped(Hash::of(&bytes), bytes).expect("right");
            groups.expect("long enough")
        })
        .collect();
    let dir = tempfile::tempdir().expect("a directory");
    write(dir.path(), &all);
    let now = std::fs::read(dir.path().join("groups.bin")).expect("written");
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/groups.bin");
    if std::env::var_os("FLETCH_GOLDEN_WRITE").is_some() {
        std::fs::write(&golden, &now).expect("golden file");
    }
    assert!(std::fs::read(golden).expect("a golden file") == now, "the format changed");
}
