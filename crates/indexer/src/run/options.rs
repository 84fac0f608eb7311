//! The options of a run, its report, and its failure.

use super::learned::LearnedPages;
use super::loss::Share;
use super::renewed::RenewedPins;
use crate::failure::Failure;
use crate::progress::Mode;
use crate::select::Select;
use crate::source::draft::DraftEntries;
use crate::source::name_list::NameList;
use crate::source::walk::Symlinks;
use fletch_core::TagName;
use fletch_core::manifest::SampleRule;
use fletch_origin::OriginUri;
use fletch_tables::Fault;
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

/// What a run does at an entry that cannot be part of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFault {
    /// Ends at the first fault.
    Stop,
    /// Reports all faults and writes no version.
    Report,
    /// Leaves these entries out and lists them in the manifest.
    Skip,
}

/// The version that a run compares the dataset with, so that it does not read unchanged files again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParentChoice {
    /// Which version.
    pub select: Select,
    /// Whether the run goes on without a parent when there is none (`--parent auto`).
    pub optional: bool,
}

/// What `index` and `pack` are asked to do.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// The dataset.
    pub uri: OriginUri,
    /// Where the tables go, and the chunks of a pack.
    pub to: OriginUri,
    /// The names of the dataset's objects (`--list`); `None` to list the store or walk the directory.
    pub list: Option<NameList>,
    /// The parent; `None` to read every file.
    pub parent: Option<ParentChoice>,
    /// Pins that a server renewed, beside those of the parent.
    pub renewed: RenewedPins,
    /// What a server learned of a draft of the dataset.
    pub learned: Option<Arc<dyn LearnedPages>>,
    /// The draft to seal: its entries are those of the version, and nothing is listed. `None` to list.
    pub seal: Option<Arc<dyn DraftEntries>>,
    /// The URI of the dataset at the server, to make a draft: nothing is read. `None` to read every file.
    pub draft: Option<String>,
    /// The tag to move; `None` to move none.
    pub tag: Option<TagName>,
    /// How entries form samples.
    pub rule: SampleRule,
    /// The directories with tar shards. With the rule `stem`, files beside shards are no samples unless a
    /// glob of the rule names them.
    pub shard_dirs: BTreeSet<String>,
    /// Whether a version without entries is written (`--allow-empty`).
    pub allow_empty: bool,
    /// What to do at symbolic links.
    pub symlinks: Symlinks,
    /// Whether directories on other file systems than the dataset's top are left out.
    pub one_file_system: bool,
    /// What to do at faults.
    pub on_fault: OnFault,
    /// The share of its entries that a version may lose before the tag moves to it (`--allow-loss`). `None`:
    /// 1 %, and one entry in any case.
    pub allow_loss: Option<Share>,
    /// Reader threads of `index`; chunks that `pack` makes at once on a local disk.
    pub threads: usize,
    /// Where journals and scratch files are.
    pub state_dir: PathBuf,
    /// How progress is shown.
    pub progress: Mode,
}

/// The report of a run: the `--json` output of `index`, and a part of the one of `pack`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunReport {
    /// The version.
    pub root: String,
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
    /// Files of the version, as a mount shows them: without members, links and empty directories.
    pub files: u64,
    /// Bytes of those files.
    pub file_bytes: u64,
    /// Files that were read.
    pub files_read: u64,
    /// Bytes that were read.
    pub bytes_read: u64,
    /// Files that were not read because the parent or a stopped run had read them.
    pub files_reused: u64,
    /// Bytes of the reused files.
    pub bytes_reused: u64,
    /// Wall-clock time.
    pub seconds: f64,
    /// The entries that were left out.
    pub skipped: Vec<Fault>,
}

/// A failed run: the failure, and the entries at fault.
#[derive(Debug)]
pub struct RunFailure {
    /// How the command ends.
    pub failure: Failure,
    /// The entries that cannot be part of a version.
    pub faults: Vec<Fault>,
}

impl From<Failure> for RunFailure {
    fn from(failure: Failure) -> Self {
        RunFailure { failure, faults: Vec::new() }
    }
}
