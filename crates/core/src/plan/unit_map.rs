//! The units of a layout: which samples each unit holds ([`UnitMap`]), and a plan sorted by unit
//! ([`PlanUnits`]).
//!
//! A *unit* is what the sweep loads and evicts as one: a chunk, or the several chunks of one sample that is
//! larger than a chunk. A sample is in exactly one unit.

use super::{PackedInts, PackedIntsBuilder, Plan, bits::Bits};
use crate::Kind;
use std::{ops::Range, sync::Arc};

/// The samples and the length of each unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitMap {
    bytes: Vec<u64>,
    /// The number of samples before each unit, and of all.
    starts: Arc<PackedInts>,
    /// The samples, by unit.
    samples: Arc<PackedInts>,
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
    /// # Errors
    /// As [`UnitMap::of_iter`].
    pub fn new(unit_of: &[u32], bytes: Vec<u64>) -> Result<Self, BadUnitMap> {
        Self::of_iter(unit_of.iter().copied(), bytes)
    }

    /// Returns the map in which the units of the samples are those of `unit_of`, in order, and unit u has
    /// `bytes[u]` bytes.
    ///
    /// A counting sort takes O(samples + units). The map keeps 8 bytes a unit, and next to nothing a sample
    /// where the samples of a unit follow each other, as in a pack; else up to 4 bytes each.
    ///
    /// # Errors
    /// [`BadUnitMap::Unit`], [`BadUnitMap::TooMany`], [`BadUnitMap::TooLong`].
    pub fn of_iter(unit_of: impl Iterator<Item = u32> + Clone, bytes: Vec<u64>) -> Result<Self, BadUnitMap> {
        let units = bytes.len();
        let count = unit_of.clone().count();
        for n in [count, units] {
            if n > 1 << 31 {
                return Err(BadUnitMap::TooMany(n));
            }
        }
        let total = bytes.iter().try_fold(0u64, |sum, &b| sum.checked_add(b)).ok_or(BadUnitMap::TooLong)?;
        let mut starts = vec![0u32; units + 1];
        for (sample, unit) in (0u32..).zip(unit_of.clone()) {
            match starts.get_mut(unit as usize + 1) {
                Some(n) => *n += 1,
                None => return Err(BadUnitMap::Unit { sample, unit, units }),
            }
        }
        for u in 0..units {
            starts[u + 1] += starts[u];
        }
        let packed_starts = starts.iter().copied().collect();
        let samples: PackedInts = if unit_of.clone().is_sorted() {
            (0u32..).take(count).collect()
        } else {
            let mut samples = vec![0u32; count];
            for (sample, unit) in (0u32..).zip(unit_of) {
                let at = &mut starts[unit as usize];
                samples[*at as usize] = sample;
                *at += 1;
            }
            samples.into_iter().collect()
        };
        Ok(UnitMap { bytes, starts: Arc::new(packed_starts), samples: Arc::new(samples), total })
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
    pub fn samples_of(&self, unit: u32) -> impl ExactSizeIterator<Item = u32> + '_ {
        range_of(&self.starts, unit).map(|at| self.samples.get(at as usize))
    }
}

/// Returns the range of a unit.
fn range_of(starts: &PackedInts, unit: u32) -> Range<u32> {
    starts.get(unit as usize)..starts.get(unit as usize + 1)
}

/// The first pass of a plan, sorted by unit. A position in it is a *slot*; the slots of a unit are a range.
#[derive(Debug, Clone)]
pub struct PlanUnits {
    starts: Arc<PackedInts>,
    entries: Arc<PackedInts>,
}

impl PlanUnits {
    /// Sorts a plan by unit. A plan of all samples shares the map's own tables; another plan costs at
    /// most 4 bytes an entry.
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
        let (mut starts, mut entries) = (PackedIntsBuilder::default(), PackedIntsBuilder::default());
        let so_far = |entries: &PackedIntsBuilder| u32::try_from(entries.len()).unwrap_or(u32::MAX);
        for unit in 0..unit_map.units() {
            starts.push(so_far(&entries));
            for s in unit_map.samples_of(u32::try_from(unit).unwrap_or(u32::MAX)) {
                if let Some(first) = plan.first_entry(s) {
                    (first..first + plan.copies_of(s)).for_each(|entry| entries.push(entry));
                }
            }
        }
        starts.push(so_far(&entries));
        Ok(PlanUnits { starts: Arc::new(starts.finish()), entries: Arc::new(entries.finish()) })
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
        let (mut starts, mut sum) = (PackedIntsBuilder::default(), 0u32);
        starts.push(sum);
        for &n in sizes {
            sum = sum.checked_add(n)?;
            starts.push(sum);
        }
        let (starts, entries) = (Arc::new(starts.finish()), Arc::new(entries.into_iter().collect()));
        (sum as usize == PackedInts::len(&entries)).then_some(PlanUnits { starts, entries })
    }

    /// Returns how many units the layout has.
    #[must_use]
    pub fn units(&self) -> u32 {
        u32::try_from(self.starts.len() - 1).unwrap_or(u32::MAX)
    }

    /// Returns the number of slots: the entries of one pass.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.starts.get(self.starts.len() - 1)
    }

    /// Returns the plan entry of a slot.
    #[must_use]
    pub fn entry(&self, slot: u32) -> u32 {
        self.entries.get(slot as usize)
    }

    /// Returns the slots of a unit.
    #[must_use]
    pub fn of_unit(&self, unit: u32) -> Range<u32> {
        range_of(&self.starts, unit)
    }

    /// Returns the unit of a slot, by binary search.
    #[must_use]
    pub fn unit(&self, slot: u32) -> u32 {
        u32::try_from(self.starts.count_at_most(slot) - 1).unwrap_or(u32::MAX)
    }

    /// Converts a bitmap over plan entries (pass 0) to a bitmap over slots.
    #[must_use]
    pub fn to_slots(&self, entries: &Bits) -> Bits {
        let mut out = Bits::zeros(u64::from(self.slots()));
        for (slot, e) in (0u64..).zip(self.entries.iter()) {
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
            out.set(u64::from(self.entries.get(usize::try_from(slot).unwrap_or(usize::MAX))));
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
