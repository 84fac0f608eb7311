//! Tests I6: overload, oversized requests and silent peers get an error in time, and a stop always ends.

use crate::common::{Node, Tree, body, epochs, problem};
use fletch_api::{Code, OrderKind, PlanBase, routes};
use fletch_core::{Hash, plan::Tail};
use reqwest::{Method, StatusCode};
use std::time::{Duration, Instant};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};
use tokio_util::task::TaskTracker;

#[tokio::test]
async fn routes_methods_headers_and_jobs_that_are_none() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let node = Node::serving(&tree, &["--limits-header-bytes=8KiB"]).await;
    let chunk = routes::chunk(root, Hash::of(&tree.files["z"]));
    problem(node.get("/v2/anything").send().await.expect("answer"), Code::NotFound).await;
    problem(node.ask(Method::PUT, &chunk).send().await.expect("answer"), Code::MethodNotAllowed).await;
    problem(node.get("/v1/versions/xyz/manifest.json").send().await.expect("answer"), Code::BadRequest).await;
    let upper = format!("/v1/versions/{}/manifest.json", root.to_string().to_uppercase());
    problem(node.get(&upper).send().await.expect("answer"), Code::BadRequest).await;
    for bad in ["a b", "../x", "", &"x".repeat(200)] {
        problem(node.get(&chunk).header("fletch-job", bad).send().await.expect("answer"), Code::BadJob).await;
    }
    problem(node.get(&chunk).header("fletch-view", "soon").send().await.expect("answer"), Code::BadRequest)
        .await;
    assert_eq!(
        node.get(&chunk).header("fletch-view", "7").send().await.expect("answer").status(),
        StatusCode::OK
    );
    problem(
        node.get(&chunk).header("x-big", "y".repeat(10_000)).send().await.expect("answer"),
        Code::HeaderTooLarge,
    )
    .await;
    // Beyond what is read at all the connection ends; it must not hang or take memory.
    let mut stream = TcpStream::connect(node.addr()).await.expect("connect");
    let head = format!("GET {chunk} HTTP/1.1\r\nhost: localhost\r\nx-huge: {}", "y".repeat(4 << 20));
    let wrote = stream.write_all(head.as_bytes()).await;
    let mut got = Vec::new();
    let read = stream.read_to_end(&mut got).await;
    assert!(
        wrote.is_err() || read.is_err() || got.starts_with(b"HTTP/1.1 431"),
        "{}",
        String::from_utf8_lossy(&got)
    );
    node.running.shutdown().await;
}

#[tokio::test]
async fn probes_pages_and_descriptions() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    body(
        node.get(&routes::chunk(root, Hash::of(&tree.files["a.bin"]))).send().await.expect("answer"),
        StatusCode::OK,
    )
    .await;
    let text = async |path: &str| {
        let r = node.get(path).send().await.expect("answer");
        assert_eq!(r.status(), StatusCode::OK, "{path}");
        r.text().await.expect("text")
    };
    assert_eq!((text("/livez").await.as_str(), text("/readyz").await.as_str()), ("ok\n", "ok\n"));
    let (page, now) = (text("/").await, text("/v1/dashboard").await);
    // Of 256 MiB of memory, an eighth is for copies and read-ahead data, and one for requests that arrive.
    assert!(text("/metrics").await.contains(&format!("fletch_memory_limit_bytes {}\n", 192 << 20)));
    assert!(page.contains("<title>Fletch</title>") && !page.contains("anonymous"), "{page}");
    for part in ["file://", "\"name\":\"anonymous\"", "\"miss_bytes\":5000", "\"delivered_bytes\":5000"] {
        assert!(now.contains(part), "{part} in {now}");
    }
    let cluster: fletch_api::Cluster = serde_json::from_str(&text("/v1/cluster").await).expect("cluster");
    assert_eq!(
        (cluster.view, cluster.members.len(), cluster.members[0].url.clone()),
        (1, 1, node.running.url())
    );
    let info: fletch_api::Info = serde_json::from_str(&text("/v1/info").await).expect("info");
    assert_eq!((info.formats.api, info.formats.versions, info.formats.frames), (vec![1], vec![1], vec![1]));
    assert!(text("/v1/openapi.json").await.contains("/v1/versions/{root}/files/{path}"));
    node.running.shutdown().await;
}

/// A listener that accepts connections and never replies.
async fn silent() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let url = format!("http://{}", listener.local_addr().expect("addr"));
    (listener, url)
}

async fn node_of_silence(more: &[&str]) -> (Node, TcpListener) {
    let (listener, endpoint) = silent().await;
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("f.toml");
    let text = format!(
        "[[origin]]\nprefix = \"s3://silent\"\nendpoint = \"{endpoint}\"\nallow_http = true\nregion = \
            \"x\"\ncredentials = \"anonymous\"\n"
    );
    std::fs::write(&file, text).expect("write");
    let config = format!("--config={}", file.display());
    let mut args = vec![config.as_str()];
    args.extend(more);
    let node = Node::start(&args).await;
    node.register("s", "s3://silent/data", None).await;
    (node, listener)
}

#[tokio::test]
async fn an_origin_that_never_answers_is_an_error_in_time() {
    let (node, _listener) = node_of_silence(&["--io-timeout=400ms"]).await;
    let begun = Instant::now();
    problem(
        node.get("/v1/datasets/s/versions/latest").send().await.expect("answer"),
        Code::OriginUnavailable,
    )
    .await;
    let root = fletch_core::Root(Hash::of(b"unknown"));
    problem(node.get(&routes::manifest(root)).send().await.expect("answer"), Code::OriginUnavailable).await;
    assert!(begun.elapsed() < Duration::from_secs(2 * (1 + 2)), "{:?}", begun.elapsed());
    node.running.shutdown().await;
}

#[tokio::test]
async fn at_the_limit_the_answer_is_429_and_a_stop_ends_though_the_origin_hangs() {
    let (node, _listener) =
        node_of_silence(&["--limits-requests=1", "--limits-grace=1s", "--io-timeout=1m"]).await;
    let root = fletch_core::Root(Hash::of(b"unknown"));
    let manifest = routes::manifest(root);
    let hanging = TaskTracker::new().spawn(node.get(&manifest).send());
    while node.metric("fletch_requests_in_flight").await == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let r = node.get(&manifest).send().await.expect("answer");
    assert_eq!(r.headers()["retry-after"], "1");
    problem(r, Code::Overloaded).await;
    // What is not for bytes still answers.
    assert_eq!(node.get("/readyz").send().await.expect("answer").status(), StatusCode::OK);
    let begun = Instant::now();
    node.running.shutdown().await;
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    assert!(hanging.await.expect("task").is_err(), "the answer under way was cut");
}

#[tokio::test]
async fn a_stop_says_so_finishes_what_is_under_way_and_takes_no_more() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let addr = node.addr();
    // Two connections that are open before: one in the middle of an answer, one idle.
    let mut busy = TcpStream::connect(addr).await.expect("connect");
    let ask = format!("GET /v1/versions/{root}/files/big.bin HTTP/1.1\r\nhost: localhost\r\n\r\n");
    busy.write_all(ask.as_bytes()).await.expect("write");
    let mut begin = [0; 15];
    busy.read_exact(&mut begin).await.expect("the head");
    let stop = node.running.stop.clone();
    stop.cancel();
    let stopped = TaskTracker::new().spawn(node.running.stopped());
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(TcpStream::connect(addr).await.is_err(), "no new connections");
    let mut got = Vec::new();
    busy.read_to_end(&mut got).await.expect("the whole answer");
    assert!(got.ends_with(&tree.files["big.bin"]), "{} bytes", got.len());
    stopped.await.expect("stopped");
}

#[tokio::test]
async fn connections_are_bounded_and_idle_ones_are_closed() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let node = Node::serving(&tree, &["--limits-connections=2", "--limits-idle-timeout=300ms"]).await;
    let mut idle = TcpStream::connect(node.addr()).await.expect("connect");
    let mut second = TcpStream::connect(node.addr()).await.expect("connect");
    let begun = Instant::now();
    // The third takes the place of the oldest idle one.
    let chunk = routes::chunk(root, Hash::of(&tree.files["z"]));
    assert_eq!(reqwest::get(node.url(&chunk)).await.expect("answer").status(), StatusCode::OK);
    assert!(begun.elapsed() < Duration::from_secs(5));
    let mut end = Vec::new();
    for stream in [&mut idle, &mut second] {
        // An end or an error: closed in any case.
        drop(stream.read_to_end(&mut end).await);
    }
    node.running.shutdown().await;
}

/// A client that starts a long body and sends nothing does not block other declarations.
#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_do_not_come_are_not_waited_for() {
    let tree = epochs::tree(14);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let client = epochs::client(&node);
    let mut silent = Vec::new();
    for length in [9, 9, 9, 15 << 20, 15 << 20] {
        let mut stream = TcpStream::connect(node.addr()).await.expect("connect");
        let head = format!(
            "POST {} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                content-length: {length}\r\n\r\n",
            routes::JOBS
        );
        stream.write_all(head.as_bytes()).await.expect("a head");
        silent.push(stream);
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    let mut what = epochs::ask("all", OrderKind::Strict, epochs::world(1, 4, Tail::Keep));
    client.declare(&what).await.expect("declared");
    // A body takes memory as it arrives, so those that do not come keep none from a plan.
    what.name = "some".parse().expect("a name");
    what.plan.base = PlanBase::Keys(tree.files.keys().take(4).cloned().collect());
    assert_eq!(client.declare(&what).await.expect("declared").info().entries, 4);
    for stream in &mut silent[3..] {
        let mut got = String::new();
        stream.read_to_string(&mut got).await.expect("an answer");
        assert!(got.starts_with("HTTP/1.1 504") && got.contains("only 0 bytes of the body arrived"), "{got}");
    }
    node.running.shutdown().await;
}
