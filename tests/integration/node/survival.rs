//! I5: an owner dies, hangs or loses its directory, and its clients continue to read.

use crate::common::{Node, read_all, read_one};
use fletch_tests::readers::Data;
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use nix::sys::signal::Signal;
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

#[test]
fn an_owner_is_killed_under_load_and_the_next_is_warm() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = Data::new(74, 500, 110_000);
    let node = Node::start();
    let _ = node.site.publish("d", &data.dir);
    let mut one = node.mount("d", "one", &[]);
    node.read_to_keep(&one.dir, &data);
    node.settled(one.pid(), 500);
    let guests = [node.mount("d", "two", &[]), node.mount("d", "three", &[])];
    let read = AtomicUsize::new(0);
    std::thread::scope(|s| {
        let readers: Vec<_> = guests
            .iter()
            .map(|m| {
                let (data, read) = (&data, &read);
                s.spawn(move || {
                    for (path, hash) in data.files.iter().cycle().take(1000) {
                        read_one(&m.dir, path, *hash);
                        read.fetch_add(1, Relaxed);
                    }
                })
            })
            .collect();
        until("they read", Duration::from_secs(60), || read.load(Relaxed) > 200);
        one.daemon().signal(Signal::SIGKILL);
        one.daemon().wait(Duration::from_secs(10));
        readers.into_iter().for_each(|r| r.join().expect("no read fails"));
    });
    let pids = guests.each_ref().map(|m| m.pid());
    until("a guest became the owner", Duration::from_secs(20), || {
        node.state().is_some_and(|s| pids.iter().any(|p| s["pid"] == *p))
    });
    let state = node.state().expect("an owner");
    assert_eq!(state["chunks"], 500, "all that was kept is there: {state}");
    // What the disk has is not sent again, to whoever asks next.
    let before = node.sent("");
    let late = node.mount("d", "late", &[]);
    read_all(&late.dir, &data);
    for m in &guests {
        read_all(&m.dir, &data);
    }
    assert_eq!(node.sent("") - before, 0, "the next owner is warm");
    drop(guests);
}

#[test]
fn an_owner_that_hangs_is_passed_by() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = Data::new(75, 60, 110_000);
    let node = Node::start();
    let _ = node.site.publish("d", &data.dir);
    let mut one = node.mount("d", "one", &["--io-timeout", "8s"]);
    read_all(&one.dir, &data);
    let two = node.mount("d", "two", &["--io-timeout", "8s"]);
    one.daemon().signal(Signal::SIGSTOP);
    let begun = Instant::now();
    read_all(&two.dir, &data);
    let took = begun.elapsed();
    one.daemon().signal(Signal::SIGCONT);
    assert!(took < Duration::from_secs(30), "all of it, not each read, waits once: {took:?}");
    assert!(node.sent("two") > 0, "the server was asked");
    until("it is a guest again", Duration::from_secs(20), || {
        let log = node.site.mount_log("two");
        log.matches("another mount owns this node's store").count() == 2
    });
}

#[test]
fn an_owner_whose_directory_is_deleted_begins_anew() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = Data::new(76, 100, 110_000);
    let node = Node::start();
    let _ = node.site.publish("d", &data.dir);
    let (one, two) = (node.mount("d", "one", &[]), node.mount("d", "two", &[]));
    node.read_to_keep(&two.dir, &data);
    node.settled(one.pid(), 100);
    // In one step, and not to where stores are looked for: its owner writes into it.
    let gone = node.site.place("gone");
    fs::rename(node.stores().first().expect("a store"), &gone).expect("rename");
    fs::remove_dir_all(gone).expect("remove");
    for m in [&two, &one] {
        read_all(&m.dir, &data);
    }
    // Whoever of them owns the new one. It keeps what it is brought: memory still has the rest.
    until("a new store", Duration::from_secs(20), || node.state().is_some());
    let other = Data::new(86, 100, 110_000);
    let _ = node.site.publish("e", &other.dir);
    let three = node.mount("e", "three", &[]);
    node.read_to_keep(&three.dir, &other);
    assert!(node.state().expect("an owner")["chunks"].as_u64() >= Some(100));
    let before = node.sent("");
    let late = node.mount("e", "late", &[]);
    read_all(&late.dir, &other);
    assert_eq!(node.sent("") - before, 0);
}

#[test]
fn without_a_server_the_store_serves_what_it_has_and_the_origin_the_rest() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = Data::new(77, 80, 110_000);
    let mut node = Node::start();
    let _ = node.site.publish("d", &data.dir);
    let state = node.site.place("state-of-mounts").display().to_string();
    let with = ["--origin-fallback", "--state-dir", &state, "--io-timeout", "20s"];
    let (one, two) = (node.mount("d", "one", &with), node.mount("d", "two", &with));
    let (known, rest) = data.files.split_at(50);
    known.iter().for_each(|(path, hash)| read_one(&one.dir, path, *hash));
    node.settled(one.pid(), 50);
    node.site.kill();
    // The origin has what was read no more: only the store has.
    for (path, _) in known {
        fs::remove_file(data.dir.join(path)).expect("remove");
    }
    known.iter().for_each(|(path, hash)| read_one(&two.dir, path, *hash));
    let begun = Instant::now();
    rest.iter().for_each(|(path, hash)| read_one(&two.dir, path, *hash));
    assert!(begun.elapsed() < Duration::from_secs(15), "nobody waits for the server: {:?}", begun.elapsed());
    // And it is warm without a server, from its beginning.
    drop((one, two));
    let late = node.mount("d", "late", &with);
    known.iter().for_each(|(path, hash)| read_one(&late.dir, path, *hash));
}

#[test]
fn an_owner_that_cannot_listen_keeps_the_store_and_listens_when_it_can() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = Data::new(88, 40, 110_000);
    let node = Node::start();
    let _ = node.site.publish("d", &data.dir);
    let one = node.mount("d", "one", &[]);
    node.read_to_keep(&one.dir, &data);
    node.settled(one.pid(), 40);
    one.stop();
    // What nobody can bind over.
    let socket = node.stores()[0].join("node.sock");
    fs::create_dir_all(socket.join("in the way")).expect("mkdir");
    let before = node.sent("");
    let (two, three) = (node.mount("d", "two", &[]), node.mount("d", "three", &[]));
    read_all(&two.dir, &data);
    assert_eq!(node.sent("") - before, 0, "the store serves its owner");
    read_all(&three.dir, &data);
    assert_eq!(node.sent("") - before, data.bytes(), "whom nobody serves asks the server");
    let log = node.site.mount_log("two");
    assert_eq!(log.matches("other mounts cannot reach this node store").count(), 1, "{log}");
    fs::remove_dir_all(&socket).expect("remove");
    node.settled(two.pid(), 40);
    let log = node.site.mount_log("two");
    assert_eq!(log.matches("this mount owns the node's store").count(), 1, "it was its all the time: {log}");
    until("it has a guest", Duration::from_secs(20), || {
        node.site.mount_log("three").contains("another mount owns this node's store")
    });
    drop((two, three));
}
