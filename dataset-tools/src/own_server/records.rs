//! Remembers the mounts that `fletch mount` made, so that `fletch down` finds them: also those whose process
//! was killed, and those of another server.
//!
//! One small file for each directory, beside the socket. A reboot removes them with the mounts.

use super::OwnPaths;
use fletch_core::Hash;
use serde::{Deserialize, Serialize};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// The longest record, in bytes.
const BYTES_MAX: u64 = 16 << 10;

/// A mount that was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeMount {
    /// The directory, without links.
    pub dir: PathBuf,
    pub dataset: String,
    /// Whether it reads from the own server.
    #[serde(default)]
    pub is_own: bool,
}

fn records(paths: &OwnPaths) -> PathBuf {
    paths.dir.join("mounts")
}

fn path_of(paths: &OwnPaths, dir: &Path) -> PathBuf {
    records(paths).join(&Hash::of(dir.as_os_str().as_bytes()).to_string()[..24])
}

/// Remembers a mount.
///
/// # Errors
/// The error of the file.
pub fn remember(paths: &OwnPaths, made: &MadeMount) -> io::Result<()> {
    // Private, as for the socket beside it.
    fs::DirBuilder::new().recursive(true).mode(0o700).create(records(paths))?;
    fs::write(path_of(paths, &made.dir), serde_json::to_vec(made)?)
}

/// Forgets a mount. Forgetting an unknown one changes nothing.
pub fn forget(paths: &OwnPaths, dir: &Path) {
    // A record that stays names a directory where nothing is mounted, which `down` skips.
    let _stays = fs::remove_file(path_of(paths, dir));
    let _in_use = fs::remove_dir(records(paths));
}

/// Returns the mounts that were made, in the order of their directories. Skips damaged records.
#[must_use]
pub fn all(paths: &OwnPaths) -> Vec<MadeMount> {
    let Ok(entries) = fs::read_dir(records(paths)) else { return Vec::new() };
    let short = |path: &PathBuf| fs::metadata(path).is_ok_and(|meta| meta.len() <= BYTES_MAX);
    let files = entries.flatten().map(|entry| entry.path()).filter(short);
    let mut all: Vec<MadeMount> =
        files.filter_map(|path| serde_json::from_slice(&fs::read(path).ok()?).ok()).collect();
    all.sort_by(|a, b| a.dir.cmp(&b.dir));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_remembered_until_they_are_forgotten() {
        let dir = tempfile::tempdir().expect("tempdir");
        let at = |name: &str| dir.path().join(name);
        let (socket, state, cache) = (at("s"), at("state"), at("cache"));
        let paths = OwnPaths { uid: 0, dir: dir.path().to_owned(), socket, state, cache };
        let made = |name: &str| MadeMount { dir: at(name), dataset: "photos".into(), is_own: true };
        assert_eq!(all(&paths), []);
        for name in ["b", "a", "b"] {
            remember(&paths, &made(name)).expect("remembered");
        }
        fs::write(records(&paths).join("damaged"), "{").expect("write");
        assert_eq!(all(&paths), [made("a"), made("b")]);
        forget(&paths, &at("a"));
        forget(&paths, &at("never"));
        assert_eq!(all(&paths), [made("b")]);
    }
}
