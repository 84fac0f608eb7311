//! Counters of the store.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub hits_memory: AtomicU64,
    pub hits_flight: AtomicU64,
    pub hits_disk: AtomicU64,
    pub fetches: AtomicU64,
    pub fetched_bytes: AtomicU64,
    pub fetch_errors: AtomicU64,
    pub corrupt: AtomicU64,
    pub overloaded: AtomicU64,
    pub deadlines: AtomicU64,
}

/// A snapshot of the counters. The last five are gauges; the others grow until the store is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreStats {
    /// Reads answered from memory.
    pub hits_memory: u64,
    /// Reads that joined another reader's fetch.
    pub hits_flight: u64,
    /// Reads answered from disk.
    pub hits_disk: u64,
    /// Fetch calls, retries included.
    pub fetches: u64,
    /// Bytes that fetches returned and that matched their hash.
    pub fetched_bytes: u64,
    /// Fetches that ended with an error.
    pub fetch_errors: u64,
    /// Fetches that returned wrong bytes.
    pub corrupt: u64,
    /// Reads rejected because no memory came free in time.
    pub overloaded: u64,
    /// Fetches that did not end before their deadline.
    pub deadlines: u64,
    /// Bytes of chunks cached now.
    pub cached_bytes: u64,
    /// Chunks cached now.
    pub cached_chunks: u64,
    /// Bytes whose permits are taken: live buffers, and fetches that have not read theirs yet. Never above
    /// `memory_bytes`.
    pub live_bytes: u64,
    /// Bytes of pinned chunks, part of `live_bytes`.
    pub pinned_bytes: u64,
    /// Fetches running now.
    pub flights: u64,
}

impl Counters {
    pub fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Relaxed);
    }

    pub fn snapshot(&self) -> StoreStats {
        StoreStats {
            hits_memory: self.hits_memory.load(Relaxed),
            hits_flight: self.hits_flight.load(Relaxed),
            hits_disk: self.hits_disk.load(Relaxed),
            fetches: self.fetches.load(Relaxed),
            fetched_bytes: self.fetched_bytes.load(Relaxed),
            fetch_errors: self.fetch_errors.load(Relaxed),
            corrupt: self.corrupt.load(Relaxed),
            overloaded: self.overloaded.load(Relaxed),
            deadlines: self.deadlines.load(Relaxed),
            cached_bytes: 0,
            cached_chunks: 0,
            live_bytes: 0,
            pinned_bytes: 0,
            flights: 0,
        }
    }
}
