//! The rig on which a cell is played: the dataset, its origin and its server.

use crate::{
    cells::Cell,
    consumer::{Clock, Consumer, Fared, Span},
};
use fletch_api::{OrderKind, StartJob, Visitation, WorldSpec, jobs::PlanSpec};
use fletch_benches::{Daemon, bin, sow_tree, until, walk};
use fletch_client::{Client, ClientConfig};
use fletch_core::{DatasetName, JobName, plan::Tail};
use fletch_sim::{ArmKind, JobSpec, Reader};
use fletch_testkit::{Backing, EmulatorConfig, Latency, OriginEmulator};
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_util::task::TaskTracker;

/// The smallest memory that a server accepts, in bytes.
const MEMORY_BYTES: u64 = 64 << 20;

/// The dataset in both layouts, and the speeds of jobs and origin.
pub struct Bench {
    pub scratch: tempfile::TempDir,
    pub samples: u64,
    /// Mean bytes of a sample.
    pub sample_bytes: u64,
    pub chunk_size: String,
    pub cache_size: Option<u64>,
    /// Demand of all jobs together, in bytes a second.
    pub pace: f64,
    /// The origin's bandwidth where the cell has none, in bytes a second.
    pub origin_bytes_per_s: f64,
    pub orders: Option<PathBuf>,
    /// Whether to make a pack. Without one there is room for a larger dataset.
    pub packs: bool,
    /// Epochs that are not counted, and epochs that are.
    pub epochs: (u64, u64),
}

/// The result of a cell.
#[derive(Debug)]
pub struct Measured {
    /// Origin bytes per delivered byte.
    pub ratio: f64,
    pub delivered: u64,
    /// Length of the measured span, in seconds.
    pub seconds: f64,
    /// Waiting times of each job.
    pub fared: Vec<Fared>,
    /// CPU seconds of the server per delivered GB.
    pub cpu: f64,
}

impl Measured {
    /// Returns the part of the time that the worst job waited.
    pub fn stalled(&self) -> f64 {
        self.fared.iter().map(|f| f.waited.as_secs_f64()).fold(0.0, f64::max) / self.seconds
    }

    /// Returns the longest wait for a first batch, in seconds, of the jobs that start late.
    pub fn first(&self, cell: &Cell) -> Option<f64> {
        let late = self.fared.iter().zip(&cell.case.jobs).filter(|(_, j)| j.start > 0.0);
        late.map(|(f, _)| f.first.as_secs_f64()).reduce(f64::max)
    }

    /// Returns the time of an epoch relative to the least that compute, link and cache allow.
    pub fn times_ideal(&self, cell: &Cell) -> Option<f64> {
        let link = cell.link?;
        let best = (link.demand * link.bytes_per_s).min(link.bytes_per_s / (1.0 - cell.case.cache));
        Some(best * self.seconds / self.delivered as f64)
    }
}

fn run(c: &mut Command) {
    assert!(c.stdout(Stdio::null()).status().expect("run").success(), "{c:?}");
}

impl Bench {
    pub fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    pub fn bytes(&self) -> u64 {
        self.samples * self.sample_bytes
    }

    /// Starts the origin of the dataset and writes the settings by which servers and tools reach it.
    pub fn emulator(&self, config: EmulatorConfig) -> OriginEmulator {
        let origin =
            OriginEmulator::start(config, Backing::Synthetic(self.at("bucket"), std::process::id().into()));
        let text = format!(
            "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\n\
             credentials = \"anonymous\"\nregion = \"local\"\n",
            origin.uri(),
            origin.endpoint()
        );
        std::fs::write(self.at("fletch.toml"), text).expect("config");
        origin
    }

    /// Writes the dataset, or copies `data`, and makes its layouts.
    pub fn make(&mut self, data: &str) {
        let set = self.at("bucket/set");
        if data.is_empty() {
            let (files, bytes) = (self.samples as usize, self.sample_bytes as usize);
            // Their bytes are the emulator's.
            sow_tree(&set, files, bytes);
        } else {
            std::fs::create_dir_all(self.at("bucket")).expect("mkdir");
            run(Command::new("cp").arg("-r").args([Path::new(data), &set]));
            let sizes = walk(&set).into_iter().map(|p| std::fs::metadata(set.join(p)).expect("file").len());
            let (count, total) = sizes.fold((0, 0), |(n, sum), len| (n + 1, sum + len));
            (self.samples, self.sample_bytes) = (count, total / count);
        }
        let origin = self.emulator(EmulatorConfig::default());
        let pack = self.packs.then_some(("pack", "pack", Some(&self.chunk_size)));
        for (verb, to, more) in [("index", "index", None)].into_iter().chain(pack) {
            let mut c = Command::new(bin("fletch"));
            c.args([verb, "--quiet", &format!("{}/set", origin.uri()), "--config"])
                .arg(self.at("fletch.toml"))
                .args(["--to", &format!("{}/{to}", origin.uri()), "--state-dir"])
                .arg(self.at("st"));
            if let Some(chunk) = more {
                c.args(["--chunk-size", chunk]);
            }
            run(&mut c);
        }
    }

    /// Returns the samples in each chunk of the pack, estimated from its length. Empty without a pack.
    pub fn pack_units(&self) -> Vec<u32> {
        if !self.packs {
            return Vec::new();
        }
        let chunks = self.at("bucket/pack/fletch/chunks");
        let bytes = |p: PathBuf| std::fs::metadata(chunks.join(p)).expect("chunk").len();
        let units = |p| u32::try_from(bytes(p) / self.sample_bytes).expect("samples").max(1);
        let mut units: Vec<u32> = walk(&chunks).into_iter().map(units).collect();
        // Samples of unequal lengths: the rest is spread, so that the dataset is as large.
        let missing = (self.samples as usize).saturating_sub(units.iter().map(|&u| u as usize).sum());
        let count = units.len();
        for i in 0..missing {
            units[i % count] += 1;
        }
        units
    }

    /// Starts a fresh server and registers the dataset. Returns the server, its unix socket and its URL.
    pub fn server(&self, origin: &OriginEmulator, more: &[&str], packed: bool) -> (Daemon, PathBuf, String) {
        let state = self.at("server");
        std::fs::remove_dir_all(&state).ok();
        std::fs::create_dir_all(&state).expect("mkdir");
        let ready = state.join("ready");
        let socket = self.at("s.sock");
        let server = Daemon::start(
            Command::new(bin("fletch-server"))
                .args(["--listen", "127.0.0.1:0", "--cache-free-floor", "0"])
                .args(more)
                .arg("--config")
                .arg(self.at("fletch.toml"))
                .arg("--socket")
                .arg(&socket)
                .arg("--state-dir")
                .arg(state.join("state"))
                .arg("--cache-dir")
                .arg(state.join("cache"))
                .arg("--ready-file")
                .arg(&ready),
            Some(&self.at("server.log")),
        );
        until("the server", || std::fs::read_to_string(&ready).is_ok_and(|s| s.starts_with("http")));
        let url = std::fs::read_to_string(&ready).expect("ready").trim().to_owned();
        let tables = format!("{}/{}", origin.uri(), if packed { "pack" } else { "index" });
        let data = format!("{}/set", origin.uri());
        run(Command::new(bin("fletch"))
            .args(["register", "set", &data, "--tables", &tables, "--quiet", "--server", &url]));
        (server, socket, url)
    }

    /// Starts a server and its origin, plays a cell, and stops both.
    pub fn measure(&self, cell: &Cell, arm: ArmKind) -> Measured {
        let link = cell.link.map_or(self.origin_bytes_per_s, |l| l.bytes_per_s);
        let origin = self.emulator(EmulatorConfig {
            first_byte: Some(Latency { median: Duration::from_millis(25), p99: Duration::from_millis(120) }),
            stream_bytes_per_s: Some(80_000_000),
            total_bytes_per_s: Some(link as u64),
            ..EmulatorConfig::default()
        });
        let all = (cell.case.cache * self.bytes() as f64) as u64;
        let cache = self.cache_size.unwrap_or(all.saturating_sub(MEMORY_BYTES));
        let (size, policy) = match arm {
            ArmKind::Direct => (0, "fletch"),
            ArmKind::Lru => (cache, "lru"),
            ArmKind::Pin => (cache, "pin"),
            ArmKind::Fletch => (cache, "fletch"),
        };
        let (memory, size) = (MEMORY_BYTES.to_string(), size.to_string());
        let more = ["--memory", &memory, "--cache-size", &size, "--cache-policy", policy];
        let (server, socket, _) = self.server(&origin, &more, cell.packed);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("runtime");
        runtime.block_on(self.play(cell, arm, &origin, &server, &socket))
    }

    async fn play(
        &self,
        cell: &Cell,
        arm: ArmKind,
        origin: &OriginEmulator,
        server: &Daemon,
        socket: &Path,
    ) -> Measured {
        let case = &cell.case;
        let sum: f64 = case.jobs.iter().map(|j| j.rate).sum();
        let pace = cell.link.map_or(self.pace, |l| l.bytes_per_s * l.demand);
        let speed = pace / self.sample_bytes as f64 / sum;
        let clock = Clock { begin: Instant::now() + Duration::from_millis(200), speed };
        // A job alone is measured over whole epochs, however long they take: what an epoch finds in the cache
        // and what it brings lie at different ends of it. Several jobs begin theirs at different times.
        let span = match case.jobs.len() {
            1 => Span::Epochs { first: self.epochs.0, after: self.epochs.0 + self.epochs.1 },
            _ => Span::Time { warm: clock.at(case.warm), end: clock.at(case.end) },
        };
        let (begins, mut begun) = watch::channel(0);
        let counted = Arc::new(AtomicU64::new(0));
        let (tasks, mut jobs) = (TaskTracker::new(), Vec::new());
        for (j, spec) in case.jobs.iter().enumerate() {
            let endpoint = format!("unix:{}", socket.display()).parse().expect("endpoint");
            let what = declaration(j, spec, arm);
            let config =
                ClientConfig { job: Some(what.name.clone()), ..ClientConfig::new(endpoint, "loader") };
            let consumer = Consumer {
                client: Client::new(config).expect("client"),
                what,
                spec: spec.clone(),
                clock,
                span,
                begins: begins.clone(),
                counted: Arc::clone(&counted),
                orders: self.orders.as_ref().map(|d| d.join(format!("job-{j}.txt"))),
            };
            jobs.push(tasks.spawn(consumer.consume()));
        }
        let mut reached = async |when: Option<Instant>, epoch: u64| {
            match when {
                Some(when) => sleep_until(when).await,
                None => drop(begun.wait_for(|&e| e >= epoch).await.expect("the job")),
            }
            (origin.counts().bytes_sent, server.cpu(), Instant::now())
        };
        let ((before, cpu, from), (after, cpu_after, to)) = match span {
            Span::Time { warm, end } => (reached(Some(warm), 0).await, reached(Some(end), 0).await),
            Span::Epochs { first, after } => (reached(None, first).await, reached(None, after).await),
        };
        let mut fared = Vec::new();
        for job in jobs {
            fared.push(job.await.expect("a job"));
        }
        let delivered = counted.load(Relaxed);
        Measured {
            ratio: (after - before) as f64 / delivered as f64,
            delivered,
            seconds: (to - from).as_secs_f64(),
            fared,
            cpu: (cpu_after - cpu) / (delivered as f64 / 1e9),
        }
    }
}

/// Returns the declaration of job `j` for the server.
fn declaration(j: usize, spec: &JobSpec, arm: ArmKind) -> StartJob {
    let chosen = arm == ArmKind::Fletch && spec.reader == Reader::Substitute;
    StartJob {
        name: format!("bench-{j}").parse::<JobName>().expect("name"),
        dataset: Some("set".parse::<DatasetName>().expect("name")),
        version: None,
        root: None,
        layout: None,
        seed: Some(j as u64),
        order: if chosen { OrderKind::Substitute } else { OrderKind::Strict },
        buckets: None,
        replay: None,
        plan: PlanSpec::default(),
        world: WorldSpec { ranks: 1, batch: spec.lease, tail: Tail::Keep },
        visitation: Visitation::ExactlyOnce,
    }
}
