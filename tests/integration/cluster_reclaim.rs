//! Jobs in mid-epoch whose server is lost for good, with its disks: the ranks say what they consumed, and the
//! job goes on at another server. Each sample is consumed once, and nobody does anything.

use fletch_api::{
    BatchTimes, BucketSpec, Code, OrderKind, PlanSpec, ReplaySpec, StartJob, Visitation, WorldSpec,
    jobs::LedgerBytes,
};
use fletch_client::{
    Client, ClientConfig, ClientError, Endpoint,
    epochs::{JobHandle, Next, ReceivedSum},
};
use fletch_core::{Hash, plan::Tail};
use fletch_tests::bins::command;
use fletch_tests::cluster::{ClusterServer, EtcdCluster, agreed};
use fletch_tests::cluster_data::ClusterData;
use fletch_tests::fixture::Mounted;
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use nix::sys::signal::Signal;
use parking_lot::Mutex;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Samples of the dataset.
const SAMPLES: u32 = 96;
/// The longest time for which a rank may wait, from the loss of its server on.
const WAIT_MAX: Duration = Duration::from_secs(25);
/// How soon a killed server counts as down: `cluster.member_ttl` of the rig, and etcd's own delay.
const SILENCE: Duration = Duration::from_secs(5);
/// How long a job may take in all.
const JOB_MAX: Duration = Duration::from_secs(60);
/// How many times a server is lost, in the long form of the test.
const LOSSES: &str = "FLETCH_TEST_LOSSES";
/// For how many seconds there is trouble, in the long form of the test.
const TROUBLE_SECONDS: &str = "FLETCH_TEST_TROUBLE_SECONDS";

/// Servers of a cluster that know a dataset. The servers can be lost, and come back empty.
struct Stage {
    servers: Vec<ClusterServer>,
    /// The servers that are lost, and since when.
    lost: Vec<(usize, Instant)>,
    etcd: EtcdCluster,
    set: ClusterData,
}

impl Stage {
    fn new() -> Self {
        Stage::new_with(1)
    }

    /// As [`Stage::new`], with so many processes of etcd.
    fn new_with(etcds: usize) -> Self {
        let set = ClusterData::new(9, SAMPLES.into());
        let etcd = EtcdCluster::start(etcds);
        let servers = Vec::from(set.servers::<3>(&etcd, &[], None));
        Stage { servers, lost: Vec::new(), etcd, set }
    }

    /// Returns a client that knows one server that is up, as a loader is started.
    fn client(&self) -> Client {
        let up = (0..self.servers.len()).find(|at| self.lost.iter().all(|(lost, _)| lost != at));
        let endpoint: Endpoint = self.servers[up.expect("a server")].url.parse().expect("url");
        let client = Client::new(ClientConfig::new(endpoint, "loader")).expect("client");
        client.within(Duration::from_secs(10))
    }

    /// Returns the server that has a job.
    fn server_of(&mut self, job: &JobHandle) -> &mut ClusterServer {
        let at = self.place_of(job);
        &mut self.servers[at]
    }

    fn place_of(&self, job: &JobHandle) -> usize {
        let path = format!("/v1/jobs/{}", job.info().id);
        let mut place = None;
        until("a server has the job", WAIT_MAX, || {
            let is_lost = |at: &usize| self.lost.iter().any(|(lost, _)| lost == at);
            let up = (0..self.servers.len()).filter(|at| !is_lost(at));
            place = up.into_iter().find(|&at| self.servers[at].status(&path) == 200);
            place.is_some()
        });
        place.expect("it was waited for")
    }

    /// Kills the server of a job, and deletes all that it had.
    fn lose_server_of(&mut self, job: &JobHandle) {
        let at = self.place_of(job);
        let lost = &mut self.servers[at];
        lost.kill();
        for dir in ["state", "cache"] {
            fs::remove_dir_all(lost.place(dir)).expect("deleted");
        }
        self.lost.push((at, Instant::now()));
    }

    /// Returns the logs of all servers.
    fn logs(&self) -> String {
        self.servers.iter().map(|server| format!("{}\n{}\n", server.url, server.log())).collect()
    }

    /// Starts the lost servers again, empty, once etcd has forgotten them.
    fn revive(&mut self) {
        let lost = std::mem::take(&mut self.lost);
        if lost.is_empty() {
            return;
        }
        for (at, since) in lost {
            thread::sleep(SILENCE.saturating_sub(since.elapsed()));
            self.servers[at].start();
        }
        agreed(&self.servers.iter().collect::<Vec<_>>(), "a:up b:up c:up", WAIT_MAX);
    }
}

fn ask(name: &str, order: OrderKind, ranks: u32) -> StartJob {
    StartJob {
        name: name.parse().expect("name"),
        dataset: Some("set".parse().expect("name")),
        version: None,
        root: None,
        layout: None,
        seed: Some(11),
        order,
        buckets: None,
        replay: None,
        plan: PlanSpec::default(),
        world: WorldSpec { ranks, batch: 4 * ranks, tail: Tail::Pad },
        visitation: Visitation::ExactlyOnce,
    }
}

/// What all ranks of a job consumed.
struct Consumed {
    entries: Mutex<Vec<u32>>,
    sums: Mutex<Vec<ReceivedSum>>,
    count: AtomicUsize,
    /// The longest wait for a batch or an ack.
    waited: Mutex<Duration>,
}

impl Consumed {
    fn new() -> Arc<Self> {
        Arc::new(Consumed {
            entries: Mutex::default(),
            sums: Mutex::default(),
            count: AtomicUsize::new(0),
            waited: Mutex::default(),
        })
    }

    fn note_wait(&self, since: Instant) {
        let mut waited = self.waited.lock();
        *waited = waited.max(since.elapsed());
    }
}

/// Renews leases of a handle, and reclaims its job, until the set is dropped.
fn keep(job: &JobHandle, keepers: &mut JoinSet<ClientError>) {
    let job = job.clone();
    keepers.spawn(async move { job.keep_alive().await });
}

/// Trains as a rank until its epoch is done: consumes each batch, then acknowledges it.
async fn train(job: JobHandle, epoch: u64, rank: u32, pause: Duration, consumed: Arc<Consumed>) {
    job.join(epoch, rank).await.expect("joined");
    let mut sum = ReceivedSum::new(job.info().root);
    let mut reader = job.reader(epoch, rank, 0).patience(JOB_MAX).prefetch(2);
    loop {
        let asked = Instant::now();
        let next = reader.next(4).await.expect("a lease");
        consumed.note_wait(asked);
        match next {
            Next::Batch(batch) => {
                tokio::time::sleep(pause).await;
                let asked = Instant::now();
                loop {
                    match job.ack(epoch, rank, &[batch.token.ack(BatchTimes::default())]).await {
                        Ok(_) => break,
                        Err(e) if e.kind().retryable() && asked.elapsed() < JOB_MAX => {}
                        Err(e) => panic!("rank {rank}: {e}"),
                    }
                }
                consumed.note_wait(asked);
                job.held().forget(epoch, rank, batch.token.lease);
                batch.samples.iter().for_each(|sample| sum.add(sample));
                let entries = batch.samples.iter().map(|sample| sample.entry);
                consumed.entries.lock().extend(entries);
                consumed.count.fetch_add(batch.samples.len(), SeqCst);
            }
            Next::Done => break,
            Next::Full | Next::Last => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
    consumed.sums.lock().push(sum);
}

/// Waits until the ranks consumed so much.
async fn consumed_at_least(consumed: &Consumed, samples: usize) {
    let began = Instant::now();
    while consumed.count.load(SeqCst) < samples {
        assert!(began.elapsed() < JOB_MAX, "{} samples", consumed.count.load(SeqCst));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Checks that an epoch was consumed once, that its receipt says so, and that no rank waited for long.
async fn check(job: &JobHandle, epoch: u64, consumed: &Consumed, what: &str) {
    check_once(job, epoch, consumed, what).await;
    let waited = *consumed.waited.lock();
    assert!(waited < WAIT_MAX, "{what}: a rank waited {waited:?}");
}

/// Checks that an epoch was consumed once, and that its receipt says so.
async fn check_once(job: &JobHandle, epoch: u64, consumed: &Consumed, what: &str) {
    let mut entries = consumed.entries.lock().clone();
    entries.sort_unstable();
    let planned: Vec<u32> = entries.iter().copied().filter(|&e| e < SAMPLES).collect();
    assert_eq!(planned, (0..SAMPLES).collect::<Vec<_>>(), "{what}: each sample once");
    entries.dedup();
    assert_eq!(entries.len(), consumed.entries.lock().len(), "{what}: each pad once");
    let receipt = job.receipt(epoch).await.expect("a receipt");
    let mut all = ReceivedSum::new(job.info().root);
    consumed.sums.lock().iter().for_each(|sum| all.merge(sum));
    assert!(all.agrees(&receipt), "{what}: the receipt agrees");
}

/// Declares a job and trains with all its ranks. Loses its server at these numbers of consumed samples.
async fn train_and_lose(stage: &mut Stage, spec: &StartJob, losses: &[usize], pause: Duration) -> JobHandle {
    train_and(stage, spec, losses, pause, Stage::lose_server_of).await
}

/// Declares a job and trains with all its ranks. Does something at these numbers of consumed samples.
async fn train_and(
    stage: &mut Stage,
    spec: &StartJob,
    at: &[usize],
    pause: Duration,
    disturb: impl Fn(&mut Stage, &JobHandle),
) -> JobHandle {
    let (consumed, ranks) = (Consumed::new(), spec.world.ranks);
    let mut handles = Vec::new();
    for _ in 0..ranks {
        // Each rank has a client of its own, as a process has.
        handles.push(stage.client().declare(spec).await.expect("declared"));
    }
    let (mut tasks, mut keepers) = (JoinSet::new(), JoinSet::new());
    for (rank, job) in (0..ranks).zip(&handles) {
        // A rank that has not joined cannot say that it had nothing.
        job.join(0, rank).await.expect("joined");
    }
    for (rank, job) in (0..ranks).zip(&handles) {
        keep(job, &mut keepers);
        tasks.spawn(train(job.clone(), 0, rank, pause, Arc::clone(&consumed)));
    }
    for &at in at {
        consumed_at_least(&consumed, at).await;
        disturb(stage, &handles[0]);
    }
    for _ in 0..ranks {
        match tokio::time::timeout(JOB_MAX, tasks.join_next()).await {
            Ok(ended) => ended.expect("a rank").expect("it does not fail"),
            Err(_) => panic!("a rank does not end:\n{}", stage.logs()),
        }
    }
    let what = format!("{} with {ranks} ranks", spec.order.as_str());
    check(&handles[0], 0, &consumed, &what).await;
    stage.revive();
    handles.swap_remove(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_server_stops_no_job_in_any_order() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let rounds = std::env::var(LOSSES).ok().and_then(|n| n.parse().ok());
    let rounds: usize = rounds.unwrap_or(if std::env::var_os("FLETCH_SOAK").is_some() { 50 } else { 1 });
    let mut stage = Stage::new();
    let pause = Duration::from_millis(15);
    for round in 0..rounds {
        // Of four ranks, the last ones hear of the loss after the first has moved the job.
        let (ranks, others) = if round % 2 == 0 { (4, 2) } else { (2, 4) };
        let at = 8 + (round * 7) % 60;
        let strict = ask(&format!("strict-{round}"), OrderKind::Strict, ranks);
        let done = train_and_lose(&mut stage, &strict, &[at], pause).await;
        let ledger = done.ledger(0).await.expect("a ledger");
        let substitute = ask(&format!("substitute-{round}"), OrderKind::Substitute, others);
        train_and_lose(&mut stage, &substitute, &[at], pause).await;
        let groups = (0..SAMPLES).map(|i| i % 3).collect();
        let bucketed = StartJob {
            buckets: Some(BucketSpec::Groups(groups)),
            ..ask(&format!("bucketed-{round}"), OrderKind::Bucketed, ranks)
        };
        train_and_lose(&mut stage, &bucketed, &[at], pause).await;
        // The declaration has a ledger, which the cluster does not know. So the ranks present it again.
        let replay = StartJob {
            seed: None,
            replay: Some(ReplaySpec { ledger: LedgerBytes(ledger.to_vec().into()) }),
            ..ask(&format!("replay-{round}"), OrderKind::Replay, ranks)
        };
        train_and_lose(&mut stage, &replay, &[at], pause).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_survives_the_loss_of_one_server_after_the_other() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let mut stage = Stage::new();
    let spec = ask("unlucky", OrderKind::Substitute, 2);
    train_and_lose(&mut stage, &spec, &[16, 48], Duration::from_millis(15)).await;
}

/// One rank does not report, because its process died with the server. The job waits for it without end, says
/// so, and goes on when an operator gives the process up.
#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_died_too_is_given_up_by_an_operator() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let mut stage = Stage::new();
    let spec = ask("half", OrderKind::Strict, 2);
    let consumed = Consumed::new();
    let [living, dying] = [stage.client(), stage.client()];
    let (living, dying) = (living.declare(&spec).await.expect("a"), dying.declare(&spec).await.expect("b"));
    let pause = Duration::from_millis(15);
    let (mut tasks, mut other) = (JoinSet::new(), JoinSet::new());
    let (mut keepers, mut keeper_of_other) = (JoinSet::new(), JoinSet::new());
    keep(&living, &mut keepers);
    keep(&dying, &mut keeper_of_other);
    tasks.spawn(train(living.clone(), 0, 0, pause, Arc::clone(&consumed)));
    let lost = Consumed::new();
    other.spawn(train(dying, 0, 1, pause, Arc::clone(&lost)));
    consumed_at_least(&consumed, 12).await;
    consumed_at_least(&lost, 8).await;
    drop((other, keeper_of_other));
    stage.lose_server_of(&living);
    until("the job is listed with the rank that is missing", WAIT_MAX, || {
        let (code, text) = jobs(&stage, &["list"]);
        code == Some(0) && text.contains("waits until rank 1 says what it consumed")
    });
    let (code, text) = jobs(&stage, &["lost", "half", "--rank", "0"]);
    assert!(code == Some(1) && text.contains("does not wait for rank 0"), "{text}");
    let (code, text) = jobs(&stage, &["lost", "half", "--rank", "1"]);
    assert!(code == Some(0) && text.contains("it goes on without"), "{text}");
    let (code, text) = jobs(&stage, &["lost", "half", "--rank", "1"]);
    assert!(code == Some(1) && text.contains("waits for no rank"), "{text}");
    // A new process reads as the rank: what only the dead one knew comes again, and nothing else.
    let again = stage.client().declare(&spec).await.expect("declared");
    keep(&again, &mut keepers);
    tasks.spawn(train(again, 0, 1, pause, Arc::clone(&consumed)));
    while let Some(ended) = tokio::time::timeout(JOB_MAX, tasks.join_next()).await.expect("it ends") {
        ended.expect("it does not fail");
    }
    check_entries(&consumed);
}

/// Checks that what the living consumed is each sample once.
fn check_entries(consumed: &Consumed) {
    let mut entries = consumed.entries.lock().clone();
    entries.retain(|&e| e < SAMPLES);
    entries.sort_unstable();
    assert_eq!(entries, (0..SAMPLES).collect::<Vec<_>>());
}

/// Runs `fletch jobs` at a server that is up. Returns the exit code, and what was printed.
fn jobs(stage: &Stage, words: &[&str]) -> (Option<i32>, String) {
    let mut c = command("fletch");
    let urls: Vec<&str> = stage.servers.iter().map(|server| server.url.as_str()).collect();
    let out = c.arg("jobs").args(words).args(["--server", &urls.join(",")]).output();
    let out = out.expect("fletch runs");
    let text = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    (out.status.code(), text.concat())
}

/// A server that comes back before it counts as gone has the job still. One that was cut off from etcd, was
/// paused, or stopped in good order and stayed away does not, and confirms nothing that counts.
#[tokio::test(flavor = "multi_thread")]
async fn whatever_happens_to_a_primary_each_sample_is_consumed_once() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let mut stage = Stage::new();
    let pause = Duration::from_millis(15);
    let spec = ask("killed", OrderKind::Strict, 2);
    let killed = train_and(&mut stage, &spec, &[24], pause, |stage, job| {
        let server = stage.server_of(job);
        server.kill();
        server.start();
    });
    drop(killed.await);
    let spec = ask("cut-off", OrderKind::Substitute, 2);
    let cut_off = train_and(&mut stage, &spec, &[24], pause, |stage, job| stage.server_of(job).cut_all(true));
    drop(cut_off.await);
    stage.servers.iter().for_each(|server| server.cut_all(false));
    agreed(&stage.servers.iter().collect::<Vec<_>>(), "a:up b:up c:up", WAIT_MAX);
    let spec = ask("paused", OrderKind::Strict, 2);
    let paused = train_and(&mut stage, &spec, &[24], pause, |stage, job| {
        stage.server_of(job).signal(Signal::SIGSTOP);
    });
    drop(paused.await);
    stage.servers.iter().for_each(|server| server.signal(Signal::SIGCONT));
    agreed(&stage.servers.iter().collect::<Vec<_>>(), "a:up b:up c:up", WAIT_MAX);
    let spec = ask("stopped", OrderKind::Strict, 2);
    drop(train_and(&mut stage, &spec, &[24], pause, |stage, job| stage.server_of(job).end()).await);
}

/// What a process may not reclaim: another tenant's job, records that are none, at-most-once.
#[tokio::test(flavor = "multi_thread")]
async fn records_that_are_none_are_refused() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let mut stage = Stage::new();
    let spec = ask("odd", OrderKind::Strict, 1);
    let once = StartJob { visitation: Visitation::AtMostOnce, ..ask("once", OrderKind::Strict, 1) };
    let job = stage.client().declare(&spec).await.expect("declared");
    let at_most = stage.client().declare(&once).await.expect("declared");
    let (id, of_once) = (job.info().id.clone(), at_most.info().id.clone());
    let at = stage.servers.iter().position(|s| s.url == job.server()).expect("a server of the cluster");
    let post = |server: &ClusterServer, id: &str, body: &str| -> (u16, String) {
        let url = format!("{}/v1/jobs/{id}/reclaim", server.url);
        let out = std::process::Command::new("curl")
            .args([
                "-sS",
                "-L",
                "-o",
                "-",
                "-w",
                "\n%{http_code}",
                "-H",
                "content-type: application/json",
                "-d",
                body,
                &url,
            ])
            .output()
            .expect("curl runs");
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let (body, status) = text.rsplit_once('\n').expect("a status");
        (status.parse().expect("a number"), body.to_owned())
    };
    let (status, text) = post(&stage.servers[at], &id, r#"{"rank": 0, "epochs": []}"#);
    assert!(status == 200 && text.contains(r#""waits_for":[]"#), "it is served: {text}");
    let (status, _) = post(&stage.servers[at], "no-such-job", r#"{"rank": 0, "epochs": []}"#);
    assert_eq!(status, 404);
    for lost in [&job, &at_most] {
        let path = format!("/v1/jobs/{}", lost.info().id);
        if stage.servers.iter().any(|s| s.status(&path) == 200) {
            stage.lose_server_of(lost);
        }
    }
    stage.revive();
    let refused = |id: &str, body: &str| {
        let mut last = (0, String::new());
        until("a server takes the job over", WAIT_MAX, || {
            last = post(&stage.servers[0], id, body);
            last.0 != 503
        });
        last
    };
    for (body, why) in [
        (r#"{"rank": 0, "epochs": [{"epoch": 0, "record": "!"}]}"#, "a rank's record cannot be used"),
        (r#"{"rank": 0, "epochs": [{"epoch": 0, "record": "AAAA"}]}"#, "a rank's record cannot be used"),
        (r#"{"rank": 0, "epoch": 1}"#, "unknown field"),
        (r#"{"rank": 1, "epochs": []}"#, "rank 1"),
    ] {
        let (status, text) = refused(&id, body);
        assert!(status == 400 && text.contains(why), "{body}: {status} {text}");
    }
    let (status, text) = refused(&of_once, r#"{"rank": 0, "epochs": []}"#);
    assert!(status == 409 && text.contains("at-most-once"), "{status} {text}");
    let (status, text) = refused(&id, r#"{"rank": 0, "epochs": []}"#);
    assert!(status == 200 && text.contains(r#""waits_for":[]"#), "its only rank had nothing: {text}");
    let error: ClientError = stage.client().lose_rank(&id, 0).await.expect_err("it is served");
    assert_eq!(error.code(), Some(Code::Conflict));
}

/// A job moves while its ranks run, by a command or because its server is drained: each sample is consumed
/// once. A job without ranks moves with its progress.
#[tokio::test(flavor = "multi_thread")]
async fn a_planned_move_loses_nothing() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let mut stage = Stage::new();
    let pause = Duration::from_millis(15);
    let idle = stage.client().declare(&ask("idle", OrderKind::Strict, 1)).await.expect("declared");
    let mut reader = idle.reader(0, 0, 0);
    let Next::Batch(batch) = reader.next(4).await.expect("a lease") else { panic!("samples are left") };
    idle.ack(0, 0, &[batch.token.ack(BatchTimes::default())]).await.expect("acknowledged");
    drop(reader);
    let state = idle.state(0).await.expect("a state");
    for order in [OrderKind::Substitute, OrderKind::Strict] {
        let spec = ask(&format!("moved-{}", order.as_str()), order, 2);
        let moved = train_and(&mut stage, &spec, &[24], pause, |stage, job| {
            let from = stage.server_of(job).url.clone();
            let (code, text) = jobs(stage, &["move", spec.name.as_str(), "--to", "nobody"]);
            assert!(code == Some(1) && text.contains("no server nobody"), "{text}");
            let to = ["a", "b", "c"][stage.servers.iter().position(|s| s.url != from).expect("another one")];
            let (code, text) = jobs(stage, &["move", spec.name.as_str(), "--to", to]);
            assert!(code == Some(0) && text.contains(&format!("server {to} has it now")), "{text}");
            assert_ne!(stage.server_of(job).url, from);
        });
        drop(moved.await);
    }
    let spec = ask("drained", OrderKind::Strict, 2);
    let drained = train_and(&mut stage, &spec, &[24], pause, |stage, job| {
        let from = stage.server_of(job).url.clone();
        let at = stage.servers.iter().position(|s| s.url == from).expect("a server");
        let mut c = command("fletch");
        c.args(["cluster", "drain", ["a", "b", "c"][at], "--server", &stage.servers[(at + 1) % 3].url]);
        assert!(c.status().expect("fletch runs").success());
        let has_left = || stage.servers[at].text("/v1/jobs").contains(r#""jobs":[]"#);
        until("a drained server has no job", Duration::from_secs(10), has_left);
        stage.servers[at].end();
    });
    drop(drained.await);
    assert_eq!(idle.state(0).await.expect("a state"), state, "the job without ranks has its progress");
}

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
fn trouble(stage: &mut Stage, chance: &mut Chance) -> &'static str {
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
    let mut stage = Stage::new_with(3);
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
