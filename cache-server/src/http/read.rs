//! Reading chunks for an answer: one call for chunks, files and batches.

use super::problem::{Answer, Fault};
use crate::{
    accounting::Cost,
    server::Server,
    versions::{ChunkFetch, Located, Sources},
};
use fletch_api::{ByteResult, ByteTier};
use fletch_core::{Hash, StoreKey};
use fletch_store::{DatasetId, Hit, Tier};
use std::{ops::Range, sync::Arc};

/// What a tier costs, in the contract's words.
#[must_use]
pub fn cost(tier: Tier) -> Cost {
    match tier {
        Tier::Memory => (ByteResult::Hit, ByteTier::Memory),
        Tier::Disk => (ByteResult::Hit, ByteTier::Disk),
        Tier::Flight => (ByteResult::Hit, ByteTier::Flight),
        Tier::Origin => (ByteResult::Miss, ByteTier::Origin),
        Tier::Bypass => (ByteResult::Bypass, ByteTier::Origin),
    }
}

/// RFC 9211: how a chunk was come by.
#[must_use]
pub fn cache_status(tier: Tier) -> &'static str {
    match tier {
        Tier::Memory | Tier::Disk => "fletch; hit",
        Tier::Flight => "fletch; fwd=miss; collapsed",
        Tier::Origin => "fletch; fwd=miss; stored",
        Tier::Bypass => "fletch; fwd=miss",
    }
}

/// A chunk from memory. Only for hashes that the version's own tables named: being cached in the
/// domain says nothing about which version a chunk is of. `None` too once the grant ended.
#[must_use]
pub fn cached(server: &Server, sources: &Sources, hash: Hash) -> Option<Hit> {
    if !sources.stand() {
        return None;
    }
    server.store.cached(&StoreKey { domain: sources.domain.clone(), hash })
}

/// Whether a chunk that the version's own tables named is in memory or on disk. Reads nothing.
#[must_use]
pub fn has(server: &Server, sources: &Sources, hash: Hash, len: u32) -> bool {
    sources.stand() && server.store.has(&StoreKey { domain: sources.domain.clone(), hash }, len)
}

/// A whole chunk that the version's own tables named.
pub async fn chunk(server: &Server, sources: &Arc<Sources>, hash: Hash) -> Answer<Hit> {
    if let Some(hit) = cached(server, sources, hash) {
        return Ok(hit);
    }
    let located = server.versions.locate(sources, hash).await?;
    located_chunk(server, sources, hash, &located, sources.number()).await
}

/// A whole chunk that was located.
pub async fn located_chunk(
    server: &Server,
    sources: &Arc<Sources>,
    hash: Hash,
    located: &Located,
    number: DatasetId,
) -> Answer<Hit> {
    if let Some(hit) = cached(server, sources, hash) {
        return Ok(hit);
    }
    // A long answer outlives its grant by one chunk at most.
    if !sources.stand() {
        return Err(Fault::not_found());
    }
    let key = StoreKey { domain: sources.domain.clone(), hash };
    let fetch = ChunkFetch::fetch(&server.versions, sources, hash, located);
    Ok(server.store.read(key, located.len, number, fetch).await?)
}

/// Bytes `at` of a located chunk, which hash to `part`, if they are here without the chunk being read.
pub async fn located_part(
    server: &Server,
    sources: &Sources,
    (chunk, located): (Hash, &Located),
    at: &Range<usize>,
    part: Hash,
) -> Answer<Option<Hit>> {
    if !sources.stand() {
        return Err(Fault::not_found());
    }
    let key = StoreKey { domain: sources.domain.clone(), hash: chunk };
    Ok(server.store.part(&key, located.len, at, part).await?)
}
