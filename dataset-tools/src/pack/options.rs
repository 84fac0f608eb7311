//! What a pack is asked to do, and what it says it did.

use crate::index::OnFault;
use crate::index::listed::Names;
use crate::index::walk::Symlinks;
use crate::progress::Mode;
use crate::target::Select;
use fletch_core::TagName;
use fletch_core::manifest::{LayoutParams, SampleRule};
use fletch_origin::OriginUri;
use fletch_tables::Fault;
use serde::Serialize;
use std::path::PathBuf;

/// What to pack and how.
#[derive(Debug, Clone)]
pub struct PackOptions {
    /// The dataset.
    pub uri: OriginUri,
    /// Where chunks and tables go.
    pub to: OriginUri,
    /// The names of its objects, where these are not listed.
    pub list: Option<Names>,
    /// The version whose chunks are kept where they can be; `None` for none.
    pub parent: Option<Select>,
    /// Whether a missing parent is no error (`--parent auto`).
    pub parent_optional: bool,
    /// Whether everything that lies outside the canonical grouping is grouped anew.
    pub compact: bool,
    /// The tag to move.
    pub tag: Option<TagName>,
    /// How entries form samples.
    pub rule: SampleRule,
    /// How they are grouped.
    pub params: LayoutParams,
    /// What becomes of links.
    pub symlinks: Symlinks,
    /// What happens at faults.
    pub on_fault: OnFault,
    /// Chunks made at once.
    pub threads: usize,
    /// Where journals and scratch files are.
    pub state_dir: PathBuf,
    /// How progress is shown.
    pub progress: Mode,
}

/// What became of the parent's chunks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Kept {
    /// Chunks of the parent that stay.
    pub chunks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Samples that are grouped.
    pub samples: u64,
    /// How many of them lie outside the canonical grouping.
    pub samples_outside: u64,
}

/// What a run did; the `--json` output of `pack`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PackReport {
    /// The version.
    pub root: String,
    /// The packed layout.
    pub layout: String,
    /// The index layout that was written beside it.
    pub index_layout: String,
    /// The tag that was moved.
    pub tag: Option<String>,
    /// The dataset.
    pub uri: String,
    /// Where chunks and tables are.
    pub tables: String,
    /// Entries of the version.
    pub entries: u64,
    /// Samples of the version.
    pub samples: u64,
    /// Bytes of the version.
    pub bytes: u64,
    /// Chunks that were written.
    pub chunks_written: u64,
    /// Bytes of chunks that were written.
    pub chunk_bytes_written: u64,
    /// Chunks that were there already, from a stopped run or another dataset.
    pub chunks_found: u64,
    /// What was kept of the parent; `null` without one.
    pub kept: Option<Kept>,
    /// Files that were read.
    pub files_read: u64,
    /// Bytes that were read.
    pub bytes_read: u64,
    /// Files that were not read, because a parent or a stopped run knew them.
    pub files_reused: u64,
    /// Their bytes.
    pub bytes_reused: u64,
    /// Wall-clock time.
    pub seconds: f64,
    /// What was left out.
    pub skipped: Vec<Fault>,
}
