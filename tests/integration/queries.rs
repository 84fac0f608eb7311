//! "Questions and queries" of METRICS.md: each query of the page is sent to a real Prometheus that scraped a
//! real server, and its answer is compared with what the test knows.
//!
//! The truth comes from outside the server: the origin emulator counts the bytes that it sent, and the
//! readers count the bytes that they got and the time for which they waited. Answers agree within 1 %.
//!
//! `make accept-queries` runs the four workloads with more data.

use fletch_api::{Ack, OrderKind, PlanSpec, StartJob, Visitation, WorldSpec};
use fletch_client::{
    Client, ClientConfig, Endpoint,
    epochs::{JobHandle, Next},
};
use fletch_core::plan::Tail;
use fletch_testkit::{Backing, EmulatorConfig, Fault, OriginEmulator};
use fletch_tests::{
    bins::{command, repo, run, stdout},
    fixture::{Site, files},
    prometheus::{Answer, Prometheus, queries},
    require::{Need, have},
    watch::until,
};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs,
    process::Command,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// The length of each file. A multiple of a pack's alignment, so that no chunk has padding.
const FILE: usize = 40_960;

/// How much a workload does: little in `make test`, more in `make accept-queries`.
fn is_full() -> bool {
    std::env::var("FLETCH_QUERIES").is_ok_and(|v| v == "full")
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

/// A packed dataset in a store, a server that has registered it, and a Prometheus that scrapes the server.
struct Stage {
    prometheus: Prometheus,
    site: Site,
    emulator: OriginEmulator,
    root: String,
    names: Vec<String>,
    queries: BTreeMap<String, String>,
    _dir: TempDir,
}

/// The name of the dataset.
const SET: &str = "set";

fn stage(n: u64, bytes_per_s: Option<u64>) -> Stage {
    let emulator = OriginEmulator::start(
        EmulatorConfig { stream_bytes_per_s: bytes_per_s, ..EmulatorConfig::default() },
        Backing::empty(),
    );
    let names: Vec<String> = (0..n).map(|i| format!("d{}/f{i:05}", i % 4)).collect();
    for (i, name) in names.iter().enumerate() {
        emulator.insert(&format!("set/{name}"), bytes(i as u64, FILE));
    }
    let dir = TempDir::with_prefix("fletch-queries-").expect("scratch");
    let config = dir.path().join("fletch.toml");
    let text = format!(
        "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nregion = \"x\"\nallow_http = true\n\
         credentials = \"anonymous\"\n",
        emulator.uri(),
        emulator.endpoint()
    );
    fs::write(&config, text).expect("config");
    let config = config.display().to_string();
    let site = Site::start(&[
        "--config",
        &config,
        "--cache-size",
        "1GiB",
        "--memory",
        "256MiB",
        "--io-timeout",
        "4s",
    ]);
    let (uri, tables) = (format!("{}/set", emulator.uri()), format!("{}/tables", emulator.uri()));
    let mut pack = command("fletch");
    pack.args(["pack", &uri, "--to", &tables, "--config", &config, "--chunk-size", "1MiB"]);
    let root = stdout(&run(pack.arg("--state-dir").arg(site.place("pack-state"))));
    emulator.reset_counts();
    site.register(SET, &uri, &tables);
    let page = fs::read_to_string(repo().join("docs/METRICS.md")).expect("METRICS.md");
    let prometheus = Prometheus::scrape(&site.url);
    let queries = queries(&page, "Questions and queries");
    Stage { prometheus, site, emulator, root, names, queries, _dir: dir }
}

/// What the readers and the origin counted.
#[derive(Debug, Clone, Copy, Default)]
struct Truth {
    delivered: f64,
    origin: f64,
}

impl Truth {
    fn avoided(self) -> f64 {
        (self.delivered - self.origin).max(0.0)
    }
}

fn one(answer: &Answer, key: &str) -> f64 {
    answer.get(key).copied().unwrap_or(0.0)
}

/// Checks that two numbers agree within a hundredth: of the larger one, or of the whole for a part of it.
#[track_caller]
fn agree(what: &str, got: f64, want: f64, whole: f64) {
    eprintln!("{what}: the query says {got:.4}, the truth is {want:.4}");
    let most = got.abs().max(want.abs()).max(whole) / 100.0;
    assert!((got - want).abs() <= most, "{what}: the query says {got}, the truth is {want}");
}

impl Stage {
    fn query(&self, question: &str) -> &str {
        self.queries.get(question).unwrap_or_else(|| panic!("{question:?} is not in {:#?}", self.queries))
    }

    fn ask(&self, question: &str, time: f64) -> Answer {
        self.prometheus.query(self.query(question), Some(time))
    }

    /// Asks a question about a window that ends at `time`. The page asks about an hour.
    fn ask_since(&self, question: &str, since: f64, time: f64) -> Answer {
        let query = self.query(question);
        assert!(query.contains("offset 1h"), "{query}");
        let window = format!("offset {}ms", ((time - since) * 1000.0).round());
        self.prometheus.query(&query.replace("offset 1h", &window), Some(time))
    }

    fn origin_bytes(&self) -> f64 {
        self.emulator.counts().bytes_sent as f64
    }

    /// Checks the questions about bytes against the truth since the server started. Returns the time.
    fn check_bytes(&self, what: &str, truth: Truth) -> f64 {
        let time = self.prometheus.settle();
        let dataset = format!("dataset={SET}");
        let of = |question| one(&self.ask(question, time), &dataset);
        let Truth { delivered, origin } = truth;
        agree(&format!("{what}: delivered"), of("bytes delivered"), delivered, 0.0);
        agree(&format!("{what}: origin"), of("bytes read from the origin"), origin, 0.0);
        agree(&format!("{what}: avoided"), of("bytes that the cache saved"), truth.avoided(), delivered);
        let (saved, amplified) = (truth.avoided() / delivered, origin / delivered);
        agree(&format!("{what}: saved"), of("share of the bytes that the cache saved"), saved, 1.0);
        let question = "bytes read from the origin for each byte delivered";
        agree(&format!("{what}: amplification"), of(question), amplified, 1.0);
        let split = self.ask("hit split", time);
        agree(&format!("{what}: all parts"), split.values().sum(), 1.0, 0.0);
        self.check_people(what, truth);
        time
    }

    /// Checks what people see: the page and `fletch status` have these bytes, and the page and `fletch jobs
    /// show` one verdict of each job.
    fn check_people(&self, what: &str, truth: Truth) {
        let fletch = |words: &[&str]| -> Value {
            let out =
                stdout(&run(command("fletch").args(words).args(["--json", "--server", &self.site.url])));
            serde_json::from_str(&out).expect("JSON")
        };
        let (page, status) = (self.site.json("/v1/dashboard?rows=100"), fletch(&["status"]));
        let row = |rows: &Value| -> Value {
            let rows = rows.as_array().expect("rows");
            let of_set = |row: &&Value| row["dataset"] == SET || row["name"] == SET;
            rows.iter().find(of_set).unwrap_or_else(|| panic!("{rows:?}")).clone()
        };
        let of_status = row(&status["accounts"]["datasets"]);
        for (place, row) in [("page", row(&page["datasets"])), ("status", of_status)] {
            let of = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row}"));
            let Truth { delivered, origin } = truth;
            agree(&format!("{what}: delivered, {place}"), of("delivered_bytes"), delivered, 0.0);
            agree(&format!("{what}: origin, {place}"), of("origin_bytes"), origin, 0.0);
            agree(&format!("{what}: avoided, {place}"), of("avoided_bytes"), truth.avoided(), delivered);
        }
        let jobs = page["jobs"].as_array().expect("jobs");
        for job in jobs.iter().filter(|job| job["is_declared"] == true) {
            let name = job["name"].as_str().expect("a name");
            // A row has the verdict among its own fields.
            let verdict = |job: &Value| {
                let doing = if job["doing"].is_object() { &job["doing"] } else { job };
                assert!(doing["state"].is_string(), "{job}");
                (doing["state"].clone(), doing["waits_for"].clone())
            };
            let shown = fletch(&["jobs", "show", name]);
            assert_eq!(verdict(&shown), verdict(job), "{what}: the verdict about {name}: {shown} {job}");
            let all = fletch(&["status"])["jobs_now"].as_array().expect("jobs").clone();
            let of_status = all.iter().find(|of| of["name"] == name).expect("the job is in the status");
            assert_eq!(verdict(of_status), verdict(job), "{what}: the verdict about {name}: {of_status}");
        }
    }

    fn split(&self, time: f64, result: &str) -> f64 {
        one(&self.ask("hit split", time), &format!("dataset={SET},result={result}"))
    }

    /// Fetches a file with curl. Returns its bytes if the server delivered it, and how long curl waited for
    /// the first byte of the answer, in seconds.
    fn get(&self, name: &str) -> (Option<Vec<u8>>, f64) {
        let times = "%{stderr}%{time_pretransfer} %{time_starttransfer}";
        let out = Command::new("curl")
            .args(["-s", "--fail", "--max-time", "30", "-H", "Fletch-Job: curl", "-w", times])
            .arg(format!("{}/v1/versions/{}/files/{name}", self.site.url, self.root))
            .output()
            .expect("curl runs");
        let times = String::from_utf8_lossy(&out.stderr);
        let times: Vec<f64> = times.split_whitespace().filter_map(|t| t.parse().ok()).collect();
        (out.status.success().then_some(out.stdout), times[1] - times[0])
    }

    fn failing(&self) -> bool {
        let origins = self.site.json("/v1/origins");
        let origins = origins["origins"].as_array().expect("a list");
        origins.iter().any(|o| o["state"] == "failing")
    }
}

#[test]
fn a_cold_and_a_warm_mount_of_a_pack() {
    if !have(&[Need::Fuse, Need::Prometheus]) {
        return;
    }
    let stage = stage(if is_full() { 2000 } else { 250 }, None);
    // Returns the bytes that were read, and those for which the origin was asked meanwhile.
    let read = |job: &str| {
        let mount = stage.site.mount(SET, job, &[]);
        let (mut sum, mut missed) = (0.0, 0.0);
        for (i, name) in stage.names.iter().enumerate() {
            let before = stage.emulator.counts().get;
            let got = fs::read(mount.dir.join(name)).expect("read");
            assert!(got == bytes(i as u64, FILE), "{name}");
            sum += got.len() as f64;
            if stage.emulator.counts().get > before {
                missed += got.len() as f64;
            }
        }
        assert_eq!(files(&mount.dir).len(), stage.names.len());
        mount.stop();
        (sum, missed)
    };
    let (delivered, missed) = read("cold");
    let cold = Truth { delivered, origin: stage.origin_bytes() };
    assert!(cold.origin >= cold.delivered, "nothing was saved: {cold:?}");
    let between = stage.check_bytes("cold mount", cold);
    // The origin's reads are those of one job, and of the tables.
    let by_job = stage.ask("bytes read from the origin, by job", between);
    let content = one(&by_job, &format!("dataset={SET},of=content,train_job=cold"));
    let tables = one(&by_job, &format!("dataset={SET},of=tables,train_job=none"));
    agree("cold mount: content of the job", content, cold.delivered, 0.0);
    agree("cold mount: content and tables", content + tables, cold.origin, 0.0);
    agree("cold mount: misses", stage.split(between, "miss"), missed / delivered, 1.0);
    agree("cold mount: hits", stage.split(between, "hit"), 1.0 - missed / delivered, 1.0);
    let warm = Truth { delivered: cold.delivered + read("warm").0, origin: stage.origin_bytes() };
    let time = stage.check_bytes("warm mount", warm);
    // The window has the warm mount only: everything was saved.
    let dataset = format!("dataset={SET}");
    let delivered = one(&stage.ask_since("bytes delivered in the last hour", between, time), &dataset);
    agree("warm mount: delivered in the window", delivered, warm.delivered - cold.delivered, 0.0);
    let saved = one(&stage.ask_since("bytes that the cache saved in the last hour", between, time), &dataset);
    agree("warm mount: saved in the window", saved, delivered - (warm.origin - cold.origin), 0.0);
    agree("warm mount: misses", stage.split(time, "miss"), missed / warm.delivered, 1.0);
    agree("warm mount: hits", stage.split(time, "hit"), 1.0 - missed / warm.delivered, 1.0);
    let stalls = stage.ask("seconds for which a job waited", time);
    let (cold, warm) = (one(&stalls, "train_job=cold"), one(&stalls, "train_job=warm"));
    eprintln!("stalls: cold {cold:.3} s, warm {warm:.3} s");
    assert!(cold > 0.0);
}

/// Consumes an epoch. Returns the bytes, and the time in which the consumer waited for samples.
async fn consume(job: JobHandle) -> (f64, Duration) {
    let mut reader = job.reader(0, 0, 0).patience(Duration::from_secs(60));
    let (mut sum, mut waited) = (0.0, Duration::ZERO);
    loop {
        let began = Instant::now();
        let next = reader.next(64).await.expect("a lease");
        waited += began.elapsed();
        match next {
            Next::Batch(b) => {
                sum += b.samples.iter().map(|s| s.bytes.len() as f64).sum::<f64>();
                let ack = Ack { lease: b.token.lease, upto: b.token.entries, batches: Vec::new() };
                job.ack(0, b.token.rank, &[ack]).await.expect("acknowledged");
                job.held().release(0, 0, b.token.lease);
            }
            Next::Full | Next::Last => tokio::time::sleep(Duration::from_millis(20)).await,
            Next::Done => return (sum, waited),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_jobs_that_share() {
    if !have(&[Need::Prometheus]) {
        return;
    }
    // Slow enough that both jobs wait for the origin.
    let n = if is_full() { 2000 } else { 250 };
    let stage = tokio::task::block_in_place(|| stage(n, Some(4 << 20)));
    let endpoint: Endpoint = stage.site.url.parse().expect("url");
    let client = Client::new(ClientConfig::new(endpoint, "loader")).expect("client");
    let declare = async |name: &str| {
        let ask = StartJob {
            name: name.parse().expect("name"),
            dataset: Some(SET.parse().expect("name")),
            version: None,
            root: None,
            layout: None,
            seed: Some(7),
            order: OrderKind::Substitute,
            buckets: None,
            replay: None,
            plan: PlanSpec::default(),
            world: WorldSpec { ranks: 1, batch: 64, tail: Tail::Keep },
            visitation: Visitation::ExactlyOnce,
        };
        client.declare(&ask).await.expect("declared")
    };
    let (a, b) = (declare("a").await, declare("b").await);
    let (a, b) = tokio::join!(consume(a), consume(b));
    tokio::task::block_in_place(|| {
        let truth = Truth { delivered: a.0 + b.0, origin: stage.origin_bytes() };
        assert!(truth.origin < 0.6 * truth.delivered, "the jobs shared: {truth:?}");
        let time = stage.check_bytes("two jobs", truth);
        // Each unit was fetched once, for one of the jobs; the other one got it as a substitution.
        let missed = stage.split(time, "miss") + stage.split(time, "bypass");
        agree("two jobs: misses", missed, a.0 / truth.delivered, 1.0);
        agree("two jobs: shared", stage.split(time, "substituted") + stage.split(time, "hit"), 0.5, 1.0);
        let stalls = stage.ask("seconds for which a job waited", time);
        for (job, (_, waited)) in [("a", a), ("b", b)] {
            let got = one(&stalls, &format!("train_job={job}"));
            eprintln!("job {job}: the query says {got:.3} s, the consumer waited {waited:.3?}");
        }
    });
}

#[test]
fn a_warm_up_and_a_reader() {
    if !have(&[Need::Prometheus]) {
        return;
    }
    let stage = stage(if is_full() { 2000 } else { 250 }, None);
    let mut warm_up = command("fletch");
    run(warm_up.args(["warmup", SET, "--wait", "--quiet", "--server", &stage.site.url]));
    let origin = stage.origin_bytes();
    let mut delivered = 0.0;
    for name in &stage.names {
        delivered += stage.get(name).0.expect("the file").len() as f64;
    }
    assert!((stage.origin_bytes() - origin).abs() < 1.0, "all was there");
    stage.check_bytes("after a warm-up", Truth { delivered, origin });
}

#[test]
fn an_origin_that_fails() {
    if !have(&[Need::Prometheus]) {
        return;
    }
    let stage = stage(250, Some(4 << 20));
    let mut truth = Truth::default();
    // Few files, so that most chunks are not cached.
    let (before, after) = stage.names.split_at(3);
    for name in before {
        truth.delivered += stage.get(name).0.expect("the file").len() as f64;
    }
    truth.origin = stage.origin_bytes();
    let time = stage.check_bytes("before the failure", truth);
    assert!(!stage.failing() && stage.ask("an origin fails", time).is_empty());

    // Content fails, then works again.
    let question = "an origin fails";
    let fault = Fault::Error { rate: 1.0, status: 503 };
    stage.emulator.set_fault("", fault, None);
    let mut refused = 0;
    let began = Instant::now();
    for name in after {
        match stage.get(name).0 {
            Some(got) => truth.delivered += got.len() as f64,
            None => refused += 1,
        }
        if refused > 0 && stage.failing() {
            break;
        }
    }
    assert!(stage.failing(), "{refused} reads failed");
    assert!(began.elapsed() < Duration::from_secs(10), "seen within 10 s: {:?}", began.elapsed());
    let time = stage.prometheus.settle();
    let failing = stage.ask(question, time);
    let series = stage.site.metrics();
    let series: Vec<_> = series.iter().filter(|(k, _)| k.contains("_origin_")).collect();
    let why = format!("{} {series:#?}", stage.site.json("/v1/origins"));
    assert_eq!(failing.keys().collect::<Vec<_>>(), [&format!("dataset={SET}")], "{why}");
    let age = one(&stage.ask("seconds since an origin failed last", time), &format!("dataset={SET}"));
    assert!((0.0..20.0).contains(&age), "{age}");
    let ready = String::from_utf8(stage.site.get("/readyz?verbose")).expect("text");
    assert!(ready.starts_with("ok\n") && ready.contains("failing: "), "{ready}");
    let problems = stage.site.json("/v1/dashboard")["problems"].to_string();
    assert!(problems.contains("FletchOriginErrors"), "{problems}");
    let status = stdout(&run(command("fletch").args(["status", "--server", &stage.site.url])));
    assert!(
        status.contains(": degraded\nwhy    s3://bucket") && status.contains("failing origins"),
        "{status}"
    );
    truth.origin = stage.origin_bytes();
    stage.check_bytes("while it fails", truth);
    stage.emulator.clear_faults();
    until("the origin works again", Duration::from_secs(20), || !stage.failing());
    assert!(stage.ask(question, stage.prometheus.settle()).is_empty());
    assert!(stage.get(&after[after.len() - 1]).0.is_some());
}

#[test]
fn a_reader_that_waits_for_the_origin() {
    if !have(&[Need::Prometheus]) {
        return;
    }
    // A chunk of 25 files takes a second.
    let stage = stage(125, Some(1 << 20));
    let mut names = stage.names.clone();
    names.sort();
    // The first read opens the version.
    assert!(stage.get(&names[0]).0.is_some());
    let question = "seconds for which a job waited";
    let stalls = |time| one(&stage.ask(question, time), "train_job=curl");
    let before = stalls(stage.prometheus.settle());
    // Files of different chunks, and two that are cached by then.
    let waited: f64 = [30, 56, 82, 31, 57].map(|i: usize| stage.get(&names[i]).1).iter().sum();
    assert!(waited > 2.0, "{waited}");
    let got = stalls(stage.prometheus.settle()) - before;
    eprintln!("stall: the query says {got:.3} s, the reader waited {waited:.3} s");
    // The short form runs beside other tests.
    let within = if is_full() { 0.01 } else { 0.05 };
    assert!((got - waited).abs() <= within * waited, "the query says {got}, the truth is {waited}");
}

#[test]
fn tables_alone_fail() {
    if !have(&[Need::Prometheus]) {
        return;
    }
    let stage = stage(20, None);
    stage.emulator.set_fault("tables/", Fault::Error { rate: 1.0, status: 403 }, None);
    // Nobody opened the version yet: the first read needs the tables.
    assert!(stage.get(&stage.names[0]).0.is_none());
    until("the failing tables are seen", Duration::from_secs(10), || stage.failing());
    let time = stage.prometheus.settle();
    assert_eq!(stage.ask("an origin fails", time).len(), 1);
    let ready = String::from_utf8(stage.site.get("/readyz?verbose")).expect("text");
    assert!(ready.contains("origins 1 of 2 failing\norigin s3://bucket/tables failing: "), "{ready}");
    stage.emulator.clear_faults();
    until("the tables work again", Duration::from_secs(20), || !stage.failing());
}

#[test]
fn every_query_of_the_page_is_one_that_prometheus_takes() {
    if !have(&[Need::Prometheus]) {
        return;
    }
    let stage = stage(5, None);
    assert!(stage.queries.len() > 10, "{:#?}", stage.queries);
    for (question, query) in &stage.queries {
        let answer = stage.prometheus.query(query, None);
        eprintln!("{question}: {} series", answer.len());
    }
}
