//! Warming: fetching chunks to where the store keeps them, and checking that they are there.
//!
//! A store with a disk tier keeps chunks on disk, whatever memory holds. A store without one keeps them in
//! memory while memory has space.

use crate::{
    dataset_id::DatasetId,
    disk_tier::PromiseOutcome,
    outcome::{ReadError, Tier},
    read::{Fetch, Store},
};
use fletch_core::{StoreKey, Verified};
use std::sync::Arc;
use tokio::time::Instant;

/// The result of warming a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Warmed {
    /// The store already kept the chunk.
    Already,
    /// The store keeps the chunk now, fetched or copied from memory. Its append to disk may still be queued.
    Fetched,
    /// The disk tier does not keep the chunk, or is not open. Usually the store fetched nothing.
    Refused,
}

/// The result of checking a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkCheck {
    /// The store read the whole chunk, and it hashes to its name.
    Whole,
    /// The store does not have the chunk.
    Missing,
    /// The bytes do not hash to the chunk's name. The store drops them and never serves them.
    Damaged,
    /// The store has the chunk and could not read it in time.
    Unread,
}

impl Store {
    /// Fetches the chunk to where the store keeps it, unless it is there.
    ///
    /// Waits while the append queue is more than half full, so that chunks of readers find space in it.
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
        if self.is_kept(key, len) {
            if let Some(disk) = self.disk() {
                disk.use_chunk(key, dataset);
            }
            return Ok(Warmed::Already);
        }
        let Some(disk) = self.disk() else {
            self.read(key.clone(), len, dataset, fetch).await?;
            return Ok(Warmed::Fetched);
        };
        // First: a chunk that will not be kept is not worth the origin's bytes.
        if !disk.admits(key, dataset, len) {
            return Ok(Warmed::Refused);
        }
        disk.wait_for_queue_room(len, self.deadline()).await;
        let hit = self.read(key.clone(), len, dataset, fetch).await?;
        // A read that fetched has handed it to the disk; one that did not may have come before.
        let mut kept =
            hit.tier == Tier::Origin || disk.has(key, len) || disk.enqueue(key, dataset, &hit.chunk);
        if !kept && disk.admits(key, dataset, len) {
            // Others filled the queue first: what was fetched waits for space.
            disk.wait_for_queue_room(len, self.deadline()).await;
            kept = disk.has(key, len) || disk.enqueue(key, dataset, &hit.chunk);
        }
        Ok(if kept { Warmed::Fetched } else { Warmed::Refused })
    }

    /// As [`Store::warm`], but fetches only what the disk tier will keep, and waits until it was appended.
    ///
    /// `Fetched` means here that the chunk is on disk. `Refused` covers a chunk that was fetched and did not
    /// get there. Only a failing disk, or readers that fill the same share at the same time, cause that.
    ///
    /// # Errors
    /// [`ReadError`], as [`Store::read`]; [`ReadError::Overloaded`] also if other warm-ups held the space for
    /// too long.
    pub async fn warm_to_disk(
        self: &Arc<Self>,
        key: &StoreKey,
        len: u32,
        dataset: DatasetId,
        fetch: Fetch,
    ) -> Result<Warmed, ReadError> {
        let Some(disk) = self.disk().filter(|_| !self.is_kept(key, len)) else {
            return self.warm(key, len, dataset, fetch).await;
        };
        let within = self.deadline();
        let _promise = match disk.promise(key, dataset, len, Instant::now() + within).await {
            PromiseOutcome::Promised(promise) => promise,
            PromiseOutcome::Refused => return Ok(Warmed::Refused),
            PromiseOutcome::Late => return Err(ReadError::Overloaded { len, within }),
        };
        let warmed = self.warm(key, len, dataset, fetch).await?;
        if warmed == Warmed::Fetched {
            disk.wait_appended(key, Instant::now() + within).await;
            if !disk.has(key, len) {
                return Ok(Warmed::Refused);
            }
        }
        Ok(warmed)
    }

    /// Has a chunk appended to disk, if it is not there and the disk tier admits it.
    pub fn keep(&self, key: &StoreKey, dataset: DatasetId, chunk: &Verified) {
        let Ok(len) = u32::try_from(chunk.bytes().len()) else { return };
        if let Some(disk) = self.disk().filter(|disk| !disk.has_or_queued(key, len)) {
            disk.enqueue(key, dataset, chunk);
        }
    }

    /// Whether the chunk is where the store keeps chunks. Reads nothing.
    #[must_use]
    pub fn is_kept(&self, key: &StoreKey, len: u32) -> bool {
        self.disk().map_or_else(|| self.has(key, len), |d| d.has(key, len))
    }

    /// Reads and hashes the kept chunk.
    pub async fn check_chunk(&self, key: &StoreKey, len: u32) -> ChunkCheck {
        let Some(disk) = self.disk() else {
            // Chunks in memory were hashed before they were cached.
            return if self.has(key, len) { ChunkCheck::Whole } else { ChunkCheck::Missing };
        };
        if !disk.has(key, len) {
            return ChunkCheck::Missing;
        }
        let until = Instant::now() + self.deadline();
        let Some(buffer) = self.buffer(len, until).await else { return ChunkCheck::Unread };
        match disk.read(key, self.groups.whole(key.hash, len), buffer, until).await {
            Some((_, groups)) => {
                self.groups.learn(groups);
                ChunkCheck::Whole
            }
            None if disk.has(key, len) => ChunkCheck::Unread,
            None => ChunkCheck::Damaged,
        }
    }
}
