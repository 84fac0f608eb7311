//! `--hold`: one keeper for processes that others start, such as the pods of a node.
//!
//! A worker connects to the socket and names its set of mounts. When it ends, the set waits for the next
//! worker that names it. The keeper starts none.
//!
//! 1. Only processes of the keeper's own user may connect.
//! 2. The keeper mounts and unmounts below one directory only.
//! 3. A signal ends the keeper. It unmounts, unless a worker is still there: that one has the devices, and
//!    gives them to the next keeper ([`Ask::Back`]).

use super::Ask;
use super::keep::block_end_signals;
use super::mount_set::{MountSet, MountSetRules, Watched, receive, send};
use crate::keeper::Answer;
use anyhow::{Context, Result, bail};
use nix::sys::{
    signalfd::SignalFd,
    socket::{
        AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept4, bind, getsockopt, listen, socket,
        sockopt,
    },
    stat::{Mode, umask},
};
use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::fs::DirBuilderExt as _,
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// How often the keeper looks at its clocks.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A worker that has said nothing for so long may be dead, and not gone. It speaks every second.
const SILENT_AFTER: Duration = Duration::from_secs(4);
/// How long a keeper that is to end waits for its workers to end.
const LEAVE_WITHIN: Duration = Duration::from_secs(10);
const CONNECTIONS_WAITING_MAX: i32 = 64;
/// The pause after a failed accept.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(20);

/// The settings of a keeper for other processes.
#[derive(Debug, Clone)]
pub struct HoldSettings {
    /// The path of the socket, absolute.
    pub socket: PathBuf,
    /// The directory below which workers may mount, without links.
    pub below: PathBuf,
    /// How long mounts wait for a worker before they are given up.
    pub keep: Duration,
}

/// A connected worker.
struct Worker {
    socket: OwnedFd,
    /// The name of its mounts, once it said so.
    set: Option<PathBuf>,
    spoke_at: Instant,
    /// Whether its mounts are taken for waiting, because it says nothing.
    is_silent: bool,
}

/// Mounts, and since when they have had no worker.
struct Held {
    set: MountSet,
    alone_since: Option<Instant>,
}

struct Holder {
    settings: HoldSettings,
    watched: Watched,
    signals: (u64, SignalFd),
    listener: (u64, OwnedFd),
    workers: HashMap<u64, Worker>,
    sets: BTreeMap<PathBuf, Held>,
    /// Since when a signal has said that the keeper is to end.
    ending_since: Option<Instant>,
}

/// Holds the mounts of other processes until a signal. Called while the process has one thread.
///
/// # Errors
/// The socket cannot be made, or another keeper has it.
pub fn hold(settings: HoldSettings) -> Result<()> {
    let signals = block_end_signals()?;
    let listener = listen_at(&settings.socket)?;
    let mut watched = Watched::new().context("waiting for events")?;
    let signals = (watched.add(&signals)?, signals);
    let listener = (watched.add(&listener)?, listener);
    tracing::info!(socket = %settings.socket.display(), below = %settings.below.display(), "holding mounts");
    let (workers, sets) = (HashMap::new(), BTreeMap::new());
    Holder { settings, watched, signals, listener, workers, sets, ending_since: None }.run()
}

/// Listens at a path, which only the own user may use. Creates its directory if necessary, and replaces a
/// socket that nobody listens at.
fn listen_at(path: &Path) -> Result<OwnedFd> {
    let shown = path.display();
    let address = UnixAddr::new(path).with_context(|| format!("{shown}: at most 107 bytes"))?;
    if let Some(parent) = path.parent() {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(parent);
        made.with_context(|| format!("cannot create {}", parent.display()))?;
    }
    let flags = SockFlag::SOCK_CLOEXEC;
    let new = || socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).map_err(io::Error::from);
    match nix::sys::socket::connect(new()?.as_raw_fd(), &address) {
        Ok(()) => bail!("{shown} is the socket of another keeper: end that one first"),
        Err(nix::errno::Errno::ECONNREFUSED) => {
            fs::remove_file(path).with_context(|| format!("cannot remove {shown}"))?;
        }
        Err(_) => {}
    }
    let listener = new()?;
    let before = umask(Mode::from_bits_truncate(0o177));
    let bound = bind(listener.as_raw_fd(), &address);
    umask(before);
    bound.map_err(io::Error::from).with_context(|| format!("cannot listen at {shown}"))?;
    listen(&listener, Backlog::new(CONNECTIONS_WAITING_MAX)?)?;
    Ok(listener)
}

impl Holder {
    fn run(mut self) -> Result<()> {
        loop {
            match self.watched.wait(LOOK_EVERY)? {
                None => {}
                Some(key) if key == self.signals.0 => {
                    while self.signals.1.read_signal()?.is_some() {}
                    self.ending_since.get_or_insert_with(Instant::now);
                }
                Some(key) if key == self.listener.0 => self.accept(),
                Some(key) if self.workers.contains_key(&key) => self.hear(key)?,
                Some(key) => self.forget(key)?,
            }
            self.look()?;
            if let Some(since) = self.ending_since
                && (self.workers.is_empty() || since.elapsed() > LEAVE_WITHIN)
            {
                return self.end();
            }
        }
    }

    fn accept(&mut self) {
        let mut accept = || -> io::Result<(u64, Worker)> {
            let socket = accept4(self.listener.1.as_raw_fd(), SockFlag::SOCK_CLOEXEC)?;
            // SAFETY: the system made the descriptor for this process just now.
            #[expect(unsafe_code, reason = "nix returns the number of the new descriptor")]
            let socket = unsafe { OwnedFd::from_raw_fd(socket) };
            let uid = getsockopt(&socket, sockopt::PeerCredentials)?.uid();
            if uid != nix::unistd::geteuid().as_raw() {
                return Err(io::Error::other(format!("user {uid} may not use this keeper")));
            }
            let worker = Worker { socket, set: None, spoke_at: Instant::now(), is_silent: false };
            Ok((self.watched.add(&worker.socket)?, worker))
        };
        match accept() {
            Ok((key, worker)) => drop(self.workers.insert(key, worker)),
            Err(error) => {
                tracing::warn!(%error, "a process was refused");
                // Without a descriptor the same connection waits again at once.
                std::thread::sleep(ACCEPT_RETRY_PAUSE);
            }
        }
    }

    /// Answers a worker.
    fn hear(&mut self, key: u64) -> Result<()> {
        let Some(worker) = self.workers.get_mut(&key) else { return Ok(()) };
        (worker.spoke_at, worker.is_silent) = (Instant::now(), false);
        let is_there = match &worker.set {
            Some(set) => match self.sets.get_mut(set) {
                Some(held) => held.set.answer((key, &worker.socket), &mut self.watched)?,
                None => false,
            },
            None => match receive(&worker.socket)? {
                Some((Ok(Ask::Hello { name, io_timeout_ms, links }), _)) => {
                    let rules = MountSetRules {
                        io_timeout: Duration::from_millis(io_timeout_ms),
                        links: links.then(|| name.clone()),
                        below: Some(self.settings.below.clone()),
                    };
                    if let Err(error) = rules.check(&name) {
                        send(&worker.socket, &Answer::failed(&error), None)?;
                        return Ok(());
                    }
                    tracing::info!(name = %name.display(), "a process serves mounts");
                    let new = || Held { set: MountSet::new(rules.clone()), alone_since: None };
                    let held = self.sets.entry(name.clone()).or_insert_with(new);
                    held.set.rules = rules;
                    held.alone_since = None;
                    worker.set = Some(name);
                    send(&worker.socket, &Answer::Done, None)?;
                    true
                }
                Some(_) => {
                    send(&worker.socket, &Answer::failed(&io::Error::other("say hello first")), None)?;
                    true
                }
                None => false,
            },
        };
        if !is_there {
            self.lose(key)?;
        }
        Ok(())
    }

    fn lose(&mut self, key: u64) -> Result<()> {
        let Some(worker) = self.workers.remove(&key) else { return Ok(()) };
        self.watched.remove(&worker.socket)?;
        let Some(name) = worker.set else { return Ok(()) };
        let is_last = self.workers.values().all(|other| other.set.as_ref() != Some(&name));
        if let Some(held) = self.sets.get_mut(&name) {
            held.set.has_ended(key);
            held.set.is_gone(key);
            if !held.set.is_keeping(true) {
                self.sets.remove(&name);
            } else if is_last {
                held.alone_since = Some(Instant::now());
                tracing::warn!(name = %name.display(), "mounts wait for the next process that serves them");
            }
        }
        Ok(())
    }

    /// Lets go of a mount that is gone.
    fn forget(&mut self, key: u64) -> Result<()> {
        for held in self.sets.values_mut() {
            if held.set.forget(key, &self.watched)? {
                break;
            }
        }
        Ok(())
    }

    /// Does what is due from time to time.
    fn look(&mut self) -> Result<()> {
        for (key, worker) in &mut self.workers {
            if worker.spoke_at.elapsed() <= SILENT_AFTER {
                continue;
            }
            if let Some(held) = worker.set.as_ref().and_then(|name| self.sets.get_mut(name)) {
                if !std::mem::replace(&mut worker.is_silent, true) {
                    held.set.is_away(*key);
                }
                held.set.release_pages(*key)?;
            }
        }
        for held in self.sets.values_mut() {
            held.set.tend_late_requests()?;
        }
        let is_old = |held: &Held| held.alone_since.is_some_and(|at| at.elapsed() > self.settings.keep);
        let old: Vec<PathBuf> =
            self.sets.iter().filter(|(_, held)| is_old(held)).map(|(name, _)| name.clone()).collect();
        for name in old {
            // The mounts stay, without a device: readers get errors, and never an empty directory.
            tracing::warn!(name = %name.display(), "giving up mounts that no process has served for long");
            self.sets.remove(&name);
        }
        Ok(())
    }

    /// Unmounts what no worker serves. Those with a worker stay: it has their devices.
    fn end(self) -> Result<()> {
        for (name, held) in self.sets {
            match held.alone_since {
                Some(_) => held.set.unmount()?,
                None => {
                    tracing::info!(name = %name.display(), "mounts are left to the process that serves them")
                }
            }
        }
        drop(fs::remove_file(&self.settings.socket));
        Ok(())
    }
}
