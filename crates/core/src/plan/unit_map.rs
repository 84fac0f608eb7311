//! How samples lie in the things that are fetched and evicted: the view of a layout that a
//! substituting order needs, and a plan laid over it.
//!
//! A *unit* is what one fetch brings and one eviction drops: a chunk, or the several chunks of
//! one sample that is larger than a chunk. A sample lies in exactly one unit.

use super::{Plan, bits::Bits};
use crate::Kind;
use std::{ops::Range, sync::Arc};

/// Which samples each unit holds, and how long it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitMap {
    bytes: Vec<u64>,
    starts: Arc<[u32]>,
    samples: Arc<[u32]>,
    total: u64,
}

/// Tables that contradict each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadUnitMap {
    /// A sample is said to lie in a unit that does not exist.
    #[error("sample {sample} lies in unit {unit} of {units}")]
    Unit {
        /// Which sample.
        sample: u32,
        /// Where it is said to be.
        unit: u32,
        /// How many units there are.
        units: usize,
    },
    /// More samples or units than 2^31.
    #[error("{0} samples or units are too many")]
    TooMany(usize),
    /// Units that together are longer than a length can be.
    #[error("the units have 2^64 bytes or more together")]
    TooLong,
    /// The plan is for a version with another number of samples.
    #[error("a plan for {plan} samples over a layout of {unit_map}")]
    Samples {
        /// Samples of the plan's version.
        plan: u32,
        /// Samples of the layout.
        unit_map: usize,
    },
}

impl BadUnitMap {
    /// Who can act on it.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            BadUnitMap::Samples { .. } => Kind::Invalid,
            BadUnitMap::Unit { .. } | BadUnitMap::TooMany(_) | BadUnitMap::TooLong => Kind::Corrupt,
        }
    }
}

impl UnitMap {
    /// `unit_of[s]` is the unit of sample s, `bytes[u]` the length of unit u. Counting sort:
    /// O(samples + units), 4 bytes a sample and 12 a unit kept.
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

    /// How many units there are.
    #[must_use]
    pub fn units(&self) -> usize {
        self.bytes.len()
    }

    /// How many samples there are.
    #[must_use]
    pub fn samples(&self) -> usize {
        self.samples.len()
    }

    /// The length of all units together, in bytes.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.total
    }

    /// The length of a unit, in bytes.
    #[must_use]
    pub fn bytes(&self, unit: u32) -> u64 {
        self.bytes[unit as usize]
    }

    /// The samples of a unit, ascending.
    #[must_use]
    pub fn samples_of(&self, unit: u32) -> &[u32] {
        let u = unit as usize;
        &self.samples[self.starts[u] as usize..self.starts[u + 1] as usize]
    }
}

/// The first pass of a plan, laid over a shape: its entries in the order of the units they
/// need. A place in that order is a *slot*; the slots of a unit are a range.
#[derive(Debug, Clone)]
pub struct PlanUnits {
    starts: Arc<[u32]>,
    entries: Arc<[u32]>,
}

impl PlanUnits {
    /// Lays `plan` over `shape`. A plan of everything shares the shape's own tables; another
    /// one costs 4 bytes an entry.
    ///
    /// # Errors
    /// [`BadUnitMap::Samples`] when they are not of one version.
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

    /// Every sample of a shape, once.
    pub(crate) fn all_of(unit_map: &UnitMap) -> Self {
        PlanUnits { starts: unit_map.starts.clone(), entries: unit_map.samples.clone() }
    }

    /// Whether it is [`PlanUnits::all_of`] this shape.
    pub(crate) fn is_all_of(&self, unit_map: &UnitMap) -> bool {
        Arc::ptr_eq(&self.entries, &unit_map.samples)
    }

    /// From the number of slots of each unit, and their entries; `None` when they do not add up.
    pub(crate) fn of_sizes(sizes: &[u32], entries: Vec<u32>) -> Option<Self> {
        let mut starts = vec![0u32];
        for &n in sizes {
            starts.push(starts[starts.len() - 1].checked_add(n)?);
        }
        let whole = starts[starts.len() - 1] as usize == entries.len();
        whole.then(|| PlanUnits { starts: starts.into(), entries: entries.into() })
    }

    /// How many units the layout has.
    #[must_use]
    pub fn units(&self) -> u32 {
        u32::try_from(self.starts.len() - 1).unwrap_or(u32::MAX)
    }

    /// How many slots there are: the entries of one pass.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.starts[self.starts.len() - 1]
    }

    /// The plan entry of a slot.
    #[must_use]
    pub fn entry(&self, slot: u32) -> u32 {
        self.entries[slot as usize]
    }

    /// The slots of a unit.
    #[must_use]
    pub fn of_unit(&self, unit: u32) -> Range<u32> {
        self.starts[unit as usize]..self.starts[unit as usize + 1]
    }

    /// The unit of a slot: a binary search.
    #[must_use]
    pub fn unit(&self, slot: u32) -> u32 {
        u32::try_from(self.starts.partition_point(|&s| s <= slot) - 1).unwrap_or(u32::MAX)
    }

    /// A bitmap over plan entries (pass 0) as one over slots.
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

    /// A bitmap over slots as one over plan entries (pass 0), `len` bits long.
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
        fn a_plan_laid_over_a_shape_is_the_plan(unit_of in proptest::collection::vec(0u32..12, 1..120), chosen in proptest::collection::vec(any::<u64>(), 1..40)) {
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
                (0..plan.entries()).step_by(3).for_each(|e| { some.set(e); });
                prop_assert_eq!(plan_units.to_entries(&plan_units.to_slots(&some), plan.entries()), some);
            }
        }
    }

    #[test]
    fn contradictions_are_refused() {
        assert_eq!(UnitMap::new(&[0, 2], vec![1, 1]), Err(BadUnitMap::Unit { sample: 1, unit: 2, units: 2 }));
        let unit_map = UnitMap::new(&[0, 1], vec![1, 1]).expect("unit_map");
        assert!(PlanUnits::new(&Plan::all(3).expect("plan"), &unit_map).is_err());
        assert_eq!(UnitMap::new(&[0, 1], vec![u64::MAX, 1]), Err(BadUnitMap::TooLong));
        let longest = UnitMap::new(&[0, 1], vec![u64::MAX - 1, 1]).expect("unit_map");
        assert_eq!(longest.total_bytes(), u64::MAX);
    }
}
