//! File descriptors: raises the process's own limit, and fits the limits of connections into it.

use crate::app::{limits::Limits, server::StartError};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::io;

/// Raises the soft limit to the hard one. Returns the limits, with fewer connections if they need more.
///
/// # Errors
/// If the process may open too few files to serve at all.
pub(super) fn fit(limits: Limits) -> Result<Limits, StartError> {
    let failed = |error: io::Error| StartError::Io {
        what: "set the limit of open files".to_owned(),
        error,
        hint: "raise it: `ulimit -n 65536`, or LimitNOFILE=65536 in a systemd unit",
    };
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).map_err(|e| failed(e.into()))?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard).map_err(|e| failed(e.into()))?;
    }
    let fitted = limits.fit_descriptors(hard).ok_or_else(|| {
        let need = limits.descriptors_besides_connections();
        failed(io::Error::other(format!("the process may open {hard} files, and needs more than {need}")))
    })?;
    if fitted != limits {
        tracing::warn!(
            files = hard,
            configured = limits.connections,
            used = fitted.connections,
            configured_socket = limits.socket_connections,
            used_socket = fitted.socket_connections,
            "the process may open too few files for limits.connections, which is lowered; raise its limit of \
                open files (`ulimit -n`, LimitNOFILE)"
        );
    }
    Ok(fitted)
}
