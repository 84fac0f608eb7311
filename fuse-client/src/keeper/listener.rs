//! The socket of a keeper for many processes. Only processes of the keeper's own user may use it.

use super::event_loop::HoldSettings;
use super::watch::{Watch, Watched};
use anyhow::{Context, Result, bail};
use nix::sys::epoll::EpollFlags;
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
    rc::Rc,
    thread,
    time::Duration,
};

const CONNECTIONS_WAITING_MAX: i32 = 64;
/// The pause after a failed accept.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(20);

/// The socket.
pub(super) struct Listener {
    pub settings: HoldSettings,
    pub socket: Watched<OwnedFd>,
}

impl Listener {
    pub fn new(settings: HoldSettings, watch: &Rc<Watch>) -> Result<Self> {
        let socket = watch.add(listen_at(&settings.socket)?, EpollFlags::EPOLLIN)?;
        let (at, below) = (settings.socket.display(), settings.below.display());
        tracing::info!(socket = %at, %below, "holding mounts");
        Ok(Listener { settings, socket })
    }

    /// Returns the next connection, unless it has to be refused.
    pub fn accept(&self, watch: &Rc<Watch>) -> Option<Watched<OwnedFd>> {
        let accepted = accept(&self.socket.descriptor);
        match accepted.and_then(|socket| watch.add(socket, EpollFlags::EPOLLIN)) {
            Ok(socket) => Some(socket),
            Err(error) => {
                tracing::warn!(%error, "a process was refused");
                // Without a descriptor the same connection waits again at once.
                thread::sleep(ACCEPT_RETRY_PAUSE);
                None
            }
        }
    }

    /// Nobody connects any more.
    pub fn close(&self) -> Result<()> {
        fs::remove_file(&self.settings.socket).context("removing the socket")
    }
}

/// Listens at a path. Creates its directory if necessary, and replaces a socket that nobody listens at.
fn listen_at(path: &Path) -> Result<OwnedFd> {
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
fn accept(listener: &OwnedFd) -> io::Result<OwnedFd> {
    let number = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC)?;
    // SAFETY: the system made the descriptor for this process just now.
    let socket = unsafe { OwnedFd::from_raw_fd(number) };
    let uid = getsockopt(&socket, sockopt::PeerCredentials)?.uid();
    match uid == geteuid().as_raw() {
        true => Ok(socket),
        false => Err(io::Error::other(format!("user {uid} may not use this keeper"))),
    }
}
