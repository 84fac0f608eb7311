//! The lifecycle of a mount: how it starts, which starts it refuses, and how it ends.

use crate::support::dataset::{Dataset, walk};
use crate::support::kernel::{Mount, can_mount, command};
use crate::support::stub::{ChunkReply, Stub};
use fletch_host::mounts;
use nix::sys::signal::Signal;
use std::{
    fs,
    io::Read,
    process::{Output, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

fn fails(args: &[&str]) -> (i32, String) {
    let Output { status, stderr, .. } = command().args(args).stderr(Stdio::piped()).output().expect("runs");
    (status.code().expect("an exit code"), String::from_utf8(stderr).expect("utf-8"))
}

#[test]
fn a_failed_mount_has_a_message_and_an_exit_code() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().to_str().expect("utf-8");
    let file = dir.path().join("file");
    fs::write(&file, "").expect("write");
    let stub = Stub::start(Arc::new(Dataset::many(3, 10)));
    let url = &stub.url();
    let nobody = "http://127.0.0.1:1";
    let cases: &[(&[&str], i32, &str)] = &[
        (&["d", path], 2, "--server"),
        (&["d", path, "--server", "nonsense"], 2, "nonsense"),
        (&["d", "/no/such/dir", "--server", url], 1, "mkdir -p /no/such/dir"),
        (&["d", file.to_str().expect("utf-8"), "--server", url], 1, "not a directory"),
        (&["other", path, "--server", url], 1, "no such dataset"),
        (&["d@v2", path, "--server", url], 1, "d@v2"),
        (&["d", path, "--server", nobody, "--io-timeout", "1s"], 4, "does not answer"),
        (&["d", path, "--server", "unix:/no/such.sock", "--io-timeout", "1s"], 4, "/no/such.sock"),
        (
            &["d", path, "--server", nobody, "--io-timeout", "1s", "--daemon", "--log-file", "/dev/null"],
            4,
            "answer",
        ),
    ];
    for (args, code, says) in cases {
        let (got, text) = fails(args);
        assert!(got == *code && text.contains(says), "{args:?}: {got}, {text}");
    }
}

#[test]
fn a_second_mount_at_the_same_directory_is_refused() {
    if !can_mount() {
        return;
    }
    let stub = Stub::start(Arc::new(Dataset::many(3, 10)));
    let mount = Mount::start(&stub.url(), &[]);
    let (code, text) = fails(&["d", mount.path().to_str().expect("utf-8"), "--server", &stub.url()]);
    assert!(code == 1 && text.contains("is a fletch mount already"), "{code}: {text}");
    assert!(text.contains("shows d already"), "the same dataset is told in one sentence: {text}");
    assert!(mount.entry().is_some());
}

#[test]
fn signals_unmount_and_the_report_is_written() {
    if !can_mount() {
        return;
    }
    let dataset = Arc::new(Dataset::many(10, 1000));
    let stub = Stub::start(Arc::clone(&dataset));
    let reports = tempfile::tempdir().expect("tempdir");
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let report = reports.path().join("report.json");
        let mut mount =
            Mount::start(&stub.url(), &["--job", "j", "--report", report.to_str().expect("utf-8")]);
        for path in dataset.nodes.keys() {
            fs::read(mount.path().join(path)).expect("reads");
        }
        mount.signal(signal);
        assert!(mount.ended(Duration::from_secs(5)).success());
        assert_eq!(mount.entry(), None);
        let r: serde_json::Value = serde_json::from_slice(&fs::read(&report).expect("report")).expect("JSON");
        assert_eq!((&r["job"], &r["dataset"]), (&"j".into(), &"d".into()));
        assert_eq!((&r["read_bytes"], &r["fetches"], &r["corrupt"]), (&10_000.into(), &10.into(), &0.into()));
        assert_eq!(r["requests"]["open"], 1, "{r}");
    }
}

#[test]
fn a_busy_mount_is_detached_and_the_process_ends_in_time() {
    if !can_mount() {
        return;
    }
    let dataset = Arc::new(Dataset::many(10, 300_000));
    let stub = Stub::start(Arc::clone(&dataset));
    let mut mount = Mount::start(&stub.url(), &["--io-timeout", "60s"]);
    let paths: Vec<_> = dataset.nodes.keys().map(|p| mount.path().join(p)).collect();
    let mut held = fs::File::open(&paths[0]).expect("opens");
    let mut byte = [0];
    held.read_exact(&mut byte).expect("reads");
    // And a reader that waits for a server that says nothing.
    stub.set(ChunkReply::Hang);
    let path = paths[1].clone();
    let reader = std::thread::spawn(move || fs::read(path).map(|b| b.len()));
    std::thread::sleep(Duration::from_millis(300));
    let begun = Instant::now();
    mount.signal(Signal::SIGTERM);
    mount.wait_for("detached");
    assert!(mount.ended(Duration::from_secs(10)).success(), "after {:?}", begun.elapsed());
    assert_eq!(mount.entry(), None);
    reader.join().expect("reader").expect_err("it was told");
}

#[test]
fn an_unmount_from_outside_ends_the_process() {
    if !can_mount() {
        return;
    }
    let stub = Stub::start(Arc::new(Dataset::many(3, 10)));
    let mut mount = Mount::start(&stub.url(), &[]);
    nix::mount::umount(mount.path()).expect("unmount");
    assert!(mount.ended(Duration::from_secs(5)).success());
}

#[test]
fn a_dead_mount_is_named_and_the_next_mount_replaces_it() {
    if !can_mount() {
        return;
    }
    let dataset = Arc::new(Dataset::many(3, 10));
    let stub = Stub::start(Arc::clone(&dataset));
    let mut dead = Mount::start(&stub.url(), &[]);
    let living = Mount::start(&stub.url(), &[]);
    let real = |m: &Mount| fs::canonicalize(m.path()).unwrap_or_else(|_| m.path().to_owned());
    let (dead_dir, living_dir) = (real(&dead), real(&living));
    dead.signal(Signal::SIGKILL);
    dead.ended(Duration::from_secs(5));
    let named: Vec<_> = mounts::dead_mounts().expect("mount table").into_iter().map(|m| m.dir).collect();
    assert!(named.contains(&dead_dir) && !named.contains(&living_dir), "{named:?}");

    // A link to the directory repairs it as well.
    let links = tempfile::tempdir().expect("tempdir");
    let link = links.path().join("link");
    std::os::unix::fs::symlink(dead.path(), &link).expect("symlink");
    let mut anew = Mount::start_at(&stub.url(), &link, &[]);
    assert!(anew.seen("detached the mount of a dead fletch-mount"));
    assert_eq!(walk(dead.path()), dataset.nodes);
    let at = |m: &mounts::MountEntry| m.dir == dead_dir;
    let table = fs::read("/proc/self/mountinfo").expect("mount table");
    assert_eq!(mounts::parse(&table).iter().filter(|m| at(m)).count(), 1, "nothing is left below");
    anew.signal(Signal::SIGTERM);
    assert!(anew.ended(Duration::from_secs(10)).success());
    assert_eq!(dead.entry(), None);
}

#[test]
fn a_dead_mount_lists_a_directory_whole_or_fails_at_once() {
    if !can_mount() {
        return;
    }
    let dataset = Arc::new(Dataset::many(600, 10));
    let stub = Stub::start(Arc::clone(&dataset));
    let mut mount = Mount::start(&stub.url(), &[]);
    let names = |dir: &std::path::Path| {
        let out = std::process::Command::new("timeout").args(["10", "ls"]).arg(dir).output().expect("ls");
        let text = String::from_utf8(out.stdout).expect("utf-8");
        (out.status.code(), text.lines().map(str::to_owned).collect::<Vec<_>>())
    };
    let dirs = |m: &Mount| -> Vec<_> {
        let mut all: Vec<_> =
            fs::read_dir(m.path()).expect("lists").map(|e| e.expect("entry").path()).collect();
        all.sort();
        all
    };
    let all = dirs(&mount);
    let (listed, fresh) = (&all[0], &all[1]);
    let before = names(listed);
    assert_eq!(before.0, Some(0));
    mount.signal(Signal::SIGKILL);
    mount.ended(Duration::from_secs(5));
    let begun = Instant::now();
    for dir in [mount.path(), listed, fresh] {
        let (code, found) = names(dir);
        match code {
            Some(0) if dir == listed => assert_eq!(found, before.1),
            Some(0) => assert_eq!((dir, found.len()), (mount.path(), all.len())),
            code => assert_eq!((code.is_some_and(|c| c == 1 || c == 2), found.len()), (true, 0), "{dir:?}"),
        }
    }
    assert!(begun.elapsed() < Duration::from_secs(10), "no call hangs: {:?}", begun.elapsed());
}

#[test]
fn daemon_returns_when_usable_and_metrics_are_served() {
    if !can_mount() {
        return;
    }
    let dataset = Arc::new(Dataset::many(3, 10));
    let stub = Stub::start(Arc::clone(&dataset));
    let dir = tempfile::tempdir().expect("tempdir");
    let log = dir.path().join("log");
    let at = dir.path().join("m");
    fs::create_dir(&at).expect("mkdir");
    let port = std::net::TcpListener::bind("127.0.0.1:0").expect("bind").local_addr().expect("addr").port();
    let metrics = format!("127.0.0.1:{port}");
    let out = command()
        .arg("d")
        .arg(&at)
        .args(["--server", &stub.url(), "--daemon", "--metrics", &metrics, "--log-file"])
        .arg(&log)
        .stderr(Stdio::piped())
        .output()
        .expect("runs");
    let text = String::from_utf8(out.stderr).expect("utf-8");
    assert!(out.status.success() && text.starts_with("mounted d (root "), "{text}");
    let path = dataset.nodes.keys().next().expect("a file");
    assert_eq!(fs::read(at.join(path)).expect("usable at once").len(), 10);
    let mut page = String::new();
    let mut http = std::net::TcpStream::connect(&metrics).expect("metrics");
    std::io::Write::write_all(
        &mut http,
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    )
    .expect("ask");
    http.read_to_string(&mut page).expect("page");
    assert!(page.contains("fletch_mount_requests_total{op=\"open\"} 1"), "{page}");
    let mut refusal = String::new();
    let mut http = std::net::TcpStream::connect(&metrics).expect("metrics");
    let rebound = b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n";
    std::io::Write::write_all(&mut http, rebound).expect("ask");
    http.read_to_string(&mut refusal).expect("page");
    assert!(refusal.starts_with("HTTP/1.1 421") && !refusal.contains("fletch_mount"), "{refusal}");
    nix::mount::umount(&at).expect("unmount");
    let until = Instant::now() + Duration::from_secs(5);
    while !fs::read_to_string(&log).expect("log").contains("unmounted clean=true") {
        assert!(Instant::now() < until, "{}", fs::read_to_string(&log).expect("log"));
        std::thread::sleep(Duration::from_millis(20));
    }
}
