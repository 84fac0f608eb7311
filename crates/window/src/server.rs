//! The side of the server.

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::{SealFlags, SeekFrom};
use std::{io, os::fd::OwnedFd, ptr};

/// What Linux says of files in memory with pages of the usual size.
const TMPFS: u64 = 0x0102_1994;

/// The server does not take this memory as a window.
#[derive(Debug, thiserror::Error)]
pub enum BadWindow {
    /// It is a file on a disk, a pipe, or memory of another kind.
    #[error("it is no shared memory with pages of the usual size")]
    Kind,
    /// It is empty or too long, or its length changed meanwhile.
    #[error("it has a length of {0} bytes")]
    Length(u64),
    /// A page is not there: to write it would take memory of the server.
    #[error("a page is missing at {0}")]
    Hole(u64),
    /// The system rejected it. It may be sealed already.
    #[error("it cannot be mapped and sealed: {0}")]
    System(#[from] io::Error),
}

/// The server's side of a window. It can write.
#[derive(Debug)]
pub struct Window {
    map: MmapRaw,
}

impl Window {
    /// Maps and seals memory of at most `bytes_max` bytes that a client sent.
    ///
    /// After that, neither side can map it writable again, write to it by a call, change its length or take
    /// pages out of it. A mapping of the client that could write before still can.
    ///
    /// # Errors
    /// [`BadWindow`].
    pub fn accept(file: &OwnedFd, bytes_max: u32) -> Result<Self, BadWindow> {
        let kind = rustix::fs::fstatfs(file).map_err(io::Error::from)?.f_type;
        if u64::try_from(kind).ok() != Some(TMPFS) {
            return Err(BadWindow::Kind);
        }
        let bytes = length(file)?;
        let len = u32::try_from(bytes).ok().filter(|len| (1..=bytes_max).contains(len));
        let len = len.and_then(|len| usize::try_from(len).ok()).ok_or(BadWindow::Length(bytes))?;
        let map = MmapOptions::new().len(len).map_raw(file)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(file, seals).map_err(io::Error::from)?;
        // Nothing changes any more, so what is seen from here on stays true.
        let sealed = length(file)?;
        if sealed != bytes {
            return Err(BadWindow::Length(sealed));
        }
        let hole = rustix::fs::seek(file, SeekFrom::Hole(0)).map_err(io::Error::from)?;
        if hole != bytes {
            return Err(BadWindow::Hole(hole));
        }
        // Linux before 5.14 cannot do that. Then pages are mapped one by one as they are written.
        drop(map.advise(Advice::PopulateWrite));
        Ok(Window { map })
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u32 {
        u32::try_from(self.map.len()).unwrap_or(u32::MAX)
    }

    /// Returns whether a place of `len` bytes at an offset lies in the window.
    #[must_use]
    pub fn has(&self, at: u32, len: u32) -> bool {
        u64::from(at) + u64::from(len) <= self.map.len() as u64
    }

    /// Puts bytes at an offset. Returns whether they fit there; nothing is written if not.
    #[must_use]
    pub fn put(&mut self, at: u32, bytes: &[u8]) -> bool {
        let fits = u32::try_from(bytes.len()).is_ok_and(|len| self.has(at, len));
        if fits {
            copy(bytes, &self.map, at as usize);
        }
        fits
    }
}

/// Returns the length of a file in bytes.
fn length(file: &OwnedFd) -> Result<u64, BadWindow> {
    let bytes = rustix::fs::fstat(file).map_err(io::Error::from)?.st_size;
    Ok(u64::try_from(bytes).unwrap_or(0))
}

/// Copies bytes into a mapping, in which `at + bytes.len()` lies.
#[expect(unsafe_code, reason = "memory that another process may read and write has no safe reference")]
fn copy(bytes: &[u8], to: &MmapRaw, at: usize) {
    // SAFETY: the caller checked that the place lies in the mapping, whose pages stay there (invariant 1).
    // `bytes` is memory of this process, so they do not overlap. Nothing here depends on what another
    // process reads or writes meanwhile.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_mut_ptr().add(at), bytes.len()) }
}
