//! Warm-ups: fetch the chunks of a version before they are read, or check the chunks that are cached.

use crate::Problem;
use fletch_core::{DatasetName, LayoutId, Root};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The default time for which the chunks of a warm-up are protected from eviction, in seconds.
pub const PIN_S_DEFAULT: u64 = 3600;
/// The longest time for which the chunks of a warm-up are protected from eviction, in seconds.
pub const PIN_S_MAX: u64 = 7 * 86_400;

/// Body of `POST /v1/warmups`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StartWarmup {
    /// The dataset.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// A tag or a root of the dataset. The default is `latest`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Whether to read and hash the cached chunks instead of fetching the missing ones.
    #[serde(default)]
    pub check: bool,
    /// How long the chunks are protected from eviction afterwards, in seconds. At most a week.
    #[serde(default = "pin_default")]
    pub pin_s: u64,
}

fn pin_default() -> u64 {
    PIN_S_DEFAULT
}

/// The state of a warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WarmupState {
    /// The warm-up waits for other warm-ups.
    Queued,
    /// The warm-up fetches or checks chunks.
    Running,
    /// Every chunk is cached. For a check: every chunk was read and is correct.
    Done,
    /// The warm-up ended, and some chunks are not cached or not correct: `missing` counts them.
    Partial,
    /// The warm-up ended early, for the reason in `error`. The fetched chunks stay cached.
    Failed,
    /// The warm-up was cancelled. The fetched chunks stay cached.
    Cancelled,
}

impl WarmupState {
    /// Returns whether the warm-up has ended.
    #[must_use]
    pub fn is_over(self) -> bool {
        !matches!(self, WarmupState::Queued | WarmupState::Running)
    }

    /// Returns the word that JSON uses.
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

/// A number of chunks and their bytes. A chunk that several files share counts once for each file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Amount {
    /// The number of chunks.
    pub chunks: u64,
    /// The number of bytes.
    pub bytes: u64,
}

/// The progress of a warm-up. The server forgets it at a restart; the fetched chunks stay cached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Warmup {
    /// The id of the warm-up.
    pub id: String,
    /// The dataset.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// The root of the version.
    #[schema(value_type = String)]
    pub root: Root,
    /// The layout of the version.
    #[schema(value_type = String)]
    pub layout: LayoutId,
    /// Whether the warm-up only checks cached chunks.
    pub check: bool,
    /// The state of the warm-up.
    pub state: WarmupState,
    /// All chunks of the version.
    pub total: Amount,
    /// The chunks that were processed so far.
    pub looked_at: Amount,
    /// The processed chunks that were cached already. For a check: that were read and are correct.
    pub present: Amount,
    /// The chunks that were fetched from the origin, or written from memory to disk.
    pub fetched: Amount,
    /// The chunks that the cache rejected, because the dataset's share or the disk is full.
    pub refused: Amount,
    /// The chunks that could not be fetched.
    pub failed: Amount,
    /// For a check: the chunks whose bytes do not match their hash.
    ///
    /// The server never served them and has removed them.
    pub damaged: Amount,
    /// After the end: the chunks that are not cached, from a second count.
    ///
    /// For a check: the chunks that are not cached, damaged or not readable.
    pub missing: Amount,
    /// The average rate since the warm-up began to run, in bytes a second.
    pub bytes_per_s: u64,
    /// The remaining time at this rate, in seconds. Present while the warm-up runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_s: Option<u64>,
    /// The time of the request, in nanoseconds since 1970.
    pub started_ns: u64,
    /// The time of the end, in nanoseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ns: Option<u64>,
    /// The time until which the chunks are protected from eviction, in nanoseconds since 1970.
    ///
    /// Absent if they are not protected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned_until_ns: Option<u64>,
    /// The reason for an early end, or the first problem with a chunk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Problem>,
}

/// The warm-ups of the caller's domain.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Warmups {
    /// The warm-ups, the latest first.
    pub warmups: Vec<Warmup>,
}

/// The result of an eviction.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Evicted {
    /// The number of chunks that were evicted from the disks of all servers.
    pub chunks: u64,
    /// The servers of the cluster that did not confirm it: their disks may still have chunks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unconfirmed: Vec<String>,
}
