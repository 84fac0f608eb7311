//! Tar shards: members are entries, slices end where samples do, and what cannot be read by range
//! is a file like any other, with a word why.

use crate::common::{Fixture, bytes, files};
use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator};
use std::fs;
use std::process::Command;

/// Makes `data/NAME` of files `KEY.jpg` and `KEY.cls` by the system's tar; what is in it.
fn shard(w: &Fixture, name: &str, keys: std::ops::Range<u64>, jpg: usize) -> Vec<(String, Vec<u8>)> {
    let dir = tempfile::tempdir().expect("tempdir");
    let mut members = Vec::new();
    for key in keys {
        members.push((format!("{key:05}.cls"), format!("{}", key % 10).into_bytes()));
        members.push((format!("{key:05}.jpg"), bytes(key, jpg + key as usize)));
    }
    for (name, bytes) in &members {
        fs::write(dir.path().join(name), bytes).expect("write");
    }
    fs::create_dir_all(w.data()).expect("mkdir");
    let made = Command::new("tar")
        .args(["--format=gnu", "--sort=name", "-C"])
        .arg(dir.path())
        .arg("-cf")
        .arg(w.data().join(name))
        .args(members.iter().map(|(name, _)| name))
        .status()
        .expect("tar runs");
    assert!(made.success());
    members
}

#[test]
fn members_are_entries_and_a_bucket_has_the_same_root() {
    let w = Fixture::new();
    let a = shard(&w, "train-000.tar", 0..120, 100_000);
    let b = shard(&w, "train-001.tar", 120..125, 1_000);
    w.write("README", "read me");
    w.write("README.md", "read");
    // Files younger than two seconds would be read again.
    std::thread::sleep(std::time::Duration::from_millis(2_100));
    let report = w.run(&["index", "data", "--json"]).ok().says("--sample-rule stem").json();
    assert_eq!(report["entries"], 4 + a.len() + b.len());
    // One sample for each key of a shard. A shard is no sample, nor is a file beside it.
    assert_eq!(report["samples"], 120 + 5);
    let named = ["index", "data", "--to", "named", "--samples", "*.jpg", "--samples", "*.cls"];
    assert_eq!(w.json(&[&named[..], &["--samples", "README*"]].concat())["samples"], 120 + 5 + 1);
    let size = |name: &str| fs::metadata(w.data().join(name)).expect("stat").len();
    assert_eq!(report["bytes_read"], size("train-000.tar") + size("train-001.tar") + 7 + 4);
    w.run(&["verify", "data"]).ok();

    // Nothing is read again, members and all.
    let again = w.run(&["index", "data", "--parent", "auto", "--json"]).ok().json();
    assert_eq!((&again["root"], &again["bytes_read"]), (&report["root"], &0.into()));
    assert_eq!(again["layout"], report["layout"]);

    let origin = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    for name in ["README", "README.md", "train-000.tar", "train-001.tar"] {
        origin.insert(&format!("set/{name}"), fs::read(w.data().join(name)).expect("read"));
    }
    w.configure(&origin);
    let uri = format!("{}/set", origin.uri());
    let remote = w.run(&["index", &uri, "--to", "to", "--json", "--config", "fletch.toml"]).ok().json();
    assert_eq!((&remote["root"], &remote["layout"]), (&report["root"], &report["layout"]));
    assert_eq!(remote["bytes_read"], report["bytes_read"]);
    w.run(&["verify", "to", "--config", "fletch.toml"]).ok();

    // The rule can be given; then it is another version.
    let file = w.run(&["index", "data", "--sample-rule", "file", "--no-tag", "--json"]).ok().json();
    assert_eq!(file["samples"], file["entries"]);
    assert_ne!(file["root"], report["root"]);
}

#[test]
fn a_stopped_run_knows_the_members_that_it_had_read() {
    let w = Fixture::new();
    shard(&w, "a.tar", 0..10, 50_000);
    w.write("b", "b");
    fs::create_dir(w.data().join("c")).expect("mkdir");
    std::os::unix::fs::symlink("c", w.data().join("c/loop")).expect("link");
    // Files younger than two seconds are read again by whoever goes on.
    std::thread::sleep(std::time::Duration::from_millis(2_100));
    w.run(&["index", "data", "--symlinks", "error"]).code(1);
    fs::remove_file(w.data().join("c/loop")).expect("remove");
    let report = w.run(&["index", "data", "--symlinks", "error", "--json"]).ok().json();
    assert_eq!(report["bytes_read"], 0, "{report}");
    assert_eq!(report["root"].as_str(), Some(w.full_root(&[]).as_str()));
}

#[test]
fn a_file_that_is_not_a_plain_archive_is_kept_as_a_file_with_a_reason() {
    let w = Fixture::new();
    shard(&w, "good.tar", 0..3, 1_000);
    w.write("short.tar", &fs::read(w.data().join("good.tar")).expect("read")[..1_300]);
    w.write("text.tar", "this is no archive");
    w.write("zipped.tar", [0x1f, 0x8b, 8, 0, 0, 0, 0, 0]);
    w.write("empty.tar", "");
    w.write("big.tar", bytes(7, 9_000_000));
    w.write("more.tar.gz", "anything");
    w.write("more.tgz", "anything");
    let ran = w.run(&["index", "data", "--json"]).ok();
    for (name, why) in [
        ("short.tar", "ends at byte 1300"),
        ("text.tar", "not a tar archive"),
        ("zipped.tar", "compressed"),
        ("empty.tar", "not a tar archive"),
        ("big.tar", "not a tar archive"),
    ] {
        let line = ran.stderr.lines().find(|l| l.contains(name)).unwrap_or_else(|| panic!("{}", ran.stderr));
        assert!(line.contains("without members") && line.contains(why), "{line}");
    }
    assert!(ran.stderr.contains(": 2 compressed archives;"), "{}", ran.stderr);
    assert_eq!(ran.json()["entries"], 8 + 6);
    w.run(&["verify", "data"]).ok();
}

#[test]
fn a_changed_member_is_named_below_its_shard() {
    let w = Fixture::new();
    shard(&w, "a.tar", 0..6, 1_000);
    let before = w.run(&["index", "data", "--json"]).ok().json()["root"].as_str().expect("root").to_owned();
    shard(&w, "a.tar", 0..7, 1_000);
    w.run(&["index", "data"]).ok();
    let said = w.run(&["diff", &format!("data@{before}"), "data"]).ok().stdout;
    let lines: Vec<&str> = said.lines().collect();
    // Whether its size is another depends on how tar rounds it.
    assert!(lines[0].starts_with("~ a.tar ("), "{lines:?}");
    assert_eq!(lines[1..], ["+ a.tar/00006.cls", "+ a.tar/00006.jpg"]);
    let json = w.json(&["diff", &format!("data@{before}"), "data"]);
    assert_eq!(json["changes"][1]["path"], "a.tar\u{0}00006.cls", "as it is in the version");
}

#[test]
fn long_chunks_of_a_shard_have_the_hashes_of_their_groups() {
    let w = Fixture::new();
    shard(&w, "s.tar", 0..30, 300_000);
    w.index(&["--to", "tables"]);
    let slices = w.json(&["show", "data", "s.tar", "--tables", "tables"])["slices"].clone();
    let lens: Vec<u64> =
        slices.as_array().expect("slices").iter().map(|s| s["length"].as_u64().expect("a length")).collect();
    let long: Vec<u64> = lens.into_iter().filter(|len| *len >= 256 << 10).collect();
    assert!(long.len() >= 2, "{slices}");
    let place = w.path("tables");
    let file = files(&place).into_iter().find(|file| file.ends_with("groups.bin")).expect("a table");
    let lists: u64 = long.iter().map(|len| len.div_ceil(16 << 10) * 32).sum();
    let size = fs::metadata(place.join(file)).expect("a file").len();
    assert_eq!(size, 16 + 48 * long.len() as u64 + lists);
}
