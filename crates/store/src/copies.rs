//! Copies of parts of chunks.
//!
//! A caller that keeps a small part for long copies it, so as not to keep the whole chunk in memory.

use crate::buffer_pool::{BufferPool, PooledBuffer, size_class};
use bytes::Bytes;
use fletch_core::{Hash, Verified};
use std::{convert::Infallible, sync::Arc};
use tokio::sync::Semaphore;

/// A pool of memory for copies. Half of it may be idle.
///
/// Invariant (I6): all live copies and idle buffers together occupy at most `bytes`.
#[derive(Debug)]
pub struct Copies {
    permits: Arc<Semaphore>,
    buffers: Arc<BufferPool>,
    bytes: u64,
}

impl Copies {
    /// Returns a pool of `bytes`.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let permits = usize::try_from(bytes).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Copies { permits: Arc::new(Semaphore::new(permits)), buffers: BufferPool::new(bytes / 2), bytes }
    }

    /// Takes a buffer of `len` bytes, if one is free now.
    fn buffer(&self, len: usize) -> Option<PooledBuffer> {
        let len = u32::try_from(len).ok()?;
        let class = size_class(len, self.bytes);
        if let Some(lent) = self.buffers.take(class, len) {
            return Some(lent);
        }
        let permit = || Arc::clone(&self.permits).try_acquire_many_owned(class).ok();
        let permit = permit().or_else(|| {
            self.buffers.free_idle(class.into());
            permit()
        })?;
        Some(self.buffers.allocate(permit, len))
    }

    /// Returns a copy of `bytes`, or `bytes` itself when the pool has no space for a copy.
    #[must_use]
    pub fn copy(&self, bytes: Bytes) -> Bytes {
        let Some(mut buffer) = self.buffer(bytes.len()) else { return bytes };
        buffer.as_mut().copy_from_slice(&bytes);
        Bytes::from_owner(buffer)
    }

    /// Returns `bytes`, copied if the pool has space, when they hash to `part` (I1).
    ///
    /// Hashes the copy, not the source.
    #[must_use]
    pub fn verified(&self, bytes: Bytes, part: Hash) -> Option<Verified> {
        let Some(buffer) = self.buffer(bytes.len()) else { return Verified::check(part, bytes).ok() };
        let filled = Verified::fill(part, buffer, |at, piece| {
            piece.copy_from_slice(&bytes[at..at + piece.len()]);
            Ok::<_, Infallible>(())
        });
        let Ok(copied) = filled;
        copied.ok()
    }

    /// Returns the bytes that live copies and idle buffers occupy.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.bytes.saturating_sub(self.permits.available_permits() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: &[u8]) -> (Bytes, Hash) {
        (Bytes::copy_from_slice(bytes), Hash::of(bytes))
    }

    #[test]
    fn i6_copies_hold_nothing_of_their_chunk_while_there_is_room() {
        let copies = Copies::new(400_000);
        let chunk: Vec<u8> = (0..1_000_000u32).map(|i| (i % 251) as u8).collect();
        let (chunk, _) = of(&chunk);
        let within = |b: &[u8]| chunk.as_ptr_range().contains(&b.as_ptr());
        let part = |i: usize| chunk.slice(i * 100_000..(i + 1) * 100_000);
        let mut kept: Vec<Bytes> = (0..3).map(|i| copies.copy(part(i))).collect();
        assert!(kept.iter().enumerate().all(|(i, c)| *c == part(i) && !within(c)));
        assert!((300_000..=400_000).contains(&copies.taken()), "{}", copies.taken());
        let fourth = copies.copy(part(3));
        assert!(within(&fourth), "no room: the part itself");
        // What comes back idle is used again, or given up for another length.
        let at = kept[0].as_ptr();
        kept.remove(0);
        let again = copies.verified(part(4), Hash::of(&part(4))).expect("right");
        assert_eq!((again.bytes().as_ptr(), again.bytes()), (at, &part(4)));
        drop((again, kept));
        assert!(copies.taken() <= 200_000, "half of it idle: {}", copies.taken());
        let long = copies.copy(chunk.slice(..390_000));
        assert!(!within(&long) && copies.taken() == 393_216, "{}", copies.taken());
        drop(long);
        assert!(copies.copy(Bytes::new()).is_empty());
    }

    #[test]
    fn i1_what_does_not_hash_to_its_name_is_not_copied() {
        let (bytes, hash) = of(&[7; 300_000]);
        for copies in [Copies::new(1 << 20), Copies::new(0)] {
            let right = copies.verified(bytes.clone(), hash).expect("right");
            assert_eq!((right.hash(), right.bytes()), (hash, &bytes));
            assert!(copies.verified(bytes.slice(1..), hash).is_none());
            assert!(copies.verified(bytes.clone(), Hash::of(b"other")).is_none());
        }
    }
}
