//! What the mounts of one node say to each other: the owner of the node's store answers on a unix socket,
//! and the others, its guests, ask there before they ask the server.
//!
//! The owner answers 200 with the bytes, or 404 with a problem for whatever reason it has not to: then the
//! guest asks the server itself. It never says anything that a guest would have to believe.

use fletch_core::{Hash, Root};
use serde::{Deserialize, Serialize};

/// A chunk by root, hash and length: GET.
pub const CHUNK: &str = "/node/v1/versions/{root}/chunks/{hash}/{len}";
/// A file that lies in a chunk with others, by root, hash, length and path: GET.
pub const FILE: &str = "/node/v1/versions/{root}/files/{hash}/{len}/{*path}";
/// How the store is ([`NodeState`]): GET. A guest says in the query which version it reads.
pub const STATE: &str = "/node/v1/state";

/// Path of a chunk.
#[must_use]
pub fn chunk(root: Root, hash: Hash, len: u32) -> String {
    format!("/node/v1/versions/{root}/chunks/{hash}/{len}")
}

/// Path of a file.
#[must_use]
pub fn file(root: Root, hash: Hash, len: u32, path: &str) -> String {
    format!("/node/v1/versions/{root}/files/{hash}/{len}/{}", crate::routes::escaped(path))
}

/// Path of the state, asked by a guest that reads this version.
#[must_use]
pub fn state(of: MountedVersion) -> String {
    format!("{STATE}?root={}&footprint={}", of.root, of.footprint)
}

/// The version that a mount reads, as it tells the owner of the node store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountedVersion {
    /// Which.
    pub root: Root,
    /// What its chunks occupy on disk together, at most, in bytes.
    pub footprint: u64,
}

/// The store of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeState {
    /// The process that owns it.
    pub pid: u32,
    /// Chunks on disk.
    pub chunks: u64,
    /// Bytes that slab files have taken of the limit.
    pub slab_bytes: u64,
    /// What the directory may occupy, in bytes.
    pub limit_bytes: u64,
    /// Bytes of chunks that wait to be appended.
    pub queued_bytes: u64,
    /// Damaged chunks found so far; none of them was served.
    pub quarantined: u64,
}
