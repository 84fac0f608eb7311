//! What can be read on this thread now: for hit connections, whose clients ask by HTTP for all else.

use super::{Payer, Reads, Span, SpanBytes, spans};
use crate::data::versions::Sources;
use fletch_core::Hash;
use futures::FutureExt as _;
use std::{fs::File, sync::Arc};

impl Reads {
    /// Returns a chunk from memory, from the disk, or, if it is short, from a disk of this machine with its
    /// origin. `None` if that would take a wait.
    #[must_use]
    pub fn chunk_at_hand(
        &self,
        payer: impl FnOnce() -> Payer,
        sources: &Arc<Sources>,
        hash: Hash,
    ) -> Option<SpanBytes> {
        // As by HTTP, what is in memory is not located first: that looks into two tables.
        if let Some(hit) = self.in_memory(sources, hash) {
            return Some(SpanBytes { bytes: hit.chunk.bytes().clone(), tier: hit.tier });
        }
        let located = self.versions.locate(sources, hash).now_or_never()?.ok()?;
        let kept = || self.store.read_no_wait(&self.key(sources, hash), located.len);
        let near = || self.chunks.read_near(&payer().read_of(sources, hash, &located));
        let hit = self.counted(sources, kept).or_else(|| self.counted(sources, near))?;
        Some(SpanBytes { bytes: hit.chunk.bytes().clone(), tier: hit.tier })
    }

    /// Opens the file on disk that has a chunk, for a client that reads there itself. Returns the length of
    /// the chunk, and where it begins. `len`: the length that the client knows; 0 for none.
    #[must_use]
    pub fn slab_at_hand(&self, sources: &Arc<Sources>, hash: Hash, len: u32) -> Option<(u32, File, u64)> {
        let located = self.versions.locate(sources, hash).now_or_never()?.ok()?;
        if ![0, located.len].contains(&len) || !sources.is_registered() {
            return None;
        }
        let (file, offset) = self.store.lend(&self.key(sources, hash), located.len)?;
        Some((located.len, file, offset))
    }

    /// Returns a file of `size` bytes that hash to `hash`, if it lies in one chunk, in memory or on disk.
    /// `None` if that would take a wait.
    #[must_use]
    pub fn file_at_hand(
        &self,
        sources: &Arc<Sources>,
        path: &str,
        hash: Hash,
        size: u64,
    ) -> Option<SpanBytes> {
        let found = sources.first.version.find(path).now_or_never()?.ok()??;
        let entry = found.entry();
        if entry.hash != Some(hash) || entry.size != size {
            return None;
        }
        let mut spans = spans(&sources.first, &found, 0..size);
        let (span, None) = (spans.pop()?, spans.pop()) else { return None };
        if let Some(read) = self.span_in_memory(sources, &span) {
            return Some(read);
        }
        let hit = match &span {
            Span::Chunk(range) => {
                let (key, len) = (self.key(sources, range.slice.chunk), range.slice.len);
                self.counted(sources, || self.store.read_no_wait(&key, len))?
            }
            Span::PackedFile(file) => {
                let chunk = file.chunk().chunk;
                let len = self.versions.locate(sources, chunk).now_or_never()?.ok()?.len;
                let key = self.key(sources, chunk);
                self.counted(sources, || self.store.part_no_wait(&key, len, file.place(), hash))?
            }
        };
        Some(SpanBytes { bytes: hit.chunk.bytes().clone(), tier: hit.tier })
    }
}
