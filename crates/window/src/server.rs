//! The side of the server.

use memmap2::MmapMut;
use rustix::fs::{MemfdFlags, SealFlags};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

/// The server's side of a window. It can write.
#[derive(Debug)]
pub struct Window {
    file: OwnedFd,
    map: MmapMut,
}

impl Window {
    /// Creates a window of `bytes`. It takes memory only as places are written.
    ///
    /// # Errors
    /// The system has no room for it, or cannot seal memory.
    pub fn new(bytes: u32) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("fletch-window", flags)?;
        rustix::fs::ftruncate(&file, bytes.into())?;
        let map = map(&file)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        Ok(Window { file, map })
    }

    /// Returns whether a place of `len` bytes at an offset lies in the window.
    #[must_use]
    pub fn has(&self, at: u32, len: u32) -> bool {
        u64::from(at) + u64::from(len) <= self.map.len() as u64
    }

    /// Puts bytes at an offset. Returns whether they fit there; nothing is written if not.
    #[must_use]
    pub fn put(&mut self, at: u32, bytes: &[u8]) -> bool {
        let place = usize::try_from(at).ok().and_then(|at| self.map.get_mut(at..)?.get_mut(..bytes.len()));
        place.map(|place| place.copy_from_slice(bytes)).is_some()
    }
}

impl AsFd for Window {
    /// Returns the descriptor for the client, which can only read.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Maps the memory to be written.
#[expect(unsafe_code, reason = "a mapping is plain memory only while nobody else changes its file")]
fn map(file: &OwnedFd) -> io::Result<MmapMut> {
    // SAFETY: the file was made above and has no other user. Before a client gets it, it is sealed, so
    // that this mapping stays the only one that can write, and its length stays the same.
    unsafe { MmapMut::map_mut(file) }
}
