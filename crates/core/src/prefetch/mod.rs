//! Prefetch for orders that are known in advance: which unit to fetch next, and which to evict for it, within
//! a budget of bytes.
//!
//! The order is a sequence of *positions*, each of which needs one unit. [`Prefetch::advance`] looks at
//! positions in order and loads the units that are not cached. A full budget stops it until positions are
//! served.
//!
//! Belady's rule ("A study of replacement algorithms", 1966) chooses the victim: the unit whose next use is
//! furthest, and only if that use is behind the position that needs the room.
//!
//! I1. Loaded units never exceed the budget, in bytes. One exception: a unit that is larger than the whole
//!     budget is held as the only unit, because its position must be served. (Adopted units were held
//!     before.)
//! I2. Loads come in the order of first use.
//! I3. No load is in vain: a loaded unit is evicted only after a position that needs it was served.
//! I4. No position waits for ever: after `advance`, the unit of the first unserved position is held or
//!     cached. One exception: a unit that was lost while all of the budget is still needed is not fetched;
//!     its position is read directly.
//!
//! Cost: O(log units) a position. Memory: 8 bytes a position and 16 a unit.

pub mod segments;

use crate::{plan::bits::Bits, residency::CacheAction};
use std::{collections::BTreeSet, ops::Range};

/// The next use of a unit that has no use left.
const NEVER: u64 = u64::MAX;

/// The unit that each position of an order needs.
#[derive(Debug, Clone)]
pub struct Uses {
    unit_at: Vec<u32>,
    /// Positions by unit, ascending. Those of unit u are at `starts[u]..starts[u + 1]`.
    starts: Vec<u32>,
    positions: Vec<u32>,
}

/// Why the uses of an order are impossible.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadUses {
    /// A position needs a unit that does not exist.
    #[error("position {position} needs unit {unit}, but there are {units} units, numbered from 0")]
    Unit {
        /// The position.
        position: u64,
        /// The unit that it needs.
        unit: u32,
        /// How many units there are.
        units: usize,
    },
    /// There are more than 2^32 − 1 positions.
    #[error("{0} positions are too many; at most 2^32 - 1 are possible")]
    TooMany(usize),
}

impl BadUses {
    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> crate::Kind {
        crate::Kind::Invalid
    }
}

impl Uses {
    /// Returns the uses of an order whose position p needs unit `unit_at[p]`, of `units` units.
    ///
    /// # Errors
    /// Any [`BadUses`].
    pub fn new(unit_at: Vec<u32>, units: usize) -> Result<Self, BadUses> {
        let n = u32::try_from(unit_at.len()).map_err(|_| BadUses::TooMany(unit_at.len()))?;
        let mut starts = vec![0u32; units + 1];
        for (position, &unit) in (0u64..).zip(&unit_at) {
            match starts.get_mut(unit as usize + 1) {
                Some(x) => *x += 1,
                None => return Err(BadUses::Unit { position, unit, units }),
            }
        }
        for u in 0..units {
            starts[u + 1] += starts[u];
        }
        let mut next = starts.clone();
        let mut positions = vec![0u32; unit_at.len()];
        for (p, &unit) in (0..n).zip(&unit_at) {
            let at = &mut next[unit as usize];
            positions[*at as usize] = p;
            *at += 1;
        }
        Ok(Uses { unit_at, starts, positions })
    }

    /// Returns the number of positions.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.unit_at.len() as u64
    }

    /// Returns whether there are no positions.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.unit_at.is_empty()
    }

    /// Returns where the positions of a unit are in `positions`.
    fn of(&self, unit: u32) -> Range<usize> {
        self.starts[unit as usize] as usize..self.starts[unit as usize + 1] as usize
    }
}

/// The units that are prefetched for one order.
#[derive(Debug, Clone)]
pub struct Prefetch {
    uses: Uses,
    bytes: Vec<u64>,
    budget: u64,
    /// Whether a unit that is larger than the whole budget may be held as the only unit.
    oversized_allowed: bool,
    held_bytes: u64,
    held: Vec<bool>,
    /// Of each unit: its first unserved use, as an index into `uses.positions`.
    first: Vec<u32>,
    served: Bits,
    /// The first unserved position.
    head: u64,
    /// The next position to look at.
    ahead: u64,
    /// The first position that was never looked at. A unit with a use before it is not evicted, even after a
    /// loss has moved `ahead` back.
    horizon: u64,
    /// Held units by their next use.
    by_use: BTreeSet<(u64, u32)>,
}

impl Prefetch {
    /// Returns a prefetch that holds no unit. `bytes` are the lengths of the units.
    ///
    /// # Panics
    /// When `bytes` is of another number of units.
    #[must_use]
    pub fn new(uses: Uses, bytes: Vec<u64>, budget: u64) -> Self {
        assert_eq!(uses.starts.len(), bytes.len() + 1, "a length for each unit");
        Prefetch {
            held: vec![false; bytes.len()],
            first: uses.starts[..bytes.len()].to_vec(),
            served: Bits::zeros(uses.len()),
            uses,
            bytes,
            budget,
            oversized_allowed: true,
            held_bytes: 0,
            head: 0,
            ahead: 0,
            horizon: 0,
            by_use: BTreeSet::new(),
        }
    }

    fn next_use(&self, unit: u32) -> u64 {
        let end = self.uses.of(unit).end;
        let at = self.first[unit as usize] as usize;
        if at < end { u64::from(self.uses.positions[at]) } else { NEVER }
    }

    /// Removes a unit from those held.
    fn release(&mut self, unit: u32) {
        self.by_use.remove(&(self.next_use(unit), unit));
        self.held[unit as usize] = false;
        self.held_bytes -= self.bytes[unit as usize];
    }

    /// Makes room for `bytes` by evicting units whose next use is behind `position` and was never looked at.
    /// Returns whether there is room. Evicts nothing when that would not suffice.
    fn make_room(&mut self, bytes: u64, position: u64, actions: &mut Vec<CacheAction>) -> bool {
        let (mut left, mut victims) = (self.held_bytes, Vec::new());
        for &(next, unit) in self.by_use.iter().rev() {
            if left == 0
                || left + bytes <= self.budget
                || next <= position.max(self.horizon.saturating_sub(1))
            {
                break;
            }
            left -= self.bytes[unit as usize];
            victims.push(unit);
        }
        let fits = (self.oversized_allowed && left == 0) || left + bytes <= self.budget;
        for unit in victims.into_iter().filter(|_| fits) {
            self.release(unit);
            actions.push(CacheAction::Evict(unit));
        }
        fits
    }

    /// Looks at positions as far as the budget allows, at most to position `until`, and loads their units. A
    /// unit that is `here` anyway, in a shared cache, is neither loaded nor held.
    pub fn advance(&mut self, until: u64, here: impl Fn(u32) -> bool, actions: &mut Vec<CacheAction>) {
        let end = until.max(self.head + 1).min(self.uses.len());
        while self.ahead < end {
            let unit = self.uses.unit_at[usize::try_from(self.ahead).unwrap_or(usize::MAX)];
            if !self.served.get(self.ahead) && !self.held[unit as usize] && !here(unit) {
                let bytes = self.bytes[unit as usize];
                if !self.make_room(bytes, self.ahead, actions) {
                    return;
                }
                actions.push(CacheAction::Load(unit));
                self.held[unit as usize] = true;
                self.held_bytes += bytes;
                self.by_use.insert((self.next_use(unit), unit));
            }
            self.ahead += 1;
            self.horizon = self.horizon.max(self.ahead);
        }
    }

    /// Marks a position as served. Ranks serve positions in any order.
    ///
    /// # Panics
    /// Past the end.
    pub fn serve(&mut self, position: u64) {
        if !self.served.set(position) {
            return;
        }
        let unit = self.uses.unit_at[usize::try_from(position).unwrap_or(usize::MAX)];
        let before = self.next_use(unit);
        let end = self.uses.of(unit).end;
        let at = &mut self.first[unit as usize];
        while (*at as usize) < end && self.served.get(u64::from(self.uses.positions[*at as usize])) {
            *at += 1;
        }
        if self.held[unit as usize] && self.by_use.remove(&(before, unit)) {
            self.by_use.insert((self.next_use(unit), unit));
        }
        while self.head < self.uses.len() && self.served.get(self.head) {
            self.head += 1;
        }
        self.ahead = self.ahead.max(self.head);
        self.horizon = self.horizon.max(self.ahead);
    }

    /// Notes that a unit is not cached: its load failed, or it vanished from the shared cache. It is loaded
    /// again if a position that was looked at needs it.
    pub fn lost(&mut self, unit: u32) {
        if self.held[unit as usize] {
            self.release(unit);
        }
        self.ahead = self.ahead.min(self.next_use(unit));
    }

    /// Evicts held units that have no use left, before their room is needed.
    pub fn evict_unused(&mut self, actions: &mut Vec<CacheAction>) {
        while let Some(&(NEVER, unit)) = self.by_use.last() {
            self.release(unit);
            actions.push(CacheAction::Evict(unit));
        }
    }

    /// Takes over a cached unit that its holder would evict. Returns whether this order has a use for it. The
    /// unit counts as loaded, even beyond the budget.
    pub fn adopt(&mut self, unit: u32) -> bool {
        let next = self.next_use(unit);
        if next == NEVER {
            return false;
        }
        if !std::mem::replace(&mut self.held[unit as usize], true) {
            self.held_bytes += self.bytes[unit as usize];
            self.by_use.insert((next, unit));
        }
        true
    }

    /// Sets whether a unit that is larger than the whole budget may be held as the only unit. The default is
    /// yes.
    pub fn allow_oversized(&mut self, yes: bool) {
        self.oversized_allowed = yes;
    }

    /// Changes the budget. A held unit stays until room is needed or its uses are over.
    pub fn set_budget(&mut self, budget: u64, actions: &mut Vec<CacheAction>) {
        self.budget = budget;
        while self.held_bytes > budget
            && let Some(&(next, unit)) = self.by_use.last()
            && next >= self.horizon
        {
            self.release(unit);
            actions.push(CacheAction::Evict(unit));
        }
    }

    /// Returns whether a unit is held: loaded, and not evicted.
    #[must_use]
    pub fn holds(&self, unit: u32) -> bool {
        self.held[unit as usize]
    }

    /// Returns the length of a unit, in bytes.
    #[must_use]
    pub fn bytes_of(&self, unit: u32) -> u64 {
        self.bytes[unit as usize]
    }

    /// Returns the bytes of all held units.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Returns the next position to look at.
    #[must_use]
    pub fn ahead(&self) -> u64 {
        self.ahead
    }

    /// Returns the first unserved position.
    #[must_use]
    pub fn head(&self) -> u64 {
        self.head
    }
}

#[cfg(test)]
mod tests;
