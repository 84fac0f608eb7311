//! Which server is asked: the one that was named, else the user's own, else the one of the machine.
//!
//! 1. A socket in the user's own directory counts only if its server runs as that user or as root. Nothing is
//!    sent to another user's server there.
//! 2. A socket file on which no process listens counts as absent.

use crate::{BadEndpoint, Endpoint, Servers};
use std::{
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};
use tokio::net::UnixStream;

/// The socket of a server for all users of a machine: the default of a `fletch-server` that root starts.
pub const SYSTEM_SOCKET: &str = "/run/fletch/server.sock";
/// The name of the socket in the directory of [`own_dir`].
const OWN_SOCKET: &str = "server.sock";

/// A server, or several of a cluster, and why they are asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerChoice {
    /// They were named, by `--server` or `FLETCH_SERVER`.
    Named(Servers),
    /// It is the user's own server.
    Own(Servers),
    /// It is the server for all users of this machine.
    System(Servers),
}

impl ServerChoice {
    /// Returns the addresses.
    #[must_use]
    pub fn servers(&self) -> &Servers {
        match self {
            ServerChoice::Named(at) | ServerChoice::Own(at) | ServerChoice::System(at) => at,
        }
    }

    /// Returns whether the server is the user's own.
    #[must_use]
    pub fn is_own(&self) -> bool {
        matches!(self, ServerChoice::Own(_))
    }

    /// Returns whether the server was named.
    #[must_use]
    pub fn is_named(&self) -> bool {
        matches!(self, ServerChoice::Named(_))
    }
}

/// Why no server can be chosen.
#[derive(Debug, thiserror::Error)]
pub enum ServerChoiceError {
    /// The named server has no valid address.
    #[error(transparent)]
    Bad(#[from] BadEndpoint),
    /// Another user's process listens on the socket in this user's directory.
    #[error(
        "the server at {} runs as user {uid}, not as you: nothing was sent to it; remove that file, or name \
         another server with --server or FLETCH_SERVER", socket.display()
    )]
    Stranger {
        /// The socket.
        socket: PathBuf,
        /// The user of the process that listens there.
        uid: u32,
    },
    /// Other users can change what is in the directory of the socket.
    #[error(
        "other users can replace the socket {}, because its directory is not yours alone: nothing was sent \
         to it; remove that directory, or set XDG_RUNTIME_DIR to one of yours", socket.display()
    )]
    OpenDirectory {
        /// The socket.
        socket: PathBuf,
    },
    /// The socket cannot be used.
    #[error("cannot connect to {}: {error}; name a server with --server or FLETCH_SERVER", socket.display())]
    Socket {
        /// The socket.
        socket: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
}

/// The process that listens on a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketPeer {
    /// Its user.
    pub uid: u32,
    /// Its id, if it is a process of this namespace.
    pub pid: Option<i32>,
}

/// Returns the directory of a user's own server: `$XDG_RUNTIME_DIR/fletch`, else `/tmp/fletch-UID`.
///
/// `runtime` counts only if it is the absolute path of a directory of that user.
#[must_use]
pub fn own_dir(runtime: Option<&Path>, uid: u32) -> PathBuf {
    let is_own = |dir: &&Path| {
        dir.is_absolute() && std::fs::metadata(dir).is_ok_and(|meta| meta.is_dir() && meta.uid() == uid)
    };
    match runtime.filter(is_own) {
        Some(dir) => dir.join("fletch"),
        None => PathBuf::from(format!("/tmp/fletch-{uid}")),
    }
}

/// Returns the socket in the directory of a user's own server.
#[must_use]
pub fn own_socket(dir: &Path) -> PathBuf {
    dir.join(OWN_SOCKET)
}

/// Returns the process that listens on a socket. `None` if none does, or the file does not exist.
///
/// # Errors
/// The socket cannot be used.
pub async fn listener_of(socket: &Path) -> io::Result<Option<SocketPeer>> {
    let stream = match UnixStream::connect(socket).await {
        Ok(stream) => stream,
        Err(e) => {
            return match e.kind() {
                // Reset: the process was killed a moment ago.
                io::ErrorKind::NotFound
                | io::ErrorKind::ConnectionRefused
                | io::ErrorKind::ConnectionReset => Ok(None),
                _ => Err(e),
            };
        }
    };
    let peer = stream.peer_cred()?;
    Ok(Some(SocketPeer { uid: peer.uid(), pid: peer.pid() }))
}

/// Returns the process of a user's own server; `None` if it does not run.
///
/// # Errors
/// [`ServerChoiceError::Stranger`] if the process is neither the user's nor root's;
/// [`ServerChoiceError::OpenDirectory`] if other users can replace the socket; or the socket cannot be used.
pub async fn own_listener(socket: &Path, uid: u32) -> Result<Option<SocketPeer>, ServerChoiceError> {
    let peer = listener_of(socket).await;
    let peer = peer.map_err(|error| ServerChoiceError::Socket { socket: socket.to_owned(), error })?;
    match peer {
        Some(peer) if peer.uid != uid && peer.uid != 0 => {
            Err(ServerChoiceError::Stranger { socket: socket.to_owned(), uid: peer.uid })
        }
        // The caller connects once more. Between the two connections nobody else may replace the socket.
        Some(_) if !is_kept(socket, uid) => {
            Err(ServerChoiceError::OpenDirectory { socket: socket.to_owned() })
        }
        peer => Ok(peer),
    }
}

/// Returns whether only a user and root can change what is in the directory of a socket.
fn is_kept(socket: &Path, uid: u32) -> bool {
    let meta = socket.parent().and_then(|dir| std::fs::symlink_metadata(dir).ok());
    meta.is_some_and(|m| m.is_dir() && (m.uid() == uid || m.uid() == 0) && m.mode() & 0o022 == 0)
}

/// Chooses the server: `named`, else the one at the socket `own`, else the one of the machine.
///
/// # Errors
/// [`ServerChoiceError`].
pub async fn choose(
    named: Option<&str>,
    own: &Path,
    uid: u32,
) -> Result<Option<ServerChoice>, ServerChoiceError> {
    if let Some(named) = named {
        let servers: Servers = named.parse()?;
        let is_own = *servers.first() == Endpoint::Unix(own.to_owned());
        if is_own && own_listener(own, uid).await?.is_some() {
            return Ok(Some(ServerChoice::Own(servers)));
        }
        return Ok(Some(ServerChoice::Named(servers)));
    }
    if own_listener(own, uid).await?.is_some() {
        return Ok(Some(ServerChoice::Own(Endpoint::Unix(own.to_owned()).into())));
    }
    let system = Path::new(SYSTEM_SOCKET);
    // A socket that this user may not use is as good as none.
    match listener_of(system).await {
        Ok(Some(_)) => Ok(Some(ServerChoice::System(Endpoint::Unix(system.to_owned()).into()))),
        Ok(None) | Err(_) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn own_uid() -> u32 {
        std::fs::metadata("/proc/self").expect("proc").uid()
    }

    #[tokio::test]
    async fn a_named_server_comes_first_then_the_own_one() {
        let dir = tempfile::tempdir().expect("tempdir");
        let own = own_socket(dir.path());
        let named = choose(Some("http://127.0.0.1:1"), &own, own_uid()).await.expect("chosen");
        assert!(named.is_some_and(|c| c.is_named()));
        assert!(choose(Some("nonsense"), &own, own_uid()).await.is_err());
        let absent = choose(None, &own, own_uid()).await.expect("chosen");
        assert!(absent.is_none_or(|c| !c.is_own()), "no socket yet");
        let listener = UnixListener::bind(&own).expect("bind");
        let found = choose(None, &own, own_uid()).await.expect("chosen").expect("a server");
        assert!(found.is_own() && found.servers().is_unix());
        let by_name = format!("unix:{}", own.display());
        let found = choose(Some(&by_name), &own, own_uid()).await.expect("chosen").expect("a server");
        assert!(found.is_own(), "the own server under its name");
        drop(listener);
        assert_eq!(listener_of(&own).await.expect("usable"), None, "a stale socket is no server");
    }

    #[tokio::test]
    async fn a_stranger_s_socket_is_an_error() {
        let dir = tempfile::tempdir().expect("tempdir");
        let own = own_socket(dir.path());
        let _listener = UnixListener::bind(&own).expect("bind");
        // This test's process is the stranger of another user, unless it is root.
        let other = own_uid() + 1;
        match own_listener(&own, other).await {
            Ok(Some(peer)) => assert_eq!(peer.uid, 0, "root's server serves everybody"),
            Err(e @ ServerChoiceError::Stranger { .. }) => {
                assert!(e.to_string().contains("nothing was sent"), "{e}");
            }
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_socket_that_others_can_replace_is_an_error() {
        use std::os::unix::fs::{PermissionsExt as _, symlink};
        let dir = tempfile::tempdir().expect("tempdir");
        let own = own_socket(dir.path());
        let _listener = UnixListener::bind(&own).expect("bind");
        assert!(own_listener(&own, own_uid()).await.expect("kept").is_some());
        let link = dir.path().join("link");
        symlink(dir.path(), &link).expect("symlink");
        let through = own_listener(&own_socket(&link), own_uid()).await;
        assert!(matches!(through, Err(ServerChoiceError::OpenDirectory { .. })), "{through:?}");
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).expect("chmod");
        let open = own_listener(&own, own_uid()).await;
        assert!(matches!(open, Err(ServerChoiceError::OpenDirectory { .. })), "{open:?}");
    }

    #[test]
    fn the_own_directory_is_in_the_runtime_directory_of_that_user() {
        let dir = tempfile::tempdir().expect("tempdir");
        assert_eq!(own_dir(Some(dir.path()), own_uid()), dir.path().join("fletch"));
        let other = PathBuf::from(format!("/tmp/fletch-{}", own_uid() + 1));
        assert_eq!(own_dir(Some(dir.path()), own_uid() + 1), other, "another user's directory");
        assert_eq!(own_dir(Some(Path::new("run")), 7), Path::new("/tmp/fletch-7"));
        assert_eq!(own_dir(None, 7), Path::new("/tmp/fletch-7"));
    }
}
