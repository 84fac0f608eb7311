//! Reads of a part of a long chunk, for programs that read a large file here and there.
//!
//! A mount asks for the hashes of a chunk's groups once, and checks each part by them (I1). Where a part
//! cannot be had, whatever the reason, the whole chunk is read instead.

use super::read::{FetchRequest, Reader};
use fletch_client::fallback::OriginLocation;
use fletch_core::{
    Hash, StoreKey,
    groups::{GROUPED_BYTES_MIN, GroupHashes, GroupRun, group_hash_bytes},
    manifest::locate::ChunkRange,
};
use fletch_store::{Brought, Fetch, PartHit, ReadError};
use fletch_tables::version::Found;
use std::sync::Arc;

/// A range of more than this part of its chunk, one of so many, is read with the whole chunk.
const PART_MAX: usize = 4;

impl Reader {
    /// Returns the hashes of the groups of a chunk, if the source has them at hand.
    pub(super) fn groups_at_hand(&self, chunk: Hash, len: u32) -> Option<Arc<GroupHashes>> {
        let wanted = FetchRequest::Groups { chunk, len: group_hash_bytes(len) };
        let Brought::Bytes(bytes) = self.source.bring(&wanted) else { return None };
        self.checked_groups(chunk, len, &bytes)
    }

    /// Returns the groups of a chunk that have a range of it. `None`: the whole chunk is to be read.
    ///
    /// # Errors
    /// [`ReadError`] of a source that does not answer, or when no memory came free.
    pub(super) async fn part(&self, found: &Found, of: &ChunkRange) -> Result<Option<PartHit>, ReadError> {
        let (chunk, len) = (of.slice.chunk, of.slice.chunk_offset + of.slice.len);
        if len < GROUPED_BYTES_MIN || of.range.len() > len as usize / PART_MAX || !self.source.has_parts() {
            return Ok(None);
        }
        let (store, key) = (&self.reads.store, self.key(chunk));
        let at = || self.origin_location(found, of);
        let groups = match store.groups(chunk).filter(|groups| groups.chunk_len() == len) {
            Some(groups) => groups,
            None if store.holds_chunk(&key) || store.is_in_flight(&key) => return Ok(None),
            None => match self.ask_for_groups(chunk, len, &at()).await {
                Some(groups) => groups,
                None => return Ok(None),
            },
        };
        let Some(run) = groups.run(&of.range) else { return Ok(None) };
        if let Some(known) = store.run(&key, &run).await? {
            return Ok(Some(known));
        }
        if store.is_in_flight(&key) || store.disk().is_some_and(|disk| disk.has(&key, len)) {
            return Ok(None);
        }
        if self.source.has_hits()
            && let Brought::Bytes(bytes) = self.source.bring(&wanted_of(&run))
            && let Some(part) = store.brought_run(&run, bytes)
        {
            return Ok(Some(part));
        }
        match self.fetch_run(&key, store.grown(&run), at()).await {
            Ok(part) => Ok(Some(part)),
            // Whoever has waited for an outage must not wait for it twice.
            Err(error) if error.kind().retryable() => Err(error),
            Err(error) => {
                tracing::debug!(chunk = %key.hash, %error, "a part cannot be read; the chunk is read");
                Ok(None)
            }
        }
    }

    async fn fetch_run(
        &self,
        key: &StoreKey,
        run: GroupRun,
        at: OriginLocation,
    ) -> Result<PartHit, ReadError> {
        let (source, wanted) = (Arc::clone(&self.source), wanted_of(&run));
        let at = at.from(run.range().start as u64);
        let fetch: Fetch = Arc::new(move |attempt| source.fetch(wanted.clone(), &at, attempt));
        self.reads.store.fetch_run(key, run, fetch).await
    }

    /// Returns the hashes of the groups of a chunk from the source.
    async fn ask_for_groups(&self, chunk: Hash, len: u32, at: &OriginLocation) -> Option<Arc<GroupHashes>> {
        if self.source.has_hits()
            && let Some(groups) = self.groups_at_hand(chunk, len)
        {
            return Some(groups);
        }
        let wanted = FetchRequest::Groups { chunk, len: group_hash_bytes(len) };
        match self.source.fetch(wanted, at, 0).await {
            Ok(bytes) => self.checked_groups(chunk, len, &bytes),
            Err(error) => {
                tracing::debug!(%chunk, %error, "no hashes of groups; the chunk is read");
                None
            }
        }
    }

    /// Remembers the hashes of the groups of a chunk of `len` bytes, if they are right.
    fn checked_groups(&self, chunk: Hash, len: u32, bytes: &[u8]) -> Option<Arc<GroupHashes>> {
        match GroupHashes::check(chunk, len, bytes) {
            Ok(groups) => {
                let groups = Arc::new(groups);
                self.reads.store.learn_groups(&groups);
                Some(groups)
            }
            Err(wrong) => {
                tracing::warn!(%wrong, "the source of a mount sent wrong hashes");
                None
            }
        }
    }
}

fn wanted_of(run: &GroupRun) -> FetchRequest {
    let from = u32::try_from(run.range().start).unwrap_or(u32::MAX);
    FetchRequest::Part { chunk: run.of().chunk(), from, len: run.len() }
}
