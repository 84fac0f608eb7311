//! The cache directory and the state directory: on which file system, with how much space, used by whom.

use super::args::DoctorArgs;
use super::finding::Finding;
use super::fuse::below;
use super::maybe;
use crate::failure::Failure;
use crate::out::bytes;
use fletch_host::mounts::{self, MountEntry};
use fletch_settings::Amount;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

pub const CACHE_PLACE: &str = "cache-place";
pub const CACHE_SPACE: &str = "cache-space";
pub const STATE: &str = "state-dir";

/// The defaults of `cache.size` and `cache.free_floor`.
const SIZE: Amount = Amount::Percent(50);
const FREE_FLOOR: Amount = Amount::Percent(5);
/// A smaller cache hardly helps.
const ROOM_MIN: u64 = 1 << 30;

const OVERLAY: &[&str] = &["overlay", "aufs", "fuse.fuse-overlayfs"];
const MEMORY: &[&str] = &["tmpfs", "ramfs"];

/// What kind of place a file system is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Local,
    Network,
    Overlay,
    Memory,
}

impl Place {
    fn of(fs_type: &str) -> Self {
        if OVERLAY.contains(&fs_type) {
            Place::Overlay
        } else if MEMORY.contains(&fs_type) {
            Place::Memory
        } else if mounts::is_network(fs_type) {
            Place::Network
        } else {
            Place::Local
        }
    }
}

/// A directory, or the nearest one above it that exists.
#[derive(Debug, Clone)]
struct Dir {
    path: PathBuf,
    /// Whether the directory itself exists and has entries.
    in_use: bool,
    mount: Option<MountEntry>,
    /// Why nothing can be written there.
    unwritable: Option<String>,
    /// Bytes: of the whole file system, and those that this user may still use.
    space: Option<(u64, u64)>,
}

/// The process that has the lock of a state directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lock {
    Free,
    Held { pid: i64 },
}

#[derive(Debug, Clone)]
pub struct Facts {
    cache: Dir,
    size: Amount,
    floor: Amount,
    state: Dir,
    lock: Lock,
    /// Whether a server answered where the caller said, or where servers listen.
    server_answers: bool,
}

impl Facts {
    /// # Errors
    /// Neither a directory nor a home directory is given.
    pub fn gather(args: &DoctorArgs, server_answers: bool) -> Result<Self, Failure> {
        let root = nix::unistd::geteuid().is_root();
        let table = fs::read(args.root.join("proc/self/mountinfo")).unwrap_or_default();
        let lacks = |flag: &str| {
            Failure::usage("no home directory: neither HOME nor the XDG variables are set")
                .hint(format!("give {flag} DIR"))
        };
        let cache = args.cache_dir.clone().or_else(|| fletch_settings::cache_dir(root));
        let state = args.state_dir.clone().or_else(|| fletch_settings::state_dir(root));
        let cache = cache.ok_or_else(|| lacks("--cache-dir"))?;
        let state = state.ok_or_else(|| lacks("--state-dir"))?;
        let locks = fs::read_to_string(below(&args.root, Path::new("/proc/locks"))).unwrap_or_default();
        let lock = fs::metadata(state.join("lock")).ok().and_then(|m| holder(&locks, m.dev(), m.ino()));
        Ok(Facts {
            cache: Dir::look(&cache, &table),
            size: args.cache_size.unwrap_or(SIZE),
            floor: args.cache_free_floor.unwrap_or(FREE_FLOOR),
            state: Dir::look(&state, &table),
            lock: lock.map_or(Lock::Free, |pid| Lock::Held { pid }),
            server_answers,
        })
    }

    pub fn findings(&self) -> Vec<Finding> {
        if self.size.of(100) == 0 {
            return self.state_findings();
        }
        let cache = [self.place_finding(), self.space_finding()].into_iter().flat_map(maybe);
        cache.chain(self.state_findings()).collect()
    }

    fn place_finding(&self) -> Option<Finding> {
        let mount = self.cache.mount.as_ref()?;
        let dir = self.cache.path.display();
        let (why, severity): (_, fn(_, _, _) -> Finding) = match Place::of(&mount.fs_type) {
            Place::Local => return None,
            Place::Network => {
                ("a network file system: each read of the cache crosses the network", Finding::warning)
            }
            Place::Overlay => (
                "the overlay of a container: it is slow, and its content vanishes with the container",
                Finding::warning,
            ),
            Place::Memory => {
                ("memory: each chunk on the \"disk\" takes memory of the machine", Finding::warning)
            }
        };
        let what = format!("cache.dir {dir} is on {} ({}), {why}", mount.fs_type, mount.dir.display());
        Some(severity(
            CACHE_PLACE,
            what,
            "give a directory of a local disk: --cache-dir DIR, or a volume of the container".to_owned(),
        ))
    }

    fn space_finding(&self) -> Option<Finding> {
        let dir = self.cache.path.display();
        if let Some(why) = &self.cache.unwritable {
            let what = format!("cache.dir {dir} cannot be written: {why}");
            return Some(Finding::error(CACHE_SPACE, what, "give another one: --cache-dir DIR"));
        }
        let (whole, free) = self.cache.space?;
        let floor = self.floor.of(whole);
        let room = free.saturating_sub(floor);
        let fix = "free some space, lower --cache-free-floor, or give another --cache-dir";
        // A cache that is in use took its room already.
        if self.cache.in_use {
            return None;
        }
        if room == 0 {
            let what = format!(
                "cache.dir {dir} has {} free, and cache.free_floor {} keeps {} of that: nothing is cached",
                bytes(free),
                self.floor,
                bytes(floor)
            );
            return Some(Finding::error(CACHE_SPACE, what, fix));
        }
        let (size, told) = match self.size {
            Amount::Bytes(n) => (n, bytes(n)),
            Amount::Percent(_) => (self.size.of(room), format!("{} of the room", self.size)),
        };
        if size > room || size < ROOM_MIN {
            let what = format!("cache.size is {told}, and {dir} has room for {}", bytes(room));
            return Some(Finding::warning(CACHE_SPACE, what, fix));
        }
        None
    }

    fn state_findings(&self) -> Vec<Finding> {
        let dir = self.state.path.display();
        let mut found = Vec::new();
        if let Some(why) = &self.state.unwritable {
            let what = format!("state.dir {dir} cannot be written: {why}");
            found.push(Finding::error(STATE, what, "give another one: --state-dir DIR"));
        }
        if let Some(mount) = self.state.mount.as_ref().filter(|m| Place::of(&m.fs_type) == Place::Network) {
            let what = format!(
                "state.dir {dir} is on {}, a network file system: two machines' servers may open it at once",
                mount.fs_type
            );
            found.push(Finding::warning(STATE, what, "give each server a local one: --state-dir DIR"));
        }
        if let (Lock::Held { pid }, false) = (self.lock, self.server_answers) {
            let what = format!(
                "process {pid} uses state.dir {dir}, and no server answers here: a second server on it does \
                 not start"
            );
            let fix = format!("stop that server: kill {pid}; or give this one its own: --state-dir DIR");
            found.push(Finding::error(STATE, what, fix));
        }
        found
    }
}

impl Dir {
    fn look(path: &Path, table: &[u8]) -> Self {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let there = path.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
        let real = fs::canonicalize(there).unwrap_or_else(|_| there.to_owned());
        let space = nix::sys::statvfs::statvfs(&real).ok();
        Dir {
            in_use: there == path && fs::read_dir(&path).is_ok_and(|mut all| all.next().is_some()),
            mount: mounts::holding(table, &real),
            unwritable: unwritable(&real).err().map(|e| e.to_string()),
            space: space.map(|s| (s.blocks() * s.fragment_size(), s.blocks_available() * s.fragment_size())),
            path,
        }
    }
}

/// Returns the error of a program that creates something in the directory.
fn unwritable(dir: &Path) -> io::Result<()> {
    if !dir.is_dir() {
        return Err(io::Error::new(
            io::ErrorKind::NotADirectory,
            format!("{} is no directory", dir.display()),
        ));
    }
    let flags = nix::unistd::AccessFlags::W_OK | nix::unistd::AccessFlags::X_OK;
    Ok(nix::unistd::access(dir, flags)?)
}

/// Returns the process that holds a lock on the file, from the text of `/proc/locks`.
fn holder(locks: &str, device: u64, inode: u64) -> Option<i64> {
    let file = format!("{:02x}:{:02x}:{inode}", libc::major(device), libc::minor(device));
    locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        match fields[..] {
            // A process that waits for the lock has an arrow after the number.
            [_, "FLOCK" | "POSIX" | "OFDLCK", _, _, pid, id, ..] if id == file => pid.parse().ok(),
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::super::finding::Severity;
    use super::*;

    fn dir(path: &str, fs_type: &str) -> Dir {
        let mount =
            MountEntry { device: "8:1".into(), dir: "/".into(), fs_type: fs_type.into(), source: "s".into() };
        let space = Some((1000 << 30, 500 << 30));
        Dir { path: path.into(), in_use: false, mount: Some(mount), unwritable: None, space }
    }

    fn healthy() -> Facts {
        Facts {
            cache: dir("/var/cache/fletch", "ext4"),
            size: SIZE,
            floor: FREE_FLOOR,
            state: dir("/var/lib/fletch", "ext4"),
            lock: Lock::Free,
            server_answers: false,
        }
    }

    fn only(facts: &Facts) -> (&'static str, Severity) {
        let found = facts.findings();
        assert_eq!(found.len(), 1, "{found:?}");
        (found[0].check, found[0].severity)
    }

    #[test]
    fn the_cache_belongs_on_a_local_disk() {
        assert_eq!(healthy().findings(), []);
        for fs_type in ["nfs4", "overlay", "tmpfs", "fuse.sshfs", "cifs"] {
            let facts = Facts { cache: dir("/c", fs_type), ..healthy() };
            assert_eq!(only(&facts), (CACHE_PLACE, Severity::Warning), "{fs_type}");
            let none = Facts { size: Amount::Percent(0), ..facts };
            assert_eq!(none.findings(), [], "without a disk tier the place does not matter");
        }
        for fs_type in ["xfs", "btrfs", "zfs", "fuseblk"] {
            assert_eq!(Facts { cache: dir("/c", fs_type), ..healthy() }.findings(), [], "{fs_type}");
        }
    }

    #[test]
    fn the_cache_needs_room_above_its_floor() {
        let with = |space, size, floor, in_use| {
            let cache = Dir { space: Some(space), in_use, ..healthy().cache };
            Facts { cache, size, floor, ..healthy() }
        };
        let full = with((100 << 30, 4 << 30), SIZE, FREE_FLOOR, false);
        assert_eq!(only(&full), (CACHE_SPACE, Severity::Error));
        assert_eq!(
            with((100 << 30, 4 << 30), SIZE, FREE_FLOOR, true).findings(),
            [],
            "the cache has the rest"
        );
        let big = with((100 << 30, 50 << 30), Amount::Bytes(200 << 30), FREE_FLOOR, false);
        assert_eq!(only(&big), (CACHE_SPACE, Severity::Warning));
        let fixed = with((100 << 30, 4 << 30), SIZE, Amount::Bytes(1 << 30), false);
        assert_eq!(fixed.findings(), [], "the fix: a lower floor");
        let unwritable = Dir { unwritable: Some("read-only".into()), ..healthy().cache };
        assert_eq!(only(&Facts { cache: unwritable, ..healthy() }), (CACHE_SPACE, Severity::Error));
    }

    #[test]
    fn a_state_directory_has_one_server() {
        let held = Facts { lock: Lock::Held { pid: 7 }, ..healthy() };
        assert_eq!(only(&held), (STATE, Severity::Error));
        assert!(held.findings()[0].fix.contains("kill 7"));
        assert_eq!(Facts { server_answers: true, ..held }.findings(), [], "it is the server that runs here");
        assert_eq!(only(&Facts { state: dir("/s", "nfs"), ..healthy() }), (STATE, Severity::Warning));
    }

    #[test]
    fn the_kernel_names_the_process_that_holds_a_lock() {
        let state = tempfile::tempdir().expect("tempdir");
        let path = state.path().join("lock");
        let file = fs::File::create(&path).expect("lock");
        let meta = fs::metadata(&path).expect("meta");
        let locks = || fs::read_to_string("/proc/locks").expect("/proc/locks");
        assert_eq!(holder(&locks(), meta.dev(), meta.ino()), None);
        let lock = nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusiveNonblock).expect("free");
        let own = i64::from(std::process::id());
        assert_eq!(holder(&locks(), meta.dev(), meta.ino()), Some(own), "{}", locks());
        drop(lock);
        let waits = format!("1: -> FLOCK  ADVISORY  WRITE 9 08:01:{} 0 EOF\n", meta.ino());
        assert_eq!(holder(&waits, libc::makedev(8, 1), meta.ino()), None);
    }
}
