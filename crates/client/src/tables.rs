//! Reads the tables of a version from a server.

use crate::Client;
use crate::body::BodyLength;
use async_trait::async_trait;
use bytes::Bytes;
use fletch_api::routes;
use fletch_core::{Kind, LayoutId, Root};
use fletch_tables::source::DOCUMENT_BYTES_MAX;
use fletch_tables::{SourceError, Table, TableRange, TableSource};
use std::sync::Arc;

struct HttpTables {
    client: Client,
    root: Root,
    layout: LayoutId,
}

impl Client {
    /// Returns the tables of a version in one layout, read through this client.
    #[must_use]
    pub fn tables(&self, root: Root, layout: LayoutId) -> Arc<dyn TableSource> {
        Arc::new(HttpTables { client: self.clone(), root, layout })
    }
}

#[async_trait]
impl TableSource for HttpTables {
    async fn read(&self, table: Table, range: TableRange) -> Result<Bytes, SourceError> {
        let path = match table {
            Table::Manifest => routes::manifest(self.root),
            Table::Entries => routes::entries(self.root),
            Table::Layout => routes::layout(self.root, self.layout),
            Table::Placement => routes::placement(self.root, self.layout),
            Table::Chunks | Table::Groups => {
                let message = format!("the server does not serve {table}");
                return Err(SourceError { kind: Kind::Invalid, message });
            }
        };
        let (range, length) = match range {
            TableRange::All => (None, BodyLength::AtMost(DOCUMENT_BYTES_MAX)),
            TableRange::Range(r) if r.start >= r.end => return Ok(Bytes::new()),
            TableRange::Range(r) => {
                (Some(format!("bytes={}-{}", r.start, r.end - 1)), BodyLength::Exactly(r.end - r.start))
            }
            TableRange::Suffix(0) => return Ok(Bytes::new()),
            TableRange::Suffix(n) => (Some(format!("bytes=-{n}")), BodyLength::AtMost(n)),
        };
        self.client
            .table(&path, range, length)
            .await
            .map_err(|e| SourceError { kind: e.kind(), message: format!("{table}: {e}") })
    }
}
