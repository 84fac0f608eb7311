//! Packs that follow other runs: a stopped one, a parent; and packs of a bucket.

use crate::common::{Fixture, Ran, bytes, files, signal};
use crate::pack::{chunks, tree};
use fletch_testkit::{Backing, EmulatorConfig, Fault, OriginEmulator};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::fs;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const SMALL: &[&str] = &["--chunk-size", "256KiB"];

fn n(v: &Value) -> u64 {
    v.as_u64().unwrap_or_else(|| panic!("{v} is no number"))
}

fn pack(w: &Fixture, more: &[&str]) -> Value {
    let mut args = vec!["pack", "data"];
    args.extend(SMALL);
    args.extend(more);
    w.json(&args)
}

/// The layout of a run that knows nothing from before.
fn canonical(w: &Fixture) -> (Value, Value) {
    let fresh = tempfile::tempdir().expect("tempdir");
    let at = |rel: &str| fresh.path().join(rel).to_str().expect("UTF-8").to_owned();
    let r = pack(w, &["--to", &at("to"), "--state-dir", &at("state")]);
    (r["root"].clone(), r["layout"].clone())
}

/// A tree old enough to be believed unchanged.
fn old_tree(files: u64) -> Fixture {
    let w = Fixture::new();
    for i in 0..files {
        w.write(&format!("d{:02}/f{i:05}", i % 20), bytes(i, 3000 + (i % 50) as usize * 100));
    }
    std::thread::sleep(Duration::from_millis(2200));
    w
}

/// Starts a pack and returns when it has written some chunks and is still at it.
fn start(w: &Fixture) -> Child {
    for _ in 0..10 {
        let mut args = vec!["pack", "data", "--threads", "1", "--quiet"];
        args.extend(SMALL);
        let mut c = w.command(&args);
        let mut child = c.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("spawn");
        let began = Instant::now();
        loop {
            if child.try_wait().expect("wait").is_some() {
                break;
            }
            let made: u64 = files(&w.path("state"))
                .iter()
                .filter(|f| f.contains("made/"))
                .map(|f| fs::metadata(w.path("state").join(f)).map_or(0, |m| m.len()))
                .sum();
            if made > 3000 {
                return child;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "no journal");
            std::thread::sleep(Duration::from_micros(300));
        }
        // It was too fast for us: once more, from nothing.
        let _gone = fs::remove_dir_all(w.path("state"));
        let _gone = fs::remove_dir_all(w.data().join("fletch"));
    }
    panic!("the run ends before it can be stopped");
}

fn resumes(w: &Fixture, before: usize) {
    assert!(before > 0);
    assert!(!w.data().join("fletch/versions").exists(), "nothing was published");
    let mut args = vec!["pack", "data", "--json"];
    args.extend(SMALL);
    let report = w.run(&args).ok().says("resuming:").json();
    assert!(n(&report["chunks_found"]) > 0, "{report}");
    let (read, reused) = (n(&report["files_read"]), n(&report["files_reused"]));
    assert!(read > 0 && reused > 0 && read + reused == 1500, "{report}");
    let all = chunks(w, "data").len() as u64;
    assert_eq!(n(&report["chunks_written"]) + n(&report["chunks_found"]), all, "{report}");
    assert_eq!((report["root"].clone(), report["layout"].clone()), canonical(w));
    assert_eq!(files(&w.path("state/index")), Vec::<String>::new(), "nothing is left");
    assert_eq!(w.json(&["verify", "data"])["summary"]["faults"], 0);
}

#[test]
fn after_kill_nine_chunks_that_were_written_are_not_written_again() {
    let w = old_tree(1500);
    let mut child = start(&w);
    child.kill().expect("kill");
    child.wait().expect("wait");
    resumes(&w, chunks(&w, "data").len());
}

#[test]
fn after_ctrl_c_a_pack_says_how_to_go_on_and_does() {
    let w = old_tree(1500);
    let child = start(&w);
    signal(&child, Signal::SIGSTOP);
    let other = w.run(&["pack", "data", "--chunk-size", "256KiB"]);
    signal(&child, Signal::SIGINT);
    signal(&child, Signal::SIGCONT);
    other.code(1).says("another run");
    let ran = Ran::from(child.wait_with_output().expect("wait")).code(130);
    assert!(ran.stderr.contains("run the same command again to go on"), "{}", ran.stderr);
    assert_eq!(files(&w.path("state")).iter().filter(|f| f.contains("scratch")).count(), 0);
    resumes(&w, chunks(&w, "data").len());
}

#[test]
fn a_parent_writes_only_what_changed() {
    let w = old_tree(1500);
    let first = pack(&w, &[]);
    let before = chunks(&w, "data");
    // 1 % of the files: some changed, some new, one gone.
    for i in 0..8 {
        w.write(&format!("d{:02}/f{:05}", i * 100 % 20, i * 100), bytes(90_000 + i, 5000));
    }
    for i in 0..6 {
        w.write(&format!("new/f{i}"), bytes(95_000 + i, 4000));
    }
    fs::remove_file(w.data().join("d07/f00007")).expect("remove");
    let second = pack(&w, &["--parent", "latest"]);
    assert_eq!(second["root"], canonical(&w).0);
    let kept = &second["kept"];
    assert!(n(&kept["chunks"]) > 0 && n(&kept["samples"]) == 1505, "{second}");
    assert!(n(&kept["samples_outside"]) * 100 <= n(&kept["samples"]) * 3, "{second}");
    // Far from everything is written: what lies outside, and groups written anew for the rule.
    let written = n(&second["chunk_bytes_written"]);
    let total: usize = before.values().map(Vec::len).sum();
    assert!(written * 2 < total as u64, "{written} of {total}: {second}");
    assert_eq!(w.json(&["verify", "data"])["summary"]["faults"], 0);
    // A chunk of the parent that is gone is not leaned on.
    let gone = before.keys().next().expect("chunk");
    fs::remove_file(w.data().join("fletch/chunks").join(gone)).expect("remove");
    let third = pack(&w, &["--parent", first["root"].as_str().expect("root")]);
    assert_eq!(third["root"], second["root"]);
    assert_eq!(w.json(&["verify", "data"])["summary"]["faults"], 0, "{third}");
    // Compacted it is what everybody else has.
    let compact = pack(&w, &["--parent", "latest", "--compact"]);
    assert_eq!((compact["root"].clone(), compact["layout"].clone()), canonical(&w));
    assert_eq!(compact["kept"]["samples_outside"], 0);
    w.run(&["pack", "data", "--compact"]).code(2);
}

#[test]
fn nothing_changed_reads_and_writes_nothing_and_an_index_is_parent_enough() {
    let w = old_tree(300);
    let index = w.json(&["index", "data"]);
    let first = pack(&w, &["--parent", "auto"]);
    assert_eq!((&first["root"], &first["files_read"]), (&index["root"], &Value::from(300)));
    let again = pack(&w, &["--parent", "auto"]);
    assert_eq!((&again["root"], &again["layout"]), (&first["root"], &first["layout"]));
    assert_eq!((n(&again["files_read"]), n(&again["chunks_written"]), n(&again["bytes_read"])), (0, 0, 0));
    assert_eq!(again["files_reused"], 300);
}

#[test]
fn a_bucket_has_the_chunks_of_the_same_tree() {
    let w = Fixture::new();
    tree(&w, 5);
    fs::remove_file(w.data().join("link")).expect("remove");
    fs::remove_dir(w.data().join("nothing")).expect("remove");
    let origin = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    for path in files(&w.data()) {
        origin.insert(&format!("set/{path}"), fs::read(w.data().join(&path)).expect("file"));
    }
    let prefix = origin.uri();
    w.configure(&origin);
    let (set, to) = (format!("{prefix}/set"), format!("{prefix}/packs"));
    let mut args = vec!["pack", &set, "--to", &to, "--config", "fletch.toml"];
    args.extend(SMALL);
    let report = w.json(&args);
    let local = pack(&w, &[]);
    assert_eq!((&report["root"], &report["layout"]), (&local["root"], &local["layout"]));
    for (key, gets) in origin.counts().gets {
        let size = origin.object(&key).expect("object").len() as u64;
        if key.starts_with("set/") {
            assert_eq!(gets, size.div_ceil(4 << 20), "{key} is read once");
        }
    }
    for (name, bytes) in chunks(&w, "data") {
        assert_eq!(origin.object(&format!("packs/fletch/chunks/{name}")).expect("chunk"), bytes);
    }
    let target = format!("{to}@latest");
    w.run(&["verify", &target, "--config", "fletch.toml"]).ok();
}

#[test]
fn a_file_that_changes_under_the_run_is_named_and_no_chunk_is_wrong() {
    let w = Fixture::new();
    tree(&w, 6);
    fs::remove_file(w.data().join("link")).expect("remove");
    let origin = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    for path in files(&w.data()) {
        origin.insert(&format!("set/{path}"), fs::read(w.data().join(&path)).expect("file"));
    }
    let prefix = origin.uri();
    w.configure(&origin);
    let name = "d3/f003 #3";
    origin.set_fault(&format!("set/{name}"), Fault::ChangeEtag, None);
    let set = format!("{prefix}/set");
    let mut args = vec!["pack", &set, "--config", "fletch.toml"];
    args.extend(SMALL);
    w.run(&args).code(1).says(name).says("changed");
    assert!(origin.object("set/fletch/tags/latest").is_none());
}
