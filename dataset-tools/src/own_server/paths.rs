//! Where a user's own server keeps its files, on this machine.
//!
//! Home directories are shared by several machines, so the state and the cache are kept by machine id. The
//! socket is in a directory that only its user can enter.

use crate::failure::{Exit, Failure};
use fletch_client::server_choice::{own_dir, own_socket};
use fletch_core::Hash;
use fletch_host::mounts;
use fletch_host::usage::HostUsage;
use std::fs::{self, DirBuilder};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// The longest path of a unix socket, in bytes.
const SOCKET_PATH_BYTES_MAX: usize = 107;
/// The smallest cache that a server accepts. A smaller one is none.
const CACHE_BYTES_MIN: u64 = 16 << 20;

/// What the paths depend on.
#[derive(Debug, Clone)]
pub struct Environment {
    /// The user.
    pub uid: u32,
    /// `XDG_RUNTIME_DIR`.
    pub runtime: Option<PathBuf>,
    /// The state directory of this user's commands.
    pub state: Option<PathBuf>,
    /// The cache directory of this user's commands.
    pub cache: Option<PathBuf>,
    /// The id of this machine.
    pub machine: String,
}

/// The files and directories of a user's own server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnPaths {
    /// The user.
    pub uid: u32,
    /// The directory of the socket and of the lock.
    pub dir: PathBuf,
    pub socket: PathBuf,
    /// The state directory of the server on this machine.
    pub state: PathBuf,
    /// The cache directory of the server on this machine.
    pub cache: PathBuf,
}

impl Environment {
    /// Returns the environment of this process.
    #[must_use]
    pub fn of_process() -> Self {
        let directory = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
        let euid = nix::unistd::geteuid();
        let root = euid.is_root();
        Environment {
            uid: euid.as_raw(),
            runtime: directory("XDG_RUNTIME_DIR"),
            state: directory("FLETCH_STATE_DIR").or_else(|| fletch_settings::state_dir(root)),
            cache: directory("FLETCH_CACHE_DIR").or_else(|| fletch_settings::cache_dir(root)),
            machine: machine_id(),
        }
    }
}

/// Returns the id of this machine: `FLETCH_MACHINE_ID`, else that of the system, else the host's name.
fn machine_id() -> String {
    let file = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let given = std::env::var("FLETCH_MACHINE_ID").ok();
    let all = [given, file("/etc/machine-id"), file("/proc/sys/kernel/hostname")];
    let id = all.into_iter().flatten().find(|id| !id.is_empty()).unwrap_or_else(|| "this-machine".to_owned());
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if id.len() <= 64 && id.chars().all(is_plain) {
        return id;
    }
    Hash::of(id.as_bytes()).to_string()[..32].to_owned()
}

impl OwnPaths {
    /// Returns the paths. Creates nothing.
    ///
    /// # Errors
    /// There is no home directory, or the path of the socket is too long for a socket.
    pub fn of(from: &Environment) -> Result<Self, Failure> {
        let lacks = |flag: &str| {
            Failure::usage("neither HOME nor the XDG variables are set")
                .hint(format!("set HOME, or {flag} to a directory that you may write"))
        };
        let dir = own_dir(from.runtime.as_deref(), from.uid);
        let socket = own_socket(&dir);
        let length = socket.as_os_str().as_bytes().len();
        if length > SOCKET_PATH_BYTES_MAX {
            return Err(Failure::new(format!(
                "the path of your server's socket, {}, has {length} bytes, and a socket takes {}",
                socket.display(),
                SOCKET_PATH_BYTES_MAX
            ))
            .hint("set XDG_RUNTIME_DIR to a directory with a shorter path"));
        }
        let machine = |base: &Path| base.join("machines").join(&from.machine);
        let state = from.state.as_deref().ok_or_else(|| lacks("FLETCH_STATE_DIR"))?;
        let cache = from.cache.as_deref().ok_or_else(|| lacks("FLETCH_CACHE_DIR"))?;
        let cache = if is_network(cache) {
            PathBuf::from(format!("/var/tmp/fletch-{}/cache", from.uid)).join(&from.machine)
        } else {
            machine(cache)
        };
        Ok(OwnPaths { uid: from.uid, dir, socket, state: machine(state), cache })
    }

    /// Returns the paths for this process.
    ///
    /// # Errors
    /// As [`OwnPaths::of`].
    pub fn of_process() -> Result<Self, Failure> {
        OwnPaths::of(&Environment::of_process())
    }

    /// Returns the log of the server.
    #[must_use]
    pub fn server_log(&self) -> PathBuf {
        self.state.join("server.log")
    }

    /// Returns the log of the mounts.
    #[must_use]
    pub fn mount_log(&self) -> PathBuf {
        self.state.join("mount.log")
    }

    /// Returns the directory for the versions of the datasets that a command indexes.
    #[must_use]
    pub fn tables(&self) -> PathBuf {
        self.state.join("tables")
    }

    /// Returns the free bytes of the disk that the state is or will be on, if they can be read.
    #[must_use]
    pub fn state_free(&self) -> Option<u64> {
        let existing = self.state.ancestors().find(|dir| dir.exists())?;
        HostUsage::of_process(existing).state_free
    }

    /// Creates the directory of the socket and of the records, and checks that nobody else can use it.
    ///
    /// # Errors
    /// It cannot be created, or it is a link or another user's.
    pub fn create_dir(&self) -> Result<(), Failure> {
        private(&self.dir, self.uid)
    }

    /// Creates all directories.
    ///
    /// # Errors
    /// As [`OwnPaths::create_dir`], or another directory cannot be created.
    pub fn create(&self) -> Result<(), Failure> {
        self.create_dir()?;
        if let Some(dir) = self.cache.ancestors().find(|dir| is_below_shared(dir)) {
            private(dir, self.uid)?;
        }
        for dir in [&self.state, &self.cache] {
            let cannot = |e| {
                Failure::io(format_args!("cannot create {}", dir.display()), &e).hint(
                    "set HOME to a directory of yours, or FLETCH_STATE_DIR and FLETCH_CACHE_DIR to \
                     directories that you may write",
                )
            };
            DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(cannot)?;
        }
        Ok(())
    }

    /// Returns the size of the cache: a tenth of what is free, or what an older cache occupies of that.
    #[must_use]
    pub fn cache_bytes(&self) -> u64 {
        let free = nix::sys::statvfs::statvfs(&self.cache)
            .map(|s| s.blocks_available().saturating_mul(s.fragment_size()));
        let tenth = free.unwrap_or(0).saturating_add(occupied(&self.cache)) / 10;
        if tenth < CACHE_BYTES_MIN { 0 } else { tenth }
    }
}

/// Whether a directory is one that this program makes below a directory of all users.
fn is_below_shared(dir: &Path) -> bool {
    dir.parent() == Some(Path::new("/var/tmp"))
}

/// Creates a directory that only its user may enter, or checks the one that exists.
fn private(dir: &Path, uid: u32) -> Result<(), Failure> {
    let shown = dir.display();
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(Failure::io(format_args!("cannot create {shown}"), &e)
                .hint("set XDG_RUNTIME_DIR to a directory of yours"));
        }
        Err(_) | Ok(()) => {}
    }
    let cannot = |e| Failure::io(format_args!("cannot use {shown}"), &e);
    let meta = fs::symlink_metadata(dir).map_err(cannot)?;
    let why = if meta.is_symlink() {
        "it is a link"
    } else if !meta.is_dir() {
        "it is no directory"
    } else if meta.uid() != uid {
        "it belongs to another user"
    } else {
        if meta.mode() & 0o077 != 0 {
            fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).map_err(cannot)?;
        }
        return Ok(());
    };
    Err(Failure::new(format!("{shown} cannot hold your server's socket: {why}; nothing was started there"))
        .hint("remove it, or set XDG_RUNTIME_DIR to a directory of yours")
        .exit(Exit::Denied))
}

/// Whether a path, or the nearest directory above it that exists, is on a network file system.
fn is_network(path: &Path) -> bool {
    let Ok(table) = fs::read("/proc/self/mountinfo") else { return false };
    let real = path.ancestors().find_map(|dir| fs::canonicalize(dir).ok());
    let mount = real.and_then(|real| mounts::holding(&table, &real));
    mount.is_some_and(|mount| mounts::is_network(&mount.fs_type))
}

/// Returns the bytes that the files of a directory occupy.
fn occupied(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => occupied(&entry.path()),
        Ok(meta) => meta.blocks().saturating_mul(512),
        Err(_) => 0,
    };
    entries.flatten().map(size).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(home: &Path, machine: &str) -> Environment {
        Environment {
            uid: nix::unistd::geteuid().as_raw(),
            runtime: None,
            state: Some(home.join("state")),
            cache: Some(home.join("cache")),
            machine: machine.into(),
        }
    }

    #[test]
    fn two_machines_share_a_home_and_two_users_share_nothing() {
        let home = tempfile::tempdir().expect("tempdir");
        let a = OwnPaths::of(&environment(home.path(), "a")).expect("paths");
        let b = OwnPaths::of(&environment(home.path(), "b")).expect("paths");
        assert_eq!(a.state, home.path().join("state/machines/a"));
        assert!(a.state != b.state && a.cache != b.cache, "{a:?} {b:?}");
        let other = Environment { uid: 12345, ..environment(home.path(), "a") };
        let other = OwnPaths::of(&other).expect("paths");
        assert_eq!(other.dir, Path::new("/tmp/fletch-12345"));
        assert_ne!(other.socket, a.socket);
    }

    #[test]
    fn a_socket_has_a_path_that_a_socket_can_have() {
        let home = tempfile::tempdir().expect("tempdir");
        let deep = home.path().join("d".repeat(100));
        fs::create_dir(&deep).expect("mkdir");
        let from = Environment { runtime: Some(deep), ..environment(home.path(), "a") };
        let failure = OwnPaths::of(&from).expect_err("too long").to_string();
        assert!(failure.contains("XDG_RUNTIME_DIR") && failure.contains("107"), "{failure}");
    }

    #[test]
    fn the_directory_of_the_socket_is_private() {
        let home = tempfile::tempdir().expect("tempdir");
        let uid = nix::unistd::geteuid().as_raw();
        let dir = home.path().join("run");
        private(&dir, uid).expect("created");
        assert_eq!(fs::metadata(&dir).expect("made").mode() & 0o777, 0o700);
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).expect("chmod");
        private(&dir, uid).expect("narrowed");
        assert_eq!(fs::metadata(&dir).expect("made").mode() & 0o777, 0o700);
        let link = home.path().join("link");
        std::os::unix::fs::symlink(&dir, &link).expect("symlink");
        assert!(private(&link, uid).expect_err("a link").what.contains("it is a link"));
        assert!(private(&dir, uid + 1).expect_err("another user").what.contains("another user"));
        let file = home.path().join("file");
        fs::write(&file, "").expect("write");
        assert!(private(&file, uid).expect_err("a file").what.contains("no directory"));
    }

    #[test]
    fn the_cache_takes_a_tenth_of_the_free_space() {
        let home = tempfile::tempdir().expect("tempdir");
        let paths = OwnPaths::of(&environment(home.path(), "a")).expect("paths");
        assert_eq!(paths.cache_bytes(), 0, "no directory yet");
        fs::create_dir_all(&paths.cache).expect("mkdir");
        let free = nix::sys::statvfs::statvfs(&paths.cache).expect("statvfs");
        let free = free.blocks_available() * free.fragment_size();
        assert!(paths.cache_bytes() <= free / 9, "{} of {free}", paths.cache_bytes());
    }
}
