//! Accounts of delivered bytes (I8), by who received them, the version they belong to, and their source.

use fletch_core::{DatasetName, Domain, JobName, Root, Tenant};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Whether delivering a byte needed a read from the origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ByteResult {
    /// The byte was in the cache. This reader caused no read from the origin.
    Hit,
    /// The byte was in the cache, and the epoch chose its sample because it was there.
    Substituted,
    /// The byte was fetched from the origin for this reader.
    ///
    /// For an epoch, the fetch may have happened earlier.
    Miss,
    /// The byte was fetched from the origin for this reader and not kept.
    Bypass,
}

/// The source of a byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ByteTier {
    /// The memory of this server.
    Memory,
    /// The disk of this server.
    Disk,
    /// A read or a fetch that another request had started.
    Flight,
    /// The origin.
    Origin,
    /// Another server of the cluster.
    Peer,
}

impl ByteResult {
    /// Returns the word that JSON and metric labels use.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ByteResult::Hit => "hit",
            ByteResult::Substituted => "substituted",
            ByteResult::Miss => "miss",
            ByteResult::Bypass => "bypass",
        }
    }
}

impl ByteTier {
    /// Returns the word that JSON and metric labels use.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ByteTier::Memory => "memory",
            ByteTier::Disk => "disk",
            ByteTier::Flight => "flight",
            ByteTier::Origin => "origin",
            ByteTier::Peer => "peer",
        }
    }
}

/// The key of an account.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct AccountKey {
    /// The domain that the cached bytes belong to.
    #[schema(value_type = String)]
    pub domain: Domain,
    /// The tenant that is charged.
    #[schema(value_type = String)]
    pub tenant: Tenant,
    /// The job that received the bytes.
    #[schema(value_type = String)]
    pub job: JobName,
    /// The root of the version.
    #[schema(value_type = String)]
    pub root: Root,
    /// Whether the bytes needed a read from the origin.
    pub result: ByteResult,
    /// The source of the bytes.
    pub tier: ByteTier,
}

/// One account. Its numbers only grow until the server restarts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Account {
    /// The key of the account.
    #[serde(flatten)]
    pub key: AccountKey,
    /// Content bytes that were sent. Headers, frames and tar padding are not counted.
    pub bytes: u64,
}

/// The accounts of the caller's tenant. An administrator gets the accounts of all tenants.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Accounts {
    /// Accounts in the order of their keys. Accounts without bytes are left out.
    pub accounts: Vec<Account>,
    /// Bytes of version tables that were sent.
    ///
    /// They belong to no account. 0 unless the caller is an administrator.
    pub table_bytes: u64,
    /// The datasets of the caller's domain, in the order of their names. An administrator gets all domains.
    #[serde(default)]
    pub datasets: Vec<DatasetUse>,
    /// The jobs of these accounts, each once for each dataset that it reads, in order.
    #[serde(default)]
    pub jobs: Vec<JobUse>,
}

/// What a dataset is, what the cache holds of it, and what the cache saved, since the server first ran with
/// its state directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DatasetUse {
    /// The domain of the dataset.
    #[schema(value_type = String)]
    pub domain: Domain,
    /// The name of the dataset.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// Bytes of the files of its newest open version, as a mount shows them. While no version is open, those
    /// of the largest version that was open before. Absent if none ever was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version_bytes: Option<u64>,
    /// What all chunks of that version occupy on disk: an upper bound until all of them are there. Absent
    /// while no version is open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout_bytes: Option<u64>,
    /// What its chunks occupy on the server's disk now. Absent without a disk cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_bytes: Option<u64>,
    /// Content bytes that were sent.
    pub delivered_bytes: u64,
    /// Bytes that were read from its origins: content, tables and probes.
    pub origin_bytes: u64,
    /// Bytes that were sent beyond those that were read: what the cache avoided. Never falls.
    pub avoided_bytes: u64,
    /// Objects that changed since the index, as far as readers met them: at most 10,000. `fletch refresh`
    /// indexes them.
    #[serde(default)]
    pub changed_objects: u64,
}

/// What a job received of a dataset, and what that cost, since the server started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobUse {
    /// The tenant of the job.
    #[schema(value_type = String)]
    pub tenant: Tenant,
    /// The name of the job.
    #[schema(value_type = String)]
    pub job: JobName,
    /// The dataset that it reads.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// Bytes that were sent and counted as `hit`.
    pub hit_bytes: u64,
    /// Bytes that were sent and counted as `substituted`.
    pub substituted_bytes: u64,
    /// Bytes that were sent and counted as `miss`.
    pub miss_bytes: u64,
    /// Bytes that were sent and counted as `bypass`.
    pub bypass_bytes: u64,
    /// Content bytes that the server read from origins for the job.
    pub origin_bytes: u64,
    /// The time in which at least one reply of the job waited for bytes, in milliseconds.
    pub stalled_ms: u64,
}

impl JobUse {
    /// Returns the bytes that were sent.
    #[must_use]
    pub fn delivered_bytes(&self) -> u64 {
        self.hit_bytes + self.substituted_bytes + self.miss_bytes + self.bypass_bytes
    }
}
