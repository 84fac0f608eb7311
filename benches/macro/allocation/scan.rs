//! Three jobs on X, one on Y, and a scan of Z, which is ten times as large and has a least share. The disk
//! has room for X and half of Y.

use super::{
    judge,
    rig::{BATCH, CHUNK, Rig, SAMPLE, mib_per_s},
    training::{Training, declare},
};
use fletch_api::{JobSettings, OrderKind};
use std::time::Duration;
use tokio::time::sleep;
use tokio_util::task::TaskTracker;

/// Chunks of X, Y and Z.
const CHUNKS: [usize; 3] = [400, 400, 4000];
/// What each link carries, and what each job could read, in MiB/s.
const LINK: f64 = 3.0;
const MOST: f64 = 60.0;
/// The least share of the scan, in chunks.
const LEAST: u64 = 20;
/// How long they run, in seconds.
const RUNS: f64 = 100.0;

/// Returns whether a target is missed.
pub async fn run() -> bool {
    let rig = Rig::new(&CHUNKS);
    let origins = rig.origins(&[Some(mib_per_s(LINK)); 3]);
    let disk = (CHUNKS[0] + CHUNKS[1] / 2) * CHUNK;
    let server = rig.serve(&origins, disk as u64, &["--cache-decision-interval=2s"]);
    let (client, tasks) = (server.client(), TaskTracker::new());
    let mut trainings = Vec::new();
    for (name, dataset) in [("x1", 0), ("x2", 0), ("x3", 0), ("y", 1), ("scan", 2)] {
        let job = declare(&client, (name, dataset), OrderKind::Substitute, BATCH).await;
        if name == "scan" {
            let least = Some(LEAST * CHUNK as u64);
            let settings = JobSettings { min_share_bytes: least, ..JobSettings::default() };
            job.set_settings(&settings).await.expect("the least share");
        }
        let training = Training::new(mib_per_s(MOST));
        tasks.spawn(training.clone().run(job, 0..if name == "scan" { 1 } else { u64::MAX }));
        trainings.push(training);
    }
    sleep(Duration::from_secs_f64(RUNS)).await;
    let now = client.allocation().await.expect("the allocation");
    println!("| job | MiB/s | most | sure | waits for |");
    println!("|---|---|---|---|---|");
    for job in client.jobs().await.expect("the jobs") {
        let job = client.job(&job.id).await.expect("the job");
        if let Some(e) = job.info().benefit.as_ref().and_then(|b| b.estimate.as_ref()) {
            let mib = |rate: f64| rate * SAMPLE as f64 / mib_per_s(1.0);
            let (rate, most) = (mib(e.rate), mib(e.most_rate));
            println!("| {} | {rate:.1} | {most:.1} | {} | {:?} |", job.info().name, e.is_sure, e.verdict);
        }
    }
    println!("\nReason of the last decision: {:?}\n", now.reason);
    trainings.iter().for_each(|t| t.stop());
    tasks.close();
    tasks.wait().await;
    println!("| dataset | share, chunks | cached, chunks | can use, chunks | rank | gain per GiB |");
    println!("|---|---|---|---|---|---|");
    let chunks = |bytes: u64| bytes as f64 / CHUNK as f64;
    let mut shares = [f64::NAN; 3];
    for d in now.datasets.iter().filter(|d| d.is_sweep) {
        println!(
            "| {} | {:.1} | {:.1} | {:.1} | {:?} | {:?} |",
            d.dataset,
            chunks(d.share_bytes),
            chunks(d.cached_bytes),
            chunks(d.size_bytes),
            d.rank,
            d.gain_per_gib
        );
        let at = d.dataset.as_str()[1..].parse::<usize>().expect("a number");
        shares[at] = chunks(d.share_bytes);
    }
    let capacity = chunks(now.capacity_bytes);
    // With more than that in the cache its link brings the rest as fast as its jobs compute.
    let used = CHUNKS[0] as f64 * (1.0 - LINK / MOST);
    let near = (LEAST as f64 * 0.01).max(1.0);
    let musts = [
        ("X's part of what makes its jobs faster", shares[0] / used, 0.99),
        ("Y's part of what X and Z leave", shares[1] / (capacity - shares[0] - shares[2]), 0.99),
        ("Z's least share is kept, chunks", shares[2] + near, LEAST as f64),
        ("Z has no more than that, chunks less", LEAST as f64 + near - shares[2], 0.0),
    ];
    musts
        .into_iter()
        .fold(false, |missed, (what, figure, least)| judge(what, figure, least) || figure.is_nan() || missed)
}
