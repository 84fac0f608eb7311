//! Where the tables of a version lie, relative to the place given by `--to`.
//!
//! Chunks written by `pack` lie beside them under `fletch/chunks/`.

use fletch_core::{Hash, LayoutId, Root, TagName};

/// Everything Fletch writes begins with this; it is never indexed itself.
pub const PREFIX: &str = "fletch/";
/// Where tags are, for listing them.
pub const TAGS: &str = "fletch/tags/";
/// Where versions are, for listing them.
pub const VERSIONS: &str = "fletch/versions/";

/// Where chunks of packs are, for listing them: in the order of their hashes.
pub const CHUNKS: &str = "fletch/chunks/";

/// The object of a packed chunk.
#[must_use]
pub fn chunk(hash: Hash) -> String {
    let hex = hash.to_string();
    format!("{CHUNKS}{}/{hex}", &hex[..2])
}

/// The manifest of a version.
#[must_use]
pub fn manifest(root: Root) -> String {
    format!("{VERSIONS}{root}/manifest.json")
}

/// The entries of a version.
#[must_use]
pub fn entries(root: Root) -> String {
    format!("{VERSIONS}{root}/entries.parquet")
}

/// Where the layouts of a version are, for listing them.
#[must_use]
pub fn layouts(root: Root) -> String {
    format!("{VERSIONS}{root}/layouts/")
}

/// The description of a layout.
#[must_use]
pub fn layout(root: Root, layout: LayoutId) -> String {
    format!("{VERSIONS}{root}/layouts/{layout}/layout.json")
}

/// Which bytes of which chunks an entry is.
#[must_use]
pub fn placement(root: Root, layout: LayoutId) -> String {
    format!("{VERSIONS}{root}/layouts/{layout}/placement.parquet")
}

/// Where each chunk is at the origin.
#[must_use]
pub fn chunks(root: Root, layout: LayoutId) -> String {
    format!("{VERSIONS}{root}/layouts/{layout}/chunks.parquet")
}

/// A tag's document.
#[must_use]
pub fn tag(tag: &TagName) -> String {
    format!("{TAGS}{tag}")
}
