//! Tests packs: what one request fetches, what is read if a layout's objects are gone, and that a wrong
//! placement delivers no wrong byte.

use crate::common::{Node, Tree, body, content, problem};
use fletch_api::{Code, routes};
use fletch_core::{Hash, Root};
use reqwest::StatusCode;
use std::collections::BTreeMap;

/// Files of about 60 KB, a long file and an empty one.
fn tree(files: u64) -> Tree {
    let mut tree = Tree::new([("empty", Vec::new()), ("long", content(9, 9_000_000))]);
    for i in 0..files {
        let bytes = content(100 + i, 60_000 + (i % 50) as usize);
        std::fs::write(tree.path(&format!("f{i:04}")), &bytes).expect("write");
        tree.files.insert(format!("f{i:04}"), bytes);
    }
    tree
}

async fn file(node: &Node, root: Root, path: &str) -> Vec<u8> {
    body(node.get(&routes::file(root, path)).send().await.expect("answer"), StatusCode::OK).await
}

async fn all(node: &Node, root: Root, files: &BTreeMap<String, Vec<u8>>) {
    for (path, bytes) in files {
        assert!(file(node, root, path).await == *bytes, "{path}");
    }
}

/// A directory for tables and chunks.
fn place() -> tempfile::TempDir {
    tempfile::tempdir().expect("tempdir")
}

#[tokio::test]
async fn a_chunk_is_brought_once_for_all_its_files_ranges_and_batches() {
    let (tree, to) = (tree(200), place());
    let (packed, objects) = tree.pack_to(to.path(), false);
    assert!((2..12).contains(&objects.len()), "{}", objects.len());
    let node = Node::start(&["--cache-size=0"]).await;
    node.register("d", &tree.uri(), Some(&to.path().display().to_string())).await;
    let root = packed.root();
    all(&node, root, &tree.files).await;
    let fetches = node.metric("fletch_chunk_reads_total{tier=\"origin\"}").await;
    assert_eq!(fetches, objects.len() as u64 + 3, "each chunk once, the long file's slices");
    let waited =
        async |tier| node.metric(&format!("fletch_chunk_read_seconds_count{{tier=\"{tier}\"}}")).await;
    assert_eq!(waited("origin").await, fetches, "a wait for each fetch");
    assert!(waited("memory").await >= 200 - fetches && waited("disk").await == 0);
    let ranged = node.get(&routes::file(root, "f0007")).header("range", "bytes=100-299");
    let got = body(ranged.send().await.expect("answer"), StatusCode::PARTIAL_CONTENT).await;
    assert_eq!(got, tree.files["f0007"][100..300]);
    let items: Vec<_> = (0..20).map(|i| serde_json::json!({"path": format!("f{i:04}")})).collect();
    let ask = node.post(&routes::batch(root), serde_json::json!({"items": items}).to_string());
    let frames = body(ask.send().await.expect("answer"), StatusCode::OK).await;
    let sum: usize = (0..20).map(|i| tree.files[&format!("f{i:04}")].len()).sum();
    assert!(frames.len() > sum && frames.len() < sum + 5000, "{} of {sum}", frames.len());
    let chunk = objects[0].rsplit('/').next().expect("name").parse::<Hash>().expect("hash");
    let whole =
        body(node.get(&routes::chunk(root, chunk)).send().await.expect("answer"), StatusCode::OK).await;
    assert_eq!(Hash::of(&whole), chunk);
    assert_eq!(node.metric("fletch_chunk_reads_total{tier=\"origin\"}").await, fetches);
    node.running.shutdown().await;
}

#[tokio::test]
async fn another_layout_is_read_when_the_objects_of_one_are_gone() {
    let plain = tree(120);
    let rows = place();
    let (packed, objects) = plain.pack_to(rows.path(), false);
    let indexed = plain.index_plain(rows.path());
    assert_eq!(packed.root(), indexed.root());
    crate::common::tag(rows.path(), "packed", &packed.written);
    crate::common::tag(rows.path(), "indexed", &indexed.written);
    let tables = rows.path().display().to_string();

    // The pack's objects are gone: its files come from where they were.
    let node = Node::start(&["--cache-size=0"]).await;
    node.register("d", &plain.uri(), Some(&tables)).await;
    assert_eq!(node.resolve("d", "packed").await.layout, packed.written.layout);
    let gone: Vec<_> =
        objects.iter().map(|key| (key, std::fs::read(rows.path().join(key)).expect("chunk"))).collect();
    for (key, _) in &gone {
        std::fs::remove_file(rows.path().join(key)).expect("remove");
    }
    all(&node, packed.root(), &plain.files).await;
    node.running.shutdown().await;
    for (key, bytes) in &gone {
        std::fs::write(rows.path().join(key), bytes).expect("write");
    }

    // The files are gone: an index's chunks come out of the pack.
    let node = Node::start(&["--cache-size=0"]).await;
    node.register("d", &plain.uri(), Some(&tables)).await;
    assert_eq!(node.resolve("d", "indexed").await.layout, indexed.written.layout);
    for path in plain.files.keys().filter(|p| p.starts_with('f')) {
        std::fs::remove_file(plain.path(path)).expect("remove");
    }
    all(&node, packed.root(), &plain.files).await;
    for (path, bytes) in plain.files.iter().filter(|(p, _)| p.starts_with('f')) {
        let url = routes::chunk(packed.root(), Hash::of(bytes));
        let got = body(node.get(&url).send().await.expect("answer"), StatusCode::OK).await;
        assert!(got == *bytes, "{path}");
    }
    node.running.shutdown().await;

    // Both are gone: the answer says so.
    for (key, _) in &gone {
        std::fs::remove_file(rows.path().join(key)).expect("remove");
    }
    let node = Node::start(&["--cache-size=0"]).await;
    node.register("d", &plain.uri(), Some(&tables)).await;
    let r = node.get(&routes::file(packed.root(), "f0001")).send().await.expect("answer");
    problem(r, Code::OriginMissing).await;
    node.running.shutdown().await;
}

#[tokio::test]
async fn both_layouts_of_a_root_are_served_whichever_was_opened_first() {
    let (tree, to) = (tree(60), place());
    let tables = to.path().display().to_string();
    let indexed = tree.index_plain(to.path());
    let node = Node::start(&[]).await;
    node.register("d", &tree.uri(), Some(&tables)).await;
    // The index is open when the pack appears.
    assert_eq!(node.resolve("d", "latest").await.layout, indexed.written.layout);
    assert_eq!(file(&node, indexed.root(), "f0001").await, tree.files["f0001"]);
    let (packed, objects) = tree.pack_to(to.path(), false);
    assert_eq!(node.resolve("d", "latest").await.layout, packed.written.layout);
    for layout in [indexed.written.layout, packed.written.layout] {
        let r = node.get(&routes::layout(packed.root(), layout)).send().await.expect("answer");
        body(r, StatusCode::OK).await;
    }
    let chunk = objects[0].rsplit('/').next().expect("name").parse::<Hash>().expect("hash");
    for hash in [chunk, Hash::of(&tree.files["f0002"])] {
        let r = node.get(&routes::chunk(packed.root(), hash)).send().await.expect("answer");
        assert_eq!(Hash::of(&body(r, StatusCode::OK).await), hash);
    }
    let r = node.get(&routes::chunk(packed.root(), Hash::of(b"nobody's"))).send().await.expect("answer");
    problem(r, Code::NotFound).await;
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_wrong_placement_delivers_nothing() {
    let (tree, to) = (tree(60), place());
    let (packed, _) = tree.pack_to(to.path(), true);
    let node = Node::start(&[]).await;
    node.register("d", &tree.uri(), Some(&to.path().display().to_string())).await;
    let mut refused = 0;
    for (path, bytes) in &tree.files {
        let r = node.get(&routes::file(packed.root(), path)).send().await.expect("answer");
        if r.status() == StatusCode::OK {
            assert!(r.bytes().await.expect("body") == *bytes, "{path}");
        } else {
            problem(r, Code::TablesCorrupt).await;
            refused += 1;
        }
    }
    // The first of each chunk begins where it should.
    assert!(refused > 40, "{refused}");
    node.running.shutdown().await;
}

/// The server does not fetch a chunk that the disk would not keep for one of its files.
#[tokio::test]
async fn files_of_chunks_that_are_not_kept_are_read_by_range() {
    let node = Node::start(&["--cache-size=16MiB", "--cache-policy=pin", "--memory=64MiB"]).await;
    // Something else has the disk.
    let other = Tree::new([("other", content(1, 40 << 20))]);
    let indexed = other.index();
    node.register("other", &other.uri(), None).await;
    assert!(file(&node, indexed.root(), "other").await == other.files["other"]);
    while node.metric("fletch_disk_refused_total{why=\"full\"}").await == 0 {
        tokio::task::yield_now().await;
    }
    let before = node.metric("fletch_chunk_fetched_bytes_total").await;

    let (tree, to) = (tree(700), place());
    let (packed, objects) = tree.pack_to(to.path(), false);
    let written: u64 =
        objects.iter().map(|k| std::fs::metadata(to.path().join(k)).expect("chunk").len()).sum();
    assert!(objects.len() > 2, "{}", objects.len());
    node.register("d", &tree.uri(), Some(&to.path().display().to_string())).await;
    // A few files of each chunk, read twice.
    let some: Vec<&String> = tree.files.keys().filter(|p| p.starts_with('f')).step_by(20).collect();
    let total: u64 = some.iter().map(|p| tree.files[*p].len() as u64).sum();
    for path in some.iter().chain(&some) {
        assert!(file(&node, packed.root(), path).await == tree.files[*path], "{path}");
    }
    // Not even a small chunk that may have found room makes this more than a part of the pack.
    let fetched = node.metric("fletch_chunk_fetched_bytes_total").await - before;
    assert!(fetched * 2 < written && fetched >= total, "{fetched} of {written}");
    node.running.shutdown().await;
}
