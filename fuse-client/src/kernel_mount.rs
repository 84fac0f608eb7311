//! Mounts a FUSE file system, and hands out its device.
//!
//! Root mounts with mount(2). Another user asks `fusermount3`, which sends the device over a socket.

use crate::passed_device;
use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    mount::{MsFlags, mount},
    sys::socket::{AddressFamily, SockFlag, SockType, socketpair},
    unistd::{getgid, getuid},
};
use std::{
    fs::{self, OpenOptions},
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    process::{Command, Stdio},
};

const DEVICE: &str = "/dev/fuse";
/// The program that mounts for users without privileges.
const FUSERMOUNT: &str = "fusermount3";
/// The environment variable in which it finds the number of its socket.
const SOCKET_VARIABLE: &str = "_FUSE_COMMFD";
/// The root's type and permissions until the kernel has asked for them. Those of the directory below may be
/// none, and a process that takes over can make the kernel drop the first answer ([`ask_first`]).
const ROOT_MODE: u32 = libc::S_IFDIR | 0o555;
/// What the mount table shows as the type, after `fuse.`.
const SUBTYPE: &str = "fletch";

/// Mounts at `dir`, under the name `source` of the mount table, read-only. Returns the device from which the
/// kernel's requests are read.
///
/// # Errors
/// The error of the kernel, or what `fusermount3` says.
pub fn open(dir: &Path, source: &str, allow_other: bool) -> io::Result<OwnedFd> {
    let dir = dir.canonicalize()?;
    match by_system_call(&dir, source, allow_other) {
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => by_helper(&dir, source, allow_other),
        mounted => mounted,
    }
}

/// Asks a new mount for the attributes of its root, before anything makes the kernel forget them. Blocks
/// until somebody serves the mount.
///
/// `fusermount3` gives the root no permissions until then. If a program asks while nothing serves the mount,
/// and the next process first makes the kernel forget attributes, then the kernel takes the answer for an old
/// one: the program would get EACCES. Root mounts with [`ROOT_MODE`], and needs no such question.
pub fn ask_first(dir: &Path) {
    if let Err(error) = fs::metadata(dir) {
        tracing::debug!(%error, "the mount does not answer for its root");
    }
}

fn by_system_call(dir: &Path, source: &str, allow_other: bool) -> io::Result<OwnedFd> {
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
    mount(Some(source), dir, Some("fuse"), flags, Some(options.as_str()))?;
    Ok(device)
}

fn by_helper(dir: &Path, source: &str, allow_other: bool) -> io::Result<OwnedFd> {
    let mut options =
        format!("ro,noatime,nosuid,nodev,default_permissions,fsname={source},subtype={SUBTYPE}");
    if allow_other {
        options.push_str(",allow_other");
    }
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC)?;
    // The helper inherits its end.
    fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty()))?;
    let child = Command::new(FUSERMOUNT)
        .args(["-o", &options, "--"])
        .arg(dir)
        .env(SOCKET_VARIABLE, theirs.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| io::Error::new(e.kind(), format!("{FUSERMOUNT}: {e}")))?;
    drop(theirs);
    let (_, device) = passed_device::receive(&ours, &mut [0])?;
    // It ends by itself once the device is taken.
    let ended = child.wait_with_output()?;
    device.ok_or_else(|| {
        let said = String::from_utf8_lossy(&ended.stderr).trim().to_owned();
        let kind = match said.contains("user_allow_other") {
            true => io::ErrorKind::PermissionDenied,
            false => io::ErrorKind::Other,
        };
        io::Error::new(kind, said)
    })
}
