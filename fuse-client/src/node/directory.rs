//! Where the store of a node lies: a directory for each server and principal, of one user alone.
//!
//! ```text
//! <cache dir>/mounts-<uid>/<name>/   0700: lock, slabs/, catalogue (crates/store), node.sock (its owner)
//! ```
//! The socket is reached through an open descriptor of its directory: the path of a unix socket has room for 107
//! bytes, and that of a cache directory has no bound.

use fletch_core::Hash;
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

/// The socket's name.
const SOCKET: &str = "node.sock";
/// A store that nobody has used for so long is removed by who opens another: tokens are rotated, servers move.
const IDLE_AFTER: Duration = Duration::from_secs(7 * 86_400);

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreDirectory {
    all: PathBuf,
    dir: PathBuf,
}

impl StoreDirectory {
    /// The place of the store `name` below a cache directory. Makes nothing.
    #[must_use]
    pub fn new(cache_dir: &Path, name: Hash) -> Self {
        let all = cache_dir.join(format!("mounts-{}", geteuid()));
        let dir = all.join(&name.to_string()[..32]);
        StoreDirectory { all, dir }
    }

    /// The store's directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Makes the directory, for this user alone, and refuses it if somebody else made it otherwise.
    ///
    /// # Errors
    /// What is wrong with it, and what to do.
    pub fn make(&self) -> Result<(), String> {
        let fail = |dir: &Path, e: io::Error| format!("{}: {e}", dir.display());
        if let Some(cache) = self.all.parent() {
            let made = DirBuilder::new().recursive(true).mode(0o700).create(cache);
            made.map_err(|e| fail(cache, e))?;
        }
        for dir in [&self.all, &self.dir] {
            match DirBuilder::new().mode(0o700).create(dir) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(fail(dir, e)),
                _ => check(dir)?,
            }
        }
        Ok(())
    }

    /// Refuses a directory that others can look into or have made: what is read is theirs to see then. One that is
    /// not there is nobody's.
    ///
    /// # Errors
    /// What is wrong with it, and what to do.
    pub fn check(&self) -> Result<(), String> {
        [&self.all, &self.dir].into_iter().try_for_each(|dir| check(dir))
    }

    /// The directory, opened, so that its socket can be reached.
    ///
    /// # Errors
    /// What the system says.
    pub fn open(&self) -> io::Result<File> {
        self.check().map_err(io::Error::other)?;
        OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW).open(&self.dir)
    }

    /// Device and inode of the socket that lies there now.
    ///
    /// # Errors
    /// What the system says.
    pub fn socket_id(&self) -> io::Result<(u64, u64)> {
        fs::metadata(self.dir.join(SOCKET)).map(|m| (m.dev(), m.ino()))
    }

    /// Removes stores beside this one that nobody has and nobody used for a week. Blocks.
    pub fn remove_idle(&self) {
        for other in fs::read_dir(&self.all).into_iter().flatten().flatten().map(|e| e.path()) {
            if other != self.dir && is_idle(&other, SystemTime::now()) {
                self.remove(&other);
            }
        }
    }

    fn remove(&self, other: &Path) {
        let shown = other.display();
        match remove(other) {
            Ok(true) => tracing::info!(dir = %shown, "a store that nobody used for a week is removed"),
            Ok(false) => {}
            Err(error) => tracing::warn!(dir = %shown, %error, "a store that nobody uses cannot be removed"),
        }
    }
}

/// Removes a store, if nobody has its lock; its lock last, so that what is begun is done or done another time. Whoever
/// takes the lock meanwhile finds that it lies there no more, and begins anew.
fn remove(store: &Path) -> io::Result<bool> {
    let path = store.join("lock");
    // Made anew where it is all that somebody removed.
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
            "{shown} is not a directory of this user alone (mode 0700): remove it, or give another --cache-dir"
        )),
    }
}

/// The socket's path by way of its open directory.
#[must_use]
pub fn socket_path(dir: &File) -> PathBuf {
    format!("/proc/self/fd/{}/{SOCKET}", dir.as_raw_fd()).into()
}

fn is_idle(store: &Path, now: SystemTime) -> bool {
    let at = |p: PathBuf| fs::metadata(p).and_then(|m| m.modified()).ok();
    // The directory changes with the socket, the lock with each owner, the slabs with what is kept.
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
    fn a_directory_that_others_can_look_into_is_refused() {
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
    fn nothing_is_made_where_others_can_write() {
        let cache = tempfile::tempdir().expect("tempdir");
        let store = StoreDirectory::new(&cache.path().join("deep/cache"), Hash::of(b"x"));
        store.make().expect("all levels");
        let mode = |p: &Path| fs::metadata(p).expect("metadata").mode() & 0o777;
        assert_eq!((mode(&store.all), mode(store.dir())), (0o700, 0o700));
        fs::remove_dir(store.dir()).expect("remove");
        fs::set_permissions(&store.all, fs::Permissions::from_mode(0o777)).expect("chmod");
        assert!(store.make().expect_err("refused").contains("0700"));
        assert!(!store.dir().exists());
    }

    #[test]
    fn only_what_nobody_has_or_used_is_removed() {
        let cache = tempfile::tempdir().expect("tempdir");
        let at = |n: &[u8]| StoreDirectory::new(cache.path(), Hash::of(n));
        let [own, fresh, idle, held, half] = [&b"own"[..], b"fresh", b"idle", b"held", b"half"].map(at);
        for store in [&own, &fresh, &idle, &held, &half] {
            make(store.dir());
            fs::write(store.dir().join("slabs/1"), "x").expect("a slab");
        }
        // Somebody began to remove it, and died.
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
        own.remove_idle();
        let there = [&own, &fresh, &idle, &held, &half].map(|p| p.dir().exists());
        assert_eq!(there, [true, true, false, true, false]);
        assert!(held.dir().join("slabs/1").exists(), "whole");
    }
}
