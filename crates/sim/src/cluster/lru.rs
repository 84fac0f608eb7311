//! The hits of an LRU cache whose readers each read random permutations: the approximation of Che, Tung and
//! Wang ("Hierarchical Web caching systems", 2002). A byte stays for a fixed time after its last use.

use fletch_core::capacity::{DatasetDemand, JobDemand, Problem, job_rates};

/// Rounds until rates and hits agree, each going half of the way.
const ROUNDS: usize = 30;
/// Bisections of the time that a byte stays.
const BISECTIONS: usize = 60;
/// More than the time that any byte stays, in seconds.
const TIME_MAX: f64 = 1e9;

/// Returns the part of a dataset that a reader touched in its last `passes` passes.
fn touched(passes: f64) -> f64 {
    match passes {
        p if p < 1.0 => p - p.powi(3) / 6.0,
        p if p < 2.0 => 1.0 - (2.0 - p).powi(3) / 6.0,
        _ => 1.0,
    }
}

/// Returns the part of a reader's bytes that it read itself in its last `passes` passes.
fn repeated(passes: f64) -> f64 {
    match passes {
        p if p < 1.0 => p * p / 2.0,
        p if p < 2.0 => 1.0 - (2.0 - p).powi(2) / 2.0,
        _ => 1.0,
    }
}

/// Returns the part of each job's bytes that an LRU cache has.
pub(super) fn hits(problem: &Problem) -> Vec<f64> {
    let jobs = &problem.jobs;
    let mut rates: Vec<f64> = jobs.iter().map(|j| j.most_rate).collect();
    let mut hits = vec![0.0; jobs.len()];
    for _ in 0..ROUNDS {
        let passes = |i: usize, time: f64| time * rates[i] / problem.datasets[jobs[i].dataset].size;
        let held = |time: f64| -> f64 {
            let of = |d: usize| {
                let readers = (0..jobs.len()).filter(|&i| jobs[i].dataset == d);
                1.0 - readers.map(|i| 1.0 - touched(passes(i, time))).product::<f64>()
            };
            problem.datasets.iter().enumerate().map(|(d, dataset)| dataset.size * of(d)).sum()
        };
        let (mut low, mut high) = (0.0, TIME_MAX);
        for _ in 0..BISECTIONS {
            let time = (low + high) / 2.0;
            if held(time) > problem.capacity { high = time } else { low = time }
        }
        for (i, job) in jobs.iter().enumerate() {
            let readers = (0..jobs.len()).filter(|&k| jobs[k].dataset == job.dataset);
            let part = |k: usize| if k == i { repeated(passes(k, low)) } else { touched(passes(k, low)) };
            hits[i] = 1.0 - readers.map(|k| 1.0 - part(k)).product::<f64>();
        }
        for (rate, new) in rates.iter_mut().zip(rates_apart(problem, &hits)) {
            *rate = f64::midpoint(*rate, new);
        }
    }
    hits
}

/// Returns the rates of jobs that each fetch for themselves what they do not hit.
pub(super) fn rates_apart(problem: &Problem, hits: &[f64]) -> Vec<f64> {
    let dataset = |(i, job): (usize, &JobDemand)| {
        let shared = &problem.datasets[job.dataset];
        DatasetDemand { id: i as u64, window: 0.0, ..shared.clone() }
    };
    let job = |(dataset, job): (usize, &JobDemand)| JobDemand { dataset, ..job.clone() };
    let apart = Problem {
        datasets: problem.jobs.iter().enumerate().map(dataset).collect(),
        jobs: problem.jobs.iter().enumerate().map(job).collect(),
        ..problem.clone()
    };
    let shares: Vec<f64> = hits.iter().zip(&apart.datasets).map(|(hit, d)| hit * d.size).collect();
    job_rates(&apart, &shares)
}
