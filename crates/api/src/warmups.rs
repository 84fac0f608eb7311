//! Warm-ups: bringing a version's chunks before somebody reads them, and looking whether they are there.

use crate::Problem;
use fletch_core::{DatasetName, LayoutId, Root};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How long chunks are protected from eviction unless something else is asked for, in seconds.
pub const LEASE_S_DEFAULT: u64 = 3600;
/// And the longest, in seconds.
pub const LEASE_S_MAX: u64 = 7 * 86_400;

/// Body of `POST /v1/warmups`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StartWarmup {
    /// Of which dataset.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// Which version: a tag or a root; `latest` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Read and hash what is there instead of bringing what is not. Nothing is fetched.
    #[serde(default)]
    pub check: bool,
    /// How long the chunks are protected from eviction afterwards, in seconds, at most a week.
    #[serde(default = "lease_default")]
    pub lease_s: u64,
}

fn lease_default() -> u64 {
    LEASE_S_DEFAULT
}

/// How far a warm-up is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WarmupState {
    /// It waits for its turn.
    Queued,
    /// It works.
    Running,
    /// Every chunk is where it stays; of a check: was read and is right.
    Done,
    /// It ended, and not every chunk is: `missing` says how many.
    Partial,
    /// It ended early; `error` says why. What it brought is kept.
    Failed,
    /// Somebody cancelled it. What it brought is kept.
    Cancelled,
}

impl WarmupState {
    /// Whether nothing will change any more.
    #[must_use]
    pub fn is_over(self) -> bool {
        !matches!(self, WarmupState::Queued | WarmupState::Running)
    }

    /// The word in JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            WarmupState::Queued => "queued",
            WarmupState::Running => "running",
            WarmupState::Done => "done",
            WarmupState::Partial => "partial",
            WarmupState::Failed => "failed",
            WarmupState::Cancelled => "cancelled",
        }
    }
}

/// A number of chunks and their bytes. A chunk that several files have counts for each of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Amount {
    /// Chunks.
    pub chunks: u64,
    /// Bytes.
    pub bytes: u64,
}

/// A warm-up as it is now. The server forgets it when it restarts (what was brought is kept).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Warmup {
    /// Its name.
    pub id: String,
    /// Of which dataset.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// Of which version.
    #[schema(value_type = String)]
    pub root: Root,
    /// In which layout.
    #[schema(value_type = String)]
    pub layout: LayoutId,
    /// Whether it only looks.
    pub check: bool,
    /// How far it is.
    pub state: WarmupState,
    /// All there is to do.
    pub total: Amount,
    /// What was looked at so far.
    pub looked_at: Amount,
    /// Of that, what was there already; of a check: was read and is right.
    pub present: Amount,
    /// What was brought from the origin, or from memory to disk.
    pub brought: Amount,
    /// What the cache refused: the dataset's share, or the disk, is full.
    pub refused: Amount,
    /// What could not be brought.
    pub failed: Amount,
    /// Of a check: what had other bytes than its name says. It is never served and was given up.
    pub damaged: Amount,
    /// When it ended: what of the total is not there, counted once more. Of a check: not there, damaged or not readable.
    pub missing: Amount,
    /// Bytes a second since it began to work.
    pub bytes_per_s: u64,
    /// Seconds that are left at this rate, while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_s: Option<u64>,
    /// When it was asked for, nanoseconds since 1970.
    pub started_ns: u64,
    /// When it ended, nanoseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ns: Option<u64>,
    /// Until when its chunks are protected from eviction, nanoseconds since 1970; absent when they are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leased_until_ns: Option<u64>,
    /// Why it ended early, or the first thing that went wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Problem>,
}

/// Warm-ups of the asking principal's domain, the last first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Warmups {
    /// The warm-ups.
    pub warmups: Vec<Warmup>,
}

/// What an eviction did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Evicted {
    /// Chunks that left the disk.
    pub chunks: u64,
}
