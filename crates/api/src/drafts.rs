//! What a server learned of a draft.

use crate::ObjectPin;
use fletch_core::Hash;
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
