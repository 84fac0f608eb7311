//! Tests registrations: which URIs are allowed, what tags resolve to, and what survives a restart.

use crate::common::{Node, Tree, body, content, problem, settings};
use fletch_api::{Code, Datasets, routes};
use fletch_core::{Hash, manifest::LayoutParams};
use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator};
use reqwest::{Method, StatusCode};

async fn names(node: &Node) -> Vec<String> {
    let text = node.get("/v1/datasets").send().await.expect("answer").text().await.expect("text");
    let list: Datasets = serde_json::from_str(&text).expect("datasets");
    list.datasets.into_iter().map(|d| d.dataset.name.to_string()).collect()
}

#[tokio::test]
async fn registering_is_idempotent_and_conflicts_are_named() {
    let tree = Tree::usual();
    let node = Node::serving(&tree, &[]).await;
    let again = node.try_register("d", &format!("{}/", tree.uri()), None).await;
    assert_eq!(again.status(), StatusCode::OK, "the same place in another spelling");
    problem(node.try_register("d", "/somewhere/else", None).await, Code::Conflict).await;
    problem(node.try_register("bad name", &tree.uri(), None).await, Code::BadRequest).await;
    problem(node.try_register("e", "relative/path", None).await, Code::BadRequest).await;
    problem(node.try_register("e", "/a/../b", None).await, Code::BadRequest).await;
    problem(node.try_register("e", "ftp://x/y", None).await, Code::BadRequest).await;
    let p = problem(node.try_register("e", "s3://bucket/x", None).await, Code::UriNotAllowed).await;
    assert!(p.hint.contains("[[origin]]"), "{p}");
    let r =
        node.post("/v1/datasets", r#"{"name":"e","uri":"/x","surprise":1}"#).send().await.expect("answer");
    problem(r, Code::BadRequest).await;
    assert_eq!(names(&node).await, ["d"]);
    let r = node.get("/v1/datasets/d").send().await.expect("answer");
    assert!(r.text().await.expect("text").contains("file://"));
    problem(node.ask(Method::DELETE, "/v1/datasets/e").send().await.expect("answer"), Code::NotFound).await;
    node.running.shutdown().await;
}

#[tokio::test]
async fn only_allowed_directories_where_some_are_named() {
    let (inside, outside) = (Tree::usual(), Tree::usual());
    let node = Node::start(&[&format!("--local-dirs={}", inside.uri())]).await;
    node.register("in", &inside.uri(), None).await;
    let out = problem(node.try_register("out", &outside.uri(), None).await, Code::UriNotAllowed).await;
    let absent = problem(node.try_register("out", "/no/such/dir", None).await, Code::UriNotAllowed).await;
    assert_eq!(out.hint, absent.hint);
    std::os::unix::fs::symlink(outside.dir.path(), inside.path("way-out")).expect("symlink");
    let way = inside.path("way-out").display().to_string();
    problem(node.try_register("out", &way, None).await, Code::UriNotAllowed).await;
    problem(node.try_register("out", &inside.uri(), Some(&outside.uri())).await, Code::UriNotAllowed).await;
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_tag_is_read_at_every_call_and_roots_resolve_too() {
    let mut tree = Tree::new([("a", content(1, 100))]);
    let first = tree.index();
    let to = tempfile::tempdir().expect("tempdir");
    let node = Node::serving(&tree, &[]).await;
    let v = node.resolve("d", "latest").await;
    assert_eq!((v.root, v.layout, v.entries, v.bytes), (first.root(), first.written.layout, 2, 100));
    assert_eq!(
        (v.tag.map(|t| t.to_string()), v.created_ns),
        (Some("latest".into()), 1_700_000_000_000_000_007)
    );
    tree.files.insert("b".into(), content(2, 50));
    std::fs::write(tree.path("b"), &tree.files["b"]).expect("write");
    let second = tree.index();
    assert_eq!(node.resolve("d", "latest").await.root, second.root());
    let by_root = node.resolve("d", &first.root().to_string()).await;
    assert_eq!((by_root.root, by_root.tag), (first.root(), None));
    // Both versions are served.
    for root in [first.root(), second.root()] {
        let r = node.get(&format!("/v1/versions/{root}/files/a")).send().await.expect("answer");
        assert_eq!(body(r, StatusCode::OK).await, tree.files["a"]);
    }
    // Tables elsewhere, and another layout of the same root.
    let small = LayoutParams { slice_bytes: 64, ..LayoutParams::INDEX };
    let third = tree.index_to(to.path(), small);
    assert_eq!(third.root(), second.root());
    let tables = to.path().display().to_string();
    node.register("elsewhere", &tree.uri(), Some(&tables)).await;
    let v = node.resolve("elsewhere", "latest").await;
    assert_eq!((v.root, v.layout), (third.root(), third.written.layout));
    let r = node.get(&routes::layout(v.root, v.layout)).send().await.expect("answer");
    assert_eq!(r.status(), StatusCode::OK);
    let r = node.get(&routes::placement(v.root, second.written.layout)).send().await.expect("answer");
    assert_eq!(r.status(), StatusCode::OK, "the first layout is still to be had");
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_restart_keeps_registrations_and_serves_at_once() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    node.register("e", "/gone/for/now", None).await;
    node.ask(Method::DELETE, "/v1/datasets/e").send().await.expect("answer");
    let Node { state, running, .. } = node;
    running.shutdown().await;
    let node = Node::start_in(state, &[]).await;
    assert_eq!(names(&node).await, ["d"]);
    // By root alone: nobody resolved a tag since the start.
    let r = node.get(&routes::chunk(root, Hash::of(&tree.files["a.bin"]))).send().await.expect("answer");
    assert_eq!(body(r, StatusCode::OK).await, tree.files["a.bin"]);
    node.running.shutdown().await;
}

/// Starts a plain HTTP server over a directory, and writes settings that allow it.
fn plain_http(of: &std::path::Path) -> (OriginEmulator, tempfile::TempDir, String) {
    let http = OriginEmulator::start(EmulatorConfig::default(), Backing::Directory(of.to_owned()));
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("f.toml");
    let text = format!("[[origin]]\nprefix = \"{}\"\nallow_http = true\n", http.endpoint());
    std::fs::write(&file, text).expect("write");
    let flag = format!("--config={}", file.display());
    (http, dir, flag)
}

/// A plain HTTP server has no listing. So nothing there says which layouts a root has.
#[tokio::test]
async fn tables_at_a_plain_http_server_serve_tagged_versions_after_a_restart() {
    let mut tree = Tree::new([("a", content(1, 100))]);
    let to = tempfile::tempdir().expect("tempdir");
    let (http, _settings, config) = plain_http(to.path());
    let tables = format!("{}/bucket", http.endpoint());
    let first = tree.index_to(to.path(), LayoutParams::INDEX);
    let node = Node::start(&[&config]).await;
    node.register("d", &tree.uri(), Some(&tables)).await;
    assert_eq!(node.resolve("d", "latest").await.root, first.root());
    tree.files.insert("b".into(), content(2, 50));
    std::fs::write(tree.path("b"), &tree.files["b"]).expect("write");
    // Nobody resolves the tag of the second version before the restart.
    let second = tree.index_to(to.path(), LayoutParams::INDEX);
    let Node { state, running, .. } = node;
    running.shutdown().await;
    let node = Node::start_in(state, &[&config]).await;
    for root in [first.root(), second.root()] {
        let r = node.get(&format!("/v1/versions/{root}/files/a")).send().await.expect("answer");
        assert_eq!(body(r, StatusCode::OK).await, tree.files["a"]);
        assert_eq!(node.resolve("d", &root.to_string()).await.root, root);
    }
    let absent = Hash::of(b"no such root");
    for path in [format!("/v1/versions/{absent}/files/a"), format!("/v1/datasets/d/versions/{absent}")] {
        problem(node.get(&path).send().await.expect("answer"), Code::NotFound).await;
    }
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_damaged_log_and_a_taken_directory_are_start_errors() {
    let tree = Tree::usual();
    let node = Node::serving(&tree, &[]).await;
    let taken = fletch_server::app::start(settings(node.state.path(), &["--socket=none"]).expect("settings"));
    let told = taken.await.err().expect("in use").to_string();
    assert!(told.contains("--state-dir"), "{told}");
    let Node { state, running, .. } = node;
    running.shutdown().await;
    let log = state.path().join("state/registrations.log");
    let mut bytes = std::fs::read(&log).expect("log");
    bytes.extend_from_within(16..);
    bytes[50] ^= 4;
    std::fs::write(&log, &bytes).expect("write");
    let told = fletch_server::app::start(settings(state.path(), &[]).expect("settings"))
        .await
        .err()
        .expect("damaged")
        .to_string();
    for part in ["registrations.log", "byte 16", "backup"] {
        assert!(told.contains(part), "{part} in {told}");
    }
}
