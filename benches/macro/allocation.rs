//! `bench-allocation [--chunks 800] [--link-mib-per-s 10] [--passes 10] [--rounds 1] [--interval 2s]
//!                   [--arms fletch,equal,lru] [--json FILE]`
//!
//! Two jobs read a dataset each, over a link each, with a disk that has room for half of one dataset. Job
//! A computes at .8 of its link, and never waits. Job B could read at 4 times its link. A reads until B has
//! made its passes from an empty cache. Accelerators are emulated by absolute deadlines.
//!
//! The arms: `fletch` divides the disk by what it is worth; `equal` decides once an hour, so that both
//! datasets keep equal shares; `lru` is `cache.policy = "lru"` under the order `strict`. The row `free` is A
//! alone, over a link without a limit.
//!
//! Ends with status 1 where B's bytes, B's time or A's rate miss their targets.

use fletch_api::{BatchTimes, OrderKind, StartJob, Visitation, WorldSpec, jobs::PlanSpec};
use fletch_benches::{Daemon, arg, bin, sow_tree, span, until, usage};
use fletch_client::{
    Client, ClientConfig,
    epochs::{JobHandle, LeaseBatch, Next},
};
use fletch_core::plan::Tail;
use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator};
use std::{
    path::PathBuf,
    process::{Command, Stdio},
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
/// Samples of a step.
const BATCH: u32 = 32;
/// What A computes and what B could read, in parts of a link.
const RATES: [f64; 2] = [0.8, 4.0];
/// The smallest memory that a server accepts.
const MEMORY: &str = "--memory=64MiB";

/// How a job fared.
#[derive(Debug, Clone, Copy)]
struct Fared {
    seconds: f64,
    bytes: u64,
}

impl Fared {
    fn rate(self) -> f64 {
        self.bytes as f64 / self.seconds
    }
}

/// The result of one arm.
#[derive(Debug, Clone, Copy)]
struct Measured {
    a: f64,
    b: Fared,
    /// B's part of the bytes that are divided at the end, and when it was first 90 %, in seconds.
    part: f64,
    settled: Option<f64>,
}

struct Bench {
    scratch: TempDir,
    chunks: usize,
    link: f64,
    passes: u64,
    interval: String,
}

fn run(c: &mut Command) {
    assert!(c.stdout(Stdio::null()).status().expect("run").success(), "{c:?}");
}

impl Bench {
    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// Starts the origins of both datasets, and writes the settings by which they are reached.
    fn origins(&self, limits: [Option<u64>; 2]) -> Vec<OriginEmulator> {
        let start = |(i, limit): (usize, Option<u64>)| {
            let config = EmulatorConfig {
                bucket: format!("bucket-{i}"),
                total_bytes_per_s: limit,
                ..EmulatorConfig::default()
            };
            OriginEmulator::start(config, Backing::Synthetic(self.at(&format!("bucket-{i}")), i as u64))
        };
        let origins: Vec<_> = limits.into_iter().enumerate().map(start).collect();
        let text: String = origins
            .iter()
            .map(|origin| {
                format!(
                    "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\n\
                     credentials = \"anonymous\"\nregion = \"local\"\n",
                    origin.uri(),
                    origin.endpoint()
                )
            })
            .collect();
        std::fs::write(self.at("fletch.toml"), text).expect("settings");
        origins
    }

    /// Makes and packs both datasets.
    fn make(&self) {
        for i in 0..2 {
            sow_tree(&self.at(&format!("bucket-{i}/set")), self.chunks * CHUNK / SAMPLE, SAMPLE);
        }
        for origin in self.origins([None, None]) {
            run(Command::new(bin("fletch"))
                .args(["pack", "--quiet", &format!("{}/set", origin.uri()), "--config"])
                .arg(self.at("fletch.toml"))
                .args(["--to", &format!("{}/pack", origin.uri()), "--chunk-size", "256KiB", "--state-dir"])
                .arg(self.at("st")));
        }
    }

    /// Starts a fresh server with both datasets. Returns it with its URL.
    fn server(&self, origins: &[OriginEmulator], more: &[&str]) -> (Daemon, String) {
        let state = self.at("server");
        std::fs::remove_dir_all(&state).ok();
        std::fs::create_dir_all(&state).expect("mkdir");
        let ready = state.join("ready");
        let path = |flag: &str, name: &str| format!("--{flag}={}", state.join(name).display());
        let server = Daemon::start(
            Command::new(bin("fletch-server"))
                .args(["--listen=127.0.0.1:0", "--cache-free-floor=0", MEMORY])
                .arg(format!("--config={}", self.at("fletch.toml").display()))
                .args([path("socket", "s.sock"), path("state-dir", "state"), path("cache-dir", "cache")])
                .arg(path("ready-file", "ready"))
                .arg(format!("--cache-size={}", self.chunks * CHUNK / 2))
                .args(more),
            Some(&self.at("server.log")),
        );
        until("the server", || std::fs::read_to_string(&ready).is_ok_and(|s| s.starts_with("http")));
        let url = std::fs::read_to_string(&ready).expect("ready").trim().to_owned();
        for (i, origin) in origins.iter().enumerate() {
            let (data, tables) = (format!("{}/set", origin.uri()), format!("{}/pack", origin.uri()));
            run(Command::new(bin("fletch")).args([
                "register",
                &format!("d{i}"),
                &data,
                "--tables",
                &tables,
                "--quiet",
                "--server",
                &url,
            ]));
        }
        (server, url)
    }

    /// Plays one arm. Without `both`, A runs alone for as many seconds.
    async fn play(&self, arm: &str, alone: Option<f64>) -> Measured {
        let limit = Some(self.link as u64);
        let origins = self.origins(if alone.is_some() { [None, None] } else { [limit, limit] });
        let interval = if arm == "equal" { "1h" } else { self.interval.as_str() };
        let policy = if arm == "lru" { "lru" } else { "fletch" };
        let (interval, policy) =
            (format!("--cache-decision-interval={interval}"), format!("--cache-policy={policy}"));
        let (_server, url) = self.server(&origins, &[&interval, &policy]);
        let client = client(&url, "allocation");
        let order = if arm == "lru" { OrderKind::Strict } else { OrderKind::Substitute };
        let (stop, never) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let tasks = TaskTracker::new();
        let a = client.declare(&declaration(0, order)).await.expect("job A");
        let a = tasks.spawn(train(a, RATES[0] * self.link, u64::MAX, Arc::clone(&stop)));
        if let Some(seconds) = alone {
            sleep(Duration::from_secs_f64(seconds)).await;
            stop.store(true, Relaxed);
            let a = a.await.expect("job A").rate();
            return Measured { a, b: Fared { seconds, bytes: 0 }, part: 0.0, settled: None };
        }
        let b = client.declare(&declaration(1, order)).await.expect("job B");
        let begun = Instant::now();
        let b = tasks.spawn(train(b, RATES[1] * self.link, self.passes, never));
        let (mut part, mut settled) = (0.0, None);
        while !b.is_finished() {
            sleep(Duration::from_millis(250)).await;
            let now = client.allocation().await.expect("the allocation");
            let share = now.datasets.iter().find(|d| d.dataset.as_str() == "d1" && d.is_sweep);
            part = share.map_or(0.0, |d| d.share_bytes as f64 / now.capacity_bytes as f64);
            if part >= 0.9 && settled.is_none() {
                settled = Some(begun.elapsed().as_secs_f64());
            }
        }
        let b = b.await.expect("job B");
        stop.store(true, Relaxed);
        Measured { a: a.await.expect("job A").rate(), b, part, settled }
    }
}

fn client(url: &str, job: &str) -> Client {
    let config = ClientConfig::new(url.parse().expect("endpoint"), "loader");
    Client::new(ClientConfig { job: job.parse().ok(), ..config }).expect("client")
}

fn declaration(dataset: usize, order: OrderKind) -> StartJob {
    StartJob {
        name: format!("job-{dataset}").parse().expect("name"),
        dataset: format!("d{dataset}").parse().ok(),
        version: None,
        root: None,
        layout: None,
        seed: Some(dataset as u64),
        order,
        buckets: None,
        replay: None,
        plan: PlanSpec::default(),
        world: WorldSpec { ranks: 1, batch: BATCH, tail: Tail::Keep },
        visitation: Visitation::ExactlyOnce,
    }
}

/// Trains by absolute deadlines at `rate` bytes a second, for `passes` epochs or until `stop`.
async fn train(job: JobHandle, rate: f64, passes: u64, stop: Arc<AtomicBool>) -> Fared {
    let begun = Instant::now();
    let (mut due, mut bytes, tasks) = (begun, 0, TaskTracker::new());
    for epoch in 0..passes {
        let (to, mut from) = mpsc::channel::<LeaseBatch>(4);
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
            bytes += content;
            // Late by less than a batch that lies ready is the timer's fault, and is made up for.
            if got - asked > Duration::from_millis(1) {
                due = due.max(got);
            }
            due += Duration::from_secs_f64(content as f64 / rate);
            sleep_until(due).await;
            let ns = |d: Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
            let times = BatchTimes {
                entries: u32::try_from(batch.samples.len()).expect("few"),
                waited_ns: ns(got - asked),
                stepped_ns: ns(got.elapsed()),
                ..BatchTimes::default()
            };
            job.ack(epoch, 0, &[batch.token.ack(times)]).await.expect("an ack");
            job.held().release(epoch, 0, batch.token.lease);
            if stop.load(Relaxed) {
                asking.abort();
                return Fared { seconds: begun.elapsed().as_secs_f64(), bytes };
            }
        }
        asking.await.expect("the epoch's leases");
    }
    Fared { seconds: begun.elapsed().as_secs_f64(), bytes }
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() {
    usage(include_str!("allocation.rs"));
    let bench = Bench {
        scratch: TempDir::with_prefix("fletch-bench-").expect("scratch"),
        chunks: arg("chunks", 800),
        link: arg("link-mib-per-s", 10.0) * f64::from(1 << 20),
        passes: arg("passes", 10),
        interval: arg("interval", "2s".to_owned()),
    };
    let (rounds, arms): (usize, String) = (arg("rounds", 1), arg("arms", "fletch,equal,lru".to_owned()));
    bench.make();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("runtime");
    let mut all: Vec<(String, Measured)> = Vec::new();
    for round in 0..rounds {
        for arm in arms.split(',') {
            let m = runtime.block_on(bench.play(arm, None));
            eprintln!("round {round}, {arm}: {m:?}");
            all.push((arm.to_owned(), m));
            if arm == "fletch" {
                let free = runtime.block_on(bench.play("fletch", Some(m.b.seconds)));
                eprintln!("round {round}, free: {free:?}");
                all.push(("free".to_owned(), free));
            }
        }
    }
    let of = |arm: &str, figure: fn(&Measured) -> f64| -> Vec<f64> {
        all.iter().filter(|(name, _)| name == arm).map(|(_, m)| figure(m)).collect()
    };
    println!("| arm | B's time, s | B's part of the disk | 90 % after, s | A's rate, MiB/s |");
    println!("|---|---|---|---|---|");
    for arm in arms.split(',').chain(["free"]) {
        println!(
            "| {arm} | {} | {} | {} | {} |",
            span(&of(arm, |m| m.b.seconds)),
            span(&of(arm, |m| m.part)),
            span(&of(arm, |m| m.settled.unwrap_or(f64::INFINITY))),
            span(&of(arm, |m| m.a / f64::from(1 << 20))),
        );
    }
    let json: String = arg("json", String::new());
    if !json.is_empty() {
        let raw: Vec<_> = all
            .iter()
            .map(|(arm, m)| {
                serde_json::json!({"arm": arm, "b_seconds": m.b.seconds, "b_bytes": m.b.bytes,
                    "b_part": m.part, "settled_s": m.settled, "a_bytes_per_s": m.a})
            })
            .collect();
        std::fs::write(&json, serde_json::to_string_pretty(&raw).expect("json")).expect("written");
    }
    let time = |arm| median(of(arm, |m| m.b.seconds));
    let rate = |arm| median(of(arm, |m| m.a));
    let musts = [
        ("B's part of the disk", median(of("fletch", |m| m.part)), 0.9),
        ("B is faster than under lru, times", time("lru") / time("fletch"), 1.5),
        ("B is faster than with equal shares, times", time("equal") / time("fletch"), 1.25),
        ("A's rate, of its rate with a free link", rate("fletch") / rate("free"), 0.98),
    ];
    let mut missed = false;
    for (what, figure, least) in musts {
        // An arm that was not played has no figure.
        if figure.is_nan() {
            continue;
        }
        let met = figure >= least;
        missed |= !met;
        println!("{what}: {figure:.3}, at least {least}: {}", if met { "met" } else { "MISSED" });
    }
    if missed {
        std::process::exit(1);
    }
}
