//! Mounts of drafts: files after the listing, and the version once all was read.

use crate::content;
use fletch_testkit::{Backing, EmulatorConfig, Latency, OriginEmulator};
use fletch_tests::fixture::index;
use fletch_tests::require::{Need, have};
use fletch_tests::user::{User, shows};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[test]
fn a_mount_of_a_draft_shows_files_at_once_and_a_second_one_what_was_sealed() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let user = User::new("one");
    let all = user.dataset("photos", 40);
    let first = user.say(&["mount", "photos", "mnt"]).ok().in_plain_words();
    assert!(!first.stderr.contains("reads "), "{first:?}");
    let show = |user: &User| -> Value {
        serde_json::from_str(&user.say(&["show", "photos", "--json"]).ok().stdout).expect("JSON")
    };
    assert_eq!(show(&user)["layout_kind"], "draft");
    shows(&user.path("mnt"), &all);
    // All was read, so the server seals it.
    let until = Instant::now() + Duration::from_secs(30);
    while show(&user)["layout_kind"] == "draft" {
        assert!(Instant::now() < until, "{}", show(&user));
        std::thread::sleep(Duration::from_millis(200));
    }
    let direct = index(&user.path("photos"), &user.path("direct"), &[]);
    assert_eq!(show(&user)["root"], direct.trim());
    user.say(&["mount", "photos", "mnt2"]).ok();
    shows(&user.path("mnt2"), &all);
    // The mount of the draft goes on, and the same command says that there is a version.
    shows(&user.path("mnt"), &all);
    let same = user.say(&["mount", "photos", "mnt"]).ok();
    assert!(same.stderr.contains("shows a draft of photos"), "{same:?}");
    user.say(&["down"]).ok();
}

/// One pass through a mount, the seal, and a second mount with a pass: every byte is fetched once in all.
#[test]
fn a_pass_through_a_mount_is_the_only_reading_of_a_bucket() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let all = content();
    let emulator = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    for (path, bytes) in &all {
        emulator.insert(&format!("set/{path}"), bytes.clone());
    }
    let mut user = User::new("one");
    user.has_keys_of(emulator.endpoint());
    let uri = format!("{}/set", emulator.uri());
    user.mount(&uri, "mnt", &[]);
    assert_eq!(emulator.counts().bytes_sent, 0, "nothing is read before a program reads");
    let files: BTreeMap<PathBuf, Vec<u8>> = all.iter().map(|(p, b)| (p.into(), b.clone())).collect();
    shows(&user.path("mnt"), &files);
    let until = Instant::now() + Duration::from_secs(30);
    let show = || -> Value {
        serde_json::from_str(&user.say(&["show", "set", "--json"]).ok().stdout).expect("JSON")
    };
    while show()["layout_kind"] == "draft" {
        assert!(Instant::now() < until, "{}", show());
        std::thread::sleep(Duration::from_millis(200));
    }
    user.mount(&uri, "mnt2", &[]);
    shows(&user.path("mnt2"), &files);
    let total: usize = all.values().map(Vec::len).sum();
    assert_eq!(emulator.counts().bytes_sent, total as u64);
    let direct = user.say(&["index", &uri, "--tables", &user.text("direct")]).ok();
    assert_eq!(show()["root"], direct.stdout.trim());
    user.say(&["down"]).ok();
}

#[test]
fn a_mount_with_index_reads_everything_first() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let user = User::new("one");
    let all = user.dataset("photos", 10);
    let show = |user: &User| -> Value {
        serde_json::from_str(&user.say(&["show", "photos", "--json"]).ok().stdout).expect("JSON")
    };
    user.say(&["mount", "--index", "photos", "mnt"]).ok();
    assert_eq!(show(&user)["layout_kind"], "index");
    shows(&user.path("mnt"), &all);
    // Of a draft it makes a version.
    let other = user.dataset("other", 10);
    user.say(&["mount", "other", "mnt2"]).ok();
    user.say(&["mount", "--index", "other", "mnt3"]).ok();
    shows(&user.path("mnt3"), &other);
    let other: Value =
        serde_json::from_str(&user.say(&["show", "other", "--json"]).ok().stdout).expect("JSON");
    assert_eq!(other["layout_kind"], "index");
    user.say(&["down"]).ok();
}

#[test]
fn a_dry_run_counts_names_bytes_and_requests_and_leaves_nothing_behind() {
    let emulator =
        OriginEmulator::start(EmulatorConfig::default(), Backing::Generated { keys: 12_000, bytes: 100 });
    let mut user = User::new("one");
    user.has_keys_of(emulator.endpoint());
    let uri = format!("{}/set", emulator.uri());
    let told = user.say(&["mount", &uri, "mnt", "--dry-run"]).ok().in_plain_words();
    assert!(told.stdout.contains("12000 files, 1.14 MiB; "), "{told:?}");
    let counts = emulator.counts();
    assert_eq!((counts.get, counts.requests()), (0, counts.list));
    assert!(!user.path("mnt").exists());
    let json = user.say(&["mount", &uri, "mnt", "--dry-run", "--json"]).ok().stdout;
    let json: Value = serde_json::from_str(&json).expect("JSON");
    let requests = emulator.counts().list - counts.list;
    assert_eq!((&json["files"], &json["bytes"]), (&12_000.into(), &1_200_000.into()), "{json}");
    assert_eq!((&json["left_out"], &json["requests"]), (&0.into(), &requests.into()), "{json}");
    user.dataset("photos", 12);
    let told = user.say(&["mount", "photos", "mnt", "--dry-run"]).ok();
    assert!(told.stdout.contains("12 files") && !told.stdout.contains("request"), "{told:?}");
    user.say(&["mount", "nothing-here", "mnt", "--dry-run"]).mistake(1, &["nothing-here"]);
    assert_eq!(user.say(&["datasets"]).stdout.trim(), "", "no server was started");
}

/// Returns the anonymous memory of a user's process, in bytes.
fn anonymous_bytes(user: &User, program: &str) -> u64 {
    let words = user.dir.path().display().to_string();
    let is_theirs = |pid: &PathBuf| {
        let line = fs::read(pid.join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        line.split(' ').next().is_some_and(|word| word.ends_with(program)) && line.contains(&words)
    };
    let mut pids = fs::read_dir("/proc").expect("/proc").flatten().map(|entry| entry.path());
    let pid = pids.find(is_theirs).unwrap_or_else(|| panic!("no process {program}"));
    let status = fs::read_to_string(pid.join("status")).expect("its status");
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).expect("RssAnon");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("KiB") * 1024
}

/// Mounts a draft of `names` objects of a store that takes 25 ms for a request. Returns the time until the
/// first byte of a file, that of a second mount, and the memory of server and mount.
fn first_byte(names: u64) -> (Duration, Duration, u64, u64) {
    let latency = Latency { median: Duration::from_millis(25), p99: Duration::from_millis(30) };
    let config = EmulatorConfig { first_byte: Some(latency), ..EmulatorConfig::default() };
    let emulator = OriginEmulator::start(config, Backing::Generated { keys: names, bytes: 100 });
    let mut user = User::new("one");
    user.has_keys_of(emulator.endpoint());
    let uri = format!("{}/set", emulator.uri());
    let began = Instant::now();
    let told = user.say(&["mount", &uri, "mnt"]).ok();
    println!("$ fletch mount {uri} mnt\n{}{}", told.stderr, told.stdout);
    assert_eq!(emulator.counts().get, 0, "nothing was read before a program read");
    let name = format!("{:06}/{:09}", (names - 1) / 1000, names - 1);
    assert_eq!(fs::read(user.path("mnt").join(&name)).expect("the last file").len(), 100);
    let first = began.elapsed();
    assert_eq!(emulator.counts().get, 1);
    let pages = names.div_ceil(1000);
    let listed = emulator.counts().list;
    assert!(listed <= 2 * pages + 8, "{listed} pages of a listing of {names} names");
    let (server, mount) = (anonymous_bytes(&user, "fletch-server"), anonymous_bytes(&user, "fletch-mount"));
    let again = Instant::now();
    user.say(&["mount", &uri, "mnt2"]).ok();
    assert_eq!(fs::read(user.path("mnt2").join(&name)).expect("the last file").len(), 100);
    let second = again.elapsed();
    user.say(&["down"]).ok();
    (first, second, server, mount)
}

/// With `FLETCH_DRAFTS=full` also 200,000 and 1.28 M names, and the times.
#[test]
fn the_time_to_the_first_byte_depends_on_the_names_alone() {
    if !have(&[Need::Fuse]) {
        return;
    }
    if std::env::var("FLETCH_DRAFTS").is_err() {
        first_byte(2_000);
        return;
    }
    for (names, within) in [(2_000, 2), (200_000, 40), (1_280_000, 300)] {
        let (first, second, server, mount) = first_byte(names);
        println!(
            "{names} names: first byte after {first:.2?}, second mount {second:.2?}, memory of the server \
             {} MB, of the mount {} MB",
            server / 1_000_000,
            mount / 1_000_000
        );
        assert!(first <= Duration::from_secs(within), "{first:?}");
        assert!(second <= Duration::from_secs(2), "{second:?}");
        assert!(server.max(mount) <= 300_000_000, "{server} {mount}");
    }
}
