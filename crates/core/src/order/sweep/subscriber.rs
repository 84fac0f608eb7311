//! One job at a sweep: what its epoch still needs, what it has taken (R4), and its pace.

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

/// A taken sample. It is due when the sweep reaches position `at`, and void when its unit's generation is no
/// longer `generation`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Due {
    pub(super) at: u64,
    pub(super) slot: u32,
    pub(super) unit: u32,
    pub(super) generation: u32,
}

impl Due {
    /// Whether the sample can be handed out: the window still has its unit, and its slot is left.
    pub(super) fn is_valid(&self, generations: &[u32], left: &Bits) -> bool {
        generations[self.unit as usize] == self.generation && left.get(u64::from(self.slot))
    }
}

/// What a job needs and has taken of one unit. The three values stand together because they are read
/// together, and those of many jobs do not fit into the processor's caches.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct UnitState {
    /// Slots that the epoch has left.
    pub(super) left: u32,
    /// The unit's generation when the job took it.
    pub(super) taken: u32,
    /// Taken slots that are not handed out yet.
    pub(super) backlog: u32,
}

/// The state of one job. Vectors are indexed by unit.
#[derive(Debug, Clone)]
pub(super) struct Subscriber {
    /// False once the job has left. Another job may then get its number.
    pub(super) joined: bool,
    pub(super) plan_units: PlanUnits,
    /// Slots not yet handed out in this epoch.
    pub(super) left: Bits,
    /// Slots that the epoch had when it began, or was resumed.
    pub(super) total: u64,
    /// The backlog when the epoch began: what it took of the window then.
    pub(super) backlog_at_start: u64,
    pub(super) units: Vec<UnitState>,
    /// Taken samples, void ones included, soonest first.
    pub(super) due: BinaryHeap<Reverse<Due>>,
    /// How many entries of `due` are valid.
    pub(super) backlog: u64,
    /// Units of the reserve that have slots left.
    pub(super) reserve_units: Members,
    /// Slots left in units of the reserve.
    pub(super) reserve_left: u64,
    /// Slots of the epoch in units of the reserve.
    pub(super) reserve_total: u64,
    /// Ring indexes of the units that have slots left and are neither in the reserve nor taken.
    pub(super) lacking: Ring,
    /// Position of the sweep when the job last asked.
    pub(super) asked_at: u64,
    /// Samples that the job reads while the sweep loads one mean unit.
    pub(super) pace: f64,
    /// Samples handed out from window and reserve.
    pub(super) drawn: u64,
    /// The sweep's position and `drawn` when the pace was last measured.
    pub(super) measured_at: (u64, u64),
}

impl Subscriber {
    pub(super) fn new(units: usize, plan_units: PlanUnits, pace: f64, now: u64) -> Self {
        let slots = u64::from(plan_units.slots());
        Subscriber {
            joined: true,
            plan_units,
            left: Bits::zeros(slots),
            total: 0,
            backlog_at_start: 0,
            units: vec![UnitState::default(); units],
            due: BinaryHeap::new(),
            backlog: 0,
            reserve_units: Members::new(units),
            reserve_left: 0,
            reserve_total: 0,
            lacking: Ring::new(units),
            asked_at: now,
            pace,
            drawn: 0,
            measured_at: (now, 0),
        }
    }

    /// Returns whether the job's epoch has slots left in a unit.
    pub(super) fn needs(&self, unit: u32) -> bool {
        self.joined && self.units[unit as usize].left > 0
    }

    /// Returns how many slots of the plan are in a unit.
    pub(super) fn planned(&self, unit: u32) -> u64 {
        let r = self.plan_units.of_unit(unit);
        u64::from(r.end - r.start)
    }
}
