//! Reclaim: the ranks of a job whose server is lost say what they consumed (`docs/EPOCHS.md`, "A lost
//! server").

use crate::{Loader, StartJob};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The most epochs of a rank in one request: the latest one, and those before it that are not over.
pub const RECLAIMED_EPOCHS_MAX: usize = 8;
/// The most losses of a server that a rank tells of in one request.
pub const UNKNOWN_MAX: usize = 64;

/// Body of `POST /v1/jobs/{id}/reclaim`: all that a rank's process knows of the job's epochs.
///
/// It says that the process consumed nothing else of the latest one of these epochs, nor of any later one.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Reclaim {
    /// The rank.
    pub rank: u32,
    /// The process that reads as this rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loader: Option<Loader>,
    /// The records, by ascending number of the epoch.
    pub epochs: Vec<ReclaimedEpoch>,
    /// The declaration, for a job that was declared with lists: the cluster does not know them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub declaration: Option<Box<StartJob>>,
    /// Whether no server has served this process as this rank, so that it has no record: it does not know
    /// what an earlier process of the rank consumed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unserved: bool,
    /// What the answers to earlier reclaims of the job told.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown: Vec<UnknownRanks>,
}

/// The ranks for which nobody knew what they had consumed, when an epoch was restored after the loss of its
/// server. What only their earlier processes knew to be consumed is delivered again.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UnknownRanks {
    /// The number of the epoch.
    pub epoch: u64,
    /// The term of the server that restored it.
    pub term: u64,
    /// The ranks, ascending.
    pub ranks: Vec<u32>,
}

/// What a rank's process knows of one epoch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReclaimedEpoch {
    /// The number of the epoch.
    pub epoch: u64,
    /// The record as `GET …/epochs/{n}/record` gives it, with what the process acknowledged since then and
    /// the leases that it holds: base64 (RFC 4648, with padding) of a ledger. Empty if the epoch had not
    /// begun.
    #[serde(default)]
    pub record: String,
}

/// The answer to a reclaim.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Reclaimed {
    /// The ranks that have not reclaimed yet. Nothing is granted until this is empty: reclaim again.
    pub waits_for: Vec<u32>,
    /// The leases of the rank that live. Samples of its other leases are delivered again.
    #[serde(default)]
    pub leases: Vec<u64>,
    /// The ranks for which nobody knew what they had consumed. Repeat it in later reclaims.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown: Vec<UnknownRanks>,
}

/// Body of `POST /v1/jobs/{id}/move`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveJob {
    /// The id of the member that gets the job.
    pub to: String,
}

/// The answer to a move.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MovedJobs {
    /// The id of the member that has the jobs now.
    pub to: String,
    /// How many jobs moved: those that share a sweep move together.
    pub jobs: u64,
}

/// Body of `POST /v1/jobs/{id}/lost`: the process of a rank is gone, and nobody knows what it consumed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LostRank {
    /// The rank.
    pub rank: u32,
}
