//! Tests that a failing origin is seen: in `/v1/origins`, `/readyz?verbose`, at `/` and in metrics. And that
//! only admins see its name (I7).

use crate::common::{Node, Tree, body, content, index_below, index_bucket};
use fletch_api::{OriginList, OriginState, routes};
use fletch_core::{Hash, Root};
use fletch_testkit::{Backing, EmulatorConfig, Fault, Latency, OriginEmulator};
use reqwest::StatusCode;
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio_util::task::TaskTracker;

struct Bucket {
    tree: Tree,
    emulator: OriginEmulator,
    root: Root,
    settings: TempDir,
}

async fn bucket(tokens: bool) -> (Bucket, Node) {
    let tree = Tree::new([("a", content(1, 30_000)), ("b", content(2, 30_000))]);
    let backing = Backing::Directory(tree.dir.path().to_owned());
    let emulator = OriginEmulator::start(EmulatorConfig::default(), backing);
    let root = index_bucket(&tree, &emulator).await;
    let settings = tempfile::tempdir().expect("tempdir");
    let domains = if tokens { "domains = [\"*\"]\n" } else { "" };
    let text = format!(
        "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\nregion = \"x\"\n\
         credentials = \"anonymous\"\n{domains}",
        emulator.uri(),
        emulator.endpoint()
    );
    std::fs::write(settings.path().join("f.toml"), text).expect("write");
    let config = format!("--config={}", settings.path().join("f.toml").display());
    let mut args = vec![config, "--cache-size=0".to_owned(), "--io-timeout=2s".to_owned()];
    if tokens {
        let line = |token: &str, role: &str| {
            let hash = Hash::of(token.as_bytes());
            format!("[[token]]\nhash = \"{hash}\"\ntenant = \"t\"\nrole = \"{role}\"\n")
        };
        let file = settings.path().join("tokens.toml");
        std::fs::write(&file, line("tok-a", "admin") + &line("tok-u", "user")).expect("write");
        args.push(format!("--auth-tokens={}", file.display()));
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut node = Node::start(&args).await;
    if tokens {
        node.sign("tok-a");
    }
    node.register("set", &emulator.uri(), None).await;
    (Bucket { tree, emulator, root, settings }, node)
}

impl Bucket {
    async fn read(&self, node: &Node, name: &str) -> u16 {
        let chunk = routes::chunk(self.root, Hash::of(&self.tree.files[name]));
        node.get(&chunk).send().await.expect("answer").status().as_u16()
    }
}

async fn origins(node: &Node) -> OriginList {
    let bytes = body(node.get(routes::ORIGINS).send().await.expect("answer"), StatusCode::OK).await;
    serde_json::from_slice(&bytes).expect("a list")
}

async fn text(node: &Node, path: &str) -> String {
    let bytes = body(node.get(path).send().await.expect("answer"), StatusCode::OK).await;
    String::from_utf8(bytes).expect("text")
}

async fn until_state(node: &Node, state: OriginState) -> OriginList {
    let begun = Instant::now();
    loop {
        let list = origins(node).await;
        if list.origins[0].state == state {
            return list;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "{list:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_failed_call_shows_everywhere_until_the_origin_answers_again() {
    let (bucket, node) = bucket(false).await;
    assert_eq!(bucket.read(&node, "a").await, 200);
    let list = origins(&node).await;
    assert_eq!(list.origins.len(), 1, "objects and tables lie at one place: {list:?}");
    let origin = &list.origins[0];
    assert_eq!((origin.state, origin.failed, &origin.last_error), (OriginState::Ok, 0, &None));
    assert_eq!((origin.uri.as_str(), origin.datasets[0].as_str()), (bucket.emulator.uri().as_str(), "set"));
    assert!(origin.requests > 0);

    bucket.emulator.set_fault("", Fault::Error { rate: 1.0, status: 403 }, None);
    assert_ne!(bucket.read(&node, "b").await, 200);
    let list = until_state(&node, OriginState::Failing).await;
    let error = list.origins[0].last_error.clone().expect("an error");
    assert!(error.why.contains("access denied") && error.at_ns > 0, "{error:?}");
    assert!(list.origins[0].failed > 0);
    let ready = text(&node, "/readyz?verbose").await;
    assert!(ready.starts_with("ok\norigins 1 of 1 failing\norigin s3://"), "{ready}");
    assert_eq!(text(&node, "/readyz").await, "ok\n", "without the word, one line as before");
    let page = text(&node, "/v1/dashboard").await;
    assert!(page.contains("FletchOriginErrors") && page.contains("access denied"), "{page}");
    assert_eq!(node.metric("fletch_origin_failing{dataset=\"set\"}").await, 1);
    assert!(node.metric("fletch_origin_calls_failed_total{dataset=\"set\"}").await > 0);

    // Nobody reads: the server probes the origin by itself.
    bucket.emulator.clear_faults();
    let list = until_state(&node, OriginState::Ok).await;
    assert!(list.origins[0].last_error.is_some(), "the last error stays");
    assert_eq!(node.metric("fletch_origin_failing{dataset=\"set\"}").await, 0);
    assert!(!text(&node, "/v1/dashboard").await.contains("FletchOriginErrors"));
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn i7_only_admins_see_which_origin_fails() {
    let (bucket, node) = bucket(true).await;
    bucket.emulator.set_fault("", Fault::Error { rate: 1.0, status: 403 }, None);
    assert_ne!(bucket.read(&node, "a").await, 200);
    until_state(&node, OriginState::Failing).await;
    let user = node.get(routes::ORIGINS).bearer_auth("tok-u").send().await.expect("answer");
    assert_eq!(user.status(), StatusCode::FORBIDDEN);
    // A probe has no token.
    let url = node.url("/readyz?verbose");
    let anonymous = reqwest::get(url).await.expect("answer").text().await.expect("text");
    assert_eq!(anonymous, "ok\norigins 1 of 1 failing\n");
    assert!(text(&node, "/readyz?verbose").await.contains("origin s3://"), "an admin sees it");
    drop(bucket.settings);
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_origin_whose_tables_alone_fail_shows_within_ten_seconds() {
    for fault in [Fault::Stall, Fault::Error { rate: 1.0, status: 403 }] {
        let (bucket, node) = bucket(false).await;
        bucket.emulator.set_fault("fletch/", fault.clone(), None);
        let begun = Instant::now();
        let chunk = routes::chunk(bucket.root, Hash::of(&bucket.tree.files["a"]));
        let asked = TaskTracker::new().spawn(node.get(&chunk).send());
        loop {
            let ready = text(&node, "/readyz?verbose").await;
            if ready.contains("origins 1 of 1 failing\norigin s3://") {
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(10), "{fault:?}: {ready}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert!(text(&node, "/v1/dashboard").await.contains("FletchOriginErrors"), "{fault:?}");
        assert_eq!(node.metric("fletch_origin_failing{dataset=\"set\"}").await, 1, "{fault:?}");
        assert!(begun.elapsed() < Duration::from_secs(10), "{fault:?}: {:?}", begun.elapsed());
        assert_ne!(asked.await.expect("task").expect("answer").status(), StatusCode::OK);
        bucket.emulator.clear_faults();
        until_state(&node, OriginState::Ok).await;
        assert_eq!(bucket.read(&node, "a").await, 200);
        node.running.shutdown().await;
    }
}

/// A tree of chunks of 20 kB.
fn many(above: &std::path::Path, seed: u64, files: u64) -> Tree {
    let mut tree = Tree::new_in(above, []);
    for i in 0..files {
        let (name, bytes) = (format!("f{i}"), content(seed + i, 20_000));
        std::fs::write(tree.path(&name), &bytes).expect("write");
        tree.files.insert(name, bytes);
    }
    tree
}

#[tokio::test]
async fn a_scan_with_a_long_queue_takes_turns_with_a_job_that_reads_one_chunk_at_a_time() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (scan, train) = (many(dir.path(), 1_000, 80), many(dir.path(), 5_000, 11));
    let slow = Latency { median: Duration::from_millis(10), p99: Duration::from_millis(10) };
    let config = EmulatorConfig { first_byte: Some(slow), ..EmulatorConfig::default() };
    let emulator = OriginEmulator::start(config, Backing::Directory(dir.path().to_owned()));
    let below = |tree: &Tree| {
        let name = tree.dir.path().file_name().expect("a name").to_string_lossy().into_owned();
        format!("{}/{name}", emulator.uri())
    };
    let settings = tempfile::tempdir().expect("tempdir");
    let file = settings.path().join("f.toml");
    let text = format!(
        "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\nregion = \"x\"\n\
         credentials = \"anonymous\"\nconcurrency = 2\nbytes_per_second = \"10MiB\"\n",
        emulator.uri(),
        emulator.endpoint()
    );
    std::fs::write(&file, text).expect("write");
    let node = Node::start(&[&format!("--config={}", file.display()), "--cache-size=0"]).await;
    let (scan_uri, train_uri) = (below(&scan), below(&train));
    let roots =
        (index_below(&scan, &emulator, &scan_uri).await, index_below(&train, &emulator, &train_uri).await);
    node.register("scan", &scan_uri, None).await;
    node.register("train", &train_uri, None).await;
    let read = |root: Root, bytes: &Vec<u8>| node.get(&routes::chunk(root, Hash::of(bytes)));
    // The tables are read before, so that only chunks come from the store.
    let mut of_train: Vec<_> = train.files.values().map(|bytes| read(roots.1, bytes)).collect();
    let first = of_train.pop().expect("one").send().await.expect("answer");
    assert_eq!(first.status(), StatusCode::OK);

    let (tasks, done) = (TaskTracker::new(), Arc::new(AtomicUsize::new(0)));
    let reads = scan.files.values().map(|bytes| (read(roots.0, bytes), Arc::clone(&done)));
    let scanning: Vec<_> = reads
        .map(|(ask, done)| {
            tasks.spawn(async move {
                let status = ask.send().await.expect("answer").status();
                done.fetch_add(1, Relaxed);
                status
            })
        })
        .collect();
    while done.load(Relaxed) < 4 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let before = done.load(Relaxed);
    for ask in of_train {
        assert_eq!(ask.send().await.expect("answer").status(), StatusCode::OK);
    }
    let meanwhile = done.load(Relaxed) - before;
    // In the order in which they came, all of the scan would be read before the first chunk of the job.
    assert!(meanwhile <= 4 * 10 && before + meanwhile < 75, "{before} and {meanwhile} chunks of the scan");
    for one in scanning {
        assert_eq!(one.await.expect("ended"), StatusCode::OK);
    }
}
