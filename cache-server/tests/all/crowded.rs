//! Tests I6: many lease streams share little memory, and streams that no client reads block no other.

use crate::common::{Node, Tree, content, epochs::*};
use fletch_api::{OrderKind, routes};
use fletch_client::epochs::JobHandle;
use fletch_core::plan::Tail;
use reqwest::StatusCode;
use std::time::Duration;

/// Files of 100 KB, forty in each chunk.
const FILES: u64 = 1_200;
const WANT: u32 = 64;

/// Reads and checks the next leases of a job.
async fn read_on(job: &JobHandle, tree: &Tree, leases: u32) -> u32 {
    let (mut reader, mut got) = (job.reader(0, 0, 0), 0);
    for _ in 0..leases {
        let fletch_client::epochs::Next::Batch(b) = reader.next(WANT).await.expect("a lease") else {
            panic!("a batch")
        };
        b.samples.iter().for_each(|s| right(tree, s));
        ack(job, &b).await;
        got += u32::try_from(b.samples.len()).expect("few");
    }
    got
}

#[tokio::test(flavor = "multi_thread")]
async fn i6_strict_leases_of_a_pack_go_on_with_sixteen_chunks_of_memory() {
    let mut tree = Tree::new([]);
    for i in 0..FILES {
        let (name, bytes) = (format!("f{i:04}"), content(100 + i, 100_000 + (i % 50) as usize));
        std::fs::write(tree.path(&name), &bytes).expect("write");
        tree.files.insert(name, bytes);
    }
    let to = tempfile::tempdir().expect("tempdir");
    let (_, objects) = tree.pack_to(to.path(), false);
    assert!(objects.len() > 25, "more than memory and disk hold: {}", objects.len());
    // What is read comes to stay, so that each sample that is not here costs its whole chunk.
    let few = ["--memory=64MiB", "--memory-prefetch=0", "--cache-size=24MiB", "--cache-free-floor=0"];
    let more = ["--cache-policy=lru", "--io-timeout=10s", "--limits-send-timeout=10m"];
    let node = Node::start(&[few.as_slice(), &more].concat()).await;
    node.register("d", &tree.uri(), Some(&to.path().display().to_string())).await;
    let (client, mut jobs) = (client(&node), Vec::new());
    for j in 0..12 {
        let mut ask = ask(&format!("j-{j}"), OrderKind::Strict, world(1, WANT, Tail::Keep));
        ask.seed = Some(j);
        jobs.push(client.declare(&ask).await.expect("declared"));
    }
    let (unread, read) = jobs.split_at(4);
    let mut waiting = Vec::new();
    for job in unread {
        let path = routes::epoch(&job.info().id, 0, "leases");
        let ask = serde_json::json!({"rank": 0, "sequence": 1, "want": 512});
        let answer = node.post(&path, ask.to_string()).send().await.expect("answer");
        assert_eq!(answer.status(), StatusCode::OK);
        waiting.push(answer);
    }
    let reading = futures::future::join_all(read.iter().map(|job| read_on(job, &tree, 3)));
    let got = tokio::time::timeout(Duration::from_secs(120), reading).await.expect("all go on");
    assert_eq!(got, vec![3 * WANT; read.len()]);
    let (ahead, limit) = (node.metric("fletch_memory_bytes{of=\"read_ahead\"}").await, 64 << 20);
    assert!(ahead <= limit / 16, "{ahead}");
    assert_eq!(node.metric("fletch_overloaded_total").await, 0);
    drop(waiting);
    let gone = async {
        while node.metric("fletch_memory_bytes{of=\"read_ahead\"}").await > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), gone).await.expect("what nobody reads is given back");
    node.running.shutdown().await;
}
