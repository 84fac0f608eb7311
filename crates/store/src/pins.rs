//! Pins: chunks that stay in memory until the prefetcher that pinned them lets go, whatever the cache evicts.
//!
//! Invariants:
//! 1. (I6) a pinned chunk holds its permit like any other buffer. Pins are part of `memory_bytes`, and the
//!    code that pins must bound its pins;
//! 2. a chunk is pinned for as long as a [`Pinned`] of it exists.

use fletch_core::{StoreKey, Verified};
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// The pinned chunks, by key.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    held: RwLock<HashMap<StoreKey, Pin>>,
    bytes: AtomicU64,
}

#[derive(Debug)]
struct Pin {
    chunk: Verified,
    holders: u32,
}

/// Keeps a chunk in memory until it is dropped.
#[derive(Debug)]
pub struct Pinned {
    pins: Arc<Pins>,
    key: StoreKey,
}

impl Pins {
    fn read(&self) -> RwLockReadGuard<'_, HashMap<StoreKey, Pin>> {
        // The map is only inserted into and removed from: a panic leaves it whole.
        self.held.read()
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<StoreKey, Pin>> {
        self.held.write()
    }

    pub fn get(&self, key: &StoreKey) -> Option<Verified> {
        if self.bytes.load(Relaxed) == 0 {
            return None;
        }
        self.read().get(key).map(|p| p.chunk.clone())
    }

    /// Pins a chunk.
    pub fn pin(self: &Arc<Self>, key: StoreKey, chunk: Verified) -> Pinned {
        let mut held = self.write();
        let pin = held.entry(key.clone()).or_insert_with(|| {
            self.bytes.fetch_add(weight(&chunk), Relaxed);
            Pin { chunk, holders: 0 }
        });
        pin.holders += 1;
        Pinned { pins: Arc::clone(self), key }
    }

    /// Returns the bytes of all pinned chunks, each chunk counted once.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }
}

/// Returns a chunk's length, at least 1, so that a total of 0 means that no chunk is pinned.
fn weight(chunk: &Verified) -> u64 {
    (chunk.bytes().len() as u64).max(1)
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let mut held = self.pins.write();
        let Some(pin) = held.get_mut(&self.key) else { return };
        pin.holders -= 1;
        if pin.holders == 0
            && let Some(pin) = held.remove(&self.key)
        {
            self.pins.bytes.fetch_sub(weight(&pin.chunk), Relaxed);
            drop(held);
            // Its memory is given back with the lock released.
            drop(pin);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use fletch_core::Domain;

    #[test]
    fn a_chunk_is_pinned_until_its_last_holder_lets_go() {
        let pins = Arc::new(Pins::default());
        let chunk = Verified::of(Bytes::from_static(b"seven b"));
        let key = StoreKey { domain: Domain::default_domain(), hash: chunk.hash() };
        assert!(pins.get(&key).is_none());
        let a = pins.pin(key.clone(), chunk.clone());
        let b = pins.pin(key.clone(), chunk.clone());
        assert_eq!((pins.bytes(), pins.get(&key).map(|c| c.hash())), (7, Some(chunk.hash())));
        drop(a);
        assert_eq!((pins.bytes(), pins.get(&key).is_some()), (7, true));
        drop(b);
        assert_eq!((pins.bytes(), pins.get(&key).is_none()), (0, true));
        let empty = Verified::of(Bytes::new());
        let of_empty = StoreKey { hash: empty.hash(), ..key };
        let held = pins.pin(of_empty.clone(), empty);
        assert!(pins.get(&of_empty).is_some());
        drop(held);
        assert_eq!(pins.bytes(), 0);
    }
}
