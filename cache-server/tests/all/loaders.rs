//! Tests two processes that are the same rank of the same job: one reads, the other is refused or takes over.

use crate::common::{Node, epochs::*, problem};
use crate::releases::keep_alive;
use fletch_api::{Code, Job, JobLoaders, LeaseRequest, Loader, OrderKind, Problem, Visitation, routes};
use fletch_client::{
    Client,
    epochs::{EpochReader, JobHandle, Next, ReceivedSum},
};
use fletch_core::plan::Tail;
use std::time::{Duration, Instant};

const TTL: Duration = Duration::from_secs(4);
const FLAGS: [&str; 1] = ["--limits-lease-ttl=4s"];

/// The loader of a process on another host than this one.
fn process(n: u32) -> Loader {
    let (id, host) = (format!("{n:032x}"), format!("gpu-{n}"));
    Loader { id, host, pid: n, since_ms: 1_790_000_000_000, take_over: false, leave: false }
}

async fn declared(node: &Node, name: &str, loader: Loader) -> JobHandle {
    let job = ask(name, OrderKind::Strict, world(1, 2, Tail::Keep));
    client(node).declare(&job).await.expect("declared").with_loader(loader)
}

/// Asks once for a lease, without a retry. Returns the problem.
async fn refused(node: &Node, job: &JobHandle, loader: Option<Loader>, code: Code) -> Problem {
    let path = routes::epoch(&job.info().id, 0, "leases");
    let ask = LeaseRequest { sequence: 1, worker: 9, want: 2, loader, ..LeaseRequest::default() };
    let body = serde_json::to_string(&ask).expect("json");
    problem(node.post(&path, body).send().await.expect("answer"), code).await
}

async fn loaders(job: &JobHandle) -> JobLoaders {
    let now: Job = job.current().await.expect("job");
    now.loaders.expect("this server shows them")
}

/// Reads a rank to its end, with an ack for each lease. Returns the number of entries.
async fn read_all(job: &JobHandle, reader: &mut EpochReader, received: &mut ReceivedSum) -> usize {
    let mut n = 0;
    loop {
        match reader.next(2).await.expect("a lease") {
            Next::Batch(b) => {
                ack(job, &b).await;
                b.samples.iter().for_each(|s| received.add(s));
                n += b.samples.len();
            }
            Next::Done => return n,
            Next::Full | Next::Last => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_process_is_refused_while_the_first_lives() {
    let tree = tree(10);
    tree.index();
    let node = Node::serving(&tree, &FLAGS).await;
    let first = declared(&node, "copied", process(1)).await;
    let mut received = ReceivedSum::new(first.info().root);
    let mut reader = first.reader(0, 0, 0);
    let Next::Batch(b) = reader.next(2).await.expect("a lease") else { panic!("a batch") };
    let waits = refused(&node, &first, Some(process(2)), Code::RankWaits).await;
    assert!(waits.retryable && waits.detail.contains("process 1 on gpu-1 (since 2026-"), "{waits}");
    let shown = loaders(&first).await;
    assert_eq!((shown.total, shown.unnamed), (1, 0));
    assert_eq!(shown.ranks[0].loader, Some(process(1)));
    assert_eq!(shown.ranks[0].waiting, Some(process(2)));
    // What only reads the job is no sign of life of a rank. An ack is.
    refused(&node, &first, Some(process(2)), Code::RankWaits).await;
    ack(&first, &b).await;
    b.samples.iter().for_each(|s| received.add(s));
    let in_use = refused(&node, &first, Some(process(2)), Code::RankInUse).await;
    assert!(!in_use.retryable && in_use.detail.contains("process 1 on gpu-1"), "{in_use}");
    for remedy in ["end that process", "job=", "take_over=True"] {
        assert!(in_use.hint.contains(remedy), "{in_use}");
    }
    // Also the client's reader ends with this error, and an ack of the second changes nothing.
    let second = declared(&node, "copied", process(3)).await;
    let Next::Batch(b) = reader.next(2).await.expect("a lease") else { panic!("a batch") };
    let beat = keep_alive(&first);
    let error = second.reader(0, 0, 0).patience(Duration::from_secs(60)).next(2).await.expect_err("in use");
    assert_eq!(error.code(), Some(Code::RankInUse), "a renewal is a sign of life: {error}");
    let error = second.ack(0, 0, &[b.token.ack(Default::default())]).await.expect_err("in use");
    assert_eq!(error.code(), Some(Code::RankInUse));
    drop(beat);
    ack(&first, &b).await;
    b.samples.iter().for_each(|s| received.add(s));
    let n = 4 + read_all(&first, &mut reader, &mut received).await;
    let receipt = first.receipt(0).await.expect("finished");
    assert!(received.agrees(&receipt));
    assert_eq!(receipt.receipt.redelivered, 0);
    let rows: Vec<_> =
        receipt.acked_by.iter().map(|row| (row.rank, row.loader.clone(), row.entries)).collect();
    assert_eq!(rows, [(0, Some(process(1)), n as u64)]);
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_takes_over_from_a_process_that_was_killed() {
    let tree = tree(10);
    tree.index();
    let node = Node::serving(&tree, &FLAGS).await;
    let first = declared(&node, "restarted", process(1)).await;
    let Next::Batch(lost) = first.reader(0, 0, 0).next(2).await.expect("a lease") else { panic!("a batch") };
    let begun = Instant::now();
    let second = declared(&node, "restarted", process(2)).await;
    let mut received = ReceivedSum::new(second.info().root);
    let mut reader = second.reader(0, 0, 0).patience(Duration::from_secs(60));
    let n = read_all(&second, &mut reader, &mut received).await;
    let took = begun.elapsed();
    assert!(took > TTL / 2 && took < 3 * TTL, "{took:?}");
    // The first one was only slow: it learns who is the rank now, and its ack does not count.
    let error = first.ack(0, 0, &[lost.token.ack(Default::default())]).await.expect_err("taken over");
    assert_eq!(error.code(), Some(Code::RankTaken));
    assert!(error.to_string().contains("process 2 on gpu-2"), "{error}");
    let taken = refused(&node, &first, Some(Loader { take_over: true, ..process(1) }), Code::RankTaken).await;
    assert!(taken.hint.contains("end this process"), "{taken}");
    let receipt = second.receipt(0).await.expect("finished");
    assert!(received.agrees(&receipt));
    assert_eq!((receipt.receipt.redelivered, receipt.acked_by.len()), (2, 1));
    assert_eq!(receipt.acked_by[0].entries, n as u64);
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_flag_and_a_farewell_give_the_rank_and_its_samples_at_once() {
    let tree = tree(10);
    tree.index();
    let node = Node::serving(&tree, &["--limits-lease-ttl=120s"]).await;
    let begun = Instant::now();
    for name in ["flag", "farewell"] {
        let first = declared(&node, name, process(1)).await;
        let Next::Batch(_) = first.reader(0, 0, 0).next(2).await.expect("a lease") else { panic!("a batch") };
        let take_over = name == "flag";
        if !take_over {
            first.leave(0, 0).await.expect("it left");
            assert!(loaders(&first).await.ranks[0].has_left);
        }
        let second = declared(&node, name, Loader { take_over, ..process(2) }).await;
        let mut received = ReceivedSum::new(second.info().root);
        read_all(&second, &mut second.reader(0, 0, 0), &mut received).await;
        let receipt = second.receipt(0).await.expect("finished");
        assert!(received.agrees(&receipt), "{name}");
        assert_eq!(receipt.receipt.redelivered, 2, "{name}: the lease of the first ended");
        let error = first.reader(0, 0, 0).next(2).await.expect_err("taken over");
        assert_eq!(error.code(), Some(Code::RankTaken), "{name}");
        // A late farewell of a process that was replaced changes nothing.
        first.leave(0, 0).await.expect_err("not its rank");
        assert!(!loaders(&second).await.ranks[0].has_left);
    }
    assert!(begun.elapsed() < Duration::from_secs(60), "no lease was waited for");
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_once_a_replaced_process_keeps_what_it_was_granted() {
    let tree = tree(10);
    tree.index();
    let node = Node::serving(&tree, &["--limits-lease-ttl=120s"]).await;
    let mut once = ask("once", OrderKind::Strict, world(1, 2, Tail::Keep));
    once.visitation = Visitation::AtMostOnce;
    let declare = async |loader| client(&node).declare(&once).await.expect("declared").with_loader(loader);
    let first = declare(process(1)).await;
    let Next::Batch(had) = first.reader(0, 0, 0).next(2).await.expect("a lease") else { panic!("a batch") };
    let second = declare(Loader { take_over: true, ..process(2) }).await;
    let mut reader = second.reader(0, 0, 0);
    let mut seen: Vec<u32> = had.samples.iter().map(|s| s.entry).collect();
    while let Next::Batch(b) = reader.next(2).await.expect("a lease") {
        seen.extend(b.samples.iter().map(|s| s.entry));
    }
    seen.sort_unstable();
    assert!(seen.windows(2).all(|two| two[0] < two[1]), "{seen:?}: none twice");
    assert_eq!(seen.len(), 12, "none lost");
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_without_an_id_read_on_and_are_shown() {
    let tree = tree(10);
    tree.index();
    let node = Node::serving(&tree, &FLAGS).await;
    let job = declared(&node, "unnamed", process(1)).await;
    let path = routes::epoch(&job.info().id, 0, "leases");
    for worker in 0..2 {
        let ask = serde_json::json!({"rank": 0, "worker": worker, "sequence": 1, "want": 2});
        let answer = node.post(&path, ask.to_string()).send().await.expect("answer");
        assert_eq!(answer.status(), 200);
    }
    let shown = loaders(&job).await;
    assert_eq!((shown.total, shown.unnamed), (1, 1));
    assert!(shown.ranks[0].loader.is_none() && shown.ranks[0].unnamed_ms.is_some());
    // A name that is not valid is refused, and takes no place.
    for bad in [
        Loader { id: "no id".into(), ..process(1) },
        Loader { host: "h".repeat(256), ..process(1) },
        Loader { since_ms: u64::MAX, ..process(1) },
        Loader { leave: true, ..process(1) },
    ] {
        let told = refused(&node, &job, Some(bad), Code::BadRequest).await;
        assert!(told.detail.contains("loader") || told.detail.contains("rank up"), "{told}");
    }
    assert!(loaders(&job).await.ranks[0].loader.is_none());
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_restart_of_the_server_the_first_to_ask_is_the_rank() {
    let tree = tree(10);
    tree.index();
    let node = Node::serving(&tree, &FLAGS).await;
    let first = declared(&node, "j", process(1)).await;
    let Next::Batch(b) = first.reader(0, 0, 0).next(2).await.expect("a lease") else { panic!("a batch") };
    refused(&node, &first, Some(process(2)), Code::RankWaits).await;
    let Node { running, state, .. } = node;
    running.shutdown().await;
    let node = Node::start_in(state, &FLAGS).await;
    let client: Client = client(&node);
    let first = client.job(&first.info().id).await.expect("job").with_loader(process(1));
    ack(&first, &b).await;
    refused(&node, &first, Some(process(2)), Code::RankWaits).await;
    let mut received = ReceivedSum::new(first.info().root);
    let n = read_all(&first, &mut first.reader(0, 0, 0), &mut received).await;
    b.samples.iter().for_each(|s| received.add(s));
    let receipt = first.receipt(0).await.expect("finished");
    assert!(received.agrees(&receipt));
    assert_eq!(receipt.acked_by[0].entries, n as u64 + 2);
    node.running.shutdown().await;
}
