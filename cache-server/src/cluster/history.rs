//! Notices that etcd went back in time: somebody restored a backup of it, or replaced it.
//!
//! I1. One task notes what each answer says, and its reads are linearizable. So the numbers only grow, unless
//!     etcd lost a part of its history.
//! I2. The numbers are kept over restarts, at most [`KEEP_EVERY`] old.

use super::records::{from_text, to_text};
use fletch_host::replace::replace_file;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// The file of the state directory.
const HISTORY_FILE: &str = "etcd.history";
/// How often the numbers are written.
const KEEP_EVERY: Duration = Duration::from_secs(10);

/// What an answer of etcd says about its history.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistoryPoint {
    /// The id that etcd gave itself when it began.
    pub cluster_id: u64,
    /// Counts the changes of all keys.
    pub revision: u64,
    /// Counts the elections of leaders.
    pub raft_term: u64,
}

impl HistoryPoint {
    /// Returns what shows that this point is not after `earlier`. `None`: it is, or is the same.
    fn went_back_from(&self, earlier: &HistoryPoint) -> Option<String> {
        let HistoryPoint { cluster_id, revision, raft_term } = *self;
        if cluster_id != earlier.cluster_id {
            return Some(format!("its cluster id is {cluster_id:x} and was {:x}", earlier.cluster_id));
        }
        if revision < earlier.revision {
            return Some(format!("its revision is {revision} and was {}", earlier.revision));
        }
        if raft_term < earlier.raft_term {
            return Some(format!("its raft term is {raft_term} and was {}", earlier.raft_term));
        }
        None
    }
}

#[derive(Debug, Default)]
struct State {
    last: Option<HistoryPoint>,
    kept: Option<(HistoryPoint, Instant)>,
}

/// What this server has seen of etcd's history.
#[derive(Debug)]
pub struct History {
    path: PathBuf,
    state: Mutex<State>,
    losses: AtomicU64,
}

impl History {
    /// Reads what a state directory has. Blocking. A damaged file counts as none.
    pub fn open(dir: &Path) -> Self {
        let path = dir.join(HISTORY_FILE);
        let last = std::fs::read(&path).ok().and_then(|text| match from_text(&text) {
            Ok(point) => Some(point),
            Err(error) => {
                tracing::warn!(file = %path.display(), %error, "the last revision of etcd cannot be read");
                None
            }
        });
        History { path, state: Mutex::new(State { last, kept: None }), losses: AtomicU64::new(0) }
    }

    /// Notes what an answer says. Returns whether it must be kept for the next start now.
    pub fn note(&self, now: HistoryPoint) -> bool {
        let mut state = self.state.lock();
        if let Some(why) = state.last.and_then(|last| now.went_back_from(&last)) {
            self.losses.fetch_add(1, Relaxed);
            state.kept = None;
            tracing::warn!(
                "etcd went back in time: {why}. A backup of it was restored, or it was replaced. This server \
                 goes on by the terms of jobs that it remembers, and writes them back, and the server that \
                 knows the latest datasets writes those back"
            );
        }
        state.last = Some(now);
        state.kept.is_none_or(|(kept, at)| kept != now && at.elapsed() >= KEEP_EVERY)
    }

    /// Notes a loss that something else than these numbers showed.
    pub fn note_loss(&self) {
        self.losses.fetch_add(1, Relaxed);
    }

    /// Keeps the last numbers for the next start. Blocking.
    pub fn keep(&self) {
        let Some(now) = self.state.lock().last else { return };
        if let Err(error) = replace_file(&self.path, &to_text(&now)) {
            tracing::warn!(%error, "the revision of etcd is not kept for the next start");
        }
        self.state.lock().kept = Some((now, Instant::now()));
    }

    /// Returns how often etcd went back since the server started.
    pub fn losses(&self) -> u64 {
        self.losses.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_that_goes_back_is_noticed_also_over_a_restart() {
        let dir = tempfile::tempdir().expect("tempdir");
        let at = |cluster_id, revision, raft_term| HistoryPoint { cluster_id, revision, raft_term };
        let history = History::open(dir.path());
        for (point, losses) in [
            (at(7, 10, 2), 0),
            (at(7, 10, 2), 0),
            (at(7, 11, 3), 0),
            (at(7, 9, 3), 1),
            (at(7, 9, 2), 2),
            (at(8, 12, 4), 3),
            (at(8, 13, 4), 3),
        ] {
            history.note(point);
            assert_eq!(history.losses(), losses, "{point:?}");
        }
        history.keep();
        assert!(!history.note(at(8, 14, 4)), "it was written just now");
        let again = History::open(dir.path());
        assert!(again.note(at(8, 14, 4)) && again.losses() == 0);
        let again = History::open(dir.path());
        again.note(at(8, 12, 4));
        assert_eq!(again.losses(), 1);
    }
}
