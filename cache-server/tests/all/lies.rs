//! Tests I1: no wrong byte leaves the server, whatever the origin does. Each case has its code and its
//! counter.

use crate::common::{Node, Tree, body, content, problem, tag, write};
use fletch_api::{Code, routes};
use fletch_core::{
    Hash, Root,
    manifest::{Entry, LayoutParams},
};
use fletch_tables::{PinRow, Table};
use reqwest::StatusCode;
use std::{
    fs::{File, FileTimes},
    path::Path,
    time::{Duration, SystemTime},
};

fn chunk_of(root: Root, bytes: &[u8]) -> String {
    routes::chunk(root, Hash::of(bytes))
}

/// Writes other bytes into a file and restores its mtime. Only its ctime shows the change.
fn overwrite_in_place(at: &Path, bytes: &[u8]) {
    let before = std::fs::metadata(at).expect("metadata").modified().expect("mtime");
    std::fs::write(at, bytes).expect("write");
    let times = FileTimes::new().set_modified(before);
    File::options().write(true).open(at).expect("open").set_times(times).expect("times");
}

/// A table whose schema has 9,000 groups within each other. Each was a level of the reader's stack.
fn deep_schema() -> Vec<u8> {
    let groups = [0x35, 0, 0x18, 0, 0x15, 2, 0].repeat(9000);
    let footer = [&[0x15, 2, 0x19, 0xfc, 0xa8, 0x46][..], &groups, &[0]].concat();
    let length = u32::try_from(footer.len()).expect("short").to_le_bytes();
    [b"PAR1", &footer[..], &length, b"PAR1"].concat()
}

#[tokio::test]
async fn flipped_truncated_swapped_and_gone_objects() {
    let tree = Tree::new([
        ("changed", content(1, 50_000)),
        ("gone", content(2, 50_000)),
        ("grown", content(3, 50_000)),
        ("swap-a", content(4, 50_000)),
        ("swap-b", content(5, 50_000)),
        ("truncated", content(6, 50_000)),
        ("untouched", content(7, 50_000)),
    ]);
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let mut flipped = tree.files["changed"].clone();
    flipped[25_000] ^= 1;
    std::fs::write(tree.path("changed"), &flipped).expect("write");
    std::fs::remove_file(tree.path("gone")).expect("remove");
    let mut grown = tree.files["grown"].clone();
    grown.push(0);
    std::fs::write(tree.path("grown"), &grown).expect("write");
    std::fs::write(tree.path("truncated"), &tree.files["truncated"][..49_999]).expect("write");
    std::fs::write(tree.path("swap-a"), &tree.files["swap-b"]).expect("write");
    std::fs::write(tree.path("swap-b"), &tree.files["swap-a"]).expect("write");

    let fails = async |path: &str, code: Code| {
        let url = chunk_of(root, &tree.files[path]);
        let p = problem(node.get(&url).send().await.expect("answer"), code).await;
        assert!(p.detail.contains(path) && p.hint.contains("fletch refresh"), "{p}");
        // The same through the file's own route and a batch.
        problem(node.get(&format!("/v1/versions/{root}/files/{path}")).send().await.expect("answer"), code)
            .await;
    };
    fails("changed", Code::OriginChanged).await;
    fails("gone", Code::OriginMissing).await;
    fails("grown", Code::OriginChanged).await;
    fails("truncated", Code::OriginChanged).await;
    fails("swap-a", Code::OriginChanged).await;
    fails("swap-b", Code::OriginChanged).await;
    let r = node.get(&chunk_of(root, &tree.files["untouched"])).send().await.expect("answer");
    assert_eq!(body(r, StatusCode::OK).await, tree.files["untouched"]);
    assert_eq!(node.metric("fletch_corrupt_total{source=\"origin_missing\"}").await, 2);
    assert!(node.metric("fletch_corrupt_total{source=\"origin_changed\"}").await >= 10);
    assert!(node.metric("fletch_corrupt_total{source=\"hash\"}").await >= 6);
    assert_eq!(node.accounts().await.accounts.iter().map(|a| a.bytes).sum::<u64>(), 50_000);
    // Put right again, it is served again: errors are not kept.
    std::fs::write(tree.path("changed"), &tree.files["changed"]).expect("write");
    let r = node.get(&chunk_of(root, &tree.files["changed"])).send().await.expect("answer");
    assert_eq!(body(r, StatusCode::OK).await, tree.files["changed"]);
    node.running.shutdown().await;
}

#[tokio::test]
async fn wrong_bytes_behind_an_unchanged_pin_are_corrupt() {
    let tree = Tree::new([("a", content(1, 50_000))]);
    // Tables that know no etag: only size and mtime tell, and both are put back.
    let meta = std::fs::metadata(tree.path("a")).expect("metadata");
    let pin = fletch_origin::local::pin_of(&meta);
    let entry = Entry::file("a", 50_000, Hash::of(&tree.files["a"]));
    let slices = crate::common::slices(&tree.files["a"], LayoutParams::INDEX);
    let pin = PinRow { size: pin.size, mtime_ns: pin.mtime_ns, etag: None };
    let made = write(tree.dir.path(), vec![(entry, slices, pin)], LayoutParams::INDEX);
    let node = Node::serving(&tree, &[]).await;
    let mut flipped = tree.files["a"].clone();
    flipped[7] ^= 128;
    overwrite_in_place(&tree.path("a"), &flipped);
    let p = problem(
        node.get(&chunk_of(made.root(), &tree.files["a"])).send().await.expect("answer"),
        Code::OriginCorrupt,
    )
    .await;
    assert!(!p.retryable);
    // Tried once more before that was said.
    assert_eq!(node.metric("fletch_corrupt_total{source=\"origin_corrupt\"}").await, 2);
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_touched_file_is_still_served() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let times = FileTimes::new().set_modified(SystemTime::now() + Duration::from_secs(1000));
    File::options().write(true).open(tree.path("a.bin")).expect("open").set_times(times).expect("times");
    let r = node.get(&chunk_of(root, &tree.files["a.bin"])).send().await.expect("answer");
    assert_eq!(body(r, StatusCode::OK).await, tree.files["a.bin"]);
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_duplicate_or_another_dataset_with_the_same_root_saves_the_read() {
    let same = content(9, 60_000);
    let tree = Tree::new([("copy-1", same.clone()), ("copy-2", same.clone()), ("lone", content(8, 60_000))]);
    let root = tree.index().root();
    let mirror =
        Tree::new([("copy-1", same.clone()), ("copy-2", same.clone()), ("lone", content(8, 60_000))]);
    assert_eq!(mirror.index().root(), root);
    let node = Node::serving(&tree, &[]).await;
    assert_eq!(node.resolve("d", "latest").await.root, root);
    node.register("mirror", &mirror.uri(), None).await;
    assert_eq!(node.resolve("d", "latest").await.dataset.as_str(), "d");
    std::fs::write(tree.path("copy-1"), content(1, 60_000)).expect("write");
    let r = node.get(&chunk_of(root, &same)).send().await.expect("answer");
    assert_eq!(body(r, StatusCode::OK).await, same, "from copy-2");
    std::fs::remove_file(tree.path("lone")).expect("remove");
    let r = node.get(&chunk_of(root, &tree.files["lone"])).send().await.expect("answer");
    assert_eq!(body(r, StatusCode::OK).await, tree.files["lone"], "from the mirror");
    assert_eq!(node.metric("fletch_corrupt_total{source=\"origin_changed\"}").await, 1);
    assert_eq!(node.metric("fletch_corrupt_total{source=\"origin_missing\"}").await, 1);
    node.running.shutdown().await;
}

#[tokio::test]
async fn damaged_foreign_and_newer_tables() {
    let (tree, other) = (Tree::usual(), Tree::new([("x", content(1, 10))]));
    let (mine, theirs) = (tree.index().written, other.index().written);
    // A fresh server each time: what is open stays open.
    let after = async |change: &dyn Fn()| {
        change();
        let node = Node::serving(&tree, &[]).await;
        let r = node.get("/v1/datasets/d/versions/latest").send().await.expect("answer");
        let path = format!("/v1/versions/{}/files/a.bin", mine.root);
        let file = node.get(&path).send().await.expect("answer");
        let out = (r.status(), r.text().await.expect("text"), file.status());
        node.running.shutdown().await;
        out
    };
    let at = |t: Table| tree.path(&t.path(mine.root, mine.layout));
    let put = |t: Table, bytes: Vec<u8>| std::fs::write(at(t), bytes).expect("write");
    let good = |t: Table| {
        let files = Tree::usual();
        files.index();
        std::fs::read(files.path(&t.path(mine.root, mine.layout))).expect("table")
    };
    let has = |out: &(StatusCode, String, StatusCode), code: Code| {
        assert!(out.1.contains(&format!("\"{code}\"")) && out.0.as_u16() == code.status(), "{out:?}");
        assert!(!out.2.is_success(), "{out:?}");
    };
    let swapped =
        std::fs::read(other.path(&Table::Manifest.path(theirs.root, theirs.layout))).expect("manifest");
    has(&after(&|| put(Table::Manifest, swapped.clone())).await, Code::TablesCorrupt);
    let newer =
        String::from_utf8(good(Table::Manifest)).expect("json").replace("\"major\": 1", "\"major\": 2");
    has(&after(&|| put(Table::Manifest, newer.clone().into_bytes())).await, Code::UnsupportedFormat);
    put(Table::Manifest, good(Table::Manifest));
    has(&after(&|| put(Table::Entries, b"not parquet".to_vec())).await, Code::TablesCorrupt);
    has(&after(&|| put(Table::Entries, deep_schema())).await, Code::TablesCorrupt);
    put(Table::Entries, good(Table::Entries));
    // Rows of the placement: noticed when the part is looked at.
    let damaged = {
        let mut b = good(Table::Placement);
        let middle = b.len() / 3;
        b[middle] ^= 0xff;
        b
    };
    let out = after(&|| put(Table::Placement, damaged.clone())).await;
    assert!(!out.2.is_success(), "{out:?}");
    put(Table::Placement, good(Table::Placement));
    tag(tree.dir.path(), "latest", &theirs);
    let out = after(&|| ()).await;
    assert_eq!(
        (out.0, out.2),
        (StatusCode::BAD_GATEWAY, StatusCode::OK),
        "a tag to nowhere; the root is still there"
    );
    std::fs::write(tree.path("fletch/tags/latest"), "{").expect("write");
    assert!(after(&|| ()).await.1.contains("tables_corrupt"));
}
