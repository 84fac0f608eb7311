//! Drafts: what a server learned of them, and how it seals them.

use crate::{ObjectPin, Problem};
use fletch_core::{DatasetName, Hash, Root};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A file of a draft, every byte of which the server has read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LearnedFile {
    /// The path of its object, which is the path of its entry.
    pub path: String,
    /// The object as the listing showed it. The server read the bytes of this state.
    pub pin: ObjectPin,
    /// The BLAKE3 hashes of its slices, in order.
    #[schema(value_type = Vec<String>)]
    pub slices: Vec<Hash>,
    /// The values of the slices in the tree of the file, 64 hex digits each. Empty for a file of one slice.
    #[schema(value_type = Vec<String>)]
    pub subtrees: Vec<Hash>,
}

/// A page of what a server learned of a draft.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LearnedFiles {
    /// When the listing began, in nanoseconds since 1970.
    pub listed_ns: u64,
    /// The files of which every byte was read, in path order, at most 1024.
    pub files: Vec<LearnedFile>,
    /// The number of entries that the page is about, whether they were read or not.
    pub entries: u64,
    /// The value of `after` for the next page. Absent after the last page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<u64>,
}

/// A draft that is in use, and how much of it the server knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Draft {
    /// Its dataset.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// Its root.
    #[schema(value_type = String)]
    pub root: Root,
    /// When the listing began, in nanoseconds since 1970.
    pub listed_ns: u64,
    /// Its files.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The files of which the server has read every byte.
    pub known_files: u64,
    /// The bytes that the server has read.
    pub known_bytes: u64,
}

/// A dataset that the server lists, to make a draft of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Listing {
    /// The dataset.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// How far it is: `running`, `done` or `failed`.
    pub state: RunState,
    /// Names that were listed.
    pub names: u64,
    /// When it began, in nanoseconds since 1970.
    pub started_ns: u64,
    /// When it ended, in nanoseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ns: Option<u64>,
    /// The root of the draft, once it is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub root: Option<Root>,
    /// Why no draft was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Problem>,
}

/// How far the listing of a dataset or the sealing of a draft is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// It runs, or waits for its turn.
    Running,
    /// The tables are there, and the tag `latest` names them.
    Done,
    /// Objects changed or vanished since the listing, or cannot be read. No version was made.
    Blocked,
    /// It failed. What was read is not read again by the next one.
    Failed,
    /// A state that this client does not know.
    #[serde(other)]
    Unknown,
}

/// The sealing of a draft.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Sealing {
    /// The dataset.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// The draft. Of a dataset whose latest version is no draft, that version.
    #[schema(value_type = String)]
    pub draft: Root,
    /// How far it is.
    pub state: RunState,
    /// Files and other entries of the draft.
    pub entries: u64,
    /// Bytes of the draft.
    pub bytes: u64,
    /// Entries that are done.
    pub entries_done: u64,
    /// Bytes that need not be read, because the server read them before.
    pub bytes_known: u64,
    /// Bytes that were read for the sealing.
    pub bytes_read: u64,
    /// When it began, in nanoseconds since 1970.
    pub started_ns: u64,
    /// When it ended, in nanoseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ns: Option<u64>,
    /// The root of the version, once it is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub root: Option<Root>,
    /// Why no version was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Problem>,
}
