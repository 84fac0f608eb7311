//! The samples of large versions, which are worked out before the first job needs them.

use super::Registry;
use crate::data::versions::{SamplesError, Source};
use fletch_core::{DatasetName, Domain};
use fletch_store::allocator;
use parking_lot::Mutex;
use std::{collections::BTreeSet, sync::Arc};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::spawn_blocking,
};

type Waiting = Arc<Mutex<BTreeSet<(Domain, DatasetName)>>>;

/// The datasets that wait to be prepared. One is prepared at a time, so that jobs find a core and memory.
pub(super) struct Queue {
    waiting: Waiting,
    permits: Arc<Semaphore>,
}

impl Default for Queue {
    fn default() -> Self {
        Queue { waiting: Waiting::default(), permits: Arc::new(Semaphore::new(1)) }
    }
}

/// The permit to prepare one dataset, until it is dropped.
pub struct PreparingPermit {
    _permit: OwnedSemaphorePermit,
}

/// A place in the queue. It is given up when the permit comes, and when its task is dropped.
struct WaitingPlace {
    waiting: Waiting,
    key: (Domain, DatasetName),
}

impl Drop for WaitingPlace {
    fn drop(&mut self) {
        self.waiting.lock().remove(&self.key);
    }
}

impl Registry {
    /// Waits until a dataset may be prepared. Returns `None` if it waits already.
    pub async fn wait_to_prepare(&self, domain: &Domain, dataset: &DatasetName) -> Option<PreparingPermit> {
        let key = (domain.clone(), dataset.clone());
        if !self.preparing.waiting.lock().insert(key.clone()) {
            return None;
        }
        let _place = WaitingPlace { waiting: Arc::clone(&self.preparing.waiting), key };
        // The semaphore is never closed.
        let permit = Arc::clone(&self.preparing.permits).acquire_owned().await.ok()?;
        Some(PreparingPermit { _permit: permit })
    }

    /// Works out the samples of a version, and keeps them beside its tables. A job that is declared meanwhile
    /// waits for the result, and shares it.
    ///
    /// # Errors
    /// Those of the tables.
    pub async fn prepare(&self, domain: &Domain, source: &Arc<Source>) -> Result<(), SamplesError> {
        self.samples(domain, source).await?;
        // All of the tables were read. From here on the server searches its local form of them.
        source.blocks.forget(source.version.root());
        // It is lost only at the end of the process.
        let _ = spawn_blocking(allocator::release_freed).await;
        Ok(())
    }
}
