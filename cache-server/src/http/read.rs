//! Reading chunks for an answer: one call for chunks, files and batches.

use super::problem::Answer;
use crate::{
    server::Server,
    versions::{Filler, Located, Sources},
};
use fletch_api::ByteTier;
use fletch_core::{Domain, Hash, StoreKey};
use fletch_store::{Hit, Tier};
use std::sync::Arc;

/// The tier in the contract's word.
#[must_use]
pub fn tier(tier: Tier) -> ByteTier {
    match tier {
        Tier::Memory => ByteTier::Memory,
        Tier::Flight => ByteTier::Flight,
        Tier::Origin => ByteTier::Origin,
    }
}

/// RFC 9211: how a chunk was come by.
#[must_use]
pub fn cache_status(tier: Tier) -> &'static str {
    match tier {
        Tier::Memory => "fletch; hit",
        Tier::Flight => "fletch; fwd=miss; collapsed",
        Tier::Origin => "fletch; fwd=miss; stored",
    }
}

/// A chunk from memory. Only for hashes that the version's own tables named: being cached in the
/// domain says nothing about which version a chunk is of.
#[must_use]
pub fn cached(server: &Server, domain: &Domain, hash: Hash) -> Option<Hit> {
    server.store.cached(&StoreKey { domain: domain.clone(), hash })
}

/// A whole chunk that the version's own tables named.
pub async fn chunk(server: &Server, sources: &Arc<Sources>, domain: &Domain, hash: Hash) -> Answer<Hit> {
    if let Some(hit) = cached(server, domain, hash) {
        return Ok(hit);
    }
    let located = sources.locate(hash).await?;
    located_chunk(server, sources, domain, hash, &located).await
}

/// A whole chunk that was located.
pub async fn located_chunk(
    server: &Server,
    sources: &Arc<Sources>,
    domain: &Domain,
    hash: Hash,
    located: &Located,
) -> Answer<Hit> {
    let key = StoreKey { domain: domain.clone(), hash };
    if let Some(hit) = server.store.cached(&key) {
        return Ok(hit);
    }
    let fetch = Filler::fetch(&server.versions, sources, hash, located);
    Ok(server.store.read(key, located.len, fetch).await?)
}
