//! The assignment of a strict order to ranks, for one world of an epoch.
//!
//! A world divides the positions that are not acknowledged when it begins, in order, and then the pads. It
//! divides them as the whole order is divided ([`super::strict::step_position`]): step by step, each step in
//! equal runs by rank. Under `drop`, the rest of a last step is divided in runs as long as the ranks' shares.
//! So a world that begins at a step boundary continues exactly what another number of ranks would have done.
//!
//! I1. The sequences of ranks are disjoint, and together they are the entries that [`Leases`] divides.
//! I2. A rank's next entries depend only on which entries are free, so they are the same after a restart.

use super::strict::Strict;
use crate::delivery::lease::Leases;
use std::collections::BTreeMap;

/// The sequences of all ranks in one world of an epoch.
#[derive(Debug, Clone)]
pub struct StrictAssignment {
    /// This world delivers these positions below `suffix`, and then all positions from `suffix` to `end`.
    holes: Vec<u64>,
    suffix: u64,
    end: u64,
    pads: Vec<u32>,
    batch: u64,
    ranks: u64,
    shares: Vec<u64>,
    /// Of each rank: before this position of its sequence, every entry is granted or acknowledged.
    cursor: Vec<u64>,
    /// Of each live lease of this world: its rank, and the position in the rank's sequence where it begins.
    begun: BTreeMap<u64, (usize, u64)>,
}

impl StrictAssignment {
    /// Returns the assignment for the world of `leases`, which has just begun: no lease may be live.
    ///
    /// After a restart, `leases` are those at the beginning of the world too. The cursors begin anew and skip
    /// entries that are not free.
    #[must_use]
    pub fn begin(strict: &Strict, leases: &Leases) -> Self {
        let world = leases.world();
        let end = strict.len().min(strict.plan().entries());
        // A suffix of free entries needs no list of positions.
        let mut suffix = end;
        while suffix > 0 && leases.is_free(strict.entry(suffix - 1)) {
            suffix -= 1;
        }
        let holes = (0..suffix).filter(|&p| leases.is_free(strict.entry(p))).collect();
        let shares: Vec<u64> = (0..world.ranks).map(|r| leases.left(r)).collect();
        StrictAssignment {
            holes,
            suffix,
            end,
            pads: leases.pads_free().collect(),
            batch: u64::from(world.batch),
            ranks: u64::from(world.ranks),
            cursor: vec![0; shares.len()],
            shares,
            begun: BTreeMap::new(),
        }
    }

    /// Returns how many positions of the plan this world delivers.
    fn rest(&self) -> u64 {
        self.holes.len() as u64 + (self.end - self.suffix)
    }

    /// Returns how many entries this world divides, pads included.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.rest() + self.pads.len() as u64
    }

    /// Returns whether this world has nothing to divide.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the entry at index `q` of all that this world divides: step after step, in each step rank
    /// after rank.
    #[must_use]
    pub fn at(&self, strict: &Strict, q: u64) -> Option<u32> {
        let rest = self.rest();
        if q >= rest {
            return self.pads.get(usize::try_from(q - rest).ok()?).copied();
        }
        let held = self.holes.len() as u64;
        let p = match usize::try_from(q) {
            Ok(i) if q < held => self.holes[i],
            _ => self.suffix + (q - held),
        };
        Some(strict.entry(p))
    }

    /// Returns the index, for [`StrictAssignment::at`], of the `j`-th entry of a rank.
    fn index(&self, rank: usize, j: u64) -> u64 {
        let per = self.batch / self.ranks;
        let full = (self.rest() + self.pads.len() as u64) / self.batch;
        if j < full * per {
            return j / per * self.batch + rank as u64 * per + j % per;
        }
        let before: u64 = self.shares[..rank].iter().map(|s| s.saturating_sub(full * per)).sum();
        full * self.batch + before + (j - full * per)
    }

    /// Returns a rank's next `n` free entries, and the position of the first in the rank's sequence.
    #[must_use]
    pub fn next(&mut self, strict: &Strict, leases: &Leases, rank: u32, n: u32) -> (Vec<u32>, u64) {
        let r = rank as usize;
        let (Some(&share), Some(&from)) = (self.shares.get(r), self.cursor.get(r)) else {
            return (Vec::new(), 0);
        };
        let (mut out, mut j, mut first) = (Vec::new(), from, None);
        while j < share && out.len() < n as usize {
            if let Some(e) = self.at(strict, self.index(r, j)).filter(|&e| leases.is_free(e)) {
                first.get_or_insert(j);
                out.push(e);
            }
            j += 1;
        }
        self.cursor[r] = j;
        (out, first.unwrap_or(j))
    }

    /// Notes that a lease holds entries of a rank from position `from` on.
    pub fn granted(&mut self, lease: u64, rank: u32, from: u64) {
        self.begun.insert(lease, (rank as usize, from));
    }

    /// Notes that a lease expired: its entries come again, before later entries of its rank.
    pub fn expired(&mut self, lease: u64, rank: u32) {
        // A lease from before a restart is unknown: begin at 0 and skip what is not free.
        let (rank, from) = self.begun.remove(&lease).unwrap_or((rank as usize, 0));
        if let Some(c) = self.cursor.get_mut(rank) {
            *c = (*c).min(from);
        }
    }

    /// Notes that all entries of a lease were acknowledged.
    pub fn settled(&mut self, lease: u64) {
        self.begun.remove(&lease);
    }
}

#[cfg(test)]
mod tests;
