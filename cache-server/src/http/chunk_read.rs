//! Reads whole chunks for a reply: the one call of the store for chunks, files, batches and leases.
//!
//! Every function checks first that the version is still registered, so that a long reply outlives its access
//! by one chunk at most. The hashes come from the version's own tables: whether a chunk is cached in the
//! domain says nothing about the versions that have it (I7).

use super::error::{ApiError, ApiResult};
use crate::{
    app::server::Server,
    data::{
        chunk_reads::{Asker, ChunkRead, PackedPart},
        versions::{LocatedChunk, Sources},
    },
    tenancy::accounting::{Cost, JobCosts},
};
use fletch_api::{ByteResult, ByteTier};
use fletch_core::{Hash, StoreKey, Tenant};
use fletch_store::{AtPeer, DatasetId, Hit, Tier};
use std::{ops::Range, sync::Arc, time::Instant};

/// Returns the result and the tier under which a read is counted.
#[must_use]
pub fn cost_of(tier: Tier) -> Cost {
    match tier {
        Tier::Memory => (ByteResult::Hit, ByteTier::Memory),
        Tier::Disk => (ByteResult::Hit, ByteTier::Disk),
        Tier::Flight => (ByteResult::Hit, ByteTier::Flight),
        Tier::Origin => (ByteResult::Miss, ByteTier::Origin),
        Tier::Bypass => (ByteResult::Bypass, ByteTier::Origin),
        Tier::Peer(AtPeer::Hit) => (ByteResult::Hit, ByteTier::Peer),
        Tier::Peer(AtPeer::Miss) => (ByteResult::Miss, ByteTier::Peer),
        Tier::Peer(AtPeer::Bypass) => (ByteResult::Bypass, ByteTier::Peer),
    }
}

/// Returns the `Cache-Status` header of a read (RFC 9211).
#[must_use]
pub fn cache_status(tier: Tier) -> &'static str {
    match tier {
        Tier::Memory | Tier::Disk => "fletch; hit",
        Tier::Flight => "fletch; fwd=miss; collapsed",
        Tier::Origin => "fletch; fwd=miss; stored",
        Tier::Bypass => "fletch; fwd=miss",
        Tier::Peer(_) => "fletch; fwd=miss; detail=peer",
    }
}

/// Who asks for bytes: the tenant whose permits the reads take, and the job that they cost.
#[derive(Clone)]
pub struct Payer {
    /// Whether a client or another server asks.
    pub asker: Asker,
    /// The tenant.
    pub tenant: Tenant,
    /// The costs of the job's reads of the dataset.
    pub costs: Arc<JobCosts>,
}

fn key(sources: &Sources, hash: Hash) -> StoreKey {
    StoreKey { domain: sources.domain.clone(), hash }
}

/// Returns a chunk from memory, or `None` if it is not there or the access has ended.
#[must_use]
pub fn cached_chunk(server: &Server, sources: &Sources, hash: Hash) -> Option<Hit> {
    if !sources.is_registered() {
        return None;
    }
    let began = Instant::now();
    let hit = server.store.cached(&key(sources, hash))?;
    server.requests.count_read(hit.tier, began.elapsed());
    Some(hit)
}

/// Returns whether a chunk of `len` bytes is in memory or on disk. Reads nothing.
#[must_use]
pub fn has_chunk(server: &Server, sources: &Sources, hash: Hash, len: u32) -> bool {
    sources.is_registered() && server.store.has(&key(sources, hash), len)
}

/// Reads a whole chunk, which it locates first unless the chunk is in memory.
pub async fn read_chunk(
    server: &Server,
    payer: &Payer,
    sources: &Arc<Sources>,
    hash: Hash,
) -> ApiResult<Hit> {
    if let Some(hit) = cached_chunk(server, sources, hash) {
        return Ok(hit);
    }
    let located = server.versions.locate(sources, hash).await?;
    read_located_chunk(server, payer, sources, (hash, None), &located, sources.dataset_id()).await
}

/// Reads a whole chunk that was located, with a permit of the payer's tenant if it must be fetched.
///
/// A chunk that is fetched is kept on disk for `dataset`, unless another server of the cluster owns it.
/// `part` says that the chunk is a file which is read alone.
pub async fn read_located_chunk(
    server: &Server,
    payer: &Payer,
    sources: &Arc<Sources>,
    (hash, part): (Hash, Option<PackedPart>),
    located: &LocatedChunk,
    dataset: DatasetId,
) -> ApiResult<Hit> {
    if let Some(hit) = cached_chunk(server, sources, hash) {
        return Ok(hit);
    }
    if !sources.is_registered() {
        return Err(ApiError::not_found());
    }
    let began = Instant::now();
    let (asker, tenant, costs) = (payer.asker, &payer.tenant, &payer.costs);
    let read = ChunkRead { asker, tenant, costs, sources, hash, located, dataset, part };
    let hit = server.chunk_reads.read(&read).await?;
    server.requests.count_read(hit.tier, began.elapsed());
    Ok(hit)
}

/// Reads bytes `range` of a located chunk, which hash to `part`, without reading the whole chunk.
///
/// Returns `None` if the store cannot do that, for example because the chunk is not on disk.
pub async fn read_part(
    server: &Server,
    sources: &Sources,
    (chunk, located): (Hash, &LocatedChunk),
    range: &Range<usize>,
    part: Hash,
) -> ApiResult<Option<Hit>> {
    if !sources.is_registered() {
        return Err(ApiError::not_found());
    }
    let began = Instant::now();
    let hit = server.store.part(&key(sources, chunk), located.len, range, part).await?;
    if let Some(hit) = &hit {
        server.requests.count_read(hit.tier, began.elapsed());
    }
    Ok(hit)
}

/// Returns a chunk of `len` bytes from memory or disk, if it can be read without a wait.
#[must_use]
pub fn chunk_no_wait(server: &Server, sources: &Sources, hash: Hash, len: u32) -> Option<Hit> {
    counted(server, sources, || server.store.read_no_wait(&key(sources, hash), len))
}

/// Returns the bytes `at` of a chunk of `len` bytes, which hash to `part`, if they can be read without a
/// wait.
#[must_use]
pub fn part_no_wait(
    server: &Server,
    sources: &Sources,
    (chunk, len): (Hash, u32),
    at: &Range<usize>,
    part: Hash,
) -> Option<Hit> {
    counted(server, sources, || server.store.part_no_wait(&key(sources, chunk), len, at, part))
}

/// Returns a short chunk that lies on a disk of this machine, if it can be read on this thread now.
#[must_use]
pub fn near_chunk(
    server: &Server,
    payer: &Payer,
    sources: &Arc<Sources>,
    hash: Hash,
    located: &LocatedChunk,
) -> Option<Hit> {
    let (asker, tenant, costs) = (payer.asker, &payer.tenant, &payer.costs);
    let dataset = sources.dataset_id();
    let read = ChunkRead { asker, tenant, costs, sources, hash, located, dataset, part: None };
    counted(server, sources, || server.chunk_reads.read_near(&read))
}

/// Counts a read that does not wait. It is not made if the access has ended.
fn counted(server: &Server, sources: &Sources, read: impl FnOnce() -> Option<Hit>) -> Option<Hit> {
    if !sources.is_registered() {
        return None;
    }
    let began = Instant::now();
    let hit = read()?;
    server.requests.count_read(hit.tier, began.elapsed());
    Some(hit)
}
