//! Chunks from a server.

use crate::fs::read::ChunkSource;
use bytes::Bytes;
use fletch_client::Client;
use fletch_core::{Hash, Root};
use fletch_store::FetchError;
use futures::future::{BoxFuture, FutureExt};

/// Chunks of one version, from the server that `client` asks.
pub struct ServerChunks {
    /// Who is asked.
    pub client: Client,
    /// Of which version.
    pub root: Root,
}

impl ChunkSource for ServerChunks {
    fn fetch(&self, hash: Hash, len: u32, _attempt: u32) -> BoxFuture<'static, Result<Bytes, FetchError>> {
        let (client, root) = (self.client.clone(), self.root);
        // Unchecked: the store hashes whatever it is brought, once.
        async move { client.chunk_unchecked(root, hash, len).await.map_err(|e| FetchError::new(e.kind(), e)) }
            .boxed()
    }
}
