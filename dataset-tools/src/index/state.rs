//! The private directory of one indexing job under the state directory: its lock, its journals
//! and its scratch files. One per (dataset, sample rule, symlink policy).

use super::journal::{self, JournalReader};
use crate::failure::Failure;
use fletch_core::Hash;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Holds the lock; the directory goes when the run succeeded.
#[derive(Debug)]
pub struct RunState {
    dir: PathBuf,
    _lock: File,
}

/// Where state is kept when nobody says otherwise.
///
/// # Errors
/// When there is no home directory to put it in.
pub fn default_dir() -> Result<PathBuf, Failure> {
    fletch_settings::state_dir(nix::unistd::geteuid().is_root())
        .ok_or_else(|| Failure::usage("neither HOME nor XDG_STATE_HOME is set").hint("give --state-dir DIR"))
}

impl RunState {
    /// Takes the lock of the job named by `key` and removes what an earlier run left in scratch.
    ///
    /// # Errors
    /// When another run holds it, or the directory cannot be written.
    pub fn lock(state_dir: &Path, key: &str) -> Result<Self, Failure> {
        let dir = state_dir.join("index").join(&Hash::of(key.as_bytes()).to_string()[..24]);
        let fail = |e: &std::io::Error| {
            Failure::io(format_args!("cannot use the state directory {}", dir.display()), e)
                .hint("give a directory you may write with --state-dir DIR")
        };
        let path = dir.join("lock");
        loop {
            fs::create_dir_all(&dir).map_err(|e| fail(&e))?;
            let mut lock =
                match OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path) {
                    Ok(lock) => lock,
                    // A run that just ended removed the directory.
                    Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
                    Err(e) => return Err(fail(&e)),
                };
            match lock.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let mut pid = String::new();
                    let _known = lock.read_to_string(&mut pid);
                    return Err(Failure::new(format!(
                        "another run is indexing the same dataset (process {}, lock {})",
                        pid.trim(),
                        path.display()
                    ))
                    .hint("wait for it, stop it, or give this run another --state-dir"));
                }
                Err(TryLockError::Error(e)) => return Err(fail(&e)),
            }
            // The lock counts only if it is still the file that others will find.
            let same = fs::metadata(&path)
                .is_ok_and(|m| lock.metadata().is_ok_and(|l| (l.dev(), l.ino()) == (m.dev(), m.ino())));
            if !same {
                continue;
            }
            lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id())).map_err(|e| fail(&e))?;
            let state = RunState { dir: dir.clone(), _lock: lock };
            journal::remove(&state.scratch()).map_err(|e| fail(&e))?;
            fs::create_dir_all(state.scratch()).map_err(|e| fail(&e))?;
            return Ok(state);
        }
    }

    /// Where this run may put large temporary files.
    #[must_use]
    pub fn scratch(&self) -> PathBuf {
        self.dir.join("scratch")
    }

    /// Something of this job's own that outlives a stopped run.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Where this run's journal is written.
    #[must_use]
    pub fn journal(&self) -> PathBuf {
        self.dir.join("new")
    }

    /// The journal to go on from: of the last two runs the one that got further.
    ///
    /// # Errors
    /// When the files cannot be moved.
    pub fn earlier(&self, local: bool) -> Result<JournalReader, Failure> {
        let old = self.dir.join("old");
        let (a, b) = (JournalReader::open(&old, local), JournalReader::open(&self.journal(), local));
        if b.last.is_none() || b.last < a.last {
            return Ok(a);
        }
        journal::remove(&old).and_then(|()| fs::rename(self.journal(), &old)).map_err(|e| {
            Failure::io(format_args!("cannot move the journal in {}", self.dir.display()), &e)
        })?;
        Ok(JournalReader::open(&old, local))
    }

    /// Removes scratch files, for a run that is to be gone on with.
    pub fn clear_scratch(&self) {
        // What stays is removed by the next run.
        let _stays = fs::remove_dir_all(self.scratch());
    }

    /// Removes everything: the run succeeded.
    pub fn finish(self) {
        // The lock is held until the end, so nobody can be using it; what stays is only stale.
        let _stays = fs::remove_dir_all(&self.dir);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_run_at_a_time_and_nothing_left_after_success() {
        let tmp = tempfile::tempdir().expect("tempdir");
        let a = RunState::lock(tmp.path(), "k").expect("free");
        assert!(a.scratch().is_dir());
        let held = RunState::lock(tmp.path(), "k").expect_err("held");
        assert!(held.what.contains(&std::process::id().to_string()), "{held}");
        let other = RunState::lock(tmp.path(), "other").expect("another key");
        other.finish();
        fs::write(a.scratch().join("left"), b"x").expect("write");
        drop(a);
        let a = RunState::lock(tmp.path(), "k").expect("free again");
        assert_eq!(fs::read_dir(a.scratch()).expect("dir").count(), 0);
        a.finish();
        assert_eq!(fs::read_dir(tmp.path().join("index")).expect("dir").count(), 0);
    }
}
