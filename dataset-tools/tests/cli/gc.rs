//! `fletch gc`: what is named stays, the rest goes, and no run that writes loses what it relies on.

use crate::common::{Fixture, Ran, bytes, files};
use crate::pack::chunks;
use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator};
use serde_json::Value;
use std::fs::{self, File, FileTimes};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant, SystemTime};

const ALL: &[&str] = &["--older-than", "0s"];

fn n(v: &Value) -> u64 {
    v.as_u64().unwrap_or_else(|| panic!("{v} is no number"))
}

fn gc(w: &Fixture, more: &[&str]) -> Value {
    w.json(&[&["gc", "data"], more].concat())
}

/// Packs the dataset, and returns the root.
fn pack(w: &Fixture) -> String {
    let report = w.json(&["pack", "data", "--chunk-size", "256KiB", "--parent", "auto"]);
    report["root"].as_str().expect("a root").to_owned()
}

/// Three versions with chunks of their own: one with a tag, one that nothing names, and the latest.
fn three_packs() -> (Fixture, [String; 3]) {
    let w = Fixture::new();
    let write = |seed: u64| {
        for i in 0..300u64 {
            w.write(&format!("d{}/f{i:03}", i % 5), bytes(seed * 1000 + i, 4000));
        }
    };
    let roots = [1, 2, 3].map(|seed| {
        write(seed);
        let root = pack(&w);
        if seed == 1 {
            w.run(&["tag", "data", "stable", &root]).ok();
        }
        root
    });
    (w, roots)
}

fn bytes_of(w: &Fixture) -> u64 {
    let dir = w.data().join("fletch");
    files(&dir).iter().map(|file| fs::metadata(dir.join(file)).expect("a file").len()).sum()
}

#[test]
fn a_version_that_nothing_names_goes_with_its_chunks() {
    let (w, [stable, unused, latest]) = three_packs();
    let (before, all) = (bytes_of(&w), files(&w.data().join("fletch")));
    let young = gc(&w, &[]);
    assert_eq!((n(&young["bytes"]), n(&young["kept_versions"])), (0, 3), "for a week: {young}");
    let said = w.run(&["gc", "data", "--older-than", "0s"]).ok();
    let said = said.says("no server was asked").says("nothing was deleted; the same command with --yes");
    assert!(said.stdout.contains(&unused) && said.stdout.contains("unused: 1 version and"), "{said:?}");
    let shown = gc(&w, ALL);
    assert_eq!(files(&w.data().join("fletch")), all, "nothing is deleted");
    let done = gc(&w, &["--older-than", "0s", "--yes"]);
    assert_eq!((&done["versions"], &done["bytes"]), (&shown["versions"], &shown["bytes"]));
    assert_eq!(done["versions"][0]["root"], unused.as_str());
    assert_eq!((n(&done["kept_versions"]), done["deleted"].as_bool()), (2, Some(true)));
    assert!(n(&done["chunks"]) >= 3 && n(&done["chunk_bytes"]) >= 1_200_000, "{done}");
    assert_eq!(before - bytes_of(&w), n(&done["bytes"]), "exactly what was shown is free");
    for root in [&stable, &latest] {
        let version = format!("data@{root}");
        let shown = w.json(&["show", &version]);
        assert_eq!(shown["entries"].as_u64(), Some(300));
    }
    assert_eq!(w.json(&["verify", "data"])["summary"]["faults"], 0);
    w.run(&["show", &format!("data@{unused}")]).code(1).says("there is no version");
    assert!(!w.data().join("fletch/versions").join(&unused).exists(), "no empty directory is left");
    assert!(files(&w.data().join("fletch/runs")).is_empty(), "no mark is left");
    assert_eq!(n(&gc(&w, ALL)["bytes"]), 0);
    // Without its tag, the first one goes, too. Its chunks are in no other version.
    w.run(&["tag", "data", "stable", "--delete"]).ok();
    assert_eq!(gc(&w, &["--older-than", "0s", "--yes"])["versions"][0]["root"], stable.as_str());
    let kept = chunks(&w, "data").len();
    assert_eq!(w.json(&["verify", "data"])["summary"]["faults"], 0);
    assert!(kept > 0 && kept < 10, "{kept} chunks");
}

#[test]
fn what_was_deleted_in_part_goes_at_the_next_time() {
    let (w, [_, unused, _]) = three_packs();
    let documents = files(&w.data().join("fletch/versions").join(&unused));
    for document in documents.iter().filter(|file| file.ends_with(".json")) {
        fs::remove_file(w.data().join("fletch/versions").join(&unused).join(document)).expect("remove");
    }
    let done = gc(&w, &["--older-than", "0s", "--yes"]);
    assert_eq!(done["versions"][0]["root"], unused.as_str());
    assert!(n(&done["chunks"]) >= 3, "{done}");
    assert_eq!(w.json(&["verify", "data"])["summary"]["faults"], 0);
}

#[test]
fn nothing_is_deleted_unless_all_is_known() {
    let (w, [stable, ..]) = three_packs();
    let all = files(&w.data().join("fletch"));
    let versions = w.data().join("fletch/versions").join(&stable);
    let placement = files(&versions).into_iter().find(|file| file.ends_with("chunks.parquet"));
    let damaged = files(&versions).into_iter().filter(|file| file.ends_with("chunks.parquet"));
    let whole: Vec<_> = damaged.map(|file| (versions.join(&file), fs::read(versions.join(file)))).collect();
    assert!(placement.is_some() && !whole.is_empty());
    for (path, _) in &whole {
        fs::write(path, b"damaged").expect("write");
    }
    let yes: &[&str] = &["gc", "data", "--older-than", "0s", "--yes"];
    w.run(yes).code(1).says(&format!("nothing was deleted, because version {stable} stays"));
    for (path, content) in whole {
        fs::write(path, content.expect("read")).expect("write");
    }
    fs::rename(w.data().join("fletch/tags"), w.path("tags")).expect("rename");
    w.run(yes).code(1).says("no tag names a version");
    fs::create_dir(w.data().join("fletch/tags")).expect("mkdir");
    fs::write(w.data().join("fletch/tags/latest"), b"damaged").expect("write");
    w.run(yes).code(1);
    fs::remove_dir_all(w.data().join("fletch/tags")).expect("remove");
    fs::rename(w.path("tags"), w.data().join("fletch/tags")).expect("rename");
    assert_eq!(files(&w.data().join("fletch")), all);
}

/// Lets a mark be as old as one of a run that was killed.
fn aged(w: &Fixture, mark: &str) {
    let file = File::options().write(true).open(w.data().join("fletch/runs").join(mark)).expect("a mark");
    let at = SystemTime::now() - Duration::from_secs(1900);
    file.set_times(FileTimes::new().set_modified(at)).expect("times");
}

fn mark(w: &Fixture, name: &str) {
    fs::create_dir_all(w.data().join("fletch/runs")).expect("mkdir");
    fs::write(w.data().join("fletch/runs").join(name), b"{}").expect("write");
}

#[test]
fn a_run_that_writes_and_a_collection_wait_for_each_other() {
    let (w, _) = three_packs();
    let yes: &[&str] = &["gc", "data", "--older-than", "0s", "--yes"];
    mark(&w, "0123456789ab");
    w.run(yes).code(1).says("a run that writes (fletch/runs/0123456789ab) is at work");
    mark(&w, "gc");
    w.run(yes).code(1).says("another `fletch gc` is at work");
    assert_eq!(files(&w.data().join("fletch/runs")), ["0123456789ab", "gc"], "marks of others stay");
    let mut waits =
        w.command(&["tag", "data", "held", "latest"]).stderr(Stdio::piped()).spawn().expect("spawn");
    std::thread::sleep(Duration::from_millis(1500));
    assert!(waits.try_wait().expect("wait").is_none(), "it waits for the collection");
    fs::remove_file(w.data().join("fletch/runs/gc")).expect("remove");
    Ran::from(waits.wait_with_output().expect("wait")).ok().says("waiting for `fletch gc`");
    mark(&w, "gc");
    for name in ["0123456789ab", "gc"] {
        aged(&w, name);
    }
    w.write("new", bytes(1, 100));
    pack(&w);
    w.run(yes).ok();
    assert_eq!(w.json(&["verify", "data"])["summary"]["faults"], 0);
}

fn started(w: &Fixture, words: &[&str]) -> Child {
    w.command(words).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("spawn")
}

/// Packs and collections of one bucket at the same time: no pack loses a chunk.
#[test]
fn a_pack_beside_collections_loses_nothing() {
    let w = Fixture::new();
    let origin = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    w.configure(&origin);
    let tables = format!("{}/packs", origin.uri());
    let (mut collected, mut waited) = (0, 0);
    let begun = Instant::now();
    for round in 0..6u64 {
        // Every second content comes again, so a pack finds chunks that no version has any more.
        for i in 0..120u64 {
            w.write(&format!("f{i:03}"), bytes(round % 2 * 1000 + i, 4000));
        }
        let words: Vec<&str> =
            "pack data --chunk-size 256KiB --config fletch.toml --tables".split(' ').collect();
        let mut pack = started(&w, &[&words[..], &[tables.as_str()]].concat());
        while pack.try_wait().expect("wait").is_none() {
            let gc =
                w.run(&["gc", &tables, "--older-than", "0s", "--yes", "--config", "fletch.toml", "--json"]);
            match gc.code {
                0 => collected += n(&gc.json()["bytes"]),
                1 => waited += 1,
                _ => panic!("{gc:?}"),
            }
        }
        Ran::from(pack.wait_with_output().expect("wait")).ok();
        let verified = w.json(&["verify", &tables, "--config", "fletch.toml"]);
        assert_eq!(verified["summary"]["faults"], 0, "round {round}: {verified}");
    }
    println!("{collected} bytes collected, {waited} gave way, in {:.1} s", begun.elapsed().as_secs_f64());
    let last = w.json(&["gc", &tables, "--older-than", "0s", "--yes", "--config", "fletch.toml"]);
    assert!(collected + n(&last["bytes"]) > 0, "{last}");
    let verified = w.json(&["verify", &tables, "--config", "fletch.toml"]);
    assert_eq!(verified["summary"]["faults"], 0, "{verified}");
}
