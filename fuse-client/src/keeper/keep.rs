//! The keeper's end: holds the device, and starts one worker after the other.

use super::{Answer, Ask, MESSAGE_BYTES_MAX, SOCKET_VARIABLE, State, end_signals};
use crate::cli::Settings;
use crate::fuse::{self, abandon};
use crate::fuse_wire::{self as wire, Operation};
use crate::handshake::Agreed;
use crate::session::BUFFER_BYTES;
use crate::{passed_device, unmount};
use anyhow::{Context, Result};
use fletch_host::mounts;
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, OFlag, fcntl},
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        signal::{Signal, kill},
        signalfd::{SfdFlags, SignalFd},
        socket::{AddressFamily, SockFlag, SockType, socketpair},
    },
    unistd::Pid,
};
use std::{
    io,
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
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

/// The exit code of a process that SIGKILL ended, as a shell tells it.
const KILLED: u8 = 137;

const SOCKET: u64 = 0;
const SIGNALS: u64 = 1;
const DEVICE: u64 = 2;

/// The mount that is kept.
struct Kept {
    device: OwnedFd,
    /// The number of the mount's device in the mount table.
    number: String,
    agreed: Agreed,
    state: State,
}

impl Kept {
    /// Whether somebody unmounted: then the kernel reports an error of the device.
    fn is_unmounted(&self) -> Result<bool> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&self.device, EpollEvent::new(EpollFlags::empty(), DEVICE))?;
        Ok(epoll.wait(&mut [EpollEvent::empty()], EpollTimeout::ZERO)? > 0)
    }

    /// Has the kernel send all unanswered requests again. It fails only if nothing is mounted any more, which
    /// the device tells, too.
    fn resend(&self) {
        if let Err(error) = fuse::resend(&self.device) {
            tracing::debug!(%error, "the kernel does not send requests again");
        }
    }
}

/// What ended a wait.
enum Event {
    /// The worker wrote, or is gone.
    Worker,
    Signal,
    /// Nothing is mounted any more.
    Unmounted,
    /// It is time to look at the clocks.
    Clock,
}

struct Keeper {
    epoll: Epoll,
    signals: SignalFd,
    /// The program of the workers, as a path: an upgrade puts another file there.
    program: PathBuf,
    io_timeout: Duration,
    /// What a worker accounts its reads to. Its own name for that has the number of its process.
    job: String,
    kept: Option<Kept>,
    /// Whether a signal said that the mount is to end.
    is_ending: bool,
    /// Since when no worker serves the mount.
    away_since: Option<Instant>,
    /// When the latest worker got the device.
    attached_at: Option<Instant>,
    /// Workers that died, of which a thread still waits in the kernel for a page that a request has locked.
    /// The next worker answers that request.
    lingering: Vec<Child>,
}

/// Keeps the mount that the settings name, until a signal, or until somebody unmounts it. Returns the exit
/// code. Called while the process has one thread.
///
/// # Errors
/// A worker cannot be started, or the system has no room for a descriptor.
pub fn run(settings: &Settings) -> Result<u8> {
    let ends = end_signals();
    ends.thread_block().context("blocking signals")?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let signals = SignalFd::with_flags(&ends, flags).context("listening for signals")?;
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("waiting for events")?;
    epoll.add(&signals, EpollEvent::new(EpollFlags::EPOLLIN, SIGNALS)).context("waiting for signals")?;
    let (io_timeout, job) = (settings.process.io_timeout, settings.process.job.to_string());
    Keeper {
        epoll,
        signals,
        program: std::env::current_exe().context("finding the path of this program")?,
        io_timeout,
        job,
        kept: None,
        is_ending: false,
        away_since: None,
        attached_at: None,
        lingering: Vec::new(),
    }
    .run()
}

impl Keeper {
    fn run(mut self) -> Result<u8> {
        let mut pause = PAUSE_MIN;
        loop {
            self.attached_at = None;
            let ended = self.serve().context("starting the process that serves the mount")?;
            let code = ended.map_or(KILLED, exit_code);
            let Some(kept) = &self.kept else { return Ok(code) };
            if kept.is_unmounted()? {
                return Ok(code);
            }
            if self.is_ending || code == 0 {
                self.unmount()?;
                return Ok(code);
            }
            tracing::error!(code, "the process that serves the mount died: readers wait for the next one");
            if self.attached_at.is_some_and(|at| at.elapsed() > SETTLED_AFTER) {
                pause = PAUSE_MIN;
                continue;
            }
            self.wait_without_worker(Instant::now() + pause)?;
            pause = (pause * 2).min(PAUSE_MAX);
            if self.is_ending {
                self.unmount()?;
                return Ok(0);
            }
            if let Some(kept) = &self.kept
                && kept.is_unmounted()?
            {
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
            Err(error) if self.kept.is_some() => {
                tracing::error!(error = format!("{error:#}"), "cannot start a process for the mount");
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        self.epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, SOCKET))?;
        let pid = Pid::from_raw(i32::try_from(worker.id()).unwrap_or(i32::MAX));
        let lingers = loop {
            match self.wait(LOOK_EVERY)? {
                Event::Worker => {
                    if !self.answer(&socket)? {
                        break false;
                    }
                }
                Event::Signal => {
                    self.is_ending = true;
                    // It is gone already if this fails, and that is the next event.
                    let _gone = kill(pid, Signal::SIGTERM);
                }
                // The worker sees that, too, and ends.
                Event::Unmounted => self.forget_device()?,
                Event::Clock if is_dead(pid) => break true,
                Event::Clock => self.look()?,
            }
        };
        self.epoll.delete(&socket)?;
        if let Some(kept) = &self.kept {
            self.away_since.get_or_insert_with(Instant::now);
            // At once: a request that a dead process has read could not even be given up by who made it.
            kept.resend();
        }
        if lingers {
            self.lingering.push(worker);
            return Ok(None);
        }
        Ok(Some(worker.wait()?))
    }

    /// Does what is due from time to time.
    fn look(&mut self) -> Result<()> {
        let before = self.lingering.len();
        self.lingering.retain_mut(|worker| !matches!(worker.try_wait(), Ok(Some(_)) | Err(_)));
        if self.lingering.len() < before
            && let Some(kept) = &self.kept
        {
            // One of its threads may have read a request when it died.
            kept.resend();
        }
        self.fail_late_requests()
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
        if self.kept.is_some() {
            // Whoever started the mount in the background has heard that it is usable.
            command.stdout(Stdio::null());
        }
        Ok((ours, command.spawn()?))
    }

    /// Answers one question of the worker. Returns whether the worker is still there.
    fn answer(&mut self, socket: &OwnedFd) -> Result<bool> {
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        let len = match passed_device::receive(socket, &mut buffer) {
            // It was killed before it read an answer if this fails.
            Ok((0, _)) | Err(_) => return Ok(false),
            Ok((len, _)) => len,
        };
        let answer = match serde_json::from_slice(&buffer[..len]) {
            // A later build may ask what this one does not know.
            Err(error) => Answer::failed(&error.into()),
            Ok(ask) => self.answer_to(ask),
        };
        let device = match (&answer, &self.kept) {
            (Answer::Device(_), Some(kept)) => {
                self.away_since = None;
                self.attached_at = Some(Instant::now());
                Some(kept.device.as_fd())
            }
            _ => None,
        };
        // The next event says so if it is gone.
        let _gone = passed_device::send(socket, &serde_json::to_vec(&answer)?, device);
        Ok(true)
    }

    fn answer_to(&mut self, ask: Ask) -> Answer {
        match ask {
            Ask::Hello => Answer::Kept(self.kept.as_ref().map(|kept| kept.state.clone())),
            Ask::Mount { source, allow_other, state } => match self.mount(&source, allow_other, state) {
                Ok(agreed) => Answer::Device(agreed),
                Err(error) => Answer::failed(&error),
            },
            Ask::Attach => match &self.kept {
                Some(kept) => {
                    kept.resend();
                    Answer::Device(kept.agreed)
                }
                None => Answer::failed(&io::Error::other("nothing is kept")),
            },
        }
    }

    fn mount(&mut self, source: &str, allow_other: bool, state: State) -> io::Result<Agreed> {
        let (device, agreed) = fuse::open(&state.dir, source, allow_other)?;
        if !agreed.resend {
            abandon(&state.dir);
            return Err(io::Error::other(
                "this kernel cannot hand requests over to another process: --survive needs Linux 6.9",
            ));
        }
        let entry = mounts::at(&state.dir).inspect_err(|_| abandon(&state.dir))?;
        let gone = || io::Error::other("another program removed the mount at once");
        let number = entry.ok_or_else(gone)?.device;
        // Without a flag, `epoll` tells when the device has failed: nothing is mounted then.
        self.epoll.add(&device, EpollEvent::new(EpollFlags::empty(), DEVICE))?;
        self.kept = Some(Kept { device, number, agreed, state });
        Ok(agreed)
    }

    fn wait(&self, within: Duration) -> Result<Event> {
        let mut events = [EpollEvent::empty()];
        let timeout = EpollTimeout::try_from(within).unwrap_or(EpollTimeout::MAX);
        loop {
            match self.epoll.wait(&mut events, timeout) {
                Err(Errno::EINTR) => {}
                Ok(0) => return Ok(Event::Clock),
                Ok(_) if events[0].data() == SOCKET => return Ok(Event::Worker),
                Ok(_) if events[0].data() == DEVICE => return Ok(Event::Unmounted),
                Ok(_) => {
                    while self.signals.read_signal()?.is_some() {}
                    return Ok(Event::Signal);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn wait_without_worker(&mut self, until: Instant) -> Result<()> {
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|t| !t.is_zero()) {
            match self.wait(left.clamp(Duration::from_millis(1), LOOK_EVERY))? {
                Event::Signal => {
                    self.is_ending = true;
                    return Ok(());
                }
                Event::Unmounted => {
                    self.forget_device()?;
                    return Ok(());
                }
                Event::Worker | Event::Clock => self.look()?,
            }
        }
        Ok(())
    }

    /// Waits no longer for a device that has failed.
    fn forget_device(&self) -> Result<()> {
        if let Some(kept) = &self.kept {
            self.epoll.delete(&kept.device)?;
        }
        Ok(())
    }

    /// Answers EIO to every request, if no worker came in time.
    fn fail_late_requests(&self) -> Result<()> {
        let (Some(kept), Some(since)) = (&self.kept, self.away_since) else { return Ok(()) };
        if since.elapsed() < self.io_timeout {
            return Ok(());
        }
        let flags = OFlag::from_bits_retain(fcntl(&kept.device, FcntlArg::F_GETFL)?);
        fcntl(&kept.device, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            match nix::unistd::read(&kept.device, &mut buffer) {
                Ok(len) => {
                    let Ok(request) = wire::parse(&buffer[..len]) else { continue };
                    if request.operation != Operation::Forget {
                        // Nobody waits for this reply any more if the kernel does not take it.
                        let _unheard =
                            nix::unistd::write(&kept.device, &wire::out_header(request.unique, libc::EIO, 0));
                    }
                }
                Err(Errno::ENOENT | Errno::EINTR) => {}
                // Nothing waits, or nothing is mounted.
                Err(_) => break,
            }
        }
        fcntl(&kept.device, FcntlArg::F_SETFL(flags))?;
        Ok(())
    }

    /// Unmounts, unless the worker did.
    fn unmount(&self) -> Result<()> {
        if let Some(kept) = &self.kept {
            unmount::unmount(&kept.state.dir, &kept.number)?;
        }
        Ok(())
    }
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
