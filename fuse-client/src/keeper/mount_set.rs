//! What one worker after the other serves: its mounts, and what it had the keeper hold.

use super::worker_memory::{Unanswered, WorkerMemory};
use super::{Answer, Ask, MESSAGE_BYTES_MAX, State, file_pages};
use crate::datasets::directory;
use crate::fuse::{self, abandon};
use crate::fuse_wire::{self as wire, Operation, Request};
use crate::handshake::Agreed;
use crate::mount::raise_read_ahead;
use crate::session::BUFFER_BYTES;
use crate::{passed_device, unmount};
use anyhow::{Result, anyhow};
use fletch_host::mounts;
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    io,
    ops::Bound,
    os::fd::{AsFd, OwnedFd},
    path::{Component, Path, PathBuf},
    time::{Duration, Instant},
};

/// How often requests that wait for a worker are sent again.
const RESEND_EVERY: Duration = Duration::from_secs(1);
/// The most mounts that one answer names. Their paths fit in a message.
const WAITING_MAX: usize = 12;
/// The most READs that are failed for one worker.
const RELEASED_MAX: usize = 4096;
/// How often pages of the program's file that a keeper does not use any more are unmapped. It uses more of
/// them when it mounts and when it starts a worker.
const PAGES_RELEASED_EVERY: Duration = Duration::from_secs(5);

/// The descriptors that a keeper waits for. Each has a number.
pub(super) struct Watched {
    epoll: Epoll,
    next: u64,
    pages_released_at: Instant,
}

impl Watched {
    pub fn new() -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        Ok(Watched { epoll, next: 0, pages_released_at: Instant::now() })
    }

    /// Waits for messages, too.
    pub fn add(&mut self, descriptor: impl AsFd) -> io::Result<u64> {
        self.add_with(descriptor, EpollFlags::EPOLLIN)
    }

    /// Waits until the device has failed, which needs no flag: nothing is mounted then.
    pub fn add_device(&mut self, device: impl AsFd) -> io::Result<u64> {
        self.add_with(device, EpollFlags::empty())
    }

    fn add_with(&mut self, descriptor: impl AsFd, flags: EpollFlags) -> io::Result<u64> {
        let key = self.next;
        self.next += 1;
        self.epoll.add(descriptor, EpollEvent::new(flags, key))?;
        Ok(key)
    }

    pub fn remove(&self, descriptor: impl AsFd) -> io::Result<()> {
        Ok(self.epoll.delete(descriptor)?)
    }

    /// Returns the number of a descriptor with something new; `None` after a time without.
    pub fn wait(&mut self, within: Duration) -> io::Result<Option<u64>> {
        if self.pages_released_at.elapsed() > PAGES_RELEASED_EVERY {
            self.pages_released_at = Instant::now();
            if let Err(error) = file_pages::release() {
                tracing::debug!(%error, "pages of the program stay mapped");
            }
        }
        let mut events = [EpollEvent::empty()];
        let timeout = EpollTimeout::try_from(within).unwrap_or(EpollTimeout::MAX);
        loop {
            match self.epoll.wait(&mut events, timeout) {
                Err(Errno::EINTR) => {}
                Ok(0) => return Ok(None),
                Ok(_) => return Ok(Some(events[0].data())),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// What a keeper does for the workers of one set.
#[derive(Debug, Clone, Default)]
pub(super) struct MountSetRules {
    /// How long a mount may wait for a worker.
    pub io_timeout: Duration,
    /// The file system of links with the mounts below it, if the workers make one.
    pub links: Option<PathBuf>,
    /// The directory below which a worker may have the keeper mount and unmount; `None` for everywhere.
    pub below: Option<PathBuf>,
}

impl MountSetRules {
    /// Refuses a directory that the workers have no business with.
    pub fn check(&self, dir: &Path) -> io::Result<()> {
        let is_plain = dir.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        let is_below = self.below.as_ref().is_none_or(|below| dir != below && dir.starts_with(below));
        if is_plain && is_below {
            return Ok(());
        }
        let why = format!("{} is not below the directory of --hold-below", dir.display());
        Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
    }
}

/// A mount that is kept.
struct Kept {
    device: OwnedFd,
    key: u64,
    /// The number of the mount's device in the mount table.
    number: String,
    agreed: Agreed,
    state: State,
    /// The socket of the worker that serves the mount.
    served_by: Option<u64>,
    /// Since when no worker serves the mount.
    away_since: Option<Instant>,
    /// Whether a worker said that none will serve the mount.
    is_given_up: bool,
    resent_at: Instant,
    /// The READs that were failed for a worker that is dead and not gone, by inode and offset.
    released: HashSet<(u64, u64)>,
    /// The requests that no worker answered and that the kernel does not send again, by their numbers.
    unanswered: BTreeMap<u64, Vec<u8>>,
}

impl Kept {
    /// Has the kernel send all unanswered requests again. It fails only if nothing is mounted any more, which
    /// the device tells, too.
    fn resend(&self) {
        if self.agreed.resend
            && let Err(error) = fuse::resend(&self.device)
        {
            tracing::debug!(%error, "the kernel does not send requests again");
        }
    }

    /// Has requests sent again that wait for long: a worker that is dead, and not gone, may have read them.
    /// Answers EIO to every request if no worker came in time.
    fn tend_late_requests(&mut self, io_timeout: Duration) -> io::Result<()> {
        let away = self.away_since.map(|since| since.elapsed());
        if away.is_some() && self.resent_at.elapsed() > RESEND_EVERY {
            self.resent_at = Instant::now();
            self.resend();
        }
        // A mount that is not away is never late.
        if self.is_given_up || away >= Some(io_timeout) { self.answer_all(|_| true) } else { Ok(()) }
    }

    /// Answers EIO to the first request for each page that a worker, which is dead and not gone, may wait
    /// for.
    ///
    /// Such a request comes from the kernel's read-ahead. When it fails, the page is unlocked, and the
    /// program that reads it asks once more. That second request waits for the next worker. Only a program
    /// that has mapped the file with `MADV_RANDOM` gets the error.
    fn release_pages(&mut self) -> io::Result<()> {
        let mut released = std::mem::take(&mut self.released);
        let answered = self.answer_all(|request| match request.operation {
            Operation::Read { offset, .. } => {
                released.len() < RELEASED_MAX && released.insert((request.ino, offset))
            }
            _ => false,
        });
        self.released = released;
        // What was read and not answered waits again.
        self.resend();
        answered
    }

    /// Reads all requests that wait, and answers EIO to those that `is_failed` returns true for. The kernel
    /// or the keeper has the others again.
    fn answer_all(&mut self, mut is_failed: impl FnMut(&Request) -> bool) -> io::Result<()> {
        let mut waiting: Vec<Vec<u8>> = std::mem::take(&mut self.unanswered).into_values().collect();
        let flags = OFlag::from_bits_retain(fcntl(&self.device, FcntlArg::F_GETFL)?);
        fcntl(&self.device, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            match nix::unistd::read(&self.device, &mut buffer) {
                Ok(len) => waiting.push(buffer[..len].to_vec()),
                Err(Errno::ENOENT | Errno::EINTR) => {}
                // Nothing waits, or nothing is mounted.
                Err(_) => break,
            }
        }
        fcntl(&self.device, FcntlArg::F_SETFL(flags))?;
        for message in waiting {
            let Ok(request) = wire::parse(&message) else { continue };
            if request.operation == Operation::Forget {
                continue;
            }
            if is_failed(&request) {
                // Nobody waits for this reply any more if the kernel does not take it.
                let _unheard =
                    nix::unistd::write(&self.device, &wire::out_header(request.unique, libc::EIO, 0));
            } else if !self.agreed.resend {
                self.unanswered.insert(request.unique, message);
            }
        }
        Ok(())
    }
}

/// The mounts of one worker after the other, by their directories.
pub(super) struct MountSet {
    pub rules: MountSetRules,
    kept: BTreeMap<PathBuf, Kept>,
    /// What a worker had the keeper hold for the next one.
    held: Option<OwnedFd>,
    /// The memories of the workers, by their sockets.
    memories: HashMap<u64, WorkerMemory>,
    /// When a worker last took something over.
    pub attached_at: Option<Instant>,
}

impl MountSet {
    pub fn new(rules: MountSetRules) -> Self {
        let (kept, memories) = (BTreeMap::new(), HashMap::new());
        MountSet { rules, kept, held: None, memories, attached_at: None }
    }

    /// Whether there is something for the next worker. `with_held`: also if it is no mount.
    pub fn is_keeping(&self, with_held: bool) -> bool {
        !self.kept.is_empty() || with_held && self.held.is_some()
    }

    /// Answers one question of the worker with this socket. Returns whether the worker is still there.
    pub fn answer(&mut self, socket: (u64, &OwnedFd), watched: &mut Watched) -> Result<bool> {
        let Some((ask, descriptor)) = receive(socket.1)? else { return Ok(false) };
        match ask {
            Ok(ask) => self.answer_to(ask, descriptor, socket, watched)?,
            Err(error) => send(socket.1, &Answer::failed(&error), None)?,
        }
        Ok(true)
    }

    fn answer_to(
        &mut self,
        ask: Ask,
        descriptor: Option<OwnedFd>,
        (key, socket): (u64, &OwnedFd),
        watched: &mut Watched,
    ) -> Result<()> {
        self.is_back(key);
        let done = |outcome: io::Result<()>| match outcome {
            Ok(()) => Answer::Done,
            Err(error) => Answer::failed(&error),
        };
        let answer = match ask {
            Ask::Hello { .. } => Answer::Done,
            Ask::Alive => {
                let of_it = self.kept.iter().filter(|(_, kept)| kept.served_by == Some(key));
                let waiting = of_it.filter(|(_, kept)| !kept.unanswered.is_empty());
                let dirs: Vec<PathBuf> = waiting.map(|(dir, _)| dir.clone()).take(WAITING_MAX).collect();
                if dirs.is_empty() { Answer::Done } else { Answer::Waiting { dirs } }
            }
            Ask::Memory => {
                self.memories.extend(descriptor.map(|descriptor| (key, WorkerMemory::new(descriptor))));
                Answer::Done
            }
            Ask::Unanswered { dir, taken } => {
                let unanswered = self.kept.get_mut(&dir).map(|kept| &mut kept.unanswered);
                Answer::Unanswered(unanswered.and_then(|unanswered| {
                    taken.and_then(|taken| unanswered.remove(&taken));
                    unanswered.first_key_value().map(|(_, message)| message.clone())
                }))
            }
            Ask::Kept { after } => {
                let after = after.map_or(Bound::Unbounded, Bound::Excluded);
                let next = self.kept.range((after, Bound::Unbounded)).next();
                Answer::Kept(next.map(|(_, kept)| kept.state.clone()))
            }
            Ask::Mount { source, allow_other, state } => {
                let dir = state.dir.clone();
                match self.mount(&source, allow_other, state, watched) {
                    Ok(()) => return self.give(&dir, key, socket),
                    Err(error) => Answer::failed(&error),
                }
            }
            Ask::Attach { dir } => return self.give(&dir, key, socket),
            Ask::Back { state, agreed } => match descriptor {
                Some(device) => done(self.keep(device, agreed, state, Some(key), watched)),
                None => Answer::failed(&io::Error::other("no device came with the message")),
            },
            Ask::MountLinks { dir } => {
                done(self.rules.check(&dir).and_then(|()| directory::mount_links(&dir)))
            }
            Ask::Unmount { dir, detach } => {
                done(self.rules.check(&dir).and_then(|()| unmount::once(&dir, detach)))
            }
            Ask::GiveUp { dir } => {
                self.kept.get_mut(&dir).into_iter().for_each(|kept| kept.is_given_up = true);
                Answer::Done
            }
            Ask::Hold => {
                self.held = descriptor;
                Answer::Done
            }
            Ask::Held => {
                self.attached_at = Some(Instant::now());
                return send(socket, &Answer::Held, self.held.as_ref());
            }
        };
        send(socket, &answer, None)
    }

    /// Gives the worker the device of a mount.
    fn give(&mut self, dir: &Path, key: u64, socket: &OwnedFd) -> Result<()> {
        let Some(kept) = self.kept.get_mut(dir) else {
            return send(socket, &Answer::failed(&io::Error::other("nothing is kept there")), None);
        };
        kept.resend();
        (kept.served_by, kept.away_since, kept.is_given_up) = (Some(key), None, false);
        kept.released.clear();
        self.attached_at = Some(Instant::now());
        send(socket, &Answer::Device(kept.agreed), Some(&kept.device))
    }

    fn mount(
        &mut self,
        source: &str,
        allow_other: bool,
        state: State,
        watched: &mut Watched,
    ) -> io::Result<()> {
        let dir = state.dir.clone();
        self.rules.check(&dir)?;
        // Another worker of this set was faster.
        if self.kept.get(&dir).is_some_and(|kept| kept.state == state) {
            return Ok(());
        }
        let (device, agreed) = fuse::open(&dir, source, allow_other)?;
        self.keep(device, agreed, state, None, watched).inspect_err(|_| abandon(&dir))
    }

    fn keep(
        &mut self,
        device: OwnedFd,
        agreed: Agreed,
        state: State,
        served_by: Option<u64>,
        watched: &mut Watched,
    ) -> io::Result<()> {
        let dir = state.dir.clone();
        self.rules.check(&dir)?;
        let gone = || io::Error::other("another program removed the mount at once");
        let number = mounts::at(&dir)?.ok_or_else(gone)?.device;
        raise_read_ahead(&number);
        let key = watched.add_device(&device)?;
        let kept = Kept {
            device,
            key,
            number,
            agreed,
            state,
            served_by,
            away_since: None,
            is_given_up: false,
            resent_at: Instant::now(),
            released: HashSet::new(),
            unanswered: BTreeMap::new(),
        };
        // The one before was detached, and programs with open files there still use it: they get errors.
        if let Some(before) = self.kept.insert(dir, kept) {
            watched.remove(&before.device)?;
        }
        Ok(())
    }

    /// Notes that a worker says nothing any more: its mounts wait for it, or for another one.
    pub fn is_away(&mut self, key: u64) {
        self.memories.get_mut(&key).into_iter().for_each(|memory| memory.is_left = true);
        for kept in self.kept.values_mut() {
            // At once: a request that a dead process has read could not even be given up by who made it.
            kept.resend();
            if kept.served_by.is_none_or(|by| by == key) {
                kept.away_since.get_or_insert_with(Instant::now);
            }
        }
    }

    /// Notes that a worker has ended.
    pub fn has_ended(&mut self, key: u64) {
        self.is_away(key);
        let of_it = self.kept.values_mut().filter(|kept| kept.served_by == Some(key));
        of_it.for_each(|kept| kept.served_by = None);
    }

    /// Notes that the last thread of a worker is gone. It may have read a request when it died.
    pub fn is_gone(&mut self, key: u64) {
        self.kept.values().for_each(Kept::resend);
        if let Some(mut memory) = self.memories.remove(&key) {
            let found = memory.take(true);
            self.add_unanswered(found);
        }
    }

    fn add_unanswered(&mut self, found: Vec<Unanswered>) {
        for Unanswered { tag, unique, message } in found {
            if let Some(kept) = self.kept.values_mut().find(|kept| kept.agreed.tag == tag) {
                kept.unanswered.insert(unique, message);
            }
        }
    }

    /// Notes that a worker speaks, whose mounts it serves still.
    fn is_back(&mut self, key: u64) {
        self.memories.get_mut(&key).into_iter().for_each(|memory| memory.is_left = false);
        let of_it = self.kept.values_mut().filter(|kept| kept.served_by == Some(key));
        of_it.for_each(|kept| kept.away_since = None);
    }

    /// Has requests that wait sent again, and answers EIO to those that wait for too long.
    pub fn tend_late_requests(&mut self) -> Result<()> {
        let left = self.memories.values_mut().filter(|memory| memory.is_left);
        let found = left.flat_map(|memory| memory.take(false)).collect();
        self.add_unanswered(found);
        let mut kept = self.kept.values_mut();
        Ok(kept.try_for_each(|kept| kept.tend_late_requests(self.rules.io_timeout))?)
    }

    /// Lets the worker with this socket end, which may be dead and not gone. The kubelet starts no other one
    /// before.
    pub fn release_pages(&mut self, key: u64) -> Result<()> {
        let of_it = self.kept.values_mut().filter(|kept| kept.served_by == Some(key));
        Ok(of_it.into_iter().try_for_each(Kept::release_pages)?)
    }

    /// Lets go of the mount whose device has this number. Returns whether there was one.
    pub fn forget(&mut self, key: u64, watched: &Watched) -> Result<bool> {
        let gone = self.kept.iter().find(|(_, kept)| kept.key == key).map(|(dir, _)| dir.clone());
        let Some(kept) = gone.and_then(|dir| self.kept.remove(&dir)) else { return Ok(false) };
        watched.remove(&kept.device)?;
        Ok(true)
    }

    /// Unmounts what the workers left.
    pub fn unmount(&self) -> Result<()> {
        if let Some(links) = self.rules.links.as_ref().filter(|_| self.is_keeping(true)) {
            // With it go all mounts below. A worker that ended by itself left nothing of this.
            let is_there = mounts::at(links)?.is_some_and(|entry| entry.source == directory::SOURCE);
            let detached = if is_there { unmount::detach(links) } else { Ok(()) };
            return detached.map_err(|why| anyhow!("cannot detach {}: {why}", links.display()));
        }
        for kept in self.kept.values() {
            unmount::unmount(&kept.state.dir, &kept.number)?;
        }
        Ok(())
    }
}

/// Receives one question, and what came with it; `None` if the worker is gone. A later build may ask what
/// this one does not know.
pub(super) fn receive(socket: &OwnedFd) -> Result<Option<(io::Result<Ask>, Option<OwnedFd>)>> {
    let mut buffer = vec![0; MESSAGE_BYTES_MAX];
    match passed_device::receive(socket, &mut buffer) {
        // It was killed before it read an answer if this fails.
        Ok((0, _)) | Err(_) => Ok(None),
        Ok((len, descriptor)) => {
            let ask = serde_json::from_slice(&buffer[..len]).map_err(io::Error::from);
            Ok(Some((ask, descriptor)))
        }
    }
}

/// Sends an answer. If the worker is gone, the next event of its socket says so.
pub(super) fn send(socket: &OwnedFd, answer: &Answer, descriptor: Option<&OwnedFd>) -> Result<()> {
    let _gone = passed_device::send(socket, &serde_json::to_vec(answer)?, descriptor.map(OwnedFd::as_fd));
    Ok(())
}
