//! Bringing chunks to where they stay, and looking whether they are really there.
//!
//! Where there is a disk tier a chunk stays on disk, whatever memory has of it; without one, in
//! memory for as long as that has room.

use crate::{DatasetId, Fetch, ReadError, Store, Tier};
use fletch_core::StoreKey;
use std::sync::Arc;
use tokio::time::Instant;

/// What became of a chunk that was to be brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Warmed {
    /// It was there.
    Already,
    /// It was brought, by this call's fetch or from memory. On disk it may still wait to be written.
    Fetched,
    /// The disk tier does not keep it (or there is none to be had): nothing was fetched for it.
    Refused,
}

/// What a look at a chunk found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkCheck {
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
        if self.is_kept(key, len) {
            return Ok(Warmed::Already);
        }
        let Some(disk) = self.disk() else {
            self.read(key.clone(), len, dataset, fetch).await?;
            return Ok(Warmed::Fetched);
        };
        // Asked first: what will not be kept is not worth the origin's bytes.
        if !disk.admits(key, dataset, len) {
            return Ok(Warmed::Refused);
        }
        disk.wait_for_queue_room(len, self.deadline()).await;
        let hit = self.read(key.clone(), len, dataset, fetch).await?;
        // A read that fetched has handed it to the disk; one that did not may have come before.
        let mut kept =
            hit.tier == Tier::Origin || disk.has(key, len) || disk.enqueue(key, dataset, &hit.chunk);
        if !kept && disk.admits(key, dataset, len) {
            // Others came first to the queue's room: what was fetched waits for the next.
            disk.wait_for_queue_room(len, self.deadline()).await;
            kept = disk.has(key, len) || disk.enqueue(key, dataset, &hit.chunk);
        }
        Ok(if kept { Warmed::Fetched } else { Warmed::Refused })
    }

    /// Whether the chunk is where it stays. Reads nothing.
    #[must_use]
    pub fn is_kept(&self, key: &StoreKey, len: u32) -> bool {
        self.disk().map_or_else(|| self.has(key, len), |d| d.has(key, len))
    }

    /// Reads and hashes what is kept of a chunk.
    pub async fn check_chunk(&self, key: &StoreKey, len: u32) -> ChunkCheck {
        let Some(disk) = self.disk() else {
            // What is in memory was hashed on its way there.
            return if self.has(key, len) { ChunkCheck::Whole } else { ChunkCheck::Missing };
        };
        if !disk.has(key, len) {
            return ChunkCheck::Missing;
        }
        let until = Instant::now() + self.deadline();
        let Some(buffer) = self.buffer(len, until).await else { return ChunkCheck::Unread };
        match disk.read(key, buffer, until).await {
            Some(_) => ChunkCheck::Whole,
            None if disk.has(key, len) => ChunkCheck::Unread,
            None => ChunkCheck::Damaged,
        }
    }
}
