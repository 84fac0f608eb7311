//! Buckets as consoles and file systems over stores leave them: which keys are entries, and what an outage
//! does to a run.

use crate::common::{Fixture, Ran};
use fletch_testkit::{Backing, EmulatorConfig, Fault, OriginEmulator};
use std::fs;

struct Bucket {
    w: Fixture,
    origin: OriginEmulator,
    uri: String,
}

fn bucket(keys: &[(&str, &str)]) -> Bucket {
    let w = Fixture::new();
    let origin = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    for (key, content) in keys {
        origin.insert(&format!("set/{key}"), (*content).to_owned());
    }
    w.configure(&origin);
    let uri = format!("{}/set", origin.uri());
    Bucket { w, origin, uri }
}

impl Bucket {
    fn run(&self, args: &[&str]) -> Ran {
        let mut args = args.to_vec();
        args.extend(["--config", "fletch.toml"]);
        self.w.run(&args)
    }

    /// Whether the tables in `to` have the tag `latest`.
    fn tag_moved(&self) -> bool {
        self.w.path("to/fletch/tags/latest").exists()
    }
}

/// A bucket with markers of every kind, and the tree that it means.
fn with_markers() -> Bucket {
    let b = bucket(&[
        ("", ""),
        ("train/", ""),
        ("train.csv", "table"),
        ("train-old/x", "x"),
        ("train/1.jpg", "one"),
        ("stub", ""),
        ("stub.csv", "table"),
        ("stub/deep/", ""),
        ("stub/deep/2.jpg", "two"),
        ("both", ""),
        ("both/", ""),
        ("empty-folder/", ""),
        ("empty-folder.txt", "text"),
        ("a/b/", ""),
        ("empty", ""),
        ("empty-not", "x"),
        ("label", ""),
        ("label.txt", "x"),
    ]);
    for (name, content) in [
        ("train.csv", "table"),
        ("train-old/x", "x"),
        ("train/1.jpg", "one"),
        ("stub.csv", "table"),
        ("stub/deep/2.jpg", "two"),
        ("empty-folder.txt", "text"),
        ("empty", ""),
        ("empty-not", "x"),
        ("label", ""),
        ("label.txt", "x"),
    ] {
        b.w.write(name, content);
    }
    for dir in ["both", "empty-folder", "a/b"] {
        fs::create_dir_all(b.w.data().join(dir)).expect("mkdir");
    }
    b
}

#[test]
fn markers_of_folders_are_no_files_whatever_lies_between() {
    let b = with_markers();
    let want = b.w.full_root(&[]);
    let report = b.run(&["index", &b.uri, "--to", "to", "--json"]).ok().json();
    assert_eq!(report["root"].as_str(), Some(want.as_str()));
    // One page for shards, one for the objects, and a question each for `stub`, `empty` and `label`.
    assert_eq!(b.origin.counts().list, 5);
    b.run(&["verify", "to"]).ok();
    let packed = b.run(&["pack", &b.uri, "--to", "packed", "--json"]).ok().json();
    assert_eq!(packed["root"], report["root"]);
    b.run(&["verify", "packed"]).ok();

    // A bucket that worked goes on working when somebody adds a folder.
    b.origin.insert("set/train-old/", "");
    b.origin.insert("set/new/", "");
    fs::create_dir(b.w.data().join("new")).expect("mkdir");
    let again = b.run(&["index", &b.uri, "--to", "to", "--parent", "auto", "--json"]).ok().json();
    assert_eq!(again["root"].as_str(), Some(b.w.full_root(&[]).as_str()));
    assert_eq!(again["bytes_read"], 0);
}

#[test]
fn keys_that_are_no_paths_are_faults_of_these_keys() {
    let b = bucket(&[
        ("good/a", "a"),
        ("good/b", "b"),
        ("good//c", "c"),
        ("/lead", "l"),
        ("./dot", "d"),
        ("x/../up", "u"),
        ("full/", "bytes"),
        ("full/inside", "i"),
        ("e//", ""),
    ]);
    b.run(&["index", &b.uri, "--to", "to"]).code(1).says("./dot").says("--skip-failed");
    let ran = b.run(&["index", &b.uri, "--to", "to", "--keep-going", "--json"]).code(1);
    let faults = ran.json()["faults"].clone();
    let paths: Vec<&str> =
        faults.as_array().expect("a list").iter().filter_map(|fault| fault["path"].as_str()).collect();
    assert_eq!(paths, ["./dot", "/lead", "e//", "full/", "good//c", "x/../up"]);
    assert!(ran.stderr.contains("holds 5 bytes"), "{}", ran.stderr);
    // What never was an entry is no loss.
    let ran = b.run(&["index", &b.uri, "--to", "to", "--skip-failed", "--json"]).code(3);
    assert_eq!(ran.json()["entries"], 3);
    b.run(&["pack", &b.uri, "--to", "packed", "--skip-failed"]).code(3).says("good//c");
}

#[test]
fn a_key_that_a_directory_could_have_is_an_entry_of_a_bucket_too() {
    let b = bucket(&[]);
    for name in ["new\nline", "tab\there", "bell\u{7}", "del\u{7f}", "per%2Fcent", " space ", "plus+", "ü"] {
        b.origin.insert(&format!("set/{name}"), name.to_owned());
        b.w.write(name, name);
    }
    let report = b.run(&["index", &b.uri, "--to", "to", "--json"]).ok().json();
    assert_eq!(report["root"].as_str(), Some(b.w.full_root(&[]).as_str()));
    b.run(&["verify", "to"]).ok();
}

#[test]
fn an_outage_is_no_fault_of_entries() {
    let names: Vec<String> = (0..200).map(|i| format!("d/{i:03}")).collect();
    let b = bucket(&names.iter().map(|name| (name.as_str(), "x")).collect::<Vec<_>>());
    // Every object is denied, and the listing is not.
    for status in [403, 401, 400, 404, 407] {
        b.origin.clear_faults();
        b.origin.set_fault("set/d/", Fault::Error { status, rate: 1.0 }, None);
        let ran = b.run(&["index", &b.uri, "--to", "to", "--skip-failed"]);
        assert!(!matches!(ran.code, 0 | 3), "{status}: {ran:?}");
        ran.says("no object was left out");
        assert!(!b.tag_moved(), "{status}");
    }
    // Two objects of 200 are denied: one percent is left out. A third one is too many.
    b.origin.clear_faults();
    for key in ["set/d/007", "set/d/100"] {
        b.origin.set_fault(key, Fault::Error { status: 403, rate: 1.0 }, None);
    }
    let ran = b.run(&["index", &b.uri, "--to", "to", "--skip-failed", "--json"]).code(3);
    assert_eq!(ran.json()["entries"], 198);
    b.origin.set_fault("set/d/150", Fault::Error { status: 403, rate: 1.0 }, None);
    let tag = fs::read(b.w.path("to/fletch/tags/latest")).expect("a tag");
    let ran = b.run(&["index", &b.uri, "--to", "to", "--skip-failed"]).code(1);
    ran.says("3 entries of 200").says("--allow-loss 2%");
    assert_eq!(fs::read(b.w.path("to/fletch/tags/latest")).expect("a tag"), tag);
    b.run(&["index", &b.uri, "--to", "to", "--skip-failed", "--allow-loss", "2%"]).code(3);
}

#[test]
fn a_tag_does_not_move_to_a_version_that_lost_entries() {
    let b = bucket(&[("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")]);
    b.run(&["index", &b.uri, "--to", "to"]).ok();
    fs::write(b.w.path("list"), "a\nb\n").expect("written");
    let less = ["index", &b.uri, "--to", "to", "--list", "list"];
    b.run(&less).code(1).says("would lose more than 1%").says("--allow-loss 50%");
    b.run(&[&less[..], &["--allow-loss", "0.5"]].concat()).ok();
    b.run(&[&less[..], &["--no-tag"]].concat()).ok();
    b.run(&[&less[..], &["--allow-loss", "5"]].concat()).code(2).says("5% or 0.05");
}
