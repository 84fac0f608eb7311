//! Tests several leases under way, and that a lease counts only when its stream ends.

use crate::common::{Node, Tree, epochs::*, problem};
use bytes::Bytes;
use fletch_api::{
    BatchTimes, Code, GrantStatus, LeaseGrant, OrderKind, Problem, Visitation,
    frames::{Decoder, Frame},
    routes,
};
use fletch_client::{
    Client, ClientConfig, Endpoint,
    epochs::{JobHandle, LeaseBatch, Next, ReceivedSum},
};
use fletch_core::{delivery::ledger::Ledger, plan::Tail};
use std::{
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};
use tokio_util::task::TaskTracker;

/// Asks for the lease of a sequence number.
async fn lease(job: &JobHandle, worker: u32, sequence: u64) -> LeaseBatch {
    let mut reader = job.reader(0, 0, worker).after_sequence(sequence - 1);
    let Next::Batch(b) = reader.next(2).await.expect("a lease") else { panic!("a batch") };
    assert_eq!(reader.sequence(), sequence, "it was not stale");
    b
}

/// Reads the rest of a rank's epoch, with `leases_ahead` and with acks beside the requests.
async fn read_on(
    job: &JobHandle,
    tree: &Tree,
    (rank, leases_ahead): (u32, usize),
    received: &mut ReceivedSum,
) -> Vec<u32> {
    let (tasks, mut acks, mut order) = (TaskTracker::new(), Vec::new(), Vec::new());
    let mut reader = job.reader(0, rank, 0).prefetch(leases_ahead);
    loop {
        match reader.next(2).await.expect("a lease") {
            Next::Batch(b) => {
                for s in &b.samples {
                    right(tree, s);
                    received.add(s);
                    order.push(s.entry);
                }
                let job = job.clone();
                acks.push(tasks.spawn(async move { ack(&job, &b).await }));
            }
            Next::Last => {
                for ack in acks.drain(..) {
                    ack.await.expect("acknowledged");
                }
            }
            Next::Done => return order,
            Next::Full => panic!("far from full"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i2_leases_under_way_come_once_and_in_order() {
    let tree = tree(60);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let client = client(&node);
    let mut orders = Vec::new();
    for order in [OrderKind::Strict, OrderKind::Substitute] {
        for leases_ahead in [0, 1, 4, 7] {
            let name = format!("j-{}-{leases_ahead}", order.as_str());
            let job = client.declare(&ask(&name, order, world(2, 4, Tail::Pad))).await.expect("declared");
            let mut sums = [(); 2].map(|()| ReceivedSum::new(job.info().root));
            let [a, b] = &mut sums;
            let (first, second) = tokio::join!(
                read_on(&job, &tree, (0, leases_ahead), a),
                read_on(&job, &tree, (1, leases_ahead), b)
            );
            let [mut all, rest] = sums;
            all.merge(&rest);
            let receipt = job.receipt(0).await.expect("finished");
            assert!(all.agrees(&receipt), "{name}");
            assert_eq!(receipt.receipt.redelivered, 0, "{name}");
            let ledger = Ledger::read(&job.ledger(0).await.expect("ledger")).expect("a ledger");
            for (rank, got) in (0..).zip([&first, &second]) {
                assert_eq!(ledger.order_of(rank).collect::<Vec<_>>(), *got, "{name}: the order of grants");
            }
            if order == OrderKind::Strict {
                orders.push((first, second));
            }
        }
    }
    assert!(orders.windows(2).all(|two| two[0] == two[1]), "the same order with any number ahead");
    node.running.shutdown().await;
}

/// A lost answer is asked for again, although later requests of the worker were granted meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn i2_a_request_comes_again_while_later_ones_have_leases() {
    let tree = tree(60);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let client = client(&node);
    for order in [OrderKind::Strict, OrderKind::Substitute] {
        let name = format!("j-{}", order.as_str());
        let job = client.declare(&ask(&name, order, world(1, 2, Tail::Keep))).await.expect("declared");
        let mut leases = Vec::new();
        for sequence in 11..=18 {
            leases.push(lease(&job, 3, sequence).await);
        }
        let mut received = ReceivedSum::new(job.info().root);
        for (sequence, first) in (11..).zip(&leases) {
            assert_eq!(alike(&lease(&job, 3, sequence).await), alike(first), "{name}, {sequence}");
        }
        assert_eq!(job.current().await.expect("job").epochs[0].leases, 8);
        // What was acknowledged is over, and so is what the worker left long ago.
        assert!(!ack(&job, &leases[4]).await);
        lease(&job, 3, 19).await;
        let path = routes::epoch(&job.info().id, 0, "leases");
        for late in [10, 11, 15] {
            let again = serde_json::json!({"rank": 0, "worker": 3, "sequence": late, "want": 2});
            let answer = node.post(&path, again.to_string()).send().await.expect("answer");
            problem(answer, Code::StaleSequence).await;
        }
        leases.push(lease(&job, 3, 19).await);
        for b in &leases {
            ack(&job, b).await;
            b.samples.iter().for_each(|s| received.add(s));
        }
        read_on(&job, &tree, (0, 3), &mut received).await;
        let receipt = job.receipt(0).await.expect("finished");
        assert!(received.agrees(&receipt), "{name}");
        assert_eq!(receipt.receipt.redelivered, 0);
    }
    // At most once: a request delivers the earlier leases, so a reader has one lease ahead at most.
    let mut once = ask("once", OrderKind::Strict, world(1, 2, Tail::Keep));
    once.visitation = Visitation::AtMostOnce;
    let job = client.declare(&once).await.expect("declared");
    let (mut reader, mut seen) = (job.reader(0, 0, 0).prefetch(7), Vec::new());
    while let Next::Batch(b) = reader.next(2).await.expect("a lease") {
        seen.extend(b.samples.iter().map(|s| s.entry));
        assert!(job.current().await.expect("job").epochs[0].leases <= 2, "nothing far ahead is delivered");
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..62).collect::<Vec<u32>>());
    node.running.shutdown().await;
}

/// A server whose files can be kept from growing.
pub struct Limited {
    child: Child,
    pub url: String,
}

impl Limited {
    pub fn start(dir: &Path) -> Self {
        let mut c = Command::new("sh");
        // A write past the limit is then an error, and no signal.
        c.args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""]).arg(env!("CARGO_BIN_EXE_fletch-server"));
        c.args(["--listen=127.0.0.1:0", "--cache-size=0"]).stdin(Stdio::null());
        for (flag, name) in
            [("--state-dir", "state"), ("--cache-dir", "cache"), ("--socket", "s"), ("--ready-file", "ready")]
        {
            c.arg(flag).arg(dir.join(name));
        }
        let child = c.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("spawned");
        let mut limited = Limited { child, url: String::new() };
        for _ in 0..1000 {
            limited.url = std::fs::read_to_string(dir.join("ready")).unwrap_or_default().trim().to_owned();
            if !limited.url.is_empty() {
                return limited;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("never ready: {:?}", limited.child.try_wait());
    }

    /// Kills the server, and starts another one with the same files.
    pub fn killed(mut self, dir: &Path) -> Self {
        self.child.kill().expect("killed");
        self.child.wait().expect("ended");
        std::fs::remove_file(dir.join("ready")).expect("removed");
        Limited::start(dir)
    }

    /// Registers the dataset `d`.
    pub async fn register(&self, tree: &Tree) {
        let body = serde_json::json!({"name": "d", "uri": tree.uri()}).to_string();
        let post = reqwest::Client::new().post(format!("{}/v1/datasets", self.url));
        let registered = post.header("content-type", "application/json").body(body).send().await;
        assert_eq!(registered.expect("answer").status(), 201);
    }

    /// Sets the length in bytes beyond which no file grows.
    fn limit(&self, bytes: &str) {
        let pid = self.child.id().to_string();
        let set = Command::new("prlimit").args(["--pid", &pid]).arg(format!("--fsize={bytes}:")).status();
        assert!(set.expect("prlimit").success());
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Decodes a whole stream: the grant, the number of samples with data, the problem, and whether it ended.
fn decoded(stream: Bytes) -> (LeaseGrant, usize, Option<Problem>, bool) {
    let mut decoder = Decoder::new(64 << 20);
    decoder.feed(stream);
    let (mut grant, mut whole, mut failed, mut ended) = (None, 0, None, false);
    while let Some(frame) = decoder.next_frame().expect("frames") {
        assert!(failed.is_none(), "nothing follows a problem");
        match frame {
            Frame::Grant { grant: json } => grant = Some(serde_json::from_slice(&json).expect("a grant")),
            Frame::Data { whole: true, .. } => whole += 1,
            Frame::Error { problem, .. } => failed = Some(serde_json::from_slice(&problem).expect("json")),
            Frame::End { .. } => ended = true,
            Frame::Data { .. } | Frame::Sample { .. } | Frame::Ref { .. } => {}
        }
    }
    (grant.expect("a grant"), whole, failed, ended)
}

/// If the ledger cannot be written, a lease's data arrive and its end does not. The samples were never
/// granted, so they come again, to whoever asks.
#[tokio::test(flavor = "multi_thread")]
async fn i2_a_grant_that_is_not_durable_has_no_end() {
    let tree = tree(20);
    tree.index();
    let dir = tempfile::tempdir().expect("tempdir");
    let server = Limited::start(dir.path());
    let http = reqwest::Client::new();
    let post = |path: &str, body: serde_json::Value| {
        let r = http.post(format!("{}{path}", server.url)).header("content-type", "application/json");
        r.body(body.to_string()).send()
    };
    server.register(&tree).await;
    let endpoint: Endpoint = server.url.parse().expect("url");
    let client = Client::new(ClientConfig::new(endpoint, "loader")).expect("client");
    let job = client.declare(&ask("j", OrderKind::Strict, world(1, 2, Tail::Keep))).await.expect("declared");
    let mut received = ReceivedSum::new(job.info().root);
    let first = lease(&job, 0, 11).await;
    ack(&job, &first).await;
    first.samples.iter().for_each(|s| received.add(s));
    let ledger = dir.path().join("state/jobs").join(&job.info().id).join("epoch-0.ledger");
    let len = std::fs::metadata(&ledger).expect("a ledger").len();
    server.limit(&len.to_string());
    let path = routes::epoch(&job.info().id, 0, "leases");
    let again = serde_json::json!({"rank": 0, "sequence": 12, "want": 2});
    let stream = post(&path, again).await.expect("answer").bytes().await.expect("a whole body");
    let (grant, whole, failed, ended) = decoded(stream);
    assert_eq!((grant.status, grant.entries.len(), whole, ended), (GrantStatus::Granted, 2, 2, false));
    let failed = failed.expect("the ledger's error");
    assert_eq!(failed.code, Code::Internal);
    assert!(failed.detail.contains("epoch-0.ledger"), "{}", failed.detail);
    // A reader gets the error, holds nothing, and has nothing to acknowledge.
    let error = job.reader(0, 0, 0).after_sequence(12).next(2).await.expect_err("not granted");
    assert_eq!(error.code(), Some(Code::Internal), "{error}");
    assert_eq!(job.held().len(), 1, "the first lease only");
    assert_eq!(std::fs::metadata(&ledger).expect("a ledger").len(), len);
    server.limit("unlimited");
    let lost = BatchTimes::default();
    let ack_lost = fletch_api::Ack { lease: grant.lease, upto: 2, batches: vec![lost] };
    let gone = job.ack(0, 0, &[ack_lost]).await.expect_err("it never was");
    assert_eq!(gone.code(), Some(Code::LeaseGone), "{gone}");
    let second = lease(&job, 0, 12).await;
    let entries: Vec<u32> = second.samples.iter().map(|s| s.entry).collect();
    assert_eq!(entries, grant.entries, "strict");
    assert!(second.token.lease > grant.lease, "a number that a client has seen does not come again");
    ack(&job, &second).await;
    second.samples.iter().for_each(|s| received.add(s));
    read_on(&job, &tree, (0, 4), &mut received).await;
    let receipt = job.receipt(0).await.expect("finished");
    assert!(received.agrees(&receipt));
    assert_eq!((receipt.receipt.delivered, receipt.receipt.redelivered), (22, 0));
}
