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
pub(crate) type Arrival = Shared<oneshot::Receiver<Outcome>>;

#[derive(Debug, Default)]
pub(crate) struct Flights {
    running: Mutex<HashMap<StoreKey, Arrival>>,
}

/// What a reader that missed memory does next.
pub(crate) enum Boarding {
    /// It arrived in memory meanwhile.
    Landed(Verified),
    /// Somebody else fetches it: wait.
    Join(Arrival),
    /// Nobody does: the caller must start the fetch and give it this ticket.
    Lead(Ticket, Arrival),
}

/// The right and duty to fetch one key. However it ends, dropping it clears the way for a
/// next fetch.
pub(crate) struct Ticket {
    flights: Arc<Flights>,
    key: StoreKey,
    tell: Option<oneshot::Sender<Outcome>>,
}

impl Flights {
    fn lock(&self) -> MutexGuard<'_, HashMap<StoreKey, Arrival>> {
        // The map is only inserted into and removed from: a panic leaves it whole.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `memory` is asked again under the lock: a flight lands in memory before it leaves the
    /// map, so whoever finds neither may lead, and no second fetch can slip between.
    pub fn board(self: &Arc<Self>, key: &StoreKey, memory: impl Fn() -> Option<Verified>) -> Boarding {
        let mut running = self.lock();
        if let Some(arrival) = running.get(key) {
            return Boarding::Join(arrival.clone());
        }
        if let Some(chunk) = memory() {
            return Boarding::Landed(chunk);
        }
        let (tell, hear) = oneshot::channel();
        let arrival = hear.shared();
        running.insert(key.clone(), arrival.clone());
        Boarding::Lead(Ticket { flights: Arc::clone(self), key: key.clone(), tell: Some(tell) }, arrival)
    }

    /// Whether the chunk is on its way.
    pub fn has(&self, key: &StoreKey) -> bool {
        self.lock().contains_key(key)
    }

    pub fn len(&self) -> usize {
        self.lock().len()
    }
}

impl Ticket {
    /// Ends the flight. What was fetched must already be in memory.
    pub fn land(mut self, outcome: Outcome) {
        self.flights.lock().remove(&self.key);
        if let Some(tell) = self.tell.take() {
            // Nobody may be waiting any more; the chunk is in memory all the same.
            drop(tell.send(outcome));
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.tell.is_some() {
            self.flights.lock().remove(&self.key);
        }
    }
}
