//! Tests the bucketed order: all entries of one step, of every rank, are of one bucket.

use crate::common::{Node, Tree, content, epochs::*};
use fletch_api::{
    BucketSpec, Code, EchoSpec, EpochReceipt, EpochState, OrderKind, PlanBase, StartJob, Visitation,
    WorldSpec,
};
use fletch_client::epochs::{JobHandle, LeaseBatch, Next, ReceivedSum};
use fletch_core::{delivery::ledger::Ledger, plan::Tail};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

const LANGUAGES: [&str; 4] = ["de", "en", "fr", "pt"];
/// The bounds between the lengths of the four languages' sentences.
const BOUNDS: [u64; 3] = [1000, 2000, 3000];

/// Creates 97 sentences in four languages. Sentences of one language have similar lengths.
fn sentences() -> Tree {
    let mut tree = Tree::new([]);
    for i in 0..97_u64 {
        // 14, 28, 13 and 42 of them.
        let of = usize::try_from([1, 3, 0, 3, 1, 3, 2][i as usize % 7]).expect("few");
        let name = format!("{}/{i:03}", LANGUAGES[of]);
        let bytes = content(500 + i, of * 1000 + 500 + (i % 90) as usize);
        std::fs::create_dir_all(tree.path(LANGUAGES[of])).expect("mkdir");
        std::fs::write(tree.path(&name), &bytes).expect("write");
        tree.files.insert(name, bytes);
    }
    tree.index_plain(tree.dir.path());
    tree
}

fn language(path: &str) -> usize {
    LANGUAGES.iter().position(|l| path.starts_with(l)).expect("a language")
}

fn specs(tree: &Tree) -> [BucketSpec; 3] {
    [
        BucketSpec::Lengths(BOUNDS.to_vec()),
        BucketSpec::Prefixes(LANGUAGES[..3].iter().map(|l| format!("{l}/")).collect()),
        BucketSpec::Groups(tree.files.keys().map(|p| language(p) as u32 * 7).collect()),
    ]
}

fn bucketed(name: &str, buckets: &BucketSpec, world: WorldSpec) -> StartJob {
    StartJob { buckets: Some(buckets.clone()), ..ask(name, OrderKind::Bucketed, world) }
}

/// Returns the bucket of a lease. All its entries must be of one bucket.
fn bucket(tree: &Tree, b: &LeaseBatch) -> usize {
    let of: BTreeSet<usize> = b.samples.iter().map(|s| language(&s.heads[0].path)).collect();
    b.samples.iter().for_each(|s| right(tree, s));
    assert_eq!(of.len(), 1, "a mixed lease: {of:?}");
    *of.first().expect("one")
}

/// What one rank consumed: (entry, language) in order, and its sum.
struct Got {
    order: Vec<(u32, usize)>,
    received: ReceivedSum,
    dropped: u64,
}

/// Reads a rank's epoch from its current step. Never acknowledges each `dies`th of the first leases, as if
/// its worker died.
async fn rank(job: &JobHandle, tree: &Tree, rank: u32, want: u32, dies: u64, stop: u64) -> Got {
    let mut got = Got { order: Vec::new(), received: ReceivedSum::new(job.info().root), dropped: 0 };
    let mut reader = job.reader(0, rank, 0);
    for i in 1..=stop {
        tokio::time::sleep(Duration::from_millis(u64::from(rank) * 4)).await;
        match reader.next(want).await.expect("a lease") {
            Next::Batch(b) if i < 12 && i % dies == 0 => {
                bucket(tree, &b);
                job.held().release(0, rank, b.token.lease);
                got.dropped += 1;
                // Another worker goes on.
                reader = job.reader(0, rank, u32::try_from(i).expect("few"));
            }
            Next::Batch(b) => {
                let of = bucket(tree, &b);
                ack(job, &b).await;
                job.held().release(0, rank, b.token.lease);
                b.samples.iter().for_each(|s| got.received.add(s));
                got.order.extend(b.samples.iter().map(|s| (s.entry, of)));
            }
            Next::Done => return got,
            Next::Full | Next::Last => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
    got
}

fn proved(parts: &[&Got], receipt: &EpochReceipt) -> usize {
    let mut all = parts[0].received.clone();
    parts[1..].iter().for_each(|g| all.merge(&g.received));
    assert!(all.agrees(receipt));
    let entries: Vec<u32> = parts.iter().flat_map(|g| g.order.iter().map(|o| o.0)).collect();
    let once: BTreeSet<u32> = entries.iter().copied().collect();
    assert_eq!(once.len(), entries.len(), "exactly once");
    assert_eq!(once.len() as u64, receipt.receipt.delivered);
    once.len()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_step_of_unequal_ranks_mixes_buckets() {
    let tree = sentences();
    let node = Node::serving(&tree, &[]).await;
    let client = client(&node);
    let mut sequences = Vec::new();
    for (i, (spec, tail)) in
        specs(&tree).iter().flat_map(|s| [(s.clone(), Tail::Drop), (s.clone(), Tail::Pad)]).enumerate()
    {
        let job = client.declare(&bucketed(&format!("j{i}"), &spec, world(3, 12, tail))).await.expect("job");
        // 14, 28, 13 and 42 entries in steps of 12.
        let (steps, delivered) = if tail == Tail::Drop { (7, 84) } else { (11, 132) };
        assert_eq!((job.info().steps, job.info().entries), (steps, 97));
        // Whoever asks for less than its share of a step, for all of it, or for more.
        let wants = [3, 4, 9];
        let ranks = (0..3).map(|r| rank(&job, &tree, r, wants[r as usize], u64::MAX, u64::MAX));
        let got = futures::future::join_all(ranks).await;
        let receipt = job.receipt(0).await.expect("finished");
        assert_eq!(proved(&got.iter().collect::<Vec<_>>(), &receipt), delivered);
        let pads = delivered.saturating_sub(97) as u32;
        assert_eq!(receipt.receipt.padded, pads);
        assert_eq!(receipt.receipt.dropped.len(), if tail == Tail::Drop { 13 } else { 0 });
        let mut mixed = 0;
        for step in 0..usize::try_from(steps).expect("few") {
            let of: BTreeSet<usize> =
                got.iter().flat_map(|g| g.order[step * 4..step * 4 + 4].iter().map(|o| o.1)).collect();
            mixed += usize::from(of.len() > 1);
        }
        println!(
            "by {} {tail:?}: {steps} steps, {mixed} mixed, {delivered} entries once, {pads} pads",
            ["lengths", "prefixes", "groups"][i / 2]
        );
        assert_eq!(mixed, 0);
        let ledger = Ledger::read(&job.ledger(0).await.expect("ledger")).expect("a ledger");
        assert_eq!((ledger.header.order.as_str(), ledger.header.plan), ("bucketed", receipt.receipt.plan));
        assert_eq!(ledger.header.plan, job.info().plan);
        sequences.push(got.into_iter().map(|g| g.order).collect::<Vec<_>>());
    }
    assert_eq!(sequences[0], sequences[2], "the same buckets by whatever means");
    assert_ne!(sequences[0], sequences[4], "another cut is another order");
    // The same settings under another name, pulled otherwise: the same steps.
    let again = client.declare(&bucketed("again", &specs(&tree)[0], world(3, 12, Tail::Drop))).await;
    let again = again.expect("job");
    for r in [2, 0, 1] {
        assert_eq!(rank(&again, &tree, r, 5, u64::MAX, u64::MAX).await.order, sequences[0][r as usize]);
    }
    // One rank may have short steps; a lease is of one step, however much is wanted.
    let one =
        client.declare(&bucketed("one", &specs(&tree)[0], world(1, 12, Tail::Keep))).await.expect("job");
    let got = rank(&one, &tree, 0, 4096, u64::MAX, u64::MAX).await;
    assert_eq!((got.order.len(), one.info().steps), (97, 11));
    proved(&[&got], &one.receipt(0).await.expect("finished"));
    node.running.shutdown().await;
}

/// Workers die with their leases, the server restarts in mid-epoch, and later loses its state.
#[tokio::test(flavor = "multi_thread")]
async fn deaths_a_restart_and_a_loss_mix_nothing() {
    let tree = sentences();
    let flags = ["--limits-lease-ttl=4s"];
    let spec = BucketSpec::Lengths(BOUNDS.to_vec());
    let node = Node::serving(&tree, &flags).await;
    let declare = bucketed("j", &spec, world(3, 12, Tail::Pad));
    let job = client(&node).declare(&declare).await.expect("declared");
    let id = job.info().id.clone();
    let (stops, wants) = ([5, 4, 3], [4, 4, 2]);
    let some = (0..3).map(|r| rank(&job, &tree, r, wants[r as usize], 3, stops[r as usize]));
    let first = futures::future::join_all(some).await;
    node.running.shutdown().await;
    let node = Node::start_in(node.state, &flags).await;
    let job = client(&node).job(&id).await.expect("remembered");
    let some = (0..3).map(|r| rank(&job, &tree, r, 4, 4, 2));
    let second = futures::future::join_all(some).await;
    // What the dead held is free again.
    let expired = async {
        while job.current().await.expect("job").epochs[0].leases > 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), expired).await.expect("leases expire");
    let state = job.state(0).await.expect("state");
    node.running.shutdown().await;
    drop(node.state);
    // Nothing is left but the state, in the middle of a step: each rank goes on where it was.
    let node = Node::serving(&tree, &flags).await;
    let job = client(&node).declare(&declare).await.expect("declared anew");
    let there = job.put_state(0, state, false).await.expect("resumed");
    let before: usize = first.iter().chain(&second).map(|g| g.order.len()).sum();
    assert_eq!((there.acked, there.planned), (before as u64, 132));
    let rest = (0..3).map(|r| rank(&job, &tree, r, wants[r as usize], 4, u64::MAX));
    let third = futures::future::join_all(rest).await;
    let receipt = job.receipt(0).await.expect("finished");
    let parts: Vec<&Got> = first.iter().chain(&second).chain(&third).collect();
    assert_eq!(proved(&parts, &receipt), 132);
    // Every rank has as many entries of each bucket, so that steps match, and each entry is of its step's
    // bucket.
    let count = |r: usize| {
        let mut of: BTreeMap<usize, usize> = BTreeMap::new();
        let entries = [&first[r], &second[r], &third[r]].into_iter().flat_map(|g| &g.order);
        entries.for_each(|o| *of.entry(o.1).or_default() += 1);
        of
    };
    assert_eq!(count(0), BTreeMap::from([(0, 8), (1, 12), (2, 8), (3, 16)]));
    assert_eq!((count(1), count(2)), (count(0), count(0)));
    let died: u64 = parts.iter().map(|g| g.dropped).sum();
    println!(
        "132 entries once over a restart and a loss, {died} leases died with their workers, {} entries \
            redelivered after the loss",
        receipt.receipt.redelivered
    );
    assert!(died > 3 && receipt.receipt.redelivered > 0);
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_number_of_ranks_changes_between_steps_only() {
    let tree = sentences();
    let node = Node::serving(&tree, &[]).await;
    let client = client(&node);
    let spec = BucketSpec::Lengths(BOUNDS.to_vec());
    let at = |ranks| world(ranks, 12, Tail::Drop);
    let whole = client.declare(&bucketed("whole", &spec, at(2))).await.expect("declared");
    let whole = [rank(&whole, &tree, 0, 6, 99, 99).await, rank(&whole, &tree, 1, 6, 99, 99).await];
    let job = client.declare(&bucketed("j", &spec, at(3))).await.expect("declared");
    let mut got = Vec::new();
    for r in 0..3 {
        got.push(rank(&job, &tree, r, 4, 99, 2).await);
    }
    // Two steps are delivered; then one rank is ahead.
    let boundary = job.state(0).await.expect("state");
    got.push(rank(&job, &tree, 1, 2, 99, 1).await);
    let ahead = job.state(0).await.expect("state");
    for other in [at(2), world(3, 24, Tail::Drop)] {
        let refused = job.set_world(other).await.expect_err("in the middle of a step");
        assert_eq!(refused.code(), Some(Code::MidStep));
    }
    assert_eq!(job.current().await.expect("job").world, at(3), "nothing has changed");
    got.push(rank(&job, &tree, 1, 2, 99, 1).await);
    got.push(rank(&job, &tree, 0, 4, 99, 1).await);
    got.push(rank(&job, &tree, 2, 9, 99, 1).await);
    assert_eq!(job.set_world(at(2)).await.expect("at a boundary").epochs[0].world, at(2));
    let there = client.job(&job.info().id).await.expect("job");
    assert_eq!((there.info().world, there.info().steps), (at(2), 7));
    for r in 0..2 {
        let rest = rank(&job, &tree, r, 6, 99, 99).await;
        assert_eq!(rest.order, whole[r as usize].order[18..], "what two ranks would have had from the start");
        got.push(rest);
    }
    proved(&got.iter().collect::<Vec<_>>(), &job.receipt(0).await.expect("finished"));
    // A state of the boundary goes on with any number of ranks, one of the middle with as many.
    client.delete_job(&job.info().id).await.expect("deleted");
    let job = client.declare(&bucketed("j", &spec, at(2))).await.expect("declared");
    let refused = job.put_state(0, ahead.clone(), false).await.expect_err("in the middle of a step");
    assert_eq!(refused.code(), Some(Code::MidStep));
    assert!(job.current().await.expect("job").epochs.is_empty(), "nothing was written");
    assert_eq!(job.put_state(0, boundary, false).await.expect("resumed").acked, 24);
    for r in 0..2 {
        assert_eq!(rank(&job, &tree, r, 6, 99, 99).await.order, whole[r as usize].order[12..]);
    }
    assert_eq!(job.current().await.expect("job").epochs[0].state, EpochState::Finished);
    node.running.shutdown().await;
}

/// A rollback to a commit in mid-step restores the ranks of that step, so that all ranks end with as many
/// steps.
#[tokio::test(flavor = "multi_thread")]
async fn a_rollback_into_the_middle_of_a_step_brings_its_ranks_back() {
    let tree = sentences();
    let node = Node::serving(&tree, &[]).await;
    let at = |ranks| world(ranks, 12, Tail::Drop);
    let mut what = bucketed("j", &BucketSpec::Lengths(BOUNDS.to_vec()), at(2));
    what.visitation = Visitation::Checkpoint;
    let job = client(&node).declare(&what).await.expect("declared");
    job.checkpoint(0, 1).await.expect("at the beginning");
    rank(&job, &tree, 0, 6, 99, 1).await;
    job.checkpoint(0, 2).await.expect("in the middle of a step");
    rank(&job, &tree, 1, 6, 99, 1).await;
    job.set_world(at(3)).await.expect("at a boundary");
    assert_eq!(
        job.rollback(0, Some(1)).await.expect("a boundary").world,
        at(3),
        "which any ranks go on from"
    );
    job.set_world(at(2)).await.expect("at a boundary");
    rank(&job, &tree, 0, 6, 99, 1).await;
    job.checkpoint(0, 3).await.expect("in the middle of a step");
    rank(&job, &tree, 1, 6, 99, 1).await;
    job.set_world(at(3)).await.expect("at a boundary");
    rank(&job, &tree, 2, 4, 99, 1).await;
    let back = job.rollback(0, Some(3)).await.expect("from the middle of a step of three");
    assert_eq!((back.acked, back.world), (6, at(2)), "the step that two had begun");
    assert_eq!(job.set_world(at(3)).await.expect_err("not yet").code(), Some(Code::MidStep));
    job.set_world(at(2)).await.expect("it is so");
    // Over a restart, too; and both ranks end with as many steps.
    let id = job.info().id.clone();
    node.running.shutdown().await;
    let node = Node::start_in(node.state, &[]).await;
    let job = crate::common::epochs::client(&node).job(&id).await.expect("remembered");
    let rest = [rank(&job, &tree, 0, 6, 99, 99).await, rank(&job, &tree, 1, 6, 99, 99).await];
    assert_eq!(rest[0].order.len() + 6, rest[1].order.len());
    let ended = job.current().await.expect("job").epochs[0].state;
    assert_eq!(ended, EpochState::Finished);
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_bucketed_is_not_declared() {
    let tree = sentences();
    let node = Node::serving(&tree, &[]).await;
    let client = client(&node);
    let world = world(1, 4, Tail::Keep);
    let refused = AtomicU64::new(0);
    let refuse = async |ask: StartJob, says: &str| {
        let e = client.declare(&ask).await.expect_err(says);
        assert_eq!(e.code(), Some(Code::BadPlan));
        assert!(e.to_string().contains(says), "{e}");
        refused.fetch_add(1, Relaxed);
    };
    let with = |spec: BucketSpec| bucketed("j", &spec, world);
    let lengths = BucketSpec::Lengths(vec![100]);
    refuse(StartJob { buckets: None, ..with(lengths.clone()) }, "needs buckets").await;
    refuse(StartJob { order: OrderKind::Strict, ..with(lengths.clone()) }, "only the order bucketed").await;
    refuse(with(BucketSpec::Lengths(vec![5, 5])), "do not ascend").await;
    refuse(with(BucketSpec::Groups(vec![0; 96])), "96 samples have a bucket, and the version has 97 samples")
        .await;
    refuse(with(BucketSpec::Groups(vec![65_536; 97])), "bucket 65536").await;
    refuse(with(BucketSpec::Prefixes(vec![String::new(); 1025])), "1024 prefixes").await;
    let mut echo = with(lengths.clone());
    echo.plan.echo = Some(EchoSpec { copies: 2, apart: 1 });
    refuse(echo, "data echoing").await;
    assert_eq!((refused.load(Relaxed), client.jobs().await.expect("jobs").len()), (7, 0));
    // A selection keeps its samples' buckets.
    let mut some = bucketed("j", &specs(&tree)[1], world);
    some.plan.base = PlanBase::Samples((0..97).filter(|i| i % 3 == 0).collect());
    let job = client.declare(&some).await.expect("declared");
    let got = rank(&job, &tree, 0, 4, u64::MAX, u64::MAX).await;
    assert_eq!(got.order.len(), 33);
    let mut other = some.clone();
    other.buckets = Some(BucketSpec::Prefixes(vec!["pt/".into()]));
    assert_eq!(client.declare(&other).await.expect_err("differs").code(), Some(Code::JobDiffers));
    node.running.shutdown().await;
}

/// Many buckets with a large batch would need more pads than entries. The server rejects the plan before it
/// builds it.
#[tokio::test(flavor = "multi_thread")]
async fn pads_have_a_bound() {
    let tree = tree(300);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let groups = BucketSpec::Groups((0..302).collect());
    let what = |batch| bucketed("wide", &groups, world(1, batch, Tail::Pad));
    let refused = client(&node).declare(&what(1 << 20)).await.expect_err("316 million pads");
    assert_eq!(refused.code(), Some(Code::BadPlan), "{refused}");
    let job = client(&node).declare(&what(8)).await.expect("few pads");
    let refused = job.set_world(world(1, 1 << 20, Tail::Pad)).await.expect_err("nor later");
    assert_eq!(refused.code(), Some(Code::BadPlan), "{refused}");
    assert_eq!(job.current().await.expect("job").world, world(1, 8, Tail::Pad));
    node.running.shutdown().await;
}
