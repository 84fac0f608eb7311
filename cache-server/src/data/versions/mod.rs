//! Opens dataset versions, locates their bytes and fetches them.
//!
//! A domain has a root if the tables of one of its datasets have it. A [`Source`] is one way to the root's
//! bytes: a dataset and a layout. A root is opened with one source, that of the dataset which the reader
//! named. The server looks for the others when that one fails or is slow, and leaves an origin alone that
//! does not answer (`breaker.rs`).
//!
//! Invariants:
//! 1. (I7) Every lookup starts with (domain, root). A foreign root, an absent root and the root of an
//!    unregistered dataset take the same path to the same error. Memory is kept per domain and location, so
//!    that the time of a reply does not tell what other domains read.
//! 2. The server reads only registered URIs, and checks them again before it reads ([`Allowlist`]). It
//!    ignores the origin that `layout.json` names.
//! 3. Access through a registration ends when the dataset is unregistered.

mod allowlist;
mod breaker;
mod changed_objects;
mod condition;
mod error;
mod fetch;
mod home;
mod latest;
mod learned_files;
pub mod local_tables;
mod locate;
mod location;
mod lookups;
mod open;
mod patience;
mod prove;
mod race;
mod recent_tags;
mod renewed_pins;
mod samples;
mod search;
mod source;
mod sources;
pub mod table_blocks;

pub use allowlist::{Allowlist, UriNotAllowed};
pub use breaker::BreakerState;
pub use changed_objects::ChangedObjects;
pub use condition::ConditionView;
pub use error::VersionError;
pub use fetch::{ATTEMPTS, ChunkFetch};
pub use home::{Home, HomeCounts, HomeOrigin};
pub use locate::AskTables;
pub use location::LocatedChunk;
pub use prove::ProvenFiles;
pub use renewed_pins::RenewedPins;
pub use samples::{Samples, SamplesError};
pub use source::Source;
pub use sources::{Reader, Sources};

use crate::data::learned::LearnedNames;
use crate::tenancy::accounting::Accounts;
use crate::tenancy::state::{RegistrationHandle, Registrations};
use crate::training::benefit::ServiceSums;
use fletch_core::{DatasetName, Domain, LayoutId, Root, TagName};
use fletch_origin::{OriginUri, Origins};
use fletch_store::Footprint;
use fletch_tables::{FileTotals, LocalStats, LocalTables, PartCache, TagDoc};
use home::Homes;
use lookups::RootLookups;
use moka::sync::Cache;
use recent_tags::RecentTags;
use search::Searches;
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use table_blocks::TableBlocks;
use tokio::{sync::OnceCell, time::Instant};
use tokio_util::task::TaskTracker;

/// How long the server remembers that a domain has no such root, before it asks the origins again.
const UNKNOWN_TTL: Duration = Duration::from_secs(2);
/// The most unknown roots that are remembered.
const UNKNOWN_MAX: u64 = 10_000;
/// The most roots whose last dataset and layout are remembered, as hints.
const HINTS_MAX: u64 = 100_000;
/// The most failing origins that are probed at once.
const PROBES_MAX: usize = 16;
/// The most roots whose last search for sources is remembered.
const SEARCHES_MAX: u64 = 1024;

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

/// The condition of an origin of registered datasets.
#[derive(Debug, Clone)]
pub struct OriginCondition {
    pub domain: Domain,
    /// The URI, which holds no secret.
    pub uri: String,
    /// The datasets whose objects or tables lie there.
    pub datasets: Vec<DatasetName>,
    /// What its calls did.
    pub condition: ConditionView,
    /// The requests for content that were sent there.
    pub reads: ServiceSums,
}

/// An open version of a dataset.
#[derive(Debug, Clone, Copy)]
pub struct OpenedVersion {
    /// The files that a mount shows.
    pub shown: FileTotals,
    /// The number of entries.
    pub entries: u64,
    /// When it was made, in nanoseconds since 1970.
    pub created_ns: u64,
}

/// How large an open version is.
#[derive(Debug, Clone, Copy)]
pub struct VersionSize {
    /// When it was made, in nanoseconds since 1970.
    made_ns: u64,
    /// The bytes of its files, as a mount shows them.
    pub bytes: u64,
    /// What its chunks occupy on disk at most.
    pub footprint: Footprint,
}

impl VersionSize {
    /// Returns what its chunks occupy, if the disk has `bytes` in `chunks` of the dataset.
    ///
    /// Without a table of all lengths the sum is known only when all chunks are there. Until then it is the
    /// upper bound.
    #[must_use]
    pub fn layout_bytes(&self, bytes: u64, chunks: u64) -> u64 {
        match chunks >= self.footprint.chunks {
            true => self.footprint.bytes.min(bytes),
            false => self.footprint.bytes,
        }
    }
}

/// Returns the size of a dataset, which every program shows: that of its newest open version.
///
/// A dataset that nobody has opened since the start has the size that was recorded. `None`: nobody ever
/// opened it.
#[must_use]
pub fn dataset_bytes(entry: &RegistrationHandle, open: Option<&VersionSize>) -> Option<u64> {
    match (open, entry.bytes()) {
        (Some(open), _) => Some(open.bytes),
        (None, 0) => None,
        (None, recorded) => Some(recorded),
    }
}

type Slot = Arc<OnceCell<Arc<Sources>>>;
/// A root in a domain, as the readers see it that named this dataset, or none.
type RootKey = (Domain, Root, Option<DatasetName>);

/// The bounds of [`Versions`].
#[derive(Debug, Clone)]
pub struct VersionLimits {
    /// Bytes of version tables in memory. Parsed parts get three quarters, and raw blocks the rest.
    pub tables_bytes: u64,
    /// Where parsed parts are kept on disk, and how many bytes of them.
    pub local_tables: Option<LocalTables>,
    /// Open versions.
    pub versions: u64,
    /// Datasets that a tenant may search in a second for roots that are not open.
    pub root_lookups: u32,
    /// The longest time of a read that may ask several homes.
    pub call_timeout: Duration,
}

/// The open versions, and what opens them.
pub struct Versions {
    allowed: Allowlist,
    registrations: Arc<Registrations>,
    blocks: TableBlocks,
    parts: PartCache,
    /// By the dataset that the reader named, too: its home is asked first.
    open: Cache<RootKey, Slot>,
    hints: Cache<RootKey, (DatasetName, LayoutId)>,
    unknown: Cache<(Domain, Root), ()>,
    searches: Cache<(Domain, Root), Arc<Searches>>,
    lookups: RootLookups,
    recent_tags: RecentTags,
    homes: Homes,
    learned: Arc<LearnedNames>,
    call_timeout: Duration,
    tasks: TaskTracker,
    /// CorruptionCounts bytes so far.
    pub corruption: CorruptionCounts,
}

impl Versions {
    /// Creates the room.
    #[must_use]
    pub fn new(
        allowed: Allowlist,
        registrations: Arc<Registrations>,
        limits: VersionLimits,
        accounts: Arc<Accounts>,
        learned: Arc<LearnedNames>,
        tasks: TaskTracker,
    ) -> Arc<Self> {
        Arc::new(Versions {
            allowed,
            registrations,
            blocks: TableBlocks::new(limits.tables_bytes / 4, tasks.clone()),
            parts: PartCache::new(limits.tables_bytes / 4 * 3).with_local(limits.local_tables),
            open: Cache::new(limits.versions),
            hints: Cache::new(HINTS_MAX),
            unknown: Cache::builder().max_capacity(UNKNOWN_MAX).time_to_live(UNKNOWN_TTL).build(),
            searches: Cache::new(SEARCHES_MAX),
            lookups: RootLookups::new(limits.root_lookups),
            recent_tags: RecentTags::default(),
            homes: Homes::new(limits.call_timeout, accounts),
            learned,
            call_timeout: limits.call_timeout,
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

    /// Returns what the names of drafts stand for.
    #[must_use]
    pub fn learned(&self) -> &Arc<LearnedNames> {
        &self.learned
    }

    /// Returns what the homes of all datasets count.
    #[must_use]
    pub fn home_counts(&self) -> &HomeCounts {
        self.homes.counts()
    }

    /// Returns the tags under which objects have the indexed bytes, where the tables have others.
    #[must_use]
    pub fn renewed_pins(&self) -> &RenewedPins {
        self.homes.renewed_pins()
    }

    /// Returns the objects that changed since they were indexed, as far as readers met them.
    #[must_use]
    pub fn changed_objects(&self) -> &ChangedObjects {
        self.homes.changed_objects()
    }

    /// Returns the state of every registered dataset: that of its objects' or tables' home, whichever is
    /// worse. Datasets of the same name in several domains are one row.
    #[must_use]
    pub fn dataset_states(&self) -> BTreeMap<DatasetName, BreakerState> {
        let unhealthy = self.homes.unhealthy();
        let mut out = BTreeMap::new();
        for entry in self.registrations.all() {
            let worst = out.entry(entry.dataset.name.clone()).or_insert(BreakerState::Closed);
            let uris =
                [&entry.dataset.uri, &entry.dataset.tables].into_iter().filter(|_| !unhealthy.is_empty());
            for uri in uris.filter_map(|uri| OriginUri::parse(uri).ok()) {
                let state = unhealthy.get(&(entry.domain.clone(), uri));
                *worst = state.copied().unwrap_or(BreakerState::Closed).max(*worst);
            }
        }
        out
    }

    /// Returns the origins of all registered datasets, each once a domain: its URI and its condition.
    ///
    /// An origin that nobody asked yet works, as far as the server knows.
    #[must_use]
    pub fn conditions(&self) -> Vec<OriginCondition> {
        let known: HashMap<_, _> =
            self.homes.all().into_iter().map(|(d, h)| ((d, h.uri().clone()), h)).collect();
        let mut out: BTreeMap<(Domain, String), OriginCondition> = BTreeMap::new();
        for entry in self.registrations.all() {
            let uris = [&entry.dataset.uri, &entry.dataset.tables];
            for uri in uris.into_iter().filter_map(|uri| OriginUri::parse(uri).ok()) {
                let domain = entry.domain.clone();
                let row = out.entry((domain.clone(), uri.to_string())).or_insert_with(|| {
                    let (domain, text) = (domain.clone(), uri.to_string());
                    let home = known.get(&(domain.clone(), uri));
                    OriginCondition {
                        domain,
                        uri: text,
                        datasets: Vec::new(),
                        condition: home.map(|home| home.condition()).unwrap_or_default(),
                        reads: home.map(|home| home.reads().sums()).unwrap_or_default(),
                    }
                });
                if !row.datasets.contains(&entry.dataset.name) {
                    row.datasets.push(entry.dataset.name.clone());
                }
            }
        }
        out.into_values().collect()
    }

    /// Probes failing origins of registered datasets that nobody asks, so that they are seen to work again.
    pub fn probe_failing(self: &Arc<Self>) {
        let failing = self.homes.all().into_iter().filter(|(_, home)| home.condition().failing);
        let failing: HashSet<_> = failing.map(|(domain, home)| (domain, home.uri().clone())).collect();
        if failing.is_empty() {
            return;
        }
        let mut probed = HashSet::new();
        for entry in self.registrations.all() {
            for uri in [&entry.dataset.uri, &entry.dataset.tables] {
                let Ok(parsed) = OriginUri::parse(uri) else { continue };
                let key = (entry.domain.clone(), parsed);
                if probed.len() == PROBES_MAX || !failing.contains(&key) || probed.contains(&key) {
                    continue;
                }
                let Ok(origin) = self.allowed.open(&entry.domain, uri) else { continue };
                let of = (&entry.domain, &entry.tenant);
                let origin = self.homes.with_home(of, &entry.dataset.name, origin);
                if origin.home().is_probe_due() {
                    probed.insert(key);
                    self.tasks.spawn(async move { origin.probe_failing().await });
                }
            }
        }
    }

    /// Returns when a read that begins now ends, at whatever homes it asks.
    #[must_use]
    pub fn call_deadline(&self) -> Instant {
        Instant::now() + self.call_timeout
    }

    /// Returns the bytes of cached tables: (parts, blocks).
    #[must_use]
    pub fn table_memory(&self) -> (u64, u64) {
        (self.parts.bytes(), self.blocks.bytes())
    }

    /// Returns what the local tables did; nothing without a directory for them.
    #[must_use]
    pub fn local_tables(&self) -> LocalStats {
        self.parts.local().map(LocalTables::stats).unwrap_or_default()
    }

    /// Returns the sizes of each dataset's open version: content bytes, and what its chunks occupy on disk.
    ///
    /// Of several open versions of a dataset, the newest one.
    #[must_use]
    pub fn sizes(&self) -> BTreeMap<(Domain, DatasetName), VersionSize> {
        let mut out = BTreeMap::new();
        for (key, slot) in self.open.iter() {
            let Some(sources) = slot.get() else { continue };
            let manifest = sources.first.version.manifest();
            let (made_ns, bytes, footprint) =
                (manifest.created_ns(), manifest.shown().bytes, sources.first.footprint());
            let size = VersionSize { made_ns, bytes, footprint };
            let newest = out.entry((key.0.clone(), sources.dataset().clone())).or_insert(size);
            if (newest.made_ns, newest.bytes) < (made_ns, bytes) {
                *newest = size;
            }
        }
        out
    }

    /// Returns the open versions of a dataset.
    #[must_use]
    pub fn opened(&self, domain: &Domain, dataset: &DatasetName) -> BTreeMap<Root, OpenedVersion> {
        let slots = self.open.iter().filter(|(key, _)| key.0 == *domain);
        let sources = slots.filter_map(|(_, slot)| slot.get().cloned());
        sources
            .filter(|s| s.dataset() == dataset)
            .map(|s| {
                let manifest = s.first.version.manifest();
                let (entries, created_ns) = (manifest.entries, manifest.created_ns());
                let opened = OpenedVersion { shown: manifest.shown(), entries, created_ns };
                (s.first.version.root(), opened)
            })
            .collect()
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
        for (key, _) in self.searches.iter().filter(|(key, _)| key.0 == *domain) {
            self.searches.invalidate(&*key);
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
        if *tag == TagName::latest() {
            self.changed_objects().resolved(entry, doc.root);
        }
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
        let name = &entry.dataset.name;
        let key = (entry.domain.clone(), root, Some(name.clone()));
        if let Some(sources) = self.open.get(&key).and_then(|slot| slot.get().cloned()) {
            let s = &sources.first;
            if Arc::ptr_eq(&s.registered, entry)
                && s.is_registered()
                && layout.is_none_or(|l| l == s.version.layout())
            {
                return Ok(Arc::clone(s));
            }
            // The dataset did not have the root when it was opened, and may have it now.
            if sources.dataset() != name {
                self.open.invalidate(&key);
            }
        }
        // While the home does not answer, another dataset may stand in for it.
        let hint = || {
            let tables = self.tables_of(entry).ok().filter(|tables| !tables.home().is_healthy());
            tables.and_then(|_| self.hints.get(&key)).map(|(_, layout)| layout)
        };
        let layout = match layout.or_else(hint) {
            Some(layout) => layout,
            None => {
                let best = self.open_layouts(entry, root).await?.into_iter().next();
                best.ok_or(VersionError::NotFound)?.version.layout()
            }
        };
        let any = (entry.domain.clone(), root, None);
        self.hints.insert(key, (name.clone(), layout));
        self.hints.insert(any, (name.clone(), layout));
        self.unknown.invalidate(&(entry.domain.clone(), root));
        // Opens the root by the hint. A root that is open in another layout stays as it is.
        let reader = Reader { domain: &entry.domain, tenant: &entry.tenant, dataset: Some(name) };
        let sources = self.sources(reader, root).await?;
        let own = Arc::ptr_eq(&sources.first.registered, entry) && sources.first.version.layout() == layout;
        if own || sources.stands_in_for.is_some() {
            return Ok(Arc::clone(&sources.first));
        }
        self.open_source(entry, root, layout).await
    }

    /// Returns the sources of a root.
    ///
    /// # Errors
    /// [`VersionError::NotFound`] for every root that the domain does not have;
    /// [`VersionError::TooManyLookups`]; those of origin and tables.
    pub async fn sources(
        self: &Arc<Self>,
        reader: Reader<'_>,
        root: Root,
    ) -> Result<Arc<Sources>, VersionError> {
        // A name that the domain does not have changes nothing, and takes no memory.
        let domain = reader.domain;
        let dataset = reader.dataset.filter(|name| self.registrations.get(domain, name).is_some());
        let key = (domain.clone(), root, dataset.cloned());
        if let Some(sources) = self.open.get(&key).and_then(|slot| slot.get().cloned()) {
            if let Some(tables) = &sources.stands_in_for {
                // Starts the probe that may bring the named dataset back.
                self.may_ask_tables(tables, root);
            }
            if sources.is_registered() && !sources.may_return_home() {
                return Ok(sources);
            }
            self.open.invalidate(&key);
        }
        let unknown = (domain.clone(), root);
        if self.unknown.contains_key(&unknown) {
            return Err(VersionError::NotFound);
        }
        let slot = self.open.get_with(key.clone(), Slot::default);
        // In a task of its own: the first caller may disconnect while other callers wait.
        let (this, of, tenant) = (Arc::clone(self), key.clone(), reader.tenant.clone());
        let task = self.tasks.spawn(async move {
            let (domain, root, dataset) = of;
            let reader = Reader { domain: &domain, tenant: &tenant, dataset: dataset.as_ref() };
            slot.get_or_try_init(|| this.open_root(reader, root)).await.cloned()
        });
        let result = task.await.unwrap_or(Err(VersionError::Lost));
        // The dataset may have been unregistered meanwhile.
        let result = result.and_then(|s| if s.is_registered() { Ok(s) } else { Err(VersionError::NotFound) });
        if result.is_err() {
            // An empty slot must not evict an open version.
            self.open.invalidate(&key);
        }
        match &result {
            Err(VersionError::NotFound) => self.unknown.insert(unknown, ()),
            Err(VersionError::Tables(e)) if !e.kind().retryable() => {
                self.corruption.tables.fetch_add(1, Relaxed);
            }
            _ => {}
        }
        result
    }

    /// Returns the source of a root in one layout, at a healthy home if there is one.
    ///
    /// # Errors
    /// [`VersionError::NotFound`] if no dataset of the domain has that layout; those of origin and tables.
    pub async fn in_layout(
        self: &Arc<Self>,
        sources: &Sources,
        layout: LayoutId,
    ) -> Result<Arc<Source>, VersionError> {
        let first = &sources.first;
        let fits = first.version.layout() == layout;
        if fits && first.tables.home().is_healthy() {
            return Ok(Arc::clone(first));
        }
        match self.search_for(sources, |s| s.version.layout() == layout).await {
            Err(VersionError::NotFound) if fits => Ok(Arc::clone(first)),
            found => found,
        }
    }
}
