//! What waits to be appended to the disk, and is found here until it is there.

use crate::DatasetId;
use fletch_core::{StoreKey, Verified};
use std::collections::{HashMap, VecDeque};

/// A chunk that was admitted.
#[derive(Debug)]
pub(super) struct Append {
    pub key: StoreKey,
    pub dataset: DatasetId,
    pub chunk: Verified,
}

/// In the order of their coming. Its bound is its owner's.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: VecDeque<Append>,
    /// Those that wait, and those that are being written.
    chunks: HashMap<StoreKey, Verified>,
    /// Of both.
    bytes: u64,
    /// Somebody appends.
    pub has_drainer: bool,
}

fn len(chunk: &Verified) -> u64 {
    chunk.bytes().len() as u64
}

impl Queue {
    /// Bytes that wait or are being written.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub fn push(&mut self, append: Append) {
        self.bytes += len(&append.chunk);
        self.chunks.insert(append.key.clone(), append.chunk.clone());
        self.waiting.push_back(append);
    }

    /// The next to be written. It counts until [`Queue::over`].
    pub fn next(&mut self) -> Option<Append> {
        self.waiting.pop_front()
    }

    /// It was written, or will not be.
    pub fn finish(&mut self, append: &Append) {
        self.bytes = self.bytes.saturating_sub(len(&append.chunk));
        self.chunks.remove(&append.key);
    }

    /// Takes back what nobody began to write of a chunk for a dataset; whether there was any.
    pub fn cancel(&mut self, key: &StoreKey, dataset: DatasetId) -> bool {
        if !self.chunks.contains_key(key) {
            return false;
        }
        let at = self.waiting.iter().position(|w| w.dataset == dataset && w.key == *key);
        let Some(append) = at.and_then(|at| self.waiting.remove(at)) else { return false };
        self.finish(&append);
        true
    }

    /// The chunk, if it waits or is being written.
    pub fn get(&self, key: &StoreKey) -> Option<Verified> {
        self.chunks.get(key).cloned()
    }
}
