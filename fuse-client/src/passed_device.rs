//! Messages between processes that may carry an open device.

use nix::{
    cmsg_space,
    errno::Errno,
    sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, UnixAddr, recvmsg, sendmsg},
};
use std::{
    io::{self, IoSlice, IoSliceMut},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

/// Sends bytes, and a device with them. Does not wait for room.
///
/// # Errors
/// The error of the system; the other process may be gone, or may not read its messages.
pub fn send(socket: &OwnedFd, bytes: &[u8], device: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let device: Vec<RawFd> = device.iter().map(|device| device.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&device)];
    let control = if device.is_empty() { &[][..] } else { &rights[..] };
    let parts = [IoSlice::new(bytes)];
    loop {
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        match sendmsg::<UnixAddr>(socket.as_fd().as_raw_fd(), &parts, control, flags, None) {
            Err(Errno::EINTR) => {}
            sent => return sent.map(|_| ()).map_err(io::Error::from),
        }
    }
}

/// Waits for a message. Returns how many bytes of it are in `buffer`, and the device that came with it. There
/// are no bytes if the other process is gone.
///
/// # Errors
/// The error of the system.
#[expect(unsafe_code, reason = "the kernel made new descriptors for this process")]
pub fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = cmsg_space!(RawFd);
    let mut parts = [IoSliceMut::new(buffer)];
    let message = loop {
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        match recvmsg::<UnixAddr>(socket.as_raw_fd(), &mut parts, Some(&mut space), flags) {
            Err(Errno::EINTR) => {}
            received => break received?,
        }
    };
    let mut device = None;
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(descriptors) = control {
            // SAFETY: each of these descriptors was received just now, and nothing else owns it.
            device = descriptors.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).next();
        }
    }
    Ok((message.bytes, device))
}
