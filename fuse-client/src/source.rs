//! Chunks from a server, or from the origin while that is gone.

use crate::fs::read::{ChunkSource, Wanted};
use bytes::Bytes;
use fletch_client::fallback::{Fallback, OriginLocation};
use fletch_client::{Client, ClientError};
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
    fn fetch(
        &self,
        wanted: Wanted,
        _: &OriginLocation,
        _: u32,
    ) -> BoxFuture<'static, Result<Bytes, FetchError>> {
        let (client, root) = (self.client.clone(), self.root);
        async move { ask(client, root, &wanted).await.map_err(|e| FetchError::new(e.kind(), e)) }.boxed()
    }
}

/// Unchecked: the store hashes whatever it is brought, once.
pub(crate) async fn ask(client: Client, root: Root, wanted: &Wanted) -> Result<Bytes, ClientError> {
    match wanted {
        Wanted::Chunk { hash, len } => client.chunk_unchecked(root, *hash, *len).await,
        Wanted::File { path, len, .. } => client.file_unchecked(root, path, *len).await,
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
        wanted: Wanted,
        spot: &OriginLocation,
        _: u32,
    ) -> BoxFuture<'static, Result<Bytes, FetchError>> {
        let (fallback, root, spot) = (self.fallback.clone(), self.root, spot.clone());
        async move {
            let (_, len) = wanted.name();
            let got = fallback.bytes_unchecked(&spot, len, |client| ask(client, root, &wanted)).await;
            got.map_err(|e| FetchError::new(e.kind(), e))
        }
        .boxed()
    }
}
