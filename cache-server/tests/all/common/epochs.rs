//! Consumes epochs, for tests.

use super::{Node, Tree, content};
use fletch_api::{BatchTimes, OrderKind, PlanSpec, StartJob, Visitation, WorldSpec};
use fletch_client::{
    Client, ClientConfig, Endpoint,
    epochs::{AckToken, JobHandle, LeaseBatch, LeasedSample, Next, ReceivedSum},
};
use fletch_core::{JobName, plan::Tail};

pub fn client(node: &Node) -> Client {
    let endpoint: Endpoint = node.running.url().parse().expect("url");
    Client::new(ClientConfig::new(endpoint, "loader")).expect("client")
}

/// Returns the token and the samples of a lease, without what came from sharing: when a lease is sent again,
/// its bytes are cached.
pub fn alike(b: &LeaseBatch) -> (AckToken, Vec<LeasedSample>) {
    (b.token, b.samples.iter().map(|s| LeasedSample { shared: 0, ..s.clone() }).collect())
}

pub fn world(ranks: u32, batch: u32, tail: Tail) -> WorldSpec {
    WorldSpec { ranks, batch, tail }
}

pub fn ask(name: &str, order: OrderKind, world: WorldSpec) -> StartJob {
    StartJob {
        name: JobName::new(name).expect("name"),
        dataset: Some("d".parse().expect("name")),
        version: None,
        root: None,
        layout: None,
        seed: Some(5),
        order,
        buckets: None,
        replay: None,
        plan: PlanSpec::default(),
        world,
        visitation: Visitation::ExactlyOnce,
    }
}

/// Creates `n` files of a few KB, an empty file, and a file of several slices.
pub fn tree(n: u64) -> Tree {
    let mut tree = Tree::new([("empty", Vec::new()), ("long", content(9, 9_000_000))]);
    for i in 0..n {
        let name = format!("f{i:04}");
        let bytes = content(100 + i, 3_000 + (i % 50) as usize);
        std::fs::write(tree.path(&name), &bytes).expect("write");
        tree.files.insert(name, bytes);
    }
    tree
}

pub fn right(tree: &Tree, sample: &LeasedSample) {
    for (file, bytes) in sample.files() {
        assert!(tree.files[&file.path] == bytes[..], "{}", file.path);
    }
}

pub async fn batch(job: &JobHandle, epoch: u64, rank: u32, want: u32) -> Option<LeaseBatch> {
    match job.reader(epoch, rank, 0).next(want).await.expect("a lease") {
        Next::Batch(b) => Some(b),
        Next::Done => None,
        other => panic!("{other:?}"),
    }
}

pub async fn ack(job: &JobHandle, b: &LeaseBatch) -> bool {
    let t = b.token;
    let times = BatchTimes { stepped_ns: 7, ..BatchTimes::default() };
    job.ack(t.epoch, t.rank, &[t.ack(times)]).await.expect("acknowledged").finished
}

/// Reads a rank's whole epoch. Returns its entries in order, and their sum.
pub async fn consume(
    job: &JobHandle,
    tree: &Tree,
    epoch: u64,
    rank: u32,
    want: u32,
) -> (Vec<u32>, ReceivedSum) {
    let (order, received, _) = consumed(job, tree, epoch, rank, want).await;
    (order, received)
}

pub async fn consumed(
    job: &JobHandle,
    tree: &Tree,
    epoch: u64,
    rank: u32,
    want: u32,
) -> (Vec<u32>, ReceivedSum, u64) {
    let mut bytes = 0;
    let mut received = ReceivedSum::new(job.info().root);
    let mut order = Vec::new();
    let mut reader = job.reader(epoch, rank, 0);
    loop {
        match reader.next(want).await.expect("a lease") {
            Next::Batch(b) => {
                ack(job, &b).await;
                for s in &b.samples {
                    right(tree, s);
                    received.add(s);
                    order.push(s.entry);
                    bytes += s.bytes.len() as u64;
                }
            }
            Next::Done => return (order, received, bytes),
            other => panic!("{other:?}"),
        }
    }
}
