//! I4: a dataset of three times the disk, which a mount and two jobs of the substitute order read at once.
//!
//! `make accept-pool` plays ten epochs; by default the test plays four of a smaller dataset.

use crate::common::{Over, appended, one_rank, series};
use crate::shares::{epoch, footprint};
use fletch_api::OrderKind;
use fletch_client::epochs::Next;
use fletch_client::{Client, ClientConfig, ClientError};
use fletch_tests::bins::{command, run};
use fletch_tests::cgroup::Memory;
use fletch_tests::fixture::Site;
use fletch_tests::readers::Data;
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// The length of each file, which is a chunk, a unit and a sample.
const LEN: u64 = 110_000;
/// Epochs of a job before the measured ones.
const WARM: u64 = 2;

/// A case: the size of the disk, the epochs of each job, and the samples that it reads a second.
struct Case {
    cache: &'static str,
    epochs: u64,
    rate: f64,
}

fn case() -> Case {
    if std::env::var_os("FLETCH_POOL").is_some_and(|form| form == "full") {
        Case { cache: "256MiB", epochs: 10, rate: 500.0 }
    } else {
        Case { cache: "96MiB", epochs: 4, rate: 600.0 }
    }
}

/// Reads epochs of a job at the case's rate until `over`, and counts them.
fn train(url: &str, name: &str, case: &Case, over: &AtomicBool, done: &AtomicU64) {
    let ask = one_rank(name, OrderKind::Substitute);
    let work = async {
        let client = Client::new(ClientConfig::new(url.parse().expect("url"), "loader"))?;
        let job = client.declare(&ask).await?;
        let (begun, mut samples) = (Instant::now(), 0.0);
        for epoch in 0.. {
            let mut reader = job.reader(epoch, 0, 0);
            loop {
                match reader.next(32).await? {
                    _ if over.load(Relaxed) => return Ok::<_, ClientError>(()),
                    Next::Batch(b) => {
                        samples += 32.0;
                        let at = begun + Duration::from_secs_f64(samples / case.rate);
                        tokio::time::sleep(at.saturating_duration_since(Instant::now())).await;
                        job.ack(epoch, 0, &[b.token.ack(Default::default())]).await?;
                    }
                    Next::Done => break,
                    Next::Full | Next::Last => {}
                }
            }
            done.fetch_add(1, Relaxed);
        }
        Ok(())
    };
    tokio::runtime::Runtime::new().expect("runtime").block_on(work).expect("epochs");
}

/// Counters of the server at one moment.
#[derive(Debug, Clone, Copy)]
struct Counted {
    /// Bytes that jobs read, and bytes that were fetched for them.
    delivered: u64,
    fetched: u64,
    /// Bytes that the mount read, and those of them that were on disk or in memory.
    mount: u64,
    mount_memory: u64,
    mount_disk: u64,
    put: u64,
    displaced: u64,
}

impl Counted {
    fn now(site: &Site) -> Self {
        let all = site.metrics();
        let bytes = |job: &str, more: &str| -> u64 {
            let is = |k: &str| k.starts_with("fletch_bytes_total{") && k.contains(job) && k.contains(more);
            all.iter().filter(|(k, _)| is(k)).map(|(_, n)| *n as u64).sum()
        };
        let jobs = "train_job=\"sweep-";
        let of_mount = |tier: &str| {
            let is = |k: &str| {
                let names = ["fletch_bytes_total{", "train_job=\"plain\"", "result=\"hit\""];
                names.iter().all(|name| k.contains(name)) && k.contains(tier)
            };
            all.iter().filter(|(k, _)| is(k)).map(|(_, n)| *n as u64).sum()
        };
        let of = |name: &str| all.get(name).map_or(0, |n| *n as u64);
        Counted {
            delivered: bytes(jobs, ""),
            // Units that the sweep loaded, and samples that were read by themselves.
            fetched: of("fletch_sweep_loaded_bytes_total") / footprint(LEN) * LEN
                + bytes(jobs, "result=\"bypass\""),
            mount: bytes("train_job=\"plain\"", ""),
            mount_memory: of_mount("tier=\"memory\""),
            mount_disk: of_mount("tier=\"disk\""),
            put: of("fletch_disk_put_chunks_total"),
            displaced: of("fletch_sweep_displaced_units_total"),
        }
    }

    fn since(self, before: Self) -> Self {
        Counted {
            delivered: self.delivered - before.delivered,
            fetched: self.fetched - before.fetched,
            mount: self.mount - before.mount,
            mount_memory: self.mount_memory - before.mount_memory,
            mount_disk: self.mount_disk - before.mount_disk,
            put: self.put - before.put,
            displaced: self.displaced - before.displaced,
        }
    }

    /// Origin bytes of the jobs for each byte that they read.
    fn cost(&self) -> f64 {
        self.fetched as f64 / self.delivered as f64
    }
}

/// Returns what two jobs alone read from the origin for each byte, with a cache of this part of the dataset.
fn simulated(site: &Site, units: u64, cache: f64, epochs: u64) -> f64 {
    let file = site.place("simulated").join("case.toml");
    let (warm, end) = (WARM * units, epochs * units);
    let jobs = "[[jobs]]\nrate = 1.0\n".repeat(2);
    let text = format!(
        "name = \"alone\"\nunits = {{ count = {units}, samples = 1 }}\ncache = {cache}\nwarm = {warm}.0\n\
         end = {end}.0\nseed = 1\nleased = 128\nahead = 64\novertake = 4\n{jobs}"
    );
    fs::write(&file, text).expect("write");
    let mut c = command("fletch");
    c.args(["simulate", "--arm", "fletch", "--json", "--case"]).arg(&file);
    let told: serde_json::Value = serde_json::from_slice(&run(&mut c).stdout).expect("json");
    told["outcomes"][0]["ratio"].as_f64().expect("a ratio")
}

/// The parts of the dataset and what they have of the disk, in bytes.
#[derive(Debug, Clone, Copy)]
struct Parts {
    plain: u64,
    sweep: u64,
    plain_has: u64,
    sweep_has: u64,
}

fn parts(site: &Site) -> Parts {
    let allocation = site.json("/v1/allocation");
    let of = |name: &str| allocation["datasets"][0][name].as_u64().unwrap_or_default();
    Parts {
        plain: of("share_bytes") - of("sweep_share_bytes"),
        sweep: of("sweep_share_bytes"),
        plain_has: of("cached_bytes") - of("sweep_cached_bytes"),
        sweep_has: of("sweep_cached_bytes"),
    }
}

#[test]
fn a_mount_and_two_jobs_keep_their_parts_and_nothing_thrashes() {
    if !have(&[Need::Fuse, Need::Cgroup]) {
        return;
    }
    let case = case();
    let flags = ["--memory", "64MiB", "--cache-size", case.cache, "--cache-free-floor", "0"];
    let site = Site::start(&flags);
    let n = 3 * series(&site, "fletch_disk_capacity_bytes") / footprint(LEN);
    let data = Data::new(91, n, LEN);
    let _ = site.publish("one", &data.dir);
    let group = Memory::new(64 << 20).expect("cgroup");
    let mount = site.mount("one", "plain", &["--memory", "32MiB", "--push", "off"]);
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let mut order = data.files.clone();
    let (over, done) = (AtomicBool::new(false), [AtomicU64::new(0), AtomicU64::new(0)]);
    let reached = |epochs: u64| done.iter().all(|done| done.load(Relaxed) >= epochs);
    let read_by_mount = AtomicU64::new(0);
    let (mut seen, mut counts) = (Vec::new(), Vec::new());
    thread::scope(|s| {
        let _over = Over(&over);
        for (job, done) in done.iter().enumerate() {
            let (site, case, over) = (&site, &case, &over);
            s.spawn(move || train(&site.url, &format!("sweep-{job}"), case, over, done));
        }
        s.spawn(|| {
            for nth in 0.. {
                order.shuffle(&mut rng);
                for some in order.chunks(100) {
                    epoch(&group, &mount.dir, some, nth == 0);
                    if over.load(Relaxed) {
                        return;
                    }
                }
                read_by_mount.fetch_add(1, Relaxed);
            }
        });
        // In its first epoch the mount finds nothing of its own.
        let warm = || reached(WARM) && read_by_mount.load(Relaxed) > 0;
        until("the first epochs", Duration::from_secs(400), warm);
        let first = done.iter().map(|done| done.load(Relaxed)).min().unwrap_or(WARM);
        let mut next = first;
        until("the other epochs", Duration::from_secs(600), || {
            seen.push(parts(&site));
            if reached(next) {
                counts.push(Counted::now(&site));
                next += 1;
            }
            thread::sleep(Duration::from_millis(200));
            reached(first + case.epochs - WARM)
        });
        counts.push(Counted::now(&site));
    });
    appended(&site);
    mount.stop();
    judge(&site, &data, &case, &seen, &counts);
}

fn judge(site: &Site, data: &Data, case: &Case, seen: &[Parts], counts: &[Counted]) {
    let units = data.files.len() as u64;
    let size = (units * footprint(LEN)) as f64;
    let least = |of: &dyn Fn(&Parts) -> f64| seen.iter().map(of).fold(f64::INFINITY, f64::min);
    let sweep_part = least(&|p| p.sweep as f64 / size);
    let alone = simulated(site, units, sweep_part, case.epochs);
    for pair in counts.windows(2) {
        let one = pair[1].since(pair[0]);
        println!("an epoch of the jobs costs {:.3}, {one:?}", one.cost());
    }
    let all = counts[counts.len() - 1].since(counts[0]);
    println!(
        "the jobs read {:.3} from the origin, alone on {sweep_part:.3} they would {alone:.3}",
        all.cost()
    );
    assert!(all.cost() <= alone + 0.03, "{} beside the mount, {alone} alone", all.cost());
    // What memory has says nothing about the disk.
    let plain_part = least(&|p| p.plain as f64 / size);
    let hits = all.mount_disk as f64 / (all.mount - all.mount_memory) as f64;
    let (has, full) = (
        least(&|p| p.plain_has as f64 / p.plain as f64),
        least(&|p| (p.plain_has + p.sweep_has) as f64 / (p.plain + p.sweep) as f64),
    );
    println!(
        "the mount finds {hits:.3} on disk, its part is {plain_part:.3}; it has at least {has:.3} of that \
         part; the pool is at least {full:.3} full"
    );
    // The reads are a sample of the dataset: four standard deviations of its share that is on the disk.
    let reads = ((all.mount - all.mount_memory) / LEN) as f64;
    let least_hits = plain_part - 4.0 * (plain_part * (1.0 - plain_part) / reads).sqrt();
    assert!(hits >= least_hits, "the mount finds {hits} in {reads} reads, its part is {plain_part}");
    assert!(has >= 0.95, "the mount has {has} of its part");
    assert!(full >= 0.95, "the pool is {full} full");
    // Each unit that the sweep loads is written once. All other writes are for the mount.
    let misses = (all.mount - all.mount_memory - all.mount_disk) / LEN;
    let written = all.put.saturating_sub(all.fetched / LEN);
    println!("the mount missed {misses} chunks and wrote {written}; {} units displaced", all.displaced);
    assert!(written * 5 <= misses, "{written} chunks were written of {misses} that the mount missed");
    assert!(
        all.displaced * 100 <= units,
        "the disk kept less than the sweep's share {} times",
        all.displaced
    );
}
