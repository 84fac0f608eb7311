//! Fetching of a unit or a sample into memory, pinned until it is released.

use super::{By, Prefetcher};
use crate::data::{
    chunk_reads::{Asker, ChunkRead, PackedPart},
    versions::{LocatedChunk, SamplesError, VersionError},
};
use fletch_core::{
    Hash,
    manifest::{Slice, locate::ranges},
};
use fletch_store::{AtPeer, Pinned, ReadError, Tier};
use fletch_tables::Found;
use futures::{StreamExt as _, TryStreamExt as _, stream};

/// Most chunks of one unit or sample that are fetched at once.
const AT_ONCE: usize = 4;

/// The result of a fetch.
#[derive(Debug, Default)]
pub(super) struct Fetched {
    /// Bytes that came from the origin.
    pub fetched_bytes: u64,
    /// The pinned chunks.
    _pins: Vec<Pinned>,
}

/// Why a fetch failed: a line for the log.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchFailed {
    /// The version's tables cannot be read.
    #[error(transparent)]
    Tables(#[from] SamplesError),
    /// The store or the origin failed.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// One read, and whether its chunk is pinned.
struct Piece {
    hash: Hash,
    located: LocatedChunk,
    /// The file, if it is read without the chunk in which it lies.
    part: Option<PackedPart>,
    held: bool,
}

impl Prefetcher {
    /// Fetches what a key identifies.
    pub(super) async fn fetch(&self, key: u32) -> Result<Fetched, FetchFailed> {
        let pieces = match self.by {
            By::Unit => self.of_unit(key).await?,
            By::Sample => self.of_sample(key).await?,
        };
        let reads = stream::iter(pieces).map(|p| self.read(p)).buffered(AT_ONCE);
        let all: Vec<(u64, Option<Pinned>)> = reads.try_collect().await?;
        let fetched_bytes = all.iter().map(|(n, _)| n).sum();
        Ok(Fetched { fetched_bytes, _pins: all.into_iter().filter_map(|(_, p)| p).collect() })
    }

    async fn read(&self, piece: Piece) -> Result<(u64, Option<Pinned>), FetchFailed> {
        let Piece { hash, located, part, held } = piece;
        let read = ChunkRead {
            asker: Asker::Client,
            tenant: &self.tenant,
            costs: &self.costs,
            sources: &self.sources,
            hash,
            located: &located,
            dataset: self.sources.dataset_id(),
            part,
            run: None,
        };
        let hit = self.context.reads.read(&read).await?;
        let is_fetched = match hit.tier {
            Tier::Origin | Tier::Bypass => true,
            Tier::Peer(at) => at != AtPeer::Hit,
            Tier::Memory | Tier::Disk | Tier::Flight => false,
        };
        let fetched = if is_fetched { located.len.into() } else { 0 };
        Ok((fetched, held.then(|| self.context.store.pin(self.key(hash), hit.chunk))))
    }

    async fn of_unit(&self, unit: u32) -> Result<Vec<Piece>, FetchFailed> {
        let mut pieces = Vec::new();
        let source = &self.sources.first;
        for c in self.samples.chunks(unit) {
            let row = source.version.chunk_row(c.part as usize, c.row as usize).await;
            let row =
                row.map_err(|e| SamplesError::from(VersionError::from(e)))?.ok_or(SamplesError::Lost)?;
            let located = LocatedChunk::from_row(source, c.part as usize, row);
            pieces.push(Piece { hash: c.hash, located, part: None, held: true });
        }
        Ok(pieces)
    }

    async fn of_sample(&self, sample: u32) -> Result<Vec<Piece>, FetchFailed> {
        let mut pieces = Vec::new();
        for found in self.samples.files(&self.sources.first, sample).await? {
            match found.slices() {
                [one] if found.entry().hash.is_some_and(|h| h != one.chunk) => {
                    pieces.push(self.shared(&found, one).await?);
                }
                slices => {
                    for s in slices {
                        pieces.push(Piece {
                            hash: s.chunk,
                            located: self.locate(s.chunk).await?,
                            part: None,
                            held: true,
                        });
                    }
                }
            }
        }
        Ok(pieces)
    }

    async fn locate(&self, chunk: Hash) -> Result<LocatedChunk, SamplesError> {
        Ok(self.context.versions.locate(&self.sources, chunk).await?)
    }

    /// Returns the read for a file that shares its chunk with others, as the file's reader will read it.
    ///
    /// That is the chunk, where the cache has it or would keep it (the cache then keeps it), and else the
    /// file by itself.
    async fn shared(&self, found: &Found, one: &Slice) -> Result<Piece, FetchFailed> {
        let (entry, slices) = (found.entry(), found.slices());
        let located = self.locate(one.chunk).await?;
        let (key, number) = (self.key(one.chunk), self.sources.dataset_id());
        let range = ranges(slices, 0..entry.size).next().map(|r| r.range);
        let part = range.as_ref().map_or(located.len, |r| u32::try_from(r.len()).unwrap_or(u32::MAX));
        let all = located.layout_bytes();
        let store = &self.context.store;
        // The owner of the chunk decides whether it keeps the whole of it. The file alone comes here.
        let is_elsewhere = store.needs_fetch(&key, located.len)
            && self.context.reads.is_elsewhere(Asker::Client, &self.sources, one.chunk);
        let stays = !is_elsewhere && store.would_keep(&key, number, (part, located.len), all);
        let of = is_elsewhere.then_some(PackedPart { chunk: one.chunk, ordinal: found.ordinal });
        let part = range.filter(|_| !stays).and_then(|r| located.slice(&r));
        Ok(match (entry.hash, part) {
            (Some(hash), Some(file)) => Piece { hash, located: file, part: of, held: true },
            _ => Piece { hash: one.chunk, located, part: None, held: false },
        })
    }
}
