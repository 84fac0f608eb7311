//! The paths of a version's tables, relative to the folder that `--tables` names.
//!
//! `pack` writes chunks beside the tables, under `fletch/chunks/`.

use fletch_core::{Hash, LayoutId, Root, TagName};

/// The prefix of every path that Fletch writes. `index` skips it.
pub const PREFIX: &str = "fletch/";
/// The folder of the tags.
pub const TAGS: &str = "fletch/tags/";
/// The folder of the versions.
pub const VERSIONS: &str = "fletch/versions/";
/// The folder of packed chunks. A listing returns them in the order of their hashes.
pub const CHUNKS: &str = "fletch/chunks/";

/// The folder of the marks of runs.
pub const RUNS: &str = "fletch/runs/";
/// The mark of a run that deletes versions.
pub const COLLECTION: &str = "fletch/runs/gc";

/// The folder of the records of erased files.
pub const ERASED: &str = "fletch/erased/";

/// Returns the path of the record that a file was erased.
#[must_use]
pub fn erased(path: &str) -> String {
    format!("{ERASED}{}", Hash::of(path.as_bytes()))
}

/// Returns the path of a run's mark.
#[must_use]
pub fn run(id: &str) -> String {
    format!("{RUNS}{id}")
}

/// Returns the path of a packed chunk.
#[must_use]
pub fn chunk(hash: Hash) -> String {
    let hex = hash.to_string();
    format!("{CHUNKS}{}/{hex}", &hex[..2])
}

/// Returns the path of a version's manifest.
#[must_use]
pub fn manifest(root: Root) -> String {
    format!("{VERSIONS}{root}/manifest.json")
}

/// Returns the path of a version's entries.
#[must_use]
pub fn entries(root: Root) -> String {
    format!("{VERSIONS}{root}/entries.parquet")
}

/// Returns the folder of a version's layouts.
#[must_use]
pub fn layouts(root: Root) -> String {
    format!("{VERSIONS}{root}/layouts/")
}

/// Returns the path of a layout's document.
#[must_use]
pub fn layout(root: Root, layout: LayoutId) -> String {
    format!("{VERSIONS}{root}/layouts/{layout}/layout.json")
}

/// Returns the path of a layout's placement: the slices of chunks that make up each entry.
#[must_use]
pub fn placement(root: Root, layout: LayoutId) -> String {
    format!("{VERSIONS}{root}/layouts/{layout}/placement.parquet")
}

/// Returns the path of a layout's chunks: the location of each chunk at the origin.
#[must_use]
pub fn chunks(root: Root, layout: LayoutId) -> String {
    format!("{VERSIONS}{root}/layouts/{layout}/chunks.parquet")
}

/// Returns the path of the hashes of the groups of a layout's long chunks.
#[must_use]
pub fn groups(root: Root, layout: LayoutId) -> String {
    format!("{VERSIONS}{root}/layouts/{layout}/groups.bin")
}

/// Returns the path of a tag's document.
#[must_use]
pub fn tag(tag: &TagName) -> String {
    format!("{TAGS}{tag}")
}
