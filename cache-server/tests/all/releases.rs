//! Tests released leases: what a client lets go comes back at once, and counts once.

use crate::{
    common::{Node, Tree, epochs::*, problem},
    leases::Limited,
};
use fletch_api::{
    Ack, Acks, BucketSpec, Code, LedgerBytes, OrderKind, PlanBase, ReplaySpec, StartJob, Visitation,
    epochs::{ACKS_MAX, HELD_MAX, WANT_MAX},
    routes,
};
use fletch_client::{
    Client, ClientConfig, Endpoint,
    epochs::{JobHandle, LeaseBatch, Next, ReceivedSum},
};
use fletch_core::{
    delivery::{Event, ledger::Ledger},
    plan::Tail,
};
use std::time::{Duration, Instant};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

/// Far less than the 30 s for which a lease lives.
const AT_ONCE: Duration = Duration::from_secs(10);

async fn release(job: &JobHandle, rank: u32, leases: &[u64]) {
    job.send_acks(0, &Acks { rank, release: leases.to_vec(), ..Acks::default() }).await.expect("released");
}

fn entries(b: &LeaseBatch) -> Vec<u32> {
    b.samples.iter().map(|s| s.entry).collect()
}

/// Renews and releases the leases of a job until the result is dropped.
pub(crate) fn keep_alive(job: &JobHandle) -> AbortOnDropHandle<()> {
    let job = job.clone();
    AbortOnDropHandle::new(TaskTracker::new().spawn(async move { drop(job.keep_alive().await) }))
}

/// Reads a rank's epoch. Drops every third lease, and the reader with its leases ahead after each eighth.
async fn read_with_breaks(job: &JobHandle, tree: &Tree, rank: u32) -> (ReceivedSum, Vec<u32>, u64) {
    let (mut received, mut order, mut dropped) = (ReceivedSum::new(job.info().root), Vec::new(), 0);
    let mut reader = job.reader(0, rank, 0).prefetch(3);
    for i in 1.. {
        match reader.next(2).await.expect("a lease") {
            Next::Batch(b) if i < 60 && i % 3 == 0 => {
                dropped += 1;
                job.held().release(0, rank, b.token.lease);
            }
            Next::Batch(b) => {
                ack(job, &b).await;
                job.held().forget(0, rank, b.token.lease);
                for s in &b.samples {
                    right(tree, s);
                    received.add(s);
                    order.push(s.entry);
                }
            }
            Next::Done => break,
            Next::Full | Next::Last => tokio::time::sleep(Duration::from_millis(5)).await,
        }
        if i < 60 && i % 8 == 0 {
            drop(reader);
            job.held().settled().await;
            let held = job.current().await.expect("job").epochs[0].held;
            assert!(held == 0 || job.info().world.ranks > 1, "{held} entries are held after a break");
            reader = job.reader(0, rank, 0).prefetch(3);
        }
    }
    (received, order, dropped)
}

/// In every order, by an epoch of two ranks that break off again and again. Leases live for 30 s.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_loop_lets_go_comes_back_at_once_in_every_order() {
    let tree = tree(100);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let client = client(&node);
    let begun = Instant::now();
    let mut ledger = Vec::new();
    for order in [OrderKind::Strict, OrderKind::Substitute, OrderKind::Bucketed, OrderKind::Replay] {
        let mut spec = ask(order.as_str(), order, world(2, 4, Tail::Drop));
        if order == OrderKind::Bucketed {
            spec.buckets = Some(BucketSpec::Lengths(vec![3020]));
        }
        if order == OrderKind::Replay {
            let replay = Some(ReplaySpec { ledger: LedgerBytes(std::mem::take(&mut ledger).into()) });
            spec = StartJob { replay, seed: None, ..spec };
        }
        let job = client.declare(&spec).await.expect("declared");
        let _beat = keep_alive(&job);
        let ((mut sum, mut got, dropped), (more, rest, _)) =
            tokio::join!(read_with_breaks(&job, &tree, 0), read_with_breaks(&job, &tree, 1));
        sum.merge(&more);
        got.extend(rest);
        let all = got.len();
        got.sort_unstable();
        got.dedup();
        assert_eq!(got.len(), all, "{order:?}: no entry was consumed twice");
        let receipt = job.receipt(0).await.expect("finished");
        assert!(sum.agrees(&receipt), "{order:?}");
        assert!(receipt.receipt.redelivered >= 2 * dropped, "{order:?}: {:?}", receipt.receipt);
        if order == OrderKind::Strict {
            ledger = job.ledger(0).await.expect("ledger").to_vec();
        }
    }
    assert!(begun.elapsed() < AT_ONCE * 2, "nobody waited for an expiry: {:?}", begun.elapsed());
    assert!(node.metric("fletch_epoch_entries_total{event=\"released\"}").await > 0);
    assert_eq!(node.metric("fletch_epoch_entries_total{event=\"expired\"}").await, 0);
    node.running.shutdown().await;
}

/// The rules of one release: idempotent, after the acks of its request, only by its own rank, bounded.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_follows_its_rules() {
    let tree = tree(40);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let client = client(&node);
    let job = client.declare(&ask("j", OrderKind::Strict, world(2, 8, Tail::Drop))).await.expect("declared");
    let mut reader = job.reader(0, 0, 3).after_sequence(10);
    let Next::Batch(first) = reader.next(4).await.expect("a lease") else { panic!("a batch") };
    let Next::Batch(second) = reader.next(4).await.expect("a lease") else { panic!("a batch") };
    let (one, two) = (first.token.lease, second.token.lease);
    // Another rank's lease, and too many at once, change nothing. Neither does a lease that never was.
    let foreign = Acks { rank: 1, release: vec![one], ..Acks::default() };
    assert_eq!(job.send_acks(0, &foreign).await.expect_err("refused").code(), Some(Code::LeaseForeign));
    let many = Acks { rank: 0, release: vec![one; ACKS_MAX + 1], ..Acks::default() };
    assert_eq!(job.send_acks(0, &many).await.expect_err("refused").code(), Some(Code::BadPlan));
    release(&job, 0, &[99, one - 1]).await;
    assert_eq!(job.current().await.expect("job").epochs[0].leases, 2);
    // An ack that is refused refuses the release of its request.
    let late = Ack { lease: 99, upto: 1, batches: vec![] };
    let refused = Acks { rank: 0, acks: vec![late], release: vec![one], ..Acks::default() };
    assert_eq!(job.send_acks(0, &refused).await.expect_err("refused").code(), Some(Code::LeaseGone));
    assert_eq!(job.current().await.expect("job").epochs[0].leases, 2);
    // The acks of a request count before its release.
    let part = Ack { lease: one, upto: 3, batches: vec![] };
    let both = Acks { rank: 0, acks: vec![part], release: vec![one], ..Acks::default() };
    assert_eq!(job.send_acks(0, &both).await.expect("applied").entries, 3);
    let now = &job.current().await.expect("job").epochs[0];
    assert_eq!((now.acked, now.held, now.leases), (3, 4, 1));
    release(&job, 0, &[one]).await;
    let whole = Ack { lease: one, upto: 4, batches: vec![] };
    let gone = job.ack(0, 0, &[whole]).await.expect_err("it was released");
    assert_eq!(gone.code(), Some(Code::LeaseGone));
    // The released entry comes first, to the request that had it and to no other rank.
    let other = batch(&job, 0, 1, 4).await.expect("a batch");
    assert!(!entries(&other).contains(&entries(&first)[3]));
    let mut again = job.reader(0, 0, 3).after_sequence(10);
    let Next::Batch(third) = again.next(4).await.expect("a lease") else { panic!("a batch") };
    assert!(third.token.lease > two && entries(&third)[0] == entries(&first)[3]);
    // A lease request releases, too, and gets what it released.
    let path = routes::epoch(&job.info().id, 0, "leases");
    let ask_for = serde_json::json!({
        "rank": 0, "worker": 5, "sequence": 1, "want": 8, "release": [two, third.token.lease],
    });
    let answer = node.post(&path, ask_for.to_string()).send().await.expect("answer");
    assert_eq!(answer.status(), 200);
    answer.bytes().await.expect("a stream");
    let now = &job.current().await.expect("job").epochs[0];
    assert_eq!((now.acked, now.held, now.leases), (3, 12, 2), "8 for this rank, 4 for the other one");
    let ledger = Ledger::read(&job.ledger(0).await.expect("ledger")).expect("a ledger");
    let Some(Event::Grant { entries: got, .. }) = ledger.events.last() else { panic!("a grant") };
    for b in [&second, &third] {
        assert!(entries(b).iter().all(|e| got.contains(e)), "{got:?}");
    }
    // An acknowledged lease stays acknowledged.
    ack(&job, &other).await;
    release(&job, 1, &[other.token.lease]).await;
    assert_eq!(job.current().await.expect("job").epochs[0].acked, 7);
    let refused = Acks { rank: 0, release: vec![other.token.lease], ..Acks::default() };
    assert_eq!(job.send_acks(0, &refused).await.expect_err("refused").code(), Some(Code::LeaseForeign));
    // A request that begins an epoch has its bound, too.
    let many = serde_json::json!({"rank": 0, "sequence": 1, "want": 1, "release": vec![7; ACKS_MAX + 1]});
    let path = routes::epoch(&job.info().id, 1, "leases");
    problem(node.post(&path, many.to_string()).send().await.expect("answer"), Code::BadPlan).await;
    node.running.shutdown().await;
}

/// What was granted at most once is not granted again: its release only ends it sooner.
#[tokio::test(flavor = "multi_thread")]
async fn at_most_once_a_release_gives_nothing_back() {
    let tree = tree(6);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let mut spec = ask("once", OrderKind::Substitute, world(1, 4, Tail::Keep));
    spec.visitation = Visitation::AtMostOnce;
    let job = client(&node).declare(&spec).await.expect("declared");
    let first = batch(&job, 0, 0, 4).await.expect("a batch");
    release(&job, 0, &[first.token.lease]).await;
    let now = &job.current().await.expect("job").epochs[0];
    assert_eq!((now.acked, now.leases, now.redelivered), (4, 0, 0));
    let (rest, _) = consume(&job, &tree, 0, 0, 4).await;
    assert!(rest.len() == 4 && rest.iter().all(|e| !entries(&first).contains(e)));
    let receipt = job.receipt(0).await.expect("finished");
    assert_eq!((receipt.receipt.delivered, receipt.receipt.redelivered), (8, 0));
    node.running.shutdown().await;
}

/// A request that waits because its rank holds as much as it may is answered when entries come back.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_waits_for_room_learns_of_a_release() {
    let tree = tree(20);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let mut spec = ask("full", OrderKind::Strict, world(1, WANT_MAX, Tail::Keep));
    let weights = serde_json::json!({"weights": vec![1; 22], "draws": HELD_MAX + 2 * WANT_MAX});
    spec.plan.base = PlanBase::Weights(serde_json::from_value(weights).expect("weights"));
    let job = client(&node).declare(&spec).await.expect("declared");
    let path = routes::epoch(&job.info().id, 0, "leases");
    let want = |sequence: u32, wait_ms: u32| {
        let ask = serde_json::json!({
            "rank": 0, "sequence": sequence, "want": WANT_MAX, "refs": true, "wait_ms": wait_ms,
        });
        node.post(&path, ask.to_string()).send()
    };
    for sequence in 1..=HELD_MAX / WANT_MAX {
        // The grant counts although nobody reads its stream.
        drop(want(sequence, 0).await.expect("a stream"));
    }
    let now = job.current().await.expect("job").epochs[0].clone();
    assert_eq!((now.held, now.leases), (u64::from(HELD_MAX), 64));
    let begun = Instant::now();
    let ledger = Ledger::read(&job.ledger(0).await.expect("ledger")).expect("a ledger");
    let Some(Event::Grant { lease, .. }) = ledger.events.last() else { panic!("a grant") };
    let (waited, ()) = tokio::join!(want(100, 10_000), async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        release(&job, 0, &[*lease]).await;
    });
    assert_eq!(waited.expect("a stream").status(), 200);
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    let after = job.current().await.expect("job").epochs[0].clone();
    assert_eq!((after.held, after.redelivered), (u64::from(HELD_MAX), u64::from(WANT_MAX)));
    node.running.shutdown().await;
}

/// A reader that is dropped while the server answers its request holds nothing, whatever the answer is.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_nobody_waits_for_holds_nothing() {
    let tree = tree(60);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let spec = ask("cut", OrderKind::Substitute, world(1, 2, Tail::Keep));
    let job = client(&node).declare(&spec).await.expect("declared");
    let _beat = keep_alive(&job);
    for micros in (0..60).map(|i| i * 40) {
        let mut reader = job.reader(0, 0, 0).prefetch(2 * (micros as usize % 3));
        if let Ok(Next::Batch(b)) = tokio::time::timeout(Duration::from_micros(micros), reader.next(2))
            .await
            .unwrap_or(Ok(Next::Last))
        {
            job.held().release(0, 0, b.token.lease);
        }
        drop(reader);
        tokio::time::timeout(AT_ONCE, job.held().settled()).await.expect("at once");
        match job.current().await.expect("job").epochs.first() {
            Some(epoch) => assert_eq!((epoch.held, epoch.leases), (0, 0), "after {micros} µs"),
            None => assert!(micros < 1000, "no request began the epoch"),
        }
    }
    let (order, received) = consume(&job, &tree, 0, 0, 2).await;
    assert_eq!(order.len(), 62);
    assert!(received.agrees(&job.receipt(0).await.expect("finished")));
    node.running.shutdown().await;
}

/// kill -9 after a release, and after its entries were granted again: each entry counts once.
#[tokio::test(flavor = "multi_thread")]
async fn released_entries_survive_a_killed_server() {
    let tree = tree(20);
    tree.index();
    for order in [OrderKind::Strict, OrderKind::Substitute] {
        let dir = tempfile::tempdir().expect("tempdir");
        let mut server = Limited::start(dir.path());
        let begun = Instant::now();
        server.register(&tree).await;
        let declare = async |server: &Limited| {
            let endpoint: Endpoint = server.url.parse().expect("url");
            let client = Client::new(ClientConfig::new(endpoint, "loader")).expect("client");
            client.declare(&ask("j", order, world(1, 4, Tail::Keep))).await.expect("declared")
        };
        let job = declare(&server).await;
        let mut received = ReceivedSum::new(job.info().root);
        let [first, second] = [batch(&job, 0, 0, 4).await, batch(&job, 0, 0, 4).await];
        let (first, second) = (first.expect("a batch"), second.expect("a batch"));
        release(&job, 0, &[first.token.lease]).await;
        server = server.killed(dir.path());
        let job = declare(&server).await;
        let now = &job.current().await.expect("job").epochs[0];
        assert_eq!((now.held, now.leases), (4, 1), "{order:?}: the release was durable");
        // The released entries are granted again, and the server is killed with that lease alive.
        let again = batch(&job, 0, 0, 4).await.expect("a batch");
        let alike = entries(&again).iter().all(|e| entries(&first).contains(e));
        assert!(alike || order == OrderKind::Substitute, "{order:?}: the released entries come first");
        server = server.killed(dir.path());
        let job = declare(&server).await;
        for b in [&again, &second] {
            ack(&job, b).await;
            b.samples.iter().for_each(|s| received.add(s));
        }
        release(&job, 0, &[first.token.lease, again.token.lease]).await;
        let (rest, more) = consume(&job, &tree, 0, 0, 4).await;
        received.merge(&more);
        assert_eq!(rest.len(), 22 - 8, "{order:?}");
        let receipt = job.receipt(0).await.expect("finished");
        assert!(received.agrees(&receipt), "{order:?}");
        assert_eq!((receipt.receipt.delivered, receipt.receipt.redelivered), (22, 4), "{order:?}");
        assert!(begun.elapsed() < AT_ONCE * 2, "{order:?}: {:?}", begun.elapsed());
    }
}
