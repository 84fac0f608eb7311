//! Residency: which units of a layout a cache holds, as a versioned value that may be old.
//!
//! No correctness may depend on it. A unit that the snapshot has and the cache lacks costs a fetch. A unit
//! that the cache has and the snapshot lacks costs an opportunity.

use crate::plan::bits::Bits;

/// A snapshot of the units of one layout that a cache holds, or several caches together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Residency {
    version: u64,
    units: Bits,
}

impl Residency {
    /// Returns a snapshot. `version` grows with every change of the cache.
    #[must_use]
    pub fn new(version: u64, units: Bits) -> Self {
        Residency { version, units }
    }

    /// Returns the version: the newer of two snapshots has the higher one.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns the units that the cache held.
    #[must_use]
    pub fn units(&self) -> &Bits {
        &self.units
    }

    /// Returns whether the cache held a unit.
    #[must_use]
    pub fn has(&self, unit: u32) -> bool {
        self.units.get(u64::from(unit))
    }

    /// Sets whether the cache holds a unit, and raises the version.
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

    /// Returns how many units the cache held.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.units.count()
    }

    /// Returns the units that either of two caches held: the view of a cluster from those of its members.
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

/// An order of a policy to the store. The store obeys the orders in sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheAction {
    /// Evict this unit from the cache.
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
