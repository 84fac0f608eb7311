//! One job's side of the sweep: what its epoch still needs, what it has taken, and its pace.

use crate::plan::{
    bits::{Bits, Ring},
    unit_map::PlanUnits,
};
use std::{cmp::Reverse, collections::BinaryHeap};

/// A set of small numbers with O(1) insert, remove and indexed access.
#[derive(Debug, Clone)]
pub(super) struct Members {
    list: Vec<u32>,
    at: Vec<u32>,
}

impl Members {
    pub(super) fn new(n: usize) -> Self {
        Members { list: Vec::new(), at: vec![u32::MAX; n] }
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(super) fn get(&self, i: u64) -> u32 {
        self.list[usize::try_from(i).unwrap_or(usize::MAX)]
    }

    pub(super) fn list(&self) -> &[u32] {
        &self.list
    }

    pub(super) fn insert(&mut self, x: u32) {
        if self.at[x as usize] == u32::MAX {
            self.at[x as usize] = u32::try_from(self.list.len()).unwrap_or(u32::MAX);
            self.list.push(x);
        }
    }

    pub(super) fn remove(&mut self, x: u32) {
        let i = std::mem::replace(&mut self.at[x as usize], u32::MAX);
        if i != u32::MAX
            && let Some(last) = self.list.pop()
            && last != x
        {
            self.list[i as usize] = last;
            self.at[last as usize] = i;
        }
    }

    pub(super) fn clear(&mut self) {
        for x in self.list.drain(..) {
            self.at[x as usize] = u32::MAX;
        }
    }
}

/// A taken sample: due when the sweep has reached `at`, void when its unit's generation is no
/// longer `generation`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Due {
    pub(super) at: u64,
    pub(super) slot: u32,
    pub(super) unit: u32,
    pub(super) generation: u32,
}

/// What a job has of one unit. Together, since many jobs' books do not fit into the processor's caches, and whoever
/// looks at one of these looks at another.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct UnitBook {
    /// Spots that the epoch has left.
    pub(super) rem: u32,
    /// The generation under which it was taken.
    pub(super) taken: u32,
    /// Taken slots that are left.
    pub(super) held: u32,
}

/// What the policy knows of one job. All per-unit vectors are indexed by unit.
#[derive(Debug, Clone)]
pub(super) struct Subscriber {
    pub(super) on: bool,
    pub(super) plan_units: PlanUnits,
    /// Spots not yet handed out in this epoch; how many the epoch had.
    pub(super) left: Bits,
    pub(super) total: u64,
    /// Of them, what the epoch found in the window when it began.
    pub(super) carried: u64,
    /// Of each unit.
    pub(super) books: Vec<UnitBook>,
    /// Taken samples by when they are due; how many of them are valid.
    pub(super) due: BinaryHeap<Reverse<Due>>,
    pub(super) backlog: u64,
    /// Reserve units with slots left; slots left in the reserve; reserve slots of the plan.
    pub(super) pins: Members,
    pub(super) pin_left: u64,
    pub(super) pin_all: u64,
    /// Places of the ring whose unit has slots left that are neither reserve nor taken.
    pub(super) lack: Ring,
    /// Position of the sweep when the job last asked.
    pub(super) last: u64,
    /// Own draws per mean unit of sweep, measured over half windows since `mark`.
    pub(super) pace: f64,
    pub(super) drawn: u64,
    pub(super) mark: (u64, u64),
}

impl Subscriber {
    pub(super) fn new(units: usize, plan_units: PlanUnits, pace: f64, now: u64) -> Self {
        let slots = u64::from(plan_units.slots());
        Subscriber {
            on: true,
            plan_units,
            left: Bits::zeros(slots),
            total: 0,
            carried: 0,
            books: vec![UnitBook::default(); units],
            due: BinaryHeap::new(),
            backlog: 0,
            pins: Members::new(units),
            pin_left: 0,
            pin_all: 0,
            lack: Ring::new(units),
            last: now,
            pace,
            drawn: 0,
            mark: (now, 0),
        }
    }

    pub(super) fn needs(&self, unit: u32) -> bool {
        self.on && self.books[unit as usize].rem > 0
    }

    /// Spots of the plan in a unit.
    pub(super) fn planned(&self, unit: u32) -> u64 {
        let r = self.plan_units.of_unit(unit);
        u64::from(r.end - r.start)
    }
}
