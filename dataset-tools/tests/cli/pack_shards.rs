//! Packs of tar shards: members are grouped by sample, shards stay where they are, and both
//! commands name the same version.

use crate::common::{Fixture, bytes};
use crate::pack::chunks;
use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator};
use serde_json::Value;
use std::fs;
use std::process::Command;

/// Writes `data/NAME` with two members for each key.
fn shard(w: &Fixture, name: &str, keys: std::ops::Range<u64>, len: usize) {
    let dir = tempfile::tempdir().expect("tempdir");
    let mut names = Vec::new();
    for key in keys {
        for (end, bytes) in [("cls", vec![b'0' + (key % 10) as u8]), ("jpg", bytes(key, len + key as usize))]
        {
            let member = format!("{key:05}.{end}");
            fs::write(dir.path().join(&member), bytes).expect("write");
            names.push(member);
        }
    }
    let mut tar = Command::new("tar");
    tar.args(["--format=gnu", "-C"]).arg(dir.path()).arg("-cf").arg(w.data().join(name)).args(&names);
    assert!(tar.status().expect("tar runs").success());
}

fn entry(w: &Fixture, place: &str, path: &str) -> Value {
    // A member's path has a NUL, which no command line takes: it is found by its chunk.
    let root = w.json(&["show", place, path]);
    assert_eq!(root["kind"], "file", "{root}");
    root
}

#[test]
fn members_are_packed_with_their_samples_and_the_root_is_that_of_an_index() {
    let w = Fixture::new();
    shard(&w, "a.tar", 0..250, 40_000);
    shard(&w, "b.tar", 250..255, 5_000_000);
    w.write("c.bin", bytes(9, 70_000));
    std::thread::sleep(std::time::Duration::from_millis(2200));
    let index = w.json(&["index", "data", "--to", "to-index"]);
    let pack = w.json(&["pack", "data", "--to", "packs"]);
    assert_eq!((&pack["root"], &pack["index_layout"]), (&index["root"], &index["layout"]));
    assert_eq!((&pack["samples"], &pack["entries"]), (&index["samples"], &index["entries"]));
    let size = |name: &str| fs::metadata(w.data().join(name)).expect("stat").len();
    assert_eq!(pack["samples"], 255, "neither the shards nor the file beside them");
    // Shards are read for what is in them, then the members that are grouped; the rest once.
    let grouped: u64 = (0..250).map(|key| 1 + 40_000 + key).sum::<u64>() + 5;
    assert_eq!(pack["bytes_read"], size("a.tar") + size("b.tar") + grouped + 70_000);
    assert_eq!(w.json(&["verify", "packs"])["summary"]["faults"], 0);
    // Each sample lies in one chunk: the class is beside its image.
    let all = chunks(&w, "packs");
    assert!(all.len() > 1, "{}", all.len());
    for key in [3u64, 77, 249] {
        let image = bytes(key, 40_000 + key as usize);
        let held = all.values().filter(|c| c.windows(64).any(|win| win == &image[..64])).count();
        assert_eq!(held, 1, "{key}");
    }
    assert_eq!(entry(&w, "packs", "b.tar")["slices"], entry(&w, "to-index", "b.tar")["slices"]);

    // Nothing changed: shards are scanned again, nothing is written.
    let again = w.json(&["pack", "data", "--to", "packs", "--parent", "auto"]);
    assert_eq!((&again["layout"], &again["chunks_written"]), (&pack["layout"], &0.into()));
    assert_eq!(again["bytes_read"], size("a.tar") + size("b.tar"));

    // A bucket has the same chunks.
    let origin = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    for name in ["a.tar", "b.tar", "c.bin"] {
        origin.insert(&format!("set/{name}"), fs::read(w.data().join(name)).expect("file"));
    }
    w.configure(&origin);
    let uri = format!("{}/set", origin.uri());
    let remote = w.json(&["pack", &uri, "--to", "remote", "--config", "fletch.toml"]);
    assert_eq!((&remote["root"], &remote["layout"]), (&pack["root"], &pack["layout"]));
    assert_eq!(chunks(&w, "remote"), all);
}

#[test]
fn a_file_that_is_not_an_archive_is_packed_as_a_plain_file() {
    let w = Fixture::new();
    w.write("broken.tar", bytes(1, 5000));
    w.write("x.tar.gz", bytes(2, 5000));
    let pack = w.run(&["pack", "data", "--json"]).ok().says("broken.tar").says("without members").json();
    assert_eq!(pack["root"], w.json(&["index", "data", "--to", "elsewhere"])["root"]);
    assert_eq!(w.json(&["verify", "data"])["summary"]["faults"], 0);
}
