//! Flights: for each key at most one fetch in progress, and the readers that wait for it.

use crate::outcome::{Hit, ReadError};
use fletch_core::{StoreKey, Verified};
use futures::{FutureExt, future::Shared};
use parking_lot::{Mutex, MutexGuard};
use std::{collections::HashMap, sync::Arc};
use tokio::sync::oneshot;

pub(crate) type Outcome = Result<Hit, ReadError>;
/// Resolves to the outcome for every clone, or to an error when the flight's task was lost.
pub(crate) type SharedOutcome = Shared<oneshot::Receiver<Outcome>>;

#[derive(Debug, Default)]
/// The fetches in progress, by key.
pub(crate) struct Flights {
    running: Mutex<HashMap<StoreKey, SharedOutcome>>,
}

/// What a reader that missed memory does next.
pub(crate) enum FlightRole {
    /// The chunk arrived in memory meanwhile.
    Cached(Verified),
    /// Another reader's fetch is in progress: the reader waits for its outcome.
    Follower(SharedOutcome),
    /// No fetch is in progress: the reader starts one and passes it this guard.
    Leader(LeaderGuard, SharedOutcome),
}

/// The right and the duty to fetch one key. Dropping it always permits the next fetch of the key.
pub(crate) struct LeaderGuard {
    flights: Arc<Flights>,
    key: StoreKey,
    sender: Option<oneshot::Sender<Outcome>>,
}

impl Flights {
    fn lock(&self) -> MutexGuard<'_, HashMap<StoreKey, SharedOutcome>> {
        // The map is only inserted into and removed from: a panic leaves it whole.
        self.running.lock()
    }

    /// Joins the flight of `key`, or makes the caller its leader.
    ///
    /// Looks into `memory` again under the lock. A flight enters memory before it leaves the map, so a caller
    /// that finds neither may lead, and no second fetch can start.
    pub fn join(self: &Arc<Self>, key: &StoreKey, memory: impl Fn() -> Option<Verified>) -> FlightRole {
        let mut running = self.lock();
        if let Some(outcome) = running.get(key) {
            return FlightRole::Follower(outcome.clone());
        }
        if let Some(chunk) = memory() {
            return FlightRole::Cached(chunk);
        }
        let (sender, receiver) = oneshot::channel();
        let outcome = receiver.shared();
        running.insert(key.clone(), outcome.clone());
        FlightRole::Leader(
            LeaderGuard { flights: Arc::clone(self), key: key.clone(), sender: Some(sender) },
            outcome,
        )
    }

    /// Whether a fetch of the chunk is in progress.
    pub fn has(&self, key: &StoreKey) -> bool {
        self.lock().contains_key(key)
    }

    pub fn len(&self) -> usize {
        self.lock().len()
    }
}

impl LeaderGuard {
    /// Ends the flight with its outcome. A chunk that memory keeps must already be there.
    pub fn finish(mut self, outcome: Outcome) {
        self.flights.lock().remove(&self.key);
        if let Some(sender) = self.sender.take() {
            // Perhaps no reader waits any more; the chunk is in memory all the same.
            drop(sender.send(outcome));
        }
    }
}

impl Drop for LeaderGuard {
    fn drop(&mut self) {
        if self.sender.is_some() {
            self.flights.lock().remove(&self.key);
        }
    }
}
