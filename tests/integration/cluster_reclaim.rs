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
use fletch_core::plan::Tail;
use fletch_tests::bins::command;
use fletch_tests::cluster::{ClusterServer, EtcdCluster, agreed};
use fletch_tests::cluster_data::ClusterData;
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use nix::sys::signal::Signal;
use parking_lot::Mutex;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
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

/// Servers of a cluster that know a dataset. The servers can be lost, and come back empty.
struct Stage {
    servers: Vec<ClusterServer>,
    /// The servers that are lost, and since when.
    lost: Vec<(usize, Instant)>,
    _etcd: EtcdCluster,
    _set: ClusterData,
}

impl Stage {
    fn new() -> Self {
        let set = ClusterData::new(9, SAMPLES.into());
        let etcd = EtcdCluster::start(1);
        let servers = Vec::from(set.servers::<3>(&etcd, &[], None));
        Stage { servers, lost: Vec::new(), _etcd: etcd, _set: set }
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
        self.servers.iter().position(|server| server.status(&path) == 200).expect("a server has the job")
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

/// Trains as a rank until its epoch is done: consumes each batch, then acknowledges it.
async fn train(job: JobHandle, epoch: u64, rank: u32, pause: Duration, consumed: Arc<Consumed>) {
    let renewed = job.clone();
    // Ended when it is dropped.
    let mut renewals = JoinSet::new();
    renewals.spawn(async move { renewed.keep_alive().await });
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
    drop(renewals);
}

/// Waits until the ranks consumed so much.
async fn consumed_at_least(consumed: &Consumed, samples: usize) {
    let began = Instant::now();
    while consumed.count.load(SeqCst) < samples {
        assert!(began.elapsed() < JOB_MAX, "{} samples", consumed.count.load(SeqCst));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Checks that an epoch was consumed once, and that its receipt says so.
async fn check(job: &JobHandle, epoch: u64, consumed: &Consumed, what: &str) {
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
    let waited = *consumed.waited.lock();
    assert!(waited < WAIT_MAX, "{what}: a rank waited {waited:?}");
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
    let mut tasks = JoinSet::new();
    for (rank, job) in (0..ranks).zip(&handles) {
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
        let (ranks, at) = (if round % 2 == 0 { 2 } else { 4 }, 8 + (round * 7) % 60);
        let strict = ask(&format!("strict-{round}"), OrderKind::Strict, ranks);
        let done = train_and_lose(&mut stage, &strict, &[at], pause).await;
        let ledger = done.ledger(0).await.expect("a ledger");
        let substitute = ask(&format!("substitute-{round}"), OrderKind::Substitute, ranks);
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
    tasks.spawn(train(living.clone(), 0, 0, pause, Arc::clone(&consumed)));
    let lost = Consumed::new();
    other.spawn(train(dying, 0, 1, pause, Arc::clone(&lost)));
    consumed_at_least(&consumed, 12).await;
    consumed_at_least(&lost, 8).await;
    other.abort_all();
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

/// A job moves while its ranks run, by a command or because its server is drained: each sample is consumed once.
/// A job without ranks moves with its progress.
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
