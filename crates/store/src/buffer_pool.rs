//! A pool of large buffers.
//!
//! Reusing a buffer saves a page fault, and the charge to the memory cgroup, for each of its pages.
//!
//! Invariants:
//! 1. (I6) a buffer holds the permit for all of its bytes while it exists, in use or idle. Idle buffers are
//!    part of the store's memory and hold at most `idle_bytes`. A fetch that needs their memory frees them
//!    ([`BufferPool::free_idle`]);
//! 2. one reader at a time uses a buffer. It returns to the pool when the last clone of its bytes is dropped.

use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};
use tokio::sync::OwnedSemaphorePermit;

/// Smallest pooled buffer. The allocator serves smaller buffers from its heaps, whose pages stay mapped.
const POOLED_FROM: u32 = 64 << 10;

/// The pool, and the buffers that are idle in it.
#[derive(Debug)]
pub(crate) struct BufferPool {
    idle: Mutex<Idle>,
    /// Bytes that may be idle.
    idle_bytes: u64,
    /// Number of fetches that wait for permits. While there are any, no buffer becomes idle.
    waiters: AtomicUsize,
}

/// Idle buffers by size class. The buffer that was used last is at the end: its pages are the warmest.
#[derive(Debug, Default)]
struct Idle {
    classes: BTreeMap<usize, Vec<Buffer>>,
    bytes: u64,
}

impl Idle {
    fn pop(&mut self, class: usize) -> Option<Buffer> {
        let all = self.classes.get_mut(&class)?;
        let buffer = all.pop()?;
        if all.is_empty() {
            self.classes.remove(&class);
        }
        self.bytes -= class as u64;
        Some(buffer)
    }

    fn push(&mut self, buffer: Buffer) {
        self.bytes += buffer.bytes.len() as u64;
        self.classes.entry(buffer.bytes.len()).or_default().push(buffer);
    }
}

/// Counts as a fetch that waits for memory, until it is dropped.
#[derive(Debug)]
pub(crate) struct Waiter<'a>(&'a BufferPool);

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.waiters.fetch_sub(1, Relaxed);
    }
}

#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    permit: OwnedSemaphorePermit,
}

/// A buffer for a given number of bytes, with arbitrary content, until it is dropped.
#[derive(Debug)]
pub(crate) struct PooledBuffer {
    /// `None` only while the buffer is dropped.
    buffer: Option<Buffer>,
    len: usize,
    pool: Arc<BufferPool>,
}

/// Returns the length of the buffer that `len` bytes are read into.
///
/// Lengths of one class share buffers; they differ by at most an eighth. A class longer than `most` is not
/// used: the buffer is then exactly `len` long.
pub(crate) fn size_class(len: u32, most: u64) -> u32 {
    if len < POOLED_FROM {
        return len;
    }
    let step = (len.next_power_of_two() / 16).max(1);
    match len.checked_next_multiple_of(step) {
        Some(class) if u64::from(class) <= most => class,
        _ => len,
    }
}

impl BufferPool {
    /// Returns an empty pool, in which at most `idle_bytes` will be idle.
    pub fn new(idle_bytes: u64) -> Arc<Self> {
        Arc::new(BufferPool { idle: Mutex::default(), idle_bytes, waiters: AtomicUsize::new(0) })
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock()
    }

    /// Takes an idle buffer of exactly this class, to read `len` bytes into.
    pub fn take(self: &Arc<Self>, class: u32, len: u32) -> Option<PooledBuffer> {
        let buffer = self.idle().pop(class as usize)?;
        Some(PooledBuffer { buffer: Some(buffer), len: len as usize, pool: Arc::clone(self) })
    }

    /// Allocates a buffer of as many bytes as `permit` covers, to read `len` bytes into.
    pub fn allocate(self: &Arc<Self>, permit: OwnedSemaphorePermit, len: u32) -> PooledBuffer {
        let bytes = vec![0; permit.num_permits()];
        PooledBuffer { buffer: Some(Buffer { bytes, permit }), len: len as usize, pool: Arc::clone(self) }
    }

    /// Counts one more fetch that waits for memory.
    pub fn add_waiter(&self) -> Waiter<'_> {
        self.waiters.fetch_add(1, Relaxed);
        Waiter(self)
    }

    /// Frees idle buffers until `bytes` are free or no buffer is idle, and returns how many bytes it freed.
    pub fn free_idle(&self, bytes: u64) -> u64 {
        let mut freed = 0;
        while freed < bytes {
            // The largest class first; freed with the lock released.
            let mut idle = self.idle();
            let largest = idle.classes.keys().next_back().copied();
            let Some(buffer) = largest.and_then(|class| idle.pop(class)) else { break };
            drop(idle);
            freed += buffer.permit.num_permits() as u64;
        }
        freed
    }
}

impl AsRef<[u8]> for PooledBuffer {
    fn as_ref(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |b| &b.bytes[..self.len.min(b.bytes.len())])
    }
}

impl AsMut<[u8]> for PooledBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        self.buffer.as_mut().map_or(&mut [], |b| {
            let end = len.min(b.bytes.len());
            &mut b.bytes[..end]
        })
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let large =
            |b: &Buffer| b.bytes.len() >= POOLED_FROM as usize && self.pool.waiters.load(Relaxed) == 0;
        if let Some(buffer) = self.buffer.take().filter(large) {
            let mut idle = self.pool.idle();
            if idle.bytes + buffer.bytes.len() as u64 <= self.pool.idle_bytes {
                idle.push(buffer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokio::sync::Semaphore;

    proptest! {
        #[test]
        fn a_class_holds_its_lengths_and_wastes_little(len in 0..=(16u32 << 20), most in 0..(1u64 << 25)) {
            let c = size_class(len, most);
            prop_assert!(c >= len && (u64::from(c) <= most || c == len));
            prop_assert!(u64::from(c - len) * 8 <= u64::from(len), "{len} in {c}");
            prop_assert_eq!(size_class(c, most), c, "a class is its own");
        }
    }

    #[test]
    fn i6_idle_or_lent_a_buffer_holds_its_permit() {
        let permits = Arc::new(Semaphore::new(1 << 20));
        let pool = BufferPool::new(400_000);
        let fresh = |len| {
            let permit = Arc::clone(&permits).try_acquire_many_owned(size_class(len, 1 << 20)).expect("room");
            pool.allocate(permit, len)
        };
        let (a, b) = (fresh(200_000), fresh(100_000));
        assert_eq!((a.as_ref().len(), b.as_ref().len()), (200_000, 100_000));
        let lent = (1 << 20) - permits.available_permits();
        drop((a, b));
        assert_eq!((1 << 20) - permits.available_permits(), lent, "idle");
        assert!(pool.take(size_class(150_000, 1 << 20), 150_000).is_none(), "another class");
        let again = pool.take(size_class(199_999, 1 << 20), 199_999).expect("the same class");
        assert_eq!((again.as_ref().len(), (1 << 20) - permits.available_permits()), (199_999, lent));
        assert!(pool.free_idle(u64::MAX) >= 100_000);
        drop(again);
        assert_eq!(pool.free_idle(1), u64::from(size_class(199_999, 1 << 20)), "whole buffers");
        assert_eq!(permits.available_permits(), 1 << 20);
        let many: Vec<_> = (0..4).map(|_| fresh(150_000)).collect();
        drop(many);
        assert_eq!(
            pool.free_idle(u64::MAX),
            2 * u64::from(size_class(150_000, 1 << 20)),
            "no more than may be idle"
        );
        let waiting = pool.add_waiter();
        drop(fresh(100_000));
        drop(waiting);
        assert_eq!((pool.free_idle(1), permits.available_permits()), (0, 1 << 20), "who waits gets it");
        drop(fresh(10));
        assert_eq!((pool.free_idle(1), permits.available_permits()), (0, 1 << 20), "small ones do not stay");
    }
}
