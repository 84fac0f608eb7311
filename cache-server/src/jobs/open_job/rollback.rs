//! The model of a job went back: one epoch does, and later ones have not begun.

use super::{OpenJob, blocking, lock};
use crate::epochs::{Epoch, JobError};
use std::sync::Arc;

impl OpenJob {
    /// The model went back: the epoch is as it was at the commit (the latest unless one is named), and no later one has begun.
    ///
    /// # Errors
    /// [`JobError`]: no such commit.
    pub async fn roll_back(
        self: &Arc<Self>,
        number: u64,
        commit: Option<u64>,
    ) -> Result<Arc<Epoch>, JobError> {
        let this = Arc::clone(self);
        self.alone(async move { this.roll_back_alone(number, commit).await }).await
    }

    async fn roll_back_alone(
        self: Arc<Self>,
        number: u64,
        commit: Option<u64>,
    ) -> Result<Arc<Epoch>, JobError> {
        let epoch = self.epoch_alone(number, false).await?;
        let commit = epoch.committed(commit)?;
        // The commit may have been heard of before it was durable; what is forgotten is not to be the only trace of it.
        epoch.durable().await?;
        let this = Arc::clone(&self);
        // Later ones first: after a crash in between the same request finds what is left to do.
        blocking(move || this.forget_after(number)).await?;
        if epoch.is_at_commit(commit) {
            return Ok(epoch);
        }
        epoch.roll_back(commit).await?;
        blocking(move || {
            epoch.close();
            Ok(())
        })
        .await?;
        lock(&self.epochs).remove(&number);
        self.epoch_alone(number, false).await
    }

    /// Closes and forgets all epochs after one, the last first: what a crash leaves is the beginning of them. Blocking.
    pub(super) fn forget_after(&self, number: u64) -> Result<(), JobError> {
        let mut gone = false;
        for n in self.on_disk()?.into_iter().rev().filter(|&n| n > number) {
            let open = lock(&self.epochs).remove(&n);
            if let Some(epoch) = open {
                epoch.close();
            }
            let path = self.path(n);
            std::fs::remove_file(&path).map_err(|error| JobError::Io { path, error })?;
            gone = true;
        }
        let synced = if gone { std::fs::File::open(&self.dir).and_then(|d| d.sync_all()) } else { Ok(()) };
        synced.map_err(|error| JobError::Io { path: self.dir.clone(), error })
    }
}
