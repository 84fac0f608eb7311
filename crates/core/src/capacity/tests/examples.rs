//! Small problems whose answers are known, refused problems, and the prices against finite differences.

use super::random::{Mix, problem};
use crate::capacity::tests::rng::Rng;
use crate::capacity::{
    DatasetDemand, JobDemand, Limit, Link, Problem, ProblemError, byte_values, divide, job_rates,
    rates::evaluate, streams::DatasetStreams,
};

/// Datasets of 100 bytes, a job on each with these most rates (bytes a second) and links.
fn lone_jobs(most_rates: &[f64], links: &[usize], bandwidth: f64, capacity: f64) -> Problem {
    let ids = 0..most_rates.len() as u64;
    let dataset = |(id, &link)| DatasetDemand { id, size: 100.0, link, window: 0.0, pinned: 0.0 };
    let job = |(id, &most_rate): (u64, &f64)| {
        let dataset = id as usize;
        JobDemand { id, dataset, most_rate, weight: 1.0, strict: false }
    };
    let count = links.iter().max().map_or(0, |l| l + 1) as u64;
    Problem {
        capacity,
        links: (0..count).map(|id| Link { id, bandwidth }).collect(),
        datasets: ids.clone().zip(links).map(dataset).collect(),
        jobs: ids.zip(most_rates).map(job).collect(),
        limits: vec![],
    }
}

#[track_caller]
fn near(a: &[f64], b: &[f64], tolerance: f64) {
    assert!(a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= tolerance), "{a:?} {b:?}");
}

fn shares(p: &Problem) -> Vec<f64> {
    divide(p, None, 4000).expect("a problem").shares
}

#[test]
fn the_cache_goes_to_the_job_that_waits_for_its_origin() {
    let p = lone_jobs(&[1.0, 4.0], &[0, 1], 1.0, 50.0);
    near(&shares(&p), &[0.0, 50.0], 0.5);
    near(&job_rates(&p, &[0.0, 50.0]), &[1.0, 2.0], 1e-9);
    near(&job_rates(&p, &[25.0, 25.0]), &[1.0, 4.0 / 3.0], 1e-9);
    let values = byte_values(&p, &[25.0, 25.0]);
    assert!(values[0] < values[1] / 10.0, "{values:?}");
}

#[test]
fn jobs_of_a_sweep_pay_for_the_origin_once() {
    let mut p = lone_jobs(&[4.0, 4.0], &[0, 0], 1.0, 50.0);
    p.datasets.truncate(1);
    p.jobs[1].dataset = 0;
    near(&job_rates(&p, &[50.0]), &[2.0 / 1.03; 2], 1e-9);
    // Below the window each of them fetches for itself, over one link.
    p.datasets[0].window = 60.0;
    near(&job_rates(&p, &[50.0]), &[1.0; 2], 1e-9);
    // A strict order is a stream of its own.
    (p.datasets[0].window, p.jobs[1].strict) = (0.0, true);
    near(&job_rates(&p, &[50.0]), &[1.0; 2], 1e-9);
}

#[test]
fn a_scan_gets_its_minimum_and_nothing_else() {
    let p = |capacity: f64| {
        let mut p = lone_jobs(&[4.0; 5], &[0; 5], 3.0, capacity);
        p.datasets.truncate(3);
        (p.datasets[0].window, p.datasets[2].size) = (0.5, 1000.0);
        for (job, dataset) in p.jobs.iter_mut().zip([0, 0, 0, 1, 2]) {
            job.dataset = dataset;
        }
        p.limits = vec![Limit { id: 0, datasets: vec![2], least: 5.0, most: f64::INFINITY }];
        p
    };
    for (capacity, want) in [(60.0, [55.0, 0.0, 5.0]), (120.0, [100.0, 15.0, 5.0])] {
        near(&shares(&p(capacity)), &want, 1.0);
    }
}

#[test]
fn pinned_bytes_count_as_cached_and_are_not_divided() {
    let mut p = lone_jobs(&[4.0, 4.0], &[0, 1], 1.0, 100.0);
    p.datasets[0].pinned = 90.0;
    near(&job_rates(&p, &[0.0, 0.0]), &[4.0, 1.0], 1e-9);
    let shares = shares(&p);
    assert!(shares[0] <= 10.0 && shares[1] >= 75.0, "{shares:?}");
}

#[test]
fn limits_that_contradict_each_other_are_kept_in_part() {
    let mut p = lone_jobs(&[4.0, 4.0], &[0, 1], 1.0, 50.0);
    let limit = |id, d| Limit { id, datasets: vec![d], least: 40.0, most: f64::INFINITY };
    p.limits = vec![limit(0, 0), limit(1, 1)];
    let division = divide(&p, None, 1000).expect("a problem");
    near(&division.shares, &[25.0, 25.0], 5.1);
    assert!((division.minimums_kept - 0.5).abs() < 1e-9, "{division:?}");
}

#[test]
fn problems_that_cannot_be_solved_are_refused() {
    let good = lone_jobs(&[1.0, 4.0], &[0, 1], 1.0, 50.0);
    let refused = |change: &dyn Fn(&mut Problem)| {
        let mut p = good.clone();
        change(&mut p);
        divide(&p, None, 100).expect_err("no problem").to_string()
    };
    assert_eq!(
        refused(&|p| p.jobs[1].weight = -1.0),
        "job 1: weight is -1, but must be a finite number above 0"
    );
    assert!(refused(&|p| p.jobs[0].most_rate = f64::NAN).contains("most rate is NaN"));
    assert!(refused(&|p| p.capacity = f64::INFINITY).contains("capacity is inf"));
    assert_eq!(refused(&|p| p.jobs[0].dataset = 7), "job 0 names dataset 7, but the problem has 2");
    assert_eq!(refused(&|p| p.links[1].id = 0), "two links have the id 0");
    assert!(matches!(
        {
            let mut p = good.clone();
            p.datasets[0].pinned = -1.0;
            p.check()
        },
        Err(ProblemError::Negative { .. })
    ));
}

#[test]
fn a_cache_without_bytes_and_a_problem_without_jobs_have_a_division() {
    let empty = Problem { capacity: 10.0, ..Problem::default() };
    assert_eq!(shares(&empty), Vec::<f64>::new());
    assert_eq!(shares(&lone_jobs(&[1.0, 4.0], &[0, 1], 1.0, 0.0)), [0.0, 0.0]);
    let mut idle = lone_jobs(&[1.0, 4.0], &[0, 1], 1.0, 50.0);
    idle.jobs.clear();
    near(&shares(&idle), &[25.0, 25.0], 1e-9);
}

#[test]
fn prices_agree_with_finite_differences() {
    let mut rng = Rng(17);
    let mut compared = 0;
    for _ in 0..300 {
        let p = problem(&mut rng, Mix { datasets: 5, jobs_max: 3, tenants: 0 });
        let at: Vec<f64> = p.datasets.iter().map(|d| (d.size - d.pinned) * rng.between(0.05, 0.9)).collect();
        let datasets = DatasetStreams::of(&p);
        let now = evaluate(&p, &datasets, &at);
        for (d, dataset) in datasets.iter().enumerate() {
            let step = 1e-6 * dataset.size;
            let mut more = at.clone();
            more[d] += step;
            let whole = (evaluate(&p, &datasets, &more).value - now.value) / step;
            let (level, price) = (now.levels[dataset.link], now.prices[dataset.link]);
            let value = |share: f64| dataset.priced_value(share, level, price);
            let by_prices = (value(more[d]) - value(at[d])) / step;
            if whole.abs() > 1e-9 {
                compared += 1;
                assert!((by_prices / whole - 1.0).abs() < 1e-4, "{by_prices} for {whole}");
            }
        }
    }
    assert!(compared > 1000, "{compared}");
}
