//! Reads and writes directories of this machine through `std::fs`. Every function here blocks.
//!
//! 1. No call waits for another process. Files are opened without blocking, and everything but a regular file
//!    is rejected, so that a FIFO or device in a hostile tree cannot hang a thread.
//! 2. A read follows symbolic links, because the caller hashes the bytes. A path with `..` never reaches this
//!    module.
//! 3. A confined origin finds the real path of a file before it asks the file system about that path. It
//!    checks the path again when the file is open, so that no link can change between check and use.
//! 4. A write goes to a temporary file, syncs it, renames it, and syncs the directory.

use crate::OriginError;
use crate::object::{ObjectBytes, ObjectMeta, Pin, PutMode};
use crate::regular_file::{not_regular, open_regular};
use bytes::Bytes;
use std::fs::{File, Metadata, Permissions};
use std::io::{self, Read, Seek as _, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use tempfile::NamedTempFile;

mod confinement;
mod listing;
mod real_path;
pub(crate) use confinement::Confinement;
pub use confinement::PathFilter;
pub(crate) use listing::list;
pub use real_path::{Place, real_path};

/// The prefix of the temporary files of writes. Listings leave these files out.
pub const TEMPORARY: &str = ".fletch-tmp-";

/// How often the directory of a new file is made again if it vanishes.
const DIRECTORY_TRIES: u32 = 10;

/// Returns the pin of a local file: its size, modification time and etag.
///
/// The etag is `"{inode:x}-{change time in ns:x}"`. No ordinary program can set a change time back.
#[must_use]
pub fn pin_of(meta: &Metadata) -> Pin {
    let ns = |s: i64, ns: i64| s.saturating_mul(1_000_000_000).saturating_add(ns);
    Pin {
        size: meta.len(),
        mtime_ns: Some(ns(meta.mtime(), meta.mtime_nsec())),
        etag: Some(format!("{:x}-{:x}", meta.ino(), ns(meta.ctime(), meta.ctime_nsec()))),
    }
}

fn meta_of(path: &str, meta: &Metadata) -> ObjectMeta {
    let Pin { size, mtime_ns, etag } = pin_of(meta);
    ObjectMeta { path: path.to_owned(), size, mtime_ns, etag }
}

pub(crate) fn get(
    confinement: &Confinement,
    dir: &Path,
    what: &str,
    path: &str,
    range: Option<Range<u64>>,
    pin: Option<&Pin>,
    bytes_max: u64,
) -> Result<ObjectBytes, OriginError> {
    let io = |e: io::Error| OriginError::io(what, &e);
    let changed = |why: String| OriginError::Changed { what: what.to_owned(), why };
    confinement.check_name(&dir.join(path), what)?;
    let (mut file, before) = open_regular(&dir.join(path)).map_err(io)?;
    confinement.check(&file, what)?;
    let size = before.len();
    if let Some(pin) = pin {
        check_size(what, pin, size)?;
    }
    let range = range.unwrap_or(0..size);
    if range.end > size {
        return Err(OriginError::invalid(
            what,
            format!("the range {range:?} ends after the object's {size} bytes"),
        ));
    }
    let length = range.end - range.start;
    if length > bytes_max {
        return Err(OriginError::invalid(
            what,
            format!("one read of {length} bytes, at most {bytes_max} are allowed; read by range"),
        ));
    }
    let capacity = usize::try_from(length).map_err(|e| OriginError::invalid(what, e))?;
    if range.start > 0 {
        file.seek(SeekFrom::Start(range.start)).map_err(io)?;
    }
    let mut bytes = Vec::with_capacity(capacity);
    file.by_ref().take(length).read_to_end(&mut bytes).map_err(io)?;
    // Taken after the bytes, so that the caller sees a write that happened during the read.
    let after = file.metadata().map_err(io)?;
    if bytes.len() as u64 != length || after.len() != size {
        return Err(changed(format!("{size} bytes before the read, {} after it", after.len())));
    }
    Ok(ObjectBytes { bytes: Bytes::from(bytes), meta: meta_of(path, &after) })
}

/// Rejects a file that has another size than its pin.
fn check_size(what: &str, pin: &Pin, size: u64) -> Result<(), OriginError> {
    if size == pin.size {
        return Ok(());
    }
    let why = format!("{} bytes when it was indexed, {size} now", pin.size);
    Err(OriginError::Changed { what: what.to_owned(), why })
}

/// Fills `buffer` with the bytes of a file from `offset` on. As [`get`] with a pin.
pub(crate) fn fill(
    (confinement, dir): (&Confinement, &Path),
    (what, path): (&str, &str),
    (offset, pin): (u64, &Pin),
    buffer: &mut [u8],
) -> Result<(), OriginError> {
    let io = |e: io::Error| OriginError::io(what, &e);
    confinement.check_name(&dir.join(path), what)?;
    let (file, before) = open_regular(&dir.join(path)).map_err(io)?;
    confinement.check(&file, what)?;
    check_size(what, pin, before.len())?;
    // A file that became shorter meanwhile ends early; any other change shows in the hash.
    file.read_exact_at(buffer, offset).map_err(io)
}

pub(crate) fn head(
    confinement: &Confinement,
    dir: &Path,
    what: &str,
    path: &str,
) -> Result<ObjectMeta, OriginError> {
    confinement.check_name(&dir.join(path), what)?;
    let meta = std::fs::metadata(dir.join(path)).map_err(|e| OriginError::io(what, &e))?;
    if meta.is_dir() {
        // As at a store: a directory is no object.
        return Err(OriginError::NotFound { what: what.to_owned() });
    }
    if !meta.is_file() {
        return Err(OriginError::io(what, &not_regular()));
    }
    if confinement.is_everywhere() {
        return Ok(meta_of(path, &meta));
    }
    // Only the path of an open file cannot change between check and use.
    let (file, meta) = open_regular(&dir.join(path)).map_err(|e| OriginError::io(what, &e))?;
    confinement.check(&file, what)?;
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
    let mut tries = 0..DIRECTORY_TRIES;
    let mut file = loop {
        match create_durably(parent).and_then(|()| temporary_in(parent)) {
            // Another process may have removed a directory that was empty for a moment.
            Err(e) if e.kind() == io::ErrorKind::NotFound && tries.next().is_some() => {}
            made => break made?,
        }
    };
    io::copy(from, file.as_file_mut())?;
    file.as_file().sync_all()?;
    match mode {
        PutMode::Create => file.persist_noclobber(target)?,
        PutMode::Overwrite => file.persist(target)?,
    };
    sync(parent)
}

fn temporary_in(dir: &Path) -> io::Result<NamedTempFile> {
    // 0666 less the umask, as other programs create files.
    let permissions = Permissions::from_mode(0o666);
    tempfile::Builder::new().prefix(TEMPORARY).permissions(permissions).tempfile_in(dir)
}

/// Creates `dir` and its missing ancestors, each durable in its parent.
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
