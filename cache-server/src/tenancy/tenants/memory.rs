//! Memory for chunks that a tenant's reads fetch and its replies hold, so that slow readers of one tenant
//! leave memory for others.
//!
//! Replies of one tenant that send the same chunk share its memory, and count it once. With one tenant alone
//! only spans of long replies are counted.

use super::{FairPermit, FairPermits, TenantLimit, Tenants};
use bytes::Bytes;
use fletch_bounds::{Gate, pass_gate};
use fletch_core::{Hash, Tenant, manifest::CHUNK_BYTES_MAX};
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::time::timeout;

/// The memory of all tenants.
#[derive(Debug)]
pub struct ChunkMemory {
    /// Permits in bytes.
    pub permits: Arc<FairPermits>,
    held: Mutex<HashMap<(Tenant, Hash), Weak<HeldMemory>>>,
}

/// The memory of one chunk, as long as a read or a reply needs it.
#[derive(Debug)]
pub struct HeldMemory {
    memory: Arc<ChunkMemory>,
    key: (Tenant, Hash),
    _permit: FairPermit,
}

/// A tenant waited too long for memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the replies of this tenant hold {used} bytes of chunks, and no memory for {bytes} more bytes came free \
     within {waited:?}"
)]
pub struct NoChunkMemory {
    /// Bytes that the tenant holds.
    pub used: u64,
    /// Bytes of the chunk.
    pub bytes: u64,
    /// How long the request waited.
    pub waited: Duration,
}

impl NoChunkMemory {
    /// What the caller can do about the error.
    pub const HINT: &str = "read the running replies faster, then send the request again; if this lasts, \
                            raise memory.max";
}

/// Bytes, and the memory that they hold.
struct HeldBytes {
    bytes: Bytes,
    _held: Arc<HeldMemory>,
}

impl AsRef<[u8]> for HeldBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Ties bytes to the memory that they hold: the last clone of the result gives it back.
#[must_use]
pub fn bind_memory(bytes: Bytes, held: Option<Arc<HeldMemory>>) -> Bytes {
    match held {
        Some(held) => Bytes::from_owner(HeldBytes { bytes, _held: held }),
        None => bytes,
    }
}

impl ChunkMemory {
    /// Divides `bytes` bytes among tenants.
    #[must_use]
    pub fn new(bytes: u64) -> Arc<Self> {
        let permits = FairPermits::new(bytes, CHUNK_BYTES_MAX.into());
        Arc::new(ChunkMemory { permits, held: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(Tenant, Hash), Weak<HeldMemory>>> {
        self.held.lock()
    }

    async fn hold(self: &Arc<Self>, tenant: &Tenant, chunk: Hash, bytes: u64) -> Arc<HeldMemory> {
        let key = (tenant.clone(), chunk);
        let shared = self.lock().get(&key).and_then(Weak::upgrade);
        if let Some(shared) = shared {
            return shared;
        }
        let permit = self.permits.acquire(tenant, bytes).await;
        let held = Arc::new(HeldMemory { memory: Arc::clone(self), key: key.clone(), _permit: permit });
        let before = self.lock().insert(key, Arc::downgrade(&held));
        // Another read of the chunk may have come first. Both count until the earlier one ends.
        drop(before);
        held
    }
}

impl Drop for HeldMemory {
    fn drop(&mut self) {
        let mut held = self.memory.lock();
        // A later read may have put its own memory there.
        if held.get(&self.key).is_some_and(|there| there.strong_count() == 0) {
            held.remove(&self.key);
        }
    }
}

impl Tenants {
    /// Waits for memory for a chunk that a read of the tenant fetches, or that its reply holds. `None` where
    /// there is one tenant only.
    ///
    /// # Errors
    /// [`NoChunkMemory`], which is counted.
    pub async fn hold_memory(
        &self,
        tenant: &Tenant,
        chunk: Hash,
        bytes: u64,
    ) -> Result<Option<Arc<HeldMemory>>, NoChunkMemory> {
        if self.are_alone() {
            return Ok(None);
        }
        self.hold_span_memory(tenant, chunk, bytes).await.map(Some)
    }

    /// Waits for memory for a span of a reply, for one tenant alone too.
    ///
    /// A reply takes memory in the order of its spans. Otherwise later spans of many replies fill the memory,
    /// and no first span gets any.
    ///
    /// # Errors
    /// [`NoChunkMemory`], which is counted.
    pub async fn hold_span_memory(
        &self,
        tenant: &Tenant,
        chunk: Hash,
        bytes: u64,
    ) -> Result<Arc<HeldMemory>, NoChunkMemory> {
        let waited = self.limits.io_timeout / 2;
        let hold = timeout(waited, self.memory.hold(tenant, chunk, bytes));
        match pass_gate(Gate::ReplyMemory, hold).await {
            Ok(held) => Ok(held),
            Err(_) => {
                self.count_refusal(tenant, TenantLimit::MemoryBytes);
                Err(NoChunkMemory { used: self.memory.permits.of(tenant).used, bytes, waited })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;

    #[tokio::test]
    async fn a_chunk_counts_once_for_each_tenant_until_its_last_byte_is_gone() {
        let name = |n: &str| Tenant::new(n).expect("a name");
        let (a, b, chunk) = (name("a"), name("b"), u64::from(CHUNK_BYTES_MAX));
        let memory = ChunkMemory::new(4 * chunk);
        memory.permits.set_tenants(&[(a.clone(), None), (b.clone(), None)]);
        let hash = |i: u64| Hash::of(&i.to_le_bytes());
        let one = memory.hold(&a, hash(1), chunk).await;
        let same = memory.hold(&a, hash(1), chunk).await;
        assert_eq!(memory.permits.of(&a).used, chunk);
        let other = memory.hold(&b, hash(1), chunk).await;
        assert_eq!((memory.permits.of(&b).used, memory.permits.used()), (chunk, 2 * chunk));
        let bytes = bind_memory(Bytes::from_static(b"some bytes"), Some(same));
        drop(one);
        let slice = bytes.slice(2..3);
        drop(bytes);
        assert_eq!(memory.permits.of(&a).used, chunk, "a slice holds the chunk");
        drop(slice);
        assert_eq!((memory.permits.of(&a).used, memory.lock().len()), (0, 1));
        // One tenant takes all but the part of the other, which never waits.
        drop(other);
        let mut held = Vec::new();
        for i in 2..5 {
            held.push(memory.hold(&a, hash(i), chunk).await);
        }
        let waiting = memory.hold(&a, hash(5), chunk);
        tokio::pin!(waiting);
        assert!(waiting.as_mut().now_or_never().is_none());
        let guaranteed = memory.hold(&b, hash(5), chunk).now_or_never().expect("guaranteed");
        drop((held, guaranteed));
        drop(waiting.now_or_never().expect("memory came free"));
        assert_eq!((memory.permits.used(), memory.lock().len()), (0, 0));
    }
}
