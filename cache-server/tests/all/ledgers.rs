//! Tests the limit of a ledger's length.

use crate::common::{Node, epochs::*};
use fletch_api::{Code, LedgerBytes, OrderKind, ReplaySpec, StartJob};
use fletch_client::epochs::{Next, ReceivedSum};
use fletch_core::{
    delivery::ledger::{self, Ledger},
    plan::Tail,
};

/// A full ledger grants no more samples, but takes acks of those it granted. Putting the epoch's own state
/// starts a short ledger, with room for the rest.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_ledger_says_so_and_its_state_begins_a_short_one() {
    const BYTES: u64 = 4 << 10;
    let tree = tree(300);
    tree.index();
    let node = Node::serving(&tree, &["--limits-ledger-bytes=4KiB"]).await;
    let client = client(&node);
    let one_by_one = ask("one-by-one", OrderKind::Strict, world(1, 1, Tail::Keep));
    let refused = client.declare(&one_by_one).await.expect_err("no ledger has room for so many leases");
    assert_eq!(refused.code(), Some(Code::BadPlan), "{refused}");
    // In batches of 64 it would have room, and somebody asks for samples one by one.
    let wide = ask("wide", OrderKind::Strict, world(1, 64, Tail::Keep));
    let job = client.declare(&wide).await.expect("declared");
    let (mut received, mut order, mut full) = (ReceivedSum::new(job.info().root), Vec::new(), 0);
    loop {
        match job.reader(0, 0, 0).next(1).await {
            Ok(Next::Batch(b)) => {
                ack(&job, &b).await;
                job.held().release(0, 0, b.token.lease);
                b.samples.iter().for_each(|s| {
                    right(&tree, s);
                    received.add(s);
                    order.push(s.entry);
                });
            }
            Ok(Next::Done) => break,
            Ok(other) => panic!("{other:?}"),
            Err(e) => {
                assert_eq!(e.code(), Some(Code::LedgerFull), "{e}");
                full += 1;
                let long = job.current().await.expect("job").epochs[0].ledger_bytes;
                assert!((BYTES..BYTES + 200).contains(&long), "{long} bytes");
                let state = job.state(0).await.expect("state");
                // Without `replace` the state changes nothing. With it, the ledger starts anew, although no
                // lease is held.
                job.put_state(0, state.clone(), false).await.expect("it is there");
                assert_eq!(job.current().await.expect("job").epochs[0].ledger_bytes, long);
                let there = job.put_state(0, state, true).await.expect("anew");
                assert!(there.ledger_bytes < BYTES / 2, "{} bytes", there.ledger_bytes);
                assert_eq!(there.acked, order.len() as u64);
            }
        }
    }
    assert!(full >= 2, "it was full {full} times");
    order.sort_unstable();
    assert_eq!(order, (0..302).collect::<Vec<u32>>());
    assert!(received.agrees(&job.receipt(0).await.expect("finished")));
    // A ledger to replay whose own world has no room.
    let told = Ledger::read(&job.ledger(0).await.expect("ledger")).expect("a ledger");
    let mut header = told.header.clone();
    header.world.batch = 1;
    let mut bytes = ledger::begin(&header);
    told.events.iter().for_each(|e| e.append(&mut bytes));
    let replay = Some(ReplaySpec { ledger: LedgerBytes(bytes.into()) });
    let again = StartJob { replay, seed: None, ..ask("again", OrderKind::Replay, world(1, 64, Tail::Keep)) };
    let refused = client.declare(&again).await.expect_err("it could not be kept");
    assert_eq!(refused.code(), Some(Code::BadLedger), "{refused}");
    node.running.shutdown().await;
}
