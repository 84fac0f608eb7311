//! The keeper of one process: it starts one worker after the other.

use super::mount_set::{MountSet, MountSetRules, Watched};
use super::{SOCKET_VARIABLE, end_signals};
use anyhow::{Context, Result};
use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    sys::{
        signal::{Signal, kill},
        signalfd::{SfdFlags, SignalFd},
        socket::{AddressFamily, SockFlag, SockType, socketpair},
    },
    unistd::Pid,
};
use std::{
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
/// How often the keeper looks at its clocks, and whether its worker lives.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A worker that has said nothing for half of the time that a read may take is stopped, or hangs in the
/// kernel: it is killed. These are the bounds of that time. A worker speaks every second.
const FROZEN_AFTER_MIN: Duration = Duration::from_secs(4);
const FROZEN_AFTER_MAX: Duration = Duration::from_secs(30);

/// The exit code of a process that SIGKILL ended, as a shell tells it.
const KILLED: u8 = 137;

/// What a keeper does for its workers.
#[derive(Debug)]
pub struct Rules {
    /// How long a mount may wait for a worker.
    pub io_timeout: Duration,
    /// What a worker accounts its reads to. Its own name for that has the number of its process.
    pub job: String,
    /// The file system of links with the mounts below it, if the workers make one.
    pub links: Option<PathBuf>,
}

/// What ended a wait.
enum Event {
    /// The worker wrote, or is gone.
    Worker,
    Signal,
    /// It is time to look at the clocks.
    Clock,
}

struct Keeper {
    watched: Watched,
    signals: SignalFd,
    signals_key: u64,
    /// The program of the workers, as a path: an upgrade puts another file there.
    program: PathBuf,
    job: String,
    set: MountSet,
    /// Whether a signal said that the mounts are to end.
    is_ending: bool,
    /// Workers that died, of which a thread still waits in the kernel for a page that a request has locked.
    /// The next worker answers that request. With the numbers of their sockets.
    lingering: Vec<(u64, Child)>,
}

/// Returns a descriptor for the signals that end a mount. Called while the process has one thread.
pub(super) fn block_end_signals() -> Result<SignalFd> {
    let ends = end_signals();
    ends.thread_block().context("blocking signals")?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    SignalFd::with_flags(&ends, flags).context("listening for signals")
}

/// Keeps what its workers mount, until a signal, or until somebody unmounts it. Returns the exit code. Called
/// while the process has one thread.
///
/// # Errors
/// A worker cannot be started, or the system has no room for a descriptor.
pub fn run(rules: Rules) -> Result<u8> {
    let signals = block_end_signals()?;
    let mut watched = Watched::new().context("waiting for events")?;
    let signals_key = watched.add(&signals).context("waiting for signals")?;
    let Rules { io_timeout, job, links } = rules;
    let set = MountSet::new(MountSetRules { io_timeout, links, below: None });
    let program = std::env::current_exe().context("finding the path of this program")?;
    let (is_ending, lingering) = (false, Vec::new());
    Keeper { watched, signals, signals_key, program, job, set, is_ending, lingering }.run()
}

impl Keeper {
    fn run(mut self) -> Result<u8> {
        let mut pause = PAUSE_MIN;
        loop {
            self.set.attached_at = None;
            let ended = self.serve().context("starting the process that serves the mount")?;
            let code = ended.map_or(KILLED, exit_code);
            // What happened while the keeper did something else.
            while !matches!(self.wait(Duration::ZERO)?, Event::Clock) {}
            if self.is_ending || code == 0 {
                self.set.unmount()?;
                return Ok(code);
            }
            // A worker that ends by itself, and leaves no mount, has said why.
            let was_killed = ended.is_none_or(|status| status.signal().is_some());
            if !self.set.is_keeping(was_killed) {
                return Ok(code);
            }
            tracing::error!(code, "the process that serves the mount died: readers wait for the next one");
            if self.set.attached_at.is_some_and(|at| at.elapsed() > SETTLED_AFTER) {
                pause = PAUSE_MIN;
                continue;
            }
            self.wait_without_worker(Instant::now() + pause)?;
            pause = (pause * 2).min(PAUSE_MAX);
            if self.is_ending {
                self.set.unmount()?;
                return Ok(0);
            }
            if !self.set.is_keeping(was_killed) {
                return Ok(0);
            }
        }
    }

    /// Starts a worker, and does what it asks for until it is dead. Returns how it ended; `None` if it was
    /// killed and lingers.
    fn serve(&mut self) -> Result<Option<ExitStatus>> {
        let (socket, mut worker) = match self.start_worker() {
            Ok(started) => started,
            // An upgrade may just replace the program, or the machine has no room: the mount outlives that.
            Err(error) if self.set.is_keeping(true) => {
                tracing::error!(error = format!("{error:#}"), "cannot start a process for the mount");
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let key = self.watched.add(&socket)?;
        let pid = Pid::from_raw(i32::try_from(worker.id()).unwrap_or(i32::MAX));
        let mut spoke_at = Instant::now();
        let frozen_after = (self.set.rules.io_timeout / 2).clamp(FROZEN_AFTER_MIN, FROZEN_AFTER_MAX);
        let lingers = loop {
            let was_ending = self.is_ending;
            match self.wait(LOOK_EVERY)? {
                Event::Worker => {
                    spoke_at = Instant::now();
                    if !self.set.answer((key, &socket), &mut self.watched)? {
                        break false;
                    }
                }
                Event::Signal => end(pid, Signal::SIGTERM),
                Event::Clock if is_dead(pid) => break true,
                Event::Clock => {
                    self.look()?;
                    if spoke_at.elapsed() > frozen_after && !was_ending {
                        let silent = frozen_after;
                        tracing::error!(?silent, "killing a process that does not run any more");
                        end(pid, Signal::SIGKILL);
                        spoke_at = Instant::now();
                    }
                }
            }
        };
        self.watched.remove(&socket)?;
        self.set.has_ended(key);
        if lingers {
            self.lingering.push((key, worker));
            return Ok(None);
        }
        self.set.is_gone(key);
        Ok(Some(worker.wait()?))
    }

    /// Does what is due from time to time.
    fn look(&mut self) -> Result<()> {
        let is_gone = |(_, worker): &mut (u64, Child)| matches!(worker.try_wait(), Ok(Some(_)) | Err(_));
        for (key, _) in self.lingering.extract_if(.., is_gone) {
            self.set.is_gone(key);
        }
        self.set.tend_late_requests()
    }

    fn start_worker(&self) -> Result<(OwnedFd, Child)> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        // The worker inherits its end.
        fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty()))?;
        let mut command = Command::new(&self.program);
        command.args(std::env::args_os().skip(1));
        command.env(SOCKET_VARIABLE, theirs.as_raw_fd().to_string());
        command.env("FLETCH_JOB", &self.job);
        if self.set.is_keeping(true) {
            // Whoever started the mount in the background has heard that it is usable.
            command.stdout(Stdio::null());
        }
        Ok((ours, command.spawn()?))
    }

    /// Waits for an event, and lets go of mounts that are gone. The worker sees that, too: it ends if it has
    /// no other mount.
    fn wait(&mut self, within: Duration) -> Result<Event> {
        loop {
            return Ok(match self.watched.wait(within)? {
                None => Event::Clock,
                Some(key) if key == self.signals_key => {
                    while self.signals.read_signal()?.is_some() {}
                    self.is_ending = true;
                    Event::Signal
                }
                Some(key) if self.set.forget(key, &self.watched)? => continue,
                Some(_) => Event::Worker,
            });
        }
    }

    fn wait_without_worker(&mut self, until: Instant) -> Result<()> {
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|t| !t.is_zero()) {
            self.wait(left.clamp(Duration::from_millis(1), LOOK_EVERY))?;
            self.look()?;
            if self.is_ending || !self.set.is_keeping(true) {
                break;
            }
        }
        Ok(())
    }
}

/// Sends a signal. It fails if the process is gone already, and that is the next event.
fn end(pid: Pid, signal: Signal) {
    let _gone = kill(pid, signal);
}

/// Returns whether a process has died. Its threads may not all have.
///
/// Neither its socket nor a signal says so before the last thread is gone; and that one may wait for a page
/// that is locked until a request is answered.
fn is_dead(pid: Pid) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return true };
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    matches!(state, Some('Z' | 'X'))
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    u8::try_from(code.unwrap_or(1)).unwrap_or(1)
}
