//! Tests sweeps that jobs share, and epochs that survive restarts of the server.

use crate::common::{Node, Tree, body, content, epochs::*};
use fletch_api::{OrderKind, StartJob, routes};
use fletch_client::epochs::{JobHandle, Next, ReceivedSum};
use fletch_core::{
    JobName,
    manifest::{LayoutParams, PackParams},
    plan::Tail,
};
use reqwest::StatusCode;
use std::os::unix::fs::FileExt as _;

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_replays_and_a_state_goes_on_in_an_empty_server_with_another_world() {
    let tree = tree(62);
    tree.index();
    for order in [OrderKind::Strict, OrderKind::Substitute] {
        let ask = |world| ask("j", order, world);
        let node = Node::serving(&tree, &[]).await;
        let job = client(&node).declare(&ask(world(2, 8, Tail::Drop))).await.expect("declared");
        let mut got = Vec::new();
        let mut all = ReceivedSum::new(job.info().root);
        for _ in 0..2 {
            for rank in 0..2 {
                let b = batch(&job, 0, rank, 4).await.expect("a batch");
                ack(&job, &b).await;
                b.samples.iter().for_each(|s| all.add(s));
                got.extend(b.samples.iter().map(|s| s.entry));
            }
        }
        // A lease that lives over a restart, its bytes never read.
        let reader = |job: &JobHandle| job.reader(0, 1, 0).after_sequence(1 << 60);
        let Next::Batch(held) = reader(&job).next(4).await.expect("lease") else { panic!("a batch") };
        let id = job.info().id.clone();
        node.running.shutdown().await;
        let node = Node::start_in(node.state, &[]).await;
        let job = client(&node).job(&id).await.expect("remembered");
        let Next::Batch(again) = reader(&job).next(4).await.expect("lease") else { panic!("a batch") };
        assert_eq!(alike(&again), alike(&held), "the same lease");
        let late = client(&node).declare(&ask(world(2, 8, Tail::Drop))).await.expect("the same job");
        assert_eq!(late.info().id, id);
        // Two steps are acknowledged: from here it goes on elsewhere, with four ranks.
        let state = job.state(0).await.expect("state");
        let strict: Vec<u32> = {
            let name = JobName::new("four").expect("name");
            let four = StartJob { name, ..ask(world(4, 8, Tail::Drop)) };
            let four = client(&node).declare(&four).await.expect("declared");
            let mut whole = Vec::new();
            for step in 0..8 {
                for rank in 0..4 {
                    let b = batch(&four, 0, rank, 2).await.expect("a batch");
                    ack(&four, &b).await;
                    if step >= 2 {
                        whole.extend(b.samples.iter().map(|s| s.entry));
                    }
                }
            }
            whole
        };
        node.running.shutdown().await;
        drop(node.state);
        let node = Node::serving(&tree, &[]).await;
        let job = client(&node).declare(&ask(world(4, 8, Tail::Drop))).await.expect("declared anew");
        assert_eq!(job.info().id, id);
        let there = job.put_state(0, state, false).await.expect("resumed");
        assert_eq!((there.acked, there.planned, there.world.ranks), (16, 64, 4));
        let mut rest = Vec::new();
        for _ in 2..8 {
            for rank in 0..4 {
                let b = batch(&job, 0, rank, 2).await.expect("a batch");
                ack(&job, &b).await;
                for s in &b.samples {
                    right(&tree, s);
                    all.add(s);
                    rest.push(s.entry);
                }
            }
        }
        if order == OrderKind::Strict {
            assert_eq!(rest, strict, "bit-identical from the step boundary on");
        }
        got.extend(rest);
        got.sort_unstable();
        assert_eq!(got, (0..64).collect::<Vec<_>>(), "delivered and rest are the plan");
        assert!(all.agrees(&job.receipt(0).await.expect("finished")));
        node.running.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_one_dataset_share_a_sweep() {
    let mut tree = Tree::new([]);
    for i in 0..400 {
        let name = format!("f{i:04}");
        let bytes = content(100 + i, 256 << 10);
        std::fs::write(tree.path(&name), &bytes).expect("write");
        tree.files.insert(name, bytes);
    }
    tree.index();
    let whole: u64 = tree.files.values().map(|b| b.len() as u64).sum();
    // The disk has room for a seventh of it, the memory for less than half.
    let node = Node::serving(&tree, &["--cache-size=20MiB", "--cache-free-floor=0", "--memory=64MiB"]).await;
    let client = client(&node);
    let mut jobs = Vec::new();
    for name in ["a", "b", "c"] {
        let ask = ask(name, OrderKind::Substitute, world(1, 8, Tail::Keep));
        jobs.push(client.declare(&ask).await.expect("declared"));
    }
    assert!(node.metric("fletch_sweep_bytes{of=\"reserve_max\"}").await > 4 << 20, "a share of the disk");
    // The first epoch fills the reserve.
    for epoch in 0..2 {
        let before = node.metric("fletch_chunk_fetched_bytes_total").await;
        let mut readers: Vec<_> = jobs.iter().map(|j| j.reader(epoch, 0, 0)).collect();
        let mut left = jobs.len();
        let mut done = vec![false; jobs.len()];
        while left > 0 {
            for (i, job) in jobs.iter().enumerate().filter(|(i, _)| !done[*i]).collect::<Vec<_>>() {
                match readers[i].next(4).await.expect("lease") {
                    Next::Batch(b) => {
                        b.samples.iter().for_each(|s| right(&tree, s));
                        ack(job, &b).await;
                    }
                    Next::Done => {
                        done[i] = true;
                        left -= 1;
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        let fetched = node.metric("fletch_chunk_fetched_bytes_total").await - before;
        let ratio = fetched as f64 / (3 * whole) as f64;
        println!("epoch {epoch}: backend / delivered = {ratio:.3}");
        // One job's worth for all three, less what is kept.
        assert!((0.05..0.37).contains(&ratio), "epoch {epoch}: {ratio}");
    }
    let accounts = node.accounts().await.accounts;
    let sum = |result| accounts.iter().filter(|a| a.key.result == result).map(|a| a.bytes).sum::<u64>();
    let (substituted, hit) = (sum(fletch_api::ByteResult::Substituted), sum(fletch_api::ByteResult::Hit));
    let other = sum(fletch_api::ByteResult::Miss) + sum(fletch_api::ByteResult::Bypass);
    assert_eq!(substituted + hit + other, 6 * whole, "I8");
    assert!(substituted > 3 * whole, "{substituted} of {whole}");
    // Who joins late begins with what is here: nothing of its first batch is fetched for it.
    let late =
        client.declare(&ask("late", OrderKind::Substitute, world(1, 8, Tail::Keep))).await.expect("declared");
    let first = batch(&late, 0, 0, 8).await.expect("a batch");
    first.samples.iter().for_each(|s| right(&tree, s));
    let accounts = node.accounts().await.accounts;
    let its: Vec<_> = accounts.iter().filter(|a| a.key.job == late.info().name && a.bytes > 0).collect();
    assert!(its.iter().all(|a| a.key.result == fletch_api::ByteResult::Substituted), "{its:#?}");
    assert_eq!(its.iter().map(|a| a.bytes).sum::<u64>(), 8 * (256 << 10));
    // Each grant was one choice, and most of what was chosen was here.
    let picks = async |unit: &str| node.metric(&format!("fletch_sweep_picks_total{{unit=\"{unit}\"}}")).await;
    let (here, kept_back, away) = (picks("resident").await, picks("held_back").await, picks("absent").await);
    assert_eq!(here + kept_back + away, node.metric("fletch_epoch_entries_total{event=\"granted\"}").await);
    assert!(here > kept_back + away, "{here} here, {kept_back} kept back, {away} away");
    node.running.shutdown().await;
}

/// A reader of a damaged record fetches the chunk again. When its share shrinks, a sweep gives units up, and
/// every epoch stays exact.
#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_follows_its_share_and_what_is_damaged_is_fetched_again() {
    let mut tree = Tree::new([]);
    for i in 0..300 {
        let name = format!("f{i:04}");
        let bytes = content(900 + i, 256 << 10);
        std::fs::write(tree.path(&name), &bytes).expect("write");
        tree.files.insert(name, bytes);
    }
    tree.index();
    let node = Node::serving(&tree, &["--cache-size=40MiB", "--cache-free-floor=0", "--memory=64MiB"]).await;
    let job = client(&node).declare(&ask("j", OrderKind::Substitute, world(1, 8, Tail::Keep))).await;
    let job = job.expect("declared");
    let whole = async |epoch: u64| {
        let (mut reader, mut entries) = (job.reader(epoch, 0, 0), Vec::new());
        loop {
            match reader.next(8).await.expect("lease") {
                Next::Batch(b) => {
                    b.samples.iter().for_each(|s| right(&tree, s));
                    entries.extend(b.samples.iter().map(|s| s.entry));
                    ack(&job, &b).await;
                }
                Next::Done => break,
                other => panic!("{other:?}"),
            }
        }
        entries.sort_unstable();
        assert_eq!(entries, (0..300).collect::<Vec<_>>(), "epoch {epoch}");
    };
    whole(0).await;
    let (mut dirs, mut slabs, mut flips) = (vec![node.state.path().to_owned()], Vec::new(), 0);
    while let Some(dir) = dirs.pop() {
        let listed = std::fs::read_dir(dir).expect("listed").map(|e| e.expect("listed").path());
        let (below, files): (Vec<_>, Vec<_>) = listed.partition(|p| p.is_dir());
        dirs.extend(below);
        slabs.extend(files.into_iter().filter(|p| p.extension().is_some_and(|x| x == "slab")));
    }
    for slab in slabs {
        // One that was just compacted is gone.
        let file = match std::fs::File::options().read(true).write(true).open(slab) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            opened => opened.expect("open"),
        };
        let len = file.metadata().expect("metadata").len();
        for at in (50_000..len).step_by(100_000) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).expect("read");
            file.write_all_at(&[byte[0] ^ 4], at).expect("write");
            flips += 1;
        }
    }
    assert!(flips > 200, "{flips}");
    whole(1).await;
    assert!(node.metric("fletch_disk_quarantined_total").await > 0);
    let failed = async || node.metric("fletch_sweep_failed_units_total").await;
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while failed().await == 0 {
        assert!(std::time::Instant::now() < until, "the sweep believes in what is gone");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    // A strict epoch takes nothing from the sweep; a plain reader gets the room of what it reads.
    let strict = client(&node).declare(&ask("s", OrderKind::Strict, world(1, 8, Tail::Keep))).await;
    let strict = strict.expect("declared");
    let b = batch(&strict, 0, 0, 8).await.expect("a batch");
    ack(&strict, &b).await;
    let share = async || node.metric("fletch_sweep_bytes{of=\"reserve_max\"}").await;
    let whole_share = share().await;
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    assert!(share().await >= whole_share / 10 * 9, "{whole_share}, then {}", share().await);
    let evicted = async || node.metric("fletch_sweep_evicted_units_total").await;
    let before = evicted().await;
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    // The share of plain readers grows with what they read.
    for (path, bytes) in tree.files.iter().cycle() {
        if share().await < whole_share / 10 * 9 && evicted().await >= before + 5 {
            break;
        }
        assert!(std::time::Instant::now() < until, "{whole_share}, then {}", share().await);
        let file = node.get(&routes::file(job.info().root, path)).send().await.expect("answer");
        assert!(body(file, StatusCode::OK).await == *bytes);
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    whole(2).await;
    node.running.shutdown().await;
}

/// Reads two staggered epochs of three jobs, and returns the fetched bytes per delivered byte.
async fn staggered_jobs(tree: &Tree, tables: &std::path::Path, more: &[&str]) -> f64 {
    let node = Node::start(&[&["--cache-free-floor=0", "--memory=64MiB"], more].concat()).await;
    node.register("d", &tree.uri(), Some(&tables.display().to_string())).await;
    let client = client(&node);
    let mut jobs = Vec::new();
    for name in ["a", "b", "c"] {
        let ask = ask(name, OrderKind::Substitute, world(1, 8, Tail::Keep));
        jobs.push(client.declare(&ask).await.expect("declared"));
    }
    let epochs = 2;
    let turns_of_an_epoch = tree.files.len() / 16;
    let mut readers: Vec<_> = jobs.iter().map(|j| (0, j.reader(0, 0, 0))).collect();
    let mut turn = 0;
    while readers.iter().any(|(epoch, _)| *epoch < epochs) {
        for (i, job) in jobs.iter().enumerate() {
            let (epoch, reader) = &mut readers[i];
            // Each job begins a third of an epoch after the one before it.
            if *epoch == epochs || turn < i * turns_of_an_epoch / 3 {
                continue;
            }
            match reader.next(16).await.expect("lease") {
                Next::Batch(b) => {
                    b.samples.iter().for_each(|s| right(tree, s));
                    ack(job, &b).await;
                }
                Next::Done => {
                    *epoch += 1;
                    *reader = job.reader(*epoch, 0, 0);
                }
                other => panic!("{other:?}"),
            }
        }
        turn += 1;
    }
    let accounts = node.accounts().await.accounts;
    let delivered: u64 = accounts.iter().map(|a| a.bytes).sum();
    let fetched = node.metric_sum("fletch_origin_read_bytes_total").await;
    node.running.shutdown().await;
    fetched as f64 / delivered as f64
}

/// A sweep holds its chunks in memory where the server has no disk. Reads find them there.
#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_in_memory_shares_as_much_as_a_sweep_on_a_disk() {
    let mut tree = Tree::new([]);
    for i in 0..4_000 {
        let name = format!("f{i:04}");
        let bytes = content(3_000 + i, 24 << 10);
        std::fs::write(tree.path(&name), &bytes).expect("write");
        tree.files.insert(name, bytes);
    }
    let to = tempfile::tempdir().expect("tempdir");
    let group_bytes = 256 << 10;
    let pack = PackParams { group_bytes, ..PackParams::DEFAULT };
    tree.pack_with(to.path(), LayoutParams { pack: Some(pack), ..LayoutParams::PACK }, false);
    let on_disk = staggered_jobs(&tree, to.path(), &["--cache-size=37MiB"]).await;
    let in_memory = staggered_jobs(&tree, to.path(), &["--cache-size=0"]).await;
    println!("origin bytes per delivered byte: {on_disk:.3} on disk, {in_memory:.3} in memory");
    assert!(in_memory <= on_disk + 0.03, "{in_memory} in memory, {on_disk} on disk");
}

/// Reads `epochs` epochs of two jobs, and returns the bytes that were read from the origin meanwhile.
///
/// The server's disk has room for a fifth of the tree. In the middle of the first epoch the jobs rest, and if
/// `beside`, a plain reader reads one file.
async fn two_jobs_beside(tree: &Tree, node: &Node, epochs: std::ops::Range<u64>, beside: bool) -> u64 {
    let client = client(node);
    let root = node.resolve("d", "latest").await.root;
    let mut jobs = Vec::new();
    for name in ["a", "b"] {
        let ask = ask(name, OrderKind::Substitute, world(1, 8, Tail::Keep));
        jobs.push(client.declare(&ask).await.expect("declared"));
    }
    let before = node.metric("fletch_chunk_fetched_bytes_total").await;
    for epoch in epochs.clone() {
        let mut readers: Vec<_> = jobs.iter().map(|j| Some(j.reader(epoch, 0, 0))).collect();
        let mut turn = 0;
        while readers.iter().any(Option::is_some) {
            for (job, reader) in jobs.iter().zip(&mut readers) {
                let Some(open) = reader else { continue };
                match open.next(16).await.expect("lease") {
                    Next::Batch(b) => drop(ack(job, &b).await),
                    Next::Done => *reader = None,
                    other => panic!("{other:?}"),
                }
            }
            turn += 1;
            if epoch == epochs.start && turn == 20 {
                if beside {
                    let file = node.get(&routes::file(root, "f0007")).send().await.expect("answer");
                    assert!(body(file, StatusCode::OK).await == tree.files["f0007"]);
                }
                // Until the disk is divided anew.
                tokio::time::sleep(std::time::Duration::from_secs(2)).await;
            }
        }
    }
    node.metric("fletch_chunk_fetched_bytes_total").await - before
}

/// A plain read of one file takes the room of that file from a sweep, and no more.
#[tokio::test(flavor = "multi_thread")]
async fn one_plain_read_costs_a_sweep_next_to_nothing() {
    let mut tree = Tree::new([]);
    for i in 0..4_000 {
        let name = format!("f{i:04}");
        let bytes = content(9_000 + i, 27_000);
        std::fs::write(tree.path(&name), &bytes).expect("write");
        tree.files.insert(name, bytes);
    }
    tree.index();
    let node = Node::serving(&tree, &["--cache-size=24MiB", "--cache-free-floor=0", "--memory=64MiB"]).await;
    // The first epoch fills the cache.
    two_jobs_beside(&tree, &node, 0..1, false).await;
    let share = async || node.metric("fletch_sweep_bytes{of=\"reserve_max\"}").await;
    // Epochs drift by a hundredth as a sweep grows old, so both kinds are as old as each other on average.
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for (from, with_a_read) in [(1, false), (3, true), (5, true), (7, false)] {
        let bytes = two_jobs_beside(&tree, &node, from..from + 2, with_a_read).await;
        let kind = if with_a_read { &mut beside } else { &mut alone };
        kind.push((bytes, share().await));
    }
    println!("bytes and share: {alone:?} alone, {beside:?} beside a plain read");
    let sum = |kind: &[(u64, u64)]| kind.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    let ((alone, share_alone), (beside, share_beside)) = (sum(&alone), sum(&beside));
    // A unit that the disk refuses shrinks the sweep for a minute, so the share is not exact.
    assert!(share_beside * 100 >= share_alone * 90, "the share {share_alone} became {share_beside}");
    assert!(beside * 100 <= alone * 102 + 100 * 27_000, "{alone} bytes alone, {beside} beside a plain read");
    node.running.shutdown().await;
}

/// A cache whose policy keeps nothing for sweeps, and a version of few chunks, are no fault of the server.
#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_without_a_share_by_policy_is_not_too_small() {
    let tree = tree(10);
    tree.index();
    for (policy, has_share) in [("fletch", true), ("lru", false), ("pin", false)] {
        let node = Node::serving(&tree, &[&format!("--cache-policy={policy}")]).await;
        let asked = ask("j", OrderKind::Substitute, world(1, 4, Tail::Keep));
        let job = client(&node).declare(&asked).await.expect("declared");
        consume(&job, &tree, 0, 0, 4).await;
        let now = job.current().await.expect("job");
        assert_eq!(now.sweep.is_some(), has_share, "{policy}: {:?}", now.sweep);
        let lines = client(&node).jobs().await.expect("jobs");
        assert!(lines.iter().all(|line| line.sweep.as_ref().and_then(|s| s.warning()).is_none()), "{policy}");
        node.running.shutdown().await;
    }
}
