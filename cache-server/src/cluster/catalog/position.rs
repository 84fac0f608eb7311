//! How late the datasets of this server are, kept over restarts.

use crate::cluster::{from_text, to_text};
use fletch_host::replace::replace_file;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The file of the state directory.
const POSITION_FILE: &str = "datasets.position";

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Reached {
    /// The uid of the cluster.
    uid: String,
    position: u64,
}

/// The position of the last change that this server has executed. It is never ahead of the log.
#[derive(Debug)]
pub struct Position {
    path: PathBuf,
    reached: Mutex<Reached>,
}

impl Position {
    /// Reads what a state directory has. Blocking. A damaged file counts as none.
    pub fn open(dir: &Path) -> Self {
        let path = dir.join(POSITION_FILE);
        let reached = std::fs::read(&path).ok().and_then(|text| match from_text(&text) {
            Ok(reached) => Some(reached),
            Err(error) => {
                tracing::warn!(file = %path.display(), %error, "how late the datasets are cannot be read");
                None
            }
        });
        Position { path, reached: Mutex::new(reached.unwrap_or_default()) }
    }

    /// Returns the position in the changes of a cluster, or 0 if nothing is known of it.
    pub fn of(&self, uid: &str) -> u64 {
        let reached = self.reached.lock();
        if reached.uid == uid { reached.position } else { 0 }
    }

    /// Notes a position whose changes are durable. Blocking.
    pub fn reach(&self, uid: &str, position: u64) {
        let now = Reached { uid: uid.to_owned(), position };
        let mut reached = self.reached.lock();
        if *reached == now {
            return;
        }
        if let Err(error) = replace_file(&self.path, &to_text(&now)) {
            tracing::warn!(%error, "how late the datasets are is not kept for the next start");
        }
        *reached = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_outlives_a_restart_and_is_of_one_cluster() {
        let dir = tempfile::tempdir().expect("tempdir");
        let position = Position::open(dir.path());
        assert_eq!(position.of("u"), 0);
        position.reach("u", 7);
        let again = Position::open(dir.path());
        assert_eq!((again.of("u"), again.of("other")), (7, 0));
        std::fs::write(dir.path().join(POSITION_FILE), "?").expect("written");
        assert_eq!(Position::open(dir.path()).of("u"), 0);
    }
}
