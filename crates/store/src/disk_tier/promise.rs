//! Promises of space: a warm-up fetches a chunk only if the disk will keep it.
//!
//! Admission compares a chunk with the chunks on disk. Chunks that are fetched at the same time would all see
//! the same space, and the disk would refuse some of them later. So a warm-up takes a promise first, and the
//! admission of the next chunk counts the promises of its dataset.
//!
//! A promise lasts until its chunk was appended. While the chunk is being written it counts twice. So a
//! request that finds no space waits until earlier promises end.

use super::DiskTier;
use crate::{dataset_id::DatasetId, disk::Admission, disk::DiskEngine};
use fletch_bounds::{Gate, pass_gate};
use fletch_core::StoreKey;
use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc};
use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};

/// The promises of a disk tier.
#[derive(Debug, Default)]
pub(super) struct Promises {
    /// Promised footprints.
    bytes: Mutex<HashMap<DatasetId, u64>>,
    /// Notified when a promise or an append ended.
    pub changed: Notify,
}

/// Space of a dataset on disk, promised until this value is dropped.
#[derive(Debug)]
pub(crate) struct Promise {
    disk: Arc<DiskTier>,
    dataset: DatasetId,
    bytes: u64,
}

impl Drop for Promise {
    fn drop(&mut self) {
        let mut bytes = self.disk.promises.bytes.lock();
        if let Some(all) = bytes.get_mut(&self.dataset) {
            *all = all.saturating_sub(self.bytes);
            if *all == 0 {
                bytes.remove(&self.dataset);
            }
        }
        drop(bytes);
        self.disk.promises.changed.notify_waiters();
    }
}

/// The answer to a request for space.
#[derive(Debug)]
pub(crate) enum PromiseOutcome {
    /// The space is promised.
    Promised(Promise),
    /// The tier would not keep the chunk, whatever becomes of earlier promises.
    Refused,
    /// Earlier promises did not end in time.
    Late,
}

impl DiskTier {
    /// Promises space for a chunk of `dataset`. Waits until `until` for earlier promises, if need be.
    pub(crate) async fn promise(
        self: &Arc<Self>,
        key: &StoreKey,
        dataset: DatasetId,
        len: u32,
        until: Instant,
    ) -> PromiseOutcome {
        loop {
            let changed = self.promises.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let Some(engine) = self.engine() else { return PromiseOutcome::Refused };
            if engine.admit(key, dataset, len) == Admission::No {
                return PromiseOutcome::Refused;
            }
            if let Some(promise) = self.try_promise(&engine, key, dataset, len) {
                return PromiseOutcome::Promised(promise);
            }
            if pass_gate(Gate::DiskRoom, timeout_at(until, changed)).await.is_err() {
                return PromiseOutcome::Late;
            }
        }
    }

    fn try_promise(
        self: &Arc<Self>,
        engine: &DiskEngine,
        key: &StoreKey,
        dataset: DatasetId,
        len: u32,
    ) -> Option<Promise> {
        let mut promised = self.promises.bytes.lock();
        let beside = promised.get(&dataset).copied().unwrap_or(0);
        if engine.admit_beside(key, dataset, len, beside) == Admission::No {
            return None;
        }
        let bytes = DiskEngine::footprint(len);
        *promised.entry(dataset).or_default() += bytes;
        Some(Promise { disk: Arc::clone(self), dataset, bytes })
    }
}
