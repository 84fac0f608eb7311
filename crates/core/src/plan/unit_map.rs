//! The units of a layout: which samples each unit holds ([`UnitMap`]), and a plan sorted by unit
//! ([`PlanUnits`]).
//!
//! A *unit* is what the sweep loads and evicts as one: a chunk, or the several chunks of one sample that is
//! larger than a chunk. A sample is in exactly one unit.

use super::{Plan, bits::Bits};
use crate::Kind;
use std::{ops::Range, sync::Arc};

/// The samples and the length of each unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitMap {
    bytes: Vec<u64>,
    starts: Arc<[u32]>,
    samples: Arc<[u32]>,
    total: u64,
}

/// Why units, samples and plan do not fit together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadUnitMap {
    /// A sample is assigned to a unit that does not exist.
    #[error("sample {sample} is in unit {unit}, but there are {units} units, numbered from 0")]
    Unit {
        /// The sample.
        sample: u32,
        /// The unit that it is assigned to.
        unit: u32,
        /// Returns the number of units.
        units: usize,
    },
    /// There are more than 2^31 samples or units.
    #[error("{0} samples or units are too many; at most 2^31 are possible")]
    TooMany(usize),
    /// The units together have 2^64 bytes or more.
    #[error("the units together have 2^64 bytes or more")]
    TooLong,
    /// The plan is for a version with another number of samples.
    #[error("the plan is for {plan} samples, and the layout has {unit_map}")]
    Samples {
        /// Samples of the plan's version.
        plan: u32,
        /// Samples of the layout.
        unit_map: usize,
    },
}

impl BadUnitMap {
    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            BadUnitMap::Samples { .. } => Kind::Invalid,
            BadUnitMap::Unit { .. } | BadUnitMap::TooMany(_) | BadUnitMap::TooLong => Kind::Corrupt,
        }
    }
}

impl UnitMap {
    /// Returns the map in which sample s is in unit `unit_of[s]`, and unit u has `bytes[u]` bytes.
    ///
    /// A counting sort takes O(samples + units). The map keeps 4 bytes a sample and 12 bytes a unit.
    ///
    /// # Errors
    /// [`BadUnitMap::Unit`], [`BadUnitMap::TooMany`], [`BadUnitMap::TooLong`].
    pub fn new(unit_of: &[u32], bytes: Vec<u64>) -> Result<Self, BadUnitMap> {
        let units = bytes.len();
        for n in [unit_of.len(), units] {
            if n > 1 << 31 {
                return Err(BadUnitMap::TooMany(n));
            }
        }
        let total = bytes.iter().try_fold(0u64, |sum, &b| sum.checked_add(b)).ok_or(BadUnitMap::TooLong)?;
        let mut starts = vec![0u32; units + 1];
        for (sample, &unit) in (0u32..).zip(unit_of) {
            match starts.get_mut(unit as usize + 1) {
                Some(n) => *n += 1,
                None => return Err(BadUnitMap::Unit { sample, unit, units }),
            }
        }
        for u in 0..units {
            starts[u + 1] += starts[u];
        }
        let mut next = starts.clone();
        let mut samples = vec![0u32; unit_of.len()];
        for (sample, &unit) in (0u32..).zip(unit_of) {
            let at = &mut next[unit as usize];
            samples[*at as usize] = sample;
            *at += 1;
        }
        Ok(UnitMap { bytes, starts: starts.into(), samples: samples.into(), total })
    }

    /// Returns the number of units.
    #[must_use]
    pub fn units(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the number of samples.
    #[must_use]
    pub fn samples(&self) -> usize {
        self.samples.len()
    }

    /// Returns the length of all units together, in bytes.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.total
    }

    /// Returns the length of a unit, in bytes.
    #[must_use]
    pub fn bytes(&self, unit: u32) -> u64 {
        self.bytes[unit as usize]
    }

    /// Returns the samples of a unit, ascending.
    #[must_use]
    pub fn samples_of(&self, unit: u32) -> &[u32] {
        let u = unit as usize;
        &self.samples[self.starts[u] as usize..self.starts[u + 1] as usize]
    }
}

/// The first pass of a plan, sorted by unit. A position in it is a *slot*; the slots of a unit are a range.
#[derive(Debug, Clone)]
pub struct PlanUnits {
    starts: Arc<[u32]>,
    entries: Arc<[u32]>,
}

impl PlanUnits {
    /// Sorts a plan by unit. A plan of all samples shares the map's own tables; another plan costs 4 bytes an
    /// entry.
    ///
    /// # Errors
    /// [`BadUnitMap::Samples`] when plan and map belong to different versions.
    pub fn new(plan: &Plan, unit_map: &UnitMap) -> Result<Self, BadUnitMap> {
        if plan.samples() as usize != unit_map.samples() {
            return Err(BadUnitMap::Samples { plan: plan.samples(), unit_map: unit_map.samples() });
        }
        if plan.is_all() {
            return Ok(PlanUnits::all_of(unit_map));
        }
        let mut starts = Vec::with_capacity(unit_map.units() + 1);
        let mut entries = Vec::new();
        for unit in 0..unit_map.units() {
            starts.push(u32::try_from(entries.len()).unwrap_or(u32::MAX));
            for &s in unit_map.samples_of(u32::try_from(unit).unwrap_or(u32::MAX)) {
                if let Some(first) = plan.first_entry(s) {
                    entries.extend(first..first + plan.copies_of(s));
                }
            }
        }
        starts.push(u32::try_from(entries.len()).unwrap_or(u32::MAX));
        Ok(PlanUnits { starts: starts.into(), entries: entries.into() })
    }

    /// Returns the plan of every sample of a map, once, sorted by unit.
    pub(crate) fn all_of(unit_map: &UnitMap) -> Self {
        PlanUnits { starts: unit_map.starts.clone(), entries: unit_map.samples.clone() }
    }

    /// Returns whether this is [`PlanUnits::all_of`] this map.
    pub(crate) fn is_all_of(&self, unit_map: &UnitMap) -> bool {
        Arc::ptr_eq(&self.entries, &unit_map.samples)
    }

    /// Builds the value from the number of slots of each unit, and their entries. Returns `None` when the
    /// numbers do not add up.
    pub(crate) fn of_sizes(sizes: &[u32], entries: Vec<u32>) -> Option<Self> {
        let mut starts = vec![0u32];
        for &n in sizes {
            starts.push(starts[starts.len() - 1].checked_add(n)?);
        }
        let whole = starts[starts.len() - 1] as usize == entries.len();
        whole.then(|| PlanUnits { starts: starts.into(), entries: entries.into() })
    }

    /// Returns how many units the layout has.
    #[must_use]
    pub fn units(&self) -> u32 {
        u32::try_from(self.starts.len() - 1).unwrap_or(u32::MAX)
    }

    /// Returns the number of slots: the entries of one pass.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.starts[self.starts.len() - 1]
    }

    /// Returns the plan entry of a slot.
    #[must_use]
    pub fn entry(&self, slot: u32) -> u32 {
        self.entries[slot as usize]
    }

    /// Returns the slots of a unit.
    #[must_use]
    pub fn of_unit(&self, unit: u32) -> Range<u32> {
        self.starts[unit as usize]..self.starts[unit as usize + 1]
    }

    /// Returns the unit of a slot, by binary search.
    #[must_use]
    pub fn unit(&self, slot: u32) -> u32 {
        u32::try_from(self.starts.partition_point(|&s| s <= slot) - 1).unwrap_or(u32::MAX)
    }

    /// Converts a bitmap over plan entries (pass 0) to a bitmap over slots.
    #[must_use]
    pub fn to_slots(&self, entries: &Bits) -> Bits {
        let mut out = Bits::zeros(u64::from(self.slots()));
        for (slot, &e) in (0u64..).zip(self.entries.iter()) {
            if entries.get(u64::from(e)) {
                out.set(slot);
            }
        }
        out
    }

    /// Converts a bitmap over slots to a bitmap over plan entries (pass 0), `len` bits long.
    #[must_use]
    pub fn to_entries(&self, slots: &Bits, len: u64) -> Bits {
        let mut out = Bits::zeros(len);
        for slot in slots.iter_in(0, slots.len()) {
            out.set(u64::from(self.entries[usize::try_from(slot).unwrap_or(usize::MAX)]));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_plan_sorted_by_unit_is_the_plan(
            unit_of in proptest::collection::vec(0u32..12, 1..120),
            chosen in proptest::collection::vec(any::<u64>(), 1..40),
        ) {
            let n = unit_of.len() as u64;
            let unit_map = UnitMap::new(&unit_of, vec![1; 12]).expect("unit_map");
            for plan in [Plan::all(n), Plan::subset(n, chosen.iter().map(|c| c % n))] {
                let plan = plan.expect("plan");
                let plan_units = PlanUnits::new(&plan, &unit_map).expect("same version");
                let mut entries: Vec<u32> = (0..plan_units.slots()).map(|s| plan_units.entry(s)).collect();
                for u in 0..12 {
                    for slot in plan_units.of_unit(u) {
                        prop_assert_eq!(unit_of[plan.item(plan_units.entry(slot)).sample as usize], u);
                        prop_assert_eq!(plan_units.unit(slot), u);
                    }
                }
                entries.sort_unstable();
                prop_assert_eq!(entries, (0..plan.entries() as u32).collect::<Vec<_>>());
                let mut some = Bits::zeros(plan.entries());
                (0..plan.entries()).step_by(3).for_each(|e| {
                    some.set(e);
                });
                prop_assert_eq!(plan_units.to_entries(&plan_units.to_slots(&some), plan.entries()), some);
            }
        }
    }

    #[test]
    fn contradictions_are_rejected() {
        assert_eq!(UnitMap::new(&[0, 2], vec![1, 1]), Err(BadUnitMap::Unit { sample: 1, unit: 2, units: 2 }));
        let unit_map = UnitMap::new(&[0, 1], vec![1, 1]).expect("unit_map");
        assert!(PlanUnits::new(&Plan::all(3).expect("plan"), &unit_map).is_err());
        assert_eq!(UnitMap::new(&[0, 1], vec![u64::MAX, 1]), Err(BadUnitMap::TooLong));
        let longest = UnitMap::new(&[0, 1], vec![u64::MAX - 1, 1]).expect("unit_map");
        assert_eq!(longest.total_bytes(), u64::MAX);
    }
}
