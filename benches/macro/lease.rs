//! `bench-lease [--rounds 5] [--samples 4000] [--sample-bytes 112640] [--want 64] [--ahead true]
//!              [--json FILE]`
//!
//! Times whole epochs of a pack, read by leases, against plain GETs of the same bytes in 4 MiB chunks. One
//! client reads both in turn over a unix socket and verifies every byte. Everything is warm: once in the
//! server's memory, once on its disk (page cache).
//!
//! A lease is granted durably, and acknowledged durably before the next one is taken. The client receives
//! that next lease meanwhile; with `--ahead false` it asks only then. Further rows read epochs of a
//! selection, a random tenth of the keys, and epochs whose acks carry no times, by which the server measures
//! a job.

use fletch_api::{BatchTimes, OrderKind, PlanBase, StartJob, Visitation, WorldSpec, jobs::PlanSpec};
use fletch_benches::{Daemon, Table, arg, bin, keep, until, usage, walk, write_tree};
use fletch_client::{Client, ClientConfig, epochs::Next};
use fletch_core::{Hash, Root, plan::Tail};
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

struct Served {
    client: Client,
    root: Root,
    chunks: Vec<(Hash, u32)>,
    /// Stops when this is dropped.
    _server: Daemon,
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
    async fn start(scratch: &Path, tier: &str, more: &[&str]) -> Self {
        let at = |name: &str| scratch.join(format!("{tier}-{name}"));
        let server = Daemon::start(
            Command::new(bin("fletch-server"))
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
    async fn leases(&self, order: OrderKind, epoch: u64, (want, ahead): (u32, bool), read: Read<'_>) -> f64 {
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
}

fn main() {
    usage(include_str!("lease.rs"));
    let (rounds, want, ahead): (u64, u32, bool) = (arg("rounds", 5), arg("want", 64), arg("ahead", true));
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
    let mut table = Table::default();
    runtime.block_on(async {
        for (tier, memory, cache) in [("memory", twice.as_str(), "0"), ("disk", "64MiB", &twice)] {
            let more = ["--memory", memory, "--cache-size", cache];
            let served = Served::start(scratch.path(), tier, &more).await;
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
