//! Reads in the slabs of the server: what the page cache has, and what the disk has to be read for.

use fletch_tests::bins::{command, run};
use fletch_tests::fixture::Site;
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use serde_json::Value;
use std::fs;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

const LONG_BYTES: usize = 24 << 20;

fn long() -> Vec<u8> {
    let mut bytes = vec![0; LONG_BYTES];
    blake3::Hasher::new().update(b"long").finalize_xof().fill(&mut bytes);
    bytes
}

/// Reads the long file in the order of `windows`, and returns what the mount reports at its end.
fn read_long(site: &Site, job: &str, bytes: &[u8], windows: &[Range<usize>]) -> Value {
    let report = site.place("report").join(format!("{job}.json"));
    let socket = format!("unix:{}", site.socket().display());
    let words = ["--report", report.to_str().expect("a path")];
    let mounted = site.mount_from(&socket, "long", job, &words);
    let file = fs::File::open(mounted.dir.join("big")).expect("opened");
    for at in windows {
        let mut got = vec![0; at.len()];
        file.read_exact_at(&mut got, at.start as u64).expect("read");
        assert!(got == bytes[at.clone()], "{job}: other bytes at {at:?}");
    }
    drop(file);
    mounted.stop();
    serde_json::from_slice(&fs::read(report).expect("a report")).expect("JSON")
}

/// The slabs of the site's server.
fn slabs(site: &Site) -> Vec<PathBuf> {
    let all = fs::read_dir(site.cache_dir().join("slabs")).expect("slabs");
    all.map(|entry| entry.expect("an entry").path()).collect()
}

fn appended(site: &Site) {
    let is_empty = || site.metric("fletch_disk_append_queue_bytes") == 0.0;
    until("the disk has it", Duration::from_secs(20), is_empty);
}

/// Takes the slabs out of the page cache.
fn cool(site: &Site) {
    for path in slabs(site) {
        let slab = fs::File::open(&path).expect("opened");
        slab.sync_all().expect("on disk");
        posix_fadvise(&slab, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).expect("dropped");
    }
}

/// Flips a bit here and there in the slabs.
fn flip(site: &Site) {
    for path in slabs(site) {
        let slab = fs::File::options().read(true).write(true).open(&path).expect("opened");
        let len = slab.metadata().expect("metadata").len();
        for at in (100_000..len).step_by(1_500_000) {
            let mut one = [0];
            slab.read_exact_at(&mut one, at).expect("read");
            slab.write_all_at(&[one[0] ^ 4], at).expect("flipped");
        }
    }
}

/// Cuts the slabs.
fn cut(site: &Site) {
    for path in slabs(site) {
        let slab = fs::File::options().write(true).open(&path).expect("opened");
        slab.set_len(1_000_000).expect("cut");
    }
}

#[test]
fn large_files_are_read_in_the_slabs_of_the_server() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let mut site = Site::start(&["--memory=64MiB", "--cache-size=256MiB", "--cache-free-floor=0"]);
    let tree = tempfile::tempdir().expect("a directory");
    let bytes = long();
    fs::write(tree.path().join("big"), &bytes).expect("write");
    assert_eq!(site.publish("long", tree.path()).len(), 64, "a root");
    let of = |report: &Value, key: &str| report[key].as_u64().expect("a number");
    let in_order: Vec<Range<usize>> =
        (0..LONG_BYTES).step_by(1 << 20).map(|at| at..(at + (1 << 20)).min(LONG_BYTES)).collect();
    let here_and_there: Vec<Range<usize>> =
        (0..600).map(|i| i * 7_654_321 % (LONG_BYTES - 5000)).map(|at| at..at + 4321).collect();
    read_long(&site, "first", &bytes, &in_order);
    appended(&site);
    let cold = ["in-order-cold", "here-and-there-cold"];
    let windows = [&in_order, &here_and_there];
    let jobs = ["in-order", "here-and-there"].into_iter().chain(cold).zip(windows.into_iter().cycle());
    for (job, windows) in jobs {
        if cold.contains(&job) {
            cool(&site);
        }
        let report = read_long(&site, job, &bytes, windows);
        let (slab, replied) = (of(&report, "slab_bytes"), of(&report, "read_bytes"));
        assert!(slab * 10 >= replied * 9, "{job}: {slab} of {replied} bytes were read in slabs");
        let accounts = site.json("/v1/accounts");
        let jobs = accounts["jobs"].as_array().expect("a list");
        let counted = jobs.iter().find(|j| j["job"] == job).expect("the job")["hit_bytes"].as_u64();
        assert!(counted.is_some_and(|n| n >= slab), "I8, {job}: {counted:?} of {slab} bytes: {accounts}");
    }
    assert_eq!(site.metric("fletch_chunk_fetched_bytes_total"), LONG_BYTES as f64, "once, from the origin");
    // Damage under the mount's eyes: a bit here and there, then files that are cut.
    flip(&site);
    read_long(&site, "flipped", &bytes, &in_order);
    read_long(&site, "flipped-too", &bytes, &here_and_there);
    appended(&site);
    cut(&site);
    read_long(&site, "cut", &bytes, &here_and_there);
    // Without the server nothing is read in its slabs.
    site.kill();
    site.restart();
    read_long(&site, "after", &bytes, &in_order);
}

const SHORT_FILES: usize = 200;

fn short(i: usize) -> Vec<u8> {
    let mut bytes = vec![0; 30_000 + i * 400];
    blake3::Hasher::new().update(&i.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Reads all short files through a new mount, with cold slabs if `is_cold`. Returns how many bytes were read
/// in slabs, of a hundred.
fn read_short(site: &Site, job: &str, is_cold: bool) -> u64 {
    let report = site.place("report").join(format!("{job}.json"));
    let socket = format!("unix:{}", site.socket().display());
    let words = ["--report", report.to_str().expect("a path"), "--push", "off"];
    let mounted = site.mount_from(&socket, "short", job, &words);
    for i in 0..SHORT_FILES {
        if is_cold {
            // The system reads ahead.
            cool(site);
        }
        let got = fs::read(mounted.dir.join(format!("f{i:04}"))).expect("read");
        assert!(got == short(i), "{job}: other bytes in {i}");
    }
    mounted.stop();
    let report: Value = serde_json::from_slice(&fs::read(report).expect("a report")).expect("JSON");
    let of = |key: &str| report[key].as_u64().expect("a number");
    of("slab_bytes") * 100 / of("read_bytes")
}

/// Starts a server with a dataset of short files on its disk, and nothing in its memory.
fn with_short_files(verb: &str) -> Site {
    let mut site = Site::start(&["--memory=64MiB", "--cache-size=256MiB", "--cache-free-floor=0"]);
    let (tree, tables) = (site.place("tree"), site.place("tables"));
    (0..SHORT_FILES).for_each(|i| fs::write(tree.join(format!("f{i:04}")), short(i)).expect("write"));
    let text = |path: &Path| path.display().to_string();
    run(command("fletch").args([verb, &text(&tree), "--to", &text(&tables), "--quiet"]));
    site.register("short", &text(&tree), &text(&tables));
    read_short(&site, "first", false);
    appended(&site);
    site.kill();
    site.restart();
    let is_on = || site.metrics().get("fletch_disk_state{state=\"on\"}") == Some(&1.0);
    until("the disk is on", Duration::from_secs(20), is_on);
    site
}

#[test]
fn short_files_are_read_in_slabs_if_the_server_has_to_read_its_disk() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let site = with_short_files("index");
    let of_slabs = read_short(&site, "cold", true);
    assert!(of_slabs >= 80, "{of_slabs} % were read in slabs");
    assert_eq!(site.metric("fletch_chunk_fetched_bytes_total"), 0.0);
    let of_slabs = read_short(&site, "warm", false);
    assert!(of_slabs <= 10, "{of_slabs} % were read in slabs that the server had at hand");
    flip(&site);
    read_short(&site, "flipped", true);
    cut(&site);
    read_short(&site, "cut", true);
}

#[test]
fn files_of_packs_are_read_in_slabs() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let site = with_short_files("pack");
    // The server reads its tables again.
    read_short(&site, "again", false);
    for (job, is_cold) in [("cold", true), ("warm", false)] {
        let of_slabs = read_short(&site, job, is_cold);
        assert!(of_slabs >= 95, "{job}: {of_slabs} % were read in slabs");
    }
    assert_eq!(site.metric("fletch_chunk_fetched_bytes_total"), 0.0);
    flip(&site);
    read_short(&site, "flipped", false);
    cut(&site);
    read_short(&site, "cut", true);
}
