//! The chunk sources of a mount: the server, and the origin while the server is gone.

use crate::draft_places::DraftPlaces;
use crate::fs::read::{ChunkSource, FetchRequest};
use crate::hit_connections;
use crate::server_watch::ServerWatch;
use crate::short_circuit::{Lent, ShortCircuit};
use bytes::Bytes;
use fletch_client::fallback::{Fallback, OriginLocation};
use fletch_client::{Client, ClientError};
use fletch_core::{Hash, Root};
use fletch_store::{Brought, FetchError, Names};
use fletch_tables::Version;
use futures::future::{BoxFuture, FutureExt};
use std::sync::Arc;

/// Fetches the chunks of one version from the server.
pub struct ServerChunks {
    client: Client,
    /// Refuses fetches while the server is gone.
    watch: Arc<ServerWatch>,
    root: Root,
    /// The places that were read, if the version is a draft.
    places: Option<Arc<DraftPlaces>>,
    lent: Arc<Lent>,
}

impl ServerChunks {
    /// Returns the source of the chunks of `version`.
    #[must_use]
    pub fn new(client: &Client, watch: &Arc<ServerWatch>, version: &Version) -> Self {
        ServerChunks {
            client: client.clone(),
            watch: Arc::clone(watch),
            root: version.root(),
            places: version.is_draft().then(Arc::default),
            lent: Arc::default(),
        }
    }
}

impl ChunkSource for ServerChunks {
    fn fetch(
        &self,
        request: FetchRequest,
        _: &OriginLocation,
        attempt: u32,
    ) -> BoxFuture<'static, Result<Bytes, FetchError>> {
        let client = self.client.after_wrong_bytes(attempt);
        let (watch, root, places) = (Arc::clone(&self.watch), self.root, self.places.clone());
        async move {
            let fetched = match (&places, &request) {
                (Some(places), FetchRequest::Chunk { hash, len }) => {
                    watch.call(|| fetch_place(client.clone(), root, places, *hash, *len)).await
                }
                _ => watch.call(|| fetch_from_server(client.clone(), root, &request)).await,
            };
            fetched.map_err(|e| FetchError::new(e.kind(), e))
        }
        .boxed()
    }

    fn names(&self) -> Option<Arc<dyn Names>> {
        Some(Arc::clone(self.places.as_ref()?) as _)
    }

    fn has_parts(&self) -> bool {
        self.places.is_none()
    }

    // A hit connection does not say what the bytes of a place hash to.
    fn has_hits(&self) -> bool {
        self.places.is_none() && hit_connections::may_ask(&self.client) && !self.watch.is_gone()
    }

    fn short_circuit(&self) -> Option<ShortCircuit<'_>> {
        self.has_hits().then(|| ShortCircuit::new(&self.lent, &self.client, self.root))
    }

    fn hit(&self, wanted: &FetchRequest, buffer: &mut [u8]) -> bool {
        hit_connections::ask(&self.client, self.root, wanted, buffer)
    }

    fn bring(&self, wanted: &FetchRequest) -> Brought {
        hit_connections::ask_in_window(&self.client, self.root, wanted)
    }

    fn bring_all(&self, wanted: &[FetchRequest]) -> Vec<Option<Bytes>> {
        hit_connections::ask_all_in_window(&self.client, self.root, wanted)
    }
}

/// Fetches bytes of a draft by the name of their place, and notes what the server says of them.
async fn fetch_place(
    client: Client,
    root: Root,
    places: &DraftPlaces,
    name: Hash,
    len: u32,
) -> Result<Bytes, ClientError> {
    let (bytes, content) = client.named_place(root, name, len).await?;
    places.note_said(name, content);
    Ok(bytes)
}

/// Fetches bytes from the server, unchecked: the store hashes them, once.
pub(crate) async fn fetch_from_server(
    client: Client,
    root: Root,
    request: &FetchRequest,
) -> Result<Bytes, ClientError> {
    match request {
        FetchRequest::Chunk { hash, len } => client.chunk_unchecked(root, *hash, *len).await,
        FetchRequest::File { path, len, chunk, .. } => client.file_unchecked(root, path, *len, *chunk).await,
        FetchRequest::Part { chunk, from, len } => client.part_unchecked(root, *chunk, *from, *len).await,
        FetchRequest::Groups { chunk, len } => client.groups_unchecked(root, *chunk, *len).await,
    }
}

/// Fetches the chunks of one version from the server, or from the origin while the server is gone.
pub struct FallbackChunks {
    /// Decides between server and origin.
    pub fallback: Fallback,
    /// The version.
    pub root: Root,
    /// What the server lent.
    pub lent: Arc<Lent>,
}

impl ChunkSource for FallbackChunks {
    fn fetch(
        &self,
        request: FetchRequest,
        location: &OriginLocation,
        attempt: u32,
    ) -> BoxFuture<'static, Result<Bytes, FetchError>> {
        let (fallback, root, location) = (self.fallback.clone(), self.root, location.clone());
        async move {
            let (_, len) = request.hash_and_len();
            let ask = |client: Client| fetch_from_server(client.after_wrong_bytes(attempt), root, &request);
            let got = match &request {
                FetchRequest::Groups { .. } => fallback.from_server_unchecked(ask).await,
                _ => fallback.bytes_unchecked(&location, len, ask).await,
            };
            got.map_err(|e| FetchError::new(e.kind(), e))
        }
        .boxed()
    }

    // An origin that is read in the server's place has parts, but no hashes of groups: then the reader reads
    // whole chunks.
    fn has_parts(&self) -> bool {
        self.fallback.server().is_some()
    }

    fn has_hits(&self) -> bool {
        self.fallback.server().is_some_and(hit_connections::may_ask)
    }

    fn short_circuit(&self) -> Option<ShortCircuit<'_>> {
        let client = self.fallback.server().filter(|client| hit_connections::may_ask(client))?;
        Some(ShortCircuit::new(&self.lent, client, self.root))
    }

    fn hit(&self, wanted: &FetchRequest, buffer: &mut [u8]) -> bool {
        let server = self.fallback.server();
        server.is_some_and(|client| hit_connections::ask(client, self.root, wanted, buffer))
    }

    fn bring(&self, wanted: &FetchRequest) -> Brought {
        let asked = |client| hit_connections::ask_in_window(client, self.root, wanted);
        self.fallback.server().map_or(Brought::NoMemory, asked)
    }

    fn bring_all(&self, wanted: &[FetchRequest]) -> Vec<Option<Bytes>> {
        let asked = |client| hit_connections::ask_all_in_window(client, self.root, wanted);
        self.fallback.server().map_or_else(|| vec![None; wanted.len()], asked)
    }
}
