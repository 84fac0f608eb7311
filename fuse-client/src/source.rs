//! Chunks from a server.

use crate::fs::read::{ChunkSource, Wanted};
use bytes::Bytes;
use fletch_client::Client;
use fletch_core::Root;
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
    fn fetch(&self, wanted: Wanted, _attempt: u32) -> BoxFuture<'static, Result<Bytes, FetchError>> {
        let (client, root) = (self.client.clone(), self.root);
        // Unchecked: the store hashes whatever it is brought, once.
        async move {
            let got = match &wanted {
                Wanted::Chunk { hash, len } => client.chunk_unchecked(root, *hash, *len).await,
                Wanted::File { path, len, .. } => client.file_unchecked(root, path, *len).await,
            };
            got.map_err(|e| FetchError::new(e.kind(), e))
        }
        .boxed()
    }
}
