//! Tests the routes for chunks, tables, files and batches, as clients see them.

use crate::common::{Node, Tree, body, content, problem};
use bytes::Bytes;
use fletch_api::{
    Code, Problem,
    frames::{Decoder, Frame},
    routes,
};
use fletch_core::{Hash, Root};
use reqwest::{Method, StatusCode};
use std::collections::BTreeMap;

#[tokio::test]
async fn a_chunk_by_hash_whole_by_range_and_as_head() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let want = &tree.files["a.bin"];
    let path = routes::chunk(root, Hash::of(want));
    let etag = format!("\"{}\"", Hash::of(want));

    let head = node.ask(Method::HEAD, &path).send().await.expect("answer");
    assert_eq!(head.status(), StatusCode::OK);
    assert_eq!(head.headers()["content-length"], "5000");
    assert_eq!(head.headers()["cache-status"], "fletch; fwd=miss");

    let r = node.get(&path).send().await.expect("answer");
    let h = r.headers().clone();
    assert_eq!(body(r, StatusCode::OK).await, *want);
    assert_eq!(h["etag"], etag.as_str());
    assert_eq!(h["accept-ranges"], "bytes");
    assert!(h["cache-control"].to_str().expect("text").contains("immutable"));
    assert_eq!(h["cache-status"], "fletch; fwd=miss; stored");

    for (range, want) in [
        ("bytes=0-0", &want[..1]),
        ("bytes=10-19", &want[10..20]),
        ("bytes=-7", &want[4993..]),
        ("bytes=4000-9999", &want[4000..]),
    ] {
        let r = node.get(&path).header("range", range).send().await.expect("answer");
        assert_eq!(r.headers()["cache-status"], "fletch; hit");
        assert!(r.headers()["content-range"].to_str().expect("text").ends_with("/5000"));
        assert_eq!(body(r, StatusCode::PARTIAL_CONTENT).await, want, "{range}");
    }
    let r = node.get(&path).header("range", "bytes=5000-").send().await.expect("answer");
    assert_eq!(r.headers()["content-range"], "bytes */5000");
    problem(r, Code::RangeNotSatisfiable).await;
    let r = node.get(&path).header("if-none-match", &etag).send().await.expect("answer");
    assert_eq!((r.status(), r.content_length()), (StatusCode::NOT_MODIFIED, Some(0)));
    node.running.shutdown().await;
}

/// RFC 9110, section 13: `If-Match` is evaluated before `If-None-Match` and `Range`.
#[tokio::test]
async fn a_read_of_another_representation_fails_if_the_client_says_so() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let chunk = routes::chunk(root, Hash::of(&tree.files["a.bin"]));
    for path in [chunk, routes::file(root, "a.bin"), routes::manifest(root)] {
        let r = node.get(&path).send().await.expect("answer");
        let etag = r.headers()["etag"].to_str().expect("text").to_owned();
        let whole = body(r, StatusCode::OK).await;
        let ask = |method: Method, tags: String| node.ask(method, &path).header("if-match", tags);
        for tags in [etag.clone(), "*".into(), format!("\"other\", {etag}")] {
            let r = ask(Method::GET, tags.clone()).send().await.expect("answer");
            assert_eq!(body(r, StatusCode::OK).await, whole, "{path} {tags}");
            let r = ask(Method::GET, tags).header("range", "bytes=1-2").send().await.expect("answer");
            assert_eq!(body(r, StatusCode::PARTIAL_CONTENT).await, whole[1..3]);
        }
        for tags in ["\"other\"".to_owned(), format!("W/{etag}"), String::new()] {
            let r = ask(Method::GET, tags.clone()).send().await.expect("answer");
            let p = problem(r, Code::PreconditionFailed).await;
            assert!(p.detail.contains(&etag), "{p}");
            let r =
                ask(Method::GET, tags.clone()).header("range", "bytes=1-2").header("if-none-match", &etag);
            assert_eq!(r.send().await.expect("answer").status(), 412, "{path} {tags}");
            assert_eq!(ask(Method::HEAD, tags).send().await.expect("answer").status(), 412);
        }
        let r = ask(Method::GET, etag.clone()).header("if-none-match", &etag).send().await.expect("answer");
        assert_eq!(r.status(), StatusCode::NOT_MODIFIED);
    }
    let r = node.get(&routes::file(root, "none")).header("if-match", "*").send().await.expect("answer");
    problem(r, Code::NotFound).await;
    node.running.shutdown().await;
}

#[tokio::test]
async fn i7_foreign_absent_and_unregistered_give_the_same_answer() {
    let (tree, other) = (Tree::usual(), Tree::new([("only-here", content(77, 3000))]));
    let root = tree.index().root();
    let foreign = other.index().root();
    let node = Node::serving(&tree, &[]).await;
    let (mine, theirs, nobodys) =
        (Hash::of(&tree.files["z"]), Hash::of(&other.files["only-here"]), Hash::of(b"nobody's"));
    let answer = async |path: String| {
        let mut p = problem(node.get(&path).send().await.expect("answer"), Code::NotFound).await;
        p.hint.clear();
        p
    };
    let absent = answer(routes::chunk(root, nobodys)).await;
    // A root that is not registered here, a hash of another version, a root nobody has, another file.
    assert_eq!(answer(routes::chunk(foreign, theirs)).await, absent);
    assert_eq!(answer(routes::chunk(root, theirs)).await, absent);
    assert_eq!(answer(routes::chunk(Root(nobodys), mine)).await, absent);
    assert_eq!(answer(routes::manifest(Root(nobodys))).await, absent);
    assert_eq!(answer(format!("/v1/versions/{root}/files/nothing")).await, absent);
    // Names are those of the caller's own domain, so these answers repeat the name.
    let unknown = answer("/v1/datasets/nobodys".into()).await;
    assert_eq!(unknown.detail, "no dataset nobodys is registered here");
    let untagged = answer("/v1/datasets/d/versions/no-such-tag".into()).await;
    assert_eq!(untagged.detail, "dataset d has no tag no-such-tag");
    // In memory, and still not to be had once the dataset is forgotten.
    body(node.get(&routes::chunk(root, mine)).send().await.expect("answer"), StatusCode::OK).await;
    let r = node.ask(Method::DELETE, "/v1/datasets/d").send().await.expect("answer");
    assert_eq!(r.status(), StatusCode::NO_CONTENT);
    assert_eq!(answer(routes::chunk(root, mine)).await, absent);
    node.running.shutdown().await;
}

#[tokio::test]
async fn files_whole_by_range_and_never_outside() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let file = |p: &str| format!("/v1/versions/{root}/files/{p}");
    for (path, want) in &tree.files {
        let url = file(&path.replace('#', "%23").replace(' ', "%20"));
        assert_eq!(&body(node.get(&url).send().await.expect("answer"), StatusCode::OK).await, want, "{path}");
        let head = node.ask(Method::HEAD, &url).send().await.expect("answer");
        assert_eq!(head.headers()["content-length"], want.len().to_string().as_str());
        assert_eq!(head.headers()["etag"], format!("\"{}\"", Hash::of(want)).as_str());
    }
    let big = &tree.files["big.bin"];
    let across = (4 << 20) - 10..(8 << 20) + 10;
    let range = format!("bytes={}-{}", across.start, across.end - 1);
    let r = node.get(&file("big.bin")).header("range", range).send().await.expect("answer");
    assert_eq!(body(r, StatusCode::PARTIAL_CONTENT).await, big[across]);

    std::fs::write(tree.dir.path().join("not-indexed"), "secret").expect("write");
    for path in
        ["not-indexed", "train", "train/", "..%2fa.bin", "train/..%2fa.bin", "%2fetc%2fpasswd", "a.bin%00"]
    {
        problem(node.get(&file(path)).send().await.expect("answer"), Code::NotFound).await;
    }
    let p = problem(node.get(&file("link")).send().await.expect("answer"), Code::NotAFile).await;
    assert!(p.hint.contains("a.bin"), "{p}");
    problem(node.get(&file("%ff")).send().await.expect("answer"), Code::BadRequest).await;
    node.running.shutdown().await;
}

#[tokio::test]
async fn tables_by_range_as_they_lie() {
    let tree = Tree::usual();
    let made = tree.index();
    let (root, layout) = (made.written.root, made.written.layout);
    let node = Node::serving(&tree, &[]).await;
    for path in [
        routes::manifest(root),
        routes::entries(root),
        routes::layout(root, layout),
        routes::placement(root, layout),
    ] {
        let at_rest =
            std::fs::read(tree.path(&path.replace("/v1/versions", "fletch/versions"))).expect("table");
        let r = node.get(&path).send().await.expect("answer");
        let etag = r.headers()["etag"].clone();
        assert_eq!(body(r, StatusCode::OK).await, at_rest, "{path}");
        let r = node.get(&path).header("range", "bytes=-8").send().await.expect("answer");
        assert_eq!(body(r, StatusCode::PARTIAL_CONTENT).await, at_rest[at_rest.len() - 8..]);
        let r = node.get(&path).header("if-none-match", etag).send().await.expect("answer");
        assert_eq!(r.status(), StatusCode::NOT_MODIFIED);
        let r = node.get(&path).header("range", "bytes=99999999-").send().await.expect("answer");
        problem(r, Code::RangeNotSatisfiable).await;
        let head = node.ask(Method::HEAD, &path).send().await.expect("answer");
        assert_eq!(head.headers()["content-length"], at_rest.len().to_string().as_str());
    }
    // What names origins is for fallback clients only.
    let r = node
        .get(&format!("/v1/versions/{root}/layouts/{layout}/chunks.parquet"))
        .send()
        .await
        .expect("answer");
    problem(r, Code::NotFound).await;
    let other = fletch_core::LayoutId(Hash::of(b"none"));
    problem(node.get(&routes::layout(root, other)).send().await.expect("answer"), Code::NotFound).await;
    node.running.shutdown().await;
}

/// The result of a batch: bytes or a problem for each index.
async fn batch(node: &Node, root: Root, items: serde_json::Value) -> BTreeMap<u32, Result<Vec<u8>, Problem>> {
    let ask = serde_json::json!({"items": items}).to_string();
    let r = node.post(&routes::batch(root), ask).send().await.expect("answer");
    assert_eq!(r.headers()["content-type"], "application/vnd.fletch.frames");
    let bytes = body(r, StatusCode::OK).await;
    let mut decoder = Decoder::new(16 << 20);
    decoder.feed(Bytes::from(bytes));
    let (mut out, mut last) = (BTreeMap::new(), 0);
    while let Some(frame) = decoder.next_frame().expect("frames") {
        match frame {
            Frame::Data { index, bytes, .. } => {
                assert!(index >= last, "items in order");
                last = index;
                let entry = out.entry(index).or_insert_with(|| Ok(Vec::new()));
                entry.as_mut().expect("no data after an error").extend_from_slice(&bytes);
            }
            Frame::Error { index, status, problem } => {
                let p: Problem = serde_json::from_slice(&problem).expect("problem");
                assert_eq!(p.status, status);
                out.insert(index, Err(p));
                last = index;
            }
            Frame::End { items } => assert_eq!(items as usize, out.len()),
            other => panic!("a batch has no {other:?}"),
        }
    }
    decoder.finish().expect("whole");
    out
}

#[tokio::test]
async fn a_batch_answers_each_item_with_its_own_outcome() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let a = &tree.files["a.bin"];
    let hash = Hash::of(a).to_string();
    let items = serde_json::json!([
        {"path": "a.bin"},
        {"path": "nothing"},
        {"ordinal": 1},
        {"ordinal": 99},
        {"chunk": {"hash": hash, "offset": 100, "length": 50}},
        {"chunk": {"hash": hash, "offset": 4990, "length": 50}},
        {"path": "link"},
        {"path": "empty"},
        {"chunk": {"hash": Hash::of(b"nobody's").to_string()}},
        {"path": "train/0001 ü#1.jpg"},
    ]);
    let got = batch(&node, root, items).await;
    let bytes = |i: u32| got[&i].as_ref().expect("bytes");
    let code = |i: u32| got[&i].as_ref().expect_err("a problem").code;
    assert_eq!(bytes(0), a);
    assert_eq!(code(1), Code::NotFound);
    assert_eq!(bytes(2), &tree.files["big.bin"], "ordinal 1, in several frames");
    assert_eq!(code(3), Code::NotFound);
    assert_eq!(bytes(4), &a[100..150]);
    assert_eq!(code(5), Code::RangeNotSatisfiable);
    assert_eq!(code(6), Code::NotAFile);
    assert!(bytes(7).is_empty());
    assert_eq!(code(8), Code::NotFound);
    assert_eq!(bytes(9), &tree.files["train/0001 ü#1.jpg"]);
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_batch_is_bounded_in_items_and_bytes() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let node = Node::serving(&tree, &["--limits-batch-bytes=16MiB", "--limits-body-bytes=1MiB"]).await;
    let ask = async |n: usize| {
        let items = vec![serde_json::json!({"path": "z"}); n];
        node.post(&routes::batch(root), serde_json::json!({"items": items}).to_string())
            .send()
            .await
            .expect("answer")
    };
    problem(ask(0).await, Code::BadRequest).await;
    problem(ask(4097).await, Code::BadRequest).await;
    assert_eq!(ask(4096).await.status(), StatusCode::OK);
    let r = node.post(&routes::batch(root), "{").send().await.expect("answer");
    problem(r, Code::BadRequest).await;
    let r = node.post(&routes::batch(root), " ".repeat((1 << 20) + 1)).send().await.expect("answer");
    problem(r, Code::BodyTooLarge).await;
    let got =
        batch(&node, root, serde_json::json!([{"path": "big.bin"}, {"path": "big.bin"}, {"path": "a.bin"}]))
            .await;
    assert_eq!(got[&0].as_ref().expect("first"), &tree.files["big.bin"]);
    assert_eq!(got[&1].as_ref().expect_err("past the bound").code, Code::BodyTooLarge);
    assert_eq!(got[&2].as_ref().expect("fits again"), &tree.files["a.bin"]);
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_batch_as_tar_is_what_tar_reads() {
    use std::io::Read as _;
    let long: &'static str = Box::leak(format!("{}/file", "d".repeat(200)).into_boxed_str());
    let tree = Tree::new([("a.bin", content(1, 5000)), (long, content(2, 600)), ("empty", Vec::new())]);
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let paths = ["a.bin", "gone", long, "empty"];
    let items = serde_json::json!({"items": paths.map(|path| serde_json::json!({"path": path}))});
    let r = node
        .post(&routes::batch(root), items.to_string())
        .header("accept", "application/x-tar")
        .send()
        .await
        .expect("answer");
    assert_eq!(r.headers()["content-type"], "application/x-tar");
    let bytes = body(r, StatusCode::OK).await;
    let mut archive = tar::Archive::new(&bytes[..]);
    let mut members = BTreeMap::new();
    for entry in archive.entries().expect("archive") {
        let mut entry = entry.expect("member");
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).expect("content");
        members.insert(entry.path().expect("name").display().to_string(), bytes);
    }
    let missing = members.remove("fletch-problems.json").expect("a list of what is missing");
    let missing: serde_json::Value = serde_json::from_slice(&missing).expect("json");
    assert_eq!((&missing[0]["index"], &missing[0]["problem"]["code"]), (&1.into(), &"not_found".into()));
    assert_eq!(members, tree.files);
    node.running.shutdown().await;
}

#[tokio::test]
async fn the_unix_socket_serves_the_same() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let tree = Tree::usual();
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let path = node.running.socket.clone().expect("socket");
    let mut stream = tokio::net::UnixStream::connect(&path).await.expect("connect");
    let ask = format!(
        "GET {} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        routes::chunk(root, Hash::of(&tree.files["a.bin"]))
    );
    stream.write_all(ask.as_bytes()).await.expect("write");
    let mut got = Vec::new();
    stream.read_to_end(&mut got).await.expect("read");
    assert!(got.starts_with(b"HTTP/1.1 200 OK") && got.ends_with(&tree.files["a.bin"]));
    node.running.shutdown().await;
    assert!(!path.exists(), "the socket file is gone after a stop");
}
