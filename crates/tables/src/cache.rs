//! What of versions is in memory: parts (and rows of `chunks.parquet`), bounded in bytes and
//! shared by all versions of a process.
//!
//! Invariants
//! 1. A hit takes no lock of ours and awaits nothing.
//! 2. A part that is being loaded is loaded once, however many ask for it; when all of them go
//!    away the load is dropped, and the next one to ask begins anew.
//! 3. An error reaches all who waited and is not kept.

use crate::TableError;
use crate::chunks::ChunkRow;
use fletch_core::manifest::{Part, Placed};
use fletch_core::{Hash, LayoutId, Root};
use futures::future::{BoxFuture, FutureExt, Shared, WeakShared};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// One part of a version and its placement, both checked.
#[derive(Debug, Clone)]
pub struct LoadedPart {
    /// The entries.
    pub entries: Part,
    /// Where their bytes are.
    pub placed: Placed,
}

impl LoadedPart {
    /// Approximate bytes of memory it holds.
    #[must_use]
    pub fn footprint(&self) -> usize {
        self.entries.footprint() + self.placed.footprint()
    }
}

/// What is kept: parts, and the origin rows of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Shelf {
    Part,
    Chunks,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CacheKey {
    pub scope: Hash,
    pub root: Root,
    pub layout: LayoutId,
    pub shelf: Shelf,
    pub part: usize,
}

#[derive(Debug, Clone)]
pub(crate) enum Kept {
    Part(Arc<LoadedPart>),
    Chunks(Arc<Vec<ChunkRow>>),
}

impl Kept {
    fn footprint(&self) -> usize {
        match self {
            Kept::Part(p) => p.footprint(),
            Kept::Chunks(rows) => rows.iter().map(ChunkRow::footprint).sum(),
        }
    }
}

type Flight = BoxFuture<'static, Result<Kept, TableError>>;

struct Inner {
    kept: moka::sync::Cache<CacheKey, Kept>,
    /// Loads in progress; each removes itself when it ends or is dropped.
    flights: Mutex<Flights>,
}

#[derive(Default)]
struct Flights {
    next: u64,
    by_key: HashMap<CacheKey, (u64, WeakShared<Flight>)>,
}

/// Parts in memory, bounded in bytes. Cloning shares it.
#[derive(Clone)]
pub struct PartCache {
    inner: Arc<Inner>,
    scope: Hash,
}

impl std::fmt::Debug for PartCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PartCache").field("bytes", &self.inner.kept.weighted_size()).finish()
    }
}

impl PartCache {
    /// A cache of at most `bytes_max` bytes (by the parts' own estimate). Parts that are being
    /// loaded or used are not counted.
    #[must_use]
    pub fn new(bytes_max: u64) -> Self {
        let kept = moka::sync::Cache::builder()
            .max_capacity(bytes_max)
            // A walk uses a part a few times and never again. Moka's default keeps what was
            // used more often before, and would load the part anew for each of those times.
            .eviction_policy(moka::policy::EvictionPolicy::lru())
            .weigher(|_: &CacheKey, kept: &Kept| u32::try_from(kept.footprint()).unwrap_or(u32::MAX))
            .build();
        PartCache { inner: Arc::new(Inner { kept, flights: Mutex::default() }), scope: Hash([0; 32]) }
    }

    /// The same room, for what is read in `scope` and seen nowhere else: rows of `chunks.parquet`
    /// are a place's own word, and another reader's parts would tell what that reader reads.
    #[must_use]
    pub fn scoped(&self, scope: &str) -> Self {
        PartCache { inner: Arc::clone(&self.inner), scope: Hash::of(scope.as_bytes()) }
    }

    pub(crate) fn scope(&self) -> Hash {
        self.scope
    }

    /// Bytes it holds now.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.inner.kept.run_pending_tasks();
        self.inner.kept.weighted_size()
    }

    pub(crate) fn get(&self, key: &CacheKey) -> Option<Kept> {
        self.inner.kept.get(key)
    }

    /// What is kept under `key`, loaded by `load` if nobody is loading it already.
    pub(crate) async fn get_or_load<F>(
        &self,
        key: CacheKey,
        load: impl FnOnce() -> F,
    ) -> Result<Kept, TableError>
    where
        F: Future<Output = Result<Kept, TableError>> + Send + 'static,
    {
        if let Some(kept) = self.get(&key) {
            return Ok(kept);
        }
        let flight = self.flight(key, load);
        flight.await
    }

    fn flight<F>(&self, key: CacheKey, load: impl FnOnce() -> F) -> Shared<Flight>
    where
        F: Future<Output = Result<Kept, TableError>> + Send + 'static,
    {
        let mut flights = self.inner.flights.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(flight) = flights.by_key.get(&key).and_then(|(_, weak)| weak.upgrade()) {
            return flight;
        }
        let id = flights.next;
        flights.next += 1;
        let landing = Landing { inner: Arc::clone(&self.inner), key, id };
        let load = load();
        let flight = async move {
            let result = load.await;
            if let Ok(kept) = &result {
                landing.inner.kept.insert(landing.key, kept.clone());
                landing.inner.kept.run_pending_tasks();
            }
            drop(landing);
            result
        }
        .boxed()
        .shared();
        if let Some(weak) = flight.downgrade() {
            flights.by_key.insert(key, (id, weak));
        }
        flight
    }
}

/// Takes its flight out of the table, whether the load ended or was dropped.
struct Landing {
    inner: Arc<Inner>,
    key: CacheKey,
    id: u64,
}

impl Drop for Landing {
    fn drop(&mut self) {
        let mut flights = self.inner.flights.lock().unwrap_or_else(PoisonError::into_inner);
        if flights.by_key.get(&self.key).is_some_and(|(id, _)| *id == self.id) {
            flights.by_key.remove(&self.key);
        }
    }
}
