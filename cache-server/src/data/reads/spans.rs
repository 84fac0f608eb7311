//! Reads bytes of entries, through the chunks that hold them.
//!
//! A layout's placement of an entry is a claim. An entry that consists of whole chunks is proved by their
//! names. An entry that lies in a chunk with others (of a pack or a shard) is hashed by itself before it is
//! sent (I1), once for as long as the layout is open. If its chunk cannot be read, or proves the placement
//! wrong, the entry is read from the root's other layouts.
//!
//! A few bytes of a large chunk are copied out of it, so that a slow client does not hold the chunk in
//! memory (I6).

use super::{ContentError, Payer, Reads};
use crate::{
    data::{
        chunk_reads::PackedPart,
        read_ahead::READ_AHEAD_BYTES_MAX,
        versions::{ProvenFiles, Source, Sources},
    },
    tenancy::tenants::{HeldMemory, bind_memory},
};
use bytes::Bytes;
use fletch_api::Code;
use fletch_core::{
    Hash, Verified,
    manifest::{
        EntryRef, Slice,
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
    pub bytes: Bytes,
    pub tier: Tier,
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
/// [`ContentError::NotAFile`] for a symbolic link or an empty directory.
pub fn content_hash(entry: &EntryRef<'_>) -> Result<Hash, ContentError> {
    entry.hash.ok_or_else(|| ContentError::not_a_file(entry))
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

    /// Returns the bytes as a range of the chunk, if an earlier read proved the placement.
    fn proven_range(&self) -> Option<Range<usize>> {
        let Range { start, end } = self.placement.range;
        let inside = self.range.end <= end - start && self.proven.contains(self.ordinal);
        inside.then(|| start + self.range.start..start + self.range.end)
    }
}

/// Where a file lies in its chunk, by its own layout or by another one of the root.
#[derive(Clone, Copy)]
struct FilePlace<'a> {
    at: &'a ChunkRange,
    is_own: bool,
}

impl Reads {
    /// Reads spans in order, [`SPANS_AT_ONCE`] at once.
    pub fn spans(
        self: &Arc<Self>,
        payer: &Payer,
        sources: &Arc<Sources>,
        spans: Vec<Span>,
    ) -> impl Stream<Item = Result<SpanBytes, ContentError>> + Send + use<> {
        let (tenants, tenant) = (Arc::clone(&self.tenants), payer.tenant.clone());
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
        let (reads, payer, sources) = (Arc::clone(self), payer.clone(), Arc::clone(sources));
        let reading = held.map(move |(span, held)| {
            let (reads, payer, sources) = (Arc::clone(&reads), payer.clone(), Arc::clone(&sources));
            async move { reads.span(&payer, &sources, span, held?).await }
        });
        reading.buffered(SPANS_AT_ONCE)
    }

    /// Reads spans of few bytes, in a task of their own.
    ///
    /// The task copies bytes out of a chunk as soon as the chunk is there, however slowly the client reads.
    ///
    /// # Errors
    /// [`ContentError`].
    pub async fn buffered(
        self: &Arc<Self>,
        payer: &Payer,
        sources: &Arc<Sources>,
        spans: Vec<Span>,
    ) -> Result<Vec<SpanBytes>, ContentError> {
        let reading = self.spans(payer, sources, spans).try_collect::<Vec<SpanBytes>>();
        AbortOnDropHandle::new(self.tasks.spawn(reading)).await?
    }

    /// Returns the bytes of a span if they are in memory, and hashing them is cheap.
    #[must_use]
    pub fn span_in_memory(&self, sources: &Sources, span: &Span) -> Option<SpanBytes> {
        match span {
            // If the bytes cannot be cut, `span` reads them again and returns the error.
            Span::Chunk(r) => self.cut(&self.in_memory(sources, r.slice.chunk)?, &r.range, None).ok(),
            Span::PackedFile(f) => {
                if let Some(file) = self.in_memory(sources, f.hash) {
                    return self.cut(&file, &f.range, None).ok();
                }
                let proven = f.proven_range();
                if proven.is_none() && f.placement.range.len() > INLINE_HASH_BYTES_MAX {
                    return None;
                }
                let hit = self.in_memory(sources, f.placement.slice.chunk)?;
                if let Some(range) = proven {
                    return self.cut(&hit, &range, None).ok();
                }
                let copies = &self.read_ahead.copies;
                let file = verify_file(copies, f.hash, &hit.chunk, &f.placement.range).ok()?;
                f.proven.insert(f.ordinal);
                self.cut(&Hit { chunk: file, ..hit }, &f.range, None).ok()
            }
        }
    }

    /// Reads the bytes of a span. `held` is the memory of its chunk, if a reply that sends it needs some.
    ///
    /// # Errors
    /// [`ContentError`].
    pub async fn span(
        &self,
        payer: &Payer,
        sources: &Arc<Sources>,
        span: Span,
        held: Option<Arc<HeldMemory>>,
    ) -> Result<SpanBytes, ContentError> {
        match span {
            Span::Chunk(r) if r.range.len() == r.slice.len as usize => {
                self.cut(&self.chunk(payer, sources, r.slice.chunk).await?, &r.range, held)
            }
            Span::Chunk(r) => {
                let found = self.chunk_range(payer, sources, r.slice.chunk, &r.range).await?;
                // A range before the first byte that was read lies past the end of it, too.
                let from = r.range.start.checked_sub(found.begins).unwrap_or(usize::MAX);
                self.cut(&found.hit, &(from..from.saturating_add(r.range.len())), held)
            }
            Span::PackedFile(f) => self.packed_file(payer, sources, &f, held).await,
        }
    }

    /// Returns whether a file of a pack, or its chunk, is in memory or on disk.
    #[must_use]
    pub fn has_packed_file(&self, sources: &Sources, file: &PackedFile) -> bool {
        let size = u32::try_from(file.placement.range.len()).unwrap_or(u32::MAX);
        let slice = file.chunk();
        self.has(sources, file.hash, size) || self.has(sources, slice.chunk, slice.chunk_offset + slice.len)
    }

    /// Cuts bytes out of a chunk.
    fn cut(
        &self,
        hit: &Hit,
        range: &Range<usize>,
        held: Option<Arc<HeldMemory>>,
    ) -> Result<SpanBytes, ContentError> {
        let chunk = &hit.chunk;
        let bytes = chunk.slice(range.clone()).ok_or_else(|| {
            ContentError::Tables(format!("bytes {range:?} lie past the end of chunk {}", chunk.hash()))
        })?;
        let copied = is_copied(bytes.len(), chunk.bytes().len());
        let bytes = if copied { self.read_ahead.copies.copy(bytes) } else { bind_memory(bytes, held) };
        Ok(SpanBytes { bytes, tier: hit.tier })
    }

    /// Reads a file of a pack by its own layout, or else by another layout of the root.
    async fn packed_file(
        &self,
        payer: &Payer,
        sources: &Arc<Sources>,
        file: &PackedFile,
        held: Option<Arc<HeldMemory>>,
    ) -> Result<SpanBytes, ContentError> {
        let own = FilePlace { at: &file.placement, is_own: true };
        let error = match self.packed_file_at(payer, sources, file, own, held.as_ref()).await {
            Ok(read) => return Ok(read),
            Err(error) if !another_layout_may_help(error.code()) => return Err(error),
            Err(error) => error,
        };
        let size = (file.placement.range.end - file.placement.range.start) as u64;
        let chunk = file.placement.slice.chunk;
        for other in self.versions.other_locations(sources, file.ordinal, 0..size, chunk).await {
            let place = FilePlace { at: &other, is_own: false };
            match self.packed_file_at(payer, sources, file, place, held.as_ref()).await {
                Ok(read) => return Ok(read),
                Err(e) => tracing::debug!(error = %e, "another layout does not have the file either"),
            }
        }
        Err(error)
    }

    /// Reads a file of a pack from one place.
    ///
    /// In this order: the file alone from its chunk on disk; the whole chunk, if the disk would keep it; the
    /// file alone from the origin. Fetching a chunk that is not kept for one of its forty files would read
    /// the chunk forty times.
    async fn packed_file_at(
        &self,
        payer: &Payer,
        sources: &Arc<Sources>,
        file: &PackedFile,
        place: FilePlace<'_>,
        held: Option<&Arc<HeldMemory>>,
    ) -> Result<SpanBytes, ContentError> {
        let (chunk_hash, at) = (place.at.slice.chunk, &place.at.range);
        if self.in_memory(sources, chunk_hash).is_none() {
            let located = self.versions.locate(sources, chunk_hash).await?;
            if let Some(hit) = self.part(sources, chunk_hash, &located, at, file.hash).await? {
                return self.cut(&hit, &file.range, held.cloned());
            }
            let size = u32::try_from(at.len()).unwrap_or(u32::MAX);
            let is_elsewhere = || {
                self.store.needs_fetch(&self.key(sources, chunk_hash), located.len)
                    && self.chunks.is_elsewhere(payer.asker, sources, chunk_hash)
            };
            let would_keep = || {
                let (dataset, all) = (sources.dataset_id(), located.layout_bytes());
                self.store.would_keep(&self.key(sources, chunk_hash), dataset, (size, located.len), all)
            };
            // If another server owns the chunk, that one decides whether it fetches the whole of it.
            let is_alone =
                self.store.has(&self.key(sources, file.hash), size) || is_elsewhere() || !would_keep();
            if is_alone && let Some(bytes) = located.slice(at) {
                let part = PackedPart { chunk: chunk_hash, ordinal: file.ordinal };
                let hit = self.file_alone(payer, sources, file.hash, part, &bytes).await?;
                return self.cut(&hit, &file.range, held.cloned());
            }
        }
        let hit = self.chunk(payer, sources, chunk_hash).await?;
        if place.is_own
            && let Some(range) = file.proven_range()
        {
            return self.cut(&hit, &range, held.cloned());
        }
        let chunk = self.file_of_chunk(file, hit.chunk, place.at).await?;
        if place.is_own {
            file.proven.insert(file.ordinal);
        }
        self.cut(&Hit { chunk, tier: hit.tier }, &file.range, held.cloned())
    }

    /// Cuts a file out of its chunk and verifies it, on a blocking thread if it is long.
    async fn file_of_chunk(
        &self,
        file: &PackedFile,
        chunk: Verified,
        place: &ChunkRange,
    ) -> Result<Verified, ContentError> {
        let (hash, at) = (file.hash, place.range.clone());
        let checked = if at.len() <= INLINE_HASH_BYTES_MAX {
            verify_file(&self.read_ahead.copies, hash, &chunk, &at)
        } else {
            let budget = Arc::clone(&self.read_ahead);
            spawn_blocking(move || verify_file(&budget.copies, hash, &chunk, &at)).await?
        };
        checked.map_err(|why| {
            self.versions.corruption.tables.fetch_add(1, Relaxed);
            let why = match why {
                WrongPlacement::PastTheEnd => "reaches past the end of the chunk",
                WrongPlacement::OtherBytes => "names other bytes than the entry's",
            };
            let (ordinal, chunk) = (file.ordinal, place.slice.chunk);
            ContentError::Tables(format!("the placement of entry {ordinal} in chunk {chunk} {why}"))
        })
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
