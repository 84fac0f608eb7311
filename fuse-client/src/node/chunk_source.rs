//! The chunk source of a client of the node store: the store's owner first, and the mount's own source beyond
//! it.

use super::{Node, Role};
use crate::fs::read::{ChunkSource, FetchRequest};
use crate::short_circuit::ShortCircuit;
use bytes::Bytes;
use fletch_client::fallback::OriginLocation;
use fletch_core::{DatasetName, Root};
use fletch_store::FetchError;
use futures::future::{BoxFuture, FutureExt};
use std::sync::Arc;

/// Fetches chunks from the owner of the node store, and otherwise from the source beyond it.
pub struct NodeChunks {
    /// This process's part in the node store.
    pub node: Arc<Node>,
    /// The version.
    pub root: Root,
    /// The dataset through which the mount reads.
    pub dataset: DatasetName,
    /// The source if this mount is not a client, or the owner sent no bytes.
    pub beyond: Arc<dyn ChunkSource>,
}

impl ChunkSource for NodeChunks {
    fn fetch(
        &self,
        request: FetchRequest,
        location: &OriginLocation,
        attempt: u32,
    ) -> BoxFuture<'static, Result<Bytes, FetchError>> {
        let (node, beyond, location) = (Arc::clone(&self.node), Arc::clone(&self.beyond), location.clone());
        let (root, dataset) = (self.root, self.dataset.clone());
        async move {
            // After wrong bytes from the owner, the retry goes to the source beyond.
            if attempt == 0
                && let Some(bytes) = node.fetch_from_owner(root, &dataset, &request).await
            {
                return Ok(bytes);
            }
            beyond.fetch(request, &location, attempt).await
        }
        .boxed()
    }

    /// A client asks its owner first, which takes longer.
    fn has_hits(&self) -> bool {
        self.beyond.has_hits() && !matches!(self.node.role(), Role::Client(_))
    }

    fn short_circuit(&self) -> Option<ShortCircuit<'_>> {
        self.beyond.short_circuit().filter(|_| self.has_hits())
    }

    fn hit(&self, wanted: &FetchRequest, buffer: &mut [u8]) -> bool {
        self.beyond.hit(wanted, buffer)
    }
}
