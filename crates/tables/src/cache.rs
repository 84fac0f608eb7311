//! The cache of parts, of their leaves, and of their rows of `chunks.parquet`.
//!
//! It is bounded in bytes and shared by all versions of a process. With local tables it has the leaves that
//! were used last; without them it has whole parts.
//!
//! Must never: let one tenant's reads show in another's. See [`PartCache::scoped`].
//!
//! Invariants
//! 1. A hit takes no lock of this module and awaits nothing.
//! 2. Concurrent requests for a part share one load. If every waiter goes away, the load is dropped and the
//!    next request starts a new one.
//! 3. Every waiter gets a load's error. The cache does not keep errors.

use crate::chunk_leaf::ChunkLeaf;
use crate::chunks::ChunkRow;
use crate::leaf::Leaf;
use crate::local::{Directory, LocalTables};
use crate::{LoadedPart, TableError};
use fletch_core::{Hash, LayoutId, Root};
use futures::future::{BoxFuture, FutureExt, Shared, WeakShared};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// The kind of a cached value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum CachedKind {
    /// A part and its placement.
    Part,
    /// A part's rows of `chunks.parquet`.
    Chunks,
    /// The directory of a part's local file of entries.
    EntriesDirectory,
    /// A leaf of that file.
    EntriesLeaf(usize),
    /// The directory of a part's local file of chunk rows.
    ChunksDirectory,
    /// A leaf of that file.
    ChunksLeaf(usize),
}

impl CachedKind {
    /// Whether the value comes from `chunks.parquet`.
    pub fn is_of_chunks(self) -> bool {
        matches!(self, CachedKind::Chunks | CachedKind::ChunksDirectory | CachedKind::ChunksLeaf(_))
    }
}

/// What the cache itself needs for a value, in bytes: its key, its place in a table, its place in an order.
const OVERHEAD: usize = 400;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CacheKey {
    pub scope: Hash,
    pub root: Root,
    pub layout: LayoutId,
    pub kind: CachedKind,
    pub part: usize,
}

/// A cached value; its kind is the one in its key.
#[derive(Debug, Clone)]
pub(crate) enum Cached {
    Part(Arc<LoadedPart>),
    Chunks(Arc<Vec<ChunkRow>>),
    Directory(Arc<Directory>),
    Leaf(Arc<Leaf>),
    ChunkLeaf(Arc<ChunkLeaf>),
}

impl Cached {
    fn footprint(&self) -> usize {
        let value = match self {
            Cached::Part(p) => p.footprint(),
            Cached::Chunks(rows) => rows.iter().map(ChunkRow::footprint).sum(),
            Cached::Directory(directory) => directory.footprint(),
            Cached::Leaf(leaf) => leaf.footprint(),
            Cached::ChunkLeaf(leaf) => leaf.footprint(),
        };
        OVERHEAD + value
    }
}

/// What a load returns.
pub(crate) struct Loaded {
    pub value: Cached,
    /// Whether the cache keeps the value. It need not if the value has a local file.
    pub keep: bool,
}

type Load = BoxFuture<'static, Result<Cached, TableError>>;

struct Inner {
    values: moka::sync::Cache<CacheKey, Cached>,
    /// Loads in progress. Each removes itself when it ends or is dropped.
    loads: Mutex<Loads>,
}

#[derive(Default)]
struct Loads {
    next_id: u64,
    by_key: HashMap<CacheKey, (u64, WeakShared<Load>)>,
}

/// A cache of parts, bounded in bytes. Clones share one cache.
#[derive(Clone)]
pub struct PartCache {
    inner: Arc<Inner>,
    local: Option<LocalTables>,
    scope: Hash,
}

impl std::fmt::Debug for PartCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PartCache").field("bytes", &self.inner.values.weighted_size()).finish()
    }
}

impl PartCache {
    /// Creates a cache of at most `bytes_max` bytes, by the parts' own estimate of their size.
    ///
    /// Parts that are being loaded, and parts that a caller holds, do not count.
    #[must_use]
    pub fn new(bytes_max: u64) -> Self {
        let values = moka::sync::Cache::builder()
            .max_capacity(bytes_max)
            // A walk uses a part a few times and never again. Moka's default policy prefers values that were
            // used often, and would load the part again for each of these uses.
            .eviction_policy(moka::policy::EvictionPolicy::lru())
            .weigher(|_: &CacheKey, value: &Cached| u32::try_from(value.footprint()).unwrap_or(u32::MAX))
            .build();
        let inner = Arc::new(Inner { values, loads: Mutex::default() });
        PartCache { inner, local: None, scope: Hash([0; 32]) }
    }

    /// Returns the cache with a directory where parts are kept once they were checked.
    #[must_use]
    pub fn with_local(self, local: Option<LocalTables>) -> Self {
        PartCache { local, ..self }
    }

    /// The directory where parts are kept.
    #[must_use]
    pub fn local(&self) -> Option<&LocalTables> {
        self.local.as_ref()
    }

    /// Returns a view of the cache that shares its bytes, and whose values no other scope can see.
    ///
    /// Two reasons: the rows of `chunks.parquet` are unsigned, so a scope must not believe another scope's
    /// rows; and a hit on another reader's part would reveal what that reader reads.
    #[must_use]
    pub fn scoped(&self, scope: &str) -> Self {
        PartCache { scope: Hash::of(scope.as_bytes()), ..self.clone() }
    }

    pub(crate) fn scope(&self) -> Hash {
        self.scope
    }

    /// Returns the scope of what no hash covers: that of one run of the index.
    pub(crate) fn scope_of_index(&self, indexed_at_ns: u64) -> Hash {
        Hash::of(&[&self.scope.as_bytes()[..], &indexed_at_ns.to_le_bytes()].concat())
    }

    /// The number of bytes that the cache holds now.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.inner.values.run_pending_tasks();
        self.inner.values.weighted_size()
    }

    pub(crate) fn get(&self, key: &CacheKey) -> Option<Cached> {
        self.inner.values.get(key)
    }

    pub(crate) fn insert(&self, key: CacheKey, value: Cached) {
        self.inner.values.insert(key, value);
    }

    pub(crate) fn remove(&self, key: &CacheKey) {
        self.inner.values.invalidate(key);
    }

    /// Returns the value of `key`. Calls `load` if the cache lacks it and no load of it is in progress.
    pub(crate) async fn get_or_load<F>(
        &self,
        key: CacheKey,
        load: impl FnOnce() -> F,
    ) -> Result<Cached, TableError>
    where
        F: Future<Output = Result<Loaded, TableError>> + Send + 'static,
    {
        if let Some(value) = self.get(&key) {
            return Ok(value);
        }
        let load = self.shared_load(key, load);
        load.await
    }

    fn shared_load<F>(&self, key: CacheKey, load: impl FnOnce() -> F) -> Shared<Load>
    where
        F: Future<Output = Result<Loaded, TableError>> + Send + 'static,
    {
        let mut loads = self.inner.loads.lock();
        if let Some(running) = loads.by_key.get(&key).and_then(|(_, weak)| weak.upgrade()) {
            return running;
        }
        let id = loads.next_id;
        loads.next_id += 1;
        let guard = LoadGuard { inner: Arc::clone(&self.inner), key, id };
        let load = load();
        let shared = async move {
            let result = load.await;
            if let Ok(Loaded { value, keep: true }) = &result {
                guard.inner.values.insert(guard.key, value.clone());
                guard.inner.values.run_pending_tasks();
            }
            drop(guard);
            result.map(|loaded| loaded.value)
        }
        .boxed()
        .shared();
        if let Some(weak) = shared.downgrade() {
            loads.by_key.insert(key, (id, weak));
        }
        shared
    }
}

/// Removes its load from the table of loads when the load ends or is dropped.
struct LoadGuard {
    inner: Arc<Inner>,
    key: CacheKey,
    id: u64,
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        let mut loads = self.inner.loads.lock();
        if loads.by_key.get(&self.key).is_some_and(|(id, _)| *id == self.id) {
            loads.by_key.remove(&self.key);
        }
    }
}
