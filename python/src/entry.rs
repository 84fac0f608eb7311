//! `fletch.Entry` and `fletch.Sample`.

use crate::errors::{Failure, Pickled};
use fletch_core::manifest::{EntryKind, EntryRef, SampleRef};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// A file, symlink, empty directory or member of a tar shard of a version.
#[pyclass(frozen, get_all, module = "fletch", eq, hash)]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Entry {
    /// The entry's position in the version, from 0.
    pub ordinal: u64,
    /// The relative path. A member's path is its shard's path, `/`, and the member's name.
    pub path: String,
    /// `file`, `symlink`, `empty-dir` or `member`.
    pub kind: &'static str,
    /// The bytes of the content; of the target for a symlink.
    pub size: u64,
    /// The BLAKE3 hash of the content, 64 hex digits; `None` without content.
    pub hash: Option<String>,
    /// The target of a symlink; empty for other kinds.
    pub target: String,
    /// The key of the entry's sample: the entry's own path for a single sample, `None` for no sample.
    pub sample: Option<String>,
}

impl Entry {
    /// Creates an entry from a row of the tables.
    pub fn new(ordinal: u64, e: &EntryRef<'_>) -> Self {
        Entry {
            ordinal,
            path: shown(e.path),
            kind: e.kind.as_str(),
            size: e.size,
            hash: e.hash.map(|h| h.to_string()),
            target: e.target.to_owned(),
            sample: match e.sample {
                SampleRef::None => None,
                SampleRef::Single => Some(shown(e.path)),
                SampleRef::Keyed(key) => Some(key.to_owned()),
            },
        }
    }
}

/// Returns a path in the form that people write: a member's name follows its shard's path and `/`.
pub fn shown(path: &str) -> String {
    path.replace('\0', "/")
}

type EntryFields = (u64, String, String, u64, Option<String>, String, Option<String>);

#[pymethods]
impl Entry {
    fn __reduce__<'py>(&self, py: Python<'py>) -> Pickled<'py, EntryFields> {
        let Entry { ordinal, path, kind, size, hash, target, sample } = self.clone();
        let fields = (ordinal, path, kind.to_owned(), size, hash, target, sample);
        Ok((py.import("fletch._native")?.getattr("_entry")?, fields))
    }

    fn __repr__(&self) -> String {
        format!("Entry({}, {:?}, {}, {} bytes)", self.ordinal, self.path, self.kind, self.size)
    }
}

/// The unit that a training step consumes: a single entry, or neighbouring entries that share a key.
#[pyclass(frozen, module = "fletch", eq, hash)]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Sample {
    /// The key; for a single sample the entry's path.
    #[pyo3(get)]
    pub key: String,
    /// Whether the sample is a single entry without a key of its own.
    #[pyo3(get)]
    pub single: bool,
    /// The ordinals of the sample's entries, ascending.
    pub ordinals: Vec<u64>,
}

#[pymethods]
impl Sample {
    /// The ordinals of the sample's entries, ascending. The first one identifies the sample.
    #[getter]
    fn ordinals<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.ordinals)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> Pickled<'py, (String, bool, Vec<u64>)> {
        let fields = (self.key.clone(), self.single, self.ordinals.clone());
        Ok((py.import("fletch._native")?.getattr("_sample")?, fields))
    }

    fn __repr__(&self) -> String {
        format!("Sample({:?}, {:?})", self.key, self.ordinals)
    }
}

/// Creates an entry from its pickled fields.
#[pyfunction(name = "_entry")]
pub fn unpickle_entry(
    ordinal: u64,
    path: String,
    kind: &str,
    size: u64,
    hash: Option<String>,
    target: String,
    sample: Option<String>,
) -> PyResult<Entry> {
    let Some(kind) = EntryKind::from_word(kind) else {
        return Err(Failure::Invalid(format!("{kind:?} is not a kind of entry")).into());
    };
    Ok(Entry { ordinal, path, kind: kind.as_str(), size, hash, target, sample })
}

/// Creates a sample from its pickled fields.
#[pyfunction(name = "_sample")]
pub fn unpickle_sample(key: String, single: bool, ordinals: Vec<u64>) -> Sample {
    Sample { key, single, ordinals }
}
