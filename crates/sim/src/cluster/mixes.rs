//! Random clusters: named mixes of jobs, each with a seed.

use super::{Cluster, Dataset, Job};
use crate::rng::Rng;

const HOUR: f64 = 3600.0;
/// The time in which the jobs of a mix start, in hours.
const STARTS: f64 = 12.0;

/// A kind of cluster.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mix {
    /// Its name in tables.
    pub name: &'static str,
    /// Jobs, beside the scans.
    jobs: usize,
    datasets: usize,
    /// The cache, as a part of the datasets' sizes.
    cache: f64,
    /// The bandwidth of the link, in GB/s.
    link: f64,
    /// Jobs that read a dataset of their own once, and the size of each of these datasets in GB.
    scans: (usize, f64),
}

/// The mixes that are simulated.
pub const MIXES: [Mix; 7] = {
    let base = Mix { name: "", jobs: 36, datasets: 12, cache: 0.2, link: 0.6, scans: (1, 3000.0) };
    [
        Mix { name: "scarce link, cache 20 %, 12 datasets", ..base },
        Mix { name: "cache 3 %", cache: 0.03, ..base },
        Mix { name: "3 datasets", datasets: 3, ..base },
        Mix { name: "24 jobs, and 24 that read 200 GB once", jobs: 24, scans: (24, 200.0), ..base },
        Mix { name: "30 datasets, hardly shared", jobs: 30, datasets: 30, ..base },
        Mix { name: "cache 50 %", cache: 0.5, ..base },
        Mix { name: "ample link", link: 8.0, ..base },
    ]
};

impl Mix {
    /// Returns a cluster of this kind.
    ///
    /// Of the jobs, 35 % compute for long; the others can read more than their part of the link. The
    /// popularity of datasets follows Zipf's law. Scans start over 8 hours.
    #[must_use]
    pub fn cluster(&self, seed: u64) -> Cluster {
        let mut rng = Rng::new(seed);
        let window = |size: f64| (0.002 * size).max(0.0625);
        let mut datasets: Vec<Dataset> = (0..self.datasets)
            .map(|_| {
                let size = rng.log_between(50.0, 1000.0);
                Dataset { size, window: window(size) }
            })
            .collect();
        let cache = self.cache * datasets.iter().map(|d| d.size).sum::<f64>();
        let popularity: Vec<f64> = (1..=self.datasets).map(|rank| 1.0 / rank as f64).collect();
        let mut jobs: Vec<Job> = (0..self.jobs)
            .map(|_| {
                let mut at = rng.unit() * popularity.iter().sum::<f64>();
                let drawn = popularity.iter().position(|p| {
                    at -= p;
                    at <= 0.0
                });
                let dataset = drawn.unwrap_or(0);
                let computes = rng.unit() < 0.35;
                let most_rate =
                    if computes { rng.log_between(0.03, 0.15) } else { rng.log_between(0.2, 1.2) };
                let work =
                    (most_rate * rng.log_between(0.5 * HOUR, 6.0 * HOUR)).max(2.0 * datasets[dataset].size);
                let (start, strict) = (rng.unit() * STARTS * HOUR, rng.unit() < 0.15);
                Job { start, dataset, most_rate, work, strict }
            })
            .collect();
        let (scans, size) = self.scans;
        for i in 0..scans {
            let start = (2.0 + 8.0 * i as f64 / scans as f64) * HOUR;
            jobs.push(Job { start, dataset: datasets.len(), most_rate: 0.8, work: size, strict: false });
            datasets.push(Dataset { size, window: 6.0 });
        }
        jobs.sort_by(|a, b| a.start.total_cmp(&b.start));
        Cluster { cache, link: self.link, datasets, jobs }
    }
}
