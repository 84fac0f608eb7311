//! The dashboards of the chart: every query of every panel is sent to a real Prometheus, which scraped a real
//! server and real mounts under load, and returns data.
//!
//! Some queries return nothing on a healthy machine. [`EMPTY`] lists them, and the test makes each of them
//! return data. `tests/chart` checks that the files are what their script writes, and that they have the
//! types of Grafana.
//!
//! `make accept-dashboards` runs this with more data.

use fletch_api::{BatchTimes, OrderKind, PlanSpec, StartJob, Visitation, WorldSpec};
use fletch_client::{
    Client, ClientConfig, Endpoint,
    epochs::{JobHandle, Next},
};
use fletch_core::plan::Tail;
use fletch_testkit::{Backing, EmulatorConfig, Fault, OriginEmulator};
use fletch_tests::{
    bins::{command, repo, run, stdout},
    cluster::{ClusterServer, EtcdCluster, agreed},
    monitored::{NodeMounts, Service},
    prometheus::{Answer, Prometheus},
    require::{Need, have},
    watch::until,
};
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    process::Command,
    time::{Duration, Instant},
};

const SET: &str = "set";
const JOB: &str = "train";
/// The length of each file.
const FILE: usize = 40_960;
/// Ranks of the job.
const RANKS: u32 = 2;
/// Samples of a rank's step.
const STEP: u32 = 16;

/// Queries without data on a healthy machine: (panel, number of the query from 0). The test below gives each
/// of them data.
const EMPTY: [(&str, usize); 2] = [("Firing alerts", 0), ("Failed requests by route", 0)];

/// Panels about what passes between servers, which have data in a cluster only.
const OF_CLUSTERS: [&str; 3] =
    ["Bytes sent to other servers", "Requests to other servers by result", "Chunks away from their owners"];

/// How many files there are: more than the server's memory holds, so that its disk is read.
fn file_count() -> u64 {
    if std::env::var("FLETCH_DASHBOARDS").is_ok_and(|v| v == "full") { 6000 } else { 2000 }
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

/// A query of a panel.
struct PanelQuery {
    board: String,
    panel: String,
    number: usize,
    query: String,
}

impl PanelQuery {
    fn is(&self, (panel, number): (&str, usize)) -> bool {
        self.panel == panel && self.number == number
    }
}

fn boards() -> Vec<Value> {
    let dir = repo().join("helm/fletch/dashboards");
    let files = fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let mut files: Vec<_> = files.map(|e| e.expect("entry").path()).collect();
    files.sort();
    let read = |path: &std::path::PathBuf| fs::read_to_string(path).expect("dashboard");
    files.iter().map(|path| serde_json::from_str(&read(path)).expect("JSON")).collect()
}

/// Returns a query with values in place of Grafana's variables.
fn filled(query: &str) -> String {
    let values = [
        ("$__rate_interval", "1m"),
        ("$__range", "5m"),
        ("$dataset", ".*"),
        ("$tenant", ".*"),
        ("$job", JOB),
    ];
    values.iter().fold(query.to_owned(), |query, (variable, value)| query.replace(variable, value))
}

fn queries() -> Vec<PanelQuery> {
    let mut found = Vec::new();
    for board in boards() {
        let text = |of: &Value, key: &str| of[key].as_str().unwrap_or_default().to_owned();
        for panel in board["panels"].as_array().expect("panels") {
            for (number, target) in panel["targets"].as_array().into_iter().flatten().enumerate() {
                let query = filled(&text(target, "expr"));
                found.push(PanelQuery {
                    board: text(&board, "title"),
                    panel: text(panel, "title"),
                    number,
                    query,
                });
            }
        }
    }
    found
}

/// Whether at least one value of an answer is a number.
fn has_data(answer: &Answer) -> bool {
    answer.values().any(|n| n.is_finite())
}

/// A server with a packed dataset at an emulated store, mounts of it, and a Prometheus that reads both.
struct Stage {
    prometheus: Prometheus,
    mounts: NodeMounts,
    service: Service,
    emulator: OriginEmulator,
    root: String,
}

fn stage() -> Stage {
    let emulator = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    for i in 0..file_count() {
        emulator.insert(&format!("set/d{}/f{i:05}", i % 4), bytes(i, FILE));
    }
    let origins = format!(
        "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nregion = \"x\"\nallow_http = true\n\
         credentials = \"anonymous\"\n",
        emulator.uri(),
        emulator.endpoint()
    );
    // The disk has room for half of the dataset.
    let settings = format!(
        "size = \"{}KiB\"\ndecision_interval = \"1s\"\n\n[memory]\nmax = \"64MiB\"\n\n\
         [io]\ntimeout = \"4s\"\n",
        (file_count() * FILE as u64 / 2048).max(20_000)
    );
    let service = Service::start(&settings, &origins);
    let (uri, tables) = (format!("{}/set", emulator.uri()), format!("{}/tables", emulator.uri()));
    let mut pack = command("fletch");
    pack.args(["pack", &uri, "--to", &tables, "--chunk-size", "1MiB", "--config"]);
    pack.arg(service.path("origins.toml")).arg("--state-dir").arg(service.place("pack-state"));
    let root = stdout(&run(&mut pack));
    service.register(SET, &uri, &tables);
    let mounts = NodeMounts::start(&service);
    let prometheus =
        Prometheus::watch(&[("fletch", &service.url), ("fletch-mounts", mounts.metrics.as_str())], "");
    Stage { prometheus, mounts, service, emulator, root }
}

impl Stage {
    fn get(&self, path: &str) -> bool {
        let mut c = Command::new("curl");
        c.args(["-s", "--fail", "--max-time", "20", "-o", "/dev/null"]);
        let url = format!("{}/v1/versions/{}/files/{path}", self.service.url, self.root);
        c.arg(url).status().expect("curl").success()
    }

    /// Reads files through the mounts and the API, and trains two epochs.
    fn load(&self) {
        let dir = self.mounts.dir.join(SET);
        for i in 0..40 {
            let read = fs::read(dir.join(format!("d{}/f{i:05}", i % 4))).expect("a file of the mount");
            assert!(read == bytes(i, FILE), "f{i:05}");
        }
        assert!(self.get("d0/f00000"));
        let runtime = tokio::runtime::Runtime::new().expect("runtime");
        runtime.block_on(async {
            let endpoint: Endpoint = self.service.url.parse().expect("url");
            let client = Client::new(ClientConfig::new(endpoint, "loader")).expect("client");
            let job = StartJob {
                name: JOB.parse().expect("name"),
                dataset: Some(SET.parse().expect("name")),
                version: None,
                root: None,
                layout: None,
                seed: Some(7),
                order: OrderKind::Substitute,
                buckets: None,
                replay: None,
                plan: PlanSpec::default(),
                world: WorldSpec { ranks: RANKS, batch: RANKS * STEP, tail: Tail::Drop },
                visitation: Visitation::ExactlyOnce,
            };
            let job = client.declare(&job).await.expect("declared");
            for epoch in 0..2 {
                tokio::join!(train(&job, epoch, 0), train(&job, epoch, 1));
            }
        });
    }
}

/// Trains a rank for an epoch: each step computes for 5 ms.
async fn train(job: &JobHandle, epoch: u64, rank: u32) {
    let mut reader = job.reader(epoch, rank, 0).patience(Duration::from_secs(60));
    loop {
        let asked = Instant::now();
        match reader.next(STEP).await.expect("a lease") {
            Next::Batch(batch) => {
                let waited = asked.elapsed();
                tokio::time::sleep(Duration::from_millis(5)).await;
                let ns = |d: Duration| u64::try_from(d.as_nanos()).expect("short");
                let times = BatchTimes {
                    entries: u32::try_from(batch.samples.len()).expect("few"),
                    waited_ns: ns(waited),
                    stepped_ns: ns(asked.elapsed() - waited),
                    ..BatchTimes::default()
                };
                job.ack(epoch, rank, &[batch.token.ack(times)]).await.expect("acknowledged");
                job.held().release(epoch, rank, batch.token.lease);
            }
            Next::Full | Next::Last => tokio::time::sleep(Duration::from_millis(5)).await,
            Next::Done => return,
        }
    }
}

#[test]
fn every_query_of_every_panel_returns_data() {
    if !have(&[Need::Prometheus, Need::Fuse, Need::Root]) {
        return;
    }
    let stage = stage();
    stage.load();
    let queries = queries();
    assert!(queries.len() > 80, "{} queries", queries.len());
    let titles: BTreeSet<&str> = queries.iter().map(|q| q.board.as_str()).collect();
    assert_eq!(titles.len(), 2, "{titles:?}");
    for empty in EMPTY {
        assert_eq!(queries.iter().filter(|q| q.is(empty)).count(), 1, "{empty:?}");
    }
    // The decision that measures the job may come a second after its end.
    let measured = || has_data(&stage.prometheus.query("fletch_job_samples_per_second{of=\"disk\"}", None));
    until("the job is measured", Duration::from_secs(10), measured);
    let time = stage.prometheus.settle();
    for query in ["sum(fletch_uptime)", "fletch_bytes_total / 0 * 0", "0 * fletch_uptime_seconds / 0"] {
        assert!(!has_data(&stage.prometheus.query(query, Some(time))), "{query}");
    }
    let mut faults = Vec::new();
    for q in &queries {
        let answer = stage.prometheus.query(&q.query, Some(time));
        let is_of_cluster = OF_CLUSTERS.contains(&&*q.panel);
        let is_empty = is_of_cluster || EMPTY.iter().any(|empty| q.is(*empty));
        if has_data(&answer) == is_empty {
            let what = if is_empty { "has data" } else { "has no data" };
            faults.push(format!("{}: {} ({}) {what}: {}\n  {answer:?}", q.board, q.panel, q.number, q.query));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    for board in boards() {
        for variable in board["templating"]["list"].as_array().expect("variables") {
            let Some(of) = variable["query"]["query"].as_str() else { continue };
            let of =
                of.strip_prefix("label_values(").and_then(|of| of.strip_suffix(')')).expect("label_values");
            let (metric, label) = of.rsplit_once(", ").expect("a metric and a label");
            let values =
                stage.prometheus.query(&format!("group by ({label}) ({})", filled(metric)), Some(time));
            assert!(values.keys().any(|v| v.len() > label.len() + 1), "{of}: {values:?}");
        }
    }
    // What is empty on a healthy machine: wrong bytes fail a request and raise an alert.
    stage.emulator.set_fault("", Fault::FlipBit { byte: 77 }, None);
    let failed = (0..file_count()).rev().any(|i| !stage.get(&format!("d{}/f{i:05}", i % 4)));
    assert!(failed, "wrong bytes were delivered");
    let shown = |panel: &str| {
        let query = queries.iter().find(|q| q.panel == panel).expect("a panel");
        has_data(&stage.prometheus.query(&query.query, None))
    };
    until("the failure is shown", Duration::from_secs(20), || {
        shown("Firing alerts") && shown("Failed requests by route")
    });
}

#[test]
fn the_row_of_a_cluster_returns_data_in_a_cluster() {
    if !have(&[Need::Prometheus, Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let scratch = tempfile::tempdir().expect("a directory");
    let at = |name: &str| scratch.path().join(name).display().to_string();
    fs::create_dir(at("data")).expect("data");
    for i in 0..24 {
        fs::write(scratch.path().join(format!("data/f{i:02}")), bytes(i, FILE)).expect("a file");
    }
    let mut index = command("fletch");
    index.args(["index", &at("data"), "--tables", &at("tables"), "--state-dir", &at("state")]);
    let root = stdout(&run(&mut index));
    let dirs = format!("--local-dirs={}=*", scratch.path().display());
    let [a, b] = ["a", "b"].map(|id| {
        let mut server = ClusterServer::new(id, &etcd, &[&dirs]);
        server.start();
        server
    });
    agreed(&[&a, &b], "a:up b:up", Duration::from_secs(5));
    a.register(SET, &format!("file://{}", at("data")), &format!("file://{}", at("tables")), None);
    let prometheus = Prometheus::watch(&[("a", &a.url), ("b", &b.url)], "");
    let queries = queries();
    let row: Vec<_> = queries.iter().filter(|q| OF_CLUSTERS.contains(&&*q.panel)).collect();
    assert_eq!(row.len(), 4);
    until("the other server has the dataset", Duration::from_secs(5), || b.file(&root, "f00").is_some());
    for i in 0..24 {
        for server in [&a, &b] {
            assert!(server.file(&root, &format!("f{i:02}")) == Some(bytes(i, FILE)), "f{i:02}");
        }
    }
    let time = prometheus.settle();
    for q in row {
        let answer = prometheus.query(&q.query, Some(time));
        assert!(has_data(&answer), "{} ({}): {}\n  {answer:?}", q.panel, q.number, q.query);
    }
    let sent = [&a, &b].map(|s| s.sum("fletch_peer_sent_bytes_total"));
    assert!(sent.iter().all(|bytes| *bytes > 0.0), "both servers own chunks: {sent:?}");
}
