//! Permits for chunks that are read from origins, so that one tenant's cold reads leave room for others.

use super::{NoChunkMemory, TenantLimit, Tenants};
use fletch_core::{Kind, StoreKey, Tenant};
use fletch_store::{Fetch, FetchError, ReadError, Store};
use std::{sync::Arc, time::Duration};
use tokio::time::timeout;

/// Why a tenant may not read a chunk from an origin now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoOriginPermit {
    /// The tenant waited too long for a permit.
    #[error("this tenant reads {used} chunks from origins, and the request waited {waited:?} for its turn")]
    Requests {
        /// What the tenant uses now.
        used: u64,
        /// How long the request waited.
        waited: Duration,
    },
    /// The tenant waited too long for memory.
    #[error(transparent)]
    Memory(#[from] NoChunkMemory),
}

impl NoOriginPermit {
    /// Returns what the caller can do about the error.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self {
            NoOriginPermit::Requests { .. } => {
                "wait and send the request again; if this lasts, raise the tenant's quota `origin_requests` \
                 or limits.origin_requests"
            }
            NoOriginPermit::Memory(_) => NoChunkMemory::HINT,
        }
    }
}

impl From<NoOriginPermit> for ReadError {
    fn from(e: NoOriginPermit) -> Self {
        FetchError::new(Kind::Overloaded, e).into()
    }
}

impl Tenants {
    /// Waits for a permit and for memory, if a read of the chunk would begin a fetch. Returns the fetch with
    /// both, which are given back when the last clone of the fetch is dropped.
    ///
    /// Call it before the read: a flight that waited for a permit would keep other tenants from fetching the
    /// same chunk.
    ///
    /// # Errors
    /// [`NoOriginPermit`], which is counted.
    pub async fn with_origin_permit(
        &self,
        tenant: &Tenant,
        (store, key, len): (&Store, &StoreKey, u32),
        fetch: Fetch,
    ) -> Result<Fetch, NoOriginPermit> {
        if !store.needs_fetch(key, len) {
            return Ok(fetch);
        }
        // First the memory: who has a permit waits for nothing else here.
        let memory = self.hold_memory(tenant, key.hash, len.into()).await?;
        let waited = self.limits.io_timeout / 2;
        let Ok(permit) = timeout(waited, self.origin_requests.acquire(tenant, 1)).await else {
            self.count_refusal(tenant, TenantLimit::OriginRequests);
            return Err(NoOriginPermit::Requests { used: self.origin_requests.of(tenant).used, waited });
        };
        Ok(Arc::new(move |attempt| {
            let _held = (&permit, &memory);
            fetch(attempt)
        }))
    }
}
