//! What a run is asked to do, and what it says it did.

use super::listed::Names;
use super::walk::Symlinks;
use crate::failure::Failure;
use crate::progress::Mode;
use crate::target::Select;
use fletch_core::TagName;
use fletch_core::manifest::SampleRule;
use fletch_origin::OriginUri;
use fletch_tables::Fault;
use serde::Serialize;
use std::path::PathBuf;

/// What happens at an entry that cannot be indexed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFault {
    /// The run ends.
    Stop,
    /// All are reported, nothing is written.
    Report,
    /// They are left out, and listed in the manifest.
    Skip,
}

/// What to index and how.
#[derive(Debug, Clone)]
pub struct IndexOptions {
    /// The dataset.
    pub uri: OriginUri,
    /// Where the tables go.
    pub to: OriginUri,
    /// The names of its objects, where these are not listed.
    pub list: Option<Names>,
    /// The version of which unchanged files are not read again; `None` for none, a tag that is
    /// missing is an error unless `parent_optional`.
    pub parent: Option<Select>,
    /// Whether a missing parent is no error (`--parent auto`).
    pub parent_optional: bool,
    /// The tag to move.
    pub tag: Option<TagName>,
    /// How entries form samples.
    pub rule: SampleRule,
    /// What becomes of links.
    pub symlinks: Symlinks,
    /// What happens at faults.
    pub on_fault: OnFault,
    /// Reader threads.
    pub threads: usize,
    /// Where journals and scratch files are.
    pub state_dir: PathBuf,
    /// How progress is shown.
    pub progress: Mode,
}

/// What a run did; the `--json` output of `index`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The version.
    pub root: String,
    /// The layout.
    pub layout: String,
    /// The tag that was moved.
    pub tag: Option<String>,
    /// The dataset.
    pub uri: String,
    /// Where the tables are.
    pub tables: String,
    /// Entries of the version.
    pub entries: u64,
    /// Samples of the version.
    pub samples: u64,
    /// Bytes of the version.
    pub bytes: u64,
    /// Files that were read.
    pub files_read: u64,
    /// Bytes that were read.
    pub bytes_read: u64,
    /// Files known from the parent or from a stopped run.
    pub files_reused: u64,
    /// Their bytes.
    pub bytes_reused: u64,
    /// Wall-clock time.
    pub seconds: f64,
    /// What was left out.
    pub skipped: Vec<Fault>,
}

/// A failed run: what happened, and the entries at fault.
#[derive(Debug)]
pub struct IndexFailure {
    /// How the command ends.
    pub failure: Failure,
    /// The entries that could not be indexed.
    pub faults: Vec<Fault>,
}

impl From<Failure> for IndexFailure {
    fn from(failure: Failure) -> Self {
        IndexFailure { failure, faults: Vec::new() }
    }
}
