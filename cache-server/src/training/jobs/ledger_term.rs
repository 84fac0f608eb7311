//! The term of the cluster in which a job's ledgers came to this server: a file beside them.
//!
//! It tells an etcd that was restored from a backup that the ledgers here are the newer ones. Ledgers that
//! were always here have the term 1, and no file.

use crate::training::epochs::JobError;
use fletch_host::replace::replace_file;
use std::{io, path::Path};

/// The file of a job's directory.
const TERM_FILE: &str = "cluster.term";

/// Reads the term. Blocking. A file that cannot be read is logged, and counts as none.
pub fn read(dir: &Path) -> u64 {
    let path = dir.join(TERM_FILE);
    let read = match std::fs::read_to_string(&path) {
        Ok(text) => text.trim().parse().map_err(io::Error::other),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(1),
        Err(e) => Err(e),
    };
    read.unwrap_or_else(|error| {
        tracing::error!(file = %path.display(), %error, "the term of a job's ledgers cannot be read");
        1
    })
}

/// Writes the term. Durable when this returns. Blocking. A job whose files are gone needs none.
///
/// # Errors
/// [`JobError::Io`].
pub fn write(dir: &Path, term: u64) -> Result<(), JobError> {
    let path = dir.join(TERM_FILE);
    match replace_file(&path, format!("{term}\n").as_bytes()) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(JobError::Io { path, error }),
        Ok(()) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_term_is_read_again() {
        let dir = tempfile::tempdir().expect("tempdir");
        assert_eq!(read(dir.path()), 1);
        write(dir.path(), 3).expect("written");
        assert_eq!(read(dir.path()), 3);
        std::fs::write(dir.path().join(TERM_FILE), "x").expect("damaged");
        assert_eq!(read(dir.path()), 1);
        write(&dir.path().join("gone"), 3).expect("nothing is left of the job");
    }
}
