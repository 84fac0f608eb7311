//! Which units of a layout are here: a versioned, possibly stale value that pure code reads.
//!
//! Nothing may depend on it for correctness: a unit that is believed here and is not costs a
//! fetch, a unit that is here and not believed so costs an opportunity.

use crate::plan::bits::Bits;

/// A snapshot of what a cache (or several, merged) holds of one layout.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Residency {
    version: u64,
    units: Bits,
}

impl Residency {
    /// A snapshot; `version` grows with every change that its maker knows of.
    #[must_use]
    pub fn new(version: u64, units: Bits) -> Self {
        Residency { version, units }
    }

    /// Which of two snapshots is the newer.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// All that was here.
    #[must_use]
    pub fn units(&self) -> &Bits {
        &self.units
    }

    /// Whether a unit was here.
    #[must_use]
    pub fn has(&self, unit: u32) -> bool {
        self.units.get(u64::from(unit))
    }

    /// Sets whether a unit is here, and makes the snapshot a newer one.
    ///
    /// # Panics
    /// When the layout has no such unit.
    pub fn put(&mut self, unit: u32, here: bool) {
        self.version += 1;
        if here {
            self.units.set(u64::from(unit));
        } else {
            self.units.clear(u64::from(unit));
        }
    }

    /// How many units are here.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.units.count()
    }

    /// What is here or there: the view of a cluster from its members'.
    #[must_use]
    pub fn merged(&self, other: &Residency) -> Residency {
        let (mut units, more) = if self.units.len() >= other.units.len() {
            (self.units.clone(), &other.units)
        } else {
            (other.units.clone(), &self.units)
        };
        for u in more.iter_in(0, more.len()) {
            units.set(u);
        }
        Residency { version: self.version + other.version, units }
    }
}

/// What a policy tells the store to do, in sequence, so that the cache holds what the policy wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheAction {
    /// Evict this unit.
    Evict(u32),
    /// Fetch this unit and keep it.
    Load(u32),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_is_union() {
        let mut a = Residency::new(3, Bits::zeros(10));
        let mut b = Residency::new(4, Bits::zeros(12));
        a.put(1, true);
        b.put(11, true);
        b.put(1, false);
        let m = a.merged(&b);
        assert!(m.has(1) && m.has(11) && !m.has(2) && !m.has(99));
        assert_eq!((m.version(), m.count()), (10, 2));
    }
}
