//! Permits for chunks that are read from origins, so that one tenant's cold reads leave room for others.
//!
//! The backends of a tenant's origins share what the tenant may read at once ([`SharedPermits`]). So the
//! calls that wait for a backend that hangs leave room for those to other ones. At one backend, the datasets
//! that the tenant reads take turns by the weights of their jobs ([`StreamTurns`]).
//!
//! While a caller waits here, reads of hung objects of the same backend end and give their permits back
//! ([`Origin::awaited`]); their readers ask again.

use super::{
    FairPermit, HeldMemory, NoChunkMemory, Stream, TenantLimit, Tenants, stream_turns::StreamTurns, to_usize,
};
use fletch_bounds::{Gate, pass_gate};
use fletch_core::{Kind, StoreKey, Tenant};
use fletch_origin::{Backend, Origin, OriginPace, OriginUri, SharedPermit, SharedPermits};
use fletch_store::{Fetch, FetchError, ReadError, Store};
use parking_lot::{Mutex, RwLock};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

/// How much of what a configured pace lets through is under way at once.
///
/// More would queue at the pace, which serves requests as they come. It is longer than the latency of a store
/// that answers, so the pace never runs dry.
const PACE_AHEAD: Duration = Duration::from_millis(500);
/// The unit of the bytes under way.
const ROOM_UNIT: u64 = 1 << 10;

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
    pub origin: &'a Origin,
    /// For which dataset it is read.
    pub stream: Stream,
}

/// What a fetch of a chunk from an origin holds. Dropping it gives all back.
#[derive(Debug)]
pub struct OriginPermits {
    _own: OriginPermit,
    _all: FairPermit,
    _memory: Option<Arc<HeldMemory>>,
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

/// What a tenant may have under way at a backend whose settings give a pace: requests, and bytes in units of
/// [`ROOM_UNIT`].
#[derive(Debug)]
struct Room {
    requests: Option<Arc<Semaphore>>,
    bytes: Option<(Arc<Semaphore>, u32)>,
}

/// A part of a [`Room`].
type RoomPermit = [Option<OwnedSemaphorePermit>; 2];

impl Room {
    fn new(pace: OriginPace) -> Self {
        let ahead = |per_s: u64| (per_s as f64 * PACE_AHEAD.as_secs_f64()) as u64;
        let paced = pace.requests_per_s.map(|per_s| to_usize(ahead(per_s.into())).max(2));
        let requests = [pace.concurrency, paced].into_iter().flatten().min();
        let bytes = pace.bytes_per_s.map(|per_s| {
            let units = u32::try_from(ahead(per_s) / ROOM_UNIT).unwrap_or(u32::MAX).clamp(2, u32::MAX / 8);
            (Arc::new(Semaphore::new(units as usize)), units)
        });
        let requests = requests.map(|n| Arc::new(Semaphore::new(n.clamp(1, Semaphore::MAX_PERMITS))));
        Room { requests, bytes }
    }

    /// Waits for room for a chunk. A chunk of more than half of the room counts as half.
    async fn acquire(&self, len: u32) -> RoomPermit {
        let requests = match &self.requests {
            Some(room) => Arc::clone(room).acquire_owned().await.ok(),
            None => None,
        };
        let bytes = match &self.bytes {
            Some((room, all)) => {
                let units = u32::try_from(u64::from(len).div_ceil(ROOM_UNIT)).unwrap_or(u32::MAX);
                Arc::clone(room).acquire_many_owned(units.min(all / 2)).await.ok()
            }
            None => None,
        };
        [requests, bytes]
    }
}

/// The turns of a tenant at a backend, and its room there.
#[derive(Debug)]
struct Line {
    turns: Arc<StreamTurns>,
    room: Room,
}

/// What a fetch holds at its backend.
#[derive(Debug)]
struct OriginPermit {
    _line: Arc<Line>,
    _room: RoomPermit,
    _permit: SharedPermit<Backend>,
}

/// The permits of each tenant, which its backends share, the turns at each backend, and the weight of each
/// stream. Tenants are those of the tokens file.
#[derive(Debug, Default)]
pub(super) struct OriginShares {
    permits: Mutex<BTreeMap<Tenant, Arc<SharedPermits<Backend>>>>,
    lines: Mutex<HashMap<(Tenant, Backend, OriginPace), Weak<Line>>>,
    weights: RwLock<BTreeMap<Stream, f64>>,
}

impl OriginShares {
    /// Returns the turns of a tenant at a backend. They are forgotten when nobody waits or reads there.
    fn line(&self, tenant: &Tenant, origin: &Origin) -> Arc<Line> {
        let pace = origin.pace();
        let key = (tenant.clone(), origin.backend().clone(), pace);
        let mut all = self.lines.lock();
        if let Some(line) = all.get(&key).and_then(Weak::upgrade) {
            return line;
        }
        all.retain(|_, line| line.strong_count() > 0);
        let line = Arc::new(Line { turns: Arc::default(), room: Room::new(pace) });
        all.insert(key, Arc::downgrade(&line));
        line
    }

    fn weight(&self, stream: &Stream) -> f64 {
        let weights = self.weights.read();
        weights.get(stream).copied().unwrap_or(1.0)
    }

    /// Returns the permits of a tenant: `all`, of which one backend alone gets `to_one`.
    fn of(&self, tenant: &Tenant, (all, to_one): (usize, usize)) -> Arc<SharedPermits<Backend>> {
        let mut shares = self.permits.lock();
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

    /// Sets the weights of the streams that jobs read. Every other stream has the weight 1.
    pub fn set_stream_weights(&self, weights: BTreeMap<Stream, f64>) {
        *self.origin_shares.weights.write() = weights;
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
        if !chunk.store.needs_fetch(chunk.key, chunk.len) {
            return Ok(fetch);
        }
        let memory = self.hold_memory(tenant, chunk.key.hash, chunk.len.into());
        let permits = self.origin_permits(tenant, chunk, memory).await?;
        Ok(Arc::new(move |attempt| {
            let _held = &permits;
            fetch(attempt)
        }))
    }

    /// Waits for a permit for a read that asked another server first, or that another server waits for.
    ///
    /// It takes no memory of the tenant. Replies hold that while they wait for other servers, so servers that
    /// wait for each other would wait for ever.
    ///
    /// # Errors
    /// [`NoOriginPermit`], which is counted.
    pub async fn bare_origin_permit(
        &self,
        tenant: &Tenant,
        chunk: &ColdChunk<'_>,
    ) -> Result<OriginPermits, NoOriginPermit> {
        self.origin_permits(tenant, chunk, std::future::ready(Ok(None))).await
    }

    async fn origin_permits(
        &self,
        tenant: &Tenant,
        chunk: &ColdChunk<'_>,
        memory: impl Future<Output = Result<Option<Arc<HeldMemory>>, NoChunkMemory>>,
    ) -> Result<OriginPermits, NoOriginPermit> {
        let ColdChunk { len, origin, ref stream, .. } = *chunk;
        let waited = self.limits.io_timeout / 2;
        // First the share: who waits for an origin that hangs holds nothing that readers of others need.
        let permits = self.origin_shares.of(tenant, self.origin_share(tenant));
        let line = self.origin_shares.line(tenant, origin);
        let weight = self.origin_shares.weight(stream);
        let acquire = async {
            // Only the caller with the turn waits for the rest, so the rest is given in the order of turns.
            let _turn = pass_gate(Gate::StreamTurn, line.turns.acquire(stream, weight, len)).await;
            let room = pass_gate(Gate::OriginRoom, line.room.acquire(len)).await;
            let permit = pass_gate(Gate::TenantOriginRequests, permits.acquire(origin.backend())).await;
            OriginPermit { _line: Arc::clone(&line), _room: room, _permit: permit }
        };
        let Ok(own) = timeout(waited, origin.awaited(acquire)).await else {
            self.count_refusal(tenant, TenantLimit::OriginRequests);
            let (origin, share) = (origin.uri().clone(), permits.held(origin.backend()));
            return Err(NoOriginPermit::Share { origin, share, waited });
        };
        // Then the memory: who has a permit of all origins waits for nothing else here.
        let memory = origin.awaited(memory).await?;
        let all = origin.awaited(self.origin_requests.acquire(tenant, 1));
        let Ok(permit) = pass_gate(Gate::TenantRequests, timeout(waited, all)).await else {
            self.count_refusal(tenant, TenantLimit::OriginRequests);
            let used = self.origin_requests.of(tenant).used;
            return Err(NoOriginPermit::Requests { origin: origin.uri().clone(), used, waited });
        };
        Ok(OriginPermits { _own: own, _all: permit, _memory: memory })
    }
}
