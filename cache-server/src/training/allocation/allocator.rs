//! Decides now and then how the disk is divided.

use super::{
    Division, Outcome, Reader, TenantShare,
    problem::{Built, Demand, build},
};
use fletch_api::JobSettings;
use fletch_core::{Tenant, capacity::Hysteresis};
use fletch_store::{DatasetId, Split, TenantQuota};
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

/// The most divisions that one decision evaluates: enough for 200 datasets, in about 50 ms.
const EVALUATIONS: usize = 1500;
/// The most links whose bandwidth is remembered.
const LINKS_MAX: usize = 4096;

/// The limits of a decision.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    /// What the administrator set of tenants.
    pub tenants: BTreeMap<Tenant, TenantShare>,
    /// The shares with plain readers, which are divided by reads.
    pub plain: BTreeSet<DatasetId>,
}

/// Decides about the disk, and keeps the decision.
#[derive(Debug, Default)]
pub struct Allocator {
    state: Mutex<State>,
    demand: Mutex<Demand>,
    current: Mutex<Arc<Division>>,
    /// The jobs of the last decision, with their settings.
    running: Mutex<BTreeMap<String, JobSettings>>,
}

#[derive(Debug, Default)]
struct State {
    hysteresis: Hysteresis,
    /// What each link carried when it was last busy, in bytes a second.
    bandwidths: BTreeMap<String, f64>,
}

impl Allocator {
    /// Returns the decision in force.
    #[must_use]
    pub fn current(&self) -> Arc<Division> {
        Arc::clone(&self.current.lock())
    }

    /// Notes what the disk is divided by, and returns the claims that carry out the decision in force.
    ///
    /// `claims` are those of reads, `limited` the same within the tenants' `quotas`.
    pub fn divide(&self, claims: Split, limited: Split, capacity: u64, quotas: Vec<TenantQuota>) -> Split {
        let divided = self.current().claims(&limited, capacity);
        *self.demand.lock() = Demand { claims, limited, capacity, quotas };
        divided
    }

    /// Returns the claims of the last division within the quotas, and the capacity that they divided.
    #[must_use]
    pub fn claims(&self) -> (Split, u64) {
        let demand = self.demand.lock();
        (demand.limited.clone(), demand.capacity)
    }

    /// Returns whether a decision is due: `interval` passed since the last, or jobs came or went, or their
    /// settings changed. The next call counts from this one.
    pub fn is_due(&self, running: BTreeMap<String, JobSettings>, interval: Duration) -> bool {
        let is_late = self.current().at.is_none_or(|at| at.elapsed() >= interval);
        let mut last = self.running.lock();
        let is_other = *last != running;
        *last = running;
        is_late || is_other
    }

    /// Decides. Returns whether the disk must be divided anew.
    pub fn decide(&self, readers: &[Reader], limits: &Limits) -> bool {
        let mut state = self.state.lock();
        let demand = self.demand.lock().clone();
        state.learn(readers);
        let built = build(&demand, readers, &limits.tenants, &limits.plain, &state.bandwidths);
        let old = self.current();
        let new = Division { readers: readers.to_vec(), ..state.next(built, &old, &demand) };
        let is_changed = !new.is_same(&old);
        *self.current.lock() = Arc::new(new);
        is_changed
    }
}

impl State {
    fn learn(&mut self, readers: &[Reader]) {
        if self.bandwidths.len() >= LINKS_MAX {
            self.bandwidths.retain(|link, _| readers.iter().any(|r| r.link == *link));
        }
        for (link, bandwidth) in readers.iter().filter_map(|r| Some((&r.link, r.bandwidth?))) {
            if bandwidth.is_finite() && bandwidth > 0.0 {
                self.bandwidths.insert(link.clone(), bandwidth);
            }
        }
    }

    fn next(&mut self, built: Built, old: &Division, demand: &Demand) -> Division {
        let now = Instant::now();
        let Built { problem, ids, jobs, least, idle, share_of } = built;
        let mut new = Division {
            idle,
            least,
            share_of,
            at: Some(now),
            moved: old.moved,
            outcome: Outcome::NotMeasured,
            ..Division::default()
        };
        if problem.jobs.is_empty() || problem.capacity <= 0.0 {
            return new;
        }
        let seconds = old.at.map_or(0.0, |at| now.duration_since(at).as_secs_f64());
        let previous = previous(old, &ids, problem.capacity, demand);
        let decided = self.hysteresis.decide(&problem, Some(&previous), seconds, EVALUATIONS);
        let decision = match decided {
            Ok(decision) => decision,
            Err(error) => {
                if old.outcome != Outcome::Failed {
                    tracing::error!(%error, "the disk cannot be divided by worth; shares follow reads");
                }
                new.outcome = Outcome::Failed;
                return new;
            }
        };
        new.minimums_kept = decision.best.minimums_kept;
        if new.minimums_kept < 1.0 && new.minimums_kept != old.minimums_kept {
            tracing::warn!(
                kept = new.minimums_kept,
                "the least shares of jobs and tenants contradict their quotas or the size of the disk; each \
                 gets this part of its least share"
            );
        }
        new.outcome = Outcome::Decided(decision.reason);
        new.moved = old.moved.saturating_add(decision.moved as u64);
        new.divided = problem.capacity as u64;
        new.shares = ids.iter().copied().zip(decision.shares.iter().map(|share| *share as u64)).collect();
        new.problem = decision.smoothed;
        new.ids = ids;
        new.jobs = jobs;
        new
    }
}

/// Returns the shares in force, in the problem's order, at most `capacity` in sum. A share that was not
/// divided by worth until now has what it had by reads.
fn previous(old: &Division, ids: &[DatasetId], capacity: f64, demand: &Demand) -> Vec<f64> {
    let in_force: BTreeMap<DatasetId, u64> = old
        .claims(&demand.limited, demand.capacity)
        .iter()
        .filter_map(|claim| Some((claim.dataset, claim.want?)))
        .collect();
    let shares: Vec<f64> = ids.iter().map(|id| in_force.get(id).copied().unwrap_or(0) as f64).collect();
    let sum: f64 = shares.iter().sum();
    let scale = if sum > capacity { capacity / sum } else { 1.0 };
    shares.into_iter().map(|share| share * scale).collect()
}
