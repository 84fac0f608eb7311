//! The lock on a cache directory: one tier owns the directory, and recognizes it later.

use super::DiskError;
use rustix::fs::{FlockOperation, flock};
use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Seek, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::Path,
};

/// The lock of this tier's directory, held until it is dropped.
#[derive(Debug)]
pub(crate) struct DirectoryLock {
    /// Holds the lock while it is open.
    file: File,
    lock_id: (u64, u64),
    slabs_id: (u64, u64),
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        // Closing is not enough while a child that was just forked has a copy of the file.
        if let Err(e) = flock(&self.file, FlockOperation::Unlock) {
            tracing::debug!(error = %e, "the cache directory was not unlocked; closing the file unlocks it");
        }
    }
}

impl DirectoryLock {
    /// Creates the directory if it does not exist, and takes its lock.
    ///
    /// # Errors
    /// [`DiskError::Locked`] when another tier holds the lock, [`DiskError::Io`] when a file operation fails.
    pub fn take(dir: &Path) -> Result<Self, DiskError> {
        let slabs = dir.join("slabs");
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&slabs)
            .map_err(|e| DiskError::io("create", &slabs, e))?;
        let path = dir.join("lock");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(|e| DiskError::io("lock", &path, e))?;
        DirectoryLock::hold(dir, file)
    }

    /// Takes the lock through `file`, which was opened at the lock's path.
    ///
    /// Fails unless the file still lies at that path. The former owner may have removed the directory
    /// meanwhile, and another process may own the directory that was created since.
    fn hold(dir: &Path, mut file: File) -> Result<Self, DiskError> {
        let (path, slabs) = (dir.join("lock"), dir.join("slabs"));
        let fail = |e| DiskError::io("lock", &path, e);
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            let mut pid = String::new();
            let read = (&mut file).take(20).read_to_string(&mut pid).is_ok();
            let holder =
                if read && !pid.trim().is_empty() { format!(" (pid {})", pid.trim()) } else { String::new() };
            return Err(DiskError::Locked { dir: dir.into(), holder });
        }
        let lock_id = file.metadata().map(id).map_err(fail)?;
        let slabs_id = fs::metadata(&slabs).map(id).map_err(fail)?;
        let lock = DirectoryLock { file, lock_id, slabs_id };
        // Last: while our lock lies there, no other process creates or removes anything here.
        if fs::metadata(&path).map(id).map_err(fail)? != lock_id {
            let removed = io::Error::new(
                io::ErrorKind::NotFound,
                "the file was removed while it was locked; try again",
            );
            return Err(fail(removed));
        }
        let pid = format!("{}\n", std::process::id());
        let mut file = &lock.file;
        let note = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(pid.as_bytes()));
        if let Err(e) = note {
            // On a full disk the lock holds without its note.
            tracing::debug!(error = %e, "the lock file could not be given this process's pid");
        }
        Ok(lock)
    }

    /// Whether the locked directory still lies at `dir`.
    ///
    /// # Errors
    /// `PermissionDenied` when the process may not look at it.
    pub fn is_at(&self, dir: &Path) -> io::Result<bool> {
        for (name, expected) in [("lock", self.lock_id), ("slabs", self.slabs_id)] {
            match fs::metadata(dir.join(name)) {
                Ok(m) if id(m.clone()) == expected => {}
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return Err(e),
                _ => return Ok(false),
            }
        }
        Ok(true)
    }
}

/// Identifies a file whatever its name is.
fn id(m: fs::Metadata) -> (u64, u64) {
    (m.dev(), m.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_was_removed_before_it_was_taken_owns_nothing() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("lock");
        let late = || OpenOptions::new().read(true).write(true).open(&path).expect("open");
        let owner = DirectoryLock::take(dir.path()).expect("the first");
        let (one, two) = (late(), late());
        assert!(
            matches!(DirectoryLock::hold(dir.path(), late()), Err(DiskError::Locked { .. })),
            "it is held"
        );
        // Its owner removed it, then released the lock.
        fs::remove_file(&path).expect("remove");
        drop(owner);
        assert!(
            matches!(DirectoryLock::hold(dir.path(), one), Err(DiskError::Io { .. })),
            "nothing lies there"
        );
        let owner = DirectoryLock::take(dir.path()).expect("the next");
        assert!(
            matches!(DirectoryLock::hold(dir.path(), two), Err(DiskError::Io { .. })),
            "another's lies there"
        );
        assert!(matches!(DirectoryLock::take(dir.path()), Err(DiskError::Locked { .. })), "and is still its");
        drop(owner);
        DirectoryLock::take(dir.path()).expect("free again");
    }
}
