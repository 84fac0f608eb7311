//! The record of where a cache directory lay, so that a cache that is not mounted is not begun anew.
//!
//! While its file system is unmounted, a cache directory is an empty directory of the file system below. A
//! tier that began anew there would fill a file system that nobody meant for it. So the directory carries an
//! id, in its file `id`. A record outside of it, in the state directory, keeps the id and the mount point.
//!
//! | the directory's id | its file system now | the tier |
//! |---|---|---|
//! | the recorded one, or no record | any | opens |
//! | missing or another | mounted at the recorded mount point, or not above it | begins anew |
//! | missing or another | above the recorded mount point | is absent until the file system is back |
//!
//! Device numbers would not do: they differ from boot to boot. A directory that was emptied in place is begun
//! anew, because everything in it may vanish (I5). Without a record nothing is refused.

use super::DiskError;
use fletch_core::Hash;
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Read, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

/// The version of the record's format.
const VERSION: u32 = 1;
/// The file of the directory that holds its id.
const ID: &str = "id";
/// The length of an id, in hex digits.
const ID_LEN: usize = 32;
/// The longest record that is read.
const RECORD_BYTES_MAX: u64 = 64 << 10;

/// Where the mount point of one cache directory is remembered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountMemory {
    dir: PathBuf,
    record: PathBuf,
}

/// The record of a cache directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct MountRecord {
    version: u32,
    dir: PathBuf,
    /// Empty if no id could be written.
    id: String,
    mount_point: PathBuf,
}

impl MountMemory {
    /// Returns the memory of cache directory `dir`, whose record lies in directory `records`. No IO.
    ///
    /// `records` must lie outside of `dir`.
    #[must_use]
    pub fn new(dir: &Path, records: &Path) -> Self {
        let name = Hash::of(dir.as_os_str().as_bytes()).to_string();
        MountMemory { dir: dir.to_owned(), record: records.join(format!("{}.json", &name[..32])) }
    }

    /// Checks that the file system of the directory is mounted.
    ///
    /// # Errors
    /// [`DiskError::Unmounted`] if it is not, [`DiskError::Io`] if the file system cannot be looked at.
    pub fn check(&self) -> Result<(), DiskError> {
        let Some(record) = self.read_record() else { return Ok(()) };
        let now = self.mount_point()?;
        if is_unmounted(&record, self.read_id().as_deref(), &now) {
            return Err(DiskError::Unmounted {
                dir: self.dir.clone(),
                mount_point: record.mount_point,
                record: self.record.clone(),
            });
        }
        Ok(())
    }

    /// Records the id and the mount point of the directory, which exists. Gives it an id if it has none.
    ///
    /// A failure only costs the protection, so it is logged.
    pub(super) fn remember(&self) {
        let id = self.read_id().map_or_else(|| self.write_id(), Ok);
        let id = id.unwrap_or_else(|error| {
            tracing::debug!(%error, dir = %self.dir.display(), "the cache directory has no id");
            String::new()
        });
        let remembered = self.mount_point().and_then(|mount_point| {
            let record = MountRecord { version: VERSION, dir: self.dir.clone(), id, mount_point };
            if self.read_record().as_ref() == Some(&record) {
                return Ok(());
            }
            self.write_record(&record).map_err(|e| DiskError::io("write", &self.record, e))
        });
        if let Err(error) = remembered {
            tracing::warn!(
                %error,
                "cannot record where the cache directory lies; if its file system is unmounted, a later \
                 start begins a new cache on the file system below"
            );
        }
    }

    fn mount_point(&self) -> Result<PathBuf, DiskError> {
        mount_point(&self.dir).map_err(|e| DiskError::io("find the file system of", &self.dir, e))
    }

    fn read_record(&self) -> Option<MountRecord> {
        let mut text = Vec::new();
        fs::File::open(&self.record).ok()?.take(RECORD_BYTES_MAX).read_to_end(&mut text).ok()?;
        let record: MountRecord = serde_json::from_slice(&text).ok()?;
        // The name of the record is a hash of the directory, so another directory here is damage.
        (record.version == VERSION && record.dir == self.dir).then_some(record)
    }

    /// Replaces the record in one step. It is not synced: a lost record costs the protection only.
    fn write_record(&self, record: &MountRecord) -> io::Result<()> {
        if let Some(records) = self.record.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(records)?;
        }
        let text = serde_json::to_vec(record)?;
        let part = self.record.with_extension(format!("{}.part", std::process::id()));
        let mut open = OpenOptions::new();
        let mut file = open.write(true).create(true).truncate(true).mode(0o600).open(&part)?;
        let written = file.write_all(&text).and_then(|()| fs::rename(&part, &self.record));
        if written.is_err() {
            drop(fs::remove_file(&part));
        }
        written
    }

    fn read_id(&self) -> Option<String> {
        let mut id = String::new();
        let file = fs::File::open(self.dir.join(ID)).ok()?;
        file.take(ID_LEN as u64 + 1).read_to_string(&mut id).ok()?;
        let id = id.trim_end();
        let whole = id.len() == ID_LEN && id.bytes().all(|b| b.is_ascii_hexdigit());
        whole.then(|| id.to_owned())
    }

    fn write_id(&self) -> io::Result<String> {
        let id = format!("{:032x}", rand::random::<u128>());
        let path = self.dir.join(ID);
        let mut open = OpenOptions::new();
        open.write(true).create(true).truncate(true).mode(0o600);
        open.open(path)?.write_all(format!("{id}\n").as_bytes())?;
        Ok(id)
    }
}

/// Whether a directory with this record, id and current mount point lacks its file system. Pure.
fn is_unmounted(record: &MountRecord, id: Option<&str>, now: &Path) -> bool {
    let same_cache = id.is_some_and(|id| id == record.id);
    let above = record.mount_point.starts_with(now) && record.mount_point != now;
    !same_cache && above
}

/// Returns the mount point of the file system that `dir` lies on, or would lie on if it existed.
fn mount_point(dir: &Path) -> io::Result<PathBuf> {
    let mut at = nearest(dir)?;
    while !is_mount_point(&at)? {
        if !at.pop() {
            break;
        }
    }
    Ok(at)
}

/// Returns the nearest existing ancestor of `dir`, without links.
fn nearest(dir: &Path) -> io::Result<PathBuf> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for at in dir.ancestors() {
        match fs::canonicalize(at) {
            Ok(found) => return Ok(found),
            Err(e) if e.kind() == io::ErrorKind::NotFound => last = e,
            Err(e) => return Err(e),
        }
    }
    Err(last)
}

fn is_mount_point(at: &Path) -> io::Result<bool> {
    let Some(parent) = at.parent() else { return Ok(true) };
    let s = statx(CWD, at, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS)?;
    if s.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT) {
        return Ok(s.stx_attributes.contains(StatxAttributes::MOUNT_ROOT));
    }
    // A kernel before 5.8 does not say.
    Ok(fs::symlink_metadata(at)?.dev() != fs::symlink_metadata(parent)?.dev())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(mount_point: &str) -> MountRecord {
        MountRecord {
            version: VERSION,
            dir: "/mnt/ssd/cache".into(),
            id: "a".repeat(32),
            mount_point: mount_point.into(),
        }
    }

    #[test]
    fn only_a_directory_that_fell_to_the_file_system_below_is_unmounted() {
        let (same, other) = ("a".repeat(32), "b".repeat(32));
        let now = |at: &str, id: Option<&str>| is_unmounted(&record("/mnt/ssd"), id, Path::new(at));
        for id in [None, Some(&*other)] {
            assert!(now("/", id) && now("/mnt", id), "{id:?}: the file system below");
            assert!(!now("/mnt/ssd", id), "{id:?}: emptied in place, or another disk mounted there");
            assert!(!now("/mnt/ssd/cache", id), "{id:?}: a file system of its own by now");
            assert!(!now("/mnt/ss", id) && !now("/other", id), "{id:?}: a link leads elsewhere now");
        }
        assert!(!now("/", Some(&same)), "the cache was copied to the file system below, with its id");
        assert!(!is_unmounted(&record("/"), None, Path::new("/")), "it never had its own");
    }

    #[test]
    fn a_record_that_is_missing_damaged_or_of_another_version_refuses_nothing() {
        let dir = tempfile::tempdir().expect("tempdir");
        let memory = MountMemory::new(&dir.path().join("cache"), &dir.path().join("records"));
        memory.check().expect("no record");
        let lay =
            MountRecord { mount_point: dir.path().join("cache"), dir: memory.dir.clone(), ..record("/") };
        memory.write_record(&lay).expect("written");
        let e = memory.check().expect_err("that mount point is gone");
        assert!(matches!(e, DiskError::Unmounted { .. }), "{e}");
        let said = e.to_string();
        assert!(said.contains("mount it again") && said.contains(".json"), "{said}");
        for text in ["", "{", "[1]", &"x".repeat(100_000)] {
            fs::write(&memory.record, text).expect("write");
            memory.check().expect("damage");
        }
        memory.write_record(&MountRecord { version: 2, ..lay.clone() }).expect("written");
        memory.check().expect("a later version");
        memory.write_record(&MountRecord { dir: "/elsewhere".into(), ..lay }).expect("written");
        memory.check().expect("another directory");
    }

    #[test]
    fn the_record_of_version_1_stays_readable() {
        let text = r#"{"version":1,"dir":"/c","id":"0123456789abcdef0123456789abcdef","mount_point":"/m"}"#;
        let read: MountRecord = serde_json::from_str(text).expect("reads");
        assert_eq!((&*read.dir, &*read.mount_point), (Path::new("/c"), Path::new("/m")));
        assert_eq!(serde_json::to_string(&read).expect("writes"), text);
    }

    #[test]
    fn a_directory_is_given_one_id_and_its_mount_point_is_found() {
        let dir = tempfile::tempdir().expect("tempdir");
        let cache = dir.path().join("cache");
        let memory = MountMemory::new(&cache, &dir.path().join("records"));
        let above = mount_point(&cache).expect("found before it exists");
        assert!(fs::canonicalize(dir.path()).expect("path").starts_with(&above), "{above:?}");
        fs::create_dir(&cache).expect("mkdir");
        memory.remember();
        let first = memory.read_record().expect("a record");
        assert_eq!((first.id.len(), &first.mount_point), (ID_LEN, &above));
        memory.remember();
        assert_eq!(memory.read_record(), Some(first.clone()), "the same id");
        fs::write(cache.join(ID), "damaged").expect("write");
        memory.remember();
        assert_ne!(memory.read_record().expect("a record").id, first.id, "an id of its own again");
        assert_eq!(mount_point(Path::new("/proc/self")).expect("found"), Path::new("/proc"));
    }
}
