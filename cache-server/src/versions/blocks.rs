//! Version tables as they lie at an origin, read in blocks that are kept for a while: eight
//! mounts that read the same tables cost the origin one reading.
//!
//! Nothing is believed of these bytes here: whoever reads them (this server's own
//! `fletch_tables`, or a client's) checks parts against the root and placements against the layout.

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use fletch_core::{Kind, LayoutId, Root};
use fletch_origin::{ObjectMeta, Origin, OriginError};
use fletch_tables::{SourceError, Table, TableRange, TableSource, source::DOCUMENT_BYTES_MAX};
use moka::sync::Cache;
use std::{ops::Range, sync::Arc, time::Duration};
use tokio::sync::OnceCell;
use tokio_util::task::TaskTracker;

/// Bytes of a block: a few parts' rows.
const BLOCK_BYTES: u64 = 1 << 20;
/// How long a table's length and etag are believed. Tables are written once; this bounds how long
/// a place that was made anew under the same root is mistaken for the old one.
const META_TTL: Duration = Duration::from_secs(300);
/// Tables whose length and etag are remembered.
const METAS_MAX: u64 = 4096;

/// In which scope, at which URI and path.
type File = (Arc<str>, String, String);
type Cell<T> = Arc<OnceCell<T>>;

/// A block being read or kept, with the bytes it will have.
#[derive(Clone)]
struct Block {
    len: u32,
    cell: Cell<Bytes>,
}

/// The kept blocks of all tables. Cloning shares them.
#[derive(Clone)]
pub struct Blocks {
    metas: Cache<File, Cell<ObjectMeta>>,
    blocks: Cache<(File, String, u64), Block>,
    /// Whose: what one scope brought is nothing to another.
    scope: Arc<str>,
    tasks: TaskTracker,
}

impl Blocks {
    /// Keeps at most `bytes_max` bytes; reads run on `tasks`, so that a reader who goes away does
    /// not end what others wait for.
    #[must_use]
    pub fn new(bytes_max: u64, tasks: TaskTracker) -> Self {
        let metas = Cache::builder().max_capacity(METAS_MAX).time_to_live(META_TTL).build();
        let blocks = Cache::builder().max_capacity(bytes_max).weigher(|_, b: &Block| b.len.max(1)).build();
        Blocks { metas, blocks, scope: Arc::default(), tasks }
    }

    /// The same room, for what `scope` reads and nobody else sees.
    #[must_use]
    pub fn scoped(&self, scope: &str) -> Self {
        Blocks { scope: scope.into(), ..self.clone() }
    }

    /// Bytes kept now.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.blocks.weighted_size()
    }

    /// Length and etag of a table.
    pub async fn meta(&self, origin: &Origin, path: &str) -> Result<ObjectMeta, OriginError> {
        let file = (Arc::clone(&self.scope), origin.uri().to_string(), path.to_owned());
        let cell = self.metas.get_with(file, Arc::default);
        let (origin, path) = (origin.clone(), path.to_owned());
        self.once(&cell, async move { origin.head(&path).await }).await
    }

    /// Exactly the bytes `range` of the table that `meta` describes; the range lies within it.
    pub async fn read(
        &self,
        origin: &Origin,
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
            // Within a block both fit a usize.
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
        origin: &Origin,
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

    /// The cell's value, read by `read` in a task of its own if nobody has read it.
    async fn once<T, F>(&self, cell: &Cell<T>, read: F) -> Result<T, OriginError>
    where
        T: Clone + Send + Sync + 'static,
        F: Future<Output = Result<T, OriginError>> + Send + 'static,
    {
        if let Some(v) = cell.get() {
            return Ok(v.clone());
        }
        let owned = Arc::clone(cell);
        let task = self.tasks.spawn(async move { owned.get_or_try_init(|| read).await.cloned() });
        task.await.unwrap_or_else(|e| {
            Err(OriginError::Unavailable {
                what: "a table".to_owned(),
                why: format!("the read was lost: {e}"),
            })
        })
    }
}

/// The etag we give a table: the origin's, or else what distinguishes one file from another.
#[must_use]
pub fn etag(meta: &ObjectMeta) -> String {
    match &meta.etag {
        Some(e) => e.trim_start_matches("W/").trim_matches('"').to_owned(),
        None => format!("{:x}-{:x}", meta.size, meta.mtime_ns.unwrap_or(0)),
    }
}

/// The tables of one (root, layout) at one place.
#[derive(Clone)]
pub struct TableLocation {
    /// The kept blocks.
    pub blocks: Blocks,
    /// Where `fletch/…` is.
    pub origin: Origin,
    /// The version.
    pub root: Root,
    /// The layout.
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
                return Err(invalid(format!("{} bytes, at most {DOCUMENT_BYTES_MAX} are read", meta.size)));
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
