//! Worlds: how the ranks of a job share an epoch's steps.

use super::{BATCH_MAX, PlanError, RANKS_MAX};

/// The tail rule: what becomes of an incomplete last step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tail {
    /// The step stays short. Only for one rank.
    Keep,
    /// The epoch leaves the step's entries out, and lists them.
    Drop,
    /// Repeats of the order's first entries fill the step, and are listed.
    Pad,
}

/// The ranks, global batch and tail rule that divide a plan in steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct World {
    /// Entries of one step of all ranks together (G).
    pub batch: u32,
    /// The number of ranks that share a step (R, which divides G).
    pub ranks: u32,
    /// What becomes of an incomplete last step.
    pub tail: Tail,
}

impl World {
    /// Checks that the world is possible.
    ///
    /// # Errors
    /// [`PlanError::World`]: no ranks or more than [`RANKS_MAX`]; no batch, a batch above [`BATCH_MAX`], or a
    /// batch that the ranks cannot share evenly; `keep` with several ranks.
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

    /// Returns the number of steps of an epoch of `entries` entries.
    #[must_use]
    pub fn steps(&self, entries: u64) -> u64 {
        let g = u64::from(self.batch);
        match self.tail {
            Tail::Drop => entries / g,
            Tail::Keep | Tail::Pad => entries.div_ceil(g),
        }
    }

    /// Returns how many entries an epoch of `entries` entries delivers: whole steps, except with `keep`.
    #[must_use]
    pub fn delivered(&self, entries: u64) -> u64 {
        match self.tail {
            Tail::Keep => entries,
            Tail::Drop | Tail::Pad => self.steps(entries) * u64::from(self.batch),
        }
    }
}
