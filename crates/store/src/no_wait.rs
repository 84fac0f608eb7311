//! Reads that never wait: of memory, and of the disk's pages that the system has in memory.
//!
//! They run on the calling thread. `None` says nothing about the chunk: a caller that may wait reads it as
//! usual ([`Store::read`]).

use crate::{
    disk_tier::Wanted,
    outcome::{Hit, PartHit, Tier},
    read::Store,
    stats::Counters,
};
use fletch_core::{Expected, Hash, StoreKey, groups::GroupRun};
use std::{fs::File, ops::Range};

impl Store {
    /// Returns a chunk of `len` bytes from memory, or from the disk.
    #[must_use]
    pub fn read_no_wait(&self, key: &StoreKey, len: u32) -> Option<Hit> {
        if let Some(hit) = self.cached(key) {
            return Some(hit);
        }
        self.read_disk_no_wait(key, (key, len), self.groups.whole(key.hash, len), len)
    }

    /// Returns the bytes `at` of a chunk of `len` bytes, from disk or from memory under their own key.
    ///
    /// The bytes must hash to `part` (I1).
    #[must_use]
    pub fn part_no_wait(&self, chunk: &StoreKey, len: u32, at: &Range<usize>, part: Hash) -> Option<Hit> {
        let key = StoreKey { domain: chunk.domain.clone(), hash: part };
        if let Some(hit) = self.cached(&key) {
            return Some(hit);
        }
        let size = u32::try_from(at.len()).ok().filter(|&size| size <= len)?;
        let part = Wanted::Part { offset: at.start, expected: Expected::Whole(part) };
        self.read_disk_no_wait(&key, (chunk, len), part, size)
    }

    /// Returns the bytes of a run of groups of a chunk, from memory or disk. See [`Store::run`].
    #[must_use]
    pub fn run_no_wait(&self, chunk: &StoreKey, run: &GroupRun) -> Option<PartHit> {
        if let Some(hit) = self.run_in_memory(chunk, run) {
            return Some(hit);
        }
        let (disk, buffer) = self.disk_for_run(chunk, run).zip(self.memory.try_buffer(run.len()))?;
        let part = Wanted::Part { offset: run.range().start, expected: Expected::Run(run.clone()) };
        let (verified, _) = disk.read_no_wait(chunk, part, buffer)?;
        Counters::add(&self.counters.hits_disk, 1);
        Some(PartHit { hit: Hit { chunk: verified, tier: Tier::Disk }, begins: run.range().start })
    }

    /// Returns the file on disk that has a chunk of `len` bytes, and where the chunk begins there, for
    /// another process, which checks what it reads.
    #[must_use]
    pub fn lend(&self, key: &StoreKey, len: u32) -> Option<(File, u64)> {
        self.disk()?.lend(key, len)
    }

    /// Reads a chunk on disk, or a part of it, and keeps what was read in memory under `key`.
    fn read_disk_no_wait(
        &self,
        key: &StoreKey,
        (chunk, len): (&StoreKey, u32),
        wanted: Wanted,
        size: u32,
    ) -> Option<Hit> {
        let disk = self.disk().filter(|d| d.has(chunk, len))?;
        let buffer = self.memory.try_buffer(size)?;
        let (verified, groups) = disk.read_no_wait(chunk, wanted, buffer)?;
        self.groups.learn(groups);
        Counters::add(&self.counters.hits_disk, 1);
        self.memory.insert(key.clone(), verified.clone());
        Some(Hit { chunk: verified, tier: Tier::Disk })
    }
}

#[cfg(test)]
mod tests;
