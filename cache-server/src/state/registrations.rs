//! Which datasets are registered: a table in memory and the log it is rebuilt from.
//!
//! 1. A change is answered after its record was fsynced; a crash loses no answered change.
//! 2. A torn last record is cut off at start; damage before it is a start-up error, because
//!    dropping what follows would silently forget datasets.
//! 3. From the moment a change is answered, nothing is granted through an entry that is gone:
//!    whoever holds a [`Registered`] asks whether it [`Registered::stands`].
//! 4. Records of unknown kinds are skipped (a newer server wrote them).

use super::{StateDir, StateError};
use fletch_api::Dataset;
use fletch_core::{DatasetName, Domain, Tenant, record};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{self, Write as _},
    ops::Deref,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

const REGISTER: u8 = 1;
const UNREGISTER: u8 = 2;

/// A dataset of a domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Whose it is.
    pub domain: Domain,
    /// Who registered it, and is charged for it.
    #[serde(default = "Tenant::default_tenant")]
    pub tenant: Tenant,
    /// What it is.
    #[serde(flatten)]
    pub dataset: Dataset,
}

/// An entry, and whether it still stands.
#[derive(Debug)]
pub struct Registered {
    entry: Entry,
    ended: AtomicBool,
}

impl Registered {
    fn new(entry: Entry) -> Arc<Self> {
        Arc::new(Registered { entry, ended: AtomicBool::new(false) })
    }

    /// Whether it has not been unregistered: what was granted through it holds only so long.
    #[must_use]
    pub fn stands(&self) -> bool {
        !self.ended.load(Ordering::Acquire)
    }
}

impl Deref for Registered {
    type Target = Entry;
    fn deref(&self) -> &Entry {
        &self.entry
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Gone {
    domain: Domain,
    name: DatasetName,
}

/// Why a change was refused. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// The name stands for something else.
    #[error("{name} is registered for {uri} with tables in {tables}")]
    Conflict {
        /// The name.
        name: DatasetName,
        /// What it stands for.
        uri: String,
        /// And where its tables are.
        tables: String,
    },
    /// There are as many as there may be.
    #[error("{0} datasets are registered, which is the limit")]
    Full(usize),
    /// The log cannot be written.
    #[error("{path}: {error}")]
    Io {
        /// The log.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

type Table = BTreeMap<(Domain, DatasetName), Arc<Registered>>;

#[derive(Debug)]
struct Inner {
    table: Table,
    log: File,
    /// Length of the log up to its last whole record.
    len: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Registrations {
    path: PathBuf,
    max: usize,
    inner: Mutex<Inner>,
}

impl Registrations {
    /// Reads the log, cutting a torn tail off.
    ///
    /// # Errors
    /// [`StateError`] when it cannot be read, written or believed.
    pub fn open(dir: &StateDir, max: usize) -> Result<Self, StateError> {
        let path = dir.path().join("registrations.log");
        let failed = |error| StateError::Open { path: path.clone(), error };
        let bytes = match std::fs::read(&path) {
            Ok(b) => b,
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(failed(e)),
        };
        let (table, len) = replay(&path, &bytes)?;
        let log = OpenOptions::new().create(true).append(true).open(&path).map_err(failed)?;
        if len < bytes.len() {
            tracing::warn!(file = %path.display(), at = len, "the last record was torn by a crash and is cut off");
        }
        log.set_len(len as u64).map_err(failed)?;
        let mut inner = Inner { table, log, len: len as u64 };
        if len == 0 {
            inner.append(&record::file_header()).map_err(failed)?;
        }
        File::open(dir.path()).and_then(|d| d.sync_all()).map_err(failed)?;
        Ok(Registrations { path, max, inner: Mutex::new(inner) })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Changes are applied after everything that can fail.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One dataset.
    #[must_use]
    pub fn get(&self, domain: &Domain, name: &DatasetName) -> Option<Arc<Registered>> {
        self.lock().table.get(&(domain.clone(), name.clone())).cloned()
    }

    /// A domain's datasets, by name.
    #[must_use]
    pub fn list(&self, domain: &Domain) -> Vec<Arc<Registered>> {
        self.lock().table.values().filter(|e| e.domain == *domain).cloned().collect()
    }

    /// How many there are in all.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().table.len()
    }

    /// Registers a dataset; blocking (it waits for the disk). Registering the same again
    /// returns what is there; the flag says whether it is new.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn register(&self, entry: Entry) -> Result<(Arc<Registered>, bool), RegisterError> {
        let mut inner = self.lock();
        let key = (entry.domain.clone(), entry.dataset.name.clone());
        if let Some(old) = inner.table.get(&key) {
            let (a, b) = (&old.dataset, &entry.dataset);
            if a.uri == b.uri && a.tables == b.tables {
                return Ok((Arc::clone(old), false));
            }
            let Dataset { name, uri, tables, .. } = old.dataset.clone();
            return Err(RegisterError::Conflict { name, uri, tables });
        }
        if inner.table.len() >= self.max {
            return Err(RegisterError::Full(self.max));
        }
        self.write(&mut inner, REGISTER, &entry)?;
        let entry = Registered::new(entry);
        inner.table.insert(key, Arc::clone(&entry));
        Ok((entry, true))
    }

    /// Forgets a dataset; blocking. `false` when there is none of that name.
    ///
    /// # Errors
    /// [`RegisterError::Io`].
    pub fn unregister(&self, domain: &Domain, name: &DatasetName) -> Result<bool, RegisterError> {
        let mut inner = self.lock();
        let key = (domain.clone(), name.clone());
        if !inner.table.contains_key(&key) {
            return Ok(false);
        }
        self.write(&mut inner, UNREGISTER, &Gone { domain: domain.clone(), name: name.clone() })?;
        if let Some(gone) = inner.table.remove(&key) {
            gone.ended.store(true, Ordering::Release);
        }
        Ok(true)
    }

    fn write(&self, inner: &mut Inner, kind: u8, value: &impl Serialize) -> Result<(), RegisterError> {
        let failed = |error| RegisterError::Io { path: self.path.clone(), error };
        let payload = serde_json::to_vec(value).map_err(|e| failed(e.into()))?;
        let mut bytes = Vec::new();
        record::append(&mut bytes, kind, &payload);
        inner.append(&bytes).map_err(failed)
    }
}

impl Inner {
    /// Appends and fsyncs; on failure the log is cut back, so that the next append does not
    /// follow a torn record (which would read as damage).
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let written = self.log.write_all(bytes).and_then(|()| self.log.sync_all());
        if let Err(e) = written {
            self.log.set_len(self.len)?;
            return Err(e);
        }
        self.len += bytes.len() as u64;
        Ok(())
    }
}

/// The table a log says, and the length of its valid prefix.
fn replay(path: &Path, bytes: &[u8]) -> Result<(Table, usize), StateError> {
    let damaged = |why: String| StateError::Damaged { path: path.to_owned(), why };
    let (records, len) = record::read(bytes).map_err(|e| damaged(e.to_string()))?;
    let mut table = Table::new();
    for (i, r) in records.iter().enumerate() {
        let unreadable = |e: serde_json::Error| damaged(format!("record {i} cannot be read: {e}"));
        match r.kind {
            REGISTER => {
                let e: Entry = serde_json::from_slice(r.payload).map_err(unreadable)?;
                table.insert((e.domain.clone(), e.dataset.name.clone()), Registered::new(e));
            }
            UNREGISTER => {
                let gone: Gone = serde_json::from_slice(r.payload).map_err(unreadable)?;
                table.remove(&(gone.domain, gone.name));
            }
            kind => tracing::info!(file = %path.display(), kind, "a record of a newer server is skipped"),
        }
    }
    Ok((table, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, uri: &str) -> Entry {
        let dataset = Dataset {
            name: DatasetName::new(name).expect("name"),
            uri: uri.into(),
            tables: uri.into(),
            registered_ns: 7,
        };
        Entry { domain: Domain::default_domain(), tenant: Tenant::default_tenant(), dataset }
    }

    fn open(dir: &Path) -> Result<Registrations, StateError> {
        // The lock is given up at once, so that a test can open again.
        Registrations::open(&StateDir::open(dir)?, 3)
    }

    fn names(r: &Registrations) -> Vec<String> {
        r.list(&Domain::default_domain()).iter().map(|e| e.dataset.name.to_string()).collect()
    }

    #[test]
    fn what_was_answered_is_there_again() {
        let dir = tempfile::tempdir().expect("tempdir");
        let r = open(dir.path()).expect("new");
        for name in ["b", "a", "c"] {
            assert!(r.register(entry(name, "file:///x")).expect("registered").1);
        }
        assert!(!r.register(entry("a", "file:///x")).expect("the same again").1);
        assert!(matches!(r.register(entry("a", "file:///y")), Err(RegisterError::Conflict { .. })));
        assert!(matches!(r.register(entry("d", "file:///x")), Err(RegisterError::Full(3))));
        let held = r.get(&Domain::default_domain(), &entry("b", "").dataset.name).expect("registered");
        assert!(held.stands());
        assert!(r.unregister(&Domain::default_domain(), &entry("b", "").dataset.name).expect("gone"));
        assert!(!held.stands());
        assert!(
            !r.unregister(&Domain::default_domain(), &entry("b", "").dataset.name).expect("gone already")
        );
        drop(r);
        let r = open(dir.path()).expect("again");
        assert_eq!(names(&r), ["a", "c"]);
        assert!(r.list(&Domain::new("other").expect("name")).is_empty());
    }

    #[test]
    fn every_torn_tail_is_cut_and_written_over() {
        let dir = tempfile::tempdir().expect("tempdir");
        let file = dir.path().join("registrations.log");
        let r = open(dir.path()).expect("new");
        r.register(entry("a", "file:///x")).expect("registered");
        let one = std::fs::metadata(&file).expect("log").len();
        r.register(entry("b", "file:///x")).expect("registered");
        drop(r);
        let whole = std::fs::read(&file).expect("log");
        for cut in 0..whole.len() {
            std::fs::write(&file, &whole[..cut]).expect("tear");
            let r = open(dir.path()).expect("a torn tail is no damage");
            assert_eq!(r.len(), usize::from(cut as u64 >= one));
            r.register(entry("c", "file:///x")).expect("goes on");
            drop(r);
            assert!(names(&open(dir.path()).expect("whole")).contains(&"c".to_owned()));
        }
    }

    #[test]
    fn damage_names_file_offset_and_way_out_and_newer_kinds_are_skipped() {
        let dir = tempfile::tempdir().expect("tempdir");
        let file = dir.path().join("registrations.log");
        let r = open(dir.path()).expect("new");
        r.register(entry("a", "file:///x")).expect("registered");
        r.register(entry("b", "file:///x")).expect("registered");
        drop(r);
        let mut bytes = std::fs::read(&file).expect("log");
        record::append(&mut bytes, 99, b"from the future");
        std::fs::write(&file, &bytes).expect("write");
        assert_eq!(names(&open(dir.path()).expect("skips")), ["a", "b"]);
        bytes[60] ^= 1;
        std::fs::write(&file, &bytes).expect("write");
        let told = open(dir.path()).expect_err("damaged").to_string();
        for part in ["registrations.log", "byte 16", "backup"] {
            assert!(told.contains(part), "{part} in {told}");
        }
    }

    #[test]
    fn a_second_server_is_told_whose_directory_it_is() {
        let dir = tempfile::tempdir().expect("tempdir");
        let _first = StateDir::open(dir.path()).expect("free");
        assert!(matches!(StateDir::open(dir.path()), Err(StateError::InUse(_))));
    }
}
