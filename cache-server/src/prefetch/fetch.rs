//! Bringing a unit or a sample into memory, to stay there until it is let go.

use super::{By, Prefetcher};
use crate::versions::{ChunkFetch, LocatedChunk, SamplesError, VersionError};
use fletch_core::{
    Hash,
    manifest::{Slice, locate::ranges},
};
use fletch_store::{Pinned, ReadError, Tier};
use fletch_tables::Found;
use futures::{StreamExt as _, TryStreamExt as _, stream};

/// Chunks of one unit or sample that are fetched at once.
const AT_ONCE: usize = 4;

/// What was brought.
#[derive(Debug, Default)]
pub(super) struct Brought {
    /// What came from the origin for it.
    pub fetched_bytes: u64,
    /// What is held.
    _pins: Vec<Pinned>,
}

/// Why something did not come: a line for the log.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotBrought {
    /// The tables.
    #[error(transparent)]
    Tables(#[from] SamplesError),
    /// The store, or the origin.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// One read, and whether it is held afterwards.
struct Piece {
    hash: Hash,
    located: LocatedChunk,
    held: bool,
}

impl Prefetcher {
    /// Brings what a key names.
    pub(super) async fn bring(&self, key: u32) -> Result<Brought, NotBrought> {
        let pieces = match self.by {
            By::Unit => self.of_unit(key).await?,
            By::Sample => self.of_sample(key).await?,
        };
        let reads = stream::iter(pieces).map(|p| self.read(p)).buffered(AT_ONCE);
        let all: Vec<(u64, Option<Pinned>)> = reads.try_collect().await?;
        let fetched_bytes = all.iter().map(|(n, _)| n).sum();
        Ok(Brought { fetched_bytes, _pins: all.into_iter().filter_map(|(_, p)| p).collect() })
    }

    async fn read(&self, piece: Piece) -> Result<(u64, Option<Pinned>), ReadError> {
        let Piece { hash, located, held } = piece;
        let fetch = ChunkFetch::fetch(&self.context.versions, &self.sources, hash, &located);
        let (store, key) = (&self.context.store, self.key(hash));
        let hit = store.read(key.clone(), located.len, self.sources.dataset_id(), fetch).await?;
        let fetched = if matches!(hit.tier, Tier::Origin | Tier::Bypass) { located.len.into() } else { 0 };
        Ok((fetched, held.then(|| store.pin(key, hit.chunk))))
    }

    async fn of_unit(&self, unit: u32) -> Result<Vec<Piece>, NotBrought> {
        let mut pieces = Vec::new();
        let source = &self.sources.first;
        for c in self.samples.chunks(unit) {
            let rows = source.version.chunk_rows(c.part as usize).await;
            let rows = rows.map_err(|e| SamplesError::from(VersionError::from(e)))?;
            let row = rows.get(c.row as usize).ok_or(SamplesError::Lost)?;
            let located = LocatedChunk::from_row(source, c.part as usize, row.clone());
            pieces.push(Piece { hash: c.hash, located, held: true });
        }
        Ok(pieces)
    }

    async fn of_sample(&self, sample: u32) -> Result<Vec<Piece>, NotBrought> {
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

    /// A file that lies in a chunk with others, as its reader will look for it: in the chunk, where that is here or
    /// comes to stay (and then is the cache's to keep), else by itself.
    async fn shared(&self, found: &Found, one: &Slice) -> Result<Piece, NotBrought> {
        let (entry, slices) = (found.entry(), found.slices());
        let located = self.locate(one.chunk).await?;
        let (key, number) = (self.key(one.chunk), self.sources.dataset_id());
        let stays = self.context.store.would_keep(&key, number, located.len, located.layout_bytes());
        let range = ranges(slices, 0..entry.size).next().map(|r| r.range);
        let part = range.filter(|_| !stays).and_then(|r| located.slice(&r));
        Ok(match (entry.hash, part) {
            (Some(hash), Some(part)) => Piece { hash, located: part, held: true },
            _ => Piece { hash: one.chunk, located, held: false },
        })
    }
}
