//! Checkpoints of the model: what was consumed counts once one has it, and a return to one takes back what came after.
//!
//! 1. A commit is what was acknowledged by all ranks when it came. It is durable before it is answered, and its number is
//!    the caller's: the same number again changes nothing.
//! 2. A rollback is one record, and then the epoch is read anew from its ledger: what a restart would make of it.

use super::{Epoch, EpochState, Inner};
use crate::epochs::JobError;
use fletch_api::Visitation;
use fletch_core::{delivery::lease::LeaseError, plan::World};
use std::collections::BTreeSet;

/// What a commit has beside the leases' bitmap.
#[derive(Clone, Default)]
pub struct Committed {
    /// Pads that were delivered: they are in no bitmap.
    padded: BTreeSet<u32>,
    /// Who shared its steps.
    ranks: u32,
}

impl Epoch {
    fn commits(&self) -> Result<(), JobError> {
        if self.setup.visitation == Visitation::Checkpoint { Ok(()) } else { Err(JobError::Uncommitted) }
    }

    /// What is acknowledged now is committed.
    ///
    /// # Errors
    /// [`JobError::Uncommitted`], and those of a closed epoch.
    pub async fn commit(&self, commit: u64) -> Result<(), JobError> {
        self.commits()?;
        let upto = {
            let mut inner = self.lock();
            let inner = &mut *inner;
            self.is_open(inner)?;
            if inner.leases.commits().any(|c| c == commit) {
                self.ledger.len()
            } else {
                let event = inner.leases.commit(commit);
                inner.note_commit(commit);
                self.ledger.append(&[event])
            }
        };
        self.ledger.durable(upto).await
    }

    /// The commit that a rollback context: this one, or the latest.
    ///
    /// # Errors
    /// [`JobError::Uncommitted`]; [`LeaseError::Commit`] when it is not remembered.
    pub fn committed(&self, commit: Option<u64>) -> Result<u64, JobError> {
        self.commits()?;
        let inner = self.lock();
        let found = match commit {
            Some(commit) => inner.leases.commits().find(|c| *c == commit),
            None => inner.leases.commits().next_back(),
        };
        Ok(found.ok_or(LeaseError::Commit(commit.unwrap_or(0)))?)
    }

    /// Whether it is as it was at a commit already, and goes on.
    #[must_use]
    pub fn stands_at(&self, commit: u64) -> bool {
        let inner = self.lock();
        let pads = inner.commits.get(&commit).is_some_and(|then| then.padded == inner.padded);
        inner.state == EpochState::Open && pads && inner.leases.is_at(commit)
    }

    /// Takes back what was acknowledged after a commit. The epoch answers nothing from then on: it is to be opened anew. In the
    /// middle of a step that others cannot go on with it has the commit's ranks again.
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
            if self.schedule.may_become(self.number(), acked, then, now).is_err() {
                events.push(inner.leases.change_world(then)?.0);
            }
            match inner.leases.rollback(commit) {
                Ok((event, _)) => events.push(event),
                Err(e) => {
                    // In their world it goes on.
                    self.ledger.append(&events);
                    self.schedule.share(&mut inner.leases)?;
                    return Err(e.into());
                }
            }
            inner.reopening = true;
            inner.state = EpochState::Abandoned;
            inner.over();
            self.ledger.append(&events)
        };
        self.changed.notify_waiters();
        self.ledger.durable(upto).await
    }
}

impl Inner {
    pub(super) fn note_commit(&mut self, commit: u64) {
        let then = Committed { padded: self.padded.clone(), ranks: self.leases.world().ranks };
        self.commits.insert(commit, then);
        let Inner { commits, leases, .. } = self;
        commits.retain(|c, _| leases.commits().any(|kept| kept == *c));
    }

    /// After a rollback: old leases say nothing any more.
    pub(super) fn note_rollback(&mut self, commit: u64) {
        self.padded = self.commits.get(&commit).cloned().unwrap_or_default().padded;
        self.settled.clear();
        let Inner { commits, leases, .. } = self;
        commits.retain(|c, _| leases.commits().any(|kept| kept == *c));
    }
}
