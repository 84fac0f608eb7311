//! The read path: maps a READ to chunks, reads them from the store, and builds one reply. Also prefetches the
//! next slices of a file that a program reads from front to back.
//!
//! Invariants
//! 1. (I1) Every byte of a reply lies in a [`fletch_store::Verified`] chunk or whole file.
//! 2. A reply is as long as the request unless the file ends: the kernel would fill a shorter one with
//!    zeroes.
//! 3. Prefetch never makes a reader wait: a slice that gets no permit at once is not prefetched.

use super::error::FsError;
use super::lent::{Lent, LentPlace};
use super::sequential::{ReadPattern, SequentialReads};
use super::tree::Tree;
use crate::short_circuit::ShortCircuit;
use bytes::{Bytes, BytesMut};
use fletch_client::fallback::OriginLocation;
use fletch_core::groups::GROUPED_BYTES_MIN;
use fletch_core::manifest::locate::{ChunkRange, ranges};
use fletch_core::manifest::{LayoutKind, Slice};
use fletch_core::{Domain, Hash, Root, StoreKey, Verified};
use fletch_store::{
    AtOnce, Brought, DatasetId, Fetch, FetchError, Hit, Names, PartHit, ReadError, Store, Tier,
};
use fletch_tables::paths;
use fletch_tables::version::Found;
use futures::future::{BoxFuture, FutureExt as _, try_join_all};
use std::borrow::Cow;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

/// A shorter READ at the start of a longer file comes from a program that reads in small blocks. The kernel's
/// read-ahead would send three READs for bytes that fit in one reply.
const READ_BYTES_FULL: u64 = 128 << 10;
/// The mount pushes files up to this size whole.
const PUSH_BYTES_WHOLE: u64 = 1 << 20;
/// The mount pushes this much of a longer file. By then the kernel's read-ahead has grown.
const PUSH_BYTES_HEAD: u64 = 512 << 10;
/// The largest page size. A push ends at a multiple of it, or at the end of the file, so that no page is
/// pushed in part on any machine.
const PAGE_BYTES_MAX: u64 = 64 << 10;
/// The smallest page size. A request that does not end at a multiple of it bypasses the page cache.
const PAGE_BYTES_MIN: u64 = 4 << 10;
/// The longest file that is brought before a program asks for it. The bytes of longer ones cost more than
/// their requests.
const AHEAD_BYTES_MAX: u64 = 32 << 10;
/// The slices prefetched for one sequential reader.
const PREFETCH_SLICES: usize = 2;
/// The most slices being prefetched at once, for all readers together.
const PREFETCH_IN_FLIGHT_MAX: usize = 4;

/// Returns the dataset id of a version. In a node store each version that is read has a share of the disk of
/// its own.
#[must_use]
pub fn dataset_id(root: Root) -> DatasetId {
    let (first, _) = root.0.0.split_at(8);
    DatasetId(first.iter().fold(0, |n, b| n << 8 | u64::from(*b)))
}

/// The bytes to fetch, named by their hash: a chunk or a whole file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FetchRequest {
    Chunk {
        /// BLAKE3 of its bytes.
        hash: Hash,
        /// Its length in bytes.
        len: u32,
    },
    /// A file that shares a chunk with other files. It is fetched and hashed alone, without its neighbours.
    File {
        /// Its path in the version.
        path: Arc<str>,
        /// BLAKE3 of its content.
        hash: Hash,
        /// Its length in bytes.
        len: u32,
        /// The chunk, by which the server is chosen. `None` if it is not known.
        chunk: Option<Hash>,
    },
    /// A part of a chunk.
    Part {
        /// BLAKE3 of the whole chunk.
        chunk: Hash,
        /// The chunk's first byte that is wanted.
        from: u32,
        /// How many bytes are wanted.
        len: u32,
    },
    /// The hashes of the groups of a chunk.
    Groups {
        /// BLAKE3 of the chunk.
        chunk: Hash,
        /// The length of the hashes in bytes.
        len: u32,
    },
}

impl FetchRequest {
    /// Returns the hash of the bytes, or of the chunk that they are of; and their length.
    #[must_use]
    pub fn hash_and_len(&self) -> (Hash, u32) {
        match self {
            FetchRequest::Chunk { hash, len } | FetchRequest::File { hash, len, .. } => (*hash, *len),
            FetchRequest::Part { chunk, len, .. } | FetchRequest::Groups { chunk, len } => (*chunk, *len),
        }
    }
}

/// A source of bytes for the store: the server, the origin, the node store, or a test.
pub trait ChunkSource: Send + Sync {
    /// Fetches the bytes, which the store then hashes. `location` says where the origin has them. `attempt`
    /// is above 0 if an earlier fetch brought wrong bytes.
    fn fetch(
        &self,
        wanted: FetchRequest,
        location: &OriginLocation,
        attempt: u32,
    ) -> BoxFuture<'static, Result<Bytes, FetchError>>;

    /// Returns what the names of the chunks stand for, if they are the names of places, as in a draft.
    fn names(&self) -> Option<Arc<dyn Names>> {
        None
    }

    /// Returns whether the source has parts of chunks, and the hashes of their groups. Without them whole
    /// chunks are read.
    fn has_parts(&self) -> bool {
        false
    }

    /// Returns whether [`ChunkSource::hit`] may find bytes, on this thread and now.
    fn has_hits(&self) -> bool {
        false
    }

    /// Returns a way to read chunks in the files of a server of this machine, on this thread and now.
    fn short_circuit(&self) -> Option<ShortCircuit<'_>> {
        None
    }

    /// Fills the buffer with all of the bytes, which the store then hashes, if the source has them at hand.
    ///
    /// Returns false otherwise; the buffer then has arbitrary content. Blocks for a very short time only.
    fn hit(&self, _wanted: &FetchRequest, _buffer: &mut [u8]) -> bool {
        false
    }

    /// As [`ChunkSource::hit`], in memory of the source's own, which is soon used again.
    fn bring(&self, _wanted: &FetchRequest) -> Brought {
        Brought::NoMemory
    }

    /// As [`ChunkSource::bring`], for several at once. Returns one entry for each.
    fn bring_all(&self, wanted: &[FetchRequest]) -> Vec<Option<Bytes>> {
        vec![None; wanted.len()]
    }
}

/// Bytes to put into the page cache in addition to the reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PagePush {
    /// The offset in the file: a page boundary at the end of the request.
    pub offset: u64,
    /// The bytes, up to a page boundary or the end of the file.
    pub bytes: Bytes,
}

/// The reply to a READ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadReply {
    /// The requested bytes.
    pub bytes: Bytes,
    /// The bytes to put into the page cache before the reply.
    pub push: Option<PagePush>,
}

/// Counters of reads; totals.
#[derive(Debug, Default)]
pub struct ReadCounters {
    /// READs of files.
    pub reads: AtomicU64,
    /// Bytes of replies.
    pub bytes: AtomicU64,
    /// Bytes of replies from the store's memory.
    pub bytes_memory: AtomicU64,
    /// Bytes of replies from the store's disk.
    pub bytes_disk: AtomicU64,
    /// Bytes of replies from a fetch that another read had started.
    pub bytes_joined: AtomicU64,
    /// Bytes of replies from the read's own fetch. (I8) The four tiers add up to `bytes`.
    pub bytes_fetched: AtomicU64,
    /// Slices prefetched for sequential readers.
    pub prefetched: AtomicU64,
}

impl ReadCounters {
    fn count(&self, tier: Tier, bytes: &Bytes) {
        let of_tier = match tier {
            Tier::Memory => &self.bytes_memory,
            Tier::Disk => &self.bytes_disk,
            Tier::Flight => &self.bytes_joined,
            Tier::Origin | Tier::Bypass | Tier::Peer(_) => &self.bytes_fetched,
        };
        of_tier.fetch_add(bytes.len() as u64, Relaxed);
    }
}

/// What the store is asked for.
struct StoreRequest {
    key: StoreKey,
    len: u32,
    wanted: FetchRequest,
    fetch: Fetch,
}

/// Reads chunks of one version through the store.
#[derive(Clone)]
pub(super) struct StoreReads {
    pub store: Arc<Store>,
    dataset: DatasetId,
    /// What the names of the chunks stand for, if the version is a draft.
    names: Option<Arc<dyn Names>>,
}

impl StoreReads {
    /// Returns the key under which the store keeps a chunk.
    fn key(&self, name: &StoreKey) -> StoreKey {
        match self.names.as_ref().and_then(|names| names.content(name)) {
            Some(hash) => StoreKey { hash, ..name.clone() },
            None => name.clone(),
        }
    }

    async fn read(&self, name: StoreKey, len: u32, fetch: Fetch) -> Result<Hit, ReadError> {
        let key = self.key(&name);
        match &self.names {
            Some(names) if key == name => {
                self.store.learn(name, len, self.dataset, fetch, Arc::clone(names)).await
            }
            _ => self.store.read(key, len, self.dataset, fetch).await,
        }
    }
}

/// How a program asks for bytes.
#[derive(Clone, Copy)]
struct Asked {
    /// Whether the kernel keeps the pages.
    kernel_keeps: bool,
    /// Whether the program reads the file here and there.
    is_scattered: bool,
    /// Until where in the file bytes are pushed after this READ.
    until: u64,
}

/// Reads files of one version.
pub struct Reader {
    tree: Tree,
    pub(super) reads: StoreReads,
    pub(super) source: Arc<dyn ChunkSource>,
    domain: Domain,
    sequential: SequentialReads,
    prefetch_permits: Arc<Semaphore>,
    pub(super) tasks: TaskTracker,
    counters: Arc<ReadCounters>,
}

impl Reader {
    /// Returns a reader of the files of `tree` through `store`. Prefetch runs on `tasks`.
    #[must_use]
    pub fn new(tree: Tree, store: Arc<Store>, source: Arc<dyn ChunkSource>, tasks: TaskTracker) -> Self {
        let (dataset, names) = (dataset_id(tree.version().root()), source.names());
        Reader {
            reads: StoreReads { store, dataset, names },
            tree,
            source,
            domain: Domain::default_domain(),
            sequential: SequentialReads::default(),
            prefetch_permits: Arc::new(Semaphore::new(PREFETCH_IN_FLIGHT_MAX)),
            tasks,
            counters: Arc::default(),
        }
    }

    /// Returns the same reader with other counters.
    #[must_use]
    pub fn with_counters(self, counters: Arc<ReadCounters>) -> Self {
        Reader { counters, ..self }
    }

    #[must_use]
    pub fn counters(&self) -> &Arc<ReadCounters> {
        &self.counters
    }

    /// Reads bytes `offset .. offset + size` of a file, fewer only at its end. The kernel keeps their pages.
    ///
    /// # Errors
    /// [`FsError`].
    pub async fn read(&self, ino: u64, offset: u64, size: u32) -> Result<ReadReply, FsError> {
        self.read_for(ino, offset, size, true).await
    }

    /// As [`Reader::read`], for a direct READ, whose pages the kernel does not keep.
    ///
    /// # Errors
    /// [`FsError`].
    pub async fn read_direct(&self, ino: u64, offset: u64, size: u32) -> Result<ReadReply, FsError> {
        self.read_for(ino, offset, size, false).await
    }

    async fn read_for(
        &self,
        ino: u64,
        offset: u64,
        size: u32,
        kernel_keeps: bool,
    ) -> Result<ReadReply, FsError> {
        let found = self.tree.file(ino).await?;
        let len = found.entry().size;
        let end = offset.saturating_add(u64::from(size)).min(len);
        self.counters.reads.fetch_add(1, Relaxed);
        if offset >= end {
            return Ok(ReadReply { bytes: Bytes::new(), push: None });
        }
        let pattern = self.pattern(ino, &found, offset, end);
        if pattern.enters_slice && found.slices().len() > 1 {
            self.prefetch_slices(&found, end);
        }
        let until = if offset == 0 { pushed_until(end, len) } else { end };
        let how = Asked { kernel_keeps, is_scattered: pattern.is_scattered, until };
        let named = |error| FsError::Read { path: found.entry().path.to_owned(), error };
        let (slices, shared) = slices_to_read(&found);
        let mut wanted = ranges(&slices, offset..end);
        let (first, second) = (wanted.next(), wanted.next());
        let (bytes, hit) = match (first, second) {
            (Some(one), None) => {
                let hit = self.bytes(&found, &one, shared, how).await.map_err(named)?;
                (self.cut(&hit, &one).map_err(named)?, Some(hit))
            }
            (Some(one), Some(two)) => {
                let all: Vec<ChunkRange> = [one, two].into_iter().chain(wanted).collect();
                let hits = all.iter().map(|r| self.bytes(&found, r, None, how));
                let hits = try_join_all(hits).await.map_err(named)?;
                let mut whole = BytesMut::with_capacity(size as usize);
                for (hit, range) in hits.iter().zip(&all) {
                    whole.extend_from_slice(&self.cut(hit, range).map_err(named)?);
                }
                (whole.freeze(), None)
            }
            // The tables were checked: slices cover the size. So this is a defect, not damage.
            (None, _) => return Err(named(ReadError::Lost)),
        };
        self.counters.bytes.fetch_add(bytes.len() as u64, Relaxed);
        let push = match (offset, hit, &*slices) {
            (0, Some(hit), [first, ..]) if end < len => push(&hit, *first, end, len),
            _ => None,
        };
        Ok(ReadReply { bytes, push })
    }

    /// Returns the inodes and the bytes of those of the files that are short and that the source has at
    /// hand. Blocks for a very short time only.
    #[must_use]
    pub fn bring_files(&self, inodes: impl Iterator<Item = u64>) -> Vec<(u64, Verified)> {
        if !self.source.has_hits() {
            return Vec::new();
        }
        let (mut files, mut wanted) = (Vec::new(), Vec::new());
        for ino in inodes {
            let Some(Ok(found)) = self.tree.file(ino).now_or_never() else { continue };
            let (len, (slices, shared)) = (found.entry().size, slices_to_read(&found));
            if !(1..=AHEAD_BYTES_MAX).contains(&len) {
                continue;
            }
            let mut ranges = ranges(&slices, 0..len);
            if let (Some(whole), None) = (ranges.next(), ranges.next()) {
                wanted.push(self.store_request(&found, &whole, shared).wanted);
                files.push(ino);
            }
        }
        let brought = self.source.bring_all(&wanted).into_iter().zip(&wanted);
        let checked = brought.map(|(bytes, wanted)| Verified::check(wanted.hash_and_len().0, bytes?).ok());
        files.into_iter().zip(checked).filter_map(|(ino, file)| Some((ino, file?))).collect()
    }

    async fn bytes(
        &self,
        found: &Found,
        of: &ChunkRange,
        shared: Option<Arc<str>>,
        how: Asked,
    ) -> Result<PartHit, ReadError> {
        let lent = match self.lent(found, of, shared.is_some(), how.until) {
            Some(Lent::OnDisk(bytes)) => self.read_lent(bytes).await,
            Some(Lent::Here(part)) => Some(part),
            None => None,
        };
        if let Some(part) = lent {
            return Ok(part);
        }
        if how.is_scattered
            && shared.is_none()
            && let Some(part) = self.part(found, of).await?
        {
            return Ok(part);
        }
        let StoreRequest { key, len, wanted, fetch } = self.store_request(found, of, shared);
        if !self.source.has_hits() {
            return Ok(PartHit { hit: self.reads.read(key, len, fetch).await?, begins: 0 });
        }
        // Nobody reads bytes again of which the kernel keeps all pages.
        let is_whole = of.range.start == 0 && u32::try_from(of.range.end).is_ok_and(|end| end == len);
        let keep = !(is_whole && how.kernel_keeps);
        let place = LentPlace::default();
        let find_place = || {
            if let FetchRequest::Chunk { hash, len } = &wanted {
                self.find_place(*hash, *len, &place);
            }
        };
        let mut bring = || {
            let brought = self.source.bring(&wanted);
            if matches!(brought, Brought::Nothing) {
                find_place();
            }
            brought
        };
        let mut fill = |buffer: &mut [u8]| {
            let is_filled = self.source.hit(&wanted, buffer);
            if !is_filled {
                find_place();
            }
            is_filled
        };
        let fetch = self.fetch_at(&place, key.hash, fetch);
        let at_once = AtOnce { bring: Some(&mut bring), fill: &mut fill, keep };
        let hit = self.reads.store.read_with(key, len, self.reads.dataset, fetch, Some(at_once)).await?;
        Ok(PartHit { hit, begins: 0 })
    }

    fn cut(&self, part: &PartHit, range: &ChunkRange) -> Result<Bytes, ReadError> {
        let bytes = part.slice(&range.range).ok_or(ReadError::Lost)?;
        self.counters.count(part.hit.tier, &bytes);
        Ok(bytes)
    }

    /// Records a READ, if the file is long enough for it to matter how a program reads it.
    fn pattern(&self, ino: u64, found: &Found, offset: u64, end: u64) -> ReadPattern {
        if found.entry().size < u64::from(GROUPED_BYTES_MIN) {
            return ReadPattern { enters_slice: false, is_scattered: false };
        }
        let slice_bytes = u64::from(self.tree.version().layout_doc().params.slice_bytes.max(1));
        self.sequential.note(ino, offset, end, (end - 1) / slice_bytes)
    }

    /// Returns what to ask the store for a slice: a chunk that ends where the slice ends, or, if the path of
    /// its file is given, that file alone.
    fn store_request(&self, found: &Found, of: &ChunkRange, shared: Option<Arc<str>>) -> StoreRequest {
        let (hash, len) = (of.slice.chunk, of.slice.chunk_offset + of.slice.len);
        let location = self.origin_location(found, of);
        let wanted = match shared {
            Some(path) => {
                FetchRequest::File { path, hash, len, chunk: found.slices().first().map(|s| s.chunk) }
            }
            None => FetchRequest::Chunk { hash, len },
        };
        let (source, asked) = (Arc::clone(&self.source), wanted.clone());
        let fetch: Fetch = Arc::new(move |attempt| source.fetch(asked.clone(), &location, attempt));
        StoreRequest { key: self.key(hash), len, wanted, fetch }
    }

    /// Returns the key of a chunk, or of a place in a draft.
    pub(super) fn key(&self, hash: Hash) -> StoreKey {
        StoreKey { domain: self.domain.clone(), hash }
    }

    /// Returns where the origin has a slice: the object of the chunk for a small file of a pack, else the
    /// file's own object.
    pub(super) fn origin_location(&self, found: &Found, of: &ChunkRange) -> OriginLocation {
        let params = &self.tree.version().layout_doc().params;
        match (params.kind, found.slices()) {
            (LayoutKind::Pack, [one]) if one.len <= params.slice_bytes => OriginLocation::TablesObject {
                key: paths::chunk(one.chunk),
                offset: u64::from(one.chunk_offset),
            },
            _ => {
                // The chunk is a contiguous part of its file, from the chunk's first byte.
                let offset = of.begin.saturating_sub(u64::from(of.slice.chunk_offset));
                OriginLocation::DatasetObject { path: found.entry().path.to_owned(), offset }
            }
        }
    }

    /// Prefetches the slices after `end`, for a program that reads the file from front to back.
    fn prefetch_slices(&self, found: &Found, end: u64) {
        let len = found.entry().size;
        for next in ranges(found.slices(), end - 1..len).skip(1).take(PREFETCH_SLICES) {
            let StoreRequest { key, len, fetch, .. } = self.store_request(found, &next, None);
            let lent = || self.source.short_circuit()?.chunk(next.slice.chunk, Some(len))?.read_ahead().ok();
            if self.reads.store.cached(&self.reads.key(&key)).is_some() || lent().is_some() {
                continue;
            }
            let Ok(permit) = Arc::clone(&self.prefetch_permits).try_acquire_owned() else { return };
            let reads = self.reads.clone();
            self.counters.prefetched.fetch_add(1, Relaxed);
            self.tasks.spawn(async move {
                if let Err(error) = reads.read(key, len, fetch).await {
                    // The reader meets the same error itself and reports it.
                    tracing::debug!(%error, "prefetch failed");
                }
                drop(permit);
            });
        }
    }
}

/// Returns the slices to read for an entry. A file that shares a chunk with others becomes one slice named by
/// the hash of its content, and is fetched by its path. To check its bytes, the mount then needs neither the
/// length of the chunk nor the other files in it.
fn slices_to_read(found: &Found) -> (Cow<'_, [Slice]>, Option<Arc<str>>) {
    let entry = found.entry();
    if let ([one], Some(hash)) = (found.slices(), entry.hash)
        && one.chunk != hash
    {
        let slice = Slice { chunk: hash, chunk_offset: 0, len: one.len };
        return (Cow::Owned(vec![slice]), Some(entry.path.into()));
    }
    (Cow::Borrowed(found.slices()), None)
}

/// Returns until where a file of `len` bytes is pushed after a READ of its first `end` bytes.
fn pushed_until(end: u64, len: u64) -> u64 {
    match len {
        _ if end >= READ_BYTES_FULL => end,
        ..=PUSH_BYTES_WHOLE => len,
        _ => PUSH_BYTES_HEAD,
    }
}

/// Returns what to push after a READ of the first `end` bytes of a file of `len` bytes.
fn push(part: &PartHit, first: Slice, end: u64, len: u64) -> Option<PagePush> {
    let until = match pushed_until(end, len).min(u64::from(first.len)) {
        n if n == len => n,
        n => n / PAGE_BYTES_MAX * PAGE_BYTES_MAX,
    };
    let offset = end;
    if !offset.is_multiple_of(PAGE_BYTES_MIN) || offset >= until {
        return None;
    }
    let base = u64::from(first.chunk_offset);
    let at = |x: u64| usize::try_from(base + x).ok();
    let bytes = part.slice(&(at(offset)?..at(until)?))?;
    Some(PagePush { offset, bytes })
}
