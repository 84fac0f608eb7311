//! Failures of the table in CLUSTER that no other test makes happen: servers without etcd that restart, and
//! servers that do not reach etcd or each other.

use fletch_api::{BatchTimes, Code, OrderKind, StartJob, WorldSpec};
use fletch_client::{
    Client, ClientConfig,
    epochs::{JobHandle, Next},
};
use fletch_core::{Hash, plan::Tail};
use fletch_tests::bins::{command, run};
use fletch_tests::cluster::{ClusterServer, Edge, EtcdCluster, agreed};
use fletch_tests::cluster_data::{ClusterData, declaration};
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use std::thread;
use std::time::Duration;

/// How soon all servers have seen a change that etcd knows.
const NEWS: Duration = Duration::from_secs(3);
/// How soon a silent server counts as down: `cluster.member_ttl` of the rig, and etcd's own delay.
const SILENCE: Duration = Duration::from_secs(8);
/// How soon a member that failed is asked again: the longest rest is 10 s.
const REST: Duration = Duration::from_secs(20);
const SAMPLES: u32 = 48;
const BATCH: u32 = 4;

fn client(server: &ClusterServer) -> Client {
    Client::new(ClientConfig::new(server.url.parse().expect("url"), "loader")).expect("client")
}

fn ask() -> StartJob {
    declaration("run", OrderKind::Strict, WorldSpec { ranks: 1, batch: BATCH, tail: Tail::Drop })
}

/// Takes and acknowledges at most `leases` leases. Returns their entries.
async fn take(job: &JobHandle, mut leases: u32) -> Vec<u32> {
    let (mut reader, mut entries) = (job.reader(0, 0, 0), Vec::new());
    while leases > 0 {
        match reader.next(BATCH).await.expect("a lease") {
            Next::Batch(batch) => {
                job.ack(0, 0, &[batch.token.ack(BatchTimes::default())]).await.expect("acknowledged");
                job.held().release(0, 0, batch.token.lease);
                entries.extend(batch.samples.iter().map(|s| s.entry));
                leases -= 1;
            }
            Next::Done => break,
            Next::Full | Next::Last => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
    entries
}

/// Reads files at a server and compares their bytes.
fn read_all(server: &ClusterServer, root: &str, files: &[(String, Hash)]) {
    for (path, hash) in files {
        let bytes = server.file(root, path).unwrap_or_else(|| panic!("{path} was not read"));
        assert!(Hash::of(&bytes) == *hash, "{path}");
    }
}

/// Another server may have the jobs of one that starts without etcd, so that one serves none. It reads, and
/// the view of all servers stays: nobody joins and nobody leaves.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_restarts_without_etcd_reads_and_serves_no_job() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let (mut etcd, set) = (EtcdCluster::start(1), ClusterData::new(71, SAMPLES.into()));
    let mut servers = Vec::from(set.servers::<3>(&etcd, &[], None));
    let view = agreed(&servers.iter().collect::<Vec<_>>(), "a:up b:up c:up", NEWS);
    let job = client(&servers[0]).declare(&ask()).await.expect("declared");
    let mut entries = take(&job, 3).await;
    let path = format!("/v1/jobs/{}", job.info().id);
    until("all know the job", NEWS, || servers.iter().all(|s| s.status(&path) != 404));
    let at = servers.iter().position(|s| s.url == job.server()).expect("a server of the cluster");
    etcd.kill(0);
    servers[at].kill();
    // Longer than `cluster.member_ttl` and its lease in etcd.
    thread::sleep(Duration::from_secs(4));
    for server in servers.iter().filter(|s| s.url != job.server()) {
        assert_eq!((server.view_number(), &*server.members()), (view, "a:up b:up c:up"), "it stays");
        read_all(server, &set.root, &set.data.files);
    }
    servers[at].start();
    assert_eq!((servers[at].view_number(), servers[at].status("/readyz")), (view, 200));
    read_all(&servers[at], &set.root, &set.data.files);
    let state = servers[at].text(&format!("{path}/epochs/0/state"));
    assert!(state.contains(" 503 ") && state.contains("\"retryable\":true"), "{state}");
    let impatient = client(&servers[at]).within(Duration::from_secs(1)).declare(&ask()).await;
    let refused = impatient.map(|job| job.info().name.clone()).expect_err("it serves no job");
    assert_eq!(refused.code(), Some(Code::NotReady), "{refused}");
    etcd.revive(0);
    entries.extend(take(&job, u32::MAX).await);
    entries.sort_unstable();
    assert_eq!(entries, (0..SAMPLES).collect::<Vec<_>>(), "each entry once");
    assert_eq!(agreed(&servers.iter().collect::<Vec<_>>(), "a:up b:up c:up", SILENCE), view);
}

/// A server that does not reach etcd counts as down for the others, and reads for whoever asks it.
#[test]
fn a_server_that_does_not_reach_etcd_reads_by_its_last_view() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let (etcd, set) = (EtcdCluster::start(1), ClusterData::new(72, SAMPLES.into()));
    let [a, b] = set.servers::<2>(&etcd, &[], None);
    let view = b.view_number();
    b.cut_all(true);
    agreed(&[&a], "a:up b:down", SILENCE);
    let (first, second) = set.data.files.split_at(24);
    read_all(&b, &set.root, first);
    read_all(&a, &set.root, second);
    assert_eq!((b.view_number(), &*b.members()), (view, "a:up b:up"), "its last view");
    assert_eq!(b.metric("fletch_cluster_coordinator_up "), Some(0.0));
    assert!(b.log().contains("no contact with the cluster"), "{}", b.log());
    b.cut_all(false);
    assert_eq!(agreed(&[&a, &b], "a:up b:up", SILENCE), view, "it was away for less than forget_after");
}

/// Both reach etcd, so both stay up. Each reads the chunks of the other itself, and asks it again later.
#[test]
fn servers_that_do_not_reach_each_other_fail_no_read() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let (etcd, set) = (EtcdCluster::start(1), ClusterData::new(73, 240));
    let mut servers = ["a", "b"].map(|id| ClusterServer::new(id, &etcd, &["--cache-free-floor=0"]));
    let edges = servers.each_mut().map(|server| {
        let port = server.url.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");
        let edge = Edge::to(port);
        server.add(format!("--cluster-peer-url={}", edge.url()));
        server.start();
        edge
    });
    let [a, b] = servers.each_ref();
    let view = agreed(&[a, b], "a:up b:up", NEWS);
    set.register(a, None);
    until("both know the dataset", NEWS, || b.text("/v1/datasets").contains("\"set\""));
    let received = |s: &ClusterServer| s.sum("fletch_peer_received_bytes_total");
    let mut parts = set.data.files.chunks(40);
    let mut next = || parts.next().expect("files that were not read yet");
    let read = |files: &[(String, Hash)]| {
        let (one, two) = files.split_at(files.len() / 2);
        read_all(a, &set.root, one);
        read_all(b, &set.root, two);
    };
    read(next());
    let before = [received(a), received(b)];
    assert!(before.iter().all(|n| *n > 0.0), "each reads chunks of the other: {before:?}");
    edges.iter().for_each(Edge::cut);
    read(next());
    assert_eq!([received(a), received(b)], before, "nothing comes from the other one");
    let mut check = command("fletch");
    let out = check.args(["cluster", "check", "--server", &a.url]).output().expect("fletch runs");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.code() == Some(1) && text.contains("a gets no answer of b"), "{text}");
    assert_eq!(agreed(&[a, b], "a:up b:up", NEWS), view);
    edges.iter().for_each(Edge::heal);
    // Files that are in no memory yet, in small parts, until the rest has ended.
    let mut files = set.data.files[80..].iter();
    until("each asks the other one again", REST, || {
        let (path, _) = files.next().expect("files that were not read yet");
        assert!(a.file(&set.root, path).is_some() && b.file(&set.root, path).is_some(), "{path}");
        thread::sleep(Duration::from_millis(200));
        received(a) > before[0] && received(b) > before[1]
    });
}

/// A restored etcd ends no access, and gives none back: the server that knows the latest change writes its
/// datasets back, also after a restart, and also if another one read the backup before.
#[test]
fn datasets_outlive_an_etcd_that_was_restored() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let (mut etcd, set) = (EtcdCluster::start(1), ClusterData::new(74, SAMPLES.into()));
    let mut servers = set.servers::<2>(&etcd, &[], None);
    let names = |s: &ClusterServer| {
        let text = s.text("/v1/datasets");
        ["set", "newer", "last"].map(|name| text.contains(&format!("\"{name}\"")))
    };
    let in_touch = |s: &ClusterServer| s.metric("fletch_cluster_coordinator_up ") == Some(1.0);
    let all_in_touch = |servers: &[ClusterServer]| {
        until("all servers are in touch with etcd", SILENCE, || servers.iter().all(in_touch));
    };
    let (uri, tables) = (set.data.dir.display().to_string(), set.tables.display().to_string());
    etcd.back_up(0);
    all_in_touch(&servers);
    servers[0].register("newer", &uri, &tables, None);
    run(command("fletch").args(["unregister", "set", "--server", &servers[1].url]));
    until("all know the changes", NEWS, || servers.iter().all(|s| names(s) == [false, true, false]));
    etcd.restore(0);
    all_in_touch(&servers);
    let corrected = |s: &ClusterServer| s.log().contains("wrote its own back");
    until("one server writes its datasets back", SILENCE, || servers.iter().any(corrected));
    until("the datasets are the latest ones", NEWS, || {
        servers.iter().all(|s| names(s) == [false, true, false])
    });
    assert_eq!(servers.iter().filter(|s| corrected(s)).count(), 1, "the other one loads them");
    // One server misses the last change, and is the first one in touch with the restored etcd.
    etcd.back_up(0);
    all_in_touch(&servers);
    servers[1].kill();
    servers[0].register("last", &uri, &tables, None);
    until("the change is known", NEWS, || names(&servers[0]) == [false, true, true]);
    servers[0].kill();
    etcd.restore(0);
    servers[1].start();
    until("it reads the backup", SILENCE, || {
        in_touch(&servers[1]) && names(&servers[1]) == [false, true, false]
    });
    servers[0].start();
    until("both know the last change", SILENCE, || servers.iter().all(|s| names(s) == [false, true, true]));
    // Changes go on from there.
    run(command("fletch").args(["unregister", "newer", "--server", &servers[1].url]));
    until("all know the change", NEWS, || servers.iter().all(|s| names(s) == [false, false, true]));
}
