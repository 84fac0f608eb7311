//! `bench-epochs [--cell NAME] [--epochs 3] [--warm 1] [--mb-per-s 600] [--arms fletch,pin,lru,direct]
//!               [--samples 25600] [--sample-bytes 131072 | --data DIR] [--chunk-size 4MiB] [--cache-size BYTES]
//!               [--orders DIR] [--strict-mb-per-s 100] [--json FILE]`
//!
//! Cells of the sweep on a real server: jobs with emulated steps (absolute deadlines) lease whole epochs over a unix
//! socket, verify and acknowledge them; the origin is the emulator at its defaults (25 ms to the first byte, 80 MB/s a
//! stream, 400 MB/s in all), which counts. Beside each figure: the bound, and `fletch simulate` on the same case.
//!
//! c counts all that the server may hold: `memory.max` and `cache.size`. `lru` and `pin` are values of
//! `cache.policy`, read in the strict order; `direct` is a server without a disk and with the least memory.
//! Before them stand the strict epochs ([`strict`]).
//! `--data` takes a tree instead of making one, `--cache-size` a disk instead of the cell's, and `--orders` writes the
//! sample numbers of each job's whole epochs, an epoch a line.

mod consumer;
mod strict;

use consumer::Consumer;
use fletch_api::{OrderKind, StartJob, Visitation, World, jobs::PlanSpec};
use fletch_benches::{Daemon, arg, bin, until, walk, write_tree};
use fletch_client::{Client, ClientConfig};
use fletch_core::{
    DatasetName, JobName,
    order::{Tail, substitute::Knobs},
};
use fletch_sim::{ArmKind, Case, simulate};
use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator};
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep_until};
use tokio_util::task::TaskTracker;

/// The least memory of a server.
const MEMORY_BYTES: u64 = 64 << 20;
/// Samples of a lease, and of a step.
const LEASE: u32 = 64;

/// One cell.
struct Cell {
    name: &'static str,
    rates: &'static [f64],
    staggered: bool,
    cache: f64,
    packed: bool,
}

const CELLS: [Cell; 8] = [
    Cell { name: "1 job, packed", rates: &[1.0], staggered: false, cache: 0.2, packed: true },
    Cell { name: "3 equal, indexed", rates: &[1.0; 3], staggered: false, cache: 0.2, packed: false },
    Cell { name: "3 equal staggered, packed", rates: &[1.0; 3], staggered: true, cache: 0.1, packed: true },
    Cell { name: "4 equal staggered, packed", rates: &[1.0; 4], staggered: true, cache: 0.05, packed: true },
    Cell { name: "4 equal staggered, packed", rates: &[1.0; 4], staggered: true, cache: 0.2, packed: true },
    Cell {
        name: "1/1.02/.98/1.05 staggered, packed",
        rates: &[1.0, 1.02, 0.98, 1.05],
        staggered: true,
        cache: 0.05,
        packed: true,
    },
    Cell {
        name: "1/1.3/2/4, packed",
        rates: &[1.0, 1.3, 2.0, 4.0],
        staggered: false,
        cache: 0.2,
        packed: true,
    },
    Cell {
        name: "8 at .97-1.1 staggered, packed",
        rates: &[0.97, 0.98, 0.99, 1.0, 1.0, 1.01, 1.02, 1.1],
        staggered: true,
        cache: 0.2,
        packed: true,
    },
];

/// The dataset, in both layouts, and how jobs read it.
struct Bench {
    scratch: tempfile::TempDir,
    samples: u64,
    /// Of a sample, on average.
    sample_bytes: u64,
    chunk_size: String,
    cache_size: Option<u64>,
    /// Bytes a second that all jobs together want.
    pace: f64,
    epochs: f64,
    warm: f64,
    orders: Option<PathBuf>,
}

/// What came of a cell.
#[derive(Debug)]
struct Measured {
    /// Origin bytes per delivered byte.
    ratio: f64,
    delivered: u64,
    /// Part of the time that the worst job waited.
    stalled: f64,
    /// CPU seconds of the server per delivered GB.
    cpu: f64,
}

fn run(c: &mut Command) {
    assert!(c.stdout(Stdio::null()).status().expect("run").success(), "{c:?}");
}

impl Bench {
    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn bytes(&self) -> u64 {
        self.samples * self.sample_bytes
    }

    fn emulator(&self, config: EmulatorConfig) -> OriginEmulator {
        let origin = OriginEmulator::start(config, Backing::Directory(self.at("bucket")));
        let text = format!(
            "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\ncredentials = \"anonymous\"\nregion = \"local\"\n",
            origin.uri(),
            origin.endpoint()
        );
        std::fs::write(self.at("fletch.toml"), text).expect("config");
        origin
    }

    /// Puts the dataset in its place and makes its two layouts.
    fn make(&mut self, data: &str) {
        let set = self.at("bucket/set");
        if data.is_empty() {
            let (files, bytes) = (self.samples as usize, self.sample_bytes as usize);
            write_tree(&set, std::process::id().into(), files, bytes);
        } else {
            std::fs::create_dir_all(self.at("bucket")).expect("mkdir");
            run(Command::new("cp").arg("-r").args([Path::new(data), &set]));
            let sizes = walk(&set).into_iter().map(|p| std::fs::metadata(set.join(p)).expect("file").len());
            let (count, total) = sizes.fold((0, 0), |(n, sum), len| (n + 1, sum + len));
            (self.samples, self.sample_bytes) = (count, total / count);
        }
        let quick = EmulatorConfig {
            first_byte: None,
            stream_bytes_per_s: None,
            total_bytes_per_s: None,
            ..EmulatorConfig::default()
        };
        let origin = self.emulator(quick);
        for (verb, to, more) in [("index", "index", None), ("pack", "pack", Some(&self.chunk_size))] {
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

    /// The cell as the simulator sees it: a rate of 1 is one sample a second there.
    fn case(&self, cell: &Cell) -> Case {
        let samples = usize::try_from(self.samples).expect("samples");
        let mut case = Case::plain(cell.name, samples, 1, cell.cache, cell.staggered, cell.rates, 1);
        if cell.packed {
            // As many samples as each object of the pack has room for.
            let chunks = self.at("bucket/pack/fletch/chunks");
            let len =
                |p: PathBuf| std::fs::metadata(chunks.join(p)).expect("chunk").len() / self.sample_bytes;
            case.units =
                walk(&chunks).into_iter().map(|p| u32::try_from(len(p)).expect("samples").max(1)).collect();
        }
        let slowest = cell.rates.iter().copied().fold(f64::MAX, f64::min);
        let epoch = self.samples as f64 / slowest;
        (case.warm, case.end) = (self.warm * epoch, (self.warm + self.epochs) * epoch);
        case
    }

    /// A server with the dataset as `set`; its socket, and its URL.
    fn server(&self, origin: &OriginEmulator, more: &[&str], packed: bool) -> (Daemon, PathBuf, String) {
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

    fn measure(&self, cell: &Cell, arm: ArmKind) -> Measured {
        let origin = self.emulator(EmulatorConfig::default());
        let all = (cell.cache * self.bytes() as f64) as u64;
        let cache = self.cache_size.unwrap_or(all.saturating_sub(MEMORY_BYTES));
        let (size, policy) = match arm {
            ArmKind::Direct => (0, "fletch"),
            ArmKind::Lru => (cache, "lru"),
            ArmKind::Pin => (cache, "pin"),
            ArmKind::Fletch => (cache, "fletch"),
        };
        let memory = MEMORY_BYTES.to_string();
        let size = size.to_string();
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
        let sum: f64 = cell.rates.iter().sum();
        // Samples a second of a job of rate 1.
        let base = self.pace / self.sample_bytes as f64 / sum;
        let case = self.case(cell);
        let begin = Instant::now() + Duration::from_millis(200);
        let at = |t: f64| begin + Duration::from_secs_f64(t / base);
        let (warm, end) = (at(case.warm), at(case.end));
        let counted = Arc::new(AtomicU64::new(0));
        let (tasks, mut jobs) = (TaskTracker::new(), Vec::new());
        for (j, spec) in case.jobs.iter().enumerate() {
            let endpoint = format!("unix:{}", socket.display()).parse().expect("endpoint");
            let name: JobName = format!("bench-{j}").parse().expect("name");
            let config = ClientConfig { job: Some(name.clone()), ..ClientConfig::new(endpoint, "loader") };
            let what = StartJob {
                name,
                dataset: Some("set".parse::<DatasetName>().expect("name")),
                version: None,
                root: None,
                layout: None,
                seed: Some(j as u64),
                order: if arm == ArmKind::Fletch { OrderKind::Substitute } else { OrderKind::Strict },
                buckets: None,
                replay: None,
                plan: PlanSpec::default(),
                world: World { ranks: 1, batch: LEASE, tail: Tail::Keep },
                visitation: Visitation::ExactlyOnce,
            };
            let job = Client::new(config).expect("client").declare(&what).await.expect("a job");
            let consumer = Consumer {
                job,
                step: Duration::from_secs_f64(1.0 / (spec.rate * base)),
                start: at(spec.start),
                warm,
                end,
                counted: Arc::clone(&counted),
                orders: self.orders.as_ref().map(|d| d.join(format!("job-{j}.txt"))),
            };
            jobs.push(tasks.spawn(consumer.consume()));
        }
        sleep_until(warm).await;
        let (before, cpu) = (origin.counts().bytes_sent, server.cpu());
        sleep_until(end).await;
        let (after, cpu_after) = (origin.counts().bytes_sent, server.cpu());
        let delivered = counted.load(Relaxed);
        let span = (end - warm).as_secs_f64();
        let mut stalled: f64 = 0.0;
        for job in jobs {
            stalled = stalled.max(job.await.expect("a job").as_secs_f64() / span);
        }
        Measured {
            ratio: (after - before) as f64 / delivered as f64,
            delivered,
            stalled,
            cpu: (cpu_after - cpu) / (delivered as f64 / 1e9),
        }
    }
}

fn main() {
    let (orders, data): (String, String) = (arg("orders", String::new()), arg("data", String::new()));
    let mut bench = Bench {
        scratch: tempfile::TempDir::with_prefix("fletch-bench-").expect("scratch"),
        samples: arg("samples", 25_600),
        sample_bytes: arg("sample-bytes", 128 << 10),
        chunk_size: arg("chunk-size", "4MiB".to_owned()),
        cache_size: Some(arg("cache-size", 0)).filter(|&n| n > 0),
        pace: arg("mb-per-s", 600.0) * 1e6,
        epochs: arg("epochs", 3.0),
        warm: arg("warm", 1.0),
        orders: (!orders.is_empty()).then(|| PathBuf::from(orders)),
    };
    let only: String = arg("cell", String::new());
    let strict_pace = arg("strict-mb-per-s", 100.0) * 1e6;
    let arms: String = arg("arms", "fletch".to_owned());
    bench.make(&data);
    let packed = bench.case(&CELLS[0]).units.len();
    println!("{} samples of {} bytes; {packed} chunks in the pack\n", bench.samples, bench.sample_bytes);
    let mut raw = strict::rows(&bench, &only, strict_pace);
    println!(
        "| cell | cache | arm | backend / delivered | simulated | bound | × bound | worst stall | server CPU s/GB | delivered GB |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for cell in CELLS.iter().filter(|c| c.name.contains(&only)) {
        for arm in arms.split(',') {
            let arm = match arm {
                "fletch" => ArmKind::Fletch,
                "pin" => ArmKind::Pin,
                "lru" => ArmKind::Lru,
                "direct" => ArmKind::Direct,
                other => panic!("--arms {other}: fletch, pin, lru or direct"),
            };
            let m = bench.measure(cell, arm);
            let s = simulate(&bench.case(cell), arm, Knobs::default());
            println!(
                "| {} | {:.0} % | {} | **{:.3}** | {:.3} | {:.3} | {:.3} | {:.1} % | {:.2} | {:.1} |",
                cell.name,
                cell.cache * 100.0,
                format!("{arm:?}").to_lowercase(),
                m.ratio,
                s.ratio,
                s.bound,
                m.ratio / s.bound,
                m.stalled * 100.0,
                m.cpu,
                m.delivered as f64 / 1e9
            );
            raw.push(serde_json::json!({
                "cell": cell.name, "cache": cell.cache, "packed": cell.packed, "arm": arm, "backend_per_delivered": m.ratio,
                "simulated": s.ratio, "bound": s.bound, "stalled": m.stalled, "server_cpu_s_per_gb": m.cpu,
                "delivered_bytes": m.delivered, "dataset_bytes": bench.bytes(),
            }));
        }
    }
    let json: String = arg("json", String::new());
    if !json.is_empty() {
        let text = serde_json::to_string_pretty(&raw).expect("json");
        std::fs::write(&json, text).unwrap_or_else(|e| panic!("{json}: {e}"));
    }
}
