//! The socket of a keeper for many processes. Only processes of the keeper's own user may use it.

use anyhow::{Context, Result, bail};
use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept4, bind, connect, getsockopt, listen,
        socket, sockopt,
    },
    unistd::geteuid,
};
use std::{
    fs::{self, DirBuilder, Permissions},
    io,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    },
    path::Path,
    time::Duration,
};

const CONNECTIONS_WAITING_MAX: i32 = 64;
/// The pause after a failed accept.
pub(super) const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Listens at a path. Creates its directory if necessary, and replaces a socket that nobody listens at.
pub(super) fn listen_at(path: &Path) -> Result<OwnedFd> {
    let shown = path.display();
    let address = UnixAddr::new(path).with_context(|| format!("{shown}: at most 107 bytes"))?;
    if let Some(parent) = path.parent() {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(parent);
        made.with_context(|| format!("cannot create {}", parent.display()))?;
    }
    let new = || socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None);
    match connect(new()?.as_raw_fd(), &address) {
        Ok(()) => bail!("{shown} is the socket of another keeper: end that one first"),
        Err(Errno::ECONNREFUSED) => {
            fs::remove_file(path).with_context(|| format!("cannot remove {shown}"))?;
        }
        Err(_) => {}
    }
    let listener = new()?;
    bind(listener.as_raw_fd(), &address).with_context(|| format!("cannot listen at {shown}"))?;
    // Nobody can connect before it listens.
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    listen(&listener, Backlog::new(CONNECTIONS_WAITING_MAX)?)?;
    Ok(listener)
}

/// Returns the next connection.
#[expect(unsafe_code, reason = "nix returns the number of the new descriptor")]
pub(super) fn accept(listener: &OwnedFd) -> io::Result<OwnedFd> {
    let number = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC)?;
    // SAFETY: the system made the descriptor for this process just now.
    let socket = unsafe { OwnedFd::from_raw_fd(number) };
    let uid = getsockopt(&socket, sockopt::PeerCredentials)?.uid();
    if uid == geteuid().as_raw() {
        Ok(socket)
    } else {
        Err(io::Error::other(format!("user {uid} may not use this keeper")))
    }
}
