//! Several servers and a real etcd: each job lives on one server, and every rank may name any of them.

use fletch_api::{BatchTimes, Code, OrderKind, StartJob, WorldSpec};
use fletch_client::{
    Client, ClientConfig, ClientError, Endpoint, TokenSource,
    epochs::{JobHandle, Next, ReceivedSum},
};
use fletch_core::{Hash, plan::Tail};
use fletch_tests::bins::{Running, before, bin, command, run, stdout, without_variables};
use fletch_tests::cluster::{ClusterServer, EtcdCluster, agreed};
use fletch_tests::cluster_data::{ClusterData, declaration};
use fletch_tests::fixture::Mounted;
use fletch_tests::readers::read_until;
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use nix::sys::signal::Signal;
use parking_lot::Mutex;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How soon all servers have seen a change that etcd knows.
const NEWS: Duration = Duration::from_secs(2);
/// How soon a killed server counts as down: `cluster.member_ttl` of the rig, and etcd's own delay.
const SILENCE: Duration = Duration::from_secs(6);
/// Samples of the dataset.
const SAMPLES: u32 = 96;
/// The entries of a step of all ranks together.
const BATCH: u32 = 8;
const RANKS: u32 = 2;

fn client(server: &ClusterServer) -> Client {
    client_of(&server.url, None)
}

fn client_of(url: &str, token: Option<&Path>) -> Client {
    let endpoint: Endpoint = url.parse().expect("url");
    let token = token.map(|file| TokenSource::File(file.to_owned()));
    Client::new(ClientConfig { token, ..ClientConfig::new(endpoint, "loader") }).expect("client")
}

fn ask(name: &str, order: OrderKind) -> StartJob {
    declaration(name, order, WorldSpec { ranks: RANKS, batch: BATCH, tail: Tail::Drop })
}

/// The entries that all ranks acknowledged, and the sum of what they received.
struct Got {
    entries: Vec<u32>,
    sum: ReceivedSum,
}

impl Got {
    fn new(job: &JobHandle) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Got { entries: Vec::new(), sum: ReceivedSum::new(job.info().root) }))
    }
}

/// Takes at most `leases` leases of a rank. Returns whether the epoch is done for it.
async fn take(job: &JobHandle, rank: u32, leases: u32, got: &Mutex<Got>) -> bool {
    let mut reader = job.reader(0, rank, 0);
    let mut left = leases;
    while left > 0 {
        match reader.next(BATCH / RANKS).await.expect("a lease") {
            Next::Batch(b) => {
                job.ack(0, rank, &[b.token.ack(BatchTimes::default())]).await.expect("acknowledged");
                job.held().release(0, rank, b.token.lease);
                let mut got = got.lock();
                b.samples.iter().for_each(|s| got.sum.add(s));
                got.entries.extend(b.samples.iter().map(|s| s.entry));
                left -= 1;
            }
            Next::Done => return true,
            Next::Full | Next::Last => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
    false
}

/// Runs all ranks to the end of the epoch, each through its own handle, and checks what came.
async fn finish(handles: &[JobHandle], got: &Arc<Mutex<Got>>) {
    let ranks = (0u32..).zip(handles).map(|(rank, job)| take(job, rank, u32::MAX, got));
    assert!(futures_all(ranks).await.into_iter().all(|done| done));
    let receipt = handles[0].receipt(0).await.expect("finished");
    let got = got.lock();
    let mut entries = got.entries.clone();
    entries.sort_unstable();
    assert_eq!(entries, (0..SAMPLES).collect::<Vec<_>>(), "each entry once");
    assert!(got.sum.agrees(&receipt));
}

/// Polls all futures at once, and returns what they return.
async fn futures_all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut all: Vec<_> = futures.into_iter().map(|f| (Box::pin(f), None)).collect();
    std::future::poll_fn(|cx| {
        for (future, done) in all.iter_mut().filter(|(_, done)| done.is_none()) {
            if let std::task::Poll::Ready(out) = future.as_mut().poll(cx) {
                *done = Some(out);
            }
        }
        match all.iter().all(|(_, done)| done.is_some()) {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
    all.into_iter().map(|(_, done)| done.expect("ready")).collect()
}

/// Splits the servers into the one that has the job and the others.
fn split(servers: [ClusterServer; 3], job: &JobHandle) -> (ClusterServer, [ClusterServer; 2]) {
    let mut servers = Vec::from(servers);
    let at = servers.iter().position(|s| s.url == job.server()).expect("a server of the cluster");
    let primary = servers.remove(at);
    (primary, servers.try_into().expect("two"))
}

/// Returns the status of a request for a job, with its text.
fn shown(server: &ClusterServer, job: &JobHandle) -> (u16, String) {
    let path = format!("/v1/jobs/{}", job.info().id);
    let text = server.text(&path);
    (text.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0), text)
}

/// Returns the value of a header in a text with its head.
fn header(text: &str, name: &str) -> String {
    let line = text.lines().find_map(|l| l.strip_prefix(&format!("{name}: ")));
    line.unwrap_or_default().trim().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn six_jobs_declared_anywhere_by_all_ranks_are_one_job_each() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let set = ClusterData::new(1, SAMPLES.into());
    let servers = set.servers::<3>(&etcd, &[], None);
    let name = |i: usize| format!("job-{i}");
    let order = |i: usize| if i.is_multiple_of(2) { OrderKind::Strict } else { OrderKind::Substitute };
    // Each rank has a client of its own, which knows one server.
    let ranks: Vec<(usize, Client)> =
        (0..6).flat_map(|i| [(i, client(&servers[i % 3])), (i, client(&servers[(i + 1) % 3]))]).collect();
    let declared = futures_all(ranks.iter().map(|(i, client)| {
        let asked = ask(&name(*i), order(*i));
        async move { client.declare(&asked).await.expect("declared") }
    }))
    .await;
    futures_all(declared.chunks(2).map(|handles| async move {
        assert_eq!(handles[0].info().id, handles[1].info().id);
        assert_eq!(handles[0].server(), handles[1].server(), "one server has the job");
        finish(handles, &Got::new(&handles[0])).await;
    }))
    .await;
    // Each job is at one server, and the jobs of one sweep are together.
    let mut at = Vec::new();
    for (i, handles) in declared.chunks(2).enumerate() {
        let has = |s: &&ClusterServer| s.text("/v1/jobs").contains(&format!("\"{}\"", name(i)));
        let having: Vec<&str> = servers.iter().filter(has).map(|s| s.url.as_str()).collect();
        assert_eq!(having, [handles[0].server()], "{}", name(i));
        at.push(handles[0].server());
    }
    assert!(at[1] == at[3] && at[3] == at[5], "{at:?}");
    let sum = |family: &str| servers.iter().map(|s| s.sum(family)).sum::<f64>();
    until("all know all jobs", NEWS, || sum("fletch_cluster_jobs") == 6.0);
    assert_eq!(sum("fletch_cluster_groups"), 4.0);
    // A server that has the job elsewhere names the place, and changes nothing.
    let job = &declared[0];
    for server in servers.iter().filter(|s| s.url != job.server()) {
        let (status, text) = shown(server, job);
        assert_eq!(status, 307, "{text}");
        assert_eq!(header(&text, "location"), format!("{}/v1/jobs/{}", job.server(), job.info().id));
        assert!(["a", "b", "c"].contains(&&*header(&text, "fletch-owner")), "{text}");
    }
    // Another setting is still refused, wherever it is asked for.
    let other = StartJob { seed: Some(12), ..ask("job-0", OrderKind::Strict) };
    let other = client(&servers[2]).declare(&other).await;
    assert_eq!(other.expect_err("differs").code(), Some(Code::JobDiffers));
    for i in 0..6 {
        client(&servers[i % 3]).delete_job(&declared[2 * i].info().id).await.expect("deleted");
    }
    let count = || (sum("fletch_cluster_jobs") + sum("fletch_cluster_groups")) as u64;
    until("all forget all jobs", NEWS, || count() == 0);
    assert_eq!(client(&servers[0]).job(&job.info().id).await.expect_err("gone").code(), Some(Code::NotFound));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_waits_for_its_server_and_goes_on_when_it_is_back() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let set = ClusterData::new(2, SAMPLES.into());
    let servers = set.servers::<3>(&etcd, &[], None);
    let handles = [
        client(&servers[0]).declare(&ask("run", OrderKind::Strict)).await.expect("declared"),
        client(&servers[1]).declare(&ask("run", OrderKind::Strict)).await.expect("declared"),
    ];
    let got = Got::new(&handles[0]);
    for (rank, job) in (0..).zip(&handles) {
        take(job, rank, 3, &got).await;
    }
    let (mut primary, others) = split(servers, &handles[0]);
    primary.kill();
    until("the others say that the job waits", SILENCE, || {
        others.iter().all(|s| shown(s, &handles[0]).0 == 503)
    });
    let (_, text) = shown(&others[0], &handles[0]);
    for word in
        ["job run (", "is served by", "is down", "waits", "state", "\"job_waits\"", "\"retryable\":true"]
    {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert!(!header(&text, "retry-after").is_empty(), "{text}");
    // Ranks that wait meanwhile go on by themselves.
    let rest = finish(&handles, &got);
    let back = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        tokio::task::block_in_place(|| primary.start());
    };
    tokio::join!(rest, back);
    assert_eq!(handles[0].server(), primary.url);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_saved_state_moves_a_job_whose_server_is_gone() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let set = ClusterData::new(3, SAMPLES.into());
    let servers = set.servers::<3>(&etcd, &[], None);
    let mut handles = Vec::new();
    for server in &servers[..2] {
        handles.push(client(server).declare(&ask("run", OrderKind::Strict)).await.expect("declared"));
    }
    let got = Got::new(&handles[0]);
    for (rank, job) in (0..).zip(&handles) {
        take(job, rank, 2, &got).await;
    }
    let state = handles[0].state(0).await.expect("a state");
    // Delivered after the state, and lost with the server.
    let lost = Got::new(&handles[0]);
    take(&handles[1], 1, 1, &lost).await;
    let (mut primary, others) = split(servers, &handles[0]);
    primary.kill();
    until("the others say that the job waits", SILENCE, || {
        others.iter().all(|s| shown(s, &handles[0]).1.contains("is down"))
    });
    let kept = client(&others[0]).within(Duration::from_secs(1)).job(&handles[0].info().id).await;
    assert_eq!(kept.expect_err("it waits").code(), Some(Code::JobWaits));
    // A state without `replace` moves nothing.
    let kept = handles[0].put_state(0, state.clone(), false);
    assert!(tokio::time::timeout(Duration::from_secs(2), kept).await.is_err(), "it waits");
    let there = handles[0].put_state(0, state, true).await.expect("moved");
    assert_eq!(there.acked, 4 * u64::from(BATCH / RANKS));
    assert_ne!(handles[0].server(), primary.url);
    let changes = others.iter().map(|s| s.sum("fletch_cluster_group_changes_total")).sum::<f64>();
    assert!((changes - 1.0).abs() < 0.5, "one takes over: {changes}");
    // The old server comes back in the middle of the epoch, and serves nothing of it.
    take(&handles[0], 0, 1, &got).await;
    primary.start();
    let (status, text) = shown(&primary, &handles[0]);
    assert_eq!(status, 307, "{text}");
    assert!(header(&text, "location").starts_with(&handles[0].server()), "{text}");
    let aside = fs::read_dir(primary.place("state").join("jobs-aside")).expect("a directory");
    assert_eq!(aside.count(), 1, "{}", primary.log());
    assert!(primary.log().contains("its ledgers on this server are set aside"), "{}", primary.log());
    finish(&handles, &got).await;
    assert_eq!(shown(&primary, &handles[0]).0, 307);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_lost_its_state_directory_is_not_the_one_that_has_the_job() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let set = ClusterData::new(7, SAMPLES.into());
    let servers = set.servers::<3>(&etcd, &[], None);
    let job = client(&servers[0]).declare(&ask("run", OrderKind::Strict)).await.expect("declared");
    let got = Got::new(&job);
    take(&job, 0, 2, &got).await;
    let state = job.state(0).await.expect("a state");
    let (mut primary, others) = split(servers, &job);
    primary.kill();
    fs::remove_dir_all(primary.place("state")).expect("lost");
    until("the server counts as down", SILENCE, || others.iter().all(|s| shown(s, &job).0 == 503));
    primary.start();
    let all = [&primary, &others[0], &others[1]];
    agreed(&all, "a:up b:up c:up", NEWS);
    for server in all {
        let (status, text) = shown(server, &job);
        assert!(status == 503 && text.contains("job_waits"), "{text}");
        let again =
            client(server).within(Duration::from_secs(1)).declare(&ask("run", OrderKind::Strict)).await;
        assert_eq!(again.expect_err("no job over a lost ledger").code(), Some(Code::JobWaits));
    }
    job.put_state(0, state, true).await.expect("moved");
    finish(&[job.clone(), job], &got).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_etcd_jobs_wait_and_running_epochs_finish_when_it_is_back() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let mut etcd = EtcdCluster::start(1);
    let set = ClusterData::new(4, SAMPLES.into());
    let servers = set.servers::<3>(&etcd, &[], None);
    let mut handles = Vec::new();
    for server in &servers[..2] {
        handles.push(client(server).declare(&ask("run", OrderKind::Strict)).await.expect("declared"));
    }
    let got = Got::new(&handles[0]);
    take(&handles[0], 0, 2, &got).await;
    let know = |s: &ClusterServer| shown(s, &handles[0]).0 != 404;
    until("all know the job", NEWS, || servers.iter().all(know));
    etcd.kill(0);
    // Longer than the leases of members live.
    thread::sleep(Duration::from_secs(3));
    for server in &servers {
        let impatient = client(server).within(Duration::from_secs(2));
        let refused = impatient.declare(&ask("new", OrderKind::Strict)).await.expect_err("etcd is away");
        assert_eq!(refused.code(), Some(Code::NotReady), "{refused}");
        assert!(refused.hint().unwrap_or_default().contains("etcd"), "{refused}");
        // The job that is known is found from everywhere.
        let job = impatient.declare(&ask("run", OrderKind::Strict)).await.expect("declared before");
        // Nobody can know whether another server has it by now.
        let unproven = job.reader(0, 0, 0).patience(Duration::from_secs(1)).next(1).await;
        assert_eq!(unproven.expect_err("no grant").code(), Some(Code::NotReady));
    }
    etcd.revive(0);
    finish(&handles, &got).await;
    let patient = client(&servers[2]).declare(&ask("new", OrderKind::Strict)).await;
    patient.expect("declared, now that etcd is back");
}

/// How many times all servers are restarted, one after the other.
fn rounds() -> usize {
    if std::env::var("FLETCH_CLUSTER").is_ok() { 5 } else { 1 }
}

/// The build that the servers start with, and those that a rolling restart goes to, a round each.
///
/// [`before`] is a build of an earlier release: the servers start with it, are upgraded, go back and are
/// upgraded again. `FLETCH_NEXT_SERVER` names a later build, to which the servers go and back.
fn builds() -> (PathBuf, Vec<PathBuf>) {
    let own = bin("fletch-server");
    let other = |program: PathBuf| {
        let bytes = |program: &Path| fs::read(program).expect("a build of the server");
        assert!(bytes(&program) != bytes(&own), "{} is the build of this test", program.display());
        program
    };
    let next = std::env::var_os("FLETCH_NEXT_SERVER").map(PathBuf::from);
    let in_turn = |one: &Path, two: &Path, rounds: usize| {
        (0..rounds).map(|n| if n % 2 == 0 { one } else { two }.to_owned()).collect()
    };
    match (before("fletch-server").map(other), next.map(other)) {
        (Some(before), _) => (before.clone(), in_turn(&own, &before, 3)),
        (None, Some(next)) => (own.clone(), in_turn(&next, &own, rounds().max(2))),
        (None, None) => (own.clone(), vec![own; rounds()]),
    }
}

/// Takes all leases of a rank, in steps of `step`. Returns the longest time of a step beyond that.
async fn take_slowly(job: &JobHandle, rank: u32, step: Duration, got: &Mutex<Got>) -> Duration {
    let mut longest = Duration::ZERO;
    loop {
        let begun = Instant::now();
        let done = take(job, rank, 1, got).await;
        longest = longest.max(begun.elapsed());
        if done {
            return longest;
        }
        tokio::time::sleep(step).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_fails_no_read_and_loses_no_sample() {
    if !have(&[Need::Etcd, Need::Fuse]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let set = ClusterData::new(9, SAMPLES.into());
    let (first, builds) = builds();
    let mut servers = set.servers_of::<3>(&[&first], &etcd, &[], None);
    let view = agreed(&servers.each_ref(), "a:up b:up c:up", NEWS);
    let list = servers.each_ref().map(|s| s.url.as_str()).join(",");
    let dir = set.scratch.path().join("mnt");
    fs::create_dir(&dir).expect("a directory");
    let mounted = Mounted::start(&list, dir.clone(), &set.scratch.path().join("mount.log"), &["set"]);
    // Mounts are upgraded when it suits, so one of the release before reads, too.
    let older = before("fletch-mount").map(|program| {
        let (dir, log) = (set.scratch.path().join("older"), set.scratch.path().join("older.log"));
        fs::create_dir(&dir).expect("a directory");
        let program = without_variables(Command::new(program));
        Mounted::start_by(program, &list, dir, &log, &["set"])
    });
    let mut jobs = Vec::new();
    for (name, order) in [("ordered", OrderKind::Strict), ("swept", OrderKind::Substitute)] {
        let mut ranks = Vec::new();
        for server in &servers[..2] {
            ranks.push(client(server).declare(&ask(name, order)).await.expect("declared"));
        }
        let got = Got::new(&ranks[0]);
        jobs.push((ranks, got));
    }
    let (stop, files) = (AtomicBool::new(false), set.data.files.clone());
    // Twelve steps for each rank, which outlast the restarts.
    let step = Duration::from_millis(400 * builds.len() as u64);
    let (met, slowest, restarts) = thread::scope(|scope| {
        let reading = scope.spawn(|| read_until(&stop, &dir, &files));
        let by_older = older.as_ref().map(|m| scope.spawn(|| read_until(&stop, &m.dir, &files)));
        let restarting = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            for build in &builds {
                for server in &mut servers {
                    let begun = Instant::now();
                    server.end();
                    server.set_program(build);
                    server.start();
                    longest = longest.max(begun.elapsed());
                    thread::sleep(Duration::from_millis(200));
                }
            }
            longest
        });
        let slowest = tokio::task::block_in_place(|| {
            tokio::runtime::Handle::current().block_on(futures_all(jobs.iter().flat_map(|(ranks, got)| {
                (0u32..).zip(ranks).map(move |(rank, job)| take_slowly(job, rank, step, got))
            })))
        });
        let restarts = restarting.join().expect("restarted");
        stop.store(true, SeqCst);
        let mut met = reading.join().expect("read");
        if let Some(reading) = by_older {
            met.add(reading.join().expect("read"));
        }
        (met, slowest.into_iter().max().expect("ranks"), restarts)
    });
    drop((mounted, older));
    eprintln!(
        "{} rounds: {} reads, {} failed, the longest {:?}; steps waited {slowest:?}, restarts {restarts:?}",
        builds.len(),
        met.reads,
        met.failed.len(),
        met.longest
    );
    assert!(met.failed.is_empty() && met.reads > 0, "{:?}", met.failed);
    let pause = Duration::from_secs(5) + restarts;
    assert!(met.longest <= pause && slowest <= pause, "{:?} {slowest:?}", met.longest);
    for (ranks, got) in &jobs {
        finish(ranks, got).await;
    }
    assert_eq!(agreed(&servers.each_ref(), "a:up b:up c:up", NEWS), view, "the ring is unchanged");
}

#[tokio::test(flavor = "multi_thread")]
async fn i7_a_job_of_another_tenant_does_not_exist_at_any_server() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let set = ClusterData::new(5, SAMPLES.into());
    let file = set.scratch.path().join("tokens.toml");
    let token = |name: &str, more: &[&str]| {
        let mut c = command("fletch-server");
        c.args(["token", "new", "--append"]).arg(&file).args(more);
        let at = set.scratch.path().join(format!("{name}.token"));
        fs::write(&at, stdout(&run(&mut c))).expect("token");
        at
    };
    let (own, peer) = (token("own", &["--tenant", "t"]), token("peer", &["--role", "peer"]));
    let stranger = token("stranger", &["--tenant", "u"]);
    let words = [
        format!("--auth-tokens={}", file.display()),
        format!("--cluster-peer-token-file={}", peer.display()),
        format!("--local-dirs={}=*", set.scratch.path().display()),
    ];
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let servers = set.servers::<3>(&etcd, &words, Some(&own));
    let mine = |s: &ClusterServer| client_of(&s.url, Some(&own));
    let mut declared = mine(&servers[0]).declare(&ask("run", OrderKind::Strict)).await;
    for _ in 0..20 {
        if declared.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        declared = mine(&servers[0]).declare(&ask("run", OrderKind::Strict)).await;
    }
    let job = declared.expect("declared");
    let id = &job.info().id;
    let get = |server: &ClusterServer, path: &str, token: &Path| {
        let token = fs::read_to_string(token).expect("token");
        let mut c = Command::new("curl");
        c.args(["-sS", "-w", " %{http_code}", "-H", &format!("Authorization: Bearer {}", token.trim())]);
        stdout(&run(c.arg(format!("{}{path}", server.url))))
    };
    let path = format!("/v1/jobs/{id}");
    let known = |s: &ClusterServer| {
        let status = if s.url == job.server() { " 200" } else { " 307" };
        get(s, &path, &own).ends_with(status)
    };
    until("all know the job", NEWS, || servers.iter().all(known));
    for server in &servers {
        for path in [path.clone(), format!("{path}/epochs/0/state"), format!("{path}/epochs/0/receipt")] {
            let absent = get(server, &path.replace(id.as_str(), &"0".repeat(24)), &stranger);
            assert!(absent.ends_with(" 404"), "{absent}");
            assert_eq!(get(server, &path, &stranger), absent, "as a job that does not exist");
        }
    }
}

#[test]
fn a_server_brings_its_jobs_into_a_cluster() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let set = ClusterData::new(6, SAMPLES.into());
    let mut a = ClusterServer::new("a", &etcd, &["--cache-free-floor=0"]);
    a.start();
    set.register(&a, None);
    // A server that was alone, in the middle of an epoch.
    let mut b = ClusterServer::new("b", &etcd, &["--cache-free-floor=0"]);
    let alone = b.url.trim_start_matches("http://").to_owned();
    let mut c = without_variables(Command::new(bin("fletch-server")));
    c.args(["--listen", &alone, "--socket=none", "--cache-size=0", "--cluster-id=b"]);
    c.arg("--state-dir").arg(b.place("state")).arg("--cache-dir").arg(b.place("cache"));
    c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut before = Running::spawn("fletch-server", &mut c);
    until("the server answers", Duration::from_secs(20), || b.status("/livez") == 200);
    set.register(&b, None);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let sweep = client(&a).declare(&ask("sweep", OrderKind::Substitute)).await.expect("declared");
        client(&a).declare(&ask("both", OrderKind::Strict)).await.expect("declared");
        assert_eq!(sweep.server(), a.url);
        let mut handles = Vec::new();
        for name in ["run", "run", "both", "mine"] {
            let order = if name == "mine" { OrderKind::Substitute } else { OrderKind::Strict };
            handles.push(client(&b).declare(&ask(name, order)).await.expect("declared"));
        }
        let got = Got::new(&handles[0]);
        take(&handles[0], 0, 3, &got).await;
        before.signal(Signal::SIGTERM);
        assert!(before.wait(Duration::from_secs(10)).success());
        b.start();
        // The job goes on where its ledger is, for ranks that know only the other server.
        let mut handles = Vec::new();
        until("the other server knows the jobs", NEWS, || a.sum("fletch_cluster_jobs") == 2.0);
        for server in [&a, &b] {
            handles.push(client(server).declare(&ask("run", OrderKind::Strict)).await.expect("known"));
        }
        assert!(handles.iter().all(|job| job.server() == b.url));
        finish(&handles, &got).await;
        // A sweep over the same version stays its own.
        let mine = client(&a).declare(&ask("mine", OrderKind::Substitute)).await.expect("known");
        assert_eq!(mine.server(), b.url);
        // Of two jobs of one name, that of the cluster stays.
        let both = client(&b).declare(&ask("both", OrderKind::Strict)).await.expect("known");
        assert_eq!(both.server(), a.url);
        assert!(b.log().contains("its ledgers on this server are set aside"), "{}", b.log());
    });
}

/// Answers every request with these bytes, and counts them.
fn answering(answer: impl Fn() -> String + Send + 'static) -> (String, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let count = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&count);
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            counted.fetch_add(1, SeqCst);
            let mut request = [0; 64 << 10];
            if stream.read(&mut request).is_ok() {
                stream.write_all(answer().as_bytes()).ok();
            }
        }
    });
    (url, count)
}

#[tokio::test]
async fn a_client_sends_nothing_to_a_place_that_is_no_member() {
    let empty = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}";
    let (foreign, asked) = answering(move || empty.to_owned());
    let place = format!("{foreign}/v1/jobs");
    let (liar, _) = answering(move || {
        format!(
            "HTTP/1.1 307 Temporary Redirect\r\nLocation: {place}\r\nFletch-Owner: x\r\nContent-Length: 0\r\n\
             Connection: close\r\n\r\n"
        )
    });
    let scratch = TempDir::with_prefix("fletch-redirect-").expect("scratch");
    let token = scratch.path().join("token");
    fs::write(&token, "flt_secret").expect("token");
    let sent = client_of(&liar, Some(&token)).declare(&ask("run", OrderKind::Strict)).await;
    let error = sent.expect_err("refused");
    assert!(matches!(error, ClientError::Protocol { .. }), "{error}");
    for word in [foreign.as_str(), "no server of the cluster", "nothing was sent"] {
        assert!(error.to_string().contains(word), "{error}");
    }
    assert_eq!(asked.load(SeqCst), 0, "nobody asked the foreign place");
}

#[tokio::test]
async fn no_program_takes_its_token_to_another_host() {
    let empty = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}";
    let (foreign, asked) = answering(move || empty.to_owned());
    let scratch = TempDir::with_prefix("fletch-redirect-").expect("scratch");
    let (token, dir) = (scratch.path().join("token"), scratch.path().join("mnt"));
    fs::write(&token, "flt_secret").expect("token");
    fs::create_dir(&dir).expect("mkdir");
    for status in ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"] {
        let place = format!("{foreign}/v1/datasets");
        let (liar, lied) = answering(move || {
            format!(
                "HTTP/1.1 {status}\r\nLocation: {place}\r\nFletch-View: 9\r\nContent-Length: 0\r\n\
                 Connection: close\r\n\r\n"
            )
        });
        let client = client_of(&liar, Some(&token));
        client.datasets().await.expect_err("a list");
        client
            .chunk_unchecked(fletch_core::Root(Hash::of(b"r")), Hash::of(b"c"), 1)
            .await
            .expect_err("bytes");
        for (program, words) in
            [("fletch", vec!["datasets"]), ("fletch", vec!["unregister", "d"]), ("fletch-mount", vec!["d"])]
        {
            let mut c = command(program);
            c.args(words).args(["--server", &liar]).arg("--token-file").arg(&token);
            if program == "fletch-mount" {
                c.arg(&dir).arg("--foreground");
            }
            let out = c.stdin(Stdio::null()).output().expect("runs");
            assert!(!out.status.success(), "{program} follows {status}");
        }
        assert!(lied.load(SeqCst) >= 5, "{status}: each was asked");
    }
    assert_eq!(asked.load(SeqCst), 0, "nobody asked the foreign place");
}
