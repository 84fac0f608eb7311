//! Reads version tables at an origin, and from the server or the origin, whichever answers.

use super::Fallback;
use crate::ClientError;
use async_trait::async_trait;
use bytes::Bytes;
use fletch_core::manifest::LayoutKind;
use fletch_core::{Kind, LayoutId, Root, TagName};
use fletch_origin::{Origin, OriginError};
use fletch_tables::source::DOCUMENT_BYTES_MAX;
use fletch_tables::{LayoutDoc, SourceError, Table, TableRange, TableSource, TagDoc, paths};
use futures::TryStreamExt;
use std::sync::Arc;
use tokio::sync::OnceCell;

/// The longest tag document, in bytes.
const TAG_BYTES_MAX: u64 = 64 << 10;

/// Resolves `version`, a tag or a root, by the tables at an origin.
///
/// For a root with several layouts, returns a packed layout if there is one, and the first one of its kind in
/// the order of their names.
///
/// # Errors
/// [`ClientError::Origin`] if the version does not exist or cannot be read. [`ClientError::Config`] for a
/// text that is neither a tag nor a root.
pub async fn resolve(tables: &Origin, version: &str) -> Result<(Root, LayoutId), ClientError> {
    let failed =
        |kind, why: String| ClientError::Origin { server: format!("tables at {}", tables.uri()), kind, why };
    let origin = |e: &OriginError| failed(e.kind(), e.to_string());
    let Ok(root) = version.parse::<Root>() else {
        let tag = TagName::new(version).map_err(|e| ClientError::Config(e.to_string()))?;
        let path = paths::tag(&tag);
        let got = tables.get(&path, None, None).await.map_err(|e| match e {
            OriginError::NotFound { .. } => failed(
                Kind::NotFound,
                format!(
                    "there is no tag {tag}; `fletch tag URI` lists the tags; `fletch index` and `fletch \
                     pack` write tables and move the tag `latest`"
                ),
            ),
            e => origin(&e),
        })?;
        if got.bytes.len() as u64 > TAG_BYTES_MAX {
            return Err(failed(
                Kind::Corrupt,
                format!("{path} has {} bytes, at most {TAG_BYTES_MAX} are allowed", got.bytes.len()),
            ));
        }
        let doc = TagDoc::parse(&got.bytes).map_err(|e| failed(e.kind(), e.to_string()))?;
        return Ok((doc.root, doc.layout));
    };
    let mut first = None;
    let mut list = tables.list(&paths::layouts(root));
    while let Some(object) = list.try_next().await.map_err(|e| origin(&e))? {
        if !object.path.ends_with("/layout.json") {
            continue;
        }
        let got = tables.get(&object.path, None, None).await.map_err(|e| origin(&e))?;
        let doc = LayoutDoc::parse_any(&got.bytes).map_err(|e| failed(e.kind(), e.to_string()))?;
        if doc.params.kind == LayoutKind::Pack {
            return Ok((root, doc.layout));
        }
        first = first.or(Some(doc.layout));
    }
    let none = || failed(Kind::NotFound, format!("no version {root} is published here"));
    Ok((root, first.ok_or_else(none)?))
}

/// The tables of one version in one layout, read from an origin.
pub struct OriginTables {
    origin: Origin,
    root: Root,
    layout: LayoutId,
    sizes: [OnceCell<u64>; Table::COUNT],
}

impl OriginTables {
    /// Returns the tables of a version in a layout. Reads nothing yet.
    #[must_use]
    pub fn new(origin: Origin, root: Root, layout: LayoutId) -> Self {
        OriginTables { origin, root, layout, sizes: Default::default() }
    }

    async fn size(&self, table: Table) -> Result<u64, SourceError> {
        let head = || async { self.origin.head(&table.path(self.root, self.layout)).await.map(|m| m.size) };
        self.sizes[table as usize].get_or_try_init(head).await.copied().map_err(source_error)
    }
}

#[expect(clippy::needless_pass_by_value, reason = "the shape of map_err")]
fn source_error(e: OriginError) -> SourceError {
    SourceError { kind: e.kind(), message: e.to_string() }
}

#[async_trait]
impl TableSource for OriginTables {
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
                    let message = format!("{path}: {size} bytes, at most {DOCUMENT_BYTES_MAX} are allowed");
                    return Err(SourceError { kind: Kind::Corrupt, message });
                }
                None
            }
        };
        Ok(self.origin.get(&path, range, None).await.map_err(source_error)?.bytes)
    }
}

/// The tables of a version, from the server or, while it does not answer, from the origin.
///
/// Both sources give the same bytes, or the reader rejects them: the parts hash to the root, the placement to
/// the layout.
struct FallbackTables {
    fallback: Fallback,
    server: Option<Arc<dyn TableSource>>,
    origin: OriginTables,
}

impl Fallback {
    /// Returns the tables of a version, read from the server or, while it does not answer, from the origin.
    #[must_use]
    pub fn tables(&self, root: Root, layout: LayoutId) -> Arc<dyn TableSource> {
        Arc::new(FallbackTables {
            fallback: self.clone(),
            server: self.0.client.as_ref().map(|c| c.tables(root, layout)),
            origin: OriginTables::new(self.0.tables.clone(), root, layout),
        })
    }
}

#[async_trait]
impl TableSource for FallbackTables {
    async fn read(&self, table: Table, range: TableRange) -> Result<Bytes, SourceError> {
        if let Some(server) = self.server.as_ref().filter(|_| !self.fallback.is_away()) {
            match server.read(table, range.clone()).await {
                Err(e) if e.kind == Kind::Unavailable && self.fallback.is_unreachable().await => {
                    tracing::debug!(error = %e, "reading tables from the origin");
                }
                answer => return answer,
            }
        }
        self.fallback.spread().await;
        self.origin.read(table, range).await
    }
}
