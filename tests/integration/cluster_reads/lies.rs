//! Ranges of chunks that another server owns, and an owner that lies about chunks and ranges.

use crate::common::{FILE, NEWS, Origin};
use fletch_testkit::{Tamper, TamperProxy, Upstream};
use fletch_tests::cluster::{ClusterServer, EtcdCluster, agreed};
use fletch_tests::readers::Readers;
use fletch_tests::require::{Need, have};
use std::fs;

/// Starts the server `b`. What other servers get of it is changed on its way.
fn liar(origin: &Origin, etcd: &EtcdCluster) -> (ClusterServer, TamperProxy) {
    let config = format!("--config={}", origin.config);
    let mut b = ClusterServer::new("b", etcd, &[&config, "--cache-free-floor=0"]);
    let address = b.url.trim_start_matches("http://").parse().expect("an address");
    let liar = TamperProxy::start(Upstream::Tcp(address));
    liar.set("/v1/peers/", Tamper::FlipBit { byte: 777, bit: 3 }, None);
    b.add(format!("--cluster-peer-url={}", liar.endpoint()));
    b.start();
    b.register("set", &origin.emulator.uri(), &origin.tables, None);
    (b, liar)
}

#[test]
fn an_owner_that_lies_delivers_no_wrong_byte() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let origin = Origin::start(9, 48, None);
    let a = origin.server("a", &etcd, &[]);
    let (b, liar) = liar(&origin, &etcd);
    agreed(&[&a, &b], "a:up b:up", NEWS);
    let readers = Readers::new();
    let got = readers.read_through(&[&a.url], &origin.root, &origin.shuffled(1, 1), 8);
    assert_eq!((got.failed, got.bytes), (0, origin.data.bytes()));
    let blamed = a.metric("fletch_peer_wrong_bytes_total{peer=\"b\"} ").unwrap_or(0.0);
    assert!(liar.tampered() > 0 && blamed == liar.tampered() as f64, "{blamed} of {}", liar.tampered());
    assert!(a.log().contains("a peer returned wrong bytes"));
    // What b keeps is right.
    let got = readers.read_through(&[&b.url], &origin.root, &origin.shuffled(2, 1), 8);
    assert_eq!((got.failed, got.bytes), (0, origin.data.bytes()));
}

/// Bytes of a group, the least that is read of a chunk.
const GROUP: u64 = 16 << 10;

/// Reads 2 KiB, which lie in one group, of each file at a server. Panics when a byte is wrong.
fn read_windows(server: &ClusterServer, origin: &Origin) {
    let at = 100_000..102_048;
    let range = format!("range: bytes={}-{}", at.start, at.end - 1);
    for (path, _) in &origin.data.files {
        let got = server.get_with(&format!("/v1/versions/{}/files/{path}", origin.root), &range);
        let file = fs::read(origin.data.dir.join(path)).expect("a file");
        assert!(got == file[at.clone()], "{path}: {} bytes", got.len());
    }
}

/// Returns the bytes of content that a server has read at the origin.
fn content_bytes(server: &ClusterServer) -> u64 {
    let text = server.text("/metrics");
    let of_content =
        |line: &&str| line.starts_with("fletch_origin_read_bytes_total{") && line.contains("of=\"content\"");
    let value = |line: &str| line.rsplit(' ').next().and_then(|n| n.parse::<f64>().ok());
    text.lines().filter(of_content).filter_map(value).sum::<f64>() as u64
}

#[test]
fn a_range_of_a_chunk_of_another_server_comes_alone() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let origin = Origin::start(21, 96, None);
    let (a, b) = (origin.server("a", &etcd, &[]), origin.server("b", &etcd, &[]));
    agreed(&[&a, &b], "a:up b:up", NEWS);
    read_windows(&a, &origin);
    let received = a.sum("fletch_peer_received_bytes_total");
    // The owner keeps the chunk, and sends the group that has the window.
    let of_b = content_bytes(&b) / FILE;
    assert_eq!(received, (of_b * GROUP) as f64);
    assert!((20..76).contains(&of_b) && content_bytes(&a) == (96 - of_b) * FILE, "{of_b} chunks are b's");
    read_windows(&a, &origin);
    assert_eq!(a.sum("fletch_peer_received_bytes_total"), received, "the groups are in memory");
}

#[test]
fn an_owner_that_lies_about_groups_delivers_no_wrong_byte() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let origin = Origin::start(22, 96, None);
    let a = origin.server("a", &etcd, &[]);
    let (b, liar) = liar(&origin, &etcd);
    agreed(&[&a, &b], "a:up b:up", NEWS);
    read_windows(&a, &origin);
    let blamed = a.metric("fletch_peer_wrong_bytes_total{peer=\"b\"} ").unwrap_or(0.0);
    assert!(liar.tampered() > 0 && blamed == liar.tampered() as f64, "{blamed} of {}", liar.tampered());
    // Groups about which another server lied come from the origin, and no more of their chunks.
    assert_eq!(content_bytes(&a), liar.tampered() * GROUP + (96 - liar.tampered()) * FILE);
}
