//! `bench-decision [JOBS] [DATASETS]`
//!
//! Measures how long a decision about a cache with many jobs and datasets takes.
//!
//! The problem is made from a fixed seed: jobs of 0.03 to 3 GB/s, datasets of 20 GB to 2 TB, a tenth of their
//! bytes as cache, ten origins. Each further decision has rates that differ a little.
//! By default there are 1,000 jobs and 200 datasets.

use fletch_core::capacity::{DatasetDemand, Hysteresis, JobDemand, Link, Problem};
use std::time::Instant;

const LINKS: u64 = 10;
const DECISIONS: usize = 20;
/// The divisions that the server evaluates in a decision.
const EVALUATIONS: usize = 1500;

/// A number from 0 to 1 for each `n`, spread by the golden ratio.
fn spread(n: u64) -> f64 {
    (n as f64 * 0.618_033_988_749_894_9).fract()
}

/// A number between two bounds, evenly by its logarithm.
fn between(n: u64, least: f64, most: f64) -> f64 {
    least * (most / least).powf(spread(n))
}

fn problem(jobs: u64, datasets: u64) -> Problem {
    let links = (0..LINKS).map(|id| Link { id, bandwidth: between(id + 7, 0.3, 3.0) }).collect();
    let index = |n: u64| usize::try_from(n).unwrap_or(0);
    let datasets: Vec<_> = (0..datasets)
        .map(|id| {
            let size = between(id + 31, 20.0, 2000.0);
            DatasetDemand { id, size, link: index(id % LINKS), window: 0.002 * size, pinned: 0.0 }
        })
        .collect();
    let n = datasets.len() as u64;
    let jobs = (0..jobs)
        .map(|id| {
            let most_rate = between(id + 101, 0.03, 3.0);
            JobDemand { id, dataset: index(id % n), most_rate, weight: 1.0, strict: false }
        })
        .collect();
    let capacity = datasets.iter().map(|d| d.size).sum::<f64>() / 10.0;
    Problem { capacity, links, datasets, jobs, limits: Vec::new() }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1).map(|a| a.parse::<u64>());
    let (jobs, datasets) = (args.next().unwrap_or(Ok(1000))?, args.next().unwrap_or(Ok(200))?);
    let mut problem = problem(jobs, datasets);
    let (mut hysteresis, mut shares, mut times) = (Hysteresis::default(), None::<Vec<f64>>, Vec::new());
    for round in 0..DECISIONS as u64 {
        for job in &mut problem.jobs {
            job.most_rate *= 0.98 + 0.04 * spread(job.id * 13 + round * 7);
        }
        let begun = Instant::now();
        let decision = hysteresis.decide(&problem, shares.as_deref(), 10.0, EVALUATIONS)?;
        times.push(begun.elapsed());
        shares = Some(decision.shares);
    }
    times.sort();
    println!(
        "{jobs} jobs, {datasets} datasets: a decision takes {:.1?} (median of {DECISIONS}; {:.1?} to {:.1?})",
        times[DECISIONS / 2],
        times[0],
        times[DECISIONS - 1]
    );
    Ok(())
}
