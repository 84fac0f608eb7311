//! The append queue: chunks that wait to be written to disk. Readers find them here until they are on disk.
//!
//! Chunks leave it in groups, which are written together: a call for each chunk, and a thread that wakes for
//! each, cost more than the bytes of short chunks.

use crate::{dataset_id::DatasetId, disk::ReservedShare};
use fletch_core::{StoreKey, Verified};
use std::collections::{HashMap, VecDeque};

/// The most chunks of a group.
const GROUP_CHUNKS: usize = 32;
/// A group takes no further chunk after so many bytes.
const GROUP_BYTES: u64 = 4 << 20;

/// An admitted chunk to append.
#[derive(Debug)]
pub(super) struct Append {
    pub key: StoreKey,
    pub dataset: DatasetId,
    pub chunk: Verified,
    /// The part of the dataset's share that it will occupy. Taken by the thread that appends.
    pub reserved: Option<ReservedShare>,
}

/// Appends in the order of their arrival. The disk tier bounds its bytes.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: VecDeque<Append>,
    /// Chunks that are queued or being written.
    chunks: HashMap<StoreKey, Verified>,
    /// Bytes of `chunks`.
    bytes: u64,
    /// Whether a thread appends.
    pub has_drainer: bool,
    /// How many callers wait until a chunk was appended. For them no group waits for further chunks.
    pub waiters: usize,
}

fn len(chunk: &Verified) -> u64 {
    chunk.bytes().len() as u64
}

impl Queue {
    /// Returns the bytes that are queued or being written.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether no append waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub fn push(&mut self, append: Append) {
        self.bytes += len(&append.chunk);
        self.chunks.insert(append.key.clone(), append.chunk.clone());
        self.waiting.push_back(append);
    }

    /// Whether the next group is to be written at once: it is whole, or somebody waits for it.
    pub fn is_due(&self) -> bool {
        let (chunks, bytes) = self.next_chunks_and_bytes();
        chunks > 0 && self.waiters > 0 || chunks == GROUP_CHUNKS || bytes >= GROUP_BYTES
    }

    /// Returns how many chunks and bytes the next group has.
    fn next_chunks_and_bytes(&self) -> (usize, u64) {
        let (mut chunks, mut bytes) = (0, 0);
        for append in self.waiting.iter().take(GROUP_CHUNKS) {
            if bytes >= GROUP_BYTES {
                break;
            }
            chunks += 1;
            bytes += len(&append.chunk);
        }
        (chunks, bytes)
    }

    /// Takes the next group. Its bytes count until [`Queue::finish`].
    pub fn next_group(&mut self) -> Vec<Append> {
        let (chunks, _) = self.next_chunks_and_bytes();
        self.waiting.drain(..chunks).collect()
    }

    /// Ends an append that was written or failed.
    pub fn finish(&mut self, append: &Append) {
        self.bytes = self.bytes.saturating_sub(len(&append.chunk));
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

    /// Cancels all appends of a chunk that did not begin; returns whether there was one.
    pub fn cancel_all(&mut self, key: &StoreKey) -> bool {
        let (cancelled, waiting): (Vec<_>, Vec<_>) = self.waiting.drain(..).partition(|w| w.key == *key);
        self.waiting.extend(waiting);
        cancelled.iter().for_each(|append| self.finish(append));
        !cancelled.is_empty()
    }

    /// Returns the chunk if it is queued or being written.
    pub fn get(&self, key: &StoreKey) -> Option<Verified> {
        self.chunks.get(key).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_core::Domain;

    fn queue(lens: &[usize]) -> Queue {
        let mut queue = Queue::default();
        for (n, len) in lens.iter().enumerate() {
            let mut bytes = vec![0; *len];
            bytes[..8].copy_from_slice(&n.to_le_bytes());
            let chunk = Verified::of(bytes.into());
            let key = StoreKey { domain: Domain::default_domain(), hash: chunk.hash() };
            queue.push(Append { key, dataset: DatasetId(1), chunk, reserved: None });
        }
        queue
    }

    #[test]
    fn groups_have_a_limited_length_and_their_bytes_count_until_they_end() {
        assert!(!queue(&[]).is_due() && queue(&[]).next_group().is_empty());
        let mut many = queue(&[10; 40]);
        assert!(many.is_due());
        let group = many.next_group();
        assert_eq!((group.len(), many.bytes(), many.is_due()), (32, 400, false));
        assert!(many.get(&group[0].key).is_some(), "readers find it while it is written");
        group.iter().for_each(|append| many.finish(append));
        assert_eq!((many.bytes(), many.next_group().len(), many.is_empty()), (80, 8, true));
        let mut few = queue(&[10; 2]);
        few.waiters = 1;
        assert!(few.is_due() && few.next_group().len() == 2 && !few.is_due(), "somebody waits");
        let mut long = queue(&[4 << 20, 4 << 20, 10, 3 << 20, 2 << 20]);
        let mut lens = Vec::new();
        while long.is_due() {
            lens.push(long.next_group().len());
        }
        assert_eq!((lens, long.is_empty()), (vec![1, 1, 3], true));
    }
}
