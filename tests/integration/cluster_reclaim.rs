//! Jobs in mid-epoch whose server is lost for good, with its disks: the ranks say what they consumed, and the
//! job goes on at another server. Each sample is consumed once, and nobody does anything.

use fletch_api::{
    BatchTimes, BucketSpec, Code, OrderKind, ReplaySpec, StartJob, UnknownRanks, Visitation,
    jobs::LedgerBytes,
};
use fletch_client::{ClientError, epochs::Next};
use fletch_tests::bins::command;
use fletch_tests::cluster::{ClusterServer, agreed};
use fletch_tests::cluster_ranks::{
    Consumed, JOB_MAX, RankStage, SAMPLES, WAIT_MAX, ask, check_once, consumed_at_least, keep, train,
    train_and, train_and_lose,
};
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use nix::sys::signal::Signal;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

/// How many times a server is lost, in the long form of the test.
const LOSSES: &str = "FLETCH_TEST_LOSSES";

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_server_stops_no_job_in_any_order() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let rounds = std::env::var(LOSSES).ok().and_then(|n| n.parse().ok());
    let rounds: usize = rounds.unwrap_or(if std::env::var_os("FLETCH_SOAK").is_some() { 50 } else { 1 });
    let mut stage = RankStage::start();
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
    let mut stage = RankStage::start();
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
    let mut stage = RankStage::start();
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
fn jobs(stage: &RankStage, words: &[&str]) -> (Option<i32>, String) {
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
    let mut stage = RankStage::start();
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

/// The server is lost while the ranks start: one of them was never served, so it has no record. It says so,
/// and the receipt tells of it, also after another loss.
#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_was_never_served_stops_no_job() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let mut stage = RankStage::start_with(1, &["--limits-lease-ttl=4s"]);
    let spec = ask("early", OrderKind::Strict, 2);
    let (consumed, pause) = (Consumed::new(), Duration::from_millis(15));
    let first = stage.client().declare(&spec).await.expect("declared");
    let late = stage.client().declare(&spec).await.expect("declared");
    assert_eq!(stage.client().describe(&spec).await.expect("an answer"), None, "a server has it");
    let (mut tasks, mut keepers) = (JoinSet::new(), JoinSet::new());
    keep(&first, &mut keepers);
    keep(&late, &mut keepers);
    tasks.spawn(train(first.clone(), 0, 0, pause, Arc::clone(&consumed)));
    consumed_at_least(&consumed, 12).await;
    stage.lose_server_of(&first);
    let described = stage.client().describe(&spec).await.expect("an answer").expect("its server is away");
    assert_eq!((&described.id, described.steps, described.is_away), (&first.info().id, 12, true));
    let other = StartJob { seed: Some(12), ..spec.clone() };
    let differs = stage.client().describe(&other).await.expect_err("the job has another seed");
    assert_eq!(differs.code(), Some(Code::JobDiffers));
    tasks.spawn(train(late, 0, 1, pause, Arc::clone(&consumed)));
    consumed_at_least(&consumed, 60).await;
    stage.lose_server_of(&first);
    while let Some(ended) = tokio::time::timeout(JOB_MAX, tasks.join_next()).await.expect("it ends") {
        ended.expect("it does not fail");
    }
    check_once(&first, 0, &consumed, "a rank that was never served").await;
    let told = first.receipt(0).await.expect("a receipt").unknown;
    let [UnknownRanks { epoch: 0, term, ranks }] = &told[..] else { panic!("{told:?}") };
    assert_eq!((*term, ranks), (2, &vec![1]));
    stage.revive();
    // No rank was served.
    let spec = ask("at-once", OrderKind::Strict, 2);
    let (consumed, mut handles) = (Consumed::new(), Vec::new());
    for _ in 0..2 {
        handles.push(stage.client().declare(&spec).await.expect("declared"));
    }
    stage.lose_server_of(&handles[0]);
    for (rank, job) in (0..).zip(&handles) {
        keep(job, &mut keepers);
        tasks.spawn(train(job.clone(), 0, rank, pause, Arc::clone(&consumed)));
    }
    while let Some(ended) = tokio::time::timeout(JOB_MAX, tasks.join_next()).await.expect("it ends") {
        ended.expect("it does not fail");
    }
    check_once(&handles[0], 0, &consumed, "ranks that were never served").await;
    let told = handles[0].receipt(0).await.expect("a receipt").unknown;
    assert_eq!(told.iter().map(|of| &of.ranks[..]).collect::<Vec<_>>(), [[0, 1]]);
}

/// All ranks bring what they had, so nothing that was handed out comes again.
#[tokio::test(flavor = "multi_thread")]
async fn at_most_once_nothing_comes_twice() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let mut stage = RankStage::start();
    let spec = StartJob { visitation: Visitation::AtMostOnce, ..ask("once", OrderKind::Substitute, 2) };
    let (consumed, pause) = (Consumed::new(), Duration::from_millis(15));
    let (mut tasks, mut keepers, mut handles) = (JoinSet::new(), JoinSet::new(), Vec::new());
    for rank in 0..2 {
        let job = stage.client().declare(&spec).await.expect("declared");
        job.join(0, rank).await.expect("joined");
        keep(&job, &mut keepers);
        tasks.spawn(train(job.clone(), 0, rank, pause, Arc::clone(&consumed)));
        handles.push(job);
    }
    consumed_at_least(&consumed, 24).await;
    stage.lose_server_of(&handles[0]);
    while let Some(ended) = tokio::time::timeout(JOB_MAX, tasks.join_next()).await.expect("it ends") {
        ended.expect("it does not fail");
    }
    let mut entries = consumed.entries.lock().clone();
    let all = entries.len();
    entries.sort_unstable();
    entries.dedup();
    assert_eq!(entries.len(), all, "nothing twice");
    assert!(all > SAMPLES as usize / 2, "{all}");
}

/// What a process may not reclaim: another tenant's job, records that are none, at-most-once.
#[tokio::test(flavor = "multi_thread")]
async fn records_that_are_none_are_refused() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let mut stage = RankStage::start();
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
    let (status, text) = refused(&of_once, r#"{"rank": 0, "epochs": [], "unserved": true}"#);
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
    let mut stage = RankStage::start();
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
