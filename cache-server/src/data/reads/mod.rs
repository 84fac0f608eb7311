//! Reads bytes of a version for requests and leases: whole chunks, parts of chunks, spans of entries.
//!
//! ```text
//! Reads  is the version still registered? ─▶ memory ─▶ chunk_reads (disk, other servers, origin), counted
//!   spans     the bytes of an entry, as ranges of the chunks that hold them
//!   ranges    a part of a long chunk, without the rest of it
//!   at_hand   what can be read on this thread now, for hit connections
//! ```
//! 1. Every read checks first that the version is still registered, so that a long reply outlives its access
//!    by one chunk at most. The hashes come from the version's own tables: whether a chunk is cached in the
//!    domain says nothing about the versions that have it (I7).
//! 2. Every read is counted by its tier in `fletch_chunk_read_seconds`.

mod at_hand;
mod error;
mod ranges;
mod spans;

use super::{
    chunk_reads::{Asker, ChunkRead, ChunkReads, PackedPart},
    read_ahead::ReadAhead,
    versions::{LocatedChunk, Sources, VersionError, Versions},
};
use crate::{
    app::request_metrics::RequestMetrics,
    tenancy::{
        accounting::{Cost, JobCosts},
        tenants::Tenants,
    },
};
pub use error::ContentError;
use fletch_api::{ByteResult, ByteTier};
use fletch_core::{Hash, Kind, StoreKey, Tenant};
use fletch_store::{AtPeer, DatasetId, FetchError, Hit, Store, Tier};
use futures::FutureExt as _;
pub use spans::{Span, SpanBytes, content_hash, spans};
use std::{ops::Range, sync::Arc, time::Instant};
use tokio_util::task::TaskTracker;

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

/// Who asks for bytes: the tenant whose permits the reads take, and the job that they cost.
#[derive(Clone)]
pub struct Payer {
    /// Whether a client or another server asks.
    pub asker: Asker,
    pub tenant: Tenant,
    /// The costs of the job's reads of the dataset.
    pub costs: Arc<JobCosts>,
}

/// Reads bytes of versions for requests and leases.
pub struct Reads {
    /// Memory and disk.
    pub store: Arc<Store>,
    /// Locates chunks.
    pub versions: Arc<Versions>,
    /// Reads chunks that are not in memory.
    pub chunks: Arc<ChunkReads>,
    /// Whose memory replies hold.
    pub tenants: Arc<Tenants>,
    /// Memory for copies out of chunks.
    pub read_ahead: Arc<ReadAhead>,
    /// Counts reads.
    pub metrics: Arc<RequestMetrics>,
    /// Owns the reads that a slow client does not delay.
    pub tasks: TaskTracker,
}

impl Reads {
    /// Returns the key of a chunk in the store. A name of a draft that was never read has nothing there.
    fn key(&self, sources: &Sources, hash: Hash) -> StoreKey {
        let key = StoreKey { domain: sources.domain.clone(), hash };
        if sources.is_draft()
            && let Some(hash) = self.versions.learned().content(&key)
        {
            return StoreKey { hash, ..key };
        }
        key
    }

    /// Counts a read that does not wait. It is not made if the access has ended.
    fn counted(&self, sources: &Sources, read: impl FnOnce() -> Option<Hit>) -> Option<Hit> {
        if !sources.is_registered() {
            return None;
        }
        let began = Instant::now();
        let hit = read()?;
        self.metrics.count_read(hit.tier, began.elapsed());
        Some(hit)
    }

    fn check_registered(sources: &Sources) -> Result<(), ContentError> {
        if sources.is_registered() { Ok(()) } else { Err(VersionError::NotFound.into()) }
    }

    /// Returns a chunk from memory, or `None` if it is not there or the access has ended.
    #[must_use]
    pub fn in_memory(&self, sources: &Sources, hash: Hash) -> Option<Hit> {
        self.counted(sources, || self.store.cached(&self.key(sources, hash)))
    }

    /// Returns whether a chunk of `len` bytes is in memory or on disk. Reads nothing.
    #[must_use]
    pub fn has(&self, sources: &Sources, hash: Hash, len: u32) -> bool {
        sources.is_registered() && self.store.has(&self.key(sources, hash), len)
    }

    /// Reads a whole chunk, which it locates first unless the chunk is in memory.
    ///
    /// # Errors
    /// [`ContentError`].
    pub async fn chunk(
        &self,
        payer: &Payer,
        sources: &Arc<Sources>,
        hash: Hash,
    ) -> Result<Hit, ContentError> {
        if let Some(hit) = self.in_memory(sources, hash) {
            return Ok(hit);
        }
        let located = self.versions.locate(sources, hash).await?;
        self.located(payer, sources, hash, &located).await
    }

    /// Reads a whole chunk that was located, with a permit of the payer's tenant if it must be fetched.
    ///
    /// A chunk that is fetched is kept on disk for its dataset, unless another server of the cluster owns it.
    ///
    /// # Errors
    /// [`ContentError`].
    pub async fn located(
        &self,
        payer: &Payer,
        sources: &Arc<Sources>,
        hash: Hash,
        located: &LocatedChunk,
    ) -> Result<Hit, ContentError> {
        let dataset = sources.dataset_id();
        self.read(&ChunkRead { dataset, ..payer.read_of(sources, hash, located) }).await
    }

    /// Reads a file that lies in a chunk with others, alone. `located` is where the file's bytes are.
    async fn file_alone(
        &self,
        payer: &Payer,
        sources: &Arc<Sources>,
        file: Hash,
        part: PackedPart,
        located: &LocatedChunk,
    ) -> Result<Hit, ContentError> {
        let dataset = sources.single_file_id();
        self.read(&ChunkRead { dataset, part: Some(part), ..payer.read_of(sources, file, located) }).await
    }

    async fn read(&self, read: &ChunkRead<'_>) -> Result<Hit, ContentError> {
        if let Some(hit) = self.in_memory(read.sources, read.hash) {
            return Ok(hit);
        }
        Self::check_registered(read.sources)?;
        let began = Instant::now();
        let hit = self.chunks.read(read).await?;
        self.metrics.count_read(hit.tier, began.elapsed());
        Ok(hit)
    }

    /// Reads a chunk of `len` bytes that this server has. Fetches nothing.
    ///
    /// # Errors
    /// [`VersionError::NotFound`] if it has none.
    pub async fn kept(&self, sources: &Sources, hash: Hash, len: u32) -> Result<Hit, ContentError> {
        let absent =
            Arc::new(|_| async { Err(FetchError::new(Kind::NotFound, "the chunk is not cached")) }.boxed());
        let read = self.store.read(self.key(sources, hash), len, DatasetId::UNCACHED, absent).await;
        read.map_err(|_| VersionError::NotFound.into())
    }

    /// Reads bytes `range` of a located chunk, which hash to `part`, without reading the whole chunk.
    ///
    /// Returns `None` if the store cannot do that, for example because the chunk is not on disk.
    async fn part(
        &self,
        sources: &Sources,
        chunk: Hash,
        located: &LocatedChunk,
        range: &Range<usize>,
        part: Hash,
    ) -> Result<Option<Hit>, ContentError> {
        Self::check_registered(sources)?;
        let began = Instant::now();
        let hit = self.store.part(&self.key(sources, chunk), located.len, range, part).await?;
        if let Some(hit) = &hit {
            self.metrics.count_read(hit.tier, began.elapsed());
        }
        Ok(hit)
    }
}

impl Payer {
    fn read_of<'a>(
        &'a self,
        sources: &'a Arc<Sources>,
        hash: Hash,
        located: &'a LocatedChunk,
    ) -> ChunkRead<'a> {
        ChunkRead {
            asker: self.asker,
            tenant: &self.tenant,
            costs: &self.costs,
            sources,
            hash,
            located,
            dataset: sources.dataset_id(),
            part: None,
            run: None,
        }
    }
}
