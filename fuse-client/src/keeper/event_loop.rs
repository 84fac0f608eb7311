//! The one loop of a keeper: it waits for workers, signals and the end of mounts, and looks at its clocks.
//!
//! A keeper of one process starts its workers itself, one after the other ([`OwnWorkers`]). A keeper for many
//! processes starts none: they connect to its socket ([`HoldSettings`]), and each names its set of mounts.
//! The rest is the same for both: [`MountSet`] answers the workers, and
//! [`KeptMount`](super::kept_mount::KeptMount) has the states of a mount.
//!
//! | a worker | how the keeper knows | then |
//! |---|---|---|
//! | is gone | its socket is closed, by its last thread | its mounts wait, and its requests are sent again |
//! | is dead and not gone | it is the keeper's child, and a zombie | the same, and once more when it is gone |
//! | says nothing for long | it speaks every second | a child is killed; another one's mounts wait |
//!
//! A signal ends the keeper. It detaches what no worker serves. A worker of another process that is still
//! there has its devices, and gives them to the next keeper ([`Ask::Back`]).

use super::child::{End, KILLED, OwnWorkers, end_of, is_zombie, terminate};
use super::messages::{Answer, Ask, receive, send};
use super::mount_set::MountSet;
use super::watch::{Watch, Watched};
use super::{end_signals, file_pages, listener};
use anyhow::{Context, Result};
use nix::sys::{
    epoll::EpollFlags,
    signalfd::{SfdFlags, SignalFd},
};
use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    os::fd::{AsFd as _, OwnedFd},
    path::PathBuf,
    process::Child,
    rc::Rc,
    time::{Duration, Instant},
};

/// How often the keeper looks at its clocks.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How often it unmaps pages of the program's file that it does not use any more, in looks. It uses more of
/// them when it mounts and when it starts a worker.
const LOOKS_WITH_PAGES: u32 = 50;
/// A worker that has said nothing for so long may be dead, and not gone. It speaks every second.
const SILENT_AFTER: Duration = Duration::from_secs(4);
/// A child that has said nothing for half of the time that a read may take is stopped, or hangs in the
/// kernel: it is killed. That time is at least [`SILENT_AFTER`], and at most this.
const FROZEN_AFTER_MAX: Duration = Duration::from_secs(30);
/// How long a keeper for many processes that is to end waits for its workers to end.
const LEAVE_WITHIN: Duration = Duration::from_secs(10);

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

struct Worker {
    socket: Watched<OwnedFd>,
    /// The name of its mounts, once it said so.
    set: Option<PathBuf>,
    spoke_at: Instant,
    /// Whether its mounts do not count on it: it says nothing, or is dead and not gone.
    is_away: bool,
    /// The process, if the keeper started it.
    child: Option<Child>,
}

/// Where workers come from.
enum Source {
    Own(OwnWorkers),
    Others(HoldSettings, Watched<OwnedFd>),
}

struct EventLoop {
    watch: Rc<Watch>,
    signals: Watched<SignalFd>,
    source: Source,
    workers: HashMap<u64, Worker>,
    sets: BTreeMap<PathBuf, MountSet>,
    /// Since when a signal has said that the keeper is to end.
    ending_since: Option<Instant>,
    looks: u32,
}

/// Keeps what its workers mount, until a signal, or until somebody unmounts it. The workers account their
/// reads to `job`. Returns the exit code. Called while the process has one thread.
///
/// # Errors
/// A worker cannot be started, or the system has no room for a descriptor.
pub fn run(job: String) -> Result<u8> {
    EventLoop::new(|_| Ok(Source::Own(OwnWorkers::new(job)?)))?.run()
}

/// Holds the mounts of other processes until a signal. Called while the process has one thread.
///
/// # Errors
/// The socket cannot be made, or another keeper has it.
pub fn hold(settings: HoldSettings) -> Result<u8> {
    let (socket, below) = (settings.socket.display().to_string(), settings.below.display().to_string());
    let holder = EventLoop::new(|watch| {
        let listener = watch.add(listener::listen_at(&settings.socket)?, EpollFlags::EPOLLIN)?;
        Ok(Source::Others(settings, listener))
    })?;
    tracing::info!(socket, below, "holding mounts");
    holder.run()
}

impl EventLoop {
    fn new(source: impl FnOnce(&Rc<Watch>) -> Result<Source>) -> Result<Self> {
        let ends = end_signals();
        ends.thread_block().context("blocking signals")?;
        let signals = SignalFd::with_flags(&ends, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        let watch = Watch::new().context("waiting for events")?;
        let signals = watch.add(signals, EpollFlags::EPOLLIN).context("waiting for signals")?;
        let (source, (workers, sets)) = (source(&watch)?, Default::default());
        Ok(EventLoop { watch, signals, source, workers, sets, ending_since: None, looks: 0 })
    }

    fn run(mut self) -> Result<u8> {
        let (mut looked_at, mut within) = (Instant::now(), Duration::ZERO);
        loop {
            let listener = if let Source::Others(_, socket) = &self.source { Some(socket.key) } else { None };
            let event = self.watch.wait(within)?;
            within = if event.is_some() { Duration::ZERO } else { LOOK_EVERY };
            match event {
                Some(key) if key == self.signals.key => self.hear_signals()?,
                Some(key) if Some(key) == listener => self.accept(),
                Some(key) if self.workers.contains_key(&key) => self.hear(key)?,
                Some(key) => self.sets.values_mut().for_each(|set| set.forget(key)),
                // All that has happened is known.
                None => {
                    if looked_at.elapsed() >= LOOK_EVERY {
                        looked_at = Instant::now();
                        self.look(looked_at)?;
                    }
                    if let Some(code) = self.decide()? {
                        self.end()?;
                        return Ok(code);
                    }
                }
            }
        }
    }

    fn hear_signals(&mut self) -> io::Result<()> {
        while self.signals.descriptor.read_signal()?.is_some() {}
        self.ending_since.get_or_insert_with(Instant::now);
        let children = self.workers.values().filter(|worker| !worker.is_away);
        children.filter_map(|worker| worker.child.as_ref()).for_each(terminate);
        Ok(())
    }

    fn accept(&mut self) {
        let Source::Others(_, listener) = &self.source else { return };
        let accepted = listener::accept(&listener.descriptor);
        match accepted.and_then(|socket| self.watch.add(socket, EpollFlags::EPOLLIN)) {
            Ok(socket) => self.add_worker(socket, None),
            Err(error) => {
                tracing::warn!(%error, "a process was refused");
                // Without a descriptor the same connection waits again at once.
                std::thread::sleep(listener::ACCEPT_RETRY_PAUSE);
            }
        }
    }

    fn add_worker(&mut self, socket: Watched<OwnedFd>, child: Option<Child>) {
        let worker = Worker { set: None, spoke_at: Instant::now(), is_away: false, child, socket };
        self.workers.insert(worker.socket.key, worker);
    }

    /// Answers a worker.
    fn hear(&mut self, key: u64) -> Result<()> {
        let Some(worker) = self.workers.get_mut(&key) else { return Ok(()) };
        // It was killed before it read an answer if the socket fails.
        let Ok(Some((ask, descriptor))) = receive(&worker.socket.descriptor) else { return self.lose(key) };
        worker.spoke_at = Instant::now();
        let was_away = std::mem::take(&mut worker.is_away);
        let set = worker.set.as_ref().and_then(|name| self.sets.get_mut(name));
        let answered = match (ask.map_err(io::Error::from), set) {
            (Ok(Ask::Hello { name, io_timeout_ms, links }), None) => {
                let below = if let Source::Others(hold, _) = &self.source { Some(&hold.below) } else { None };
                let new = || MountSet::new(Rc::clone(&self.watch), below.cloned());
                let set = self.sets.entry(name.clone()).or_insert_with(new);
                set.io_timeout = Duration::from_millis(io_timeout_ms);
                set.links = links.then(|| name.clone());
                set.check(&name).map(|()| {
                    tracing::info!(name = %name.display(), "a process serves mounts");
                    worker.set = Some(name);
                    (Answer::Done, None)
                })
            }
            (Ok(ask), Some(set)) => {
                if was_away {
                    set.is_back(key);
                }
                set.answer(key, ask, descriptor)
            }
            (Ok(_), None) => Err(io::Error::other("say hello first")),
            (Err(error), _) => Err(error),
        };
        let (answer, descriptor) = answered.unwrap_or_else(|error| (Answer::from(error), None));
        if send(&worker.socket.descriptor, &answer, descriptor.as_ref().map(OwnedFd::as_fd)).is_err() {
            // It is gone, or does not read its answers.
            worker.child.iter_mut().try_for_each(Child::kill)?;
            return self.lose(key);
        }
        Ok(())
    }

    /// The last thread of a worker is gone.
    fn lose(&mut self, key: u64) -> Result<()> {
        let Some(worker) = self.workers.remove(&key) else { return Ok(()) };
        let set = worker.set.as_ref().and_then(|name| self.sets.get_mut(name));
        if let Some(set) = set {
            set.has_ended(key, Instant::now());
            set.is_gone(key);
        }
        let Some(mut child) = worker.child else { return Ok(()) };
        let status = child.wait()?;
        if !worker.is_away {
            self.note_end(end_of(status));
        }
        Ok(())
    }

    /// A worker of the keeper's own has ended.
    fn note_end(&mut self, end: End) {
        let attached_at = self.sets.values_mut().filter_map(|set| set.attached_at.take()).max();
        if let Source::Own(own) = &mut self.source {
            own.note_end(end, attached_at);
        }
    }

    /// Does what is due from time to time.
    fn look(&mut self, now: Instant) -> Result<()> {
        let mut ended = None;
        let is_ending = self.ending_since.is_some();
        for (key, worker) in &mut self.workers {
            let silent_for = now - worker.spoke_at;
            let set = worker.set.as_ref().and_then(|name| self.sets.get_mut(name));
            match (&mut worker.child, set) {
                (Some(_), _) if worker.is_away => {}
                (Some(child), set) if is_zombie(child) => {
                    worker.is_away = true;
                    set.into_iter().for_each(|set| set.has_ended(*key, now));
                    ended = Some(KILLED);
                }
                (Some(child), set) => {
                    let half = set.map_or(FROZEN_AFTER_MAX, |set| set.io_timeout / 2);
                    if !is_ending && silent_for > half.clamp(SILENT_AFTER, FROZEN_AFTER_MAX) {
                        tracing::error!(?silent_for, "killing a process that does not run any more");
                        child.kill()?;
                        worker.spoke_at = now;
                    }
                }
                (None, Some(set)) if silent_for > SILENT_AFTER => {
                    if !std::mem::replace(&mut worker.is_away, true) {
                        set.is_silent(*key, now);
                    }
                    set.release_pages(*key)?;
                }
                (None, _) => {}
            }
        }
        // A process that does not say what it is here for.
        let is_known = |worker: &Worker| worker.set.is_some() || worker.child.is_some();
        self.workers.retain(|_, worker| is_known(worker) || now - worker.spoke_at < FROZEN_AFTER_MAX);
        ended.into_iter().for_each(|ended| self.note_end(ended));
        for (name, set) in &mut self.sets {
            if self.workers.values().any(|worker| worker.set.as_ref() == Some(name)) {
                set.alone_since = None;
            } else if set.alone_since.is_none() && set.is_keeping(true) {
                set.alone_since = Some(now);
                tracing::warn!(name = %name.display(), "mounts wait for the next process that serves them");
            }
            set.tick(now)?;
        }
        if let Source::Others(settings, _) = &self.source {
            let is_old = |set: &MountSet| set.alone_since.is_some_and(|since| now - since > settings.keep);
            for (name, _) in self.sets.extract_if(.., |_, set| is_old(set)) {
                // What is mounted stays, without a device: readers get errors, and never an empty directory.
                let name = name.display();
                tracing::warn!(%name, "giving up mounts that no process has served for long");
            }
        }
        self.looks += 1;
        if self.looks.is_multiple_of(LOOKS_WITH_PAGES)
            && let Err(error) = file_pages::release()
        {
            tracing::debug!(%error, "pages of the program stay mapped");
        }
        Ok(())
    }

    /// Returns the exit code if the keeper is to end now. Starts a worker if one is due.
    fn decide(&mut self) -> Result<Option<u8>> {
        match &mut self.source {
            Source::Own(_) if self.workers.values().any(|worker| !worker.is_away) => Ok(None),
            Source::Own(own) => {
                let is_keeping = |with_held| self.sets.values().any(|set| set.is_keeping(with_held));
                if let Some(code) = own.outcome(self.ending_since.is_some(), is_keeping) {
                    return Ok(Some(code));
                }
                if let Some((socket, child)) = own.start(is_keeping(true))? {
                    let socket = self.watch.add(socket, EpollFlags::EPOLLIN)?;
                    self.add_worker(socket, Some(child));
                }
                Ok(None)
            }
            Source::Others(..) => {
                let is_over = |since: Instant| self.workers.is_empty() || since.elapsed() > LEAVE_WITHIN;
                Ok(self.ending_since.filter(|since| is_over(*since)).map(|_| 0))
            }
        }
    }

    /// Detaches what no worker serves. What a worker serves stays: it has the devices.
    fn end(self) -> Result<()> {
        for (name, set) in &self.sets {
            if self.workers.values().any(|worker| worker.set.as_ref() == Some(name) && !worker.is_away) {
                tracing::info!(name = %name.display(), "mounts are left to the process that serves them");
            } else {
                set.detach()?;
            }
        }
        if let Source::Others(settings, _) = &self.source {
            // Somebody else may have removed it.
            let _gone = fs::remove_file(&settings.socket);
        }
        Ok(())
    }
}
