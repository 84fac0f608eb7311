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

use super::child::{OwnWorkers, is_zombie, terminate};
use super::kept_mount::WorkerEvent;
use super::listener::Listener;
use super::messages::{Answer, Ask, receive, send};
use super::mount_set::MountSet;
use super::watch::{Watch, Watched};
use super::{end_signals, file_pages};
use anyhow::{Context, Result};
use nix::sys::epoll::EpollFlags;
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::{
    collections::{BTreeMap, HashMap},
    io, mem,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::process::ExitStatusExt as _,
    },
    path::PathBuf,
    process::{Child, ExitStatus},
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

/// Where the workers of a keeper come from.
#[derive(Debug, Clone)]
pub enum WorkerSource {
    /// The keeper starts them. They account their reads to `job`.
    Own { job: String },
    /// Somebody else starts them.
    Others(HoldSettings),
}

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

struct EventLoop {
    watch: Rc<Watch>,
    signals: Watched<SignalFd>,
    own: Option<OwnWorkers>,
    others: Option<Listener>,
    workers: HashMap<u64, Worker>,
    sets: BTreeMap<PathBuf, MountSet>,
    /// Since when a signal has said that the keeper is to end.
    ending_since: Option<Instant>,
    looks: u32,
}

/// Keeps what its workers mount, until a signal. A keeper that starts its workers also ends when somebody
/// unmounts what it keeps. Returns the exit code. Called while the process has one thread.
///
/// # Errors
/// A worker cannot be started, the socket cannot be made, or another keeper has it.
pub fn run(source: WorkerSource) -> Result<u8> {
    let ends = end_signals();
    ends.thread_block().context("blocking signals")?;
    let signals = SignalFd::with_flags(&ends, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    let watch = Watch::new().context("waiting for events")?;
    let signals = watch.add(signals, EpollFlags::EPOLLIN).context("waiting for signals")?;
    let (own, others) = match source {
        WorkerSource::Own { job } => (Some(OwnWorkers::new(job)?), None),
        WorkerSource::Others(settings) => (None, Some(Listener::new(settings, &watch)?)),
    };
    let (workers, sets, ending_since, looks) = Default::default();
    EventLoop { watch, signals, own, others, workers, sets, ending_since, looks }.run()
}

impl EventLoop {
    fn run(mut self) -> Result<u8> {
        let (mut looked_at, mut within) = (Instant::now(), Duration::ZERO);
        loop {
            let event = self.watch.wait(within)?;
            within = if event.is_some() { Duration::ZERO } else { LOOK_EVERY };
            match event {
                Some(key) if key == self.signals.key => self.hear_signals()?,
                Some(key) if self.workers.contains_key(&key) => self.hear(key)?,
                Some(key) => match &self.others {
                    Some(listener) if listener.socket.key == key => {
                        listener.accept(&self.watch).into_iter().for_each(|new| self.add(new, None));
                    }
                    _ => self.sets.values_mut().for_each(|set| set.forget(key)),
                },
                // All that has happened is known.
                None => {
                    if looked_at.elapsed() >= LOOK_EVERY {
                        looked_at = Instant::now();
                        self.look(looked_at)?;
                    }
                    if let Some(code) = self.decide()? {
                        return Ok(code);
                    }
                }
            }
        }
    }

    fn hear_signals(&mut self) -> io::Result<()> {
        while self.signals.descriptor.read_signal()?.is_some() {}
        self.ending_since.get_or_insert_with(Instant::now);
        let present = self.workers.values().filter(|worker| !worker.is_away);
        present.filter_map(|worker| worker.child.as_ref()).for_each(terminate);
        Ok(())
    }

    fn add(&mut self, socket: Watched<OwnedFd>, child: Option<Child>) {
        let worker = Worker { set: None, spoke_at: Instant::now(), is_away: false, child, socket };
        self.workers.insert(worker.socket.key, worker);
    }

    /// Answers a worker.
    fn hear(&mut self, key: u64) -> Result<()> {
        let Some(worker) = self.workers.get_mut(&key) else { return Ok(()) };
        // It was killed before it read an answer if the socket fails.
        let Ok(Some((ask, descriptor))) = receive(&worker.socket.descriptor) else { return self.lose(key) };
        worker.spoke_at = Instant::now();
        let was_away = mem::take(&mut worker.is_away);
        let set = worker.set.as_ref().and_then(|name| self.sets.get_mut(name));
        let answered = match (ask.map_err(io::Error::from), set) {
            (Ok(Ask::Hello { name, io_timeout_ms, links }), None) => {
                let below = self.others.as_ref().map(|listener| listener.settings.below.clone());
                let new = MountSet::new(Rc::clone(&self.watch), below);
                let set = self.sets.entry(name.clone()).or_insert(new);
                set.io_timeout = Duration::from_millis(io_timeout_ms);
                set.links = links.then(|| name.clone());
                worker.set = set.check(&name).is_ok().then(|| name.clone());
                set.check(&name).map(|()| (Answer::Done, None))
            }
            (Ok(ask), Some(set)) => {
                if was_away {
                    set.note(key, WorkerEvent::Speaks, worker.spoke_at);
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
        if let Some(set) = worker.set.as_ref().and_then(|name| self.sets.get_mut(name)) {
            set.note(key, WorkerEvent::Ended, Instant::now());
            set.note(key, WorkerEvent::Gone, Instant::now());
        }
        let status = worker.child.map(|mut child| child.wait()).transpose()?;
        status.filter(|_| !worker.is_away).into_iter().for_each(|status| self.note_end(status));
        Ok(())
    }

    /// A worker of the keeper's own has ended.
    fn note_end(&mut self, status: ExitStatus) {
        let attached_at = self.sets.values_mut().filter_map(|set| set.attached_at.take()).max();
        self.own.iter_mut().for_each(|own| own.note_end(status, attached_at));
    }

    /// Does what is due from time to time.
    fn look(&mut self, now: Instant) -> Result<()> {
        let mut is_dead = false;
        for (key, worker) in &mut self.workers {
            let silent_for = now - worker.spoke_at;
            let set = worker.set.as_ref().and_then(|name| self.sets.get_mut(name));
            match (&mut worker.child, set) {
                (Some(_), _) if worker.is_away => {}
                (Some(child), set) if is_zombie(child) => {
                    (worker.is_away, is_dead) = (true, true);
                    set.into_iter().for_each(|set| set.note(*key, WorkerEvent::Ended, now));
                }
                (Some(child), set) => {
                    let half = set.map_or(FROZEN_AFTER_MAX, |set| set.io_timeout / 2);
                    let is_frozen = silent_for > half.clamp(SILENT_AFTER, FROZEN_AFTER_MAX);
                    if is_frozen && self.ending_since.is_none() {
                        tracing::error!(?silent_for, "killing a process that does not run any more");
                        child.kill()?;
                        worker.spoke_at = now;
                    }
                }
                (None, Some(set)) if silent_for > SILENT_AFTER => {
                    if !mem::replace(&mut worker.is_away, true) {
                        set.note(*key, WorkerEvent::Silent, now);
                    }
                    set.release_pages(*key)?;
                }
                (None, _) => {}
            }
        }
        if is_dead {
            self.note_end(ExitStatus::from_raw(libc::SIGKILL));
        }
        // A process that does not say what it is here for.
        let is_known = |worker: &Worker| worker.set.is_some() || worker.child.is_some();
        self.workers.retain(|_, worker| is_known(worker) || now - worker.spoke_at < FROZEN_AFTER_MAX);
        for (name, set) in &mut self.sets {
            let has_worker = self.workers.values().any(|worker| worker.set.as_ref() == Some(name));
            if !has_worker && set.alone_since.is_none() && set.is_keeping(true) {
                tracing::warn!(name = %name.display(), "mounts wait for the next process that serves them");
            }
            set.alone_since = if has_worker { None } else { set.alone_since.or(Some(now)) };
            set.tick(now)?;
        }
        if let Some(Listener { settings, .. }) = &self.others {
            self.sets.retain(|name, set| {
                let alone_for = set.alone_since.map_or(Duration::ZERO, |since| now - since);
                // What is mounted stays, without a device: readers get errors, and never an empty directory.
                if alone_for > settings.keep {
                    tracing::warn!(name = %name.display(), "burying mounts that no process served for long");
                }
                alone_for <= settings.keep && (alone_for.is_zero() || set.is_keeping(true))
            });
        }
        self.looks += 1;
        if self.looks.is_multiple_of(LOOKS_WITH_PAGES)
            && let Err(error) = file_pages::release()
        {
            tracing::debug!(%error, "pages of the program stay mapped");
        }
        Ok(())
    }

    /// Returns the exit code if the keeper ends now. Starts a worker if one is due.
    fn decide(&mut self) -> Result<Option<u8>> {
        let is_alone = self.workers.values().all(|worker| worker.is_away);
        let code = match &mut self.own {
            Some(_) if !is_alone => None,
            Some(own) => {
                let is_keeping = |with_held| self.sets.values().any(|set| set.is_keeping(with_held));
                let code = own.outcome(self.ending_since.is_some(), is_keeping);
                if code.is_none()
                    && let Some((socket, child)) = own.start(is_keeping(true))?
                {
                    let socket = self.watch.add(socket, EpollFlags::EPOLLIN)?;
                    self.add(socket, Some(child));
                }
                code
            }
            None => {
                let is_over = |since: &Instant| self.workers.is_empty() || since.elapsed() > LEAVE_WITHIN;
                self.ending_since.filter(is_over).map(|_| 0)
            }
        };
        if code.is_some() {
            self.end()?;
        }
        Ok(code)
    }

    /// Detaches what no worker serves. What a worker serves stays: it has the devices.
    fn end(&self) -> Result<()> {
        for (name, set) in &self.sets {
            if self.workers.values().any(|worker| worker.set.as_ref() == Some(name) && !worker.is_away) {
                tracing::info!(name = %name.display(), "mounts are left to the process that serves them");
            } else {
                set.detach()?;
            }
        }
        self.others.as_ref().map_or(Ok(()), Listener::close)
    }
}
