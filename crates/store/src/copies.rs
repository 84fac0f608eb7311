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

    /// Returns a buffer in which `capacity` bytes can be put together: one of the pool, or a new one where
    /// the pool has no space.
    #[must_use]
    pub fn gather(&self, capacity: usize) -> Gathered {
        Gathered(match self.buffer(capacity) {
            Some(buffer) => GatheredMemory::Pooled(buffer, 0),
            None => GatheredMemory::Own(Vec::with_capacity(capacity)),
        })
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

/// Bytes that are put together.
#[derive(Debug)]
pub struct Gathered(GatheredMemory);

#[derive(Debug)]
enum GatheredMemory {
    /// A buffer of the pool, and the bytes that it holds.
    Pooled(PooledBuffer, usize),
    /// Memory of its own, which grows.
    Own(Vec<u8>),
}

impl Gathered {
    /// Appends bytes. If they do not fit into the buffer, all of them move to memory that does.
    pub fn push(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            GatheredMemory::Pooled(buffer, len) if *len + bytes.len() <= buffer.as_ref().len() => {
                buffer.as_mut()[*len..*len + bytes.len()].copy_from_slice(bytes);
                *len += bytes.len();
            }
            GatheredMemory::Pooled(buffer, len) => {
                self.0 = GatheredMemory::Own([&buffer.as_ref()[..*len], bytes].concat());
            }
            GatheredMemory::Own(own) => own.extend_from_slice(bytes),
        }
    }

    /// Returns the number of bytes so far.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.0 {
            GatheredMemory::Pooled(_, len) => *len,
            GatheredMemory::Own(own) => own.len(),
        }
    }

    /// Whether there are none so far.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes. A buffer of the pool returns there when the last clone is dropped.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        match self.0 {
            GatheredMemory::Pooled(buffer, len) => Bytes::from_owner(buffer).slice(..len),
            GatheredMemory::Own(own) => own.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i6_bytes_are_put_together_in_a_buffer_that_is_used_again() {
        let copies = Copies::new(400_000);
        let mut first = copies.gather(100_000);
        assert!(first.is_empty());
        first.push(&[1; 60_000]);
        first.push(&[2; 40_000]);
        let first = first.into_bytes();
        assert!(first[..60_000].iter().all(|b| *b == 1) && first[60_000..].iter().all(|b| *b == 2));
        let (at, taken) = (first.as_ptr(), copies.taken());
        assert!(taken >= 100_000);
        drop(first);
        let mut again = copies.gather(100_000);
        again.push(&[4; 10]);
        let again = again.into_bytes();
        assert_eq!((again.as_ptr(), &again[..], copies.taken()), (at, &[4; 10][..], taken));
        drop(again);
        for (copies, then) in [(copies, taken), (Copies::new(0), 0)] {
            let mut too_long = copies.gather(100_000);
            too_long.push(&[5; 60_000]);
            too_long.push(&[6; 60_000]);
            let bytes = too_long.into_bytes();
            assert_eq!((&bytes[..60_000], &bytes[60_000..]), (&[5; 60_000][..], &[6; 60_000][..]));
            assert_eq!(copies.taken(), then, "a buffer that is too short returns to its pool");
        }
    }

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
