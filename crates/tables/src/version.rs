//! One version in one layout. Opening it reads no part; each part is loaded when a call first needs it.
//!
//! `search.rs` has the searches. A `try_` method searches the parts at hand; the others load what is missing.

use crate::cache::{CacheKey, Cached, CachedKind, Loaded, PartCache};
use crate::chunk_index::ChunkIndex;
use crate::chunks::ChunkRow;
use crate::footer::Footer;
use crate::leaf::Leaf;
use crate::local::version_hash;
use crate::schema::{CHUNKS_SCHEMA, ENTRIES_SCHEMA, PLACEMENT_SCHEMA, ROWS_PER_PART_MAX};
use crate::untrusted::blocking;
use crate::{LayoutDoc, LoadedPart, Manifest, Table, TableError, TableRange, TableSource, decode};
use fletch_core::manifest::LayoutKind;
use fletch_core::manifest::locate::{DirId, PartIndex};
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
    pub placement: Footer,
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
    pub(crate) async fn load(&self, part: usize) -> Result<Arc<LoadedPart>, TableError> {
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

/// Whether entries of this kind are in the tree.
pub(crate) fn in_tree(kind: EntryKind) -> bool {
    matches!(kind, EntryKind::File | EntryKind::Symlink)
}
