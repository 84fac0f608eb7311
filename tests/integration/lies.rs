//! I1 with a corrupt origin, corrupt tables and a corrupt connection: no wrong byte is delivered.
//!
//! Every case is counted in the metrics.

use fletch_testkit::{Tamper, TamperProxy, Upstream};
use fletch_tests::bins::{command, run};
use fletch_tests::fixture::{Site, files, index};
use fletch_tests::require::{Need, have};
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

/// Twenty files of equal sizes and equal times, three of them larger than a chunk.
fn tree(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    for i in 0..20 {
        let mut b = vec![0; if i % 7 == 0 { 9_000_000 } else { 50_000 }];
        rng.fill_bytes(&mut b);
        fs::write(dir.join(format!("{i:02}.bin")), b).expect("write");
    }
    files(dir)
        .into_iter()
        .map(|p| {
            set_time(&dir.join(&p));
            let b = fs::read(dir.join(&p)).expect("read");
            (p, b)
        })
        .collect()
}

fn set_time(p: &Path) {
    let t = SystemTime::UNIX_EPOCH + Duration::from_secs(1_600_000_000);
    fs::File::options().write(true).open(p).expect("open").set_modified(t).expect("time");
}

/// Changes a file in place and restores its times, so that the change does not show in its metadata.
fn lie(p: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut b = fs::read(p).expect("read");
    change(&mut b);
    fs::write(p, b).expect("write");
    set_time(p);
}

/// Reads every file through the mount. Returns each file's bytes, or `None` for an error.
fn read(dir: &Path, names: impl Iterator<Item = PathBuf>) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    names
        .map(|p| {
            let b = fs::read(dir.join(&p)).ok();
            (p, b)
        })
        .collect()
}

/// Checks that no wrong byte came. Returns the names of the files whose reads failed.
fn refused(got: &BTreeMap<PathBuf, Option<Vec<u8>>>, want: &BTreeMap<PathBuf, Vec<u8>>) -> Vec<String> {
    let mut out = Vec::new();
    for (p, b) in got {
        match b {
            Some(b) => assert!(b == &want[p], "WRONG BYTES of {}", p.display()),
            None => out.push(p.display().to_string()),
        }
    }
    out
}

#[test]
fn a_lying_origin_delivers_no_wrong_byte() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = TempDir::with_prefix("fletch-lies-").expect("tree");
    let want = tree(data.path());
    let site = Site::start(&[]);
    let _ = site.publish("lies", data.path());
    let at = |n: &str| data.path().join(n);
    lie(&at("01.bin"), |b| b[777] ^= 0x10);
    lie(&at("07.bin"), |b| b[5_000_000] ^= 1);
    lie(&at("02.bin"), |b| b.truncate(40_000));
    lie(&at("14.bin"), |b| b.truncate(8_999_999));
    let (three, four) = (fs::read(at("03.bin")).expect("3"), fs::read(at("04.bin")).expect("4"));
    lie(&at("03.bin"), |b| *b = four);
    lie(&at("04.bin"), |b| *b = three);
    fs::remove_file(at("05.bin")).expect("remove");
    let m = site.mount("lies", "lies", &["--io-timeout", "5s"]);
    let bad = refused(&read(&m.dir, want.keys().cloned()), &want);
    assert_eq!(bad, ["01.bin", "02.bin", "03.bin", "04.bin", "05.bin", "07.bin", "14.bin"]);
    // Each case counted: four times bytes that do not hash to their name (two flips, two swaps),
    // twice a length that changed, once an object that is gone.
    let corrupt = site.metric("fletch_corrupt_total");
    assert!(corrupt >= 4.0, "corrupt {corrupt}");
    let changed: f64 = site
        .metrics()
        .iter()
        .filter(|(k, _)| k.starts_with("fletch_origin_errors_total"))
        .map(|(_, v)| v)
        .sum();
    assert!(changed >= 3.0, "origin errors {changed}\n{:#?}", site.metrics());
    m.stop();
}

#[test]
fn an_object_changed_after_indexing_is_never_mixed_in() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = TempDir::with_prefix("fletch-edit-").expect("tree");
    let want = tree(data.path());
    let site = Site::start(&["--memory", "64MiB"]);
    let root = site.publish("edit", data.path());
    let m = site.mount("edit", "edit", &["--io-timeout", "5s"]);
    // Half is read, then everything is edited: same sizes, new bytes, new times.
    let some: Vec<PathBuf> = want.keys().take(10).cloned().collect();
    assert!(refused(&read(&m.dir, some.into_iter()), &want).is_empty());
    for p in want.keys() {
        let p = data.path().join(p);
        let mut b = fs::read(&p).expect("read");
        b.iter_mut().step_by(1000).for_each(|x| *x ^= 0xff);
        fs::write(p, b).expect("write");
    }
    let m2 = site.mount("edit", "edit-2", &["--io-timeout", "5s"]);
    let bad = refused(&read(&m2.dir, want.keys().cloned()), &want);
    assert!(!bad.is_empty());
    assert!(site.mount_log("edit-2").contains("origin_changed"), "{}", site.mount_log("edit-2"));
    m.stop();
    m2.stop();
    // The way out that the message names: index again, and mount what is there now.
    let to = site.place("tables-edit");
    let new = index(data.path(), &to, &["--parent", "auto"]);
    assert_ne!(new, root);
    let m3 = site.mount("edit", "edit-3", &[]);
    for p in want.keys() {
        assert_eq!(fs::read(m3.dir.join(p)).expect("read"), fs::read(data.path().join(p)).expect("original"));
    }
    m3.stop();
}

#[test]
fn indexing_the_same_content_again_disturbs_no_mount() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = TempDir::with_prefix("fletch-again-").expect("tree");
    for d in 0..20 {
        let dir = data.path().join(format!("d{d:02}"));
        fs::create_dir(&dir).expect("mkdir");
        for f in 0..1000 {
            fs::write(dir.join(format!("{f:04}")), format!("{d} {f}")).expect("write");
        }
    }
    let site = Site::start(&[]);
    let root = site.publish("again", data.path());
    let m = site.mount("again", "again", &["--io-timeout", "5s"]);
    // The version is open and some of its tables are read; then the times of all files change,
    // and the tables at rest are written anew for the same root.
    assert_eq!(fs::read(m.dir.join("d00/0007")).expect("read"), b"0 7");
    for p in files(data.path()) {
        set_time(&data.path().join(p));
    }
    assert_eq!(index(data.path(), &site.place("tables-again"), &["--parent", "auto"]), root);
    for p in files(data.path()) {
        let want = fs::read(data.path().join(&p)).expect("original");
        assert_eq!(fs::read(m.dir.join(&p)).ok(), Some(want), "{}", p.display());
    }
    m.stop();
}

/// Returns the paths of a version's tables below `to`: (entries, placement).
fn tables(to: &Path, root: &str) -> (PathBuf, PathBuf) {
    let v = to.join("fletch/versions").join(root);
    let layouts: Vec<PathBuf> =
        fs::read_dir(v.join("layouts")).expect("layouts").map(|e| e.expect("entry").path()).collect();
    assert_eq!(layouts.len(), 1);
    (v.join("entries.parquet"), layouts[0].join("placement.parquet"))
}

#[test]
fn swapped_rows_of_tables_deliver_no_wrong_byte() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = TempDir::with_prefix("fletch-rows-").expect("tree");
    let want = tree(data.path());
    // The same tree with two files' bytes swapped: its tables are the first one's with two rows swapped.
    let twin = TempDir::with_prefix("fletch-rows-").expect("twin");
    for (p, b) in &want {
        fs::write(twin.path().join(p), b).expect("write");
    }
    fs::rename(twin.path().join("03.bin"), twin.path().join("x")).expect("rename");
    fs::rename(twin.path().join("04.bin"), twin.path().join("03.bin")).expect("rename");
    fs::rename(twin.path().join("x"), twin.path().join("04.bin")).expect("rename");
    files(twin.path()).iter().for_each(|p| set_time(&twin.path().join(p)));
    for what in ["entries", "placement"] {
        let site = Site::start(&[]);
        let (to, to_twin) = (site.place("tables"), site.place("tables-twin"));
        let root = index(data.path(), &to, &[]);
        let root_twin = index(twin.path(), &to_twin, &[]);
        assert_ne!(root, root_twin);
        let (mine, theirs) = (tables(&to, &root), tables(&to_twin, &root_twin));
        let (target, source) = if what == "entries" { (mine.0, theirs.0) } else { (mine.1, theirs.1) };
        assert_eq!(
            fs::metadata(&target).expect("table").size(),
            fs::metadata(&source).expect("table").size()
        );
        fs::copy(source, target).expect("swap rows");
        site.register("rows", &data.path().display().to_string(), &to.display().to_string());
        let out = command("fletch-mount")
            .args(["rows"])
            .arg(site.place("refused"))
            .args(["--server", &site.url, "--io-timeout", "5s", "--report"])
            .arg(site.place("logs").join("report"))
            .stderr(fs::File::create(site.place("logs").join("refused")).expect("log"))
            .spawn();
        let mut child = out.expect("fletch-mount");
        // Either the mount refuses to begin, or everything in the damaged part is an error.
        let dir = site.place("refused");
        let end = std::time::Instant::now() + Duration::from_secs(15);
        while child.try_wait().expect("wait").is_none()
            && !fletch_tests::fixture::is_mounted(&dir)
            && std::time::Instant::now() < end
        {
            std::thread::sleep(Duration::from_millis(10));
        }
        if child.try_wait().expect("wait").is_none() {
            let bad = refused(&read(&dir, want.keys().cloned()), &want);
            assert_eq!(bad.len(), want.len(), "{what}");
            nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(i32::try_from(child.id()).expect("pid")),
                nix::sys::signal::SIGTERM,
            )
            .expect("kill");
        }
        child.wait().expect("wait");
        let log = fs::read_to_string(site.place("logs").join("refused")).expect("log");
        assert!(log.contains("part") || log.contains("placement"), "{what}: {log}");
        // Counted by whoever noticed: the mount, if it got so far, or the server.
        let report = fs::read(site.place("logs").join("report")).unwrap_or_default();
        let report: serde_json::Value = serde_json::from_slice(&report).unwrap_or_default();
        let by_mount = report["faults"]["corrupt"].as_u64().unwrap_or(0);
        let by_server = site.metric("fletch_corrupt_total");
        assert!(by_mount >= 1 || by_server >= 1.0, "{what}: {report}\n{log}");
    }
}

#[test]
fn bits_flipped_on_the_wire_deliver_no_wrong_byte() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = TempDir::with_prefix("fletch-wire-").expect("tree");
    let want = tree(data.path());
    let site = Site::start(&[]);
    let _ = site.publish("wire", data.path());
    let proxy = TamperProxy::start(Upstream::Tcp(
        site.url.trim_start_matches("http://").trim_end_matches('/').parse().expect("address"),
    ));
    let report = site.place("report").join("mount.json");
    let m = site.mount_from(
        &proxy.endpoint(),
        "wire",
        "wire",
        &["--io-timeout", "5s", "--report", report.to_str().expect("utf-8")],
    );
    // One bit in each response body from now on.
    proxy.set("/chunks/", Tamper::FlipBit { byte: 40_000, bit: 3 }, None);
    let bad = refused(&read(&m.dir, want.keys().cloned()), &want);
    assert_eq!(bad.len(), want.len(), "every body was altered");
    assert!(proxy.tampered() >= 20);
    proxy.clear();
    // The wire is honest again, and so is every file: nothing bad was kept.
    assert!(refused(&read(&m.dir, want.keys().cloned()), &want).is_empty());
    m.stop();
    let report: serde_json::Value =
        serde_json::from_slice(&fs::read(&report).expect("report")).expect("json");
    assert!(report["corrupt"].as_u64().is_some_and(|n| n >= 20), "{report}");
}

#[test]
fn verify_names_each_lie() {
    let data = TempDir::with_prefix("fletch-verify-").expect("tree");
    let _ = tree(data.path());
    let to = TempDir::with_prefix("fletch-verify-").expect("tables");
    let _ = index(data.path(), to.path(), &[]);
    run(command("fletch").arg("verify").arg(to.path()));
    lie(&data.path().join("01.bin"), |b| b[0] ^= 1);
    lie(&data.path().join("07.bin"), |b| b.truncate(8_000_000));
    fs::remove_file(data.path().join("02.bin")).expect("remove");
    let out = command("fletch").arg("verify").arg(to.path()).output().expect("verify");
    assert!(!out.status.success());
    let text = String::from_utf8_lossy(&out.stderr).into_owned() + &String::from_utf8_lossy(&out.stdout);
    for name in ["01.bin", "07.bin", "02.bin"] {
        assert!(text.contains(name), "{name}: {text}");
    }
}
