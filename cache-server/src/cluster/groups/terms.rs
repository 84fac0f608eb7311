//! The highest term of each group that this server has seen, kept over restarts.
//!
//! I1. A term never goes back. What etcd says by a lower term is of a backup that was restored, and this
//!     server goes by the record that it remembers.
//! I2. A record is durable here before this server acts by it.
//! I3. Groups that were always at one server have the term 1, which nothing can be lower than. They are not
//!     kept, so that the file has only groups that moved.

use super::records::GroupRecord;
use crate::cluster::{from_text, to_text};
use fletch_host::replace::replace_file;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

/// The file of the state directory.
const TERMS_FILE: &str = "groups.terms";

#[derive(Debug, Default, Serialize, Deserialize)]
struct Remembered {
    groups: BTreeMap<String, GroupRecord>,
}

#[derive(Debug, Default)]
struct State {
    known: Remembered,
    /// Whether the file lacks something.
    is_new: bool,
}

/// The remembered records of groups.
#[derive(Debug)]
pub struct Terms {
    path: PathBuf,
    state: Mutex<State>,
}

impl Terms {
    /// Reads what a state directory remembers. Blocking. A damaged file is logged, and counts as none.
    pub fn open(dir: &Path) -> Self {
        let path = dir.join(TERMS_FILE);
        let known = match std::fs::read(&path) {
            Ok(text) => from_text(&text).map_err(io::Error::other),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Remembered::default()),
            Err(e) => Err(e),
        };
        let known = known.unwrap_or_else(|error| {
            tracing::error!(file = %path.display(), %error, "the terms of groups of jobs cannot be read");
            Remembered::default()
        });
        Terms { path, state: Mutex::new(State { known, is_new: false }) }
    }

    /// Notes the record of a group. Returns the one that is in force if that has a higher term.
    pub fn note(&self, group: &str, told: &GroupRecord) -> Option<GroupRecord> {
        let mut state = self.state.lock();
        match state.known.groups.get(group) {
            Some(known) if known.term > told.term => return Some(known.clone()),
            Some(known) if known == told => return None,
            // Etcd decides between servers of one term: it takes one of two writes.
            Some(_) => {}
            None if told.term <= 1 => return None,
            None => {}
        }
        state.known.groups.insert(group.to_owned(), told.clone());
        state.is_new = true;
        None
    }

    /// Returns the groups that moved once, with their records.
    pub fn all(&self) -> Vec<(String, GroupRecord)> {
        let state = self.state.lock();
        state.known.groups.iter().map(|(group, record)| (group.clone(), record.clone())).collect()
    }

    /// Makes everything durable that was noted. Blocking.
    ///
    /// # Errors
    /// The path, and the system's error.
    pub fn persist(&self) -> Result<(), (PathBuf, io::Error)> {
        let mut state = self.state.lock();
        if state.is_new {
            let written = replace_file(&self.path, &to_text(&state.known));
            written.map_err(|error| (self.path.clone(), error))?;
            state.is_new = false;
        }
        Ok(())
    }

    /// Returns whether there is something to make durable.
    pub fn is_new(&self) -> bool {
        self.state.lock().is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_core::MemberId;

    fn record(term: u64, primary: &str) -> GroupRecord {
        let primary = MemberId::new(primary).expect("a name");
        GroupRecord { term, primary, incarnation: "00ff".into() }
    }

    #[test]
    fn a_term_never_goes_back_also_over_a_restart() {
        let dir = tempfile::tempdir().expect("tempdir");
        let terms = Terms::open(dir.path());
        assert_eq!(terms.note("stays", &record(1, "a")), None);
        for (term, primary) in [(1, "a"), (2, "b"), (3, "c")] {
            assert_eq!(terms.note("moves", &record(term, primary)), None);
        }
        assert_eq!(terms.note("moves", &record(2, "b")), Some(record(3, "c")));
        assert!(terms.is_new());
        terms.persist().expect("written");
        assert!(!terms.is_new());
        let text = std::fs::read_to_string(dir.path().join(TERMS_FILE)).expect("a file");
        assert_eq!(text, r#"{"format":1,"groups":{"moves":{"term":3,"primary":"c","incarnation":"00ff"}}}"#);
        let again = Terms::open(dir.path());
        assert_eq!(again.note("moves", &record(1, "a")), Some(record(3, "c")));
        assert_eq!(again.all(), [("moves".to_owned(), record(3, "c"))]);
        std::fs::write(dir.path().join(TERMS_FILE), "{").expect("damaged");
        assert_eq!(Terms::open(dir.path()).all(), []);
    }
}
