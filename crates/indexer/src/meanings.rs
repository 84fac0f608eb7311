//! Remembers which store or which folder a URI meant when this account read it.
//!
//! The same bucket name at another store is another dataset, and so is another folder at the same path. Each
//! bucket or folder has one small JSON file in the state directory. It holds no secret.
//!
//! 1. The first store of a bucket name keeps the plain URI, `s3://photos`. A bucket of that name at another
//!    store has the store in its URI, `s3://photos~STORE`, and so in everything that is remembered by a URI.
//! 2. A record of a store never changes. Of two commands at once, one decides, and the other reads that.
//! 3. Without a record (builds before 0.1.0 wrote none), a plain URI means what it meant to such a build: the
//!    store of the environment, and the folder that is there.

use fletch_core::Hash;
use fletch_host::{
    mounts,
    replace::{create_shared_file, replace_shared_file},
};
use fletch_origin::OriginUri;
use serde::{Deserialize, Serialize};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;
use std::{fs, io};

/// The longest file that is read, in bytes.
const BYTES_MAX: u64 = 16 << 10;

/// How a folder differs from another one at the same path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Folder {
    /// The type and the source of its file system.
    file_system: String,
    inode: u64,
    /// When the folder was made, in nanoseconds since 1970; `None` where the file system does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    born_ns: Option<u64>,
    /// Whether inode numbers of its file system can change.
    #[serde(default)]
    is_network: bool,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Record {
    /// The bucket, the container or the folder.
    uri: String,
    /// The store that the plain URI means.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    store: Option<String>,
    /// The folder that was there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    folder: Option<Folder>,
}

fn path_of(state_dir: &Path, uri: &str) -> PathBuf {
    state_dir.join("meanings").join(format!("{}.json", &Hash::of(uri.as_bytes()).to_string()[..24]))
}

/// Reads the record of a URI. A record that is absent, damaged or of another URI is an empty one.
fn read(state_dir: &Path, uri: &str) -> Record {
    let path = path_of(state_dir, uri);
    let is_short = fs::metadata(&path).is_ok_and(|meta| meta.len() <= BYTES_MAX);
    let text = if is_short { fs::read(&path).ok() } else { None };
    let record: Option<Record> = text.and_then(|text| serde_json::from_slice(&text).ok());
    record.filter(|record| record.uri == uri).unwrap_or_default()
}

/// Writes a record whole, and durably. `replace`: in place of an older one; else an older one stays.
fn write(state_dir: &Path, record: &Record, replace: bool) -> io::Result<()> {
    let path = path_of(state_dir, &record.uri);
    fs::create_dir_all(state_dir.join("meanings"))?;
    let text = serde_json::to_vec_pretty(record)?;
    if replace { replace_shared_file(&path, &text) } else { create_shared_file(&path, &text).map(|_| ()) }
}

/// Returns the store that the plain URI of a bucket or container means, if that is recorded.
#[must_use]
pub fn store(state_dir: &Path, top: &OriginUri) -> Option<String> {
    read(state_dir, &top.without_store().to_string()).store
}

/// Records the store that the plain URI of a bucket or container means, unless one is recorded. Returns the
/// recorded one.
///
/// # Errors
/// The error of the file.
pub fn claim(state_dir: &Path, top: &OriginUri, store: &str) -> io::Result<String> {
    let uri = top.without_store().to_string();
    if let Some(recorded) = read(state_dir, &uri).store {
        return Ok(recorded);
    }
    let record = Record { uri: uri.clone(), store: Some(store.to_owned()), folder: None };
    write(state_dir, &record, false)?;
    match read(state_dir, &uri).store {
        Some(recorded) => Ok(recorded),
        // A damaged file was in the way.
        None => write(state_dir, &record, true).map(|()| store.to_owned()),
    }
}

/// Returns the folder that was read at a path last, if that is recorded.
#[must_use]
pub fn folder(state_dir: &Path, uri: &OriginUri) -> Option<Folder> {
    read(state_dir, &uri.to_string()).folder
}

/// Records the folder that was read at a path.
///
/// # Errors
/// The error of the file.
pub fn remember_folder(state_dir: &Path, uri: &OriginUri, folder: Folder) -> io::Result<()> {
    write(state_dir, &Record { uri: uri.to_string(), store: None, folder: Some(folder) }, true)
}

impl Folder {
    /// Returns what tells the folder at a path from others.
    ///
    /// # Errors
    /// The folder cannot be seen.
    pub fn at(dir: &Path) -> io::Result<Self> {
        let real = fs::canonicalize(dir)?;
        let meta = fs::metadata(&real)?;
        let table = fs::read("/proc/self/mountinfo")?;
        let mount = mounts::holding(&table, &real);
        let (fs_type, source) = match mount {
            Some(mount) => (mount.fs_type, mount.source),
            None => ("unknown".to_owned(), String::new()),
        };
        let born = meta.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        Ok(Folder {
            is_network: mounts::is_network(&fs_type),
            file_system: format!("{fs_type} {source}"),
            inode: meta.ino(),
            born_ns: born.and_then(|since| u64::try_from(since.as_nanos()).ok()),
        })
    }

    /// Returns how the folder that is now at the path differs from this one; `None` if it is the same.
    ///
    /// The time of birth and the inode decide where both are known: the names of devices change at a reboot.
    #[must_use]
    pub fn difference(&self, now: &Folder) -> Option<String> {
        let is_same_file_system = self.file_system == now.file_system;
        let is_same = match (self.born_ns, now.born_ns) {
            (Some(then), Some(now_born)) => then == now_born && self.inode == now.inode,
            _ => is_same_file_system && (self.is_network || self.inode == now.inode),
        };
        match (is_same, is_same_file_system) {
            (true, _) => None,
            (false, true) => Some("another folder is at this path now".to_owned()),
            (false, false) => Some(format!(
                "it was on the file system {}, and {} is at this path now",
                self.file_system, now.file_system
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uri(text: &str) -> OriginUri {
        OriginUri::parse(text).expect("uri")
    }

    #[test]
    fn the_first_store_keeps_the_plain_uri() {
        let dir = tempfile::tempdir().expect("tempdir");
        let (top, other) = (uri("s3://photos"), uri("s3://other"));
        assert_eq!(store(dir.path(), &top), None);
        assert_eq!(claim(dir.path(), &top, "a:9000").expect("claimed"), "a:9000");
        assert_eq!(claim(dir.path(), &top, "b:9000").expect("read"), "a:9000");
        assert_eq!(store(dir.path(), &uri("s3://photos~b:9000")).as_deref(), Some("a:9000"));
        assert_eq!(store(dir.path(), &other), None);
        let files: Vec<_> = fs::read_dir(dir.path().join("meanings")).expect("dir").flatten().collect();
        assert_eq!(files.len(), 1, "no part stays");
        fs::write(files[0].path(), b"{").expect("damage");
        assert_eq!(store(dir.path(), &top), None, "a damaged record is no record");
        assert_eq!(claim(dir.path(), &top, "b:9000").expect("replaced"), "b:9000");
    }

    #[test]
    fn a_replaced_folder_is_another_one() {
        let dir = tempfile::tempdir().expect("tempdir");
        let (data, state) = (dir.path().join("data"), dir.path().join("state"));
        fs::create_dir(&data).expect("mkdir");
        let first = Folder::at(&data).expect("seen");
        let at = uri(&data.display().to_string());
        remember_folder(&state, &at, first.clone()).expect("remembered");
        fs::write(data.join("new"), b"x").expect("write");
        assert_eq!(folder(&state, &at), Some(first.clone()));
        assert_eq!(first.difference(&Folder::at(&data).expect("seen")), None, "a new file changes nothing");
        fs::rename(&data, dir.path().join("old")).expect("rename");
        fs::create_dir(&data).expect("mkdir");
        let now = Folder::at(&data).expect("seen");
        assert_eq!(first.difference(&now).as_deref(), Some("another folder is at this path now"));
    }

    #[test]
    fn a_device_with_another_name_is_the_same_folder_where_the_birth_is_known() {
        let of = |file_system: &str, inode, born_ns, is_network| Folder {
            file_system: file_system.to_owned(),
            inode,
            born_ns,
            is_network,
        };
        let known = of("ext4 /dev/sdb1", 2, Some(7), false);
        assert_eq!(known.difference(&of("ext4 /dev/sdc1", 2, Some(7), false)), None);
        let other = known.difference(&of("ext4 /dev/sdc1", 2, Some(8), false)).expect("another disk");
        assert!(other.contains("ext4 /dev/sdb1, and ext4 /dev/sdc1"), "{other}");
        let unknown = of("nfs4 host:/a", 2, None, true);
        assert_eq!(unknown.difference(&of("nfs4 host:/a", 3, None, true)), None);
        assert!(unknown.difference(&of("nfs4 host:/b", 2, None, true)).is_some());
        assert!(
            of("vfat /dev/sdb1", 1, None, false).difference(&of("vfat /dev/sdb1", 9, None, false)).is_some()
        );
    }
}
