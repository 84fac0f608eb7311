//! How far an open job is: its latest epoch, and what each of its ranks has left of it.

use super::OpenJob;
use fletch_api::{Epoch as EpochView, OrderKind};
use fletch_core::{DatasetName, JobName, Tenant};
use std::sync::Arc;

/// How far an open job is.
#[derive(Debug)]
pub struct JobProgress {
    pub tenant: Tenant,
    pub name: JobName,
    /// The dataset that it reads.
    pub dataset: DatasetName,
    /// The order of its epochs.
    pub order: OrderKind,
    /// Its latest epoch, if one has begun, and the entries that each of its ranks has still to acknowledge.
    pub epoch: Option<(EpochView, Vec<u64>)>,
}

impl OpenJob {
    /// Returns the progress of the latest epoch in memory, with at most `ranks` ranks.
    #[must_use]
    pub fn progress(&self, ranks: usize) -> JobProgress {
        let last = self.epochs.lock().last_key_value().map(|(_, epoch)| Arc::clone(epoch));
        let record = self.known();
        JobProgress {
            tenant: self.setup.tenant.clone(),
            name: record.ask.name.clone(),
            dataset: record.dataset.clone(),
            order: self.setup.order,
            epoch: last.map(|epoch| (epoch.view(), epoch.left_by_rank(ranks))),
        }
    }
}
