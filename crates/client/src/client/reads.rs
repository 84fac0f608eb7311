//! Reads of bytes: chunks and files from a server or from the store of the node, and tables.

use super::{Client, responder};
use crate::ClientError;
use crate::body::BodyLength;
use crate::call::Call;
use crate::server::Server;
use bytes::Bytes;
use fletch_api::{node, routes};
use fletch_core::{Hash, Root, Verified, manifest::CHUNK_BYTES_MAX};
use http::{HeaderValue, StatusCode, header};
use std::sync::Arc;

/// A longer chunk is hashed on a blocking thread.
const INLINE_HASH_BYTES: usize = 256 << 10;

impl Client {
    /// Returns a whole chunk of `len` bytes, verified against its hash.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Corrupt`] if the bytes have another hash.
    pub async fn chunk(&self, root: Root, hash: Hash, len: u32) -> Result<Verified, ClientError> {
        let (server, bytes) = self.chunk_at(root, hash, len).await?;
        let check = move || Verified::check(hash, bytes);
        let checked = if len as usize <= INLINE_HASH_BYTES {
            check()
        } else {
            let lost = |_| ClientError::Config("the runtime stopped while a chunk was hashed".into());
            tokio::task::spawn_blocking(check).await.map_err(lost)?
        };
        let endpoint = || server.shown.to_string();
        checked.map_err(|mismatch| ClientError::Corrupt { endpoint: endpoint(), mismatch })
    }

    /// Returns a whole chunk of `len` bytes, **not verified**.
    ///
    /// For a store that hashes the bytes itself. All other callers use [`Client::chunk`].
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn chunk_unchecked(&self, root: Root, hash: Hash, len: u32) -> Result<Bytes, ClientError> {
        Ok(self.chunk_at(root, hash, len).await?.1)
    }

    /// Returns `len` bytes of a draft by the name of their place, **not verified**, and what the server says
    /// that they hash to. The caller hashes them and compares.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Protocol`] from a server that does not say it.
    pub async fn named_place(&self, root: Root, name: Hash, len: u32) -> Result<(Bytes, Hash), ClientError> {
        check_chunk_len(len)?;
        let call = Call::get(routes::chunk(root, name)).about(Some(name), self.skip);
        let want = BodyLength::Exactly(u64::from(len));
        let (server, answer) = self.call_whole(&call, &[StatusCode::OK], want).await?;
        let silent = || responder(&server).protocol("the reply does not say what the bytes hash to");
        Ok((answer.bytes, answer.content.ok_or_else(silent)?))
    }

    async fn chunk_at(&self, root: Root, hash: Hash, len: u32) -> Result<(Arc<Server>, Bytes), ClientError> {
        check_chunk_len(len)?;
        let call = Call::get(routes::chunk(root, hash)).about(Some(hash), self.skip);
        self.call_at(&call, &[StatusCode::OK], BodyLength::Exactly(u64::from(len))).await
    }

    /// Returns `len` bytes of a chunk, from byte `from` on, **not verified**.
    ///
    /// For a store that checks them by the hashes of the chunk's groups.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn part_unchecked(
        &self,
        root: Root,
        chunk: Hash,
        from: u32,
        len: u32,
    ) -> Result<Bytes, ClientError> {
        check_chunk_len(len)?;
        let last = u64::from(from) + u64::from(len) - 1;
        let range = HeaderValue::try_from(format!("bytes={from}-{last}"));
        let range = range.map_err(|e| ClientError::Config(e.to_string()))?;
        let call = Call::get(routes::chunk(root, chunk)).about(Some(chunk), self.skip);
        let call = call.header(header::RANGE, range);
        self.call(&call, &[StatusCode::PARTIAL_CONTENT], BodyLength::Exactly(u64::from(len))).await
    }

    /// Returns the hashes of the groups of a chunk, `len` bytes, **not checked**.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn groups_unchecked(&self, root: Root, chunk: Hash, len: u32) -> Result<Bytes, ClientError> {
        let call = Call::get(routes::chunk_groups(root, chunk)).about(Some(chunk), self.skip);
        self.call(&call, &[StatusCode::OK], BodyLength::Exactly(u64::from(len))).await
    }

    /// Returns a whole file of `len` bytes by its path in the version, **not verified**.
    ///
    /// For a store that hashes the file itself, and reads files that share a chunk with other files. `chunk`
    /// is that chunk: the server that owns it is asked.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn file_unchecked(
        &self,
        root: Root,
        path: &str,
        len: u32,
        chunk: Option<Hash>,
    ) -> Result<Bytes, ClientError> {
        let call = Call::get(routes::file(root, path)).about(chunk, self.skip);
        self.call(&call, &[StatusCode::OK], BodyLength::Exactly(u64::from(len))).await
    }

    /// Returns a chunk from the node's store, **not verified**. The owner may fetch it from the server.
    ///
    /// After an error the caller asks the server itself.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` for every reason why the owner sends no bytes.
    pub async fn node_chunk_unchecked(&self, root: Root, hash: Hash, len: u32) -> Result<Bytes, ClientError> {
        self.node_bytes(&node::chunk(root, hash, len), len).await
    }

    /// Returns a file that shares a chunk with other files, as [`Client::node_chunk_unchecked`].
    ///
    /// # Errors
    /// As [`Client::node_chunk_unchecked`].
    pub async fn node_file_unchecked(
        &self,
        root: Root,
        hash: Hash,
        len: u32,
        path: &str,
    ) -> Result<Bytes, ClientError> {
        self.node_bytes(&node::file(root, hash, len, path), len).await
    }

    async fn node_bytes(&self, path: &str, len: u32) -> Result<Bytes, ClientError> {
        check_chunk_len(len)?;
        self.call(&Call::get(path), &[StatusCode::OK], BodyLength::Exactly(u64::from(len))).await
    }

    /// Returns a table or a range of it. A range must be answered with exactly its bytes.
    pub(crate) async fn table(
        &self,
        path: &str,
        range: Option<String>,
        length: BodyLength,
    ) -> Result<Bytes, ClientError> {
        let mut call = Call::get(path);
        if let Some(range) = &range {
            let value = HeaderValue::try_from(range).map_err(|e| ClientError::Config(e.to_string()))?;
            call = call.header(header::RANGE, value);
        }
        let want = match (&range, length) {
            (None, _) => vec![StatusCode::OK],
            (Some(_), BodyLength::Exactly(_)) => vec![StatusCode::PARTIAL_CONTENT],
            // A suffix longer than the file may be answered with the whole file.
            (Some(_), BodyLength::AtMost(_)) => vec![StatusCode::PARTIAL_CONTENT, StatusCode::OK],
        };
        self.call(&call, &want, length).await
    }
}

fn check_chunk_len(len: u32) -> Result<(), ClientError> {
    if len == 0 || len > CHUNK_BYTES_MAX {
        return Err(ClientError::Config(format!("a chunk has 1 to {CHUNK_BYTES_MAX} bytes, not {len}")));
    }
    Ok(())
}
