//! Tests credentials that a user hands to the server: they are used at once, replaced, and never kept.

use crate::common::{Node, Tree, body, content, index_bucket, problem, settings};
use fletch_api::credentials::BODY_BYTES_MAX;
use fletch_api::dashboard::Alert;
use fletch_api::{Code, GiveCredentials, OriginOptions, RegisterDataset, Secrets, routes};
use fletch_client::{Client, ClientConfig, ClientError, Endpoint};
use fletch_core::{Hash, Root};
use fletch_server::app::{self, Running};
use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator};
use reqwest::{Method, StatusCode};
use std::{
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

const SECRET: &str = "hunter2-hunter2";
const OLD: &str = "AKIAOLDOLDOLDOLD0001";
const NEW: &str = "AKIANEWNEWNEWNEW0002";

async fn start(state: &Path, more: &[&str]) -> Running {
    let mut args = vec!["--listen=none", "--cache-size=0", "--io-timeout=5s"];
    args.extend(more);
    app::start(settings(state, &args).expect("settings")).await.expect("started")
}

fn client(running: &Running) -> Client {
    let endpoint: Endpoint = running.url().parse().expect("endpoint");
    Client::new(ClientConfig::new(endpoint, "cli")).expect("client")
}

struct Bucket {
    tree: Tree,
    emulator: OriginEmulator,
    root: Root,
}

impl Bucket {
    async fn new() -> Self {
        let files = ["a", "b", "c", "d"].into_iter().zip(0u64..);
        let tree = Tree::new(files.map(|(name, seed)| (name, content(seed + 40, 30_000))));
        let backing = Backing::Directory(tree.dir.path().to_owned());
        let emulator = OriginEmulator::start(EmulatorConfig::default(), backing);
        let root = index_bucket(&tree, &emulator).await;
        Bucket { tree, emulator, root }
    }

    fn given(&self, key_id: &str, expires_ns: Option<u64>) -> GiveCredentials {
        let secrets = [("aws_access_key_id", key_id), ("aws_secret_access_key", SECRET)];
        GiveCredentials {
            origin: self.emulator.uri(),
            options: OriginOptions {
                endpoint: Some(self.emulator.endpoint()),
                region: Some("us-east-1".to_owned()),
                allow_http: true,
                ..OriginOptions::default()
            },
            secrets: Secrets(secrets.map(|(key, value)| (key.to_owned(), value.to_owned())).into()),
            expires_ns,
        }
    }

    async fn register(&self, client: &Client) -> Result<(), ClientError> {
        let dataset = RegisterDataset {
            replace: false,
            check: false,
            name: "d".parse().expect("name"),
            uri: self.emulator.uri(),
            tables: None,
        };
        client.register(&dataset).await.map(|_| ())
    }

    async fn read(&self, client: &Client, name: &str) -> Result<(), ClientError> {
        let bytes = &self.tree.files[name];
        let len = u32::try_from(bytes.len()).expect("small");
        let got = client.chunk_unchecked(self.root, Hash::of(bytes), len).await?;
        assert!(got == *bytes, "{name}: other bytes");
        Ok(())
    }
}

fn now_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    u64::try_from(now.as_nanos()).expect("before 2500")
}

/// Returns every text below a directory that contains a secret or a key id.
fn leaks(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).expect("list").map(|e| e.expect("entry").path()) {
        if entry.is_dir() {
            found.extend(leaks(&entry));
        } else if let Ok(bytes) = std::fs::read(&entry) {
            let text = String::from_utf8_lossy(&bytes);
            if [SECRET, OLD, NEW].iter().any(|secret| text.contains(secret)) {
                found.push(entry.display().to_string());
            }
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn new_credentials_are_used_at_once_and_no_secret_is_kept() {
    let bucket = Bucket::new().await;
    bucket.emulator.require_key(Some(NEW));
    let state = tempfile::tempdir().expect("tempdir");
    let running = start(state.path(), &[]).await;
    let user = client(&running);
    assert_eq!(user.credentials().await.expect("own"), []);
    let error = bucket.register(&user).await.expect_err("nobody handed over credentials");
    assert_eq!(error.code(), Some(Code::UriNotAllowed));
    let text = error.to_string();
    assert!(text.contains(&bucket.emulator.uri()) && text.contains("run `fletch mount` again"), "{text}");

    let shown = user.give_credentials(&bucket.given(OLD, None)).await.expect("taken");
    assert_eq!((shown.identity.as_str(), shown.expires_ns), ("AKIA…0001", None));
    bucket.register(&user).await.expect("the origin is known now");
    let error = bucket.read(&user, "a").await.expect_err("the store knows another key");
    assert_eq!(error.code(), Some(Code::OriginDenied), "{error}");
    assert!(error.to_string().contains("fletch mount"), "{error}");
    user.give_credentials(&bucket.given(NEW, None)).await.expect("taken");
    bucket.read(&user, "a").await.expect("without a restart");

    // The version is open now. Its origins use what comes next, too.
    bucket.emulator.require_key(Some(OLD));
    assert_eq!(bucket.read(&user, "b").await.expect_err("rotated").code(), Some(Code::OriginDenied));
    let expires = now_ns() + 3_600_000_000_000;
    user.give_credentials(&bucket.given(OLD, Some(expires))).await.expect("taken");
    bucket.read(&user, "b").await.expect("the open version");
    let held = user.credentials().await.expect("own");
    assert_eq!((held.len(), held[0].expires_ns), (1, Some(expires)), "replaced: {held:?}");
    let expires_soon = async || {
        let problems = user.dashboard().await.expect("the page").problems;
        problems.iter().filter(|p| p.alert == Alert::FletchCredentialsExpire).count()
    };
    assert_eq!(expires_soon().await, 0, "an hour is left");
    let socket = running.socket.clone().expect("a socket");
    let http = reqwest::Client::builder().unix_socket(socket).build().expect("client");
    let page = http.get("http://s/metrics").send().await.expect("answer").text().await.expect("text");
    let metric = "fletch_credentials_expire_timestamp_seconds{origin=";
    let line = page.lines().find(|l| l.starts_with(metric)).expect("the metric");
    assert!(line.ends_with(&format!("}} {}", expires / 1_000_000_000)), "{line}");

    user.give_credentials(&bucket.given(OLD, Some(now_ns() - 90_000_000_000))).await.expect("taken");
    assert_eq!(expires_soon().await, 1);
    let asked = bucket.emulator.counts().requests();
    let error = bucket.read(&user, "c").await.expect_err("expired");
    assert_eq!(error.code(), Some(Code::OriginDenied), "{error}");
    let text = error.to_string();
    assert!(text.contains("expired 90s ago") && text.contains("run `fletch mount` again"), "{text}");
    assert_eq!(bucket.emulator.counts().requests(), asked, "no request is sent");
    user.give_credentials(&bucket.given(OLD, None)).await.expect("taken");
    bucket.read(&user, "c").await.expect("again");

    running.shutdown().await;
    assert_eq!(leaks(state.path()), Vec::<String>::new());
    let running = start(state.path(), &[]).await;
    let user = client(&running);
    assert_eq!(user.credentials().await.expect("own"), [], "in memory only");
    let error = bucket.read(&user, "d").await.expect_err("forgotten");
    assert_eq!(error.code(), Some(Code::OriginDenied), "{error}");
    assert!(error.to_string().contains("run `fletch mount` again to hand over"), "{error}");
    user.give_credentials(&bucket.given(OLD, None)).await.expect("taken");
    bucket.read(&user, "d").await.expect("as before");
    running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_several_users_takes_no_credentials() {
    let dir = tempfile::tempdir().expect("tempdir");
    let tokens = dir.path().join("tokens.toml");
    let line = format!("[[token]]\nhash = \"{}\"\ntenant = \"t\"\nrole = \"admin\"\n", Hash::of(b"tok"));
    std::fs::write(&tokens, line).expect("write");
    let tokens = format!("--auth-tokens={}", tokens.display());
    for args in [vec![], vec![tokens.as_str()]] {
        let mut node = Node::start(&args).await;
        if !args.is_empty() {
            node.sign("tok");
        }
        for method in [Method::GET, Method::PUT] {
            let asked = node.json(method, routes::CREDENTIALS, "{}").send().await.expect("answer");
            let refused = problem(asked, Code::Forbidden).await;
            assert!(refused.detail.contains("can have several"), "{refused:?}");
            assert!(refused.hint.contains("[[origin]]"), "{refused:?}");
        }
        node.running.shutdown().await;
    }
    let state = tempfile::tempdir().expect("tempdir");
    for args in [vec!["--auth-socket-admins=12345"], vec![tokens.as_str()]] {
        let running = start(state.path(), &args).await;
        let mut config = ClientConfig::new(running.url().parse().expect("endpoint"), "cli");
        config.token = Some(fletch_client::TokenSource::Text("tok".to_owned()));
        let error = Client::new(config).expect("client").credentials().await.expect_err("several users");
        assert_eq!(error.code(), Some(Code::Forbidden), "{error}");
        running.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_name_the_wrong_key_and_no_secret() {
    let settings = tempfile::tempdir().expect("tempdir");
    let file = settings.path().join("f.toml");
    std::fs::write(&file, "[[origin]]\nprefix = \"s3://configured/sets\"\n").expect("write");
    let state = tempfile::tempdir().expect("tempdir");
    let running = start(state.path(), &[&format!("--config={}", file.display())]).await;
    let socket = running.socket.clone().expect("a socket");
    let http = reqwest::Client::builder().unix_socket(socket).build().expect("client");
    let put = |text: String| {
        let url = format!("http://localhost{}", routes::CREDENTIALS);
        http.put(url).header("content-type", "application/json").body(text).send()
    };
    let give = |origin: &str, more: &str| {
        format!(
            "{{\"origin\": {origin:?}, \"secrets\": {{\"aws_access_key_id\": {OLD:?}, \
                \"aws_secret_access_key\": {SECRET:?}{more}}}}}"
        )
    };
    for (text, code, says) in [
        (
            give("s3://bkt", ", \"aws_sesion_token\": \"hunter2\""),
            Code::BadRequest,
            "secrets.aws_sesion_token: ",
        ),
        (give("s3://bkt/sets", ""), Code::BadRequest, "origin: "),
        (give("gs://bkt", ""), Code::BadRequest, "secrets.aws_access_key_id: "),
        (format!("{{\"origin\": \"s3://bkt\", \"secrets\": {SECRET:?}}}"), Code::BadRequest, "secrets: "),
        (SECRET.to_owned(), Code::BadRequest, "not valid JSON"),
        (give("s3://configured", ""), Code::Conflict, "s3://configured/sets"),
    ] {
        let told = problem(put(text).await.expect("answer"), code).await;
        assert!(told.detail.contains(says), "{told:?}");
        assert!(!format!("{told:?}").contains("hunter2"), "{told:?}");
    }
    // The server may close the connection before the client has sent all of a long body.
    if let Ok(answer) = put(give("s3://bkt", &" ".repeat(BODY_BYTES_MAX))).await {
        problem(answer, Code::BodyTooLarge).await;
    }
    body(put(give("s3://bkt", "")).await.expect("answer"), StatusCode::OK).await;
    let listed = http.get(format!("http://localhost{}", routes::CREDENTIALS)).send().await.expect("answer");
    let listed = String::from_utf8(body(listed, StatusCode::OK).await).expect("text");
    assert!(listed.contains("AKIA…0001") && !listed.contains("hunter2") && !listed.contains(OLD), "{listed}");
    tokio::time::sleep(Duration::from_millis(10)).await;
    running.shutdown().await;
}
