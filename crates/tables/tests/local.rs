//! A version whose parts lie in local files: nothing is loaded twice, memory has what was used last, and
//! files that break never change an answer.

mod support;

use fletch_core::Hash;
use fletch_core::manifest::{Entry, LayoutParams, SampleRule};
use fletch_tables::{LocalTables, NewRow, PartCache, PinRow, Provenance, TablesWriter, Version};
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use support::{Files, Made, make, read_all, runtime};

fn many(n: usize) -> Vec<Entry> {
    (0..n).map(|i| Entry::file(format!("{i:08}"), 1 + i as u64, Hash::of(&i.to_le_bytes()))).collect()
}

/// A version, the files of its tables, and a directory for its parts.
struct Stage {
    made: Made,
    entries: Vec<Entry>,
    dir: tempfile::TempDir,
}

impl Stage {
    fn new(n: usize) -> Self {
        let entries = many(n);
        Stage { made: make(&entries), entries, dir: tempfile::tempdir().expect("tempdir") }
    }

    fn local(&self) -> LocalTables {
        LocalTables::open(self.dir.path(), 1 << 30, Box::new(|| Ok(()))).expect("writable")
    }

    /// Opens the version as a new process would, with tables of its own that count reads.
    async fn open(&self, cache: &PartCache) -> (Version, Arc<Files>) {
        let files = Arc::new(Files { files: self.made.files.files.clone(), ..Files::default() });
        (self.made.open_with(files.clone(), cache.clone()).await.expect("good"), files)
    }

    async fn check(&self, version: &Version, step: usize) {
        for (ordinal, e) in (0u64..).zip(&self.entries).step_by(step) {
            let found = version.find(&e.path).await.expect("good").expect("there");
            assert_eq!((found.ordinal, found.entry().to_owned()), (ordinal, e.clone()));
            assert_eq!(found.slices()[0].chunk, e.hash.expect("a file"));
        }
    }

    fn filed(&self) -> Vec<PathBuf> {
        let mut filed = Vec::new();
        for folder in fs::read_dir(self.dir.path()).expect("dir") {
            let folder = fs::read_dir(folder.expect("entry").path()).expect("folder");
            filed.extend(folder.map(|file| file.expect("entry").path()));
        }
        filed.sort();
        filed
    }
}

fn reads(files: &Files) -> u64 {
    files.reads_of_entries.load(Ordering::Relaxed)
}

#[test]
fn a_second_process_loads_nothing_and_memory_has_little() {
    let stage = Stage::new(40_000);
    runtime().block_on(async {
        let cache = PartCache::new(256 << 10).with_local(Some(stage.local()));
        let (version, files) = stage.open(&cache).await;
        let opened = reads(&files);
        stage.check(&version, 7).await;
        let parts = version.index().parts().len() as u64;
        assert_eq!(reads(&files) - opened, parts, "each part once, though memory has none of them whole");
        assert!(cache.bytes() <= 256 << 10, "{} bytes", cache.bytes());
        assert_eq!(stage.filed().len() as u64, parts);

        let cache = PartCache::new(256 << 10).with_local(Some(stage.local()));
        let (version, files) = stage.open(&cache).await;
        let opened = reads(&files);
        stage.check(&version, 7).await;
        let at = version.try_entry(39_999).expect("at hand without a wait").expect("there");
        assert_eq!(at.entry().path, "00039999");
        assert_eq!(read_all(&version).await.expect("good").len(), 40_000);
        assert_eq!(reads(&files), opened);
    });
}

#[test]
fn a_listing_reads_some_leaves_ahead() {
    let stage = Stage::new(2000);
    runtime().block_on(async {
        let cache = PartCache::new(1 << 20).with_local(Some(stage.local()));
        let (version, _) = stage.open(&cache).await;
        assert!(version.find("00000000").await.expect("good").is_some(), "writes the file");
        // Leaves have 32 rows: this page ends in the second one, and eight were read with it.
        assert_eq!(version.try_list("", 0, 40).expect("at hand").len(), 40);
        remove(&stage.filed());
        let left = version.try_list("", 40, 2000).expect("in memory");
        assert_eq!(left.len(), 9 * 32 - 40);
        let names = left.iter().map(|child| child.name.as_str());
        assert!(names.eq(stage.entries[40..9 * 32].iter().map(|e| e.path.as_str())));
        // The next name needs the file, and has it written again. A lookup reads its own leaf alone.
        assert!(version.try_list("", 9 * 32, 1).is_none());
        assert!(version.find("00001000").await.expect("good").is_some());
        assert!(version.try_entry(1001).expect("from the file").is_some());
        remove(&stage.filed());
        assert!(version.try_entry(1002).expect("in that leaf").is_some());
        assert!(version.try_entry(1030).is_none(), "in the next leaf");
    });
}

#[test]
fn a_walk_loads_the_next_part_too_and_a_lookup_does_not() {
    let stage = Stage::new(40_000);
    runtime().block_on(async {
        let (version, files) = stage.open(&PartCache::new(64 << 20)).await;
        let opened = reads(&files);
        let index = version.index();
        assert!(index.parts().len() >= 6, "{} parts", index.parts().len());
        let is_at_hand = |part| version.try_entry(index.first_ordinal(part)).is_some();
        let first = |part| &stage.entries[usize::try_from(index.first_ordinal(part)).expect("few")].path;
        // Nobody knows whether a walk that begins goes on.
        version.list("", 0, 10).await.expect("good");
        assert!(is_at_hand(0) && !is_at_hand(1));
        version.find(first(1)).await.expect("good").expect("there");
        assert!(is_at_hand(1) && !is_at_hand(2));
        version.list("", index.first_ordinal(2), 10).await.expect("good");
        assert!(is_at_hand(3) && !is_at_hand(4));
        // It comes from nowhere: the part before is not at hand.
        version.list("", index.first_ordinal(5), 10).await.expect("good");
        assert!(is_at_hand(5) && !is_at_hand(4));
        assert_eq!(reads(&files) - opened, 5, "each part once");
        assert_eq!(version.list("", 0, 50_000).await.expect("good").len(), 40_000);
        assert_eq!(reads(&files) - opened, index.parts().len() as u64);
    });
}

#[test]
fn rows_of_chunks_are_read_one_by_one() {
    let stage = Stage::new(10_000);
    runtime().block_on(async {
        let cache = PartCache::new(1 << 20).with_local(Some(stage.local()));
        let (version, _) = stage.open(&cache).await;
        for part in 0..version.index().parts().len() {
            let rows = version.chunk_rows(part).await.expect("good");
            for at in (0..rows.len()).step_by(61) {
                assert_eq!(version.chunk_row(part, at).await.expect("good").as_ref(), Some(&rows[at]));
                assert_eq!(version.try_chunk_row(part, at), Some(Some(rows[at].clone())));
            }
            assert_eq!(version.chunk_row(part, rows.len()).await.expect("good"), None);
            assert_eq!(version.chunk_row(part, rows.len() + 500).await.expect("good"), None);
            assert_eq!(version.chunk_rows(part).await.expect("from its file"), rows);
        }
        let told = version.chunk_row(version.index().parts().len(), 0).await;
        assert!(told.is_err(), "there is no such part");
    });
}

/// Hashes whose first eight bytes are few, so that rows of one key fill leaves and go on in others.
fn crowded(n: usize) -> Vec<Entry> {
    let hash = |i: usize| {
        let mut hash = Hash::of(&i.to_le_bytes());
        hash.0[..8].copy_from_slice(&Hash::of(&(i % 7).to_le_bytes()).0[..8]);
        hash
    };
    (0..n).map(|i| Entry::file(format!("{i:08}"), 1, hash(i))).collect()
}

#[test]
fn chunks_are_found_in_files_as_in_memory() {
    for entries in [many(20_000), crowded(9_000), many(3_000)] {
        let (filed, made) = (entries.len() > 4096, make(&entries));
        let stage = Stage { made, entries, dir: tempfile::tempdir().expect("tempdir") };
        runtime().block_on(async {
            let cache = PartCache::new(256 << 10).with_local(Some(stage.local()));
            let (version, _) = stage.open(&cache).await;
            let index = version.chunk_index().await.expect("good");
            assert_eq!(version.try_find_chunk(index_hash(&stage, 0)), None, "nothing is at hand yet");
            let check = async |version: &Version| {
                for i in (0..stage.entries.len()).step_by(97) {
                    let hash = index_hash(&stage, i);
                    let found = version.find_chunk(hash).await.expect("good");
                    assert_eq!(found, index.find(hash).collect::<Vec<_>>());
                    assert!(!found.is_empty() && version.try_find_chunk(hash) == Some(found));
                }
                let absent = Hash::of(b"no such chunk");
                assert_eq!(version.find_chunk(absent).await, Ok(Vec::new()));
            };
            check(&version).await;
            assert_eq!(stage.filed().len(), usize::from(filed));
            for broken in [flip, truncate, remove] {
                broken(&stage.filed());
                check(&version).await;
                let cache = PartCache::new(256 << 10).with_local(Some(stage.local()));
                check(&stage.open(&cache).await.0).await;
                assert_eq!(stage.filed().len(), usize::from(filed), "it is made again");
            }
        });
    }
}

fn index_hash(stage: &Stage, i: usize) -> Hash {
    stage.entries[i].hash.expect("a file")
}

#[test]
fn what_is_known_of_samples_is_kept_for_its_index() {
    let stage = Stage::new(10);
    runtime().block_on(async {
        let cache = PartCache::new(1 << 20).with_local(Some(stage.local()));
        let (version, _) = stage.open(&cache).await;
        assert_eq!(version.kept_samples(Some).await, None);
        let pieces = vec![b"form".to_vec(), vec![7; 100_000], vec![]];
        assert!(version.keep_samples(pieces.clone()).await);
        assert_eq!(version.kept_samples(Some).await, Some(pieces));
        flip(&stage.filed());
        assert_eq!(version.kept_samples(Some).await, None);
        let (without, _) = stage.open(&PartCache::new(1 << 20)).await;
        assert!(!without.keep_samples(vec![vec![1]]).await, "there is no directory for it");
    });
}

/// Breaks the files of a version, and returns how many.
type Break = fn(&[PathBuf]) -> u64;

fn flip(files: &[PathBuf]) -> u64 {
    for file in files {
        let mut bytes = fs::read(file).expect("read");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(file, bytes).expect("written");
    }
    files.len() as u64
}

fn truncate(files: &[PathBuf]) -> u64 {
    for file in files {
        let file = OpenOptions::new().write(true).open(file).expect("open");
        file.set_len(1000).expect("truncated");
    }
    files.len() as u64
}

fn remove(files: &[PathBuf]) -> u64 {
    files.iter().for_each(|file| fs::remove_file(file).expect("removed"));
    0
}

fn swap(files: &[PathBuf]) -> u64 {
    fs::rename(&files[0], &files[1]).expect("renamed");
    1
}

#[test]
fn a_file_that_breaks_while_it_is_in_use_changes_no_answer() {
    let stage = Stage::new(20_000);
    runtime().block_on(async {
        for broken in [flip as Break, truncate, remove, swap] {
            // The cache keeps directories and a few leaves, and the rest comes from the files.
            let cache = PartCache::new(64 << 10).with_local(Some(stage.local()));
            let (version, files) = stage.open(&cache).await;
            stage.check(&version, 50).await;
            let (all, before) = (stage.filed(), reads(&files));
            let damaged = broken(&all);
            stage.check(&version, 1).await;
            let stats = cache.local().expect("given").stats();
            assert_eq!(stats.damaged, damaged);
            assert!(reads(&files) > before, "parts were loaded again");
            assert_eq!(stage.filed(), all, "and written again");
        }
    });
}

#[test]
fn without_room_parts_stay_in_memory() {
    let stage = Stage::new(20_000);
    runtime().block_on(async {
        let local = LocalTables::open(stage.dir.path(), 1000, Box::new(|| Ok(()))).expect("writable");
        let cache = PartCache::new(64 << 20).with_local(Some(local.clone()));
        let (version, files) = stage.open(&cache).await;
        let opened = reads(&files);
        stage.check(&version, 3).await;
        let parts = version.index().parts().len() as u64;
        assert_eq!(reads(&files) - opened, parts);
        assert_eq!((local.stats().refused, local.stats().written), (parts, 0));
        assert!(stage.filed().is_empty(), "nothing is left behind");
    });
}

#[test]
fn a_directory_that_vanishes_is_made_again() {
    let stage = Stage::new(3000);
    runtime().block_on(async {
        let cache = PartCache::new(64 << 10).with_local(Some(stage.local()));
        let (version, _) = stage.open(&cache).await;
        stage.check(&version, 100).await;
        for folder in fs::read_dir(stage.dir.path()).expect("dir") {
            fs::remove_dir_all(folder.expect("entry").path()).expect("removed");
        }
        stage.check(&version, 1).await;
        assert!(!stage.filed().is_empty());
    });
}

#[test]
fn two_scopes_share_no_file() {
    let stage = Stage::new(100);
    runtime().block_on(async {
        let cache = PartCache::new(1 << 20).with_local(Some(stage.local()));
        for scope in ["one", "two"] {
            let (version, files) = stage.open(&cache.scoped(scope)).await;
            let opened = reads(&files);
            stage.check(&version, 1).await;
            assert!(reads(&files) > opened, "{scope} does not learn what another has read");
        }
        let folders = |dir: &Path| fs::read_dir(dir).expect("dir").count();
        assert_eq!(folders(stage.dir.path()), 2);
    });
}

#[test]
fn a_later_index_of_the_layout_replaces_the_rows_of_chunks() {
    let entries = many(300);
    let index = |indexed_at_ns: u64, mtime: i64| {
        let scratch = tempfile::tempdir().expect("scratch");
        let (rule, params) = (SampleRule::file(), LayoutParams::INDEX);
        let mut writer = TablesWriter::create(scratch.path(), rule, params).expect("scratch");
        for e in &entries {
            let pin = PinRow { size: e.size, mtime_ns: Some(mtime), etag: None };
            writer.push(NewRow::indexed(e.clone(), support::slices(e, params), &pin)).expect("a good entry");
        }
        let written = writer.finish(Provenance { indexed_at_ns, ..support::about() }).expect("written");
        let files = Arc::new(Files::load(&written));
        Made { written, files }
    };
    let (first, later) = (index(10, 1), index(20, 2));
    assert_eq!((first.written.root, first.written.layout), (later.written.root, later.written.layout));
    let dir = tempfile::tempdir().expect("tempdir");
    runtime().block_on(async {
        // In one process, and in the next.
        let cache = || {
            let local = LocalTables::open(dir.path(), 1 << 30, Box::new(|| Ok(()))).expect("writable");
            PartCache::new(1 << 20).with_local(Some(local))
        };
        let one = cache();
        for (made, mtime, cache) in [(&first, 1, &one), (&later, 2, &one), (&later, 2, &cache())] {
            let version = made.open_with(made.files.clone(), cache.clone()).await.expect("good");
            let row = version.chunk_row(0, 0).await.expect("good").expect("there");
            assert_eq!(row.pin.mtime_ns, Some(mtime));
        }
    });
}
