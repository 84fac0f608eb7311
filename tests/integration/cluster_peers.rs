//! A real etcd, and servers that read from each other: one that accepts connections and does not answer, and
//! several that join at once.

use fletch_core::Hash;
use fletch_tests::cluster::{ClusterServer, Edge, EtcdCluster, agreed};
use fletch_tests::cluster_data::ClusterData;
use fletch_tests::require::{Need, have};
use std::time::{Duration, Instant};

/// How soon all servers have seen a change that etcd knows.
const NEWS: Duration = Duration::from_secs(3);
const FILES: u64 = 64;

/// Reads every file at a server, in four threads. Returns the longest read.
fn read_all(server: &ClusterServer, root: &str, files: &[(String, Hash)]) -> Duration {
    let read = |files: &[(String, Hash)]| {
        let times = files.iter().map(|(path, hash)| {
            let began = Instant::now();
            let bytes = server.file(root, path).unwrap_or_else(|| panic!("{path} was not read"));
            assert!(Hash::of(&bytes) == *hash, "{path}");
            began.elapsed()
        });
        times.max().unwrap_or_default()
    };
    std::thread::scope(|scope| {
        let parts: Vec<_> =
            files.chunks(files.len().div_ceil(4)).map(|part| scope.spawn(|| read(part))).collect();
        parts.into_iter().map(|part| part.join().expect("read")).max().unwrap_or_default()
    })
}

/// Returns the content bytes that servers read from origins.
fn from_origin(servers: &[&ClusterServer]) -> f64 {
    let of = |server: &&ClusterServer| {
        let text = server.text("/metrics");
        let lines = text
            .lines()
            .filter(|l| l.starts_with("fletch_origin_read_bytes_total{") && l.contains("of=\"content\""));
        lines.filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>()
    };
    servers.iter().map(of).sum()
}

#[test]
fn a_peer_that_accepts_and_does_not_answer_costs_its_readers_three_seconds_once() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let (etcd, set) = (EtcdCluster::start(1), ClusterData::new(51, FILES));
    let mut a = ClusterServer::new("a", &etcd, &["--cache-free-floor=0"]);
    let mut b = ClusterServer::new("b", &etcd, &["--cache-free-floor=0"]);
    let port = b.url.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");
    let edge = Edge::to(port);
    b.add(format!("--cluster-peer-url={}", edge.url()));
    a.start();
    b.start();
    agreed(&[&a, &b], "a:up b:up", NEWS);
    set.register(&a, None);
    let (first, rest) = set.data.files.split_at(16);
    read_all(&a, &set.root, first);
    assert!(a.sum("fletch_peer_requests_total") > 0.0, "some chunks are at the other server");
    edge.hold();
    let (first, rest) = rest.split_at(24);
    let longest = read_all(&a, &set.root, first);
    let later = Instant::now();
    let after = read_all(&a, &set.root, rest);
    eprintln!("reads beside a silent peer took at most {longest:?}, and later ones {after:?}");
    assert!(longest < Duration::from_secs(5), "{longest:?}");
    assert!(after < Duration::from_millis(1_900) && later.elapsed() < Duration::from_secs(5), "{after:?}");
    assert!(a.log().contains("it gives no sign of life"), "{}", a.log());
    edge.heal();
}

#[test]
fn three_servers_that_join_at_once_cost_the_origin_nothing() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let (etcd, set) = (EtcdCluster::start(1), ClusterData::new(52, FILES));
    let server = |id: &str| ClusterServer::new(id, &etcd, &["--cache-free-floor=0"]);
    let mut servers = ["a", "b", "c", "d"].map(server);
    servers[0].start();
    set.register(&servers[0], None);
    read_all(&servers[0], &set.root, &set.data.files);
    let all = from_origin(&[&servers[0]]);
    assert!(all > 0.0);
    std::thread::scope(|scope| {
        servers.iter_mut().skip(1).for_each(|server| drop(scope.spawn(|| server.start())));
    });
    let servers = servers.each_ref();
    agreed(&servers, "a:up b:up c:up d:up", NEWS);
    for server in &servers[1..] {
        read_all(server, &set.root, &set.data.files);
    }
    let more = from_origin(&servers) - all;
    assert!(more == 0.0, "the origin was read again: {more} of {all} bytes");
    let from_peers: f64 = servers.iter().map(|s| s.sum("fletch_peer_received_bytes_total")).sum();
    assert!(from_peers > 0.0);
}
