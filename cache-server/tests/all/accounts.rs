//! Tests I3 and I8: many readers of a chunk cost one fetch, and accounts equal what the readers received.

use crate::common::{Node, Tree, body, content, index_bucket, problem};
use fletch_api::{AccountKey, ByteResult, ByteTier, Code, routes};
use fletch_core::Hash;
use fletch_testkit::{Backing, EmulatorConfig, Latency, OriginEmulator};
use reqwest::{Method, StatusCode};
use std::{collections::BTreeMap, time::Duration};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

type Sums = BTreeMap<(String, ByteResult, ByteTier), u64>;

async fn sums(node: &Node) -> Sums {
    let accounts = node.accounts().await.accounts;
    let of = |k: &AccountKey| (k.job.to_string(), k.result, k.tier);
    accounts.iter().map(|a| (of(&a.key), a.bytes)).collect()
}

async fn eventually(what: &str, mut is: impl AsyncFnMut() -> bool) {
    for _ in 0..500 {
        if is().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("never: {what}");
}

#[tokio::test]
async fn i8_whole_ranges_heads_batches_and_errors_agree_with_the_readers_sums() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let big = &tree.files["big.bin"];
    let chunk = routes::chunk(root, Hash::of(&big[..4 << 20]));
    let read = async |job: &str, range: &str, url: &str| {
        let mut ask = node.get(url).header("fletch-job", job).header("fletch-component", "loader");
        if !range.is_empty() {
            ask = ask.header("range", range);
        }
        ask.send().await.expect("answer").bytes().await.expect("body").len() as u64
    };
    let cold = read("one", "bytes=5-1000000", &chunk).await;
    assert_eq!(cold, 999_996);
    let mut warm = read("one", "", &chunk).await;
    warm += read("one", "bytes=-1", &chunk).await;
    // What sends no content counts nothing.
    for _ in 0..3 {
        node.ask(Method::HEAD, &chunk).header("fletch-job", "one").send().await.expect("answer");
        let r = node.get(&chunk).header("fletch-job", "one").header("range", "bytes=99999999-").send().await;
        problem(r.expect("answer"), Code::RangeNotSatisfiable).await;
        let etag = format!("\"{}\"", Hash::of(&big[..4 << 20]));
        node.get(&chunk)
            .header("fletch-job", "one")
            .header("if-none-match", etag)
            .send()
            .await
            .expect("answer");
    }
    let items =
        r#"{"items":[{"path":"a.bin"},{"path":"nothing"},{"path":"z"},{"path":"empty"},{"path":"big.bin"}]}"#;
    let r = node.post(&routes::batch(root), items).header("fletch-job", "two").send().await.expect("answer");
    assert!(body(r, StatusCode::OK).await.len() > big.len());
    let got = sums(&node).await;
    let key = |job: &str, result, tier| (job.to_owned(), result, tier);
    let (hit, miss) = (ByteResult::Hit, ByteResult::Miss);
    assert_eq!(got[&key("one", miss, ByteTier::Origin)], cold);
    assert_eq!(got[&key("one", hit, ByteTier::Memory)], warm);
    let two: u64 = got.iter().filter(|(k, _)| k.0 == "two").map(|(_, n)| n).sum();
    assert_eq!(two, 5000 + 1 + big.len() as u64);
    assert_eq!(got[&key("two", hit, ByteTier::Memory)], 4 << 20, "the chunk that `one` brought");
    // Metrics say the same.
    let text = node.get("/metrics").send().await.expect("answer").text().await.expect("text");
    let all: u64 = text
        .lines()
        .filter(|l| l.starts_with("fletch_bytes_total{"))
        .map(|l| l.rsplit(' ').next().expect("value").parse::<u64>().expect("number"))
        .sum();
    assert_eq!(all, got.values().sum::<u64>());
    assert!(text.contains("component=\"loader\"") && text.contains("dataset=\"d\""), "{text}");
    // Tables are counted apart.
    let before = node.accounts().await.table_bytes;
    let n = node.get(&routes::manifest(root)).send().await.expect("answer").bytes().await.expect("body").len()
        as u64;
    assert_eq!(node.accounts().await.table_bytes, before + n);
    assert_eq!(sums(&node).await, got);
    node.running.shutdown().await;
}

/// Requests a chunk on a connection of its own, reads `n` bytes of the reply and disconnects.
async fn read_some_and_leave(node: &Node, path: &str, job: &str, n: usize) -> usize {
    let mut stream = TcpStream::connect(node.addr()).await.expect("connect");
    let ask = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nfletch-job: {job}\r\n\r\n");
    stream.write_all(ask.as_bytes()).await.expect("write");
    let mut got = vec![0; n];
    stream.read_exact(&mut got).await.expect("read");
    let head = got.windows(4).position(|w| w == b"\r\n\r\n").map_or(n, |at| at + 4);
    n - head
}

#[tokio::test]
async fn i8_an_aborted_answer_counts_what_the_connection_took() {
    let tree = Tree::new([("big", content(1, 4 << 20))]);
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let chunk = routes::chunk(root, Hash::of(&tree.files["big"]));
    body(node.get(&chunk).send().await.expect("answer"), StatusCode::OK).await;
    for i in 0..4 {
        let job = format!("aborts-{i}");
        let read = read_some_and_leave(&node, &chunk, &job, 1000 + i * 100_000).await as u64;
        // The connection's end is noticed by a write that fails; then nothing is added any more.
        eventually("the answer ended", async || node.metric("fletch_requests_in_flight").await == 0).await;
        let counted: u64 = sums(&node).await.iter().filter(|(k, _)| k.0 == job).map(|(_, n)| n).sum();
        assert!(counted >= read, "{counted} counted, {read} read");
        assert!(counted <= 4 << 20, "{counted} counted of one answer");
        assert_eq!(counted % (256 << 10), 0, "whole slices");
    }
    node.running.shutdown().await;
}

#[tokio::test]
async fn i8_a_stalled_reader_is_cut_and_counts_only_what_it_took() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let node = Node::serving(&tree, &["--limits-send-timeout=300ms"]).await;
    let mut stream = TcpStream::connect(node.addr()).await.expect("connect");
    let ask = format!(
        "GET /v1/versions/{root}/files/big.bin HTTP/1.1\r\nhost: localhost\r\nfletch-job: stalls\r\n\r\n"
    );
    // Ten answers do not fit into the kernel's buffers.
    stream.write_all(ask.repeat(10).as_bytes()).await.expect("write");
    eventually("it began", async || !sums(&node).await.is_empty()).await;
    eventually("the answer was cut", async || node.metric("fletch_requests_in_flight").await == 0).await;
    let counted: u64 = sums(&node).await.values().sum();
    let mut taken = Vec::new();
    // The rest of what the kernel had, and then the cut.
    let end = stream.read_to_end(&mut taken).await;
    assert!(end.is_err() || counted < 10 * tree.files["big.bin"].len() as u64);
    assert!(counted >= taken.len() as u64 - 10 * 1024, "{counted} counted, {} read", taken.len());
    drop(stream);
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn i3_64_readers_of_a_cold_chunk_make_one_read_though_the_first_is_killed() {
    let tree = Tree::new([("data/big", content(1, 4 << 20)), ("data/other", content(2, 1000))]);
    let slow = Latency { median: Duration::from_millis(150), p99: Duration::from_millis(200) };
    let emulator = OriginEmulator::start(
        EmulatorConfig { first_byte: Some(slow), ..EmulatorConfig::default() },
        Backing::Directory(tree.dir.path().to_owned()),
    );
    let settings = tempfile::tempdir().expect("tempdir");
    let file = settings.path().join("f.toml");
    let text = format!(
        "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\nregion = \
            \"us-east-1\"\ncredentials = \"anonymous\"\n",
        emulator.uri(),
        emulator.endpoint()
    );
    std::fs::write(&file, text).expect("write");
    // Objects in the emulated bucket, tables in the tree itself: another place.
    let node = Node::start(&[&format!("--config={}", file.display())]).await;
    let root = index_bucket(&tree, &emulator).await;
    node.register("s3", &emulator.uri(), Some(&tree.uri())).await;
    assert_eq!(node.resolve("s3", "latest").await.root, root);
    // Everything but the chunk is warm.
    body(
        node.get(&format!("/v1/versions/{root}/files/data/other")).send().await.expect("answer"),
        StatusCode::OK,
    )
    .await;
    emulator.reset_counts();
    let chunk = routes::chunk(root, Hash::of(&tree.files["data/big"]));
    let leader = {
        let addr = node.addr();
        let ask = format!("GET {chunk} HTTP/1.1\r\nhost: localhost\r\n\r\n");
        let mut stream = TcpStream::connect(addr).await.expect("connect");
        stream.write_all(ask.as_bytes()).await.expect("write");
        stream
    };
    eventually("the fetch began", async || node.metric("fletch_flights").await == 1).await;
    let readers: Vec<_> = (0..63).map(|_| node.get(&chunk).send()).collect();
    let (answers, ()) = tokio::join!(futures::future::join_all(readers), async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(leader);
    });
    let mut collapsed = 0;
    for r in answers {
        let r = r.expect("answer");
        collapsed += u32::from(r.headers()["cache-status"] == "fletch; fwd=miss; collapsed");
        assert_eq!(body(r, StatusCode::OK).await, tree.files["data/big"]);
    }
    let counts = emulator.counts();
    assert_eq!(counts.get, 1, "{counts:?}");
    assert!(collapsed >= 1, "nobody waited: the test was too slow");
    node.running.shutdown().await;
}
