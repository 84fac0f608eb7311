//! Chunks by way of the node's owner, and from wherever they come otherwise.

use super::Node;
use crate::fs::read::{ChunkSource, Wanted};
use bytes::Bytes;
use fletch_client::fallback::OriginLocation;
use fletch_store::FetchError;
use futures::future::{BoxFuture, FutureExt};
use std::sync::Arc;

/// What a mount with a store on its node reads from.
pub struct NodeChunks {
    /// The node's store.
    pub node: Arc<Node>,
    /// Whom to ask when this mount owns it, or its owner has not what is wanted.
    pub beyond: Arc<dyn ChunkSource>,
}

impl ChunkSource for NodeChunks {
    fn fetch(
        &self,
        wanted: Wanted,
        spot: &OriginLocation,
        attempt: u32,
    ) -> BoxFuture<'static, Result<Bytes, FetchError>> {
        let (node, beyond, spot) = (Arc::clone(&self.node), Arc::clone(&self.beyond), spot.clone());
        async move {
            // What an owner brought and was wrong is not asked of it again.
            if attempt == 0
                && let Some(bytes) = node.ask_owner(&wanted).await
            {
                return Ok(bytes);
            }
            beyond.fetch(wanted, &spot, attempt).await
        }
        .boxed()
    }
}
