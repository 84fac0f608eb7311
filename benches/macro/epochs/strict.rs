//! Strict epochs, cold: one job in a known order at an origin with 1.1 times its demand, on a server without
//! a disk. Measures the stall from batch 10 on, the origin's bytes, and the bytes that were prefetched in
//! vain.

use crate::{
    cells::LEASE,
    consumer::{acknowledge, next},
    rig::Bench,
};
use fletch_api::{OrderKind, StartJob, Visitation, WorldSpec, jobs::PlanSpec};
use fletch_client::{
    Client, ClientConfig,
    epochs::{LeaseBatch, Next},
};
use fletch_core::plan::Tail;
use fletch_testkit::{EmulatorConfig, Latency};
use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    path::Path,
    time::Duration,
};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep_until},
};
use tokio_util::task::TaskTracker;

/// The origin's bandwidth, as a multiple of the job's demand.
const SPARE: f64 = 1.1;
/// The first batch that counts.
const FROM: usize = 10;

struct Row {
    name: &'static str,
    packed: bool,
    memory: &'static str,
    ahead: &'static str,
}

const ROWS: [Row; 4] = [
    Row { name: "strict, indexed, not ahead", packed: false, memory: "512MiB", ahead: "0" },
    Row { name: "strict, indexed", packed: false, memory: "512MiB", ahead: "25%" },
    Row { name: "strict, packed, by range", packed: true, memory: "512MiB", ahead: "25%" },
    Row { name: "strict, packed, by chunk", packed: true, memory: "2GiB", ahead: "50%" },
];

/// Measures the rows whose names contain `only`, with a job that reads `pace` bytes a second.
pub fn rows(bench: &Bench, only: &str, pace: f64) -> Vec<serde_json::Value> {
    let wanted: Vec<&Row> = ROWS.iter().filter(|r| r.name.contains(only)).collect();
    let mut raw = Vec::new();
    if wanted.is_empty() {
        return raw;
    }
    println!(
        "| cold, origin {SPARE} x demand ({:.0} MB/s) | stall from batch {FROM} | origin bytes / D \
         | in vain, bytes | epoch s | server CPU s/GB |",
        pace / 1e6
    );
    println!("|---|---|---|---|---|---|");
    for row in wanted {
        let m = measure(bench, row, pace);
        println!(
            "| {} | **{:.1} %** | {:.3} | {} | {:.1} | {:.2} |",
            row.name,
            m.stalled * 100.0,
            m.origin,
            m.vain,
            m.seconds,
            m.cpu
        );
        raw.push(serde_json::json!({
            "cell": row.name, "stalled": m.stalled, "origin_per_dataset": m.origin, "vain_bytes": m.vain,
            "epoch_s": m.seconds, "server_cpu_s_per_gb": m.cpu, "pace": pace, "dataset_bytes": bench.bytes(),
        }));
    }
    println!();
    raw
}

struct Measured {
    stalled: f64,
    origin: f64,
    vain: u64,
    seconds: f64,
    cpu: f64,
}

fn measure(bench: &Bench, row: &Row, pace: f64) -> Measured {
    let first_byte = Some(Latency { median: Duration::from_millis(25), p99: Duration::from_millis(100) });
    let origin = bench.emulator(EmulatorConfig {
        first_byte,
        stream_bytes_per_s: Some(80_000_000),
        total_bytes_per_s: Some((pace * SPARE) as u64),
        ..EmulatorConfig::default()
    });
    let more = ["--memory", row.memory, "--memory-prefetch", row.ahead, "--cache-size", "0"];
    let (server, socket, url) = bench.server(&origin, &more, row.packed);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let before = (origin.counts().bytes_sent, server.cpu());
    let (stalled, delivered, seconds) = runtime.expect("runtime").block_on(epoch(bench, &socket, pace));
    let sent = origin.counts().bytes_sent - before.0;
    Measured {
        stalled,
        // With the tables, a few KB.
        origin: sent as f64 / delivered as f64,
        vain: metric(&url, "fletch_prefetch_unused_bytes_total"),
        seconds,
        cpu: (server.cpu() - before.1) / (delivered as f64 / 1e9),
    }
}

/// Reads one epoch. Returns the part of the time from batch [`FROM`] on that the job waited, bytes, and
/// seconds.
async fn epoch(bench: &Bench, socket: &Path, pace: f64) -> (f64, u64, f64) {
    let endpoint = format!("unix:{}", socket.display()).parse().expect("endpoint");
    let name: fletch_core::JobName = "strict".parse().expect("name");
    let config = ClientConfig { job: Some(name.clone()), ..ClientConfig::new(endpoint, "loader") };
    let what = StartJob {
        name,
        dataset: Some("set".parse().expect("name")),
        version: None,
        root: None,
        layout: None,
        seed: Some(1),
        order: OrderKind::Strict,
        buckets: None,
        replay: None,
        plan: PlanSpec::default(),
        world: WorldSpec { ranks: 1, batch: LEASE, tail: Tail::Keep },
        visitation: Visitation::ExactlyOnce,
    };
    let job = Client::new(config).expect("client").declare(&what).await.expect("a job");
    let step = Duration::from_secs_f64(bench.sample_bytes as f64 / pace);
    let (to, mut from) = tokio::sync::mpsc::channel::<LeaseBatch>(2);
    let asking = job.clone();
    let tasks = TaskTracker::new();
    let task = tasks.spawn(async move {
        let mut reader = asking.reader(0, 0, 0).patience(Duration::from_secs(60));
        loop {
            match reader.next(LEASE).await.expect("a lease") {
                Next::Batch(batch) => to.send(batch).await.expect("a consumer"),
                Next::Full => {}
                Next::Last | Next::Done => return,
            }
        }
    });
    let begin = Instant::now();
    let (mut due, mut since, mut waited, mut delivered) = (begin, begin, Duration::ZERO, 0);
    let mut number = 0;
    let mut acking: Option<JoinHandle<()>> = None;
    while let Some((batch, late)) = next(&mut from, &mut due).await {
        if number < FROM {
            since = due;
        } else {
            waited += late;
        }
        due += step * u32::try_from(batch.samples.len()).expect("few");
        delivered += batch.samples.iter().map(|s| s.bytes.len() as u64).sum::<u64>();
        sleep_until(due).await;
        if let Some(before) = acking.take() {
            before.await.expect("an ack");
        }
        acking = Some(tasks.spawn(acknowledge(job.clone(), 0, batch.token)));
        number += 1;
    }
    if let Some(last) = acking {
        last.await.expect("the last ack");
    }
    task.await.expect("the epoch's leases");
    let counted = (Instant::now() - since).as_secs_f64();
    (waited.as_secs_f64() / counted, delivered, begin.elapsed().as_secs_f64())
}

/// Returns the value of one of the server's metrics.
fn metric(url: &str, name: &str) -> u64 {
    let address = url.trim_start_matches("http://").trim_end_matches('/');
    let mut stream = TcpStream::connect(address).expect("the server");
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").expect("asked");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("metrics");
    let line = text.lines().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
    line.rsplit(' ').next().and_then(|n| n.parse().ok()).expect("a number")
}
