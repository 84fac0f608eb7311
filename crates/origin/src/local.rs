//! Directories of this machine, by `std::fs` (blocking: called on blocking threads).
//!
//! 1. Nothing here waits for another process: files are opened without blocking, and what is
//!    not a regular file is refused, so that a FIFO or device in a hostile tree cannot hang us.
//! 2. A link in the tree is followed: whoever reads hashes the bytes. `..` never gets here.
//! 3. Where files are confined, a file is checked once it is open, by where it really is: no link
//!    can be moved between the check and the use.
//! 4. A write is made under a temporary name, synced, then given its name, then the directory is
//!    synced.

use crate::OriginError;
use crate::origin::{Got, ObjectMeta, Pin, PutMode};
use bytes::Bytes;
use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io::{self, Read, Seek as _, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

mod walk;
mod within;
pub(crate) use walk::list;
pub use within::MayRead;
pub(crate) use within::Within;

/// Temporary files of writes begin with this; listings leave them out.
pub const TEMPORARY: &str = ".fletch-tmp-";

/// The pin of a local file in this state: size, modification time, and as etag
/// `"{inode:x}-{change time in ns:x}"`, which no ordinary program can set back.
#[must_use]
pub fn pin_of(meta: &Metadata) -> Pin {
    let ns = |s: i64, ns: i64| s.saturating_mul(1_000_000_000).saturating_add(ns);
    Pin {
        size: meta.len(),
        mtime_ns: Some(ns(meta.mtime(), meta.mtime_nsec())),
        etag: Some(format!("{:x}-{:x}", meta.ino(), ns(meta.ctime(), meta.ctime_nsec()))),
    }
}

/// Opens a regular file for reading and says what it is. Never waits, whatever `path` is.
///
/// # Errors
/// What the system says; `NotFound` for a directory (as at a store, it is no object) and
/// `InvalidInput` for anything else that is no regular file.
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

fn not_regular() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")
}

fn meta_of(path: &str, meta: &Metadata) -> ObjectMeta {
    let Pin { size, mtime_ns, etag } = pin_of(meta);
    ObjectMeta { path: path.to_owned(), size, mtime_ns, etag }
}

pub(crate) fn get(
    within: &Within,
    dir: &Path,
    what: &str,
    path: &str,
    range: Option<Range<u64>>,
    pin: Option<&Pin>,
    bytes_max: u64,
) -> Result<Got, OriginError> {
    let io = |e: io::Error| OriginError::io(what, &e);
    let changed = |why: String| OriginError::Changed { what: what.to_owned(), why };
    let (mut file, before) = open_regular(&dir.join(path)).map_err(io)?;
    within.check(&file, what)?;
    let size = before.len();
    if let Some(pin) = pin.filter(|p| p.size != size) {
        return Err(changed(format!("{} bytes then, {size} now", pin.size)));
    }
    let range = range.unwrap_or(0..size);
    if range.end > size {
        return Err(OriginError::invalid(what, format!("range {range:?} of {size} bytes")));
    }
    let length = range.end - range.start;
    if length > bytes_max {
        return Err(OriginError::invalid(
            what,
            format!("{length} bytes in one read; at most {bytes_max} are held, read by range"),
        ));
    }
    let capacity = usize::try_from(length).map_err(|e| OriginError::invalid(what, e))?;
    if range.start > 0 {
        file.seek(SeekFrom::Start(range.start)).map_err(io)?;
    }
    let mut bytes = Vec::with_capacity(capacity);
    file.by_ref().take(length).read_to_end(&mut bytes).map_err(io)?;
    // Seen after the bytes, so that a write while they were read is in what the caller compares.
    let after = file.metadata().map_err(io)?;
    if bytes.len() as u64 != length || after.len() != size {
        return Err(changed(format!("{size} bytes before it was read, {} after", after.len())));
    }
    Ok(Got { bytes: Bytes::from(bytes), meta: meta_of(path, &after) })
}

pub(crate) fn head(within: &Within, dir: &Path, what: &str, path: &str) -> Result<ObjectMeta, OriginError> {
    let meta = std::fs::metadata(dir.join(path)).map_err(|e| OriginError::io(what, &e))?;
    if meta.is_dir() {
        // As at a store: a directory is no object.
        return Err(OriginError::NotFound { what: what.to_owned() });
    }
    if !meta.is_file() {
        return Err(OriginError::io(what, &not_regular()));
    }
    if within.is_everywhere() {
        return Ok(meta_of(path, &meta));
    }
    // What a name leads to is only known for certain of what is open.
    let (file, meta) = open_regular(&dir.join(path)).map_err(|e| OriginError::io(what, &e))?;
    within.check(&file, what)?;
    Ok(meta_of(path, &meta))
}

pub(crate) fn put_file(
    dir: &Path,
    what: &str,
    path: &str,
    from: &Path,
    mode: PutMode,
) -> Result<u64, OriginError> {
    let (mut file, meta) =
        open_regular(from).map_err(|e| OriginError::io(&from.display().to_string(), &e))?;
    put(dir, what, path, &mut file, mode)?;
    Ok(meta.len())
}

pub(crate) fn put(
    dir: &Path,
    what: &str,
    path: &str,
    from: &mut impl Read,
    mode: PutMode,
) -> Result<(), OriginError> {
    write(&dir.join(path), from, mode).map_err(|e| OriginError::io(what, &e))
}

fn write(target: &Path, from: &mut impl Read, mode: PutMode) -> io::Result<()> {
    let parent = target.parent().ok_or(io::ErrorKind::InvalidInput)?;
    create_durably(parent)?;
    // 0666 less the umask, as any program that creates a file.
    let mut file = tempfile::Builder::new()
        .prefix(TEMPORARY)
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(parent)?;
    io::copy(from, file.as_file_mut())?;
    file.as_file().sync_all()?;
    match mode {
        PutMode::Create => file.persist_noclobber(target)?,
        PutMode::Overwrite => file.persist(target)?,
    };
    sync(parent)
}

/// Makes `dir` and its missing ancestors, each durable in its parent.
fn create_durably(dir: &Path) -> io::Result<()> {
    match std::fs::metadata(dir) {
        Ok(meta) if meta.is_dir() => return Ok(()),
        Ok(_) => return Err(io::ErrorKind::NotADirectory.into()),
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        Err(_) => {}
    }
    let parent = dir.parent().ok_or(io::ErrorKind::NotFound)?;
    create_durably(parent)?;
    match std::fs::create_dir(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    sync(parent)
}

fn sync(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

pub(crate) fn delete(dir: &Path, what: &str, path: &str) -> Result<(), OriginError> {
    let target = dir.join(path);
    let removed = std::fs::remove_file(&target).and_then(|()| target.parent().map_or(Ok(()), sync));
    match removed.map_err(|e| OriginError::io(what, &e)) {
        Err(OriginError::NotFound { .. }) => Ok(()),
        other => other,
    }
}
