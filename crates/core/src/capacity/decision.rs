//! Whether a new division is worth the bytes that it moves.
//!
//! Estimates are noisy, and a division that follows the noise moves the cache for nothing. Three things
//! prevent that: estimates are smoothed, a division must gain more than a threshold and a price on the bytes
//! that it takes away, and divisions that gain little share a budget of moved bytes.
//!
//! A real change must be followed soon. Two jumps in one direction reset the smoothing, and for some
//! decisions after that, or after a job came or went, threshold and price are a tenth and no budget applies.

use super::{
    allocator::{Division, Previous, divide, moved},
    problem::{Problem, ProblemError},
};
use std::collections::BTreeMap;

/// The price of taking the whole cache away once, in parts of mean speed.
const MOVE_PRICE: f64 = 0.05;
/// The least gain, in parts of mean speed.
const LEAST_GAIN: f64 = 0.002;
/// The gain from which a division needs no budget, in parts of mean speed.
const CLEAR_GAIN: f64 = 0.02;
/// The part of the cache that divisions with little gain may move in an hour.
const MOVED_AN_HOUR: f64 = 0.1;
const SECONDS_PER_HOUR: f64 = 3600.0;
/// The weight of a new observation in the mean of logarithms.
const SMOOTHING: f64 = 0.1;
/// The least difference of logarithms that is a jump.
const JUMP: f64 = 0.15;
/// Decisions after a change for which moving is cheap.
const EASY_DECISIONS: u32 = 5;
/// What threshold and price are multiplied by then.
const EASE: f64 = 0.1;

/// Why a decision changed or kept the division.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// There was no division, or it broke a limit.
    First,
    /// The new division gains more than it costs to move.
    Gain,
    /// The division in force was worth less than the equal split.
    BelowEqual,
    /// The new division would gain too little.
    SmallGain,
    /// The new division would gain little, and this hour's budget of moved bytes is used up.
    BudgetSpent,
}

impl Reason {
    /// Whether the division changed.
    #[must_use]
    pub fn is_change(self) -> bool {
        matches!(self, Reason::First | Reason::Gain | Reason::BelowEqual)
    }
}

/// A decision about the division.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// The bytes of each dataset from now on, in the problem's order, beside its pinned bytes.
    pub shares: Vec<f64>,
    /// Why.
    pub reason: Reason,
    /// The bytes that this decision takes away from datasets.
    pub moved: f64,
    /// The best division that was found, in force or not.
    pub best: Division,
    /// The problem with smoothed rates and bandwidths: what the decision is based on.
    pub smoothed: Problem,
}

/// The smoothed logarithm of one number.
#[derive(Debug, Clone, Copy)]
struct Smoothed {
    log: f64,
    /// The last difference of an observation from it.
    last: f64,
}

impl Smoothed {
    /// Takes one observation. Returns whether it was the second jump in one direction.
    fn observe(&mut self, value: f64) -> bool {
        let difference = value.ln() - self.log;
        let is_jump = difference.abs() > JUMP;
        if is_jump && self.last * difference > JUMP * JUMP {
            *self = Smoothed { log: self.log + (self.last + difference) / 2.0, last: 0.0 };
            return true;
        }
        if !is_jump {
            self.log += SMOOTHING * difference;
        }
        self.last = difference;
        false
    }
}

/// Smooths the numbers of one kind. Returns whether one of them jumped, came or went.
fn smooth<'a>(
    known: &mut BTreeMap<u64, Smoothed>,
    observed: impl Iterator<Item = (u64, &'a mut f64)>,
) -> bool {
    let mut changed = false;
    let mut seen = BTreeMap::new();
    for (id, value) in observed {
        let smoothed = match known.remove(&id) {
            Some(mut smoothed) => {
                changed |= smoothed.observe(*value);
                smoothed
            }
            None => {
                changed = true;
                Smoothed { log: value.ln(), last: 0.0 }
            }
        };
        *value = smoothed.log.exp();
        seen.insert(id, smoothed);
    }
    changed |= !known.is_empty();
    *known = seen;
    changed
}

/// Decides again and again about the division of one cache.
#[derive(Debug, Clone)]
pub struct Hysteresis {
    jobs: BTreeMap<u64, Smoothed>,
    links: BTreeMap<u64, Smoothed>,
    /// What may still be moved for little gain, in parts of the cache.
    budget: f64,
    easy_decisions: u32,
}

impl Default for Hysteresis {
    fn default() -> Self {
        // A full budget would let twice the hourly part through in the first hour.
        let budget = MOVED_AN_HOUR / 2.0;
        Hysteresis { jobs: BTreeMap::new(), links: BTreeMap::new(), budget, easy_decisions: 0 }
    }
}

impl Hysteresis {
    /// Decides about the division of a problem with newly observed rates and bandwidths.
    ///
    /// `previous` is the division in force, in the problem's order; `seconds` is the time since the last
    /// decision. Evaluates at most about `evaluations` divisions.
    ///
    /// # Errors
    /// A number, index or identity of the problem that cannot be used.
    ///
    /// # Panics
    /// If `previous` has another length than the problem's datasets.
    pub fn decide(
        &mut self,
        observed: &Problem,
        previous: Option<&[f64]>,
        seconds: f64,
        evaluations: usize,
    ) -> Result<Decision, ProblemError> {
        observed.check()?;
        let mut smoothed = observed.clone();
        // Both, in any case: `||` would skip the links.
        let changed = smooth(&mut self.jobs, smoothed.jobs.iter_mut().map(|j| (j.id, &mut j.most_rate)))
            | smooth(&mut self.links, smoothed.links.iter_mut().map(|l| (l.id, &mut l.bandwidth)));
        let refilled = self.budget + MOVED_AN_HOUR * seconds.max(0.0) / SECONDS_PER_HOUR;
        self.budget = refilled.min(MOVED_AN_HOUR);
        if changed {
            self.easy_decisions = EASY_DECISIONS;
        }
        let easy = self.easy_decisions > 0;
        let ease = if easy { EASE } else { 1.0 };
        self.easy_decisions = self.easy_decisions.saturating_sub(1);
        let weight = smoothed.weight();
        let in_force = previous.map(|shares| Previous { shares, move_price: ease * MOVE_PRICE * weight });
        let best = divide(&smoothed, in_force, evaluations)?;
        let moved = previous.map_or(0.0, |p| moved(p, &best.shares));
        let part = if smoothed.capacity > 0.0 { moved / smoothed.capacity } else { 0.0 };
        let reason = match best.previous_value {
            None => Reason::First,
            Some(value) => {
                let gain = best.value - value;
                if value < best.equal_value - ease * LEAST_GAIN * weight {
                    Reason::BelowEqual
                } else if gain <= ease * LEAST_GAIN * weight {
                    Reason::SmallGain
                } else if easy || gain >= CLEAR_GAIN * weight {
                    Reason::Gain
                } else if part > self.budget {
                    Reason::BudgetSpent
                } else {
                    self.budget -= part;
                    Reason::Gain
                }
            }
        };
        let (shares, moved) = match previous {
            Some(previous) if !reason.is_change() => (previous.to_vec(), 0.0),
            _ => (best.shares.clone(), moved),
        };
        Ok(Decision { shares, reason, moved, best, smoothed })
    }
}
