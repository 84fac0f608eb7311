//! Tests states, changes of world and first requests of epochs, concurrently and in unusual orders.

use crate::common::{Node, epochs::*, problem};
use fletch_api::{BatchTimes, BucketSpec, Code, EpochState, OrderKind, StartJob, Visitation, routes};
use fletch_client::{
    ClientError,
    epochs::{JobHandle, LeaseBatch},
};
use fletch_core::{delivery::ledger::Ledger, plan::Tail};

/// A change of world that drops all remaining samples finishes the epoch. Earlier epochs cannot begin later.
#[tokio::test(flavor = "multi_thread")]
async fn an_epoch_ends_when_a_new_world_leaves_out_its_rest_and_none_begins_in_the_past() {
    let tree = tree(14);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let job =
        client(&node).declare(&ask("j", OrderKind::Strict, world(2, 4, Tail::Drop))).await.expect("declared");
    for _ in 0..3 {
        for rank in 0..2 {
            let some = batch(&job, 3, rank, 2).await.expect("a batch");
            assert!(!ack(&job, &some).await);
        }
    }
    // 16 samples: 4 are not acknowledged, and are no step of 8 ranks.
    job.set_world(world(8, 8, Tail::Drop)).await.expect("another world");
    let receipt = job.receipt(3).await.expect("finished by that");
    assert_eq!((receipt.certificate.delivered, receipt.receipt.dropped.len()), (12, 4));
    let closed = |e: ClientError| e.code();
    assert_eq!(job.reader(1, 0, 0).next(1).await.map_err(closed).err(), Some(Some(Code::EpochClosed)));
    assert!(batch(&job, u64::MAX, 0, 1).await.is_some(), "any number is one");
    assert_eq!(job.reader(5, 0, 0).next(1).await.map_err(closed).err(), Some(Some(Code::EpochClosed)));
    node.running.shutdown().await;
}

async fn begun(job: &JobHandle) -> Vec<(u64, EpochState)> {
    job.current().await.expect("the job").epochs.iter().map(|e| (e.epoch, e.state)).collect()
}

async fn acked(job: &JobHandle, epoch: u64) -> LeaseBatch {
    let some = batch(job, epoch, 0, 4).await.expect("a batch");
    ack(job, &some).await;
    some
}

/// A state that is put takes back the later epochs: they are delivered completely.
#[tokio::test(flavor = "multi_thread")]
async fn a_state_takes_back_the_epochs_after_it() {
    let tree = tree(14);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    for visitation in [Visitation::ExactlyOnce, Visitation::Checkpoint] {
        let what = StartJob {
            visitation,
            ..ask(&format!("{visitation:?}").to_lowercase(), OrderKind::Substitute, world(1, 4, Tail::Keep))
        };
        let job = client(&node).declare(&what).await.expect("declared");
        acked(&job, 1).await;
        let early = job.state(1).await.expect("state");
        consume(&job, &tree, 1, 0, 4).await;
        consume(&job, &tree, 2, 0, 4).await;
        let end = job.state(2).await.expect("state");
        acked(&job, 3).await;
        let held = batch(&job, 3, 0, 4).await.expect("a batch");
        let (open, finished) = (EpochState::Open, EpochState::Finished);
        // Asked for as a fact and not as a wish, it changes nothing.
        if visitation == Visitation::ExactlyOnce {
            job.put_state(2, end.clone(), false).await.expect("it is there");
            assert_eq!(begun(&job).await, [(1, finished), (2, finished), (3, open)]);
            let refused = job.put_state(1, early.clone(), false).await.map(drop).expect_err("it is further");
            assert_eq!(refused.code(), Some(Code::StateBehind));
            let refused = job.put_state(0, early.clone(), false).await.map(drop).expect_err("of epoch 1");
            assert_eq!(refused.code(), Some(Code::StateDiffers));
        }
        // The end of epoch 2, half of epoch 3 later.
        let there = job.put_state(2, end.clone(), true).await.expect("the model was saved then");
        assert_eq!((there.state, there.acked), (finished, 16));
        assert_eq!(begun(&job).await, [(1, finished), (2, finished)]);
        let stale = held.token.ack(BatchTimes::default());
        let anew = batch(&job, 3, 0, 4).await.expect("a batch");
        let refused = job.ack(3, 0, &[stale]).await.map(drop).expect_err("of a ledger that is gone");
        assert_eq!(refused.code(), Some(Code::LeaseGone));
        ack(&job, &anew).await;
        let (rest, _) = consume(&job, &tree, 3, 0, 4).await;
        assert_eq!(rest.len(), 12, "all of epoch 3, but for what was acknowledged since");
        // The middle of epoch 1, when epoch 4 has begun and epoch 1 is over.
        acked(&job, 4).await;
        let there = job.put_state(1, early, true).await.expect("an older model");
        assert_eq!((there.state, there.acked), (open, 4));
        assert_eq!(begun(&job).await, [(1, open)]);
        let (rest, _) = consume(&job, &tree, 1, 0, 4).await;
        assert_eq!(rest.len(), 12);
        let (again, received) = consume(&job, &tree, 2, 0, 4).await;
        assert_eq!(again.len(), 16);
        assert!(received.agrees(&job.receipt(2).await.expect("finished")));
    }
    node.running.shutdown().await;
}

/// A checkpoint can be saved before the first step. A request for a state ends no epoch that is open.
#[tokio::test(flavor = "multi_thread")]
async fn a_state_before_the_first_lease_begins_the_epoch_that_follows() {
    let tree = tree(14);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let job =
        client(&node).declare(&ask("j", OrderKind::Strict, world(1, 4, Tail::Keep))).await.expect("declared");
    let none = async |epoch| job.state(epoch).await.map(drop).expect_err("no such epoch").code();
    assert_eq!(none(1).await, Some(Code::NotFound));
    assert_eq!(begun(&job).await, []);
    let start = job.state(0).await.expect("the first epoch");
    let (open, finished) = (EpochState::Open, EpochState::Finished);
    assert_eq!(begun(&job).await, [(0, open)]);
    acked(&job, 0).await;
    assert_eq!(none(1).await, Some(Code::NotFound), "epoch 0 is open");
    // The process was killed, and its model with it: everything comes again.
    job.put_state(0, start, true).await.expect("the state before the first step");
    let (all, _) = consume(&job, &tree, 0, 0, 4).await;
    assert_eq!(all.len(), 16);
    job.state(1).await.expect("epoch 0 is finished");
    assert_eq!(begun(&job).await, [(0, finished), (1, open)]);
    assert_eq!(none(3).await, Some(Code::NotFound));
    node.running.shutdown().await;
}

/// Putting a state with `replace` voids the held leases. Their workers may still live, but the restored model
/// did not consume those samples, so that their acks are rejected.
#[tokio::test(flavor = "multi_thread")]
async fn a_state_that_is_put_again_voids_what_is_held() {
    let tree = tree(14);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let job = client(&node)
        .declare(&ask("j", OrderKind::Substitute, world(1, 4, Tail::Keep)))
        .await
        .expect("declared");
    acked(&job, 0).await;
    let held = batch(&job, 0, 0, 4).await.expect("a batch");
    let state = job.state(0).await.expect("state");
    let there = job.put_state(0, state.clone(), false).await.expect("it is there");
    assert_eq!((there.acked, there.held, there.leases), (4, 4, 1), "nothing changed");
    let back = job.put_state(0, state, true).await.expect("the model went back");
    assert_eq!((back.acked, back.held, back.leases), (4, 0, 0));
    let late = job.ack(0, 0, &[held.token.ack(BatchTimes::default())]).await.map(drop);
    assert_eq!(late.expect_err("it is gone").code(), Some(Code::LeaseGone));
    let (rest, _) = consume(&job, &tree, 0, 0, 4).await;
    assert_eq!(rest.len(), 12);
    node.running.shutdown().await;
}

/// A damaged or unreadable epoch cannot reject a change of world, and the job goes on with the next epoch.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_epoch_refuses_no_world() {
    let tree = tree(14);
    tree.index();
    for readable in [true, false] {
        let node = Node::serving(&tree, &[]).await;
        let what = StartJob {
            buckets: Some(BucketSpec::Lengths(vec![3_020])),
            ..ask("j", OrderKind::Bucketed, world(1, 4, Tail::Drop))
        };
        let job = client(&node).declare(&what).await.expect("declared");
        acked(&job, 0).await;
        let id = job.info().id.clone();
        node.running.shutdown().await;
        let ledger = node.state.path().join("state/jobs").join(&id).join("epoch-0.ledger");
        let mut damaged = std::fs::read(&ledger).expect("a ledger");
        damaged[60] ^= 1;
        if readable {
            std::fs::write(&ledger, damaged).expect("damaged");
        } else {
            // What no read of gives bytes, as if its sectors were bad.
            std::fs::remove_file(&ledger).expect("removed");
            std::fs::create_dir(&ledger).expect("a directory");
        }
        let node = Node::start_in(node.state, &[]).await;
        let job = client(&node).declare(&what).await.expect("the same");
        let moved = job.set_world(world(2, 4, Tail::Drop)).await.expect("another world");
        let epochs: Vec<_> = moved.epochs.iter().map(|e| (e.epoch, e.state)).collect();
        assert_eq!((moved.world.ranks, epochs), (2, vec![(0, EpochState::Damaged)]));
        assert!(node.metric("fletch_epoch_faults_total{fault=\"damaged\"}").await > 0);
        batch(&job, 1, 1, 2).await.expect("it goes on");
        node.running.shutdown().await;
    }
}

/// A state of an epoch before the current one is rejected, unless `replace` says to discard the later epochs.
#[tokio::test(flavor = "multi_thread")]
async fn a_state_before_epochs_that_have_begun_is_refused() {
    let tree = tree(14);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let client = client(&node);
    let what = ask("j", OrderKind::Strict, world(1, 4, Tail::Keep));
    let job = client.declare(&what).await.expect("declared");
    acked(&job, 0).await;
    let state = job.state(0).await.expect("state");
    client.delete_job(&job.info().id).await.expect("deleted");
    let job = client.declare(&what).await.expect("again");
    acked(&job, 2).await;
    let refused = job.put_state(0, state.clone(), false).await.map(drop).expect_err("epoch 2 has begun");
    assert_eq!(refused.code(), Some(Code::StateBehind));
    assert_eq!(begun(&job).await, [(2, EpochState::Open)]);
    job.put_state(0, state, true).await.expect("forget it");
    assert_eq!(begun(&job).await, [(0, EpochState::Open)]);
    node.running.shutdown().await;
}

/// The first request of an epoch ends the epochs before it. A rejected request neither begins nor ends an
/// epoch.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_refused_begins_no_epoch() {
    let tree = tree(14);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let job =
        client(&node).declare(&ask("j", OrderKind::Strict, world(2, 4, Tail::Drop))).await.expect("declared");
    let first = batch(&job, 3, 0, 2).await.expect("a batch");
    let path = routes::epoch(&job.info().id, 7, "leases");
    let renewals =
        serde_json::json!({"rank": 0, "sequence": 1, "want": 1, "renew": vec![1; 4097]}).to_string();
    for (body, code) in [
        (renewals.as_str(), Code::BadPlan),
        (r#"{"rank":2,"sequence":1,"want":1}"#, Code::BadRank),
        (r#"{"rank":0,"sequence":1,"want":0}"#, Code::BadPlan),
        (r#"{"rank":0,"sequence":1,"want":4097}"#, Code::BadPlan),
        (r#"{"rank":0,"sequence":1,"want":1,"acks":[{"lease":1,"upto":1}]}"#, Code::LeaseGone),
    ] {
        problem(node.post(&path, body).send().await.expect("answer"), code).await;
    }
    assert_eq!(job.checkpoint(7, 1).await.map(drop).expect_err("no such law").code(), Some(Code::NoCommit));
    assert_eq!(begun(&job).await, [(3, EpochState::Open)]);
    assert!(!ack(&job, &first).await);
    batch(&job, 3, 1, 2).await.expect("it goes on");
    node.running.shutdown().await;
}

/// Ranks send their first requests while one puts a state. Whichever comes first, no write goes to a deleted
/// ledger.
#[tokio::test(flavor = "multi_thread")]
async fn a_state_put_among_beginning_ranks_loses_nothing() {
    let tree = tree(61);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let client = client(&node);
    let job = client.declare(&ask("j", OrderKind::Strict, world(4, 8, Tail::Drop))).await.expect("declared");
    for rank in 0..4 {
        let some = batch(&job, 0, rank, 4).await.expect("a batch");
        ack(&job, &some).await;
    }
    let state = job.state(0).await.expect("state");
    for round in 0..8 {
        client.delete_job(&job.info().id).await.expect("deleted");
        let job = client.declare(&ask("j", OrderKind::Strict, world(4, 8, Tail::Drop))).await.expect("again");
        let put = job.put_state(0, state.clone(), false);
        let begin = futures::future::join_all((0..4).map(|rank| batch(&job, 0, rank, 2)));
        let (put, batches) = tokio::join!(put, begin);
        for b in batches.into_iter().flatten() {
            // A lease of what the state replaced is gone; one of what is there is known to it.
            match job.ack(0, b.token.rank, &[b.token.ack(BatchTimes::default())]).await {
                Ok(_) => {}
                Err(e) => assert_eq!(e.code(), Some(Code::LeaseGone), "{round}: {e}"),
            }
        }
        if let Err(e) = &put {
            assert_eq!(e.code(), Some(Code::StateBehind), "{round}");
        }
        // The ledger that is there is whole, and says what is acknowledged.
        let ledger = Ledger::read(&job.ledger(0).await.expect("ledger")).expect("whole");
        assert_eq!(ledger.header.job, "j");
        let seen = futures::future::join_all((0..4).map(|rank| consume(&job, &tree, 0, rank, 4))).await;
        let rest: usize = seen.iter().map(|s| s.0.len()).sum();
        assert!(rest >= 56 - 16 - 8, "{round}: {rest}");
        job.receipt(0).await.expect("finished");
    }
    node.running.shutdown().await;
}

/// A power loss before the first sync leaves an incomplete or empty job file or ledger. No client was told of
/// it, so that it starts anew. A synced ledger that is damaged is not mistaken for an incomplete one.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_cut_off_before_it_was_told_begins_anew() {
    let tree = tree(14);
    tree.index();
    let mut node = Node::serving(&tree, &[]).await;
    let what = ask("j", OrderKind::Strict, world(1, 4, Tail::Keep));
    let id = client(&node).declare(&what).await.expect("declared").info().id.clone();
    let of_job = |node: &Node, name: &str| node.state.path().join("state/jobs").join(&id).join(name);
    // The directory came through, the file's bytes did not.
    for torn in ["", "{\"na"] {
        node.running.shutdown().await;
        std::fs::write(node.state.path().join("state/jobs").join(&id).join("job.json"), torn).expect("torn");
        node = Node::start_in(node.state, &[]).await;
        assert!(client(&node).jobs().await.expect("jobs").is_empty());
        let again = client(&node).declare(&what).await.expect("declared again");
        assert_eq!(again.info().id, id);
        assert!(std::fs::metadata(of_job(&node, "job.json")).expect("a file").len() > 4);
    }
    let job = client(&node).declare(&what).await.expect("the same");
    let first = batch(&job, 0, 0, 4).await.expect("a batch");
    assert!(!ack(&job, &first).await);
    node.running.shutdown().await;
    let ledger = node.state.path().join("state/jobs").join(&id).join("epoch-0.ledger");
    let whole = std::fs::read(&ledger).expect("a ledger");
    let mut damaged = whole.clone();
    damaged[60] ^= 1;
    std::fs::write(&ledger, damaged).expect("damaged");
    node = Node::start_in(node.state, &[]).await;
    let job = client(&node).declare(&what).await.expect("a job goes on without one of its epochs");
    let epochs: Vec<_> = job.info().epochs.iter().map(|e| (e.epoch, e.state, e.planned)).collect();
    assert_eq!(epochs, [(0, EpochState::Damaged, 0)]);
    let refused = job.reader(0, 0, 0).next(1).await.map(drop).expect_err("it was told of");
    assert_eq!(refused.code(), Some(Code::Internal));
    for torn in [&[], &whole[..9], &whole[..100], &[0; 200]] {
        node.running.shutdown().await;
        std::fs::write(&ledger, torn).expect("torn");
        node = Node::start_in(node.state, &[]).await;
        let job = client(&node).declare(&what).await.expect("the same");
        assert_eq!(job.receipt(0).await.expect_err("it did not begin").code(), Some(Code::NotFound));
        let (entries, received) = consume(&job, &tree, 0, 0, 4).await;
        assert_eq!(entries.len(), 16, "all of it");
        assert!(received.agrees(&job.receipt(0).await.expect("finished")));
    }
    node.running.shutdown().await;
}

/// A deletion that fails on disk leaves the job as it was, so that no new job of that name gets its old
/// ledgers.
#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_that_fails_deletes_nothing() {
    let tree = tree(14);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let client = client(&node);
    let what = ask("j", OrderKind::Strict, world(1, 4, Tail::Keep));
    let job = client.declare(&what).await.expect("declared");
    acked(&job, 0).await;
    let id = &job.info().id;
    // Something of that name that is no directory.
    let jobs = node.state.path().join("state/jobs");
    let in_the_way = jobs.join(format!("gone-{id}"));
    std::fs::write(&in_the_way, b"").expect("written");
    let refused = client.delete_job(id).await.expect_err("no room for what is deleted");
    assert_eq!(refused.code(), Some(Code::Internal), "{refused}");
    assert_eq!(job.current().await.expect("still there").epochs[0].acked, 4);
    assert_eq!(client.jobs().await.expect("jobs").len(), 1);
    std::fs::remove_file(&in_the_way).expect("removed");
    // What an earlier deletion could not remove is no reason.
    std::fs::create_dir_all(in_the_way.join("more")).expect("made");
    client.delete_job(id).await.expect("deleted");
    assert!(!in_the_way.exists() && !jobs.join(id).exists());
    let anew = client.declare(&what).await.expect("declared anew");
    assert!(anew.current().await.expect("job").epochs.is_empty());
    node.running.shutdown().await;
}

/// Weights keep every bit when they are written to the job's file and read back, several times.
#[tokio::test(flavor = "multi_thread")]
async fn weights_survive_their_file() {
    let tree = tree(62);
    tree.index();
    let mut node = Node::serving(&tree, &[]).await;
    let mut what = ask("j", OrderKind::Strict, world(1, 2, Tail::Drop));
    // Numbers of seventeen digits.
    let weights =
        (1..=64).map(|i| Some(f64::from(i).sqrt() / 1e5 * std::f64::consts::PI.powi(i % 9))).collect();
    what.plan.base = fletch_api::PlanBase::Weights(fletch_api::Weights { weights, draws: 500, of: None });
    let declared = client(&node).declare(&what).await.expect("declared");
    for ranks in [1, 2, 1] {
        let job = client(&node).job(&declared.info().id).await.expect("job");
        job.set_world(world(ranks, 2, Tail::Drop)).await.expect("another world");
        node.running.shutdown().await;
        node = Node::start_in(node.state, &[]).await;
    }
    let same = client(&node).declare(&what).await.expect("the same weights");
    assert_eq!(same.info().plan, declared.info().plan);
    node.running.shutdown().await;
}

/// A long plan is kept in its file, not in memory. A repeated declaration is compared by the plan's hash,
/// before and after a restart.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_plan_is_compared_by_its_hash() {
    let tree = tree(14);
    tree.index();
    let mut node = Node::serving(&tree, &[]).await;
    let mut what = ask("j", OrderKind::Strict, world(1, 2, Tail::Keep));
    what.plan.base = fletch_api::PlanBase::Samples(vec![1, 3, 5, 7]);
    let declared = client(&node).declare(&what).await.expect("declared");
    for restart in [false, true] {
        if restart {
            node.running.shutdown().await;
            node = Node::start_in(node.state, &[]).await;
        }
        let same = client(&node).declare(&what).await.expect("the same");
        assert_eq!((same.info().plan, same.info().entries), (declared.info().plan, 4));
        let mut other = what.clone();
        other.plan.base = fletch_api::PlanBase::Samples(vec![1, 3, 5, 8]);
        let differs = client(&node).declare(&other).await.expect_err("another plan");
        assert_eq!(differs.code(), Some(Code::JobDiffers));
        assert!(differs.to_string().contains("plan"), "{differs}");
    }
    // Its world changes in its file, and the plan stays there.
    let job = client(&node).job(&declared.info().id).await.expect("job");
    job.set_world(world(1, 4, Tail::Keep)).await.expect("another world");
    node.running.shutdown().await;
    let node = Node::start_in(node.state, &[]).await;
    let job = client(&node).job(&declared.info().id).await.expect("remembered");
    assert_eq!((job.info().entries, job.info().world), (4, world(1, 4, Tail::Keep)));
    node.running.shutdown().await;
}
