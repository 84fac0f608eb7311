//! Mounts: which mounts read through a server, as each mount announces itself.
//!
//! A mount announces itself every [`ANNOUNCE_INTERVAL`]. The server forgets a mount [`FORGET_AFTER`] after
//! its last announcement, so that a killed mount disappears by itself.

use fletch_core::{DatasetName, JobName, MountId, Root};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use utoipa::ToSchema;

/// How often a mount announces itself.
pub const ANNOUNCE_INTERVAL: Duration = Duration::from_secs(10);
/// How long after its last announcement the server forgets a mount.
pub const FORGET_AFTER: Duration = Duration::from_secs(30);
/// The longest directory of an announcement, in bytes.
pub const DIR_BYTES_MAX: usize = 4096;
/// The longest problem of an announcement, in bytes.
pub const PROBLEM_BYTES_MAX: usize = 255;
/// The longest host name or version of an announcement, in bytes.
pub const WORD_BYTES_MAX: usize = 255;

/// Body of `PUT /v1/mounts/{id}`. A server ignores fields that it does not know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AnnounceMount {
    /// The mounted dataset.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// The root of the mounted version.
    #[schema(value_type = String)]
    pub root: Root,
    /// The directory where the version is mounted, at most 4096 bytes.
    pub dir: String,
    /// The name of the mount's machine, at most 255 bytes.
    pub host: String,
    /// The id of the mount's process on that machine.
    pub pid: u32,
    /// The job to which the mount's reads are accounted.
    #[schema(value_type = String)]
    pub job: JobName,
    /// The tag or root by which the mount named the version, at most 255 bytes.
    pub version: String,
    /// Why the directory does not show the version that its name means now, at most 255 bytes. Absent if it
    /// shows that version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// What the mount counted of its reads. Absent from older mounts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reads: Option<MountReads>,
}

/// What a mount counted of its reads since it began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MountReads {
    /// The time in which the kernel waited for at least one read, in nanoseconds.
    pub read_ns: u64,
    /// The time between two reads, in which none was under way, without pauses of 10 s and more, in
    /// nanoseconds.
    pub think_ns: u64,
    /// The reads that the kernel asked for.
    pub reads: u64,
    /// The bytes that the kernel got.
    pub bytes: u64,
    /// The requests of the kernel, other than reads, that only a program in the mount causes.
    pub other_requests: u64,
}

/// Who serves the programs in a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum MountState {
    /// No program uses the mount, as far as it can see.
    Idle,
    /// The kernel's page cache has all that programs read, so more cache is worth nothing to them.
    Kernel,
    /// The mount delivers bytes.
    Reading,
}

/// What cache is worth to the programs in a mount, by the counts of about the last minute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MountBenefit {
    /// Who serves them now.
    pub state: MountState,
    /// Bytes a second while they read and think. Absent unless the mount delivers bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// An upper bound of the bytes a second that they would read if reads took no time. Absent unless the
    /// mount delivers bytes, and if they do nothing but read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_rate: Option<u64>,
}

/// A mount that announced itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Mount {
    /// The id that the mount chose.
    #[schema(value_type = String)]
    pub id: MountId,
    /// What the mount announced last.
    #[serde(flatten)]
    pub announced: AnnounceMount,
    /// The time of the last announcement, in nanoseconds since 1970.
    pub seen_ns: u64,
    /// What cache is worth to the programs in the mount. Absent until it announced itself twice, and for
    /// older mounts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub benefit: Option<MountBenefit>,
}

/// The mounts that the caller may see.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Mounts {
    /// The mounts, in the order of their ids.
    pub mounts: Vec<Mount>,
}
