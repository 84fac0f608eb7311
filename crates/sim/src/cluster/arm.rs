//! The ways to divide a cache that are compared.

use clap::ValueEnum;
use fletch_core::capacity::{Hysteresis, JobDemand, Problem, ProblemError, job_rates};
use serde::Serialize;

/// Divisions that one decision evaluates.
const EVALUATIONS: usize = 800;
/// Rounds in which capacity that full datasets leave is given to the others.
const ROUNDS: usize = 20;

/// A way to divide a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Arm {
    /// One cache that evicts the least recently used; readers in random orders of their own
    Lru,
    /// Equal shares of the datasets that jobs read
    Equal,
    /// Shares in proportion to what the jobs of a dataset can read
    Demand,
    /// Whole datasets, the largest gain per byte first, as Quiver does
    Quiver,
    /// The server's decisions
    Fletch,
}

impl Arm {
    /// All of them, in the order of tables.
    pub const ALL: [Arm; 5] = [Arm::Lru, Arm::Equal, Arm::Demand, Arm::Quiver, Arm::Fletch];
}

/// Divides the capacity in proportion to weights. Nobody gets more than its dataset.
fn in_proportion(problem: &Problem, weights: &[f64]) -> Vec<f64> {
    let mut shares = vec![0.0; problem.datasets.len()];
    let mut left = problem.capacity;
    for _ in 0..ROUNDS {
        let open: Vec<usize> = (0..shares.len()).filter(|&d| shares[d] < problem.datasets[d].size).collect();
        let weight: f64 = open.iter().map(|&d| weights[d]).sum();
        if weight <= 0.0 {
            break;
        }
        let now = left;
        for d in open {
            let bytes = (now * weights[d] / weight).min(problem.datasets[d].size - shares[d]);
            shares[d] += bytes;
            left -= bytes;
        }
    }
    shares
}

/// Returns the sum over the jobs of each dataset.
fn by_dataset(problem: &Problem, of: impl Fn(usize, &JobDemand) -> f64) -> Vec<f64> {
    let mut sums = vec![0.0; problem.datasets.len()];
    for (i, job) in problem.jobs.iter().enumerate() {
        sums[job.dataset] += of(i, job);
    }
    sums
}

/// Divides as Quiver does (Kumar and Sivathanu, FAST 2020): the benefit of a dataset's jobs per byte, the
/// speed with all hits over the speed with none, the best first.
fn quiver(problem: &Problem) -> Vec<f64> {
    let none = job_rates(problem, &vec![0.0; problem.datasets.len()]);
    let benefit = by_dataset(problem, |i, job| job.most_rate / none[i] - 1.0);
    let per_byte = |d: usize| benefit[d] / problem.datasets[d].size;
    let mut order: Vec<usize> = (0..benefit.len()).collect();
    order.sort_by(|&a, &b| per_byte(b).total_cmp(&per_byte(a)));
    let mut shares = vec![0.0; benefit.len()];
    let mut left = problem.capacity;
    // A job that never waits has a benefit of 0, up to rounding.
    for d in order.into_iter().filter(|&d| benefit[d] > 1e-6) {
        shares[d] = left.min(problem.datasets[d].size);
        left -= shares[d];
    }
    shares
}

/// Decides about the division again and again.
#[derive(Debug)]
pub(super) struct Divider {
    arm: Arm,
    hysteresis: Hysteresis,
}

impl Divider {
    pub fn new(arm: Arm) -> Self {
        Divider { arm, hysteresis: Hysteresis::default() }
    }

    /// Returns the next division of the datasets that jobs read.
    pub fn divide(
        &mut self,
        observed: &Problem,
        previous: Option<&[f64]>,
        seconds: f64,
    ) -> Result<Vec<f64>, ProblemError> {
        Ok(match self.arm {
            Arm::Lru => vec![0.0; observed.datasets.len()],
            Arm::Equal => in_proportion(observed, &vec![1.0; observed.datasets.len()]),
            Arm::Demand => in_proportion(observed, &by_dataset(observed, |_, job| job.most_rate)),
            Arm::Quiver => quiver(observed),
            Arm::Fletch => self.hysteresis.decide(observed, previous, seconds, EVALUATIONS)?.shares,
        })
    }
}
