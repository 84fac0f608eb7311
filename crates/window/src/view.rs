//! The side of the client.

use crate::places::Places;
use crate::written_pages::WrittenPages;
use memmap2::{Advice, MmapMut, MmapOptions};
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{MemfdFlags, SealFlags};
use std::{
    fs::File,
    io::{self, Write as _},
    os::fd::OwnedFd,
    sync::Arc,
};

/// How many bytes are written at once when the memory is made.
const WRITE_BYTES: usize = 64 << 10;

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
    /// Makes the memory of a window of `bytes`, which must not be 0. Returns also the descriptor for the
    /// server.
    ///
    /// It takes all of its memory at once.
    ///
    /// # Errors
    /// The system has no room for it, or cannot seal memory.
    pub fn new(bytes: u32) -> io::Result<(Arc<Self>, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file = File::from(rustix::fs::memfd_create("fletch-window", flags)?);
        let zeros = [0; WRITE_BYTES];
        let mut left = usize::try_from(bytes).map_err(io::Error::other)?;
        while left > 0 {
            let written = left.min(WRITE_BYTES);
            file.write_all(&zeros[..written])?;
            left -= written;
        }
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        let map = map(&file)?;
        let page_bytes = u32::try_from(rustix::param::page_size()).map_err(io::Error::other)?;
        let (written, places) = (WrittenPages::of_this_process(), Mutex::new(Places::new(bytes, page_bytes)));
        Ok((Arc::new(View { map, written, places }), file.into()))
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
    // SAFETY: the file was made above, and its length is sealed. The server changes bytes only of a place
    // that the client named in a request without an answer. Only `Filled` reads bytes, after the answer, and
    // while it lives no request names its place. The server is trusted with this as with its answers.
    let map = unsafe { MmapOptions::new().map_copy(file)? };
    // The option `populate` would copy every page. Before Linux 5.14 there is no such advice, and pages are
    // mapped when they are read.
    drop(map.advise(Advice::PopulateRead));
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BadWindow, Window};
    use memmap2::MmapMut;
    use rustix::fs::FallocateFlags;

    const MIB: u32 = 1 << 20;

    fn pair(bytes: u32) -> (Arc<View>, Window, OwnedFd) {
        let (view, file) = View::new(bytes).expect("memory");
        let window = Window::accept(&file, MIB).expect("a window");
        (view, window, file)
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

    #[test]
    #[expect(unsafe_code, reason = "an attack by a mapping")]
    fn i1_a_client_cannot_take_pages_away_after_its_window_was_accepted() {
        let (view, mut window, file) = pair(8192);
        assert!(window.put(0, b"content"));
        // SAFETY: the mapping must fail; if it does not, nobody writes through it.
        let mapped = unsafe { MmapMut::map_mut(&file) };
        assert!(mapped.is_err(), "a writable mapping");
        let punched = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for (how, from, len) in
            [(punched, 0, 4096), (FallocateFlags::ZERO_RANGE, 0, 4096), (FallocateFlags::empty(), 0, 16384)]
        {
            assert!(rustix::fs::fallocate(&file, how, from, len).is_err(), "{how:?}");
        }
        let mut file = File::from(file);
        assert!(file.write_all(b"x").is_err(), "a write");
        assert!(file.set_len(0).is_err() && file.set_len(16384).is_err(), "another length");
        let seals = rustix::fs::fcntl_add_seals(&file, SealFlags::empty());
        assert!(seals.is_err(), "further seals");
        let reopened = File::options().write(true).open(format!("/proc/self/fd/{}", {
            use std::os::fd::AsRawFd as _;
            file.as_raw_fd()
        }));
        if let Ok(mut reopened) = reopened {
            assert!(reopened.write_all(b"x").is_err(), "a write by another descriptor");
            assert!(rustix::fs::fallocate(&reopened, punched, 0, 4096).is_err());
        }
        assert_eq!(view.take(7).expect("room").filled().as_ref(), b"content");
    }

    #[test]
    #[expect(unsafe_code, reason = "an attack by a mapping")]
    fn a_client_that_writes_into_its_window_harms_itself_alone() {
        let mut memory = memory(8192);
        memory.write_all(&[0; 8192]).expect("written");
        // SAFETY: the test reads these bytes by this mapping only, and expects that they change.
        let mut scribbled = unsafe { MmapMut::map_mut(&memory) }.expect("before the seal");
        let mut window = Window::accept(&memory.into(), MIB).expect("a window");
        let (view, mut of_other, _) = pair(8192);
        let other = view.take(8192).expect("room");
        for round in 1..100_u8 {
            assert!(window.put(0, &[round; 8192]));
            assert!(scribbled.iter().all(|byte| *byte == round), "the server's bytes");
            scribbled.fill(0xff);
            assert!(of_other.put(other.offset(), &[round; 8192]));
        }
        assert_eq!(other.filled().as_ref(), &[99; 8192][..]);
    }

    /// Makes memory as a client would that does not follow the rules.
    fn memory(len: u64) -> File {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("attack", flags).expect("memory"));
        file.set_len(len).expect("a length");
        file
    }

    fn refused(file: File) -> BadWindow {
        Window::accept(&file.into(), MIB).expect_err("it is refused")
    }

    #[test]
    fn i6_memory_that_the_server_would_have_to_pay_for_is_refused() {
        assert!(matches!(refused(memory(8192)), BadWindow::Hole(0)), "no page");
        let mut half = memory(8192);
        half.write_all(&[1; 4096]).expect("written");
        assert!(matches!(refused(half), BadWindow::Hole(4096)), "one page of two");
        // As many pages as it is long, but behind its end.
        let beyond = memory(8192);
        let further = rustix::fs::fallocate(&beyond, FallocateFlags::KEEP_SIZE, 8192, 8192);
        further.expect("pages behind the end");
        assert!(matches!(refused(beyond), BadWindow::Hole(0)));
        let mut whole = memory(8192);
        whole.write_all(&[1; 8192]).expect("written");
        assert!(Window::accept(&whole.into(), MIB).is_ok());
    }

    #[test]
    fn memory_of_another_kind_or_length_is_refused() {
        assert!(matches!(refused(memory(0)), BadWindow::Length(0)));
        assert!(matches!(refused(memory(u64::from(MIB) + 1)), BadWindow::Length(1_048_577)));
        assert!(matches!(refused(memory(1 << 40)), BadWindow::Length(_)));
        // /dev is memory, too, on some systems.
        let null = refused(File::open("/dev/null").expect("opens"));
        assert!(matches!(null, BadWindow::Kind | BadWindow::Length(0)));
        assert!(matches!(refused(File::open("/proc/self/exe").expect("opens")), BadWindow::Kind));
        let (_, file) = View::new(4096).expect("memory");
        let path = format!("/proc/self/fd/{}", {
            use std::os::fd::AsRawFd as _;
            file.as_raw_fd()
        });
        let read_only = File::open(path).expect("opens");
        assert!(matches!(refused(read_only), BadWindow::System(_)), "a descriptor that only reads");
        assert!(Window::accept(&file, MIB).is_ok());
        assert!(matches!(refused(file.into()), BadWindow::System(_)), "it has a server already");
        // No seals for files that are no memory of one process.
        if let Ok(mut shared) = tempfile::tempfile_in("/dev/shm") {
            shared.write_all(&[1; 4096]).expect("written");
            assert!(matches!(refused(shared), BadWindow::System(_)));
        }
        let huge = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        if let Ok(huge) = rustix::fs::memfd_create("huge", huge) {
            assert!(matches!(refused(huge.into()), BadWindow::Kind));
        }
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
