//! What one worker after the other serves: its mounts, and what it had the keeper hold.

use super::kept_mount::{KeptMount, WorkerEvent};
use super::messages::{Answer, Ask};
use super::watch::Watch;
use super::worker_memory::{Unanswered, WorkerMemory};
use crate::datasets::directory::{SOURCE, mount_links};
use crate::mount::raise_read_ahead;
use crate::{fuse, kernel_mount, unmount};
use anyhow::{Result, anyhow};
use fletch_host::mounts;
use nix::sys::epoll::EpollFlags;
use std::{
    collections::{BTreeMap, HashMap},
    io,
    ops::Bound,
    os::fd::OwnedFd,
    path::{Component, Path, PathBuf},
    rc::Rc,
    time::{Duration, Instant},
};

/// The mounts of one worker after the other, by their directories.
pub(super) struct MountSet {
    watch: Rc<Watch>,
    /// How long a mount may wait for a worker.
    pub io_timeout: Duration,
    /// The file system of links with the mounts below it, if the workers make one.
    pub links: Option<PathBuf>,
    /// The directory below which a worker may have the keeper mount and unmount; `None` for everywhere.
    below: Option<PathBuf>,
    kept: BTreeMap<PathBuf, KeptMount>,
    /// The mounts on which a worker does not yet agree with the kernel, with the sockets of these workers.
    begun: BTreeMap<PathBuf, u64>,
    /// What a worker had the keeper hold for the next one.
    held: Option<OwnedFd>,
    /// The memories of the workers, by their sockets.
    memories: HashMap<u64, WorkerMemory>,
    /// When a worker last took something over.
    pub attached_at: Option<Instant>,
    /// Since when no worker has been there.
    pub alone_since: Option<Instant>,
}

impl MountSet {
    pub fn new(watch: Rc<Watch>, below: Option<PathBuf>) -> Self {
        let (io_timeout, links, kept, begun, held, memories, attached_at, alone_since) = Default::default();
        MountSet { watch, io_timeout, links, below, kept, begun, held, memories, attached_at, alone_since }
    }

    /// Refuses a directory that the workers have no business with.
    pub fn check(&self, dir: &Path) -> io::Result<()> {
        let is_plain = dir.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        match &self.below {
            Some(below) if !is_plain || dir == below || !dir.starts_with(below) => {
                let why = format!("{} is not below the directory of --hold-below", dir.display());
                Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
            }
            _ => Ok(()),
        }
    }

    /// Whether there is something for the next worker. `with_held`: also if it is no mount.
    pub fn is_keeping(&self, with_held: bool) -> bool {
        !self.kept.is_empty() || with_held && self.held.is_some()
    }

    /// Answers one question of a worker, and returns what goes with the answer.
    pub fn answer(
        &mut self,
        worker: u64,
        ask: Ask,
        descriptor: Option<OwnedFd>,
    ) -> io::Result<(Answer, Option<OwnedFd>)> {
        let came_with = || descriptor.ok_or_else(|| io::Error::other("no descriptor came with the message"));
        match ask {
            Ask::Hello { .. } | Ask::Alive => {}
            Ask::Kept { after } => {
                let after = after.map_or(Bound::Unbounded, Bound::Excluded);
                let next = self.kept.range((after, Bound::Unbounded)).next();
                let next = next.map(|(dir, kept)| (dir.clone(), kept.state.clone()));
                return Ok((Answer::Kept(next), None));
            }
            Ask::Mount { source, allow_other, dir, state } => {
                // Another worker of this set was faster.
                if self.kept.get(&dir).is_some_and(|kept| kept.state == state) {
                    return self.attach(&dir, worker);
                }
                self.check(&dir)?;
                if self.begun.contains_key(&dir) {
                    return Err(io::Error::other("another process is just then mounting there"));
                }
                let device = kernel_mount::mount_fuse(&dir, &source, allow_other)?;
                self.begun.insert(dir, worker);
                return Ok((Answer::Mounted, Some(device)));
            }
            Ask::Attach { dir } => return self.attach(&dir, worker),
            Ask::Back { dir, state, agreed } => {
                self.check(&dir)?;
                let gone = || io::Error::other("another program removed the mount at once");
                raise_read_ahead(&mounts::at(&dir)?.ok_or_else(gone)?.device);
                let device = self.watch.add(came_with()?, EpollFlags::empty())?;
                self.attached_at = Some(Instant::now());
                self.begun.remove(&dir);
                // The one before was detached, and programs with open files there still use it: they get
                // errors.
                self.kept.insert(dir, KeptMount::new(device, agreed, state, worker));
            }
            Ask::MountLinks { dir } => {
                self.check(&dir)?;
                let (_open, at) = kernel_mount::pinned(&dir)?;
                mount_links(&at)?;
            }
            Ask::Unmount { dir, detach } => {
                self.check(&dir)?;
                // Above it, nobody else's link may be on the way.
                let (Some(above), Some(name)) = (dir.parent(), dir.file_name()) else {
                    return Err(io::Error::other("the root directory stays mounted"));
                };
                let (_open, above) = kernel_mount::pinned(above)?;
                kernel_mount::umount(&above.join(name), detach)?;
            }
            Ask::GiveUp { dir } => self.kept.get_mut(&dir).into_iter().for_each(KeptMount::give_up),
            Ask::Hold => self.held = Some(came_with()?),
            Ask::Held => {
                self.attached_at = Some(Instant::now());
                let held = self.held.as_ref().map(OwnedFd::try_clone).transpose()?;
                return Ok((Answer::Held, held));
            }
            Ask::Memory => drop(self.memories.insert(worker, WorkerMemory::new(came_with()?))),
            Ask::Unanswered { taken } => {
                if let Some((dir, unique)) = taken
                    && let Some(kept) = self.kept.get_mut(&dir)
                {
                    kept.unanswered.remove(&unique);
                }
                let next = self.kept.iter().filter(|(_, kept)| kept.worker == Some(worker)).find_map(
                    |(dir, kept)| Some((dir.clone(), kept.unanswered.first_key_value()?.1.clone())),
                );
                return Ok((Answer::Unanswered(next), None));
            }
        }
        Ok((Answer::Done, None))
    }

    fn attach(&mut self, dir: &Path, worker: u64) -> io::Result<(Answer, Option<OwnedFd>)> {
        let kept = self.kept.get_mut(dir).ok_or_else(|| io::Error::other("nothing is kept there"))?;
        self.attached_at = Some(Instant::now());
        Ok((Answer::Device(kept.agreed), Some(kept.attach(worker)?)))
    }

    /// Something happened to a worker.
    pub fn note(&mut self, worker: u64, event: WorkerEvent, now: Instant) {
        self.kept.values_mut().for_each(|kept| kept.note(worker, event, now));
        if let Some(memory) = self.memories.get_mut(&worker) {
            memory.is_left = event != WorkerEvent::Speaks;
        }
        if event != WorkerEvent::Gone {
            return;
        }
        if let Some(mut memory) = self.memories.remove(&worker) {
            self.add_unanswered(memory.take(true));
        }
        for (dir, _) in self.begun.extract_if(.., |_, by| *by == worker) {
            fuse::abandon(&dir);
        }
    }

    fn add_unanswered(&mut self, found: Vec<Unanswered>) {
        for Unanswered { tag, unique, message } in found {
            if let Some(kept) = self.kept.values_mut().find(|kept| kept.agreed.tag == tag) {
                kept.unanswered.insert(unique, message);
            }
        }
    }

    /// Does what is due now.
    pub fn tick(&mut self, now: Instant) -> io::Result<()> {
        let left = self.memories.values_mut().filter(|memory| memory.is_left);
        let found = left.flat_map(|memory| memory.take(false)).collect();
        self.add_unanswered(found);
        self.kept.values_mut().try_for_each(|kept| kept.tick(now, self.io_timeout))
    }

    /// Lets a worker end that may be dead and not gone. The kubelet starts no other one before.
    pub fn release_pages(&mut self, worker: u64) -> io::Result<()> {
        let of_it = self.kept.values_mut().filter(|kept| kept.worker == Some(worker));
        of_it.into_iter().try_for_each(KeptMount::release_pages)
    }

    /// Lets go of the mount whose device has this number: somebody unmounted it.
    pub fn forget(&mut self, device: u64) {
        self.kept.retain(|_, kept| kept.device.key != device);
    }

    /// Detaches what the workers left.
    pub fn detach(&self) -> Result<()> {
        let is_there = |links| Ok::<_, io::Error>(mounts::at(links)?.is_some_and(|at| at.source == SOURCE));
        let dirs: Vec<&PathBuf> = match &self.links {
            // With it go all mounts below. A worker that ended by itself left nothing of this.
            Some(links) if self.is_keeping(true) && is_there(links)? => vec![links],
            Some(_) => Vec::new(),
            None => self.kept.keys().collect(),
        };
        for dir in dirs {
            unmount::detach(dir).map_err(|why| anyhow!("cannot detach {}: {why}", dir.display()))?;
        }
        Ok(())
    }
}
