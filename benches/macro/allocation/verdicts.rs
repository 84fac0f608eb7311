//! A bottleneck that moves without notice: between the accelerator, the worker that prepares batches, the
//! origin, the server's disk, and the server itself. The server's verdict is asked all the time.

use super::{
    judge,
    rig::{BATCH, CHUNK, Rig, Served, mib_per_s},
    throttle::Throttle,
    training::{Training, declare},
};
use fletch_api::{OrderKind, benefit::BenefitVerdict};
use std::{sync::Arc, time::Duration};
use tokio::time::sleep;
use tokio_util::task::TaskTracker;

const CHUNKS: usize = 400;
/// What the link carries and the slower of accelerator and worker does, in MiB/s, and how much faster the
/// others are.
const SLOW: f64 = 16.0;
const FASTER: f64 = 4.0;
/// Steps of a phase.
const STEPS: u64 = 500;
/// Within as many steps the verdict must be right, the pipeline's depth apart.
const WITHIN: f64 = 128.0;

use BenefitVerdict::{Compute, Disk, Origin, Preparation, Queue};
/// Each bottleneck is followed by each other one.
const PHASES: [BenefitVerdict; 7] = [Compute, Origin, Preparation, Compute, Preparation, Origin, Compute];
/// The same with a disk that has the whole dataset, and which the server's page cache does not hide.
const DISK_PHASES: [BenefitVerdict; 6] = [Compute, Disk, Preparation, Disk, Compute, Preparation];
const DISK_CHUNKS: usize = 800;
const WITH_PAGE_CACHE: u64 = 112 << 20;
/// The same with a server that has the whole dataset in memory, and in some phases little CPU time.
const QUEUE_PHASES: [BenefitVerdict; 6] = [Compute, Queue, Preparation, Queue, Compute, Preparation];
const QUEUE_CHUNKS: usize = 64;
/// The part of a core that a slow server has.
const FEW_CORES: f64 = 0.1;

/// Plays the phases of the tiers that are named in `tiers`, a list with commas. Returns whether a target is
/// missed.
pub async fn run(tiers: &str) -> bool {
    let mut missed = false;
    for tier in tiers.split(',') {
        missed |= match tier {
            "origin" => run_origin().await,
            "disk" => run_throttled("disk", (DISK_CHUNKS, &DISK_PHASES)).await,
            "queue" => run_throttled("memory", (QUEUE_CHUNKS, &QUEUE_PHASES)).await,
            _ => {
                eprintln!("--tiers: there is no tier {tier}; see --help");
                std::process::exit(2);
            }
        };
    }
    missed
}

/// Follows the verdicts of a job that reads most of its dataset from the origin.
async fn run_origin() -> bool {
    let rig = Rig::new(&[CHUNKS]);
    let (slow, fast) = (mib_per_s(SLOW), mib_per_s(SLOW * FASTER));
    let origins = rig.origins(&[Some(slow)]);
    // A fifth of the dataset is cached, so that the origin is asked for most samples.
    let server = rig.serve(&origins, (CHUNKS * CHUNK / 5) as u64, &[]);
    follow(&server, &PHASES, |phase| {
        origins[0].set_bandwidth(Some(if phase == Origin { slow } else { fast } as u64));
    })
    .await
}

/// Follows the verdicts of a job whose whole dataset is in `tier` of a server in a throttle.
async fn run_throttled(tier: &str, (chunks, phases): (usize, &[BenefitVerdict])) -> bool {
    let rig = Rig::new(&[chunks]);
    let origins = rig.origins(&[None]);
    let throttle = match Throttle::new(&rig.at(""), WITH_PAGE_CACHE) {
        Ok(throttle) => throttle,
        Err(why) => {
            println!("\nno phases of the {tier}: {why}");
            return false;
        }
    };
    let server = rig.serve_throttled(&throttle, &origins, (chunks * CHUNK * 2) as u64);
    let job = declare(&server.client(), ("fills", 0), OrderKind::Substitute, BATCH).await;
    Training::new(mib_per_s(SLOW * FASTER * FASTER)).run(job, 0..1).await;
    println!("\nThe server's {tier} has the whole dataset.\n");
    let missed = follow(&server, phases, |phase| {
        throttle.set_disk((phase == Disk).then(|| mib_per_s(SLOW)));
        throttle.set_cores((phase == Queue).then_some(FEW_CORES));
    })
    .await;
    // What the server still has to do, and its end, need not take long.
    throttle.set_cores(None);
    missed
}

/// Moves the bottleneck of a job from phase to phase. Returns whether a verdict was late or wrong.
async fn follow(server: &Served, phases: &[BenefitVerdict], set: impl Fn(BenefitVerdict)) -> bool {
    let (slow, fast) = (mib_per_s(SLOW), mib_per_s(SLOW * FASTER));
    let job = declare(&server.client(), ("moves", 0), OrderKind::Substitute, BATCH).await;
    let (training, tasks) = (Training::new(slow), TaskTracker::new());
    let running = tasks.spawn(Arc::clone(&training).run(job.clone(), 0..u64::MAX));
    println!("| phase | right after, steps | wrong verdicts later |");
    println!("|---|---|---|");
    let (mut slowest, mut wrong) = (0.0_f64, 0_u32);
    for &phase in phases {
        set(phase);
        let of = |bottleneck| if phase == bottleneck { slow } else { fast };
        training.set_speeds(of(Compute), of(Preparation));
        let begun = training.steps();
        // When the verdict became right, and how often it was wrong after the time that it has.
        let (mut right_at, mut later) = (None, Vec::new());
        while training.steps() - begun < STEPS {
            sleep(Duration::from_millis(20)).await;
            let shown = job.current().await.expect("the job").benefit.expect("a new server");
            let after = training.steps() - begun;
            let verdict = shown.estimate.map(|e| e.verdict);
            if verdict != Some(phase) {
                right_at = None;
                if after as f64 > WITHIN {
                    later.push((after, verdict));
                }
            } else if right_at.is_none() {
                right_at = Some(after);
            }
        }
        let right = right_at.map_or(f64::INFINITY, |at| at as f64);
        println!("| {phase:?} | {right} | {} |", later.len());
        if !later.is_empty() {
            eprintln!("{phase:?}: {later:?}");
        }
        slowest = slowest.max(right);
        wrong += u32::try_from(later.len()).unwrap_or(u32::MAX);
    }
    training.stop();
    running.await.expect("the job");
    let in_time = judge("steps to spare until the verdict was right", WITHIN - slowest, 0.0);
    judge("wrong verdicts after that (negative)", -f64::from(wrong), 0.0) || in_time
}
