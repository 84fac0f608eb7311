//! Tests that a slow read says where it waited: in its log line, in the histogram, and in its job.
//!
//! Each case makes readers wait at one gate. The reads carry the gate's name as their request's id, so that
//! their log lines are found.

use crate::common::{Node, Tree, body, content, index_bucket};
use fletch_api::{headers, routes};
use fletch_bounds::Gate;
use fletch_core::{Hash, Root};
use fletch_testkit::{Backing, EmulatorConfig, Fault, OriginEmulator};
use parking_lot::Mutex;
use reqwest::{Response, StatusCode};
use serde_json::Value;
use std::{
    io,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};
use tempfile::TempDir;

const FILES: [&str; 16] =
    ["f0", "f1", "f2", "f3", "f4", "f5", "f6", "f7", "f8", "f9", "f10", "f11", "f12", "f13", "f14", "f15"];
/// Far longer than a wait, for a loaded machine.
const SOON: Duration = Duration::from_secs(60);

/// The lines that this process logs, as JSON.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Returns the log of this process, which is started now if need be.
    fn of_process() -> Self {
        static LOG: OnceLock<Log> = OnceLock::new();
        let start = || {
            let log = Log::default();
            let writer = log.clone();
            let builder = tracing_subscriber::fmt().json().with_env_filter("info");
            builder.with_writer(move || writer.clone()).try_init().expect("no other test logs");
            log
        };
        LOG.get_or_init(start).clone()
    }

    /// Returns the slow-read lines of a request: each one's gate, and the line.
    fn slow_reads(&self, id: &str) -> Vec<(String, Value)> {
        let bytes = self.0.lock().clone();
        let lines = String::from_utf8(bytes).expect("text");
        let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("json"));
        let is_of = |line: &Value| {
            let mut spans = line["spans"].as_array().cloned().unwrap_or_default();
            spans.push(line["span"].clone());
            spans.iter().any(|span| span["name"] == "request" && span["id"] == id)
        };
        let gate = |line: &Value| line["fields"]["gate"].as_str().map(str::to_owned);
        lines.filter(is_of).filter_map(|line| Some((gate(&line)?, line))).collect()
    }
}

/// A bucket with small files, and the settings of a server that may read it.
struct Bucket {
    tree: Tree,
    store: OriginEmulator,
    root: Root,
    settings: TempDir,
}

impl Bucket {
    /// `pace` are further lines of the `[[origin]]`.
    async fn new(pace: &str) -> Self {
        let tree = Tree::new((0u64..).zip(FILES).map(|(seed, name)| (name, content(seed + 50, 30_000))));
        let backing = Backing::Directory(tree.dir.path().to_owned());
        let store = OriginEmulator::start(EmulatorConfig::default(), backing);
        let root = index_bucket(&tree, &store).await;
        let settings = tempfile::tempdir().expect("tempdir");
        let text = format!(
            "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\nregion = \
                \"us-east-1\"\ncredentials = \"anonymous\"\n{pace}",
            store.uri(),
            store.endpoint()
        );
        std::fs::write(settings.path().join("f.toml"), text).expect("write");
        Bucket { tree, store, root, settings }
    }

    async fn node(&self, more: &[&str]) -> Node {
        let config = format!("--config={}", self.settings.path().join("f.toml").display());
        let mut args = vec![config.as_str(), "--cache-size=0", "--log-slow-read=200ms"];
        args.extend(more);
        let node = Node::start(&args).await;
        node.register("d", &self.store.uri(), None).await;
        node
    }

    async fn get(&self, node: &Node, id: &str, name: &str) -> Response {
        let chunk = routes::chunk(self.root, Hash::of(&self.tree.files[name]));
        node.get(&chunk).header(headers::REQUEST_ID, id).send().await.expect("answer")
    }

    /// Reads files at once, and checks their bytes.
    async fn read(&self, node: &Node, id: &str, names: &[&str]) {
        let reads = names.iter().map(|name| async move {
            let reply = self.get(node, id, name).await;
            assert_eq!(reply.headers()[headers::REQUEST_ID], id, "the client's id comes back");
            assert!(body(reply, StatusCode::OK).await == self.tree.files[*name], "{name}: other bytes");
        });
        futures::future::join_all(reads).await;
    }

    /// Reads pairs of files, one pair after the other, until a line names the gate: on a loaded machine the
    /// second request can come when the first one is through.
    async fn read_pairs(&self, node: &Node, log: &Log, gate: &str) {
        for pair in FILES.chunks(2) {
            self.read(node, gate, pair).await;
            if log.slow_reads(gate).iter().any(|(named, _)| named == gate) {
                break;
            }
        }
    }

    fn stall_once(&self, names: &[&str]) {
        for name in names {
            self.store.set_fault(name, Fault::Stall, Some(1));
        }
    }
}

/// Checks that a log line of the request names the gate, and that the histogram counts it.
async fn named(log: &Log, node: &Node, gate: &str) {
    let begun = Instant::now();
    loop {
        let lines = log.slow_reads(gate);
        let line = lines.iter().find(|(named, _)| named == gate);
        if let Some((_, line)) = line {
            let waits = line["fields"]["waits"].as_str().expect("all gates");
            assert!(waits.starts_with(gate), "{waits}");
            break;
        }
        assert!(begun.elapsed() < SOON, "no line names {gate}: {lines:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let count = format!("fletch_read_wait_seconds_count{{gate=\"{gate}\"}}");
    assert!(node.metric(&count).await > 0, "{gate} is not counted");
}

#[test]
fn every_gate_is_documented() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/OPERATIONS.md"));
    let page = page.expect("the page");
    let table = page.split_once("### Slow reads").expect("the section").1;
    for gate in Gate::ALL {
        let row = format!("\n| `{}` | ", gate.as_str());
        assert!(table.contains(&row), "{row}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_read_names_the_gate_at_which_it_waited() {
    let log = Log::of_process();

    // A store that answers nothing for a third of io.timeout.
    let bucket = Bucket::new("").await;
    let node = bucket.node(&["--io-timeout=3s"]).await;
    bucket.stall_once(&["f0"]);
    bucket.read(&node, "origin", &["f0"]).await;
    named(&log, &node, "origin").await;
    // One fetch for two readers.
    bucket.stall_once(&["f1"]);
    bucket.read(&node, "shared_fetch", &["f1", "f1"]).await;
    named(&log, &node, "shared_fetch").await;
    // A store that asks to come again in a second.
    bucket.store.set_fault("f2", Fault::SlowDown { retry_after_s: Some(1) }, Some(1));
    bucket.read(&node, "retry", &["f2"]).await;
    named(&log, &node, "retry").await;
    node.running.shutdown().await;

    // Two objects that hang, and one call for such objects at a time.
    let node = bucket.node(&["--io-timeout=6s", "--limits-origin-requests-per-origin=4"]).await;
    for name in ["f3", "f4", "f5"] {
        bucket.store.set_fault(name, Fault::Stall, Some(2));
    }
    let reads = ["f3", "f4", "f5"].map(|name| bucket.get(&node, "hung_objects", name));
    futures::future::join_all(reads).await;
    named(&log, &node, "hung_objects").await;
    node.running.shutdown().await;

    // The tables are cold, and their part does not come at once.
    let node = bucket.node(&["--io-timeout=3s"]).await;
    node.resolve("d", "latest").await;
    bucket.store.set_fault("fletch", Fault::Stall, Some(1));
    bucket.read(&node, "tables", &["f6"]).await;
    named(&log, &node, "tables").await;
    bucket.store.clear_faults();
    node.running.shutdown().await;

    // One request to the store at a time, which takes half a second: the first read has it, the second one
    // the turn.
    let node = bucket.node(&["--limits-origin-requests-per-origin=1"]).await;
    bucket.read(&node, "warm", &["f15"]).await;
    bucket.store.set_bandwidth(Some(60_000));
    bucket.read_pairs(&node, &log, "tenant_origin_requests").await;
    named(&log, &node, "tenant_origin_requests").await;
    bucket.read(&node, "turn", &FILES[8..]).await;
    named(&log, &node, "turn").await;
    bucket.store.set_bandwidth(None);
    node.running.shutdown().await;

    // A pace of two requests a second.
    let bucket = Bucket::new("requests_per_second = 2\n").await;
    let node = bucket.node(&[]).await;
    bucket.read_pairs(&node, &log, "origin_pace").await;
    named(&log, &node, "origin_pace").await;
    node.running.shutdown().await;

    // The `[[origin]]` lets one request be under way.
    let bucket = Bucket::new("concurrency = 1\n").await;
    let node = bucket.node(&[]).await;
    bucket.read(&node, "warm", &["f15"]).await;
    bucket.store.set_bandwidth(Some(60_000));
    bucket.read_pairs(&node, &log, "origin_room").await;
    named(&log, &node, "origin_room").await;
    node.running.shutdown().await;
}

/// Replies that nobody reads hold the memory for chunks.
#[tokio::test(flavor = "multi_thread")]
async fn a_read_that_waits_for_memory_names_it() {
    let log = Log::of_process();
    let mut tree = Tree::new([]);
    for i in 0..20 {
        let (name, bytes) = (format!("f{i:02}"), content(100 + i, 4 << 20));
        std::fs::write(tree.path(&name), &bytes).expect("write");
        tree.files.insert(name, bytes);
    }
    let root = tree.index().root();
    let memory = ["--memory=64MiB", "--memory-prefetch=0", "--cache-size=0", "--limits-send-timeout=10m"];
    let more: Vec<&str> = memory.into_iter().chain(["--log-slow-read=200ms", "--io-timeout=4m"]).collect();
    let node = Node::serving(&tree, &more).await;
    let get = |bytes: &Vec<u8>| {
        node.get(&routes::chunk(root, Hash::of(bytes))).header(headers::REQUEST_ID, "chunk_memory").send()
    };
    let mut unread = Vec::new();
    for bytes in tree.files.values() {
        match tokio::time::timeout(Duration::from_secs(1), get(bytes)).await {
            Ok(reply) => unread.push(reply.expect("answer")),
            // It waits for memory.
            Err(_) => break,
        }
    }
    assert!(unread.len() < 20, "the memory holds 64 MiB");
    drop(unread);
    named(&log, &node, "chunk_memory").await;
    node.running.shutdown().await;
}
