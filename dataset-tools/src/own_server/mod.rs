//! A user's own server: where its files are, how it is started and stopped, and the mounts of this user.
//!
//! 1. Nothing is sent to a server at the own socket that runs as another user, unless that user is root.
//! 2. Two commands at once start one server: the start holds a lock.
//! 3. The server inherits no setting and no secret from the terminal that starts it.

pub mod paths;
pub mod records;
pub mod start;

pub use paths::OwnPaths;

use std::path::{Path, PathBuf};

/// Returns the path of a program of Fletch: beside this one, else on the search path.
#[must_use]
pub fn program(name: &str) -> Option<PathBuf> {
    let here = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join(name)));
    here.filter(|path| path.is_file()).or_else(|| on_path(name))
}

fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|path| path.is_file())
}

/// Returns what keeps a server alive after a logout, if a logout would end it: the name of this user.
///
/// systemd removes the directory of the socket with the user's last session, unless the user lingers.
#[must_use]
pub fn ends_with_the_session(paths: &OwnPaths) -> Option<String> {
    let of_session = paths.dir.starts_with("/run/user") && Path::new("/run/systemd/system").is_dir();
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(paths.uid)).ok().flatten()?.name;
    let lingers = Path::new("/var/lib/systemd/linger").join(&user).exists();
    (of_session && !lingers).then_some(user)
}
