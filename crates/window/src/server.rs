//! The side of the server.

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, SeekFrom};
use std::{
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    ptr,
};

/// Memory that the server offers to a client as a window. Its pages are not there yet.
#[derive(Debug)]
pub struct Offer {
    map: MmapRaw,
    file: OwnedFd,
}

impl Offer {
    /// Makes memory of `bytes`, which must not be 0. Returns also the descriptor for the client.
    ///
    /// The memory is sealed: no descriptor can write to it, change its length or take pages out of it. Only
    /// the mapping of the server can write. The descriptor for the client can only read, and other users
    /// cannot open the memory anew.
    ///
    /// # Errors
    /// The system cannot seal memory, or `/proc` is not mounted.
    pub fn new(bytes: u32) -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("fletch-window", flags)?;
        rustix::fs::ftruncate(&file, bytes.into())?;
        rustix::fs::fchmod(&file, Mode::RUSR)?;
        let map = MmapOptions::new().len(usize::try_from(bytes).map_err(io::Error::other)?).map_raw(&file)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let of_client = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        Ok((Offer { map, file }, of_client))
    }

    /// Returns the window, if its client has touched all pages. `None`: to write the memory would take memory
    /// of the server.
    ///
    /// # Errors
    /// That of the system.
    pub fn accept(self) -> io::Result<Option<Window>> {
        let hole = rustix::fs::seek(&self.file, SeekFrom::Hole(0))?;
        if hole != self.map.len() as u64 {
            return Ok(None);
        }
        // Linux before 5.14 cannot do that. Then pages are mapped one by one as they are written.
        drop(self.map.advise(Advice::PopulateWrite));
        Ok(Some(Window { map: self.map }))
    }
}

/// The server's side of a window. It can write.
#[derive(Debug)]
pub struct Window {
    map: MmapRaw,
}

impl Window {
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

/// Copies bytes into a mapping, in which `at + bytes.len()` lies.
#[expect(unsafe_code, reason = "memory that another process may read and write has no safe reference")]
fn copy(bytes: &[u8], to: &MmapRaw, at: usize) {
    // SAFETY: the caller checked that the place lies in the mapping, whose pages stay there (invariant 2).
    // `bytes` is memory of this process, so they do not overlap. Nothing here depends on what another
    // process reads or writes meanwhile.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_mut_ptr().add(at), bytes.len()) }
}
