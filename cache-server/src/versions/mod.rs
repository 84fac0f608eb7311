//! Opens dataset versions, locates their bytes and fetches them.
//!
//! A domain has a root if the tables of one of its datasets have it. A [`Source`] is one way to the root's
//! bytes: a dataset and a layout. A root is opened with one source. The server looks for the others when that
//! one fails.
//!
//! Invariants:
//! 1. (I7) Every lookup starts with (domain, root). A foreign root, an absent root and the root of an
//!    unregistered dataset take the same path to the same error. Memory is kept per domain and location, so
//!    that the time of a reply does not tell what other domains read.
//! 2. The server reads only registered URIs, and checks them again before it reads ([`Allowlist`]). It
//!    ignores the origin that `layout.json` names.
//! 3. Access through a registration ends when the dataset is unregistered.

mod allowlist;
mod error;
mod fetch;
mod locate;
mod location;
mod prove;
mod samples;
mod source;
pub mod table_blocks;

pub use allowlist::{Allowlist, UriNotAllowed};
pub use error::VersionError;
pub use fetch::{ATTEMPTS, ChunkFetch};
pub use location::LocatedChunk;
pub use prove::ProvenFiles;
pub use samples::{Samples, SamplesError};
pub use source::Source;

use crate::state::{Registration, RegistrationHandle, Registrations};
use fletch_core::manifest::LayoutKind;
use fletch_core::{DatasetName, Domain, Hash, LayoutId, Root, TagName};
use fletch_origin::{Origin, OriginError, Origins};
use fletch_store::DatasetId;
use fletch_tables::{PartCache, TagDoc, Version, paths};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use moka::sync::Cache;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use table_blocks::{TableBlocks, TableLocation};
use tokio::{
    sync::{Mutex, OnceCell},
    time::Instant,
};
use tokio_util::task::TaskTracker;

/// How long the server remembers that a domain has no such root, before it asks the origins again.
const UNKNOWN_TTL: Duration = Duration::from_secs(2);
/// The most unknown roots that are remembered.
const UNKNOWN_MAX: u64 = 10_000;
/// The most roots whose last dataset and layout are remembered, as hints.
const HINTS_MAX: u64 = 100_000;
/// How many datasets are searched for a root at once.
const SCAN_AT_ONCE: usize = 16;
/// The most layouts of one root at one location that are tried.
const LAYOUTS_MAX: usize = 8;
/// The longest tag document that is read, in bytes.
const TAG_BYTES_MAX: u64 = 64 << 10;

/// The number of wrong bytes found, by their source.
#[derive(Debug, Default)]
pub struct CorruptionCounts {
    /// Objects that differ from their pin and from their hash.
    pub changed: AtomicU64,
    /// Objects that agree with their pin, but not with their hash.
    pub corrupt: AtomicU64,
    /// Indexed objects that are gone.
    pub missing: AtomicU64,
    /// Tables that do not fold into their root or layout, or cannot be parsed.
    pub tables: AtomicU64,
}

/// The sources of one root in one domain.
pub struct Sources {
    /// The domain. Chunks that the sources fetch are shared with no other domain.
    pub domain: Domain,
    root: Root,
    /// The source in use.
    pub first: Arc<Source>,
    /// The id under which the disk tier keeps the chunks.
    dataset_id: DatasetId,
    /// The other sources, once a read looked for them.
    others: Mutex<OtherSources>,
}

/// The result of the latest search for other sources of a root.
#[derive(Default)]
struct OtherSources {
    found: Arc<[Arc<Source>]>,
    searched_at: Option<Instant>,
}

impl Sources {
    /// Returns the same version with `source` in use, whose chunks the disk tier keeps under `dataset_id`.
    #[must_use]
    pub fn with_source(&self, source: &Arc<Source>, dataset_id: DatasetId) -> Arc<Sources> {
        Arc::new(Sources {
            domain: self.domain.clone(),
            root: self.root,
            first: Arc::clone(source),
            dataset_id,
            others: Mutex::default(),
        })
    }

    /// Returns the id under which the disk tier keeps the chunks of this version.
    #[must_use]
    pub fn dataset_id(&self) -> DatasetId {
        self.dataset_id
    }

    /// Returns the length of a chunk of this version from memory.
    ///
    /// The outer `None` says that the tables are not in memory: await [`Versions::locate`].
    #[must_use]
    pub fn try_len(&self, hash: Hash) -> Option<Option<u32>> {
        self.first.try_len(hash)
    }

    /// Returns the id under which the disk keeps a file that is fetched without its chunk.
    ///
    /// A sweep keeps no such file, because its policy evicts whole units and would never evict the file.
    #[must_use]
    pub fn single_file_id(&self) -> DatasetId {
        let own = DatasetId::of(&self.domain, self.first.dataset());
        if self.dataset_id == own { own } else { DatasetId::UNCACHED }
    }

    /// Returns whether the dataset is still registered. If not, the access to the version has ended.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        self.first.registered.is_registered()
    }
}

type Slot = Arc<OnceCell<Arc<Sources>>>;

/// The open versions, and what opens them.
pub struct Versions {
    allowed: Allowlist,
    registrations: Arc<Registrations>,
    blocks: TableBlocks,
    parts: PartCache,
    open: Cache<(Domain, Root), Slot>,
    hints: Cache<(Domain, Root), (DatasetName, LayoutId)>,
    unknown: Cache<(Domain, Root), ()>,
    tasks: TaskTracker,
    /// CorruptionCounts bytes so far.
    pub corruption: CorruptionCounts,
}

impl Versions {
    /// Creates the room. Parsed parts get three quarters of `tables_bytes`, and raw blocks the rest.
    #[must_use]
    pub fn new(
        allowed: Allowlist,
        registrations: Arc<Registrations>,
        tables_bytes: u64,
        versions_max: u64,
        tasks: TaskTracker,
    ) -> Arc<Self> {
        Arc::new(Versions {
            allowed,
            registrations,
            blocks: TableBlocks::new(tables_bytes / 4, tasks.clone()),
            parts: PartCache::new(tables_bytes / 4 * 3),
            open: Cache::new(versions_max),
            hints: Cache::new(HINTS_MAX),
            unknown: Cache::builder().max_capacity(UNKNOWN_MAX).time_to_live(UNKNOWN_TTL).build(),
            tasks,
            corruption: CorruptionCounts::default(),
        })
    }

    /// Returns the origins, for their statistics.
    #[must_use]
    pub fn origins(&self) -> &Origins {
        self.allowed.origins()
    }

    /// Returns the rules for URIs.
    #[must_use]
    pub fn allowed(&self) -> &Allowlist {
        &self.allowed
    }

    /// Returns the bytes of cached tables: (parts, blocks).
    #[must_use]
    pub fn table_memory(&self) -> (u64, u64) {
        (self.parts.bytes(), self.blocks.bytes())
    }

    /// Returns the number of open versions.
    #[must_use]
    pub fn open_count(&self) -> u64 {
        self.open.entry_count()
    }

    /// Forgets what the domain has and does not have. Call it after a dataset was registered.
    ///
    /// The new dataset may have roots that were unknown, and other sources of open ones. Unregistering needs
    /// no such call (invariant 3).
    pub fn forget_unknown(&self, domain: &Domain) {
        for (key, _) in self.open.iter().filter(|(key, _)| key.0 == *domain) {
            self.open.invalidate(&*key);
        }
        for (key, ()) in self.unknown.iter().filter(|(key, ())| key.0 == *domain) {
            self.unknown.invalidate(&*key);
        }
    }

    /// Resolves a tag of a dataset, which is read from the dataset's tables at every call.
    ///
    /// # Errors
    /// [`VersionError::NotFound`] for an unknown tag; those of the origin and the tables.
    pub async fn resolve_tag(
        self: &Arc<Self>,
        entry: &Arc<RegistrationHandle>,
        tag: &TagName,
    ) -> Result<Arc<Source>, VersionError> {
        let doc = self.tag(entry, tag).await?;
        let source = self.resolve(entry, doc.root, Some(doc.layout)).await?;
        if source.tables.uri().is_plain_http() && !entry.tagged_layouts(doc.root).contains(&doc.layout) {
            self.record_tagged(entry, &doc).await;
        }
        Ok(source)
    }

    /// Records the version that a tag named. Without a listing, a restarted server finds it by this record.
    async fn record_tagged(&self, entry: &Arc<RegistrationHandle>, doc: &TagDoc) {
        let (registrations, handle) = (Arc::clone(&self.registrations), Arc::clone(entry));
        let (root, layout) = (doc.root, doc.layout);
        let recorded =
            tokio::task::spawn_blocking(move || registrations.record_tagged(&handle, root, layout)).await;
        // The reader needs no record now, so it gets its version all the same.
        let failed = match recorded {
            Ok(Ok(())) => return,
            Ok(Err(e)) => e.to_string(),
            Err(e) => e.to_string(),
        };
        let dataset = &entry.dataset.name;
        tracing::warn!(
            %dataset, %root, error = %failed,
            "cannot record a tagged version; after a restart, resolve its tag again"
        );
    }

    /// Returns the content bytes of a dataset's `latest` version, or 0 without that tag.
    ///
    /// The dataset need not be registered.
    ///
    /// # Errors
    /// Those of the origin and the tables.
    pub async fn bytes_of_latest(&self, entry: &Registration) -> Result<u64, VersionError> {
        let doc = match self.tag(entry, &TagName::latest()).await {
            Err(VersionError::NotFound) => return Ok(0),
            doc => doc?,
        };
        let (tables, blocks, parts) = self.tables_scoped(entry)?;
        let location = TableLocation { blocks, origin: tables, root: doc.root, layout: doc.layout };
        Ok(Version::open(Arc::new(location), doc.root, doc.layout, parts).await?.manifest().bytes)
    }

    async fn tag(&self, entry: &Registration, tag: &TagName) -> Result<TagDoc, VersionError> {
        let tables = self.tables_of(entry)?;
        let got = match tables.get(&paths::tag(tag), None, None).await {
            Err(OriginError::NotFound { .. }) => return Err(VersionError::NotFound),
            got => got?,
        };
        if got.bytes.len() as u64 > TAG_BYTES_MAX {
            let why = format!("tag {tag} has {} bytes", got.bytes.len());
            return Err(fletch_tables::TableError::Damaged { table: "tag", why }.into());
        }
        Ok(TagDoc::parse(&got.bytes)?)
    }

    /// Opens a root of a dataset, in the given layout or in any.
    ///
    /// # Errors
    /// [`VersionError::NotFound`] if the dataset's tables do not have the root; those of origin and tables.
    pub async fn resolve(
        self: &Arc<Self>,
        entry: &Arc<RegistrationHandle>,
        root: Root,
        layout: Option<LayoutId>,
    ) -> Result<Arc<Source>, VersionError> {
        let key = (entry.domain.clone(), root);
        if let Some(sources) = self.open.get(&key).and_then(|slot| slot.get().cloned()) {
            let s = &sources.first;
            if Arc::ptr_eq(&s.registered, entry)
                && s.registered.is_registered()
                && layout.is_none_or(|l| l == s.version.layout())
            {
                return Ok(Arc::clone(s));
            }
        }
        let layout = match layout {
            Some(layout) => layout,
            None => {
                let best = self.open_layouts(entry, root).await?.into_iter().next();
                best.ok_or(VersionError::NotFound)?.version.layout()
            }
        };
        self.hints.insert(key.clone(), (entry.dataset.name.clone(), layout));
        self.unknown.invalidate(&key);
        // Opens the root by the hint. A root that is open with another dataset or layout stays as it is.
        let sources = self.sources(&entry.domain, root).await?;
        if Arc::ptr_eq(&sources.first.registered, entry) && sources.first.version.layout() == layout {
            return Ok(Arc::clone(&sources.first));
        }
        self.open_source(entry, root, layout).await
    }

    /// Returns the sources of a root.
    ///
    /// # Errors
    /// [`VersionError::NotFound`] for every root that the domain does not have; those of origin and tables.
    pub async fn sources(
        self: &Arc<Self>,
        domain: &Domain,
        root: Root,
    ) -> Result<Arc<Sources>, VersionError> {
        let key = (domain.clone(), root);
        if let Some(sources) = self.open.get(&key).and_then(|slot| slot.get().cloned()) {
            if sources.is_registered() {
                return Ok(sources);
            }
            self.open.invalidate(&key);
        }
        if self.unknown.contains_key(&key) {
            return Err(VersionError::NotFound);
        }
        let slot = self.open.get_with(key.clone(), Slot::default);
        // In a task of its own: the first caller may disconnect while other callers wait.
        let (this, (domain, root)) = (Arc::clone(self), key.clone());
        let task = self.tasks.spawn(async move {
            slot.get_or_try_init(|| async {
                let first = this.find(&domain, root).await?;
                let dataset_id = DatasetId::of(&domain, first.dataset());
                Ok(Arc::new(Sources { domain, root, first, dataset_id, others: Mutex::default() }))
            })
            .await
            .cloned()
        });
        let result = task.await.unwrap_or(Err(VersionError::Lost));
        // The dataset may have been unregistered meanwhile.
        let result = result.and_then(|s| if s.is_registered() { Ok(s) } else { Err(VersionError::NotFound) });
        if result.is_err() {
            // An empty slot must not evict an open version.
            self.open.invalidate(&key);
        }
        match &result {
            Err(VersionError::NotFound) => self.unknown.insert(key, ()),
            Err(VersionError::Tables(e)) if !e.kind().retryable() => {
                self.corruption.tables.fetch_add(1, Relaxed);
            }
            _ => {}
        }
        result
    }

    /// Returns the source of a root in one layout.
    ///
    /// # Errors
    /// [`VersionError::NotFound`] if no dataset of the domain has that layout; those of origin and tables.
    pub async fn in_layout(&self, sources: &Sources, layout: LayoutId) -> Result<Arc<Source>, VersionError> {
        if sources.first.version.layout() == layout {
            return Ok(Arc::clone(&sources.first));
        }
        let of = |s: &Arc<Source>| s.registered.is_registered() && s.version.layout() == layout;
        for fresh in [false, true] {
            if let Some(found) = self.others(sources, fresh).await.iter().find(|s| of(s)) {
                return Ok(Arc::clone(found));
            }
        }
        Err(VersionError::NotFound)
    }

    async fn find(&self, domain: &Domain, root: Root) -> Result<Arc<Source>, VersionError> {
        if let Some((name, layout)) = self.hints.get(&(domain.clone(), root))
            && let Some(entry) = self.registrations.get(domain, &name)
        {
            return self.open_source(&entry, root, layout).await;
        }
        let mut failed = VersionError::NotFound;
        let mut scan = Box::pin(self.scan(domain, root));
        while let Some(found) = scan.next().await {
            match found {
                Ok(sources) => {
                    if let Some(first) = sources.into_iter().next() {
                        return Ok(first);
                    }
                }
                // The root may be there, so that "not found" would be wrong.
                Err(e) => failed = e,
            }
        }
        Err(failed)
    }

    /// Returns the sources of `root`, for each dataset of the domain.
    fn scan(
        &self,
        domain: &Domain,
        root: Root,
    ) -> impl futures::Stream<Item = Result<Vec<Arc<Source>>, VersionError>> + Send + '_ {
        stream::iter(self.registrations.list(domain))
            .map(move |entry| async move { self.open_layouts(&entry, root).await })
            .buffer_unordered(SCAN_AT_ONCE)
    }

    /// Opens the sources of `root` of one dataset, sorted by preference.
    ///
    /// Packs come before indexes, because they cost fewer requests; otherwise the layouts' ids decide. A
    /// source that cannot be opened is left out, unless it is the only one.
    async fn open_layouts(
        &self,
        entry: &Arc<RegistrationHandle>,
        root: Root,
    ) -> Result<Vec<Arc<Source>>, VersionError> {
        let (mut out, mut failed) = (Vec::new(), None);
        for layout in self.layouts(entry, root).await? {
            match self.open_source(entry, root, layout).await {
                Ok(source) => out.push(source),
                Err(e) => {
                    tracing::warn!(%root, %layout, error = %e, "cannot open a layout");
                    failed = Some(e);
                }
            }
        }
        out.sort_by_key(|s| s.version.layout_doc().params.kind != LayoutKind::Pack);
        match failed {
            Some(e) if out.is_empty() => Err(e),
            _ => Ok(out),
        }
    }

    /// Returns the layouts of `root` that a dataset's tables have, sorted by id.
    ///
    /// A plain HTTP server has no listing. There the recorded tags and the tag `latest` decide.
    async fn layouts(&self, entry: &RegistrationHandle, root: Root) -> Result<Vec<LayoutId>, VersionError> {
        let tables = self.tables_of(entry)?;
        if tables.uri().is_plain_http() {
            let mut found = entry.tagged_layouts(root);
            if found.is_empty() {
                match self.tag(entry, &TagName::latest()).await {
                    Ok(doc) if doc.root == root => found.push(doc.layout),
                    Ok(_) | Err(VersionError::NotFound) => {}
                    Err(e) => return Err(e),
                }
            }
            found.sort_unstable();
            found.truncate(LAYOUTS_MAX);
            return Ok(found);
        }
        let found: Vec<_> = tables
            .list(&paths::layouts(root))
            .try_filter_map(|meta| async move {
                let of = meta.path.strip_suffix("/layout.json").and_then(|p| p.rsplit('/').next());
                Ok(of.and_then(|id| id.parse::<LayoutId>().ok()))
            })
            .take(LAYOUTS_MAX)
            .collect()
            .await;
        let found: Result<Vec<_>, OriginError> = found.into_iter().collect();
        match found {
            Err(OriginError::NotFound { .. }) => Ok(Vec::new()),
            found => Ok(found.map_err(VersionError::Origin)?),
        }
    }

    async fn open_source(
        &self,
        entry: &Arc<RegistrationHandle>,
        root: Root,
        layout: LayoutId,
    ) -> Result<Arc<Source>, VersionError> {
        let (tables, blocks, parts) = self.tables_scoped(entry)?;
        let location = TableLocation { blocks: blocks.clone(), origin: tables.clone(), root, layout };
        let version = Version::open(Arc::new(location), root, layout, parts).await?;
        let data = self.allowed.open(&entry.domain, &entry.dataset.uri)?;
        Ok(Arc::new(Source::new(Arc::clone(entry), version, data, tables, blocks)))
    }

    /// Returns the origin of a dataset's tables, and the caches for that domain and location alone.
    fn tables_scoped(&self, entry: &Registration) -> Result<(Origin, TableBlocks, PartCache), VersionError> {
        let tables = self.tables_of(entry)?;
        let scope = format!("{}\0{}", entry.domain, tables.uri());
        Ok((tables, self.blocks.scoped(&scope), self.parts.scoped(&scope)))
    }

    fn tables_of(&self, entry: &Registration) -> Result<Origin, VersionError> {
        self.allowed.open(&entry.domain, &entry.dataset.tables)
    }

    /// Returns every source of a root except the one in use, from the latest search.
    ///
    /// `fresh` repeats a search that is older than [`UNKNOWN_TTL`].
    async fn others(&self, sources: &Sources, fresh: bool) -> Arc<[Arc<Source>]> {
        let mut others = sources.others.lock().await;
        let search = match others.searched_at {
            None => true,
            Some(at) => fresh && at.elapsed() >= UNKNOWN_TTL,
        };
        if search {
            let mut all = Vec::new();
            let mut scan = Box::pin(self.scan(&sources.domain, sources.root));
            while let Some(found) = scan.next().await {
                match found {
                    Ok(found) => all.extend(found.into_iter().filter(|s| !s.is_same(&sources.first))),
                    Err(e) => tracing::debug!(error = %e, "cannot search a dataset for another source"),
                }
            }
            *others = OtherSources { found: all.into(), searched_at: Some(Instant::now()) };
        }
        Arc::clone(&others.found)
    }
}
