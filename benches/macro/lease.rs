//! `bench-lease [--rounds 5] [--samples 4000] [--sample-bytes 112640] [--want 64] [--ahead 1]
//!              [--json FILE] [--sync-us N [--before DIR]]`
//!
//! Times whole epochs of a pack, read by leases, against plain GETs of the same bytes in 4 MiB chunks. One
//! client reads both in turn over a unix socket and verifies every byte. Everything is warm: once in the
//! server's memory, once on its disk (page cache).
//!
//! A lease is granted durably, and acknowledged durably before the next one is taken. The client receives
//! that next lease meanwhile; with `--ahead 0` it asks only then. Further rows read epochs of a selection, a
//! random tenth of the keys, and epochs whose acks carry no times, by which the server measures a job.
//!
//! With `--sync-us` the table is another one: strict epochs from memory with 1, 2 and 4 leases under way and
//! acks beside the requests, where each sync of the server takes N microseconds longer (0: as long as the
//! disk takes). It needs `cc`. Beside it the way of a build without either: one lease ahead, and each ack
//! before the next lease; with `--before` at the server of an earlier build in that directory.

use fletch_api::{BatchTimes, OrderKind, PlanBase, StartJob, Visitation, WorldSpec, jobs::PlanSpec};
use fletch_benches::{Daemon, Table, arg, bin, keep, span, until, usage, walk, write_tree};
use fletch_client::{Client, ClientConfig, epochs::Next};
use fletch_core::{Hash, Root, plan::Tail};
use std::{
    collections::VecDeque,
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};
use tokio_util::task::TaskTracker;

/// Acks that a consumer sends and does not wait for.
const ACKS_BESIDE: usize = 8;

struct Served {
    client: Client,
    root: Root,
    chunks: Vec<(Hash, u32)>,
    /// Stops when this is dropped.
    _server: Daemon,
}

/// The server to measure.
struct Program {
    path: PathBuf,
    /// A library that makes syncs longer, and by how many microseconds.
    slower: Option<(PathBuf, u64)>,
}

impl Program {
    fn own() -> Self {
        Program { path: bin("fletch-server"), slower: None }
    }

    fn command(&self) -> Command {
        let mut c = Command::new(&self.path);
        if let Some((library, us)) = &self.slower {
            c.env("LD_PRELOAD", library).env("FLETCH_BENCH_SYNC_US", us.to_string());
        }
        c
    }
}

/// What an epoch reads, and whether its acks carry times, by which the server measures the job.
#[derive(Clone, Copy)]
enum Read<'a> {
    All,
    Unmeasured,
    Selection(&'a [String]),
}

fn run(c: &mut Command) {
    assert!(c.stdout(Stdio::null()).status().expect("run").success(), "{c:?}");
}

fn declaration(order: OrderKind, want: u32, keys: Option<&[String]>) -> StartJob {
    let (what, base) = keys.map_or(("all", PlanBase::All), |keys| ("some", PlanBase::Keys(keys.to_vec())));
    StartJob {
        name: format!("bench-{}-{what}", order.as_str()).parse().expect("name"),
        dataset: Some("set".parse().expect("name")),
        version: None,
        root: None,
        layout: None,
        seed: Some(1),
        order,
        buckets: None,
        replay: None,
        plan: PlanSpec { base, ..PlanSpec::default() },
        world: WorldSpec { ranks: 1, batch: want, tail: Tail::Keep },
        visitation: Visitation::ExactlyOnce,
    }
}

impl Served {
    async fn start(program: &Program, scratch: &Path, tier: &str, more: &[&str]) -> Self {
        let at = |name: &str| scratch.join(format!("{tier}-{name}"));
        let server = Daemon::start(
            program
                .command()
                .args(["--listen", "127.0.0.1:0", "--cache-free-floor", "0"])
                .args(more)
                .args(["--socket".as_ref(), at("s.sock").as_os_str()])
                .args(["--state-dir".as_ref(), at("state").as_os_str()])
                .args(["--cache-dir".as_ref(), at("cache").as_os_str()])
                .args(["--ready-file".as_ref(), at("ready").as_os_str()]),
            Some(&at("log")),
        );
        let ready = at("ready");
        until("the server", || std::fs::read_to_string(&ready).is_ok_and(|s| s.starts_with("http")));
        let url = std::fs::read_to_string(&ready).expect("ready").trim().to_owned();
        let (data, tables) = (scratch.join("set"), scratch.join("pack"));
        run(Command::new(bin("fletch"))
            .args(["register", "set"])
            .arg(&data)
            .arg("--tables")
            .arg(&tables)
            .args(["--quiet", "--server", &url]));
        let endpoint = format!("unix:{}", at("s.sock").display()).parse().expect("endpoint");
        let client = Client::new(ClientConfig::new(endpoint, "loader")).expect("client");
        let root = client.resolve(&"set".parse().expect("name"), "latest").await.expect("a version").root;
        let chunks = tables.join("fletch/chunks");
        let chunk = |p: PathBuf| {
            let len = std::fs::metadata(chunks.join(&p)).expect("chunk").len();
            let name = p.file_name().expect("name").to_str().expect("text");
            (name.parse::<Hash>().expect("a hash"), u32::try_from(len).expect("a chunk"))
        };
        Served { client, root, chunks: walk(&chunks).into_iter().map(chunk).collect(), _server: server }
    }

    /// Measures plain GETs, in bytes a second.
    async fn gets(&self) -> f64 {
        let (begin, mut bytes) = (Instant::now(), 0);
        for &(hash, len) in &self.chunks {
            bytes += self.client.chunk(self.root, hash, len).await.expect("a chunk").bytes().len();
        }
        bytes as f64 / begin.elapsed().as_secs_f64()
    }

    /// Measures an epoch by leases of all samples, or of `keys`, in bytes a second.
    async fn leases(&self, order: OrderKind, epoch: u64, (want, ahead): (u32, usize), read: Read<'_>) -> f64 {
        let keys = if let Read::Selection(keys) = read { Some(keys) } else { None };
        let job = self.client.declare(&declaration(order, want, keys)).await.expect("a job");
        let (begin, mut bytes) = (Instant::now(), 0);
        let mut reader = job.reader(epoch, 0, 0).prefetch(ahead);
        let mut asked = Instant::now();
        while let Next::Batch(batch) = reader.next(want).await.expect("a lease") {
            bytes += batch.samples.iter().map(|s| s.bytes.len()).sum::<usize>();
            let waited_ns = u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX);
            let entries = u32::try_from(batch.samples.len()).expect("few");
            let times = match read {
                Read::Unmeasured => BatchTimes::default(),
                _ => BatchTimes { entries, waited_ns, received_ns: Some(waited_ns), ..BatchTimes::default() },
            };
            job.ack(epoch, 0, &[batch.token.ack(times)]).await.expect("an ack");
            asked = Instant::now();
        }
        bytes as f64 / begin.elapsed().as_secs_f64()
    }

    /// Measures a strict epoch whose acks travel beside the lease requests, in bytes a second.
    async fn leases_under_way(&self, epoch: u64, want: u32, ahead: usize) -> f64 {
        let job = self.client.declare(&declaration(OrderKind::Strict, want, None)).await.expect("a job");
        let (begin, mut bytes, tasks) = (Instant::now(), 0, TaskTracker::new());
        let (mut reader, mut acks) = (job.reader(epoch, 0, 0).prefetch(ahead), VecDeque::new());
        while let Next::Batch(batch) = reader.next(want).await.expect("a lease") {
            bytes += batch.samples.iter().map(|s| s.bytes.len()).sum::<usize>();
            let (acker, token) = (job.clone(), batch.token);
            acks.push_back(tasks.spawn(async move {
                acker.ack(epoch, 0, &[token.ack(BatchTimes::default())]).await.expect("an ack");
            }));
            if acks.len() > ACKS_BESIDE
                && let Some(first) = acks.pop_front()
            {
                first.await.expect("an ack");
            }
        }
        for ack in acks {
            ack.await.expect("an ack");
        }
        bytes as f64 / begin.elapsed().as_secs_f64()
    }
}

/// Compiles the library that makes syncs longer.
fn compile_slow_sync(scratch: &Path) -> PathBuf {
    let (source, library) = (scratch.join("slow_sync.c"), scratch.join("slow_sync.so"));
    std::fs::write(&source, include_str!("slow_sync.c")).expect("written");
    run(Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source));
    library
}

/// Prints how long a sync of a short append takes in `dir`.
fn print_sync(dir: &Path, slower_us: u64) {
    let mut file = File::create(dir.join("syncs")).expect("created");
    let times = (0..200).map(|_| {
        let begun = Instant::now();
        file.write_all(&[7; 200]).expect("written");
        file.sync_data().expect("synced");
        begun.elapsed().as_secs_f64() * 1e3
    });
    let times: Vec<f64> = times.collect();
    println!("A sync takes {} ms here, and the server's {slower_us} us more.\n", span(&times));
}

/// Prints the table of leases under way.
async fn under_way(scratch: &Path, memory: &str, (rounds, want, sample_bytes): (u64, u32, usize), us: u64) {
    print_sync(scratch, us);
    let slower = Some((compile_slow_sync(scratch), us)).filter(|_| us > 0);
    let own = Program { slower: slower.clone(), ..Program::own() };
    let settings = ["--memory", memory, "--cache-size", "0"];
    let now = Served::start(&own, scratch, "now", &settings).await;
    let before = match arg("before", String::new()) {
        dir if dir.is_empty() => None,
        dir => {
            let program = Program { path: Path::new(&dir).join("fletch-server"), slower };
            Some(Served::start(&program, scratch, "before", &settings).await)
        }
    };
    now.gets().await;
    if let Some(before) = &before {
        before.gets().await;
    }
    let (mut table, row) = (Table::default(), format!("sync {us} us longer, {sample_bytes} B"));
    for round in 0..rounds {
        let base = before.as_ref().unwrap_or(&now);
        let figure = base.leases(OrderKind::Strict, 4 * round, (want, 1), Read::Unmeasured).await;
        table.add(&row, "one ahead, acks between", figure / 1e6);
        for (arm, ahead) in [1, 2, 4].into_iter().enumerate() {
            let figure = now.leases_under_way(4 * round + 1 + arm as u64, want, ahead).await;
            table.add(&row, &format!("{ahead} ahead, acks beside"), figure / 1e6);
        }
    }
    for ahead in [1, 2, 4] {
        table.print(&format!("{ahead} ahead, acks beside"), "MB/s");
    }
    keep(&table);
}

fn main() {
    usage(include_str!("lease.rs"));
    let (rounds, want, ahead): (u64, u32, usize) = (arg("rounds", 5), arg("want", 64), arg("ahead", 1));
    let (samples, sample_bytes) = (arg("samples", 4000), arg("sample-bytes", 112_640));
    let scratch = tempfile::TempDir::with_prefix("fletch-bench-").expect("scratch");
    write_tree(&scratch.path().join("set"), std::process::id().into(), samples, sample_bytes);
    run(Command::new(bin("fletch"))
        .args(["pack", "--quiet", "--chunk-size", "4MiB"])
        .arg(scratch.path().join("set"))
        .arg("--to")
        .arg(scratch.path().join("pack"))
        .arg("--state-dir")
        .arg(scratch.path().join("st")));
    let all = samples * sample_bytes;
    let twice = (all * 2).max(64 << 20).to_string();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("runtime");
    let keys = walk(&scratch.path().join("set")).into_iter().map(|p| p.display().to_string());
    // As random as their hashes are.
    let tenth: Vec<String> = keys.filter(|key| Hash::of(key.as_bytes()).as_bytes()[0] < 26).collect();
    let sync_us: i64 = arg("sync-us", -1);
    if let Ok(us) = u64::try_from(sync_us) {
        runtime.block_on(under_way(scratch.path(), &twice, (rounds, want, sample_bytes), us));
        return;
    }
    let mut table = Table::default();
    runtime.block_on(async {
        for (tier, memory, cache) in [("memory", twice.as_str(), "0"), ("disk", "64MiB", &twice)] {
            let more = ["--memory", memory, "--cache-size", cache];
            let served = Served::start(&Program::own(), scratch.path(), tier, &more).await;
            served.gets().await;
            for round in 0..rounds {
                for order in [OrderKind::Strict, OrderKind::Substitute] {
                    let row = format!("{tier}, {} epoch, {sample_bytes} B", order.as_str());
                    table.add(&row, "GET", served.gets().await / 1e6);
                    // Epochs of a job are read once, and the two arms are one job.
                    let mut arms = [
                        ("lease", 2 * round, Read::All),
                        ("lease, acks without times", 2 * round + 1, Read::Unmeasured),
                        ("lease, a tenth", round, Read::Selection(&tenth)),
                    ];
                    if round % 2 == 1 {
                        // The first of two has no advantage that lasts.
                        arms.swap(0, 1);
                        (arms[0].1, arms[1].1) = (arms[1].1, arms[0].1);
                    }
                    for (arm, epoch, read) in arms {
                        table.add(&row, arm, served.leases(order, epoch, (want, ahead), read).await / 1e6);
                    }
                }
            }
        }
    });
    table.print("lease", "MB/s");
    keep(&table);
}
