//! Mounts FUSE file systems and unmounts with system calls, which needs privileges. A keeper does so for
//! processes without.

use nix::{
    errno::Errno,
    fcntl::{OFlag, open},
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::stat::Mode,
    unistd::{getgid, getuid},
};
use std::{
    fs::{self, OpenOptions},
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

const DEVICE: &str = "/dev/fuse";
/// The root's type and permissions until the kernel has asked for them. Those of the directory below may be
/// none, and a process that takes over can make the kernel drop the first answer.
const ROOT_MODE: u32 = libc::S_IFDIR | 0o555;
/// What the mount table shows as the type, after `fuse.`.
pub(crate) const SUBTYPE: &str = "fletch";

/// Mounts at `dir`, a path without links, under the name `source` of the mount table, read-only. Returns the
/// device from which the kernel's requests are read.
///
/// # Errors
/// The error of the kernel.
pub(crate) fn mount_fuse(dir: &Path, source: &str, allow_other: bool) -> io::Result<OwnedFd> {
    let (_open, at) = pinned(dir)?;
    let device = OwnedFd::from(OpenOptions::new().read(true).write(true).open(DEVICE)?);
    let mut options = format!(
        "fd={},rootmode={ROOT_MODE:o},user_id={},group_id={},default_permissions,subtype={SUBTYPE}",
        device.as_raw_fd(),
        getuid(),
        getgid()
    );
    if allow_other {
        options.push_str(",allow_other");
    }
    let flags = MsFlags::MS_RDONLY | MsFlags::MS_NOATIME | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some(source), &at, Some("fuse"), flags, Some(options.as_str()))?;
    Ok(device)
}

/// Opens a directory, and returns a path to it that leads there also if somebody else moves it or puts a link
/// in its place.
///
/// # Errors
/// It is not there, or `dir` is a path with links.
pub(crate) fn pinned(dir: &Path) -> io::Result<(OwnedFd, PathBuf)> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let open = open(dir, flags, Mode::empty())?;
    let at = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
    if fs::read_link(&at)? != dir {
        return Err(io::Error::other(format!("{} has links on its way", dir.display())));
    }
    Ok((open, at))
}

/// Unmounts a directory, or detaches it. Nothing may be mounted there.
///
/// # Errors
/// The error of the kernel.
pub(crate) fn umount(dir: &Path, detach: bool) -> io::Result<()> {
    let lazy = if detach { MntFlags::MNT_DETACH } else { MntFlags::empty() };
    match umount2(dir, lazy | MntFlags::UMOUNT_NOFOLLOW) {
        Ok(()) | Err(Errno::EINVAL) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_path_with_links_is_not_used() {
        let top = tempfile::tempdir().expect("tempdir");
        let top = top.path().canonicalize().expect("real");
        fs::create_dir_all(top.join("a/b")).expect("mkdir");
        fs::write(top.join("a/file"), "").expect("write");
        symlink("a", top.join("link")).expect("symlink");
        let (_open, at) = pinned(&top.join("a/b")).expect("a directory");
        fs::write(at.join("here"), "").expect("write");
        // Another directory has its name by now.
        fs::rename(top.join("a/b"), top.join("a/c")).expect("rename");
        fs::create_dir(top.join("a/b")).expect("mkdir");
        fs::write(at.join("there"), "").expect("write");
        assert!(top.join("a/c/here").exists() && top.join("a/c/there").exists());
        for path in ["link", "link/b", "a/file", "a/none", "a/../a"] {
            assert!(pinned(&top.join(path)).is_err(), "{path}");
        }
    }
}
