//! Time, which the reference leaves out: bandwidth, latency, picks decided ahead, leases in flight.

use fletch_core::order::sweep::SweepParams;
use fletch_sim::{ArmKind, Case, Origin, Subset, cases, simulate};

fn timed(mut case: Case, bandwidth: f64) -> Case {
    case.origin = Some(Origin::new(bandwidth, 10.0));
    (case.leased, case.ahead, case.overtake) = (128, 64, 4);
    case
}

/// Each job holds two leases of 64 samples.
fn leased(case: &mut Case) {
    (case.ahead, case.overtake) = (32, 4);
    case.jobs.iter_mut().for_each(|j| (j.lease, j.leased) = (64, Some(128)));
}

/// Pacing: f* = 2b at c = .5, and where the link is just or not enough. Epoch time at most 1.05
/// of 1 / min(f*, b / (1 − c)), bytes at most (1 − c + .01) per epoch.
#[test]
fn a_lone_job_is_paced() {
    for (cache, bandwidth) in [(0.5, 0.5), (0.2, 0.8), (0.05, 0.95), (0.2, 0.4)] {
        let case = timed(Case::plain("lone", 800, 32, cache, false, &[1.0], 1), bandwidth);
        let o = simulate(&case, ArmKind::Fletch, SweepParams::default());
        let ideal = 25_600.0 / f64::min(1.0, bandwidth / (1.0 - cache));
        let times = o.epoch_seconds[0] / ideal;
        assert!(times <= 1.05, "c {cache} b {bandwidth}: {times:.3} × the ideal time");
        // Warm-up and end cut epochs, so that a window more or less is counted.
        assert!(o.ratio <= 1.0 - cache + 0.015, "c {cache} b {bandwidth}: backend {:.3}", o.ratio);
    }
}

/// A lone job fetches what is not cached and no more, from its first warm epoch on: 1 − c of the dataset an
/// epoch, for every c and every size of units. Where nearly all is cached a window is a few units, and fewer
/// units go through it than the reserve would have exchanged.
#[test]
fn a_lone_job_fetches_what_is_not_cached() {
    for (units, samples) in [(1000, 1), (400, 32)] {
        for cache in [0.05, 0.2, 0.5, 0.8, 0.9, 0.95, 0.98] {
            let mut case = Case::plain("lone", units, samples, cache, false, &[1.0], 1);
            let epoch = (units * samples as usize) as f64;
            (case.warm, case.end) = (epoch, 3.0 * epoch);
            leased(&mut case);
            let o = simulate(&case, ArmKind::Fletch, SweepParams::default());
            assert!(o.ratio <= 1.0 - cache + 0.01, "{units} × {samples}, c {cache}: {:.4}", o.ratio);
        }
    }
}

/// Where nearly all is cached, several jobs still share the few loads.
#[test]
fn jobs_share_what_is_not_cached_however_little() {
    for (cache, most) in [(0.8, 1.15), (0.9, 1.2), (0.95, 1.25)] {
        let mut case = Case::plain("four", 400, 32, cache, true, &[1.0; 4], 1);
        (case.warm, case.end) = (2.0 * 12_800.0, 5.0 * 12_800.0);
        leased(&mut case);
        let o = simulate(&case, ArmKind::Fletch, SweepParams::default());
        assert!(o.ratio <= o.bound * most, "c {cache}: {:.4}, bound {:.4}", o.ratio, o.bound);
    }
}

/// With a link that has a tenth to spare, fetches that take time cause no stalls and cost few bytes: at most
/// .02 more than the figures without time.
#[test]
fn time_costs_several_jobs_little() {
    for case in cases::rows(800, 32, 1).into_iter().filter(|c| c.jobs.len() >= 4 && c.name.contains("equal"))
    {
        let without = simulate(&case, ArmKind::Fletch, SweepParams::default());
        let total: f64 = case.jobs.iter().map(|j| j.rate).sum();
        let with =
            simulate(&timed(case, without.ratio * total * 1.1), ArmKind::Fletch, SweepParams::default());
        println!("{}\n{}", fletch_sim::table::line(&without), fletch_sim::table::line(&with));
        assert!(with.ratio <= without.ratio + 0.02, "{}", with.case);
        assert!(with.stalled.iter().all(|&s| s < 0.02), "{}: {:?}", with.case, with.stalled);
        assert!(with.near10.iter().zip(&without.near10).all(|(a, b)| *a < b * 1.25), "{}", with.case);
    }
}

/// Overtaking without limit saves no time and ruins the shuffle.
#[test]
fn serving_on_arrival_ruins_the_shuffle_and_gains_nothing() {
    let case = timed(Case::plain("lone", 800, 32, 0.05, false, &[1.0], 1), 0.85);
    let little = simulate(&case, ArmKind::Fletch, SweepParams::default());
    let all = simulate(&Case { overtake: usize::MAX, ..case }, ArmKind::Fletch, SweepParams::default());
    assert!(all.epoch_seconds[0] > 0.99 * little.epoch_seconds[0]);
    assert!(all.near[0] > 2.0 * little.near[0], "{} {}", all.near[0], little.near[0]);
}

/// The other arms: direct fetches everything, pin the part that is not cached, LRU nearly everything.
#[test]
fn other_arms() {
    let case = Case::plain("lone", 200, 32, 0.2, false, &[1.0], 1);
    let ratio = |arm| simulate(&case, arm, SweepParams::default()).ratio;
    assert_eq!(ratio(ArmKind::Direct), 1.0);
    assert!((ratio(ArmKind::Pin) - 0.8).abs() < 0.01);
    // LRU under random permutations hits c + (1 − c) · ln(1 − c).
    let lru = 1.0 - (0.2 + 0.8 * 0.8f64.ln());
    assert!((ratio(ArmKind::Lru) - lru).abs() < 0.01, "{} {lru}", ratio(ArmKind::Lru));
    assert!((ratio(ArmKind::Fletch) - 0.8).abs() < 0.01);
}

/// The same case gives the same outcome.
#[test]
fn the_same_case_gives_the_same_outcome() {
    let case = timed(cases::grid_case(0.1, 4, "churn", "5%", 3), 1.5);
    let run =
        || simulate(&Case { end: case.warm * 1.2, ..case.clone() }, ArmKind::Fletch, SweepParams::default());
    assert_eq!(run(), run());
}

/// Unknown keys and impossible numbers in a case are errors.
#[test]
fn cases_are_checked() {
    let good = Case::plain("x", 4, 2, 0.5, false, &[1.0], 1);
    let text = serde_json::to_string(&good).expect("json");
    assert_eq!(serde_json::from_str::<Case>(&text).expect("json"), good);
    assert!(serde_json::from_str::<Case>(&text.replace("\"cache\"", "\"cash\"")).is_err());
    assert!(good.faults().is_empty());
    let mut bad = good;
    (bad.cache, bad.end) = (1.5, 0.0);
    bad.jobs[0].rate = f64::NAN;
    bad.jobs[0].lease = 2;
    assert_eq!(bad.faults().len(), 4, "{:?}", bad.faults());
}

/// A clock that would stand still, and a job with nothing to read, are faults before the run starts.
#[test]
fn what_would_never_end_or_never_begin_is_a_fault() {
    let good = Case::plain("x", 4, 2, 0.5, false, &[1.0], 1);
    let fault = |change: &dyn Fn(&mut Case)| {
        let mut case = good.clone();
        change(&mut case);
        let faults = case.faults();
        assert!(faults.len() < 2, "{faults:?}");
        faults.into_iter().next().unwrap_or_default()
    };
    assert!(fault(&|c| c.jobs[0].rate = 1e18).starts_with("jobs[0].rate"));
    assert!(fault(&|c| c.end = 1e16).starts_with("jobs[0].rate"));
    assert_eq!(fault(&|c| (c.end, c.jobs[0].end) = (1e16, Some(64.0))), "", "it is gone by then");
    assert_eq!(fault(&|c| c.end = 1e15), "");
    for whole_units in [false, true] {
        let subset = |part| Some(Subset { part, whole_units, seed: 1 });
        assert!(fault(&|c| c.jobs[0].subset = subset(1e-9)).starts_with("jobs[0].subset"));
        assert_eq!(fault(&|c| c.jobs[0].subset = subset(1.0)), "");
    }
}

/// Twelve jobs of three batch sizes, each holding four leases, fetch as much as twelve of one size, within 3
/// %.
#[test]
fn sizes_of_leases_cost_nothing() {
    let play = |leases: &[u32]| {
        let mut case = Case::plain("12 staggered", 1100, 23, 0.2, true, &[1.0; 12], 1);
        (case.ahead, case.overtake, case.bound) = (32, 4, false);
        case.end = 4.0 * case.samples() as f64;
        for (job, &lease) in case.jobs.iter_mut().zip(leases.iter().cycle()) {
            (job.lease, job.leased) = (lease, Some(4 * lease as usize));
        }
        simulate(&case, ArmKind::Fletch, SweepParams::default()).ratio
    };
    let (equal, mixed) = (play(&[64]), play(&[32, 96, 128]));
    assert!((mixed / equal - 1.0).abs() < 0.03, "{mixed:.4} for {equal:.4}");
}
