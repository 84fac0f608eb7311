//! The duties of the owner: maintenance of the disk tier, and a socket that clients can reach.
//!
//! The two are independent. Without a socket the store still serves its owner. When the socket cannot be
//! bound, the owner retries on a timer of its own while maintenance goes on.
//!
//! (I7) The owner leaves the store when it is no longer certain that the directory belongs to this user
//! alone, and when the token now speaks for another principal.

use super::{Node, RETRY_PAUSE, Role, directory::StoreDirectory, listener::Socket, settings};
use fletch_settings::ByteSize;
use fletch_store::{
    DiskOwner, DiskState, DiskTier,
    disk::{DiskConfig, FsSpace, Health, MountMemory, OffReason, Policy},
    maintenance,
};
use futures::future::{BoxFuture, FutureExt};
use std::{io, sync::Arc, time::Duration};
use tokio::{
    task::spawn_blocking,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

/// The most slab files kept open for reading.
const SLABS_OPEN: usize = 256;
/// How often the owner checks that its socket is still at the path where clients look for it.
const SOCKET_CHECK_EVERY: Duration = Duration::from_secs(1);
/// The pause before the owner retries after it could not bind the socket or listen at it.
const BIND_RETRY_EVERY: Duration = Duration::from_secs(5);
/// How long a mount that ends waits for its answers to clients.
const DRAIN: Duration = Duration::from_millis(300);

impl Node {
    /// Runs the store as its owner until `stop`, or until the store is lost.
    pub(super) async fn run_as_owner(self: &Arc<Self>, stop: &CancellationToken) {
        let directory = self.directory();
        tracing::info!(dir = %directory.dir().display(), "this mount owns the node's store");
        let idle = directory.clone();
        // Nothing here depends on the removal, so nothing waits for it.
        drop(spawn_blocking(move || idle.remove_idle()));
        // Gives the dataset of a single mount a share of the disk until a read renews it.
        for root in self.context.own.reserving() {
            self.node_store().record_read(root);
        }
        let ended = stop.child_token();
        let serving = self.serve_clients(&directory, &ended);
        let maintaining = {
            let (owner, disk) = (Arc::clone(self) as Arc<dyn DiskOwner>, Arc::clone(&self.disk));
            maintenance::run(owner, disk, ended.clone())
        };
        tokio::pin!(serving);
        tokio::select! {
            () = maintaining => {}
            () = &mut serving => {}
            () = self.context.node_store.watch_server() => {}
        }
        ended.cancel();
        drop(timeout(DRAIN, &mut serving).await);
        if stop.is_cancelled() {
            maintenance::close(Arc::clone(&self.disk)).await;
            return;
        }
        self.role.send_replace(Role::Direct);
        let dir = directory.dir().display();
        tracing::warn!(%dir, "the node store was lost: this mount opens it again");
        let disk = Arc::clone(&self.disk);
        let left = spawn_blocking(move || disk.detach("its directory is gone".to_owned())).await;
        if let Err(error) = left {
            tracing::error!(%error, "the task that leaves the node store failed; please report this line");
        }
    }

    /// Serves clients until `ended`. Binds the socket again whenever it is lost.
    async fn serve_clients(&self, directory: &StoreDirectory, ended: &CancellationToken) {
        let mut warned = false;
        while !ended.is_cancelled() {
            let at = directory.clone();
            let bound = spawn_blocking(move || Socket::bind(&at)).await;
            self.set_role(Role::Owner);
            let served = match bound.unwrap_or_else(|lost| Err(io::Error::other(lost))) {
                Ok(socket) => self.serve(Arc::new(socket), directory, ended).await,
                Err(e) => Err(e),
            };
            let pause = match served {
                Ok(()) => {
                    warned = false;
                    RETRY_PAUSE.0
                }
                Err(error) => {
                    if !std::mem::replace(&mut warned, true) {
                        tracing::warn!(
                            %error,
                            "other mounts cannot reach this node store and read from the server; retrying"
                        );
                    }
                    BIND_RETRY_EVERY
                }
            };
            ended.run_until_cancelled(sleep(pause)).await;
        }
    }

    /// Serves clients until `ended`, or until the socket is no longer where clients look for it.
    async fn serve(
        &self,
        socket: Arc<Socket>,
        directory: &StoreDirectory,
        ended: &CancellationToken,
    ) -> io::Result<()> {
        let lost = ended.child_token();
        let serving = socket.serve(Arc::clone(&self.context.node_store), lost.clone());
        let watching = async {
            loop {
                sleep(SOCKET_CHECK_EVERY).await;
                let (socket, directory) = (Arc::clone(&socket), directory.clone());
                match spawn_blocking(move || socket.is_in_place(&directory)).await {
                    Ok(true) => {}
                    Ok(false) => return,
                    Err(error) => {
                        tracing::error!(%error, "the check of the socket failed; please report this line")
                    }
                }
            }
        };
        tokio::pin!(serving);
        tokio::select! {
            done = &mut serving => return done,
            () = watching => {}
        }
        lost.cancel();
        drop(timeout(DRAIN, &mut serving).await);
        Ok(())
    }

    /// Returns whether the disk tier has its directory.
    fn has_directory(&self) -> bool {
        let state = self.disk.state();
        !matches!(state, DiskState::Absent(_) | DiskState::Open(Health::Off { why: OffReason::Vanished, .. }))
    }
}

impl DiskOwner for Node {
    fn config(&self) -> Result<DiskConfig, String> {
        let (directory, s) = (self.directory(), &self.context.settings);
        let mount_memory = s.records.as_deref().map(|records| directory.mount_memory(records));
        // First: while its file system is not mounted, nothing is created in its place.
        mount_memory.as_ref().map_or(Ok(()), MountMemory::check).map_err(|e| e.to_string())?;
        directory.make()?;
        let dir = directory.dir();
        let shown = dir.display();
        let room = FsSpace::at(dir).map_err(|e| format!("{shown}: {e}"))?;
        let size_max = s.size.of(room.available.saturating_add(room.own));
        if size_max < settings::CACHE_BYTES_MIN {
            let spare = ByteSize(room.available);
            let min = ByteSize(settings::CACHE_BYTES_MIN);
            return Err(format!(
                "--cache-size {} of the {spare} free at {shown} is less than {min}: \
                 give more space or another --cache-dir",
                s.size
            ));
        }
        Ok(DiskConfig {
            dir: dir.to_owned(),
            size_max,
            free_floor: s.free_floor.of(room.total),
            slab_bytes: None,
            policy: Policy::Fletch,
            // Any value will do that differs between two stores.
            seed: u64::from(std::process::id()),
            files_max: SLABS_OPEN,
            mount_memory,
        })
    }

    fn on_open(&self) {
        self.node_store().shares().forget_applied();
    }

    fn divide(&self, disk: &DiskTier) {
        for root in self.context.own.newly_read() {
            self.node_store().record_read(root);
        }
        if let Some(split) = self.node_store().shares().next_split(disk, self.node_store().now_ns()) {
            self.node_store().shares().apply(disk, &split);
        }
    }

    fn wake(&self) -> BoxFuture<'_, ()> {
        async {
            tokio::select! {
                () = self.node_store().shares().wait_for_change() => {}
                () = self.disk.wait_for_refusals() => {}
            }
        }
        .boxed()
    }

    fn still_owns(&self, _: &DiskTier) -> bool {
        let directory = self.directory();
        if let Err(why) = directory.check() {
            tracing::warn!(%why, "this mount leaves the node store: it may not belong to this user alone");
            return false;
        }
        self.has_directory() && directory == self.current_directory()
    }
}
