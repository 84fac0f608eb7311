//! Accounts of delivered bytes (I8), by who received them, the version they belong to, and their source.

use fletch_core::{Domain, JobName, Root, Tenant};
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
}
