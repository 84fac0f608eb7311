//! Caches raw blocks of version tables. Eight mounts that read the same tables cost the origin one read.
//!
//! This module must not trust the bytes. Their reader (`fletch_tables` of this server or of a client) checks
//! parts against the root, and placements against the layout.

use super::HomeOrigin;
use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use fletch_bounds::carried;
use fletch_core::{Kind, LayoutId, Root};
use fletch_origin::{ObjectMeta, OriginError};
use fletch_tables::{SourceError, Table, TableRange, TableSource, paths, source::DOCUMENT_BYTES_MAX};
use moka::sync::Cache;
use std::{ops::Range, sync::Arc, time::Duration};
use tokio::sync::OnceCell;
use tokio_util::task::TaskTracker;

/// Bytes of a block, which has the rows of a few parts.
const BLOCK_BYTES: u64 = 1 << 20;
/// How long a table's length and etag are cached.
///
/// Tables are written once. If somebody writes them anew under the same root, the server notices after this
/// time.
const META_TTL: Duration = Duration::from_secs(300);
/// The most tables whose length and etag are cached.
const METAS_MAX: u64 = 4096;

/// A table: its scope, the URI of its origin, and its path.
type TableKey = (Arc<str>, String, String);
type Cell<T> = Arc<OnceCell<T>>;

/// A block that is being read or was read, and its length.
#[derive(Clone)]
struct Block {
    len: u32,
    cell: Cell<Bytes>,
}

/// The cached blocks of all tables. Clones share them.
#[derive(Clone)]
pub struct TableBlocks {
    metas: Cache<TableKey, Cell<ObjectMeta>>,
    blocks: Cache<(TableKey, String, u64), Block>,
    /// The scope of this handle. One scope does not see the blocks of another.
    scope: Arc<str>,
    tasks: TaskTracker,
}

impl TableBlocks {
    /// Creates a cache of at most `bytes_max` bytes.
    ///
    /// Reads run on `tasks`, so that a client that disconnects does not end a read that others wait for.
    #[must_use]
    pub fn new(bytes_max: u64, tasks: TaskTracker) -> Self {
        let metas = Cache::builder().max_capacity(METAS_MAX).time_to_live(META_TTL).build();
        let blocks = Cache::builder().max_capacity(bytes_max).weigher(|_, b: &Block| b.len.max(1)).build();
        TableBlocks { metas, blocks, scope: Arc::default(), tasks }
    }

    /// Returns a handle to the same cache whose blocks only `scope` sees.
    #[must_use]
    pub fn scoped(&self, scope: &str) -> Self {
        TableBlocks { scope: scope.into(), ..self.clone() }
    }

    /// Returns the bytes of the cached blocks.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.blocks.weighted_size()
    }

    /// Drops the blocks of a version's tables. Whoever reads them again reads them from the origin.
    pub fn forget(&self, root: Root) {
        let tables = format!("{}{root}/", paths::VERSIONS);
        for (key, _) in &self.blocks {
            let ((scope, _, path), ..) = &*key;
            if *scope == self.scope && path.starts_with(&tables) {
                self.blocks.invalidate(&*key);
            }
        }
        self.blocks.run_pending_tasks();
    }

    /// Returns the length and etag of a table.
    pub async fn meta(&self, origin: &HomeOrigin, path: &str) -> Result<ObjectMeta, OriginError> {
        let file = (Arc::clone(&self.scope), origin.uri().to_string(), path.to_owned());
        let cell = self.metas.get_with(file, Arc::default);
        let (origin, path) = (origin.clone(), path.to_owned());
        self.once(&cell, async move { origin.head(&path).await }).await
    }

    /// Returns bytes `range` of the table that `meta` describes. The range must lie within the table.
    pub async fn read(
        &self,
        origin: &HomeOrigin,
        meta: &ObjectMeta,
        range: Range<u64>,
    ) -> Result<Bytes, OriginError> {
        let mut out = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let n = at / BLOCK_BYTES;
            let (begin, end) = (n * BLOCK_BYTES, ((n + 1) * BLOCK_BYTES).min(meta.size));
            let block = self.block(origin, meta, n, begin..end).await?;
            let to = range.end.min(end);
            // Both lie within a block and fit a usize.
            let cut = |x: u64| usize::try_from(x - begin).unwrap_or(usize::MAX);
            out.push(block.slice(cut(at)..cut(to)));
            at = to;
        }
        Ok(match out.len() {
            0 => Bytes::new(),
            1 => out.swap_remove(0),
            _ => {
                let mut whole = BytesMut::with_capacity(out.iter().map(Bytes::len).sum());
                out.iter().for_each(|b| whole.extend_from_slice(b));
                whole.freeze()
            }
        })
    }

    async fn block(
        &self,
        origin: &HomeOrigin,
        meta: &ObjectMeta,
        n: u64,
        range: Range<u64>,
    ) -> Result<Bytes, OriginError> {
        let file = (Arc::clone(&self.scope), origin.uri().to_string(), meta.path.clone());
        let key = (file.clone(), etag(meta), n);
        let new = || Block {
            len: u32::try_from(range.end - range.start).unwrap_or(u32::MAX),
            cell: Arc::default(),
        };
        let block = self.blocks.get_with(key, new);
        let (origin, path, pin) = (origin.clone(), meta.path.clone(), meta.pin());
        let want = range.clone();
        let read = async move { Ok(origin.get(&path, Some(want), Some(&pin)).await?.bytes) };
        let got = self.once(&block.cell, read).await;
        if let Err(OriginError::Changed { .. } | OriginError::NotFound { .. }) = &got {
            self.metas.invalidate(&file);
        }
        got
    }

    /// Returns the cell's value, which `read` makes in a task of its own if the cell is empty.
    async fn once<T, F>(&self, cell: &Cell<T>, read: F) -> Result<T, OriginError>
    where
        T: Clone + Send + Sync + 'static,
        F: Future<Output = Result<T, OriginError>> + Send + 'static,
    {
        if let Some(v) = cell.get() {
            return Ok(v.clone());
        }
        let owned = Arc::clone(cell);
        let task = self.tasks.spawn(carried(async move { owned.get_or_try_init(|| read).await.cloned() }));
        task.await.unwrap_or_else(|e| {
            Err(OriginError::Unavailable {
                what: "a table".to_owned(),
                why: format!("the task that read it was lost: {e}"),
            })
        })
    }
}

/// Returns the etag of a table: the origin's, or one made of its size and time.
#[must_use]
pub fn etag(meta: &ObjectMeta) -> String {
    match &meta.etag {
        Some(e) => e.trim_start_matches("W/").trim_matches('"').to_owned(),
        None => format!("{:x}-{:x}", meta.size, meta.mtime_ns.unwrap_or(0)),
    }
}

/// The tables of one (root, layout) at one origin.
#[derive(Clone)]
pub struct TableLocation {
    /// The cached blocks.
    pub blocks: TableBlocks,
    /// The origin that has `fletch/…`.
    pub origin: HomeOrigin,
    /// The version.
    pub root: Root,
    pub layout: LayoutId,
}

#[async_trait]
impl TableSource for TableLocation {
    async fn read(&self, table: Table, range: TableRange) -> Result<Bytes, SourceError> {
        let path = table.path(self.root, self.layout);
        let failed = |e: OriginError| SourceError { kind: e.kind(), message: e.to_string() };
        let invalid = |why: String| SourceError { kind: Kind::Corrupt, message: format!("{path}: {why}") };
        let meta = self.blocks.meta(&self.origin, &path).await.map_err(failed)?;
        let range = match range {
            TableRange::All if meta.size > DOCUMENT_BYTES_MAX => {
                return Err(invalid(format!(
                    "it has {} bytes; at most {DOCUMENT_BYTES_MAX} are allowed",
                    meta.size
                )));
            }
            TableRange::All => 0..meta.size,
            TableRange::Suffix(n) => meta.size.saturating_sub(n)..meta.size,
            TableRange::Range(r) if r.start > r.end || r.end > meta.size => {
                return Err(invalid(format!("bytes {r:?} lie past its {} bytes", meta.size)));
            }
            TableRange::Range(r) => r,
        };
        self.blocks.read(&self.origin, &meta, range).await.map_err(failed)
    }
}
