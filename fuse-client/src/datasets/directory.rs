//! The directory with a link for each dataset: a small file system of its own, in memory.
//!
//! ```text
//! DIR/NAME          link to .versions/ROOT, the version that the tag `latest` names
//! DIR/NAME@TAG      link to .versions/ROOT, the version that another tag names
//! DIR/.versions/ROOT    a mount of that version
//! ```
//!
//! 1. While nothing is mounted at DIR, the directory below has mode 0000 and the file [`NOT_MOUNTED`]. So has
//!    each directory of a version. A reader gets an error or that file, never an empty dataset.
//! 2. A link is replaced in one step, so a reader finds the old version or the new one.
//! 3. One process has the lock of DIR, and its keeper shares it. The kernel releases it when both have ended,
//!    however they end.

use crate::keeper::Keeper;
use crate::mount_dir::real_path;
use crate::unmount;
use anyhow::{Context, Result, anyhow, bail};
use fletch_core::Root;
use fletch_host::mounts::{self, Health};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    mount::{MsFlags, mount},
};
use parking_lot::Mutex;
use std::{
    fs::{self, File, Permissions},
    io::{self, Write as _},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, symlink},
    },
    path::{Path, PathBuf},
    time::Duration,
};

/// The file that takes the place of datasets while nothing is mounted.
pub const NOT_MOUNTED: &str = "NOT-MOUNTED";
/// What the file says.
const NOT_MOUNTED_TEXT: &str =
    "The datasets are not mounted here now: start `fletch-mount --datasets` for this directory again.\n";
/// The directory with a mount for each version.
const VERSIONS: &str = ".versions";
/// The name of a link until it takes its place.
const NEW_LINK: &str = ".new-link";
/// The source of the file system in the mount table.
pub const SOURCE: &str = "fletch-datasets";
/// The file system holds links and directories only, which have no pages.
const OPTIONS: &str = "size=4m,nr_inodes=65536,mode=0700";
/// The mode of the directory while datasets are shown, while they are not, and while nothing is mounted.
const MODE_SHOWN: u32 = 0o755;
const MODE_HIDDEN: u32 = 0o700;
const MODE_CLOSED: u32 = 0o000;
/// The most dead mounts that are detached. Each crash leaves one.
const DEAD_MOUNTS_MAX: usize = 64;
/// How long a mount may take to say that it lives.
const HEALTH_WITHIN: Duration = Duration::from_secs(2);

/// The directory while its file system is mounted.
pub struct DatasetsDir {
    dir: PathBuf,
    device: String,
    /// Released before the unmount: an open file keeps the file system busy.
    lock: Mutex<Option<Flock<File>>>,
    is_taken_over: bool,
}

impl DatasetsDir {
    /// Opens the directory. With a keeper that holds the lock of the file system there, this process takes
    /// over the file system. Else it mounts one that shows nothing yet, as [`DatasetsDir::create`]. Blocks.
    ///
    /// # Errors
    /// What is wrong with the directory, and what to do.
    pub fn open(dir: &Path, keeper: Option<&Keeper>) -> Result<Self> {
        let Some(keeper) = keeper else { return DatasetsDir::create(dir) };
        if let Some(held) = keeper.held().context("asking the keeper of the mounts")?
            && let Some(opened) = DatasetsDir::take_over(dir, held)?
        {
            return Ok(opened);
        }
        let opened = DatasetsDir::create(dir)?;
        if let Some(lock) = &*opened.lock.lock() {
            keeper.hold(&**lock).context("asking the keeper of the mounts")?;
        }
        Ok(opened)
    }

    /// Takes over the file system whose locked directory `held` is; `None` if it is not at `dir` any more.
    fn take_over(dir: &Path, held: OwnedFd) -> Result<Option<Self>> {
        let dir = real_path(dir)?;
        let file = File::from(held);
        let is_there = {
            let (there, held) = (fs::metadata(&dir), file.metadata());
            there.is_ok_and(|there| {
                held.is_ok_and(|held| (there.dev(), there.ino()) == (held.dev(), held.ino()))
            })
        };
        let entry = mounts::at(&dir).context("cannot read the mount table")?;
        let (true, Some(entry)) = (is_there, entry) else { return Ok(None) };
        // This process shares the lock with the one before it.
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock);
        let lock = lock.map_err(|(_, e)| anyhow!(io::Error::from(e)).context("the lock was lost"))?;
        Ok(Some(DatasetsDir { dir, device: entry.device, lock: Mutex::new(Some(lock)), is_taken_over: true }))
    }

    /// Detaches what a dead process left at `dir`, closes the directory, and mounts a file system there.
    fn create(dir: &Path) -> Result<Self> {
        let dir = closed(dir)?;
        match (mount_links(&dir), Keeper::of_many()) {
            (Err(e), Some(keeper)) if e.raw_os_error() == Some(libc::EPERM) => keeper.mount_links(&dir),
            (mounted, _) => mounted,
        }
        .map_err(|e| explain(e, &dir))?;
        let device = match mounts::at(&dir).context("cannot read the mount table")? {
            Some(entry) => entry.device,
            None => bail!("another program unmounted {} at once: start again", dir.display()),
        };
        let Some(lock) = lock(&dir)? else {
            bail!("{} was taken by another fletch-mount at the same moment", dir.display())
        };
        // Dropped after an error, this value detaches the file system.
        let opened = DatasetsDir { dir, device, lock: Mutex::new(Some(lock)), is_taken_over: false };
        opened.hide()?;
        let versions = opened.dir.join(VERSIONS);
        fs::create_dir(&versions).with_context(|| format!("cannot create {}", versions.display()))?;
        opened.set_mode(&versions, MODE_SHOWN)?;
        Ok(opened)
    }

    /// Returns the path of the directory, without links.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Returns whether an earlier process made the file system.
    #[must_use]
    pub fn is_taken_over(&self) -> bool {
        self.is_taken_over
    }

    /// Returns the links and the versions that they lead to.
    ///
    /// # Errors
    /// The file system is gone.
    pub fn links(&self) -> Result<Vec<(String, Root)>> {
        let mut links = Vec::new();
        let cannot = || format!("cannot read {}", self.dir.display());
        for entry in fs::read_dir(&self.dir).with_context(cannot)? {
            let entry = entry.with_context(cannot)?;
            // Other entries are no links.
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            let root = target.file_name().and_then(|name| name.to_str()?.parse().ok());
            if let (Ok(name), Some(root)) = (entry.file_name().into_string(), root) {
                links.push((name, root));
            }
        }
        Ok(links)
    }

    /// Returns whether the file system is still mounted.
    ///
    /// # Errors
    /// The mount table cannot be read.
    pub fn is_mounted(&self) -> Result<bool> {
        let top = mounts::at(&self.dir).context("cannot read the mount table")?;
        Ok(top.is_some_and(|entry| entry.device == self.device))
    }

    /// Shows the links to every user.
    ///
    /// # Errors
    /// The file system is gone.
    pub fn show(&self) -> Result<()> {
        let file = self.dir.join(NOT_MOUNTED);
        match fs::remove_file(&file) {
            // An earlier process showed the links.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            removed => removed.with_context(|| format!("cannot delete {}", file.display()))?,
        }
        self.set_mode(&self.dir, MODE_SHOWN)
    }

    /// Closes the directory: no user but root can list it, and it has the file [`NOT_MOUNTED`].
    ///
    /// # Errors
    /// The file system is gone.
    pub fn hide(&self) -> Result<()> {
        let file = self.dir.join(NOT_MOUNTED);
        fs::write(&file, NOT_MOUNTED_TEXT).with_context(|| format!("cannot write {}", file.display()))?;
        self.set_mode(&self.dir, MODE_HIDDEN)
    }

    fn set_mode(&self, path: &Path, mode: u32) -> Result<()> {
        let set = fs::set_permissions(path, Permissions::from_mode(mode));
        set.with_context(|| format!("cannot set the mode of {}", path.display()))
    }

    /// Returns the directory of a version. Creates it, closed, if it does not exist.
    ///
    /// # Errors
    /// The file system is gone or full.
    pub fn make_version_dir(&self, root: Root) -> Result<PathBuf> {
        let dir = self.version_dir(root);
        let made = match fs::create_dir(&dir) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(dir),
            made => made.and_then(|()| File::create(dir.join(NOT_MOUNTED)).map(drop)),
        };
        made.with_context(|| format!("cannot create {}", dir.display()))?;
        self.set_mode(&dir, MODE_CLOSED)?;
        Ok(dir)
    }

    /// Returns the path of the directory with a mount for each version.
    #[must_use]
    pub fn versions(&self) -> PathBuf {
        self.dir.join(VERSIONS)
    }

    /// Returns the path of the directory of a version.
    #[must_use]
    pub fn version_dir(&self, root: Root) -> PathBuf {
        self.dir.join(VERSIONS).join(root.to_string())
    }

    /// Removes the directory of a version that is not mounted.
    ///
    /// # Errors
    /// The directory is mounted.
    pub fn remove_version_dir(&self, root: Root) -> io::Result<()> {
        let dir = self.version_dir(root);
        // A process without privileges cannot look into a closed directory, though it owns it.
        fs::set_permissions(&dir, Permissions::from_mode(MODE_HIDDEN))?;
        fs::remove_file(dir.join(NOT_MOUNTED))?;
        fs::remove_dir(dir)
    }

    /// Makes the link `name` lead to a version, in one step.
    ///
    /// # Errors
    /// The file system is gone or full.
    pub fn set_link(&self, name: &str, root: Root) -> io::Result<()> {
        let new = self.dir.join(VERSIONS).join(NEW_LINK);
        match fs::remove_file(&new) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        symlink(format!("{VERSIONS}/{root}"), &new)?;
        fs::rename(&new, self.dir.join(name))
    }

    /// Removes the link `name`.
    ///
    /// # Errors
    /// The file system is gone.
    pub fn remove_link(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.dir.join(name))
    }

    /// Lets go of the file system, which its keeper has for the next process.
    pub fn leave(&self) {
        // Dropped, it would be unlocked for the keeper, too.
        std::mem::forget(self.lock.lock().take());
    }

    /// Unmounts the file system, or detaches it with everything below it. Then the closed directory is there
    /// again. Blocks.
    ///
    /// # Errors
    /// The kernel does not even detach the file system.
    pub fn close(&self) -> Result<()> {
        drop(self.lock.lock().take());
        let shown = self.dir.display();
        if self.is_mounted()? {
            let refused = |why| anyhow!("cannot unmount {shown}: {why}; as root, run: umount -l {shown}");
            unmount::attempt(&self.dir, false).or_else(|_| unmount::detach(&self.dir)).map_err(refused)?;
        }
        close_dir(&self.dir)
    }
}

impl Drop for DatasetsDir {
    fn drop(&mut self) {
        let dir = self.dir.display();
        if Keeper::of_many().is_some() {
            self.leave();
            return;
        }
        match self.is_mounted() {
            Ok(false) => {}
            Ok(true) => {
                if let Err(why) = unmount::detach(&self.dir) {
                    tracing::error!(%dir, why, "cannot detach the directory: run umount -l");
                }
            }
            Err(error) => tracing::error!(%dir, error = format!("{error:#}"), "the directory stays mounted"),
        }
    }
}

/// Mounts a file system in memory at `dir`, for links.
///
/// # Errors
/// The error of the kernel.
pub fn mount_links(dir: &Path) -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    Ok(mount(Some(SOURCE), dir, Some("tmpfs"), flags, Some(OPTIONS))?)
}

fn explain(e: io::Error, dir: &Path) -> anyhow::Error {
    let shown = dir.display();
    let what = match e.kind() {
        io::ErrorKind::PermissionDenied => "--datasets mounts a file system of its own: run it as root",
        _ => "cannot mount a file system in memory",
    };
    anyhow!(e).context(format!("{shown}: {what}"))
}

/// Returns the lock of the file system at `dir`; `None` if another process has it.
fn lock(dir: &Path) -> Result<Option<Flock<File>>> {
    let file = File::open(dir).with_context(|| format!("cannot open {}", dir.display()))?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, e)) => Err(io::Error::from(e)).with_context(|| format!("cannot lock {}", dir.display())),
    }
}

/// Returns `dir` without links, once nothing of Fletch is mounted there and the directory is closed.
fn closed(dir: &Path) -> Result<PathBuf> {
    if fs::symlink_metadata(dir).is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
        fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    let real = real_path(dir)?;
    let shown = real.display();
    for _ in 0..DEAD_MOUNTS_MAX {
        let Some(entry) = mounts::at(&real).context("cannot read the mount table")? else { break };
        let is_ours = entry.fs_type == "tmpfs" && entry.source == SOURCE;
        if is_ours && lock(&real)?.is_none() {
            bail!("{shown} is served by another fletch-mount: end that process first");
        }
        if !is_ours {
            let Some(dataset) = entry.dataset() else { break };
            if mounts::health(&real, HEALTH_WITHIN) != Health::Dead {
                bail!("{shown} is a mount of {dataset}: unmount it first, or give another directory");
            }
        }
        let why =
            |why| anyhow!("{shown} is a dead mount and cannot be detached: {why}; run: umount -l {shown}");
        unmount::detach(&real).map_err(why)?;
        tracing::warn!(dir = %shown, "detached what a dead fletch-mount left: mounting anew");
    }
    close_dir(&real)?;
    Ok(real)
}

/// Makes a directory that is not mounted unreadable, with one file that says why.
///
/// The directory may be in another user's hand, who swaps names: each step goes through its open descriptor,
/// follows no link and changes no file that was there before.
fn close_dir(dir: &Path) -> Result<()> {
    let shown = dir.display();
    let open = open_closed(dir).with_context(|| format!("cannot open {shown}"))?;
    let here = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
    for entry in fs::read_dir(&here).with_context(|| format!("cannot read {shown}"))? {
        let name = entry.with_context(|| format!("cannot read {shown}"))?.file_name();
        if name != NOT_MOUNTED {
            bail!("{shown} is not empty: it holds {}; give an empty directory", name.display());
        }
    }
    let file = here.join(NOT_MOUNTED);
    let write = || -> io::Result<()> {
        if !says_why(&file) {
            match fs::remove_file(&file) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
            let mut made = File::options().write(true).create_new(true).mode(0o444).open(&file)?;
            made.write_all(NOT_MOUNTED_TEXT.as_bytes())?;
        }
        open.set_permissions(Permissions::from_mode(MODE_CLOSED))
    };
    write().with_context(|| format!("cannot close {shown}"))
}

/// Opens a directory of this user, also a closed one, and no link.
fn open_closed(dir: &Path) -> io::Result<File> {
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
    let open = || File::options().read(true).custom_flags(flags).open(dir);
    match open() {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            let found = File::options().read(true).custom_flags(flags | libc::O_PATH).open(dir)?;
            let here = PathBuf::from(format!("/proc/self/fd/{}", found.as_raw_fd()));
            fs::set_permissions(here, Permissions::from_mode(MODE_HIDDEN))?;
            open()
        }
        opened => opened,
    }
}

/// Whether the file of a closed directory is there. A link or a pipe is none, and is not opened.
fn says_why(file: &Path) -> bool {
    let open = || -> io::Result<bool> {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = File::options().read(true).custom_flags(flags).open(file)?;
        let is_ours = file.metadata().is_ok_and(|m| m.is_file() && m.len() == NOT_MOUNTED_TEXT.len() as u64);
        Ok(is_ours && io::read_to_string(file)? == NOT_MOUNTED_TEXT)
    };
    open().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_directory_says_why_and_foreign_files_are_left_alone() {
        let top = tempfile::tempdir().expect("tempdir");
        let dir = top.path().join("datasets");
        fs::create_dir(&dir).expect("mkdir");
        let mode = || fs::metadata(&dir).expect("exists").permissions().mode() & 0o777;
        for _ in 0..2 {
            close_dir(&dir).expect("closed");
            assert_eq!(mode(), 0);
            fs::set_permissions(&dir, Permissions::from_mode(0o700)).expect("chmod");
            let text = fs::read_to_string(dir.join(NOT_MOUNTED)).expect("the file");
            assert!(text.contains("fletch-mount --datasets"), "{text}");
        }
        fs::write(dir.join("data"), "of somebody").expect("write");
        let refused = format!("{:#}", close_dir(&dir).expect_err("foreign"));
        assert!(refused.contains("not empty") && refused.contains("data"), "{refused}");
        assert_eq!(mode(), 0o700);
    }

    #[test]
    fn what_others_put_in_the_place_of_the_file_changes_nothing_elsewhere() {
        let top = tempfile::tempdir().expect("tempdir");
        let (dir, precious) = (top.path().join("datasets"), top.path().join("precious"));
        fs::create_dir(&dir).expect("mkdir");
        fs::write(&precious, "precious").expect("write");
        let file = dir.join(NOT_MOUNTED);
        let mode = nix::sys::stat::Mode::from_bits_truncate(0o600);
        let kinds: [(&str, &dyn Fn()); 4] = [
            ("a link", &|| symlink(&precious, &file).expect("symlink")),
            ("a link to nothing", &|| symlink(top.path().join("new"), &file).expect("symlink")),
            ("a name of a file", &|| fs::hard_link(&precious, &file).expect("link")),
            ("a pipe", &|| nix::unistd::mkfifo(&file, mode).expect("mkfifo")),
        ];
        for (what, make) in kinds {
            make();
            close_dir(&dir).expect(what);
            assert!(says_why(&file), "{what}");
            assert_eq!(fs::read_to_string(&precious).expect("readable"), "precious", "{what}");
            assert!(!top.path().join("new").exists(), "{what}");
            let mode = fs::metadata(&precious).expect("there").permissions().mode() & 0o777;
            assert_ne!(mode, 0o444, "{what}");
            fs::set_permissions(&dir, Permissions::from_mode(0o700)).expect("chmod");
            fs::remove_file(&file).expect("removed");
        }
        let link = top.path().join("link");
        symlink(&dir, &link).expect("symlink");
        assert!(close_dir(&link).is_err(), "the directory became a link");
        assert_eq!(fs::metadata(&dir).expect("there").permissions().mode() & 0o777, 0o700);
    }
}
