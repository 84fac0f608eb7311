//! States of epochs that clients bring: the epoch goes on from what was acknowledged elsewhere.

use super::{OpenJob, blocking};
use crate::training::{
    epochs::{Epoch, JobError, Schedule, header_mismatch, world_of},
    jobs::plan::check_ledger_size,
};
use fletch_api::{EpochState, Visitation};
use fletch_core::{
    delivery::{
        Event, Leases,
        ledger::{Header, Ledger},
    },
    plan::Bits,
};
use std::sync::Arc;

impl OpenJob {
    /// Replaces an epoch by a state.
    ///
    /// # Errors
    /// [`JobError::BadState`], [`JobError::StateDiffers`], [`JobError::StateBehind`].
    pub async fn put_state(
        self: &Arc<Self>,
        number: u64,
        bytes: &[u8],
        replace: bool,
    ) -> Result<Arc<Epoch>, JobError> {
        let bad = |why: String| JobError::BadState(why);
        let read = Ledger::read(bytes).map_err(|e| bad(e.to_string()))?;
        if read.len != bytes.len() {
            return Err(bad("it ends in the middle of a record".to_owned()));
        }
        read.header.world.check()?;
        check_ledger_size(
            &self.setup.plan,
            self.setup.bucketed.as_ref(),
            read.header.world,
            self.setup.context.ledger_bytes,
        )?;
        if read.events.iter().any(|e| !matches!(e, Event::Resume { .. })) {
            return Err(bad("it has more than what was acknowledged; use …/state, not …/ledger".to_owned()));
        }
        let header = Epoch::header(&self.setup, number, read.header.world);
        if let Some((what, got, want)) = header_mismatch(&read.header, &header, self.setup.block > 0) {
            return Err(JobError::StateDiffers { what, got, want });
        }
        // The state replaces the epoch's ledger. One that is shorter fits even where the tenant is full.
        let more = (bytes.len() as u64).saturating_sub(self.setup.charges.ledger(number).bytes());
        if more > 0 {
            self.setup.check_state_bytes(more)?;
        }
        let schedule = Schedule::new(&self.setup, number, read.header.world)?;
        let mut leases = Leases::new(schedule.planned(), read.header.world)?;
        read.replay(&mut leases, 0).map_err(|e| bad(e.to_string()))?;
        let acked = leases.acked().clone();
        schedule.can_enter_world(number, &acked, read.header.world, world_of(&self.current_world()))?;
        let this = Arc::clone(self);
        let put =
            self.exclusively(async move { this.put_state_exclusively(number, header, acked, replace).await });
        let epoch = put.await?;
        if replace {
            self.open_ranks();
        }
        Ok(epoch)
    }

    async fn put_state_exclusively(
        self: Arc<Self>,
        number: u64,
        header: Header,
        acked: Bits,
        replace: bool,
    ) -> Result<Arc<Epoch>, JobError> {
        let there = match self.epoch_exclusively(number, false).await {
            Ok(there) => Some(there),
            // A damaged ledger may be replaced.
            Err(e) if replace && e.is_file_damage() => None,
            Err(JobError::NoEpoch(_)) => None,
            Err(e) => return Err(e),
        };
        let same = there.as_ref().is_some_and(|there| there.is_at(&acked));
        // Leases from before may still live, and a full ledger is replaced by a short one.
        let full = |there: &Epoch| there.state_now() == EpochState::Open && there.is_full();
        let anew = replace && there.as_ref().is_some_and(|there| there.has_leases() || full(there));
        let keeps = same && !anew;
        let this = Arc::clone(&self);
        if replace || self.setup.visitation == Visitation::Checkpoint {
            // Later epochs are deleted first, the last one first. After a crash the same request does the
            // rest.
            blocking(move || this.delete_later_epochs(number)).await?;
        } else if !same && (there.is_some() || blocking(move || this.has_later(number)).await?) {
            return Err(JobError::StateBehind(number));
        }
        if let Some(there) = there {
            if keeps && there.state_now() != EpochState::Abandoned {
                there.durable().await?;
                return Ok(there);
            }
            blocking(move || {
                there.close();
                Ok(())
            })
            .await?;
        }
        self.epochs.lock().remove(&number);
        if !keeps {
            let this = Arc::clone(&self);
            blocking(move || {
                let known = this.epochs_on_disk()?;
                this.make_room(&known, number)?;
                Epoch::begin(&this.path(number), &header, &acked)
            })
            .await?;
        }
        self.epoch_exclusively(number, false).await
    }
}
