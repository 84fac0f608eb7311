//! Servers of two releases in one cluster, beside the rolling upgrade of `cluster_jobs`: what the tools of
//! this release do with servers that do not know them yet. `make accept-two-releases` builds the release
//! before.

use fletch_api::{BatchTimes, OrderKind, StartJob, WorldSpec};
use fletch_client::{
    Client, ClientConfig, ClientError,
    epochs::{JobHandle, Next, ReceivedSum},
};
use fletch_core::{Hash, plan::Tail};
use fletch_tests::bins::{before, bin, command};
use fletch_tests::cluster::{ClusterServer, EtcdCluster};
use fletch_tests::cluster_data::{ClusterData, declaration};
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// How soon all servers have seen a change that etcd knows.
const NEWS: Duration = Duration::from_secs(3);
/// How soon a killed server counts as down: `cluster.member_ttl` of the rig, and etcd's own delay.
const SILENCE: Duration = Duration::from_secs(8);
/// How long a rank may wait.
const WAIT_MAX: Duration = Duration::from_secs(40);
const SAMPLES: u32 = 96;

/// Returns the server of the release before, if there is one.
fn older() -> Option<PathBuf> {
    let older = before("fletch-server");
    if older.is_none() {
        eprintln!("SKIPPED: `make accept-two-releases` builds the release before");
    }
    older.filter(|_| have(&[Need::Etcd]))
}

/// Servers `a`, `b` and `c`, of two builds in turn: `a` and `c` have the first one.
struct Stage {
    servers: Vec<ClusterServer>,
    set: ClusterData,
    _etcd: EtcdCluster,
}

impl Stage {
    fn start(seed: u64, programs: [PathBuf; 2]) -> Self {
        let (etcd, set) = (EtcdCluster::start(1), ClusterData::new(seed, SAMPLES.into()));
        let programs = programs.each_ref().map(PathBuf::as_path);
        let servers = Vec::from(set.servers_of::<3>(&programs, &etcd, &[], None));
        Stage { servers, set, _etcd: etcd }
    }

    fn client(&self, at: usize) -> Client {
        let url = self.servers[at].url.parse().expect("url");
        Client::new(ClientConfig::new(url, "loader")).expect("client").within(Duration::from_secs(10))
    }

    /// Runs `fletch` at a server. Returns the exit code, and what was printed.
    fn fletch(&self, at: usize, words: &[&str]) -> (Option<i32>, String) {
        let mut c = command("fletch");
        let out = c.args(words).args(["--server", &self.servers[at].url]).output().expect("fletch runs");
        let text = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        eprintln!("$ fletch {} (at {at})\n{}(exit {:?})", words.join(" "), text.concat(), out.status.code());
        (out.status.code(), text.concat())
    }

    fn read_all(&self) {
        for (at, server) in self.servers.iter().enumerate() {
            for (path, hash) in &self.set.data.files {
                let bytes = server.file(&self.set.root, path);
                let is_right = bytes.is_some_and(|bytes| Hash::of(&bytes) == *hash);
                assert!(is_right, "{path} at {}", ["a", "b", "c"][at]);
            }
        }
    }

    fn place_of(&self, job: &JobHandle) -> Option<usize> {
        let path = format!("/v1/jobs/{}", job.info().id);
        (0..3).find(|&at| self.servers[at].status(&path) == 200)
    }
}

fn ask(name: &str, order: OrderKind) -> StartJob {
    declaration(name, order, WorldSpec { ranks: 1, batch: 4, tail: Tail::Drop })
}

/// A rank: what it consumed, and the sum of what it received.
struct Rank {
    job: JobHandle,
    entries: Vec<u32>,
    sum: ReceivedSum,
    keepers: JoinSet<ClientError>,
}

impl Rank {
    async fn of(stage: &Stage, at: usize, spec: &StartJob) -> Self {
        let job = stage.client(at).declare(spec).await.expect("declared");
        job.join(0, 0).await.expect("joined");
        let (sum, mut keepers) = (ReceivedSum::new(job.info().root), JoinSet::new());
        let kept = job.clone();
        keepers.spawn(async move { kept.keep_alive().await });
        Rank { job, entries: Vec::new(), sum, keepers }
    }

    /// Takes and acknowledges at most `leases` leases.
    async fn take(&mut self, mut leases: u32) {
        let mut reader = self.job.reader(0, 0, 0).patience(WAIT_MAX);
        while leases > 0 {
            match reader.next(4).await.expect("a lease") {
                Next::Batch(batch) => {
                    let asked = Instant::now();
                    loop {
                        match self.job.ack(0, 0, &[batch.token.ack(BatchTimes::default())]).await {
                            Ok(_) => break,
                            Err(e) if e.kind().retryable() && asked.elapsed() < WAIT_MAX => {}
                            Err(e) => panic!("{e}"),
                        }
                    }
                    self.job.held().forget(0, 0, batch.token.lease);
                    batch.samples.iter().for_each(|s| self.sum.add(s));
                    self.entries.extend(batch.samples.iter().map(|s| s.entry));
                    leases -= 1;
                }
                Next::Done => return,
                Next::Full | Next::Last => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    }

    /// Takes the rest of the epoch, and checks that each sample came once.
    async fn finish(mut self, what: &str) {
        self.take(u32::MAX).await;
        self.entries.sort_unstable();
        assert_eq!(self.entries, (0..SAMPLES).collect::<Vec<_>>(), "{what}: each sample once");
        let receipt = self.job.receipt(0).await.expect("a receipt");
        assert!(self.sum.agrees(&receipt), "{what}: the receipt agrees");
        self.keepers.shutdown().await;
    }
}

/// The tools of this release at a cluster with a server of the release before: `b`. It has the ids of all
/// servers, their view and their jobs, and no route of this release.
#[tokio::test(flavor = "multi_thread")]
async fn the_tools_work_beside_an_older_server() {
    let Some(older) = older() else { return };
    let stage = Stage::start(81, [bin("fletch-server"), older]);
    stage.read_all();
    let mut ranks = Vec::new();
    for n in 0..8 {
        let mut rank = Rank::of(&stage, n % 3, &ask(&format!("run-{n}"), OrderKind::Strict)).await;
        rank.take(3).await;
        ranks.push(rank);
    }
    let (code, text) = stage.fletch(0, &["cluster", "check"]);
    assert!(code == Some(1) && text.contains("b is away: not found"), "an older server is named: {text}");
    assert!(!text.contains("a is away") && !text.contains("c is away"), "{text}");
    for at in 0..3 {
        assert_eq!(stage.fletch(at, &["cluster", "status"]).0, Some(0));
        let (code, text) = stage.fletch(at, &["jobs", "list"]);
        assert!(code == Some(0) && (0..8).all(|n| text.contains(&format!("run-{n}\t"))), "{text}");
    }
    // Jobs move between the servers of this release. The older one cannot give a job away, and keeps it.
    for rank in &ranks {
        let name = rank.job.info().name.clone();
        let at = stage.place_of(&rank.job).expect("a server has the job");
        let to = ["c", "a", "a"][at];
        let (code, text) = stage.fletch(0, &["jobs", "move", name.as_str(), "--to", to]);
        assert_eq!(code, Some(if at == 1 { 1 } else { 0 }), "{text}");
        let then = if at == 1 { 1 } else { 2 - at };
        until("the job is there", NEWS, || stage.place_of(&rank.job) == Some(then));
    }
    stage.read_all();
    for rank in ranks {
        rank.finish("a job among two releases").await;
    }
}

/// A server of this release is lost in mid-epoch. Its job goes on when the server is back; if its disks are
/// lost, too, at the latest when all others are of this release. Each sample is delivered once.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_server_of_this_release_loses_no_sample() {
    let Some(older) = older() else { return };
    let own = bin("fletch-server");
    lose(83, [own.clone(), older.clone()], 0, Then::Upgrade).await;
    lose(84, [older, own], 1, Then::Back).await;
}

/// Fails: the next server by the ranking may be an older one, which has no such route.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a job whose next server by the ranking is an older one waits until that one is upgraded"]
async fn a_rank_brings_its_job_along_past_an_older_server() {
    let Some(older) = older() else { return };
    lose(87, [bin("fletch-server"), older], 0, Then::Nothing).await;
}

/// A server of the release before gives no records. So its ranks do not say what they consumed, and the job
/// waits for a saved state, as it did in that release.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_server_of_the_release_before_repeats_no_sample() {
    let Some(older) = older() else { return };
    let mut stage = Stage::start(85, [bin("fletch-server"), older]);
    let mut rank = job_at(&stage, 1).await;
    rank.take(5).await;
    stage.servers[1].kill();
    for dir in ["state", "cache"] {
        fs::remove_dir_all(stage.servers[1].place(dir)).expect("deleted");
    }
    let name = rank.job.info().name.clone();
    until("the job waits for its server", SILENCE, || {
        let (code, text) = stage.fletch(0, &["jobs", "list"]);
        code == Some(0) && text.contains(&name.to_string()) && text.contains("waits for b, which is down")
    });
    // For as long as ranks take to bring a job along.
    tokio::time::sleep(SILENCE).await;
    assert!(
        [0, 2].iter().all(|&at| stage.servers[at].status(&format!("/v1/jobs/{}", rank.job.info().id)) != 200)
    );
    rank.keepers.shutdown().await;
}

/// The older server would have the job without its ledgers.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_not_moved_to_an_older_server() {
    let Some(older) = older() else { return };
    let stage = Stage::start(86, [bin("fletch-server"), older]);
    let mut rank = job_at(&stage, 0).await;
    rank.take(3).await;
    let name = rank.job.info().name.clone();
    let (code, text) = stage.fletch(0, &["jobs", "move", name.as_str(), "--to", "b"]);
    assert!(code == Some(1) && !text.contains("openapi"), "{text}");
    until("the job is where it was", NEWS, || stage.place_of(&rank.job) == Some(0));
    rank.finish("a job that was not moved").await;
}

/// Declares jobs until one is at this server. Returns its rank, whose client names the server `c`.
async fn job_at(stage: &Stage, at: usize) -> Rank {
    for n in 0..40 {
        let rank = Rank::of(stage, 2, &ask(&format!("run-{n}"), OrderKind::Strict)).await;
        if rank.job.server() == stage.servers[at].url {
            return rank;
        }
    }
    panic!("no job at this server");
}

/// What happens after a server is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    /// Its disks are lost, too.
    Nothing,
    /// Its disks are lost, too, and the others are upgraded.
    Upgrade,
    /// It comes back.
    Back,
}

/// Loses a server with a job in mid-epoch.
async fn lose(seed: u64, programs: [PathBuf; 2], at: usize, then: Then) {
    let mut stage = Stage::start(seed, programs);
    let mut rank = job_at(&stage, at).await;
    rank.take(5).await;
    let path = format!("/v1/jobs/{}", rank.job.info().id);
    until("all know the job", NEWS, || stage.servers.iter().all(|s| s.status(&path) != 404));
    stage.servers[at].kill();
    let began = Instant::now();
    if then != Then::Back {
        for dir in ["state", "cache"] {
            fs::remove_dir_all(stage.servers[at].place(dir)).expect("deleted");
        }
    }
    // Longer than it takes to count as down, so that ranks try to bring the job along meanwhile.
    let finished = async {
        rank.finish(&format!("{then:?}")).await;
        began.elapsed()
    };
    let undone = async {
        tokio::time::sleep(SILENCE).await;
        tokio::task::block_in_place(|| match then {
            Then::Nothing => {}
            Then::Back => stage.servers[at].start(),
            Then::Upgrade => {
                let others = stage.servers.iter_mut().enumerate().filter(|(i, _)| *i != at);
                for (_, server) in others {
                    server.end();
                    server.set_program(&bin("fletch-server"));
                    server.start();
                }
            }
        });
    };
    let (took, ()) = tokio::join!(finished, undone);
    eprintln!("{then:?}: the epoch was done {took:?} after the loss");
}
