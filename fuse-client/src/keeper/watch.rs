//! The descriptors that a keeper waits for.

use nix::{
    errno::Errno,
    sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
};
use std::{cell::Cell, io, os::fd::AsFd, rc::Rc, time::Duration};

/// Waits for all descriptors at once.
pub(super) struct Watch {
    epoll: Epoll,
    next: Cell<u64>,
}

/// A descriptor that is waited for, with its number. It must be taken out when it goes: a worker has the same
/// open device, which the system would wait for until the worker closes it, too.
pub(super) struct Watched<T: AsFd> {
    pub descriptor: T,
    pub key: u64,
    watch: Rc<Watch>,
}

impl Watch {
    pub fn new() -> io::Result<Rc<Self>> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        Ok(Rc::new(Watch { epoll, next: Cell::new(0) }))
    }

    /// Waits for a descriptor, too. The failure of a device needs no flag: nothing is mounted then.
    pub fn add<T: AsFd>(self: &Rc<Self>, descriptor: T, flags: EpollFlags) -> io::Result<Watched<T>> {
        let key = self.next.replace(self.next.get() + 1);
        self.epoll.add(&descriptor, EpollEvent::new(flags, key))?;
        Ok(Watched { descriptor, key, watch: Rc::clone(self) })
    }

    /// Returns the number of a descriptor with something new; `None` after a time without.
    pub fn wait(&self, within: Duration) -> io::Result<Option<u64>> {
        let mut events = [EpollEvent::empty()];
        let timeout = EpollTimeout::try_from(within).unwrap_or(EpollTimeout::MAX);
        match self.epoll.wait(&mut events, timeout) {
            Ok(0) | Err(Errno::EINTR) => Ok(None),
            Ok(_) => Ok(Some(events[0].data())),
            Err(error) => Err(error.into()),
        }
    }
}

impl<T: AsFd> Drop for Watched<T> {
    fn drop(&mut self) {
        if let Err(error) = self.watch.epoll.delete(&self.descriptor) {
            tracing::error!(%error, "cannot leave a descriptor: please report this line");
        }
    }
}
