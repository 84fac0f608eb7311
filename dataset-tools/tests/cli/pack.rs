//! `fletch pack`: the same tree gives the same root and the same chunks; chunks hold what they
//! say; what is at fault is named and nothing wrong is written.

use crate::common::{Fixture, bytes, files};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;

/// Small files of many sizes in a few directories, one long file, and what has no bytes.
pub fn tree(w: &Fixture, seed: u64) {
    for i in 0..180u64 {
        let size = 200 + (i * 7919 % 97) as usize * 300;
        w.write(&format!("d{}/f{i:03} #{i}", i % 7), bytes(seed + i, size));
    }
    w.write("long", bytes(seed + 1000, 9_000_000));
    w.write("empty", "");
    w.write("twin-1", "the same");
    w.write("twin-2", "the same");
    symlink("d1/nowhere", w.data().join("link")).expect("link");
    fs::create_dir(w.data().join("nothing")).expect("mkdir");
}

/// The chunk objects below a place: name → bytes.
pub fn chunks(w: &Fixture, place: &str) -> BTreeMap<String, Vec<u8>> {
    let dir = w.path(place).join("fletch/chunks");
    files(&dir).into_iter().map(|f| (f.clone(), fs::read(dir.join(f)).expect("chunk"))).collect()
}

/// Reads an entry by what `show` says of it.
fn read(w: &Fixture, place: &str, entry: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    for slice in entry["slices"].as_array().expect("slices") {
        let name = slice["chunk"].as_str().expect("hash");
        let path = w.path(place).join("fletch/chunks").join(&name[..2]).join(name);
        let chunk = fs::read(&path).expect("chunk");
        assert_eq!(blake3::hash(&chunk).to_hex().as_str(), name);
        let n = |key: &str| usize::try_from(slice[key].as_u64().expect("number")).expect("small");
        assert_eq!(n("chunk_offset") % 512, 0);
        out.extend_from_slice(&chunk[n("chunk_offset")..n("chunk_offset") + n("length")]);
    }
    out
}

#[test]
fn index_and_pack_of_one_tree_are_one_root_and_chunks_hold_the_files() {
    let w = Fixture::new();
    tree(&w, 1);
    let report = w.json(&["pack", "data", "--chunk-size", "512KiB"]);
    assert_eq!(report["root"].as_str(), Some(w.full_root(&[]).as_str()));
    assert_eq!(report["files_read"], 183, "empty files are not read");
    assert_eq!(report["kept"], Value::Null);
    let chunks = chunks(&w, "data");
    assert_eq!(report["chunks_written"], chunks.len());
    let written: usize = chunks.values().map(Vec::len).sum();
    assert_eq!(report["chunk_bytes_written"], written);
    assert!(chunks.len() > 3 && chunks.values().all(|c| c.len() <= 512 << 10), "{}", chunks.len());
    assert!(!files(&w.data().join("fletch")).iter().any(|f| f.contains(".fletch-tmp-")));
    for name in ["d3/f003 #3", "d0/f175 #175", "twin-1", "twin-2"] {
        let entry = w.json(&["show", "data", name]);
        assert_eq!(read(&w, "data", &entry), fs::read(w.data().join(name)).expect("file"), "{name}");
    }
    assert_eq!(w.json(&["show", "data", "long"])["slices"].as_array().map(Vec::len), Some(3));
    assert_eq!(w.json(&["show", "data"])["layout"], report["layout"]);
    let verified = w.json(&["verify", "data"]);
    assert_eq!(verified["summary"]["faults"], 0, "{verified}");
    // An index of the same tree is the layout that the pack wrote beside its own.
    let index = w.json(&["index", "data", "--parent", "auto"]);
    assert_eq!((&index["root"], &index["layout"]), (&report["root"], &report["index_layout"]));
}

#[test]
fn the_same_tree_gives_the_same_chunks() {
    let w = Fixture::new();
    tree(&w, 2);
    let mut seen = Vec::new();
    for (place, threads) in [("a", "1"), ("b", "7")] {
        let to = w.path(place);
        let to = to.to_str().expect("UTF-8");
        let r = w.json(&["pack", "data", "--to", to, "--threads", threads, "--chunk-size", "512KiB"]);
        seen.push((
            r["root"].clone(),
            r["layout"].clone(),
            chunks(&w, place).into_keys().collect::<Vec<_>>(),
        ));
    }
    assert_eq!(seen[0], seen[1]);
    // Once more into the same place: everything is there.
    let again = w.json(&["pack", "data", "--to", "a", "--chunk-size", "512KiB"]);
    assert_eq!((&again["chunks_written"], &again["layout"]), (&Value::from(0), &seen[0].1));
    assert_eq!(again["chunks_found"], seen[0].2.len());
    // Another size is another layout of the same root, and shares no group.
    let other = w.json(&["pack", "data", "--to", "a", "--chunk-size", "1MiB", "--no-tag"]);
    assert_eq!(other["root"], seen[0].0);
    assert_ne!(other["layout"], seen[0].1);
    assert_eq!(w.json(&["show", "a"])["layout"], seen[0].1, "no tag was moved");
}

#[test]
fn entries_that_cannot_be_packed_are_reported_like_by_index() {
    let w = Fixture::new();
    tree(&w, 3);
    nix::unistd::mkfifo(&w.data().join("a-pipe"), nix::sys::stat::Mode::S_IRWXU).expect("fifo");
    w.run(&["pack", "data"]).code(1).says("a-pipe").says("named pipe").says("--skip-failed");
    assert!(!w.data().join("fletch").exists());
    let ran = w.run(&["pack", "data", "--keep-going", "--json"]).code(1);
    assert_eq!(ran.json()["faults"][0]["path"], "a-pipe");
    assert!(!w.data().join("fletch").exists(), "nothing is written for nothing");
    let root = w.run(&["pack", "data", "--skip-failed"]).code(3).stdout.trim().to_owned();
    let index = w.run(&["index", "data", "--skip-failed", "--to", "elsewhere"]).code(3);
    assert_eq!(index.stdout.trim(), root);
    assert_eq!(w.json(&["show", "data"])["skipped"][0]["path"], "a-pipe");
    w.run(&["pack", "data", "--chunk-size", "1GiB"]).code(2).says("--chunk-size");
    w.run(&["pack", "data", "--skip-failed", "--to", "/proc/fletch-packs"]).says("--tables");
}

#[test]
fn verify_finds_a_damaged_a_short_and_a_missing_chunk() {
    let w = Fixture::new();
    tree(&w, 4);
    w.json(&["pack", "data", "--chunk-size", "512KiB"]);
    let dir = w.data().join("fletch/chunks");
    let names = files(&dir);
    let mut damaged = fs::read(dir.join(&names[0])).expect("chunk");
    damaged[100] ^= 1;
    fs::write(dir.join(&names[0]), &damaged).expect("write");
    fs::write(dir.join(&names[1]), &damaged[..50]).expect("write");
    fs::remove_file(dir.join(&names[2])).expect("remove");
    let ran = w.run(&["verify", "data", "--json"]).code(3);
    let doc = ran.json();
    let faults = doc["faults"].as_array().expect("list");
    let of = |fault: &str| faults.iter().filter(|f| f["fault"] == fault).count();
    assert_eq!((of("corrupt"), of("changed"), of("missing"), faults.len()), (1, 1, 1, 3), "{doc}");
    for (fault, name) in faults.iter().zip([&names[0], &names[1], &names[2]]) {
        assert_eq!(fault["path"].as_str(), Some(format!("fletch/chunks/{name}").as_str()));
        assert!(fault["why"].as_str().is_some_and(|w| w.contains("the chunk has")), "{doc}");
    }
}
