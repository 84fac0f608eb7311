//! Entries and samples as Python sees them.

use crate::errors::{Failure, Pickled};
use fletch_core::manifest::{EntryKind, EntryRef, SampleRef};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// A file, symlink, empty directory or member of a tar shard of a version.
#[pyclass(frozen, get_all, module = "fletch", eq, hash)]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Entry {
    /// Its position in the version.
    pub ordinal: u64,
    /// Relative path; a member's is its shard's path, `/`, and the member's name.
    pub path: String,
    /// `file`, `symlink`, `empty-dir` or `member`.
    pub kind: &'static str,
    /// Bytes of content; of the target for a symlink.
    pub size: u64,
    /// BLAKE3 of the content, 64 hex digits; `None` where there is none.
    pub hash: Option<String>,
    /// The link's target; empty for other kinds.
    pub target: String,
    /// The key of the sample it belongs to; its own path for a sample by itself; `None` for none.
    pub sample: Option<String>,
}

impl Entry {
    /// As it is found in the tables.
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

/// A path as people write it: a shard's members below the shard.
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

/// What a training step consumes: an entry, or the neighbouring entries that share a key.
#[pyclass(frozen, module = "fletch", eq, hash)]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Sample {
    /// The key; the entry's path for a sample of one file.
    #[pyo3(get)]
    pub key: String,
    /// Whether it is one entry by itself: then its key is that entry's path.
    #[pyo3(get)]
    pub alone: bool,
    /// Ordinals of its entries, ascending.
    pub ordinals: Vec<u64>,
}

#[pymethods]
impl Sample {
    /// Ordinals of its entries, ascending. The first one is the sample's id.
    #[getter]
    fn ordinals<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.ordinals)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> Pickled<'py, (String, bool, Vec<u64>)> {
        let fields = (self.key.clone(), self.alone, self.ordinals.clone());
        Ok((py.import("fletch._native")?.getattr("_sample")?, fields))
    }

    fn __repr__(&self) -> String {
        format!("Sample({:?}, {:?})", self.key, self.ordinals)
    }
}

/// An entry from its pickled fields.
#[pyfunction(name = "_entry")]
pub fn revive_entry(
    ordinal: u64,
    path: String,
    kind: &str,
    size: u64,
    hash: Option<String>,
    target: String,
    sample: Option<String>,
) -> PyResult<Entry> {
    let Some(kind) = EntryKind::from_word(kind) else {
        return Err(Failure::Invalid(format!("no entry is a {kind:?}")).into());
    };
    Ok(Entry { ordinal, path, kind: kind.as_str(), size, hash, target, sample })
}

/// A sample from its pickled fields.
#[pyfunction(name = "_sample")]
pub fn revive_sample(key: String, alone: bool, ordinals: Vec<u64>) -> Sample {
    Sample { key, alone, ordinals }
}
