//! Permits for chunks that are read from origins, so that one tenant's cold reads leave room for others.

use super::{TenantLimit, Tenants};
use fletch_core::{Kind, StoreKey, Tenant};
use fletch_store::{Fetch, FetchError, ReadError, Store};
use std::{sync::Arc, time::Duration};
use tokio::time::timeout;

/// A tenant waited too long for a permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("this tenant reads {used} chunks from origins, and the request waited {waited:?} for its turn")]
pub struct NoOriginPermit {
    /// What the tenant uses now.
    pub used: u64,
    /// How long the request waited.
    pub waited: Duration,
}

impl NoOriginPermit {
    /// What the caller can do about the error.
    pub const HINT: &str = "wait and send the request again; if this lasts, raise the tenant's quota \
                            `origin_requests` or limits.origin_requests";
}

impl From<NoOriginPermit> for ReadError {
    fn from(e: NoOriginPermit) -> Self {
        FetchError::new(Kind::Overloaded, e).into()
    }
}

impl Tenants {
    /// Waits for a permit, if a read of the chunk would begin a fetch. Returns the fetch with the permit,
    /// which is returned when the last clone of the fetch is dropped.
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
        let waited = self.limits.io_timeout / 2;
        let Ok(permit) = timeout(waited, self.origin_requests.acquire(tenant, 1)).await else {
            self.count_refusal(tenant, TenantLimit::OriginRequests);
            return Err(NoOriginPermit { used: self.origin_requests.of(tenant).used, waited });
        };
        Ok(Arc::new(move |attempt| {
            let _held = &permit;
            fetch(attempt)
        }))
    }
}
