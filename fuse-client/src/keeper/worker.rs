//! The worker's end: how it gets the devices of its mounts.

use super::{Answer, Ask, MESSAGE_BYTES_MAX, SOCKET_VARIABLE, State, end_signals};
use crate::fuse::{self, FuseSession};
use crate::passed_device;
use crate::requests::RequestContext;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use parking_lot::Mutex;
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    path::PathBuf,
};

/// The keeper of this process's mounts. The keeper sees that the worker is gone when this is closed.
#[derive(Debug)]
pub struct Keeper(Mutex<OwnedFd>);

impl Keeper {
    /// Returns whether a keeper started this process.
    #[must_use]
    pub fn is_there() -> bool {
        std::env::var_os(SOCKET_VARIABLE).is_some()
    }

    /// Returns the keeper that started this process. Called once, while the process has one thread.
    ///
    /// # Errors
    /// The variable names no socket.
    #[expect(unsafe_code, reason = "the keeper left this descriptor open for this process alone")]
    pub fn of_process() -> io::Result<Option<Self>> {
        let Some(number) = std::env::var(SOCKET_VARIABLE).ok().and_then(|n| n.parse::<RawFd>().ok()) else {
            return Ok(None);
        };
        // SAFETY: the keeper passed the descriptor on for this process, which takes it here and nowhere else.
        let socket = unsafe { OwnedFd::from_raw_fd(number) };
        fcntl(&socket, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        end_signals().thread_unblock()?;
        Ok(Some(Keeper(Mutex::new(socket))))
    }

    /// Returns the mounts that are kept, in the order of their directories.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn kept(&self) -> io::Result<Vec<State>> {
        let mut all: Vec<State> = Vec::new();
        loop {
            let after = all.last().map(|state| state.dir.clone());
            match self.ask(&Ask::Kept { after }, None)? {
                (Answer::Kept(Some(state)), _) => all.push(state),
                (Answer::Kept(None), _) => return Ok(all),
                _ => return Err(unexpected()),
            }
        }
    }

    /// Has the keeper mount, and returns the session. Mounts by itself if the keeper is gone: such a mount
    /// ends with this process.
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
        let dir = state.dir.clone();
        match self.session(fs, &Ask::Mount { source: source.clone(), allow_other, state }) {
            Err(e) if is_gone(&e) => {
                tracing::warn!(dir = %dir.display(), "the keeper is gone: a mount ends with this process");
                fuse::mount(fs, &dir, &source, allow_other)
            }
            session => session,
        }
    }

    /// Takes over the mount that the keeper has at a directory.
    ///
    /// # Errors
    /// The keeper is gone, or has none there.
    pub fn attach(&self, fs: &RequestContext, dir: PathBuf) -> io::Result<FuseSession> {
        self.session(fs, &Ask::Attach { dir })
    }

    /// Has the keeper answer EIO to what reads the mount at a directory, until a worker takes it over.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn give_up(&self, dir: PathBuf) -> io::Result<()> {
        self.ask(&Ask::GiveUp { dir }, None).map(|_| ())
    }

    /// Returns whether the keeper has ended.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.kept().is_err_and(|e| is_gone(&e))
    }

    /// Has the keeper hold a descriptor for the next worker.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn hold(&self, descriptor: &impl AsFd) -> io::Result<()> {
        self.ask(&Ask::Hold, Some(descriptor.as_fd())).map(|_| ())
    }

    /// Returns the descriptor that an earlier worker had the keeper hold.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn held(&self) -> io::Result<Option<OwnedFd>> {
        self.ask(&Ask::Held, None).map(|(_, descriptor)| descriptor)
    }

    fn session(&self, fs: &RequestContext, ask: &Ask) -> io::Result<FuseSession> {
        match self.ask(ask, None)? {
            (Answer::Device(agreed), Some(device)) => Ok(FuseSession::new(fs, device, agreed)),
            (Answer::Failed { errno: Some(errno), .. }, _) => Err(io::Error::from_raw_os_error(errno)),
            (Answer::Failed { is_denied, why, .. }, _) => {
                let kind = if is_denied { io::ErrorKind::PermissionDenied } else { io::ErrorKind::Other };
                Err(io::Error::new(kind, why))
            }
            _ => Err(unexpected()),
        }
    }

    fn ask(&self, ask: &Ask, descriptor: Option<BorrowedFd<'_>>) -> io::Result<(Answer, Option<OwnedFd>)> {
        // One question at a time, so that each gets its own answer.
        let socket = self.0.lock();
        passed_device::send(&socket, &serde_json::to_vec(ask)?, descriptor)?;
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        let (len, device) = passed_device::receive(&socket, &mut buffer)?;
        if len == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the keeper of the mount is gone"));
        }
        Ok((serde_json::from_slice(&buffer[..len])?, device))
    }
}

/// Whether an answer says that the keeper is gone.
fn is_gone(e: &io::Error) -> bool {
    matches!(
        e.kind(),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}

fn unexpected() -> io::Error {
    io::Error::other("the keeper of the mount answers something else")
}
