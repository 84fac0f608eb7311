//! Commits and rollbacks, for the visitation `checkpoint`: consumed samples count once a checkpoint of the
//! model has them, and a return to a checkpoint takes back what was acknowledged after it.
//!
//! 1. A commit is what all ranks had acknowledged when it arrived. It is durable before it is answered. The
//!    caller chooses its number, and the same number again changes nothing.
//! 2. A rollback is one record of the ledger. Then the epoch is opened anew from its ledger, as after a
//!    restart.

use super::{Epoch, EpochState, Inner};
use crate::training::epochs::JobError;
use fletch_api::Visitation;
use fletch_core::{delivery::lease::LeaseError, plan::World};
use std::collections::BTreeSet;

/// What a commit has beside the bitmap in the leases.
#[derive(Clone, Default)]
pub struct Committed {
    /// Pads that were delivered: no bitmap contains them.
    padded: BTreeSet<u32>,
    /// Number of ranks in the commit's world.
    ranks: u32,
}

impl Epoch {
    fn commits(&self) -> Result<(), JobError> {
        if self.setup.visitation == Visitation::Checkpoint { Ok(()) } else { Err(JobError::NoCommits) }
    }

    /// Commits everything that is acknowledged now. Returns when the commit is durable.
    ///
    /// # Errors
    /// [`JobError::NoCommits`], and those of a closed epoch.
    pub async fn commit(&self, commit: u64) -> Result<(), JobError> {
        self.commits()?;
        let upto = {
            let mut inner = self.lock();
            let inner = &mut *inner;
            self.is_open(inner)?;
            if inner.leases.commits().any(|c| c == commit) {
                self.ledger.len()
            } else {
                // A commit has a bit for each entry of the plan.
                self.check_state_bytes()?;
                let event = inner.leases.commit(commit);
                inner.record_commit(commit);
                self.ledger.append(&[event])
            }
        };
        self.ledger.durable(upto).await
    }

    /// Returns the commit that a rollback asks for: the named one, or the latest.
    ///
    /// # Errors
    /// [`JobError::NoCommits`]; [`LeaseError::Commit`] when it is not remembered.
    pub fn committed(&self, commit: Option<u64>) -> Result<u64, JobError> {
        self.commits()?;
        let inner = self.lock();
        let found = match commit {
            Some(commit) => inner.leases.commits().find(|c| *c == commit),
            None => inner.leases.commits().next_back(),
        };
        Ok(found.ok_or(LeaseError::Commit(commit.unwrap_or(0)))?)
    }

    /// Returns whether the epoch is open and exactly as it was at a commit.
    #[must_use]
    pub fn is_at_commit(&self, commit: u64) -> bool {
        let inner = self.lock();
        let pads = inner.commits.get(&commit).is_some_and(|then| then.padded == inner.padded);
        inner.state == EpochState::Open && pads && inner.leases.is_at(commit)
    }

    /// Takes back what was acknowledged after a commit.
    ///
    /// The epoch answers nothing from then on and has to be opened anew. If the commit lies in the middle of
    /// a step that another number of ranks cannot continue, the epoch returns to the commit's number of
    /// ranks.
    ///
    /// # Errors
    /// [`JobError`]; nothing has changed, unless the ledger failed.
    pub async fn roll_back(&self, commit: u64) -> Result<(), JobError> {
        let upto = {
            let mut inner = self.lock();
            let inner = &mut *inner;
            let none = || LeaseError::Commit(commit);
            let acked = inner.leases.committed(commit).ok_or_else(none)?;
            let ranks = inner.commits.get(&commit).ok_or_else(none)?.ranks;
            let now = inner.leases.world();
            let then = World { ranks, ..now };
            let mut events = Vec::new();
            if self.schedule.can_enter_world(self.number(), acked, then, now).is_err() {
                events.push(inner.leases.change_world(then)?.0);
            }
            match inner.leases.rollback(commit) {
                Ok((event, _)) => events.push(event),
                Err(e) => {
                    // The rollback failed, so the epoch goes on in the commit's world.
                    self.ledger.append(&events);
                    self.schedule.share(&mut inner.leases)?;
                    return Err(e.into());
                }
            }
            inner.reopening = true;
            inner.state = EpochState::Abandoned;
            inner.end();
            self.ledger.append(&events)
        };
        self.changed.notify_waiters();
        self.ledger.durable(upto).await
    }
}

impl Inner {
    pub(super) fn record_commit(&mut self, commit: u64) {
        let then = Committed { padded: self.padded.clone(), ranks: self.leases.world().ranks };
        self.commits.insert(commit, then);
        let Inner { commits, leases, .. } = self;
        commits.retain(|c, _| leases.commits().any(|kept| kept == *c));
    }

    /// Restores what the commit remembered; acks of older leases are void.
    pub(super) fn apply_rollback(&mut self, commit: u64) {
        self.padded = self.commits.get(&commit).cloned().unwrap_or_default().padded;
        self.acked_leases.clear();
        let Inner { commits, leases, .. } = self;
        commits.retain(|c, _| leases.commits().any(|kept| kept == *c));
    }
}
