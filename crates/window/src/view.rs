//! The side of the client.

use crate::places::Places;
use memmap2::Mmap;
use rustix::fs::SealFlags;
use std::{
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// A window cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BadWindow {
    /// It is not sealed: its server could take pages away under a reader.
    #[error("the memory is not sealed")]
    NotSealed,
    /// It is empty, or longer than an offset can say.
    #[error("the memory has a length of {0} bytes")]
    Length(u64),
    /// The system rejected it.
    #[error("the memory cannot be mapped: {0}")]
    System(#[from] io::Error),
}

/// The client's side of a window. It can only read.
#[derive(Debug)]
pub struct View {
    map: Mmap,
    places: Mutex<Places>,
}

impl View {
    /// Maps a window that a server sent.
    ///
    /// # Errors
    /// [`BadWindow`].
    pub fn new(file: &OwnedFd) -> Result<Arc<Self>, BadWindow> {
        let seals = rustix::fs::fcntl_get_seals(file).map_err(io::Error::from)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(BadWindow::NotSealed);
        }
        let bytes = rustix::fs::fstat(file).map_err(io::Error::from)?.st_size;
        let bytes = u64::try_from(bytes).unwrap_or(0);
        let len = u32::try_from(bytes).ok().filter(|len| *len > 0).ok_or(BadWindow::Length(bytes))?;
        Ok(Arc::new(View { map: map(file)?, places: Mutex::new(Places::new(len)) }))
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        // Each method leaves them whole.
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
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

/// Maps the memory to be read.
#[expect(unsafe_code, reason = "a mapping is plain memory only while nobody else changes its file")]
fn map(file: &OwnedFd) -> io::Result<Mmap> {
    // SAFETY: the length cannot change (checked above). The server changes bytes only of a place that the
    // client named in a request without an answer. Only `Filled` reads bytes, after the answer, and
    // while it lives no request names its place. The server is trusted with this as with its answers.
    unsafe { Mmap::map(file) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Window;
    use memmap2::MmapMut;
    use rustix::fs::MemfdFlags;
    use std::{fs::File, io::Write as _, os::fd::AsFd as _};

    fn client_file(window: &Window) -> OwnedFd {
        window.as_fd().try_clone_to_owned().expect("a descriptor")
    }

    #[test]
    fn what_the_server_puts_the_client_sees_where_it_asked_for_it() {
        let mut window = Window::new(1 << 20).expect("memory");
        let view = View::new(&client_file(&window)).expect("a window");
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
        assert!(!window.put((1 << 20) - 1, b"ab") && !window.put(u32::MAX, b"a"), "past the end");
        drop(window);
        assert_eq!(again.as_ref(), b"new", "what is held outlives the server");
    }

    #[test]
    #[expect(unsafe_code, reason = "an attack by a mapping")]
    fn i1_a_client_cannot_write() {
        let mut window = Window::new(4096).expect("memory");
        assert!(window.put(0, b"content"));
        let file = client_file(&window);
        // SAFETY: the mapping must fail; if it does not, nobody writes through it.
        let mapped = unsafe { MmapMut::map_mut(&file) };
        assert!(mapped.is_err(), "a writable mapping");
        let mut file = File::from(file);
        assert!(file.write_all(b"x").is_err(), "a write");
        assert!(file.set_len(0).is_err() && file.set_len(8192).is_err(), "another length");
        let seals = rustix::fs::fcntl_add_seals(&file, SealFlags::empty());
        assert!(seals.is_err(), "further seals");
        let reopened = File::options().write(true).open(format!("/proc/self/fd/{}", {
            use std::os::fd::AsRawFd as _;
            file.as_raw_fd()
        }));
        if let Ok(mut reopened) = reopened {
            assert!(reopened.write_all(b"x").is_err(), "a write by another descriptor");
        }
        let view = View::new(&client_file(&window)).expect("a window");
        assert_eq!(view.take(7).expect("room").filled().as_ref(), b"content");
    }

    #[test]
    fn memory_that_its_server_could_take_away_is_refused() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("not-sealed", flags).expect("memory");
        rustix::fs::ftruncate(&file, 4096).expect("a length");
        assert!(matches!(View::new(&file), Err(BadWindow::NotSealed)));
        let seals = SealFlags::SHRINK | SealFlags::GROW;
        rustix::fs::fcntl_add_seals(&file, seals).expect("sealed");
        assert_eq!(View::new(&file).expect("a window").bytes(), 4096);
        let empty = rustix::fs::memfd_create("empty", flags).expect("memory");
        rustix::fs::fcntl_add_seals(&empty, seals).expect("sealed");
        assert!(matches!(View::new(&empty), Err(BadWindow::Length(0))));
        let pipe = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty());
        assert!(matches!(View::new(&pipe.expect("open")), Err(BadWindow::System(_))), "no memory at all");
    }

    #[test]
    fn a_full_window_has_no_place_until_one_is_dropped() {
        let window = Window::new(8192).expect("memory");
        let view = View::new(&client_file(&window)).expect("a window");
        let (a, b) = (view.take(4096).expect("room"), view.take(4096).expect("room"));
        assert!(view.take(1).is_none());
        drop(a);
        assert_eq!(view.take(4096).expect("room").offset(), 0);
        drop(b);
    }
}
