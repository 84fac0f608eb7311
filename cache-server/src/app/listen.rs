//! The unix socket: bound over a stale file, never over one that somebody listens on.

use crate::server::StartError;
use std::{
    io,
    os::unix::{
        fs::{FileTypeExt as _, PermissionsExt as _},
        net::{UnixListener as StdListener, UnixStream},
    },
    path::{Path, PathBuf},
};
use tokio::net::UnixListener;

/// Owner and group may ask; on a node shared by others, put readers in the group.
const MODE: u32 = 0o660;

/// A bound socket file, removed when dropped.
pub struct Socket {
    path: PathBuf,
    listener: StdListener,
}

impl Socket {
    /// Binds it, making its directory if need be.
    pub fn bind(path: PathBuf) -> Result<Self, StartError> {
        let shown = path.clone();
        let failed = move |error| StartError::Io {
            what: format!("socket {}", shown.display()),
            error,
            hint: "give another path with --socket, or `--socket none`",
        };
        let bind = || -> Result<StdListener, io::Error> {
            if let Some(dir) = path.parent() {
                std::fs::create_dir_all(dir)?;
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

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// For accepting; `None` when the runtime refuses it, which is logged.
    pub fn listener(&self) -> Option<UnixListener> {
        let listener = self.listener.try_clone().and_then(UnixListener::from_std);
        listener.inspect_err(|e| tracing::error!(error = %e, "the socket cannot be listened on")).ok()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Err(e) = std::fs::remove_file(&self.path) {
            tracing::warn!(socket = %self.path.display(), error = %e, "the socket file stays");
        }
    }
}

/// Removes a socket file that nobody listens on.
fn remove_stale(path: &Path) -> Result<(), StartError> {
    let failed = |error| StartError::Io {
        what: format!("socket {}", path.display()),
        error,
        hint: "remove the file, or give another path with --socket",
    };
    if !std::fs::symlink_metadata(path).map_err(failed)?.file_type().is_socket() {
        return Err(failed(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "a file that is no socket is there",
        )));
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
        assert!(matches!(Socket::bind(path.clone()), Err(StartError::SocketInUse(_))));
        drop(first);
        assert!(!path.exists());
        // What a killed server leaves.
        drop(StdListener::bind(&path).expect("bind"));
        assert!(path.exists());
        drop(Socket::bind(path.clone()).expect("stale"));
        std::fs::write(&path, "precious").expect("write");
        let told = Socket::bind(path.clone()).err().expect("no socket").to_string();
        assert!(told.contains("no socket") && path.exists(), "{told}");
    }
}
