//! A mounted FUSE session: how it begins, and what it tells the kernel without being asked.
//!
//! [`crate::session`] serves its requests.

use crate::access::{Access, KernelCache};
use crate::fuse_wire::{self as wire, Notification};
use crate::handshake::{Agreed, Answer, Init};
use crate::leaving::Push;
use crate::push::PageCache;
use crate::requests::RequestContext;
use crate::session::BUFFER_BYTES;
use crate::{fusermount, kernel_mount, unmount};
use nix::{
    errno::Errno,
    sys::uio::writev,
    time::{ClockId, clock_gettime},
    unistd,
};
use std::{
    env,
    io::{self, IoSlice},
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
    sync::{Arc, atomic::Ordering::Relaxed},
};

/// If this variable of the environment is set, a mount uses its kernel as one before Linux 6.9. For tests.
const OLD_KERNEL_VARIABLE: &str = "FLETCH_TEST_OLD_KERNEL";

/// A mounted session that does not serve requests yet. Dropping it does not unmount.
pub struct FuseSession {
    device: Arc<OwnedFd>,
    access: Arc<Access>,
}

/// Mounts at `dir` and agrees with the kernel on the protocol. Blocks.
///
/// # Errors
/// The error of the kernel or of `fusermount3`. Nothing stays mounted then.
pub fn mount(fs: &RequestContext, dir: &Path, name: &str, allow_other: bool) -> io::Result<FuseSession> {
    let device = open(dir, name, allow_other)?;
    let agreed = agree(&device).inspect_err(|_| abandon(dir))?;
    Ok(FuseSession::new(fs, device, agreed))
}

/// Mounts at `dir` with the rights that this process has, and returns the device. Blocks.
///
/// # Errors
/// As [`mount`].
pub fn open(dir: &Path, source: &str, allow_other: bool) -> io::Result<OwnedFd> {
    let dir = dir.canonicalize()?;
    match kernel_mount::mount_fuse(&dir, source, allow_other) {
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => fusermount::mount(&dir, source, allow_other),
        mounted => mounted,
    }
}

/// Makes the kernel send every request again that was read from the device and not answered.
///
/// # Errors
/// The mount is gone, or the kernel is older than Linux 6.9.
pub fn resend(device: &OwnedFd) -> io::Result<()> {
    notify(device, Notification::Resend, &[], &[])
}

/// Removes a mount that nobody will serve.
pub fn abandon(dir: &Path) {
    if let Err(why) = unmount::detach(dir) {
        tracing::warn!(dir = %dir.display(), why, "a mount that failed is still there: unmount it");
    }
}

/// Answers the INIT of a mount that was made just now. Blocks.
///
/// # Errors
/// The kernel is too old, or another program unmounted it.
pub fn agree(device: &OwnedFd) -> io::Result<Agreed> {
    let mut buffer = vec![0; BUFFER_BYTES];
    // Two mounts do not begin in the same nanosecond, and the clock does not go back.
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME)?;
    let tag = now.tv_sec().cast_unsigned() * 1_000_000_000 + now.tv_nsec().cast_unsigned();
    let may_resend = env::var_os(OLD_KERNEL_VARIABLE).is_none();
    loop {
        let len = match unistd::read(device, &mut buffer) {
            Err(Errno::EINTR | Errno::ENOENT) => continue,
            read => read?,
        };
        let init = Init::parse(&buffer[..len]).map_err(io::Error::other)?;
        match init.answer(tag, may_resend).map_err(io::Error::other)? {
            Answer::Again(reply) => unistd::write(device, &reply)?,
            Answer::Agreed(reply, agreed) => {
                unistd::write(device, &reply)?;
                tracing::debug!(?agreed, "the kernel and the mount agreed on the protocol");
                return Ok(agreed);
            }
        };
    }
}

impl FuseSession {
    /// Returns the session of a mount's device, whose requests `fs` answers.
    #[must_use]
    pub fn new(fs: &RequestContext, device: OwnedFd, agreed: Agreed) -> Self {
        fs.no_open.store(agreed.no_open, Relaxed);
        fs.no_opendir.store(agreed.no_opendir, Relaxed);
        FuseSession { device: Arc::new(device), access: Arc::clone(&fs.access) }
    }

    /// Returns the kernel's page cache, for pushing.
    #[must_use]
    pub fn page_cache(&self) -> impl PageCache + use<> {
        FusePageCache(Arc::clone(&self.device), Arc::clone(&self.access))
    }

    /// Returns the kernel's caches, for invalidation.
    #[must_use]
    pub fn kernel_cache(&self) -> Arc<dyn KernelCache> {
        Arc::new(KernelNotifier(Arc::clone(&self.device)))
    }

    /// Returns the device from which the requests of this mount are read, and to which replies are written.
    #[must_use]
    pub fn device(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.device)
    }
}

/// Tells the kernel something. It may wait for page locks.
fn notify(device: &OwnedFd, kind: Notification, head: &[u8], bytes: &[u8]) -> io::Result<()> {
    let header = wire::notification_header(kind, head.len() + bytes.len());
    let parts = [IoSlice::new(&header), IoSlice::new(head), IoSlice::new(bytes)];
    // The kernel takes a message whole or not at all.
    writev(device.as_fd(), &parts)?;
    Ok(())
}

struct KernelNotifier(Arc<OwnedFd>);

impl KernelCache for KernelNotifier {
    fn invalidate_inode(&self, ino: u64) -> io::Result<()> {
        notify(&self.0, Notification::InvalidateInode, &wire::invalidate_inode(ino, 0, 0), &[])
    }

    fn forget_attributes(&self, ino: u64) -> io::Result<()> {
        notify(&self.0, Notification::InvalidateInode, &wire::invalidate_inode(ino, -1, 0), &[])
    }

    fn invalidate_name(&self, parent: u64, name: &[u8]) -> io::Result<()> {
        notify(&self.0, Notification::InvalidateName, &wire::invalidate_name(parent, name), &[])
    }
}

struct FusePageCache(Arc<OwnedFd>, Arc<Access>);

impl PageCache for FusePageCache {
    fn store(&self, ino: u64, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let _in_flight = self.1.enter();
        let Some(_push) = Push::begin() else { return Err(io::ErrorKind::Interrupted.into()) };
        if let Some(errno) = self.1.refused() {
            return Err(io::Error::from_raw_os_error(errno));
        }
        notify(&self.0, Notification::Store, &wire::store_head(ino, offset, bytes.len()), bytes)
    }
}
