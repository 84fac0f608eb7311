//! `--parent` reads only what changed and arrives at the root of a full run.

use crate::common::{Fixture, bytes};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::fs::{self, File, FileTimes};
use std::path::Path;
use std::time::Duration;

/// What may happen to a tree between two runs.
#[derive(Debug, Clone)]
enum Edit {
    Add(u8, u16),
    Delete(u8),
    Rename(u8, u8),
    Swap(u8, u8),
    Touch(u8),
    Rewrite(u8),
    ToDir(u8),
    ToLink(u8),
    DirRename,
}

fn edit() -> impl Strategy<Value = Edit> {
    prop_oneof![
        (any::<u8>(), any::<u16>()).prop_map(|(a, n)| Edit::Add(a, n)),
        any::<u8>().prop_map(Edit::Delete),
        any::<(u8, u8)>().prop_map(|(a, b)| Edit::Rename(a, b)),
        any::<(u8, u8)>().prop_map(|(a, b)| Edit::Swap(a, b)),
        any::<u8>().prop_map(Edit::Touch),
        any::<u8>().prop_map(Edit::Rewrite),
        any::<u8>().prop_map(Edit::ToDir),
        any::<u8>().prop_map(Edit::ToLink),
        Just(Edit::DirRename),
    ]
}

/// Identity of a file for the rule: what the parent compares.
fn looks(dir: &Path) -> BTreeMap<String, (u64, i64, i64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let mut out = BTreeMap::new();
    for rel in crate::common::files(dir) {
        if rel.starts_with("fletch/") {
            continue;
        }
        let m = fs::symlink_metadata(dir.join(&rel)).expect("stat");
        if m.is_file() {
            let ns = |s: i64, n: i64| s * 1_000_000_000 + n;
            out.insert(
                rel,
                (m.ino(), ns(m.mtime(), m.mtime_nsec()), ns(m.ctime(), m.ctime_nsec()), m.size()),
            );
        }
    }
    out
}

fn apply(dir: &Path, edit: &Edit, seed: u64) {
    let files: Vec<String> = looks(dir).into_keys().collect();
    let pick = |i: u8| files.get(usize::from(i) % files.len().max(1)).map(|f| dir.join(f));
    match edit {
        Edit::Add(a, n) => {
            let path = dir.join(format!("new{}/{a}", a % 3));
            fs::create_dir_all(path.parent().expect("parent")).expect("mkdir");
            if !path.is_dir() {
                // A link of an earlier edit is replaced, not written through.
                let _gone = fs::remove_file(&path);
                fs::write(path, bytes(seed, usize::from(*n))).expect("write");
            }
        }
        Edit::Delete(i) => {
            if let Some(p) = pick(*i) {
                fs::remove_file(p).expect("rm");
            }
        }
        Edit::Rename(a, b) => {
            // A file does not replace a directory that an earlier edit made.
            if let (Some(p), Some(to)) = (pick(*a), pick(*b).map(|q| q.with_extension("moved")))
                && !to.is_dir()
            {
                fs::rename(p, to).expect("mv");
            }
        }
        // Two files of equal size and time change places: only the inode tells.
        Edit::Swap(a, b) => {
            if let (Some(p), Some(q)) = (pick(*a), pick(*b))
                && p != q
            {
                let tmp = dir.join("swap-tmp");
                fs::rename(&p, &tmp).expect("mv");
                fs::rename(&q, &p).expect("mv");
                fs::rename(&tmp, &q).expect("mv");
            }
        }
        Edit::Touch(i) => {
            if let Some(p) = pick(*i) {
                File::options()
                    .write(true)
                    .open(p)
                    .expect("open")
                    .set_modified(std::time::SystemTime::now())
                    .expect("touch");
            }
        }
        // Other bytes of the same length, with the modification time put back.
        Edit::Rewrite(i) => {
            if let Some(p) = pick(*i) {
                let m = fs::metadata(&p).expect("stat");
                fs::write(&p, bytes(seed ^ 0x5555, usize::try_from(m.len()).expect("small"))).expect("write");
                let times = FileTimes::new().set_modified(m.modified().expect("mtime"));
                File::options().write(true).open(&p).expect("open").set_times(times).expect("times");
            }
        }
        Edit::ToDir(i) => {
            if let Some(p) = pick(*i) {
                fs::remove_file(&p).expect("rm");
                fs::create_dir(&p).expect("mkdir");
                if i % 2 == 0 {
                    fs::write(p.join("inner"), bytes(seed, 10)).expect("write");
                }
            }
        }
        Edit::ToLink(i) => {
            if let Some(p) = pick(*i) {
                fs::remove_file(&p).expect("rm");
                std::os::unix::fs::symlink("anywhere", p).expect("link");
            }
        }
        Edit::DirRename => {
            if dir.join("d1").is_dir() && !dir.join("d1-moved").exists() {
                fs::rename(dir.join("d1"), dir.join("d1-moved")).expect("mv");
            }
        }
    }
}

/// Makes the run that wrote these tables look later, as if files had been old enough for the
/// 2 s rule; no hash covers this time.
fn age(w: &Fixture) {
    for file in crate::common::files(&w.data().join("fletch")) {
        if file.ends_with("layout.json") {
            let path = w.data().join("fletch").join(file);
            let mut doc: serde_json::Value =
                serde_json::from_slice(&fs::read(&path).expect("read")).expect("json");
            doc["indexed_at_ns"] = (doc["indexed_at_ns"].as_u64().expect("number") + 10_000_000_000).into();
            fs::write(&path, doc.to_string()).expect("write");
        }
    }
}

/// Longer than the kernel's step of file times.
fn tick() {
    std::thread::sleep(Duration::from_millis(25));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 40, ..ProptestConfig::default() })]
    #[test]
    fn the_root_is_that_of_a_full_run_and_only_changes_are_read(
        edits in prop::collection::vec(edit(), 0..7),
        again in prop::collection::vec(edit(), 0..4),
        seed: u64,
    ) {
        let w = Fixture::new();
        for d in 0..3u64 {
            for i in 0..5u64 {
                // Equal sizes in a directory, and one file that is cut into slices.
                let size = if (d, i) == (2, 0) { 4_300_000 } else { 1000 * (d as usize + 1) };
                w.write(&format!("d{d}/f{i}"), bytes(seed ^ (d * 10 + i), size));
            }
        }
        w.write("empty-file", "");
        tick();
        w.index(&[]);
        for (round, edits) in [edits, again].iter().enumerate() {
            age(&w);
            tick();
            let before = looks(&w.data());
            for (i, e) in edits.iter().enumerate() {
                apply(&w.data(), e, seed.wrapping_add((round * 100 + i) as u64));
            }
            let after = looks(&w.data());
            let changed = after.iter().filter(|(p, l)| before.get(*p) != Some(l));
            let (mut files, mut size) = (0, 0);
            for (_, l) in changed {
                files += u64::from(l.3 > 0);
                size += l.3;
            }
            tick();
            let report = w.json(&["index", "data", "--parent", "latest", "--allow-loss", "100%"]);
            let full = w.full_root(&[]);
            prop_assert_eq!(report["root"].as_str(), Some(full.as_str()));
            prop_assert_eq!(report["bytes_read"].as_u64(), Some(size), "{:?}", edits);
            // Empty files have no row with a pin, and are looked at each time.
            let empty = after.values().filter(|l| l.3 == 0).count() as u64;
            prop_assert_eq!(report["files_read"].as_u64(), Some(files + empty));
            w.run(&["verify", "data"]).ok();
        }
    }
}

#[test]
fn young_files_are_read_again_and_auto_needs_no_parent() {
    let w = Fixture::new();
    w.write("f", "x");
    let first = w.json(&["index", "data", "--parent", "auto"]);
    assert_eq!(first["files_read"], 1);
    // WrittenVersion within the 2 s before the first run: its time would not tell a later change.
    let second = w.json(&["index", "data", "--parent", "auto"]);
    assert_eq!((&second["files_read"], &second["root"]), (&1.into(), &first["root"]));
    std::thread::sleep(Duration::from_millis(2200));
    assert_eq!(w.json(&["index", "data", "--parent", "auto"])["files_read"], 1);
    let root = first["root"].as_str().expect("root");
    let third = w.json(&["index", "data", "--parent", root]);
    assert_eq!((&third["files_read"], &third["files_reused"]), (&0.into(), &1.into()));
}

/// A pack without the index layout beside it proves no file unchanged.
#[test]
fn an_automatic_parent_without_pins_is_left_out() {
    let w = Fixture::new();
    w.write("a", "a");
    let pack = w.json(&["pack", "data"]);
    let (root, index) =
        (pack["root"].as_str().expect("root"), pack["index_layout"].as_str().expect("layout"));
    fs::remove_dir_all(w.data().join(format!("fletch/versions/{root}/layouts/{index}"))).expect("rm");
    let ran = w.run(&["index", "data", "--parent", "auto"]).ok().says("every file is read");
    assert_eq!(ran.stdout.trim(), root);
    let other = w.json(&["pack", "data", "--tag", "packed"]);
    fs::remove_dir_all(w.data().join(format!("fletch/versions/{root}/layouts/{index}"))).expect("rm");
    assert_eq!(other["root"], root);
    w.run(&["index", "data", "--parent", "packed"]).code(1).says("no layout that `index` makes");
}
