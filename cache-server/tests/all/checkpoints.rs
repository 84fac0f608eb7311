//! Tests every visitation with the same script of faults, and checkpoints of the model.

use crate::common::{Node, Tree, epochs::*, problem};
use fletch_api::{BatchTimes, Code, EpochState, OrderKind, Visitation, routes};
use fletch_client::{
    ClientError,
    epochs::{JobHandle, LeaseBatch, Next, ReceivedSum},
};
use fletch_core::{
    delivery::{Event, ledger::Ledger},
    plan::Tail,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};
use tempfile::TempDir;

const RANKS: u32 = 2;
const WANT: u32 = 4;
/// The batches of each rank before the model is saved, and after.
const BEFORE: usize = 3;
const AFTER: usize = 2;

/// The state directory of a stopped node, for the next node.
async fn ended(node: Node) -> TempDir {
    let Node { running, state, .. } = node;
    running.shutdown().await;
    state
}

fn entries(b: &LeaseBatch) -> impl Iterator<Item = u32> + '_ {
    b.samples.iter().map(|s| s.entry)
}

/// What the models of all ranks were trained on.
#[derive(Default)]
struct Trained {
    /// How often each entry was consumed.
    times: BTreeMap<u32, u32>,
    sum: Option<ReceivedSum>,
}

impl Trained {
    async fn step(&mut self, job: &JobHandle, tree: &Tree, b: &LeaseBatch) {
        ack(job, b).await;
        let sum = self.sum.get_or_insert_with(|| ReceivedSum::new(job.info().root));
        for s in &b.samples {
            right(tree, s);
            sum.add(s);
            *self.times.entry(s.entry).or_default() += 1;
        }
    }

    fn set(&self) -> BTreeSet<u32> {
        self.times.keys().copied().collect()
    }
}

async fn steps(job: &JobHandle, tree: &Tree, trained: &mut Trained, n: usize) {
    for _ in 0..n {
        for rank in 0..RANKS {
            let b = batch(job, 0, rank, WANT).await.expect("a batch");
            trained.step(job, tree, &b).await;
        }
    }
}

/// Runs the script: train, save the model, train, kill all ranks and the server in mid-step, load the model
/// if the visitation says so, and train to the end.
async fn script(tree: &Tree, order: OrderKind, visitation: Visitation) {
    let node = Node::serving(tree, &["--limits-lease-ttl=4s"]).await;
    let mut spec = ask("j", order, world(RANKS, RANKS * WANT, Tail::Drop));
    spec.visitation = visitation;
    let job = client(&node).declare(&spec).await.expect("declared");
    let mut saved = Trained::default();
    steps(&job, tree, &mut saved, BEFORE).await;
    let commits = visitation == Visitation::Checkpoint;
    let committed = job.checkpoint(0, 30).await;
    if commits {
        assert_eq!(committed.expect("committed").commits, [30]);
    } else {
        assert_eq!(committed.expect_err("it knows none").code(), Some(Code::NoCommit));
    }
    let mut later = Trained::default();
    steps(&job, tree, &mut later, AFTER).await;
    let mut dying = BTreeSet::new();
    for rank in 0..RANKS {
        let b = batch(&job, 0, rank, WANT).await.expect("a batch");
        dying.extend(entries(&b));
        job.held().release(0, rank, b.token.lease);
    }
    let node = Node::start_in(ended(node).await, &["--limits-lease-ttl=4s"]).await;
    let job = client(&node).declare(&spec).await.expect("the same");
    if commits {
        let back = job.rollback(0, None).await.expect("rolled back");
        assert_eq!((back.acked, back.held, back.leases), (saved.times.len() as u64, 0, 0));
        let ledger = Ledger::read(&job.ledger(0).await.expect("ledger")).expect("a ledger");
        assert!(matches!(ledger.events.last(), Some(Event::Rollback { commit: 30 })));
        let again = job.rollback(0, Some(30)).await.expect("it is there already");
        assert_eq!(again.ledger_bytes, back.ledger_bytes, "which changes nothing");
    } else {
        for (name, trained) in later.times {
            *saved.times.entry(name).or_default() += trained;
        }
        if let (Some(sum), Some(more)) = (&mut saved.sum, &later.sum) {
            sum.merge(more);
        }
        later = Trained::default();
    }
    // The rest. A lease of the dead is waited for.
    let before = saved.set();
    let mut rest = Trained::default();
    let consumers = (0..RANKS).map(|rank| {
        let job = job.clone();
        async move {
            let mut reader = job.reader(0, rank, 1);
            let mut all = Vec::new();
            loop {
                match reader.next(WANT).await.expect("a lease") {
                    Next::Batch(b) => {
                        job.ack(0, rank, &[b.token.ack(BatchTimes::default())]).await.expect("in time");
                        all.push(b);
                    }
                    Next::Done => return all,
                    Next::Full | Next::Last => tokio::time::sleep(Duration::from_millis(50)).await,
                }
            }
        }
    });
    for b in futures::future::join_all(consumers).await.into_iter().flatten() {
        rest.step(&job, tree, &b).await;
    }
    assert!(rest.times.values().all(|n| *n == 1));
    let rest_set = rest.set();
    assert!(rest_set.is_disjoint(&before), "what a saved model has is not delivered again");
    let receipt = job.receipt(0).await.expect("finished").receipt;
    let planned = receipt.delivered as usize;
    let lost = match visitation {
        Visitation::AtMostOnce => {
            assert!(rest_set.is_disjoint(&dying), "what somebody held who died is not delivered again");
            assert_eq!(before.len() + rest_set.len() + dying.len(), planned);
            assert_eq!(receipt.redelivered, 0);
            dying.len()
        }
        Visitation::ExactlyOnce => {
            assert!(rest_set.is_superset(&dying));
            assert_eq!(before.len() + rest_set.len(), planned);
            assert_eq!(receipt.redelivered, dying.len() as u64);
            0
        }
        Visitation::Checkpoint => {
            let after = later.set();
            assert_eq!(after.len(), AFTER * (RANKS * WANT) as usize);
            assert!(rest_set.is_superset(&after) && rest_set.is_superset(&dying));
            assert_eq!(
                before.len() + rest_set.len(),
                planned,
                "exactly what came after the commit, and the rest"
            );
            assert_eq!(receipt.redelivered, (after.len() + dying.len()) as u64);
            0
        }
    };
    let mut all = saved.sum.expect("a sum");
    all.merge(&rest.sum.expect("a sum"));
    assert_eq!(all.agrees(&job.receipt(0).await.expect("finished")), visitation != Visitation::AtMostOnce);
    println!(
        "{visitation:?}, {}: {planned} delivered, {} before the fault, {} after, {lost} lost, 0 doubled, {} \
            redelivered",
        order.as_str(),
        before.len(),
        rest_set.len(),
        receipt.redelivered,
    );
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_visitation_holds_under_one_script_of_faults() {
    let tree = tree(70);
    tree.index();
    let visitations = [Visitation::ExactlyOnce, Visitation::AtMostOnce, Visitation::Checkpoint];
    let of = |order| visitations.map(|visitation| script(&tree, order, visitation));
    // Side by side: leases of the dead are waited for.
    futures::future::join_all([OrderKind::Strict, OrderKind::Substitute].into_iter().flat_map(of)).await;
}

/// A rollback names a commit. It reaches back over a finished epoch, over pads and over later epochs. What
/// was rolled back cannot be acknowledged.
#[tokio::test(flavor = "multi_thread")]
async fn a_model_goes_back_over_the_end_of_an_epoch() {
    let tree = tree(19);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let client = client(&node);
    for order in [OrderKind::Strict, OrderKind::Substitute] {
        let mut spec = ask(&format!("j-{}", order.as_str()), order, world(RANKS, RANKS * WANT, Tail::Pad));
        spec.visitation = Visitation::Checkpoint;
        let job = client.declare(&spec).await.expect("declared");
        let code = |r: Result<fletch_api::Epoch, ClientError>| r.expect_err("refused").code();
        assert_eq!(code(job.rollback(0, None).await), Some(Code::NotFound), "no epoch has begun");
        // 21 samples: 24 entries in 3 steps, 3 of them pads.
        let mut saved = Trained::default();
        steps(&job, &tree, &mut saved, 1).await;
        assert_eq!(code(job.rollback(0, None).await), Some(Code::NoCommit));
        for commit in [1, 2] {
            assert_eq!(job.checkpoint(0, commit).await.expect("committed").acked, 8);
        }
        let kept = ReceivedSum::clone(saved.sum.as_ref().expect("a sum"));
        steps(&job, &tree, &mut saved, 1).await;
        let same = job.checkpoint(0, 2).await.expect("known");
        assert_eq!((same.commits, same.acked), (vec![1, 2], 16));
        let unacked = batch(&job, 0, 0, WANT).await.expect("a batch");
        // To the end, and into the next epoch.
        for _ in 0..2 {
            ack(&job, &unacked).await;
        }
        let last = batch(&job, 0, 1, WANT).await.expect("a batch");
        assert!(ack(&job, &last).await, "finished");
        let first_time = job.receipt(0).await.expect("finished").receipt;
        assert_eq!((first_time.delivered, first_time.padded), (24, 3));
        batch(&job, 1, 0, WANT).await.expect("a batch of the next epoch");
        assert_eq!(code(job.rollback(0, Some(7)).await), Some(Code::NoCommit));
        assert_eq!(job.current().await.expect("job").epochs.len(), 2, "nothing changed");
        let back = job.rollback(0, Some(2)).await.expect("back");
        assert_eq!((back.state, back.acked, back.padded, back.commits), (EpochState::Open, 8, 0, vec![1, 2]));
        assert_eq!(job.current().await.expect("job").epochs.len(), 1, "the next has not begun");
        assert_eq!(job.receipt(0).await.expect_err("open").code(), Some(Code::EpochOpen));
        let gone = job.ack(0, 1, &[last.token.ack(BatchTimes::default())]).await.expect_err("rolled back");
        assert_eq!(gone.code(), Some(Code::LeaseGone));
        // What comes now, with what the model had, is the plan.
        let mut all = kept;
        for rank in 0..RANKS {
            all.merge(&consume(&job, &tree, 0, rank, WANT).await.1);
        }
        let receipt = job.receipt(0).await.expect("finished");
        assert_eq!((receipt.receipt.delivered, receipt.receipt.padded), (24, 3));
        assert!(all.agrees(&receipt));
        // Few are remembered.
        for commit in 3..9 {
            job.checkpoint(0, commit).await.expect("committed");
        }
        assert_eq!(job.current().await.expect("job").epochs[0].commits, [5, 6, 7, 8]);
        let path = routes::epoch(&job.info().id, 0, "checkpoint");
        problem(node.post(&path, "{}").send().await.expect("answer"), Code::BadRequest).await;
    }
    node.running.shutdown().await;
}
