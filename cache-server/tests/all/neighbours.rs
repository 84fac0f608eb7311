//! Tests that a dataset stays readable while another dataset with the same root lies at an origin that does
//! not answer, and that unknown roots cost the origins a bounded number of calls.

use crate::common::{Node, Tree, body, content, index_bucket, problem};
use fletch_api::{Code, headers, routes};
use fletch_core::{Hash, Root};
use fletch_testkit::{Backing, EmulatorConfig, Fault, OriginEmulator};
use reqwest::StatusCode;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio_util::task::TaskTracker;

const FILES: usize = 24;
const NAMES: [&str; FILES] = [
    "f00", "f01", "f02", "f03", "f04", "f05", "f06", "f07", "f08", "f09", "f10", "f11", "f12", "f13", "f14",
    "f15", "f16", "f17", "f18", "f19", "f20", "f21", "f22", "f23",
];

fn tree() -> Tree {
    Tree::new((0u64..).zip(NAMES).map(|(seed, name)| (name, content(seed + 100, 30_000))))
}

/// The same files in a directory and in a bucket, each with its own tables.
struct Twins {
    near: Tree,
    far: Tree,
    bucket: Option<OriginEmulator>,
    root: Root,
    settings: TempDir,
    uri: String,
}

impl Twins {
    async fn new() -> Self {
        let (near, far) = (tree(), tree());
        let root = near.index_plain(near.dir.path()).root();
        let backing = Backing::Directory(far.dir.path().to_owned());
        let bucket = OriginEmulator::start(EmulatorConfig::default(), backing);
        assert_eq!(index_bucket(&far, &bucket).await, root, "the same content");
        let settings = tempfile::tempdir().expect("tempdir");
        let text = format!(
            "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\nregion = \
                \"us-east-1\"\ncredentials = \"anonymous\"\n",
            bucket.uri(),
            bucket.endpoint()
        );
        std::fs::write(settings.path().join("f.toml"), text).expect("write");
        let uri = bucket.uri();
        Twins { near, far, bucket: Some(bucket), root, settings, uri }
    }

    async fn node(&self, more: &[&str]) -> Node {
        let config = format!("--config={}", self.settings.path().join("f.toml").display());
        let mut args = vec![config.as_str(), "--cache-size=0"];
        args.extend(more);
        Node::start(&args).await
    }

    async fn register(&self, node: &Node, name: &str) {
        let uri = if name == "near" { self.near.uri() } else { self.uri.clone() };
        node.register(name, &uri, None).await;
    }

    fn bucket(&self) -> &OriginEmulator {
        self.bucket.as_ref().expect("running")
    }

    /// Makes the bucket hang, or refuse connections.
    fn break_bucket(&mut self, refuse: bool) {
        if refuse {
            self.bucket = None;
        } else {
            self.bucket().set_fault("", Fault::Stall, None);
        }
    }

    /// Reads a file's chunk through a dataset, and checks its bytes.
    async fn read(&self, node: &Node, dataset: Option<&str>, name: &str) {
        let bytes = &self.near.files[name];
        let mut request = node.get(&routes::chunk(self.root, Hash::of(bytes)));
        if let Some(dataset) = dataset {
            request = request.header(headers::DATASET, dataset);
        }
        let got = body(request.send().await.expect("answer"), StatusCode::OK).await;
        assert!(got == *bytes, "{name}: other bytes");
    }
}

/// The row of the table: whichever dataset was opened first, whichever the reader names.
#[tokio::test(flavor = "multi_thread")]
async fn a_dataset_is_read_past_a_neighbour_that_hangs_or_refuses() {
    for (refuse, far_first) in [(false, true), (false, false), (true, true)] {
        let mut twins = Twins::new().await;
        let node = twins.node(&["--io-timeout=60s"]).await;
        let mut order = ["far", "near"];
        if !far_first {
            order.reverse();
        }
        for name in order {
            twins.register(&node, name).await;
            node.resolve(name, "latest").await;
        }
        twins.break_bucket(refuse);
        let begun = Instant::now();
        for (i, name) in NAMES.iter().enumerate() {
            twins.read(&node, [Some("near"), Some("far"), None][i % 3], name).await;
        }
        // One read with the bucket's whole time would take half a minute.
        assert!(begun.elapsed() < Duration::from_secs(15), "{refuse} {far_first}: {:?}", begun.elapsed());
        assert_ne!(node.metric("fletch_origin_breaker_state{dataset=\"far\"}").await, 0);
        assert_eq!(node.metric("fletch_origin_breaker_state{dataset=\"near\"}").await, 0);
        assert_eq!(node.metric("fletch_origin_breakers_open ").await, 1);
        assert!(node.metric("fletch_origin_hedged_total").await <= 2 * 3 + 1);
        node.running.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_opens_past_a_neighbour_that_hangs() {
    let mut twins = Twins::new().await;
    twins.break_bucket(false);
    let node = twins.node(&["--io-timeout=60s"]).await;
    for name in ["far", "near"] {
        twins.register(&node, name).await;
    }
    let begun = Instant::now();
    for (dataset, name) in [(Some("near"), "f00"), (None, "f01"), (Some("far"), "f02"), (Some("no"), "f03")] {
        twins.read(&node, dataset, name).await;
        let table = node.get(&routes::manifest(twins.root)).send().await.expect("answer");
        body(table, StatusCode::OK).await;
    }
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    // Only the dataset itself knows its tags: the error names its origin, in a few seconds.
    let tag = node.get("/v1/datasets/far/versions/latest").send().await.expect("answer");
    let told = problem(tag, Code::OriginUnavailable).await;
    assert!(told.detail.contains(&twins.uri), "{told}");
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    let tag = node.get("/v1/datasets/near/versions/latest").send().await.expect("answer");
    body(tag, StatusCode::OK).await;
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_silent_homes_are_both_named_in_time() {
    let twins = Twins::new().await;
    let second = OriginEmulator::start(
        EmulatorConfig { bucket: "second".into(), ..EmulatorConfig::default() },
        Backing::Directory(twins.far.dir.path().to_owned()),
    );
    let file = twins.settings.path().join("f.toml");
    let text = std::fs::read_to_string(&file).expect("settings");
    let more =
        text.replace(&twins.uri, &second.uri()).replace(&twins.bucket().endpoint(), &second.endpoint());
    std::fs::write(&file, text + &more).expect("write");
    let node = twins.node(&["--io-timeout=4s"]).await;
    twins.register(&node, "far").await;
    node.register("second", &second.uri(), None).await;
    for name in ["far", "second"] {
        node.resolve(name, "latest").await;
    }
    // Both have been a source of a chunk.
    twins.read(&node, Some("far"), "f00").await;
    twins.read(&node, Some("second"), "f01").await;
    twins.bucket().set_fault("", Fault::Stall, None);
    second.set_fault("", Fault::Stall, None);
    let url = routes::chunk(twins.root, Hash::of(&twins.far.files["f02"]));
    let begun = Instant::now();
    let told = problem(node.get(&url).send().await.expect("answer"), Code::OriginUnavailable).await;
    assert!(begun.elapsed() < Duration::from_secs(4 + 4), "{:?}", begun.elapsed());
    assert!(told.detail.contains(&twins.uri) && told.detail.contains(&second.uri()), "{told}");
    // They answer again: the next read works, without a wait for a cooldown.
    twins.bucket().clear_faults();
    second.clear_faults();
    twins.read(&node, None, "f02").await;
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_home_that_is_back_is_asked_again() {
    let mut twins = Twins::new().await;
    let node = twins.node(&["--io-timeout=60s"]).await;
    for name in ["far", "near"] {
        twins.register(&node, name).await;
        node.resolve(name, "latest").await;
    }
    twins.break_bucket(false);
    for name in &NAMES[..6] {
        twins.read(&node, Some("far"), name).await;
    }
    assert_ne!(node.metric("fletch_origin_breaker_state{dataset=\"far\"}").await, 0);
    twins.bucket().clear_faults();
    let until = Instant::now() + Duration::from_secs(60);
    // A read of a chunk that is not in memory starts the probe.
    let mut unread = NAMES[6..20].iter();
    while node.metric("fletch_origin_breaker_state{dataset=\"far\"}").await != 0 {
        assert!(Instant::now() < until, "the bucket answers and is not asked");
        if let Some(name) = unread.next() {
            twins.read(&node, Some("far"), name).await;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let before = twins.bucket().counts().get;
    for name in &NAMES[20..] {
        twins.read(&node, Some("far"), name).await;
    }
    assert!(twins.bucket().counts().get >= before + 4, "its own home is asked first again");
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_leaves_a_home_in_use_and_bytes_belong_to_the_named_dataset() {
    let twins = Twins::new().await;
    let node = twins.node(&[]).await;
    for name in ["far", "near"] {
        twins.register(&node, name).await;
        node.resolve(name, "latest").await;
    }
    twins.bucket().set_fault("f00", Fault::Error { rate: 1.0, status: 404 }, None);
    twins.bucket().set_fault("f01", Fault::FlipBit { byte: 7 }, None);
    for name in &NAMES[..4] {
        twins.read(&node, Some("far"), name).await;
    }
    let before = twins.bucket().counts().get;
    for name in &NAMES[4..10] {
        twins.read(&node, Some("far"), name).await;
    }
    assert!(twins.bucket().counts().get >= before + 6, "the bucket is still asked first");
    assert_eq!(node.metric("fletch_origin_breaker_state{dataset=\"far\"}").await, 0);
    let asked = twins.bucket().counts().get;
    for name in &NAMES[10..13] {
        twins.read(&node, Some("near"), name).await;
    }
    // A hedge is allowed: a loaded machine may be slow to read a directory.
    assert!(twins.bucket().counts().get <= asked + 2, "the named dataset's home alone is asked");
    let of = async |dataset: &str| {
        let page = node.get("/metrics").send().await.expect("answer").text().await.expect("text");
        let label = format!("dataset=\"{dataset}\"");
        let lines = page.lines().filter(|l| l.starts_with("fletch_bytes_total") && l.contains(&label));
        lines.map(|l| l.rsplit(' ').next().expect("value").parse::<u64>().expect("number")).sum::<u64>()
    };
    assert_eq!((of("far").await, of("near").await), (10 * 30_000, 3 * 30_000));
    // The API's accounts know roots, not datasets: one sum.
    let accounts = node.accounts().await.accounts;
    assert_eq!(accounts.iter().map(|a| a.bytes).sum::<u64>(), 13 * 30_000);
    node.running.shutdown().await;
}

#[tokio::test]
async fn unknown_roots_cost_a_bounded_number_of_calls() {
    let twins = Twins::new().await;
    let node = twins.node(&["--limits-root-lookups=1"]).await;
    twins.register(&node, "far").await;
    node.resolve("far", "latest").await;
    let before = twins.bucket().counts().requests();
    let (mut absent, mut refused) = (0, 0);
    for i in 0..100u32 {
        let unknown = Root(Hash::of(&i.to_le_bytes()));
        let request = node.get(&routes::manifest(unknown));
        // A name does not make an invented root cheaper.
        let request = if i % 2 == 0 { request.header(headers::DATASET, "far") } else { request };
        match request.send().await.expect("answer").status() {
            StatusCode::NOT_FOUND => absent += 1,
            StatusCode::TOO_MANY_REQUESTS => refused += 1,
            other => panic!("{other}"),
        }
    }
    // Ten at once, and one more a second.
    assert!((10..60).contains(&absent) && refused >= 40, "{absent} {refused}");
    assert!(twins.bucket().counts().requests() - before <= absent + 1);
    twins.read(&node, Some("far"), "f00").await;
    twins.read(&node, None, "f01").await;
    node.running.shutdown().await;
}

/// A plain server has no listing: the tag names the layout.
#[tokio::test]
async fn tables_at_a_plain_server_are_read_after_a_restart() {
    let tree = tree();
    let root = tree.index_plain(tree.dir.path()).root();
    let server =
        OriginEmulator::start(EmulatorConfig::default(), Backing::Directory(tree.dir.path().to_owned()));
    let uri = format!("{}/bucket", server.endpoint());
    let settings = tempfile::tempdir().expect("tempdir");
    let file = settings.path().join("f.toml");
    std::fs::write(&file, format!("[[origin]]\nprefix = \"{uri}\"\nallow_http = true\n")).expect("write");
    let config = format!("--config={}", file.display());
    let node = Node::start(&[&config]).await;
    // Tables at the plain server, objects in the directory, whose pins the tables have.
    let local = format!("{}/", tree.uri());
    node.register("d", local.trim_end_matches('/'), Some(&uri)).await;
    let url = routes::chunk(root, Hash::of(&tree.files["f00"]));
    // Nobody resolved the tag on this server: as after a restart.
    body(node.get(&url).send().await.expect("answer"), StatusCode::OK).await;
    let unknown = Root(Hash::of(b"unknown"));
    problem(node.get(&routes::manifest(unknown)).send().await.expect("answer"), Code::NotFound).await;
    node.running.shutdown().await;
}

/// Two stores hang, and more of each is asked for than all permits. One permit would be left, had the second
/// store the same part as the first.
#[tokio::test(flavor = "multi_thread")]
async fn origins_that_hang_leave_permits_for_other_origins() {
    let twins = Twins::new().await;
    let second = Tree::new((0u64..).zip(NAMES).map(|(seed, name)| (name, content(seed + 500, 30_000))));
    let config = EmulatorConfig { bucket: "second".into(), ..EmulatorConfig::default() };
    let bucket = OriginEmulator::start(config, Backing::Directory(second.dir.path().to_owned()));
    let second_root = index_bucket(&second, &bucket).await;
    let file = twins.settings.path().join("f.toml");
    let text = std::fs::read_to_string(&file).expect("settings");
    let more =
        text.replace(&twins.uri, &bucket.uri()).replace(&twins.bucket().endpoint(), &bucket.endpoint());
    std::fs::write(&file, text + &more).expect("write");
    let other = Tree::new([("x", content(900, 30_000)), ("y", content(901, 30_000))]);
    let root = other.index_plain(other.dir.path()).root();
    let node = twins.node(&["--limits-origin-requests=16", "--io-timeout=6s"]).await;
    twins.register(&node, "far").await;
    node.register("second", &bucket.uri(), None).await;
    node.register("other", &other.uri(), None).await;
    let read = async |root: Root, bytes: &[u8]| {
        let got = node.get(&routes::chunk(root, Hash::of(bytes))).send().await.expect("answer");
        assert!(body(got, StatusCode::OK).await == bytes);
    };
    // The tables are read before, so that only chunks come from the stores.
    read(twins.root, &twins.near.files[NAMES[0]]).await;
    read(second_root, &second.files[NAMES[0]]).await;
    read(root, &other.files["x"]).await;
    twins.bucket().set_fault("", Fault::Stall, None);
    bucket.set_fault("", Fault::Stall, None);
    let mut hang = Vec::new();
    for (root, files) in [(twins.root, &twins.near.files), (second_root, &second.files)] {
        let reads = NAMES[1..].iter().map(|name| node.get(&routes::chunk(root, Hash::of(&files[*name]))));
        hang.extend(reads.map(|read| TaskTracker::new().spawn(read.send())));
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let begun = Instant::now();
    read(root, &other.files["y"]).await;
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    let mut told = Vec::new();
    for asked in hang {
        told.push(asked.await.expect("task").expect("answer").text().await.expect("text"));
    }
    for uri in [&twins.uri, &bucket.uri()] {
        let waited = told.iter().find(|text| text.contains(&format!("for its turn at {uri}")));
        let waited = waited.expect("more than the share");
        assert!(waited.contains("limits.origin_requests_per_origin"), "{waited}");
    }
    node.running.shutdown().await;
}
