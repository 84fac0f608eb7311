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
}

/// The mounts that the caller may see.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Mounts {
    /// The mounts, in the order of their ids.
    pub mounts: Vec<Mount>,
}
