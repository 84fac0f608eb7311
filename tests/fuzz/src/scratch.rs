//! Files for parsers that read a path: in memory where the machine has a directory in memory.

use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::LazyLock,
};
use tempfile::TempDir;

static DIR: LazyLock<TempDir> = LazyLock::new(|| {
    let memory = Path::new("/dev/shm");
    let above = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    TempDir::with_prefix_in("fletch-fuzz-", above).expect("a scratch directory")
});

/// Returns the path of a name in this process's scratch directory.
///
/// # Panics
/// When the machine has no room for a directory.
#[must_use]
pub fn path(name: &str) -> PathBuf {
    DIR.path().join(name)
}

/// Writes a file and returns its path.
///
/// # Panics
/// When the file cannot be written.
#[must_use]
pub fn written(name: &str, bytes: &[u8]) -> PathBuf {
    let path = path(name);
    std::fs::write(&path, bytes).expect("a scratch file");
    path
}

/// Writes a file and returns it, open for reading.
///
/// # Panics
/// When the file cannot be written.
#[must_use]
pub fn opened(name: &str, bytes: &[u8]) -> File {
    File::open(written(name, bytes)).expect("a scratch file")
}
