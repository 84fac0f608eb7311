//! Jobs that go to another server while they run, with their ledgers.

use super::{JobError, Record, Registry, close};
use crate::training::jobs::open_job::epoch_of_file;
use fletch_api::jobs::LedgerBytes;
use serde::{Deserialize, Serialize};
use std::path::Path;
use tokio::task::spawn_blocking;

/// A job, as one server gives it to another.
#[derive(Debug, Serialize, Deserialize)]
pub struct MovedJob {
    /// The declaration with its lists, and what its names resolved to.
    pub record: Record,
    /// The ledgers of all epochs that this server remembers.
    pub epochs: Vec<MovedEpoch>,
}

/// One epoch of a job that moves.
#[derive(Debug, Serialize, Deserialize)]
pub struct MovedEpoch {
    /// The number of the epoch.
    pub epoch: u64,
    /// The whole ledger.
    pub ledger: LedgerBytes,
}

fn read(dir: &Path) -> Result<MovedJob, JobError> {
    let failed = |error| JobError::Io { path: dir.to_owned(), error };
    let record = Record::read(dir)?;
    let mut epochs = Vec::new();
    for file in std::fs::read_dir(dir).map_err(failed)? {
        let file = file.map_err(failed)?;
        let Some(epoch) = file.file_name().to_str().and_then(epoch_of_file) else { continue };
        let bytes = std::fs::read(file.path()).map_err(failed)?;
        epochs.push(MovedEpoch { epoch, ledger: LedgerBytes(bytes.into()) });
    }
    epochs.sort_by_key(|of| of.epoch);
    Ok(MovedJob { record, epochs })
}

impl Registry {
    /// Stops a job, and returns it with its ledgers. It is not opened again before [`Registry::put_back`].
    ///
    /// # Errors
    /// [`JobError::NotFound`], [`JobError::Io`]; the job goes on.
    pub async fn take_out(&self, id: &str) -> Result<MovedJob, JobError> {
        self.moving.lock().insert(id.to_owned());
        let taken = async {
            let _permit = self.permit_to_change(id).await;
            let registered = self.jobs.lock().get(id).cloned().ok_or(JobError::NotFound)?;
            if let Some(opened) = registered.opened.get() {
                close(&self.jobs, id, opened).await;
            }
            let dir = self.dir.join(id);
            spawn_blocking(move || read(&dir)).await.map_err(|_| JobError::TaskLost)?
        };
        let taken = taken.await;
        if taken.is_err() {
            self.put_back(id);
        }
        taken
    }

    /// Lets a job be opened again, because it stays here or has left.
    pub fn put_back(&self, id: &str) {
        self.moving.lock().remove(id);
    }
}
