//! Tests small ranges of long files: what they cost at the origin, and that no wrong byte is sent.

use crate::common::{Node, Tree, body, content, problem};
use fletch_api::{Code, routes};
use fletch_core::{Hash, Root, groups::GroupHashes};
use reqwest::StatusCode;
use std::os::unix::fs::FileExt as _;

const MIB: usize = 1 << 20;
const WINDOW: usize = 2 << 10;
/// Less than half of this holds the file, so a server without a disk does not keep it.
const SMALL: [&str; 2] = ["--memory=64MiB", "--cache-size=0"];

/// A file of 12 chunks.
fn tree() -> Tree {
    Tree::new([("long", content(1, 48 * MIB)), ("short", content(2, 100_000))])
}

/// The beginnings of windows that share no group, three in each chunk.
fn windows() -> Vec<usize> {
    (0..36).map(|n| (n % 12) * 4 * MIB + (n / 12) * 1_300_000 + 5_000).collect()
}

async fn window(node: &Node, root: Root, at: usize) -> Vec<u8> {
    let range = format!("bytes={at}-{}", at + WINDOW - 1);
    let asked = node.get(&routes::file(root, "long")).header("range", range);
    body(asked.send().await.expect("answer"), StatusCode::PARTIAL_CONTENT).await
}

async fn origin_bytes(node: &Node) -> u64 {
    let text = node.get("/metrics").send().await.expect("answer").text().await.expect("text");
    let of_content =
        |line: &&str| line.starts_with("fletch_origin_read_bytes_total{") && line.contains("of=\"content\"");
    let value = |line: &str| line.rsplit(' ').next().and_then(|n| n.parse::<f64>().ok());
    text.lines().filter(of_content).filter_map(value).sum::<f64>() as u64
}

#[tokio::test]
async fn a_window_costs_its_groups_if_the_tables_have_their_hashes() {
    let tree = tree();
    let root = tree.index_grouped().root();
    let node = Node::serving(&tree, &SMALL).await;
    let windows = windows();
    for &at in &windows {
        assert!(window(&node, root, at).await == tree.files["long"][at..at + WINDOW], "{at}");
    }
    let cost = origin_bytes(&node).await;
    let most = windows.len() as u64 * (32 << 10);
    assert!(cost >= 36 * (16 << 10) && cost <= most, "{cost} bytes");
    for &at in &windows {
        window(&node, root, at + 100).await;
    }
    assert_eq!(origin_bytes(&node).await, cost, "the groups are in memory");
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_window_of_a_quarter_of_a_chunk_costs_little_more_than_itself() {
    let tree = tree();
    let root = tree.index_grouped().root();
    let node = Node::serving(&tree, &SMALL).await;
    for n in 0..10 {
        let at = n * 4 * MIB + 300_001;
        let range = format!("bytes={at}-{}", at + MIB - 1);
        let asked = node.get(&routes::file(root, "long")).header("range", range);
        let got = body(asked.send().await.expect("answer"), StatusCode::PARTIAL_CONTENT).await;
        assert!(got == tree.files["long"][at..at + MIB], "{at}");
    }
    let cost = origin_bytes(&node).await;
    assert!(cost <= 11 * MIB as u64, "{cost} bytes");
    node.running.shutdown().await;
}

#[tokio::test]
async fn without_hashes_at_rest_a_chunk_is_read_once() {
    let tree = tree();
    let root = tree.index().root();
    let node = Node::serving(&tree, &SMALL).await;
    let first: Vec<usize> = windows().into_iter().take(12).collect();
    for &at in &first {
        assert!(window(&node, root, at).await == tree.files["long"][at..at + WINDOW], "{at}");
    }
    let cost = origin_bytes(&node).await;
    assert_eq!(cost, 48 << 20, "each chunk");
    for &at in windows().iter().skip(12) {
        assert!(window(&node, root, at).await == tree.files["long"][at..at + WINDOW], "{at}");
    }
    let later = origin_bytes(&node).await - cost;
    assert!(later <= 24 * (32 << 10), "{later} bytes: the hashes of the groups were learned");
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_file_that_the_cache_keeps_is_read_once() {
    let tree = tree();
    let root = tree.index_grouped().root();
    let node = Node::serving(&tree, &["--memory=64MiB", "--cache-size=256MiB"]).await;
    for round in 0..3 {
        for at in windows() {
            let at = at + round * 40_000;
            assert!(window(&node, root, at).await == tree.files["long"][at..at + WINDOW], "{at}");
        }
    }
    assert_eq!(origin_bytes(&node).await, 48 << 20);
    node.running.shutdown().await;
}

/// The lists of hashes are at the origin. A chunk that is on disk must not wait for them.
#[tokio::test]
async fn i4_a_chunk_on_disk_needs_no_origin_for_a_range() {
    let tree = tree();
    let root = tree.index_grouped().root();
    let state = tempfile::tempdir().expect("a directory");
    let of = |name: &str| format!("--{name}-dir={}/{name}", state.path().display());
    let (own, cache) = (of("state"), of("cache"));
    let args = ["--memory=64MiB", "--cache-size=256MiB", own.as_str(), cache.as_str()];
    let node = Node::serving(&tree, &args).await;
    for at in windows() {
        window(&node, root, at).await;
        // Of a disk that is busy, the queue would not take all chunks.
        while node.metric("fletch_disk_append_queue_bytes").await > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }
    node.running.shutdown().await;
    let node = Node::start(&args).await;
    node.disk_is("on").await;
    window(&node, root, 5_000).await;
    let lists = tree.path("fletch/versions").join(root.to_string()).join("layouts");
    std::fs::rename(&lists, tree.path("away")).expect("moved");
    std::fs::remove_file(tree.path("long")).expect("removed");
    for at in windows() {
        assert!(window(&node, root, at).await == tree.files["long"][at..at + WINDOW], "{at}");
    }
    assert_eq!(origin_bytes(&node).await, 0);
    node.running.shutdown().await;
}

#[tokio::test]
async fn i1_wrong_groups_and_wrong_hashes_send_no_wrong_byte() {
    let tree = tree();
    let indexed = tree.index_grouped();
    let root = indexed.root();
    // The lists of some chunks are damaged, and so are some of the file's bytes.
    let lists = fletch_tables::paths::groups(root, indexed.written.layout);
    let file = std::fs::OpenOptions::new().read(true).write(true).open(tree.path(&lists)).expect("open");
    for byte in (2_000..90_000).step_by(20_000) {
        let mut one = [0];
        file.read_exact_at(&mut one, byte).expect("read");
        file.write_all_at(&[one[0] ^ 1], byte).expect("written");
    }
    let object = std::fs::OpenOptions::new().write(true).open(tree.path("long")).expect("open");
    let at = windows()[3];
    object.write_all_at(&[!tree.files["long"][at + 7]], at as u64 + 7).expect("written");
    let node = Node::serving(&tree, &SMALL).await;
    for from in windows() {
        let range = format!("bytes={from}-{}", from + WINDOW - 1);
        let asked = node.get(&routes::file(root, "long")).header("range", range);
        let answer = asked.send().await.expect("answer");
        if from == at {
            problem(answer, Code::OriginChanged).await;
        } else if answer.status() == StatusCode::PARTIAL_CONTENT {
            let got = answer.bytes().await.expect("body");
            assert!(got == tree.files["long"][from..from + WINDOW], "{from}");
        } else {
            assert_eq!(from / (4 * MIB), at / (4 * MIB), "only the damaged chunk can fail as a whole");
        }
    }
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_client_checks_a_range_by_the_hashes_that_it_asks_for() {
    let tree = tree();
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let chunk = &tree.files["long"][4 * MIB..8 * MIB];
    let (hash, len) = (Hash::of(chunk), 4 << 20);
    let hashes = node.get(&routes::chunk_groups(root, hash)).send().await.expect("answer");
    let hashes = body(hashes, StatusCode::OK).await;
    let groups = std::sync::Arc::new(GroupHashes::check(hash, len, &hashes).expect("they make the name"));
    let run = groups.run(&(100_000..140_000)).expect("inside");
    let range = format!("bytes={}-{}", run.range().start, run.range().end - 1);
    let part = node.get(&routes::chunk(root, hash)).header("range", range).send().await.expect("answer");
    let part = body(part, StatusCode::PARTIAL_CONTENT).await;
    assert_eq!(part, chunk[run.range()]);
    fletch_core::Verified::check(run, part.into()).expect("the groups");
    let short = Hash::of(&tree.files["short"]);
    let answer = node.get(&routes::chunk_groups(root, short)).send().await.expect("answer");
    problem(answer, Code::BadRequest).await;
    let absent = node.get(&routes::chunk_groups(root, Hash::of(b"none"))).send().await.expect("answer");
    problem(absent, Code::NotFound).await;
    node.running.shutdown().await;
}
