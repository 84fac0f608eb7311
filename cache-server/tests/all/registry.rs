//! Tests many jobs: a slow one delays no other, and an idle one is closed until its next request.

use crate::common::{Node, content, epochs::*};
use fletch_api::OrderKind;
use fletch_core::plan::Tail;
use fletch_testkit::{Backing, EmulatorConfig, Fault, OriginEmulator};
use std::{future::Future, time::Duration};
use tokio_util::task::TaskTracker;

async fn until<F: Future<Output = bool>>(what: &str, is: impl Fn() -> F) {
    let wait = async {
        while !is().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap_or_else(|_| panic!("never: {what}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_declaration_holds_up_no_other_job() {
    let (far, near) = (crate::common::Tree::new([("a", content(1, 9_000))]), tree(10));
    let written = far.index().written;
    near.index();
    let backing = Backing::Directory(far.dir.path().to_owned());
    let origin = OriginEmulator::start(EmulatorConfig::default(), backing);
    let settings = tempfile::tempdir().expect("tempdir");
    let file = settings.path().join("f.toml");
    let text = format!(
        "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\nregion = \
            \"us-east-1\"\ncredentials = \"anonymous\"\n",
        origin.uri(),
        origin.endpoint()
    );
    std::fs::write(&file, text).expect("write");
    let config = format!("--config={}", file.display());
    let node = Node::start(&[&config, "--io-timeout=120s"]).await;
    node.register("d", &near.uri(), None).await;
    node.register("far", &origin.uri(), None).await;
    node.resolve("far", "latest").await;
    // What a declaration reads after its names were resolved.
    let chunks = fletch_tables::paths::chunks(written.root, written.layout);
    origin.set_fault(&chunks, Fault::Stall, None);
    let asked = origin.counts().requests();
    let tasks = TaskTracker::new();
    let slow: Vec<_> = ["s1", "s2", "s3"]
        .into_iter()
        .map(|name| {
            let mut ask = ask(name, OrderKind::Strict, world(1, 4, Tail::Keep));
            ask.dataset = Some("far".parse().expect("name"));
            let client = client(&node);
            tasks.spawn(async move { client.declare(&ask).await })
        })
        .collect();
    until("they wait for the origin", || async { origin.counts().requests() > asked + 1 }).await;
    let client = client(&node);
    for name in ["q1", "q2"] {
        let ask = ask(name, OrderKind::Strict, world(1, 4, Tail::Keep));
        let quick = client.declare(&ask);
        let job = tokio::time::timeout(Duration::from_secs(60), quick).await.expect("waits for nobody");
        let job = job.expect("declared");
        let (entries, _) = consume(&job, &near, 0, 0, 4).await;
        assert_eq!(entries.len(), 12);
        client.delete_job(&job.info().id).await.expect("deleted");
    }
    assert!(slow.iter().all(|s| !s.is_finished()), "the others wait all the while");
    assert!(client.jobs().await.expect("jobs").is_empty());
    slow.iter().for_each(|s| s.abort());
    node.running.shutdown().await;
}

/// Of concurrent declarations of one job, one declares it and the others find it.
#[tokio::test(flavor = "multi_thread")]
async fn declarations_of_one_job_follow_each_other() {
    let tree = tree(10);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let path = fletch_api::routes::JOBS;
    let body = serde_json::to_string(&ask("j", OrderKind::Strict, world(1, 4, Tail::Keep))).expect("json");
    let asks = (0..16).map(|_| node.post(path, body.clone()).send());
    let mut status: Vec<u16> = futures::future::join_all(asks)
        .await
        .into_iter()
        .map(|answer| answer.expect("answer").status().as_u16())
        .collect();
    status.sort_unstable();
    assert_eq!(status, [vec![200; 15], vec![201]].concat());
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_job_is_closed_and_goes_on_when_somebody_comes() {
    let tree = tree(40);
    tree.index();
    let node = Node::serving(&tree, &["--limits-job-ttl=1s", "--limits-lease-ttl=4s"]).await;
    let client = client(&node);
    let open = || async { node.metric("fletch_jobs_open").await };
    for order in [OrderKind::Strict, OrderKind::Substitute] {
        let job =
            client.declare(&ask(order.as_str(), order, world(1, 6, Tail::Keep))).await.expect("declared");
        let other = ask(&format!("{}-whole", order.as_str()), order, world(1, 6, Tail::Keep));
        let whole = client.declare(&other).await.expect("declared");
        let first = batch(&job, 0, 0, 6).await.expect("a batch");
        // Its lease is renewed: it stays open, and its owner keeps what it holds.
        let beat = TaskTracker::new().spawn({
            let job = job.clone();
            async move { job.keep_alive().await }
        });
        until("the other one is closed", || async { open().await == 1 }).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(open().await, 1, "a lease of it lives");
        ack(&job, &first).await;
        job.held().release(0, 0, first.token.lease);
        beat.abort();
        until("it is closed", || async { open().await == 0 }).await;
        assert_eq!(node.metric("fletch_jobs_declared").await, if order == OrderKind::Strict { 2 } else { 4 });
        assert_eq!(node.metric("fletch_sweeps").await, 0, "its seat is free");
        // The ledger says where it was.
        let (rest, _) = consume(&job, &tree, 0, 0, 6).await;
        let mut all: Vec<u32> = first.samples.iter().map(|s| s.entry).chain(rest.iter().copied()).collect();
        if order == OrderKind::Strict {
            let (of_whole, _) = consume(&whole, &tree, 0, 0, 6).await;
            assert_eq!(all, of_whole, "the order goes on where it was");
        }
        all.sort_unstable();
        assert_eq!(all, (0..42).collect::<Vec<_>>());
        assert_eq!(job.receipt(0).await.expect("finished").receipt.redelivered, 0);
        until("all are closed", || async { open().await == 0 }).await;
    }
    node.running.shutdown().await;
}

/// The processes of a job may hear from a read that its dataset is gone, and never ask again.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_dataset_is_gone_is_closed_whatever_it_leased() {
    let tree = tree(40);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let client = client(&node);
    for order in [OrderKind::Strict, OrderKind::Substitute] {
        let ask = ask(order.as_str(), order, world(1, 6, Tail::Keep));
        let job = client.declare(&ask).await.expect("declared");
        batch(&job, 0, 0, 6).await.expect("a batch");
    }
    let open = || async { node.metric("fletch_jobs_open").await };
    assert_eq!(open().await, 2, "they have leases");
    let gone = node.ask(reqwest::Method::DELETE, "/v1/datasets/d").send().await.expect("answer");
    assert!(gone.status().is_success());
    until("both are closed", || async { open().await == 0 }).await;
    assert_eq!(node.metric("fletch_jobs_declared").await, 2);
    assert_eq!(node.metric("fletch_sweeps").await, 0, "its seat is free");
    node.register("d", &tree.uri(), None).await;
    let other = client.declare(&ask("other", OrderKind::Strict, world(1, 6, Tail::Keep))).await;
    assert_eq!(consume(&other.expect("declared"), &tree, 0, 0, 6).await.0.len(), 42);
    node.running.shutdown().await;
}
