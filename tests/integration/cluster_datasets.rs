//! Several servers and a real etcd: datasets are registered once for all of them.

use fletch_tests::bins::{Running, bin, command, run, stdout, without_variables};
use fletch_tests::cluster::{ClusterServer, EtcdCluster, agreed};
use fletch_tests::fixture::index;
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use nix::sys::signal::Signal;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How soon all servers have seen a change that etcd knows.
const NEWS: Duration = Duration::from_secs(1);
/// How soon all is as before after etcd is back.
const BACK: Duration = Duration::from_secs(5);
/// `cluster.member_ttl` of the rig, and etcd's own delay.
const SILENCE: Duration = Duration::from_secs(6);

/// Two small datasets with their tables.
struct Trees {
    dir: TempDir,
    root: String,
}

impl Trees {
    fn new() -> Self {
        let dir = TempDir::with_prefix("fletch-datasets-").expect("dir");
        let mut roots = ["one", "two"].map(|name| {
            let tree = dir.path().join(name);
            fs::create_dir(&tree).expect("mkdir");
            fs::write(tree.join("f"), name.repeat(500)).expect("write");
            index(&tree, &dir.path().join(format!("tables-{name}")), &[])
        });
        Trees { root: std::mem::take(&mut roots[0]), dir }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the command that registers a tree at a server.
    fn register(&self, server: &str, name: &str, tree: &str) -> Command {
        let mut c = command("fletch");
        c.args(["register", name]).arg(self.at(tree)).arg("--tables").arg(self.at(&format!("tables-{tree}")));
        c.args(["--server", server]);
        c
    }
}

/// Sends a change once, as no command does: commands wait for etcd. Returns the status and the body.
fn send(server: &ClusterServer, method: &str, path: &str, body: &str) -> (u16, String) {
    let mut c = Command::new("curl");
    c.args(["-sS", "--max-time", "15", "-w", "%{stderr}%{http_code}", "-X", method, "-d", body]);
    let out = run(c.args(["-H", "content-type: application/json"]).arg(format!("{}{path}", server.url)));
    let status = String::from_utf8_lossy(&out.stderr).parse().unwrap_or(0);
    (status, String::from_utf8_lossy(&out.stdout).into_owned())
}

fn unregister(server: &ClusterServer, name: &str) -> Command {
    let mut c = command("fletch");
    c.args(["unregister", name, "--server", &server.url]);
    c
}

/// Returns the tree that a server has registered under a name.
fn tree_of(server: &ClusterServer, name: &str) -> Option<String> {
    let text = server.text(&format!("/v1/datasets/{name}"));
    let (head, body) = text.split_once("\r\n\r\n").expect("an answer");
    let dataset: serde_json::Value = serde_json::from_str(body).expect("JSON");
    let uri = dataset["uri"].as_str().unwrap_or_default();
    let tree = Path::new(uri).file_name().map(|tree| tree.to_string_lossy().into_owned());
    tree.filter(|_| head.starts_with("HTTP/1.1 200"))
}

fn has(server: &ClusterServer, name: &str) -> bool {
    tree_of(server, name).is_some()
}

fn servers<const N: usize>(etcd: &EtcdCluster, more: &[&str]) -> [ClusterServer; N] {
    std::array::from_fn(|i| {
        let mut server = ClusterServer::new(["a", "b", "c"][i], etcd, more);
        server.start();
        server
    })
}

#[test]
fn a_dataset_is_registered_once_for_all_servers() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let trees = Trees::new();
    let [a, b, mut c] = servers(&etcd, &[]);
    agreed(&[&a, &b, &c], "a:up b:up c:up", NEWS);
    run(&mut trees.register(&a.url, "d", "one"));
    until("all servers know it", NEWS, || has(&a, "d") && has(&b, "d") && has(&c, "d"));
    assert_eq!(b.file(&trees.root, "f").expect("a file"), b"one".repeat(500));

    // A replacement and an end are in force everywhere when the command returns.
    run(trees.register(&b.url, "d", "two").arg("--replace"));
    assert!([&a, &b, &c].iter().all(|s| tree_of(s, "d").as_deref() == Some("two")));
    assert_eq!(a.file(&trees.root, "f"), None, "nobody has registered the first tree any more");
    let ended = run(&mut unregister(&c, "d"));
    assert!(![&a, &b, &c].iter().any(|s| has(s, "d")));
    assert!(ended.stderr.is_empty(), "{}", String::from_utf8_lossy(&ended.stderr));

    // Of two trees that want one name at the same moment, one gets it. All servers agree which.
    for i in 0..10 {
        let name = format!("race-{i}");
        let asked = [(&a, "one"), (&b, "two"), (&c, "one")];
        let won: Vec<bool> = thread::scope(|scope| {
            let ask = |(server, tree): (&ClusterServer, &'static str)| {
                let mut c = trees.register(&server.url, &name, tree);
                scope.spawn(move || c.output().expect("fletch runs").status.success())
            };
            let running = asked.map(ask);
            running.into_iter().map(|r| r.join().expect("no panic")).collect()
        });
        let tree = tree_of(&a, &name).expect("somebody won");
        assert!(
            asked.iter().zip(&won).all(|((_, wanted), won)| (*wanted == tree) == *won),
            "{won:?}, {tree}"
        );
        until("all agree", NEWS, || [&b, &c].iter().all(|s| tree_of(s, &name).as_ref() == Some(&tree)));
    }
    // A restart, and a server that comes later.
    c.kill();
    c.start();
    assert!(has(&c, "race-0") && has(&c, "race-9"));
    let seen = |s: &ClusterServer| s.metric("fletch_cluster_registrations_revision ");
    assert!(seen(&a).is_some_and(|revision| revision > 0.0));
    until("all have the same revision", NEWS, || seen(&a) == seen(&b));
}

#[test]
fn without_etcd_datasets_stay_and_do_not_change() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let mut etcd = EtcdCluster::start(1);
    let trees = Trees::new();
    let [a, mut b] = servers(&etcd, &[]);
    agreed(&[&a, &b], "a:up b:up", NEWS);
    run(&mut trees.register(&a.url, "d", "one"));
    run(&mut trees.register(&a.url, "kept", "two"));
    until("both know them", NEWS, || has(&b, "d") && has(&b, "kept"));

    // A server that is cut off serves what it knew, and is named.
    b.cut_all(true);
    let begun = Instant::now();
    let ended = unregister(&a, "d").output().expect("fletch runs");
    assert_eq!(ended.status.code(), Some(3), "{ended:?}");
    let told = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(told.contains("b did not confirm it") && told.contains("fletch cluster status"), "{told}");
    assert!(begun.elapsed() < SILENCE, "{:?}", begun.elapsed());
    assert!(!has(&a, "d") && has(&b, "d"));
    assert_eq!(b.file(&trees.root, "f").expect("a file"), b"one".repeat(500));
    let new = serde_json::json!({"name": "new", "uri": trees.at("one"), "tables": trees.at("tables-one")});
    let (status, told) = send(&b, "POST", "/v1/datasets", &new.to_string());
    assert!(status == 503 && told.contains("check that etcd can be reached"), "{status} {told}");
    assert!(!told.contains("127.0.0.1"), "it names no host: {told}");
    // It also starts with what it knew.
    b.kill();
    b.start();
    assert!(has(&b, "d") && has(&b, "kept"));
    b.cut_all(false);
    until("it hears of the end", BACK, || !has(&b, "d"));
    assert!(has(&b, "kept"));

    // etcd comes back, and all goes on.
    etcd.kill(0);
    assert!(has(&a, "kept") && has(&b, "kept"));
    assert_eq!(send(&a, "POST", "/v1/datasets", &new.to_string()).0, 503);
    etcd.revive(0);
    until("changes are possible again", BACK, || send(&b, "POST", "/v1/datasets", &new.to_string()).0 < 300);
    until("both know it", NEWS, || has(&a, "new") && has(&b, "new"));

    // An etcd that lost its keys ends no access.
    etcd.wipe();
    thread::sleep(Duration::from_secs(2));
    assert!(has(&a, "kept") && has(&b, "new"));
    assert_eq!(send(&a, "DELETE", "/v1/datasets/kept", "").0, 503);
    assert!(has(&a, "kept"));
}

#[test]
fn a_server_brings_its_datasets_into_a_cluster() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let trees = Trees::new();
    let [a] = servers(&etcd, &[]);
    run(&mut trees.register(&a.url, "shared", "one"));
    // A server that was alone, with datasets of its own.
    let mut b = ClusterServer::new("b", &etcd, &[]);
    let alone = b.url.trim_start_matches("http://").to_owned();
    let mut c = without_variables(Command::new(bin("fletch-server")));
    c.args(["--listen", &alone, "--socket=none", "--cache-size=0", "--cluster-id=b"]);
    c.arg("--state-dir").arg(b.place("state")).arg("--cache-dir").arg(b.place("cache"));
    c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut before = Running::spawn("fletch-server", &mut c);
    until("the server answers", Duration::from_secs(20), || b.status("/livez") == 200);
    run(&mut trees.register(&b.url, "own", "two"));
    run(&mut trees.register(&b.url, "shared", "two"));
    before.signal(Signal::SIGTERM);
    assert!(before.wait(Duration::from_secs(10)).success());
    b.start();
    until("both know both", NEWS, || {
        [&a, &b].iter().all(|s| tree_of(s, "own").as_deref() == Some("two") && has(s, "shared"))
    });
    assert_eq!(tree_of(&b, "shared").as_deref(), Some("one"), "the cluster's dataset wins");
    assert!(b.log().contains("the cluster has a dataset of this name"), "{}", b.log());
    // What the cluster unregisters does not come back with a restart.
    run(&mut unregister(&a, "own"));
    b.kill();
    b.start();
    assert!(!has(&b, "own") && !has(&a, "own"));
}

#[test]
fn a_quota_holds_over_all_servers() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let trees = Trees::new();
    let file = trees.at("tokens.toml");
    let token = |name: &str, more: &[&str]| {
        let mut c = command("fletch-server");
        c.args(["token", "new", "--append"]).arg(&file).args(more);
        let at = trees.at(&format!("{name}.token"));
        fs::write(&at, stdout(&run(&mut c))).expect("token");
        at
    };
    let (client, peer) = (token("client", &["--tenant", "t"]), token("peer", &["--role", "peer"]));
    // Each tree has 1,500 bytes, so there is room for three.
    let tokens = fs::read_to_string(&file).expect("tokens");
    let quota = "\n[[tenant]]\nname = \"t\"\nregistered = 5000\n";
    fs::write(&file, tokens + quota).expect("tokens");
    let words = [
        format!("--auth-tokens={}", file.display()),
        format!("--cluster-peer-token-file={}", peer.display()),
        format!("--local-dirs={}=*", trees.dir.path().display()),
    ];
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let [a, b, c] = servers(&etcd, &words);
    let asked: Vec<(&ClusterServer, String)> =
        [&a, &b, &c].into_iter().cycle().take(9).enumerate().map(|(i, s)| (s, format!("d{i}"))).collect();
    let told: Vec<(bool, String)> = thread::scope(|scope| {
        let ask = |(server, name): &(&ClusterServer, String)| {
            let mut c = trees.register(&server.url, name, "one");
            c.arg("--token-file").arg(&client);
            scope.spawn(move || {
                let out = c.output().expect("fletch runs");
                (out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned())
            })
        };
        let running: Vec<_> = asked.iter().map(ask).collect();
        running.into_iter().map(|r| r.join().expect("no panic")).collect()
    });
    assert_eq!(told.iter().filter(|(won, _)| *won).count(), 3, "{told:?}");
    assert!(told.iter().filter(|(won, _)| !won).all(|(_, why)| why.contains("of 5000 bytes")), "{told:?}");
}

/// A server that is cut off for so long that the ring forgets it still serves, so it is named all the same.
#[test]
fn a_forgotten_server_is_named_until_it_stops_or_is_drained() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let trees = Trees::new();
    let [a, mut b, mut c] = servers(&etcd, &["--cluster-forget-after=1s"]);
    agreed(&[&a, &b, &c], "a:up b:up c:up", NEWS);
    for name in ["d", "e", "f"] {
        run(&mut trees.register(&a.url, name, "one"));
    }
    until("all servers know them", NEWS, || [&b, &c].iter().all(|s| has(s, "f")));
    b.cut_all(true);
    c.end();
    until("the ring has forgotten both", Duration::from_secs(15), || a.members() == "a:up");
    let ended = unregister(&a, "d").output().expect("fletch runs");
    let told = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(ended.status.code() == Some(3) && told.contains("b did not confirm it"), "{told}");
    assert!(has(&b, "d"), "it serves what it knew");
    b.kill();
    let ended = unregister(&a, "e").output().expect("fletch runs");
    assert_eq!(ended.status.code(), Some(3), "nobody knows that it was killed: {ended:?}");
    let mut drain = command("fletch");
    run(drain.args(["cluster", "drain", "b", "--server", &a.url]));
    let ended = run(&mut unregister(&a, "f"));
    assert!(ended.stderr.is_empty(), "{}", String::from_utf8_lossy(&ended.stderr));
    b.cut_all(false);
    b.start();
    until("it heard of all", BACK, || !has(&b, "d") && !has(&b, "f"));
}

/// With `cluster.stale_max`, a server that is cut off serves what was revoked for so long at most.
#[test]
fn a_server_that_is_cut_off_stops_after_stale_max() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let trees = Trees::new();
    let [a, b] = servers(&etcd, &["--cluster-stale-max=3s"]);
    agreed(&[&a, &b], "a:up b:up", NEWS);
    run(&mut trees.register(&a.url, "d", "one"));
    until("both know it", NEWS, || has(&b, "d"));
    b.cut_all(true);
    let cut = std::time::Instant::now();
    assert_eq!(unregister(&a, "d").status().expect("fletch runs").code(), Some(3));
    until("it serves nothing any more", Duration::from_secs(10), || b.status("/v1/datasets/d") == 503);
    assert!(cut.elapsed() < Duration::from_secs(9), "{:?}", cut.elapsed());
    assert!(b.text("/v1/jobs").contains("may have missed"), "jobs neither");
    assert_eq!((b.status("/v1/cluster"), b.status("/metrics"), b.status("/livez")), (200, 200, 200));
    b.cut_all(false);
    until("it serves again, and not the dataset", BACK, || b.status("/v1/datasets/d") == 404);
}
