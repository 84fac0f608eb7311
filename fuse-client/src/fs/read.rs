//! Bytes of files: which chunks, from the store, in one reply; and what is brought before it is
//! asked for.
//!
//! Invariants
//! 1. (I1) every byte that leaves lies in a [`fletch_store::Verified`] chunk.
//! 2. A reply is as long as asked unless the file ends: the kernel would fill up with zeroes.
//! 3. Read-ahead never makes a reader wait: it takes a permit or is left out.

use super::error::FsError;
use super::sequence::Sequence;
use super::tree::Tree;
use bytes::{Bytes, BytesMut};
use fletch_core::manifest::locate::{ChunkRange, ranges};
use fletch_core::manifest::{LayoutKind, Slice};
use fletch_core::{Domain, Hash, StoreKey};
use fletch_store::{Fetch, FetchError, Hit, ReadError, Store};
use fletch_tables::version::Found;
use futures::future::{BoxFuture, try_join_all};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

/// A READ shorter than this at the start of a longer file comes from a program that reads in
/// small blocks: the kernel's read-ahead would ask three times for what fits in one answer.
const READ_BYTES_FULL: u64 = 128 << 10;
/// Files up to this size are pushed whole.
const PUSH_BYTES_WHOLE: u64 = 1 << 20;
/// Of longer files this much is pushed; by then the kernel's read-ahead has grown.
const PUSH_BYTES_HEAD: u64 = 512 << 10;
/// What is pushed ends at a multiple of this, or at the file's end: no page is pushed in part,
/// whatever its size is on this machine.
const PAGE_BYTES_MAX: u64 = 64 << 10;
/// The smallest page. A request that does not end at one reads around the page cache.
const PAGE_BYTES_MIN: u64 = 4 << 10;
/// Slices brought ahead of a sequential reader.
const AHEAD_SLICES: usize = 2;
/// Slices on their way ahead of all readers together.
const AHEAD_IN_FLIGHT: usize = 4;

/// Where chunks come from: a server, or a test.
pub trait ChunkSource: Send + Sync {
    /// Brings the bytes of a chunk of `len` bytes, which the store then checks. `attempt` > 0
    /// says that what was brought before was wrong.
    fn fetch(&self, hash: Hash, len: u32, attempt: u32) -> BoxFuture<'static, Result<Bytes, FetchError>>;
}

/// Bytes for the page cache beside those that were asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Push {
    /// Where in the file they begin; a page boundary past the end of the request.
    pub offset: u64,
    /// The bytes; they end at a page boundary or at the file's end.
    pub bytes: Bytes,
}

/// An answer to a READ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// What was asked for.
    pub bytes: Bytes,
    /// What may be put into the page cache first.
    pub push: Option<Push>,
}

/// What was counted; totals.
#[derive(Debug, Default)]
pub struct ReadCounters {
    /// READs answered.
    pub reads: AtomicU64,
    /// Bytes of answers.
    pub bytes: AtomicU64,
    /// Bytes of answers that came from the store's memory.
    pub bytes_memory: AtomicU64,
    /// Slices brought ahead of a reader.
    pub ahead: AtomicU64,
}

/// Reads files of one version.
pub struct Reader {
    tree: Tree,
    store: Arc<Store>,
    source: Arc<dyn ChunkSource>,
    domain: Domain,
    sequence: Sequence,
    ahead: Arc<Semaphore>,
    tasks: TaskTracker,
    counters: ReadCounters,
}

/// This build cannot read such a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("this build mounts index layouts only; mount the version by an index layout")]
pub struct UnreadableLayout;

impl Reader {
    /// Reads `tree`'s files through `store`. Read-ahead runs on `tasks`.
    ///
    /// # Errors
    /// [`UnreadableLayout`] for layouts whose chunks this build cannot measure.
    pub fn new(
        tree: Tree,
        store: Arc<Store>,
        source: Arc<dyn ChunkSource>,
        tasks: TaskTracker,
    ) -> Result<Self, UnreadableLayout> {
        // In an index a slice ends where its chunk ends; the length of a pack's chunk is not in
        // the tables a mount reads.
        if tree.version().layout_doc().params.kind != LayoutKind::Index {
            return Err(UnreadableLayout);
        }
        Ok(Reader {
            tree,
            store,
            source,
            domain: Domain::default_domain(),
            sequence: Sequence::default(),
            ahead: Arc::new(Semaphore::new(AHEAD_IN_FLIGHT)),
            tasks,
            counters: ReadCounters::default(),
        })
    }

    /// What was counted.
    #[must_use]
    pub fn counters(&self) -> &ReadCounters {
        &self.counters
    }

    /// Bytes `offset .. offset + size` of a file, fewer only at its end.
    ///
    /// # Errors
    /// [`FsError`].
    pub async fn read(&self, ino: u64, offset: u64, size: u32) -> Result<Answer, FsError> {
        let found = self.tree.file(ino).await?;
        let len = found.entry().size;
        let end = offset.saturating_add(u64::from(size)).min(len);
        self.counters.reads.fetch_add(1, Relaxed);
        if offset >= end {
            return Ok(Answer { bytes: Bytes::new(), push: None });
        }
        if found.slices().len() > 1 {
            self.look_ahead(ino, &found, offset, end);
        }
        let named = |error| FsError::Read { path: found.entry().path.to_owned(), error };
        let mut wanted = ranges(found.slices(), offset..end);
        let (first, second) = (wanted.next(), wanted.next());
        let (bytes, hit) = match (first, second) {
            (Some(one), None) => {
                let hit = self.chunk(one.slice).await.map_err(named)?;
                (cut(&hit, &one).map_err(named)?, Some(hit))
            }
            (Some(one), Some(two)) => {
                let all: Vec<ChunkRange> = [one, two].into_iter().chain(wanted).collect();
                let hits = try_join_all(all.iter().map(|r| self.chunk(r.slice))).await.map_err(named)?;
                let mut whole = BytesMut::with_capacity(size as usize);
                for (hit, range) in hits.iter().zip(&all) {
                    whole.extend_from_slice(&cut(hit, range).map_err(named)?);
                }
                (whole.freeze(), None)
            }
            // The placement was checked to cover the size, so this is a defect and not damage.
            (None, _) => return Err(named(ReadError::Lost)),
        };
        self.counters.bytes.fetch_add(bytes.len() as u64, Relaxed);
        if hit.as_ref().is_some_and(|h| h.tier == fletch_store::Tier::Memory) {
            self.counters.bytes_memory.fetch_add(bytes.len() as u64, Relaxed);
        }
        let push = match (offset, hit, found.slices()) {
            (0, Some(hit), [first, ..]) if end < len => push(&hit, *first, end, len),
            _ => None,
        };
        Ok(Answer { bytes, push })
    }

    async fn chunk(&self, slice: Slice) -> Result<Hit, ReadError> {
        let (key, len, fetch) = self.order(slice);
        self.store.read(key, len, fetch).await
    }

    fn order(&self, slice: Slice) -> (StoreKey, u32, Fetch) {
        let (hash, len) = (slice.chunk, slice.chunk_offset + slice.len);
        let source = Arc::clone(&self.source);
        let fetch: Fetch = Arc::new(move |attempt| source.fetch(hash, len, attempt));
        (StoreKey { domain: self.domain.clone(), hash }, len, fetch)
    }

    /// Brings the slices after `end` when the file is being read from front to back.
    fn look_ahead(&self, ino: u64, found: &Found, offset: u64, end: u64) {
        let slice_bytes = u64::from(self.tree.version().layout_doc().params.slice_bytes.max(1));
        if !self.sequence.enters(ino, offset, end, (end - 1) / slice_bytes) {
            return;
        }
        let len = found.entry().size;
        for next in ranges(found.slices(), end - 1..len).skip(1).take(AHEAD_SLICES) {
            let (key, len, fetch) = self.order(next.slice);
            if self.store.cached(&key).is_some() {
                continue;
            }
            let Ok(permit) = Arc::clone(&self.ahead).try_acquire_owned() else { return };
            let store = Arc::clone(&self.store);
            self.counters.ahead.fetch_add(1, Relaxed);
            self.tasks.spawn(async move {
                if let Err(error) = store.read(key, len, fetch).await {
                    // The reader will meet the same error itself, and its errno tells it.
                    tracing::debug!(%error, "read-ahead failed");
                }
                drop(permit);
            });
        }
    }
}

fn cut(hit: &Hit, range: &ChunkRange) -> Result<Bytes, ReadError> {
    hit.chunk.slice(range.range.clone()).ok_or(ReadError::Lost)
}

/// What to push after a READ of the first `end` bytes of a file of `len` bytes.
fn push(hit: &Hit, first: Slice, end: u64, len: u64) -> Option<Push> {
    if end >= READ_BYTES_FULL {
        return None;
    }
    let until = if len <= PUSH_BYTES_WHOLE { len } else { PUSH_BYTES_HEAD };
    let until = match until.min(u64::from(first.len)) {
        n if n == len => n,
        n => n / PAGE_BYTES_MAX * PAGE_BYTES_MAX,
    };
    let offset = end;
    if !offset.is_multiple_of(PAGE_BYTES_MIN) || offset >= until {
        return None;
    }
    let base = u64::from(first.chunk_offset);
    let at = |x: u64| usize::try_from(base + x).ok();
    let bytes = hit.chunk.slice(at(offset)?..at(until)?)?;
    Some(Push { offset, bytes })
}
