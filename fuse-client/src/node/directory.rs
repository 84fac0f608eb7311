//! The directory of the node store: one for each server and principal, owned by one user alone.
//!
//! ```text
//! <cache dir>/mounts-<uid>/id        the id of all stores of this user (crates/store, `MountMemory`)
//! <cache dir>/mounts-<uid>/<name>/   0700: lock, slabs/, catalogue (crates/store), node.sock (its owner)
//! ```
//! Mounts reach the socket through an open descriptor of its directory: the path of a unix socket may have
//! 107 bytes, and the path of a cache directory may be longer.

use fletch_core::Hash;
use fletch_store::disk::MountMemory;
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::geteuid;
use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

/// The file name of the socket.
const SOCKET: &str = "node.sock";
/// The next owner removes a store that no mount used for this long, because tokens rotate and servers move.
const IDLE_AFTER: Duration = Duration::from_secs(7 * 86_400);

/// The directory of one node store, which may not exist yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreDirectory {
    /// `<cache dir>/mounts-<uid>`
    user_dir: PathBuf,
    dir: PathBuf,
}

impl StoreDirectory {
    /// Returns the directory of the store `name` below a cache directory. Does not touch the disk.
    #[must_use]
    pub fn new(cache_dir: &Path, name: Hash) -> Self {
        let user_dir = cache_dir.join(format!("mounts-{}", geteuid()));
        let dir = user_dir.join(&name.to_string()[..32]);
        StoreDirectory { user_dir, dir }
    }

    /// Returns the path of the directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the memory of where this user's stores of the cache directory lie. Does not touch the disk.
    #[must_use]
    pub fn mount_memory(&self, records: &Path) -> MountMemory {
        MountMemory::new(&self.user_dir, records)
    }

    /// Creates the directory, mode 0700, unless it exists. Then checks it as [`StoreDirectory::check`].
    ///
    /// # Errors
    /// A text that says what is wrong with the directory, and what to do.
    pub fn make(&self) -> Result<(), String> {
        let fail = |dir: &Path, e: io::Error| format!("{}: {e}", dir.display());
        if let Some(cache) = self.user_dir.parent() {
            let made = DirBuilder::new().recursive(true).mode(0o700).create(cache);
            made.map_err(|e| fail(cache, e))?;
        }
        for dir in [&self.user_dir, &self.dir] {
            match DirBuilder::new().mode(0o700).create(dir) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(fail(dir, e)),
                _ => check(dir)?,
            }
        }
        Ok(())
    }

    /// Refuses a directory that another user made or can look into. Accepts a directory that does not exist.
    ///
    /// # Errors
    /// A text that says what is wrong with the directory, and what to do.
    pub fn check(&self) -> Result<(), String> {
        [&self.user_dir, &self.dir].into_iter().try_for_each(|dir| check(dir))
    }

    /// Opens the directory, to reach its socket.
    ///
    /// # Errors
    /// The failed check, or the error of the system.
    pub fn open(&self) -> io::Result<File> {
        self.check().map_err(io::Error::other)?;
        OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW).open(&self.dir)
    }

    /// Returns the device and inode of the socket in this directory.
    ///
    /// # Errors
    /// The error of the system.
    pub fn socket_id(&self) -> io::Result<(u64, u64)> {
        fs::metadata(self.dir.join(SOCKET)).map(|m| (m.dev(), m.ino()))
    }

    /// Removes the stores beside this one that no mount owns and no mount used for a week. Blocks.
    pub fn remove_idle(&self) {
        for other in fs::read_dir(&self.user_dir).into_iter().flatten().flatten().map(|e| e.path()) {
            // The id of the cache directory lies beside the stores.
            if other != self.dir && other.is_dir() && is_idle(&other, SystemTime::now()) {
                self.remove(&other);
            }
        }
    }

    fn remove(&self, other: &Path) {
        let shown = other.display();
        match remove(other) {
            Ok(true) => tracing::info!(dir = %shown, "removed a node store that no mount used for a week"),
            Ok(false) => {}
            Err(error) => tracing::warn!(
                dir = %shown, %error, "cannot remove a node store that no mount uses: remove it yourself"
            ),
        }
    }
}

/// Removes a store unless a mount holds its lock. Returns whether it did. Removes the lock file last, so that
/// a later owner finishes a removal that was cut short. A mount that takes the lock meanwhile finds the file
/// gone and starts again.
fn remove(store: &Path) -> io::Result<bool> {
    let path = store.join("lock");
    // Creates the lock file if an earlier removal took that alone.
    let mut open = OpenOptions::new();
    open.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let Ok(held) = Flock::lock(open.open(&path)?, FlockArg::LockExclusiveNonblock) else { return Ok(false) };
    let id = |m: fs::Metadata| (m.dev(), m.ino());
    if fs::metadata(&path).map(id)? != held.metadata().map(id)? {
        return Ok(false);
    }
    for entry in fs::read_dir(store)? {
        let entry = entry?;
        match (entry.file_name() == "lock", entry.file_type()?.is_dir()) {
            (true, _) => {}
            (false, true) => fs::remove_dir_all(entry.path())?,
            (false, false) => fs::remove_file(entry.path())?,
        }
    }
    fs::remove_file(&path)?;
    fs::remove_dir(store)?;
    Ok(true)
}

fn check(dir: &Path) -> Result<(), String> {
    let shown = dir.display();
    match fs::symlink_metadata(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(format!("{shown}: {e}")),
        Ok(m) if m.is_dir() && m.uid() == geteuid().as_raw() && m.mode() & 0o077 == 0 => Ok(()),
        Ok(_) => Err(format!(
            "{shown} is not a directory of this user alone (mode 0700): \
             remove it, or give another --cache-dir"
        )),
    }
}

/// Returns the path of the socket, through its open directory.
#[must_use]
pub fn socket_path(dir: &File) -> PathBuf {
    format!("/proc/self/fd/{}/{SOCKET}", dir.as_raw_fd()).into()
}

fn is_idle(store: &Path, now: SystemTime) -> bool {
    let at = |p: PathBuf| fs::metadata(p).and_then(|m| m.modified()).ok();
    // A new socket changes the directory, a new owner the lock, and a new chunk the slabs.
    let last = [at(store.to_owned()), at(store.join("lock")), at(store.join("slabs"))];
    let last = last.into_iter().flatten().max();
    last.is_some_and(|t| now.duration_since(t).is_ok_and(|d| d > IDLE_AFTER))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn make(dir: &Path) {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir.join("slabs")).expect("mkdir");
        fs::write(dir.join("lock"), "1\n").expect("lock");
    }

    #[test]
    fn check_refuses_a_directory_that_others_can_look_into() {
        let cache = tempfile::tempdir().expect("tempdir");
        let store = StoreDirectory::new(cache.path(), Hash::of(b"x"));
        store.check().expect("nothing is there yet");
        store.make().expect("both levels");
        store.make().expect("they are there");
        make(store.dir());
        store.check().expect("ours");
        store.open().expect("opens");
        fs::set_permissions(store.dir(), fs::Permissions::from_mode(0o750)).expect("chmod");
        assert!(store.check().expect_err("refused").contains("0700"));
        assert!(store.open().is_err());
        fs::remove_dir_all(store.dir()).expect("remove");
        std::os::unix::fs::symlink("/tmp", store.dir()).expect("symlink");
        assert!(store.check().is_err() && store.open().is_err(), "a link leads elsewhere");
        assert!(store.make().is_err(), "nor is anything made there");
    }

    #[test]
    fn make_creates_nothing_where_others_can_write() {
        let cache = tempfile::tempdir().expect("tempdir");
        let store = StoreDirectory::new(&cache.path().join("deep/cache"), Hash::of(b"x"));
        store.make().expect("all levels");
        let mode = |p: &Path| fs::metadata(p).expect("metadata").mode() & 0o777;
        assert_eq!((mode(&store.user_dir), mode(store.dir())), (0o700, 0o700));
        fs::remove_dir(store.dir()).expect("remove");
        fs::set_permissions(&store.user_dir, fs::Permissions::from_mode(0o777)).expect("chmod");
        assert!(store.make().expect_err("refused").contains("0700"));
        assert!(!store.dir().exists());
    }

    #[test]
    fn remove_idle_removes_only_unlocked_unused_stores() {
        let cache = tempfile::tempdir().expect("tempdir");
        let at = |n: &[u8]| StoreDirectory::new(cache.path(), Hash::of(n));
        let [own, fresh, idle, held, half] = [&b"own"[..], b"fresh", b"idle", b"held", b"half"].map(at);
        for store in [&own, &fresh, &idle, &held, &half] {
            make(store.dir());
            fs::write(store.dir().join("slabs/1"), "x").expect("a slab");
        }
        // As a removal leaves the store when its process dies.
        fs::remove_file(half.dir().join("lock")).expect("remove");
        let old = SystemTime::now() - IDLE_AFTER - Duration::from_secs(60);
        for store in [&own, &idle, &held, &half] {
            for p in [store.dir().join("lock"), store.dir().join("slabs"), store.dir().to_owned()] {
                if p.exists() {
                    File::open(p).expect("open").set_modified(old).expect("times");
                }
            }
        }
        let lock = File::open(held.dir().join("lock")).expect("open");
        let _lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock).expect("lock");
        let id = own.user_dir.join("id");
        fs::write(&id, "x").expect("an id");
        File::open(&id).expect("open").set_modified(old).expect("times");
        own.remove_idle();
        assert!(id.exists(), "no store");
        let there = [&own, &fresh, &idle, &held, &half].map(|p| p.dir().exists());
        assert_eq!(there, [true, true, false, true, false]);
        assert!(held.dir().join("slabs/1").exists(), "whole");
    }
}
