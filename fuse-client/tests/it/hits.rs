//! Real mounts over a unix socket whose server has hit connections.

use crate::support::{
    dataset::{Dataset, Node},
    kernel::{Mount, can_mount},
    stub::Stub,
    unix_socket::{HitReply, UnixSocket},
};
use nix::sys::{signal::Signal, statvfs::statvfs};
use std::{
    fs,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

const FILES: u64 = 40;

fn started(args: &[&str]) -> (Arc<Dataset>, Stub, UnixSocket, Mount) {
    let dataset = Arc::new(Dataset::many(FILES as usize, 110_000));
    let stub = Stub::start(Arc::clone(&dataset));
    let socket = UnixSocket::start(Arc::clone(&dataset), stub.address());
    let mount = Mount::start(&socket.url(), args);
    (dataset, stub, socket, mount)
}

/// Reads some files, each whole, and compares them.
fn read(mount: &Mount, dataset: &Dataset, files: impl Iterator<Item = usize>) {
    let paths: Vec<&String> = dataset.nodes.keys().collect();
    for i in files {
        let Node::File(want) = &dataset.nodes[paths[i]] else { panic!("a file") };
        let got = fs::read(mount.path().join(paths[i])).expect("reads");
        assert!(got == want[..], "{}: wrong bytes", paths[i]);
    }
}

/// Ends the mount and returns its report.
fn report(mut mount: Mount, path: &Path) -> serde_json::Value {
    mount.signal(Signal::SIGTERM);
    assert!(mount.ended(Duration::from_secs(10)).success());
    serde_json::from_slice(&fs::read(path).expect("a report")).expect("JSON")
}

#[test]
fn what_the_server_has_at_hand_is_asked_for_once_and_nothing_else_is_sent() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("report");
    let (dataset, stub, _socket, mount) = started(&["--report", path.to_str().expect("text")]);
    read(&mount, &dataset, 0..FILES as usize);
    assert_eq!(stub.chunks(), 0, "no chunk came by HTTP");
    let report = report(mount, &path);
    let hits = &report["hit_requests"];
    assert_eq!((&hits["here"], &hits["failed"]), (&FILES.into(), &0.into()), "{report}");
    assert_eq!(report["fetches"], FILES, "{report}");
    assert_eq!(report["read_bytes"], report["read_fetched_bytes"], "{report}");
}

#[test]
fn i1_what_is_not_at_hand_or_wrong_comes_by_http() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("report");
    let (dataset, stub, socket, mount) = started(&["--report", path.to_str().expect("text")]);
    socket.set(HitReply::NotHere);
    read(&mount, &dataset, 0..10);
    assert_eq!(stub.chunks(), 10);
    socket.set(HitReply::Flip);
    read(&mount, &dataset, 10..15);
    assert_eq!(stub.chunks(), 15, "none of these bytes left the mount");
    let report = report(mount, &path);
    assert_eq!((&report["corrupt"], &report["fetches"]), (&5.into(), &20.into()), "{report}");
    assert_eq!(report["hit_requests"]["not_here"], 10, "{report}");
}

#[test]
fn a_server_that_does_not_answer_holds_a_thread_once_and_not_for_long() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("report");
    let args = ["--threads", "1", "--report", path.to_str().expect("text")];
    let (dataset, stub, socket, mount) = started(&args);
    socket.set(HitReply::Hang);
    let begun = Instant::now();
    read(&mount, &dataset, 0..10);
    // One time of waiting, and ten calls by HTTP.
    let waited = begun.elapsed();
    assert!(waited >= Duration::from_millis(50) && waited < Duration::from_millis(900), "{waited:?}");
    assert_eq!(stub.chunks(), 10);
    let begun = Instant::now();
    statvfs(mount.path()).expect("an answer");
    assert!(begun.elapsed() < Duration::from_millis(100), "{:?}", begun.elapsed());
    // After its rest the server is asked again, and answers.
    socket.set(HitReply::Honest);
    std::thread::sleep(Duration::from_secs(1).saturating_sub(waited) + Duration::from_millis(200));
    read(&mount, &dataset, 10..20);
    assert_eq!(stub.chunks(), 10, "these came by the hit connection");
    let report = report(mount, &path);
    assert_eq!(report["hit_requests"]["failed"], 1, "{report}");
}
