//! What a process tells systemd, as sd_notify(3) describes: that its mounts are usable, and that it lives.

use std::{
    env,
    ffi::OsStr,
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
};

/// The mounts are usable.
pub(crate) const READY: &str = "READY=1";
/// The process lives.
pub(crate) const ALIVE: &str = "WATCHDOG=1";

/// Tells the service manager that started this process about its state. Does nothing if none did, or if it
/// does not listen.
pub(crate) fn tell(state: &str) {
    if let Err(error) = try_tell(state) {
        tracing::debug!(%error, state, "the service manager does not listen");
    }
}

fn try_tell(state: &str) -> io::Result<()> {
    let Some(path) = env::var_os("NOTIFY_SOCKET") else { return Ok(()) };
    let address = match path.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(OsStr::from_bytes(path.as_bytes()))?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address)?;
    Ok(())
}
