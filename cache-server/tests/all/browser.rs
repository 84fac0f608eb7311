//! Tests that no web page drives a server: its own name for this machine, its forms and its scripts.

use crate::common::{Node, Tree, body, problem, settings};
use fletch_api::{Code, routes};
use fletch_client::{Client, ClientConfig, Endpoint};
use fletch_server::app;
use reqwest::{Method, StatusCode};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UnixStream},
};

/// Returns how many datasets are registered.
async fn registered(node: &Node) -> usize {
    let list = node.get("/v1/datasets").send().await.expect("answer").text().await.expect("text");
    let list: serde_json::Value = serde_json::from_str(&list).expect("JSON");
    list["datasets"].as_array().expect("list").len()
}

/// Sends bytes. Returns the reply up to the end of the connection.
async fn exchange<S>(mut stream: S, request: &str) -> String
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut got = Vec::new();
    stream.read_to_end(&mut got).await.expect("reply");
    String::from_utf8_lossy(&got).into_owned()
}

#[tokio::test]
async fn a_page_that_rebinds_its_name_to_this_machine_reads_and_changes_nothing() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let file = routes::file(root, "a.bin");
    let foreign = format!("evil.example:{}", node.addr().port());
    for path in [
        "/",
        "/page/main.js",
        "/v1/dashboard",
        "/metrics",
        "/v1/datasets",
        "/v1/info",
        "/v1/openapi.json",
        "/no/route",
        &file,
    ] {
        let r = node.get(path).header("host", &foreign).send().await.expect("answer");
        let p = problem(r, Code::Misdirected).await;
        assert!(p.detail.contains("evil.example") && p.hint.contains("auth.hosts"), "{p}");
    }
    let what = serde_json::json!({"name": "x", "uri": tree.uri()}).to_string();
    let r = node.post("/v1/datasets", what).header("host", &foreign).send().await.expect("answer");
    problem(r, Code::Misdirected).await;
    let r = node.ask(Method::DELETE, "/v1/datasets/d").header("host", &foreign).send().await.expect("answer");
    problem(r, Code::Misdirected).await;
    // The request line may name the host instead, or no line may.
    for (line, host) in [
        ("http://evil.example/v1/datasets", "Host: localhost\r\n"),
        ("/v1/datasets", ""),
        ("/v1/datasets", "Host: localhost\r\nHost: evil.example\r\n"),
    ] {
        let request = format!("GET {line} HTTP/1.1\r\n{host}Connection: close\r\n\r\n");
        let got = exchange(TcpStream::connect(node.addr()).await.expect("connect"), &request).await;
        // hyper itself refuses two lines `Host`, if it does.
        assert!(got.starts_with("HTTP/1.1 421") || got.starts_with("HTTP/1.1 400"), "{line} {host}: {got}");
    }
    for host in ["localhost", "127.0.0.1:1", "[::1]:7380"] {
        let r = node.get(&file).header("host", host).send().await.expect("answer");
        assert_eq!(body(r, StatusCode::OK).await, tree.files["a.bin"], "{host}");
    }
    let r = node.get("/livez").header("host", &foreign).send().await.expect("answer");
    assert_eq!(r.status(), 200, "a probe may name any host");
    assert_eq!(registered(&node).await, 1);
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_form_and_a_script_of_another_site_change_nothing() {
    let tree = Tree::usual();
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let what = serde_json::json!({"name": "x", "uri": tree.uri()}).to_string();
    for kind in [Some("text/plain"), Some("application/x-www-form-urlencoded"), None] {
        let mut r = node.ask(Method::POST, "/v1/datasets").body(what.clone());
        if let Some(kind) = kind {
            r = r.header("content-type", kind);
        }
        let p = problem(r.send().await.expect("answer"), Code::UnsupportedType).await;
        assert!(p.hint.contains("application/json"), "{p}");
    }
    for (name, value) in [("origin", "http://evil.example"), ("sec-fetch-site", "cross-site")] {
        let r = node.post("/v1/datasets", what.clone()).header(name, value).send().await.expect("answer");
        problem(r, Code::CrossSite).await;
        let r = node.get("/v1/datasets").header(name, value).send().await.expect("answer");
        problem(r, Code::CrossSite).await;
    }
    // The question of a browser before it sends JSON to another site gets no agreement.
    let ask = node.ask(Method::OPTIONS, "/v1/datasets").header("origin", "http://evil.example");
    let r = ask.header("access-control-request-method", "POST").send().await.expect("answer");
    assert!(
        !r.status().is_success() && r.headers().keys().all(|n| !n.as_str().starts_with("access-control"))
    );
    assert_eq!(registered(&node).await, 1);
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_host_of_the_settings_is_allowed() {
    let node = Node::start(&["--auth-hosts=gpu7"]).await;
    let status = async |host: &str| {
        node.get("/v1/datasets").header("host", host).send().await.expect("answer").status()
    };
    assert_eq!(
        (status("gpu7:7380").await, status("gpu8").await),
        (StatusCode::OK, StatusCode::MISDIRECTED_REQUEST)
    );
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_server_without_a_port_is_reached_by_its_socket() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let state = tempfile::tempdir().expect("tempdir");
    let running =
        app::start(settings(state.path(), &["--listen=none"]).expect("settings")).await.expect("started");
    let socket = running.socket.clone().expect("socket");
    assert_eq!((running.addr, running.url()), (None, format!("unix:{}", socket.display())));
    for probe in ["/livez", "/startupz", "/readyz"] {
        let request = format!("GET {probe} HTTP/1.1\r\nHost: any.example\r\nConnection: close\r\n\r\n");
        let got = exchange(UnixStream::connect(&socket).await.expect("connect"), &request).await;
        assert!(got.starts_with("HTTP/1.1 200"), "{got}");
    }
    let endpoint: Endpoint = running.url().parse().expect("endpoint");
    let client = Client::new(ClientConfig::new(endpoint, "cli")).expect("client");
    client
        .register(&fletch_api::RegisterDataset {
            replace: false,
            check: false,
            name: "d".parse().expect("name"),
            uri: tree.uri(),
            tables: None,
        })
        .await
        .expect("the server's own user is an admin");
    let request = format!("GET {} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", routes::file(root, "z"));
    let got = exchange(UnixStream::connect(&socket).await.expect("connect"), &request).await;
    assert!(got.starts_with("HTTP/1.1 200"), "{got}");
    running.shutdown().await;
}
