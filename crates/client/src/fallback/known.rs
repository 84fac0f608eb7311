//! What a server said last about a version, so that a mount or a tool can begin without it.
//!
//! One small JSON file a (server, dataset, version as written), replaced as a whole. It holds no
//! secret and decides nothing about bytes: tables and chunks are checked against the root in it.

use crate::Endpoint;
use fletch_core::{DatasetName, Hash, LayoutId, Root};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// No such file is longer, in bytes.
const BYTES_MAX: u64 = 64 << 10;

/// What a server said about a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// Who said it.
    pub server: String,
    /// Of which dataset.
    pub dataset: DatasetName,
    /// The tag or root that was asked for.
    pub version: String,
    /// What it was.
    pub root: Root,
    /// By which layout.
    pub layout: LayoutId,
    /// Where the dataset's objects are.
    pub uri: String,
    /// Where its tables are.
    pub tables: String,
}

/// Why it cannot be kept or found again.
#[derive(Debug, thiserror::Error)]
pub enum KnownError {
    /// Nothing was ever kept for this server, dataset and version.
    #[error(
        "nothing is known here of {dataset}@{version} from {server}: it was never opened from this account while the server answered"
    )]
    Unknown {
        /// Who was to be asked.
        server: String,
        /// Of which dataset.
        dataset: DatasetName,
        /// Which version of it.
        version: String,
    },
    /// The file cannot be read, written or believed.
    #[error("{}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What the system or the parser said.
        source: io::Error,
    },
}

impl Known {
    fn path(dir: &Path, server: &Endpoint, dataset: &DatasetName, version: &str) -> PathBuf {
        // Lengths keep two triples from ever being the same text.
        let server = server.to_string();
        let text = format!("{} {server} {} {dataset} {version}", server.len(), dataset.as_str().len());
        dir.join(format!("{}.json", Hash::of(text.as_bytes()).short()))
    }

    /// Keeps it under `dir`, which is created; kill -9 leaves the old or the new one.
    ///
    /// # Errors
    /// [`KnownError::File`].
    pub fn keep(&self, dir: &Path, server: &Endpoint) -> Result<(), KnownError> {
        let path = Known::path(dir, server, &self.dataset, &self.version);
        let file = |source| KnownError::File { path: path.clone(), source };
        let text = serde_json::to_vec_pretty(self).map_err(|e| file(e.into()))?;
        fs::create_dir_all(dir).map_err(file)?;
        let part = path.with_extension(format!("{}.part", std::process::id()));
        fs::write(&part, text).and_then(|()| fs::rename(&part, &path)).map_err(file)
    }

    /// What was kept last.
    ///
    /// # Errors
    /// [`KnownError`].
    pub fn find(
        dir: &Path,
        server: &Endpoint,
        dataset: &DatasetName,
        version: &str,
    ) -> Result<Known, KnownError> {
        let path = Known::path(dir, server, dataset, version);
        let unknown = || KnownError::Unknown {
            server: server.to_string(),
            dataset: dataset.clone(),
            version: version.to_owned(),
        };
        let file = |source| KnownError::File { path: path.clone(), source };
        match fs::metadata(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(unknown()),
            Err(e) => return Err(file(e)),
            Ok(m) if m.len() > BYTES_MAX => {
                return Err(file(io::Error::new(io::ErrorKind::InvalidData, "too long")));
            }
            Ok(_) => {}
        }
        let text = fs::read(&path).map_err(file)?;
        let known: Known = serde_json::from_slice(&text).map_err(|e| file(e.into()))?;
        // A file name is a short hash; only the content says whose it is.
        let same =
            known.server == server.to_string() && known.dataset == *dataset && known.version == version;
        if same { Ok(known) } else { Err(unknown()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_is_found_and_nothing_else() {
        let dir = tempfile::tempdir().expect("tempdir");
        let server: Endpoint = "http://127.0.0.1:1".parse().expect("endpoint");
        let known = Known {
            server: server.to_string(),
            dataset: DatasetName::new("d").expect("name"),
            version: "latest".into(),
            root: Root(Hash::of(b"r")),
            layout: LayoutId(Hash::of(b"l")),
            uri: "/data".into(),
            tables: "/tables".into(),
        };
        let at = dir.path().join("known");
        let find = |dataset: &str, version: &str| {
            Known::find(&at, &server, &DatasetName::new(dataset).expect("name"), version)
        };
        assert!(matches!(find("d", "latest"), Err(KnownError::Unknown { .. })));
        known.keep(&at, &server).expect("kept");
        assert_eq!(find("d", "latest").expect("found"), known);
        assert!(find("d", "v1").is_err() && find("e", "latest").is_err());
        let file = fs::read_dir(&at).expect("dir").next().expect("one").expect("entry").path();
        fs::write(&file, b"{").expect("write");
        assert!(matches!(find("d", "latest"), Err(KnownError::File { .. })));
        fs::write(&file, vec![b' '; 70_000]).expect("write");
        assert!(matches!(find("d", "latest"), Err(KnownError::File { .. })));
    }
}
