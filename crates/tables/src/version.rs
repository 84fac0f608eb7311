//! One version in one layout. Opening it reads no part; each part is loaded when a call first needs it.
//!
//! Every search is a synchronous function over the parts at hand: those in memory, and those in local files
//! (`local_reads.rs`). It returns the part that it lacks as a [`MissingPart`]. A `try_` method stops there.
//! The other methods load that part and search again. So one algorithm serves threads that must not wait and
//! tasks that may.

use crate::cache::{CacheKey, Cached, CachedKind, Loaded, PartCache};
use crate::chunk_index::ChunkIndex;
use crate::chunks::ChunkRow;
use crate::footer::Footer;
use crate::leaf::{LEAF_ROWS, Leaf};
use crate::loaded_part::leaf_of_path;
use crate::local::{Directory, version_hash};
use crate::schema::{CHUNKS_SCHEMA, ENTRIES_SCHEMA, PLACEMENT_SCHEMA, ROWS_PER_PART_MAX};
use crate::untrusted::blocking;
use crate::{LayoutDoc, LoadedPart, Manifest, Table, TableError, TableRange, TableSource, decode};
use fletch_core::manifest::LayoutKind;
use fletch_core::manifest::locate::{DirId, PartIndex, prefix};
use fletch_core::manifest::{EntryKind, EntryRef, PART_ENTRIES_MAX, Slice};
use fletch_core::{Hash, LayoutId, Root};
use std::sync::Arc;

/// One version in one layout. Clones share it.
#[derive(Clone)]
pub struct Version(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub source: Arc<dyn TableSource>,
    pub root: Root,
    pub layout: LayoutId,
    manifest: Manifest,
    pub doc: LayoutDoc,
    pub index: PartIndex,
    pub cache: PartCache,
    /// The number of this opening in the cache.
    number: u64,
    /// What stands for this version where its parts are kept: scope, root and layout.
    hash: Hash,
    /// The same for rows of `chunks.parquet`. A later index of the same layout replaces that table, and no
    /// hash says so: what was kept of an earlier one must not be found.
    chunks_hash: Hash,
    entries: Footer,
    placement: Footer,
    /// Read by the first call that needs it: a mount never does.
    pub chunks: tokio::sync::OnceCell<Footer>,
    /// Chunks by hash, unless that index is in local files. Locked while it is made.
    pub chunk_index: tokio::sync::OnceCell<ChunkIndex>,
    pub chunk_index_lock: tokio::sync::Mutex<()>,
}

impl std::fmt::Debug for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Version").field("root", &self.0.root).field("layout", &self.0.layout).finish()
    }
}

/// An entry, with the leaf that holds it.
#[derive(Debug, Clone)]
pub struct Found {
    /// The entry's position in the version.
    pub ordinal: u64,
    /// The leaf that holds the entry.
    pub(crate) leaf: Arc<Leaf>,
    /// The entry's row in the leaf.
    pub(crate) row: usize,
}

impl Found {
    #[must_use]
    pub fn entry(&self) -> EntryRef<'_> {
        self.leaf.entry(self.row)
    }

    /// The slices of chunks that hold the entry's bytes, in order.
    #[must_use]
    pub fn slices(&self) -> &[Slice] {
        self.leaf.slices(self.row)
    }
}

/// The object that a path names in the tree.
#[derive(Debug, Clone)]
pub enum Resolved {
    /// A file or a symlink.
    Entry(Found),
    /// A directory, empty or not.
    Dir(DirId),
}

/// A part that a search needs and that is not in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MissingPart(pub usize);

/// A part at hand.
pub(crate) enum PartAtHand {
    /// In memory.
    Whole(Arc<LoadedPart>),
    /// In a local file with these leaves.
    Filed(Arc<Directory>),
}

/// The parts at hand: those that a caller holds, those in the cache, and those in local files.
pub(crate) struct Parts<'a> {
    version: &'a Version,
    held: &'a [(usize, Arc<LoadedPart>)],
}

/// The number of parts that a search holds.
///
/// No step needs more at once, so a search ends even if the cache keeps nothing.
const HELD_MAX: usize = 4;

/// The parts that a walk loads with the one that it needs next. Two at once keep two cores busy; more would
/// take more memory.
const PARTS_AHEAD: usize = 1;

/// The most slices of a part that is loaded ahead: some 6 MB. A part of large files can have 200 MB of them.
const ROWS_AHEAD_MAX: u32 = 1 << 17;

impl Version {
    /// Opens a version: reads its documents and the footers of two tables, in four reads and two round trips.
    ///
    /// It checks that the documents hash to `root` and `layout`. It reads no part.
    ///
    /// # Errors
    /// [`TableError`]: the source failed, or a document is damaged, of a newer format, or of another version.
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
            return Err(TableError::damaged(
                Table::Entries,
                "its row groups differ from the manifest's parts",
            ));
        }
        let index = PartIndex::new(manifest.parts.clone());
        let chunks = tokio::sync::OnceCell::new();
        let hash = version_hash(cache.scope(), root, layout);
        let chunks_hash = version_hash(cache.scope_of_index(doc.indexed_at_ns), root, layout);
        if let Some(local) = cache.local() {
            local.opened(hash);
            local.opened(chunks_hash);
        }
        let inner = Inner {
            source,
            root,
            layout,
            manifest,
            doc,
            index,
            number: cache.number_version(),
            cache,
            hash,
            chunks_hash,
            entries,
            placement,
            chunks,
            chunk_index: tokio::sync::OnceCell::new(),
            chunk_index_lock: tokio::sync::Mutex::new(()),
        };
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

    /// The version's manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.0.manifest
    }

    /// The layout's document, `layout.json`.
    #[must_use]
    pub fn layout_doc(&self) -> &LayoutDoc {
        &self.0.doc
    }

    /// Whether the version is a draft: location names stand in the place of hashes.
    #[must_use]
    pub fn is_draft(&self) -> bool {
        self.0.doc.params.kind == LayoutKind::Draft
    }

    /// The index of the parts by path and by ordinal.
    #[must_use]
    pub fn index(&self) -> &PartIndex {
        &self.0.index
    }

    pub(crate) fn key(&self, kind: CachedKind, part: usize) -> CacheKey {
        CacheKey { version: self.version_hash(kind.is_of_chunks()), kind, part }
    }

    pub(crate) fn version_hash(&self, of_chunks: bool) -> Hash {
        if of_chunks { self.0.chunks_hash } else { self.0.hash }
    }

    pub(crate) fn check_part(&self, part: usize) -> Result<(), TableError> {
        match self.0.manifest.parts.len() {
            parts if part < parts => Ok(()),
            parts => Err(TableError::Internal(format!("there is no part {part}, the version has {parts}"))),
        }
    }

    /// Returns a whole part from memory or from its local file. Else loads and checks it, with one read of
    /// each of two tables.
    ///
    /// # Errors
    /// [`TableError`]: the source failed, or the part does not match the root;
    /// [`TableError::Internal`] if the version has no such part.
    pub async fn part(&self, part: usize) -> Result<Arc<LoadedPart>, TableError> {
        self.check_part(part)?;
        let key = self.key(CachedKind::Part, part);
        if let Some(Cached::Part(p)) = self.0.cache.get(&key) {
            return Ok(p);
        }
        match self.filed_part(part).await? {
            Some(filed) => Ok(Arc::new(filed)),
            None => self.load(part).await,
        }
    }

    /// Loads a part from the tables.
    async fn load(&self, part: usize) -> Result<Arc<LoadedPart>, TableError> {
        let load = || {
            let this = self.clone();
            async move {
                let (loaded, filed) = this.load_part(part).await?;
                Ok(Loaded { value: Cached::Part(Arc::new(loaded)), keep: !filed })
            }
        };
        match self.0.cache.get_or_load(self.key(CachedKind::Part, part), load).await? {
            Cached::Part(p) => Ok(p),
            _ => Err(wrong_kind()),
        }
    }

    /// Loads a part. If the part before it is at hand, loads the `ahead` parts after it at the same time,
    /// unless they are long.
    async fn load_ahead(&self, part: usize, ahead: usize) -> Result<Arc<LoadedPart>, TableError> {
        let follows = part.checked_sub(1).is_some_and(|before| self.at_hand(before).is_some());
        let after = if follows { part + 1..self.0.manifest.parts.len().min(part + 1 + ahead) } else { 0..0 };
        let is_short = |after: &usize| self.0.placement.rows(*after) <= ROWS_AHEAD_MAX;
        let is_wanted = |after: &usize| is_short(after) && self.at_hand(*after).is_none();
        let after = after.filter(is_wanted).map(|after| self.load(after));
        // Whoever needs one that failed loads it again, and gets the error.
        let (loaded, _after) = futures::join!(self.load(part), futures::future::join_all(after));
        loaded
    }

    /// Returns a part as a search sees it, if it is at hand.
    fn at_hand(&self, part: usize) -> Option<PartAtHand> {
        if let Some(directory) = self.try_directory(part) {
            return Some(PartAtHand::Filed(directory));
        }
        match self.0.cache.get(&self.key(CachedKind::Part, part)) {
            Some(Cached::Part(p)) => Some(PartAtHand::Whole(p)),
            _ => None,
        }
    }

    /// Runs a search over the parts at hand. Returns `None` if it needs another part.
    pub(crate) fn search_memory<T>(
        &self,
        search: impl FnOnce(&Parts<'_>) -> Result<T, MissingPart>,
    ) -> Option<T> {
        search(&Parts { version: self, held: &[] }).ok()
    }

    /// Runs a search, and loads each part that it misses. `search` is called again after each load.
    pub(crate) async fn search<T>(
        &self,
        search: impl FnMut(&Parts<'_>) -> Result<T, MissingPart>,
    ) -> Result<T, TableError> {
        self.search_ahead(0, search).await
    }

    /// [`Version::search`] for a walk, which keeps its position in its own state and continues there. It will
    /// need the next part, too.
    pub(crate) async fn walk<T>(
        &self,
        walk: impl FnMut(&Parts<'_>) -> Result<T, MissingPart>,
    ) -> Result<T, TableError> {
        self.search_ahead(PARTS_AHEAD, walk).await
    }

    async fn search_ahead<T>(
        &self,
        ahead: usize,
        mut search: impl FnMut(&Parts<'_>) -> Result<T, MissingPart>,
    ) -> Result<T, TableError> {
        let mut held: Vec<(usize, Arc<LoadedPart>)> = Vec::new();
        loop {
            let MissingPart(part) = match search(&Parts { version: self, held: &held }) {
                Ok(answer) => return Ok(answer),
                Err(missing) => missing,
            };
            let loaded = self.load_ahead(part, ahead).await?;
            if held.len() == HELD_MAX {
                held.remove(0);
            }
            held.push((part, loaded));
        }
    }

    /// Returns the entry with exactly this path, if there is one.
    ///
    /// # Errors
    /// As [`Version::part`].
    pub async fn find(&self, path: &str) -> Result<Option<Found>, TableError> {
        self.search(|parts| parts.find(path)).await
    }

    /// Returns the entry at an ordinal; `None` past the end.
    ///
    /// # Errors
    /// As [`Version::part`].
    pub async fn entry(&self, ordinal: u64) -> Result<Option<Found>, TableError> {
        self.search(|parts| parts.entry(ordinal)).await
    }

    /// Returns the entry of a part's row; `None` past the end of the part.
    ///
    /// # Errors
    /// As [`Version::part`].
    pub async fn entry_in(&self, part: usize, row: usize) -> Result<Option<Found>, TableError> {
        self.check_part(part)?;
        match row < self.0.index.parts()[part].entries as usize {
            true => self.entry(self.0.index.first_ordinal(part) + row as u64).await,
            false => Ok(None),
        }
    }

    /// [`Version::entry`] over the parts at hand. The outer `None` means "not at hand".
    #[must_use]
    pub fn try_entry(&self, ordinal: u64) -> Option<Option<Found>> {
        self.search_memory(|parts| parts.entry(ordinal))
    }

    /// Returns the ordinal of the first entry at or after `path` in byte order, else the entry count.
    ///
    /// # Errors
    /// As [`Version::part`].
    pub async fn lower_bound(&self, path: &[u8]) -> Result<u64, TableError> {
        self.search(|parts| parts.lower_bound(path)).await
    }

    /// Returns the object that `path` names in the tree, if there is one.
    ///
    /// Members of shards are not in the tree.
    ///
    /// The path is clean and has no trailing slash; `""` is the root directory.
    ///
    /// # Errors
    /// As [`Version::part`].
    pub async fn resolve(&self, path: &str) -> Result<Option<Resolved>, TableError> {
        self.search(|parts| parts.resolve(path)).await
    }

    /// [`Version::resolve`] over the parts at hand. The outer `None` means "not at hand".
    ///
    /// A call of `resolve` then loads the missing parts, or returns the error.
    #[must_use]
    pub fn try_resolve(&self, path: &str) -> Option<Option<Resolved>> {
        self.search_memory(|parts| parts.resolve(path))
    }

    /// Returns the path of a directory that this version returned; `None` if `dir` names no directory.
    ///
    /// # Errors
    /// As [`Version::part`].
    pub async fn dir_path(&self, dir: DirId) -> Result<Option<Arc<str>>, TableError> {
        match self.try_dir_path(dir) {
            Some(path) => Ok(path),
            None => Ok(self.keep_dir_path(dir, self.search(|parts| parts.dir_path(dir)).await?)),
        }
    }

    /// [`Version::dir_path`] over the parts at hand. The outer `None` means "not at hand".
    #[must_use]
    pub fn try_dir_path(&self, dir: DirId) -> Option<Option<Arc<str>>> {
        if let Some(path) = self.0.cache.dir_path(&(self.0.number, dir)) {
            return Some(Some(path));
        }
        let path = self.search_memory(|parts| parts.dir_path(dir))?;
        Some(self.keep_dir_path(dir, path))
    }

    fn keep_dir_path(&self, dir: DirId, path: Option<String>) -> Option<Arc<str>> {
        let path: Arc<str> = path?.into();
        self.0.cache.keep_dir_path((self.0.number, dir), Arc::clone(&path));
        Some(path)
    }

    /// Loads a part from the tables, and writes its local file. Returns it, and whether the file is there.
    async fn load_part(&self, part: usize) -> Result<(LoadedPart, bool), TableError> {
        let inner = &self.0;
        let (entries, placement) = futures::try_join!(
            inner.entries.fetch(&*inner.source, part, 0..ENTRIES_SCHEMA.columns.num_columns()),
            inner.placement.fetch(&*inner.source, part, 0..PLACEMENT_SCHEMA.columns.num_columns())
        )?;
        let this = self.clone();
        blocking(move || {
            let inner = &this.0;
            let entries = decode::entries(&inner.entries, &inner.index, part, &entries)?;
            let placed = decode::placed(&inner.placement, &inner.doc, part, &placement, &entries)?;
            let loaded = LoadedPart::new(&entries, &placed);
            let filed = this.file_part(part, &loaded);
            Ok((loaded, filed))
        })
        .await
    }

    pub(crate) async fn chunks_footer(&self) -> Result<&Footer, TableError> {
        let inner = &self.0;
        inner
            .chunks
            .get_or_try_init(|| {
                Footer::read(&*inner.source, &CHUNKS_SCHEMA, inner.manifest.parts.len(), ROWS_PER_PART_MAX)
            })
            .await
    }

    /// Returns a part's rows of `chunks.parquet`, in the order of the slices that refer to them.
    ///
    /// No hash covers these rows: a caller hashes the bytes that it reads through them.
    ///
    /// # Errors
    /// [`TableError`] if the rows cannot be read or break the limits of the format;
    /// [`TableError::Internal`] if the version has no such part.
    pub async fn chunk_rows(&self, part: usize) -> Result<Arc<Vec<ChunkRow>>, TableError> {
        self.check_part(part)?;
        if let Some(Cached::Chunks(rows)) = self.0.cache.get(&self.key(CachedKind::Chunks, part)) {
            return Ok(rows);
        }
        match self.filed_chunk_rows(part).await? {
            Some(filed) => Ok(Arc::new(filed)),
            None => self.load_chunk_rows(part).await,
        }
    }

    /// Loads a part's rows of `chunks.parquet` from the table.
    pub(crate) async fn load_chunk_rows(&self, part: usize) -> Result<Arc<Vec<ChunkRow>>, TableError> {
        let load = || {
            let this = self.clone();
            async move {
                let footer = this.chunks_footer().await?;
                let columns = 0..CHUNKS_SCHEMA.columns.num_columns();
                let group = footer.fetch(&*this.0.source, part, columns).await?;
                let this = this.clone();
                let rows = blocking(move || {
                    let footer = this.0.chunks.get().ok_or_else(lost_footer)?;
                    let rows = decode::chunk_rows(footer, &this.0.index, part, &group)?;
                    let filed = this.file_chunk_rows(part, &rows);
                    Ok((rows, filed))
                });
                let (rows, filed) = rows.await?;
                Ok(Loaded { value: Cached::Chunks(Arc::new(rows)), keep: !filed })
            }
        };
        match self.0.cache.get_or_load(self.key(CachedKind::Chunks, part), load).await? {
            Cached::Chunks(rows) => Ok(rows),
            _ => Err(wrong_kind()),
        }
    }
}

fn wrong_kind() -> TableError {
    TableError::Internal("the cache returned a value of another kind than its key".into())
}

pub(crate) fn lost_footer() -> TableError {
    TableError::Internal("the footer of chunks.parquet was read and is missing".into())
}

impl Parts<'_> {
    pub fn index(&self) -> &PartIndex {
        &self.version.0.index
    }

    fn get(&self, part: usize) -> Result<PartAtHand, MissingPart> {
        if let Some((_, whole)) = self.held.iter().find(|(i, _)| *i == part) {
            return Ok(PartAtHand::Whole(Arc::clone(whole)));
        }
        self.version.at_hand(part).ok_or(MissingPart(part))
    }

    fn leaf(
        &self,
        part: usize,
        at_hand: &PartAtHand,
        leaf: usize,
        ahead: usize,
    ) -> Result<Arc<Leaf>, MissingPart> {
        let found = match at_hand {
            PartAtHand::Whole(whole) => whole.leaves().get(leaf).map(Arc::clone),
            PartAtHand::Filed(directory) => self.version.try_leaf(part, directory, leaf, ahead),
        };
        found.ok_or(MissingPart(part))
    }

    pub fn entry(&self, ordinal: u64) -> Result<Option<Found>, MissingPart> {
        self.entry_ahead(ordinal, 0)
    }

    /// Returns the entry at an ordinal; `None` past the end. If it has to be read from a file, the `ahead`
    /// leaves that follow are read, too.
    pub fn entry_ahead(&self, ordinal: u64, ahead: usize) -> Result<Option<Found>, MissingPart> {
        let Some((part, row)) = self.index().find(ordinal) else { return Ok(None) };
        let leaf = self.leaf(part, &self.get(part)?, row / LEAF_ROWS, ahead)?;
        Ok(Some(Found { ordinal, leaf, row: row % LEAF_ROWS }))
    }

    /// Returns the leaf of a part that has `path` if the part has it; the number of the leaf's first row; and
    /// the first row of the leaf whose path is not below `path`, or the number of its rows.
    fn seek(&self, part: usize, path: &[u8]) -> Result<(Arc<Leaf>, usize, usize), MissingPart> {
        let at_hand = self.get(part)?;
        let leaf = match &at_hand {
            PartAtHand::Whole(whole) => {
                let leaves = whole.leaves();
                leaf_of_path(leaves.len(), |i| leaves[i].first_path(), path)
            }
            PartAtHand::Filed(directory) => leaf_of_path(directory.len(), |i| directory.first(i), path),
        };
        let found = self.leaf(part, &at_hand, leaf, 0)?;
        let row = found.lower_bound(path);
        if leaf * LEAF_ROWS + row == self.index().parts()[part].entries as usize
            && part + 1 < self.index().parts().len()
        {
            // Only the manifest says that the next part begins after `path`; loading the part checks it.
            self.get(part + 1)?;
        }
        Ok((found, leaf * LEAF_ROWS, row))
    }

    pub fn lower_bound(&self, path: &[u8]) -> Result<u64, MissingPart> {
        let Some(part) = self.index().candidate(path) else { return Ok(0) };
        let (_, first, row) = self.seek(part, path)?;
        Ok(self.index().first_ordinal(part) + (first + row) as u64)
    }

    pub fn find(&self, path: &str) -> Result<Option<Found>, MissingPart> {
        let Some(part) = self.index().candidate(path.as_bytes()) else { return Ok(None) };
        let (leaf, first, row) = self.seek(part, path.as_bytes())?;
        if row == leaf.len() || leaf.entry(row).path != path {
            return Ok(None);
        }
        let ordinal = self.index().first_ordinal(part) + (first + row) as u64;
        Ok(Some(Found { ordinal, leaf, row }))
    }

    fn resolve(&self, path: &str) -> Result<Option<Resolved>, MissingPart> {
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

    fn dir_path(&self, dir: DirId) -> Result<Option<String>, MissingPart> {
        if dir.depth == 0 {
            return Ok((dir.first == 0).then(String::new));
        }
        let first = self.entry(dir.first)?;
        Ok(first.and_then(|f| prefix(f.entry().path, dir.depth).map(str::to_owned)))
    }
}

/// Whether entries of this kind are in the tree.
pub(crate) fn in_tree(kind: EntryKind) -> bool {
    matches!(kind, EntryKind::File | EntryKind::Symlink)
}
