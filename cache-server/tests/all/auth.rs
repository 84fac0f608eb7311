//! Tests authentication: which token may use which route, and that no reply or log shows a token.

use crate::common::{Node, Tree, body, content, problem};
use fletch_api::{Accounts, Code, routes};
use fletch_core::Hash;
use reqwest::{Method, RequestBuilder, StatusCode};
use std::{
    path::Path,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

fn line(token: &str, rest: &str) -> String {
    format!("[[token]]\nhash = \"{}\"\n{rest}\n", Hash::of(token.as_bytes()))
}

fn put(path: &Path, text: &str) {
    let part = path.with_extension("part");
    std::fs::write(&part, text).expect("write");
    std::fs::rename(&part, path).expect("rename");
}

/// Starts a server with the tokens `r`eader, `u`ser, `a`dmin and `m`onitor of tenant t, and `o` of another
/// tenant.
async fn node(tree: &Tree, more: &str) -> (Node, TempDir) {
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("tokens.toml");
    let mut text = String::new();
    for (token, role) in [("tok-r", "reader"), ("tok-u", "user"), ("tok-a", "admin"), ("tok-m", "monitor")] {
        text += &line(token, &format!("tenant = \"t\"\nrole = \"{role}\""));
    }
    put(&file, &(text + &line("tok-o", "tenant = \"o\"") + more));
    let tokens = format!("--auth-tokens={}", file.display());
    let node = Node::start(&[&tokens, &format!("--local-dirs={}=*", tree.uri())]).await;
    (node, dir)
}

fn as_(token: &str, r: RequestBuilder) -> RequestBuilder {
    r.bearer_auth(token)
}

async fn status(r: RequestBuilder) -> u16 {
    r.send().await.expect("answer").status().as_u16()
}

#[tokio::test]
async fn nobody_gets_in_without_a_token_and_no_token_and_a_wrong_one_are_one_answer() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let (node, _dir) = node(&tree, "").await;
    let chunk = routes::chunk(root, Hash::of(&tree.files["a.bin"]));
    let paths = [
        "/metrics",
        "/v1/dashboard",
        "/v1/dashboard/events",
        "/v1/dashboard/history",
        "/v1/info",
        "/v1/datasets",
        "/v1/accounts",
        "/v1/cluster",
        "/no/such/route",
        &chunk,
    ];
    let mut answers = Vec::new();
    for path in paths {
        for sent in
            [None, Some(""), Some("Bearer"), Some("Bearer x"), Some("Basic dG9rOng="), Some("Bearer tok-r2")]
        {
            let mut r = node.get(path);
            if let Some(sent) = sent {
                r = r.header("authorization", sent);
            }
            let r = r.send().await.expect("answer");
            let mut headers: Vec<_> = r
                .headers()
                .iter()
                .filter(|(n, _)| *n != "date" && *n != "x-request-id")
                .map(|(n, v)| format!("{n}: {v:?}"))
                .collect();
            headers.sort();
            assert_eq!(
                (r.status().as_u16(), &r.headers()["www-authenticate"]),
                (401, &"Bearer".parse().expect("value"))
            );
            answers.push((headers, r.text().await.expect("text")));
        }
    }
    answers.dedup();
    assert_eq!(answers.len(), 1, "one answer for all: {answers:?}");
    assert!(answers[0].1.contains("\"unauthorized\""));
    for open in ["/livez", "/startupz", "/readyz", "/v1/openapi.json", "/", "/page/main.js"] {
        assert_eq!(status(node.get(open)).await, 200, "{open}");
    }
    node.running.shutdown().await;
}

#[tokio::test]
async fn roles_are_as_wide_as_they_are_said_to_be() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let (node, _dir) = node(&tree, "").await;
    let register = serde_json::json!({"name": "d", "uri": tree.uri()}).to_string();
    for (token, want) in [("tok-r", 403), ("tok-m", 403), ("tok-u", 201), ("tok-a", 200)] {
        assert_eq!(status(as_(token, node.post("/v1/datasets", register.clone()))).await, want, "{token}");
    }
    let chunk = routes::chunk(root, Hash::of(&tree.files["a.bin"]));
    for (token, want) in [("tok-r", 200), ("tok-u", 200), ("tok-a", 200), ("tok-m", 403), ("tok-o", 404)] {
        assert_eq!(status(as_(token, node.get(&chunk))).await, want, "{token}");
    }
    for (token, want) in [("tok-r", 403), ("tok-u", 403), ("tok-a", 200), ("tok-m", 200), ("tok-o", 403)] {
        assert_eq!(status(as_(token, node.get("/metrics"))).await, want, "{token}");
    }
    let delete = |token: &str| as_(token, node.ask(Method::DELETE, "/v1/datasets/d"));
    let p = problem(delete("tok-r").send().await.expect("answer"), Code::Forbidden).await;
    assert!(p.detail.contains("reader"), "{p}");
    assert_eq!(status(delete("tok-o")).await, 404, "another domain's");
    assert_eq!(status(delete("tok-u")).await, 204);
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_tenant_sees_its_own_accounts_and_an_admin_all() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let joined = line("tok-j", "tenant = \"j\"\ndomain = \"t\"");
    let (node, _dir) = node(&tree, &joined).await;
    let register = serde_json::json!({"name": "d", "uri": tree.uri()}).to_string();
    for token in ["tok-u", "tok-o"] {
        assert_eq!(
            status(as_(token, node.post("/v1/datasets", register.clone()))).await,
            201,
            "a name of its own"
        );
    }
    let chunk = routes::chunk(root, Hash::of(&tree.files["a.bin"]));
    for token in ["tok-r", "tok-j", "tok-o"] {
        let r = as_(token, node.get(&chunk)).send().await.expect("answer");
        assert_eq!(body(r, StatusCode::OK).await, tree.files["a.bin"]);
    }
    let tenants = async |token: &str| {
        let text =
            as_(token, node.get("/v1/accounts")).send().await.expect("answer").text().await.expect("text");
        let all: Accounts = serde_json::from_str(&text).expect("accounts");
        let of = |a: &fletch_api::Account| {
            (a.key.domain.to_string(), a.key.tenant.to_string(), a.key.result.as_str())
        };
        all.accounts.iter().map(of).collect::<Vec<_>>()
    };
    let row = |d: &str, t: &str, r: &'static str| (d.to_owned(), t.to_owned(), r);
    assert_eq!(tenants("tok-r").await, [row("t", "t", "miss")]);
    assert_eq!(tenants("tok-j").await, [row("t", "j", "hit")], "the same domain: its chunks are shared");
    assert_eq!(tenants("tok-o").await, [row("o", "o", "miss")], "another domain: resident chunks are no hit");
    assert_eq!(tenants("tok-a").await.len(), 3);
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_rotated_file_is_in_force_within_seconds_and_a_broken_one_never() {
    let tree = Tree::usual();
    let (node, dir) = node(&tree, "").await;
    let file = dir.path().join("tokens.toml");
    let is = async |token: &str, want: u16| {
        let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while status(as_(token, node.get("/v1/datasets"))).await != want {
            assert!(std::time::Instant::now() < until, "{token} is not {want}");
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    is("tok-r", 200).await;
    put(&file, &line("tok-new", "tenant = \"t\"\nrole = \"admin\""));
    is("tok-new", 200).await;
    is("tok-r", 401).await;
    put(&file, "[[token]]\nhash = 7\n");
    let errors = async || {
        let text =
            as_("tok-new", node.get("/metrics")).send().await.expect("answer").text().await.expect("text");
        text.contains("fletch_auth_reloads_total{result=\"error\"} 1")
    };
    while !errors().await {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    is("tok-new", 200).await;
    node.running.shutdown().await;
}

#[tokio::test]
async fn the_description_of_the_server_tells_a_tenant_about_its_own_domain_only() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let (node, _dir) = node(&tree, "").await;
    let register = serde_json::json!({"name": "d", "uri": tree.uri()}).to_string();
    assert_eq!(status(as_("tok-u", node.post("/v1/datasets", register))).await, 201);
    let chunk = routes::chunk(root, Hash::of(&tree.files["a.bin"]));
    assert_eq!(status(as_("tok-r", node.get(&chunk))).await, 200);
    let disk = async |token: &str| {
        let r = as_(token, node.get("/v1/info")).send().await.expect("answer");
        let text = r.text().await.expect("text");
        serde_json::from_str::<fletch_api::Info>(&text).expect("info").disk.expect("disk")
    };
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while disk("tok-a").await.chunks == 0 {
        assert!(std::time::Instant::now() < until, "the chunk is never on the disk");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let (admin, own, other) = (disk("tok-a").await, disk("tok-r").await, disk("tok-o").await);
    assert!(admin.limit_bytes.is_some() && admin.chunk_bytes > 0);
    assert_eq!((own.chunks, own.chunk_bytes), (admin.chunks, admin.chunk_bytes), "the only domain with data");
    assert_eq!((other.chunks, other.chunk_bytes), (0, 0), "another domain's chunks do not exist");
    assert_eq!((own.limit_bytes, other.limit_bytes), (None, None));
    node.running.shutdown().await;
}

/// Longer than a changed tokens file takes to come into force.
const SOON: Duration = Duration::from_secs(20);

/// Waits until the server no longer knows a token.
async fn is_unknown(node: &Node, token: &str) {
    let until = Instant::now() + SOON;
    while status(as_(token, node.get("/v1/info"))).await != 401 {
        assert!(Instant::now() < until, "{token} is in force");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A connection that sends one request after another.
struct Kept(TcpStream, &'static str);

impl Kept {
    async fn open(node: &Node, token: &'static str) -> Self {
        Kept(TcpStream::connect(node.addr()).await.expect("connect"), token)
    }

    async fn send(&mut self, method: &str, path: &str, more: &str, body: &str) {
        let (token, length) = (self.1, body.len());
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\
             content-type: application/json\r\ncontent-length: {length}\r\n{more}\r\n{body}"
        );
        self.0.write_all(request.as_bytes()).await.expect("the connection lives on");
    }

    /// Returns the status of a short reply.
    async fn status(&mut self) -> u16 {
        let mut got = Vec::new();
        while !got.ends_with(b"\r\n\r\n") {
            got.push(timeout(SOON, self.0.read_u8()).await.expect("in time").expect("a head"));
        }
        let head = String::from_utf8_lossy(&got).to_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length = length.map_or(0, |n| n.parse().expect("a length"));
        self.0.read_exact(&mut vec![0; length]).await.expect("a body");
        head[9..12].parse().expect("a status")
    }
}

#[tokio::test]
async fn i7_a_revoked_token_is_refused_on_every_route_of_a_connection_that_lives_on() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let (node, dir) = node(&tree, &line("tok-p", "role = \"peer\"")).await;
    let mut kept = Vec::new();
    for (token, allowed) in
        [("tok-r", 200), ("tok-u", 200), ("tok-a", 200), ("tok-o", 200), ("tok-m", 403), ("tok-p", 403)]
    {
        let mut one = Kept::open(&node, token).await;
        one.send("GET", "/v1/datasets", "", "").await;
        assert_eq!(one.status().await, allowed, "{token}");
        kept.push(one);
    }
    put(&dir.path().join("tokens.toml"), &line("tok-new", "tenant = \"t\""));
    is_unknown(&node, "tok-r").await;
    let api = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");
    let api: serde_json::Value = serde_json::from_slice(&std::fs::read(api).expect("read")).expect("JSON");
    let mut routes = 0;
    for (path, methods) in api["paths"].as_object().expect("paths") {
        let (root, hash) = (root.to_string(), Hash::of(b"x").to_string());
        let real = path.replace("{root}", &root).replace("{hash}", &hash).replace("{layout}", &hash);
        let real = real.replace(['{', '}'], "");
        for method in methods.as_object().expect("methods").keys() {
            for one in &mut kept {
                one.send(&method.to_uppercase(), &real, "", "{}").await;
                let is_probe = ["/livez", "/startupz", "/readyz"].contains(&path.as_str());
                let want = if is_probe { 200 } else { 401 };
                assert_eq!(one.status().await, want, "{method} {real} with {}", one.1);
            }
            routes += 1;
        }
    }
    assert!(routes > 60, "{routes}");
    node.running.shutdown().await;
}

#[tokio::test]
async fn i7_a_request_that_waits_is_refused_after_its_token_was_revoked() {
    let tree = Tree::usual();
    let (node, dir) = node(&tree, "").await;
    let mut waits = Kept::open(&node, "tok-r").await;
    waits.send("GET", "/v1/cluster?after=999999&wait_ms=5000", "", "").await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    put(&dir.path().join("tokens.toml"), &line("tok-new", "tenant = \"t\""));
    assert_eq!(waits.status().await, 401);
    node.running.shutdown().await;
}

#[tokio::test]
async fn i7_a_long_reply_ends_when_its_token_is_revoked_or_gets_another_role() {
    const LENGTH: usize = 96 << 20;
    let tree = Tree::new([("long", content(1, LENGTH))]);
    let root = tree.index().root();
    let files = routes::file(root, "long");
    let batch = (routes::batch(root), r#"{"items":[{"path":"long"}]}"#);
    let revoked = line("tok-new", "tenant = \"t\"");
    let changed = line("tok-u", "tenant = \"t\"\nrole = \"monitor\"") + &revoked;
    for (method, (path, body), then) in [
        ("GET", (files.clone(), ""), &revoked),
        ("POST", batch, &revoked),
        ("GET", (files.clone(), ""), &changed),
    ] {
        let (node, dir) = node(&tree, "").await;
        let register = serde_json::json!({"name": "d", "uri": tree.uri()}).to_string();
        assert_eq!(status(as_("tok-u", node.post("/v1/datasets", register))).await, 201);
        let mut reads = Kept::open(&node, "tok-u").await;
        reads.send(method, &path, "", body).await;
        let mut some = vec![0; 1 << 20];
        reads.0.read_exact(&mut some).await.expect("a part of the reply");
        put(&dir.path().join("tokens.toml"), then);
        is_unknown(&node, "tok-r").await;
        let mut got = some.len();
        let rest = async {
            while let Ok(n @ 1..) = reads.0.read(&mut some).await {
                got += n;
            }
        };
        timeout(SOON, rest).await.expect("the connection ends");
        assert!(got < LENGTH / 2, "{method} {path}: {got} bytes were sent");
        node.running.shutdown().await;
    }
}

#[tokio::test]
async fn a_long_reply_goes_on_when_other_tokens_change() {
    const LENGTH: usize = 64 << 20;
    let tree = Tree::new([("long", content(1, LENGTH))]);
    let root = tree.index().root();
    let (node, dir) = node(&tree, "").await;
    let register = serde_json::json!({"name": "d", "uri": tree.uri()}).to_string();
    assert_eq!(status(as_("tok-u", node.post("/v1/datasets", register))).await, 201);
    let mut reply = as_("tok-u", node.get(&routes::file(root, "long"))).send().await.expect("answer");
    let first = reply.chunk().await.expect("bytes").expect("bytes");
    put(&dir.path().join("tokens.toml"), &line("tok-u", "tenant = \"t\"\nrole = \"user\""));
    is_unknown(&node, "tok-r").await;
    let rest = reply.bytes().await.expect("all of it");
    assert!([&first[..], &rest].concat() == tree.files["long"]);
    node.running.shutdown().await;
}
