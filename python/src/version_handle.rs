//! What Python objects share of one version: its description, and the version opened in this process.

use crate::connections::{Connections, Settings};
use crate::errors::Failure;
use crate::fetch::{self, Item, OpenVersion};
use crate::groups::KnownGroups;
use crate::process::{Slot, wait};
use crate::ranges::{self, Recent, WantedRange};
use bytes::Bytes;
use fletch_api::ResolvedVersion;
use fletch_tables::PartCache;
use pyo3::prelude::*;
use std::sync::Arc;

/// The bytes of version tables in the memory of a process, for all versions together.
pub const TABLES_BYTES: u64 = 256 << 20;

static TABLES: Slot<PartCache> = Slot::new();

/// A version, opened in each process when it is first read.
#[derive(Debug)]
pub struct VersionHandle {
    connections: Arc<Connections>,
    /// The server's answer.
    pub resolved: ResolvedVersion,
    open: Slot<OpenVersion>,
    /// The chunks that a read of ranges hashed last.
    recent: Slot<Recent>,
    known_groups: Slot<KnownGroups>,
}

impl VersionHandle {
    /// Creates a handle from the server's answer. It reads nothing.
    pub fn new(connections: Arc<Connections>, resolved: ResolvedVersion) -> Arc<Self> {
        Arc::new(VersionHandle {
            connections,
            resolved,
            open: Slot::new(),
            recent: Slot::new(),
            known_groups: Slot::new(),
        })
    }

    /// Returns the version, opened in this process.
    pub fn open(&self, py: Python<'_>) -> PyResult<OpenVersion> {
        if let Some(open) = self.open.get(py) {
            return Ok(open);
        }
        let client = self.connections.live(py)?;
        let tables = tables(py, self.connections.settings());
        let (root, layout) = (self.resolved.root, self.resolved.layout);
        let client = client.for_dataset(Some(&self.resolved.dataset));
        let source = client.tables(root, layout);
        let opening = fletch_tables::Version::open(source, root, layout, tables);
        let version = wait(py, async move { opening.await.map_err(Failure::from) })?;
        let open = OpenVersion { client, version, verify: self.connections.settings().verify()? };
        self.open.set(py, open.clone());
        Ok(open)
    }

    /// Reads whole files. Returns them in the order of `items`.
    pub fn read_all(
        &self,
        py: Python<'_>,
        items: impl AsRef<[Item]> + Send + 'static,
    ) -> PyResult<Vec<Bytes>> {
        let open = self.open(py)?;
        wait(py, async move { fetch::read_many(&open, items.as_ref()).await })
    }

    /// Reads ranges of files. Returns them in the order of `wanted`.
    pub fn read_ranges(&self, py: Python<'_>, wanted: Vec<WantedRange>) -> PyResult<Vec<Bytes>> {
        let open = self.open(py)?;
        let recent = self.recent.get(py).unwrap_or_default();
        let known = self.known_groups.get(py).unwrap_or_default();
        self.known_groups.set(py, known.clone());
        let read = async move { ranges::read_ranges(&open, &wanted, recent, &known).await };
        let (results, recent) = wait(py, read)?;
        self.recent.set(py, recent);
        Ok(results)
    }
}

/// Returns this process's cache of tables, scoped to one principal.
fn tables(py: Python<'_>, settings: &Settings) -> PartCache {
    let all = TABLES.get(py).unwrap_or_else(|| {
        let made = PartCache::new(TABLES_BYTES);
        TABLES.set(py, made.clone());
        made
    });
    all.scoped(&format!("{}\n{:?}\n{:?}", settings.server, settings.token, settings.token_file))
}
