//! The side of the client.

use crate::places::Places;
use crate::written_pages::WrittenPages;
use memmap2::{Advice, MmapMut, MmapOptions};
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::SealFlags;
use std::{fs::File, hint::black_box, io, os::fd::OwnedFd, sync::Arc};

/// The client does not take this memory as a window.
#[derive(Debug, thiserror::Error)]
pub enum BadWindow {
    /// Its length can change, so that a read could end the client with a signal.
    #[error("its length is not sealed")]
    Seals,
    /// It is not as long as the client asked for.
    #[error("it has a length of {0} bytes")]
    Length(u64),
    /// The system rejected it.
    #[error("it cannot be mapped: {0}")]
    System(#[from] io::Error),
}

/// The client's side of a window.
///
/// The mapping is private. A program that writes into bytes that it got, such as an operation in place of a
/// tensor over them, changes a copy of the page that only it sees. The copy goes when the place is given
/// back.
#[derive(Debug)]
pub struct View {
    map: MmapMut,
    written: WrittenPages,
    places: Mutex<Places>,
}

impl View {
    /// Maps memory of `bytes` that the server offers, and touches every page, so that it counts for this
    /// process.
    ///
    /// # Errors
    /// [`BadWindow`].
    pub fn accept(file: OwnedFd, bytes: u32) -> Result<Arc<Self>, BadWindow> {
        // Only memory has seals, so nothing asks a file system here.
        let seals = rustix::fs::fcntl_get_seals(&file).map_err(|_| BadWindow::Seals)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(BadWindow::Seals);
        }
        let file = File::from(file);
        let len = file.metadata()?.len();
        if len != u64::from(bytes) {
            return Err(BadWindow::Length(len));
        }
        let map = map(&file)?;
        let page_bytes = rustix::param::page_size();
        // Before Linux 5.14 there is no such advice.
        if map.advise(Advice::PopulateRead).is_err() {
            map.iter().step_by(page_bytes).for_each(|byte| {
                black_box(byte);
            });
        }
        let page_bytes = u32::try_from(page_bytes).map_err(io::Error::other)?;
        let (written, places) = (WrittenPages::of_this_process(), Mutex::new(Places::new(bytes, page_bytes)));
        Ok(Arc::new(View { map, written, places }))
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        // Each method leaves them whole.
        self.places.lock()
    }

    /// Returns the bytes that a place of `len` bytes takes in a window: whole pages.
    #[must_use]
    pub fn place_bytes(len: u32) -> u64 {
        u64::from(len.max(1)).next_multiple_of(rustix::param::page_size() as u64)
    }

    /// Takes a place of `len` bytes. `None` while the free parts are too short.
    #[must_use]
    pub fn take(self: &Arc<Self>, len: u32) -> Option<Place> {
        let offset = self.places().take(len)?;
        Some(Place { view: Arc::clone(self), offset, len })
    }

    /// Returns the length of the window in bytes.
    #[must_use]
    pub fn bytes(&self) -> u32 {
        u32::try_from(self.map.len()).unwrap_or(u32::MAX)
    }
}

/// A place that the server may write. Dropping it gives it back.
#[derive(Debug)]
pub struct Place {
    view: Arc<View>,
    offset: u32,
    len: u32,
}

impl Place {
    /// Returns where it begins in the window.
    #[must_use]
    pub fn offset(&self) -> u32 {
        self.offset
    }

    /// Returns its bytes. Call it after the server answered that they are there.
    #[must_use]
    pub fn filled(self) -> Filled {
        Filled(self)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // A copy of a page would hide what the server writes there for the next holder. A place whose copies
        // stay is lost to the window.
        if !self.view.written.discard(&self.view.map, self.offset, self.len) {
            return;
        }
        self.view.places().give_back(self.offset, self.len);
    }
}

/// The bytes of a place that the server has written. Dropping it gives the place back.
#[derive(Debug)]
pub struct Filled(Place);

impl AsRef<[u8]> for Filled {
    fn as_ref(&self) -> &[u8] {
        let (at, len) = (self.0.offset as usize, self.0.len as usize);
        // A place lies in its window.
        self.0.view.map.get(at..at + len).unwrap_or(&[])
    }
}

/// Maps the memory. What is written through this mapping goes to a copy of the page.
#[expect(unsafe_code, reason = "a mapping is plain memory only while nobody else changes its file")]
fn map(file: &File) -> io::Result<MmapMut> {
    // SAFETY: the server made the file, and its length is sealed. The server changes bytes only of a place
    // that the client named in a request without an answer. Only `Filled` reads bytes, after the answer, and
    // while it lives no request names its place. The server is trusted with this as with its answers. The
    // option `populate` would copy every page.
    unsafe { MmapOptions::new().map_copy(file) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Offer, Window};
    use rustix::fs::{FallocateFlags, MemfdFlags, Mode};
    use std::{io::Write as _, os::fd::AsRawFd as _};

    const MIB: u32 = 1 << 20;

    fn pair(bytes: u32) -> (Arc<View>, Window, OwnedFd) {
        let (offer, file) = Offer::new(bytes).expect("memory");
        let view = View::accept(file.try_clone().expect("cloned"), bytes).expect("a view");
        (view, offer.accept().expect("a look").expect("all pages"), file)
    }

    #[test]
    fn what_the_server_puts_the_client_sees_where_it_asked_for_it() {
        let (view, mut window, _) = pair(MIB);
        assert_eq!((view.bytes(), window.bytes()), (MIB, MIB));
        let (a, b) = (view.take(5).expect("room"), view.take(200_000).expect("room"));
        assert!(window.put(a.offset(), b"first") && window.put(b.offset(), &[7; 200_000]));
        let (a, b) = (a.filled(), b.filled());
        assert_eq!((a.as_ref(), b.as_ref()), (&b"first"[..], &[7; 200_000][..]));
        let at = a.as_ref().as_ptr();
        drop(a);
        let again = view.take(3).expect("room");
        assert!(window.put(again.offset(), b"new"));
        let again = again.filled();
        assert_eq!((again.as_ref(), again.as_ref().as_ptr()), (&b"new"[..], at));
        assert!(!window.put(MIB - 1, b"ab") && !window.put(u32::MAX, b"a"), "past the end");
        assert!(window.put(MIB - 2, b"ab") && window.put(MIB, b""), "the last bytes");
        drop(window);
        assert_eq!(again.as_ref(), b"new", "what is held outlives the server");
    }

    #[test]
    #[expect(unsafe_code, reason = "a program that writes into what it got, as an operation in place does")]
    fn what_a_program_writes_into_its_bytes_only_it_sees_and_only_until_it_drops_them() {
        let (view, mut window, file) = pair(MIB);
        // SAFETY: only this test writes the memory.
        let beside = unsafe { MmapOptions::new().map(&file) }.expect("a mapping");
        for round in 1..50_u8 {
            // Two pages and a bit, and a neighbour in the next page.
            let (place, other) = (view.take(9000).expect("room"), view.take(9).expect("room"));
            assert!(window.put(place.offset(), &[round; 9000]) && window.put(other.offset(), &[round; 9]));
            let (filled, other) = (place.filled(), other.filled());
            assert_eq!(filled.as_ref(), &[round; 9000][..], "what was written before is gone");
            // SAFETY: the mapping may be written, and nobody reads these bytes meanwhile.
            unsafe { filled.as_ref().as_ptr().cast_mut().add(4000).write_bytes(0xff, 3000) };
            assert_eq!(filled.as_ref().iter().filter(|byte| **byte == 0xff).count(), 3000);
            assert_eq!(other.as_ref(), [round; 9]);
            assert!(beside[..9000].iter().all(|byte| *byte == round), "others see it");
        }
    }

    #[test]
    fn a_server_goes_on_when_its_client_is_gone() {
        let (view, mut window, file) = pair(8192);
        drop((view, file));
        assert!(window.put(0, &[1; 8192]));
    }

    /// Returns the error of opening the memory anew, to write.
    fn reopened(file: &OwnedFd) -> io::Result<File> {
        File::options().write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()))
    }

    #[test]
    #[expect(unsafe_code, reason = "an attack by a mapping")]
    fn i1_a_client_can_neither_write_to_its_window_nor_take_pages_away() {
        let (view, mut window, file) = pair(8192);
        assert!(window.put(0, b"content"));
        let of_owner = rustix::fs::fchmod(&file, Mode::RUSR | Mode::WUSR);
        // The owner of the memory, and root, open it to write. The seals hold for them, too.
        let writable = of_owner.ok().and_then(|()| reopened(&file).ok());
        let files: Vec<OwnedFd> = [Some(file), writable.map(OwnedFd::from)].into_iter().flatten().collect();
        assert_eq!(files.len(), 2);
        for file in files {
            // SAFETY: the mapping must fail; if it does not, nobody writes through it.
            assert!(unsafe { MmapMut::map_mut(&file) }.is_err(), "a writable mapping");
            let punched = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            for (how, from, len) in [
                (punched, 0, 4096),
                (FallocateFlags::ZERO_RANGE, 0, 4096),
                (FallocateFlags::empty(), 0, 16384),
            ] {
                assert!(rustix::fs::fallocate(&file, how, from, len).is_err(), "{how:?}");
            }
            assert!(rustix::fs::fcntl_add_seals(&file, SealFlags::empty()).is_err(), "further seals");
            let mut file = File::from(file);
            assert!(file.write_all(b"x").is_err(), "a write");
            assert!(file.set_len(0).is_err() && file.set_len(16384).is_err(), "another length");
        }
        assert_eq!(view.take(7).expect("room").filled().as_ref(), b"content");
    }

    #[test]
    fn the_descriptor_of_a_client_only_reads_and_another_user_opens_the_memory_not_to_write() {
        let (_, file) = Offer::new(8192).expect("memory");
        let of = rustix::fs::fcntl_getfl(&file).expect("flags");
        assert_eq!(of & rustix::fs::OFlags::RWMODE, rustix::fs::OFlags::RDONLY);
        assert_eq!(rustix::fs::fstat(&file).expect("a mode").st_mode & 0o7777, 0o400);
    }

    #[test]
    #[expect(unsafe_code, reason = "a client that touches less than all pages")]
    fn i6_memory_that_the_server_would_have_to_pay_for_is_no_window() {
        for touched in 0..2 {
            let (offer, file) = Offer::new(8192).expect("memory");
            // SAFETY: nobody writes to the memory.
            let map = unsafe { MmapOptions::new().map(&file) }.expect("a mapping");
            map.iter().step_by(4096).take(touched).for_each(|byte| {
                black_box(byte);
            });
            assert!(offer.accept().expect("a look").is_none(), "{touched} of two pages");
        }
    }

    #[test]
    fn a_client_takes_no_memory_that_could_end_it_with_a_signal() {
        let memory = |len: u64, seals| {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = File::from(rustix::fs::memfd_create("attack", flags).expect("memory"));
            file.set_len(len).expect("a length");
            rustix::fs::fcntl_add_seals(&file, seals).expect("seals");
            OwnedFd::from(file)
        };
        let refused = |file| View::accept(file, 8192).expect_err("it is refused");
        let (shrink, grow) = (SealFlags::SHRINK, SealFlags::GROW);
        for seals in [SealFlags::empty(), shrink, grow] {
            assert!(matches!(refused(memory(8192, seals)), BadWindow::Seals));
        }
        assert!(matches!(refused(memory(4096, shrink | grow)), BadWindow::Length(4096)));
        assert!(matches!(refused(memory(0, shrink | grow)), BadWindow::Length(0)));
        for path in ["/dev/null", "/proc/self/exe", "/"] {
            assert!(matches!(refused(File::open(path).expect("opens").into()), BadWindow::Seals), "{path}");
        }
        assert!(View::accept(memory(8192, shrink | grow), 8192).is_ok());
    }

    #[test]
    fn a_full_window_has_no_place_until_one_is_dropped() {
        let (view, _, _) = pair(8192);
        let (a, b) = (view.take(4096).expect("room"), view.take(4096).expect("room"));
        assert!(view.take(1).is_none());
        drop(a);
        assert_eq!(view.take(4096).expect("room").offset(), 0);
        drop(b);
    }
}
