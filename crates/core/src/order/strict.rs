//! The strict order: a keyed permutation of a plan's entries, known before the epoch starts
//! (`docs/FORMATS-epochs.md`, "Strict order").
//!
//! With batch G and R ranks:
//!
//! I1. Position p belongs to step ⌊p/G⌋, and in it to rank ⌊(p mod G)·R/G⌋. So a step is the same set for
//!     every R that divides G.
//! I2. Each entry of the plan is at exactly one position. `drop` cuts the last positions; `pad` repeats the
//!     first positions as entries of their own.
//! I3. Copies of one entry (data echoing) are at least `apart` positions from each other.
//!
//! Echoes: the base's permutation is cut into runs of `apart` to `2·apart` positions. Runs are grouped two by
//! two, and the last three if their number is odd. Each group is delivered `copies` times before the next
//! group. From the second time on, each run is shuffled within itself. So an entry comes again one group
//! later, at least the other run's length away.
//!
//! By units: where many samples share a unit, a permutation of samples would need each unit again for each of
//! its samples. Then the base is the units in permuted order, one after another, and blocks of it are
//! shuffled. A reader that holds a block's units reads each unit once.

use crate::plan::{Item, PAD, Plan, World, key::OrderKey, permutation::Permutation, unit_map::PlanUnits};
use std::ops::Range;

/// The order of the base, before echoes.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "an epoch has one, and reads it for each entry")]
enum Base {
    /// A permutation of the base's entries.
    Flat(Permutation),
    /// Units in permuted order, with the position where each begins, shuffled in blocks of `block` positions.
    Units { plan_units: PlanUnits, order: Vec<u32>, begins: Vec<u32>, block: u64 },
}

/// The strict order of one epoch.
#[derive(Debug, Clone)]
pub struct Strict {
    plan: Plan,
    world: World,
    key: OrderKey,
    base: Base,
    entries: u64,
    runs: u64,
}

/// The step and rank of a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepPosition {
    /// The step, from 0.
    pub step: u64,
    /// The rank, from 0.
    pub rank: u32,
    /// The index among the rank's entries of that step, from 0.
    pub index: u32,
}

impl Strict {
    /// Returns the order of the epoch with this key.
    #[must_use]
    pub fn new(plan: Plan, world: World, key: OrderKey) -> Self {
        let base = Base::Flat(Permutation::new(&key, "order", 0, plan.base_entries()));
        Strict::over(base, plan, world, key)
    }

    /// Returns the order by units: units in permuted order, shuffled in blocks of `block` positions. The last
    /// block may be almost twice as long. Memory: 8 bytes a unit.
    ///
    /// # Panics
    /// When `plan_units` belongs to another plan.
    #[must_use]
    pub fn by_units(plan: Plan, world: World, key: OrderKey, plan_units: PlanUnits, block: u32) -> Self {
        assert_eq!(u64::from(plan_units.slots()), plan.base_entries(), "the plan's own units");
        let units = plan_units.units();
        let permutation = Permutation::new(&key, "units", 0, u64::from(units));
        let order: Vec<u32> =
            (0..u64::from(units)).map(|p| u32::try_from(permutation.at(p)).unwrap_or(u32::MAX)).collect();
        let mut at = 0;
        let begins = order
            .iter()
            .map(|&u| {
                let slots = plan_units.of_unit(u);
                let begin = at;
                at += slots.end - slots.start;
                begin
            })
            .collect();
        Strict::over(
            Base::Units { plan_units, order, begins, block: u64::from(block.max(1)) },
            plan,
            world,
            key,
        )
    }

    fn over(base: Base, plan: Plan, world: World, key: OrderKey) -> Self {
        let entries = plan.base_entries();
        let runs = match plan.echo() {
            e if e.copies > 1 => (entries / u64::from(e.apart)).max(2),
            _ => 1,
        };
        Strict { base, entries, plan, world, key, runs }
    }

    /// Returns the base entry at a position of the base.
    fn base_at(&self, p: u64) -> u64 {
        match &self.base {
            Base::Flat(permutation) => permutation.at(p),
            Base::Units { plan_units, order, begins, block } => {
                let blocks = (self.entries / block).max(1);
                let i = (p / block).min(blocks - 1);
                let (from, to) = (i * block, if i + 1 == blocks { self.entries } else { (i + 1) * block });
                let q = from + Permutation::new(&self.key, "block", i, to - from).at(p - from);
                let q = u32::try_from(q).unwrap_or(u32::MAX);
                let at = begins.partition_point(|&b| b <= q) - 1;
                u64::from(plan_units.entry(plan_units.of_unit(order[at]).start + (q - begins[at])))
            }
        }
    }

    /// Returns the number of positions: the entries that the epoch delivers.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.world.delivered(self.plan.entries())
    }

    /// Returns whether the epoch delivers nothing, because `drop` leaves out an incomplete first step.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The plan it orders.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns the position where run `i` begins.
    fn run_start(&self, i: u64) -> u64 {
        let n = u128::from(self.entries);
        u64::try_from(u128::from(i) * n / u128::from(self.runs)).unwrap_or(u64::MAX)
    }

    /// Returns the entry at a position below [`Plan::entries`], before the tail rule.
    fn plan_entry(&self, p: u64) -> u32 {
        let copies = u64::from(self.plan.echo().copies);
        let n = self.entries;
        let number = |x: u64| u32::try_from(x).unwrap_or(u32::MAX);
        if copies == 1 {
            return number(self.base_at(p));
        }
        // The group that holds p: runs 2g and 2g+1, and a third where the number is odd.
        let groups = self.runs / 2;
        let bounds =
            |g: u64| (self.run_start(2 * g), if g + 1 == groups { n } else { self.run_start(2 * g + 2) });
        let (mut low, mut high) = (0, groups - 1);
        while low < high {
            let mid = (low + high).div_ceil(2);
            if bounds(mid).0 * copies <= p { low = mid } else { high = mid - 1 }
        }
        let (begin, end) = bounds(low);
        let (pass, at) = ((p - begin * copies) / (end - begin), begin + (p - begin * copies) % (end - begin));
        let at = if pass == 0 {
            at
        } else {
            let last = if low + 1 == groups { self.runs } else { 2 * low + 2 };
            let run = (2 * low..last).rev().find(|&r| self.run_start(r) <= at).unwrap_or(2 * low);
            let (from, to) = (self.run_start(run), self.run_start(run + 1));
            from + Permutation::new(&self.key, "echo", run * copies + pass, to - from).at(at - from)
        };
        number(pass * n + self.base_at(at))
    }

    /// Returns the entry at position `p`. Entries from [`Plan::entries`] on are pads.
    ///
    /// # Panics
    /// When `p` is past the end.
    #[must_use]
    pub fn entry(&self, p: u64) -> u32 {
        assert!(p < self.len(), "position {p} of {}", self.len());
        if p < self.plan.entries() { self.plan_entry(p) } else { u32::try_from(p).unwrap_or(u32::MAX) }
    }

    /// Returns the item of an entry or a pad. Pad number i repeats the sample at position i, modulo the
    /// plan's length.
    #[must_use]
    pub fn item(&self, entry: u32) -> Item {
        match u64::from(entry).checked_sub(self.plan.entries()) {
            None => self.plan.item(entry),
            Some(i) => {
                let sample = self.plan.item(self.plan_entry(i % self.plan.entries())).sample;
                Item { sample, copy: PAD + u32::try_from(i).unwrap_or(0) }
            }
        }
    }

    /// Returns the entries that `drop` leaves out: those at the last positions.
    pub fn dropped(&self) -> impl Iterator<Item = u32> + '_ {
        (self.len()..self.plan.entries()).map(|p| self.plan_entry(p))
    }

    /// Returns the entries that `pad` adds.
    #[must_use]
    pub fn padded(&self) -> Range<u32> {
        let number = |x: u64| u32::try_from(x).unwrap_or(u32::MAX);
        number(self.plan.entries())..number(self.len().max(self.plan.entries()))
    }

    /// Returns the number of steps of the epoch, the same for every rank.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.world.steps(self.plan.entries())
    }

    /// Returns the step and rank of position `p`.
    #[must_use]
    pub fn step_position(&self, p: u64) -> StepPosition {
        step_position(p, self.world.batch, self.world.ranks)
    }

    /// Returns the positions of one rank in one step. They are fewer only at the end of an epoch with `keep`.
    #[must_use]
    pub fn positions(&self, step: u64, rank: u32) -> Range<u64> {
        let per = u64::from(self.world.batch / self.world.ranks);
        let from = step * u64::from(self.world.batch) + u64::from(rank) * per;
        from.min(self.len())..(from + per).min(self.len())
    }
}

/// Returns the step and rank of position `p` (I1).
#[must_use]
pub fn step_position(p: u64, batch: u32, ranks: u32) -> StepPosition {
    let (g, r) = (u64::from(batch), u64::from(ranks));
    let rank = p % g * r / g;
    StepPosition {
        step: p / g,
        rank: u32::try_from(rank).unwrap_or(u32::MAX),
        index: u32::try_from(p % g - rank * g / r).unwrap_or(u32::MAX),
    }
}

#[cfg(test)]
mod tests;
