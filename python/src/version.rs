//! `fletch.Version`: lists and reads an immutable state of a dataset.

use crate::buffer;
use crate::entry::{Entry, Sample, shown};
use crate::errors::{Failure, Pickled};
use crate::fetch::{self, Item, OpenVersion};
use crate::pending_read::PendingRead;
use crate::process::wait;
use crate::ranges::WantedRange;
use crate::version_handle::VersionHandle;
use fletch_core::manifest::{KeyRule, SampleRef};
use fletch_tables::{ChildKind, Resolved};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyMemoryView};
use std::collections::BTreeMap;
use std::sync::Arc;

/// An immutable state of a dataset. Its tables are read and checked when they are first needed.
#[pyclass(frozen, module = "fletch")]
#[derive(Debug)]
pub struct Version {
    /// The `fletch.Client` that reads the version.
    client: Py<PyAny>,
    handle: Arc<VersionHandle>,
}

impl Version {
    /// Creates a version of `client`. It reads nothing.
    pub fn new(client: Py<PyAny>, handle: Arc<VersionHandle>) -> Self {
        Version { client, handle }
    }

    fn open(&self, py: Python<'_>) -> PyResult<OpenVersion> {
        self.handle.open(py)
    }
}

/// Returns the entries `start..stop` of a version.
async fn entries(open: &OpenVersion, start: u64, stop: u64) -> Result<Vec<Entry>, Failure> {
    let index = open.version.index();
    let mut out = Vec::new();
    let mut at = start;
    while at < stop
        && let Some((number, row)) = index.find(at)
    {
        let part = open.version.part(number).await?;
        let rows = row..part.len();
        let first = part.first_ordinal();
        out.extend(
            rows.take_while(|r| first + (*r as u64) < stop)
                .map(|r| Entry::new(first + r as u64, &part.entry(r))),
        );
        at = first + part.len() as u64;
    }
    Ok(out)
}

/// The number of children of a directory that one step of a listing returns.
const CHILDREN_AT_ONCE: usize = 4096;

/// Returns the names of a directory's children, with their entries; `None` for a directory.
async fn children(open: &OpenVersion, directory: &str) -> Result<Vec<(String, Option<Entry>)>, Failure> {
    let shown = || format!("{directory:?}");
    match open.version.resolve(directory).await? {
        Some(Resolved::Dir(_)) => {}
        Some(Resolved::Entry(_)) => return Err(Failure::Invalid(format!("{} is no directory", shown()))),
        None => return Err(Failure::Absent(format!("there is no directory {} in the version", shown()))),
    }
    let (mut out, mut cookie) = (Vec::new(), 0);
    loop {
        let page = open.version.list(directory, cookie, CHILDREN_AT_ONCE).await?;
        let Some(last) = page.last() else { return Ok(out) };
        cookie = last.next;
        for child in page {
            let entry = match child.kind {
                ChildKind::Dir(_) => None,
                ChildKind::Entry { .. } => {
                    let found = fetch::find(open, &Item::Ordinal(child.ordinal)).await?;
                    Some(Entry::new(found.ordinal, &found.entry()))
                }
            };
            out.push((child.name, entry));
        }
    }
}

/// Returns all samples of a version, in the order of their first entries.
async fn samples(open: &OpenVersion) -> Result<Vec<Sample>, Failure> {
    let mut out: Vec<Sample> = Vec::new();
    // The shard and the key of the last keyed sample. An entry without a sample does not end it.
    let mut run: Option<(String, String)> = None;
    for number in 0..open.version.index().parts().len() {
        let part = open.version.part(number).await?;
        for row in 0..part.len() {
            let ordinal = part.first_ordinal() + row as u64;
            let entry = part.entry(row);
            match entry.sample {
                SampleRef::None => {}
                SampleRef::Single => {
                    run = None;
                    out.push(Sample { key: shown(entry.path), single: true, ordinals: vec![ordinal] });
                }
                SampleRef::Keyed(key) => {
                    let shard = entry.path.split_once('\0').map_or("", |(shard, _)| shard);
                    let same = run.as_ref().is_some_and(|(s, k)| s == shard && k == key);
                    match out.last_mut() {
                        Some(last) if same => last.ordinals.push(ordinal),
                        _ => {
                            run = Some((shard.to_owned(), key.to_owned()));
                            out.push(Sample { key: key.to_owned(), single: false, ordinals: vec![ordinal] });
                        }
                    }
                }
            }
        }
    }
    Ok(out)
}

#[pymethods]
impl Version {
    /// The dataset's name.
    #[getter]
    fn dataset(&self) -> &str {
        self.handle.resolved.dataset.as_str()
    }

    /// The tag that was resolved; `None` if a root was given.
    #[getter]
    fn tag(&self) -> Option<&str> {
        self.handle.resolved.tag.as_ref().map(fletch_core::TagName::as_str)
    }

    /// The version's identity, 64 hex digits.
    #[getter]
    fn root(&self) -> String {
        self.handle.resolved.root.to_string()
    }

    /// The identity of the layout that is read, 64 hex digits.
    #[getter]
    fn layout(&self) -> String {
        self.handle.resolved.layout.to_string()
    }

    /// The bytes of content of the version.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.handle.resolved.bytes
    }

    /// The time when the version was made, in nanoseconds since 1970 UTC.
    #[getter]
    fn created_ns(&self) -> u64 {
        self.handle.resolved.created_ns
    }

    /// Whether the version is a draft: it was listed, and the hashes of its files are not known.
    #[getter]
    fn draft(&self) -> bool {
        self.handle.resolved.draft
    }

    /// The client that reads the version.
    #[getter]
    fn client(&self, py: Python<'_>) -> Py<PyAny> {
        self.client.clone_ref(py)
    }

    /// How entries form samples: `file` (each is one) or `stem` (neighbours that share a key are one).
    #[getter]
    fn sample_rule(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(match self.open(py)?.version.manifest().sample_rule.key {
            KeyRule::File => "file",
            KeyRule::Stem => "stem",
        })
    }

    /// The number of entries.
    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.handle.resolved.entries)?)
    }

    /// The entry with this ordinal or path.
    fn entry(&self, py: Python<'_>, item: Item) -> PyResult<Entry> {
        let open = self.open(py)?;
        wait(py, async move {
            let found = fetch::find(&open, &item).await?;
            Ok::<_, Failure>(Entry::new(found.ordinal, &found.entry()))
        })
    }

    /// The entries `start..stop` in byte order of their paths; without arguments all entries.
    #[pyo3(signature = (start=0, stop=None))]
    fn entries(&self, py: Python<'_>, start: u64, stop: Option<u64>) -> PyResult<Vec<Entry>> {
        let open = self.open(py)?;
        wait(py, async move { entries(&open, start, stop.unwrap_or(u64::MAX)).await })
    }

    /// The children of a directory: their names, with their entries; `None` for a directory.
    #[pyo3(signature = (directory=""))]
    fn children(&self, py: Python<'_>, directory: &str) -> PyResult<Vec<(String, Option<Entry>)>> {
        let (open, directory) = (self.open(py)?, directory.to_owned());
        wait(py, async move { children(&open, &directory).await })
    }

    /// Whether this is the path of a directory.
    fn is_directory(&self, py: Python<'_>, path: &str) -> PyResult<bool> {
        let (open, path) = (self.open(py)?, path.to_owned());
        wait(py, async move {
            let found = open.version.resolve(&path).await?;
            Ok::<_, Failure>(matches!(found, Some(Resolved::Dir(_))))
        })
    }

    /// All samples, in the order of their first entries.
    fn samples(&self, py: Python<'_>) -> PyResult<Vec<Sample>> {
        let open = self.open(py)?;
        wait(py, async move { samples(&open).await })
    }

    /// Labels each sample by its directory.
    ///
    /// Returns the sorted names of the directories right below `prefix` that hold samples; and for each
    /// sample, in the order of `samples()`, the index of its directory, or -1 for a sample in none of them.
    #[pyo3(signature = (prefix=""))]
    fn labels(&self, py: Python<'_>, prefix: &str) -> PyResult<(Vec<String>, Vec<i64>)> {
        let open = self.open(py)?;
        let below = match prefix.trim_end_matches('/') {
            "" => String::new(),
            dir => format!("{dir}/"),
        };
        wait(py, async move {
            let samples = samples(&open).await?;
            let dirs: Vec<Option<&str>> = samples
                .iter()
                .map(|s| s.key.strip_prefix(&below).and_then(|k| k.split_once('/')).map(|(dir, _)| dir))
                .collect();
            let mut classes: BTreeMap<&str, i64> = dirs.iter().flatten().map(|d| (*d, 0)).collect();
            (0..).zip(classes.values_mut()).for_each(|(i, class)| *class = i);
            let labels = dirs.iter().map(|d| d.and_then(|d| classes.get(d).copied()).unwrap_or(-1));
            Ok::<_, Failure>((classes.keys().map(|c| (*c).to_owned()).collect(), labels.collect()))
        })
    }

    /// Reads a whole file, by its ordinal or path.
    fn read<'py>(&self, py: Python<'py>, item: Item) -> PyResult<Bound<'py, PyMemoryView>> {
        let mut all = self.handle.read_all(py, vec![item])?;
        buffer::view(py, all.pop().unwrap_or_default())
    }

    /// Reads whole files, by ordinals or paths, in few requests. Returns views in the order of `items`.
    fn read_many<'py>(&self, py: Python<'py>, items: Vec<Item>) -> PyResult<Bound<'py, PyList>> {
        buffer::views(py, self.handle.read_all(py, items)?)
    }

    /// Reads a range of a file, by its ordinal or path: from `start` to before `stop`, or to the end.
    #[pyo3(signature = (item, start, stop=None))]
    fn read_range<'py>(
        &self,
        py: Python<'py>,
        item: Item,
        start: u64,
        stop: Option<u64>,
    ) -> PyResult<Bound<'py, PyMemoryView>> {
        let mut all = self.handle.read_ranges(py, vec![(item, start, stop)])?;
        buffer::view(py, all.pop().unwrap_or_default())
    }

    /// Reads ranges of files in few requests. Returns views in the order of `ranges`.
    fn read_ranges<'py>(&self, py: Python<'py>, ranges: Vec<WantedRange>) -> PyResult<Bound<'py, PyList>> {
        buffer::views(py, self.handle.read_ranges(py, ranges)?)
    }

    /// Starts to read whole files in the background, and returns at once.
    #[pyo3(signature = (items, after=None))]
    fn prefetch(
        &self,
        py: Python<'_>,
        items: Vec<Item>,
        after: Option<Bound<'_, PendingRead>>,
    ) -> PyResult<PendingRead> {
        PendingRead::start(py, Arc::clone(&self.handle), items, after.as_ref().map(Bound::get))
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> Pickled<'py, (Py<PyAny>, String)> {
        let what =
            serde_json::to_string(&self.handle.resolved).map_err(|e| Failure::Invalid(e.to_string()))?;
        Ok((py.import("fletch._native")?.getattr("_version")?, (self.client.clone_ref(py), what)))
    }

    fn __repr__(&self) -> String {
        let what = &self.handle.resolved;
        format!(
            "Version({:?}, root={}, {} entries)",
            what.dataset.as_str(),
            what.root.0.short(),
            what.entries
        )
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        let what = |v: &Version| (v.handle.resolved.root, v.handle.resolved.layout);
        other.cast::<Version>().is_ok_and(|o| what(o.get()) == what(self))
    }

    fn __hash__(&self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|i| self.handle.resolved.root.0.0[i]))
    }
}
