//! `fletch.Version`: an immutable state of a dataset, listed and read.

use crate::client::Client;
use crate::entry::{Entry, Sample, shown};
use crate::errors::{Failure, Pickled};
use crate::fetch::{self, Item};
use crate::process::{Slot, wait};
use crate::reading::Reading;
use crate::{buffer, client::Settings};
use bytes::Bytes;
use fletch_api::ResolvedVersion;
use fletch_core::manifest::{KeyRule, SampleRef};
use fletch_tables::PartCache;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyMemoryView};
use std::collections::BTreeMap;

/// Bytes of version tables in memory, in a process, for all versions together.
pub const TABLES_BYTES: u64 = 256 << 20;

static TABLES: Slot<PartCache> = Slot::new();

/// An immutable state of a dataset. Its tables are read and checked when they are first looked at.
#[pyclass(frozen, module = "fletch")]
#[derive(Debug)]
pub struct Version {
    client: Py<Client>,
    what: ResolvedVersion,
    open: Slot<Open>,
}

/// A version's tables, and whom to ask for its bytes.
#[derive(Debug, Clone)]
pub struct Open {
    pub client: fletch_client::Client,
    pub version: fletch_tables::Version,
}

impl Version {
    /// As the server resolved it; nothing of it is read yet.
    pub fn new(client: Py<Client>, what: ResolvedVersion) -> Self {
        Version { client, what, open: Slot::new() }
    }

    /// The version, opened in this process.
    pub fn open(&self, py: Python<'_>) -> PyResult<Open> {
        if let Some(open) = self.open.get(py) {
            return Ok(open);
        }
        let client = self.client.get().live(py)?;
        let tables = tables(py, self.client.get().settings());
        let (root, layout) = (self.what.root, self.what.layout);
        let source = client.tables(root, layout);
        let opening = fletch_tables::Version::open(source, root, layout, tables);
        let version = wait(py, async { opening.await.map_err(Failure::from) })?;
        let open = Open { client, version };
        self.open.set(py, open.clone());
        Ok(open)
    }

    /// Whole files, in the order asked.
    pub fn read_all(&self, py: Python<'_>, items: &[Item]) -> PyResult<Vec<Bytes>> {
        let open = self.open(py)?;
        wait(py, fetch::read_many(&open, items))
    }
}

/// The room for tables of this process, as one principal sees it.
fn tables(py: Python<'_>, who: &Settings) -> PartCache {
    let all = TABLES.get(py).unwrap_or_else(|| {
        let made = PartCache::new(TABLES_BYTES);
        TABLES.set(py, made.clone());
        made
    });
    all.scoped(&format!("{}\n{:?}\n{:?}", who.server, who.token, who.token_file))
}

/// Entries `start..stop` of a version.
async fn entries(open: &Open, start: u64, stop: u64) -> Result<Vec<Entry>, Failure> {
    let index = open.version.index();
    let mut out = Vec::new();
    let mut at = start;
    while at < stop
        && let Some((number, row)) = index.find(at)
    {
        let part = open.version.part(number).await?;
        let rows = row..part.entries.len();
        let first = part.entries.first_ordinal();
        out.extend(
            rows.take_while(|r| first + (*r as u64) < stop)
                .map(|r| Entry::new(first + r as u64, &part.entries.get(r))),
        );
        at = first + part.entries.len() as u64;
    }
    Ok(out)
}

/// All samples of a version, in the order of their first entries.
async fn samples(open: &Open) -> Result<Vec<Sample>, Failure> {
    let mut out: Vec<Sample> = Vec::new();
    // Shard and key of the run that the last sample is; entries in no sample do not end it.
    let mut run: Option<(String, String)> = None;
    for number in 0..open.version.index().parts().len() {
        let part = open.version.part(number).await?;
        for row in 0..part.entries.len() {
            let ordinal = part.entries.first_ordinal() + row as u64;
            let entry = part.entries.get(row);
            match entry.sample {
                SampleRef::None => {}
                SampleRef::Single => {
                    run = None;
                    out.push(Sample { key: shown(entry.path), alone: true, ordinals: vec![ordinal] });
                }
                SampleRef::Keyed(key) => {
                    let shard = entry.path.split_once('\0').map_or("", |(shard, _)| shard);
                    let same = run.as_ref().is_some_and(|(s, k)| s == shard && k == key);
                    match out.last_mut() {
                        Some(last) if same => last.ordinals.push(ordinal),
                        _ => {
                            run = Some((shard.to_owned(), key.to_owned()));
                            out.push(Sample { key: key.to_owned(), alone: false, ordinals: vec![ordinal] });
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
        self.what.dataset.as_str()
    }

    /// The tag it was resolved by; `None` when a root was given.
    #[getter]
    fn tag(&self) -> Option<&str> {
        self.what.tag.as_ref().map(fletch_core::TagName::as_str)
    }

    /// The version's identity, 64 hex digits.
    #[getter]
    fn root(&self) -> String {
        self.what.root.to_string()
    }

    /// The layout it is read by, 64 hex digits.
    #[getter]
    fn layout(&self) -> String {
        self.what.layout.to_string()
    }

    /// Content bytes of the version.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.what.bytes
    }

    /// When it was made, nanoseconds since 1970.
    #[getter]
    fn created_ns(&self) -> u64 {
        self.what.created_ns
    }

    /// Whom it is read from.
    #[getter]
    fn client(&self, py: Python<'_>) -> Py<Client> {
        self.client.clone_ref(py)
    }

    /// How entries form samples: `file` (each by itself) or `stem` (neighbours with one key).
    #[getter]
    fn sample_rule(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(match self.open(py)?.version.manifest().sample_rule.key {
            KeyRule::File => "file",
            KeyRule::Stem => "stem",
        })
    }

    /// How many entries it has.
    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.what.entries)?)
    }

    /// An entry, by its ordinal or path.
    fn entry(&self, py: Python<'_>, item: Item) -> PyResult<Entry> {
        let open = self.open(py)?;
        wait(py, async {
            let found = fetch::find(&open, &item).await?;
            Ok::<_, Failure>(Entry::new(found.ordinal, &found.entry()))
        })
    }

    /// Entries `start..stop` in order; all of them without arguments.
    #[pyo3(signature = (start=0, stop=None))]
    fn entries(&self, py: Python<'_>, start: u64, stop: Option<u64>) -> PyResult<Vec<Entry>> {
        let open = self.open(py)?;
        wait(py, entries(&open, start, stop.unwrap_or(u64::MAX)))
    }

    /// All samples, in the order of their first entries.
    fn samples(&self, py: Python<'_>) -> PyResult<Vec<Sample>> {
        let open = self.open(py)?;
        wait(py, samples(&open))
    }

    /// Labels by directory: the sorted names of the directories right below `prefix` that hold
    /// samples, and for each sample, as `samples()` has them, its directory's index there; -1 for
    /// a sample that is in none.
    #[pyo3(signature = (prefix=""))]
    fn labels(&self, py: Python<'_>, prefix: &str) -> PyResult<(Vec<String>, Vec<i64>)> {
        let open = self.open(py)?;
        let below = match prefix.trim_end_matches('/') {
            "" => String::new(),
            dir => format!("{dir}/"),
        };
        wait(py, async {
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

    /// A whole file, by its ordinal or path.
    fn read<'py>(&self, py: Python<'py>, item: Item) -> PyResult<Bound<'py, PyMemoryView>> {
        let mut all = self.read_all(py, &[item])?;
        buffer::view(py, all.pop().unwrap_or_default())
    }

    /// Whole files, by ordinals or paths, in the order asked, over as few requests as will do.
    fn read_many<'py>(&self, py: Python<'py>, items: Vec<Item>) -> PyResult<Bound<'py, PyList>> {
        buffer::views(py, self.read_all(py, &items)?)
    }

    /// Begins to read whole files that will be asked for.
    #[pyo3(signature = (items, after=None))]
    fn read_ahead(
        slf: Bound<'_, Self>,
        items: Vec<Item>,
        after: Option<Bound<'_, Reading>>,
    ) -> PyResult<Reading> {
        Reading::begin(slf.py(), slf.clone().unbind(), items, after.as_ref().map(Bound::get))
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> Pickled<'py, (Py<Client>, String)> {
        let what = serde_json::to_string(&self.what).map_err(|e| Failure::Invalid(e.to_string()))?;
        Ok((py.import("fletch._native")?.getattr("_version")?, (self.client.clone_ref(py), what)))
    }

    fn __repr__(&self) -> String {
        let what = &self.what;
        format!(
            "Version({:?}, root={}, {} entries)",
            what.dataset.as_str(),
            what.root.0.short(),
            what.entries
        )
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        let what = |v: &Version| (v.what.root, v.what.layout);
        other.cast::<Version>().is_ok_and(|o| what(o.get()) == what(self))
    }

    fn __hash__(&self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|i| self.what.root.0.0[i]))
    }
}

/// A version from its pickled description.
#[pyfunction(name = "_version")]
pub fn revive_version(client: Py<Client>, what: &str) -> PyResult<Version> {
    let what = serde_json::from_str(what).map_err(|e| Failure::Invalid(format!("pickled version: {e}")))?;
    Ok(Version::new(client, what))
}
