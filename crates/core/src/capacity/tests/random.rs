//! Random problems, from a seed.

use crate::{
    capacity::tests::rng::Rng,
    capacity::{DatasetDemand, JobDemand, Limit, Link, Problem},
};

/// The properties of random problems.
#[derive(Debug, Clone, Copy)]
pub struct Mix {
    pub datasets: usize,
    /// A dataset has 1 to this many jobs.
    pub jobs_max: usize,
    /// Tenants; each dataset belongs to one or two of them.
    pub tenants: usize,
}

/// Returns a problem. Bytes are in GB: rates of .03 to 3 GB/s, datasets of 20 GB to 2 TB.
pub fn problem(rng: &mut Rng, mix: Mix) -> Problem {
    let links: Vec<Link> = (0..1 + rng.below(3))
        .map(|id| Link { id: id as u64, bandwidth: rng.log_between(0.3, 3.0) })
        .collect();
    let datasets: Vec<DatasetDemand> = (0..mix.datasets)
        .map(|_| {
            let size = rng.log_between(20.0, 2000.0);
            let pinned = if rng.unit() < 0.1 { size * rng.between(0.0, 0.3) } else { 0.0 };
            let (id, link) = (rng.word(), rng.below(links.len()));
            DatasetDemand { id, size, link, window: (0.002 * size).max(0.0625), pinned }
        })
        .collect();
    let mut jobs = Vec::new();
    for dataset in 0..mix.datasets {
        for _ in 0..1 + rng.below(mix.jobs_max) {
            let (id, most_rate) = (rng.word(), rng.log_between(0.03, 3.0));
            let weight = [1.0, 1.0, 1.0, 2.0, 4.0][rng.below(5)];
            jobs.push(JobDemand { id, dataset, most_rate, weight, strict: rng.unit() < 0.2 });
        }
    }
    let capacity = datasets.iter().map(|d| d.size).sum::<f64>() * rng.between(0.05, 0.8);
    let of_dataset: Vec<(usize, usize)> =
        datasets.iter().map(|_| (rng.below(mix.tenants.max(1)), rng.below(mix.tenants.max(1)))).collect();
    let limits = (0..mix.tenants)
        .map(|tenant| Limit {
            id: tenant as u64,
            datasets: (0..mix.datasets)
                .filter(|&d| of_dataset[d].0 == tenant || of_dataset[d].1 == tenant)
                .collect(),
            least: capacity * rng.between(0.0, 0.6 / mix.tenants as f64),
            most: capacity * rng.between(0.8, 2.4) / mix.tenants as f64,
        })
        .collect();
    Problem { capacity, links, datasets, jobs, limits }
}

/// Returns the same problem with every list the other way round.
pub fn reversed(problem: &Problem) -> Problem {
    let mut p = problem.clone();
    let (datasets, links) = (p.datasets.len(), p.links.len());
    p.datasets.reverse();
    p.links.reverse();
    p.jobs.reverse();
    p.limits.reverse();
    for d in &mut p.datasets {
        d.link = links - 1 - d.link;
    }
    for j in &mut p.jobs {
        j.dataset = datasets - 1 - j.dataset;
    }
    for d in p.limits.iter_mut().flat_map(|l| &mut l.datasets) {
        *d = datasets - 1 - *d;
    }
    p
}
