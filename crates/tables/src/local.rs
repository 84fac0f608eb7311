//! Local tables: parts that were read and checked once, in files that are searched where they lie.
//!
//! ```text
//! <dir>/                         0700, of this user
//!   <hash of scope, root, layout>/   one version in one layout, as one scope reads it
//!     <part>.entries             its entries and slices
//!     <part>.chunks              its rows of chunks.parquet
//!     0.samples                  what a server has worked out about all samples
//!     <n>.index                  chunks by hash, and the rows of chunks.parquet that describe them
//! ```
//! The files are soft: a process that finds one damaged, gone, or of another user reads the version's own
//! tables again. Several processes of one user share a directory.
//!
//! Owns: the names of the files, who may have written them, and how many bytes they take.
//! Must never: follow a link, read a file of another user, fail a read because a file cannot be kept, or
//! write where the directory's file system should be mounted and is not ([`PlaceCheck`]).

mod leaf_file;

pub(crate) use leaf_file::{Directory, Identity, NewLeaf};

use crate::leaf::Buffer;
use fletch_core::{Hash, LayoutId, Root};
use parking_lot::Mutex;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

/// The mode bits with which a group or others may write.
const OTHERS_MAY_WRITE: u32 = 0o022;
/// The prefix of a file that is being written.
const UNFINISHED: &str = ".unfinished-";
/// A file that is being written belongs to a dead process after this time.
const UNFINISHED_FOR: Duration = Duration::from_secs(3600);
/// After this share of the limit was written, the process counts the bytes of the directory again: other
/// processes write there, too.
const COUNT_AFTER: u64 = 16;

/// A table that has a local form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub(crate) enum LocalTable {
    /// Entries and their slices.
    Entries = 1,
    /// Rows of `chunks.parquet`.
    Chunks = 2,
    /// What a server knows of all samples.
    Samples = 3,
    /// Chunks by hash.
    ChunkIndex = 4,
}

impl LocalTable {
    fn extension(self) -> &'static str {
        match self {
            LocalTable::Entries => "entries",
            LocalTable::Chunks => "chunks",
            LocalTable::Samples => "samples",
            LocalTable::ChunkIndex => "index",
        }
    }
}

/// Returns the hash that stands for a version in one layout, as one scope reads it.
pub(crate) fn version_hash(scope: Hash, root: Root, layout: LayoutId) -> Hash {
    Hash::of(&[scope, root.0, layout.0].map(|hash| hash.0).concat())
}

/// What the local tables of a process did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LocalStats {
    /// Bytes in the directory, as far as this process knows.
    pub bytes: u64,
    /// Files that this process wrote.
    pub written: u64,
    /// Files that were damaged, or that another user had written. Each was written again.
    pub damaged: u64,
    /// Files that could not be written: the disk or the share of it was full.
    pub refused: u64,
}

#[derive(Debug, Default)]
struct Counts {
    bytes: AtomicU64,
    written: AtomicU64,
    damaged: AtomicU64,
    refused: AtomicU64,
}

/// Says before each write whether the directory is where it was: its file system may have been unmounted.
pub type PlaceCheck = Box<dyn Fn() -> io::Result<()> + Send + Sync>;

/// A directory of local tables. Clones share it.
#[derive(Clone)]
pub struct LocalTables(Arc<Inner>);

impl std::fmt::Debug for LocalTables {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalTables").field("dir", &self.0.dir).finish()
    }
}

struct Inner {
    dir: PathBuf,
    /// The user of this process.
    uid: u32,
    bytes_max: u64,
    check: PlaceCheck,
    counts: Counts,
    /// Bytes that this process wrote since it counted. Locked while it makes room.
    since_count: Mutex<u64>,
}

/// The bytes of a version's folder, and when it was last opened.
struct Folder {
    path: PathBuf,
    bytes: u64,
    opened: SystemTime,
}

impl LocalTables {
    /// Opens a directory, and creates it unless it exists. Counts its bytes. Blocking.
    ///
    /// It keeps at most about `bytes_max` bytes: the version that was opened the longest ago goes first.
    /// While `check` fails nothing is created or written.
    ///
    /// # Errors
    /// The error of the system, or one that says that other users may write to the directory.
    pub fn open(dir: &Path, bytes_max: u64, check: PlaceCheck) -> io::Result<Self> {
        let (dir, counts, since_count) = (dir.to_owned(), Counts::default(), Mutex::new(0));
        let uid = rustix::process::geteuid().as_raw();
        let local = LocalTables(Arc::new(Inner { dir, uid, bytes_max, check, counts, since_count }));
        if (local.0.check)().is_ok() {
            make_own(&local.0.dir)?;
            local.make_room(0, None)?;
        }
        Ok(local)
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.0.dir
    }

    /// What was done so far.
    #[must_use]
    pub fn stats(&self) -> LocalStats {
        let c = &self.0.counts;
        LocalStats {
            bytes: c.bytes.load(Relaxed),
            written: c.written.load(Relaxed),
            damaged: c.damaged.load(Relaxed),
            refused: c.refused.load(Relaxed),
        }
    }

    fn folder(&self, version: Hash) -> PathBuf {
        self.0.dir.join(version.to_string())
    }

    fn path(&self, of: &Identity) -> PathBuf {
        self.folder(of.version).join(format!("{}.{}", of.part, of.table.extension()))
    }

    /// Notes that a version is opened, so that it stays longer than those which nobody opens.
    pub(crate) fn opened(&self, version: Hash) {
        let folder = File::open(self.folder(version));
        // There is no folder before the first part, and its time is a hint.
        drop(folder.and_then(|folder| folder.set_modified(SystemTime::now())));
    }

    /// Returns the directory of a part's file; `None` if there is no such file that can be believed.
    pub(crate) fn directory(&self, of: &Identity) -> Option<Directory> {
        self.believed(of, |file| leaf_file::read_directory(file, of))
    }

    /// Returns what `parse` makes of the bytes of some leaves, in order; `None` as [`Self::directory`].
    pub(crate) fn leaves<T>(
        &self,
        of: &Identity,
        directory: &Directory,
        mut leaves: Range<usize>,
        parse: impl Fn(Buffer) -> Option<T>,
    ) -> Option<Vec<T>> {
        let read = |file: &_| {
            leaves.try_fold(Vec::new(), |mut read, leaf| {
                read.push(leaf_file::read_leaf(file, directory, leaf, &parse)?);
                Ok(read)
            })
        };
        self.believed(of, read)
    }

    /// Reads a part's file. A file that cannot be believed is removed, and the caller writes it again.
    fn believed<T>(&self, of: &Identity, read: impl FnOnce(&File) -> io::Result<T>) -> Option<T> {
        let path = self.path(of);
        let file = match open_own(&path, self.0.uid) {
            Ok(file) => file,
            Err(e) if is_of_the_file(&e) => {
                self.disbelieve(&path, &e);
                return None;
            }
            // There is no file yet, or the process has no descriptor left.
            Err(_) => return None,
        };
        match read(&file) {
            Ok(read) => Some(read),
            Err(e) => {
                self.disbelieve(&path, &e);
                None
            }
        }
    }

    fn disbelieve(&self, path: &Path, error: &io::Error) {
        self.0.counts.damaged.fetch_add(1, Relaxed);
        tracing::warn!(path = %path.display(), %error, "a local table is not believed and is made again");
        // Another process may have removed it first. If it stays, each use of it ends here.
        drop(fs::remove_file(path));
    }

    /// Writes a part's file. Returns whether it is there now. Blocking.
    pub(crate) fn write<'a>(
        &self,
        of: &Identity,
        leaves: impl Iterator<Item = leaf_file::NewLeaf<'a>>,
    ) -> bool {
        match self.try_write(of, leaves) {
            Ok(()) => {
                self.0.counts.written.fetch_add(1, Relaxed);
                true
            }
            Err(error) => {
                let before = self.0.counts.refused.fetch_add(1, Relaxed);
                if before == 0 {
                    let dir = self.0.dir.display();
                    tracing::warn!(%dir, %error, "a part of a table stays in memory: it cannot be kept here");
                }
                false
            }
        }
    }

    /// Opens a temporary file that has no name and does not count. Blocking.
    pub(crate) fn scratch(&self, of: &Identity) -> io::Result<File> {
        (self.0.check)()?;
        let folder = self.folder(of.version);
        make_own(&folder)?;
        tempfile::tempfile_in(&folder)
    }

    fn try_write<'a>(
        &self,
        of: &Identity,
        leaves: impl Iterator<Item = leaf_file::NewLeaf<'a>>,
    ) -> io::Result<()> {
        let (path, folder) = (self.path(of), self.folder(of.version));
        (self.0.check)()?;
        make_own(&folder)?;
        let mut new = tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(&folder)?;
        let len = leaf_file::write(new.as_file_mut(), of, leaves)?;
        self.make_room(len, Some(&folder))?;
        // Not synced: a file that a crash cut short is not believed, and made again.
        new.persist(&path)?;
        Ok(())
    }

    /// Counts `len` more bytes. Removes versions, but not the one in the folder `keep`, until they fit.
    ///
    /// # Errors
    /// They do not fit, or the directory cannot be read.
    fn make_room(&self, len: u64, keep: Option<&Path>) -> io::Result<()> {
        let mut since_count = self.0.since_count.lock();
        *since_count += len;
        let known = self.0.counts.bytes.fetch_add(len, Relaxed) + len;
        if keep.is_some() && known <= self.0.bytes_max && *since_count <= self.0.bytes_max / COUNT_AFTER {
            return Ok(());
        }
        let mut folders = folders(&self.0.dir)?;
        folders.sort_by_key(|folder| folder.opened);
        // The new file is counted already, if it has been written.
        let mut bytes: u64 = folders.iter().map(|folder| folder.bytes).sum();
        for folder in folders {
            if bytes <= self.0.bytes_max {
                break;
            }
            if keep != Some(&*folder.path) && fs::remove_dir_all(&folder.path).is_ok() {
                bytes -= folder.bytes;
            }
        }
        *since_count = 0;
        self.0.counts.bytes.store(bytes, Relaxed);
        match bytes <= self.0.bytes_max {
            true => Ok(()),
            false => {
                self.0.counts.bytes.fetch_sub(len, Relaxed);
                Err(io::Error::new(
                    io::ErrorKind::StorageFull,
                    "the local tables would take more than their limit",
                ))
            }
        }
    }
}

/// Whether the file itself is the reason for an error of opening it.
fn is_of_the_file(error: &io::Error) -> bool {
    let is_link = error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error());
    is_link || error.kind() == io::ErrorKind::PermissionDenied
}

/// Returns the folders of versions. Removes what a dead process left behind.
fn folders(dir: &Path) -> io::Result<Vec<Folder>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let Ok(about) = fs::symlink_metadata(&path) else { continue };
        if !about.is_dir() {
            continue;
        }
        let mut bytes = 0;
        for file in fs::read_dir(&path).into_iter().flatten().flatten() {
            let Ok(about) = file.metadata() else { continue };
            let unfinished = file.file_name().as_encoded_bytes().starts_with(UNFINISHED.as_bytes());
            let age = about.modified().ok().and_then(|at| at.elapsed().ok());
            if unfinished
                && age.is_some_and(|age| age > UNFINISHED_FOR)
                && fs::remove_file(file.path()).is_ok()
            {
                continue;
            }
            bytes += about.len();
        }
        found.push(Folder { path, bytes, opened: about.modified().unwrap_or(SystemTime::UNIX_EPOCH) });
    }
    Ok(found)
}

/// Creates a directory that only this user may write to, unless it exists. Refuses one where others may.
fn make_own(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let about = fs::symlink_metadata(dir)?;
    let own = about.is_dir() && about.uid() == rustix::process::geteuid().as_raw();
    if own && about.mode() & OTHERS_MAY_WRITE == 0 {
        return Ok(());
    }
    let why = format!("{}: it is not a directory that only this user may write to", dir.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// Opens a file of the user `uid` or of root. Follows no link.
fn open_own(path: &Path, uid: u32) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).map_err(io::Error::other)?;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let about = file.metadata()?;
    if about.is_file() && (about.uid() == uid || about.uid() == 0) && about.mode() & OTHERS_MAY_WRITE == 0 {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is of another user, or others may write to it"))
}

#[cfg(test)]
mod tests;
