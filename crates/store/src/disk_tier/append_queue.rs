//! The append queue: chunks that wait to be written to disk. Readers find them here until they are on disk.

use crate::{dataset_id::DatasetId, disk::DiskEngine};
use fletch_core::{StoreKey, Verified};
use std::collections::{HashMap, VecDeque};

/// An admitted chunk to append.
#[derive(Debug)]
pub(super) struct Append {
    pub key: StoreKey,
    pub dataset: DatasetId,
    pub chunk: Verified,
}

/// Appends in the order of their arrival. The disk tier bounds its bytes.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: VecDeque<Append>,
    /// Chunks that are queued or being written.
    chunks: HashMap<StoreKey, Verified>,
    /// Bytes of `chunks`.
    bytes: u64,
    /// The footprints of `chunks` on disk, for each dataset.
    footprints: HashMap<DatasetId, u64>,
    /// Whether a thread appends.
    pub has_drainer: bool,
}

fn len(chunk: &Verified) -> u64 {
    chunk.bytes().len() as u64
}

/// Returns the bytes that a chunk will occupy on disk.
fn footprint(chunk: &Verified) -> u64 {
    DiskEngine::footprint(u32::try_from(chunk.bytes().len()).unwrap_or(u32::MAX))
}

impl Queue {
    /// Returns the bytes that are queued or being written.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the bytes that a dataset's chunks in this queue will occupy on disk.
    pub fn footprint_of(&self, dataset: DatasetId) -> u64 {
        self.footprints.get(&dataset).copied().unwrap_or(0)
    }

    /// Whether no append waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub fn push(&mut self, append: Append) {
        self.bytes += len(&append.chunk);
        *self.footprints.entry(append.dataset).or_default() += footprint(&append.chunk);
        self.chunks.insert(append.key.clone(), append.chunk.clone());
        self.waiting.push_back(append);
    }

    /// Takes the next append. Its bytes count until [`Queue::finish`].
    pub fn next(&mut self) -> Option<Append> {
        self.waiting.pop_front()
    }

    /// Ends an append that was written or failed.
    pub fn finish(&mut self, append: &Append) {
        self.bytes = self.bytes.saturating_sub(len(&append.chunk));
        if let Some(of) = self.footprints.get_mut(&append.dataset) {
            *of = of.saturating_sub(footprint(&append.chunk));
            if *of == 0 {
                self.footprints.remove(&append.dataset);
            }
        }
        self.chunks.remove(&append.key);
    }

    /// Cancels the append of a chunk for a dataset, unless it began; returns whether there was one.
    pub fn cancel(&mut self, key: &StoreKey, dataset: DatasetId) -> bool {
        if !self.chunks.contains_key(key) {
            return false;
        }
        let at = self.waiting.iter().position(|w| w.dataset == dataset && w.key == *key);
        let Some(append) = at.and_then(|at| self.waiting.remove(at)) else { return false };
        self.finish(&append);
        true
    }

    /// Returns the chunk if it is queued or being written.
    pub fn get(&self, key: &StoreKey) -> Option<Verified> {
        self.chunks.get(key).cloned()
    }
}
