//! Permits for chunks that are read from origins, so that one tenant's cold reads leave room for others.
//!
//! The backends of a tenant's origins share what the tenant may read at once ([`SharedPermits`]). So the
//! calls that wait for a backend that hangs leave room for those to other ones.

use super::{NoChunkMemory, TenantLimit, Tenants, to_usize};
use fletch_core::{Kind, StoreKey, Tenant};
use fletch_origin::{Backend, Origin, OriginUri, SharedPermits};
use fletch_store::{Fetch, FetchError, ReadError, Store};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::time::timeout;

/// Why a tenant may not read a chunk from an origin now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoOriginPermit {
    /// The tenant waited too long for a permit.
    #[error(
        "the request waited {waited:?} for its turn at {origin}: this tenant reads {used} chunks from all \
         origins, the most that limits.origin_requests allows"
    )]
    Requests {
        /// What the request would have read.
        origin: OriginUri,
        /// What the tenant uses now.
        used: u64,
        /// How long the request waited.
        waited: Duration,
    },
    /// The tenant waited too long for its share of the origin's backend.
    #[error(
        "the request waited {waited:?} for its turn at {origin}: this tenant reads {share} chunks from its \
         endpoint, bucket or file system, the most that limits.origin_requests_per_origin allows now"
    )]
    Share {
        /// What the request would have read.
        origin: OriginUri,
        /// The chunks that the tenant reads from the backend now.
        share: usize,
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
            NoOriginPermit::Share { .. } => {
                "check whether the origin answers (`fletch status` names the origins that fail); if it does, \
                 raise limits.origin_requests_per_origin"
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

/// The permits of each tenant, which its backends share. Tenants are those of the tokens file.
#[derive(Debug, Default)]
pub(super) struct OriginShares(Mutex<BTreeMap<Tenant, Arc<SharedPermits<Backend>>>>);

impl OriginShares {
    /// Returns the permits of a tenant: `all`, of which one backend alone gets `to_one`.
    fn of(&self, tenant: &Tenant, (all, to_one): (usize, usize)) -> Arc<SharedPermits<Backend>> {
        let mut shares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let permits = shares.entry(tenant.clone()).or_insert_with(|| SharedPermits::new(all, to_one));
        let permits = Arc::clone(permits);
        drop(shares);
        permits.resize(all, to_one);
        permits
    }
}

impl Tenants {
    /// Returns the most chunks that a tenant reads at once: from all origins, and from one backend alone.
    ///
    /// The second is the same part of the first as `limits.origin_requests_per_origin` is of
    /// `limits.origin_requests`.
    fn origin_share(&self, tenant: &Tenant) -> (usize, usize) {
        let (own, all) = (self.limits.origin_requests_per_origin, self.limits.origin_requests.max(1));
        let reach = to_usize(self.origin_requests.reach(tenant)).max(1);
        (reach, (reach.saturating_mul(own) / all).clamp(1, own.max(1)))
    }

    /// Waits for a permit and for memory, if a read of the chunk would begin a fetch. Returns the fetch with
    /// both, which are given back when the last clone of the fetch is dropped. `origin` has the chunk.
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
        origin: &Origin,
        fetch: Fetch,
    ) -> Result<Fetch, NoOriginPermit> {
        if !store.needs_fetch(key, len) {
            return Ok(fetch);
        }
        let waited = self.limits.io_timeout / 2;
        // First the share: who waits for an origin that hangs holds nothing that readers of others need.
        let permits = self.origin_shares.of(tenant, self.origin_share(tenant));
        let Ok(own) = timeout(waited, permits.acquire(origin.backend())).await else {
            self.count_refusal(tenant, TenantLimit::OriginRequests);
            let (origin, share) = (origin.uri().clone(), permits.held(origin.backend()));
            return Err(NoOriginPermit::Share { origin, share, waited });
        };
        // Then the memory: who has a permit of all origins waits for nothing else here.
        let memory = self.hold_memory(tenant, key.hash, len.into()).await?;
        let Ok(permit) = timeout(waited, self.origin_requests.acquire(tenant, 1)).await else {
            self.count_refusal(tenant, TenantLimit::OriginRequests);
            let used = self.origin_requests.of(tenant).used;
            return Err(NoOriginPermit::Requests { origin: origin.uri().clone(), used, waited });
        };
        Ok(Arc::new(move |attempt| {
            let _held = (&own, &permit, &memory);
            fetch(attempt)
        }))
    }
}
