//! Binds the listeners: TCP ports, and the unix socket. The socket replaces a stale socket file, but never
//! one on which a process listens.

use crate::app::server::StartError;
use std::{
    io,
    net::{SocketAddr, TcpListener as StdTcpListener},
    os::unix::{
        fs::{FileTypeExt as _, PermissionsExt as _},
        net::{UnixListener as StdListener, UnixStream},
    },
    path::{Path, PathBuf},
};
use tokio::net::{TcpListener, UnixListener};

/// The owner and the group may connect. On a shared node, put readers in the group.
const MODE: u32 = 0o660;
/// The mode of a directory that is created for the socket.
const DIR_MODE: u32 = 0o755;

/// A bound TCP port, on which connections wait until they are accepted.
pub struct BoundTcp {
    /// Its address, with the port that it got.
    pub addr: SocketAddr,
    listener: StdTcpListener,
}

impl BoundTcp {
    /// Binds an address. Port 0 takes a free one.
    pub fn bind(addr: SocketAddr) -> Result<Self, StartError> {
        let failed = |error| StartError::Io {
            what: format!("listen on {addr}"),
            error,
            hint: "stop the process that listens there, or give another address with --listen or \
                --s3-listen (port 0 takes a free one, none takes no port)",
        };
        let listener = StdTcpListener::bind(addr).map_err(failed)?;
        Ok(BoundTcp { addr: listener.local_addr().map_err(failed)?, listener })
    }

    /// Returns the listener.
    pub fn listener(self) -> Result<TcpListener, StartError> {
        let listener =
            self.listener.set_nonblocking(true).and_then(|()| TcpListener::from_std(self.listener));
        listener.map_err(|error| StartError::Io {
            what: format!("listen on {}", self.addr),
            error,
            hint: "see the system's log",
        })
    }
}

/// A bound socket file, removed when dropped.
pub struct Socket {
    path: PathBuf,
    listener: StdListener,
}

impl Socket {
    /// Binds the socket. Creates its directory if it does not exist.
    pub fn bind(path: PathBuf) -> Result<Self, StartError> {
        let shown = path.clone();
        let failed = move |error| StartError::Io {
            what: format!("bind the socket {}", shown.display()),
            error,
            hint: "give another path with --socket, or `--socket none`",
        };
        let bind = || -> Result<StdListener, io::Error> {
            if let Some(dir) = path.parent() {
                create_dir(dir)?;
            }
            let listener = StdListener::bind(&path)?;
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(MODE))?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        };
        let listener = match bind() {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                remove_stale(&path)?;
                bind().map_err(failed)?
            }
            bound => bound.map_err(failed)?,
        };
        Ok(Socket { path, listener })
    }

    /// Returns the path of the socket file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the listener, or `None` and a log line if the runtime rejects it.
    pub fn listener(&self) -> Option<UnixListener> {
        let listener = self.listener.try_clone().and_then(UnixListener::from_std);
        listener.inspect_err(|e| tracing::error!(error = %e, "cannot listen on the unix socket")).ok()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Err(e) = std::fs::remove_file(&self.path) {
            tracing::warn!(socket = %self.path.display(), error = %e, "cannot remove the socket file");
        }
    }
}

/// Creates the directory of the socket, through which every user may pass: the mode of the socket decides.
fn create_dir(dir: &Path) -> io::Result<()> {
    if dir.as_os_str().is_empty() || std::fs::exists(dir)? {
        return Ok(());
    }
    dir.parent().map_or(Ok(()), create_dir)?;
    match std::fs::create_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(e),
        // The umask of the process would shut others out.
        Ok(()) => std::fs::set_permissions(dir, std::fs::Permissions::from_mode(DIR_MODE)),
    }
}

/// Removes a socket file on which no process listens.
fn remove_stale(path: &Path) -> Result<(), StartError> {
    let failed = |error| StartError::Io {
        what: format!("replace the socket {}", path.display()),
        error,
        hint: "remove the file, or give another path with --socket",
    };
    if !std::fs::symlink_metadata(path).map_err(failed)?.file_type().is_socket() {
        return Err(failed(io::Error::new(io::ErrorKind::AlreadyExists, "the file there is not a socket")));
    }
    match UnixStream::connect(path) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path).map_err(failed),
        _ => Err(StartError::SocketInUse(path.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("sub/s.sock");
        let first = Socket::bind(path.clone()).expect("free");
        assert_eq!(std::fs::metadata(&path).expect("file").permissions().mode() & 0o777, MODE);
        let above = std::fs::metadata(dir.path().join("sub")).expect("directory");
        assert_eq!(above.permissions().mode() & 0o777, DIR_MODE);
        assert!(matches!(Socket::bind(path.clone()), Err(StartError::SocketInUse(_))));
        drop(first);
        assert!(!path.exists());
        // A killed server leaves its socket file.
        drop(StdListener::bind(&path).expect("bind"));
        assert!(path.exists());
        drop(Socket::bind(path.clone()).expect("stale"));
        std::fs::write(&path, "precious").expect("write");
        let told = Socket::bind(path.clone()).err().expect("no socket").to_string();
        assert!(told.contains("not a socket") && path.exists(), "{told}");
    }
}
