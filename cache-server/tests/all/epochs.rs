//! Tests epochs: every sample exactly once, in the right order, with a receipt; and which requests are
//! rejected.

use crate::common::{Node, Tree, content, epochs::*, index_bucket, problem};
use fletch_api::{Ack, Acks, BatchTimes, Code, EpochState, OrderKind, PlanBase, Visitation, routes};
use fletch_client::{
    ClientError,
    epochs::{LeaseBatch, Next, ReceivedSum},
};
use fletch_core::{
    Hash, Root,
    delivery::{
        Event,
        ledger::{self, Header, Ledger},
    },
    plan::{Bits, Tail, World},
};
use fletch_testkit::{Backing, EmulatorConfig, Latency, OriginEmulator};
use reqwest::Method;
use std::{collections::BTreeMap, time::Duration};
use tokio_util::task::TaskTracker;

#[tokio::test(flavor = "multi_thread")]
async fn i2_every_rank_gets_its_share_once_and_the_receipt_proves_it() {
    let tree = tree(61);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let client = client(&node);
    let mut bytes = 0;
    for (order, tail) in [
        (OrderKind::Strict, Tail::Drop),
        (OrderKind::Strict, Tail::Pad),
        (OrderKind::Substitute, Tail::Drop),
        (OrderKind::Substitute, Tail::Pad),
    ] {
        let name = format!("j-{}-{tail:?}", order.as_str());
        let job = client.declare(&ask(&name, order, world(4, 8, tail))).await.expect("declared");
        assert_eq!((job.info().samples, job.info().entries), (63, 63));
        let mut orders = Vec::new();
        for epoch in 0..2 {
            let ranks = (0..4).map(|r| consumed(&job, &tree, epoch, r, 2));
            let got = futures::future::join_all(ranks).await;
            let mut all = ReceivedSum::new(job.info().root);
            let mut seen: BTreeMap<u32, u32> = BTreeMap::new();
            let per_rank = if tail == Tail::Drop { 14 } else { 16 };
            for (entries, received, n) in &got {
                bytes += n;
                assert_eq!(entries.len(), per_rank, "equal steps");
                all.merge(received);
                entries.iter().for_each(|e| *seen.entry(*e).or_default() += 1);
            }
            assert!(seen.values().all(|n| *n == 1), "exactly once");
            let receipt = job.receipt(epoch).await.expect("finished");
            assert!(all.agrees(&receipt), "{name} {epoch}");
            assert_eq!(receipt.receipt.dropped.len(), if tail == Tail::Drop { 7 } else { 0 });
            assert_eq!(receipt.receipt.padded, if tail == Tail::Drop { 0 } else { 1 });
            assert_eq!((receipt.receipt.redelivered, receipt.certificate.delivered), (0, all.delivered()));
            // One sample less, one twice, another: no proof.
            let mut twice = all.clone();
            twice.merge(&got[0].1);
            assert!(!twice.agrees(&receipt) && !got[0].1.agrees(&receipt));
            orders.push(got.into_iter().map(|g| g.0).collect::<Vec<_>>());
            // The ledger says the same.
            let ledger = Ledger::read(&job.ledger(epoch).await.expect("ledger")).expect("a ledger");
            for (rank, entries) in (0u32..).zip(&orders[orders.len() - 1]) {
                assert_eq!(ledger.order_of(rank).collect::<Vec<_>>(), *entries);
            }
        }
        assert_ne!(orders[0], orders[1], "every epoch has its order");
        let now = job.current().await.expect("job");
        let states: Vec<_> = now.epochs.iter().map(|e| (e.epoch, e.state)).collect();
        assert_eq!(states, [(0, EpochState::Finished), (1, EpochState::Finished)]);
        assert!(now.epochs[0].times.batches >= 28 && now.epochs[0].times.stepped_ns >= 7 * 28);
        // The same settings are the same job.
        let again = client.declare(&ask(&name, order, world(4, 8, tail))).await.expect("the same");
        assert_eq!(again.info().id, job.info().id);
        let mut other = ask(&name, order, world(4, 8, tail));
        other.seed = Some(6);
        assert_eq!(client.declare(&other).await.expect_err("differs").code(), Some(Code::JobDiffers));
    }
    // Two jobs with the same seed get the same strict order. Golden files in core fix the order itself.
    let a = client.declare(&ask("same-a", OrderKind::Strict, world(1, 4, Tail::Keep))).await.expect("job");
    let b = client.declare(&ask("same-b", OrderKind::Strict, world(1, 4, Tail::Keep))).await.expect("job");
    let (of_a, of_b) = (consumed(&a, &tree, 0, 0, 4).await, consumed(&b, &tree, 0, 0, 7).await);
    assert_eq!(of_a.0, of_b.0);
    bytes += of_a.2 + of_b.2;
    assert_eq!(client.jobs().await.expect("jobs").len(), 6);
    client.delete_job(&b.info().id).await.expect("deleted");
    assert_eq!(b.current().await.expect_err("gone").code(), Some(Code::NotFound));
    assert_eq!(client.jobs().await.expect("jobs").len(), 5);
    i8(&node, bytes).await;
    node.running.shutdown().await;
}

/// I8: the accounts equal what the consumers received, from whatever tier.
async fn i8(node: &Node, received: u64) {
    let counted: u64 = node.accounts().await.accounts.iter().map(|a| a.bytes).sum();
    let page = node.get("/metrics").send().await.expect("answer").text().await.expect("text");
    let metrics: u64 = page
        .lines()
        .filter(|l| l.starts_with("fletch_bytes_total{"))
        .map(|l| l.rsplit(' ').next().expect("value").parse::<u64>().expect("number"))
        .sum();
    assert_eq!((counted, metrics), (received, received));
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_are_idempotent_expire_and_come_again() {
    let tree = tree(20);
    tree.index();
    let node = Node::serving(&tree, &["--limits-lease-ttl=4s"]).await;
    let client = client(&node);
    for order in [OrderKind::Strict, OrderKind::Substitute] {
        let name = format!("j-{}", order.as_str());
        let job = client.declare(&ask(&name, order, world(2, 4, Tail::Drop))).await.expect("declared");
        let mut reader = job.reader(0, 0, 3).after_sequence(10);
        let Next::Batch(first) = reader.next(2).await.expect("lease") else { panic!("a batch") };
        let Next::Batch(again) = job.reader(0, 0, 3).after_sequence(10).next(2).await.expect("lease") else {
            panic!("a batch")
        };
        assert_eq!(alike(&again), alike(&first), "the same lease");
        // Renewed by id it lives; not renewed it does not.
        let alive = TaskTracker::new().spawn({
            let job = job.clone();
            async move { job.keep_alive().await }
        });
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert_eq!(job.current().await.expect("job").epochs[0].leases, 1, "the heartbeat renews it");
        alive.abort();
        let expired = async {
            while job.current().await.expect("job").epochs[0].leases > 0 {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), expired).await.expect("it expires");
        let gone = job.ack(0, 0, &[first.token.ack(BatchTimes::default())]).await.expect_err("re-issued");
        assert_eq!(gone.code(), Some(Code::LeaseGone));
        assert!(node.metric("fletch_epoch_faults_total{fault=\"late_ack\"}").await > 0);
        let anew = batch(&job, 0, 0, 2).await.expect("a batch");
        let entries = |b: &LeaseBatch| b.samples.iter().map(|s| s.entry).collect::<Vec<_>>();
        assert_eq!(entries(&anew), entries(&first), "what came back goes first");
        assert_ne!(anew.token.lease, first.token.lease);
        // Acks: partial, twice, less than before, another rank's, more than there is.
        let part = |upto| Ack { lease: anew.token.lease, upto, batches: Vec::new() };
        let send = |rank, acks: Vec<Ack>| {
            let job = job.clone();
            async move { job.ack(0, rank, &acks).await }
        };
        let code = |r: Result<fletch_api::Acked, ClientError>| r.expect_err("refused").code();
        assert_eq!(code(send(1, vec![part(1)]).await), Some(Code::LeaseForeign));
        assert_eq!(code(send(0, vec![part(1), part(3)]).await), Some(Code::BadAck));
        assert_eq!(code(send(9, vec![part(1)]).await), Some(Code::BadRank));
        assert_eq!(job.current().await.expect("job").epochs[0].acked, 0, "all or nothing");
        assert_eq!(send(0, vec![part(1)]).await.expect("acked").entries, 1);
        assert_eq!(send(0, vec![part(1)]).await.expect("acked").entries, 0);
        assert_eq!(send(0, vec![part(2)]).await.expect("acked").entries, 1);
        assert_eq!(send(0, vec![part(1)]).await.expect("settled").entries, 0);
        // The rest; the receipt counts what came twice.
        let (a, b) = tokio::join!(consume(&job, &tree, 0, 0, 2), consume(&job, &tree, 0, 1, 2));
        let mut all = a.1;
        all.merge(&b.1);
        anew.samples.iter().for_each(|s| all.add(s));
        let receipt = job.receipt(0).await.expect("finished");
        assert!(all.agrees(&receipt));
        assert_eq!(receipt.receipt.redelivered, 2);
        // Acks of a finished epoch are known or gone.
        assert_eq!(send(0, vec![part(2)]).await.expect("settled").entries, 0);
        // At most once: what somebody held who died does not come again.
        let mut once = ask(&format!("once-{name}"), order, world(1, 4, Tail::Drop));
        once.visitation = Visitation::AtMostOnce;
        let job = client.declare(&once).await.expect("declared");
        let first = batch(&job, 0, 0, 2).await.expect("a batch");
        let ended = async {
            while job.current().await.expect("job").epochs[0].leases > 0 {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), ended).await.expect("its time is over");
        let next = batch(&job, 0, 0, 2).await.expect("a batch");
        assert!(entries(&next).iter().all(|e| !entries(&first).contains(e)));
        let epoch = &job.current().await.expect("job").epochs[0];
        assert_eq!((epoch.acked, epoch.held, epoch.redelivered), (4, 0, 0));
    }
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_is_refused_and_changes_nothing() {
    let tree = tree(10);
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let client = client(&node);
    let base = serde_json::to_value(ask("j", OrderKind::Strict, world(2, 4, Tail::Drop))).expect("json");
    let with = |key: &str, value: serde_json::Value| {
        let mut ask = base.clone();
        ask[key] = value;
        ask.to_string()
    };
    let plan = |base: serde_json::Value| with("plan", serde_json::json!({"base": base}));
    let weights = |w: serde_json::Value| serde_json::json!({"weights": {"weights": w, "draws": 5}});
    let ones = vec![1.0; 12];
    let bad = Code::BadPlan;
    for (body, code, says) in [
        (plan(serde_json::json!({"keys": ["f0001", "nobody"]})), bad, "nobody"),
        (plan(serde_json::json!({"samples": [3, 12]})), bad, "names sample 12; the version has 12 samples"),
        (plan(serde_json::json!({"samples": []})), bad, "empty"),
        (plan(weights(serde_json::json!([1, null]))), bad, "2 weights for 12 samples"),
        (plan(weights(serde_json::json!([1, 2]))), bad, "2 weights for 12 samples"),
        (
            plan(weights({
                let mut w = serde_json::json!(ones);
                w[3] = serde_json::Value::Null;
                w
            })),
            bad,
            "of sample 3 is not a finite number",
        ),
        (with("plan", serde_json::json!({"base": "all", "echo": {"copies": 0}})), bad, "0 copies"),
        (
            with("world", serde_json::json!({"ranks": 3, "batch": 4, "tail": "drop"})),
            bad,
            "4 cannot be shared by 3",
        ),
        (
            with("world", serde_json::json!({"ranks": 2, "batch": 4, "tail": "keep"})),
            bad,
            "shared by 2 ranks",
        ),
        (with("world", serde_json::json!({"ranks": 0, "batch": 0, "tail": "drop"})), bad, "by 0 ranks"),
        (with("world", serde_json::json!({"ranks": 1, "batch": u32::MAX, "tail": "pad"})), bad, "4294967295"),
        (
            with("world", serde_json::json!({"ranks": u32::MAX, "batch": u32::MAX, "tail": "drop"})),
            bad,
            "4294967295 ranks",
        ),
        (with("dataset", "other".into()), Code::NotFound, "no dataset other is registered here"),
        (with("version", "no-such-tag".into()), Code::NotFound, "no tag no-such-tag"),
        (with("root", root.to_string().into()), Code::BadRequest, "root"),
        (with("name", "../x".into()), Code::BadRequest, "name"),
        (with("order", "sorted".into()), Code::BadRequest, "sorted"),
        (plan(weights(serde_json::json!([1]))).replace("[1]", "[NaN]"), Code::BadRequest, "column"),
    ] {
        let p = problem(node.post(routes::JOBS, body.clone()).send().await.expect("answer"), code).await;
        assert!(p.detail.contains(says), "{body}: {}", p.detail);
        assert!(client.jobs().await.expect("jobs").is_empty(), "{body}");
    }
    let job = client.declare(&ask("j", OrderKind::Strict, world(2, 4, Tail::Drop))).await.expect("declared");
    let id = job.info().id.clone();
    let lease = |body: serde_json::Value| {
        let (node, path) = (&node, routes::epoch(&id, 0, "leases"));
        async move { node.post(&path, body.to_string()).send().await.expect("answer") }
    };
    problem(lease(serde_json::json!({"rank": 2, "sequence": 1, "want": 1})).await, Code::BadRank).await;
    problem(lease(serde_json::json!({"rank": 0, "sequence": 1, "want": 0})).await, Code::BadPlan).await;
    problem(lease(serde_json::json!({"rank": 0, "sequence": 1, "want": 9999})).await, Code::BadPlan).await;
    let first = batch(&job, 0, 0, 2).await.expect("a batch");
    let stale = lease(serde_json::json!({"rank": 0, "sequence": 1, "want": 1})).await;
    problem(stale, Code::StaleSequence).await;
    let acks = Acks { acks: vec![Ack { lease: 99, upto: 1, batches: vec![] }], ..Acks::default() };
    assert_eq!(job.send_acks(0, &acks).await.expect_err("foreign").code(), Some(Code::LeaseGone));
    assert_eq!(job.send_acks(7, &acks).await.expect_err("no epoch").code(), Some(Code::NotFound));
    assert_eq!(job.receipt(0).await.expect_err("open").code(), Some(Code::EpochOpen));
    let unknown = routes::epoch("0123456789abcdef01234567", 0, "leases");
    let none = node.post(&unknown, r#"{"rank":0,"sequence":1,"want":1}"#).send().await.expect("answer");
    problem(none, Code::NotFound).await;
    // States of something else.
    ack(&job, &first).await;
    let state = job.state(0).await.expect("state");
    let mut subset = ask("subset", OrderKind::Strict, world(2, 4, Tail::Drop));
    subset.plan.base = PlanBase::Keys((0..9).map(|i| format!("f{i:04}")).collect());
    let subset = client.declare(&subset).await.expect("declared");
    assert_eq!((subset.info().entries, subset.info().steps), (9, 2));
    let differs = |r: Result<_, ClientError>| r.map(|_: fletch_api::Epoch| ()).expect_err("refused").code();
    assert_eq!(differs(subset.put_state(0, state.clone(), true).await), Some(Code::StateDiffers));
    assert!(subset.current().await.expect("job").epochs.is_empty(), "nothing has begun");
    assert_eq!(differs(job.put_state(1, state.clone(), false).await), Some(Code::StateDiffers));
    let ledger = job.ledger(0).await.expect("ledger");
    assert_eq!(differs(job.put_state(0, ledger, false).await), Some(Code::BadState));
    assert_eq!(differs(job.put_state(0, state.slice(..state.len() - 1), false).await), Some(Code::BadState));
    assert_eq!(differs(job.put_state(0, "what".into(), true).await), Some(Code::BadState));
    let header = Ledger::read(&state).expect("a state").header;
    let foreign = Header { root: Root(Hash::of(b"another version")), ..header.clone() };
    let foreign = ledger::state(&foreign, &Bits::zeros(0));
    assert_eq!(
        differs(job.put_state(0, foreign.into(), true).await),
        Some(Code::StateDiffers),
        "another root"
    );
    assert_eq!(job.state(0).await.expect("state"), state, "nothing changed");
    // Worlds that cannot be, in a state's header.
    for (ranks, batch, tail) in
        [(1, u32::MAX, Tail::Pad), (u32::MAX, u32::MAX, Tail::Drop), (0, 0, Tail::Drop), (2, 4, Tail::Keep)]
    {
        let header = Header { world: World { ranks, batch, tail }, ..header.clone() };
        let wide = ledger::state(&header, &Bits::zeros(0));
        assert_eq!(differs(job.put_state(0, wide.into(), true).await), Some(Code::BadState), "{ranks}");
    }
    job.put_state(0, state.clone(), false).await.expect("the same changes nothing");
    let second = batch(&job, 0, 1, 2).await.expect("a batch");
    ack(&job, &second).await;
    assert_eq!(differs(job.put_state(0, state.clone(), false).await), Some(Code::StateBehind));
    let back = job.put_state(0, state, true).await.expect("replaced");
    assert_eq!((back.acked, back.held), (2, 0));
    let anew = batch(&job, 0, 1, 2).await.expect("a batch");
    assert_eq!(anew.samples.len(), 2, "what was forgotten comes again");
    // Methods and paths.
    let r = node.json(Method::PUT, &routes::job_world(&id), r#"{"ranks":3,"batch":4,"tail":"drop"}"#);
    problem(r.send().await.expect("answer"), Code::BadPlan).await;
    let wide =
        node.json(Method::PUT, &routes::job_world(&id), r#"{"ranks":1,"batch":4294967295,"tail":"pad"}"#);
    problem(wide.send().await.expect("answer"), Code::BadPlan).await;
    assert_eq!(job.current().await.expect("job").world, world(2, 4, Tail::Drop), "nothing changed");
    let r = node.get(&format!("/v1/jobs/{id}/epochs/x/state")).send().await.expect("answer");
    problem(r, Code::BadRequest).await;
    // Epochs that the job left behind.
    let abandoned = "fletch_epoch_faults_total{fault=\"abandoned\"}";
    assert_eq!(node.metric(abandoned).await, 0);
    batch(&job, 2, 0, 2).await.expect("a batch");
    assert_eq!(node.metric(abandoned).await, 1);
    let over = lease(serde_json::json!({"rank": 0, "sequence": u64::MAX, "want": 1})).await;
    problem(over, Code::EpochClosed).await;
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn plans_echo_weights_worlds_and_refs() {
    let tree = tree(30);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let client = client(&node);
    for order in [OrderKind::Strict, OrderKind::Substitute] {
        // Everything twice, at least five apart.
        let mut echo = ask(&format!("echo-{}", order.as_str()), order, world(1, 4, Tail::Keep));
        echo.plan.echo = Some(fletch_api::EchoSpec { copies: 2, apart: 5 });
        let job = client.declare(&echo).await.expect("declared");
        let (entries, received) = consume(&job, &tree, 0, 0, 4).await;
        assert_eq!(entries.len(), 64);
        for (i, e) in entries.iter().enumerate() {
            let twin = entries.iter().position(|f| f % 32 == e % 32 && f != e).expect("a copy");
            assert!(twin.abs_diff(i) >= 5, "{e} at {i} and {twin}");
        }
        assert!(received.agrees(&job.receipt(0).await.expect("finished")));
        // Weights.
        let mut weighted = ask(&format!("weights-{}", order.as_str()), order, world(2, 4, Tail::Drop));
        let weights = (0..32).map(|i| Some(f64::from(i % 3))).collect();
        weighted.plan.base = PlanBase::Weights(fletch_api::Weights { weights, draws: 40, of: None });
        let job = client.declare(&weighted).await.expect("declared");
        assert_eq!(job.info().entries, 40);
        // One rank takes half an epoch, then there are four: by refs only.
        let mut all = ReceivedSum::new(job.info().root);
        let mut entries = Vec::new();
        for rank in 0..2 {
            for _ in 0..2 {
                let b = batch(&job, 0, rank, 2).await.expect("a batch");
                ack(&job, &b).await;
                b.samples.iter().for_each(|s| {
                    all.add(s);
                    entries.push(s.entry);
                });
            }
        }
        job.set_world(world(4, 8, Tail::Drop)).await.expect("world");
        for rank in 0..4 {
            let mut reader = job.reader(0, rank, 0).by_refs(true);
            while let Next::Batch(b) = reader.next(2).await.expect("lease") {
                ack(&job, &b).await;
                for s in &b.samples {
                    right(&tree, s);
                    all.add(s);
                    entries.push(s.entry);
                }
            }
        }
        entries.sort_unstable();
        assert_eq!(entries, (0..40).collect::<Vec<_>>());
        assert!(all.agrees(&job.receipt(0).await.expect("finished")));
        // At most once: what is granted is not granted again, whatever becomes of it.
        let mut once = ask(&format!("once-{}", order.as_str()), order, world(1, 4, Tail::Keep));
        once.visitation = Visitation::AtMostOnce;
        let job = client.declare(&once).await.expect("declared");
        let mut seen = 0;
        while let Some(b) = batch(&job, 0, 0, 5).await {
            seen += b.samples.len();
        }
        assert_eq!(seen, 32);
        assert_eq!(job.receipt(0).await.expect("finished").receipt.delivered, 32);
    }
    node.running.shutdown().await;
}

/// At most once: a repeated request gets the same samples, counted once. No other worker ever gets them.
#[tokio::test(flavor = "multi_thread")]
async fn at_most_once_a_retry_costs_nothing_and_nothing_comes_twice() {
    let tree = tree(20);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let client = client(&node);
    for order in [OrderKind::Strict, OrderKind::Substitute] {
        let mut once = ask(&format!("once-{}", order.as_str()), order, world(2, 4, Tail::Drop));
        once.visitation = Visitation::AtMostOnce;
        let job = client.declare(&once).await.expect("declared");
        let mut seen = Vec::new();
        let mut reader = job.reader(0, 0, 0).after_sequence(10);
        let Next::Batch(first) = reader.next(2).await.expect("lease") else { panic!("a batch") };
        let Next::Batch(again) = job.reader(0, 0, 0).after_sequence(10).next(2).await.expect("lease") else {
            panic!("a batch")
        };
        assert_eq!(alike(&again), alike(&first), "the same lease");
        let epoch = job.current().await.expect("job").epochs[0].clone();
        assert_eq!(
            (epoch.acked, epoch.held, epoch.leases),
            (2, 0, 1),
            "delivered, and there to be asked for"
        );
        let state = job.state(0).await.expect("state");
        let same = job.put_state(0, state, false).await.expect("what was granted is in the state");
        assert_eq!((same.acked, same.leases), (2, 1));
        let Next::Batch(second) = reader.next(2).await.expect("lease") else { panic!("a batch") };
        assert_eq!(job.current().await.expect("job").epochs[0].leases, 1, "the first is over");
        assert_eq!(job.ack(0, 0, &[first.token.ack(BatchTimes::default())]).await.expect("known").entries, 0);
        for b in [first, second] {
            seen.extend(b.samples.iter().map(|s| s.entry));
        }
        // Another world takes nothing back.
        job.set_world(world(1, 4, Tail::Drop)).await.expect("world");
        assert_eq!(job.current().await.expect("job").epochs[0].leases, 0);
        while let Some(b) = batch(&job, 0, 0, 5).await {
            seen.extend(b.samples.iter().map(|s| s.entry));
        }
        assert_eq!(seen.len(), 20);
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 20, "once");
        let receipt = job.receipt(0).await.expect("finished").receipt;
        assert_eq!((receipt.delivered, receipt.redelivered), (20, 0));
    }
    node.running.shutdown().await;
}

/// A stream renews its lease while the client waits for a sample that takes longer than the lease's time.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_lives_renews_its_lease() {
    let tree = Tree::new([("a", content(1, 70_000)), ("b", content(2, 80_000))]);
    let backing = || Backing::Directory(tree.dir.path().to_owned());
    index_bucket(&tree, &OriginEmulator::start(EmulatorConfig::default(), backing())).await;
    let slow = Latency { median: Duration::from_secs(7), p99: Duration::from_secs(7) };
    let slow = EmulatorConfig { first_byte: Some(slow), ..EmulatorConfig::default() };
    let emulator = OriginEmulator::start(slow, backing());
    let settings = tempfile::tempdir().expect("tempdir");
    let file = settings.path().join("f.toml");
    let text = format!(
        "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\nregion = \
            \"us-east-1\"\ncredentials = \"anonymous\"\n",
        emulator.uri(),
        emulator.endpoint()
    );
    std::fs::write(&file, text).expect("write");
    let config = format!("--config={}", file.display());
    let node = Node::start(&[&config, "--limits-lease-ttl=3s"]).await;
    node.register("d", &emulator.uri(), Some(&tree.uri())).await;
    let job = client(&node).declare(&ask("slow", OrderKind::Strict, world(1, 2, Tail::Keep))).await;
    let job = job.expect("declared");
    let b = batch(&job, 0, 0, 2).await.expect("a batch");
    assert!(ack(&job, &b).await, "it was held to the end");
    let epoch = &job.current().await.expect("job").epochs[0];
    assert_eq!((epoch.acked, epoch.redelivered), (2, 0));
    let ledger = Ledger::read(&job.ledger(0).await.expect("ledger")).expect("a ledger");
    let grants = ledger.events.iter().filter(|e| matches!(e, Event::Grant { .. })).count();
    assert_eq!(grants, 1, "one lease");
    assert!(emulator.counts().get >= 2, "it was slow");
    node.running.shutdown().await;
}
