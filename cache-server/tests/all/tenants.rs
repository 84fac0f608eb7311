//! Tests I6 and I7 between tenants: what one tenant asks for, holds or keeps shuts out no other.

use crate::common::{Node, Tree, body, content, epochs, index_bucket, problem};
use fletch_api::{Code, OrderKind, StartJob, routes};
use fletch_client::{
    Client, ClientConfig, TokenSource,
    epochs::{Next, ReceivedSum},
};
use fletch_core::{Hash, Root, plan::Tail};
use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator};
use reqwest::{Method, RequestBuilder, StatusCode};
use std::{fs, path::PathBuf, time::Duration};
use tempfile::TempDir;
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpSocket, TcpStream},
};

/// The longest wait for what a loaded machine does late.
const SOON: Duration = Duration::from_secs(60);

/// A server with the tenants `a`, `b` and `z` (an admin), which share one domain.
struct Shared {
    node: Node,
    dir: TempDir,
}

fn token(tenant: &str, role: &str) -> String {
    let hash = Hash::of(tenant.as_bytes());
    format!("[[token]]\nhash = \"{hash}\"\ntenant = \"{tenant}\"\ndomain = \"d\"\nrole = \"{role}\"\n")
}

fn tokens(quotas: &str) -> String {
    token("a", "user") + &token("b", "user") + &token("z", "admin") + quotas
}

impl Shared {
    async fn new(quotas: &str, more: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("tempdir");
        fs::create_dir(dir.path().join("data")).expect("mkdir");
        fs::write(dir.path().join("tokens.toml"), tokens(quotas)).expect("write");
        let args = Shared::args(&dir, more);
        let node = Node::start(&args.iter().map(String::as_str).collect::<Vec<_>>()).await;
        Shared { node, dir }
    }

    fn args(dir: &TempDir, more: &[&str]) -> Vec<String> {
        let mut args = vec![
            format!("--auth-tokens={}", dir.path().join("tokens.toml").display()),
            format!("--local-dirs={}=*", dir.path().join("data").display()),
        ];
        args.extend(more.iter().map(|s| (*s).to_owned()));
        args
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// Replaces the tokens file, and waits until the server uses the new one.
    async fn set_tokens(&self, text: &str) {
        let before = self.metric("fletch_auth_reloads_total{result=\"ok\"}").await;
        let part = self.dir.path().join("part");
        fs::write(&part, text).expect("write");
        fs::rename(&part, self.dir.path().join("tokens.toml")).expect("rename");
        self.until("fletch_auth_reloads_total{result=\"ok\"}", |n| n > before).await;
    }

    fn ask(&self, token: &str, method: Method, path: &str) -> RequestBuilder {
        self.node.ask(method, path).bearer_auth(token).header("content-type", "application/json")
    }

    fn get(&self, token: &str, path: &str) -> RequestBuilder {
        self.ask(token, Method::GET, path)
    }

    async fn register(&self, token: &str, what: serde_json::Value) {
        let r = self.ask(token, Method::POST, "/v1/datasets").body(what.to_string()).send().await;
        let r = r.expect("answer");
        assert_eq!(r.status(), 201, "{}", r.text().await.expect("text"));
    }

    /// Returns a value of `/metrics`, or 0 if it is not there.
    async fn metric(&self, begins: &str) -> u64 {
        let r = self.get("z", "/metrics").send().await.expect("answer");
        let text = r.text().await.expect("text");
        let line = text.lines().find(|l| l.starts_with(begins));
        line.map_or(0, |l| l.rsplit(' ').next().expect("value").parse().expect("a number"))
    }

    async fn until(&self, begins: &str, holds: impl Fn(u64) -> bool) {
        let reached = async {
            while !holds(self.metric(begins).await) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        assert!(tokio::time::timeout(SOON, reached).await.is_ok(), "{begins}: {}", self.metric(begins).await);
    }

    fn client(&self, tenant: &str) -> Client {
        let path = self.dir.path().join(format!("{tenant}.token"));
        fs::write(&path, tenant).expect("write");
        let endpoint = self.node.running.url().parse().expect("url");
        let mut config = ClientConfig::new(endpoint, "loader");
        config.token = Some(TokenSource::File(path));
        Client::new(config).expect("client")
    }
}

fn used(tenant: &str, limit: &str) -> String {
    format!("fletch_tenant_used{{limit=\"{limit}\",tenant=\"{tenant}\"}}")
}

fn refused(tenant: &str, limit: &str) -> String {
    format!("fletch_refused_total{{limit=\"{limit}\",tenant=\"{tenant}\"}}")
}

/// Invented job names on an unknown root leave no job, no permit and no account.
#[tokio::test(flavor = "multi_thread")]
async fn i7_nothing_is_remembered_of_a_request_whose_access_is_refused() {
    let shared = Shared::new("", &[]).await;
    let nowhere = Root(Hash::of(b"no such root"));
    let chunk = routes::chunk(nowhere, Hash::of(b"c"));
    for i in 0..1_000 {
        let paths = [&chunk, &routes::manifest(nowhere), &format!("/v1/versions/{nowhere}/files/x")];
        let r = shared.get("a", paths[i % 3]).header("fletch-job", format!("invented-{i}"));
        assert_eq!(r.send().await.expect("answer").status(), StatusCode::NOT_FOUND);
    }
    let items = "{\"items\":[{\"ordinal\":0}]}";
    let r = shared.ask("a", Method::POST, &routes::batch(nowhere)).header("fletch-job", "batch").body(items);
    problem(r.send().await.expect("answer"), Code::NotFound).await;
    for metric in ["fletch_jobs ", "fletch_requests_in_flight", &used("a", "jobs"), &used("a", "requests")] {
        assert_eq!(shared.metric(metric).await, 0, "{metric}");
    }
    shared.node.running.shutdown().await;
}

/// One tenant reads under many job names. It displaces its own idle jobs only, and all sums stay exact.
#[tokio::test(flavor = "multi_thread")]
async fn i8_thousands_of_job_names_of_one_tenant_displace_no_job_of_another() {
    let shared = Shared::new("", &["--limits-tenant-jobs=64"]).await;
    let tree = Tree::new_in(&shared.data(), [("a.bin", content(1, 50))]);
    let root = tree.index().root();
    shared.register("a", serde_json::json!({"name": "d", "uri": tree.uri()})).await;
    let chunk = routes::chunk(root, Hash::of(&tree.files["a.bin"]));
    let read = async |tenant: &str, job: &str| {
        let r = shared.get(tenant, &chunk).header("fletch-job", job).send().await.expect("answer");
        assert_eq!(body(r, StatusCode::OK).await.len(), 50);
    };
    read("b", "training").await;
    const NAMES: u64 = 2_000;
    for i in 0..NAMES {
        read("a", &format!("name-{i}")).await;
    }
    assert!(shared.metric(&used("a", "jobs")).await <= 64);
    assert_eq!(shared.metric(&used("b", "jobs")).await, 1);
    assert_eq!(shared.metric(&refused("a", "jobs")).await, 0, "idle jobs make room");
    let accounts = async |tenant: &str| {
        let text =
            shared.get(tenant, "/v1/accounts").send().await.expect("answer").text().await.expect("text");
        let all: fletch_api::Accounts = serde_json::from_str(&text).expect("accounts");
        let sum: u64 = all.accounts.iter().map(|a| a.bytes).sum();
        (all.accounts.len(), sum, all.accounts.iter().any(|a| a.key.job.as_str() == "training"))
    };
    let (rows, sum, _) = accounts("a").await;
    // Those of live jobs, and of few that were displaced lately; the others are one row.
    assert!(rows <= 2 * (64 + 256), "{rows} rows");
    assert_eq!(sum, 50 * NAMES, "every byte is counted once");
    assert_eq!(accounts("b").await, (1, 50, true));
    shared.node.running.shutdown().await;
}

/// Sends a request on a connection of its own whose reply nobody reads.
async fn unread(shared: &Shared, tenant: &str, path: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("socket");
    socket.set_recv_buffer_size(4 << 10).expect("a small buffer");
    let mut stream = socket.connect(shared.node.addr()).await.expect("connect");
    let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {tenant}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.expect("a head");
    stream
}

/// Replies that one tenant does not read hold its part of the permits. Another tenant reads all the time,
/// also when the first tenant is removed meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn i6_unread_replies_of_one_tenant_leave_the_others_their_permits() {
    let shared = Shared::new("", &["--limits-requests=12", "--limits-send-timeout=10m"]).await;
    let tree = Tree::new_in(&shared.data(), [("big", content(1, 24 << 20)), ("small", content(2, 50))]);
    let root = tree.index().root();
    shared.register("a", serde_json::json!({"name": "d", "uri": tree.uri()})).await;
    let big = format!("/v1/versions/{root}/files/big");
    let small = routes::chunk(root, Hash::of(&tree.files["small"]));
    let mut streams = Vec::new();
    for _ in 0..40 {
        streams.push(unread(&shared, "a", &big).await);
    }
    // Of twelve permits each of three tenants is guaranteed two.
    shared.until(&used("a", "requests"), |n| n == 8).await;
    shared.until(&refused("a", "requests"), |n| n == 32).await;
    let p = problem(shared.get("a", &small).send().await.expect("answer"), Code::Overloaded).await;
    assert!(p.detail.contains("8 requests") && p.detail.contains("kept for other tenants"), "{p}");
    for _ in 0..50 {
        let two = [shared.get("b", &small).send(), shared.get("b", &small).send()];
        for r in futures::future::join_all(two).await {
            assert_eq!(body(r.expect("answer"), StatusCode::OK).await.len(), 50);
        }
    }
    assert_eq!(shared.metric(&refused("b", "requests")).await, 0);
    // A tenant that is removed keeps its permits until its replies end, and is guaranteed nothing more.
    shared.set_tokens(&(token("b", "user") + &token("z", "admin"))).await;
    problem(shared.get("a", &small).send().await.expect("answer"), Code::Unauthorized).await;
    assert_eq!(shared.metric("fletch_requests_in_flight").await, 8);
    assert_eq!(body(shared.get("b", &small).send().await.expect("answer"), StatusCode::OK).await.len(), 50);
    drop(streams);
    shared.until("fletch_requests_in_flight", |n| n == 0).await;
    shared.node.running.shutdown().await;
}

/// Unread replies of one tenant hold its part of the memory for chunks. Another tenant's cold reads go on.
#[tokio::test(flavor = "multi_thread")]
async fn i6_unread_replies_of_one_tenant_leave_the_others_their_memory() {
    let more = [
        "--memory=64MiB",
        "--memory-prefetch=0",
        "--cache-size=0",
        "--io-timeout=4m",
        "--limits-send-timeout=10m",
    ];
    let shared = Shared::new("", &more).await;
    let mut tree = Tree::new_in(&shared.data(), []);
    for i in 0..20 {
        let (name, bytes) = (format!("f{i:02}"), content(100 + i, 4 << 20));
        fs::write(tree.path(&name), &bytes).expect("write");
        tree.files.insert(name, bytes);
    }
    let root = tree.index().root();
    shared.register("a", serde_json::json!({"name": "d", "uri": tree.uri()})).await;
    let chunks: Vec<_> =
        tree.files.values().map(|bytes| (routes::chunk(root, Hash::of(bytes)), bytes)).collect();
    let mut streams = Vec::new();
    for (path, _) in &chunks[..16] {
        streams.push(unread(&shared, "a", path).await);
        // The same chunk again takes no more memory.
        streams.push(unread(&shared, "a", path).await);
    }
    shared.until(&used("a", "memory_bytes"), |n| n >= 12 << 20).await;
    let go_on = async {
        for (path, bytes) in &chunks[16..] {
            let r = shared.get("b", path).send().await.expect("answer");
            assert!(body(r, StatusCode::OK).await == bytes[..]);
        }
    };
    tokio::time::timeout(SOON, go_on).await.expect("cold reads of another tenant go on");
    let (of_a, limit) =
        (shared.metric(&used("a", "memory_bytes")).await, shared.metric("fletch_memory_limit").await);
    assert!(of_a < limit / 2, "{of_a} of {limit}");
    assert_eq!(shared.metric("fletch_overloaded_total").await, 0);
    drop(streams);
    shared.until(&used("a", "memory_bytes"), |n| n == 0).await;
    shared.until("fletch_read_wait_seconds_count{gate=\"reply_memory\"}", |n| n > 0).await;
    shared.node.running.shutdown().await;
}

/// A quota bounds a tenant's own requests, although nobody else asks.
#[tokio::test(flavor = "multi_thread")]
async fn a_quota_of_requests_is_the_tenants_own_limit() {
    let quota = "[[tenant]]\nname = \"a\"\nrequests = 1\n";
    let shared = Shared::new(quota, &["--limits-send-timeout=10m"]).await;
    let tree = Tree::new_in(&shared.data(), [("big", content(1, 24 << 20))]);
    let root = tree.index().root();
    shared.register("a", serde_json::json!({"name": "d", "uri": tree.uri()})).await;
    let big = format!("/v1/versions/{root}/files/big");
    let stream = unread(&shared, "a", &big).await;
    shared.until(&used("a", "requests"), |n| n == 1).await;
    let p = problem(shared.get("a", &big).send().await.expect("answer"), Code::Overloaded).await;
    assert!(p.detail.contains("its limit") && p.hint.contains("quota"), "{p}");
    drop(stream);
    shared.until(&used("a", "requests"), |n| n == 0).await;
    shared.node.running.shutdown().await;
}

/// A server on which `d` is a dataset of small files.
async fn training(quotas: &str, more: &[&str]) -> (Shared, Tree) {
    let shared = Shared::new(quotas, more).await;
    let mut tree = Tree::new_in(&shared.data(), []);
    for i in 0..300 {
        let (name, bytes) = (format!("f{i:04}"), content(100 + i, 500));
        fs::write(tree.path(&name), &bytes).expect("write");
        tree.files.insert(name, bytes);
    }
    tree.index();
    shared.register("a", serde_json::json!({"name": "d", "uri": tree.uri()})).await;
    (shared, tree)
}

fn strict(name: &str) -> StartJob {
    epochs::ask(name, OrderKind::Strict, epochs::world(1, 8, Tail::Keep))
}

#[tokio::test(flavor = "multi_thread")]
async fn declared_jobs_are_bounded_for_each_tenant() {
    let quota = "[[tenant]]\nname = \"a\"\ndeclared_jobs = 5\n";
    let (shared, _tree) = training(quota, &["--limits-tenant-declared-jobs=7"]).await;
    let (a, b) = (shared.client("a"), shared.client("b"));
    let mut ids = Vec::new();
    for i in 0..5 {
        ids.push(a.declare(&strict(&format!("j-{i}"))).await.expect("declared").info().id.clone());
    }
    let sixth = async || {
        let body = serde_json::to_string(&strict("j-5")).expect("json");
        shared.ask("a", Method::POST, routes::JOBS).body(body).send().await.expect("answer")
    };
    let p = problem(sixth().await, Code::Overloaded).await;
    assert!(p.detail.contains("declared 5 jobs") && p.hint.contains("delete"), "{p}");
    // The same declaration again is no new job. Another tenant has its own limit.
    a.declare(&strict("j-0")).await.expect("known");
    for i in 0..7 {
        b.declare(&strict(&format!("j-{i}"))).await.expect("declared");
    }
    assert_eq!(shared.metric(&used("a", "declared_jobs")).await, 5);
    a.delete_job(&ids[2]).await.expect("deleted");
    shared.until(&used("a", "declared_jobs"), |n| n == 4).await;
    assert_eq!(sixth().await.status(), StatusCode::CREATED);
    assert!(shared.metric(&refused("a", "declared_jobs")).await >= 1);
    shared.node.running.shutdown().await;
}

/// A tenant whose records and ledgers are full is granted nothing more. It loses nothing: its acks are kept,
/// the epoch goes on after the quota was raised, and a restart counts the same bytes.
#[tokio::test(flavor = "multi_thread")]
async fn i2_an_epoch_whose_tenant_is_full_goes_on_after_the_quota_was_raised() {
    let quota = |bytes: u64| format!("[[tenant]]\nname = \"a\"\nstate = \"{bytes}B\"\n");
    let (shared, tree) = training(&quota(3_000), &[]).await;
    let (a, b) = (shared.client("a"), shared.client("b"));
    let job = a.declare(&strict("j")).await.expect("declared");
    let mut received = ReceivedSum::new(job.info().root);
    let (mut order, mut raised) = (Vec::new(), 0);
    loop {
        match job.reader(0, 0, 0).next(4).await {
            Ok(Next::Batch(batch)) => {
                epochs::ack(&job, &batch).await;
                job.held().release(0, 0, batch.token.lease);
                for sample in &batch.samples {
                    epochs::right(&tree, sample);
                    received.add(sample);
                    order.push(sample.entry);
                }
            }
            Ok(Next::Done) => break,
            Ok(other) => panic!("{other:?}"),
            Err(e) => {
                assert_eq!(e.code(), Some(Code::StateFull), "{e}");
                let (bytes, epochs) = (shared.metric(&used("a", "state_bytes")).await, job.current().await);
                let there = &epochs.expect("job").epochs[0];
                assert_eq!((there.acked, there.held), (order.len() as u64, 0), "no ack is lost");
                // A refused epoch begins nothing, and another tenant has its own bytes.
                let body = "{\"rank\":0,\"sequence\":1,\"want\":4}";
                let path = routes::epoch(&job.info().id, 1, "leases");
                let r = shared.ask("a", Method::POST, &path).body(body).send().await.expect("answer");
                let p = problem(r, Code::StateFull).await;
                assert!(
                    p.detail.contains(&bytes.to_string()) && p.hint.contains("fletch jobs delete"),
                    "{p}"
                );
                assert_eq!(job.current().await.expect("job").epochs.len(), 1);
                let other = b.declare(&strict("other")).await.expect("declared");
                assert!(matches!(other.reader(0, 0, 0).next(4).await, Ok(Next::Batch(_))));
                raised += 1;
                shared.set_tokens(&tokens(&quota(3_000 + raised * 2_500))).await;
            }
        }
    }
    assert!(raised >= 2, "it was full {raised} times");
    order.sort_unstable();
    assert_eq!(order, (0..300).collect::<Vec<u32>>(), "every sample once");
    assert!(received.agrees(&job.receipt(0).await.expect("finished")));
    let before = shared.metric(&used("a", "state_bytes")).await;
    let dir = shared.node.state.path().join("state/jobs").join(&job.info().id);
    let on_disk: u64 = fs::read_dir(&dir)
        .expect("the job's directory")
        .map(|file| file.expect("a file").metadata().expect("metadata").len())
        .sum();
    assert_eq!(before, on_disk);
    let Shared { node, dir } = shared;
    node.running.shutdown().await;
    let args = Shared::args(&dir, &[]);
    let node = Node::start_in(node.state, &args.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let shared = Shared { node, dir };
    assert_eq!(shared.metric(&used("a", "state_bytes")).await, before, "a restart counts the same");
    assert_eq!(shared.metric(&used("a", "declared_jobs")).await, 1);
    shared.client("a").delete_job(&job.info().id).await.expect("deleted");
    shared.until(&used("a", "state_bytes"), |n| n == 0).await;
    shared.node.running.shutdown().await;
}

/// A declaration that would exceed the bytes of its tenant declares nothing, and a long one is too long.
#[tokio::test(flavor = "multi_thread")]
async fn records_of_jobs_count_for_their_tenant() {
    let quota = "[[tenant]]\nname = \"a\"\nstate = \"4KiB\"\n";
    let more = ["--limits-job-bytes=64KiB", "--limits-tenant-state-bytes=1GiB"];
    let (shared, tree) = training(quota, &more).await;
    let mut long = strict("long");
    long.plan.base = fletch_api::PlanBase::Keys(tree.files.keys().cloned().collect());
    let declare = async |tenant: &str, what: &StartJob| {
        let body = serde_json::to_string(what).expect("json");
        shared.ask(tenant, Method::POST, routes::JOBS).body(body).send().await.expect("answer")
    };
    assert_eq!(declare("a", &strict("short")).await.status(), StatusCode::CREATED);
    let before = shared.metric(&used("a", "state_bytes")).await;
    assert!(before > 100, "{before}");
    assert_eq!(declare("a", &long).await.status(), StatusCode::CREATED);
    long.name = "long-2".parse().expect("a name");
    let p = problem(declare("a", &long).await, Code::StateFull).await;
    assert!(p.detail.contains("limit of 4096 bytes") && p.detail.contains("more would exceed"), "{p}");
    assert!(shared.metric(&used("a", "state_bytes")).await <= 4_096);
    assert!(shared.metric(&refused("a", "state_bytes")).await >= 1);
    assert_eq!(declare("b", &long).await.status(), StatusCode::CREATED, "another tenant has its own bytes");
    long.plan.base = fletch_api::PlanBase::Keys((0..9_000).map(|i| format!("key-{i}")).collect());
    let p = problem(declare("b", &long).await, Code::BodyTooLarge).await;
    assert!(p.hint.contains("limits.job_bytes"), "{p}");
    shared.node.running.shutdown().await;
}

/// A store that accepts connections and never replies.
async fn silent() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let url = format!("http://{}", listener.local_addr().expect("addr"));
    (listener, url)
}

/// One tenant's cold reads of a store that hangs wait for each other, and another tenant's cold reads go on.
#[tokio::test(flavor = "multi_thread")]
async fn i6_cold_reads_of_one_tenant_leave_the_others_their_origin_requests() {
    const ALL_TO_ONE: &str = "--limits-origin-requests-per-origin=100%";
    let (_listener, hanging) = silent().await;
    let files = |seed: u64| (0..20u64).map(move |i| (format!("f{i}"), content(seed + i, 5_000)));
    let tree_of = |seed| {
        let mut tree = Tree::new([]);
        for (name, bytes) in files(seed) {
            fs::write(tree.path(&name), &bytes).expect("write");
            tree.files.insert(name, bytes);
        }
        tree
    };
    let (slow, healthy) = (tree_of(100), tree_of(500));
    let slow_root = slow.index().root();
    let backing = Backing::Directory(healthy.dir.path().to_owned());
    let emulator = OriginEmulator::start(EmulatorConfig::default(), backing);
    let root = index_bucket(&healthy, &emulator).await;
    let config = tempfile::tempdir().expect("tempdir");
    let origin = |prefix: &str, endpoint: &str| {
        format!(
            "[[origin]]\nprefix = \"{prefix}\"\nendpoint = \"{endpoint}\"\nallow_http = true\nregion = \
             \"x\"\ncredentials = \"anonymous\"\ndomains = [\"d\"]\n"
        )
    };
    let file = config.path().join("f.toml");
    fs::write(&file, origin("s3://silent", &hanging) + &origin(&emulator.uri(), &emulator.endpoint()))
        .expect("write");
    let config = format!("--config={}", file.display());
    let shared =
        Shared::new("", &[&config, "--limits-origin-requests=12", "--io-timeout=30s", ALL_TO_ONE]).await;
    let tables = shared.data().join("slow");
    let copied = std::process::Command::new("cp").arg("-r").arg(slow.dir.path()).arg(&tables).status();
    assert!(copied.expect("cp").success());
    let at = tables.display().to_string();
    shared.register("a", serde_json::json!({"name": "slow", "uri": "s3://silent/x", "tables": at})).await;
    shared.register("b", serde_json::json!({"name": "healthy", "uri": emulator.uri()})).await;
    // The tables are read before, so that only chunks come from the stores.
    let warm = format!("/v1/versions/{root}/files/f0");
    assert_eq!(shared.get("b", &warm).send().await.expect("answer").status(), StatusCode::OK);
    let reads: Vec<_> = slow
        .files
        .values()
        .map(|bytes| shared.get("a", &routes::chunk(slow_root, Hash::of(bytes))))
        .collect();
    let tasks = tokio_util::task::TaskTracker::new();
    let hanging: Vec<_> = reads.into_iter().map(|r| tasks.spawn(r.send())).collect();
    shared.until(&used("a", "origin_requests"), |n| n == 8).await;
    let go_on = async {
        for bytes in healthy.files.values() {
            let r = shared.get("b", &routes::chunk(root, Hash::of(bytes))).send().await.expect("answer");
            assert!(body(r, StatusCode::OK).await == bytes[..]);
        }
    };
    tokio::time::timeout(Duration::from_secs(10), go_on).await.expect("cold reads of another tenant go on");
    assert_eq!(shared.metric(&used("a", "origin_requests")).await, 8, "the store still hangs");
    hanging.iter().for_each(|task| task.abort());
    shared.node.running.shutdown().await;
}
