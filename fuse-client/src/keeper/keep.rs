//! The keeper's end: holds the device, and starts one worker after the other.

use super::{Answer, Ask, MESSAGE_BYTES_MAX, SOCKET_VARIABLE, State, end_signals};
use crate::datasets::directory::SOURCE as LINKS_SOURCE;
use crate::fuse::{self, abandon};
use crate::fuse_wire::{self as wire, Operation};
use crate::handshake::Agreed;
use crate::session::BUFFER_BYTES;
use crate::{passed_device, unmount};
use anyhow::{Context, Result, anyhow};
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
    collections::BTreeMap,
    io,
    ops::Bound,
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::process::ExitStatusExt as _,
    },
    path::{Path, PathBuf},
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
/// The device of the first mount. That of each further mount has a higher number.
const FIRST_DEVICE: u64 = 2;

/// What a keeper does for its workers.
#[derive(Debug)]
pub struct Rules {
    /// How long a mount may wait for a worker.
    pub io_timeout: Duration,
    /// What a worker accounts its reads to. Its own name for that has the number of its process.
    pub job: String,
    /// The file system of links with the mounts below it, if the workers make one.
    pub links: Option<PathBuf>,
    /// Whether to refuse a kernel that cannot hand requests over.
    pub is_required: bool,
}

/// A mount that is kept.
struct Kept {
    device: OwnedFd,
    /// The number by which `epoll` tells of the device.
    key: u64,
    /// The number of the mount's device in the mount table.
    number: String,
    agreed: Agreed,
    state: State,
    /// Since when no worker serves the mount.
    away_since: Option<Instant>,
    /// Whether a worker said that none will serve the mount.
    is_given_up: bool,
}

impl Kept {
    /// Has the kernel send all unanswered requests again. It fails only if nothing is mounted any more, which
    /// the device tells, too.
    fn resend(&self) {
        if let Err(error) = fuse::resend(&self.device) {
            tracing::debug!(%error, "the kernel does not send requests again");
        }
    }

    /// Answers EIO to every request, if no worker came in time.
    fn fail_late_requests(&self, io_timeout: Duration) -> Result<()> {
        let is_late = self.away_since.is_some_and(|since| since.elapsed() >= io_timeout);
        if !is_late && !self.is_given_up {
            return Ok(());
        }
        let flags = OFlag::from_bits_retain(fcntl(&self.device, FcntlArg::F_GETFL)?);
        fcntl(&self.device, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            match nix::unistd::read(&self.device, &mut buffer) {
                Ok(len) => {
                    let Ok(request) = wire::parse(&buffer[..len]) else { continue };
                    if request.operation != Operation::Forget {
                        // Nobody waits for this reply any more if the kernel does not take it.
                        let _unheard =
                            nix::unistd::write(&self.device, &wire::out_header(request.unique, libc::EIO, 0));
                    }
                }
                Err(Errno::ENOENT | Errno::EINTR) => {}
                // Nothing waits, or nothing is mounted.
                Err(_) => break,
            }
        }
        fcntl(&self.device, FcntlArg::F_SETFL(flags))?;
        Ok(())
    }
}

/// What ended a wait.
enum Event {
    /// The worker wrote, or is gone.
    Worker,
    Signal,
    /// A mount is gone: the kernel reports an error of this device.
    Unmounted(u64),
    /// It is time to look at the clocks.
    Clock,
}

struct Keeper {
    rules: Rules,
    epoll: Epoll,
    signals: SignalFd,
    /// The program of the workers, as a path: an upgrade puts another file there.
    program: PathBuf,
    /// The mounts, by their directories.
    kept: BTreeMap<PathBuf, Kept>,
    /// What a worker had the keeper hold for the next one.
    held: Option<OwnedFd>,
    next_key: u64,
    /// Whether a signal said that the mounts are to end.
    is_ending: bool,
    /// When the latest worker took what is kept.
    attached_at: Option<Instant>,
    /// Workers that died, of which a thread still waits in the kernel for a page that a request has locked.
    /// The next worker answers that request.
    lingering: Vec<Child>,
}

/// Keeps what its workers mount, until a signal, or until somebody unmounts it. Returns the exit code. Called
/// while the process has one thread.
///
/// # Errors
/// A worker cannot be started, or the system has no room for a descriptor.
pub fn run(rules: Rules) -> Result<u8> {
    let ends = end_signals();
    ends.thread_block().context("blocking signals")?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let signals = SignalFd::with_flags(&ends, flags).context("listening for signals")?;
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("waiting for events")?;
    epoll.add(&signals, EpollEvent::new(EpollFlags::EPOLLIN, SIGNALS)).context("waiting for signals")?;
    Keeper {
        rules,
        epoll,
        signals,
        program: std::env::current_exe().context("finding the path of this program")?,
        kept: BTreeMap::new(),
        held: None,
        next_key: FIRST_DEVICE,
        is_ending: false,
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
            self.take_events()?;
            if self.is_ending || code == 0 {
                self.unmount()?;
                return Ok(code);
            }
            // A worker that ends by itself, and leaves no mount, has said why.
            let was_killed = ended.is_none_or(|status| status.signal().is_some());
            let can_go_on = self.kept.values().all(|kept| kept.agreed.resend);
            if !can_go_on || !(self.is_keeping(was_killed)) {
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
            if !self.is_keeping(was_killed) {
                return Ok(0);
            }
        }
    }

    /// Whether there is something for the next worker. `with_held`: also if it is no mount.
    fn is_keeping(&self, with_held: bool) -> bool {
        !self.kept.is_empty() || with_held && self.held.is_some()
    }

    /// Starts a worker, and does what it asks for until it is dead. Returns how it ended; `None` if it was
    /// killed and lingers.
    fn serve(&mut self) -> Result<Option<ExitStatus>> {
        let (socket, mut worker) = match self.start_worker() {
            Ok(started) => started,
            // An upgrade may just replace the program, or the machine has no room: the mount outlives that.
            Err(error) if self.is_keeping(true) => {
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
                // The worker sees that, too. It ends if it has no other mount.
                Event::Unmounted(key) => self.forget(key)?,
                Event::Clock if is_dead(pid) => break true,
                Event::Clock => self.look()?,
            }
        };
        self.epoll.delete(&socket)?;
        for kept in self.kept.values_mut() {
            kept.away_since.get_or_insert_with(Instant::now);
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
        for kept in self.kept.values() {
            if self.lingering.len() < before {
                // One of its threads may have read a request when it died.
                kept.resend();
            }
            kept.fail_late_requests(self.rules.io_timeout)?;
        }
        Ok(())
    }

    fn start_worker(&self) -> Result<(OwnedFd, Child)> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        // The worker inherits its end.
        fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty()))?;
        let mut command = Command::new(&self.program);
        command.args(std::env::args_os().skip(1));
        command.env(SOCKET_VARIABLE, theirs.as_raw_fd().to_string());
        command.env("FLETCH_JOB", &self.rules.job);
        if self.is_keeping(true) {
            // Whoever started the mount in the background has heard that it is usable.
            command.stdout(Stdio::null());
        }
        Ok((ours, command.spawn()?))
    }

    /// Answers one question of the worker. Returns whether the worker is still there.
    fn answer(&mut self, socket: &OwnedFd) -> Result<bool> {
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        let (len, descriptor) = match passed_device::receive(socket, &mut buffer) {
            // It was killed before it read an answer if this fails.
            Ok((0, _)) | Err(_) => return Ok(false),
            Ok(received) => received,
        };
        let answer = match serde_json::from_slice(&buffer[..len]) {
            // A later build may ask what this one does not know.
            Err(error) => Answer::failed(&error.into()),
            Ok(Ask::GiveUp { dir }) => {
                if let Some(kept) = self.kept.get_mut(&dir) {
                    kept.is_given_up = true;
                }
                Answer::Done
            }
            Ok(Ask::Hold) => {
                self.held = descriptor;
                Answer::Held
            }
            Ok(Ask::Held) => {
                self.attached_at = Some(Instant::now());
                Answer::Held
            }
            Ok(Ask::Kept { after }) => {
                let after = after.map_or(Bound::Unbounded, Bound::Excluded);
                let next = self.kept.range((after, Bound::Unbounded)).next();
                Answer::Kept(next.map(|(_, kept)| kept.state.clone()))
            }
            Ok(Ask::Mount { source, allow_other, state }) => {
                let dir = state.dir.clone();
                match self.mount(&source, allow_other, state) {
                    Ok(()) => return self.give(socket, &dir),
                    Err(error) => Answer::failed(&error),
                }
            }
            Ok(Ask::Attach { dir }) => return self.give(socket, &dir),
        };
        let held = self.held.as_ref().filter(|_| matches!(answer, Answer::Held));
        // The next event says so if it is gone.
        let _gone = passed_device::send(socket, &serde_json::to_vec(&answer)?, held.map(OwnedFd::as_fd));
        Ok(true)
    }

    /// Gives the worker the device of a mount. Returns `true`: the next event says so if the worker is gone.
    fn give(&mut self, socket: &OwnedFd, dir: &Path) -> Result<bool> {
        let answer = match self.kept.get_mut(dir) {
            Some(kept) => {
                kept.resend();
                kept.away_since = None;
                kept.is_given_up = false;
                self.attached_at = Some(Instant::now());
                Answer::Device(kept.agreed)
            }
            None => Answer::failed(&io::Error::other("nothing is kept there")),
        };
        let device = self.kept.get(dir).map(|kept| kept.device.as_fd());
        let _gone = passed_device::send(socket, &serde_json::to_vec(&answer)?, device);
        Ok(true)
    }

    fn mount(&mut self, source: &str, allow_other: bool, state: State) -> io::Result<()> {
        let dir = state.dir.clone();
        let (device, agreed) = fuse::open(&dir, source, allow_other)?;
        if !agreed.resend && self.rules.is_required {
            abandon(&dir);
            return Err(io::Error::other(
                "this kernel cannot hand requests over to another process: --survive needs Linux 6.9",
            ));
        }
        let entry = mounts::at(&dir).inspect_err(|_| abandon(&dir))?;
        let gone = || io::Error::other("another program removed the mount at once");
        let number = entry.ok_or_else(gone)?.device;
        let key = self.next_key;
        self.next_key += 1;
        // Without a flag, `epoll` tells when the device has failed: nothing is mounted then.
        self.epoll.add(&device, EpollEvent::new(EpollFlags::empty(), key))?;
        let kept = Kept { device, key, number, agreed, state, away_since: None, is_given_up: false };
        // The one before was detached, and programs with open files there still use it: they get errors.
        if let Some(before) = self.kept.insert(dir, kept) {
            self.epoll.delete(&before.device)?;
        }
        Ok(())
    }

    fn wait(&self, within: Duration) -> Result<Event> {
        let mut events = [EpollEvent::empty()];
        let timeout = EpollTimeout::try_from(within).unwrap_or(EpollTimeout::MAX);
        loop {
            match self.epoll.wait(&mut events, timeout) {
                Err(Errno::EINTR) => {}
                Ok(0) => return Ok(Event::Clock),
                Ok(_) if events[0].data() == SOCKET => return Ok(Event::Worker),
                Ok(_) if events[0].data() >= FIRST_DEVICE => return Ok(Event::Unmounted(events[0].data())),
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
                Event::Unmounted(key) => self.forget(key)?,
                Event::Worker | Event::Clock => self.look()?,
            }
            if !self.is_keeping(true) {
                break;
            }
        }
        Ok(())
    }

    /// Takes what happened while the keeper did something else.
    fn take_events(&mut self) -> Result<()> {
        loop {
            match self.wait(Duration::ZERO)? {
                Event::Unmounted(key) => self.forget(key)?,
                Event::Signal => self.is_ending = true,
                Event::Worker | Event::Clock => return Ok(()),
            }
        }
    }

    /// Lets go of a mount that is gone.
    fn forget(&mut self, key: u64) -> Result<()> {
        let gone: Vec<PathBuf> =
            self.kept.iter().filter(|(_, kept)| kept.key == key).map(|(dir, _)| dir.clone()).collect();
        for dir in gone {
            if let Some(kept) = self.kept.remove(&dir) {
                self.epoll.delete(&kept.device)?;
            }
        }
        Ok(())
    }

    /// Unmounts what the worker left.
    fn unmount(&self) -> Result<()> {
        if let Some(links) = self.rules.links.as_ref().filter(|_| self.is_keeping(true)) {
            // With it go all mounts below. A worker that ended by itself left nothing of this.
            let is_there = mounts::at(links)?.is_some_and(|entry| entry.source == LINKS_SOURCE);
            let detached = if is_there { unmount::detach(links) } else { Ok(()) };
            return detached.map_err(|why| anyhow!("cannot detach {}: {why}", links.display()));
        }
        for kept in self.kept.values() {
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
