//! The worker's end: how it gets the device of its mount.

use super::{Answer, Ask, MESSAGE_BYTES_MAX, SOCKET_VARIABLE, State, end_signals};
use crate::fuse::FuseSession;
use crate::passed_device;
use crate::requests::RequestContext;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use std::{
    io,
    os::fd::{FromRawFd, OwnedFd, RawFd},
};

/// The keeper of this process's mount. The keeper sees that the worker is gone when this is closed.
#[derive(Debug)]
pub struct Keeper(OwnedFd);

impl Keeper {
    /// Returns whether a keeper started this process.
    #[must_use]
    pub fn is_there() -> bool {
        std::env::var_os(SOCKET_VARIABLE).is_some()
    }

    /// Returns the keeper that started this process, and what it keeps for it. Called once, while the process
    /// has one thread.
    ///
    /// # Errors
    /// The variable names no socket, or the keeper is gone.
    #[expect(unsafe_code, reason = "the keeper left this descriptor open for this process alone")]
    pub fn of_process() -> io::Result<Option<(Self, Option<State>)>> {
        let Some(number) = std::env::var(SOCKET_VARIABLE).ok().and_then(|n| n.parse::<RawFd>().ok()) else {
            return Ok(None);
        };
        // SAFETY: the keeper passed the descriptor on for this process, which takes it here and nowhere else.
        let socket = unsafe { OwnedFd::from_raw_fd(number) };
        fcntl(&socket, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        end_signals().thread_unblock()?;
        let keeper = Keeper(socket);
        match keeper.ask(&Ask::Hello)? {
            (Answer::Kept(state), _) => Ok(Some((keeper, state))),
            _ => Err(unexpected()),
        }
    }

    /// Has the keeper mount, and returns the session.
    ///
    /// # Errors
    /// As [`crate::fuse::mount`].
    pub fn mount(
        &self,
        fs: &RequestContext,
        source: String,
        allow_other: bool,
        state: State,
    ) -> io::Result<FuseSession> {
        self.session(fs, &Ask::Mount { source, allow_other, state })
    }

    /// Takes over the mount that the keeper has.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn attach(&self, fs: &RequestContext) -> io::Result<FuseSession> {
        self.session(fs, &Ask::Attach)
    }

    fn session(&self, fs: &RequestContext, ask: &Ask) -> io::Result<FuseSession> {
        match self.ask(ask)? {
            (Answer::Device(agreed), Some(device)) => Ok(FuseSession::new(fs, device, agreed)),
            (Answer::Failed { errno: Some(errno), .. }, _) => Err(io::Error::from_raw_os_error(errno)),
            (Answer::Failed { is_denied, why, .. }, _) => {
                let kind = if is_denied { io::ErrorKind::PermissionDenied } else { io::ErrorKind::Other };
                Err(io::Error::new(kind, why))
            }
            _ => Err(unexpected()),
        }
    }

    fn ask(&self, ask: &Ask) -> io::Result<(Answer, Option<OwnedFd>)> {
        passed_device::send(&self.0, &serde_json::to_vec(ask)?, None)?;
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        let (len, device) = passed_device::receive(&self.0, &mut buffer)?;
        if len == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the keeper of the mount is gone"));
        }
        Ok((serde_json::from_slice(&buffer[..len])?, device))
    }
}

fn unexpected() -> io::Error {
    io::Error::other("the keeper of the mount answers something else")
}
