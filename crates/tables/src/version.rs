//! One version in one layout: opened, its parts loaded when they are looked at.
//!
//! What finds things is synchronous and works on parts in memory; it says which part it lacks
//! ([`Miss`]). The `try_` methods stop there; the others load that part and go on. So there is
//! one algorithm for threads that must not wait and for tasks that may.

use crate::cache::{CacheKey, Kept, LoadedPart, PartCache, Shelf};
use crate::footer::{Footer, blocking};
use crate::schema::{ENTRIES_SCHEMA, PLACEMENT_SCHEMA, ROWS_PER_PART_MAX};
use crate::{LayoutDoc, Manifest, Table, TableError, TableRange, TableSource, decode};
use fletch_core::manifest::locate::{DirId, PartIndex, prefix};
use fletch_core::manifest::{EntryKind, EntryRef, PART_ENTRIES_MAX, Slice};
use fletch_core::{LayoutId, Root};
use std::sync::Arc;

/// One version in one layout. Cloning shares it.
#[derive(Clone)]
pub struct Version(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub source: Arc<dyn TableSource>,
    pub root: Root,
    pub layout: LayoutId,
    pub manifest: Manifest,
    pub doc: LayoutDoc,
    pub index: PartIndex,
    pub cache: PartCache,
    pub entries: Footer,
    pub placement: Footer,
    /// Read when first needed: a mount never needs it.
    pub chunks: tokio::sync::OnceCell<Footer>,
}

impl std::fmt::Debug for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Version").field("root", &self.0.root).field("layout", &self.0.layout).finish()
    }
}

/// An entry that was found, with the part that holds it.
#[derive(Debug, Clone)]
pub struct Found {
    /// Its position in the version.
    pub ordinal: u64,
    /// The part that holds it.
    pub part: Arc<LoadedPart>,
    /// Its row in the part.
    pub row: usize,
}

impl Found {
    /// The entry.
    #[must_use]
    pub fn entry(&self) -> EntryRef<'_> {
        self.part.entries.get(self.row)
    }

    /// Where its bytes are.
    #[must_use]
    pub fn slices(&self) -> &[Slice] {
        self.part.placed.slices(self.row)
    }
}

/// What a path names.
#[derive(Debug, Clone)]
pub enum Resolved {
    /// A file or a symlink.
    Entry(Found),
    /// A directory, empty or not.
    Dir(DirId),
}

/// A part that is not in memory and without which there is no answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Miss(pub usize);

/// Parts in memory: those a caller holds, and those in the cache.
pub(crate) struct Parts<'a> {
    version: &'a Version,
    held: &'a [(usize, Arc<LoadedPart>)],
}

/// How many parts a caller holds while it looks for one thing. No step needs more at once, so
/// that it ends even if the cache keeps nothing.
const HELD_MAX: usize = 4;

impl Version {
    /// Reads manifest and layout, checks that they fold into `root` and `layout`, and reads the
    /// footers of the tables (four reads in two rounds). No part is read.
    ///
    /// # Errors
    /// [`TableError`]: the source failed, or the documents are damaged, newer, or others.
    pub async fn open(
        source: Arc<dyn TableSource>,
        root: Root,
        layout: LayoutId,
        cache: PartCache,
    ) -> Result<Self, TableError> {
        let (manifest, doc) = futures::try_join!(
            source.read(Table::Manifest, TableRange::All),
            source.read(Table::Layout, TableRange::All)
        )?;
        let (manifest, doc) = blocking(move || {
            let manifest = Manifest::parse(&manifest, root)?;
            let doc = LayoutDoc::parse(&doc, layout, root, manifest.parts.len())?;
            Ok((manifest, doc))
        })
        .await?;
        let parts = manifest.parts.len();
        let (entries, placement) = futures::try_join!(
            Footer::read(&*source, &ENTRIES_SCHEMA, parts, PART_ENTRIES_MAX),
            Footer::read(&*source, &PLACEMENT_SCHEMA, parts, ROWS_PER_PART_MAX)
        )?;
        if manifest.parts.iter().enumerate().any(|(i, p)| p.entries != entries.rows(i)) {
            return Err(TableError::damaged(Table::Entries, "its row groups are not the manifest's parts"));
        }
        let index = PartIndex::new(manifest.parts.clone());
        let chunks = tokio::sync::OnceCell::new();
        let inner = Inner { source, root, layout, manifest, doc, index, cache, entries, placement, chunks };
        Ok(Version(Arc::new(inner)))
    }

    /// The version's identity.
    #[must_use]
    pub fn root(&self) -> Root {
        self.0.root
    }

    /// The layout's identity.
    #[must_use]
    pub fn layout(&self) -> LayoutId {
        self.0.layout
    }

    /// The manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.0.manifest
    }

    /// The layout's document.
    #[must_use]
    pub fn layout_doc(&self) -> &LayoutDoc {
        &self.0.doc
    }

    /// The parts as an index over paths and ordinals.
    #[must_use]
    pub fn index(&self) -> &PartIndex {
        &self.0.index
    }

    pub(crate) fn key(&self, shelf: Shelf, part: usize) -> CacheKey {
        CacheKey { scope: self.0.cache.scope(), root: self.0.root, layout: self.0.layout, shelf, part }
    }

    /// A part, if it is in memory.
    #[must_use]
    pub fn try_part(&self, part: usize) -> Option<Arc<LoadedPart>> {
        match self.0.cache.get(&self.key(Shelf::Part, part)) {
            Some(Kept::Part(p)) => Some(p),
            _ => None,
        }
    }

    /// A part, loaded and checked if it is not in memory (one read of each of two tables).
    ///
    /// # Errors
    /// [`TableError`]: the source failed, or the part is not the one the root names;
    /// [`TableError::Internal`] when there is no such part.
    pub async fn part(&self, part: usize) -> Result<Arc<LoadedPart>, TableError> {
        if part >= self.0.manifest.parts.len() {
            return Err(TableError::Internal(format!("there is no part {part}")));
        }
        let load = || {
            let inner = Arc::clone(&self.0);
            async move { load_part(inner, part).await.map(|p| Kept::Part(Arc::new(p))) }
        };
        match self.0.cache.get_or_load(self.key(Shelf::Part, part), load).await? {
            Kept::Part(p) => Ok(p),
            Kept::Chunks(_) => Err(TableError::Internal("the cache mixed up its shelves".into())),
        }
    }

    /// Answers from memory, if it can.
    pub(crate) fn now<T>(&self, f: impl FnOnce(&Parts<'_>) -> Result<T, Miss>) -> Option<T> {
        f(&Parts { version: self, held: &[] }).ok()
    }

    /// Answers after loading what is missing, one part after the other. `f` begins anew each
    /// time, or goes on where it was if it keeps its state.
    pub(crate) async fn awaited<T>(
        &self,
        mut f: impl FnMut(&Parts<'_>) -> Result<T, Miss>,
    ) -> Result<T, TableError> {
        let mut held: Vec<(usize, Arc<LoadedPart>)> = Vec::new();
        loop {
            let Miss(part) = match f(&Parts { version: self, held: &held }) {
                Ok(answer) => return Ok(answer),
                Err(miss) => miss,
            };
            let loaded = self.part(part).await?;
            if held.len() == HELD_MAX {
                held.remove(0);
            }
            held.push((part, loaded));
        }
    }

    /// The entry with exactly this path, if there is one.
    ///
    /// # Errors
    /// As [`Version::part`].
    pub async fn find(&self, path: &str) -> Result<Option<Found>, TableError> {
        self.awaited(|parts| parts.find(path)).await
    }

    /// The entry at an ordinal; `None` past the end.
    ///
    /// # Errors
    /// As [`Version::part`].
    pub async fn entry(&self, ordinal: u64) -> Result<Option<Found>, TableError> {
        self.awaited(|parts| parts.entry(ordinal)).await
    }

    /// [`Version::entry`], only from memory: the outer `None` means "not in memory".
    #[must_use]
    pub fn try_entry(&self, ordinal: u64) -> Option<Option<Found>> {
        self.now(|parts| parts.entry(ordinal))
    }

    /// The ordinal of the first entry whose path is not below `path`; the number of entries
    /// when all are.
    ///
    /// # Errors
    /// As [`Version::part`].
    pub async fn lower_bound(&self, path: &[u8]) -> Result<u64, TableError> {
        self.awaited(|parts| parts.lower_bound(path)).await
    }

    /// What a path (clean, without closing slash; "" is the root directory) names in the tree.
    /// Members of shards are not part of the tree.
    ///
    /// # Errors
    /// As [`Version::part`].
    pub async fn resolve(&self, path: &str) -> Result<Option<Resolved>, TableError> {
        self.awaited(|parts| parts.resolve(path)).await
    }

    /// [`Version::resolve`], only from memory: the outer `None` means "not in memory", and an
    /// await of `resolve` will load what is missing (or say what is wrong).
    #[must_use]
    pub fn try_resolve(&self, path: &str) -> Option<Option<Resolved>> {
        self.now(|parts| parts.resolve(path))
    }

    /// The path of a directory that this version handed out; `None` when it names none.
    ///
    /// # Errors
    /// As [`Version::part`].
    pub async fn dir_path(&self, dir: DirId) -> Result<Option<String>, TableError> {
        self.awaited(|parts| parts.dir_path(dir)).await
    }

    /// [`Version::dir_path`], only from memory: the outer `None` means "not in memory".
    #[must_use]
    pub fn try_dir_path(&self, dir: DirId) -> Option<Option<String>> {
        self.now(|parts| parts.dir_path(dir))
    }
}

impl Parts<'_> {
    pub fn index(&self) -> &PartIndex {
        &self.version.0.index
    }

    pub fn get(&self, part: usize) -> Result<Arc<LoadedPart>, Miss> {
        let held = self.held.iter().find(|(i, _)| *i == part).map(|(_, p)| Arc::clone(p));
        held.or_else(|| self.version.try_part(part)).ok_or(Miss(part))
    }

    pub fn entry(&self, ordinal: u64) -> Result<Option<Found>, Miss> {
        match self.index().find(ordinal) {
            Some((part, row)) => Ok(Some(Found { ordinal, part: self.get(part)?, row })),
            None => Ok(None),
        }
    }

    pub fn lower_bound(&self, path: &[u8]) -> Result<u64, Miss> {
        let Some(at) = self.index().candidate(path) else { return Ok(0) };
        let row = self.get(at)?.entries.lower_bound(path) as u64;
        if row == u64::from(self.index().parts()[at].entries) && at + 1 < self.index().parts().len() {
            // That the next part begins after `path` is the manifest's word until it is loaded.
            self.get(at + 1)?;
        }
        Ok(self.index().first_ordinal(at) + row)
    }

    pub fn find(&self, path: &str) -> Result<Option<Found>, Miss> {
        let at = self.lower_bound(path.as_bytes())?;
        Ok(self.entry(at)?.filter(|f| f.entry().path == path))
    }

    fn resolve(&self, path: &str) -> Result<Option<Resolved>, Miss> {
        if path.is_empty() {
            return Ok(Some(Resolved::Dir(DirId { first: 0, depth: 0 })));
        }
        if path.ends_with('/') || path.contains('\0') {
            return Ok(None);
        }
        if let Some(found) = self.find(path)? {
            return Ok(Some(Resolved::Entry(found)));
        }
        let below = format!("{path}/");
        let first = self.lower_bound(below.as_bytes())?;
        let is_dir = self.entry(first)?.is_some_and(|f| f.entry().path.starts_with(&below));
        let depth = u16::try_from(path.split('/').count()).unwrap_or(u16::MAX);
        Ok(is_dir.then_some(Resolved::Dir(DirId { first, depth })))
    }

    fn dir_path(&self, dir: DirId) -> Result<Option<String>, Miss> {
        if dir.depth == 0 {
            return Ok((dir.first == 0).then(String::new));
        }
        let first = self.entry(dir.first)?;
        Ok(first.and_then(|f| prefix(f.entry().path, dir.depth).map(str::to_owned)))
    }
}

async fn load_part(inner: Arc<Inner>, part: usize) -> Result<LoadedPart, TableError> {
    let (entries, placement) = futures::try_join!(
        inner.entries.fetch(&*inner.source, part, 0..ENTRIES_SCHEMA.columns.num_columns()),
        inner.placement.fetch(&*inner.source, part, 0..PLACEMENT_SCHEMA.columns.num_columns())
    )?;
    blocking(move || {
        let entries = decode::entries(&inner, part, &entries)?;
        let placed = decode::placed(&inner, part, &placement, &entries)?;
        Ok(LoadedPart { entries, placed })
    })
    .await
}

/// Whether a kind is part of the tree.
pub(crate) fn in_tree(kind: EntryKind) -> bool {
    matches!(kind, EntryKind::File | EntryKind::Symlink)
}
