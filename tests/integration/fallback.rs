//! A mount whose server is gone, with and without `--origin-fallback`; and a mount whose process is gone.
//!
//! With it the mount reads from the origin. Without it a read fails within its timeout, and the log names the
//! option. No read returns a wrong byte.

use fletch_tests::bins::{command, run};
use fletch_tests::fixture::{Mounted, Site, files};
use fletch_tests::require::{Need, have};
use nix::sys::signal::Signal;
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

type Files = BTreeMap<PathBuf, Vec<u8>>;

/// A tree of small files and of some files of several slices.
fn tree() -> (TempDir, Files) {
    let dir = TempDir::with_prefix("fletch-fallback-").expect("tree");
    let mut all = Files::new();
    let mut rng = ChaCha8Rng::seed_from_u64(23);
    for i in 0..60u32 {
        let len = if i % 12 == 0 { 9_500_000 } else { 60_000 };
        let name = PathBuf::from(format!("d{}/{i:03}.bin", i % 5));
        // No two slices alike: one would stand in for the other.
        let mut bytes = vec![0; len];
        rng.fill_bytes(&mut bytes);
        fs::create_dir_all(dir.path().join(name.parent().expect("dir"))).expect("mkdir");
        fs::write(dir.path().join(&name), &bytes).expect("write");
        all.insert(name, bytes);
    }
    (dir, all)
}

/// Kills the server with SIGKILL.
fn kill(site: &mut Site) {
    site.server().signal(Signal::SIGKILL);
    site.server().wait(Duration::from_secs(5));
}

fn check(dir: &Path, name: &Path, want: &Files) {
    let got = fs::read(dir.join(name)).unwrap_or_else(|e| panic!("{}: {e}", name.display()));
    assert!(got == want[name], "WRONG BYTES of {}", name.display());
}

fn check_all(dir: &Path, want: &Files) {
    assert_eq!(files(dir), want.keys().cloned().collect::<Vec<_>>());
    want.keys().for_each(|name| check(dir, name, want));
}

/// Ends a mount and returns its report.
fn end(mount: Mounted, report: &Path) -> Value {
    mount.stop();
    serde_json::from_slice(&fs::read(report).expect("report")).expect("JSON")
}

fn text(p: &Path) -> String {
    p.display().to_string()
}

#[test]
fn readers_go_on_at_the_origin_when_the_server_is_killed() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let (data, want) = tree();
    let mut site = Site::start(&[]);
    let _ = site.publish("set", data.path());
    let (state, report) = (text(&site.place("mount-state")), site.place("out").join("report"));
    let args = ["--origin-fallback", "--state-dir", &state, "--report", &text(&report)];
    let mount = site.mount("set", "goes-on", &args);
    let names: Vec<&PathBuf> = want.keys().collect();
    let (before, after) = names.split_at(20);
    before.iter().for_each(|name| check(&mount.dir, name, &want));
    // Readers are under way while it dies.
    std::thread::scope(|s| {
        let readers: Vec<_> = (0..4)
            .map(|r| {
                let (dir, want) = (&mount.dir, &want);
                let mine: Vec<&&PathBuf> = after.iter().skip(r).step_by(4).collect();
                s.spawn(move || mine.into_iter().for_each(|name| check(dir, name, want)))
            })
            .collect();
        kill(&mut site);
        readers.into_iter().for_each(|r| r.join().expect("every reader reads on"));
    });
    check_all(&mount.dir, &want);
    let log = site.mount_log("goes-on");
    assert_eq!(log.matches("the server does not answer; reading from the origin").count(), 1, "{log}");
    let report = end(mount, &report);
    assert_eq!((&report["server_losses"], &report["server_away"]), (&1.into(), &true.into()), "{report}");
    assert!(report["origin_bytes"].as_u64() > Some(1_000_000), "{report}");
    assert_eq!((&report["corrupt"], &report["faults"]["unavailable"]), (&0.into(), &0.into()), "{report}");
}

#[test]
fn without_leave_a_read_fails_in_time_and_the_log_names_the_switch() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let (data, want) = tree();
    let mut site = Site::start(&[]);
    let _ = site.publish("set", data.path());
    let mount = site.mount("set", "fails", &["--io-timeout", "2s"]);
    let first = want.keys().next().expect("one");
    check(&mount.dir, first, &want);
    kill(&mut site);
    let begun = Instant::now();
    let last = want.keys().last().expect("one");
    let got = fs::read(mount.dir.join(last)).map(|b| b.len()).map_err(|e| e.raw_os_error());
    assert_eq!(got, Err(Some(libc::EIO)), "nobody has it");
    assert!(begun.elapsed() < Duration::from_secs(4), "io_timeout and 2 s: {:?}", begun.elapsed());
    let log = site.mount_log("fails");
    assert!(log.contains("--origin-fallback"), "{log}");
    mount.stop();
}

#[test]
fn a_mount_begins_without_its_server_by_what_it_said_last() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let (data, want) = tree();
    let mut site = Site::start(&[]);
    let _ = site.publish("set", data.path());
    let state = text(&site.place("mount-state"));
    let args = ["--origin-fallback", "--state-dir", &state, "--io-timeout", "10s"];
    site.mount("set", "learns", &args).stop();
    kill(&mut site);
    let mount = site.mount("set", "knows", &args);
    check_all(&mount.dir, &want);
    mount.stop();
    // Nobody ever said anything about this one.
    let mut c = command("fletch-mount");
    c.arg("other").arg(site.place("nowhere")).args(["--server", &site.url]).args(args);
    let out = c.output().expect("fletch-mount");
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(4), "{said}");
    assert!(
        said.contains("does not answer") && said.contains("this account has no record of other@latest"),
        "{said}"
    );
}

#[test]
fn the_tools_look_into_what_the_server_said_last() {
    let (data, want) = tree();
    let mut site = Site::start(&[]);
    let _ = site.publish("set", data.path());
    let state = site.place("tool-state");
    let ls = |url: &str, more: &[&str]| {
        let mut c = command("fletch");
        c.args(["ls", "set", "d1", "--server", url]).args(more).env("FLETCH_STATE_DIR", &state);
        c.output().expect("fletch ls")
    };
    let url = site.url.clone();
    let before = ls(&url, &["--origin-fallback"]);
    assert!(before.status.success(), "{}", String::from_utf8_lossy(&before.stderr));
    kill(&mut site);
    let refused = ls(&url, &[]);
    assert_eq!(refused.status.code(), Some(4));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--origin-fallback"), "it names the switch");
    let after = ls(&url, &["--origin-fallback"]);
    let told = String::from_utf8_lossy(&after.stderr);
    assert!(after.status.success() && told.contains("which it named last"), "{told}");
    assert_eq!(after.stdout, before.stdout);
    assert_eq!(String::from_utf8_lossy(&after.stdout).lines().count(), want.len() / 5);
}

#[test]
fn given_tables_need_no_server_and_a_changed_object_is_refused() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let (data, want) = tree();
    let site = Site::start(&[]);
    let root = site.publish("set", data.path());
    let tables = text(&site.place("tables-set"));
    // Same length, other bytes, after it was indexed.
    let edited = want.keys().next().expect("one");
    let mut bytes = want[edited].clone();
    bytes[100] ^= 1;
    fs::write(data.path().join(edited), bytes).expect("write");
    let (dir, log) = (site.place("alone"), site.place("out").join("log"));
    let uri = text(data.path());
    for version in ["set", &format!("set@{root}")] {
        let mut c = command("fletch-mount");
        c.arg(version).arg(&dir).args(["--tables", &tables, "--uri", &uri, "--io-timeout", "5s", "--daemon"]);
        c.arg("--log-file").arg(&log);
        run(&mut c);
        let mount = Unmount(&dir);
        want.keys().filter(|n| *n != edited).for_each(|name| check(&dir, name, &want));
        let got = fs::read(dir.join(edited)).map(|b| b.len()).map_err(|e| e.raw_os_error());
        assert_eq!(got, Err(Some(libc::EIO)), "{}", fs::read_to_string(&log).unwrap_or_default());
        drop(mount);
    }
    assert_eq!(site.metric("fletch_chunk_reads_total"), 0.0, "the server was not asked");
}

/// Runs the doctor and returns the lines of one check.
fn findings(site: &Site, check: &str) -> Vec<String> {
    let mut c = command("fletch");
    c.args(["doctor", "--listen", "none", "--cache-size", "0", "--server", &site.url, "--state-dir"]);
    let out = c.arg(site.place("state")).output().expect("fletch doctor");
    let lines = String::from_utf8(out.stdout).expect("utf-8");
    lines.lines().filter(|l| l.contains(&format!(": {check}: "))).map(str::to_owned).collect()
}

#[test]
fn the_doctor_names_a_killed_mount_until_its_fix_replaces_it() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = TempDir::with_prefix("fletch-doctor-").expect("tree");
    fs::write(data.path().join("a"), "content").expect("write");
    let site = Site::start(&[]);
    let _ = site.publish("set", data.path());
    for healthy in ["server", "clock", "state-dir"] {
        assert_eq!(findings(&site, healthy), Vec::<String>::new(), "this server is healthy");
    }
    let mut mount = site.mount("set", "killed", &[]);
    let dir = mount.dir.clone();
    // Tests beside this one kill mounts, too.
    let named = || findings(&site, "dead-mount").iter().filter(|l| l.contains(&text(&dir))).count();
    assert_eq!(named(), 0);
    mount.daemon().signal(Signal::SIGKILL);
    mount.daemon().wait(Duration::from_secs(5));
    assert_eq!(named(), 1);
    let anew = site.mount_at(&site.url, dir.clone(), "set", "anew", &[]);
    assert_eq!(named(), 0, "the fix: mount again");
    assert_eq!(fs::read(dir.join("a")).expect("reads"), b"content");
    anew.stop();
}

/// Unmounts the mount of a background daemon when dropped.
struct Unmount<'a>(&'a Path);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        if let Err(e) = nix::mount::umount2(self.0, nix::mount::MntFlags::MNT_DETACH) {
            eprintln!("{} stays mounted: {e}", self.0.display());
        }
    }
}
