//! Servers and etcd that are killed, stopped, cut off and paused at random under mounts and jobs.

use fletch_api::OrderKind;
use fletch_client::epochs::JobHandle;
use fletch_core::Hash;
use fletch_tests::cluster::agreed;
use fletch_tests::cluster_ranks::{Consumed, JOB_MAX, RankStage, SILENCE, ask, check_once, keep, train};
use fletch_tests::fixture::Mounted;
use fletch_tests::require::{Need, have};
use nix::sys::signal::Signal;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// For how many seconds there is trouble, in the long form of the test.
const TROUBLE_SECONDS: &str = "FLETCH_TEST_TROUBLE_SECONDS";

/// Random numbers by xorshift, so that a seed repeats a run.
struct Chance(u64);

impl Chance {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }

    fn pause(&mut self, from_ms: u64, to_ms: u64) {
        thread::sleep(Duration::from_millis(from_ms + self.below(to_ms - from_ms)));
    }
}

/// Does one thing to a server or to etcd, and undoes it. Returns what it was.
fn trouble(stage: &mut RankStage, chance: &mut Chance) -> &'static str {
    let at = usize::try_from(chance.below(3)).expect("small");
    let server = &mut stage.servers[at];
    let what = match chance.below(6) {
        0 => {
            server.kill();
            chance.pause(100, 3_000);
            server.start();
            "kill"
        }
        1 => {
            server.kill();
            for dir in ["state", "cache"] {
                fs::remove_dir_all(server.place(dir)).expect("deleted");
            }
            thread::sleep(SILENCE);
            server.start();
            "kill and delete"
        }
        2 => {
            server.end();
            chance.pause(100, 3_000);
            server.start();
            "stop"
        }
        3 => {
            server.cut_all(true);
            chance.pause(500, 6_000);
            server.cut_all(false);
            "cut"
        }
        4 => {
            server.signal(Signal::SIGSTOP);
            chance.pause(500, 6_000);
            server.signal(Signal::SIGCONT);
            "pause"
        }
        _ => {
            stage.etcd.kill(at);
            chance.pause(500, 3_000);
            stage.etcd.revive(at);
            "kill of an etcd"
        }
    };
    agreed(&stage.servers.iter().collect::<Vec<_>>(), "a:up b:up c:up", Duration::from_secs(30));
    what
}

/// Reads random files of a mount and compares their bytes, until `stop`. Returns how many were read, and
/// those that failed or were wrong.
fn read_on(mount: &Path, files: &[(String, Hash)], seed: u64, stop: &AtomicBool) -> (u64, Vec<String>) {
    let (mut chance, mut reads, mut failed) = (Chance(seed), 0, Vec::new());
    while !stop.load(SeqCst) {
        let (path, hash) = &files[usize::try_from(chance.below(files.len() as u64)).expect("small")];
        match fs::read(mount.join(path)) {
            Ok(bytes) if Hash::of(&bytes) == *hash => {}
            Ok(_) => failed.push(format!("{path} has wrong bytes")),
            Err(error) => failed.push(format!("{path}: {error}")),
        }
        reads += 1;
        thread::sleep(Duration::from_millis(2));
    }
    (reads, failed)
}

/// Trains a job with two ranks, epoch after epoch, until `stop`. Returns how many epochs it made.
async fn train_on(handles: Vec<JobHandle>, stop: Arc<AtomicBool>) -> u64 {
    let mut keepers = JoinSet::new();
    handles.iter().for_each(|job| keep(job, &mut keepers));
    for epoch in 0.. {
        if stop.load(SeqCst) {
            return epoch;
        }
        let (consumed, mut tasks) = (Consumed::new(), JoinSet::new());
        for (rank, job) in (0..).zip(&handles) {
            tasks.spawn(train(job.clone(), epoch, rank, Duration::from_millis(40), Arc::clone(&consumed)));
        }
        while let Some(ended) = tasks.join_next().await {
            ended.expect("a rank does not fail");
        }
        check_once(&handles[0], epoch, &consumed, &format!("{}, epoch {epoch}", handles[0].info().name))
            .await;
    }
    0
}

/// Servers and etcd are killed, stopped, cut off and paused at random, some with their disks deleted, while
/// two mounts read and three jobs train: no read fails, and each sample of each epoch is consumed once.
#[tokio::test(flavor = "multi_thread")]
async fn random_trouble_fails_no_read_and_doubles_no_sample() {
    if !have(&[Need::Etcd, Need::Fuse]) {
        return;
    }
    let seconds = std::env::var(TROUBLE_SECONDS).ok().and_then(|n| n.parse().ok()).unwrap_or(15);
    let seed = std::env::var("FLETCH_TEST_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(0x9e37);
    let mut stage = RankStage::start_with(3, &[]);
    let list = stage.servers.iter().map(|s| s.url.as_str()).collect::<Vec<_>>().join(",");
    let mounts: Vec<Mounted> = (0..2)
        .map(|i| {
            let (dir, log) = (stage.set.scratch.path().join(format!("mnt-{i}")), format!("mount-{i}.log"));
            fs::create_dir(&dir).expect("a directory");
            let log = stage.set.scratch.path().join(log);
            Mounted::start(&list, dir, &log, &["set"])
        })
        .collect();
    let stop = Arc::new(AtomicBool::new(false));
    let mut jobs = JoinSet::new();
    for (name, order) in
        [("a", OrderKind::Strict), ("b", OrderKind::Substitute), ("c", OrderKind::Substitute)]
    {
        let mut handles = Vec::new();
        for _ in 0..2 {
            handles.push(stage.client().declare(&ask(name, order, 2)).await.expect("declared"));
        }
        for (rank, job) in (0..).zip(&handles) {
            job.join(0, rank).await.expect("joined");
        }
        jobs.spawn(train_on(handles, Arc::clone(&stop)));
    }
    let files = stage.set.data.files.clone();
    let (mut chance, mut done) = (Chance(seed), Vec::new());
    let read: Vec<(u64, Vec<String>)> = thread::scope(|scope| {
        let readers: Vec<_> = (1u64..)
            .zip(&mounts)
            .map(|(i, mount)| {
                let (files, stop) = (&files, &stop);
                scope.spawn(move || read_on(&mount.dir, files, seed + i, stop))
            })
            .collect();
        let began = Instant::now();
        tokio::task::block_in_place(|| {
            while began.elapsed() < Duration::from_secs(seconds) {
                done.push(trouble(&mut stage, &mut chance));
            }
        });
        stop.store(true, SeqCst);
        readers.into_iter().map(|reader| reader.join().expect("read")).collect()
    });
    let mut epochs = Vec::new();
    while let Some(ended) = tokio::time::timeout(JOB_MAX * 2, jobs.join_next()).await.expect("the jobs end") {
        epochs.push(ended.expect("a job does not fail"));
    }
    eprintln!(
        "seed {seed}: {done:?}; epochs {epochs:?}; reads {:?}",
        read.iter().map(|r| r.0).collect::<Vec<_>>()
    );
    for (reads, failed) in &read {
        assert!(failed.is_empty() && *reads > 0, "{reads} reads, failed: {failed:?}\n{}", stage.logs());
    }
    drop(mounts);
}
