//! Bringing chunks to where they stay, and looking whether they are really there.
//!
//! Where there is a disk tier a chunk stays on disk, whatever memory has of it; without one, in
//! memory for as long as that has room.

use crate::{DatasetId, Disk, Fetch, ReadError, Store, Tier};
use fletch_core::StoreKey;
use std::sync::Arc;
use tokio::time::Instant;

/// What became of a chunk that was to be brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Warmed {
    /// It was there.
    Already,
    /// It was brought, by this call's fetch or from memory. On disk it may still wait to be written.
    Brought,
    /// The disk tier does not keep it (or there is none to be had): nothing was fetched for it.
    Refused,
}

/// What a look at a chunk found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// All of it was read and hashes to its name.
    Whole,
    /// It is not there.
    Missing,
    /// What is there is something else. It is given up, and never served.
    Damaged,
    /// It is there and could not be read in time.
    Unread,
}

impl Store {
    /// Brings the chunk to where it stays, unless it is there. Waits while the disk is behind, so that
    /// readers' own chunks find room in its queue.
    ///
    /// # Errors
    /// [`ReadError`], as [`Store::read`].
    pub async fn warm(
        self: &Arc<Self>,
        key: &StoreKey,
        len: u32,
        dataset: DatasetId,
        fetch: Fetch,
    ) -> Result<Warmed, ReadError> {
        if self.stays(key, len) {
            return Ok(Warmed::Already);
        }
        let Some(disk) = self.disk() else {
            self.read(key.clone(), len, dataset, fetch).await?;
            return Ok(Warmed::Brought);
        };
        // Asked first: what will not be kept is not worth the origin's bytes.
        if !disk.admits(key, dataset, len) {
            return Ok(Warmed::Refused);
        }
        disk.room(len, self.deadline()).await;
        let hit = self.read(key.clone(), len, dataset, fetch).await?;
        // A read that fetched has handed it to the disk; one that did not may have come before.
        let mut kept = hit.tier == Tier::Origin || disk.has(key, len) || disk.keep(key, dataset, &hit.chunk);
        if !kept && disk.admits(key, dataset, len) {
            // Others came first to the queue's room: what was fetched waits for the next.
            disk.room(len, self.deadline()).await;
            kept = disk.has(key, len) || disk.keep(key, dataset, &hit.chunk);
        }
        Ok(if kept { Warmed::Brought } else { Warmed::Refused })
    }

    /// Whether the chunk is where it stays. Reads nothing.
    #[must_use]
    pub fn stays(&self, key: &StoreKey, len: u32) -> bool {
        self.disk().map_or_else(|| self.has(key, len), |d| d.has(key, len))
    }

    /// Reads and hashes what is kept of a chunk.
    pub async fn look_at(&self, key: &StoreKey, len: u32) -> Found {
        let Some(disk) = self.disk() else {
            // What is in memory was hashed on its way there.
            return if self.has(key, len) { Found::Whole } else { Found::Missing };
        };
        if !disk.has(key, len) {
            return Found::Missing;
        }
        let until = Instant::now() + self.deadline();
        let Some(buffer) = self.buffer(len, until).await else { return Found::Unread };
        match disk.read(key, buffer, until).await {
            Some(_) => Found::Whole,
            None if disk.has(key, len) => Found::Unread,
            None => Found::Damaged,
        }
    }
}

impl Disk {
    /// Protects chunks from eviction until as many releases; which of them are there and are now.
    #[must_use]
    pub fn lease(&self, keys: &[StoreKey]) -> Vec<bool> {
        let Some(tier) = self.tier() else { return vec![false; keys.len()] };
        keys.iter().map(|k| tier.lease(std::slice::from_ref(k)) == 1).collect()
    }

    /// Takes one protection back from each chunk.
    pub fn release(&self, keys: &[StoreKey]) {
        if let Some(tier) = self.tier() {
            tier.release(keys);
        }
    }

    /// Evicts what a dataset has and nobody leased; how many chunks.
    #[must_use]
    pub fn evict_dataset(&self, dataset: DatasetId) -> u64 {
        self.tier().map_or(0, |t| t.evict_dataset(dataset))
    }

    /// Evicts a chunk if it was brought for `dataset` and nobody leased it; one that waits to be written never is.
    pub fn evict_of(&self, key: &StoreKey, dataset: DatasetId) -> bool {
        let waited = self.take_back(key, dataset);
        waited | self.tier().is_some_and(|t| t.evict_of(key, dataset))
    }

    /// What a dataset was given of the tier, in footprints.
    #[must_use]
    pub fn share_of(&self, dataset: DatasetId) -> Option<u64> {
        self.tier().and_then(|t| t.share_of(dataset))
    }

    /// Whether the dataset was given a share of so many bytes. True where none are given out.
    #[must_use]
    pub fn has_share(&self, dataset: DatasetId, bytes: u64) -> bool {
        let enough = |share: Option<u64>| share.is_some_and(|s| s >= bytes);
        self.tier().is_none_or(|t| {
            t.policy() != crate::disk::Policy::Fletch
                || t.stats().datasets.iter().any(|d| d.dataset == dataset && enough(d.share))
        })
    }
}
