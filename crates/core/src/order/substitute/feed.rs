//! One job's picks, decided ahead of time: fetches start early, service comes later, and what
//! is here goes first (pacing, DESIGN §7).

use super::{Act, Flywheel, How, Pick, SeatId};
use std::collections::VecDeque;

/// Picks that were decided and not yet served.
#[derive(Debug, Clone, Default)]
pub struct Feed {
    planned: VecDeque<Pick>,
}

impl Feed {
    /// Decides until `ahead` picks are planned or the epoch has no more. Orders to the store go
    /// to `acts`; `new` sees each new pick, so that range reads can start now.
    pub fn fill(
        &mut self,
        fly: &mut Flywheel,
        seat: SeatId,
        ahead: usize,
        acts: &mut Vec<Act>,
        mut new: impl FnMut(&Pick),
    ) {
        while self.planned.len() < ahead {
            let Some(pick) = fly.next(seat, acts) else { return };
            new(&pick);
            self.planned.push_back(pick);
        }
    }

    /// The next pick to serve: the first that is `here`, else the oldest. A pick whose unit left
    /// the cache since it was decided is to be read by range.
    pub fn next(&mut self, fly: &Flywheel, mut here: impl FnMut(&Pick) -> bool) -> Option<Pick> {
        let at = self.planned.iter().position(&mut here).unwrap_or(0);
        let mut pick = self.planned.remove(at)?;
        if !fly.holds(pick.unit) {
            pick.how = How::Range;
        }
        Some(pick)
    }

    /// What is planned, oldest first.
    pub fn planned(&self) -> impl Iterator<Item = &Pick> {
        self.planned.iter()
    }

    /// How many picks are planned.
    #[must_use]
    pub fn len(&self) -> usize {
        self.planned.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.planned.is_empty()
    }

    /// Gives everything that was not served back to the sweep (the job leaves or its epoch is
    /// saved).
    pub fn give_back(&mut self, fly: &mut Flywheel, seat: SeatId) {
        for pick in self.planned.drain(..) {
            fly.give_back(seat, pick.spot);
        }
    }
}
