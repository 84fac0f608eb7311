//! Tests replay: an epoch in the order of an earlier epoch's ledger.

use crate::common::{Node, epochs::*};
use fletch_api::{BucketSpec, Code, LedgerBytes, OrderKind, ReplaySpec, StartJob, WorldSpec};
use fletch_client::epochs::{JobHandle, Next, ReceivedSum};
use fletch_core::{
    Hash,
    delivery::{
        Event, Request,
        ledger::{self, Header, Ledger},
    },
    order::Replay,
    plan::{Tail, World},
};
use std::time::Duration;

fn replaying(name: &str, ledger: &[u8], world: WorldSpec) -> StartJob {
    let replay = Some(ReplaySpec { ledger: LedgerBytes(ledger.into()) });
    StartJob { replay, seed: None, ..ask(name, OrderKind::Replay, world) }
}

/// What a rank consumed, in order: each entry, its copy, and the hash of its bytes.
type Said = Vec<(u32, u32, Hash)>;

/// Reads at most `most` leases of a rank's epoch. Loses each `dies`th of the first ten, as if its worker
/// died.
async fn rank(
    job: &JobHandle,
    epoch: u64,
    rank: u32,
    want: u32,
    dies: u64,
    most: u64,
) -> (Said, ReceivedSum) {
    let (mut said, mut received) = (Vec::new(), ReceivedSum::new(job.info().root));
    let mut reader = job.reader(epoch, rank, 0);
    for i in 1..=most {
        tokio::time::sleep(Duration::from_millis(u64::from(rank) * 5)).await;
        match reader.next(want).await.expect("a lease") {
            Next::Batch(b) if i < 10 && i % dies == 0 => job.held().release(epoch, rank, b.token.lease),
            Next::Batch(b) => {
                ack(job, &b).await;
                job.held().release(epoch, rank, b.token.lease);
                for s in &b.samples {
                    received.add(s);
                    said.push((s.entry, s.copy, Hash::of(&s.bytes)));
                }
            }
            Next::Done => break,
            Next::Full | Next::Last => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
    (said, received)
}

/// Reads the epochs of all ranks, at the same time.
async fn ranks(job: &JobHandle, epoch: u64, wants: [u32; 3], dies: u64) -> (Vec<Said>, ReceivedSum) {
    let all = (0..3).map(|r| rank(job, epoch, r, wants[r as usize], dies, u64::MAX));
    let got = futures::future::join_all(all).await;
    let mut sum = ReceivedSum::new(job.info().root);
    got.iter().for_each(|g| sum.merge(&g.1));
    (got.into_iter().map(|g| g.0).collect(), sum)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_substituted_epoch_is_replayed_exactly() {
    let tree = tree(88);
    tree.index();
    let node = Node::serving(&tree, &["--limits-lease-ttl=2s"]).await;
    let world = world(3, 12, Tail::Pad);
    let first = client(&node).declare(&ask("first", OrderKind::Substitute, world)).await.expect("declared");
    // Ranks of unequal speed, and workers that die with what they hold.
    let (order, sum) = ranks(&first, 4, [4, 4, 2], 7).await;
    assert!(sum.agrees(&first.receipt(4).await.expect("finished")));
    let ledger = first.ledger(4).await.expect("ledger");
    let redelivered = first.current().await.expect("job").epochs[0].redelivered;
    let tells = |bytes: &[u8]| Replay::new(&Ledger::read(bytes).expect("a ledger")).expect("tells").by_rank();
    // A lease that was granted twice is acknowledged later than its first grant, as the ranks recorded it.
    let entries: Vec<Vec<u32>> = order.iter().map(|o| o.iter().map(|s| s.0).collect()).collect();
    assert_eq!(tells(&ledger), Some(entries.clone()));
    node.running.shutdown().await;
    drop(node.state);
    // Elsewhere, where nobody ever heard of it.
    let node = Node::serving(&tree, &["--limits-lease-ttl=2s"]).await;
    let ask = replaying("again", &ledger, world);
    let again = client(&node).declare(&ask).await.expect("declared");
    assert_eq!((again.info().seed, again.info().plan), (first.info().seed, first.info().plan));
    assert_eq!(again.info().steps, 8);
    // Asked for otherwise, and over a restart in the middle.
    let some = (0..3).map(|r| rank(&again, 0, r, 3 + r, u64::MAX, 2));
    let mut told: Vec<Said> = futures::future::join_all(some).await.into_iter().map(|g| g.0).collect();
    let id = again.info().id.clone();
    node.running.shutdown().await;
    let node = Node::start_in(node.state, &["--limits-lease-ttl=2s"]).await;
    let again = client(&node).job(&id).await.expect("remembered");
    let state = again.state(0).await.expect("state");
    let some = ranks(&again, 0, [1, 9, 4], u64::MAX).await.0;
    told.iter_mut().zip(some).for_each(|(t, s)| t.extend(s));
    assert_eq!(told, order, "each rank's entries, copies and bytes, in order");
    let receipt = again.receipt(0).await.expect("finished");
    assert!(sum.agrees(&receipt), "the first run's sum is the second's proof");
    assert_eq!((receipt.receipt.padded, receipt.receipt.dropped.len()), (6, 0));
    let again_ledger = again.ledger(0).await.expect("ledger");
    assert_eq!(tells(&again_ledger), Some(entries));
    println!(
        "{} entries of 3 ranks replayed bit for bit; {redelivered} were redelivered the first time",
        order.iter().map(Vec::len).sum::<usize>()
    );
    // The next epoch replays it in other steps. Workers die, and their leases are granted again in their
    // place.
    again.set_world(crate::common::epochs::world(3, 24, Tail::Pad)).await.expect("another batch");
    assert_eq!(again.current().await.expect("job").steps, 4);
    let (mut next, _) = ranks(&again, 1, [8, 8, 8], 3).await;
    for (rank, told) in next.iter_mut().enumerate() {
        told.sort_unstable();
        let mut was = order[rank].clone();
        was.sort_unstable();
        assert_eq!(*told, was, "to the rank that had it");
    }
    assert!(sum.agrees(&again.receipt(1).await.expect("finished")));
    // A state goes on where it was.
    client(&node).delete_job(&id).await.expect("deleted");
    let anew = client(&node).declare(&ask).await.expect("declared anew");
    let acked = anew.put_state(0, state, false).await.expect("resumed").acked;
    let rest = ranks(&anew, 0, [4, 4, 4], u64::MAX).await.0;
    assert_eq!(acked as usize + rest.iter().map(Vec::len).sum::<usize>(), 96);
    rest.iter().zip(&order).for_each(|(r, o)| assert!(o.ends_with(r)));
    // As many ranks as told, no other order, and no replay of a replay.
    let refused = |e: Result<JobHandle, fletch_client::ClientError>| e.expect_err("refused").code();
    let client = client(&node);
    assert_eq!(
        anew.set_world(crate::common::epochs::world(2, 12, Tail::Pad)).await.expect_err("ranks").code(),
        Some(Code::BadPlan)
    );
    let two = replaying("two", &ledger, crate::common::epochs::world(2, 12, Tail::Pad));
    assert_eq!(refused(client.declare(&two).await), Some(Code::BadPlan));
    let other = StartJob { order: OrderKind::Strict, ..replaying("strict", &ledger, world) };
    assert_eq!(refused(client.declare(&other).await), Some(Code::BadPlan));
    let none = StartJob { replay: None, ..replaying("none", &ledger, world) };
    assert_eq!(refused(client.declare(&none).await), Some(Code::BadPlan));
    assert_eq!(
        refused(client.declare(&replaying("twice", &again_ledger, world)).await),
        Some(Code::BadLedger)
    );
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_or_foreign_ledger_is_refused() {
    let tree = tree(14);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let client = client(&node);
    let world = world(2, 4, Tail::Drop);
    let job = client.declare(&ask("first", OrderKind::Substitute, world)).await.expect("declared");
    let begun = job.state(1).await.err().map(|e| e.code());
    assert_eq!(begun, Some(Some(Code::NotFound)), "epoch 1 does not follow on any");
    let got = [rank(&job, 0, 0, 2, 99, 99).await.0, rank(&job, 0, 1, 2, 99, 2).await.0];
    let ledger = job.ledger(0).await.expect("ledger");
    let state = job.state(0).await.expect("state");
    let read = Ledger::read(&ledger).expect("a ledger");
    let refuse = async |name: &str, bytes: &[u8], says: &str| {
        let e = client.declare(&replaying(name, bytes, world)).await.expect_err(says);
        assert_eq!(e.code(), Some(Code::BadLedger), "{e}");
        assert!(e.to_string().contains(says), "{says}: {e}");
    };
    // Any byte but those of the minor version.
    for at in (0..ledger.len()).step_by(7).filter(|at| !(12..16).contains(at)) {
        let mut bytes = ledger.to_vec();
        bytes[at] ^= 0x20;
        let e = client.declare(&replaying("flipped", &bytes, world)).await.expect_err("damaged");
        assert_eq!(e.code(), Some(Code::BadLedger), "byte {at}: {e}");
    }
    refuse("cut", &ledger[..ledger.len() - 1], "in the middle of a record").await;
    refuse("nothing", b"", "").await;
    refuse("state", &state, "no acknowledged entry").await;
    // Another version, plan, seed; entries that are not there; acknowledged twice.
    let with = |change: &dyn Fn(&mut Header)| {
        let mut header = read.header.clone();
        change(&mut header);
        let mut bytes = ledger::begin(&header);
        read.events.iter().for_each(|e| e.append(&mut bytes));
        bytes
    };
    refuse("root", &with(&|h| h.root = fletch_core::Root(Hash::of(b"another"))), "root").await;
    refuse("plan", &with(&|h| h.plan = Hash::of(b"another")), "plan").await;
    refuse("order", &with(&|h| h.order = "replay".into()), "the order replay").await;
    let seeded = StartJob { seed: Some(6), ..replaying("seed", &ledger, world) };
    assert_eq!(client.declare(&seeded).await.expect_err("seed").code(), Some(Code::BadLedger));
    let mut twice = ledger.to_vec();
    read.events.iter().for_each(|e| e.append(&mut twice));
    refuse("twice", &twice, "record").await;
    assert_eq!(client.jobs().await.expect("jobs").len(), 1, "nothing was declared");
    // One that ended early tells what it can, and the receipt lists the rest.
    let early = client.declare(&replaying("early", &ledger, world)).await.expect("declared");
    let again = [rank(&early, 0, 0, 3, 99, 99).await, rank(&early, 0, 1, 3, 99, 99).await];
    assert_eq!([&again[0].0, &again[1].0], [&got[0], &got[1]]);
    let receipt = early.receipt(0).await.expect("finished").receipt;
    assert_eq!((receipt.delivered, receipt.dropped.len()), (12, 4));
    // Other epochs than substituted ones.
    for (name, order) in [("strict", OrderKind::Strict), ("bucketed", OrderKind::Bucketed)] {
        let buckets = (order == OrderKind::Bucketed).then(|| BucketSpec::Lengths(vec![3_006]));
        let ask = StartJob {
            buckets: buckets.clone(),
            ..ask(name, order, crate::common::epochs::world(2, 4, Tail::Pad))
        };
        let job = client.declare(&ask).await.expect("declared");
        let got = [rank(&job, 0, 0, 2, 99, 99).await.0, rank(&job, 0, 1, 2, 99, 99).await.0];
        let ledger = job.ledger(0).await.expect("ledger");
        let again = StartJob { buckets, ..replaying(&format!("{name}-again"), &ledger, ask.world) };
        let again = client.declare(&again).await.expect("declared");
        assert_eq!([rank(&again, 0, 0, 2, 99, 99).await.0, rank(&again, 0, 1, 2, 99, 99).await.0], got);
        // In a world of that batch, leases lack two entries and would need pads. Buckets have their pads from
        // the start.
        let all = u32::try_from(got[0].len() + got[1].len()).expect("a number");
        let mut bytes = ledger::begin(&Ledger::read(&ledger).expect("a ledger").header);
        let request = Request { rank: 0, worker: 0, sequence: 1 };
        let events = [
            Event::World { world: World { batch: all + 2, ranks: 2, tail: Tail::Pad } },
            Event::Grant { lease: 1, request, entries: vec![all] },
            Event::Ack { lease: 1, upto: 1 },
        ];
        events.iter().for_each(|e| e.append(&mut bytes));
        let buckets = (order == OrderKind::Bucketed).then(|| BucketSpec::Lengths(vec![3_006]));
        let padded = StartJob { buckets, ..replaying(&format!("{name}-padded"), &bytes, ask.world) };
        match (order, client.declare(&padded).await) {
            (OrderKind::Bucketed, refused) => {
                let refused = refused.expect_err("no such pad");
                assert_eq!(refused.code(), Some(Code::BadLedger), "{refused}");
                assert!(refused.to_string().contains("its buckets have"), "{refused}");
            }
            (_, declared) => assert_eq!(rank(&declared.expect("a pad"), 0, 0, 2, 99, 99).await.0.len(), 1),
        }
    }
    node.running.shutdown().await;
}
