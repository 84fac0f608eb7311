//! The options of `fletch index` and `fletch pack`.

use crate::run::loss::Share;
use crate::source::walk::Symlinks;
use crate::target::DatasetArg;
use clap::{Args, ValueEnum};
use fletch_core::TagName;
use fletch_settings::ByteSize;
use std::path::PathBuf;

/// `fletch index`.
#[derive(Debug, Args)]
pub struct IndexArgs {
    /// The dataset: a directory, a URI, or a name that the server knows.
    #[arg(value_name = "SOURCE")]
    pub uri: DatasetArg,
    /// The place of the tables [default: where the server says].
    #[arg(long, visible_alias = "to", value_name = "URI")]
    pub tables: Option<String>,
    /// Names of the objects, one on each line, instead of a store's listing.
    #[arg(long, value_name = "FILE")]
    pub list: Option<PathBuf>,
    /// List the files and read none of them.
    #[arg(long, conflicts_with = "parent")]
    pub draft: bool,
    /// Skip files that are unchanged since a ROOT, a TAG, or `auto`.
    #[arg(long, value_name = "VERSION")]
    pub parent: Option<String>,
    /// The tag to move.
    #[arg(long, value_name = "TAG", default_value = "latest")]
    pub tag: TagName,
    /// Move no tag.
    #[arg(long, conflicts_with = "tag")]
    pub no_tag: bool,
    /// Which files are samples; may be repeated [default: all].
    #[arg(long, value_name = "GLOB")]
    pub samples: Vec<String>,
    /// A sample is a `file`, or all files of one `stem` [default: by content].
    #[arg(long, value_name = "RULE", value_enum, hide_possible_values = true)]
    pub sample_rule: Option<RuleArg>,
    /// Symbolic links: keep, follow, skip or error.
    #[arg(
        long, value_name = "HOW", value_enum, default_value_t = Symlinks::Keep, hide_possible_values = true
    )]
    pub symlinks: Symlinks,
    /// Do not cross into other file systems.
    #[arg(long)]
    pub one_file_system: bool,
    /// Report every entry that cannot be read, and write no version.
    #[arg(long)]
    pub keep_going: bool,
    /// Leave such entries out, list them, and exit with 3.
    #[arg(long, conflicts_with = "keep_going")]
    pub skip_failed: bool,
    /// How much a tag's version may lose, such as 5% [default: 1%].
    #[arg(long, value_name = "SHARE")]
    pub allow_loss: Option<Share>,
    /// Write a version without entries, if the dataset has none.
    #[arg(long)]
    pub allow_empty: bool,
    /// Reader threads [default: the number of cores].
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Journals and temporary files [env: FLETCH_STATE_DIR].
    #[arg(long, value_name = "DIR", env = "FLETCH_STATE_DIR", hide_env = true)]
    pub state_dir: Option<PathBuf>,
}

/// `fletch pack`.
#[derive(Debug, Args)]
pub struct PackArgs {
    /// The options that `index` has too.
    #[command(flatten)]
    pub index: IndexArgs,
    /// Leave no sample outside the canonical grouping.
    #[arg(long, requires = "parent")]
    pub compact: bool,
    /// The largest chunk of small files [default: 6MiB].
    #[arg(long, value_name = "SIZE")]
    pub chunk_size: Option<ByteSize>,
}

/// The sample rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RuleArg {
    /// One file is one sample.
    File,
    /// All files with the same name up to its first dot are one sample (WebDataset).
    Stem,
}
