//! Tests I6 for connections: who is closed for whom, what an unproven connection may take, and how much
//! memory requests take while they arrive.

use crate::common::{Node, Tree, content};
use fletch_core::{Hash, Root};
use std::{
    path::Path,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, UnixStream},
    time::timeout,
};

/// Longer than anything here takes, and shorter than `limits.idle_timeout`.
const SOON: Duration = Duration::from_secs(20);

async fn connect(node: &Node) -> TcpStream {
    TcpStream::connect(node.addr()).await.expect("connect")
}

/// Sends a request and returns everything up to the end of the connection.
async fn ask(mut stream: impl AsyncRead + AsyncWrite + Unpin, request: &str) -> String {
    stream.write_all(request.as_bytes()).await.expect("write");
    let mut got = Vec::new();
    // A server that closes in the middle of a request resets the connection.
    drop(timeout(SOON, stream.read_to_end(&mut got)).await.expect("an end in time"));
    String::from_utf8_lossy(&got).into_owned()
}

fn get(path: &str, more: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n{more}\r\n")
}

const CLOSE: &str = "connection: close\r\n";

/// Waits until the server has closed a connection.
async fn is_closed(stream: &mut TcpStream) {
    let mut got = [0; 1 << 10];
    let end = async { while matches!(stream.read(&mut got).await, Ok(1..)) {} };
    timeout(SOON, end).await.expect("closed in time");
}

/// Starts a server with tokens of the tenants `a` and `b`.
async fn with_tokens(tree: &Tree, more: &[&str]) -> (Node, TempDir) {
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("tokens.toml");
    let line = |tenant: &str, role: &str| {
        let hash = Hash::of(format!("tok-{tenant}-{role}").as_bytes());
        format!("[[token]]\nhash = \"{hash}\"\ntenant = \"{tenant}\"\ndomain = \"team\"\nrole = \"{role}\"\n")
    };
    let text = [("a", "reader"), ("b", "user"), ("m", "admin")].map(|(t, r)| line(t, r)).concat();
    std::fs::write(&file, text).expect("write");
    let flags = [format!("--auth-tokens={}", file.display()), format!("--local-dirs={}=*", tree.uri())];
    let flags: Vec<&str> = flags.iter().map(String::as_str).chain(more.iter().copied()).collect();
    let mut node = Node::start(&flags).await;
    node.sign("tok-b-user");
    node.register("d", &tree.uri(), None).await;
    node.sign("tok-m-admin");
    (node, dir)
}

/// A server all of whose connections (one over TCP, two over the socket) run a request that never ends.
async fn occupied() -> (Node, TcpListener, Vec<Box<dyn Send>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let endpoint = format!("http://{}", listener.local_addr().expect("addr"));
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("f.toml");
    let text = format!(
        "[[origin]]\nprefix = \"s3://silent\"\nendpoint = \"{endpoint}\"\nallow_http = true\nregion = \"x\"\n\
         credentials = \"anonymous\"\n"
    );
    std::fs::write(&file, text).expect("write");
    let config = format!("--config={}", file.display());
    let few = ["--limits-connections=1", "--limits-socket-connections=2", "--io-timeout=1m"];
    let node = Node::start(&[&few[..], &["--limits-grace=1s", &config]].concat()).await;
    node.register("s", "s3://silent/data", None).await;
    let request = |of: &[u8]| get(&fletch_api::routes::manifest(Root(Hash::of(of))), "");
    let mut held: Vec<Box<dyn Send>> = vec![Box::new(dir)];
    let mut tcp = connect(&node).await;
    tcp.write_all(request(b"tcp").as_bytes()).await.expect("write");
    // The request runs when the server asks the origin.
    let (at_origin, _) = listener.accept().await.expect("a call to the origin");
    held.extend([Box::new(tcp) as Box<dyn Send>, Box::new(at_origin)]);
    // A user of the socket has half of its connections.
    let path = node.running.socket.clone().expect("a socket");
    let mut unix = UnixStream::connect(&path).await.expect("connect");
    unix.write_all(request(b"unix").as_bytes()).await.expect("write");
    let (at_origin, _) = listener.accept().await.expect("a call to the origin");
    held.extend([Box::new(unix) as Box<dyn Send>, Box::new(at_origin)]);
    (node, listener, held)
}

async fn unix(path: &Path) -> UnixStream {
    UnixStream::connect(path).await.expect("connect")
}

#[tokio::test]
async fn i6_where_every_connection_is_busy_probes_are_answered_and_the_rest_gets_429() {
    let (node, _listener, _held) = occupied().await;
    let socket = node.running.socket.clone().expect("a socket");
    let got = ask(connect(&node).await, &get("/v1/info", CLOSE)).await;
    assert!(got.starts_with("HTTP/1.1 429"), "{got}");
    assert!(got.contains("retry-after: 1") && got.contains("connection: close"), "{got}");
    assert!(got.contains("limits.connections"), "{got}");
    for path in ["/livez", "/startupz", "/readyz"] {
        let got = ask(connect(&node).await, &get(path, "")).await;
        assert!(got.starts_with("HTTP/1.1 200") && got.ends_with("ok\n"), "{got}");
        let got = ask(unix(&socket).await, &get(path, "")).await;
        assert!(got.starts_with("HTTP/1.1 200") && got.ends_with("ok\n"), "{got}");
    }
    // Silent connections in the lane do not fill it.
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(connect(&node).await);
    }
    let got = ask(connect(&node).await, &get("/livez", "")).await;
    assert!(got.starts_with("HTTP/1.1 200"), "{got}");
    node.running.shutdown().await;
}

#[tokio::test]
async fn i6_idle_connections_make_room_unproven_ones_first() {
    let tree = Tree::usual();
    tree.index();
    let (node, _dir) = with_tokens(&tree, &["--limits-connections=3", "--limits-head-timeout=10m"]).await;
    let signed = "authorization: Bearer tok-a-reader\r\n";
    let mut proven = connect(&node).await;
    proven.write_all(get("/v1/datasets", signed).as_bytes()).await.expect("write");
    let mut head = [0; 15];
    proven.read_exact(&mut head).await.expect("an answer");
    assert_eq!(&head, b"HTTP/1.1 200 OK");
    let mut silent = connect(&node).await;
    let mut half = connect(&node).await;
    half.write_all(b"GET /v1/info HTTP/1.1\r\nhost: localhost\r\n").await.expect("write");
    // The oldest unproven connections go, one for each newcomer, and the proven one stays.
    let got = ask(connect(&node).await, &get("/v1/datasets", &format!("{signed}{CLOSE}"))).await;
    assert!(got.starts_with("HTTP/1.1 200"), "{got}");
    is_closed(&mut silent).await;
    let newcomer = connect(&node).await;
    let second = connect(&node).await;
    is_closed(&mut half).await;
    let more = get("/v1/datasets", &format!("{signed}{CLOSE}"));
    let got = ask(proven, &more).await;
    assert!(got.contains("HTTP/1.1 200"), "the proven connection goes on: {got}");
    drop((newcomer, second));
    assert!(node.metric("fletch_connections_closed_total{reason=\"made_room\"}").await >= 2);
    node.running.shutdown().await;
}

#[tokio::test]
async fn i6_a_connection_without_a_token_has_seconds() {
    let tree = Tree::usual();
    tree.index();
    let (node, _dir) = with_tokens(&tree, &["--limits-head-timeout=700ms"]).await;
    let mut silent = connect(&node).await;
    let mut slow = connect(&node).await;
    slow.write_all(b"GET /v1/info HTTP/1.1\r\nhost: localhost\r\nx-slow: ").await.expect("write");
    let mut wrong = connect(&node).await;
    wrong.write_all(get("/v1/info", "authorization: Bearer wrong\r\n").as_bytes()).await.expect("write");
    let begun = Instant::now();
    for stream in [&mut silent, &mut slow, &mut wrong] {
        is_closed(stream).await;
    }
    assert!(begun.elapsed() >= Duration::from_millis(300), "{:?}", begun.elapsed());
    assert!(node.metric("fletch_connections_closed_total{reason=\"not_proven\"}").await >= 2);
    node.running.shutdown().await;
}

#[tokio::test]
async fn i6_unfinished_heads_share_little_memory_and_shut_nobody_out() {
    let tree = Tree::usual();
    tree.index();
    let (node, _dir) = with_tokens(&tree, &["--memory=64MiB", "--limits-head-timeout=10m"]).await;
    // 300 heads of 30 KB: with their buffers more than all the memory for requests.
    let mut held = Vec::new();
    for _ in 0..300 {
        let mut stream = connect(&node).await;
        let head = format!("GET /v1/info HTTP/1.1\r\nhost: localhost\r\nx-long: {}", "y".repeat(30_000));
        stream.write_all(head.as_bytes()).await.expect("write");
        held.push(stream);
    }
    // The reader comes from the same source as the attacker.
    let signed = format!("authorization: Bearer tok-a-reader\r\n{CLOSE}");
    for _ in 0..20 {
        let got = ask(connect(&node).await, &get("/v1/datasets", &signed)).await;
        assert!(got.starts_with("HTTP/1.1 200"), "{got}");
    }
    let strangers = node.metric("fletch_request_memory_bytes{of=\"strangers\"}").await;
    let limit = node.metric("fletch_request_memory_limit_bytes").await;
    assert!(strangers <= limit / 4, "{strangers} of {limit}");
    node.running.shutdown().await;
}

fn post(path: &str, token: &str, more: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
            authorization: Bearer {token}\r\n{more}\r\n"
    )
}

#[tokio::test]
async fn i6_unfinished_bodies_of_one_tenant_take_its_share_of_memory_and_no_more() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let (node, _dir) = with_tokens(&tree, &["--memory=64MiB"]).await;
    let path = format!("/v1/versions/{root}/batch");
    let length = format!("content-length: {}\r\n", 4 << 20);
    let mut held = Vec::new();
    for _ in 0..50 {
        let mut stream = connect(&node).await;
        let head = post(&path, "tok-a-reader", &length) + "{\"items\":[";
        // The server may answer 429 before the end.
        drop(stream.write_all((head + &" ".repeat(256 << 10)).as_bytes()).await);
        held.push(stream);
    }
    let limit = node.metric("fletch_request_memory_limit_bytes").await;
    let until = Instant::now() + SOON;
    while node.metric("fletch_bodies_refused_total{reason=\"memory\"}").await == 0 {
        assert!(Instant::now() < until, "none was refused");
    }
    let of_tenants = node.metric("fletch_request_memory_bytes{of=\"tenants\"}").await;
    assert!(of_tenants <= limit / 2 + limit / 4, "{of_tenants} of {limit}");
    // Another tenant is not refused meanwhile.
    let body = "{\"items\":[{\"path\":\"z\"}]}";
    let more = format!("content-length: {}\r\n{CLOSE}", body.len());
    let got = ask(connect(&node).await, &(post(&path, "tok-b-user", &more) + body)).await;
    assert!(got.starts_with("HTTP/1.1 200"), "{got}");
    // Those that send nothing more get an answer in seconds, and give their memory back.
    for stream in &mut held {
        is_closed(stream).await;
    }
    node.running.shutdown().await;
}

#[tokio::test]
async fn bodies_without_an_end_of_many_values_or_encoded_are_refused() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let (node, _dir) = with_tokens(&tree, &["--memory=64MiB"]).await;
    let path = format!("/v1/versions/{root}/batch");
    let mut endless = connect(&node).await;
    let head = post(&path, "tok-a-reader", "transfer-encoding: chunked\r\n");
    endless.write_all(head.as_bytes()).await.expect("write");
    let chunk = format!("10000\r\n{}\r\n", " ".repeat(0x10000));
    let mut sent = 0;
    while endless.write_all(chunk.as_bytes()).await.is_ok() {
        sent += chunk.len();
        assert!(sent < 64 << 20, "the server goes on reading");
    }
    // A hundred thousand items are within the length of a body, and take more memory than a body may.
    let body = format!("{{\"items\":[{}]}}", vec!["{\"ordinal\":1}"; 100_000].join(","));
    let more = format!("content-length: {}\r\n{CLOSE}", body.len());
    let got = ask(connect(&node).await, &(post(&path, "tok-a-reader", &more) + &body)).await;
    assert!(got.starts_with("HTTP/1.1 413") && got.contains("raise --memory"), "{got}");
    let more = format!("content-length: 2\r\ncontent-encoding: gzip\r\n{CLOSE}");
    let got = ask(connect(&node).await, &(post(&path, "tok-a-reader", &more) + "xx")).await;
    assert!(got.starts_with("HTTP/1.1 400") && got.contains("Content-Encoding"), "{got}");
    assert!(node.metric("fletch_bodies_refused_total{reason=\"too_large\"}").await >= 2);
    node.running.shutdown().await;
}

#[tokio::test]
async fn i6_connections_that_send_nothing_take_no_memory_for_requests_and_stay() {
    let node = Node::start(&["--limits-head-timeout=10m", "--limits-idle-timeout=10m"]).await;
    let mut held = Vec::new();
    for _ in 0..600 {
        held.push(connect(&node).await);
    }
    let until = Instant::now() + SOON;
    while node.metric("fletch_connections{of=\"tcp\"}").await < 600 {
        assert!(Instant::now() < until, "not all are open");
    }
    assert_eq!(node.metric("fletch_request_memory_bytes{of=\"strangers\"}").await, 0);
    assert_eq!(node.metric("fletch_connections_closed_total{reason=\"made_room\"}").await, 0);
    node.running.shutdown().await;
}

/// The server frees the buffers of an idle connection. What the client sends then is not lost.
#[tokio::test]
async fn a_connection_that_rests_goes_on_where_it_stopped() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let mut stream = connect(&node).await;
    let request = get(&format!("/v1/versions/{root}/files/a.bin"), "");
    for pause in [0, 1_700, 0, 2_600] {
        tokio::time::sleep(Duration::from_millis(pause)).await;
        let (first, rest) = request.split_at(20);
        stream.write_all(first.as_bytes()).await.expect("write");
        tokio::time::sleep(Duration::from_millis(pause)).await;
        stream.write_all(rest.as_bytes()).await.expect("write");
        let mut got = Vec::new();
        while !got.ends_with(&tree.files["a.bin"]) {
            let n = stream.read_buf(&mut got).await.expect("read");
            assert!(n > 0, "closed after {:?}", String::from_utf8_lossy(&got));
        }
        assert!(got.starts_with(b"HTTP/1.1 200"));
    }
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn i6_a_client_that_takes_a_reply_byte_by_byte_is_cut() {
    let tree = Tree::new([("huge.bin", content(8, 64 << 20))]);
    let root = tree.index().root();
    let node = Node::serving(&tree, &["--limits-send-timeout=500ms"]).await;
    let mut stream = connect(&node).await;
    let request = get(&format!("/v1/versions/{root}/files/huge.bin"), "");
    stream.write_all(request.as_bytes()).await.expect("write");
    let cut = async {
        loop {
            // The client goes on taking bytes, each time before `limits.send_timeout`.
            if !matches!(stream.read(&mut [0; 16]).await, Ok(1..)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            if node.metric("fletch_connections_closed_total{reason=\"slow_reader\"}").await > 0 {
                return;
            }
        }
    };
    timeout(SOON, cut).await.expect("cut");
    let until = Instant::now() + SOON;
    while node.metric("fletch_requests_in_flight").await > 0 {
        assert!(Instant::now() < until, "its permit is held");
    }
    node.running.shutdown().await;
}
