//! I7: each server and token has its own store. A store serves no version to which its token lost access.

use crate::common::{Node, read_all, state_of, token};
use fletch_tests::bins::{command, run};
use fletch_tests::fixture::index;
use fletch_tests::readers::Data;
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;

#[test]
fn another_token_is_another_store_and_a_grant_that_ends_ends_both() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let home = TempDir::with_prefix("fletch-node-").expect("home");
    let tokens = home.path().join("tokens.toml");
    let (a, b) = (token(home.path(), &tokens, "a"), token(home.path(), &tokens, "b"));
    let data = Data::new(78, 40, 110_000);
    let tables = home.path().join("tables");
    fs::create_dir(&tables).expect("mkdir");
    let root = index(&data.dir, &tables, &[]);
    let dirs = format!("{}=*:{}=*", data.dir.display(), tables.display());
    let node = Node::with(&["--auth-tokens", tokens.to_str().expect("utf-8"), "--local-dirs", &dirs]);
    let fletch = |token: &std::path::Path, args: &[&str]| {
        run(command("fletch").args(args).args(["--server", &node.site.url]).arg("--token-file").arg(token));
    };
    let (uri, at) = (data.dir.display().to_string(), tables.display().to_string());
    for token in [&a, &b] {
        fletch(token, &["register", "d", &uri, "--tables", &at]);
    }
    let mount = |job: &str, token: &std::path::Path| {
        let token = token.display().to_string();
        let report = node.site.place("out").join(job).display().to_string();
        node.mount("d", job, &["--token-file", &token, "--report", &report])
    };
    let report = |job: &str| -> serde_json::Value {
        let text = fs::read(node.site.place("out").join(job)).expect("report");
        serde_json::from_slice(&text).expect("JSON")
    };
    let (owner, guest) = (mount("a1", &a), mount("a2", &a));
    read_all(&owner.dir, &data);
    let of_a = node.stores();
    assert_eq!(of_a.len(), 1);
    let mode = |p: &std::path::Path| fs::metadata(p).expect("metadata").permissions().mode() & 0o777;
    assert_eq!(mode(&of_a[0]), 0o700);
    let socket = of_a[0].join("node.sock");
    assert!(fs::metadata(&socket).expect("socket").file_type().is_socket() && mode(&socket) == 0o600);

    // The other tenant reads the same bytes of the same server, and shares none.
    let other = mount("b1", &b);
    read_all(&other.dir, &data);
    assert_eq!(node.stores().len(), 2, "one for each");
    other.stop();
    let other = report("b1");
    assert!(other["server_bytes"].as_u64() >= Some(data.bytes()), "{other}");
    assert_eq!((&other["node"]["bytes"], &other["node"]["role"]), (&0.into(), &"owner".into()), "{other}");

    read_all(&guest.dir, &data);
    // What a guest would ask, asked of the owner before and after the grant.
    let dir = fs::File::open(&of_a[0]).expect("store");
    let path = format!("/proc/{}/fd/{}/node.sock", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&dir));
    let (_, hash) = &data.files[0];
    let ask = || {
        let mut c = Command::new("curl");
        c.args([
            "-sS",
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}",
            "-H",
            "fletch-job: a2",
            "--unix-socket",
            &path,
        ]);
        c.arg(format!("http://localhost/node/v1/versions/{root}/chunks/{hash}/{}", data.len));
        String::from_utf8(run(&mut c).stdout).expect("a status")
    };
    assert_eq!(ask(), "200");
    fletch(&a, &["unregister", "d"]);
    let begun = Instant::now();
    let refused = |m: &std::path::Path| {
        data.files
            .iter()
            .all(|(p, _)| fs::read(m.join(p)).is_err_and(|e| e.raw_os_error() == Some(libc::ESTALE)))
    };
    until("guest and owner refuse, though the owner's disk has all of it", Duration::from_secs(5), || {
        refused(&guest.dir) && refused(&owner.dir)
    });
    until("and so does the socket", Duration::from_secs(5).saturating_sub(begun.elapsed()), || {
        ask() == "404"
    });
    assert_eq!(state_of(&of_a[0]).expect("it lives")["chunks"], 40, "it is all still there");
    drop((owner, guest));
}

#[test]
fn a_directory_of_somebody_else_is_no_store() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = Data::new(79, 10, 50_000);
    let node = Node::start();
    let _ = node.site.publish("d", &data.dir);
    let all = node.cache.join(format!("mounts-{}", nix::unistd::geteuid()));
    fs::create_dir(&all).expect("mkdir");
    fs::set_permissions(&all, fs::Permissions::from_mode(0o777)).expect("chmod");
    let one = node.mount("d", "one", &[]);
    read_all(&one.dir, &data);
    let log = node.site.mount_log("one");
    assert!(log.contains("is not a directory of this user alone"), "{log}");
    assert!(node.stores().is_empty());
    fs::set_permissions(&all, fs::Permissions::from_mode(0o700)).expect("chmod");
    until("it is used when it is ours alone", Duration::from_secs(10), || node.state().is_some());
    one.stop();
}

#[test]
fn over_the_socket_of_a_server_there_is_no_second_store() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = Data::new(80, 10, 50_000);
    let node = Node::start();
    let _ = node.site.publish("d", &data.dir);
    let server = format!("unix:{}", node.site.socket().display());
    let cache = node.cache.display().to_string();
    let more = ["--cache-dir", &cache, "--cache-size", "64MiB"];
    let one = node.site.mount_from(&server, "d", "local", &more);
    read_all(&one.dir, &data);
    assert!(node.site.mount_log("local").contains("cache.size is not used"));
    assert!(node.stores().is_empty());
    one.stop();
}

#[test]
fn i7_a_token_that_is_rotated_under_mounts_is_another_store() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let home = TempDir::with_prefix("fletch-node-").expect("home");
    let (tokens, later) = (home.path().join("tokens.toml"), home.path().join("later.toml"));
    let old = fs::read(token(home.path(), &tokens, "a")).expect("token");
    let file = token(home.path(), &later, "a");
    let new = fs::read(&file).expect("token");
    fs::write(&file, old).expect("the first");
    let data = Data::new(89, 40, 110_000);
    let tables = home.path().join("tables");
    fs::create_dir(&tables).expect("mkdir");
    let _ = index(&data.dir, &tables, &[]);
    let dirs = format!("{}=*:{}=*", data.dir.display(), tables.display());
    let node = Node::with(&["--auth-tokens", tokens.to_str().expect("utf-8"), "--local-dirs", &dirs]);
    let (uri, at, file_arg) = (data.dir.display(), tables.display(), file.display().to_string());
    let (uri, at) = (uri.to_string(), at.to_string());
    run(command("fletch")
        .args(["register", "d", &uri, "--tables", &at, "--server", &node.site.url])
        .args(["--token-file", &file_arg]));
    let mount = |job: &str| node.mount("d", job, &["--token-file", &file_arg]);
    let (one, two) = (mount("one"), mount("two"));
    read_all(&one.dir, &data);
    let of_old = node.stores();
    assert_eq!(of_old.len(), 1);
    fs::write(&file, new).expect("rotate");
    fs::rename(&later, &tokens).expect("the old one ends");
    until("the store of the new token has an owner", Duration::from_secs(60), || {
        node.stores().iter().any(|s| !of_old.contains(s) && state_of(s).is_some())
    });
    until("and the old one none", Duration::from_secs(60), || state_of(&of_old[0]).is_none());
    for m in [&one, &two] {
        read_all(&m.dir, &data);
    }
    drop((one, two));
}
