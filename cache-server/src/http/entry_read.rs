//! Reads bytes of entries, through the chunks that hold them.
//!
//! A layout's placement of an entry is a claim. An entry that consists of whole chunks is proved by their
//! names. An entry that lies in a chunk with others (of a pack or a shard) is hashed by itself before it is
//! sent (I1), once for as long as the layout is open. If its chunk cannot be read, or proves the placement
//! wrong, the entry is read from the root's other layouts.
//!
//! A few bytes of a large chunk are copied out of it, so that a slow client does not hold the chunk in
//! memory (I6).

use super::{
    chunk_read::{Payer, cached_chunk, cost_of, has_chunk, read_chunk, read_located_chunk, read_part},
    error::{ApiError, ApiResult},
    response_body::{Charge, Piece},
};
use crate::{
    app::server::Server,
    data::{
        chunk_reads::PackedPart,
        read_ahead::READ_AHEAD_BYTES_MAX,
        versions::{ProvenFiles, Source, Sources},
    },
    tenancy::{
        accounting::Cost,
        tenants::{HeldMemory, bind_memory},
    },
};
use bytes::Bytes;
use fletch_api::Code;
use fletch_core::{
    Hash, StoreKey, Verified,
    manifest::{
        EntryKind, EntryRef, Slice,
        locate::{ChunkRange, ranges},
    },
};
use fletch_store::{Copies, Hit, Tier};
use fletch_tables::Found;
use futures::{Stream, StreamExt as _, TryStreamExt as _, stream};
use std::{ops::Range, sync::Arc, sync::atomic::Ordering::Relaxed};
use tokio::task::spawn_blocking;
use tokio_util::task::AbortOnDropHandle;

/// A longer file is hashed on a blocking thread.
const INLINE_HASH_BYTES_MAX: usize = 256 << 10;
/// How many spans of one file are read at once.
const SPANS_AT_ONCE: usize = 2;

/// Bytes of an entry that one chunk holds.
#[derive(Debug, Clone)]
pub enum Span {
    /// A range of a chunk. The chunk's name proves it.
    Chunk(ChunkRange),
    /// A range of a file that lies in a chunk with others. The file's hash proves it.
    PackedFile(PackedFile),
}

/// A range of a file that lies in a chunk with others.
#[derive(Debug, Clone)]
pub struct PackedFile {
    ordinal: u64,
    /// BLAKE3 of the whole file.
    hash: Hash,
    /// Where the layout says that the whole file lies.
    placement: ChunkRange,
    /// The bytes of the file that are read.
    range: Range<usize>,
    /// The proven files of the layout.
    proven: Arc<ProvenFiles>,
}

/// Verified bytes of a span, and the tier that they came from.
#[derive(Debug, Clone)]
pub struct SpanBytes {
    /// The bytes.
    pub bytes: Bytes,
    /// The tier.
    pub tier: Tier,
}

impl SpanBytes {
    /// Cuts bytes out of a chunk. `held` is the memory of the chunk, if a reply that sends it needs some.
    pub fn of(
        server: &Server,
        hit: &Hit,
        range: &Range<usize>,
        held: Option<Arc<HeldMemory>>,
    ) -> ApiResult<Self> {
        let chunk = &hit.chunk;
        let bytes = chunk.slice(range.clone()).ok_or_else(|| {
            let detail = format!("bytes {range:?} lie past the end of chunk {}", chunk.hash());
            let hint = "index the dataset again; no wrong byte was delivered";
            ApiError::new(Code::TablesCorrupt, detail, hint)
        })?;
        let copied = is_copied(bytes.len(), chunk.bytes().len());
        let bytes = if copied { server.read_ahead.copies.copy(bytes) } else { bind_memory(bytes, held) };
        Ok(SpanBytes { bytes, tier: hit.tier })
    }

    /// Returns the bytes as a piece of a body.
    pub fn into_piece(self, charge: &impl Fn(Cost) -> Charge) -> Piece {
        Piece::Content(self.bytes, charge(cost_of(self.tier)))
    }
}

/// Returns whether `bytes` bytes of a chunk of `chunk` bytes are copied out of it.
fn is_copied(bytes: usize, chunk: usize) -> bool {
    bytes as u64 <= READ_AHEAD_BYTES_MAX && bytes * 2 < chunk
}

/// Why a chunk does not prove a file.
enum WrongPlacement {
    PastTheEnd,
    OtherBytes,
}

/// Cuts a file out of its chunk and verifies it by its own hash.
fn verify_file(
    copies: &Copies,
    file: Hash,
    chunk: &Verified,
    at: &Range<usize>,
) -> Result<Verified, WrongPlacement> {
    let bytes = chunk.slice(at.clone()).ok_or(WrongPlacement::PastTheEnd)?;
    let copied = is_copied(bytes.len(), chunk.bytes().len());
    let file = if copied { copies.verified(bytes, file) } else { Verified::check(file, bytes).ok() };
    file.ok_or(WrongPlacement::OtherBytes)
}

/// Returns the content hash of an entry.
///
/// # Errors
/// [`Code::NotAFile`] for a symbolic link or an empty directory.
pub fn content_hash(entry: &EntryRef<'_>) -> ApiResult<Hash> {
    if let Some(hash) = entry.hash {
        return Ok(hash);
    }
    let (what, hint) = match entry.kind {
        EntryKind::Symlink => {
            ("a symbolic link", format!("it points to {:?}: request that path instead", entry.target))
        }
        _ => ("an empty directory", "it has no bytes to read".to_owned()),
    };
    Err(ApiError::new(Code::NotAFile, format!("{:?} is {what}", entry.path), hint))
}

/// Returns the spans that, in order, are bytes `range` of an entry of the source's version.
pub fn spans(source: &Source, found: &Found, range: Range<u64>) -> Vec<Span> {
    let (entry, slices) = (found.entry(), found.slices());
    if let ([one], Some(hash)) = (slices, entry.hash)
        && one.chunk != hash
    {
        let Some(placement) = ranges(slices, 0..entry.size).next() else { return Vec::new() };
        if range.is_empty() {
            return Vec::new();
        }
        // A file of one slice is at most 16 MiB.
        let to_usize = |x: u64| usize::try_from(x).unwrap_or(usize::MAX);
        let range = to_usize(range.start)..to_usize(range.end);
        let proven = Arc::clone(&source.proven);
        let ordinal = found.ordinal;
        return vec![Span::PackedFile(PackedFile { ordinal, hash, placement, range, proven })];
    }
    ranges(slices, range).map(Span::Chunk).collect()
}

/// Reads spans in order, [`SPANS_AT_ONCE`] at once.
pub fn read_spans(
    server: Arc<Server>,
    payer: Payer,
    sources: Arc<Sources>,
    spans: Vec<Span>,
) -> impl Stream<Item = ApiResult<SpanBytes>> + Send + 'static {
    let (tenants, tenant) = (Arc::clone(&server.tenants), payer.tenant.clone());
    let held = stream::iter(spans).then(move |span| {
        let (tenants, tenant) = (Arc::clone(&tenants), tenant.clone());
        // In order, so that no span waits for memory that a later one of the same reply has.
        async move {
            let held = match span.chunk_held() {
                Some((chunk, bytes)) => tenants.hold_span_memory(&tenant, chunk, bytes).await.map(Some),
                None => Ok(None),
            };
            (span, held)
        }
    });
    let reads = held.map(move |(span, held)| {
        let (server, payer, sources) = (Arc::clone(&server), payer.clone(), Arc::clone(&sources));
        async move { span.read(&server, &payer, &sources, held?).await }
    });
    reads.buffered(SPANS_AT_ONCE)
}

/// Reads spans of few bytes, in a task of their own.
///
/// The task copies bytes out of a chunk as soon as the chunk is there, however slowly the client reads.
pub async fn read_buffered(
    server: &Arc<Server>,
    payer: &Payer,
    sources: &Arc<Sources>,
    spans: Vec<Span>,
    charge: impl Fn(Cost) -> Charge,
) -> ApiResult<Vec<Piece>> {
    let reads = read_spans(Arc::clone(server), payer.clone(), Arc::clone(sources), spans);
    let reading = AbortOnDropHandle::new(server.tasks.spawn(reads.try_collect::<Vec<SpanBytes>>()));
    Ok(reading.await??.into_iter().map(|read| read.into_piece(&charge)).collect())
}

impl Span {
    /// Returns the chunk, and its bytes, that a reply holds while it sends the span, if they are many.
    ///
    /// Few bytes are copied, or bounded by the number of replies and by what is read ahead.
    fn chunk_held(&self) -> Option<(Hash, u64)> {
        let (range, slice) = match self {
            Span::Chunk(r) => (&r.range, &r.slice),
            Span::PackedFile(f) => (&f.range, &f.placement.slice),
        };
        (range.len() as u64 > READ_AHEAD_BYTES_MAX).then(|| (slice.chunk, u64::from(slice.len)))
    }

    /// Returns the bytes if they are in memory, and hashing them is cheap.
    pub fn try_read(&self, server: &Server, sources: &Sources) -> Option<SpanBytes> {
        match self {
            // If the bytes cannot be cut, `read` reads them again and returns the error.
            Span::Chunk(r) => {
                SpanBytes::of(server, &cached_chunk(server, sources, r.slice.chunk)?, &r.range, None).ok()
            }
            Span::PackedFile(f) => {
                if let Some(file) = cached_chunk(server, sources, f.hash) {
                    return SpanBytes::of(server, &file, &f.range, None).ok();
                }
                let proven = f.proven_range();
                if proven.is_none() && f.placement.range.len() > INLINE_HASH_BYTES_MAX {
                    return None;
                }
                let hit = cached_chunk(server, sources, f.placement.slice.chunk)?;
                if let Some(range) = proven {
                    return SpanBytes::of(server, &hit, &range, None).ok();
                }
                let copies = &server.read_ahead.copies;
                let file = verify_file(copies, f.hash, &hit.chunk, &f.placement.range).ok()?;
                f.proven.insert(f.ordinal);
                SpanBytes::of(server, &Hit { chunk: file, ..hit }, &f.range, None).ok()
            }
        }
    }

    /// Reads the bytes.
    pub async fn read(
        self,
        server: &Server,
        payer: &Payer,
        sources: &Arc<Sources>,
        held: Option<Arc<HeldMemory>>,
    ) -> ApiResult<SpanBytes> {
        match self {
            Span::Chunk(r) => {
                let hit = read_chunk(server, payer, sources, r.slice.chunk).await?;
                SpanBytes::of(server, &hit, &r.range, held)
            }
            Span::PackedFile(f) => f.read(server, payer, sources, held).await,
        }
    }
}

impl PackedFile {
    /// Returns the chunk in which the file lies.
    pub fn chunk(&self) -> &Slice {
        &self.placement.slice
    }

    /// Returns where the layout says that the file lies in its chunk.
    pub fn place(&self) -> &Range<usize> {
        &self.placement.range
    }

    /// Returns whether the file, or its chunk, is in memory or on disk.
    pub fn is_here(&self, server: &Server, sources: &Sources) -> bool {
        let size = u32::try_from(self.placement.range.len()).unwrap_or(u32::MAX);
        let slice = self.chunk();
        has_chunk(server, sources, self.hash, size)
            || has_chunk(server, sources, slice.chunk, slice.chunk_offset + slice.len)
    }

    /// Returns the bytes as a range of the chunk, if an earlier read proved the placement.
    fn proven_range(&self) -> Option<Range<usize>> {
        let Range { start, end } = self.placement.range;
        let inside = self.range.end <= end - start && self.proven.contains(self.ordinal);
        inside.then(|| start + self.range.start..start + self.range.end)
    }

    async fn read(
        &self,
        server: &Server,
        payer: &Payer,
        sources: &Arc<Sources>,
        held: Option<Arc<HeldMemory>>,
    ) -> ApiResult<SpanBytes> {
        let held = held.as_ref();
        let error = match self.read_from((server, payer), sources, (&self.placement, true), held).await {
            Ok(read) => return Ok(read),
            Err(error) if !another_layout_may_help(error.code()) => return Err(error),
            Err(error) => error,
        };
        let size = (self.placement.range.end - self.placement.range.start) as u64;
        let chunk = self.placement.slice.chunk;
        for other in server.versions.other_locations(sources, self.ordinal, 0..size, chunk).await {
            match self.read_from((server, payer), sources, (&other, false), held).await {
                Ok(read) => return Ok(read),
                Err(e) => tracing::debug!(error = %e, "another layout does not have the file either"),
            }
        }
        Err(error)
    }

    /// Reads the bytes from a placement of the whole file, by its own layout (`own`) or by another.
    ///
    /// In this order: the file alone from its chunk on disk; the whole chunk, if the disk would keep it; the
    /// file alone from the origin. Fetching a chunk that is not kept for one of its forty files would read
    /// the chunk forty times.
    async fn read_from(
        &self,
        (server, payer): (&Server, &Payer),
        sources: &Arc<Sources>,
        (placement, own): (&ChunkRange, bool),
        held: Option<&Arc<HeldMemory>>,
    ) -> ApiResult<SpanBytes> {
        let cut = |hit: &Hit, range: &Range<usize>| SpanBytes::of(server, hit, range, held.cloned());
        let hash = self.hash;
        let (chunk_hash, at) = (placement.slice.chunk, placement.range.clone());
        let key = |hash| StoreKey { domain: sources.domain.clone(), hash };
        let size = u32::try_from(at.len()).unwrap_or(u32::MAX);
        if cached_chunk(server, sources, chunk_hash).is_none() {
            let located = server.versions.locate(sources, chunk_hash).await?;
            if let Some(hit) = read_part(server, sources, (chunk_hash, &located), &at, hash).await? {
                return cut(&hit, &self.range);
            }
            let part_of = Some(PackedPart { chunk: chunk_hash, ordinal: self.ordinal });
            let is_elsewhere = || {
                server.store.needs_fetch(&key(chunk_hash), located.len)
                    && server.chunk_reads.is_elsewhere(payer.asker, sources, chunk_hash)
            };
            let would_keep = || {
                let (dataset, all) = (sources.dataset_id(), located.layout_bytes());
                server.store.would_keep(&key(chunk_hash), dataset, (size, located.len), all)
            };
            // If another server owns the chunk, that one decides whether it fetches the whole of it.
            let alone = server.store.has(&key(hash), size) || is_elsewhere() || !would_keep();
            if alone && let Some(part) = located.slice(&at) {
                let (dataset, of) = (sources.single_file_id(), (hash, part_of));
                let hit = read_located_chunk(server, payer, sources, of, &part, dataset).await?;
                return cut(&hit, &self.range);
            }
        }
        let hit = read_chunk(server, payer, sources, chunk_hash).await?;
        if let Some(range) = self.proven_range().filter(|_| own) {
            return cut(&hit, &range);
        }
        let whole = hit.chunk;
        let checked = if at.len() <= INLINE_HASH_BYTES_MAX {
            verify_file(&server.read_ahead.copies, hash, &whole, &at)
        } else {
            let budget = Arc::clone(&server.read_ahead);
            spawn_blocking(move || verify_file(&budget.copies, hash, &whole, &at)).await?
        };
        let chunk = checked.map_err(|why| {
            server.versions.corruption.tables.fetch_add(1, Relaxed);
            let why = match why {
                WrongPlacement::PastTheEnd => "reaches past the end of the chunk",
                WrongPlacement::OtherBytes => "names other bytes than the entry's",
            };
            let detail = format!("the placement of entry {} in chunk {chunk_hash} {why}", self.ordinal);
            let hint = "pack or index the dataset again; no wrong byte was delivered";
            ApiError::new(Code::TablesCorrupt, detail, hint)
        })?;
        if own {
            self.proven.insert(self.ordinal);
        }
        cut(&Hit { chunk, tier: hit.tier }, &self.range)
    }
}

/// Returns whether another layout of the root may still have the bytes.
fn another_layout_may_help(code: Code) -> bool {
    matches!(
        code,
        Code::OriginChanged
            | Code::OriginMissing
            | Code::OriginCorrupt
            | Code::OriginDenied
            | Code::OriginInvalid
            | Code::TablesCorrupt
    )
}
