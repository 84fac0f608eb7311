//! Slab files: created with all their space, appended to, read, sealed, punched, unlinked.
//!
//! Invariants:
//! 1. bytes in a slab are never rewritten. Records are appended; dead records may be punched out;
//! 2. no code punches or unlinks a slab under a reader: readers hold `Slab::guard` shared, and look the
//!    record up again after they have it;
//! 3. at most `Files::max` files are open beside those being written;
//! 4. a slab is cut to nothing before it is unlinked: another process may have it open ([`Files::lend`]), and
//!    would keep its space.

use super::layout::{Head, LINE, slab_header};
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use rustix::{
    buffer::spare_capacity,
    fs::{FallocateFlags, fallocate},
    io::{Errno, ReadWriteFlags},
};
use std::{
    cell::Cell,
    collections::VecDeque,
    fs::{File, OpenOptions},
    io::{self, IoSlice, IoSliceMut},
    ops::Range,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::Duration,
};

/// The most parts of one call that writes: the limit of Linux.
const PARTS_MAX: usize = 1024;
/// Longest wait of `punch` and `remove` for the readers of a slab. They try again later.
const READERS_WAIT: Duration = Duration::from_millis(200);

/// One slab file.
#[derive(Debug)]
pub(crate) struct Slab {
    pub id: u64,
    guard: RwLock<()>,
    file: Mutex<Option<Arc<File>>>,
}

impl Slab {
    pub fn new(id: u64) -> Arc<Self> {
        Arc::new(Slab { id, guard: RwLock::new(()), file: Mutex::new(None) })
    }

    /// Keeps the slab's records where they are until the guard is dropped.
    pub fn lock_shared(&self) -> RwLockReadGuard<'_, ()> {
        self.guard.read()
    }

    /// Waits until no reader holds the slab; `None` after [`READERS_WAIT`].
    fn lock_exclusive(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        self.guard.try_write_for(READERS_WAIT)
    }

    fn opened(&self) -> parking_lot::MutexGuard<'_, Option<Arc<File>>> {
        self.file.lock()
    }
}

/// The directory of slab files, and which of them are open.
#[derive(Debug)]
pub(crate) struct Files {
    dir: PathBuf,
    max: usize,
    open: Mutex<VecDeque<Weak<Slab>>>,
}

impl Files {
    pub fn new(dir: PathBuf, max: usize) -> Self {
        Files { dir, max: max.max(1), open: Mutex::default() }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn path(&self, id: u64) -> PathBuf {
        self.dir.join(format!("{id:016x}.slab"))
    }

    /// Returns the id in a slab file's name; `None` for other files.
    pub fn id_of(name: &str) -> Option<u64> {
        let hex = name.strip_suffix(".slab").filter(|h| h.len() == 16)?;
        u64::from_str_radix(hex, 16).ok().filter(|id| format!("{id:016x}") == hex)
    }

    /// Creates a slab with its header, and allocates `bytes` bytes for it where the file system can do that.
    ///
    /// Leaves nothing behind when it fails.
    pub fn create(&self, id: u64, bytes: u64) -> io::Result<(Arc<Slab>, Arc<File>)> {
        let path = self.path(id);
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        let fill = || {
            match fallocate(&file, FallocateFlags::KEEP_SIZE, 0, bytes) {
                // The space is reserved all the same; the file system may only run out later.
                Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
                Err(e) => return Err(e.into()),
            }
            file.write_all_at(&slab_header(id), 0)
        };
        if let Err(e) = fill() {
            drop(std::fs::remove_file(&path));
            return Err(e);
        }
        let (slab, file) = (Slab::new(id), Arc::new(file));
        self.keep_open(&slab, &file);
        Ok((slab, file))
    }

    /// Returns the open file of a slab, and opens it if necessary.
    pub fn file(&self, slab: &Arc<Slab>) -> io::Result<Arc<File>> {
        if let Some(f) = slab.opened().as_ref() {
            return Ok(Arc::clone(f));
        }
        let file = Arc::new(OpenOptions::new().read(true).write(true).open(self.path(slab.id))?);
        self.keep_open(slab, &file);
        Ok(file)
    }

    fn keep_open(&self, slab: &Arc<Slab>, file: &Arc<File>) {
        if slab.opened().replace(Arc::clone(file)).is_some() {
            // Another thread opened it meanwhile, and it is in the queue.
            return;
        }
        let mut open = self.open.lock();
        open.push_back(Arc::downgrade(slab));
        while open.len() > self.max {
            if let Some(old) = open.pop_front().and_then(|w| w.upgrade()) {
                old.opened().take();
            }
        }
    }

    /// Closes all files. A file stays open while a reader uses it.
    pub fn close_all(&self) {
        for slab in self.open.lock().drain(..) {
            if let Some(slab) = slab.upgrade() {
                slab.opened().take();
            }
        }
    }

    /// Returns the bytes of files that are open here but have no name any more.
    pub fn unlinked_bytes(&self) -> u64 {
        let open = self.open.lock();
        let metas =
            open.iter().filter_map(Weak::upgrade).filter_map(|s| s.opened().as_ref()?.metadata().ok());
        metas.filter(|m| m.nlink() == 0).map(|m| m.blocks() * 512).sum()
    }

    /// Opens a slab's file anew, for another process that only reads it.
    pub fn lend(&self, slab: &Slab) -> io::Result<File> {
        File::open(self.path(slab.id))
    }

    /// Removes the slab's file; `false` when a reader holds the slab.
    pub fn remove(&self, slab: &Arc<Slab>) -> io::Result<bool> {
        let Some(_exclusive) = slab.lock_exclusive() else { return Ok(false) };
        slab.opened().take();
        let path = self.path(slab.id);
        let cut = OpenOptions::new().write(true).open(&path).and_then(|file| file.set_len(0));
        if let Err(error) = cut {
            tracing::debug!(%error, slab = slab.id, "a slab cannot be cut; whom it was lent reads on");
        }
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(true),
        }
    }

    /// Punches `ranges` out of the slab's file; `false` when a reader holds the slab.
    pub fn punch(&self, slab: &Arc<Slab>, ranges: &[Range<u64>]) -> io::Result<bool> {
        let file = self.file(slab)?;
        let Some(_exclusive) = slab.lock_exclusive() else { return Ok(false) };
        for r in ranges {
            fallocate(
                &file,
                FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                r.start,
                r.end - r.start,
            )?;
        }
        Ok(true)
    }
}

/// Returns the bytes that a file occupies.
pub(crate) fn blocks(file: &File) -> io::Result<u64> {
    Ok(file.metadata()?.blocks() * 512)
}

/// Writes records side by side from `at` on, if possible by one call.
pub(crate) fn append(file: &File, at: u64, records: &[(&Head, &[u8])]) -> io::Result<()> {
    const PADDING: [u8; LINE as usize] = [0; LINE as usize];
    let mut parts = Vec::with_capacity(3 * records.len());
    for (header, payload) in records {
        let padding = payload.len().next_multiple_of(PADDING.len()) - payload.len();
        parts.extend([&header[..], payload, &PADDING[..padding]].map(IoSlice::new));
    }
    // Nothing follows the last one yet.
    parts.pop();
    let (mut rest, mut at) = (&mut parts[..], at);
    while rest.iter().any(|part| !part.is_empty()) {
        let some = rest.len().min(PARTS_MAX);
        match rustix::io::pwritev(file, &rest[..some], at) {
            Err(Errno::INTR) => {}
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => {
                at += written as u64;
                IoSlice::advance_slices(&mut rest, written);
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Reads the bytes of one record in place. The bytes are not verified.
#[derive(Debug)]
pub struct RecordReader<'a> {
    file: &'a File,
    at: u64,
    len: u32,
    taken: Cell<u64>,
}

impl<'a> RecordReader<'a> {
    /// Returns a reader of `len` bytes from `at` on.
    #[must_use]
    pub fn new(file: &'a File, at: u64, len: u32) -> Self {
        RecordReader { file, at, len, taken: Cell::new(0) }
    }

    /// Returns the length of the record.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether the record has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns how many bytes were read.
    pub(crate) fn taken(&self) -> u64 {
        self.taken.get()
    }

    /// Returns all bytes of the record. Blocks.
    ///
    /// # Errors
    /// As [`RecordReader::read_at`].
    pub fn whole(&self) -> io::Result<Vec<u8>> {
        let mut out = vec![0; self.len()];
        self.read_at(0, &mut out)?;
        Ok(out)
    }

    /// Fills `out` with bytes of the record from `offset` on. Blocks.
    ///
    /// # Errors
    /// Those of the disk; `UnexpectedEof` where the record or the file ends earlier.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(out.len()).is_none_or(|end| end > self.len()) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.file.read_exact_at(out, self.at + offset as u64)?;
        self.taken.set(self.taken.get() + out.len() as u64);
        Ok(())
    }

    /// As [`RecordReader::read_at`], if the system has the bytes in its page cache. Does not wait for the
    /// disk.
    ///
    /// # Errors
    /// `WouldBlock` where the system would have to read the disk, or cannot tell; else those of `read_at`.
    pub fn read_cached_at(&self, offset: usize, out: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(out.len()).is_none_or(|end| end > self.len()) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut done = 0;
        while done < out.len() {
            let at = self.at + (offset + done) as u64;
            let parts = &mut [IoSliceMut::new(&mut out[done..])];
            match rustix::io::preadv2(self.file, parts, at, ReadWriteFlags::NOWAIT) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                // AGAIN: a page is missing. The others: the kernel or the file system has no such reads.
                Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::NOSYS) => {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                Err(e) => return Err(e.into()),
            }
        }
        self.taken.set(self.taken.get() + out.len() as u64);
        Ok(())
    }
}

/// Reads `len` bytes at `at`, or fewer at the end of the file.
pub(crate) fn read(file: &File, at: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut out = Vec::with_capacity(len);
    while out.len() < len {
        let from = at + out.len() as u64;
        match rustix::io::pread(file, spare_capacity(&mut out), from) {
            Ok(0) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    out.truncate(len);
    Ok(out)
}

/// Writes the table after the last record, gives unused space back, and returns what the slab occupies.
pub(crate) fn seal(file: &File, table_at: u64, table: &[u8]) -> io::Result<u64> {
    file.write_all_at(table, table_at)?;
    let end = table_at + table.len() as u64;
    // Truncating also drops blocks that were allocated past the end. Some file systems do nothing for a
    // truncation to the present length, so the file grows by one byte first.
    file.set_len(end + 1)?;
    file.set_len(end)?;
    blocks(file)
}
