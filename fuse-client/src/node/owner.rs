//! What the owner of a node's store does all the time: housekeeping of the tier, and a socket that guests find.
//!
//! The two are apart: without a socket the store serves its owner, and a socket that cannot be bound is tried again,
//! in its own time, while housekeeping goes on.
//!
//! (I7) The store is left when its directory is not, or not surely, of this user alone any more, and when the token
//! became another principal's name.

use super::{Node, REST, Role, door::Socket, place::Place, settings};
use fletch_settings::ByteSize;
use fletch_store::{
    DiskOwner, DiskState, DiskTier,
    disk::{DiskConfig, FsSpace, Health, OffReason, Policy},
    maintenance,
};
use futures::future::{BoxFuture, FutureExt};
use std::{
    io,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::{
    task::spawn_blocking,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

/// Slab files that are kept open for reading.
const SLABS_OPEN: usize = 256;
/// How often an owner looks whether its socket is where guests look for it.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often a socket is tried that cannot be bound, or cannot be listened at.
const BIND_EVERY: Duration = Duration::from_secs(5);
/// How long answers to guests are waited for when the mount ends.
const DRAIN: Duration = Duration::from_millis(300);

impl Node {
    /// Keeps the store until `stop`, or until it is lost.
    pub(super) async fn own(self: &Arc<Self>, stop: &CancellationToken) {
        let place = self.place();
        tracing::info!(dir = %place.dir().display(), "this mount owns the node's store");
        let idle = place.clone();
        // Beside the point of what is waited for here.
        drop(spawn_blocking(move || idle.remove_idle()));
        // Until it is noted again by reads.
        self.host().note(self.means.version.root);
        let ended = stop.child_token();
        let serving = self.receive(&place, &ended);
        let keeping = {
            let (house, disk) = (Arc::clone(self) as Arc<dyn DiskOwner>, Arc::clone(&self.disk));
            maintenance::run(house, disk, ended.clone())
        };
        tokio::pin!(serving);
        tokio::select! {
            () = keeping => {}
            () = &mut serving => {}
            () = self.means.host.watch_server() => {}
        }
        ended.cancel();
        drop(timeout(DRAIN, &mut serving).await);
        if stop.is_cancelled() {
            maintenance::close(Arc::clone(&self.disk)).await;
            return;
        }
        self.role.send_replace(Role::Alone);
        tracing::warn!(dir = %place.dir().display(), "the node's store is lost, and begun anew");
        let disk = Arc::clone(&self.disk);
        let left = spawn_blocking(move || disk.detach("its directory is gone".to_owned())).await;
        if let Err(error) = left {
            tracing::error!(%error, "leaving the node's store was lost");
        }
    }

    /// Serves guests until `ended`, at a socket that is bound again whenever it is lost.
    async fn receive(&self, place: &Place, ended: &CancellationToken) {
        let mut told = false;
        while !ended.is_cancelled() {
            let at = place.clone();
            let bound = spawn_blocking(move || Socket::bind(&at)).await;
            self.becomes(Role::Owner);
            let served = match bound.unwrap_or_else(|lost| Err(io::Error::other(lost))) {
                Ok(socket) => self.serve(Arc::new(socket), place, ended).await,
                Err(e) => Err(e),
            };
            let rest = match served {
                Ok(()) => {
                    told = false;
                    REST.0
                }
                Err(error) => {
                    if !std::mem::replace(&mut told, true) {
                        tracing::warn!(%error, "other mounts cannot reach this node's store for now");
                    }
                    BIND_EVERY
                }
            };
            ended.run_until_cancelled(sleep(rest)).await;
        }
    }

    /// Serves guests until `ended`, or until they do not find the socket any more.
    async fn serve(&self, socket: Arc<Socket>, place: &Place, ended: &CancellationToken) -> io::Result<()> {
        let lost = ended.child_token();
        let serving = socket.serve(Arc::clone(&self.means.host), lost.clone());
        let watching = async {
            loop {
                sleep(LOOK_EVERY).await;
                let (socket, place) = (Arc::clone(&socket), place.clone());
                match spawn_blocking(move || socket.is_there(&place)).await {
                    Ok(true) => {}
                    Ok(false) => return,
                    Err(error) => tracing::error!(%error, "a look at the node's socket was lost"),
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

    /// Whether the tier has its directory.
    fn stands(&self) -> bool {
        let state = self.disk.state();
        !matches!(state, DiskState::Absent(_) | DiskState::Open(Health::Off { why: OffReason::Vanished, .. }))
    }
}

impl DiskOwner for Node {
    fn config(&self) -> Result<DiskConfig, String> {
        let place = self.place();
        place.make()?;
        let (dir, s) = (place.dir(), &self.means.settings);
        let shown = dir.display();
        let room = FsSpace::at(dir).map_err(|e| format!("{shown}: {e}"))?;
        let size_max = s.size.of(room.available.saturating_add(room.own));
        if size_max < settings::SIZE_MIN {
            let spare = ByteSize(room.available);
            return Err(format!("{} of the {spare} that are free at {shown} is too little", s.size));
        }
        Ok(DiskConfig {
            dir: dir.to_owned(),
            size_max,
            free_floor: s.free_floor.of(room.total),
            slab_bytes: None,
            policy: Policy::Fletch,
            // Only so that two stores do not choose alike.
            seed: u64::from(std::process::id()),
            files_max: SLABS_OPEN,
        })
    }

    fn on_open(&self) {
        self.host().shares().forget_applied();
    }

    fn divide(&self, disk: &DiskTier) {
        let reads = self.means.read.reads.load(Relaxed);
        if self.noted.swap(reads, Relaxed) != reads {
            self.host().note(self.means.version.root);
        }
        if let Some(split) = self.host().shares().next_split(disk, self.host().now_ns()) {
            self.host().shares().apply(disk, &split);
        }
    }

    fn wake(&self) -> BoxFuture<'_, ()> {
        self.host().shares().wait_for_change().boxed()
    }

    fn still_owns(&self, _: &DiskTier) -> bool {
        let place = self.place();
        if let Err(why) = place.check() {
            tracing::warn!(%why, "the node's store is not this user's alone");
            return false;
        }
        self.stands() && place == self.place_now()
    }
}
