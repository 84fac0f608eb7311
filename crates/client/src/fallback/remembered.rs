//! Remembers what a server last said about a version, to open the version without the server.
//!
//! Keeps one small JSON file for each (server, dataset, version as written), replaced as a whole. The file
//! holds no secret. Readers check tables and chunks against the root that the file names.

use crate::Servers;
use fletch_core::{DatasetName, Hash, LayoutId, Root};
use fletch_host::replace::replace_shared_file;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// The longest file that is read, in bytes.
const BYTES_MAX: u64 = 64 << 10;

/// The answer of a server to the question what a version is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RememberedVersion {
    /// The server that answered.
    pub server: String,
    /// The dataset.
    pub dataset: DatasetName,
    /// The tag or root that was asked for.
    pub version: String,
    /// The root of the version.
    pub root: Root,
    /// The layout to read the version by.
    pub layout: LayoutId,
    /// The URI of the dataset's objects.
    pub uri: String,
    /// The URI of the version tables.
    pub tables: String,
}

/// Why a version cannot be saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum RememberedVersionError {
    /// Nothing is saved for this server, dataset and version.
    #[error(
        "this account has no record of {dataset}@{version} from {server}; \
         open it once while the server answers"
    )]
    Unknown {
        /// The server.
        server: String,
        /// The dataset.
        dataset: DatasetName,
        /// The tag or root.
        version: String,
    },
    /// The file cannot be read, written or parsed.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the system or the parser.
        source: io::Error,
    },
}

impl RememberedVersion {
    fn path(dir: &Path, server: &Servers, dataset: &DatasetName, version: &str) -> PathBuf {
        // The lengths make the text of each triple unique.
        let server = server.to_string();
        let text = format!("{} {server} {} {dataset} {version}", server.len(), dataset.as_str().len());
        dir.join(format!("{}.json", Hash::of(text.as_bytes()).short()))
    }

    /// Saves the record under `dir`, which is created. A crash leaves the old or the new file.
    ///
    /// # Errors
    /// [`RememberedVersionError::File`].
    pub fn save(&self, dir: &Path, server: &Servers) -> Result<(), RememberedVersionError> {
        let path = RememberedVersion::path(dir, server, &self.dataset, &self.version);
        let file = |source| RememberedVersionError::File { path: path.clone(), source };
        let text = serde_json::to_vec_pretty(self).map_err(|e| file(e.into()))?;
        fs::create_dir_all(dir).map_err(file)?;
        replace_shared_file(&path, &text).map_err(file)
    }

    /// Loads the record that was saved last.
    ///
    /// # Errors
    /// [`RememberedVersionError`].
    pub fn load(
        dir: &Path,
        server: &Servers,
        dataset: &DatasetName,
        version: &str,
    ) -> Result<RememberedVersion, RememberedVersionError> {
        let path = RememberedVersion::path(dir, server, dataset, version);
        let unknown = || RememberedVersionError::Unknown {
            server: server.to_string(),
            dataset: dataset.clone(),
            version: version.to_owned(),
        };
        let file = |source| RememberedVersionError::File { path: path.clone(), source };
        match fs::metadata(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(unknown()),
            Err(e) => return Err(file(e)),
            Ok(m) if m.len() > BYTES_MAX => {
                return Err(file(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the file is longer than 64 KiB",
                )));
            }
            Ok(_) => {}
        }
        let text = fs::read(&path).map_err(file)?;
        let known: RememberedVersion = serde_json::from_slice(&text).map_err(|e| file(e.into()))?;
        // The file name is a short hash, so two triples may share it.
        let same =
            known.server == server.to_string() && known.dataset == *dataset && known.version == version;
        if same { Ok(known) } else { Err(unknown()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_version_is_loaded_and_no_other() {
        let dir = tempfile::tempdir().expect("tempdir");
        let server: Servers = "http://127.0.0.1:1".parse().expect("endpoint");
        let known = RememberedVersion {
            server: server.to_string(),
            dataset: DatasetName::new("d").expect("name"),
            version: "latest".into(),
            root: Root(Hash::of(b"r")),
            layout: LayoutId(Hash::of(b"l")),
            uri: "/data".into(),
            tables: "/tables".into(),
        };
        let at = dir.path().join("known");
        let load = |dataset: &str, version: &str| {
            RememberedVersion::load(&at, &server, &DatasetName::new(dataset).expect("name"), version)
        };
        assert!(matches!(load("d", "latest"), Err(RememberedVersionError::Unknown { .. })));
        known.save(&at, &server).expect("saved");
        assert_eq!(load("d", "latest").expect("found"), known);
        assert!(load("d", "v1").is_err() && load("e", "latest").is_err());
        let file = fs::read_dir(&at).expect("dir").next().expect("one").expect("entry").path();
        fs::write(&file, b"{").expect("write");
        assert!(matches!(load("d", "latest"), Err(RememberedVersionError::File { .. })));
        fs::write(&file, vec![b' '; 70_000]).expect("write");
        assert!(matches!(load("d", "latest"), Err(RememberedVersionError::File { .. })));
    }
}
