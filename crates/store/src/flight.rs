//! Flights: for each key at most one fetch under way, and everyone who waits for it.

use crate::read::{Hit, ReadError};
use fletch_core::{StoreKey, Verified};
use futures::{FutureExt, future::Shared};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio::sync::oneshot;

pub(crate) type Outcome = Result<Hit, ReadError>;
/// Resolves to the outcome for every clone; to an error when the flight's task was lost.
pub(crate) type SharedOutcome = Shared<oneshot::Receiver<Outcome>>;

#[derive(Debug, Default)]
pub(crate) struct Flights {
    running: Mutex<HashMap<StoreKey, SharedOutcome>>,
}

/// What a reader that missed memory does next.
pub(crate) enum FlightRole {
    /// It arrived in memory meanwhile.
    Cached(Verified),
    /// Somebody else fetches it: wait.
    Follower(SharedOutcome),
    /// Nobody does: the caller must start the fetch and give it this ticket.
    Leader(LeaderGuard, SharedOutcome),
}

/// The right and duty to fetch one key. However it ends, dropping it clears the way for a
/// next fetch.
pub(crate) struct LeaderGuard {
    flights: Arc<Flights>,
    key: StoreKey,
    sender: Option<oneshot::Sender<Outcome>>,
}

impl Flights {
    fn lock(&self) -> MutexGuard<'_, HashMap<StoreKey, SharedOutcome>> {
        // The map is only inserted into and removed from: a panic leaves it whole.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `memory` is asked again under the lock: a flight lands in memory before it leaves the
    /// map, so whoever finds neither may lead, and no second fetch can slip between.
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

    /// Whether the chunk is on its way.
    pub fn has(&self, key: &StoreKey) -> bool {
        self.lock().contains_key(key)
    }

    pub fn len(&self) -> usize {
        self.lock().len()
    }
}

impl LeaderGuard {
    /// Ends the flight. What was fetched must already be in memory.
    pub fn finish(mut self, outcome: Outcome) {
        self.flights.lock().remove(&self.key);
        if let Some(sender) = self.sender.take() {
            // Nobody may be waiting any more; the chunk is in memory all the same.
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
