//! The text files of the repository, for the tests that read the tree.
//!
//! A file that git ignores is no part of the tree; one that is not committed yet is.

use crate::bins::repo;
use ignore::WalkBuilder;
use std::{fs, path::Path};

/// A text file of the repository.
#[derive(Debug, Clone)]
pub struct File {
    /// Path below the root, with `/`.
    pub path: String,
    /// Content.
    pub text: String,
}

/// What a file is written in. The rules for lines, comments and names depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    /// `.rs`.
    Rust,
    /// `.py` and `.pyi`.
    Python,
    /// `.sh`, `.toml`, `.yaml`, the Makefile, `.ci/run`: comments begin with `#`.
    Script,
    /// `.md`.
    Markdown,
    /// Data, golden files, generated files.
    Other,
}

/// Returns what the file at a path is written in.
#[must_use]
pub fn language(path: &str) -> Language {
    if path.starts_with("tests/golden/") {
        return Language::Other;
    }
    let name = path.rsplit('/').next().unwrap_or(path);
    match name.rsplit_once('.').map_or("", |(_, extension)| extension) {
        "rs" => Language::Rust,
        "py" | "pyi" => Language::Python,
        "sh" | "toml" | "yaml" | "editorconfig" => Language::Script,
        "md" => Language::Markdown,
        _ if name == "Makefile" || path == ".ci/run" => Language::Script,
        _ => Language::Other,
    }
}

/// Returns the text files of the repository, by path.
///
/// # Panics
/// When the repository cannot be read.
#[must_use]
pub fn files() -> Vec<File> {
    let root = repo();
    let walk = WalkBuilder::new(&root)
        .hidden(false)
        .parents(false)
        .require_git(false)
        .filter_entry(|e| !matches!(e.file_name().to_str(), Some(".git" | "target")))
        .build();
    let mut out: Vec<File> = walk
        .map(|e| e.expect("entry"))
        .filter(|e| e.file_type().is_some_and(|t| t.is_file()))
        .filter_map(|e| read(&root, e.path()))
        .collect();
    out.sort_by(|a, b| a.path.cmp(&b.path));
    out
}

fn read(root: &Path, path: &Path) -> Option<File> {
    let text = String::from_utf8(fs::read(path).expect("read")).ok()?;
    Some(File { path: path.strip_prefix(root).expect("below").display().to_string(), text })
}
