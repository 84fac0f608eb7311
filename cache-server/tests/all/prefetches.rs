//! Tests prefetch of strict epochs: each byte is fetched once and used, within the budget, and nothing stays
//! behind.

use crate::common::{Node, Tree, content, epochs::*};
use fletch_api::{OrderKind, StartJob};
use fletch_client::epochs::JobHandle;
use fletch_core::plan::Tail;
use fletch_testkit::{Backing, EmulatorConfig, Latency, OriginEmulator};
use std::{path::Path, time::Duration};

/// A tree in a bucket of the emulated origin, indexed or packed.
struct Bucket {
    tree: Tree,
    origin: OriginEmulator,
    settings: tempfile::TempDir,
    packed: bool,
}

/// Creates `files` files of `len` bytes. `mixed` adds a file of several chunks and an empty one.
fn bucket(files: u64, len: usize, mixed: bool, packed: bool, delay_ms: u64) -> Bucket {
    let mut tree = Tree::new([]);
    let mut add = |name: String, bytes: Vec<u8>| {
        std::fs::write(tree.path(&name), &bytes).expect("write");
        tree.files.insert(name, bytes);
    };
    (0..files).for_each(|i| add(format!("f{i:04}"), content(100 + i, len + (i % 50) as usize)));
    if mixed {
        add("empty".into(), Vec::new());
        add("long".into(), content(9, 5_000_000));
    }
    let delay = Duration::from_millis(delay_ms);
    let first_byte = (delay_ms > 0).then_some(Latency { median: delay, p99: delay * 2 });
    let config = EmulatorConfig { first_byte, ..EmulatorConfig::default() };
    let origin = OriginEmulator::start(config, Backing::Directory(tree.dir.path().to_owned()));
    Bucket { tree, origin, settings: tempfile::tempdir().expect("tempdir"), packed }
}

impl Bucket {
    /// Starts a server that has the bucket as dataset `d`.
    async fn serve(&self, more: &[&str]) -> Node {
        let to = self.settings.path().join("tables");
        let tables: &Path = if self.packed { self.tree.dir.path() } else { &to };
        if self.packed {
            self.tree.pack_to(tables, false);
        } else {
            self.index(tables).await;
        }
        let file = self.settings.path().join("f.toml");
        let text = format!(
            "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\nregion = \
                \"us-east-1\"\ncredentials = \"anonymous\"\n",
            self.origin.uri(),
            self.origin.endpoint()
        );
        std::fs::write(&file, text).expect("write");
        let config = format!("--config={}", file.display());
        let more: Vec<&str> = std::iter::once(config.as_str()).chain(more.iter().copied()).collect();
        let node = Node::start(&more).await;
        let tables = if self.packed { self.origin.uri() } else { tables.display().to_string() };
        node.register("d", &self.origin.uri(), Some(&tables)).await;
        node
    }

    async fn index(&self, to: &Path) {
        // The tables are written beside the files, and belong elsewhere.
        crate::common::index_bucket(&self.tree, &self.origin).await;
        std::fs::create_dir_all(to).expect("mkdir");
        std::fs::rename(self.tree.path("fletch"), to.join("fletch")).expect("moved");
    }

    /// Returns the number of requests for each object that is not a table.
    fn gets(&self) -> Vec<(String, u64)> {
        let data = |key: &str| !key.starts_with("fletch/") || key.starts_with("fletch/chunks/");
        self.origin.counts().gets.into_iter().filter(|(key, _)| data(key)).collect()
    }

    fn total(&self) -> u64 {
        self.gets().iter().map(|(_, n)| n).sum()
    }

    /// Returns the bytes of all chunks. Chunks of packs have gaps between files.
    fn chunk_bytes(&self) -> u64 {
        let len = |key: &str| std::fs::metadata(self.tree.path(key)).expect("an object").len();
        if self.packed { self.gets().iter().map(|(key, _)| len(key)).sum() } else { self.bytes() }
    }

    fn bytes(&self) -> u64 {
        self.tree.files.values().map(|b| b.len() as u64).sum()
    }
}

async fn strict(node: &Node, name: &str, ranks: u32) -> JobHandle {
    let ask = ask(name, OrderKind::Strict, world(ranks, 8, if ranks == 1 { Tail::Keep } else { Tail::Drop }));
    client(node).declare(&ask).await.expect("declared")
}

/// Waits until a condition holds.
async fn until<F: Future<Output = bool>>(what: &str, is: impl Fn() -> F) {
    let wait = async {
        while !is().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap_or_else(|_| panic!("never: {what}"));
}

const FETCHED: &str = "fletch_prefetch_fetched_bytes_total";
const VAIN: &str = "fletch_prefetch_unused_bytes_total";
const HELD: &str = "fletch_prefetch_bytes{of=\"held\"}";
const EPOCHS: &str = "fletch_prefetch_epochs";

async fn nothing_is_left(node: &Node) {
    until("all of it is let go", || async { node.metric(EPOCHS).await == 0 && node.metric(HELD).await == 0 })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cold_epoch_is_fetched_ahead_once_and_none_of_it_in_vain() {
    for (packed, disk) in
        [(false, "--cache-size=0"), (false, "--cache-size=100MiB"), (true, "--cache-size=0")]
    {
        let bucket = bucket(150, 40_000, !packed, packed, 0);
        let samples = bucket.tree.files.len() as u64;
        let node = bucket.serve(&[disk, "--cache-free-floor=0"]).await;
        let job = strict(&node, "j", 1).await;
        let (before, sent) = (bucket.total(), bucket.origin.counts().bytes_sent);
        let first = batch(&job, 0, 0, 8).await.expect("a batch");
        // Nobody asks for the second lease: its bytes, and all that come after, are here.
        let whole = bucket.chunk_bytes();
        until("all of it is here", || async { node.metric(FETCHED).await == whole }).await;
        let gets = bucket.gets();
        let chunks = if packed {
            gets.len() as u64
        } else {
            /* two of the long one, none of the empty one */
            samples
        };
        assert_eq!(bucket.total() - before, chunks, "{gets:?}");
        assert!(node.metric(HELD).await > whole / 2);
        ack(&job, &first).await;
        let (entries, _, bytes) = consumed(&job, &bucket.tree, 0, 0, 8).await;
        let of_first: u64 = first.samples.iter().map(|s| s.bytes.len() as u64).sum();
        assert_eq!((entries.len() as u64, bytes + of_first), (samples - 8, bucket.bytes()));
        assert_eq!(bucket.total() - before, chunks, "nothing twice");
        assert_eq!(bucket.origin.counts().bytes_sent - sent, whole, "1.00 x D");
        assert_eq!((node.metric(FETCHED).await, node.metric(VAIN).await), (whole, 0));
        nothing_is_left(&node).await;
        let accounts = node.accounts().await.accounts;
        let missed: u64 =
            accounts.iter().filter(|a| a.key.result == fletch_api::ByteResult::Miss).map(|a| a.bytes).sum();
        assert_eq!(missed, bucket.bytes(), "I8: it was fetched for this job, ahead of need or not");
        if disk != "--cache-size=0" {
            // What the disk kept is left there.
            consume(&job, &bucket.tree, 1, 0, 8).await;
            assert_eq!((bucket.total() - before, node.metric(FETCHED).await), (chunks, whole));
        }
        node.running.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_budget_bounds_it_and_samples_of_packs_come_by_range() {
    for (packed, disk) in [(false, "--cache-size=0"), (true, "--cache-size=0"), (true, "--cache-size=80MiB")]
    {
        let bucket = bucket(600, 60_000, false, packed, 0);
        let more = [disk, "--cache-free-floor=0", "--memory=64MiB", "--memory-prefetch=4MiB"];
        let node = bucket.serve(&more).await;
        let job = strict(&node, "j", 4).await;
        let (before, sent) = (bucket.total(), bucket.origin.counts().bytes_sent);
        // One rank is ahead of the others by many steps.
        let mut got = 0;
        for _ in 0..12 {
            let b = batch(&job, 0, 3, 4).await.expect("a batch");
            b.samples.iter().for_each(|s| right(&bucket.tree, s));
            ack(&job, &b).await;
            got += b.samples.len();
            assert!(node.metric(HELD).await <= 4 << 20, "I6");
        }
        let ranks = (0..4).map(|r| consume(&job, &bucket.tree, 0, r, 2));
        let watched = async {
            for _ in 0..40 {
                assert!(node.metric(HELD).await <= 4 << 20, "I6");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let (all, ()) = tokio::join!(futures::future::join_all(ranks), watched);
        got += all.iter().map(|(entries, _)| entries.len()).sum::<usize>();
        assert_eq!(got, 600);
        let sent = bucket.origin.counts().bytes_sent - sent;
        if disk == "--cache-size=0" {
            assert_eq!((sent, bucket.total() - before), (bucket.bytes(), 600), "1.00 x D");
        } else {
            // Whole chunks for the disk; until that has a share for the dataset, some samples by themselves.
            assert!(
                (bucket.bytes()..=bucket.bytes() / 50 * 51).contains(&sent),
                "{sent} of {}",
                bucket.bytes()
            );
            assert!(bucket.total() - before < 100, "{}", bucket.total() - before);
        }
        assert_eq!(node.metric(VAIN).await, 0);
        let ahead = node.metric(FETCHED).await;
        println!("packed {packed}, {disk}: {ahead} of {} bytes were fetched ahead", bucket.bytes());
        assert!(ahead > bucket.bytes() / 2, "most of it: {ahead}");
        nothing_is_left(&node).await;
        node.running.shutdown().await;
    }
}

/// Epochs that end early release their prefetched data: deleted, abandoned, in a new world, or unregistered.
#[tokio::test(flavor = "multi_thread")]
async fn what_ends_in_the_middle_leaves_nothing_behind() {
    let bucket = bucket(400, 100_000, false, false, 20);
    let more = ["--cache-size=0", "--memory=64MiB", "--memory-prefetch=16MiB", "--limits-lease-ttl=2s"];
    let node = bucket.serve(&more).await;
    let under_way = || async { node.metric(HELD).await > 2 << 20 };
    // Deleted.
    let job = strict(&node, "deleted", 1).await;
    batch(&job, 0, 0, 8).await.expect("a batch");
    until("it is fetched ahead", under_way).await;
    assert_eq!(node.metric(EPOCHS).await, 1);
    client(&node).delete_job(&job.info().id).await.expect("deleted");
    nothing_is_left(&node).await;
    let vain = node.metric(VAIN).await;
    assert!(vain > 1 << 20, "{vain}: that was in vain, and is counted");
    // Left behind by its job: epoch 2 begins, and only that is fetched for.
    let job = strict(&node, "abandoned", 1).await;
    batch(&job, 0, 0, 8).await.expect("a batch");
    until("it is fetched ahead", under_way).await;
    batch(&job, 2, 0, 8).await.expect("a batch");
    until("one of them", || async { node.metric(EPOCHS).await == 1 }).await;
    // Without requests for ten lease times, the prefetched data is released. The next request starts anew.
    nothing_is_left(&node).await;
    let (rest, _) = consume(&job, &bucket.tree, 2, 0, 64).await;
    assert_eq!(rest.len(), 400, "the lease had expired");
    // Another world in the middle of the epoch: what is held stays.
    let job = strict(&node, "world", 1).await;
    let b = batch(&job, 0, 0, 8).await.expect("a batch");
    ack(&job, &b).await;
    until("it is fetched ahead", under_way).await;
    let before = node.metric(VAIN).await;
    job.set_world(world(2, 8, Tail::Drop)).await.expect("two ranks");
    let (a, b) = tokio::join!(consume(&job, &bucket.tree, 0, 0, 4), consume(&job, &bucket.tree, 0, 1, 4));
    assert_eq!((a.0.len(), b.0.len()), (196, 196));
    assert_eq!(node.metric(VAIN).await, before);
    nothing_is_left(&node).await;
    // Unregistered.
    let job = strict(&node, "unregistered", 1).await;
    batch(&job, 0, 0, 8).await.expect("a batch");
    until("it is fetched ahead", under_way).await;
    let gone = node.ask(reqwest::Method::DELETE, "/v1/datasets/d").send().await.expect("answer");
    assert!(gone.status().is_success());
    nothing_is_left(&node).await;
    node.running.shutdown().await;
}

/// Two jobs share the budget, and a failed prefetch fails only the sample that it was for.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_share_the_budget_and_failures_are_their_readers_own() {
    let bucket = bucket(300, 50_000, false, false, 0);
    let node = bucket
        .serve(&["--cache-size=0", "--memory=64MiB", "--memory-prefetch=6MiB", "--limits-lease-ttl=3s"])
        .await;
    bucket.origin.set_fault("f00", fletch_testkit::Fault::Error { rate: 1.0, status: 404 }, None);
    let ask = |name: &str, seed| StartJob {
        seed: Some(seed),
        ..ask(name, OrderKind::Strict, world(1, 8, Tail::Keep))
    };
    let a = client(&node).declare(&ask("a", 5)).await.expect("declared");
    let b = client(&node).declare(&ask("b", 6)).await.expect("declared");
    let first = batch_of(&node, &a).await;
    let second = batch_of(&node, &b).await;
    until("both", || async { node.metric(EPOCHS).await == 2 }).await;
    assert!(node.metric(HELD).await <= 6 << 20);
    assert!(first + second > 0, "what the origin lacks is said, the rest is delivered");
    bucket.origin.clear_faults();
    let leases = |job: JobHandle| async move { job.current().await.expect("job").epochs[0].leases };
    until("the leases expire", || async { leases(a.clone()).await + leases(b.clone()).await == 0 }).await;
    let (a, b) = tokio::join!(consume(&a, &bucket.tree, 0, 0, 16), consume(&b, &bucket.tree, 0, 0, 16));
    assert_eq!((a.0.len(), b.0.len()), (300, 300));
    assert_eq!(node.metric(VAIN).await, 0);
    nothing_is_left(&node).await;
    node.running.shutdown().await;
}

/// Returns how many frames of a lease were errors. The lease is not acknowledged, so that it can be requested
/// again.
async fn batch_of(node: &Node, job: &JobHandle) -> usize {
    let path = fletch_api::routes::epoch(&job.info().id, 0, "leases");
    let body = serde_json::json!({"rank": 0, "worker": 9, "sequence": 1, "want": 64});
    let answer = node.post(&path, body.to_string()).send().await.expect("answer");
    assert_eq!(answer.status(), 200);
    let text = answer.bytes().await.expect("frames");
    let needle = b"origin_missing";
    text.windows(needle.len()).filter(|w| w == needle).count()
}
