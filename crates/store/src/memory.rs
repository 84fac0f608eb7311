//! The memory tier: byte permits, and an LRU of verified chunks that hold their permits.
//!
//! The permits bound memory, not the capacity of moka: moka evicts lazily and counts only the chunks that it
//! holds. The cache may hold three quarters of the permits. The rest is for fetches in flight.
//!
//! moka also *frees* lazily, some epochs of its own after it evicts. So each chunk lies in a `CachedChunk`,
//! which the eviction listener empties at once.

use crate::{
    buffer_pool::{BufferPool, PooledBuffer, size_class},
    pins::{Pinned, Pins},
};
use bytes::Bytes;
use fletch_bounds::{Gate, pass_gate};
use fletch_core::{StoreKey, Verified};
use moka::{policy::EvictionPolicy, sync::Cache};
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout, timeout_at},
};

/// Time between two attempts of a waiting fetch to take memory back from the cache.
const RECLAIM_EVERY: Duration = Duration::from_millis(20);

/// The part of memory that idle buffers may occupy: one of this many.
const IDLE_PART: u64 = 16;
/// In a small memory they may occupy a larger part, one of this many, up to [`IDLE_BYTES_SMALL`].
///
/// Measured with 64 MiB of memory and chunks of 4 MiB on disk: with a sixteenth there was one idle buffer,
/// and most reads took fresh pages. With a quarter they are 1.7 times as fast.
const IDLE_PART_SMALL: u64 = 4;
const IDLE_BYTES_SMALL: u64 = 64 << 20;

#[derive(Debug)]
pub(crate) struct Memory {
    cache: Cache<StoreKey, CachedChunk>,
    permits: Arc<Semaphore>,
    buffers: Arc<BufferPool>,
    pins: Arc<Pins>,
    memory_bytes: u64,
}

/// A cached chunk, empty once the cache evicted it.
#[derive(Debug, Clone)]
struct CachedChunk {
    len: u32,
    chunk: Arc<Mutex<Option<Verified>>>,
}

impl CachedChunk {
    fn new(chunk: Verified) -> Self {
        let len = u32::try_from(chunk.bytes().len()).unwrap_or(u32::MAX);
        CachedChunk { len, chunk: Arc::new(Mutex::new(Some(chunk))) }
    }

    fn get(&self) -> Option<Verified> {
        self.chunk.lock().clone()
    }

    fn empty(&self) {
        self.chunk.lock().take();
    }
}

/// Bytes and their permit, released together.
struct PermittedBytes {
    bytes: Bytes,
    _permit: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for PermittedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Ties `bytes` to their permit: the last clone of the result returns it.
pub(crate) fn bind_permit(bytes: Bytes, permit: OwnedSemaphorePermit) -> Bytes {
    Bytes::from_owner(PermittedBytes { bytes, _permit: permit })
}

/// Returns the bytes that idle buffers of a memory may occupy.
fn idle_bytes_max(memory_bytes: u64) -> u64 {
    (memory_bytes / IDLE_PART).max((memory_bytes / IDLE_PART_SMALL).min(IDLE_BYTES_SMALL))
}

impl Memory {
    pub fn new(memory_bytes: u64) -> Self {
        let memory_bytes = memory_bytes.min(Semaphore::MAX_PERMITS as u64);
        let permits = usize::try_from(memory_bytes).unwrap_or(Semaphore::MAX_PERMITS);
        let cache = Cache::builder()
            .max_capacity(memory_bytes / 4 * 3)
            .weigher(|_: &StoreKey, chunk: &CachedChunk| chunk.len.max(1))
            .eviction_policy(EvictionPolicy::lru())
            .eviction_listener(|_, chunk, _| chunk.empty())
            .build();
        Memory {
            cache,
            permits: Arc::new(Semaphore::new(permits)),
            buffers: BufferPool::new(idle_bytes_max(memory_bytes)),
            pins: Arc::default(),
            memory_bytes,
        }
    }

    /// Returns a chunk that is cached or pinned.
    pub fn get(&self, key: &StoreKey) -> Option<Verified> {
        self.cache.get(key).and_then(|chunk| chunk.get()).or_else(|| self.pins.get(key))
    }

    /// Pins a chunk in memory until the guard is dropped.
    pub fn pin(&self, key: StoreKey, chunk: Verified) -> Pinned {
        self.pins.pin(key, chunk)
    }

    pub fn pinned_bytes(&self) -> u64 {
        self.pins.bytes()
    }

    pub fn insert(&self, key: StoreKey, chunk: Verified) {
        self.cache.insert(key, CachedChunk::new(chunk));
        // Without this the cache grows past its capacity until some later read happens to clean up.
        self.cache.run_pending_tasks();
    }

    /// Drops a cached chunk. A pinned one stays with its holders.
    pub fn remove(&self, key: &StoreKey) -> bool {
        let was_cached = self.cache.remove(key).is_some();
        self.cache.run_pending_tasks();
        was_cached
    }

    #[cfg(test)]
    pub fn clear(&self) {
        self.cache.invalidate_all();
        self.cache.run_pending_tasks();
    }

    /// Returns a buffer for `len` bytes, a pooled one if possible; `None` as for [`Memory::permit`].
    pub async fn buffer(&self, len: u32, until: Instant) -> Option<PooledBuffer> {
        let class = size_class(len, self.memory_bytes);
        match self.buffers.take(class, len) {
            Some(lent) => Some(lent),
            None => Some(self.buffers.allocate(self.permit(class, until).await?, len)),
        }
    }

    /// Returns a buffer for `len` bytes if one is free now. Takes no memory from the cache.
    pub fn try_buffer(&self, len: u32) -> Option<PooledBuffer> {
        let class = size_class(len, self.memory_bytes);
        self.buffers.take(class, len).or_else(|| {
            let permit = Arc::clone(&self.permits).try_acquire_many_owned(class).ok()?;
            Some(self.buffers.allocate(permit, len))
        })
    }

    /// Returns a permit to hold `len` bytes; `None` when none came free before `until`.
    ///
    /// A fetch that has to wait takes memory back from the cache. A chunk that a reader waits for matters
    /// more than a chunk that some reader may ask for again.
    pub async fn permit(&self, len: u32, until: Instant) -> Option<OwnedSemaphorePermit> {
        if u64::from(len) > self.memory_bytes {
            return None;
        }
        if let Ok(p) = Arc::clone(&self.permits).try_acquire_many_owned(len) {
            return Some(p);
        }
        pass_gate(Gate::ChunkMemory, self.wait_for_permit(len, until)).await
    }

    async fn wait_for_permit(&self, len: u32, until: Instant) -> Option<OwnedSemaphorePermit> {
        let _wanted = self.buffers.add_waiter();
        let waiting = Arc::clone(&self.permits).acquire_many_owned(len);
        tokio::pin!(waiting);
        loop {
            self.reclaim(u64::from(len));
            let step = (Instant::now() + RECLAIM_EVERY).min(until);
            match timeout_at(step, &mut waiting).await {
                Ok(p) => return p.ok(),
                Err(_) if Instant::now() >= until => {
                    // The permit may have been granted at the last moment.
                    return timeout(Duration::ZERO, &mut waiting).await.ok()?.ok();
                }
                Err(_) => {}
            }
        }
    }

    /// Frees idle buffers, then cached chunks, of `bytes` in all.
    ///
    /// A chunk that a reader still holds stays in memory.
    fn reclaim(&self, bytes: u64) {
        let idle = self.buffers.free_idle(bytes);
        if idle >= bytes {
            return;
        }
        let mut dropped = idle;
        for (key, chunk) in &self.cache {
            if dropped >= bytes {
                break;
            }
            dropped += u64::from(chunk.len);
            self.cache.invalidate(&*key);
        }
        self.cache.run_pending_tasks();
        // Evicted chunks returned their buffers to the pool.
        self.buffers.free_idle(bytes.saturating_sub(idle));
    }

    /// Returns the bytes and the number of cached chunks.
    pub fn cached(&self) -> (u64, u64) {
        (self.cache.weighted_size(), self.cache.entry_count())
    }

    /// Returns the bytes whose permits are taken.
    pub fn live_bytes(&self) -> u64 {
        self.memory_bytes - self.permits.available_permits() as u64
    }
}
