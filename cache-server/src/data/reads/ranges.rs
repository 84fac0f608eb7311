//! Reads parts of long chunks, without the rest of the chunk where the disk or the origin allows that.
//!
//! ```text
//! memory, the chunk's flight ─▶ its groups on disk ─▶ kept here? the whole chunk
//!                                                     else its groups, of its owner or the origin
//! ```
//! 1. (I1) Groups are checked by hashes that make the chunk's name. Where these are not known, or groups are
//!    wrong, the whole chunk is read, which heals what can be healed.
//! 2. A chunk that the store would keep is fetched whole: its other bytes are wanted later.
//! 3. The owner of a chunk is asked for the groups. It decides whether to keep the whole chunk.

use super::{ContentError, Payer, Reads, SpanBytes};
use crate::data::{
    chunk_reads::ChunkRead,
    versions::{LocatedChunk, Sources},
};
use fletch_core::{
    Hash, Verified,
    groups::{GROUPED_BYTES_MIN, GroupHashes, GroupRun},
};
use fletch_store::{DatasetId, PartHit};
use futures::FutureExt as _;
use std::{ops::Range, sync::Arc, time::Instant};
use tokio::task::spawn_blocking;

/// A range of more than this part of its chunk, one of so many, is read with the whole chunk. A mount asks
/// for up to a quarter, and the groups that have its ends.
const PART_MAX: usize = 2;

impl Reads {
    /// Returns verified bytes of a chunk that have its bytes `range`.
    ///
    /// # Errors
    /// [`ContentError`].
    pub async fn chunk_range(
        &self,
        payer: &Payer,
        sources: &Arc<Sources>,
        hash: Hash,
        range: &Range<usize>,
    ) -> Result<PartHit, ContentError> {
        if let Some(hit) = self.in_memory(sources, hash) {
            return Ok(PartHit { hit, begins: 0 });
        }
        let located = self.versions.locate(sources, hash).await?;
        if let Some(run) = self.run_of(sources, hash, &located, range).await
            && let Some(hit) = self.run(payer, sources, &run, (hash, &located)).await?
        {
            return Ok(hit);
        }
        let hit = self.located(payer, sources, hash, &located).await?;
        Ok(PartHit { hit, begins: 0 })
    }

    /// Returns the groups to read for a range, if the range is a small part of a long chunk and the hashes of
    /// the chunk's groups are known, or at rest.
    async fn run_of(
        &self,
        sources: &Sources,
        hash: Hash,
        located: &LocatedChunk,
        range: &Range<usize>,
    ) -> Option<GroupRun> {
        let len = located.len as usize;
        if located.len < GROUPED_BYTES_MIN || range.len() > len / PART_MAX {
            return None;
        }
        let groups = self.known_groups(sources, hash, located).await?;
        // Two layouts may disagree about the length of a chunk; only one of them is right.
        (groups.chunk_len() == located.len).then(|| groups.run(range)).flatten()
    }

    /// Returns the hashes of the groups of a chunk from memory or from the tables.
    async fn known_groups(
        &self,
        sources: &Sources,
        hash: Hash,
        located: &LocatedChunk,
    ) -> Option<Arc<GroupHashes>> {
        let key = self.key(sources, hash);
        if let Some(groups) = self.store.groups(key.hash) {
            return Some(groups);
        }
        // A chunk that is here is read whole once, which teaches its hashes. It must not wait for an origin.
        if sources.is_draft() || self.store.has(&key, located.len) {
            return None;
        }
        let groups = Arc::new(located.groups_at_rest().await?);
        self.store.learn_groups(&groups);
        Some(groups)
    }

    /// Reads groups of a chunk from memory or disk, or from elsewhere if this server would not keep it.
    /// `None`: the whole chunk is to be read.
    async fn run(
        &self,
        payer: &Payer,
        sources: &Arc<Sources>,
        run: &GroupRun,
        (hash, located): (Hash, &LocatedChunk),
    ) -> Result<Option<PartHit>, ContentError> {
        Self::check_registered(sources)?;
        let (key, began) = (self.key(sources, hash), Instant::now());
        if let Some(found) = self.store.run(&key, run).await? {
            self.metrics.count_read(found.hit.tier, began.elapsed());
            return Ok(Some(found));
        }
        let (dataset, all) = (sources.dataset_id(), located.layout_bytes());
        let keeps = || {
            !self.chunks.is_elsewhere(payer.asker, sources, hash)
                && self.store.would_keep(&key, dataset, (run.len(), located.len), all)
        };
        if self.store.has(&key, located.len) || self.store.is_in_flight(&key) || keeps() {
            return Ok(None);
        }
        let run = self.store.grown(run);
        let Some(bytes) = located.slice(&run.range()).filter(|_| !run.is_whole()) else { return Ok(None) };
        let read = ChunkRead {
            dataset: DatasetId::UNCACHED,
            run: Some(&run),
            ..payer.read_of(sources, run.name(), &bytes)
        };
        match self.chunks.read_run(&read, &key, &run).await {
            Ok(found) => {
                self.metrics.count_read(found.hit.tier, began.elapsed());
                Ok(Some(found))
            }
            // Whoever has waited for an outage must not wait for it twice.
            Err(error) if error.kind().retryable() => Err(error.into()),
            Err(error) => {
                tracing::debug!(chunk = %hash, %error, "groups of a chunk cannot be read; the chunk is read");
                Ok(None)
            }
        }
    }

    /// Returns the hashes of the groups of a chunk. Reads the chunk if they are not known.
    ///
    /// # Errors
    /// [`ContentError`]; [`ContentError::Ungrouped`] for a chunk that is always read whole.
    pub async fn groups(
        &self,
        payer: &Payer,
        sources: &Arc<Sources>,
        hash: Hash,
    ) -> Result<Arc<GroupHashes>, ContentError> {
        let located = self.versions.locate(sources, hash).await?;
        if located.len < GROUPED_BYTES_MIN {
            return Err(ContentError::Ungrouped);
        }
        Self::check_registered(sources)?;
        if let Some(groups) = self.known_groups(sources, hash, &located).await {
            return Ok(groups);
        }
        let chunk = self.located(payer, sources, hash, &located).await?.chunk;
        if let Some(groups) = self.store.groups(chunk.hash()) {
            return Ok(groups);
        }
        // It lay in memory longer than its hashes did.
        let checked = move || Verified::check_grouped(chunk.hash(), chunk.bytes().clone());
        let groups = spawn_blocking(checked).await?.ok().and_then(|(_, groups)| groups);
        let groups = Arc::new(groups.ok_or(ContentError::Ungrouped)?);
        self.store.learn_groups(&groups);
        Ok(groups)
    }

    /// As [`Reads::groups`], if they are known. Never waits.
    #[must_use]
    pub fn groups_at_hand(&self, sources: &Arc<Sources>, hash: Hash) -> Option<Arc<GroupHashes>> {
        // The tables say whether the version has the chunk.
        self.versions.locate(sources, hash).now_or_never()?.ok()?;
        let groups = self.store.groups(self.key(sources, hash).hash)?;
        sources.is_registered().then_some(groups)
    }

    /// Returns bytes `range` of a chunk from memory, or from its groups on disk. `None` if that would take a
    /// wait.
    #[must_use]
    pub fn range_at_hand(
        &self,
        sources: &Arc<Sources>,
        hash: Hash,
        range: &Range<usize>,
    ) -> Option<SpanBytes> {
        let located = self.versions.locate(sources, hash).now_or_never()?.ok()?;
        if !sources.is_registered() {
            return None;
        }
        let (key, began) = (self.key(sources, hash), Instant::now());
        let groups = self.store.groups(key.hash).filter(|groups| groups.chunk_len() == located.len);
        let found = match groups {
            Some(groups) => self.store.run_no_wait(&key, &groups.run(range)?)?,
            None => PartHit { hit: self.store.cached(&key)?, begins: 0 },
        };
        self.metrics.count_read(found.hit.tier, began.elapsed());
        Some(SpanBytes { bytes: found.slice(range)?, tier: found.hit.tier })
    }
}
