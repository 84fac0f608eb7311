//! Jobs in a cluster whose servers are lost with their disks: servers that come back empty, and ranks that
//! train and say what they consumed.

use crate::cluster::{ClusterServer, EtcdCluster, agreed};
use crate::cluster_data::{ClusterData, declaration};
use crate::watch::until;
use fletch_api::{BatchTimes, OrderKind, StartJob, WorldSpec};
use fletch_client::{
    Client, ClientConfig, ClientError, Endpoint,
    epochs::{JobHandle, Next, ReceivedSum},
};
use fletch_core::plan::Tail;
use parking_lot::Mutex;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Samples of the dataset.
pub const SAMPLES: u32 = 96;
/// The longest time for which a rank may wait, from the loss of its server on.
pub const WAIT_MAX: Duration = Duration::from_secs(25);
/// How soon a killed server counts as down: `cluster.member_ttl` of the rig, and etcd's own delay.
pub const SILENCE: Duration = Duration::from_secs(5);
/// How long a job may take in all.
pub const JOB_MAX: Duration = Duration::from_secs(60);

/// Servers of a cluster that know a dataset. The servers can be lost, and come back empty.
pub struct RankStage {
    pub servers: Vec<ClusterServer>,
    /// The servers that are lost, and since when.
    pub lost: Vec<(usize, Instant)>,
    pub etcd: EtcdCluster,
    pub set: ClusterData,
}

impl RankStage {
    /// Returns three servers of a new cluster.
    #[must_use]
    pub fn start() -> Self {
        RankStage::start_with(1, &[])
    }

    /// As [`RankStage::start`], with so many processes of etcd, and with these words of the servers.
    pub fn start_with(etcds: usize, settings: &[&str]) -> Self {
        let set = ClusterData::new(9, SAMPLES.into());
        let etcd = EtcdCluster::start(etcds);
        let servers = Vec::from(set.servers::<3>(&etcd, settings, None));
        RankStage { servers, lost: Vec::new(), etcd, set }
    }

    /// Returns a client that knows one server that is up, as a loader is started.
    pub fn client(&self) -> Client {
        let up = (0..self.servers.len()).find(|at| self.lost.iter().all(|(lost, _)| lost != at));
        let endpoint: Endpoint = self.servers[up.expect("a server")].url.parse().expect("url");
        let client = Client::new(ClientConfig::new(endpoint, "loader")).expect("client");
        client.within(Duration::from_secs(10))
    }

    /// Returns the server that has a job.
    pub fn server_of(&mut self, job: &JobHandle) -> &mut ClusterServer {
        let at = self.place_of(job);
        &mut self.servers[at]
    }

    pub fn place_of(&self, job: &JobHandle) -> usize {
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
    pub fn lose_server_of(&mut self, job: &JobHandle) {
        let at = self.place_of(job);
        let lost = &mut self.servers[at];
        lost.kill();
        for dir in ["state", "cache"] {
            fs::remove_dir_all(lost.place(dir)).expect("deleted");
        }
        self.lost.push((at, Instant::now()));
    }

    /// Returns the logs of all servers.
    pub fn logs(&self) -> String {
        self.servers.iter().map(|server| format!("{}\n{}\n", server.url, server.log())).collect()
    }

    /// Starts the lost servers again, empty, once etcd has forgotten them.
    pub fn revive(&mut self) {
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

pub fn ask(name: &str, order: OrderKind, ranks: u32) -> StartJob {
    declaration(name, order, WorldSpec { ranks, batch: 4 * ranks, tail: Tail::Pad })
}

/// What all ranks of a job consumed.
pub struct Consumed {
    pub entries: Mutex<Vec<u32>>,
    pub sums: Mutex<Vec<ReceivedSum>>,
    pub count: AtomicUsize,
    /// The longest wait for a batch or an ack.
    pub waited: Mutex<Duration>,
}

impl Consumed {
    pub fn new() -> Arc<Self> {
        Arc::new(Consumed {
            entries: Mutex::default(),
            sums: Mutex::default(),
            count: AtomicUsize::new(0),
            waited: Mutex::default(),
        })
    }

    pub fn note_wait(&self, since: Instant) {
        let mut waited = self.waited.lock();
        *waited = waited.max(since.elapsed());
    }
}

/// Renews leases of a handle, and reclaims its job, until the set is dropped.
pub fn keep(job: &JobHandle, keepers: &mut JoinSet<ClientError>) {
    let job = job.clone();
    keepers.spawn(async move { job.keep_alive().await });
}

/// Trains as a rank until its epoch is done: consumes each batch, then acknowledges it.
pub async fn train(job: JobHandle, epoch: u64, rank: u32, pause: Duration, consumed: Arc<Consumed>) {
    let asked = Instant::now();
    // Its server may be lost already.
    while let Err(error) = job.join(epoch, rank).await {
        assert!(error.kind().retryable() && asked.elapsed() < JOB_MAX, "rank {rank}: {error}");
    }
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
pub async fn consumed_at_least(consumed: &Consumed, samples: usize) {
    let began = Instant::now();
    while consumed.count.load(SeqCst) < samples {
        assert!(began.elapsed() < JOB_MAX, "{} samples", consumed.count.load(SeqCst));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Checks that an epoch was consumed once, that its receipt says so, and that no rank waited for long.
pub async fn check(job: &JobHandle, epoch: u64, consumed: &Consumed, what: &str) {
    check_once(job, epoch, consumed, what).await;
    let waited = *consumed.waited.lock();
    assert!(waited < WAIT_MAX, "{what}: a rank waited {waited:?}");
}

/// Checks that an epoch was consumed once, and that its receipt says so.
pub async fn check_once(job: &JobHandle, epoch: u64, consumed: &Consumed, what: &str) {
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
pub async fn train_and_lose(
    stage: &mut RankStage,
    spec: &StartJob,
    losses: &[usize],
    pause: Duration,
) -> JobHandle {
    train_and(stage, spec, losses, pause, RankStage::lose_server_of).await
}

/// Declares a job and trains with all its ranks. Does something at these numbers of consumed samples.
pub async fn train_and(
    stage: &mut RankStage,
    spec: &StartJob,
    at: &[usize],
    pause: Duration,
    disturb: impl Fn(&mut RankStage, &JobHandle),
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
