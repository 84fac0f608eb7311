//! Decisions under noise: the cache stays where it is, and real changes are followed.

use super::random::{Mix, problem};
use crate::capacity::tests::rng::Rng;
use crate::capacity::{
    Hysteresis, Problem, Reason, allocator::divide, job_rates, rates::evaluate, streams::DatasetStreams,
};

const SECONDS: f64 = 30.0;
const AN_HOUR: usize = 120;
const EVALUATIONS: usize = 600;

fn value(p: &Problem, shares: &[f64]) -> f64 {
    evaluate(p, &DatasetStreams::of(p), shares).value
}

fn best(p: &Problem) -> Vec<f64> {
    divide(p, None, 4000).expect("a problem").shares
}

/// A cluster whose rates are observed with noise: 5 % each time, or drifting over 5 minutes.
struct Cluster {
    truth: Problem,
    rng: Rng,
    noise: Vec<f64>,
    /// The correlation of noise from one decision to the next.
    memory: f64,
    hysteresis: Hysteresis,
    shares: Vec<f64>,
}

impl Cluster {
    fn new(seed: u64, memory: f64) -> Self {
        let mut rng = Rng(seed);
        let mut truth = problem(&mut rng, Mix { datasets: 12, jobs_max: 4, tenants: 0 });
        truth.capacity *= 0.5;
        for link in &mut truth.links {
            link.bandwidth *= 0.5;
        }
        let noise = vec![0.0; truth.jobs.len() + truth.links.len()];
        let shares = best(&truth);
        Cluster { truth, rng, noise, memory, hysteresis: Hysteresis::default(), shares }
    }

    /// Decides once and returns the part of the cache that moves.
    fn decide(&mut self) -> f64 {
        let fresh = (1.0 - self.memory * self.memory).sqrt() * 0.05;
        for noise in &mut self.noise {
            *noise = self.memory * *noise + fresh * self.rng.normal();
        }
        let mut seen = self.truth.clone();
        let rates = seen.jobs.iter_mut().map(|j| &mut j.most_rate);
        let numbers = rates.chain(seen.links.iter_mut().map(|l| &mut l.bandwidth));
        for (number, noise) in numbers.zip(&self.noise) {
            *number *= 1.0 + noise;
        }
        let decision =
            self.hysteresis.decide(&seen, Some(&self.shares), SECONDS, EVALUATIONS).expect("a problem");
        self.shares = decision.shares;
        decision.moved / self.truth.capacity
    }
}

/// `FLETCH_ALLOCATOR_CASES` sets the number of clusters, beside 4.
fn clusters() -> u64 {
    option_env!("FLETCH_ALLOCATOR_CASES").map_or(4, |n| n.parse::<u64>().expect("a number") / 40)
}

#[test]
fn noise_moves_at_most_a_tenth_of_the_cache_in_an_hour() {
    for memory in [0.0, 0.9] {
        let mut parts = Vec::new();
        for seed in 0..clusters() {
            let mut cluster = Cluster::new(700 + seed, memory);
            for _ in 0..AN_HOUR {
                cluster.decide();
            }
            parts.push((0..AN_HOUR).map(|_| cluster.decide()).sum::<f64>());
        }
        let worst = parts.iter().copied().fold(0.0, f64::max);
        println!(
            "noise of 5 %, memory {memory}: {} clusters, moved in an hour: mean {:.4}, worst {worst:.4}",
            parts.len(),
            parts.iter().sum::<f64>() / parts.len() as f64
        );
        assert!(worst <= 0.1, "{parts:?}");
    }
}

#[test]
fn a_change_that_is_worth_five_percent_is_followed() {
    let (mut followed, mut late) = (Vec::new(), Vec::new());
    for seed in 0..3 * clusters() {
        let mut cluster = Cluster::new(900 + seed, 0.9);
        for _ in 0..AN_HOUR / 4 {
            cluster.decide();
        }
        match seed % 3 {
            0 => {
                let rates = job_rates(&cluster.truth, &cluster.shares);
                let waiting = |i: &usize| rates[*i] < 0.95 * cluster.truth.jobs[*i].most_rate;
                let job = (0..rates.len()).find(waiting).unwrap_or(0);
                cluster.truth.jobs[job].most_rate *= 2.0;
            }
            1 => {
                let largest = (0..cluster.shares.len())
                    .max_by(|&a, &b| cluster.shares[a].total_cmp(&cluster.shares[b]))
                    .expect("datasets");
                let noise = cluster.noise.iter().copied().zip(&cluster.truth.jobs);
                // The noise of links comes after that of jobs, which leave.
                let links = cluster.noise[cluster.truth.jobs.len()..].to_vec();
                let kept = noise.filter(|(_, j)| j.dataset != largest).map(|(n, _)| n).collect::<Vec<_>>();
                cluster.truth.jobs.retain(|j| j.dataset != largest);
                cluster.noise = [kept, links].concat();
            }
            _ => cluster.truth.links[0].bandwidth /= 2.0,
        }
        let (before, best) =
            (value(&cluster.truth, &cluster.shares), value(&cluster.truth, &best(&cluster.truth)));
        if best - before < 0.05 * cluster.truth.weight() {
            continue;
        }
        let done = (1..=40).find(|_| {
            cluster.decide();
            value(&cluster.truth, &cluster.shares) >= before + 0.9 * (best - before)
        });
        match done {
            Some(decisions) => followed.push(decisions),
            None => late.push((best - value(&cluster.truth, &cluster.shares)) / cluster.truth.weight()),
        }
    }
    println!("decisions until 90 % of the gain is there: {followed:?}; else what is left: {late:?}");
    assert!(!followed.is_empty(), "no seed has a change that is worth 5 %");
    assert!(late.len() * 20 <= followed.len(), "{} of {} are late", late.len(), followed.len());
    assert!(late.iter().all(|left| *left < 0.02), "in parts of mean speed: {late:?}");
}

#[test]
fn the_first_decision_and_a_division_below_the_equal_split_are_adopted_at_once() {
    let mut rng = Rng(5);
    let p = problem(&mut rng, Mix { datasets: 4, jobs_max: 2, tenants: 0 });
    let mut hysteresis = Hysteresis::default();
    let first = hysteresis.decide(&p, None, 0.0, EVALUATIONS).expect("a problem");
    assert_eq!(first.reason, Reason::First);
    for _ in 0..10 {
        let kept = hysteresis.decide(&p, Some(&first.shares), 30.0, EVALUATIONS).expect("a problem");
        assert_eq!((kept.reason, kept.moved), (Reason::SmallGain, 0.0), "{kept:?}");
    }
    let nothing = vec![0.0; 4];
    let repaired = hysteresis.decide(&p, Some(&nothing), 30.0, EVALUATIONS).expect("a problem");
    assert!(repaired.reason.is_change(), "{repaired:?}");
}
