//! Chunks from a server, or from the origin while that is gone.

use crate::fs::read::{ChunkSource, FetchRequest};
use crate::node::Node;
use bytes::Bytes;
use fletch_client::fallback::{Fallback, Spot};
use fletch_client::{Client, ClientError};
use fletch_core::Root;
use fletch_store::FetchError;
use futures::future::{BoxFuture, FutureExt};
use std::sync::Arc;

/// Chunks of one version, from the server that `client` asks.
pub struct ServerChunks {
    /// Who is asked.
    pub client: Client,
    /// Of which version.
    pub root: Root,
}

impl ChunkSource for ServerChunks {
    fn fetch(
        &self,
        request: FetchRequest,
        _: &Spot,
        _: u32,
    ) -> BoxFuture<'static, Result<Bytes, FetchError>> {
        let (client, root) = (self.client.clone(), self.root);
        async move { fetch_from_server(client, root, &request).await.map_err(|e| FetchError::new(e.kind(), e)) }.boxed()
    }
}

/// Unchecked: the store hashes whatever it is brought, once.
pub(crate) async fn fetch_from_server(
    client: Client,
    root: Root,
    request: &FetchRequest,
) -> Result<Bytes, ClientError> {
    match request {
        FetchRequest::Chunk { hash, len } => client.chunk_unchecked(root, *hash, *len).await,
        FetchRequest::File { path, len, .. } => client.file_unchecked(root, path, *len).await,
    }
}

/// Chunks of one version, from a server or from the origin behind it.
pub struct FallbackChunks {
    /// Who decides.
    pub fallback: Fallback,
    /// Of which version.
    pub root: Root,
}

impl ChunkSource for FallbackChunks {
    fn fetch(
        &self,
        request: FetchRequest,
        spot: &Spot,
        _: u32,
    ) -> BoxFuture<'static, Result<Bytes, FetchError>> {
        let (fallback, root, spot) = (self.fallback.clone(), self.root, spot.clone());
        async move {
            let (_, len) = request.hash_and_len();
            let got = fallback
                .bytes_unchecked(&spot, len, |client| fetch_from_server(client, root, &request))
                .await;
            got.map_err(|e| FetchError::new(e.kind(), e))
        }
        .boxed()
    }
}

/// What a mount with a store on its node reads from.
pub struct NodeChunks {
    /// The node's store.
    pub node: Arc<Node>,
    /// Whom to ask when this mount owns it, or its owner has not what is request.
    pub beyond: Arc<dyn ChunkSource>,
}

impl ChunkSource for NodeChunks {
    fn fetch(
        &self,
        request: FetchRequest,
        spot: &Spot,
        attempt: u32,
    ) -> BoxFuture<'static, Result<Bytes, FetchError>> {
        let (node, beyond, spot) = (Arc::clone(&self.node), Arc::clone(&self.beyond), spot.clone());
        async move {
            // What an owner brought and was wrong is not asked of it again.
            if attempt == 0
                && let Some(bytes) = node.fetch_from_owner(&request).await
            {
                return Ok(bytes);
            }
            beyond.fetch(request, &spot, attempt).await
        }
        .boxed()
    }
}
