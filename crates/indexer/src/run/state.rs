//! The directory of one run under the state directory: its lock, its journals and its scratch files.
//!
//! Runs of the same dataset with the same options share a directory, so that one of them resumes another.

use super::journal::{self, files::FileJournalReader};
use super::options::RunFailure;
use crate::failure::{Exit, Failure};
use fletch_core::Hash;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A locked run directory. The directory is removed when the run succeeds.
#[derive(Debug)]
pub struct RunState {
    dir: PathBuf,
    _lock: File,
}

/// Returns the state directory of a run without `--state-dir`.
///
/// # Errors
/// When neither HOME nor XDG_STATE_HOME is set.
pub fn default_dir() -> Result<PathBuf, Failure> {
    fletch_settings::state_dir(nix::unistd::geteuid().is_root())
        .ok_or_else(|| Failure::usage("neither HOME nor XDG_STATE_HOME is set").hint("give --state-dir DIR"))
}

impl RunState {
    /// Locks the run directory that `key` names, and removes the scratch files of an earlier run. `doing`
    /// says in an error what the runs with such keys do.
    ///
    /// # Errors
    /// When another run holds the lock, or the directory cannot be written.
    pub fn lock(state_dir: &Path, key: &str, doing: &str) -> Result<Self, Failure> {
        let dir = state_dir.join("index").join(&Hash::of(key.as_bytes()).to_string()[..24]);
        let fail = |e: &std::io::Error| {
            Failure::io(format_args!("cannot use the state directory {}", dir.display()), e)
                .hint("name a directory that you may write with --state-dir DIR")
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
                    let _empty_if_unreadable = lock.read_to_string(&mut pid);
                    return Err(Failure::new(format!(
                        "another run is {doing} the same dataset (process {}, lock {})",
                        pid.trim(),
                        path.display()
                    ))
                    .hint("wait for it, stop it, or give this run another --state-dir"));
                }
                Err(TryLockError::Error(e)) => return Err(fail(&e)),
            }
            // A run that ended may have removed this file: then other runs would lock another one.
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

    /// Returns the directory for large temporary files, emptied.
    ///
    /// # Errors
    /// When it cannot be emptied.
    pub fn fresh_scratch(&self) -> Result<PathBuf, Failure> {
        let scratch = self.scratch();
        let emptied = journal::remove(&scratch).and_then(|()| fs::create_dir_all(&scratch));
        emptied.map(|()| scratch).map_err(|e| Failure::scratch(&e))
    }

    /// The directory for large temporary files.
    #[must_use]
    pub fn scratch(&self) -> PathBuf {
        self.dir.join("scratch")
    }

    /// The directory of the chunk journal.
    #[must_use]
    pub fn chunk_journal(&self) -> PathBuf {
        self.dir.join("made")
    }

    /// The file with the hashes of groups that runs collect.
    #[must_use]
    pub fn group_lists(&self) -> PathBuf {
        self.dir.join("groups")
    }

    /// The directory of the file journal that this run writes.
    #[must_use]
    pub fn file_journal(&self) -> PathBuf {
        self.dir.join("new")
    }

    /// Opens the file journal to resume from: the one of the last two runs that got further.
    ///
    /// # Errors
    /// When the journal cannot be renamed.
    pub fn earlier(&self, local: bool) -> Result<FileJournalReader, Failure> {
        let (old, new) = (self.dir.join("old"), self.file_journal());
        let (a, b) = (FileJournalReader::open(&old, local), FileJournalReader::open(&new, local));
        if b.last.is_none() || b.last < a.last {
            return Ok(a);
        }
        journal::remove(&old).and_then(|()| fs::rename(&new, &old)).map_err(|e| {
            Failure::io(format_args!("cannot rename the journal in {}", self.dir.display()), &e)
        })?;
        Ok(FileJournalReader::open(&old, local))
    }

    /// Ends the run. A run that succeeded leaves nothing; any other run leaves its journals, and `kept` says
    /// what is in them.
    ///
    /// # Errors
    /// The failure of the run.
    pub fn end<T>(self, done: Result<T, RunFailure>, kept: &str) -> Result<T, RunFailure> {
        match done {
            Ok(report) => {
                self.finish();
                Ok(report)
            }
            Err(mut e) => {
                // The next run removes scratch files that stay.
                let _stays = fs::remove_dir_all(self.scratch());
                if e.failure.exit == Exit::Interrupted {
                    e.failure.what = format!("stopped; {kept}");
                    e.failure.hint = Some("run the same command again to go on".into());
                }
                Err(e)
            }
        }
    }

    /// Removes the directory, under the lock.
    fn finish(self) {
        let _stays = fs::remove_dir_all(&self.dir);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_run_at_a_time_and_nothing_left_after_success() {
        let tmp = tempfile::tempdir().expect("tempdir");
        let a = RunState::lock(tmp.path(), "k", "packing").expect("free");
        assert!(a.scratch().is_dir());
        let held = RunState::lock(tmp.path(), "k", "packing").expect_err("held");
        assert!(held.what.contains(&std::process::id().to_string()), "{held}");
        assert!(held.what.contains("another run is packing"), "{held}");
        let other = RunState::lock(tmp.path(), "other", "packing").expect("another key");
        other.finish();
        fs::write(a.scratch().join("left"), b"x").expect("write");
        drop(a);
        let a = RunState::lock(tmp.path(), "k", "packing").expect("free again");
        assert_eq!(fs::read_dir(a.scratch()).expect("dir").count(), 0);
        a.finish();
        assert_eq!(fs::read_dir(tmp.path().join("index")).expect("dir").count(), 0);
    }
}
