//! Rollback of a job to a checkpoint of its model.

use super::{OpenJob, blocking};
use crate::training::epochs::{Epoch, JobError};
use std::sync::Arc;

impl OpenJob {
    /// Rolls a job back to a commit: reopens that commit's epoch and deletes every later epoch.
    ///
    /// Without a number, rolls back to the latest commit of the epoch.
    ///
    /// # Errors
    /// [`JobError`]: no such commit.
    pub async fn roll_back(
        self: &Arc<Self>,
        number: u64,
        commit: Option<u64>,
    ) -> Result<Arc<Epoch>, JobError> {
        let this = Arc::clone(self);
        let rolled_back = self.exclusively(async move { this.roll_back_exclusively(number, commit).await });
        let epoch = rolled_back.await?;
        self.open_ranks();
        Ok(epoch)
    }

    async fn roll_back_exclusively(
        self: Arc<Self>,
        number: u64,
        commit: Option<u64>,
    ) -> Result<Arc<Epoch>, JobError> {
        let epoch = self.epoch_exclusively(number, false).await?;
        let commit = epoch.committed(commit)?;
        // A client can learn of a commit before it is on disk. Make the ledger durable first, then delete
        // later epochs: they may hold the only other record of the commit.
        epoch.durable().await?;
        let this = Arc::clone(&self);
        // Later epochs are deleted first: after a crash in between, the same request does the rest.
        blocking(move || this.delete_later_epochs(number)).await?;
        if epoch.is_at_commit(commit) {
            return Ok(epoch);
        }
        epoch.roll_back(commit).await?;
        blocking(move || {
            epoch.close();
            Ok(())
        })
        .await?;
        self.epochs.lock().remove(&number);
        self.epoch_exclusively(number, false).await
    }

    /// Closes and deletes all epochs after `number`, the last first, so that a crash leaves no gap. Blocking.
    pub(super) fn delete_later_epochs(&self, number: u64) -> Result<(), JobError> {
        let mut gone = false;
        for n in self.epochs_on_disk()?.into_iter().rev().filter(|&n| n > number) {
            let open = self.epochs.lock().remove(&n);
            if let Some(epoch) = open {
                epoch.close();
            }
            let path = self.path(n);
            std::fs::remove_file(&path).map_err(|error| JobError::Io { path, error })?;
            self.setup.charges.forget(n);
            gone = true;
        }
        let synced = if gone { std::fs::File::open(&self.dir).and_then(|d| d.sync_all()) } else { Ok(()) };
        synced.map_err(|error| JobError::Io { path: self.dir.clone(), error })
    }
}
