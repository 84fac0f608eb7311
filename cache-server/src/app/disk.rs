//! The server as the owner of its disk tier: what it is opened with, and how it is divided.

use crate::server::Server;
use fletch_store::{
    Disk, Household, bounded,
    disk::{DiskConfig, DiskError},
    house,
};
use futures::future::{BoxFuture, FutureExt as _};
use std::sync::Arc;

/// Opens the tier before the first request.
///
/// # Errors
/// Only when another process uses the directory: everything else may pass.
pub(super) async fn open_first(server: &Arc<Server>) -> Result<(), DiskError> {
    let Some(disk) = server.store.disk().map(Arc::clone) else {
        tracing::info!("no cache on disk: cache.size is 0");
        return Ok(());
    };
    house::open_first(Arc::clone(server) as Arc<dyn Household>, disk).await
}

impl Household for Server {
    fn config(&self) -> Result<DiskConfig, String> {
        self.disk_config()
    }

    fn opened(&self) {
        // The shares of a tier that was not there yet.
        self.shares.repeat();
    }

    fn divide(&self, disk: &Disk) {
        let Some(split) = self.shares.changed(disk, self.now_ns()) else { return };
        let bounds: Vec<_> = self.resident_bounds().into_iter().map(|(_, bound)| bound).collect();
        self.shares.give(disk, &bounded(split, &bounds));
    }

    fn hurry(&self) -> BoxFuture<'_, ()> {
        self.shares.appeared().boxed()
    }
}
