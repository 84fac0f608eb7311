//! The workers that a keeper starts itself, one after the other.

use super::SOCKET_VARIABLE;
use anyhow::{Context, Result};
use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    sys::{
        signal::{Signal, kill},
        socket::{AddressFamily, SockFlag, SockType, socketpair},
    },
    unistd::Pid,
};
use std::{
    fs, io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::process::ExitStatusExt as _,
    },
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

/// The pause before another worker is started, if the last one died early. It doubles with each of these.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A worker that served for so long did not die early, as one does whose next request kills it again.
const SETTLED_AFTER: Duration = Duration::from_millis(100);

/// Starts one worker when the last one ended.
pub(super) struct OwnWorkers {
    /// The program of the workers, as a path: an upgrade puts another file there.
    program: PathBuf,
    job: String,
    /// How the last one ended, until [`OwnWorkers::outcome`] looks at it.
    ended: Option<ExitStatus>,
    /// While none runs after one that ended: whether a signal ended it.
    was_killed: Option<bool>,
    pause: Duration,
    start_at: Instant,
}

impl OwnWorkers {
    pub fn new(job: String) -> Result<Self> {
        let program = std::env::current_exe().context("finding the path of this program")?;
        Ok(OwnWorkers {
            program,
            job,
            ended: None,
            was_killed: None,
            pause: PAUSE_MIN,
            start_at: Instant::now(),
        })
    }

    /// Notes how a worker ended, and when it last took something over.
    pub fn note_end(&mut self, end: ExitStatus, attached_at: Option<Instant>) {
        self.ended = Some(end);
        if attached_at.is_some_and(|at| at.elapsed() > SETTLED_AFTER) {
            (self.pause, self.start_at) = (PAUSE_MIN, Instant::now());
        } else {
            self.wait();
        }
    }

    fn wait(&mut self) {
        self.start_at = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(PAUSE_MAX);
    }

    /// Returns the exit code of the keeper if no other worker is to be started. Called while none runs.
    pub fn outcome(&mut self, is_ending: bool, is_keeping: impl Fn(bool) -> bool) -> Option<u8> {
        if let Some(status) = self.ended.take() {
            let killed = status.signal().is_some();
            // As a shell tells it.
            let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
            let code = u8::try_from(code).unwrap_or(1);
            // A worker that ends by itself, and leaves no mount, has said why.
            if is_ending || code == 0 || !is_keeping(killed) {
                return Some(code);
            }
            tracing::error!(code, "the process that serves the mount died: readers wait for the next one");
            self.was_killed = Some(killed);
        }
        // Meanwhile somebody unmounted it.
        let is_over = is_ending || self.was_killed.is_some_and(|killed| !is_keeping(killed));
        is_over.then_some(0)
    }

    /// Starts a worker if it is time to. Returns its socket and its process.
    pub fn start(&mut self, is_keeping: bool) -> Result<Option<(OwnedFd, Child)>> {
        if Instant::now() < self.start_at {
            return Ok(None);
        }
        self.was_killed = None;
        match self.spawn(is_keeping) {
            Ok(started) => Ok(Some(started)),
            // An upgrade may just replace the program, or the machine has no room: the mount outlives that.
            Err(error) if is_keeping => {
                tracing::error!(%error, "cannot start a process for the mount");
                self.wait();
                Ok(None)
            }
            Err(error) => Err(error).context("starting the process that serves the mount"),
        }
    }

    fn spawn(&self, is_keeping: bool) -> io::Result<(OwnedFd, Child)> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        // The worker inherits its end.
        fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty()))?;
        let mut command = Command::new(&self.program);
        command.args(std::env::args_os().skip(1)).env("FLETCH_JOB", &self.job);
        command.env(SOCKET_VARIABLE, theirs.as_raw_fd().to_string());
        if is_keeping {
            // Whoever started the mount in the background has heard that it is usable.
            command.stdout(Stdio::null());
        }
        Ok((ours, command.spawn()?))
    }
}

/// Has a worker unmount and end. It fails if the process is gone already, and that is the next event.
pub(super) fn terminate(child: &Child) {
    let _gone = kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM);
}

/// Returns whether a process has died. Its threads may not all have.
///
/// Neither its socket nor a signal says so before the last thread is gone; and that one may wait for a page
/// that is locked until a request is answered.
pub(super) fn is_zombie(child: &Child) -> bool {
    // The keeper may have no descriptor left. The process cannot go without being waited for.
    let Ok(stat) = fs::read_to_string(format!("/proc/{}/stat", child.id())) else { return false };
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    matches!(state, Some('Z' | 'X'))
}
