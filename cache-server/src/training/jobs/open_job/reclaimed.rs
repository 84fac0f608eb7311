//! Epochs that are restored from the records of their ranks, because their ledgers are lost.

use super::{OpenJob, blocking};
use crate::training::{
    epochs::{Epoch, JobError, Schedule, header_mismatch, world_of},
    jobs::{plan::check_ledger_size, reclaims::AllReports},
};
use fletch_api::UnknownRanks;
use fletch_core::{
    delivery::{
        Event, Leases, Loss,
        ledger::Ledger,
        reclaim::{RankRecord, restore},
    },
    plan::World,
};
use fletch_host::replace::replace_file;
use std::{collections::BTreeMap, sync::Arc};

impl OpenJob {
    /// Replaces all epochs of the job by restored ones. All of them are durable when this returns, or none is
    /// served: after a crash the ranks reclaim again. `term`: the present one of the job's group.
    ///
    /// # Errors
    /// [`JobError::BadRecord`], [`JobError::StateDiffers`], [`JobError::StateFull`].
    pub async fn restore_epochs(self: &Arc<Self>, all: AllReports, term: u64) -> Result<(), JobError> {
        let this = Arc::clone(self);
        let ledgers: Vec<(u64, Vec<u8>)> = blocking(move || {
            let ledgers = all.epochs.iter().map(|(n, records)| {
                let losses = all.losses(*n, records, term);
                this.restored(*n, records, &losses)
            });
            ledgers.filter_map(Result::transpose).collect()
        })
        .await?;
        self.adopt_ledgers(ledgers).await
    }

    /// Replaces all epochs of the job by the ledgers of another server, as they are.
    ///
    /// # Errors
    /// [`JobError::StateFull`], and what is wrong with a ledger.
    pub async fn adopt_ledgers(self: &Arc<Self>, epochs: Vec<(u64, Vec<u8>)>) -> Result<(), JobError> {
        let this = Arc::clone(self);
        self.exclusively(async move { this.restore_exclusively(epochs).await }).await
    }

    /// Returns the number and the restored ledger of an epoch, or `None` if it had not begun.
    fn restored(
        &self,
        number: u64,
        records: &BTreeMap<u32, RankRecord>,
        losses: &[Loss],
    ) -> Result<Option<(u64, Vec<u8>)>, JobError> {
        let bad = |why: String| JobError::BadRecord(why);
        let Some(first) = records.values().next() else {
            let world = world_of(&self.current_world());
            let mut anew = Epoch::head(&self.setup, number, world);
            losses.iter().cloned().map(Event::Reclaim).for_each(|event| event.append(&mut anew));
            return Ok(Some((number, anew)));
        };
        let world: World = first.header.world;
        world.check()?;
        let most = self.setup.context.ledger_bytes;
        check_ledger_size(&self.setup.plan, self.setup.bucketed.as_ref(), world, most)?;
        let expected = Epoch::header(&self.setup, number, world);
        if let Some((what, got, want)) = header_mismatch(&first.header, &expected, self.setup.block > 0) {
            return Err(JobError::StateDiffers { what, got, want });
        }
        let schedule = Schedule::new(&self.setup, number, world)?;
        let restored = restore(records, schedule.planned(), losses).map_err(|e| bad(e.to_string()))?;
        let Some(restored) = restored else { return Ok(None) };
        if restored.doubled > 0 {
            tracing::warn!(
                job = %self.setup.job, epoch = number, samples = restored.doubled,
                "two ranks consumed the same samples, because a lease had expired; each counts once"
            );
        }
        let bytes = restored.to_bytes();
        let mut leases = Leases::new(schedule.planned(), world)?;
        let read = Ledger::read(&bytes).map_err(|e| bad(e.to_string()))?;
        read.replay(&mut leases, 0).map_err(|e| bad(e.to_string()))?;
        Ok(Some((number, bytes)))
    }

    async fn restore_exclusively(self: Arc<Self>, epochs: Vec<(u64, Vec<u8>)>) -> Result<(), JobError> {
        let all: u64 = epochs.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        if all > 0 {
            self.setup.check_state_bytes(all)?;
        }
        let this = Arc::clone(&self);
        let numbers: Vec<u64> = epochs.iter().map(|e| e.0).collect();
        blocking(move || {
            let last = epochs.last().map_or(0, |e| e.0);
            // An attempt before may have left later ones.
            this.delete_later_epochs(last)?;
            for (number, bytes) in epochs {
                let before = this.epochs.lock().remove(&number);
                if let Some(before) = before {
                    before.close();
                }
                let path = this.path(number);
                replace_file(&path, &bytes).map_err(|error| JobError::Io { path, error })?;
            }
            Ok(())
        })
        .await?;
        for number in numbers {
            self.epoch_exclusively(number, false).await?;
        }
        Ok(())
    }

    /// Returns the ranks for which nobody knew what they had consumed, of all epochs in memory.
    #[must_use]
    pub fn unknown_ranks(&self) -> Vec<UnknownRanks> {
        let epochs: Vec<_> = self.epochs.lock().values().cloned().collect();
        epochs.iter().flat_map(|epoch| epoch.unknown_ranks()).collect()
    }

    /// Returns the leases of a rank that live, of all epochs in memory.
    #[must_use]
    pub fn leases_of(&self, rank: u32) -> Vec<u64> {
        let epochs: Vec<_> = self.epochs.lock().values().cloned().collect();
        epochs.iter().flat_map(|epoch| epoch.leases_of(rank)).collect()
    }
}
