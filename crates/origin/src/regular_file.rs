//! Opening of regular files, for objects of local origins, uploads and credentials.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Opens a regular file for reading and returns its metadata. Never waits, whatever `path` is.
///
/// # Errors
/// The error of the system; `NotFound` for a directory, which is no object in a store either; `InvalidInput`
/// for everything else that is not a regular file.
pub fn open_regular(path: &Path) -> io::Result<(File, Metadata)> {
    // O_NOCTTY: opening a terminal must not make it ours.
    let flags = libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY;
    let file =
        OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|e| match e.raw_os_error() {
            // Sockets and devices without a driver.
            Some(libc::ENXIO | libc::ENODEV) => not_regular(),
            _ => e,
        })?;
    let meta = file.metadata()?;
    match meta.file_type() {
        kind if kind.is_file() => Ok((file, meta)),
        kind if kind.is_dir() => Err(io::Error::new(io::ErrorKind::NotFound, "a directory, not a file")),
        _ => Err(not_regular()),
    }
}

/// Returns the error for a path that is not a regular file.
pub fn not_regular() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")
}
