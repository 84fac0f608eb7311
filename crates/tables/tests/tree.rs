//! Written versions read back equal, and searches for paths, ordinals and directories agree with a model.
//!
//! The answers lie inside parts and at their edges, with caches of any size.

mod support;

use fletch_core::Hash;
use fletch_core::manifest::parts::ends_part;
use fletch_core::manifest::{Entry, EntryKind, LayoutParams, Sample, SampleRule};
use fletch_tables::{Child, ChildKind, LocalTables, PartCache, Resolved, TableError, TablesWriter, Version};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};
use support::{Made, make, read_all, runtime};

/// The paths of a small tree. A third of them end a part.
static POOL: LazyLock<Vec<String>> = LazyLock::new(|| {
    let dirs = ["", "a/", "a-b/", "a/b/", "a/b/c/", "b/", "b.c/", "z/y/"];
    let mut cutting = Vec::new();
    let mut plain = Vec::new();
    for i in 0..60_000u32 {
        let path = format!("{}f{i:05}", dirs[i as usize % dirs.len()]);
        match ends_part(&path) {
            true => cutting.push(path),
            false if i % 1500 < 8 => plain.push(path),
            false => {}
        }
    }
    assert!(cutting.len() > 5);
    cutting.extend(plain);
    cutting
});

#[derive(Debug, Clone)]
enum What {
    File(u64),
    Link,
    Shard(u8),
}

fn trees() -> impl Strategy<Value = Vec<Entry>> {
    let what = prop_oneof![
        4 => prop_oneof![Just(0u64), 1..5000u64, Just(9 << 20)].prop_map(What::File),
        1 => Just(What::Link),
        1 => (0u8..4).prop_map(What::Shard),
    ];
    let files = proptest::collection::btree_map(0..POOL.len(), what, 0..60);
    let empty = proptest::collection::btree_set(0u8..6, 0..4);
    (files, empty).prop_map(|(files, empty)| {
        let mut all = Vec::new();
        for (i, what) in files {
            let path = POOL[i].as_str();
            let hash = Hash::of(path.as_bytes());
            match what {
                What::File(size) => all.push(Entry::file(path, size, hash)),
                What::Link => all.push(Entry::symlink(path, "../x")),
                What::Shard(members) => {
                    all.push(Entry { sample: Sample::None, ..Entry::file(path, 4096, hash) });
                    for m in 0..members {
                        all.push(Entry {
                            path: format!("{path}\0d/{m}.jpg"),
                            kind: EntryKind::Member,
                            size: 0,
                            sample: Sample::Keyed(format!("d/{m}")),
                            ..Entry::file("", 0, hash)
                        });
                    }
                }
            }
        }
        for e in empty {
            all.push(Entry::empty_dir(format!(
                "{}e{e}",
                ["", "a/", "b/", "q/r/", "a-b/", "z/"][usize::from(e)]
            )));
        }
        all.sort_by(|x, y| x.path.cmp(&y.path));
        all
    })
}

/// The children of each directory in the order of the entries: name, ordinal, whether a directory.
fn model(entries: &[Entry]) -> BTreeMap<String, Vec<(String, u64, bool)>> {
    let mut dirs: BTreeMap<String, Vec<(String, u64, bool)>> = BTreeMap::from([(String::new(), Vec::new())]);
    for (ordinal, e) in (0u64..).zip(entries) {
        if e.kind == EntryKind::Member {
            continue;
        }
        let components: Vec<&str> = e.path.split('/').collect();
        let mut dir = String::new();
        for (i, name) in components.iter().enumerate() {
            if name.is_empty() {
                break;
            }
            let is_dir = i + 1 < components.len();
            let children = dirs.entry(dir.clone()).or_default();
            if children.last().is_none_or(|c| c.0 != *name || !is_dir) {
                children.push(((*name).to_owned(), ordinal, is_dir));
            }
            dir = if dir.is_empty() { (*name).to_owned() } else { format!("{dir}/{name}") };
            if is_dir {
                dirs.entry(dir.clone()).or_default();
            }
        }
    }
    dirs
}

/// The number of parts of a version with these entries.
fn ends(entries: &[Entry]) -> u64 {
    let last_ends = entries.last().is_none_or(|e| ends_part(&e.path));
    entries.iter().filter(|e| ends_part(&e.path)).count() as u64 + u64::from(!last_ends)
}

async fn list_all(v: &Version, dir: &str, page: usize) -> Vec<Child> {
    let mut out: Vec<Child> = Vec::new();
    let mut cookie = 0;
    loop {
        let some = v.list(dir, cookie, page).await.expect("a good version");
        let Some(last) = some.last() else { return out };
        assert!(some.len() <= page && last.next > cookie);
        cookie = last.next;
        out.extend(some);
    }
}

async fn check(made: &Made, entries: &[Entry], cache: PartCache, page: usize) {
    let v = made.open_with(made.files.clone(), cache).await.expect("a good version");
    let got = read_all(&v).await.expect("a good version");
    let want: Vec<_> = entries.iter().map(|e| (e.clone(), support::slices(e, LayoutParams::INDEX))).collect();
    assert!(got == want, "entries or slices differ");
    assert_eq!(v.manifest().entries, entries.len() as u64);
    for (ordinal, e) in (0u64..).zip(entries) {
        let found = v.find(&e.path).await.expect("good").expect("there");
        assert_eq!((found.ordinal, found.entry().path), (ordinal, e.path.as_str()));
        assert!(v.find(&format!("{}!", e.path)).await.expect("good").is_none());
        let at = v.entry(ordinal).await.expect("good").expect("there");
        assert_eq!(at.entry().to_owned(), *e);
        assert_eq!(v.lower_bound(e.path.as_bytes()).await, Ok(ordinal));
        let mut after = e.path.clone().into_bytes();
        after.push(0);
        assert_eq!(v.lower_bound(&after).await, Ok(ordinal + 1));
    }
    assert!(v.entry(entries.len() as u64).await.expect("good").is_none());
    assert_eq!(v.lower_bound(b"").await, Ok(0));

    for (dir, children) in model(entries) {
        match v.resolve(&dir).await.expect("good").expect("a directory") {
            Resolved::Dir(id) => assert_eq!(v.dir_path(id).await, Ok(Some(dir.as_str().into()))),
            Resolved::Entry(_) => panic!("{dir} is a directory"),
        }
        let listed = list_all(&v, &dir, page).await;
        let names: Vec<_> =
            listed.iter().map(|c| (c.name.clone(), c.ordinal, matches!(c.kind, ChildKind::Dir(_)))).collect();
        assert_eq!(names, children, "listing of {dir:?}");
        for c in &listed {
            let path = if dir.is_empty() { c.name.clone() } else { format!("{dir}/{}", c.name) };
            match (v.resolve(&path).await.expect("good").expect("there"), c.kind) {
                (Resolved::Entry(f), ChildKind::Entry { kind, size }) => {
                    assert_eq!((f.ordinal, f.entry().kind, f.entry().size), (c.ordinal, kind, size));
                }
                (Resolved::Dir(a), ChildKind::Dir(b)) => assert_eq!(a, b),
                _ => panic!("{path} is two things"),
            }
        }
    }
    for none in ["nope", "a/nope", "a/", "/", "f", "a-", "zz", "a/b/c/d"] {
        assert!(v.resolve(none).await.expect("good").is_none(), "{none}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn a_version_reads_like_its_model(
        entries in trees(), page in 1usize..5, keeps_nothing: bool, is_filed: bool,
    ) {
        let (made, dir) = (make(&entries), tempfile::tempdir().expect("tempdir"));
        let local = is_filed.then(|| LocalTables::open(dir.path(), 1 << 30, Box::new(|| Ok(()))));
        let local = local.transpose().expect("writable");
        let cache = PartCache::new(if keeps_nothing { 0 } else { 64 << 20 }).with_local(local.clone());
        runtime().block_on(async {
            check(&made, &entries, cache.clone(), page).await;
            // Everything is in files by now.
            check(&made, &entries, cache, page).await;
        });
        if let Some(local) = local {
            let (stats, parts) = (local.stats(), ends(&entries));
            prop_assert_eq!((stats.written, stats.damaged, stats.refused), (parts, 0, 0));
        }
    }
}

fn flat(n: usize) -> Vec<Entry> {
    let mut all: Vec<Entry> = (0..n as u64)
        .map(|i| {
            let path = format!("{:08x}.jpg", i.wrapping_mul(2_654_435_761) % (1 << 32));
            Entry::file(path.clone(), 1 + i, Hash::of(path.as_bytes()))
        })
        .collect();
    all.sort_by(|a, b| a.path.cmp(&b.path));
    all
}

#[test]
fn a_flat_directory_is_listed_by_reading_each_part_once() {
    let entries = flat(30_000);
    let made = make(&entries);
    let parts = made.files.files.len();
    assert_eq!(parts, 5);
    runtime().block_on(async {
        let v = made.open().await;
        assert!(v.index().parts().len() > 3, "the example has several parts");
        assert!(v.try_list("", 0, 100).is_none(), "nothing is in memory before it is asked for");
        let opened = made.files.reads.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(opened, 4, "manifest, layout and two footers");
        let listed = list_all(&v, "", 1000).await;
        assert!(listed.iter().map(|c| &c.name).eq(entries.iter().map(|e| &e.path)));
        let reads = made.files.reads.load(std::sync::atomic::Ordering::Relaxed) - opened;
        assert_eq!(reads, 2 * v.index().parts().len() as u64);
        let again = v.try_list("", 10, 20_000).expect("all of it is in memory now");
        assert_eq!(again.len(), 20_000);
        assert_eq!(again[0].ordinal, 10);
    });
}

#[test]
fn try_answers_what_is_in_memory_and_nothing_else() {
    let entries = flat(20_000);
    let made = make(&entries);
    runtime().block_on(async {
        let v = made.open().await;
        assert!(v.try_entry(0).is_none());
        assert!(v.try_resolve(&entries[0].path).is_none());
        v.part(0).await.expect("good");
        assert_eq!(v.try_entry(0).expect("in memory").expect("there").entry().path, entries[0].path);
        assert!(v.try_entry(entries.len() as u64 - 1).is_none());
        assert!(v.try_entry(entries.len() as u64).expect("past the end is known").is_none());
        // A page that begins in memory and goes on elsewhere is cut, not refused.
        let some = v.try_list("", 0, 20_000).expect("begins in memory");
        assert_eq!(some.len() as u32, v.index().parts()[0].entries);
    });
}

#[test]
fn the_writer_refuses_what_no_reader_would_take() {
    let scratch = tempfile::tempdir().expect("scratch");
    let mut w =
        TablesWriter::create(scratch.path(), SampleRule::file(), LayoutParams::INDEX).expect("scratch");
    let good = |path: &str| support::row(&Entry::file(path, 3, Hash::of(b"abc")), LayoutParams::INDEX);
    w.push(good("m")).expect("good");
    let mut short = good("n");
    short.slices[0].len = 2;
    let mut renamed = good("n");
    renamed.slices[0].chunk = Hash::of(b"other");
    let mut outside = good("n");
    outside.chunks[0].offset = 1;
    let mut key = good("n");
    key.chunks[0].object = Some("../secret".into());
    let mut tag = good("n");
    tag.chunks[0].pin.etag = Some("a\r\nb".into());
    for bad in [short, renamed, outside, key, tag] {
        assert!(matches!(w.push(bad), Err(TableError::Row { .. })));
    }
    assert!(matches!(w.push(good("a")), Err(TableError::Entry(_))), "order");
    assert!(matches!(w.push(good("m/x")), Err(TableError::Entry(_))), "file and directory");
    w.push(good("n")).expect("the refused rows left no trace");
    let written = w.finish(support::about()).expect("written");
    let fresh = make(&[Entry::file("m", 3, Hash::of(b"abc")), Entry::file("n", 3, Hash::of(b"abc"))]);
    assert_eq!((written.root, written.layout), (fresh.written.root, fresh.written.layout));
    assert_eq!((written.entries, written.samples, written.bytes, written.chunks), (2, 2, 6, 2));
    let zero = LayoutParams { slice_bytes: 0, ..LayoutParams::INDEX };
    assert!(TablesWriter::create(scratch.path(), SampleRule::file(), zero).is_err());
}

#[test]
fn keyed_samples_are_counted_by_runs() {
    let scratch = tempfile::tempdir().expect("scratch");
    let mut w =
        TablesWriter::create(scratch.path(), SampleRule::file(), LayoutParams::INDEX).expect("scratch");
    let samples = [
        Sample::Keyed("a".into()),
        Sample::None,
        Sample::Keyed("a".into()),
        Sample::Keyed("b".into()),
        Sample::Single,
        Sample::Keyed("b".into()),
    ];
    for (i, sample) in samples.into_iter().enumerate() {
        let e = Entry { sample, ..Entry::file(format!("{i}"), 0, Hash::of(b"")) };
        w.push(support::row(&e, LayoutParams::INDEX)).expect("good");
    }
    assert_eq!(w.finish(support::about()).expect("written").samples, 4);
}

/// Equal keys in two neighbouring shards are two samples.
#[test]
fn a_sample_ends_with_its_shard() {
    let scratch = tempfile::tempdir().expect("scratch");
    let mut w =
        TablesWriter::create(scratch.path(), SampleRule::file(), LayoutParams::INDEX).expect("scratch");
    for path in ["a.tar\u{0}1.cls", "a.tar\u{0}1.jpg", "b.tar\u{0}1.cls", "b.tar\u{0}1.jpg"] {
        let sample = Sample::Keyed("1".into());
        let e = Entry { sample, kind: EntryKind::Member, ..Entry::file(path, 0, Hash::of(b"")) };
        w.push(support::row(&e, LayoutParams::INDEX)).expect("good");
    }
    assert_eq!(w.finish(support::about()).expect("written").samples, 2);
}

#[test]
fn an_empty_version_is_a_version() {
    let made = make(&[]);
    runtime().block_on(async {
        let v = made.open().await;
        assert_eq!(v.list("", 0, 10).await, Ok(vec![]));
        assert!(matches!(v.resolve("").await, Ok(Some(Resolved::Dir(_)))));
        assert!(v.find("a").await.expect("good").is_none());
        assert!(v.chunk_index().await.expect("good").is_empty());
        assert!(v.part(0).await.is_err());
    });
    assert_eq!(Arc::strong_count(&made.files), 1, "the version let go of its source");
}
