//! Whose turn a position of the strict order is: the strict order as ranks draw it, in one world, over
//! what that world began with.
//!
//! The positions that are not acknowledged when a world begins, in order, and then the pads, are shared
//! like the whole order is ([`super::strict::place`]): whole steps, each in equal runs by rank; what is
//! left of a last step under `drop`, in runs as long as the ranks' shares say. A world that begins at a
//! step boundary therefore continues exactly what another number of ranks would have done.
//!
//! I1. Ranks' sequences are disjoint, and together they are what [`Leases`] shares out.
//! I2. What is drawn depends only on which entries are free: after a restart the same is drawn.

use super::strict::Strict;
use crate::delivery::lease::Leases;
use std::collections::BTreeMap;

/// See the module. One world of one epoch.
#[derive(Debug, Clone)]
pub struct StrictAssignment {
    /// Positions below `suffix` that are to be delivered, and then all from `suffix` to `end`.
    holes: Vec<u64>,
    suffix: u64,
    end: u64,
    pads: Vec<u32>,
    batch: u64,
    ranks: u64,
    shares: Vec<u64>,
    /// Of each rank: everything before is granted or acknowledged.
    cursor: Vec<u64>,
    /// Of leases of this world: the rank, and where in its sequence it begins.
    begun: BTreeMap<u64, (usize, u64)>,
}

impl StrictAssignment {
    /// The turns of the world that `leases` is in. Nothing may be leased: a world has just begun.
    #[must_use]
    pub fn begin(strict: &Strict, leases: &Leases) -> Self {
        let world = leases.world();
        let end = strict.len().min(strict.plan().entries());
        // From the back: a suffix that nobody touched needs no list.
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

    /// The turns of a world as it is after a restart: `began` is the leases as they were when the world
    /// began. Cursors begin anew and skip what is not free.
    #[must_use]
    pub fn resumed(strict: &Strict, began: &Leases) -> Self {
        StrictAssignment::begin(strict, began)
    }

    fn rest(&self) -> u64 {
        self.holes.len() as u64 + (self.end - self.suffix)
    }

    /// How many places this world shares.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.rest() + self.pads.len() as u64
    }

    /// Whether there is nothing to share.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The entry at place `q` of everything that this world shares: step after step, ranks in turn.
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

    /// The place of the `j`-th turn of a rank.
    fn place(&self, rank: usize, j: u64) -> u64 {
        let per = self.batch / self.ranks;
        let full = (self.rest() + self.pads.len() as u64) / self.batch;
        if j < full * per {
            return j / per * self.batch + rank as u64 * per + j % per;
        }
        let before: u64 = self.shares[..rank].iter().map(|s| s.saturating_sub(full * per)).sum();
        full * self.batch + before + (j - full * per)
    }

    /// The next `n` entries of a rank that are free, and where in its sequence they begin.
    #[must_use]
    pub fn next(&mut self, strict: &Strict, leases: &Leases, rank: u32, n: u32) -> (Vec<u32>, u64) {
        let r = rank as usize;
        let (Some(&share), Some(&from)) = (self.shares.get(r), self.cursor.get(r)) else {
            return (Vec::new(), 0);
        };
        let (mut out, mut j, mut first) = (Vec::new(), from, None);
        while j < share && out.len() < n as usize {
            if let Some(e) = self.at(strict, self.place(r, j)).filter(|&e| leases.is_free(e)) {
                first.get_or_insert(j);
                out.push(e);
            }
            j += 1;
        }
        self.cursor[r] = j;
        (out, first.unwrap_or(j))
    }

    /// A lease was made of what was drawn from `from` on.
    pub fn granted(&mut self, lease: u64, rank: u32, from: u64) {
        self.begun.insert(lease, (rank as usize, from));
    }

    /// A lease expired: its entries come again, before anything later of its rank.
    pub fn expired(&mut self, lease: u64, rank: u32) {
        // One from before a restart: from the beginning, past what is not free.
        let (rank, from) = self.begun.remove(&lease).unwrap_or((rank as usize, 0));
        if let Some(c) = self.cursor.get_mut(rank) {
            *c = (*c).min(from);
        }
    }

    /// All of a lease was acknowledged.
    pub fn settled(&mut self, lease: u64) {
        self.begun.remove(&lease);
    }
}

#[cfg(test)]
mod tests;
