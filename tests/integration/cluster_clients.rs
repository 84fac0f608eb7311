//! Clients of a cluster: they ask the owners of chunks, and go on while servers come, go and hang.

use fletch_core::Hash;
use fletch_testkit::{Tamper, TamperProxy, Upstream};
use fletch_tests::bins::{command, run, stdout};
use fletch_tests::cluster::{ClusterServer, EtcdCluster, agreed};
use fletch_tests::fixture::{Mounted, Site};
use fletch_tests::readers::Data;
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use nix::sys::signal::Signal;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How soon all servers have seen a change that etcd knows.
const NEWS: Duration = Duration::from_secs(2);
/// An address where nothing listens.
const NOBODY: &str = "http://127.0.0.1:1";
/// Bytes of a file, which is a chunk.
const FILE: u64 = 256 << 10;

/// A dataset with its tables, and a place for mounts.
struct Set {
    data: Data,
    tables: String,
    scratch: TempDir,
}

impl Set {
    /// Indexes `files` files, or packs them into chunks.
    fn new(seed: u64, files: u64, len: u64, command_name: &str) -> Self {
        let data = Data::new(seed, files, len);
        let scratch = TempDir::with_prefix("fletch-clients-").expect("scratch");
        let at = |name: &str| scratch.path().join(name).display().to_string();
        let tables = at("tables");
        fs::create_dir(&tables).expect("tables");
        let mut c = command("fletch");
        c.arg(command_name).arg(&data.dir).args(["--to", &tables, "--state-dir", &at("state")]);
        drop(stdout(&run(&mut c)));
        Set { data, tables, scratch }
    }

    fn register(&self, server: &ClusterServer, name: &str) {
        server.register(name, &self.data.dir.display().to_string(), &self.tables, None);
    }

    fn server(&self, id: &str, etcd: &EtcdCluster, more: &[&str]) -> ClusterServer {
        let words = [&["--cache-free-floor=0"], more].concat();
        let mut server = ClusterServer::new(id, etcd, &words);
        server.start();
        self.register(&server, "set");
        server
    }

    fn log(&self, job: &str) -> PathBuf {
        self.scratch.path().join(format!("{job}.log"))
    }

    fn mount(&self, servers: &str, name: &str, job: &str) -> Mounted {
        let dir = self.scratch.path().join(format!("mnt-{job}"));
        fs::create_dir(&dir).expect("a directory");
        Mounted::start(servers, dir, &self.log(job), &[name, "--job", job])
    }

    /// Reads files through a mount by four readers. Returns the longest time of a read.
    fn read(&self, dir: &Path, files: &[(String, Hash)]) -> Duration {
        let part = |reader: usize| {
            let mut longest = Duration::ZERO;
            for (path, hash) in files.iter().skip(reader).step_by(4) {
                let begun = Instant::now();
                let bytes = fs::read(dir.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
                assert!(Hash::of(&bytes) == *hash, "I1: {path}");
                longest = longest.max(begun.elapsed());
            }
            longest
        };
        std::thread::scope(|s| {
            let readers: Vec<_> = (0..4).map(|i| s.spawn(move || part(i))).collect();
            readers.into_iter().map(|r| r.join().expect("a reader")).max().unwrap_or_default()
        })
    }
}

fn list(servers: &[&ClusterServer]) -> String {
    servers.iter().map(|s| &*s.url).collect::<Vec<_>>().join(",")
}

/// Returns the bytes that servers got from each other.
fn hops(servers: &[&ClusterServer]) -> f64 {
    servers.iter().map(|s| s.sum("fletch_peer_received_bytes_total")).sum()
}

#[test]
fn a_mount_reads_each_chunk_at_its_owner() {
    if !have(&[Need::Etcd, Need::Fuse]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let set = Set::new(1, 96, FILE, "index");
    let packed = Set::new(2, 400, 20 << 10, "pack");
    let all = ["a", "b", "c"].map(|id| set.server(id, &etcd, &[]));
    let [a, b, c] = &all;
    all.iter().for_each(|s| packed.register(s, "packed"));
    agreed(&[a, b, c], "a:up b:up c:up", NEWS);
    // One address is enough: its view names the others.
    for (what, name, job, servers) in
        [(&set, "set", "one", a.url.clone()), (&packed, "packed", "packs", list(&[b, a, c]))]
    {
        let mount = what.mount(&servers, name, job);
        what.read(&mount.dir, &what.data.files);
        assert_eq!(hops(&[a, b, c]), 0.0, "{name}: a peer hop");
        let log = fs::read_to_string(what.log(job)).expect("log");
        assert!(log.contains("the servers of this cluster") && log.contains(&*c.url), "{log}");
        mount.stop();
    }
    let sent = all.each_ref().map(|s| s.sum("fletch_bytes_total"));
    assert!(sent.iter().all(|n| *n > set.data.bytes() as f64 / 10.0), "each has its part: {sent:?}");
}

#[test]
fn servers_that_die_or_hang_fail_no_read_of_a_mount() {
    if !have(&[Need::Etcd, Need::Fuse]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let set = Set::new(3, 240, FILE, "index");
    let [mut a, b, c] = ["a", "b", "c"].map(|id| set.server(id, &etcd, &[]));
    agreed(&[&a, &b, &c], "a:up b:up c:up", NEWS);
    // The user named one server, and that one dies.
    let mount = set.mount(&a.url, "set", "survivor");
    let (first, second) = set.data.files.split_at(120);
    let longest = std::thread::scope(|s| {
        let reading = s.spawn(|| set.read(&mount.dir, first));
        until("some files are read", Duration::from_secs(20), || c.sum("fletch_bytes_total") > 3e6);
        a.kill();
        reading.join().expect("readers")
    });
    println!("killed: the longest read took {longest:?}");
    assert!(longest < Duration::from_secs(5), "{longest:?}");
    b.signal(Signal::SIGSTOP);
    let longest = set.read(&mount.dir, second);
    b.signal(Signal::SIGCONT);
    println!("stopped: the longest read took {longest:?}");
    assert!(longest < Duration::from_secs(12), "{longest:?}");
    mount.stop();
}

#[test]
fn the_second_server_of_a_list_is_enough() {
    if !have(&[Need::Etcd, Need::Fuse]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let set = Set::new(4, 24, FILE, "index");
    let a = set.server("a", &etcd, &[]);
    let servers = format!("{NOBODY},{}", a.url);
    let fletch = |words: &[&str], servers: &str| {
        let mut c = command("fletch");
        c.args(words).args(["--server", servers]).output().expect("fletch runs")
    };
    for words in [&["datasets"][..], &["status"], &["ls", "set"], &["cluster", "status"]] {
        let out = fletch(words, &servers);
        assert!(out.status.success(), "{words:?}: {}", String::from_utf8_lossy(&out.stderr));
    }
    let mount = set.mount(&servers, "set", "second");
    set.read(&mount.dir, &set.data.files);
    mount.stop();
    let failed = fletch(&["datasets"], &format!("{NOBODY},http://127.0.0.1:2"));
    let text = String::from_utf8_lossy(&failed.stderr);
    assert_eq!(failed.status.code(), Some(4), "{text}");
    assert!(text.contains(NOBODY) && text.contains("1 other server"), "{text}");
    let mixed = fletch(&["datasets"], "unix:/run/x,http://127.0.0.1:2");
    assert_eq!(mixed.status.code(), Some(2), "{}", String::from_utf8_lossy(&mixed.stderr));
}

#[test]
fn a_stale_view_costs_hops_and_no_errors() {
    if !have(&[Need::Etcd, Need::Fuse]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let set = Set::new(5, 180, FILE, "index");
    // Clients reach each server by a proxy, other servers reach it directly.
    let server = |id: &str| {
        let mut server = ClusterServer::new(id, &etcd, &["--cache-free-floor=0"]);
        let address = server.url.trim_start_matches("http://").parse().expect("an address");
        let proxy = TamperProxy::start(Upstream::Tcp(address));
        server.add(format!("--cluster-advertise-url={}", proxy.endpoint()));
        server.add(format!("--cluster-peer-url={}", server.url));
        server.start();
        set.register(&server, "set");
        (server, proxy)
    };
    let [(a, to_a), (b, to_b)] = ["a", "b"].map(server);
    agreed(&[&a, &b], "a:up b:up", NEWS);
    let mount = set.mount(&to_a.endpoint(), "set", "stale");
    let parts: Vec<_> = set.data.files.chunks(60).collect();
    set.read(&mount.dir, parts[0]);
    assert_eq!(hops(&[&a, &b]), 0.0);
    for proxy in [&to_a, &to_b] {
        proxy.set("/v1/cluster", Tamper::Cut { after: 0 }, None);
    }
    let (c, to_c) = server("c");
    agreed(&[&a, &b, &c], "a:up b:up c:up", NEWS);
    // In the long form the view is stale for a minute.
    let pause = Duration::from_secs(u64::from(std::env::var("FLETCH_CLUSTER").is_ok()));
    for file in parts[1] {
        set.read(&mount.dir, std::slice::from_ref(file));
        std::thread::sleep(pause);
    }
    assert!(hops(&[&a, &b]) > 0.0, "a and b ask the owner c");
    assert_eq!(to_c.responses(), 0, "the mount does not know c");
    [&to_a, &to_b].iter().for_each(|proxy| proxy.clear());
    // One answer brings the news, and the view follows within some seconds.
    until("the mount knows c", Duration::from_secs(10), || {
        fs::read_to_string(set.log("stale")).is_ok_and(|log| log.contains(&to_c.endpoint()))
    });
    let before = hops(&[&a, &b, &c]);
    set.read(&mount.dir, parts[2]);
    assert_eq!(hops(&[&a, &b, &c]), before, "no hop with the new view");
    assert!(to_c.responses() > 0);
    mount.stop();
}

#[test]
fn a_server_that_is_alone_gets_no_other_requests_than_before() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let set = Set::new(6, 40, FILE, "index");
    let site = Site::start(&[]);
    site.register("set", &set.data.dir.display().to_string(), &set.tables);
    let mount = set.mount(&site.url, "set", "alone");
    set.read(&mount.dir, &set.data.files);
    mount.stop();
    let metrics = site.metrics();
    let of = |route: &str| -> f64 {
        let is_route = |k: &&String| k.starts_with("fletch_requests_total") && k.contains(route);
        metrics.iter().filter(|(k, _)| is_route(k)).map(|(_, v)| v).sum()
    };
    assert_eq!((of("/v1/cluster"), of("/livez")), (0.0, 0.0), "{metrics:?}");
    assert_eq!(of("/chunks/"), 40.0, "one request a chunk: {metrics:?}");
}
