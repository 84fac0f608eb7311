//! Who serves, and what this server speaks.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The member view. Clients place chunks by it and send its number as `Fletch-View`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Cluster {
    /// Grows with every change of members.
    pub view: u64,
    /// The members; a single server is its own one member.
    pub members: Vec<Member>,
}

/// One server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Member {
    /// Its name, unique in the view.
    pub id: String,
    /// Where it listens, `http://host:port`.
    pub url: String,
    /// Its share of the chunks relative to the others'.
    pub weight: u32,
}

/// What this server is and speaks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Info {
    /// `fletch-server`.
    pub name: String,
    /// Version of the program.
    pub version: String,
    /// Majors of every format it reads. A client that needs another one says so and stops.
    pub formats: Formats,
    /// What it accepts.
    pub limits: InfoLimits,
    /// Its cache on disk; absent where there is to be none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<InfoDisk>,
}

/// A server's cache on disk. While its state is not `on`, reads pass it by or only read it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InfoDisk {
    /// `on`; `full` or `read_only` (what is there is still read); `io`, `denied`, `vanished`, `closed`; or
    /// `absent`, when it could not be opened.
    pub state: String,
    /// What that means, in words; absent while it is `on`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// `fletch`, `lru` or `pin`.
    pub policy: String,
    /// Bytes that it may occupy; absent until it was opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// Bytes that its chunks occupy.
    pub chunk_bytes: u64,
    /// How many those are.
    pub chunks: u64,
}

/// Majors by format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Formats {
    /// Of this HTTP contract.
    pub api: Vec<u32>,
    /// Of manifests, tables and layouts.
    pub versions: Vec<u32>,
    /// Of batch frames.
    pub frames: Vec<u32>,
}

/// Limits a client should keep to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InfoLimits {
    /// Items of one batch.
    pub batch_items: u64,
    /// Content bytes of one batch.
    pub batch_bytes: u64,
    /// Bytes of the largest chunk.
    pub chunk_bytes: u64,
}
