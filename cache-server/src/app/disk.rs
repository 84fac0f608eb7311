//! The server as the owner of its disk tier: how the tier is opened, and how datasets share it.

use crate::app::server::Server;
use fletch_store::{
    DiskOwner, DiskTier,
    disk::{DiskConfig, DiskError},
    maintenance,
};
use futures::future::{BoxFuture, FutureExt as _};
use std::sync::Arc;

/// Opens the disk tier before the first request.
///
/// # Errors
/// If another process uses the directory. After any other error the server runs and tries again later.
pub(super) async fn open_first(server: &Arc<Server>) -> Result<(), DiskError> {
    let Some(disk) = server.store.disk().map(Arc::clone) else {
        tracing::info!("there is no disk tier, because cache.size is 0");
        return Ok(());
    };
    maintenance::open_first(Arc::clone(server) as Arc<dyn DiskOwner>, disk).await
}

impl DiskOwner for Server {
    fn config(&self) -> Result<DiskConfig, String> {
        self.disk_config()
    }

    fn on_open(&self) {
        // A tier that is opened anew has no shares yet.
        self.shares.forget_applied();
    }

    fn divide(&self, disk: &DiskTier) {
        let Some(split) = self.shares.next_split(disk, self.now_ns()) else { return };
        let bounds: Vec<_> = self.resident_quotas().into_iter().map(|(_, bound)| bound).collect();
        let limited = self.shares.within_quotas(&split, &bounds);
        let capacity = disk.engine().map_or(0, |tier| tier.capacity());
        self.shares.apply(disk, &self.allocator.divide(split, limited, capacity, bounds));
    }

    fn wake(&self) -> BoxFuture<'_, ()> {
        let refusals = async {
            match self.store.disk() {
                Some(disk) => disk.wait_for_refusals().await,
                None => std::future::pending().await,
            }
        };
        async move {
            tokio::select! {
                () = self.shares.wait_for_change() => {}
                () = refusals => {}
            }
        }
        .boxed()
    }
}
