//! A real etcd that loses its keys, or holds many long ones: the servers write back what they hold, and read
//! everything.

use fletch_api::{BatchTimes, OrderKind, StartJob, WorldSpec};
use fletch_client::{
    Client, ClientConfig,
    epochs::{JobHandle, Next},
};
use fletch_core::plan::Tail;
use fletch_tests::bins::{command, repo};
use fletch_tests::cluster::{ClusterServer, EtcdCluster, agreed};
use fletch_tests::cluster_data::{ClusterData, declaration};
use fletch_tests::console::blocks;
use fletch_tests::monitored::run_block;
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use std::fs;
use std::time::Duration;

/// How soon a killed server counts as down: `cluster.member_ttl` of the rig, and etcd's own delay.
const SILENCE: Duration = Duration::from_secs(6);
const SAMPLES: u32 = 48;
const BATCH: u32 = 4;

fn client(server: &ClusterServer) -> Client {
    Client::new(ClientConfig::new(server.url.parse().expect("url"), "loader")).expect("client")
}

fn ask(name: &str, order: OrderKind) -> StartJob {
    declaration(name, order, WorldSpec { ranks: 1, batch: BATCH, tail: Tail::Drop })
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

fn each_once(mut entries: Vec<u32>) {
    entries.sort_unstable();
    assert_eq!(entries, (0..SAMPLES).collect::<Vec<_>>(), "each entry once");
}

/// Runs `fletch cluster` at a server. Returns the exit code, and what was printed.
fn cluster(server: &ClusterServer, words: &[&str]) -> (Option<i32>, String) {
    let mut c = command("fletch");
    let out = c.arg("cluster").args(words).args(["--server", &server.url]).output().expect("fletch runs");
    let text = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    (out.status.code(), text.concat())
}

/// Runs the remedy of the runbook for an etcd without keys. Returns what it printed.
fn recover_by_the_runbook(server: &ClusterServer) -> String {
    let at = repo().join("docs/runbooks/FletchNoCoordinator.md");
    let text = fs::read_to_string(at).expect("the runbook");
    let blocks = blocks(&text, "sh remedy");
    assert!(!blocks.is_empty());
    let run = |(line, block): (usize, String)| {
        let (printed, succeeded) = run_block(&block, &[("FLETCH_SERVER", server.url.as_str())]);
        assert!(succeeded, "line {line}: {printed}");
        printed
    };
    blocks.into_iter().map(run).collect()
}

fn datasets(server: &ClusterServer) -> usize {
    server.text("/v1/datasets").matches("\"registered_ns\"").count()
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_run_write_back_what_etcd_lost() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let (mut etcd, set) = (EtcdCluster::start(1), ClusterData::new(41, SAMPLES.into()));
    let servers = set.servers::<3>(&etcd, &[], None);
    let all = servers.each_ref();
    let mut jobs = Vec::new();
    for (i, name) in ["one", "two", "three", "four"].into_iter().enumerate() {
        let order = if i % 2 == 0 { OrderKind::Strict } else { OrderKind::Substitute };
        jobs.push(client(&servers[i % 3]).declare(&ask(name, order)).await.expect("declared"));
    }
    let mut entries = Vec::new();
    for job in &jobs {
        entries.push(take(job, 3).await);
    }
    let know = |s: &ClusterServer| jobs.iter().all(|j| s.status(&format!("/v1/jobs/{}", j.info().id)) != 404);
    until("all know the jobs", SILENCE, || servers.iter().all(know));
    let (code, text) = cluster(&servers[0], &["recover"]);
    assert!(code == Some(1) && text.contains("there is nothing to write back"), "{text}");

    etcd.lose(0);
    until("no server is in touch with its cluster", SILENCE, || {
        servers.iter().all(|s| s.metric("fletch_cluster_coordinator_up ") == Some(0.0))
    });
    let (code, text) = cluster(&servers[1], &["recover", "--dry-run"]);
    assert!(code == Some(0) && text.contains("to be written back") && text.contains("default/set"), "{text}");
    assert!(["one (", "two (", "three (", "four ("].iter().all(|name| text.contains(name)), "{text}");
    assert_eq!(servers[0].metric("fletch_cluster_coordinator_up "), Some(0.0), "nothing is written");
    let began = std::time::Instant::now();
    let printed = recover_by_the_runbook(&servers[1]);
    assert!(printed.contains("written back to etcd"), "{printed}");
    agreed(&all, "a:up b:up c:up", SILENCE);
    eprintln!("three servers were back {:?} after `fletch cluster recover` began", began.elapsed());
    for server in &servers {
        until("the datasets are there", SILENCE, || datasets(server) == 1);
        assert!(!server.log().contains("set aside"), "{}", server.log());
    }
    for (job, mut got) in jobs.iter().zip(entries) {
        got.extend(take(job, u32::MAX).await);
        each_once(got);
        let found = client(&servers[2]).declare(&ask(job.info().name.as_str(), job.info().order)).await;
        assert_eq!(found.expect("declared before").server(), job.server(), "it stays where it was");
    }
    let (code, text) = cluster(&servers[0], &["check"]);
    assert_eq!(code, Some(0), "{text}");
    drop(etcd);
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_start_without_keys_write_back_what_their_disks_have() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let (etcd, set) = (EtcdCluster::start(1), ClusterData::new(42, SAMPLES.into()));
    let mut servers = Vec::from(set.servers::<3>(&etcd, &[], None));
    let job = client(&servers[0]).declare(&ask("run", OrderKind::Strict)).await.expect("declared");
    let mut entries = take(&job, 3).await;
    let state = job.state(0).await.expect("a state");
    // The job moves, so that its group has a second term.
    let at = servers.iter().position(|s| s.url == job.server()).expect("a server of the cluster");
    let mut old = servers.remove(at);
    let path = format!("/v1/jobs/{}", job.info().id);
    until("all know the job", SILENCE, || servers.iter().all(|s| s.status(&path) == 307));
    old.kill();
    let gone = |s: &ClusterServer| s.text(&path).contains("is down");
    until("the others say that the job waits", SILENCE, || servers.iter().all(gone));
    let moved = client(&servers[0]).job_handle(job.info().clone());
    moved.put_state(0, state, true).await.expect("moved");
    entries.extend(take(&moved, 2).await);
    let place = moved.server();
    servers.iter_mut().for_each(ClusterServer::kill);
    etcd.wipe();
    // The server with the ledgers of the first term comes back, too.
    servers.push(old);
    servers.iter_mut().for_each(ClusterServer::start);
    assert!(servers.iter().all(|s| s.metric("fletch_cluster_coordinator_up ") == Some(0.0)));
    assert!(servers.iter().all(|s| s.status(&path) == 503), "no server has the job yet");
    let printed = recover_by_the_runbook(&servers[2]);
    assert!(printed.contains("run (") && printed.contains("default/set"), "{printed}");
    let all: Vec<&ClusterServer> = servers.iter().collect();
    agreed(&all, "a:up b:up c:up", SILENCE);
    for server in &servers {
        until("the server names the place of the job", SILENCE, || {
            let text = server.text(&path);
            let is_there = if server.url == place { " 200 " } else { &place };
            text.lines().take(8).any(|line| line.contains(is_there))
        });
        assert_eq!(datasets(server), 1);
        let asides = server.log().matches("its ledgers on this server are set aside").count();
        assert_eq!(asides, usize::from(server.url == servers[2].url), "{}", server.log());
    }
    let job = client(&servers[0]).declare(&ask("run", OrderKind::Strict)).await.expect("declared before");
    entries.extend(take(&job, u32::MAX).await);
    each_once(entries);
}

#[test]
fn nothing_is_written_over_another_history_or_without_a_server_that_may_know_more() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let mut servers = ["a", "b"].map(|id| {
        let mut server = ClusterServer::new(id, &etcd, &[]);
        server.start();
        server
    });
    agreed(&servers.each_ref(), "a:up b:up", SILENCE);
    etcd.wipe();
    servers[1].kill();
    let (code, text) = cluster(&servers[0], &["recover"]);
    assert!(
        code == Some(1) && text.contains("do not answer: b") && text.contains("--without-silent"),
        "{text}"
    );
    // Keys that nobody can tell the history of.
    etcd.put_all(&[("/fletch/default/jobs/groups/g".into(), "{}".into())]);
    let (code, text) = cluster(&servers[0], &["recover", "--without-silent"]);
    assert!(code == Some(1) && text.contains("etcd has 1 keys of a cluster of this name"), "{text}");
    etcd.wipe();
    let (code, text) = cluster(&servers[0], &["recover", "--without-silent"]);
    assert!(code == Some(3) && text.contains("written back") && text.contains("left out\tb: "), "{text}");
    servers[1].start();
    agreed(&servers.each_ref(), "a:up b:up", SILENCE);
    // A new server in the emptied etcd begins another history.
    servers.iter_mut().for_each(ClusterServer::kill);
    etcd.wipe();
    servers[0].start();
    let mut first = ClusterServer::new("first", &etcd, &[]);
    first.start();
    let (code, text) = cluster(&servers[0], &["recover", "--without-silent"]);
    assert!(code == Some(1) && text.contains("etcd has another cluster of this name"), "{text}");
    assert_eq!(first.members(), "first:up", "it is left as it was");
}

#[test]
fn registrations_that_are_longer_than_a_page_are_read_whole() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let mut a = ClusterServer::new("a", &etcd, &[]);
    a.start();
    agreed(&[&a], "a:up", SILENCE);
    let long = "x".repeat(7_500);
    let record = |i: u32| {
        let key = format!("/fletch/default/data/datasets/default/set-{i:04}");
        let value = serde_json::json!({"format": 1, "domain": "default", "tenant": "default",
            "name": format!("set-{i:04}"), "uri": format!("/{long}"), "tables": "/t", "registered_ns": 1,
            "bytes": 0});
        (key, value.to_string())
    };
    let records: Vec<_> = (0..1_150).map(record).collect();
    etcd.put_all(&records);
    until("the server has all datasets", SILENCE, || a.metric("fletch_datasets ") == Some(1_150.0));
    // One that starts reads all of them at once.
    let mut b = ClusterServer::new("b", &etcd, &[]);
    b.start();
    assert_eq!(b.metric("fletch_datasets "), Some(1_150.0), "{}", b.log());
    let bytes: usize = records.iter().map(|(_, value)| value.len()).sum();
    eprintln!("{} registrations of {} KB were read at the start", records.len(), bytes / 1_150_000);
}
