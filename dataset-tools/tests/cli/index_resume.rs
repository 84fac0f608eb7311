//! A run that was killed goes on where it was; two runs of one dataset exclude each other.

use crate::common::{Fixture, Ran, bytes, signal};
use nix::sys::signal::Signal;
use std::fs;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const FILES: u64 = 12_000;
const FILE_BYTES: usize = 6000;

/// A dataset old enough for the 2 s rule.
fn world() -> Fixture {
    let w = Fixture::new();
    let pool = bytes(7, FILE_BYTES + FILES as usize);
    for i in 0..FILES {
        w.write(&format!("d{:02}/f{i:05}", i / 500), &pool[i as usize..i as usize + FILE_BYTES]);
    }
    std::thread::sleep(Duration::from_millis(2200));
    w
}

/// More than one batch of the journal, so that the first one is whole: a write that `kill -9` cuts is torn.
const JOURNALLED_BYTES: u64 = 320 << 10;

/// Starts a run and returns when it has journalled something and is still at it.
fn start(w: &Fixture) -> Child {
    for _ in 0..10 {
        let mut child = w
            .command(&["index", "data", "--threads", "1", "--quiet"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("spawn");
        let began = Instant::now();
        loop {
            let journalled = crate::common::files(&w.path("state")).iter().any(|f| {
                f.contains("new/")
                    && fs::metadata(w.path("state").join(f)).is_ok_and(|m| m.len() > JOURNALLED_BYTES)
            });
            if child.try_wait().expect("wait").is_some() {
                break;
            }
            if journalled {
                return child;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "no journal");
            std::thread::sleep(Duration::from_micros(300));
        }
        // It was too fast for us: once more, from nothing.
        let _gone = fs::remove_dir_all(w.path("state"));
    }
    panic!("the run ends before it can be stopped");
}

fn resumes(w: &Fixture) {
    let again = w.run(&["index", "data", "--json"]).ok().says("resuming:");
    let report = again.json();
    let total = FILES * FILE_BYTES as u64;
    let (read, reused) = (&report["bytes_read"], &report["bytes_reused"]);
    assert!(reused.as_u64().expect("number") > 0 && read.as_u64().expect("number") < total, "{report}");
    assert_eq!(read.as_u64().expect("number") + reused.as_u64().expect("number"), total);
    assert_eq!(report["root"].as_str(), Some(w.full_root(&[]).as_str()));
    assert_eq!(crate::common::files(&w.path("state/index")), Vec::<String>::new(), "nothing is left");
}

#[test]
fn after_kill_nine_only_the_rest_is_read() {
    let w = world();
    let mut child = start(&w);
    child.kill().expect("kill");
    child.wait().expect("wait");
    assert!(!w.data().join("fletch/tags").exists(), "nothing was published");
    resumes(&w);
}

#[test]
fn after_ctrl_c_it_says_how_to_go_on_and_does() {
    let w = world();
    let child = start(&w);
    signal(&child, Signal::SIGSTOP);
    // Meanwhile nobody else may index it.
    let other = w.run(&["index", "data"]);
    signal(&child, Signal::SIGINT);
    signal(&child, Signal::SIGCONT);
    other.code(1).says("another run is indexing the same dataset");
    let ran = Ran::from(child.wait_with_output().expect("wait")).code(130);
    assert!(ran.stderr.contains("run the same command again to go on"), "{}", ran.stderr);
    assert_eq!(ran.stdout, "");
    assert_eq!(crate::common::files(&w.path("state")).iter().filter(|f| f.contains("scratch")).count(), 0);
    resumes(&w);
}
