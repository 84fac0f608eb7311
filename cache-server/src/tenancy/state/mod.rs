//! The state directory: what must survive a restart (I5), in append-only logs. One server locks it.

mod private;
mod registrations;

use private::make_private;
pub use registrations::{
    Applied, Change, Planned, RegisterChange, RegisterError, Registration, RegistrationHandle, Registrations,
    replay,
};

use nix::fcntl::{Flock, FlockArg};
use std::{
    fs::{File, OpenOptions},
    io,
    path::{Path, PathBuf},
};

/// Why the state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// It cannot be created or opened.
    #[error("cannot open {path} of the state directory: {error}; fix it, or name another with --state-dir")]
    Open {
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// Another process uses it.
    #[error(
        "state directory {0} is in use by another server; stop that one, or name another with --state-dir"
    )]
    InUse(PathBuf),
    /// A log is damaged.
    #[error(
        "{path} is damaged: {why}; restore the file from a backup, or move it away and register the datasets \
         again (no data is lost by that)"
    )]
    Damaged {
        /// The log.
        path: PathBuf,
        /// What is wrong, with its offset.
        why: String,
    },
}

/// The state directory, locked until this value is dropped.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    _lock: Flock<File>,
}

impl StateDir {
    /// Creates the directory if it does not exist, locks it, and makes all in it private to its owner.
    ///
    /// # Errors
    /// [`StateError`].
    pub fn open(path: &Path) -> Result<Self, StateError> {
        use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
        let failed = |error| StateError::Open { path: path.to_owned(), error };
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(path.join("lock"))
            .map_err(failed)?;
        let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| {
            if errno == nix::errno::Errno::EWOULDBLOCK {
                StateError::InUse(path.to_owned())
            } else {
                failed(errno.into())
            }
        })?;
        if let Err(error) = make_private(path) {
            // Another user may own the directory, as with a volume of a container.
            tracing::warn!(
                dir = %path.display(), %error,
                "the state directory cannot be made private; change its owner or mode"
            );
        }
        Ok(StateDir { path: path.to_owned(), _lock: lock })
    }

    /// Creates a directory below this one, if it does not exist.
    ///
    /// # Errors
    /// [`StateError`].
    pub fn create_dir(&self, name: &str) -> Result<(), StateError> {
        use std::os::unix::fs::DirBuilderExt as _;
        let path = self.path.join(name);
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path);
        made.map_err(|error| StateError::Open { path, error })
    }

    /// Returns the path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}
