//! The cache of parts, of their leaves, of their rows of `chunks.parquet`, and of directories' paths.
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

use crate::chunk_index::IndexLeaf;
use crate::chunk_leaf::ChunkLeaf;
use crate::chunks::ChunkRow;
use crate::leaf::Leaf;
use crate::local::{Directory, LocalTable, LocalTables};
use crate::{LoadedPart, TableError};
use fletch_core::Hash;
use fletch_core::manifest::locate::DirId;
use futures::future::{BoxFuture, FutureExt, Shared, WeakShared};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The kind of a cached value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum CachedKind {
    /// A part and its placement.
    Part,
    /// A part's rows of `chunks.parquet`.
    Chunks,
    /// The directory of a local file.
    Directory(LocalTable),
    /// A leaf of a local file.
    Leaf(LocalTable, usize),
}

impl CachedKind {
    /// Whether the value comes from `chunks.parquet`.
    pub fn is_of_chunks(self) -> bool {
        match self {
            CachedKind::Part => false,
            CachedKind::Chunks => true,
            CachedKind::Directory(table) | CachedKind::Leaf(table, _) => table != LocalTable::Entries,
        }
    }
}

/// What the cache itself needs for a value, in bytes: its key, its place in a table, its place in an order.
const OVERHEAD: usize = 400;
/// The same for the path of a directory.
const PATH_OVERHEAD: usize = 250;
/// This share of the cache is for paths of directories. Whoever looks up a name needs its directory's path,
/// which is in a leaf of another name; and leaves would drive the paths out, being a hundred times as large.
const PATHS_SHARE: u64 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CacheKey {
    /// What [`crate::local::version_hash`] returns.
    pub version: Hash,
    pub kind: CachedKind,
    pub part: usize,
}

impl std::hash::Hash for CacheKey {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        // Some bytes of a secure hash tell versions apart; a look into the cache takes as long as its hash.
        if let Some(first) = self.version.0.first_chunk::<8>() {
            state.write_u64(u64::from_ne_bytes(*first));
        }
        self.kind.hash(state);
        self.part.hash(state);
    }
}

/// A cached value; its kind is the one in its key.
#[derive(Debug, Clone)]
pub(crate) enum Cached {
    Part(Arc<LoadedPart>),
    Chunks(Arc<Vec<ChunkRow>>),
    Directory(Arc<Directory>),
    Leaf(Arc<Leaf>),
    ChunkLeaf(Arc<ChunkLeaf>),
    IndexLeaf(Arc<IndexLeaf>),
}

/// A leaf that the cache keeps.
pub(crate) trait CachedLeaf: Sized {
    fn cached(leaf: Arc<Self>) -> Cached;
    fn of_cached(cached: Cached) -> Option<Arc<Self>>;
}

macro_rules! cached_leaf {
    ($leaf:ident, $kind:ident) => {
        impl CachedLeaf for $leaf {
            fn cached(leaf: Arc<Self>) -> Cached {
                Cached::$kind(leaf)
            }
            fn of_cached(cached: Cached) -> Option<Arc<Self>> {
                if let Cached::$kind(leaf) = cached { Some(leaf) } else { None }
            }
        }
    };
}
cached_leaf!(Leaf, Leaf);
cached_leaf!(ChunkLeaf, ChunkLeaf);
cached_leaf!(IndexLeaf, IndexLeaf);

impl Cached {
    fn footprint(&self) -> usize {
        let value = match self {
            Cached::Part(p) => p.footprint(),
            Cached::Chunks(rows) => rows.iter().map(ChunkRow::footprint).sum(),
            Cached::Directory(directory) => directory.footprint(),
            Cached::Leaf(leaf) => leaf.footprint(),
            Cached::ChunkLeaf(leaf) => leaf.footprint(),
            Cached::IndexLeaf(leaf) => leaf.footprint(),
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

/// A directory of a version that this process opened: the number of that opening, and the directory.
pub(crate) type DirKey = (u64, DirId);

struct Inner {
    values: moka::sync::Cache<CacheKey, Cached>,
    dir_paths: moka::sync::Cache<DirKey, Arc<str>>,
    versions_opened: AtomicU64,
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
        let dir_paths = moka::sync::Cache::builder()
            .max_capacity(bytes_max / PATHS_SHARE)
            .weigher(|_: &DirKey, path: &Arc<str>| {
                u32::try_from(PATH_OVERHEAD + path.len()).unwrap_or(u32::MAX)
            })
            .build();
        let values = moka::sync::Cache::builder()
            .max_capacity(bytes_max - bytes_max / PATHS_SHARE)
            // A walk uses a part a few times and never again. Moka's default policy prefers values that were
            // used often, and would load the part again for each of these uses.
            .eviction_policy(moka::policy::EvictionPolicy::lru())
            .weigher(|_: &CacheKey, value: &Cached| u32::try_from(value.footprint()).unwrap_or(u32::MAX))
            .build();
        let versions_opened = AtomicU64::new(0);
        let inner = Arc::new(Inner { values, dir_paths, versions_opened, loads: Mutex::default() });
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
        self.inner.dir_paths.run_pending_tasks();
        self.inner.values.weighted_size() + self.inner.dir_paths.weighted_size()
    }

    /// Returns a number for a version that is opened, which no other version of the process has.
    pub(crate) fn number_version(&self) -> u64 {
        self.inner.versions_opened.fetch_add(1, Relaxed)
    }

    pub(crate) fn dir_path(&self, dir: &DirKey) -> Option<Arc<str>> {
        self.inner.dir_paths.get(dir)
    }

    pub(crate) fn keep_dir_path(&self, dir: DirKey, path: Arc<str>) {
        self.inner.dir_paths.insert(dir, path);
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
