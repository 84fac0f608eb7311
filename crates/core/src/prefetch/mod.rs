//! Prefetch for orders that are known in advance: which unit to fetch next, and which to drop for it,
//! within a budget of bytes (DESIGN §7, clairvoyance).
//!
//! The order is a sequence of *positions*, each of which needs one unit. [`Prefetch::advance`] looks at
//! positions in order and asks for what is not here yet; a full budget stops it until positions were
//! served. Belady's rule ("A study of replacement algorithms", 1966) says what leaves: the unit whose
//! next use is furthest, and only if that use lies behind the position that needs the room.
//!
//! I1. What is loaded never exceeds the budget, in bytes; but a single unit that is larger than all of
//!     it is held alone, since its position must be served. (What is adopted was held before.)
//! I2. Loads come in the order of first use.
//! I3. Nothing in vain: what was loaded is dropped only after a position that needs it was served.
//! I4. Nobody waits for ever: after `advance` the first position not served has its unit held or here; but
//!     one that was lost when the budget was full of what is still to be used is read alone, not fetched.
//!
//! Cost: O(log units) a position. Memory: 8 bytes a position and 16 a unit.

pub mod segments;

use crate::{plan::bits::Bits, residency::CacheAction};
use std::{collections::BTreeSet, ops::Range};

/// No use any more.
const NEVER: u64 = u64::MAX;

/// Which positions need which units: the whole future of an order.
#[derive(Debug, Clone)]
pub struct Uses {
    unit_at: Vec<u32>,
    /// Positions by unit, ascending; those of unit u are `starts[u]..starts[u + 1]`.
    starts: Vec<u32>,
    positions: Vec<u32>,
}

/// A future that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadUses {
    /// A position needs a unit that does not exist.
    #[error("position {position} needs unit {unit} of {units}")]
    Unit {
        /// Which position.
        position: u64,
        /// What it needs.
        unit: u32,
        /// How many units there are.
        units: usize,
    },
    /// More than 2^32 − 1 positions.
    #[error("{0} positions are too many")]
    TooMany(usize),
}

impl BadUses {
    /// Who can act on it.
    #[must_use]
    pub fn kind(&self) -> crate::Kind {
        crate::Kind::Invalid
    }
}

impl Uses {
    /// The future of an order whose position p needs unit `unit_at[p]`, of `units` units.
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

    /// How many positions there are.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.unit_at.len() as u64
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.unit_at.is_empty()
    }

    fn of(&self, unit: u32) -> Range<usize> {
        self.starts[unit as usize] as usize..self.starts[unit as usize + 1] as usize
    }
}

/// What is fetched ahead for one order.
#[derive(Debug, Clone)]
pub struct Prefetch {
    uses: Uses,
    bytes: Vec<u64>,
    budget: u64,
    /// Whether a unit that is larger than all of the budget is held alone.
    alone: bool,
    held_bytes: u64,
    held: Vec<bool>,
    /// Of each unit: the first of its uses that was not served, as an index into the uses.
    first: Vec<u32>,
    served: Bits,
    /// The first position not served, and the first not looked at.
    head: u64,
    ahead: u64,
    /// The first position that was never looked at: what is used before is not dropped, even where a loss has
    /// taken `ahead` back.
    horizon: u64,
    /// Held units by their next use.
    by_use: BTreeSet<(u64, u32)>,
}

impl Prefetch {
    /// Nothing is held yet; `bytes` are the lengths of the units.
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
            alone: true,
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

    fn drop_unit(&mut self, unit: u32) {
        self.by_use.remove(&(self.next_use(unit), unit));
        self.held[unit as usize] = false;
        self.held_bytes -= self.bytes[unit as usize];
    }

    /// Makes room for `bytes` by dropping units whose next use lies behind `position` and was not yet looked
    /// at; whether there is.
    /// Nothing is dropped when that would not do.
    fn room(&mut self, bytes: u64, position: u64, actions: &mut Vec<CacheAction>) -> bool {
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
        let fits = (self.alone && left == 0) || left + bytes <= self.budget;
        for unit in victims.into_iter().filter(|_| fits) {
            self.drop_unit(unit);
            actions.push(CacheAction::Evict(unit));
        }
        fits
    }

    /// Decides as far ahead as the budget allows, at most to position `until`. What is `here` anyway (in
    /// a cache that is shared) is neither fetched nor held.
    pub fn advance(&mut self, until: u64, here: impl Fn(u32) -> bool, actions: &mut Vec<CacheAction>) {
        let end = until.max(self.head + 1).min(self.uses.len());
        while self.ahead < end {
            let unit = self.uses.unit_at[usize::try_from(self.ahead).unwrap_or(usize::MAX)];
            if !self.served.get(self.ahead) && !self.held[unit as usize] && !here(unit) {
                let bytes = self.bytes[unit as usize];
                if !self.room(bytes, self.ahead, actions) {
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

    /// A position was served, in whatever order ranks get to theirs.
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

    /// A unit is not here after all: its load failed, or it vanished from the cache that is shared. It is
    /// fetched again if a position that was looked at already needs it.
    pub fn lost(&mut self, unit: u32) {
        if self.held[unit as usize] {
            self.drop_unit(unit);
        }
        self.ahead = self.ahead.min(self.next_use(unit));
    }

    /// Drops what is held and has no use any more, without waiting until room is needed.
    pub fn drop_spent(&mut self, actions: &mut Vec<CacheAction>) {
        while let Some(&(NEVER, unit)) = self.by_use.last() {
            self.drop_unit(unit);
            actions.push(CacheAction::Evict(unit));
        }
    }

    /// Takes over a unit that is here already and would be dropped by who has it; whether there is a use for it.
    /// It counts as loaded, whatever the budget says.
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

    /// Whether a unit that is larger than all of the budget is held alone (at first, yes) or not at all.
    pub fn hold_alone(&mut self, yes: bool) {
        self.alone = yes;
    }

    /// Another budget. What is held stays until room is needed or its uses are over.
    pub fn set_budget(&mut self, budget: u64, actions: &mut Vec<CacheAction>) {
        self.budget = budget;
        while self.held_bytes > budget
            && let Some(&(next, unit)) = self.by_use.last()
            && next >= self.horizon
        {
            self.drop_unit(unit);
            actions.push(CacheAction::Evict(unit));
        }
    }

    /// Whether a unit is held (asked for, and not dropped).
    #[must_use]
    pub fn holds(&self, unit: u32) -> bool {
        self.held[unit as usize]
    }

    /// How long a unit is, in bytes.
    #[must_use]
    pub fn bytes_of(&self, unit: u32) -> u64 {
        self.bytes[unit as usize]
    }

    /// Bytes held.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// The first position that was not looked at.
    #[must_use]
    pub fn ahead(&self) -> u64 {
        self.ahead
    }

    /// The first position that was not served.
    #[must_use]
    pub fn head(&self) -> u64 {
        self.head
    }
}

#[cfg(test)]
mod tests;
