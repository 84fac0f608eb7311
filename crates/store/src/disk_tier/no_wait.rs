//! Reads of the disk on the calling thread: only of what the system has in its page cache.

use super::{DiskTier, Wanted, verify};
use crate::buffer_pool::PooledBuffer;
use fletch_core::{StoreKey, verified::Grouped};
use std::{fs::File, sync::Arc};

impl DiskTier {
    /// Reads a chunk, or a part of it, without waiting.
    ///
    /// `buffer` is as long as what is read. Returns `None` if that is not on the disk, if the system would
    /// have to ask the device for it, if it is damaged, or if too many threads read the disk. A caller that
    /// may wait then reads it as usual, which finds out and quarantines damage.
    pub(crate) fn read_no_wait(
        &self,
        key: &StoreKey,
        wanted: Wanted,
        buffer: PooledBuffer,
    ) -> Option<Grouped> {
        let engine = self.engine()?;
        // A directory on a dead disk may hold a thread, so their number is bounded here, too.
        let _permit = Arc::clone(&self.readers).try_acquire_owned().ok()?;
        let found = engine.get_with(key, |record| {
            verify(record.len(), (key.hash, wanted), buffer, |at, piece| record.read_cached_at(at, piece))
        });
        // The engine counts its errors and turns itself off.
        found.ok().flatten().flatten()
    }

    /// Opens the file that has a chunk of `len` bytes, as [`crate::disk::DiskEngine::lend`].
    pub(crate) fn lend(&self, key: &StoreKey, len: u32) -> Option<(File, u64)> {
        let engine = self.engine()?;
        let _permit = Arc::clone(&self.readers).try_acquire_owned().ok()?;
        engine.lend(key).filter(|(_, _, found)| *found == len).map(|(file, at, _)| (file, at))
    }
}
