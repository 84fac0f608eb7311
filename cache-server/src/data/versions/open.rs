//! Opens roots: finds the datasets whose tables have a root, and opens its layouts there.
//!
//! The dataset that the reader named is asked first, then the one that had the root last, then all others. A
//! home that does not answer delays an opening only by its patience, if another dataset has the root.

use super::{
    HomeOrigin, Reader, Source, Sources, VersionError, Versions,
    breaker::{Admission, Outcome},
    table_blocks::{TableBlocks, TableLocation},
};
use crate::tenancy::state::{Registration, RegistrationHandle};
use fletch_core::{LayoutId, Root, TagName, manifest::LayoutKind};
use fletch_origin::OriginError;
use fletch_tables::{PartCache, TableError, TagDoc, Version, paths};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use std::{sync::Arc, time::Duration};
use tokio::time::{Instant, timeout};

/// How many datasets are searched for a root at once.
const SCAN_AT_ONCE: usize = 16;
/// The most layouts of one root at one location that are tried.
const LAYOUTS_MAX: usize = 8;
/// The longest tag document that is read, in bytes.
const TAG_BYTES_MAX: u64 = 64 << 10;
/// The longest wait for a tag or a list of layouts, so that the caller learns which origin is silent.
const DOCUMENT_TIMEOUT: Duration = Duration::from_secs(4);

impl Versions {
    /// Opens a root for a reader.
    pub(super) async fn open_root(
        self: &Arc<Self>,
        reader: Reader<'_>,
        root: Root,
    ) -> Result<Arc<Sources>, VersionError> {
        let domain = reader.domain;
        let hint = self.hints.get(&(domain.clone(), root, reader.dataset.cloned()));
        // Only a dataset that is known to have the root keeps its name while its home is silent.
        let known = hint.is_some();
        let name = hint.as_ref().map(|(name, _)| name).or(reader.dataset);
        let named = name.and_then(|name| self.registrations.get(domain, name));
        let Some(named) = named else {
            let first = self.find_elsewhere(reader, root, None).await?;
            let owner = Arc::clone(&first.registered);
            return Ok(Arc::new(Sources::new(domain, root, first, owner, None)));
        };
        let layout = hint.map(|(_, layout)| layout);
        let first = self.find(reader, root, &named, layout).await?;
        let own = Arc::ptr_eq(&first.registered, &named);
        let owner = if own || known { &named } else { &first.registered };
        let stands_in_for = if own || !known { None } else { Some(self.tables_of(&named)?) };
        Ok(Arc::new(Sources::new(domain, root, Arc::clone(&first), Arc::clone(owner), stands_in_for)))
    }

    /// Opens a root at one dataset, or elsewhere while its home is silent or if it does not have the root.
    async fn find(
        self: &Arc<Self>,
        reader: Reader<'_>,
        root: Root,
        named: &Arc<RegistrationHandle>,
        layout: Option<LayoutId>,
    ) -> Result<Arc<Source>, VersionError> {
        let tables = self.tables_of(named)?;
        let home = tables.home();
        // A name with an invented root costs the origin a listing, like a search.
        if layout.is_none() && !self.lookups.admit(reader.tenant, 1, Instant::now()) {
            return Err(VersionError::TooManyLookups);
        }
        let open = async {
            match layout {
                Some(layout) => self.open_source(named, root, layout).await,
                None => {
                    let best = self.open_layouts(named, root).await?.into_iter().next();
                    best.ok_or(VersionError::NotFound)
                }
            }
        };
        tokio::pin!(open);
        if !self.may_ask(named, root) {
            return match self.find_elsewhere(reader, root, Some(named)).await {
                Ok(found) => Ok(found),
                // No other dataset has it.
                Err(elsewhere) => open.await.map_err(|e| e.or(elsewhere)),
            };
        }
        let (begun, (hedge, silent)) = (Instant::now(), home.patience());
        let mut answer = timeout(hedge, &mut open).await.ok();
        if answer.is_none() && !home.take_hedge() {
            answer = timeout(silent.saturating_sub(hedge), &mut open).await.ok();
        }
        let error = match answer {
            Some(Ok(source)) => return Ok(source),
            Some(Err(e)) => Some(e),
            None => None,
        };
        let elsewhere = self.find_elsewhere(reader, root, Some(named));
        tokio::pin!(elsewhere);
        if let Some(e) = error {
            return elsewhere.await.map_err(|other| e.or(other));
        }
        tokio::select! {
            opened = &mut open => match opened {
                Ok(source) => Ok(source),
                Err(e) => elsewhere.await.map_err(|other| e.or(other)),
            },
            found = &mut elsewhere => match found {
                Ok(source) => {
                    home.report(Outcome::Overtaken(begun.elapsed()));
                    Ok(source)
                }
                Err(other) => open.await.map_err(|e| e.or(other)),
            },
        }
    }

    /// Opens a root at any dataset of the domain except one.
    async fn find_elsewhere(
        self: &Arc<Self>,
        reader: Reader<'_>,
        root: Root,
        except: Option<&Arc<RegistrationHandle>>,
    ) -> Result<Arc<Source>, VersionError> {
        let mut all = self.registrations.list(reader.domain);
        all.retain(|entry| except.is_none_or(|e| !Arc::ptr_eq(e, entry)));
        if all.is_empty() {
            return Err(VersionError::NotFound);
        }
        if !self.lookups.admit(reader.tenant, all.len(), Instant::now()) {
            return Err(VersionError::TooManyLookups);
        }
        let (ask, skip): (Vec<_>, Vec<_>) = all.into_iter().partition(|entry| self.may_ask(entry, root));
        let mut failed = VersionError::NotFound;
        let mut scan = Box::pin(self.scan(ask, root));
        while let Some((_, found)) = scan.next().await {
            match found {
                Ok(sources) => {
                    if let Some(first) = sources.into_iter().next() {
                        return Ok(first);
                    }
                }
                // The root may be there, so that "not found" would be wrong.
                Err(e) => failed = failed.or(e),
            }
        }
        for entry in skip {
            let what = self.tables_of(&entry)?.uri().to_string();
            let why = "it did not answer lately, so the server left it alone; retry later".to_owned();
            failed = failed.or(VersionError::Origin(OriginError::Unavailable { what, why }));
        }
        Err(failed)
    }

    /// Returns whether the home of a dataset's tables may be asked now. Starts its probe if that is due.
    pub(super) fn may_ask(self: &Arc<Self>, entry: &Arc<RegistrationHandle>, root: Root) -> bool {
        // A URI that is not allowed any more fails with its own error.
        let Ok(tables) = self.tables_of(entry) else { return true };
        self.may_ask_tables(&tables, root)
    }

    pub(super) fn may_ask_tables(self: &Arc<Self>, tables: &HomeOrigin, root: Root) -> bool {
        match tables.home().admit() {
            Admission::Ask => true,
            Admission::Leave => false,
            Admission::Probe => {
                let tables = tables.clone();
                self.tasks.spawn(async move {
                    let path = paths::manifest(root);
                    if timeout(DOCUMENT_TIMEOUT, tables.probe_head(&path)).await.is_err() {
                        tables.home().report(Outcome::Silent);
                    }
                });
                false
            }
        }
    }

    /// Returns the sources of `root` in each of these datasets.
    pub(super) fn scan(
        self: &Arc<Self>,
        entries: Vec<Arc<RegistrationHandle>>,
        root: Root,
    ) -> impl futures::Stream<Item = (Arc<RegistrationHandle>, Result<Vec<Arc<Source>>, VersionError>)>
    + Send
    + use<> {
        let versions = Arc::clone(self);
        stream::iter(entries)
            .map(move |entry| {
                let versions = Arc::clone(&versions);
                async move {
                    let found = versions.open_layouts(&entry, root).await;
                    (entry, found)
                }
            })
            .buffer_unordered(SCAN_AT_ONCE)
    }

    /// Opens the sources of `root` of one dataset, sorted by preference.
    ///
    /// Packs come before indexes, because they cost fewer requests; otherwise the layouts' ids decide. A
    /// source that cannot be opened is left out, unless it is the only one.
    pub(super) async fn open_layouts(
        &self,
        entry: &Arc<RegistrationHandle>,
        root: Root,
    ) -> Result<Vec<Arc<Source>>, VersionError> {
        let (mut out, mut failed) = (Vec::new(), None);
        for layout in self.layouts(entry, root).await? {
            match self.open_source(entry, root, layout).await {
                Ok(source) => out.push(source),
                Err(e) => {
                    if e.is_outage() {
                        tracing::debug!(%root, %layout, error = %e, "cannot open a layout");
                    } else {
                        tracing::warn!(%root, %layout, error = %e, "cannot open a layout");
                    }
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
        let found = tables.observed(("fletch", false), || async {
            let found: Vec<_> = tables
                .list(&paths::layouts(root))
                .try_filter_map(|meta| async move {
                    let of = meta.path.strip_suffix("/layout.json").and_then(|p| p.rsplit('/').next());
                    Ok(of.and_then(|id| id.parse::<LayoutId>().ok()))
                })
                .take(LAYOUTS_MAX)
                .collect()
                .await;
            found.into_iter().collect::<Result<Vec<_>, OriginError>>()
        });
        match found.await {
            Err(OriginError::NotFound { .. }) => Ok(Vec::new()),
            found => Ok(found.map_err(VersionError::Origin)?),
        }
    }

    /// Returns tags of a dataset's tables, at most `tags_max`, in the order in which the store lists them.
    ///
    /// A plain HTTP server has no listing. There only the tag `latest` is looked for.
    ///
    /// # Errors
    /// Those of the origin.
    pub async fn tags(&self, entry: &Registration, tags_max: usize) -> Result<Vec<TagName>, VersionError> {
        let tables = self.tables_of(entry)?;
        if tables.uri().is_plain_http() {
            let latest = TagName::latest();
            return match self.tag(entry, &latest).await {
                Ok(_) => Ok(vec![latest]),
                Err(VersionError::NotFound) => Ok(Vec::new()),
                Err(e) => Err(e),
            };
        }
        let found = tables.observed((paths::TAGS, false), || async {
            let found: Vec<_> = tables
                .list(paths::TAGS)
                .try_filter_map(|meta| async move {
                    let tag = meta.path.strip_prefix(paths::TAGS).and_then(|name| TagName::new(name).ok());
                    Ok(tag)
                })
                .take(tags_max)
                .collect()
                .await;
            found.into_iter().collect::<Result<Vec<_>, OriginError>>()
        });
        match timeout(DOCUMENT_TIMEOUT, found).await {
            Ok(Err(OriginError::NotFound { .. })) => Ok(Vec::new()),
            Ok(found) => Ok(found.map_err(VersionError::Origin)?),
            Err(_) => Err(silent(format!("{}/{}", tables.uri(), paths::TAGS))),
        }
    }

    pub(super) async fn open_source(
        &self,
        entry: &Arc<RegistrationHandle>,
        root: Root,
        layout: LayoutId,
    ) -> Result<Arc<Source>, VersionError> {
        let (tables, blocks, parts) = self.tables_scoped(entry)?;
        let location = TableLocation { blocks: blocks.clone(), origin: tables.clone(), root, layout };
        let version = Version::open(Arc::new(location), root, layout, parts).await?;
        let data = self.allowed.open(&entry.domain, &entry.dataset.uri)?;
        let data = self.homes.with_home((&entry.domain, &entry.tenant), &entry.dataset.name, data);
        Ok(Arc::new(Source::new(Arc::clone(entry), version, data, tables, blocks)))
    }

    /// Returns the origin of a dataset's tables, and the caches for that domain and location alone.
    pub(super) fn tables_scoped(
        &self,
        entry: &Registration,
    ) -> Result<(HomeOrigin, TableBlocks, PartCache), VersionError> {
        let tables = self.tables_of(entry)?;
        let scope = format!("{}\0{}", entry.domain, tables.uri());
        Ok((tables, self.blocks.scoped(&scope), self.parts.scoped(&scope)))
    }

    pub(super) fn tables_of(&self, entry: &Registration) -> Result<HomeOrigin, VersionError> {
        let tables = self.allowed.open(&entry.domain, &entry.dataset.tables)?;
        Ok(self.homes.with_home((&entry.domain, &entry.tenant), &entry.dataset.name, tables))
    }

    /// Reads a tag of a dataset from the dataset's own tables: no other dataset knows it.
    pub async fn tag(&self, entry: &Registration, tag: &TagName) -> Result<TagDoc, VersionError> {
        let tables = self.tables_of(entry)?;
        let path = paths::tag(tag);
        let got = match timeout(DOCUMENT_TIMEOUT, tables.get(&path, None, None)).await {
            Ok(Err(OriginError::NotFound { .. })) => return Err(VersionError::NotFound),
            Ok(got) => got?,
            Err(_) => return Err(silent(format!("{}/{path}", tables.uri()))),
        };
        if got.bytes.len() as u64 > TAG_BYTES_MAX {
            let why = format!("tag {tag} has {} bytes", got.bytes.len());
            return Err(TableError::Damaged { table: "tag", why }.into());
        }
        Ok(TagDoc::parse(&got.bytes)?)
    }
}

/// Returns the error of a document that did not come in time.
fn silent(what: String) -> VersionError {
    let why = format!("no answer in {DOCUMENT_TIMEOUT:?}");
    VersionError::Origin(OriginError::Unavailable { what, why })
}
