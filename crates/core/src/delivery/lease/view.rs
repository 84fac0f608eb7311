//! What leases look like from outside.

use super::{Lease, Leases};
use crate::plan::{World, bits::Bits};

impl Leases {
    /// Whether an entry, or a pad, may be granted.
    #[must_use]
    pub fn is_free(&self, entry: u32) -> bool {
        if u64::from(entry) < self.planned.len() {
            self.free.get(u64::from(entry))
        } else {
            self.pads.contains(&entry)
        }
    }

    /// Pads that may be granted, ascending.
    pub fn pads_free(&self) -> impl Iterator<Item = u32> + '_ {
        self.pads.iter().copied()
    }

    /// Entries that a rank may still be granted; 0 for one that is not there.
    #[must_use]
    pub fn left(&self, rank: u32) -> u64 {
        self.ranks.get(rank as usize).map_or(0, |r| r.share)
    }

    /// Entries that a rank holds and has not acknowledged.
    #[must_use]
    pub fn held(&self, rank: u32) -> u64 {
        self.ranks.get(rank as usize).map_or(0, |r| r.held)
    }

    /// The leases that live, by number.
    pub fn live(&self) -> impl Iterator<Item = &Lease> {
        self.live.values()
    }

    /// The number of the latest lease; 0 when there was none.
    #[must_use]
    pub fn last_id(&self) -> u64 {
        self.last_id
    }

    /// What this epoch delivers, over the plan's entries.
    #[must_use]
    pub fn planned(&self) -> &Bits {
        &self.planned
    }

    /// A live lease.
    #[must_use]
    pub fn lease(&self, id: u64) -> Option<&Lease> {
        self.live.get(&id)
    }

    /// When the next lease expires, in the shell's milliseconds.
    #[must_use]
    pub fn next_expiry_ms(&self) -> Option<u64> {
        self.live.values().map(|l| l.expires_ms).min()
    }

    /// What was acknowledged, over the plan's entries: the state from which to resume.
    #[must_use]
    pub fn acked(&self) -> &Bits {
        &self.acked
    }

    /// What is in no lease and not acknowledged: what the order may still give out.
    #[must_use]
    pub fn free(&self) -> &Bits {
        &self.free
    }

    /// Whether every rank has had its share and acknowledged it.
    #[must_use]
    pub fn finished(&self) -> bool {
        self.live.is_empty() && self.ranks.iter().all(|r| r.share == 0)
    }

    /// What a finished epoch left out although it was planned: only ever fewer entries than
    /// ranks, after a change of world with `drop`.
    pub fn left_out(&self) -> impl Iterator<Item = u64> + '_ {
        self.free.iter_in(0, self.free.len())
    }

    /// The checkpoints that can be rolled back to, the latest last.
    pub fn commits(&self) -> impl DoubleEndedIterator<Item = u64> + '_ {
        self.commits.iter().map(|c| c.0)
    }

    /// What was acknowledged at a checkpoint that can be rolled back to.
    #[must_use]
    pub fn committed(&self, commit: u64) -> Option<&Bits> {
        self.commits.iter().find(|c| c.0 == commit).map(|c| &c.1)
    }

    /// Whether exactly what a checkpoint committed is acknowledged, and nothing is leased.
    #[must_use]
    pub fn is_at(&self, commit: u64) -> bool {
        self.live.is_empty() && self.committed(commit) == Some(&self.acked)
    }

    /// Entries granted again because a lease expired, or the model went back.
    #[must_use]
    pub fn redelivered(&self) -> u64 {
        self.redelivered
    }

    /// Pads that were made, in all worlds together; those of a world that ended early may never
    /// have been granted.
    #[must_use]
    pub fn pads(&self) -> u32 {
        self.pads_made
    }

    /// The world.
    #[must_use]
    pub fn world(&self) -> World {
        self.world
    }
}
