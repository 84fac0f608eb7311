//! Tests objects whose entity tag changed after the index: equal bytes are served and their new tag is
//! remembered; other bytes fail their file, and not the origin.

use crate::common::{Node, Tree, body, content, index_bucket, problem};
use fletch_api::{Code, OriginList, OriginState, RenewedPins, routes};
use fletch_core::{Hash, Root, manifest::SLICE_BYTES_DEFAULT};
use fletch_testkit::{Backing, EmulatorConfig, Fault, OriginEmulator};
use reqwest::StatusCode;
use tempfile::TempDir;

const SLICE: usize = SLICE_BYTES_DEFAULT as usize;

struct Bucket {
    tree: Tree,
    emulator: OriginEmulator,
    root: Root,
    settings: TempDir,
}

impl Bucket {
    /// Returns a bucket with the object `big` of five chunks, and two short objects, indexed.
    async fn new() -> Self {
        let big = content(1, 4 * SLICE + 1_000);
        let tree = Tree::new([("a", content(2, 30_000)), ("b", content(3, 30_000)), ("big", big)]);
        let backing = Backing::Directory(tree.dir.path().to_owned());
        let emulator = OriginEmulator::start(EmulatorConfig::default(), backing);
        let root = index_bucket(&tree, &emulator).await;
        let settings = tempfile::tempdir().expect("tempdir");
        let text = format!(
            "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\nregion = \"x\"\n\
             credentials = \"anonymous\"\n",
            emulator.uri(),
            emulator.endpoint()
        );
        std::fs::write(settings.path().join("f.toml"), text).expect("write");
        Bucket { tree, emulator, root, settings }
    }

    async fn server(&self) -> Node {
        let config = format!("--config={}", self.settings.path().join("f.toml").display());
        let node = Node::start(&[&config, "--cache-size=0"]).await;
        node.register("set", &self.emulator.uri(), None).await;
        node
    }

    /// Changes the tags of all objects that begin with `name`, or none.
    fn retag(&self, name: Option<&str>) {
        self.emulator.clear_faults();
        if let Some(name) = name {
            self.emulator.set_fault(name, Fault::ChangeEtag, None);
        }
    }

    fn chunk(&self, bytes: &[u8]) -> String {
        routes::chunk(self.root, Hash::of(bytes))
    }

    /// Reads chunk `i` of an object, checks its bytes, and returns the number of requests for the object.
    async fn requests_for(&self, node: &Node, name: &str, i: usize) -> u64 {
        let bytes = self.tree.files[name].chunks(SLICE).nth(i).expect("a chunk");
        let gets = || self.emulator.counts().gets.get(name).copied().unwrap_or(0);
        let before = gets();
        let answer = node.get(&self.chunk(bytes)).send().await.expect("answer");
        assert!(body(answer, StatusCode::OK).await == bytes, "{name} {i}");
        gets() - before
    }
}

async fn renewed(node: &Node, query: &str) -> RenewedPins {
    let name = "set".parse().expect("name");
    let path = routes::renewed_pins(&name, None) + query;
    let bytes = body(node.get(&path).send().await.expect("answer"), StatusCode::OK).await;
    serde_json::from_slice(&bytes).expect("a page")
}

async fn renewed_paths(node: &Node) -> Vec<String> {
    renewed(node, "").await.objects.into_iter().map(|o| o.path).collect()
}

async fn changed_objects(node: &Node) -> u64 {
    let uses = node.accounts().await.datasets;
    uses.iter().find(|d| d.dataset.as_str() == "set").expect("the dataset").changed_objects
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_bytes_under_a_new_tag_cost_one_more_request_once() {
    let bucket = Bucket::new().await;
    let node = bucket.server().await;
    assert_eq!(bucket.requests_for(&node, "big", 0).await, 1);
    bucket.retag(Some("big"));
    assert_eq!(bucket.requests_for(&node, "big", 1).await, 2, "the new tag is not known");
    for i in [2, 3, 4] {
        assert_eq!(bucket.requests_for(&node, "big", i).await, 1, "{i}");
    }
    assert_eq!(changed_objects(&node).await, 0);
    assert_eq!(node.metric("fletch_corrupt_total{source=\"origin_changed\"}").await, 0);
    node.running.shutdown().await;

    // A restart forgets the tag, and learns it again.
    let node = bucket.server().await;
    assert_eq!(bucket.requests_for(&node, "big", 0).await, 2);
    assert_eq!(bucket.requests_for(&node, "big", 1).await, 1);
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_with_two_tags_that_alternate_heals() {
    let bucket = Bucket::new().await;
    let node = bucket.server().await;
    let mut requests = Vec::new();
    for i in 0..5 {
        bucket.retag((i % 2 == 0).then_some("big"));
        requests.push(bucket.requests_for(&node, "big", i).await);
    }
    assert_eq!(requests, [2, 2, 1, 1, 1], "with two known tags no condition is sent");
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_lists_objects_that_it_read_whole_under_a_new_tag() {
    let bucket = Bucket::new().await;
    let node = bucket.server().await;
    bucket.retag(Some("b"));
    assert_eq!(bucket.requests_for(&node, "a", 0).await, 1);
    for i in 0..5 {
        assert!(renewed_paths(&node).await.is_empty(), "parts of the object are not read yet");
        bucket.requests_for(&node, "big", i).await;
    }
    assert_eq!(renewed_paths(&node).await, ["big"]);
    assert_eq!(bucket.requests_for(&node, "b", 0).await, 2);
    assert_eq!(renewed_paths(&node).await, ["b", "big"]);
    let page = renewed(&node, "?after=b").await;
    let [big] = &page.objects[..] else { panic!("{page:?}") };
    assert_eq!((big.old.size, big.new.size, page.next), (4 * SLICE as u64 + 1_000, big.old.size, None));
    let (old, new) = (big.old.etag.clone().expect("etag"), big.new.etag.clone().expect("etag"));
    assert_eq!(new, format!("\"changed-{}\"", old.trim_matches('"')));
    let gone = node.get("/v1/datasets/other/renewed-pins").send().await.expect("answer");
    problem(gone, Code::NotFound).await;
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn other_bytes_fail_their_file_and_not_the_origin() {
    let bucket = Bucket::new().await;
    let node = bucket.server().await;
    assert_eq!(node.resolve("set", "latest").await.root, bucket.root);
    let right = bucket.tree.files["a"].clone();
    let url = bucket.chunk(&right);
    let mut wrong = right.clone();
    wrong[77] ^= 1;
    // Other bytes of the same length, and of another length.
    for bytes in [wrong.clone(), right[..29_000].to_vec()] {
        std::fs::write(bucket.tree.path("a"), &bytes).expect("write");
        for _ in 0..2 {
            let p = problem(node.get(&url).send().await.expect("answer"), Code::OriginChanged).await;
            assert!(p.hint.contains("fletch refresh"), "{p}");
        }
        assert_eq!(changed_objects(&node).await, 1, "an object counts once");
        assert_eq!(node.metric("fletch_dataset_changed_objects{dataset=\"set\"}").await, 1);
        assert!(renewed_paths(&node).await.is_empty(), "wrong bytes renew no pin");
        let list = body(node.get(routes::ORIGINS).send().await.expect("answer"), StatusCode::OK).await;
        let list: OriginList = serde_json::from_slice(&list).expect("a list");
        assert_eq!((list.origins[0].state, list.origins[0].failed), (OriginState::Ok, 0), "{list:?}");
        assert_eq!(node.metric("fletch_origin_failing{dataset=\"set\"}").await, 0);
        assert_eq!(bucket.requests_for(&node, "b", 0).await.min(1), u64::from(bytes.len() == 30_000));
    }
    // Registering the dataset again forgets the count; the next read counts again.
    assert_eq!(node.try_register("set", &bucket.emulator.uri(), None).await.status(), StatusCode::OK);
    assert_eq!(changed_objects(&node).await, 0);
    problem(node.get(&url).send().await.expect("answer"), Code::OriginChanged).await;
    assert_eq!(changed_objects(&node).await, 1);
    // The right bytes are back, under whatever tag.
    std::fs::write(bucket.tree.path("a"), &right).expect("write");
    bucket.retag(Some("a"));
    bucket.requests_for(&node, "a", 0).await;
    assert_eq!(changed_objects(&node).await, 0);
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_under_a_renewed_tag_is_no_change() {
    let bucket = Bucket::new().await;
    let node = bucket.server().await;
    bucket.retag(Some("big"));
    assert_eq!(bucket.requests_for(&node, "big", 0).await, 2);
    bucket.emulator.set_fault("big", Fault::FlipBit { byte: SLICE as u64 + 5 }, None);
    let damaged = bucket.tree.files["big"].chunks(SLICE).nth(1).expect("a chunk");
    let answer = node.get(&bucket.chunk(damaged)).send().await.expect("answer");
    problem(answer, Code::OriginCorrupt).await;
    assert_eq!(changed_objects(&node).await, 0);
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_restored_file_of_a_directory_is_no_longer_counted() {
    let tree = Tree::new([("a", content(1, 50_000))]);
    let root = tree.index().root();
    let node = Node::start(&["--cache-size=0"]).await;
    node.register("set", &tree.uri(), None).await;
    let url = routes::chunk(root, Hash::of(&tree.files["a"]));
    std::fs::write(tree.path("a"), content(2, 50_000)).expect("write");
    problem(node.get(&url).send().await.expect("answer"), Code::OriginChanged).await;
    assert_eq!(changed_objects(&node).await, 1);
    std::fs::write(tree.path("a"), &tree.files["a"]).expect("write");
    let answer = node.get(&url).send().await.expect("answer");
    assert!(body(answer, StatusCode::OK).await == tree.files["a"]);
    assert_eq!(changed_objects(&node).await, 0);
    node.running.shutdown().await;
}
