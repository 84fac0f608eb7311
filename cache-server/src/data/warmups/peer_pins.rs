//! Protects chunks of this server for warm-ups of other servers of the cluster.
//!
//! The other server says with each chunk how long all chunks of its warm-up stay protected from then on. So
//! the protection ends by itself if that server is lost.

use super::{KNOWN_MAX, Pins, Warmups};
use crate::cluster::PinOrder;
use fletch_core::{DatasetName, Domain, Hash};
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};
use tokio::time::{Instant, sleep_until};

/// The domain, and the id that the other server gave its warm-up.
type WarmupKey = (Domain, String);

/// The pins of one warm-up of another server.
struct PeerPins {
    dataset: DatasetName,
    pins: Pins,
    pinned: HashSet<Hash>,
    until: Instant,
}

/// The pins of all warm-ups of other servers. At most [`KNOWN_MAX`] warm-ups have pins here.
#[derive(Default)]
pub(super) struct AllPeerPins(Mutex<HashMap<WarmupKey, PeerPins>>);

impl AllPeerPins {
    fn lock(&self) -> MutexGuard<'_, HashMap<WarmupKey, PeerPins>> {
        self.0.lock()
    }

    /// Removes the pins of a dataset.
    pub(super) fn forget_dataset(&self, domain: &Domain, dataset: &DatasetName) {
        self.lock().retain(|(of, _), pins| of != domain || pins.dataset != *dataset);
    }
}

impl Warmups {
    /// Pins a chunk on this server's disk for a warm-up of another server.
    pub fn pin_for_peer(
        self: &Arc<Self>,
        (domain, dataset): (&Domain, &DatasetName),
        order: &PinOrder,
        chunk: Hash,
    ) {
        let key = (domain.clone(), order.warmup.clone());
        let until = Instant::now() + order.hold;
        let mut all = self.peer_pins.lock();
        let is_new = !all.contains_key(&key);
        if is_new {
            if all.len() >= KNOWN_MAX {
                tracing::warn!(%dataset, "too many warm-ups of other servers; a chunk is not protected");
                return;
            }
            let (pins, dataset) = (Pins::new(self, domain), dataset.clone());
            all.insert(key.clone(), PeerPins { dataset, pins, pinned: HashSet::new(), until });
        }
        if let Some(of) = all.get_mut(&key) {
            of.until = of.until.max(until);
            if !of.pinned.contains(&chunk) && of.pins.pin(chunk) {
                of.pinned.insert(chunk);
            }
        }
        drop(all);
        if is_new {
            let this = Arc::clone(self);
            self.tasks.spawn(async move { this.expire_peer_pins(key).await });
        }
    }

    /// Sets how long the chunks of another server's warm-up stay pinned from now on.
    pub fn hold_for_peer(&self, domain: &Domain, order: &PinOrder) {
        let key = (domain.clone(), order.warmup.clone());
        let mut all = self.peer_pins.lock();
        if order.hold.is_zero() {
            all.remove(&key);
        } else if let Some(of) = all.get_mut(&key) {
            of.until = Instant::now() + order.hold;
        }
        drop(all);
        self.peer_pins_changed.notify_waiters();
    }

    async fn expire_peer_pins(&self, key: WarmupKey) {
        loop {
            let changed = self.peer_pins_changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let until = {
                let mut all = self.peer_pins.lock();
                let Some(until) = all.get(&key).map(|of| of.until) else { return };
                if until <= Instant::now() {
                    all.remove(&key);
                    return;
                }
                until
            };
            tokio::select! {
                () = sleep_until(until) => {}
                () = changed => {}
                () = self.stop.cancelled() => return,
            }
        }
    }
}
