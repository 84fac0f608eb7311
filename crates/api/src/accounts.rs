//! I8: bytes delivered, by who got them, of what, and what delivering them cost.

use fletch_core::{Domain, JobName, Root, Tenant};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What delivering a byte meant for the origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ByteResult {
    /// No origin read was made for this reader.
    Hit,
    /// No origin read was made for this reader, because an epoch chose the sample that was here.
    Substituted,
    /// This reader's request made the origin read; of an epoch: its unit was fetched for it, perhaps earlier.
    Miss,
    /// Read from the origin for this reader and not kept.
    Bypass,
}

/// Where a byte came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ByteTier {
    /// Memory of this server.
    Memory,
    /// The disk of this server.
    Disk,
    /// A read or fetch that somebody else had begun.
    Flight,
    /// The origin.
    Origin,
}

impl ByteResult {
    /// The word used in JSON and as a metric label.
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
    /// The word used in JSON and as a metric label.
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

/// What one account is of.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct AccountKey {
    /// Whose cached bytes.
    #[schema(value_type = String)]
    pub domain: Domain,
    /// Who is charged.
    #[schema(value_type = String)]
    pub tenant: Tenant,
    /// For which job.
    #[schema(value_type = String)]
    pub job: JobName,
    /// Of which version.
    #[schema(value_type = String)]
    pub root: Root,
    /// At which cost for the origin.
    pub result: ByteResult,
    /// From where.
    pub tier: ByteTier,
}

/// One account. All numbers only grow until the server restarts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Account {
    /// What it is of.
    #[serde(flatten)]
    pub key: AccountKey,
    /// Content bytes handed to connections (headers, frames and tar padding not counted).
    pub bytes: u64,
}

/// The asking principal's tenant's accounts; every tenant's for an admin.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Accounts {
    /// Accounts in order of their keys; accounts without bytes are left out.
    pub accounts: Vec<Account>,
    /// Bytes of version tables handed to connections, not part of any account; 0 unless asked by an admin.
    pub table_bytes: u64,
}
