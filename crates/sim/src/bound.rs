//! The packing bound: the samples that any policy at all must fetch.
//!
//! Take a time interval that lies within one epoch of job j. The job gets d distinct samples in it, of which
//! at most W were cached at its start, so at least d − W are fetched in it. Disjoint intervals add up, and a
//! dynamic programme over epoch boundaries finds the heaviest packing. Where plans differ, another job's
//! samples count as far as they cannot be the same.

use crate::{Case, statistics::Statistics};

/// Returns the number of samples that any policy must fetch in the measured time.
pub(crate) fn packing(stats: &Statistics, case: &Case) -> f64 {
    let n = case.samples() as f64;
    let mut at = vec![case.warm, case.end];
    for j in &stats.jobs {
        for &(a, z) in j.epochs.iter().filter(|e| e.1 > e.0) {
            at.push(j.times[a]);
            at.push(j.times[z - 1] + 1e-9);
        }
    }
    at.retain(|&t| t >= case.warm && t <= case.end);
    at.sort_by(f64::total_cmp);
    at.dedup_by(|x, y| *x - *y < 1e-7);
    let k = stats.jobs.len();
    let capacity = case.capacity() as f64;
    let index: Vec<Vec<usize>> = stats
        .jobs
        .iter()
        .map(|j| at.iter().map(|&t| j.times.partition_point(|&x| x < t)).collect())
        .collect();
    let masked = case.jobs.iter().any(|s| s.subset.is_some());
    let overlap = |a: usize, q: usize| {
        let (x, y) = (&stats.jobs[a].plan, &stats.jobs[q].plan);
        x.iter_in(0, x.len()).filter(|&s| y.get(s)).count() as f64
    };
    let over: Vec<Vec<f64>> =
        (0..k).map(|a| (0..k).map(|q| if masked { overlap(a, q) } else { n }).collect()).collect();
    // Distinct samples that j surely got between boundaries h and i: the longest piece in one epoch.
    let distinct = |j: usize, h: usize, i: usize| -> f64 {
        let (x, y) = (index[j][h], index[j][i]);
        let epochs = &stats.jobs[j].epochs;
        let first = epochs.partition_point(|e| e.1 <= x);
        let piece = |e: &(usize, usize)| y.min(e.1).saturating_sub(x.max(e.0));
        epochs[first..].iter().take_while(|e| e.0 < y).map(piece).max().unwrap_or(0) as f64
    };
    let slowest = case.jobs.iter().map(|s| s.rate).fold(f64::MAX, f64::min);
    let mut best = vec![0f64; at.len()];
    for i in 1..at.len() {
        best[i] = best[i - 1];
        for h in (0..i).rev() {
            let d: Vec<f64> = (0..k).map(|j| distinct(j, h, i)).collect();
            let mut v = d.iter().copied().fold(0.0, f64::max);
            if masked {
                for a in 0..k {
                    for q in (0..k).filter(|&q| q != a) {
                        v = v.max(d[a] + (d[q] - over[a][q]).max(0.0));
                    }
                }
            }
            best[i] = best[i].max(best[h] + v - capacity);
            if at[i] - at[h] > 1.01 * n / slowest {
                break;
            }
        }
    }
    best.last().copied().unwrap_or(0.0)
}

/// Returns the simple form of the bound, (1 − c) · fastest / Σ rates. Holds for constant rates and full
/// plans.
pub(crate) fn simple(case: &Case) -> f64 {
    let sum: f64 = case.jobs.iter().map(|j| j.rate).sum();
    let fastest = case.jobs.iter().map(|j| j.rate).fold(0.0, f64::max);
    (1.0 - case.capacity() as f64 / case.samples() as f64) * fastest / sum
}
