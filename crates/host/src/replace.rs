//! Replaces a file as a whole or not at all.
//!
//! The new content is written beside the file and synced. Then it takes the file's name, and the directory is
//! synced. So a crash at any moment leaves the old or the new file, and a call that returned is durable.

use std::{
    ffi::OsString,
    fs::{File, Permissions},
    io::{self, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

/// A file's new content, written and durable beside the file that it will replace. Dropping it removes it.
#[derive(Debug)]
pub struct Staged {
    /// Empty once it has the name of the file: by then, another writer may have made a new one.
    part: PathBuf,
    path: PathBuf,
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.part.as_os_str().is_empty() {
            // If it stays, the next one is written over it.
            drop(std::fs::remove_file(&self.part));
        }
    }
}

/// Replaces a file that only this process writes. Blocking.
///
/// # Errors
/// Those of the file system. The old file is still there.
pub fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    stage_file(path, bytes)?.commit()
}

/// As [`replace_file`], for a file that several processes may replace at the same time: one of them wins.
///
/// # Errors
/// Those of the file system. The old file is still there.
pub fn replace_shared_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    stage(path, bytes, &own_suffix())?.commit()
}

/// Creates a file that several processes may create at the same time: the first one wins. Returns whether it
/// was this one. Blocking.
///
/// # Errors
/// Those of the file system.
pub fn create_shared_file(path: &Path, bytes: &[u8]) -> io::Result<bool> {
    let staged = stage(path, bytes, &own_suffix())?;
    match std::fs::hard_link(&staged.part, path) {
        Ok(()) => sync_parent(path).map(|()| true),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(e) => Err(e),
    }
}

fn own_suffix() -> String {
    format!(".{}.part", std::process::id())
}

/// Writes a file's new content beside it. Blocking.
///
/// # Errors
/// Those of the file system.
pub fn stage_file(path: &Path, bytes: &[u8]) -> io::Result<Staged> {
    stage(path, bytes, ".part")
}

fn stage(path: &Path, bytes: &[u8], suffix: &str) -> io::Result<Staged> {
    let mut part = OsString::from(path);
    part.push(suffix);
    // From here on an error removes the part: a full disk gets its bytes back.
    let staged = Staged { part: part.into(), path: path.to_owned() };
    let mut file = File::create(&staged.part)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    Ok(staged)
}

impl Staged {
    /// Sets the permissions of the new file.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn with_mode(self, mode: u32) -> io::Result<Self> {
        std::fs::set_permissions(&self.part, Permissions::from_mode(mode))?;
        Ok(self)
    }

    /// Replaces the file. Durable when this returns. Blocking.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn commit(mut self) -> io::Result<()> {
        std::fs::rename(&self.part, &self.path)?;
        self.part = PathBuf::new();
        sync_parent(&self.path)
    }

    /// Returns the path of the file that will be replaced.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Syncs the directory of a file, so that the file's name is durable. Blocking.
///
/// # Errors
/// Those of the file system.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        // The directory of a bare name is the current one.
        Some(dir) if dir.as_os_str().is_empty() => File::open(".")?.sync_all(),
        Some(dir) => File::open(dir)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_nothing_is_left_beside_it() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("record.json");
        replace_file(&path, b"old").expect("new file");
        let staged = stage_file(&path, b"new").expect("staged");
        assert_eq!(std::fs::read(&path).expect("read"), b"old", "until the commit");
        staged.with_mode(0o600).expect("mode").commit().expect("committed");
        assert_eq!(std::fs::read(&path).expect("read"), b"new");
        assert_eq!(std::fs::metadata(&path).expect("metadata").permissions().mode() & 0o777, 0o600);
        replace_shared_file(&path, b"shared").expect("replaced");
        assert_eq!(std::fs::read(&path).expect("read"), b"shared");
        drop(stage_file(&path, b"never").expect("staged"));
        assert!(!create_shared_file(&path, b"second").expect("it exists"));
        assert_eq!(std::fs::read(&path).expect("read"), b"shared");
        std::fs::remove_file(&path).expect("removed");
        assert!(create_shared_file(&path, b"first").expect("created"));
        assert_eq!(std::fs::read(&path).expect("read"), b"first");
        assert_eq!(std::fs::read_dir(dir.path()).expect("dir").count(), 1);
    }

    #[test]
    fn a_failure_leaves_the_old_file() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("busy");
        std::fs::create_dir_all(path.join("full")).expect("a directory in its place");
        replace_shared_file(&path, b"new").expect_err("a directory cannot be replaced");
        assert!(path.join("full").exists());
        assert_eq!(std::fs::read_dir(dir.path()).expect("dir").count(), 1, "the part is gone");
    }
}
