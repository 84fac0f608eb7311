//! `fusermount3`, which mounts and unmounts FUSE file systems for users without privileges. It sends the
//! device over a socket.

use crate::kernel_mount::SUBTYPE;
use crate::passed_device;
use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    sys::socket::{AddressFamily, SockFlag, SockType, socketpair},
};
use std::{
    fs, io,
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    process::{Command, Stdio},
};

const PROGRAM: &str = "fusermount3";
/// The environment variable in which it finds the number of its socket.
const SOCKET_VARIABLE: &str = "_FUSE_COMMFD";

/// Mounts as [`crate::kernel_mount::mount_fuse`].
///
/// # Errors
/// What the program says.
pub(crate) fn mount(dir: &Path, source: &str, allow_other: bool) -> io::Result<OwnedFd> {
    let mut options =
        format!("ro,noatime,nosuid,nodev,default_permissions,fsname={source},subtype={SUBTYPE}");
    if allow_other {
        options.push_str(",allow_other");
    }
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC)?;
    // The helper inherits its end.
    fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty()))?;
    let child = Command::new(PROGRAM)
        .args(["-o", &options, "--"])
        .arg(dir)
        .env(SOCKET_VARIABLE, theirs.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| io::Error::new(e.kind(), format!("{PROGRAM}: {e}")))?;
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

/// Asks a new mount for the attributes of its root, before anything makes the kernel forget them. Blocks
/// until somebody serves the mount.
///
/// The program gives the root no permissions until then. If somebody asks while nothing serves the mount,
/// and the next process first makes the kernel forget attributes, the kernel takes the answer for an old one,
/// and whoever asked would get EACCES.
pub(crate) fn ask_first(dir: &Path) {
    if let Err(error) = fs::metadata(dir) {
        tracing::debug!(%error, "the mount does not answer for its root");
    }
}

/// Unmounts a directory, or detaches it.
///
/// # Errors
/// What the program says.
pub(crate) fn unmount(dir: &Path, detach: bool) -> Result<(), String> {
    let out = Command::new(PROGRAM)
        .args(if detach { &["-u", "-z"][..] } else { &["-u"][..] })
        .arg("--")
        .arg(dir)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("{PROGRAM}: {e}"))?;
    if out.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&out.stderr).trim().to_owned())
}
