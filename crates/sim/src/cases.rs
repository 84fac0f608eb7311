//! Named cases: the main rows, odd cases, a grid, and a test of scale.

use crate::{
    case::{Case, JobSpec, Reader, Subset},
    rng::Rng,
};

/// Returns the thirteen main rows, for `units` units of `size` samples.
#[must_use]
pub fn rows(units: usize, size: u32, seed: u64) -> Vec<Case> {
    let e = [1.0; 8];
    let near = [0.97, 0.98, 0.99, 1.0, 1.0, 1.01, 1.02, 1.1];
    let rows: [(&str, f64, bool, &[f64]); 13] = [
        ("1 lone", 0.05, false, &e[..1]),
        ("1 lone", 0.2, false, &e[..1]),
        ("4 equal aligned", 0.05, false, &e[..4]),
        ("4 equal staggered", 0.05, true, &e[..4]),
        ("4 equal staggered", 0.1, true, &e[..4]),
        ("4 equal staggered", 0.2, true, &e[..4]),
        ("8 equal staggered", 0.05, true, &e),
        ("1/1.02/.98/1.05 staggered", 0.05, true, &[1.0, 1.02, 0.98, 1.05]),
        ("1/1/1/2 staggered", 0.1, true, &[1.0, 1.0, 1.0, 2.0]),
        ("1/1.3/2/4", 0.05, false, &[1.0, 1.3, 2.0, 4.0]),
        ("1/1.3/2/4", 0.2, false, &[1.0, 1.3, 2.0, 4.0]),
        ("8 at .97-1.1 staggered", 0.2, true, &near),
        ("1/4", 0.1, false, &[1.0, 4.0]),
    ];
    rows.into_iter()
        .map(|(name, c, stag, rates)| Case::plain(name, units, size, c, stag, rates, seed))
        .collect()
}

/// Returns the odd cases: pauses, joins, leaves, subsets, odd sizes, strict readers.
#[must_use]
pub fn extras() -> Vec<Case> {
    let n = 25_600.0;
    let base = |name: &str, c: f64, rates: &[f64]| Case::plain(name, 800, 32, c, true, rates, 1);
    let part = |whole_units, seed| Some(Subset { part: 0.6, whole_units, seed });
    let mut v = Vec::new();
    let mut add = |mut c: Case, f: &dyn Fn(&mut Case)| {
        f(&mut c);
        v.push(c);
    };
    let four = [1.0; 4];
    add(base("4, one pauses 7% twice", 0.1, &four), &|c| {
        c.jobs[1].pauses = vec![(3.3 * n, 3.37 * n), (5.1 * n, 5.17 * n)];
    });
    add(base("4, one pauses .8 and .5", 0.1, &four), &|c| {
        c.jobs[1].pauses = vec![(3.3 * n, 4.1 * n), (5.1 * n, 5.6 * n)];
    });
    add(base("1/1/2, leader pauses", 0.1, &[1.0, 1.0, 2.0]), &|c| {
        c.jobs[2].pauses = vec![(3.3 * n, 3.8 * n), (5.1 * n, 5.6 * n)];
    });
    add(base("late joins at 3.37, 4.77", 0.1, &four), &|c| {
        (c.jobs[1].start, c.jobs[2].start) = (3.37 * n, 4.77 * n);
    });
    add(base("leaves at 3.37, 4.77", 0.1, &four), &|c| {
        (c.jobs[1].end, c.jobs[2].end) = (Some(3.37 * n), Some(4.77 * n));
    });
    add(base("2 x 60% of samples", 0.1, &[1.0, 1.0]), &|c| {
        (c.jobs[0].subset, c.jobs[1].subset) = (part(false, 1), part(false, 2));
    });
    add(base("2 x 60% of units", 0.1, &[1.0, 1.0]), &|c| {
        (c.jobs[0].subset, c.jobs[1].subset) = (part(true, 1), part(true, 2));
    });
    add(base("60% samples, 60% units, all", 0.2, &[1.0; 3]), &|c| {
        (c.jobs[0].subset, c.jobs[1].subset) = (part(false, 1), part(true, 2));
    });
    let sizes = |c: &mut Case| {
        let mut r = Rng::new(5);
        let size = |r: &mut Rng| (8.0 * (1.0 / (1.0 - 0.97 * r.unit())).powf(0.8)).min(128.0) as u32;
        c.units = (0..800).map(|_| size(&mut r)).collect();
    };
    add(base("sizes 8..128", 0.1, &four), &|c| {
        sizes(c);
        let m = c.samples() as f64;
        (c.warm, c.end) = (2.0 * m, 8.0 * m);
        for (j, job) in (0u32..).zip(&mut c.jobs) {
            job.start = f64::from(j) / 4.0 * m;
        }
    });
    add(base("sizes 8..128, 5% speeds", 0.1, &[1.0, 1.02, 0.98, 1.05]), &sizes);
    add(base("2 + a strict reader", 0.2, &[1.0; 3]), &|c| c.jobs[2].reader = Reader::Strict);
    add(base("1 + two strict readers", 0.2, &[1.0; 3]), &|c| {
        (c.jobs[1].reader, c.jobs[2].reader) = (Reader::Strict, Reader::Strict);
    });
    let mixed = [1.0, 1.3, 2.0, 4.0];
    add(Case::plain("units of 8, 1/1.3/2/4", 3200, 8, 0.1, false, &mixed, 1), &|_| {});
    add(Case::plain("units of 128, 1/1.3/2/4", 200, 128, 0.1, false, &mixed, 1), &|_| {});
    add(Case::plain("single samples, 4 staggered", 6000, 1, 0.1, true, &four, 1), &|_| {});
    add(base("1/1/4, the 4 runs 10%", 0.1, &[1.0, 1.0, 4.0]), &|c| {
        let at = |i: u32| f64::from(i) * 0.05;
        c.jobs[2].pauses = (0..200).map(|i| (at(i) * n, (at(i) + 0.045) * n)).collect();
    });
    v
}

/// Cache sizes of the grid, as parts of the dataset.
pub const GRID_CACHES: [f64; 4] = [0.05, 0.1, 0.2, 0.5];
/// Numbers of jobs of the grid.
pub const GRID_JOBS: [usize; 6] = [1, 2, 3, 4, 8, 16];
/// Arrangements of the grid.
pub const GRID_HOW: [&str; 5] = ["aligned", "staggered", "random", "pause", "churn"];
pub const GRID_SPEEDS: [&str; 3] = ["equal", "5%", "mixed"];

/// Returns one case of the grid: `how` and `speed` as in [`GRID_HOW`] and [`GRID_SPEEDS`].
#[must_use]
pub fn grid_case(cache: f64, k: usize, how: &str, speed: &str, seed: u64) -> Case {
    let n = 25_600.0;
    let mut r = Rng::new(seed * 31 + k as u64);
    let rates: Vec<f64> = (0..k)
        .map(|j| match speed {
            "equal" => 1.0,
            "5%" => 0.95 + 0.1 * r.unit(),
            _ => [1.0, 1.3, 2.0, 4.0][j % 4],
        })
        .collect();
    let mut c = Case::plain(&format!("{k} {how} {speed}"), 800, 32, cache, how != "aligned", &rates, seed);
    let slowest = rates.iter().copied().fold(f64::MAX, f64::min);
    let t = |epochs: f64| epochs * n / slowest;
    (c.warm, c.end) = (t(2.0), t(6.0));
    if how == "random" {
        for (j, rate) in rates.iter().enumerate() {
            c.jobs[j].start = r.unit() * n / rate;
        }
    }
    let x = r.below(k);
    if how == "pause" {
        c.jobs[x].pauses = vec![(t(2.4), t(2.47)), (t(3.3), t(3.7)), (t(4.9), t(4.97))];
    }
    if how == "churn" && k > 1 {
        c.jobs[x].end = Some(t(3.6));
        c.jobs[(x + 1) % k].start = t(2.9);
    }
    c
}

/// Returns all 320 cases of the grid.
#[must_use]
pub fn grid(seed: u64) -> Vec<Case> {
    let mut v = Vec::new();
    for c in GRID_CACHES {
        for k in GRID_JOBS {
            for how in GRID_HOW {
                for speed in GRID_SPEEDS {
                    if k > 1 || speed == "equal" {
                        v.push(grid_case(c, k, how, speed, seed));
                    }
                }
            }
        }
    }
    v
}

/// Returns a case of many jobs over many single-sample units, to measure how far the policy scales. Each job
/// starts at a random moment of the first epoch, reads two epochs and leaves.
#[must_use]
pub fn scale(jobs: usize, units: usize, cache: f64, seed: u64) -> Case {
    let n = units as f64;
    let mut r = Rng::new(seed);
    let job = |r: &mut Rng| {
        let (rate, start) = (0.9 + 0.2 * r.unit(), r.unit() * n);
        // Half a sample before a third epoch would begin.
        JobSpec { end: Some(start + (2.0 * n - 0.5) / rate), ..JobSpec::new(rate, start) }
    };
    Case {
        name: "scale".into(),
        units: vec![1; units],
        cache,
        jobs: (0..jobs).map(|_| job(&mut r)).collect(),
        warm: n,
        end: 3.5 * n,
        seed,
        origin: None,
        servers: Vec::new(),
        network: None,
        news: 0.0,
        failing: 0.0,
        leased: 0,
        ahead: 0,
        overtake: 0,
        bound: false,
    }
}
