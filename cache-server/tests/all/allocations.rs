//! Tests that the disk goes to the jobs that gain, on a real server with two slow origins.

use crate::common::{Node, Tree, content, epochs::*, problem};
use fletch_api::{Allocation, BatchTimes, Code, DatasetShare, OrderKind, ShareBasis, StartJob, routes};
use fletch_client::epochs::{JobHandle, LeaseBatch, Next};
use fletch_core::{
    JobName,
    manifest::{LayoutParams, PackParams},
    plan::Tail,
};
use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator};
use reqwest::Method;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tempfile::TempDir;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, sleep_until},
};
use tokio_util::task::TaskTracker;

const SAMPLE: usize = 8 << 10;
const CHUNK: usize = 256 << 10;
/// Samples of a lease, and of a step.
const BATCH: u32 = 32;

/// Chunks of a dataset. The memory of the smallest server holds fewer.
const CHUNKS: usize = 300;
/// What a link carries, in bytes a second.
const LINK: u64 = 20 << 20;

/// A packed dataset behind a slow link.
struct Dataset {
    origin: OriginEmulator,
    _pack: TempDir,
}

impl Dataset {
    fn new(number: u64) -> Self {
        let mut tree = Tree::new([]);
        let per_chunk = CHUNK / SAMPLE;
        for i in 0..CHUNKS * per_chunk {
            let (name, bytes) = (format!("f{i:06}"), content((number << 32) + i as u64, SAMPLE));
            std::fs::write(tree.path(&name), &bytes).expect("write");
            tree.files.insert(name, bytes);
        }
        let pack = tempfile::tempdir().expect("tempdir");
        let group = PackParams { group_bytes: CHUNK as u32, ..PackParams::DEFAULT };
        tree.pack_with(pack.path(), LayoutParams { pack: Some(group), ..LayoutParams::PACK }, false);
        let bucket = format!("bucket-{number}");
        let config = EmulatorConfig { bucket, total_bytes_per_s: Some(LINK), ..EmulatorConfig::default() };
        let origin = OriginEmulator::start(config, Backing::Directory(pack.path().to_owned()));
        Dataset { origin, _pack: pack }
    }

    fn settings(&self) -> String {
        format!(
            "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\nregion = \"us-east-1\"\n\
             credentials = \"anonymous\"\n",
            self.origin.uri(),
            self.origin.endpoint()
        )
    }
}

/// Starts a server in front of datasets `d0`, `d1`, …
async fn serve(datasets: &[Dataset], disk: u64, more: &[&str]) -> Node {
    let state = tempfile::tempdir().expect("tempdir");
    let file = state.path().join("f.toml");
    std::fs::write(&file, datasets.iter().map(Dataset::settings).collect::<String>()).expect("write");
    let (config, size) = (format!("--config={}", file.display()), format!("--cache-size={disk}"));
    let mut args = vec![config.as_str(), size.as_str(), "--cache-decision-interval=2s", "--memory=64MiB"];
    args.extend_from_slice(more);
    let node = Node::start_in(state, &args).await;
    for (i, dataset) in datasets.iter().enumerate() {
        // A pack lies beside its tables, wherever the files are.
        let files = format!("{}/files", dataset.origin.uri());
        node.register(&format!("d{i}"), &files, Some(&dataset.origin.uri())).await;
    }
    node
}

fn declaration(name: &str, dataset: usize) -> StartJob {
    StartJob {
        name: JobName::new(name).expect("name"),
        dataset: Some(format!("d{dataset}").parse().expect("name")),
        ..ask(name, OrderKind::Substitute, world(1, BATCH, Tail::Keep))
    }
}

/// Trains with an emulated accelerator, which takes a step of a batch at `rate` bytes a second, by absolute
/// deadlines. Ends after `passes` epochs, or when `stop` says so.
async fn train(job: JobHandle, rate: f64, passes: u64, stop: Arc<AtomicBool>) {
    train_from(job, rate, 0..passes, stop).await;
}

async fn train_from(job: JobHandle, rate: f64, epochs: std::ops::Range<u64>, stop: Arc<AtomicBool>) {
    let (mut due, tasks) = (Instant::now(), TaskTracker::new());
    for epoch in epochs {
        let (to, mut from) = mpsc::channel::<LeaseBatch>(2);
        let asker = job.clone();
        let asking = tasks.spawn(async move {
            let mut reader = asker.reader(epoch, 0, 0).patience(Duration::from_secs(60));
            while let Next::Batch(batch) = reader.next(BATCH).await.expect("a lease") {
                if to.send(batch).await.is_err() {
                    return;
                }
            }
        });
        loop {
            let asked = Instant::now();
            let Some(batch) = from.recv().await else { break };
            let got = Instant::now();
            let content: u64 = batch.samples.iter().map(|s| s.bytes.len() as u64).sum();
            due = due.max(got) + Duration::from_secs_f64(content as f64 / rate);
            sleep_until(due).await;
            let ns = |d: Duration| u64::try_from(d.as_nanos()).expect("short");
            let times = BatchTimes {
                entries: u32::try_from(batch.samples.len()).expect("few"),
                waited_ns: ns(got - asked),
                stepped_ns: ns(got.elapsed()),
                ..BatchTimes::default()
            };
            job.ack(epoch, 0, &[batch.token.ack(times)]).await.expect("acknowledged");
            job.held().release(epoch, 0, batch.token.lease);
            if stop.load(Relaxed) {
                asking.abort();
                return;
            }
        }
        asking.await.expect("the epoch's leases");
    }
}

async fn allocation(node: &Node) -> Allocation {
    let text = node.get(routes::ALLOCATION).send().await.expect("answer").text().await.expect("text");
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e} in {text}"))
}

fn share<'a>(allocation: &'a Allocation, dataset: &str) -> &'a DatasetShare {
    let found = allocation.datasets.iter().find(|d| d.dataset.as_str() == dataset && d.is_sweep);
    found.unwrap_or_else(|| panic!("{dataset} in {allocation:?}"))
}

/// A job that computes slower than its link brings data gains nothing from the cache. The other job has all
/// of it soon after both are measured.
#[tokio::test(flavor = "multi_thread")]
async fn contested_bytes_go_to_the_job_that_waits_for_its_origin() {
    let datasets = [Dataset::new(1), Dataset::new(2)];
    let disk = (CHUNKS * CHUNK / 2) as u64;
    let node = serve(&datasets, disk, &[]).await;
    let (client, stop) = (client(&node), Arc::new(AtomicBool::new(false)));
    let slow = client.declare(&declaration("computes", 0)).await.expect("declared");
    let fast = client.declare(&declaration("waits", 1)).await.expect("declared");
    let link = LINK as f64;
    let (never, tasks) = (Arc::new(AtomicBool::new(false)), TaskTracker::new());
    let computing = tasks.spawn(train(slow.clone(), 0.8 * link, u64::MAX, Arc::clone(&stop)));
    let waiting = tasks.spawn(train(fast.clone(), 4.0 * link, 3, never));
    let mut seen = Vec::new();
    let begun = Instant::now();
    while !waiting.is_finished() {
        sleep(Duration::from_millis(500)).await;
        let now = allocation(&node).await;
        if now.datasets.iter().filter(|d| d.is_sweep).count() == 2 {
            let of = |d| (share(&now, d).share_bytes, share(&now, d).cached_bytes, share(&now, d).basis);
            seen.push((begun.elapsed(), now.reason, of("d0"), of("d1")));
        }
    }
    waiting.await.expect("the job that waits");
    let shown = fast.current().await.expect("the job");
    let last = allocation(&node).await;
    let page = node.get("/metrics").send().await.expect("answer").text().await.expect("text");
    stop.store(true, Relaxed);
    computing.await.expect("the job that computes");
    seen.iter().for_each(|s| println!("{s:?}"));
    let (a, b) = (share(&last, "d0"), share(&last, "d1"));
    assert_eq!((a.basis, b.basis), (ShareBasis::Benefit, ShareBasis::Benefit));
    assert!(b.share_bytes as f64 >= 0.9 * last.divided_bytes as f64, "{last:#?}");
    for begins in [
        "fletch_job_speed_ratio{",
        "fletch_job_waits_for{",
        "fletch_job_info{dataset=\"d1\",order=\"substitute\"",
        "fletch_job_epoch{",
        "fletch_job_epoch_entries{of=\"acked\"",
        "fletch_job_rank_entries_left{rank=\"0\"",
        "fletch_job_samples_per_second{of=\"never_waiting\"",
        "fletch_job_samples_per_second{of=\"origin\"",
        "fletch_job_time_ratio{part=\"fetch\"",
        "fletch_job_cached_ratio{",
        "fletch_dataset_bytes{dataset=\"d1\",of=\"cached\"",
        "fletch_share_bytes{dataset=\"d1\"",
    ] {
        let ours = |l: &str| l.starts_with(begins) && (l.contains("waits") || l.contains("d1"));
        assert!(page.lines().any(ours), "{begins} in {page}");
    }
    assert!((b.rank, a.rank) == (Some(1), Some(2)) && b.gain_per_gib > a.gain_per_gib, "{last:#?}");
    assert!(b.curve.windows(2).all(|w| w[0].speed <= w[1].speed + 1e-9), "{:?}", b.curve);
    let job = shown.share.expect("it runs");
    assert_eq!((job.share_bytes, job.rank, job.others), (Some(b.share_bytes), Some(1), 0));
    node.running.shutdown().await;
}

/// R12: while the link brings the units of the window, a lone job reads its reserve. So the link is busy to
/// the epoch's end, and half of its bytes come in the first half of the samples.
#[tokio::test(flavor = "multi_thread")]
async fn a_lone_job_reads_its_reserve_while_its_link_is_busy() {
    let datasets = [Dataset::new(3)];
    let node = serve(&datasets, (CHUNKS * CHUNK / 2) as u64, &[]).await;
    let job = client(&node).declare(&declaration("alone", 0)).await.expect("declared");
    let sent = || datasets[0].origin.counts().bytes_sent;
    let steps = CHUNKS * CHUNK / SAMPLE / BATCH as usize;
    let mut parts = Vec::new();
    for epoch in 0..3 {
        let (before, mut half) = (sent(), 0);
        let mut reader = job.reader(epoch, 0, 0).patience(Duration::from_secs(60));
        for step in 0..steps {
            let Next::Batch(batch) = reader.next(BATCH).await.expect("a lease") else {
                panic!("epoch {epoch} ended at step {step}")
            };
            job.ack(epoch, 0, &[batch.token.ack(BatchTimes::default())]).await.expect("acknowledged");
            job.held().release(epoch, 0, batch.token.lease);
            if step == steps / 2 {
                half = sent() - before;
            }
        }
        parts.push((half as f64 / (sent() - before) as f64, sent() - before));
    }
    // The sizes of units vary, and loads run ahead by a part of the window.
    assert!((0.4..0.65).contains(&parts[2].0), "{parts:?}");
    node.running.shutdown().await;
}

/// A job that waits for its origin most of the time gives a bound only, until a probe gives it cached
/// samples.
#[tokio::test(flavor = "multi_thread")]
async fn a_probe_finds_the_most_rate_of_a_job_that_always_waits() {
    let datasets = [Dataset::new(4)];
    let node = serve(&datasets, (CHUNKS * CHUNK / 2) as u64, &[]).await;
    let job = client(&node).declare(&declaration("probed", 0)).await.expect("declared");
    let refused = job.probe().await.expect_err("it has not begun");
    assert!(refused.to_string().contains("no epoch under way"), "{refused}");
    let (stop, tasks) = (Arc::new(AtomicBool::new(false)), TaskTracker::new());
    train(job.clone(), 20.0 * LINK as f64, 1, Arc::clone(&stop)).await;
    let running = tasks.spawn(train_from(job.clone(), 20.0 * LINK as f64, 1..4, Arc::clone(&stop)));
    // The second epoch has begun, and reads its reserve in small pieces.
    let probe = async || job.current().await.expect("the job").benefit.expect("a new server");
    let begun = loop {
        match job.probe().await {
            Ok(begun) => break begun.benefit.and_then(|b| b.probe).expect("it began"),
            Err(refused) => assert!(!running.is_finished(), "{refused}"),
        }
        sleep(Duration::from_millis(50)).await;
    };
    assert!(begun.of_entries >= 64 * u64::from(BATCH) && !begun.is_over, "{begun:?}");
    let found = loop {
        let found = probe().await.probe.expect("there is one");
        if found.is_over {
            break found;
        }
        assert!(!running.is_finished(), "{found:?}");
        sleep(Duration::from_millis(20)).await;
    };
    stop.store(true, Relaxed);
    running.await.expect("the job");
    let estimate = probe().await.estimate.expect("many steps");
    // Slower machines than this one are several times as fast as the link.
    let link = LINK as f64 / SAMPLE as f64;
    assert!(found.most_rate.is_some_and(|most| most > 1.2 * link), "{found:?} {estimate:?}");
    assert!(estimate.is_sure, "{estimate:?}");
    let strict = StartJob {
        name: JobName::new("strict").expect("name"),
        order: OrderKind::Strict,
        ..declaration("strict", 0)
    };
    let strict = client(&node).declare(&strict).await.expect("declared");
    assert!(matches!(
        strict.reader(0, 0, 0).patience(Duration::from_secs(60)).next(BATCH).await,
        Ok(Next::Batch(_))
    ));
    let refused = strict.probe().await.expect_err("its order decides");
    assert!(refused.to_string().contains("order decides"), "{refused}");
    node.running.shutdown().await;
}

/// What users set of a job is refused with an explanation, or survives a restart.
#[tokio::test(flavor = "multi_thread")]
async fn settings_of_jobs_are_checked_and_kept() {
    let tree = tree(8);
    tree.index();
    let node = Node::serving(&tree, &["--cache-size=32MiB"]).await;
    let job = client(&node).declare(&ask("a", OrderKind::Strict, world(1, 4, Tail::Keep))).await;
    let job = job.expect("declared");
    let other = client(&node).declare(&ask("b", OrderKind::Strict, world(1, 4, Tail::Keep))).await;
    let (id, other) = (job.info().id.clone(), other.expect("declared").info().id.clone());
    let put = |node: &Node, id: &str, body: &str| {
        node.json(Method::PUT, &routes::job_settings(id), body.to_owned()).send()
    };
    let refused = async |id: &str, body: &str, words: &str| {
        let told = problem(put(&node, id, body).await.expect("answer"), Code::BadRequest).await;
        assert!(told.detail.contains(words), "{body}: {told:?}");
    };
    refused(&id, r#"{"weight":-1}"#, "within 0.001 and 1000").await;
    refused(&id, r#"{"min_share_bytes":99000000}"#, "exceeds the disk").await;
    refused(&id, r#"{"wieght":2}"#, "wieght").await;
    problem(put(&node, "0123", r#"{"weight":2}"#).await.expect("answer"), Code::NotFound).await;
    let good = r#"{"weight":2.5,"min_share_bytes":20000000}"#;
    let r = put(&node, &id, good).await.expect("answer");
    assert_eq!(r.status(), 200, "{}", r.text().await.expect("text"));
    refused(&other, r#"{"min_share_bytes":20000000}"#, "beside 20000000 that other jobs").await;
    // The job's own least share does not count against a new one.
    assert_eq!(put(&node, &id, good).await.expect("answer").status(), 200);
    node.running.shutdown().await;
    let node = Node::start_in(node.state, &["--cache-size=32MiB"]).await;
    let job = client(&node).job(&id).await.expect("remembered");
    let settings = job.info().settings;
    assert_eq!((settings.weight, settings.min_share_bytes), (Some(2.5), Some(20_000_000)));
    assert_eq!(put(&node, &id, "{}").await.expect("answer").status(), 200);
    assert_eq!(job.current().await.expect("job").settings.weight(), 1.0);
    node.running.shutdown().await;
}

/// A cache policy without shares divides nothing, and says so.
#[tokio::test(flavor = "multi_thread")]
async fn a_policy_without_shares_has_no_least_shares() {
    let tree = tree(8);
    tree.index();
    let node = Node::serving(&tree, &["--cache-size=32MiB", "--cache-policy=lru"]).await;
    let job = client(&node).declare(&ask("a", OrderKind::Strict, world(1, 4, Tail::Keep))).await;
    let path = routes::job_settings(&job.expect("declared").info().id);
    let asked = node.json(Method::PUT, &path, r#"{"min_share_bytes":5}"#).send().await.expect("answer");
    let told = problem(asked, Code::BadRequest).await;
    assert!(told.detail.contains("cache.policy is not fletch"), "{told:?}");
    let weight = node.json(Method::PUT, &path, r#"{"weight":5}"#).send().await.expect("answer");
    assert_eq!(weight.status(), 200);
    let now = allocation(&node).await;
    assert!(now.datasets.is_empty() && now.reason.is_none(), "{now:?}");
    node.running.shutdown().await;
}

/// Only an admin takes bytes from all tenants, and nobody changes the jobs of others.
#[tokio::test(flavor = "multi_thread")]
async fn a_user_sets_weights_of_its_own_jobs_only() {
    let tree = tree(8);
    tree.index();
    let tokens = tempfile::tempdir().expect("tempdir");
    let file = tokens.path().join("tokens.toml");
    let row = |token: &str, tenant: &str, role: &str| {
        let hash = fletch_core::Hash::of(token.as_bytes());
        format!("[[token]]\nhash = \"{hash}\"\ntenant = \"{tenant}\"\ndomain = \"d\"\nrole = \"{role}\"\n")
    };
    let of_a = [("u", "user"), ("r", "reader"), ("a", "admin")].map(|(token, role)| row(token, "a", role));
    let rows = [of_a.concat(), row("o", "b", "user")];
    std::fs::write(&file, rows.concat()).expect("write");
    let flag = format!("--auth-tokens={}", file.display());
    let local = format!("--local-dirs={}=*", tree.uri());
    let mut node = Node::start(&["--cache-size=32MiB", &flag, &local]).await;
    node.sign("u");
    node.register("d", &tree.uri(), None).await;
    let body = serde_json::to_string(&ask("a", OrderKind::Strict, world(1, 4, Tail::Keep))).expect("json");
    let declared = node.post(routes::JOBS, body).send().await.expect("answer");
    let text = declared.text().await.expect("text");
    let job: fletch_api::Job = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e} in {text}"));
    let path = routes::job_settings(&job.id);
    let mut put = async |token: &str, body: &str| {
        node.sign(token);
        node.json(Method::PUT, &path, body.to_owned()).send().await.expect("answer")
    };
    assert_eq!(put("u", r#"{"weight":2}"#).await.status(), 200);
    problem(put("u", r#"{"weight":2,"min_share_bytes":9}"#).await, Code::Forbidden).await;
    problem(put("r", r#"{"weight":2}"#).await, Code::Forbidden).await;
    problem(put("o", r#"{"weight":9}"#).await, Code::NotFound).await;
    assert_eq!(put("a", r#"{"weight":2,"min_share_bytes":9}"#).await.status(), 200);
    // What is set already is no change.
    assert_eq!(put("u", r#"{"weight":3,"min_share_bytes":9}"#).await.status(), 200);
    node.running.shutdown().await;
}
