//! Asking the owner of this node's store, by a client of its socket. An owner is asked once: whoever gets
//! no bytes from it asks the server.

use crate::body::Length;
use crate::{Client, ClientError};
use bytes::Bytes;
use fletch_api::node::{self, MountedVersion, NodeState};
use fletch_core::manifest::CHUNK_BYTES_MAX;
use fletch_core::{Hash, Root};
use http::{Method, StatusCode};

impl Client {
    /// How the node's store is; tells its owner which version is read here.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn node_state(&self, of: MountedVersion) -> Result<NodeState, ClientError> {
        self.get_json(&node::state(of)).await
    }

    /// A chunk from the node's store, or from the server by way of it. **Nobody checked** the bytes.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` for every reason that the owner has.
    pub async fn node_chunk_unchecked(&self, root: Root, hash: Hash, len: u32) -> Result<Bytes, ClientError> {
        self.ask_node(&node::chunk(root, hash, len), len).await
    }

    /// A file that lies in a chunk with others, as [`Client::node_chunk_unchecked`].
    ///
    /// # Errors
    /// As there.
    pub async fn node_file_unchecked(
        &self,
        root: Root,
        hash: Hash,
        len: u32,
        path: &str,
    ) -> Result<Bytes, ClientError> {
        self.ask_node(&node::file(root, hash, len, path), len).await
    }

    async fn ask_node(&self, path: &str, len: u32) -> Result<Bytes, ClientError> {
        if len == 0 || len > CHUNK_BYTES_MAX {
            return Err(ClientError::Config(format!("a chunk of {len} bytes cannot be")));
        }
        let request = || self.request(Method::GET, path);
        self.call(request, &[StatusCode::OK], Length::Exactly(u64::from(len))).await
    }
}
