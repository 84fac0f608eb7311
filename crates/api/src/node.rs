//! The protocol between the mounts of one node: the owner of the node's store serves the others.
//!
//! The other mounts are clients of the store. A client asks the owner on a unix socket before it asks the
//! server. The owner answers 200 with the bytes, or 404 with a problem for every reason. After 404 the client
//! asks the server itself. The client verifies every byte, so it never has to trust the owner.

use fletch_core::{Hash, Root};
use serde::{Deserialize, Serialize};

/// GET: a chunk, by root, hash and length.
pub const CHUNK: &str = "/node/v1/versions/{root}/chunks/{hash}/{len}";
/// GET: a file that shares a chunk with other files, by root, hash, length and path.
pub const FILE: &str = "/node/v1/versions/{root}/files/{hash}/{len}/{*path}";
/// GET: the state of the store ([`NodeState`]). The query says which version the client reads.
pub const STATE: &str = "/node/v1/state";

/// Returns the path of a chunk.
#[must_use]
pub fn chunk(root: Root, hash: Hash, len: u32) -> String {
    format!("/node/v1/versions/{root}/chunks/{hash}/{len}")
}

/// Returns the path of a file.
#[must_use]
pub fn file(root: Root, hash: Hash, len: u32, path: &str) -> String {
    format!("/node/v1/versions/{root}/files/{hash}/{len}/{}", crate::routes::escaped(path))
}

/// Returns the path of the state, for a client that reads this version, or none yet.
#[must_use]
pub fn state(version: Option<MountedVersion>) -> String {
    match version {
        Some(MountedVersion { root, footprint }) => format!("{STATE}?root={root}&footprint={footprint}"),
        None => STATE.to_owned(),
    }
}

/// The version that a mount reads, as the mount tells the owner of the node store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountedVersion {
    /// The root of the version.
    pub root: Root,
    /// The most bytes that the version's chunks occupy on disk.
    pub footprint: u64,
}

/// The state of a node's store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeState {
    /// The id of the process that owns the store.
    pub pid: u32,
    /// The number of chunks on disk.
    pub chunks: u64,
    /// The bytes that slab files occupy.
    pub slab_bytes: u64,
    /// The most bytes that the store's directory may occupy.
    pub limit_bytes: u64,
    /// The bytes of chunks that wait to be written to a slab.
    pub queued_bytes: u64,
    /// The number of damaged chunks that were found. None of them was served.
    pub quarantined: u64,
}
