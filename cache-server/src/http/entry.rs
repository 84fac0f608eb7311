//! Bytes of an entry, through whatever chunks hold them.
//!
//! A placement is only its layout's word. An entry that is cut into whole chunks is proved by
//! their names; one that lies in a chunk with others (of a pack, of a shard) is hashed by itself
//! before it is sent (I1), once for as long as the layout is open, and looked for in the root's other layouts
//! when its chunk cannot be had or proves the placement wrong.
//!
//! What is little beside its chunk is copied out of it, so that a reader that takes its time holds no chunk (I6).

use super::{
    problem::{Answer, Fault},
    read::{cached, chunk, located_chunk, located_part},
};
use crate::{
    read_ahead::AHEAD_BYTES_MAX,
    server::Server,
    versions::{ProvenFiles, Source, Sources},
};
use bytes::Bytes;
use fletch_api::Code;
use fletch_core::{
    Hash, StoreKey, Verified,
    manifest::locate::{ChunkRange, ranges},
};
use fletch_store::{Copies, Hit, Tier};
use fletch_tables::Found;
use std::{ops::Range, sync::Arc, sync::atomic::Ordering::Relaxed};

/// Above this many bytes a file is hashed on a blocking thread.
const INLINE_HASH_BYTES: usize = 256 << 10;

/// Bytes to be read.
#[derive(Debug, Clone)]
pub enum Span {
    /// A range of a chunk.
    Chunk(ChunkRange),
    /// A range of a file that lies in a chunk with others.
    Shared(Shared),
}

/// See [`Span::Shared`].
#[derive(Debug, Clone)]
pub struct Shared {
    ordinal: u64,
    /// BLAKE3 of the whole file.
    hash: Hash,
    /// Where the whole file is.
    held: ChunkRange,
    /// Which bytes of the file.
    range: Range<usize>,
    /// Of the layout that says where it is.
    proven: Arc<ProvenFiles>,
}

/// Bytes of an entry, verified, and where they came from.
#[derive(Debug, Clone)]
pub struct Cut {
    /// The bytes.
    pub bytes: Bytes,
    /// Where they came from.
    pub tier: Tier,
}

impl Cut {
    fn of(server: &Server, hit: &Hit, range: &Range<usize>) -> Answer<Self> {
        let chunk = &hit.chunk;
        let bytes = chunk.slice(range.clone()).ok_or_else(|| {
            let detail = format!("bytes {range:?} lie past the end of chunk {}", chunk.hash());
            Fault::new(Code::TablesCorrupt, detail, "index the dataset again; no wrong byte was delivered")
        })?;
        let apart = goes_apart(bytes.len(), chunk.bytes().len());
        let bytes = if apart { server.read_ahead.copies.copy(bytes) } else { bytes };
        Ok(Cut { bytes, tier: hit.tier })
    }
}

/// Whether so many bytes of a chunk are copied out of it.
fn goes_apart(bytes: usize, chunk: usize) -> bool {
    bytes as u64 <= AHEAD_BYTES_MAX && bytes * 2 < chunk
}

/// A file that lies in a chunk with others, proved by its own hash; the outer `None` when it would reach past the
/// chunk's end, the inner when it is another.
fn proved(copies: &Copies, file: Hash, chunk: &Verified, at: &Range<usize>) -> Option<Option<Verified>> {
    let bytes = chunk.slice(at.clone())?;
    let apart = goes_apart(bytes.len(), chunk.bytes().len());
    Some(if apart { copies.verified(bytes, file) } else { Verified::check(file, bytes).ok() })
}

/// The spans that, in order, are bytes `range` of an entry that was found in a source's version.
pub fn spans(source: &Source, found: &Found, range: Range<u64>) -> Vec<Span> {
    let (entry, slices) = (found.entry(), found.slices());
    if let ([one], Some(hash)) = (slices, entry.hash)
        && one.chunk != hash
    {
        let Some(held) = ranges(slices, 0..entry.size).next() else { return Vec::new() };
        if range.is_empty() {
            return Vec::new();
        }
        // A file of one slice is at most 16 MiB.
        let cut = |x: u64| usize::try_from(x).unwrap_or(usize::MAX);
        let range = cut(range.start)..cut(range.end);
        let proven = Arc::clone(&source.proven);
        return vec![Span::Shared(Shared { ordinal: found.ordinal, hash, held, range, proven })];
    }
    ranges(slices, range).map(Span::Chunk).collect()
}

impl Span {
    /// The bytes, if they are in memory and few.
    pub fn ready(&self, server: &Server, sources: &Sources) -> Option<Cut> {
        match self {
            // What cannot be cut is read again the long way, which says what is wrong.
            Span::Chunk(r) => Cut::of(server, &cached(server, sources, r.slice.chunk)?, &r.range).ok(),
            Span::Shared(s) => {
                if let Some(alone) = cached(server, sources, s.hash) {
                    return Cut::of(server, &alone, &s.range).ok();
                }
                let known = s.within();
                if known.is_none() && s.held.range.len() > INLINE_HASH_BYTES {
                    return None;
                }
                let hit = cached(server, sources, s.held.slice.chunk)?;
                if let Some(at) = known {
                    return Cut::of(server, &hit, &at).ok();
                }
                let file = proved(&server.read_ahead.copies, s.hash, &hit.chunk, &s.held.range)??;
                s.proven.note(s.ordinal);
                Cut::of(server, &Hit { chunk: file, ..hit }, &s.range).ok()
            }
        }
    }

    /// The bytes.
    pub async fn read(self, server: &Server, sources: &Arc<Sources>) -> Answer<Cut> {
        match self {
            Span::Chunk(r) => Cut::of(server, &chunk(server, sources, r.slice.chunk).await?, &r.range),
            Span::Shared(s) => s.read(server, sources).await,
        }
    }
}

impl Shared {
    /// The bytes as a range of the chunk, where they were proved to be that.
    fn within(&self) -> Option<Range<usize>> {
        let Range { start, end } = self.held.range;
        let inside = self.range.end <= end - start && self.proven.has(self.ordinal);
        inside.then(|| start + self.range.start..start + self.range.end)
    }

    async fn read(&self, server: &Server, sources: &Arc<Sources>) -> Answer<Cut> {
        let fault = match self.from(server, sources, &self.held, true).await {
            Ok(cut) => return Ok(cut),
            Err(fault) if !elsewhere_helps(fault.code()) => return Err(fault),
            Err(fault) => fault,
        };
        let size = (self.held.range.end - self.held.range.start) as u64;
        let held = self.held.slice.chunk;
        for other in server.versions.elsewhere(sources, self.ordinal, 0..size, held).await {
            match self.from(server, sources, &other, false).await {
                Ok(cut) => return Ok(cut),
                Err(e) => tracing::debug!(error = %e, "another layout does not help"),
            }
        }
        Err(fault)
    }

    /// The bytes, from where the whole file is said to be, by its own layout (`own`) or another: by itself from its chunk
    /// on disk; from its chunk if that comes to stay; else only the file is brought, because a chunk for the sake of one
    /// file in forty would be read forty times.
    async fn from(
        &self,
        server: &Server,
        sources: &Arc<Sources>,
        held: &ChunkRange,
        own: bool,
    ) -> Answer<Cut> {
        let hash = self.hash;
        let key = |hash| StoreKey { domain: sources.domain.clone(), hash };
        let size = u32::try_from(held.range.len()).unwrap_or(u32::MAX);
        if cached(server, sources, held.slice.chunk).is_none() {
            let located = server.versions.locate(sources, held.slice.chunk).await?;
            let of = (held.slice.chunk, &located);
            if let Some(hit) = located_part(server, sources, of, &held.range, hash).await? {
                return Cut::of(server, &hit, &self.range);
            }
            let alone = server.store.has(&key(hash), size)
                || !server.store.would_keep(
                    &key(held.slice.chunk),
                    sources.number(),
                    located.len,
                    located.among(),
                );
            if alone && let Some(part) = located.part(&held.range) {
                let hit = located_chunk(server, sources, hash, &part, sources.number_alone()).await?;
                return Cut::of(server, &hit, &self.range);
            }
        }
        let hit = chunk(server, sources, held.slice.chunk).await?;
        if let Some(at) = self.within().filter(|_| own) {
            return Cut::of(server, &hit, &at);
        }
        let wrong = |what: &str| {
            server.versions.wrong.tables.fetch_add(1, Relaxed);
            let detail =
                format!("the placement of entry {} in chunk {} {what}", self.ordinal, held.slice.chunk);
            Fault::new(
                Code::TablesCorrupt,
                detail,
                "pack or index the dataset again; no wrong byte was delivered",
            )
        };
        let (whole, at) = (hit.chunk, held.range.clone());
        let checked = if at.len() <= INLINE_HASH_BYTES {
            proved(&server.read_ahead.copies, hash, &whole, &at)
        } else {
            let ahead = Arc::clone(&server.read_ahead);
            let check = tokio::task::spawn_blocking(move || proved(&ahead.copies, hash, &whole, &at));
            check.await.map_err(|e| Fault::new(Code::Internal, e.to_string(), "see the server's log"))?
        };
        let checked = checked.ok_or_else(|| wrong("reaches past its end"))?;
        let chunk = checked.ok_or_else(|| wrong("names other bytes"))?;
        if own {
            self.proven.note(self.ordinal);
        }
        Cut::of(server, &Hit { chunk, tier: hit.tier }, &self.range)
    }
}

/// Whether another layout of the root may still have the bytes.
fn elsewhere_helps(code: Code) -> bool {
    matches!(
        code,
        Code::OriginChanged
            | Code::OriginMissing
            | Code::OriginCorrupt
            | Code::OriginDenied
            | Code::TablesCorrupt
    )
}
