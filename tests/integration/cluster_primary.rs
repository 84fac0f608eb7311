//! A real etcd, and a primary that loses it or is paused: it confirms nothing that another server may have.

use fletch_api::{BatchTimes, OrderKind, StartJob, WorldSpec, headers};
use fletch_client::{
    Client, ClientConfig,
    epochs::{JobHandle, Next},
};
use fletch_core::plan::Tail;
use fletch_tests::cluster::{ClusterServer, EtcdCluster, agreed};
use fletch_tests::cluster_data::{ClusterData, declaration};
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use nix::sys::signal::Signal;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

/// How soon all servers have seen a change that etcd knows.
const NEWS: Duration = Duration::from_secs(3);
/// `cluster.member_ttl` of the rig.
const MEMBER_TTL: Duration = Duration::from_secs(2);
/// How soon a silent server counts as down: `cluster.member_ttl`, and etcd's own delay.
const SILENCE: Duration = Duration::from_secs(6);
/// After this time a server that is killed knows the revision of etcd when it starts again.
const HISTORY_KEPT: Duration = Duration::from_secs(11);
const SAMPLES: u32 = 48;
const BATCH: u32 = 4;

/// Three servers that know a dataset, and a job.
struct Rig {
    etcd: EtcdCluster,
    primary: ClusterServer,
    others: Vec<ClusterServer>,
    job: JobHandle,
    _set: ClusterData,
}

impl Rig {
    async fn start(seed: u64) -> Self {
        let etcd = EtcdCluster::start(1);
        let set = ClusterData::new(seed, SAMPLES.into());
        let mut servers = Vec::from(set.servers::<3>(&etcd, &[], None));
        let job = client(&servers[0]).declare(&ask()).await.expect("declared");
        let at = servers.iter().position(|s| s.url == job.server()).expect("a server of the cluster");
        let primary = servers.remove(at);
        let know = |s: &ClusterServer| s.status(&format!("/v1/jobs/{}", job.info().id)) == 307;
        until("all know the job", NEWS, || servers.iter().all(know));
        Rig { etcd, primary, others: servers, job, _set: set }
    }

    /// Returns a request that renews no lease, and needs the primary all the same.
    fn request(&self) -> String {
        let body = r#"{"rank":0,"acks":[]}"#;
        let (id, host) = (&self.job.info().id, self.primary.url.trim_start_matches("http://"));
        format!(
            "POST /v1/jobs/{id}/epochs/0/acks HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
    }

    /// Sends an ack to the primary, and returns the stream of its answer.
    fn send(&self) -> TcpStream {
        let mut stream =
            TcpStream::connect(self.primary.url.trim_start_matches("http://")).expect("connects");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a socket");
        stream.write_all(self.request().as_bytes()).expect("sent");
        stream
    }

    /// Sends an ack to the primary. Returns the status with the whole answer.
    fn probe(&self) -> (u16, String) {
        answer(self.send())
    }
}

fn answer(mut stream: TcpStream) -> (u16, String) {
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    (text.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0), text)
}

fn client(server: &ClusterServer) -> Client {
    Client::new(ClientConfig::new(server.url.parse().expect("url"), "loader")).expect("client")
}

fn ask() -> StartJob {
    declaration("run", OrderKind::Strict, WorldSpec { ranks: 1, batch: BATCH, tail: Tail::Drop })
}

/// Takes and acknowledges at most `leases` leases. Returns their entries.
async fn take(job: &JobHandle, mut leases: u32) -> Vec<u32> {
    let (mut reader, mut entries) = (job.reader(0, 0, 0), Vec::new());
    while leases > 0 {
        match reader.next(BATCH).await.expect("a lease") {
            Next::Batch(batch) => {
                job.ack(0, 0, &[batch.token.ack(BatchTimes::default())]).await.expect("acknowledged");
                job.held().release(0, 0, batch.token.lease);
                entries.extend(batch.samples.iter().map(|s| s.entry));
                leases -= 1;
            }
            Next::Done => break,
            Next::Full | Next::Last => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
    entries
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_without_etcd_confirms_nothing_after_its_lease() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let rig = Rig::start(21).await;
    let mut entries = take(&rig.job, 3).await;
    let state = rig.job.state(0).await.expect("a state");
    let (status, text) = rig.probe();
    assert!(status == 200 && text.contains(&format!("{}: job-", headers::TERM)), "{text}");
    assert!(text.contains(" 1 "), "the first term: {text}");
    rig.primary.cut_all(true);
    let cut = Instant::now();
    let mut last_ack = Duration::ZERO;
    while cut.elapsed() < MEMBER_TTL + Duration::from_secs(1) {
        let sent = cut.elapsed();
        match rig.probe() {
            (200, _) => last_ack = cut.elapsed(),
            (503, text) => assert!(text.contains("cannot confirm"), "{text}"),
            (_, text) => panic!("after {sent:?}: {text}"),
        }
        thread::sleep(Duration::from_millis(20));
    }
    eprintln!("the last ack of a primary without etcd came {last_ack:?} after the cut");
    assert!(last_ack < MEMBER_TTL, "it lasted for {last_ack:?}");
    // Nothing of the job's law is answered, while reads of the job and of bytes go on.
    let path = format!("/v1/jobs/{}", rig.job.info().id);
    assert_eq!(rig.primary.status(&format!("{path}/epochs/0/state")), 503);
    assert_eq!((rig.primary.status(&path), rig.primary.status("/v1/datasets")), (200, 200));
    let gone = |s: &ClusterServer| s.text(&path).contains("is down");
    until("the others say that the job waits", SILENCE, || rig.others.iter().all(gone));
    let moved = client(&rig.others[0]).job_handle(rig.job.info().clone());
    moved.put_state(0, state, true).await.expect("moved");
    assert_eq!(rig.probe().0, 503, "the old place does not know of the new one");
    entries.extend(take(&moved, u32::MAX).await);
    entries.sort_unstable();
    assert_eq!(entries, (0..SAMPLES).collect::<Vec<_>>(), "each entry once");
    rig.primary.cut_all(false);
    until("the old place names the new one", SILENCE, || rig.probe().0 == 307);
    drop(rig.etcd);
}

/// Pauses a primary that has requests under way, moves its job, and lets it go on.
async fn paused(seed: u64, pause: Duration) {
    let rig = Rig::start(seed).await;
    let mut entries = take(&rig.job, 3).await;
    let state = rig.job.state(0).await.expect("a state");
    rig.primary.signal(Signal::SIGSTOP);
    let stopped = Instant::now();
    // All its threads have to see the signal.
    thread::sleep(Duration::from_millis(300));
    // The kernel takes them, and the server reads them when it goes on.
    let waiting: Vec<TcpStream> = (0..8).map(|_| rig.send()).collect();
    let path = format!("/v1/jobs/{}", rig.job.info().id);
    let gone = |s: &ClusterServer| s.text(&path).contains("is down");
    until("the others say that the job waits", SILENCE, || rig.others.iter().all(gone));
    let moved = client(&rig.others[0]).job_handle(rig.job.info().clone());
    moved.put_state(0, state, true).await.expect("moved");
    entries.extend(take(&moved, 2).await);
    thread::sleep(pause.saturating_sub(stopped.elapsed()));
    rig.primary.signal(Signal::SIGCONT);
    for stream in waiting {
        let (status, text) = answer(stream);
        assert!([503, 307].contains(&status), "an old primary confirmed an ack: {text}");
    }
    until("the old place names the new one", SILENCE, || match rig.probe() {
        (200, text) => panic!("an old primary confirmed an ack: {text}"),
        (status, _) => status == 307,
    });
    entries.extend(take(&moved, u32::MAX).await);
    entries.sort_unstable();
    assert_eq!(entries, (0..SAMPLES).collect::<Vec<_>>(), "each entry once");
    drop(rig.etcd);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_was_paused_reads_its_groups_before_it_answers() {
    if have(&[Need::Etcd]) {
        paused(22, Duration::from_secs(4)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes half a minute; `make accept-paused-primary` runs it"]
async fn a_primary_that_was_paused_for_20_seconds_confirms_nothing() {
    if have(&[Need::Etcd]) {
        paused(23, Duration::from_secs(20)).await;
    }
}

/// A lease that the server kept, and nobody took over: the same primary goes on, once it has read its groups.
#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_is_back_goes_on_in_its_term() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let rig = Rig::start(24).await;
    let mut entries = take(&rig.job, 2).await;
    rig.primary.cut_all(true);
    until("the tenure ends", SILENCE, || rig.probe().0 == 503);
    rig.primary.cut_all(false);
    until("the primary is back", SILENCE, || rig.probe().0 == 200);
    assert!(rig.probe().1.contains(" 1 "), "nobody had the group meanwhile");
    entries.extend(take(&rig.job, u32::MAX).await);
    entries.sort_unstable();
    assert_eq!(entries, (0..SAMPLES).collect::<Vec<_>>(), "each entry once");
    drop(rig.etcd);
}

/// Restores etcd from a backup that was made before the job moved, and restarts the servers.
async fn restored(seed: u64, one_by_one: bool) {
    let mut rig = Rig::start(seed).await;
    let mut entries = take(&rig.job, 3).await;
    let state = rig.job.state(0).await.expect("a state");
    rig.etcd.back_up(0);
    until("the primary is back", SILENCE, || rig.probe().0 == 200);
    rig.primary.kill();
    let path = format!("/v1/jobs/{}", rig.job.info().id);
    let gone = |s: &ClusterServer| s.text(&path).contains("is down");
    until("the others say that the job waits", SILENCE, || rig.others.iter().all(gone));
    let moved = client(&rig.others[0]).job_handle(rig.job.info().clone());
    moved.put_state(0, state, true).await.expect("moved");
    entries.extend(take(&moved, 3).await);
    let place = moved.server();
    rig.primary.start();
    until("the old place names the new one", SILENCE, || rig.probe().0 == 307);
    let Rig { etcd, primary, others, .. } = &mut rig;
    let old_place = primary.url.clone();
    let mut servers: Vec<&mut ClusterServer> = others.iter_mut().chain([primary]).collect();
    if !one_by_one {
        thread::sleep(HISTORY_KEPT);
        servers.iter_mut().for_each(|s| s.kill());
    }
    etcd.restore(0);
    // The server that has nothing of the job comes first.
    for server in servers.iter_mut().rev() {
        if one_by_one {
            server.kill();
        }
        server.start();
    }
    let all: Vec<&ClusterServer> = servers.iter().map(|s| &**s).collect();
    agreed(&all, "a:up b:up c:up", SILENCE);
    for server in &all {
        until("the server names the place of the job", SILENCE, || {
            let text = server.text(&path);
            let is_there = if server.url == place { " 200 " } else { &place };
            text.lines().take(8).any(|line| line.contains(is_there))
        });
        let found = client(server).declare(&ask()).await.expect("declared before");
        assert_eq!(found.server(), place, "one server has the job");
        let asides = server.log().matches("its ledgers on this server are set aside").count();
        assert_eq!(asides, usize::from(server.url == old_place), "{}", server.log());
    }
    // Whoever comes later may find everything written back.
    let noticed = |s: &&&ClusterServer| s.log().contains("etcd went back in time");
    let wrote = |s: &&&ClusterServer| s.log().contains("this server wrote it back");
    let (noticed, wrote) = (all.iter().filter(noticed).count(), all.iter().filter(wrote).count());
    eprintln!("{noticed} servers noticed that etcd went back, {wrote} wrote terms back");
    // A server that is killed in its turn may have written them back and not said so yet.
    assert!(noticed > 0 && (wrote > 0 || one_by_one), "{}", all.iter().map(|s| s.log()).collect::<String>());
    let corrected: f64 = all.iter().map(|s| s.sum("fletch_cluster_group_changes_total")).sum();
    eprintln!("changes of groups after the restore: {corrected}");
    let job = client(all[0]).declare(&ask()).await.expect("declared before");
    entries.extend(take(&job, u32::MAX).await);
    entries.sort_unstable();
    assert_eq!(entries, (0..SAMPLES).collect::<Vec<_>>(), "each entry once");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_from_before_a_move_loses_nothing_when_all_servers_restart() {
    if have(&[Need::Etcd]) {
        restored(25, false).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_from_before_a_move_loses_nothing_when_each_server_restarts_in_turn() {
    if have(&[Need::Etcd]) {
        restored(26, true).await;
    }
}
