//! Tests data echoing: the distance between the copies of a sample.

use crate::common::{Node, epochs::*};
use fletch_api::{EchoSpec, OrderKind};
use fletch_core::plan::Tail;

/// Copies keep their distance when the server restarts in the middle of a block.
#[tokio::test(flavor = "multi_thread")]
async fn copies_keep_their_distance_over_restarts() {
    const APART: u32 = 11;
    let tree = tree(62);
    tree.index();
    let mut node = Node::serving(&tree, &[]).await;
    let mut ask = ask("echo", OrderKind::Substitute, world(1, 4, Tail::Keep));
    ask.plan.echo = Some(EchoSpec { copies: 3, apart: APART });
    let mut job = client(&node).declare(&ask).await.expect("declared");
    let (id, mut order) = (job.info().id.clone(), Vec::new());
    // Three in a lease: restarts fall on 27, 54, 81, ... of 192 entries.
    while let Some(b) = batch(&job, 0, 0, 3).await {
        ack(&job, &b).await;
        order.extend(b.samples.iter().map(|s| s.sample));
        if order.len() % 27 == 0 {
            node.running.shutdown().await;
            node = Node::start_in(node.state, &[]).await;
            job = client(&node).job(&id).await.expect("remembered");
        }
    }
    assert_eq!(order.len(), 64 * 3);
    for (i, sample) in order.iter().enumerate() {
        if let Some(last) = order[..i].iter().rposition(|s| s == sample) {
            assert!(i - last >= APART as usize, "sample {sample} at {last} and at {i}");
        }
    }
    node.running.shutdown().await;
}
