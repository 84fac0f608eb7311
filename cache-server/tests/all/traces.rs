//! Tests traces: the simulator replays a recorded sweep of a server and makes the same decisions.

use crate::common::{Node, Tree, content, epochs::*};
use fletch_api::OrderKind;
use fletch_core::plan::Tail;
use fletch_sim::{BadCase, traces};
use std::path::{Path, PathBuf};

fn files(dir: &Path) -> Vec<PathBuf> {
    let Ok(read) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut all: Vec<_> = read.map(|f| f.expect("entry").path()).collect();
    all.sort();
    all
}

/// 300 files of 128 KiB, of which the cache holds a small part.
fn much() -> Tree {
    let mut tree = Tree::new([]);
    for i in 0..300 {
        let name = format!("f{i:04}");
        let bytes = content(100 + i, 128 << 10);
        std::fs::write(tree.path(&name), &bytes).expect("write");
        tree.files.insert(name, bytes);
    }
    tree
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_server_decided_the_simulator_decides() {
    let (tree, dir) = (much(), tempfile::tempdir().expect("tempdir"));
    tree.index();
    let trace = format!("--trace-dir={}", dir.path().display());
    let small = ["--cache-size=16MiB", "--cache-free-floor=0", "--memory=64MiB", "--limits-lease-ttl=3s"];
    let more: Vec<&str> = std::iter::once(trace.as_str()).chain(small).collect();
    let node = Node::serving(&tree, &more).await;
    let client = client(&node);
    let mut jobs = Vec::new();
    for name in ["a", "b", "c"] {
        let ask = ask(name, OrderKind::Substitute, world(1, 8, Tail::Keep));
        jobs.push(client.declare(&ask).await.expect("declared"));
    }
    // One joins late, one leaves a lease to expire and is deleted in the middle.
    let held = batch(&jobs[2], 0, 0, 8).await.expect("a batch");
    let (a, b) = tokio::join!(consume(&jobs[0], &tree, 0, 0, 16), async {
        batch(&jobs[2], 1, 0, 8).await.expect("a batch");
        client.delete_job(&jobs[2].info().id).await.expect("deleted");
        consume(&jobs[1], &tree, 0, 0, 8).await
    });
    assert_eq!((a.0.len(), b.0.len(), held.samples.len()), (300, 300, 8));
    let again = consume(&jobs[0], &tree, 1, 0, 32).await;
    assert_eq!(again.0.len(), 300);
    node.running.shutdown().await;
    let all = files(dir.path());
    assert_eq!(all.len(), 1, "one sweep: {all:?}");
    let same = traces::play(&all[0]).expect("the same, call by call");
    println!("{same}");
    assert!(!same.cut && same.picks >= 900, "{same}");
    // What was decided otherwise is noticed: here, by a server of another key.
    let mut bytes = std::fs::read(&all[0]).expect("trace");
    let other = dir.path().join("other");
    let header = fletch_core::record::file_header().len();
    let (records, _) = fletch_core::record::read(&bytes).expect("a log");
    let (kind, mut first) = (records[0].kind, records[0].payload.to_vec());
    first[5] ^= 1;
    let mut changed = bytes[..header].to_vec();
    fletch_core::record::append(&mut changed, kind, &first);
    for r in &records[1..] {
        fletch_core::record::append(&mut changed, r.kind, r.payload);
    }
    std::fs::write(&other, &changed).expect("write");
    assert!(matches!(traces::play(&other), Err(BadCase::Trace { .. })));
    // Killed while it wrote: what is whole plays.
    bytes.truncate(bytes.len() - 3);
    std::fs::write(&other, &bytes).expect("write");
    assert!(traces::play(&other).expect("the rest").calls < same.calls);
}

#[tokio::test(flavor = "multi_thread")]
async fn traces_are_off_by_default_and_bounded() {
    let (tree, dir) = (much(), tempfile::tempdir().expect("tempdir"));
    tree.index();
    let trace = format!("--trace-dir={}", dir.path().join("below/it").display());
    let node = Node::serving(&tree, &[&trace, "--trace-bytes=6KiB"]).await;
    let job = ask("j", OrderKind::Substitute, world(1, 8, Tail::Keep));
    let job = client(&node).declare(&job).await.expect("declared");
    // More than one look of the recorder.
    for epoch in 0..4 {
        assert_eq!(consume(&job, &tree, epoch, 0, 4).await.0.len(), 300);
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    }
    node.running.shutdown().await;
    let all = files(&dir.path().join("below/it"));
    let bytes = std::fs::metadata(&all[0]).expect("trace").len();
    let same = traces::play(&all[0]).expect("plays");
    assert!(same.cut && same.picks < 1200 && bytes < (6 << 10) + 64, "{same}, {bytes} bytes");
    // Where not even the header has room there is no trace, and the sweep goes on.
    let trace = format!("--trace-dir={}", dir.path().join("none").display());
    let node = Node::serving(&tree, &[&trace, "--trace-bytes=256B"]).await;
    let job = ask("j", OrderKind::Substitute, world(1, 8, Tail::Keep));
    let job = client(&node).declare(&job).await.expect("declared");
    assert_eq!(consume(&job, &tree, 0, 0, 4).await.0.len(), 300);
    node.running.shutdown().await;
    assert_eq!(files(&dir.path().join("none")), Vec::<PathBuf>::new());
    // Strict epochs have no sweep; without the setting there is no file.
    let node = Node::serving(&tree, &[]).await;
    let job = ask("j", OrderKind::Substitute, world(1, 8, Tail::Keep));
    let job = client(&node).declare(&job).await.expect("declared");
    consume(&job, &tree, 0, 0, 64).await;
    let state = node.state.path().to_owned();
    node.running.shutdown().await;
    let named = |d: &Path| files(d).into_iter().any(|f| f.extension().is_some_and(|e| e == "trace"));
    assert!(!named(&state) && !named(&state.join("state")) && !named(&state.join("state/jobs")));
}
