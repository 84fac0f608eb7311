//! The identity of a server, and the view that it had last: two files of the state directory.
//!
//! I1. A state directory belongs to one member of one cluster. Two states of one name are two incarnations.
//! I2. A server that has joined a cluster refuses another one, and writes nothing where its keys are gone,
//!     unless an operator recovers them. Otherwise jobs could begin anew over their ledgers.

use super::{ClusterError, view::ClusterView};
use fletch_core::{Hash, MemberId};
use fletch_host::replace::replace_file;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

/// The file of the identity.
pub const IDENTITY_FILE: &str = "server.id";
/// The file of the last view.
const VIEW_FILE: &str = "cluster.view";

/// Who a server is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The name of its cluster.
    pub cluster: String,
    /// The random number of the cluster that it joined. `None` before it joined one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
    /// Its name in the cluster.
    pub id: MemberId,
    /// A random number of this state directory.
    pub incarnation: String,
}

/// Returns a random number in hexadecimal.
pub fn random_hex() -> String {
    format!("{:032x}", rand::random::<u128>())
}

/// Returns a hash of this machine's start and of a directory on it, or an empty text if one is not known.
///
/// A copy of the directory, or the same one at another machine, has another hash. Blocking.
pub fn place(dir: &Path) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    match (boot, std::fs::metadata(dir)) {
        (Ok(boot), Ok(meta)) => {
            let text = format!("{} {} {}", boot.trim(), meta.dev(), meta.ino());
            Hash::of(text.as_bytes()).to_string()[..32].to_owned()
        }
        _ => String::new(),
    }
}

impl Identity {
    /// Reads the identity of a state directory, or makes a new one. Blocking.
    ///
    /// # Errors
    /// [`ClusterError::File`], and [`ClusterError::OtherName`] for the state of another member.
    pub fn open(dir: &Path, cluster: &str, id: &MemberId) -> Result<Self, ClusterError> {
        let path = dir.join(IDENTITY_FILE);
        let Some(known) = read::<Identity>(&path)? else {
            let new = Identity {
                cluster: cluster.to_owned(),
                uid: None,
                id: id.clone(),
                incarnation: random_hex(),
            };
            write(&path, &new)?;
            return Ok(new);
        };
        if known.cluster == cluster && known.id == *id {
            return Ok(known);
        }
        Err(ClusterError::OtherName {
            dir: dir.to_owned(),
            known: format!("{} of the cluster {:?}", known.id, known.cluster),
            wanted: format!("{id} of the cluster {cluster:?}"),
        })
    }

    /// Remembers that the server joined the cluster. Blocking.
    ///
    /// # Errors
    /// [`ClusterError::File`].
    pub fn record(&self, dir: &Path) -> Result<(), ClusterError> {
        write(&dir.join(IDENTITY_FILE), self)
    }
}

/// Reads the view that the server had last. Blocking. A damaged file counts as none.
pub fn last_view(dir: &Path) -> Option<ClusterView> {
    let path = dir.join(VIEW_FILE);
    read(&path).unwrap_or_else(|error| {
        tracing::warn!(%error, "the last view of the cluster cannot be read");
        None
    })
}

/// Keeps a view for the next start. Blocking.
pub fn keep_view(dir: &Path, view: &ClusterView) {
    if let Err(error) = write(&dir.join(VIEW_FILE), view) {
        tracing::warn!(%error, "the view of the cluster is not kept for the next start");
    }
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> ClusterError {
    let path: PathBuf = path.to_owned();
    move |error| ClusterError::File { path, error }
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, ClusterError> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(failed(path)(e)),
    };
    let bad = |why| failed(path)(io::Error::new(io::ErrorKind::InvalidData, why));
    super::records::from_text(&text).map(Some).map_err(bad)
}

/// Writes a file whole or not at all, and makes it durable.
fn write<T: Serialize>(path: &Path, value: &T) -> Result<(), ClusterError> {
    replace_file(path, &super::records::to_text(value)).map_err(failed(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_directory_belongs_to_one_member_of_one_cluster() {
        let dir = tempfile::tempdir().expect("tempdir");
        let id = |s: &str| MemberId::new(s).expect("a name");
        let mut first = Identity::open(dir.path(), "prod", &id("srv-1")).expect("new");
        assert_eq!(first.uid, None);
        first.uid = Some("7".into());
        first.record(dir.path()).expect("write");
        assert_eq!(Identity::open(dir.path(), "prod", &id("srv-1")).expect("again"), first);
        for (cluster, member) in [("test", "srv-1"), ("prod", "srv-2")] {
            let told = Identity::open(dir.path(), cluster, &id(member)).expect_err("another").to_string();
            assert!(told.contains("srv-1 of the cluster \"prod\"") && told.contains("--state-dir"), "{told}");
        }
        std::fs::write(dir.path().join(IDENTITY_FILE), "{").expect("write");
        let told = Identity::open(dir.path(), "prod", &id("srv-1")).expect_err("damaged").to_string();
        assert!(told.contains(IDENTITY_FILE), "{told}");
        assert_eq!(last_view(dir.path()), None);
    }
}
