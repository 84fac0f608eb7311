//! Worlds: how the ranks of a job share an epoch.

use super::{BATCH_MAX, PlanError, RANKS_MAX};

/// What becomes of a last step that is not whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tail {
    /// It stays short: one rank only.
    Keep,
    /// Its entries are left out of the epoch, and listed.
    Drop,
    /// It is filled with repeats of the order's first entries, and they are listed.
    Pad,
}

/// How a plan is shared by ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct World {
    /// Entries of a step of all ranks together (G).
    pub batch: u32,
    /// How many ranks share a step (R divides G).
    pub ranks: u32,
    /// What becomes of a last step that is not whole.
    pub tail: Tail,
}

impl World {
    /// Checks it.
    ///
    /// # Errors
    /// [`PlanError::Fit`]: no ranks or more than [`RANKS_MAX`], no batch, one above [`BATCH_MAX`] or one they
    /// cannot share evenly, or `keep` with several.
    pub fn check(&self) -> Result<(), PlanError> {
        let bad = |why| Err(PlanError::World { batch: self.batch, ranks: self.ranks, why });
        if self.ranks == 0 || self.batch == 0 {
            return bad("both must be at least 1");
        }
        if self.ranks > RANKS_MAX {
            return bad("at most 65,536 ranks are possible");
        }
        if self.batch > BATCH_MAX {
            return bad("a batch of at most 1,048,576 entries is possible");
        }
        if !self.batch.is_multiple_of(self.ranks) {
            return bad("the batch must be a multiple of the ranks");
        }
        if self.tail == Tail::Keep && self.ranks > 1 {
            return bad("a short last step leaves ranks with unequal steps; use drop or pad");
        }
        Ok(())
    }

    /// Steps of an epoch of `entries` entries.
    #[must_use]
    pub fn steps(&self, entries: u64) -> u64 {
        let g = u64::from(self.batch);
        match self.tail {
            Tail::Drop => entries / g,
            Tail::Keep | Tail::Pad => entries.div_ceil(g),
        }
    }

    /// Entries an epoch of `entries` entries delivers: whole steps, except with `keep`.
    #[must_use]
    pub fn delivered(&self, entries: u64) -> u64 {
        match self.tail {
            Tail::Keep => entries,
            Tail::Drop | Tail::Pad => self.steps(entries) * u64::from(self.batch),
        }
    }
}
