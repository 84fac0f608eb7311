//! Permits for chunks that are read from origins, so that one tenant's cold reads leave room for others.
//!
//! Each origin has a share of what its tenant may read at once. So the calls that wait for an origin that
//! hangs leave room for those to other origins. The datasets that the tenant reads from one origin share that
//! origin by the weights of their jobs ([`FairQueue`](super::fair_queue::FairQueue)).

use super::{NoChunkMemory, Stream, TenantLimit, Tenants, stream_permits::StreamPermits, to_usize};
use fletch_core::{Kind, StoreKey, Tenant};
use fletch_origin::{OriginPace, OriginUri};
use fletch_store::{Fetch, FetchError, ReadError, Store};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError, RwLock, Weak},
    time::Duration,
};
use tokio::time::timeout;

/// How much of what a configured pace lets through is under way at once.
///
/// More would queue at the pace, where requests are served in the order in which they came. It is longer than
/// the latency of any store that answers, so the pace never runs dry.
const PACE_AHEAD: Duration = Duration::from_millis(500);

/// A chunk that a read needs, and where it is.
#[derive(Debug, Clone)]
pub struct ColdChunk<'a> {
    /// The store that may have it.
    pub store: &'a Store,
    /// Its key.
    pub key: &'a StoreKey,
    /// Its length in bytes.
    pub len: u32,
    /// The origin that has it.
    pub origin: &'a OriginUri,
    /// The limits that the settings of the origin give.
    pub pace: OriginPace,
    /// For which dataset it is read.
    pub stream: Stream,
}

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
    /// The tenant waited too long for its share of the origin.
    #[error(
        "the request waited {waited:?} for its turn at {origin}: this tenant reads up to {share} chunks from \
         there at once, as limits.origin_requests_per_origin and the [[origin]] allow"
    )]
    Share {
        /// What the request would have read.
        origin: OriginUri,
        /// The most chunks that the tenant reads at once from the origin.
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
                 raise limits.origin_requests_per_origin, or the limits of its [[origin]] table"
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

/// The permits of each tenant at each origin that it reads now, and the weight of each stream.
#[derive(Debug, Default)]
pub(super) struct OriginShares {
    permits: Mutex<HashMap<(Tenant, OriginUri, OriginPace), Weak<StreamPermits>>>,
    weights: RwLock<BTreeMap<Stream, f64>>,
}

impl OriginShares {
    /// Returns the permits of a tenant at a bucket, a container, a server or a directory.
    ///
    /// `most` is how many there are, if the tenant reads nothing there now.
    fn of(&self, tenant: &Tenant, origin: &OriginUri, pace: OriginPace, most: usize) -> Arc<StreamPermits> {
        let key = (tenant.clone(), origin.top().unwrap_or_else(|| origin.clone()), pace);
        let mut all = self.permits.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(permits) = all.get(&key).and_then(Weak::upgrade) {
            return permits;
        }
        all.retain(|_, permits| permits.strong_count() > 0);
        let ahead = |per_s: u64| (per_s as f64 * PACE_AHEAD.as_secs_f64()) as u64;
        let paced = pace.requests_per_s.map(|per_s| to_usize(ahead(per_s.into())).max(2));
        let requests = [pace.concurrency, paced].into_iter().flatten().fold(most, usize::min).max(1);
        let permits = StreamPermits::new(requests, pace.bytes_per_s.map(ahead));
        all.insert(key, Arc::downgrade(&permits));
        permits
    }

    fn weight(&self, stream: &Stream) -> f64 {
        let weights = self.weights.read().unwrap_or_else(PoisonError::into_inner);
        weights.get(stream).copied().unwrap_or(1.0)
    }
}

impl Tenants {
    /// Returns the most chunks that a tenant reads at once from one origin.
    ///
    /// That is the same part of what the tenant may read as `limits.origin_requests_per_origin` is of
    /// `limits.origin_requests`.
    #[must_use]
    pub fn origin_share(&self, tenant: &Tenant) -> usize {
        let (own, all) = (self.limits.origin_requests_per_origin, self.limits.origin_requests.max(1));
        let reach = to_usize(self.origin_requests.reach(tenant));
        (reach.saturating_mul(own) / all).clamp(1, own.max(1))
    }

    /// Sets the weights of the streams that jobs read. Every other stream has the weight 1.
    pub fn set_stream_weights(&self, weights: BTreeMap<Stream, f64>) {
        *self.origin_shares.weights.write().unwrap_or_else(PoisonError::into_inner) = weights;
    }

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
        chunk: &ColdChunk<'_>,
        fetch: Fetch,
    ) -> Result<Fetch, NoOriginPermit> {
        let ColdChunk { store, key, len, origin, pace, ref stream } = *chunk;
        if !store.needs_fetch(key, len) {
            return Ok(fetch);
        }
        let waited = self.limits.io_timeout / 2;
        // First the share: who waits for an origin that hangs holds nothing that readers of others need.
        let permits = self.origin_shares.of(tenant, origin, pace, self.origin_share(tenant));
        let weight = self.origin_shares.weight(stream);
        let Ok(own) = timeout(waited, permits.acquire(stream, weight, len)).await else {
            self.count_refusal(tenant, TenantLimit::OriginRequests);
            let (origin, share) = (origin.clone(), permits.requests_max());
            return Err(NoOriginPermit::Share { origin, share, waited });
        };
        // Then the memory: who has a permit of all origins waits for nothing else here.
        let memory = self.hold_memory(tenant, key.hash, len.into()).await?;
        let Ok(permit) = timeout(waited, self.origin_requests.acquire(tenant, 1)).await else {
            self.count_refusal(tenant, TenantLimit::OriginRequests);
            let used = self.origin_requests.of(tenant).used;
            return Err(NoOriginPermit::Requests { origin: origin.clone(), used, waited });
        };
        Ok(Arc::new(move |attempt| {
            let _held = (&own, &permit, &memory);
            fetch(attempt)
        }))
    }
}
