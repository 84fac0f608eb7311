//! Opening, closing, and standing one's ground: the directory, its lock, the tier's health.

use super::{
    DiskConfig, DiskError, DiskTier, Health, Policy, Why,
    catalogue::Catalogue,
    index::{Index, State},
    layout::BadSlab,
    lock, recover, seeded, slab,
    slab::{Files, Slab},
    space::{Full, Plan, Space},
    stats::{Counters, add},
    write::Writer,
};
use rand::Rng;
use rustix::fs::{FlockOperation, flock};
use std::{
    collections::HashMap,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Seek, Write},
    os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt},
    path::Path,
    sync::{
        Arc, Mutex, RwLock,
        atomic::{AtomicU8, AtomicU32, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

/// A tier that is off is not tried more often.
const PROBE_EVERY: Duration = Duration::from_secs(1);

/// What a start found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Recovery {
    /// Slabs that hold something.
    pub slabs: u64,
    /// Of those, how many had no table and were walked.
    pub walked: u64,
    /// Chunks that are there.
    pub records: u64,
    /// Their footprints.
    pub bytes: u64,
    /// Records that were there and are not believed, and chunks that a lowered limit has no room for.
    pub dropped: u64,
    /// Slabs of another format, which were removed.
    pub removed: u64,
    /// Whether the catalogue was doubted and rebuilt.
    pub rebuilt: bool,
    /// How long it took.
    pub took: Duration,
}

/// The directory that is ours: its lock, and how we know it again.
#[derive(Debug)]
struct Ground {
    /// Holds the lock while it is open.
    file: File,
    lock_id: (u64, u64),
    slabs_id: (u64, u64),
}

/// Health, and what it rests on.
#[derive(Debug)]
pub(crate) struct Standing {
    health: Health,
    now: SystemTime,
    probed: Option<SystemTime>,
    ground: Option<Ground>,
}

impl Standing {
    /// Whether another directory, or none, lies where ours was.
    pub fn lost_ground(&self, dir: &Path) -> bool {
        self.look_for_ground(dir) == Some(Why::Vanished)
    }

    /// Whether our directory is not where it was, or cannot be looked at.
    fn look_for_ground(&self, dir: &Path) -> Option<Why> {
        let Some(g) = &self.ground else { return Some(Why::Vanished) };
        for (name, id) in [("lock", g.lock_id), ("slabs", g.slabs_id)] {
            match fs::metadata(dir.join(name)) {
                Ok(m) if (m.dev(), m.ino()) == id => {}
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return Some(Why::Denied),
                _ => return Some(Why::Vanished),
            }
        }
        None
    }
}

impl DiskTier {
    /// Opens the tier in `config.dir`: takes the directory's lock, reads the tables of sealed slabs and walks
    /// the few others. `now` is only for [`Health`].
    ///
    /// # Errors
    /// [`DiskError::Invalid`] for settings that cannot be, [`DiskError::Locked`] when somebody else uses the
    /// directory, [`DiskError::Io`] when it cannot be used at all. Damage inside is no error.
    pub fn open(config: DiskConfig, now: SystemTime) -> Result<(Self, Recovery), DiskError> {
        let begin = Instant::now();
        let plan = Plan::new(config.size_max, config.slab_bytes).map_err(DiskError::Invalid)?;
        let ground = Ground::take(&config.dir)?;
        let (catalogue, marks, doubt) = Catalogue::open(&config.dir, plan.catalogue_bytes, plan.aside_bytes);
        let mut rng = seeded(config.seed);
        let key = rng.random();
        let tier = DiskTier {
            plan,
            files: Files::new(config.dir.join("slabs"), config.files_max),
            space: Space::new(plan.slabs_bytes),
            full: Full::new(),
            catalogue,
            index: RwLock::new(Index::new(key, config.policy == Policy::Lru)),
            writer: Mutex::new(Writer::default()),
            maintenance: Mutex::default(),
            scrub: Mutex::default(),
            gone: Mutex::default(),
            telling: Mutex::default(),
            rng: Mutex::new(rng),
            state: Mutex::new(Standing { health: Health::On, now, probed: None, ground: Some(ground) }),
            off: AtomicU8::new(0),
            read_errors: AtomicU32::new(0),
            counters: Counters::default(),
            config,
        };
        let mut found = Recovery::default();
        let known = marks.keys().copied().collect::<Vec<_>>();
        let present = tier.load_slabs(marks, &mut found)?;
        lock(&tier.gone)
            .extend(known.into_iter().filter(|id| !present.contains_key(id)).map(|id| (id, None)));
        if let Some(doubt) = doubt {
            tracing::warn!(%doubt, "rebuilding the catalogue from the slabs");
            found.rebuilt = true;
            tier.rebuild_catalogue(true);
        }
        if tier.space.excess() > 0 {
            found.dropped += tier.reap(0)?.evicted;
        }
        tier.sync_catalogue();
        {
            let index = tier.read_index();
            found.slabs = index.slabs().count() as u64;
            found.records = index.len() as u64;
            found.bytes = index.bytes();
        }
        found.took = begin.elapsed();
        Ok((tier, found))
    }

    fn load_slabs(
        &self,
        marks: HashMap<u64, super::catalogue::Marks>,
        found: &mut Recovery,
    ) -> Result<HashMap<u64, ()>, DiskError> {
        let dir = self.files.dir();
        let fail = |e| DiskError::io("list", dir, e);
        let mut ids = Vec::new();
        for e in fs::read_dir(dir).map_err(fail)? {
            ids.extend(e.map_err(fail)?.file_name().to_str().and_then(Files::id_of));
        }
        // In order of their making: of two records of one chunk the later is meant.
        ids.sort_unstable();
        lock(&self.writer).next_id = ids.last().map_or(1, |l| l.saturating_add(1));
        for &id in &ids {
            if let Err(e) = self.load_slab(id, marks.get(&id), found) {
                // One file that cannot be read is not all of them.
                tracing::warn!(slab = id, error = %e, "a slab cannot be read");
                add(&self.counters.errors, 1);
                found.dropped += 1;
                self.blame(&e);
                self.space.add(fs::metadata(self.files.path(id)).map_or(0, |m| m.blocks() * 512));
            }
        }
        Ok(ids.into_iter().map(|id| (id, ())).collect())
    }

    fn load_slab(
        &self,
        id: u64,
        marks: Option<&super::catalogue::Marks>,
        found: &mut Recovery,
    ) -> Result<(), DiskError> {
        let path = self.files.path(id);
        let slab = Slab::new(id);
        let file = self.files.file(&slab).map_err(|e| DiskError::io("open", &path, e))?;
        let loaded = recover::load(&file, id, marks).map_err(|e| DiskError::io("read", &path, e))?;
        let f = match loaded {
            Ok(f) => f,
            Err(why) => {
                debug_assert!(matches!(why, BadSlab::Major(_)));
                // A directory of another build has thousands of them.
                if found.removed == 0 {
                    tracing::warn!(slab = id, %why, "slabs of another format are removed");
                }
                found.removed += 1;
                self.files.remove(&slab).map_err(|e| DiskError::io("unlink", &path, e))?;
                return Ok(());
            }
        };
        found.dropped += f.dropped;
        if f.table.rows.is_empty() {
            drop(self.files.remove(&slab));
            return Ok(());
        }
        // Without the slack of a slab that was just written: what fitted before fits again.
        self.space.add(f.blocks);
        let mut index = self.write_index();
        let n = index.add_slab(Arc::clone(&slab), f.blocks, State::Sealed);
        for (row, r) in f.table.rows.iter().enumerate() {
            let key =
                fletch_core::StoreKey { domain: f.table.domains[r.domain as usize].clone(), hash: r.hash };
            let domain = if f.dead[row] { None } else { index.domain(&key.domain) };
            let Some(domain) = domain else {
                index.insert_dead(n);
                continue;
            };
            // Copied from another slab, which was not unlinked any more.
            index.remove(&key);
            let set = index.dataset(super::DatasetId(r.dataset));
            index.charge(set, super::footprint(r.len));
            index.insert(domain, r.hash, set, super::Place { slab: n, at: r.at, len: r.len });
        }
        if let Some(m) = index.slab_mut(n) {
            (m.fixed, m.end) = (f.fixed, f.end);
            m.check = f.check.unwrap_or_default();
            m.dirty = f.dead.contains(&true) && marks.is_none();
        }
        drop(index);
        if f.check.is_none() {
            found.walked += 1;
            // So that the next start does not walk it again.
            if let Err(e) = self.seal_found(n, &slab, &file, f.end) {
                self.blame(&e);
            }
        }
        Ok(())
    }

    fn seal_found(&self, n: u32, slab: &Arc<Slab>, file: &File, end: u64) -> Result<(), DiskError> {
        let (bytes, check) = {
            let mut index = self.write_index();
            let table = index.table(n);
            super::layout::seal(slab.id, end, &table)
        };
        // What follows the last record was never written, or not believed.
        let now = file
            .set_len(end)
            .and_then(|()| slab::seal(file, end, &bytes))
            .map_err(|e| DiskError::io("seal", self.files.path(slab.id), e))?;
        if let Some(m) = self.write_index().slab_mut(n) {
            m.check = check;
            (m.fixed, m.end) = (super::BLOCK + bytes.len() as u64, end);
        }
        self.resize(n, slab, now);
        Ok(())
    }

    /// Whether the tier keeps chunks, and if not, why.
    #[must_use]
    pub fn health(&self) -> Health {
        lock(&self.state).health
    }

    fn why(&self) -> Option<Why> {
        WHYS.get(usize::from(self.off.load(Ordering::Acquire)).checked_sub(1)?).copied()
    }

    pub(crate) fn readable(&self) -> Result<(), DiskError> {
        self.why().filter(|w| !w.reads_on()).map_or(Ok(()), |w| Err(DiskError::Off(w)))
    }

    pub(crate) fn writable(&self) -> Result<(), DiskError> {
        self.why().map_or(Ok(()), |w| Err(DiskError::Off(w)))
    }

    pub(crate) fn open_for_writing(&self) -> Result<(), DiskError> {
        self.why().filter(|w| *w == Why::Closed).map_or(Ok(()), |w| Err(DiskError::Off(w)))
    }

    pub(crate) fn turn_off(&self, why: Why) {
        let mut s = lock(&self.state);
        let worse = match s.health {
            Health::On => true,
            // A read-only disk may still turn out to be gone.
            Health::Off { why: was, .. } => was.reads_on() && !why.reads_on(),
        };
        if worse {
            s.health = Health::Off { why, since: s.now };
            self.set_off(Some(why));
            add(&self.counters.turned_off, 1);
            tracing::warn!(%why, dir = %self.config.dir.display(), "the disk tier is off, reads pass it by");
        }
    }

    fn set_off(&self, why: Option<Why>) {
        let code = why.and_then(|w| WHYS.iter().position(|x| *x == w)).map_or(0, |n| n as u8 + 1);
        self.off.store(code, Ordering::Release);
    }

    /// Looks whether the directory is still ours and, if the tier is off, whether it works again. To be called
    /// every few seconds; a tier that is off is tried once a second at most, whatever the clock does.
    pub fn probe(&self, now: SystemTime) -> Health {
        {
            let mut s = lock(&self.state);
            s.now = now;
            let recently = |t: SystemTime| now.duration_since(t).is_ok_and(|d| d < PROBE_EVERY);
            match s.health {
                Health::Off { why: Why::Closed, .. } => return s.health,
                Health::Off { .. } if s.probed.is_some_and(recently) => return s.health,
                _ => s.probed = Some(now),
            }
        }
        let lost = lock(&self.state).look_for_ground(&self.config.dir);
        if let Some(why) = lost {
            self.turn_off(why);
        }
        let Health::Off { .. } = self.health() else { return Health::On };
        let back = match lost {
            Some(Why::Vanished) => self.take_new_ground(),
            Some(why) => Err(DiskError::Off(why)),
            None => self.try_write(),
        };
        match back {
            Ok(()) => {
                tracing::info!(dir = %self.config.dir.display(), "the disk tier is on again");
                self.read_errors.store(0, Ordering::Relaxed);
                self.full.forget();
                lock(&self.state).health = Health::On;
                self.set_off(None);
            }
            Err(e) => tracing::debug!(error = %e, "the disk tier stays off"),
        }
        self.health()
    }

    /// Writes and removes a small file.
    fn try_write(&self) -> Result<(), DiskError> {
        let path = self.config.dir.join("probe");
        let fail = |e| DiskError::io("write", &path, e);
        if self.floor_shortage(self.plan.slab_bytes)? > 0 {
            return Err(DiskError::Off(Why::Full));
        }
        let write = || {
            let f = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path)?;
            f.write_all_at(&[0x5a; 4096], 0)?;
            f.sync_data()
        };
        let written = write();
        drop(fs::remove_file(&path));
        written.map_err(fail)
    }

    /// Begins in a new, empty directory: nothing of the old one is there any more.
    fn take_new_ground(&self) -> Result<(), DiskError> {
        let _alone = lock(&self.maintenance);
        self.abandon_writing();
        self.catalogue.disconnect();
        self.files.close_all();
        let metas: Vec<_> = {
            let mut index = self.write_index();
            let all: Vec<u32> = index.slabs().map(|(n, _)| n).collect();
            all.into_iter().filter_map(|n| index.drop_slab(n)).collect()
        };
        for m in &metas {
            self.space.give(m.blocks);
        }
        lock(&self.state).ground = None;
        let ground = Ground::take(&self.config.dir)?;
        // Somebody may have put slabs there that we know nothing of.
        let strays = fs::read_dir(self.files.dir()).into_iter().flatten().flatten();
        for e in strays.filter(|e| e.file_name().to_str().and_then(Files::id_of).is_some()) {
            drop(fs::remove_file(e.path()));
        }
        lock(&self.state).ground = Some(ground);
        self.rebuild_catalogue(false);
        self.try_write()
    }

    /// Seals what is open and writes the catalogue, so that the next start is quick. Everything
    /// after this is refused. Without it the next start walks one slab.
    ///
    /// # Errors
    /// [`DiskError`] when the disk fails; the tier is closed all the same.
    pub fn close(&self) -> Result<(), DiskError> {
        let works = self.writable().is_ok();
        let _alone = lock(&self.maintenance);
        {
            let mut s = lock(&self.state);
            s.health = Health::Off { why: Why::Closed, since: s.now };
            self.set_off(Some(Why::Closed));
        }
        let ended = if works { self.seal_active() } else { Ok(()) };
        self.sync_catalogue();
        self.catalogue.disconnect();
        self.files.close_all();
        lock(&self.state).ground = None;
        ended
    }
}

/// Codes of `DiskTier::off`, less one.
const WHYS: [Why; 6] = [Why::Full, Why::ReadOnly, Why::Io, Why::Denied, Why::Vanished, Why::Closed];

impl Drop for Ground {
    fn drop(&mut self) {
        // Closing is not enough while a child that was just forked has a copy of the file.
        if let Err(e) = flock(&self.file, FlockOperation::Unlock) {
            tracing::debug!(error = %e, "the directory's lock ends when its file is closed");
        }
    }
}

impl Ground {
    /// Makes the directory if need be and takes its lock.
    fn take(dir: &Path) -> Result<Self, DiskError> {
        let slabs = dir.join("slabs");
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&slabs)
            .map_err(|e| DiskError::io("create", &slabs, e))?;
        let path = dir.join("lock");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(|e| DiskError::io("lock", &path, e))?;
        Ground::hold(dir, file)
    }

    /// Takes the lock with a file that was opened at the lock's path, and only if it still lies there: whoever held
    /// it may have removed the directory meanwhile, and somebody else may own what was made there since.
    fn hold(dir: &Path, mut file: File) -> Result<Self, DiskError> {
        let (path, slabs) = (dir.join("lock"), dir.join("slabs"));
        let fail = |e| DiskError::io("lock", &path, e);
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            let mut pid = String::new();
            let read = (&mut file).take(20).read_to_string(&mut pid).is_ok();
            let holder =
                if read && !pid.trim().is_empty() { format!(" (pid {})", pid.trim()) } else { String::new() };
            return Err(DiskError::Locked { dir: dir.into(), holder });
        }
        let id = |m: fs::Metadata| (m.dev(), m.ino());
        let lock_id = file.metadata().map(id).map_err(fail)?;
        let slabs_id = fs::metadata(&slabs).map(id).map_err(fail)?;
        let ground = Ground { file, lock_id, slabs_id };
        // Last: while our lock lies there, nobody else makes or removes anything here.
        if fs::metadata(&path).map(id).map_err(fail)? != lock_id {
            let gone =
                io::Error::new(io::ErrorKind::NotFound, "it was removed while it was taken; try again");
            return Err(fail(gone));
        }
        let pid = format!("{}\n", std::process::id());
        let mut file = &ground.file;
        let note = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(pid.as_bytes()));
        if let Err(e) = note {
            // On a full disk the lock holds without its note.
            tracing::debug!(error = %e, "the lock file has no pid");
        }
        Ok(ground)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_was_removed_before_it_was_taken_owns_nothing() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("lock");
        let late = || OpenOptions::new().read(true).write(true).open(&path).expect("open");
        let owner = Ground::take(dir.path()).expect("the first");
        let (one, two) = (late(), late());
        assert!(matches!(Ground::hold(dir.path(), late()), Err(DiskError::Locked { .. })), "it is held");
        // Removed under its lock, by who gives it up then.
        fs::remove_file(&path).expect("remove");
        drop(owner);
        assert!(matches!(Ground::hold(dir.path(), one), Err(DiskError::Io { .. })), "nothing lies there");
        let owner = Ground::take(dir.path()).expect("the next");
        assert!(matches!(Ground::hold(dir.path(), two), Err(DiskError::Io { .. })), "another's lies there");
        assert!(matches!(Ground::take(dir.path()), Err(DiskError::Locked { .. })), "and is still its");
        drop(owner);
        Ground::take(dir.path()).expect("free again");
    }
}
