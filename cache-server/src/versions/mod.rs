//! Which versions there are, where their bytes lie, and how they are brought (`fill`).
//!
//! A root is known in a domain if the tables place of one of the domain's datasets has it. A
//! [`Source`] is one way to its bytes: (dataset, layout). A root has one open source at first, the
//! one that was resolved; others are looked for when that one fails.
//!
//! 1. (I7) Everything begins with (domain, root): a foreign root, an absent one and one whose
//!    dataset was unregistered take the same path to the same answer. What is kept in memory is
//!    kept for each domain and place apart, so that not even time tells what others read.
//! 2. Only registered URIs are read, and they are checked again when they are ([`Allowlist`]). What
//!    `layout.json` says of an origin is not believed.
//! 3. What was granted through a registration is no longer granted once it is gone.

mod allowlist;
pub mod blocks;
mod error;
mod fetch;
mod locate;
mod prove;
mod samples;
mod source;

pub use allowlist::{Allowlist, UriNotAllowed};
pub use error::VersionError;
pub use fetch::{ATTEMPTS, ChunkFetch, Located};
pub use prove::ProvenFiles;
pub use samples::{Samples, SamplesError};
pub use source::Source;

use crate::state::{Entry, Registered, Registrations};
use blocks::{Blocks, TableLocation};
use fletch_core::manifest::LayoutKind;
use fletch_core::{DatasetName, Domain, LayoutId, Root, TagName};
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
use tokio::{
    sync::{Mutex, OnceCell},
    time::Instant,
};
use tokio_util::task::TaskTracker;

/// How long an unknown root stays unknown without asking the origins again.
const UNKNOWN_TTL: Duration = Duration::from_secs(2);
/// Unknown roots remembered.
const UNKNOWN_MAX: u64 = 10_000;
/// Where a root was last seen; a hint only.
const HINTS_MAX: u64 = 100_000;
/// Datasets asked at once for an unknown root.
const SCAN_AT_ONCE: usize = 16;
/// Layouts of one root at one place that are tried.
const LAYOUTS_MAX: usize = 8;
/// The largest tag document that is read, in bytes.
const TAG_BYTES_MAX: u64 = 64 << 10;

/// Cases of wrong bytes, by where they came from.
#[derive(Debug, Default)]
pub struct Wrong {
    /// An object differs from its pin and from its hash.
    pub changed: AtomicU64,
    /// An object agrees with its pin and not with its hash.
    pub corrupt: AtomicU64,
    /// An indexed object is gone.
    pub missing: AtomicU64,
    /// Tables that do not fold into their root or layout, or cannot be read.
    pub tables: AtomicU64,
}

/// The ways to one root's bytes in one domain.
pub struct Sources {
    /// In which domain: what they bring is for nobody else.
    pub domain: Domain,
    root: Root,
    /// The one in use.
    pub first: Arc<Source>,
    /// Of its dataset, for the disk tier.
    number: DatasetId,
    /// Every other, once somebody had to look.
    others: Mutex<Others>,
}

/// What was found when somebody looked for other ways to a root.
#[derive(Default)]
struct Others {
    found: Arc<[Arc<Source>]>,
    looked: Option<Instant>,
}

impl Sources {
    /// The same version by one of its sources, whose chunks the disk tier keeps under a number of their own.
    #[must_use]
    pub fn beside(&self, source: &Arc<Source>, number: DatasetId) -> Arc<Sources> {
        Arc::new(Sources {
            domain: self.domain.clone(),
            root: self.root,
            first: Arc::clone(source),
            number,
            others: Mutex::default(),
        })
    }

    /// Under which number a file that is brought alone, without its chunk, stays: none for a sweep, no order of which would
    /// ever drop it.
    #[must_use]
    pub fn number_alone(&self) -> DatasetId {
        let own = DatasetId::of(&self.domain, self.first.dataset());
        if self.number == own { own } else { DatasetId::UNCACHED }
    }

    /// Whether they are still granted.
    #[must_use]
    pub fn stand(&self) -> bool {
        self.first.registered.stands()
    }
}

type Slot = Arc<OnceCell<Arc<Sources>>>;

/// See the module.
pub struct Versions {
    allowed: Allowlist,
    registrations: Arc<Registrations>,
    blocks: Blocks,
    parts: PartCache,
    open: Cache<(Domain, Root), Slot>,
    hints: Cache<(Domain, Root), (DatasetName, LayoutId)>,
    unknown: Cache<(Domain, Root), ()>,
    tasks: TaskTracker,
    /// Wrong bytes so far.
    pub wrong: Wrong,
}

impl Versions {
    /// Of `tables_bytes`, three quarters are for parts and a quarter for tables as they lie.
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
            blocks: Blocks::new(tables_bytes / 4, tasks.clone()),
            parts: PartCache::new(tables_bytes / 4 * 3),
            open: Cache::new(versions_max),
            hints: Cache::new(HINTS_MAX),
            unknown: Cache::builder().max_capacity(UNKNOWN_MAX).time_to_live(UNKNOWN_TTL).build(),
            tasks,
            wrong: Wrong::default(),
        })
    }

    /// The origins, for their numbers.
    #[must_use]
    pub fn origins(&self) -> &Origins {
        self.allowed.origins()
    }

    /// What may be registered.
    #[must_use]
    pub fn allowed(&self) -> &Allowlist {
        &self.allowed
    }

    /// Bytes of tables kept: (parts, blocks).
    #[must_use]
    pub fn table_memory(&self) -> (u64, u64) {
        (self.parts.bytes(), self.blocks.bytes())
    }

    /// Versions open now.
    #[must_use]
    pub fn open_count(&self) -> u64 {
        self.open.entry_count()
    }

    /// A dataset was registered: what the domain did not have it may have now, and there may be
    /// more sources of what it has. (What goes with a registration needs no word: see 3.)
    pub fn registered(&self, domain: &Domain) {
        for (key, _) in self.open.iter().filter(|(key, _)| key.0 == *domain) {
            self.open.invalidate(&*key);
        }
        for (key, ()) in self.unknown.iter().filter(|(key, ())| key.0 == *domain) {
            self.unknown.invalidate(&*key);
        }
    }

    /// What a tag of a dataset names now: read from its tables place at every call.
    ///
    /// # Errors
    /// [`VersionError`].
    pub async fn resolve_tag(
        self: &Arc<Self>,
        entry: &Arc<Registered>,
        tag: &TagName,
    ) -> Result<Arc<Source>, VersionError> {
        let doc = self.tag(entry, tag).await?;
        self.resolve(entry, doc.root, Some(doc.layout)).await
    }

    /// Content bytes of the version that `latest` of a dataset names, which need not be registered yet; 0
    /// where there is no such tag.
    ///
    /// # Errors
    /// [`VersionError`].
    pub async fn bytes_of_latest(&self, entry: &Entry) -> Result<u64, VersionError> {
        let doc = match self.tag(entry, &TagName::latest()).await {
            Err(VersionError::NotFound) => return Ok(0),
            doc => doc?,
        };
        let (tables, blocks, parts) = self.tables_scoped(entry)?;
        let place = TableLocation { blocks, origin: tables, root: doc.root, layout: doc.layout };
        Ok(Version::open(Arc::new(place), doc.root, doc.layout, parts).await?.manifest().bytes)
    }

    async fn tag(&self, entry: &Entry, tag: &TagName) -> Result<TagDoc, VersionError> {
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

    /// A root of a dataset, in the layout given or any it has.
    ///
    /// # Errors
    /// [`VersionError::NotFound`] when the dataset's tables place does not have it, and others.
    pub async fn resolve(
        self: &Arc<Self>,
        entry: &Arc<Registered>,
        root: Root,
        layout: Option<LayoutId>,
    ) -> Result<Arc<Source>, VersionError> {
        let key = (entry.domain.clone(), root);
        if let Some(sources) = self.open.get(&key).and_then(|slot| slot.get().cloned()) {
            let s = &sources.first;
            if Arc::ptr_eq(&s.registered, entry)
                && s.registered.stands()
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
        // OpenJob by the hint; an open one of another dataset or layout stays as it is.
        let sources = self.sources(&entry.domain, root).await?;
        if Arc::ptr_eq(&sources.first.registered, entry) && sources.first.version.layout() == layout {
            return Ok(Arc::clone(&sources.first));
        }
        self.open_source(entry, root, layout).await
    }

    /// The ways to a root's bytes.
    ///
    /// # Errors
    /// [`VersionError::NotFound`] for every root this domain does not have, and others.
    pub async fn sources(
        self: &Arc<Self>,
        domain: &Domain,
        root: Root,
    ) -> Result<Arc<Sources>, VersionError> {
        let key = (domain.clone(), root);
        if let Some(sources) = self.open.get(&key).and_then(|slot| slot.get().cloned()) {
            if sources.stand() {
                return Ok(sources);
            }
            self.open.invalidate(&key);
        }
        if self.unknown.contains_key(&key) {
            return Err(VersionError::NotFound);
        }
        let slot = self.open.get_with(key.clone(), Slot::default);
        // In a task of its own: whoever asked first may go away while others wait.
        let (this, of) = (Arc::clone(self), key.clone());
        let task = self.tasks.spawn(async move {
            slot.get_or_try_init(|| async {
                let first = this.find(&of.0, of.1).await?;
                let (domain, root) = of;
                let number = DatasetId::of(&domain, first.dataset());
                Ok(Arc::new(Sources { domain, root, first, number, others: Mutex::default() }))
            })
            .await
            .cloned()
        });
        let result = task.await.unwrap_or(Err(VersionError::Lost));
        // Its dataset may have gone while it was looked for.
        let result = result.and_then(|s| if s.stand() { Ok(s) } else { Err(VersionError::NotFound) });
        if result.is_err() {
            // An empty slot must not push an open version out.
            self.open.invalidate(&key);
        }
        match &result {
            Err(VersionError::NotFound) => self.unknown.insert(key, ()),
            Err(VersionError::Tables(e)) if !e.kind().retryable() => {
                self.wrong.tables.fetch_add(1, Relaxed);
            }
            _ => {}
        }
        result
    }

    /// The source of a root in one layout.
    ///
    /// # Errors
    /// [`VersionError::NotFound`] when no dataset of the domain has that layout, and others.
    pub async fn in_layout(&self, sources: &Sources, layout: LayoutId) -> Result<Arc<Source>, VersionError> {
        if sources.first.version.layout() == layout {
            return Ok(Arc::clone(&sources.first));
        }
        let of = |s: &Arc<Source>| s.registered.stands() && s.version.layout() == layout;
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
                // It may be there: "not found" would be a lie.
                Err(e) => failed = e,
            }
        }
        Err(failed)
    }

    /// For each dataset of the domain the sources of `root` that its tables place has.
    fn scan(
        &self,
        domain: &Domain,
        root: Root,
    ) -> impl futures::Stream<Item = Result<Vec<Arc<Source>>, VersionError>> + Send + '_ {
        stream::iter(self.registrations.list(domain))
            .map(move |entry| async move { self.open_layouts(&entry, root).await })
            .buffer_unordered(SCAN_AT_ONCE)
    }

    /// The sources of `root` that a dataset's tables place has: packs, which cost fewer requests,
    /// before indexes, and otherwise in order of their layouts' ids. One that cannot be opened is
    /// left out as long as there is another.
    async fn open_layouts(
        &self,
        entry: &Arc<Registered>,
        root: Root,
    ) -> Result<Vec<Arc<Source>>, VersionError> {
        let (mut out, mut failed) = (Vec::new(), None);
        for layout in self.layouts(entry, root).await? {
            match self.open_source(entry, root, layout).await {
                Ok(source) => out.push(source),
                Err(e) => {
                    tracing::warn!(%root, %layout, error = %e, "a layout cannot be opened");
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

    /// The layouts of `root` at a dataset's tables place, in order of their ids.
    async fn layouts(&self, entry: &Entry, root: Root) -> Result<Vec<LayoutId>, VersionError> {
        let tables = self.tables_of(entry)?;
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
        entry: &Arc<Registered>,
        root: Root,
        layout: LayoutId,
    ) -> Result<Arc<Source>, VersionError> {
        let (tables, blocks, parts) = self.tables_scoped(entry)?;
        let place = TableLocation { blocks: blocks.clone(), origin: tables.clone(), root, layout };
        let version = Version::open(Arc::new(place), root, layout, parts).await?;
        let data = self.allowed.open(&entry.domain, &entry.dataset.uri)?;
        Ok(Arc::new(Source::new(Arc::clone(entry), version, data, tables, blocks)))
    }

    /// A dataset's tables, and the room in memory that is theirs alone.
    fn tables_scoped(&self, entry: &Entry) -> Result<(Origin, Blocks, PartCache), VersionError> {
        let tables = self.tables_of(entry)?;
        let scope = format!("{}\0{}", entry.domain, tables.uri());
        Ok((tables, self.blocks.scoped(&scope), self.parts.scoped(&scope)))
    }

    fn tables_of(&self, entry: &Entry) -> Result<Origin, VersionError> {
        self.allowed.open(&entry.domain, &entry.dataset.tables)
    }

    /// Every source of a root but its first: as it was when somebody looked last, or looked for
    /// again if `fresh` is asked for and that was some time ago.
    async fn others(&self, sources: &Sources, fresh: bool) -> Arc<[Arc<Source>]> {
        let mut others = sources.others.lock().await;
        let again = match others.looked {
            None => true,
            Some(at) => fresh && at.elapsed() >= UNKNOWN_TTL,
        };
        if again {
            let mut all = Vec::new();
            let mut scan = Box::pin(self.scan(&sources.domain, sources.root));
            while let Some(found) = scan.next().await {
                match found {
                    Ok(found) => all.extend(found.into_iter().filter(|s| !s.is_same(&sources.first))),
                    Err(e) => tracing::debug!(error = %e, "a dataset could not be asked for another source"),
                }
            }
            *others = Others { found: all.into(), looked: Some(Instant::now()) };
        }
        Arc::clone(&others.found)
    }
}
