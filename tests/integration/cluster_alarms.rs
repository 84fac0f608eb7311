//! A real etcd, and what servers of a cluster say aloud: jobs that wait for a lost server, and servers that
//! refuse each other.

use fletch_api::{BatchTimes, OrderKind, StartJob, WorldSpec};
use fletch_client::{
    Client, ClientConfig,
    epochs::{JobHandle, Next},
};
use fletch_core::plan::Tail;
use fletch_testkit::scripted::{self, ScriptedServer};
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

fn ask(name: &str) -> StartJob {
    declaration(name, OrderKind::Strict, WorldSpec { ranks: 1, batch: BATCH, tail: Tail::Drop })
}

/// Takes and acknowledges one lease.
async fn take(job: &JobHandle) {
    let mut reader = job.reader(0, 0, 0);
    let Next::Batch(batch) = reader.next(BATCH).await.expect("a lease") else { panic!("no samples") };
    job.ack(0, 0, &[batch.token.ack(BatchTimes::default())]).await.expect("acknowledged");
    job.held().release(0, 0, batch.token.lease);
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_wait_for_a_lost_server_are_an_alarm_until_its_remedy() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let (etcd, set) = (EtcdCluster::start(1), ClusterData::new(31, SAMPLES.into()));
    let mut servers = Vec::from(set.servers::<3>(&etcd, &[], None));
    let job = client(&servers[0]).declare(&ask("train")).await.expect("declared");
    take(&job).await;
    let state = set.scratch.path().join("epoch.state");
    fs::write(&state, job.state(0).await.expect("a state")).expect("written");
    let at = servers.iter().position(|s| s.url == job.server()).expect("a server of the cluster");
    let mut primary = servers.remove(at);
    let lost = primary.view()["members"].as_array().expect("members").iter().find_map(|m| {
        let is_primary = m["url"].as_str() == Some(&primary.url);
        is_primary.then(|| m["id"].as_str().expect("an id").to_owned())
    });
    let series = format!("fletch_cluster_jobs_waiting{{member=\"{}\"}}", lost.expect("the primary"));
    let know = |s: &ClusterServer| s.status(&format!("/v1/jobs/{}", job.info().id)) == 307;
    until("all know the job", SILENCE, || servers.iter().all(know));
    assert!(servers.iter().all(|s| s.metric(&series).is_none()), "no job waits");
    primary.kill();
    until("every server counts the job", SILENCE, || servers.iter().all(|s| s.metric(&series) == Some(1.0)));
    let page = servers[0].text("/v1/dashboard");
    assert!(page.contains("\"FletchJobWaitsForServer\"") && page.contains("a job waits"), "{page}");
    let at = repo().join("docs/runbooks/FletchJobWaitsForServer.md");
    let text = fs::read_to_string(at).expect("the runbook");
    let state = state.display().to_string();
    let variables = [("FLETCH_SERVER", servers[0].url.as_str()), ("JOB", "train"), ("STATE", state.as_str())];
    for (line, block) in blocks(&text, "sh remedy") {
        let (printed, succeeded) = run_block(&block, &variables);
        assert!(succeeded && printed.contains("goes on after"), "line {line}: {printed}");
    }
    until("no job waits", SILENCE, || servers.iter().all(|s| s.metric(&series).is_none()));
    assert!(!servers[0].text("/v1/dashboard").contains("FletchJobWaitsForServer"));
}

#[test]
fn an_answer_of_a_peer_that_cannot_be_read_is_named_and_fails_no_read() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let (etcd, set) = (EtcdCluster::start(1), ClusterData::new(32, SAMPLES.into()));
    // A proxy that answers for `b`, and not as a server of Fletch does.
    let proxy = ScriptedServer::start(|_| scripted::answer("200 OK", &[], b"<html>welcome</html>"));
    let peer_url = format!("--cluster-peer-url={}", proxy.endpoint());
    let [mut a, mut b] = [("a", None), ("b", Some(&*peer_url))].map(|(id, peer_url)| {
        let words: Vec<&str> = ["--cache-free-floor=0"].into_iter().chain(peer_url).collect();
        ClusterServer::new(id, &etcd, &words)
    });
    a.start();
    b.start();
    agreed(&[&a, &b], "a:up b:up", SILENCE);
    set.register(&a, None);
    for (path, hash) in &set.data.files {
        let bytes = a.file(&set.root, path).expect("read from the origin");
        assert!(fletch_core::Hash::of(&bytes) == *hash, "{path}");
    }
    let refusals = a.metric("fletch_peer_refusals_total{peer=\"b\",reason=\"unreadable\"}");
    assert!(refusals.is_some_and(|n| n >= 2.0), "{refusals:?}");
    let log = a.log();
    let is_warning = |l: &&str| l.contains("two servers refuse each other") && l.contains("unreadable");
    let warnings = log.lines().filter(is_warning);
    assert_eq!(warnings.count(), 1, "{log}");
    let mut c = command("fletch");
    let out = c.args(["cluster", "check", "--server", &a.url]).output().expect("fletch runs");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.code() == Some(1) && text.contains("a says: b (unreadable): "), "{text}");
}
