//! Tables at their place, and tables from whoever answers.

use super::Fallback;
use crate::ClientError;
use async_trait::async_trait;
use bytes::Bytes;
use fletch_core::{Kind, LayoutId, Root, TagName};
use fletch_origin::{Origin, OriginError};
use fletch_tables::source::DOCUMENT_BYTES_MAX;
use fletch_tables::{LayoutDoc, SourceError, Table, TableRange, TableSource, TagDoc, paths};
use futures::TryStreamExt;
use std::sync::Arc;
use tokio::sync::OnceCell;

/// The longest tag document, in bytes.
const TAG_BYTES_MAX: u64 = 64 << 10;

/// What `version`, a tag or a root, is at a place of tables; of several layouts of a root the
/// first by name that is whole.
///
/// # Errors
/// [`ClientError::Origin`] when there is none or it cannot be read, [`ClientError::Config`] for a
/// text that is neither a tag nor a root.
pub async fn resolve(tables: &Origin, version: &str) -> Result<(Root, LayoutId), ClientError> {
    let failed =
        |kind, why: String| ClientError::Origin { server: format!("tables at {}", tables.uri()), kind, why };
    let origin = |e: &OriginError| failed(e.kind(), e.to_string());
    let Ok(root) = version.parse::<Root>() else {
        let tag = TagName::new(version).map_err(|e| ClientError::Config(e.to_string()))?;
        let path = paths::tag(&tag);
        let got = tables.get(&path, None, None).await.map_err(|e| origin(&e))?;
        if got.bytes.len() as u64 > TAG_BYTES_MAX {
            return Err(failed(Kind::Corrupt, format!("{path} has {} bytes", got.bytes.len())));
        }
        let doc = TagDoc::parse(&got.bytes).map_err(|e| failed(e.kind(), e.to_string()))?;
        return Ok((doc.root, doc.layout));
    };
    let mut list = tables.list(&paths::layouts(root));
    while let Some(object) = list.try_next().await.map_err(|e| origin(&e))? {
        if !object.path.ends_with("/layout.json") {
            continue;
        }
        let got = tables.get(&object.path, None, None).await.map_err(|e| origin(&e))?;
        let doc = LayoutDoc::parse_any(&got.bytes).map_err(|e| failed(e.kind(), e.to_string()))?;
        return Ok((root, doc.layout));
    }
    Err(failed(Kind::NotFound, format!("there is no version {root}")))
}

/// The tables of one version and layout, read from their place at an origin.
pub struct PlaceTables {
    origin: Origin,
    root: Root,
    layout: LayoutId,
    sizes: [OnceCell<u64>; Table::ALL.len()],
}

impl PlaceTables {
    /// Binds a place to a version and a layout. Reads nothing yet.
    #[must_use]
    pub fn new(origin: Origin, root: Root, layout: LayoutId) -> Self {
        PlaceTables { origin, root, layout, sizes: Default::default() }
    }

    async fn size(&self, table: Table) -> Result<u64, SourceError> {
        let at = Table::ALL.iter().position(|t| *t == table).unwrap_or(0);
        let head = || async { self.origin.head(&table.path(self.root, self.layout)).await.map(|m| m.size) };
        self.sizes[at].get_or_try_init(head).await.copied().map_err(source_error)
    }
}

// By value for `map_err`.
#[expect(clippy::needless_pass_by_value, reason = "the shape of map_err")]
fn source_error(e: OriginError) -> SourceError {
    SourceError { kind: e.kind(), message: e.to_string() }
}

#[async_trait]
impl TableSource for PlaceTables {
    async fn read(&self, table: Table, range: TableRange) -> Result<Bytes, SourceError> {
        let path = table.path(self.root, self.layout);
        let range = match range {
            TableRange::Range(r) => Some(r),
            TableRange::Suffix(n) => {
                let size = self.size(table).await?;
                Some(size.saturating_sub(n)..size)
            }
            TableRange::All => {
                let size = self.size(table).await?;
                if size > DOCUMENT_BYTES_MAX {
                    let message = format!("{path}: {size} bytes, the limit is {DOCUMENT_BYTES_MAX}");
                    return Err(SourceError { kind: Kind::Corrupt, message });
                }
                None
            }
        };
        Ok(self.origin.get(&path, range, None).await.map_err(source_error)?.bytes)
    }
}

/// The server's tables, or the place's while it does not answer. Both are the same bytes or are
/// refused: parts fold into the root, placements into the layout.
pub(super) struct Either {
    pub fallback: Fallback,
    pub server: Option<Arc<dyn TableSource>>,
    pub place: PlaceTables,
}

#[async_trait]
impl TableSource for Either {
    async fn read(&self, table: Table, range: TableRange) -> Result<Bytes, SourceError> {
        if let Some(server) = self.server.as_ref().filter(|_| !self.fallback.is_away()) {
            match server.read(table, range.clone()).await {
                Err(e) if e.kind == Kind::Unavailable && self.fallback.is_silent().await => {
                    tracing::debug!(error = %e, "tables come from the origin");
                }
                answer => return answer,
            }
        }
        self.fallback.spread().await;
        self.place.read(table, range).await
    }
}
