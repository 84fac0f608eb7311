//! The search for the best division of a cache.
//!
//! 1. The equal split is the first candidate, and the previous division the second.
//! 2. The links' prices at a division make each dataset's value a function of its own share. The greedy step
//!    fills the steepest parts first. Prices follow at the new division, half of the way, because two
//!    divisions that give each other's prices would take turns.
//! 3. Each dataset is tried at each of its knees, and pairs exchange ever smaller parts.

use super::{
    greedy::Hulls,
    problem::{Problem, ProblemError},
    rates::evaluate,
    streams::DatasetStreams,
};

/// Steps of prices that follow from one start.
const PRICE_STEPS: usize = 8;
/// A difference in bytes that breaks no limit, relative to the capacity.
const SLACK: f64 = 1e-6;
/// How often the minimums are halved before they are given up.
const HALVINGS: usize = 10;

/// A division of a cache, and what it is worth.
#[derive(Debug, Clone, PartialEq)]
pub struct Division {
    /// The bytes of each dataset, in the problem's order, beside its pinned bytes.
    pub shares: Vec<f64>,
    /// The value of the goal.
    pub value: f64,
    /// The value of the equal split.
    pub equal_value: f64,
    /// The value of the previous division; `None` without one, or if it is not allowed any more.
    pub previous_value: Option<f64>,
    /// The part of every minimum that could be kept; 1 unless minimums and quotas contradict each other.
    pub minimums_kept: f64,
    /// Divisions that were evaluated.
    pub evaluations: usize,
}

/// The division that is in force.
#[derive(Debug, Clone, Copy)]
pub struct Previous<'a> {
    /// The bytes of each dataset, in the problem's order.
    pub shares: &'a [f64],
    /// The price of taking the whole cache away from its datasets once, in units of the goal.
    pub move_price: f64,
}

/// Returns the bytes that a change of division takes away from datasets. What was free costs nothing.
///
/// Both divisions are of the same datasets, in the same order.
#[must_use]
pub fn moved(from: &[f64], to: &[f64]) -> f64 {
    from.iter().zip(to).map(|(a, b)| (a - b).max(0.0)).sum()
}

/// Divides the cache. Evaluates at most about `budget` divisions (1,500 do for 200 datasets).
///
/// # Errors
/// A number, index or identity of the problem that cannot be used.
///
/// # Panics
/// If `previous` has another length than the problem's datasets.
pub fn divide(
    problem: &Problem,
    previous: Option<Previous<'_>>,
    budget: usize,
) -> Result<Division, ProblemError> {
    problem.check()?;
    let (sorted, order) = problem.sorted();
    let in_order = |shares: &[f64]| order.iter().map(|&old| shares[old]).collect();
    let mut search = Search::new(
        sorted,
        previous.map(|p| {
            assert_eq!(p.shares.len(), problem.datasets.len(), "one previous share for each dataset");
            in_order(p.shares)
        }),
        previous.map_or(0.0, |p| p.move_price),
        budget,
    );
    let mut division = search.run();
    let mut shares = vec![0.0; order.len()];
    for (new, &old) in order.iter().enumerate() {
        shares[old] = division.shares[new];
    }
    division.shares = shares;
    Ok(division)
}

/// The state of one search, over a sorted problem.
pub(super) struct Search {
    pub problem: Problem,
    pub datasets: Vec<DatasetStreams>,
    /// The limits of each dataset.
    pub limits_of: Vec<Vec<usize>>,
    pub previous: Option<Vec<f64>>,
    move_price: f64,
    minimums_kept: f64,
    pub best: Vec<f64>,
    pub best_score: f64,
    evaluations: usize,
    budget: usize,
}

impl Search {
    fn new(problem: Problem, previous: Option<Vec<f64>>, move_price: f64, budget: usize) -> Self {
        let mut limits_of = vec![Vec::new(); problem.datasets.len()];
        for (i, limit) in problem.limits.iter().enumerate() {
            for &d in &limit.datasets {
                limits_of[d].push(i);
            }
        }
        let datasets = DatasetStreams::of(&problem);
        let best = vec![0.0; datasets.len()];
        let mut search = Search {
            problem,
            datasets,
            limits_of,
            previous,
            move_price,
            minimums_kept: 1.0,
            best,
            best_score: f64::NEG_INFINITY,
            evaluations: 0,
            budget,
        };
        // Settings that were possible when they were made can contradict each other on a smaller disk.
        for halving in 0..=HALVINGS {
            search.best = search.equal_split();
            if search.is_allowed(&search.best) {
                break;
            }
            search.minimums_kept = if halving + 1 < HALVINGS { search.minimums_kept / 2.0 } else { 0.0 };
        }
        search
    }

    /// Returns the bytes that the datasets of a limit get at most.
    pub(super) fn most(&self, limit: usize) -> f64 {
        self.problem.limits[limit].most
    }

    /// Returns the bytes that the datasets of a limit get at least.
    pub(super) fn least(&self, limit: usize) -> f64 {
        let limit = &self.problem.limits[limit];
        let usable: f64 = limit.datasets.iter().map(|&d| self.datasets[d].room).sum();
        (limit.least * self.minimums_kept).min(usable).min(limit.most)
    }

    /// Returns the datasets of a limit.
    pub(super) fn limit_datasets(&self, limit: usize) -> &[usize] {
        &self.problem.limits[limit].datasets
    }

    fn equal_split(&self) -> Vec<f64> {
        self.fill(&Hulls::flat(), None)
    }

    /// Returns the price of taking bytes away from datasets, in units of the goal.
    pub(super) fn price_of_moving(&self, bytes: f64) -> f64 {
        if bytes > 0.0 { self.move_price * bytes / self.problem.capacity } else { 0.0 }
    }

    /// Whether the evaluations are used up.
    pub(super) fn is_spent(&self) -> bool {
        self.evaluations >= self.budget
    }

    /// Whether a division keeps capacity, sizes and limits.
    pub(super) fn is_allowed(&self, shares: &[f64]) -> bool {
        let slack = SLACK * self.problem.capacity;
        let of_limit = |l: usize| self.limit_datasets(l).iter().map(|&d| shares[d]).sum::<f64>();
        shares.iter().sum::<f64>() <= self.problem.capacity + slack
            && shares.iter().zip(&self.datasets).all(|(share, d)| *share <= d.room + slack)
            && (0..self.problem.limits.len()).all(|l| {
                let bytes = of_limit(l);
                bytes <= self.most(l) + slack && bytes >= self.least(l) - slack
            })
    }

    fn value(&self, shares: &[f64]) -> f64 {
        evaluate(&self.problem, &self.datasets, shares).value
    }

    fn score(&mut self, shares: &[f64]) -> f64 {
        self.evaluations += 1;
        if !self.is_allowed(shares) {
            return f64::NEG_INFINITY;
        }
        let taken_away = self.previous.as_ref().map_or(0.0, |previous| moved(previous, shares));
        self.value(shares) - self.price_of_moving(taken_away)
    }

    /// Keeps a division if it is better than the best by more than a relative `margin`.
    pub(super) fn offer(&mut self, shares: Vec<f64>, margin: f64) {
        let score = self.score(&shares);
        if score > self.best_score + margin * (1.0 + self.best_score.abs()) {
            (self.best, self.best_score) = (shares, score);
        }
    }

    fn run(&mut self) -> Division {
        let equal = self.best.clone();
        self.best_score = self.score(&equal);
        let mut starts = vec![equal.clone(), vec![0.0; equal.len()]];
        if let Some(previous) = self.previous.clone() {
            let score = self.score(&previous);
            // Of two that are as good as each other, the one in force.
            if score >= self.best_score - SLACK / 1000.0 {
                (self.best, self.best_score) = (previous.clone(), score);
            }
            starts.push(previous);
        }
        for start in starts {
            self.follow_prices(start);
        }
        self.try_knees();
        self.exchange();
        let previous = self.previous.as_ref().filter(|p| self.is_allowed(p));
        Division {
            value: self.value(&self.best),
            equal_value: self.value(&equal),
            previous_value: previous.map(|p| self.value(p)),
            minimums_kept: self.minimums_kept,
            evaluations: self.evaluations,
            shares: self.best.clone(),
        }
    }

    fn follow_prices(&mut self, mut at: Vec<f64>) {
        for _ in 0..PRICE_STEPS {
            let filled = self.fill(&self.hulls(&at), None);
            self.offer(filled.clone(), 0.0);
            let settled = self.is_same(&filled, &at);
            at = filled.iter().zip(&at).map(|(new, old)| (new + old) / 2.0).collect();
            if settled {
                break;
            }
        }
    }
}
