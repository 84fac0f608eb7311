//! The simulation: a minute a step, a decision each five minutes and when a job comes or goes.

use super::{Arm, Cluster, arm::Divider, lru};
use crate::rng::Rng;
use fletch_core::capacity::{
    DatasetDemand, FIRST_PASS_WEIGHT, JobDemand, Link, Problem, ProblemError, job_rates, origin_rates,
};
use serde::Serialize;

/// Seconds of a step.
const STEP: f64 = 60.0;
/// Steps from one decision to the next.
const DECISION_STEPS: u64 = 5;
/// The standard deviation of an estimate's error.
const ERROR: f64 = 0.05;
/// The part of an estimate's error that stays from one decision to the next.
const MEMORY: f64 = 0.9;
/// The time after which a simulation is given up, in seconds.
const TIME_MAX: f64 = 4e6;

/// What became of the jobs of a cluster.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// The time until the last job ended, in hours.
    pub makespan_hours: f64,
    /// The mean over jobs of time / time without waiting.
    pub slowdown: f64,
    /// The 95th percentile of the same.
    pub slowdown_p95: f64,
    /// Jain's index of the jobs' speeds; 1 if all are slowed down alike.
    pub fairness: f64,
    /// The time that the jobs compute, as a part of the time that they hold their accelerators.
    pub gpu_use: f64,
    /// Origin bytes per delivered byte.
    pub origin: f64,
    /// The part of the cache that is reassigned in an hour.
    pub reassigned: f64,
}

impl Outcome {
    /// Returns the mean of outcomes.
    #[must_use]
    pub fn mean(outcomes: &[Outcome]) -> Outcome {
        let n = outcomes.len() as f64;
        let mean = |of: fn(&Outcome) -> f64| outcomes.iter().map(of).sum::<f64>() / n;
        Outcome {
            makespan_hours: mean(|o| o.makespan_hours),
            slowdown: mean(|o| o.slowdown),
            slowdown_p95: mean(|o| o.slowdown_p95),
            fairness: mean(|o| o.fairness),
            gpu_use: mean(|o| o.gpu_use),
            origin: mean(|o| o.origin),
            reassigned: mean(|o| o.reassigned),
        }
    }
}

/// A job that runs.
#[derive(Debug)]
struct Running {
    job: usize,
    /// What it has read, in GB.
    done: f64,
    /// What it has read of its present pass.
    pass: f64,
    /// The error of its estimate, in standard deviations.
    error: f64,
    /// What the cache had of its dataset when it started.
    found: f64,
}

/// The state of a simulation.
struct State<'a> {
    cluster: &'a Cluster,
    arm: Arm,
    running: Vec<Running>,
    /// The bytes of each dataset in the cache.
    cached: Vec<f64>,
    /// Of these, the bytes that help a job that is alone on its dataset.
    useful: Vec<f64>,
    /// The share of each dataset.
    share: Vec<f64>,
}

impl State<'_> {
    /// Returns the datasets that jobs read.
    fn active(&self) -> Vec<usize> {
        (0..self.cached.len()).filter(|&d| self.readers(d) > 0).collect()
    }

    fn readers(&self, dataset: usize) -> usize {
        self.running.iter().filter(|r| self.cluster.jobs[r.job].dataset == dataset).count()
    }

    /// Whether a job is alone on its dataset and reads it for the first time.
    fn is_first_pass(&self, r: &Running) -> bool {
        let dataset = self.cluster.jobs[r.job].dataset;
        self.readers(dataset) == 1 && r.done < self.cluster.datasets[dataset].size
    }

    /// Returns the problem of the active datasets: the true one, or the one that is `observed`.
    fn problem(&self, active: &[usize], observed: bool) -> Problem {
        let job = |r: &Running| {
            let job = &self.cluster.jobs[r.job];
            let error = if observed { (1.0 + ERROR * r.error).max(0.5) } else { 1.0 };
            // Nobody knows yet whether a lone job comes back to what it reads.
            let doubtful = observed && self.arm == Arm::Fletch && self.is_first_pass(r);
            let weight = if doubtful { FIRST_PASS_WEIGHT } else { 1.0 };
            let dataset = active.iter().position(|&d| d == job.dataset).unwrap_or(0);
            let (id, most_rate) = (r.job as u64, job.most_rate * error);
            JobDemand { id, dataset, most_rate, weight, strict: job.strict }
        };
        let dataset = |&d: &usize| {
            let of = &self.cluster.datasets[d];
            DatasetDemand { id: d as u64, size: of.size, link: 0, window: of.window, pinned: 0.0 }
        };
        Problem {
            capacity: self.cluster.cache,
            links: vec![Link { id: 0, bandwidth: self.cluster.link }],
            datasets: active.iter().map(dataset).collect(),
            jobs: self.running.iter().map(job).collect(),
            limits: Vec::new(),
        }
    }

    /// Applies a division of the active datasets. Returns the bytes that it takes away.
    fn apply(&mut self, active: &[usize], shares: &[f64]) -> f64 {
        let mut new = vec![0.0; self.share.len()];
        for (&d, &share) in active.iter().zip(shares) {
            new[d] = share;
        }
        let moved = self.share.iter().zip(&new).map(|(old, new)| (old - new).max(0.0)).sum();
        self.share = new;
        // Idle datasets keep what nobody else wants.
        let is_active = |d: &usize| active.contains(d);
        let idle: f64 = (0..self.cached.len()).filter(|d| !is_active(d)).map(|d| self.cached[d]).sum();
        let room = (self.cluster.cache - shares.iter().sum::<f64>()).max(0.0);
        for d in 0..self.cached.len() {
            let most = match (is_active(&d), idle > room) {
                (true, _) => self.share[d],
                (false, true) => self.cached[d] * room / idle,
                (false, false) => self.cached[d],
            };
            self.cached[d] = self.cached[d].min(most);
        }
        moved
    }

    /// Plays one step. Returns the bytes from the origin and the bytes delivered.
    fn step(&mut self, active: &[usize]) -> (f64, f64) {
        let problem = self.problem(active, false);
        let (rates, fetched) =
            if self.arm == Arm::Lru { self.lru_step(&problem) } else { self.shared_step(active, &problem) };
        let mut delivered = 0.0;
        for (r, rate) in self.running.iter_mut().zip(&rates) {
            let dataset = self.cluster.jobs[r.job].dataset;
            r.done += rate * STEP;
            r.pass += rate * STEP;
            delivered += rate * STEP;
            if r.pass >= self.cluster.datasets[dataset].size {
                r.pass -= self.cluster.datasets[dataset].size;
                self.useful[dataset] = self.cached[dataset];
            }
        }
        (fetched * STEP, delivered)
    }

    /// Returns the rates of jobs over one LRU cache, and what they fetch.
    fn lru_step(&mut self, problem: &Problem) -> (Vec<f64>, f64) {
        // The formula describes a cache in its steady state. What nobody has read yet is not there.
        let known = |r: &Running| {
            let dataset = self.cluster.jobs[r.job].dataset;
            let bytes = if self.is_first_pass(r) { r.found } else { self.cached[dataset] };
            bytes / self.cluster.datasets[dataset].size
        };
        let hits: Vec<f64> =
            lru::hits(problem).iter().zip(&self.running).map(|(hit, r)| hit * known(r)).collect();
        let rates = lru::rates_apart(problem, &hits);
        let mut sum = 0.0;
        for ((r, rate), hit) in self.running.iter().zip(&rates).zip(&hits) {
            let (dataset, fetched) = (self.cluster.jobs[r.job].dataset, rate * (1.0 - hit));
            let size = self.cluster.datasets[dataset].size;
            self.cached[dataset] = (self.cached[dataset] + fetched * STEP).min(size);
            sum += fetched;
        }
        (rates, sum)
    }

    /// Returns the rates of jobs over a divided cache, and what they fetch.
    fn shared_step(&mut self, active: &[usize], problem: &Problem) -> (Vec<f64>, f64) {
        let mut shares = Vec::new();
        for &d in active {
            let several = self.readers(d) > 1;
            self.useful[d] = if several { self.cached[d] } else { self.useful[d].min(self.cached[d]) };
            let window = self.cluster.datasets[d].window;
            // A sweep starts with its window, however little is cached.
            let least = if several && self.share[d] >= window { window } else { 0.0 };
            shares.push(self.useful[d].max(least));
        }
        let fetched = origin_rates(problem, &shares);
        for (&d, fetched) in active.iter().zip(&fetched) {
            let most = self.share[d].max(self.cached[d]);
            self.cached[d] = (self.cached[d] + fetched * STEP).min(most);
        }
        (job_rates(problem, &shares), fetched.iter().sum())
    }
}

/// Plays a cluster under an arm. `seed` is that of the estimates' errors.
///
/// # Errors
/// A cluster whose numbers cannot be used.
pub fn play(cluster: &Cluster, arm: Arm, seed: u64) -> Result<Outcome, ProblemError> {
    let none = vec![0.0; cluster.datasets.len()];
    let mut state =
        State { cluster, arm, running: Vec::new(), cached: none.clone(), useful: none.clone(), share: none };
    let (mut rng, mut divider) = (Rng::new(seed), Divider::new(arm));
    let (mut started, mut now, mut steps, mut decided_at) = (0, 0.0, 0, 0.0);
    let (mut origin, mut delivered, mut moved) = (0.0, 0.0, 0.0);
    let mut ended = vec![f64::NAN; cluster.jobs.len()];
    while (started < cluster.jobs.len() || !state.running.is_empty()) && now < TIME_MAX {
        let before = state.running.len();
        state.running.retain(|r| {
            let is_done = r.done >= cluster.jobs[r.job].work;
            if is_done {
                ended[r.job] = now;
            }
            !is_done
        });
        let mut changed = state.running.len() != before;
        while let Some(job) = cluster.jobs.get(started).filter(|j| j.start <= now) {
            let found = state.cached[job.dataset];
            state.running.push(Running { job: started, done: 0.0, pass: 0.0, error: rng.normal(), found });
            (started, changed) = (started + 1, true);
        }
        if !state.running.is_empty() {
            let active = state.active();
            if (changed || steps % DECISION_STEPS == 0) && arm != Arm::Lru {
                for r in &mut state.running {
                    r.error = MEMORY * r.error + (1.0 - MEMORY * MEMORY).sqrt() * rng.normal();
                }
                let previous: Vec<f64> = active.iter().map(|&d| state.share[d]).collect();
                // A division that leaves most of the cache free is none.
                let in_force = previous.iter().sum::<f64>() >= 0.5 * cluster.cache;
                let previous = in_force.then_some(&previous[..]);
                let shares = divider.divide(&state.problem(&active, true), previous, now - decided_at)?;
                moved += state.apply(&active, &shares);
                decided_at = now;
            }
            let (fetched, read) = state.step(&active);
            origin += fetched;
            delivered += read;
        }
        now += STEP;
        steps += 1;
    }
    let ideal = |job: &super::Job| job.work / job.most_rate;
    let held = |(job, ended): (&super::Job, &f64)| ended - job.start;
    let jobs = || cluster.jobs.iter().zip(&ended);
    let mut slowdowns: Vec<f64> = jobs().map(|j| (held(j) / ideal(j.0)).max(1.0)).collect();
    slowdowns.sort_by(f64::total_cmp);
    let count = slowdowns.len() as f64;
    let speeds = |power: i32| slowdowns.iter().map(|s| s.powi(-power)).sum::<f64>();
    Ok(Outcome {
        makespan_hours: now / 3600.0,
        slowdown: slowdowns.iter().sum::<f64>() / count,
        slowdown_p95: slowdowns[(0.95 * count) as usize],
        fairness: speeds(1).powi(2) / (count * speeds(2)),
        gpu_use: cluster.jobs.iter().map(ideal).sum::<f64>() / jobs().map(held).sum::<f64>(),
        origin: origin / delivered,
        reassigned: moved / cluster.cache / (now / 3600.0),
    })
}
