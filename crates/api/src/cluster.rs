//! The members of the cluster, and what a server supports.

use crate::s3::S3Door;
use fletch_core::{Domain, cluster::Ring};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// The number of the view of a server that is alone, without a cluster. Those of clusters are higher.
pub const VIEW_ALONE: u64 = 1;

/// The member view of the cluster. Clients choose servers by it and send its number as `Fletch-View`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Cluster {
    /// The number of the view. It grows with every change of members that own chunks, or of weights.
    pub view: u64,
    /// The caller's own domain, by which chunks are placed on members. Servers of older builds do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub domain: Option<Domain>,
    /// The members that own chunks, and servers that are up beside them with weight 0. A single server is the
    /// only member.
    pub members: Vec<Member>,
}

/// What one server of a cluster says of itself. `fletch cluster check` compares the servers by it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemberCheck {
    /// The name of the server.
    pub id: String,
    /// The version of its program.
    pub build: String,
    /// The protocol that it speaks with other servers.
    pub peer_protocol: u32,
    /// The number of its view.
    pub view: u64,
    /// The revision of etcd whose registrations it has. Absent for a server that is alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<u64>,
    /// The time of its clock, in nanoseconds since 1970.
    pub now_ns: u64,
    /// Whether its last contact with etcd succeeded.
    pub etcd_up: bool,
    /// Why it is not ready as a member. Absent if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_ready: Option<String>,
    /// The state of its disk tier: `on`, or what is wrong. Absent without a disk tier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// A short hash of each setting that should be the same on all servers, of `origins` and of `tokens`.
    pub settings: BTreeMap<String, String>,
    /// The other servers, and whether they answer this one.
    pub peers: Vec<PeerCheck>,
    /// What the server noticed of other servers and of itself, and what does not pass by itself: a refused
    /// token, an answer that it cannot read, changes that it cannot follow.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

/// Whether another server answers a server of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PeerCheck {
    /// The name of the other server.
    pub id: String,
    /// Why it does not answer. Absent if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// What one server holds of its cluster, for another server that recovers an etcd without keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HeldKeys {
    /// The name of the server.
    pub id: String,
    /// The uid of the cluster that it has joined. Absent before it joined one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
    /// The number of its view.
    pub view: u64,
    /// The ring of its view.
    #[schema(value_type = Object)]
    pub ring: Ring,
    /// The revision of the latest change of datasets that it has executed. 0: it has not read etcd since it
    /// started.
    pub registrations: u64,
    /// A hash of its datasets.
    pub datasets_hash: String,
    /// Its datasets, as `DOMAIN/NAME`.
    pub datasets: Vec<String>,
    /// The names of the jobs that it has or knows, by their ids.
    pub jobs: BTreeMap<String, String>,
}

/// What `fletch cluster recover` wrote to etcd, or would write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Recovery {
    /// The uid of the cluster.
    pub uid: String,
    /// Whether it is written. `false`: the caller asked for the plan only.
    pub is_done: bool,
    /// The server whose datasets count.
    pub datasets_from: String,
    /// The datasets, as `DOMAIN/NAME`.
    pub datasets: Vec<String>,
    /// The jobs, as `NAME (ID)`.
    pub jobs: Vec<String>,
    /// The members of the ring.
    pub members: Vec<String>,
    /// Members that did not answer, each with the reason. What only they know is missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub silent: Vec<String>,
}

/// One server of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Member {
    /// The name of the server, unique in the view.
    pub id: String,
    /// The URL of the server, `http://host:port`.
    pub url: String,
    /// The server's share of the chunks, relative to the weights of the other members. 0: it owns none.
    pub weight: u32,
    /// Where the server runs. Absent if its settings do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// Whether the server is up. A chunk whose owner is not up belongs to the next member of its ranking.
    #[serde(default = "is_up")]
    pub up: bool,
    /// The state of the server. Servers of older builds do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<MemberState>,
}

/// Returns that a server is up: one of an older build, which is its only member, says nothing.
fn is_up() -> bool {
    true
}

/// The state of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MemberState {
    /// It serves, and owns chunks if its weight is not 0.
    #[default]
    Up,
    /// It serves and owns no chunks, because an operator drained it. It owns chunks again after a restart.
    Drained,
    /// It stopped in good order, and keeps its chunks for a while.
    Restarting,
    /// It gives no sign of life, and keeps its chunks for a while.
    Down,
    /// A state that this build does not know, from a newer server.
    #[serde(other)]
    Unknown,
}

impl MemberState {
    /// Every state that this build knows.
    pub const ALL: &[MemberState] =
        &[MemberState::Up, MemberState::Drained, MemberState::Restarting, MemberState::Down];

    /// Returns the word that JSON uses.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            MemberState::Up => "up",
            MemberState::Drained => "drained",
            MemberState::Restarting => "restarting",
            MemberState::Down => "down",
            MemberState::Unknown => "unknown",
        }
    }
}

/// The server's name, version, formats, limits and disk cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Info {
    /// The name of the program: `fletch-server`.
    pub name: String,
    /// The version of the program.
    pub version: String,
    /// The major versions of each format that the server supports. A client that needs another version stops.
    pub formats: Formats,
    /// The limits of requests.
    pub limits: InfoLimits,
    /// Seconds since the server started.
    #[serde(default)]
    pub uptime_s: u64,
    /// The cache on disk. Absent if no disk cache is configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<InfoDisk>,
    /// Where the caller writes version tables when no other place is named. `null`: name a place.
    #[serde(default)]
    pub publish: Option<Publish>,
    /// The S3 door. `null`: it is off.
    #[serde(default)]
    pub s3: Option<S3Door>,
}

/// A place for version tables.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Publish {
    /// The URI. A client writes the tables of a dataset to a folder of its own below the URI.
    pub uri: String,
}

/// The cache on disk of a server. While its state is not `on`, reads skip it or only read from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InfoDisk {
    /// The state of the cache.
    ///
    /// `on`; `full` or `read_only`, in which the server still reads cached chunks; `io`, `denied`, `vanished`
    /// or `closed`; or `absent` if the cache could not be opened.
    pub state: String,
    /// The meaning of the state, as a text. Absent while the state is `on`, and for all but admins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// The eviction policy: `fletch`, `lru` or `pin`.
    pub policy: String,
    /// The most bytes that the cache may occupy. Absent until the cache is open, and for all but admins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// The bytes that chunks may occupy. Absent until the cache is open, and for all but admins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_bytes: Option<u64>,
    /// The bytes that cached chunks occupy: all of them for an admin, else those of the caller's domain.
    pub chunk_bytes: u64,
    /// The number of these chunks.
    pub chunks: u64,
}

/// The supported major versions of each format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Formats {
    /// Versions of this API.
    pub api: Vec<u32>,
    /// Versions of manifests, tables and layouts.
    pub versions: Vec<u32>,
    /// Versions of stream frames.
    pub frames: Vec<u32>,
}

/// The limits that a request must keep.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InfoLimits {
    /// The most items in a batch.
    pub batch_items: u64,
    /// The most content bytes in a batch.
    pub batch_bytes: u64,
    /// The longest chunk, in bytes.
    pub chunk_bytes: u64,
}
