//! What the cache saved of each dataset, across restarts: `savings.json` of the state directory.
//!
//! 1. The file is replaced whole, so a crash leaves the old one or the new one. At most the savings since the
//!    last write are lost, and never a byte of a dataset.
//! 2. A file that is damaged or of a newer server is moved aside, and savings count from zero.
//! 3. It has at most [`ROWS_MAX`] datasets: those that saved most.

use super::costs::{Costs, SavedBytes};
use crate::training::benefit::ServiceSums;
use fletch_core::{DatasetName, Domain};
use fletch_host::replace::replace_file;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::{
    cmp::Reverse,
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

const FILE: &str = "savings.json";
/// The version of the file's format.
const FORMAT: u32 = 1;
/// The most datasets that are remembered.
const ROWS_MAX: usize = 10_000;
/// The longest file that is read, in bytes: 400 for each row.
const FILE_BYTES_MAX: u64 = 400 * ROWS_MAX as u64;

/// The savings of one dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SavingsRow {
    domain: Domain,
    dataset: DatasetName,
    #[serde(flatten)]
    bytes: SavedBytes,
    /// The requests for content that were sent to its origins.
    requests: u64,
    /// The bytes that these requests brought.
    requested: u64,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct SavingsDoc {
    format: u32,
    datasets: Vec<SavingsRow>,
}

/// The file, and what it has.
#[derive(Debug)]
pub struct SavingsFile {
    path: PathBuf,
    written: Mutex<SavingsDoc>,
}

impl SavingsFile {
    /// Reads the file of a state directory, and adds its numbers to `costs`.
    #[must_use]
    pub fn open(state_dir: &Path, costs: &Costs) -> Self {
        let path = state_dir.join(FILE);
        let doc = read(&path).unwrap_or_else(|error| {
            let aside = path.with_extension("json.damaged");
            let moved = fs::rename(&path, &aside);
            tracing::warn!(
                path = %path.display(), %error, moved = moved.is_ok(),
                "what the cache saved before this start is not known, because its file cannot be read; \
                 savings count from zero"
            );
            SavingsDoc::default()
        });
        for row in &doc.datasets {
            let sums = ServiceSums { requests: row.requests, bytes: row.requested };
            costs.restore((row.domain.clone(), row.dataset.clone()), row.bytes, sums);
        }
        SavingsFile { path, written: Mutex::new(doc) }
    }

    /// Writes the savings, if they changed. `requests` are all that were sent for each dataset. Blocking.
    pub fn write(&self, costs: &Costs, requests: &BTreeMap<(Domain, DatasetName), ServiceSums>) {
        // Held while the file is written: two writes at once would leave the older numbers.
        let mut written = self.written.lock();
        let mut doc = SavingsDoc { format: FORMAT, datasets: Vec::new() };
        for ((domain, dataset), bytes) in costs.saved() {
            let key = (domain, dataset);
            let sums = requests.get(&key).copied().unwrap_or_default();
            let (domain, dataset) = key;
            let (requests, requested) = (sums.requests, sums.bytes);
            doc.datasets.push(SavingsRow { domain, dataset, bytes, requests, requested });
        }
        doc.datasets.sort_by_key(|row| Reverse(row.bytes.avoided));
        doc.datasets.truncate(ROWS_MAX);
        if *written == doc || (doc.datasets.is_empty() && written.datasets.is_empty()) {
            return;
        }
        let replaced = serde_json::to_vec(&doc)
            .map_err(io::Error::from)
            .and_then(|text| replace_file(&self.path, &text));
        match replaced {
            Ok(()) => *written = doc,
            Err(error) => tracing::warn!(
                path = %self.path.display(), %error,
                "cannot write what the cache saved; the next write tries again"
            ),
        }
    }
}

fn read(path: &Path) -> io::Result<SavingsDoc> {
    let len = match fs::metadata(path) {
        Ok(meta) => meta.len(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(SavingsDoc::default()),
        Err(e) => return Err(e),
    };
    if len > FILE_BYTES_MAX {
        return Err(io::Error::other(format!("it has {len} bytes, at most {FILE_BYTES_MAX} are read")));
    }
    let doc: SavingsDoc = serde_json::from_slice(&fs::read(path)?)?;
    match doc.format {
        FORMAT => Ok(doc),
        other => Err(io::Error::other(format!("it has format {other}, and this server reads {FORMAT}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenancy::accounting::{CostsOf, costs::DatasetBytes};
    use fletch_core::{JobName, Tenant};

    fn key() -> (Domain, DatasetName) {
        (Domain::default_domain(), DatasetName::new("d").expect("name"))
    }

    fn deliver(costs: &Costs, received: u64, delivered: u64) {
        let (domain, dataset) = key();
        let (tenant, job) = (Tenant::default_tenant(), JobName::new("j").expect("name"));
        let of = costs.of(CostsOf { domain, tenant, job, dataset }, &"j".into());
        of.receive(received);
        of.deliver(delivered);
    }

    #[test]
    fn savings_survive_a_restart() {
        let dir = tempfile::tempdir().expect("scratch");
        let costs = Costs::default();
        let file = SavingsFile::open(dir.path(), &costs);
        deliver(&costs, 100, 250);
        let sent = ServiceSums { requests: 4, bytes: 100 };
        file.write(&costs, &BTreeMap::from([(key(), sent)]));
        let again = Costs::default();
        let file = SavingsFile::open(dir.path(), &again);
        let bytes = DatasetBytes { delivered: 250, read: 0, avoided: 150 };
        assert_eq!(again.datasets(), BTreeMap::from([(key(), bytes)]));
        assert_eq!(again.requests_before(), BTreeMap::from([(key(), sent)]));
        // What is due from before is still due.
        deliver(&again, 50, 60);
        assert_eq!(again.datasets()[&key()], DatasetBytes { delivered: 310, read: 0, avoided: 160 });
        file.write(&again, &again.requests_before());
        let third = Costs::default();
        let _file = SavingsFile::open(dir.path(), &third);
        assert_eq!(third.datasets(), again.datasets());
    }

    #[test]
    fn a_file_that_cannot_be_read_is_moved_aside() {
        for text in ["{", r#"{"format":2,"datasets":[]}"#, ""] {
            let dir = tempfile::tempdir().expect("scratch");
            fs::write(dir.path().join(FILE), text).expect("write");
            let costs = Costs::default();
            let file = SavingsFile::open(dir.path(), &costs);
            assert!(costs.datasets().is_empty());
            let aside = fs::read_to_string(dir.path().join("savings.json.damaged")).expect("aside");
            assert_eq!(aside, text);
            deliver(&costs, 1, 2);
            file.write(&costs, &BTreeMap::new());
            assert_eq!(read(&file.path).expect("whole").datasets.len(), 1);
        }
    }
}
