//! Tests TLS: who is let in, what changed files do, and the bounds of connections during handshakes.

use crate::common::{Node, Tree, body, content, problem};
use fletch_api::{Code, SPEAKS_TLS};
use fletch_client::{Client, ClientConfig, ClientError, Endpoint, TlsOptions};
use fletch_testkit::tls::{Authority, PemPair};
use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};

/// Longer than anything here takes.
const SOON: Duration = Duration::from_secs(20);
const NAMES: [&str; 2] = ["localhost", "127.0.0.1"];

/// The files of a server and of a client, made by one authority.
struct Certificates {
    dir: TempDir,
    authority: Authority,
}

impl Certificates {
    fn new() -> Self {
        let (dir, authority) = (tempfile::tempdir().expect("tempdir"), Authority::new("one"));
        let made = Certificates { dir, authority };
        let _ = made.authority.server(&NAMES, 4000).write(made.dir.path(), "server");
        let _ = made.authority.client("reader").write(made.dir.path(), "client");
        made.put("ca.pem", &made.authority.pem());
        made
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn put(&self, name: &str, text: &str) {
        let part = self.path("part");
        std::fs::write(&part, text).expect("write");
        std::fs::rename(part, self.path(name)).expect("rename");
    }

    /// Returns the flags of a server.
    fn flags(&self, with_clients: bool) -> Vec<String> {
        let flag = |flag: &str, name: &str| format!("--tls-{flag}={}", self.path(name).display());
        let mut flags = vec![flag("cert-file", "server.crt"), flag("key-file", "server.key")];
        flags.extend(with_clients.then(|| flag("client-ca-file", "ca.pem")));
        flags
    }

    async fn start(&self, with_clients: bool, more: &[&str]) -> Node {
        let flags = self.flags(with_clients);
        let flags: Vec<&str> = flags.iter().map(String::as_str).chain(more.iter().copied()).collect();
        let mut node = Node::start(&flags).await;
        node.http = self.http(with_clients);
        node
    }

    /// Returns a client of another library, which trusts the authority.
    fn http(&self, with_certificate: bool) -> reqwest::Client {
        let ca = reqwest::Certificate::from_pem(self.authority.pem().as_bytes()).expect("a certificate");
        let mut http = reqwest::Client::builder().tls_certs_only([ca]);
        if with_certificate {
            let both = ["client.crt", "client.key"].map(|n| std::fs::read(self.path(n)).expect("read"));
            http = http.identity(reqwest::Identity::from_pem(&both.concat()).expect("identity"));
        }
        http.build().expect("client")
    }

    fn options(&self, with_certificate: bool) -> TlsOptions {
        let of = |name: &str| with_certificate.then(|| self.path(name));
        let ca_file = Some(self.path("ca.pem"));
        TlsOptions { ca_file, cert_file: of("client.crt"), key_file: of("client.key") }
    }
}

/// Returns a client that makes a connection for each request.
fn client(url: &str, tls: TlsOptions) -> Client {
    let endpoint: Endpoint = url.parse().expect("endpoint");
    let config = ClientConfig {
        tls,
        connections_idle_max: 0,
        io_timeout: Duration::from_secs(10),
        ..ClientConfig::new(endpoint, "loader")
    };
    Client::new(config).expect("client")
}

async fn told(client: &Client) -> (ClientError, Duration) {
    let begun = Instant::now();
    (client.info().await.expect_err("refused"), begun.elapsed())
}

/// Reads every file of the tree, and compares the bytes.
async fn read_all(client: &Client, tree: &Tree) {
    let at = client.resolve(&"d".parse().expect("name"), "latest").await.expect("resolved");
    for (path, bytes) in tree.files.iter().filter(|(_, bytes)| !bytes.is_empty()) {
        let len = u32::try_from(bytes.len()).expect("short");
        let got = client.file_unchecked(at.root, path, len, None).await.expect(path);
        assert!(got == *bytes, "{path}: other bytes");
    }
}

#[tokio::test]
async fn a_tree_is_read_over_tls_and_each_refusal_says_what_to_do() {
    let (made, tree) = (Certificates::new(), Tree::usual());
    tree.index();
    let node = made.start(false, &[]).await;
    node.register("d", &tree.uri(), None).await;
    let url = node.running.url();
    assert!(url.starts_with("https://127.0.0.1:"), "{url}");
    read_all(&client(&url, made.options(false)), &tree).await;
    // The unix socket stays plain.
    let socket = node.running.socket.clone().expect("a socket");
    read_all(&client(&format!("unix:{}", socket.display()), made.options(false)), &tree).await;

    let (unknown, took) = told(&client(&url, TlsOptions::default())).await;
    assert!(unknown.to_string().contains("is not signed by a known CA"), "{unknown}");
    assert!(unknown.parts().1.is_some_and(|advice| advice.contains("--ca-file")), "{unknown}");
    assert!(unknown.is_unreachable() && took < Duration::from_secs(5), "at once, after {took:?}");
    let (plain, _) = told(&client(&url.replace("https", "http"), TlsOptions::default())).await;
    assert!(plain.to_string().contains("speaks TLS") && plain.to_string().contains("https://"), "{plain}");
    let other = made.authority.server(&["cache.example"], 4000);
    let _ = other.write(made.dir.path(), "server");
    let second = made.start(false, &[]).await;
    let (name, _) = told(&client(&second.running.url(), made.options(false))).await;
    assert!(
        name.to_string().contains("is for other names (") && name.to_string().contains("cache.example"),
        "{name}"
    );
    let expired = made.authority.server(&NAMES, 2002);
    let _ = expired.write(made.dir.path(), "server");
    let third = made.start(false, &[]).await;
    let (expired, _) = told(&client(&third.running.url(), made.options(false))).await;
    assert!(expired.to_string().contains("has expired"), "{expired}");
}

#[tokio::test]
async fn a_client_that_speaks_tls_to_a_plain_port_is_told() {
    let node = Node::start(&[]).await;
    let url = node.running.url().replace("http://", "https://");
    let (plain, _) = told(&client(&url, TlsOptions::default())).await;
    assert!(plain.to_string().contains("does not speak TLS"), "{plain}");
    let half = TlsOptions { cert_file: Some("/absent".into()), ..TlsOptions::default() };
    let endpoint: Endpoint = url.parse().expect("endpoint");
    let config = ClientConfig { tls: half, ..ClientConfig::new(endpoint, "cli") };
    let absent = Client::new(config).expect_err("no key").to_string();
    assert!(absent.contains("--key-file"), "{absent}");
}

#[tokio::test]
async fn with_client_cas_every_request_but_a_probe_needs_a_certificate() {
    let (made, tree) = (Certificates::new(), Tree::usual());
    tree.index();
    let node = made.start(true, &[]).await;
    node.register("d", &tree.uri(), None).await;
    read_all(&client(&node.running.url(), made.options(true)), &tree).await;

    let without = made.http(false);
    for path in ["/livez", "/startupz", "/readyz"] {
        let answer = without.get(node.url(path)).send().await.expect("answer");
        assert_eq!(body(answer, reqwest::StatusCode::OK).await, b"ok\n", "{path}");
    }
    for path in ["/v1/info", "/v1/datasets", "/metrics", "/", "/v1/openapi.json"] {
        let answer = without.get(node.url(path)).send().await.expect("answer");
        problem(answer, Code::CertificateRequired).await;
    }
    let (refused, _) = told(&client(&node.running.url(), made.options(false))).await;
    assert!(refused.is_denied() && refused.to_string().contains("--cert-file"), "{refused}");
    let stranger = Authority::new("another").client("stranger");
    let (cert, key) = stranger.write(made.dir.path(), "stranger");
    let options = TlsOptions { cert_file: Some(cert), key_file: Some(key), ..made.options(true) };
    let (refused, _) = told(&client(&node.running.url(), options)).await;
    assert!(refused.to_string().contains("rejects the certificate of this client"), "{refused}");
}

/// Puts files into a new directory, and lets the link `..data` lead to it, as Kubernetes does for a Secret.
fn swap(dir: &Path, version: &str, pair: &PemPair, ca: &str) {
    let new = dir.join(version);
    std::fs::create_dir(&new).expect("mkdir");
    for (name, text) in [("tls.crt", &*pair.cert), ("tls.key", &pair.key), ("ca.crt", ca)] {
        std::fs::write(new.join(name), text).expect("write");
        let link = dir.join(name);
        if !link.exists() {
            std::os::unix::fs::symlink(Path::new("..data").join(name), link).expect("symlink");
        }
    }
    std::os::unix::fs::symlink(version, dir.join("..next")).expect("symlink");
    std::fs::rename(dir.join("..next"), dir.join("..data")).expect("rename");
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_and_cas_rotate_under_readers() {
    let (made, tree) = (Certificates::new(), Tree::new([("a", content(1, 70_000)), ("b", content(2, 90))]));
    tree.index();
    let (served, held) = (tempfile::tempdir().expect("tempdir"), tempfile::tempdir().expect("tempdir"));
    let (next, both) = (Authority::new("two"), |a: &Authority, b: &Authority| a.pem() + &b.pem());
    let (one, old_client) = (made.authority.server(&NAMES, 3001), made.authority.client("reader"));
    swap(served.path(), "1", &one, &made.authority.pem());
    swap(held.path(), "1", &old_client, &made.authority.pem());
    let at = |dir: &TempDir, name: &str| dir.path().join(name);
    let flag = |flag: &str, name: &str| format!("--tls-{flag}={}", at(&served, name).display());
    let flags = [flag("cert-file", "tls.crt"), flag("key-file", "tls.key"), flag("client-ca-file", "ca.crt")];
    let mut node = Node::start(&flags.each_ref().map(String::as_str)).await;
    node.http = made.http(true);
    node.register("d", &tree.uri(), None).await;
    let options = TlsOptions {
        ca_file: Some(at(&held, "ca.crt")),
        cert_file: Some(at(&held, "tls.crt")),
        key_file: Some(at(&held, "tls.key")),
    };
    let reader = client(&node.running.url(), options);
    let expires = "fletch_tls_certificate_expires_timestamp_seconds";
    let errors = "fletch_tls_reload_errors_total";
    let (first, begun) = (node.metric(expires).await, Instant::now());
    // First both sides trust both authorities; then they have new certificates; then the old one is gone.
    let two = next.server(&NAMES, 3002);
    let steps: [(&PemPair, PemPair, String); 3] = [
        (&one, old_client, both(&made.authority, &next)),
        (&two, next.client("reader"), both(&made.authority, &next)),
        (&two, next.client("reader"), next.pem()),
    ];
    for (i, (server_pair, client_pair, ca)) in steps.iter().enumerate() {
        let version = (i + 2).to_string();
        swap(served.path(), &version, server_pair, ca);
        swap(held.path(), &version, client_pair, ca);
        let until = Instant::now() + Duration::from_millis(2500);
        while Instant::now() < until {
            read_all(&reader, &tree).await;
        }
    }
    // The old authority is not trusted any more.
    let (cert, key) = made.authority.client("reader").write(made.dir.path(), "client");
    let ca_file = Some(at(&held, "ca.crt"));
    let old = TlsOptions { ca_file, cert_file: Some(cert), key_file: Some(key) };
    let (refused, _) = told(&client(&node.running.url(), old)).await;
    assert!(refused.to_string().contains("rejects the certificate of this client"), "{refused}");

    // A key that does not fit changes nothing, and one line of the metrics says so.
    let ca = reqwest::Certificate::from_pem(next.pem().as_bytes()).expect("a certificate");
    let pem = steps[2].1.cert.clone() + &steps[2].1.key;
    let identity = reqwest::Identity::from_pem(pem.as_bytes()).expect("identity");
    node.http = reqwest::Client::builder().tls_certs_only([ca]).identity(identity).build().expect("client");
    assert_eq!((node.metric(expires).await > first, node.metric(errors).await), (true, 0));
    let broken = PemPair { key: one.key.clone(), ..two.clone() };
    swap(served.path(), "broken", &broken, &next.pem());
    while node.metric(errors).await == 0 {
        assert!(begun.elapsed() < 3 * SOON, "the fault is not counted");
        sleep(Duration::from_millis(50)).await;
    }
    read_all(&reader, &tree).await;
}

async fn connect(node: &Node) -> TcpStream {
    TcpStream::connect(node.addr()).await.expect("connect")
}

/// Sends bytes, and returns everything up to the end of the connection.
async fn send(mut stream: TcpStream, bytes: &[u8]) -> String {
    stream.write_all(bytes).await.expect("write");
    let mut got = Vec::new();
    drop(timeout(SOON, stream.read_to_end(&mut got)).await.expect("an end in time"));
    String::from_utf8_lossy(&got).into_owned()
}

#[tokio::test]
async fn what_is_no_tls_is_answered_or_closed_in_time() {
    let made = Certificates::new();
    let node = made.start(false, &["--limits-head-timeout=1s"]).await;
    let got = send(connect(&node).await, b"GET /v1/info HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    assert!(got.starts_with("HTTP/1.1 400") && got.ends_with(&format!("{SPEAKS_TLS}\n")), "{got}");
    let begun = Instant::now();
    assert_eq!(send(connect(&node).await, b"").await, "", "a silent peer");
    assert!((Duration::from_millis(900)..SOON / 2).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    assert_eq!(send(connect(&node).await, b"\0garbage").await, "");
    // A record that never ends.
    let begun = Instant::now();
    assert_eq!(send(connect(&node).await, b"\x16\x03\x01\x02\0\x01").await, "");
    assert!(begun.elapsed() < SOON / 2, "{:?}", begun.elapsed());
    assert!(node.metric("fletch_connections_closed_total{reason=\"handshake\"}").await >= 2);
    assert!(node.metric("fletch_connections_closed_total{reason=\"not_proven\"}").await >= 2);
}

#[tokio::test]
async fn i6_silent_connections_do_not_shut_out_readers_and_probes() {
    let made = Certificates::new();
    let node = made.start(false, &["--limits-connections=100"]).await;
    let mut silent = Vec::new();
    for i in 0..200 {
        let mut stream = connect(&node).await;
        if i % 2 == 0 {
            stream.write_all(b"\x16\x03\x01\x02\0").await.expect("write");
        }
        silent.push(stream);
    }
    for path in ["/livez", "/v1/info"] {
        let begun = Instant::now();
        let answer = made.http(false).get(node.url(path)).send().await.expect("answer");
        assert_eq!(answer.status(), 200, "{path}");
        assert!(begun.elapsed() < Duration::from_secs(2), "{path}: {:?}", begun.elapsed());
    }
}

#[tokio::test]
async fn i6_the_probe_lane_speaks_tls() {
    let (made, listener) = (Certificates::new(), TcpListener::bind("127.0.0.1:0").await.expect("bind"));
    let endpoint = format!("http://{}", listener.local_addr().expect("addr"));
    made.put(
        "f.toml",
        &format!(
            "[[origin]]\nprefix = \"s3://silent\"\nendpoint = \"{endpoint}\"\nallow_http = true\n\
             region = \"x\"\ncredentials = \"anonymous\"\n"
        ),
    );
    let config = format!("--config={}", made.path("f.toml").display());
    let node = made.start(false, &["--limits-connections=1", "--limits-grace=1s", &config]).await;
    node.register("s", "s3://silent/data", None).await;
    // The only connection runs a request that never ends.
    let path = fletch_api::routes::manifest(fletch_core::Root(fletch_core::Hash::of(b"x")));
    let mut waits = tokio::task::JoinSet::new();
    waits.spawn(node.get(&path).send());
    let _at_origin = listener.accept().await.expect("a call to the origin");
    for (path, status) in [("/livez", 200), ("/readyz", 200), ("/v1/info", 429)] {
        let answer = made.http(false).get(node.url(path)).send().await.expect("answer");
        assert_eq!(answer.status(), status, "{path}");
    }
    let got = send(connect(&node).await, b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    assert!(got.contains(SPEAKS_TLS), "{got}");
    waits.abort_all();
}

#[tokio::test]
async fn an_idle_connection_is_used_again() {
    let (made, tree) = (Certificates::new(), Tree::new([("a", content(1, 70_000))]));
    tree.index();
    let node = made.start(false, &[]).await;
    node.register("d", &tree.uri(), None).await;
    let config = ClientConfig {
        tls: made.options(false),
        ..ClientConfig::new(node.running.url().parse().expect("endpoint"), "loader")
    };
    let client = Client::new(config).expect("client");
    for _ in 0..3 {
        read_all(&client, &tree).await;
        // Longer than the time after which a connection frees its buffers.
        sleep(Duration::from_millis(1600)).await;
    }
    // One connection of each client, at most.
    assert!(node.metric("fletch_connections{of=\"tcp\"}").await <= 2);
}
