//! The rate that is predicted for another part in the cache, and the rate of a job with that part.
//!
//! Each job runs with each part of the dataset in the cache. After its passes its estimate predicts its rate
//! with twice and four times the part.

use super::{
    judge,
    rig::{CHUNK, Rig, SAMPLE, mib_per_s},
    training::{Training, declare},
};
use fletch_api::{OrderKind, benefit::BenefitEstimate};
use fletch_benches::arg;
use fletch_client::epochs::JobHandle;
use std::{sync::Arc, time::Duration};
use tokio::time::sleep;

/// The smallest disk that a server accepts, 16 MiB, is 1/20 of as many.
const CHUNKS: usize = 1360;
/// What the link carries, in MiB/s.
const LINK: f64 = 40.0;
/// Samples of a step: so many that a timer of a millisecond hardly matters.
const BATCH: u32 = 128;
/// Parts in the cache. From the first four, others are predicted.
const FROM: [f64; 4] = [0.05, 0.125, 0.25, 0.375];
const SEEN: [f64; 4] = [0.1, 0.25, 0.5, 0.75];
/// Passes before the measured ones, and all.
const WARM: u64 = 1;
const PASSES: u64 = 3;
/// The largest error that counts as right, and the part that must be right.
const NEAR: f64 = 0.1;
const RIGHT: f64 = 0.9;

/// Runs a job with a part of its dataset in the cache. Returns its rate in bytes a second and its estimate.
async fn play(rig: &Rig, compute: f64, part: f64) -> (f64, BenefitEstimate) {
    let origins = rig.origins(&[Some(mib_per_s(LINK))]);
    // The disk keeps some of its bytes for itself, so the second try knows better.
    let mut disk = part * (CHUNKS * CHUNK) as f64;
    for _ in 0..4 {
        let server = rig.serve(&origins, disk as u64, &[]);
        let client = server.client();
        let job = declare(&client, ("predicted", 0), OrderKind::Substitute, BATCH).await;
        let has = cached_part(&job).await;
        if (has / part - 1.0).abs() > 0.01 {
            disk *= part / has;
            continue;
        }
        let training = Training::new(compute);
        Arc::clone(&training).run(job.clone(), 0..WARM).await;
        let fared = training.run(job.clone(), WARM..PASSES).await;
        let benefit = job.current().await.expect("the job").benefit.expect("a new server");
        let estimate = benefit.estimate.unwrap_or_else(|| panic!("{:?}", benefit.not_measured));
        return (fared.rate(), estimate);
    }
    panic!("no disk has room for {part} of the dataset");
}

/// Returns the part of the dataset that the job's sweep may keep.
async fn cached_part(job: &JobHandle) -> f64 {
    // The disk is divided anew when the sweep begins.
    sleep(Duration::from_secs(1)).await;
    let sweep = job.current().await.expect("the job").sweep.expect("its order has one");
    sweep.capacity_bytes as f64 / sweep.total_bytes as f64
}

/// Returns whether a target is missed.
pub async fn run() -> bool {
    let rig = Rig::new(&[CHUNKS]);
    println!(
        "| computes, of the link | cached | predicted for | predicted, MiB/s | was, MiB/s | error | sure |"
    );
    println!("|---|---|---|---|---|---|---|");
    let (mut right, mut sure) = (0, 0);
    // What the accelerators compute, in parts of the link.
    let compute: String = arg("compute", "0.8,1.5,3".to_owned());
    for times in compute.split(',').map(|times| times.parse::<f64>().expect("--compute has numbers")) {
        let compute = mib_per_s(LINK) * times;
        let mut was = Vec::new();
        for part in SEEN {
            was.push((part, play(&rig, compute, part).await.0));
        }
        for part in FROM {
            let (_, estimate) = play(&rig, compute, part).await;
            for guess in &estimate.what_if {
                let of = guess.cached / estimate.cached * part;
                let Some((at, rate)) = was.iter().find(|(at, _)| (at / of - 1.0).abs() < 0.01) else {
                    continue;
                };
                let predicted = guess.rate * SAMPLE as f64;
                let error = predicted / rate - 1.0;
                println!(
                    "| {times} | {:.3} | {at} | {:.2} | {:.2} | {:+.1} % | {} |",
                    estimate.cached,
                    predicted / mib_per_s(1.0),
                    rate / mib_per_s(1.0),
                    error * 100.0,
                    estimate.is_sure
                );
                sure += u32::from(estimate.is_sure);
                right += u32::from(estimate.is_sure && error.abs() <= NEAR);
            }
        }
    }
    judge("right within 10 %, of the sure predictions", f64::from(right) / f64::from(sure), RIGHT)
        || sure == 0
}
