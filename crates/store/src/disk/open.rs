//! Opening and closing a tier.

use super::{
    DiskConfig, DiskEngine, DiskError, Health, MountMemory, OffReason, Policy,
    catalogue::{Catalogue, DeadMarks},
    directory_lock::DirectoryLock,
    health::HealthState,
    index::{Index, SlabLocation, SlabState},
    layout::{self, BLOCK, BadSlab, footprint},
    recover, seeded, slab,
    slab::{Files, Slab},
    space::{FullMark, Space, SpacePlan},
    stats::{Counters, add},
    writer::Writer,
};
use crate::dataset_id::DatasetId;
use fletch_core::StoreKey;
use parking_lot::{Mutex, RwLock};
use rand::Rng;
use std::{
    collections::{HashMap, HashSet},
    fs::{self, File},
    os::unix::fs::MetadataExt,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU32},
    },
    time::{Duration, Instant, SystemTime},
};

/// What the engine found when it opened a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Recovery {
    /// Slabs that hold records.
    pub slabs: u64,
    /// Slabs without a good table, which were walked.
    pub walked: u64,
    /// Chunks in the tier.
    pub records: u64,
    /// Footprints of those chunks.
    pub bytes: u64,
    /// Damaged records, and chunks evicted because the limit was lowered.
    pub dropped: u64,
    /// Slabs of another format, which were removed.
    pub removed: u64,
    /// Whether the catalogue was damaged and rebuilt.
    pub rebuilt: bool,
    /// Time that opening took.
    pub took: Duration,
}

/// Takes the lock of the directory, and creates it if its file system is mounted.
pub(super) fn lock_directory(config: &DiskConfig) -> Result<DirectoryLock, DiskError> {
    let memory = config.mount_memory.as_ref();
    memory.map_or(Ok(()), MountMemory::check)?;
    let lock = DirectoryLock::take(&config.dir)?;
    if let Some(memory) = memory {
        memory.remember();
    }
    Ok(lock)
}

impl DiskEngine {
    /// Opens the tier in `config.dir`. `now` is only for [`Health`].
    ///
    /// Checks that the directory's file system is mounted, takes the directory's lock, reads the tables of
    /// sealed slabs, and walks the few slabs without one.
    ///
    /// # Errors
    /// [`DiskError::Invalid`] for invalid settings, [`DiskError::Unmounted`] when the directory's file system
    /// is not mounted, [`DiskError::Locked`] when another tier uses the directory, [`DiskError::Io`] when it
    /// cannot be used at all. Damage in the directory is no error.
    pub fn open(config: DiskConfig, now: SystemTime) -> Result<(Self, Recovery), DiskError> {
        let begin = Instant::now();
        let plan = SpacePlan::new(config.size_max, config.slab_bytes).map_err(DiskError::Invalid)?;
        let directory = lock_directory(&config)?;
        let (catalogue, marks, error) = Catalogue::open(&config.dir, plan.catalogue_bytes, plan.aside_bytes);
        let mut rng = seeded(config.seed);
        let key = rng.random();
        let tier = DiskEngine {
            plan,
            files: Files::new(config.dir.join("slabs"), config.files_max),
            space: Space::new(plan.slabs_bytes),
            full: FullMark::new(),
            catalogue,
            index: RwLock::new(Index::new(key, config.policy == Policy::Lru)),
            writer: Mutex::new(Writer::default()),
            maintenance: Mutex::default(),
            scrub: Mutex::default(),
            removed_slabs: Mutex::default(),
            catalogue_sync: Mutex::default(),
            rng: Mutex::new(rng),
            state: Mutex::new(HealthState::on(now, directory)),
            off: AtomicU8::new(0),
            read_errors: AtomicU32::new(0),
            counters: Counters::default(),
            config,
        };
        let mut found = Recovery::default();
        let known = marks.keys().copied().collect::<Vec<_>>();
        let present = tier.load_slabs(marks, &mut found)?;
        tier.removed_slabs
            .lock()
            .extend(known.into_iter().filter(|id| !present.contains(id)).map(|id| (id, None)));
        if let Some(error) = error {
            tracing::warn!(%error, "rebuilding the catalogue of the disk tier from its slabs");
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
        marks: HashMap<u64, DeadMarks>,
        found: &mut Recovery,
    ) -> Result<HashSet<u64>, DiskError> {
        let dir = self.files.dir();
        let fail = |e| DiskError::io("list", dir, e);
        let mut ids = Vec::new();
        for e in fs::read_dir(dir).map_err(fail)? {
            ids.extend(e.map_err(fail)?.file_name().to_str().and_then(Files::id_of));
        }
        // In order of creation: of two records of one chunk the later one counts.
        ids.sort_unstable();
        self.writer.lock().next_id = ids.last().map_or(1, |l| l.saturating_add(1));
        for &id in &ids {
            if let Err(e) = self.load_slab(id, marks.get(&id), found) {
                // One unreadable file does not fail the others.
                tracing::warn!(slab = id, error = %e, "a slab cannot be read; its chunks are fetched again");
                add(&self.counters.errors, 1);
                found.dropped += 1;
                self.note_io_error(&e);
                self.space.add(fs::metadata(self.files.path(id)).map_or(0, |m| m.blocks() * 512));
            }
        }
        Ok(ids.into_iter().collect())
    }

    fn load_slab(&self, id: u64, marks: Option<&DeadMarks>, found: &mut Recovery) -> Result<(), DiskError> {
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
                    tracing::warn!(slab = id, %why, "removing slabs of another format");
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
        // Without the slack of a slab that was just written: what fitted before must fit again.
        self.space.add(f.blocks);
        let mut index = self.write_index();
        let n = index.add_slab(Arc::clone(&slab), f.blocks, SlabState::Sealed);
        for (row, r) in f.table.rows.iter().enumerate() {
            let key = StoreKey { domain: f.table.domains[r.domain as usize].clone(), hash: r.hash };
            let domain = if f.dead[row] { None } else { index.domain(&key.domain) };
            let Some(domain) = domain else {
                index.insert_dead(n);
                continue;
            };
            // A copy of a record in another slab, which was not unlinked before the tier stopped.
            index.remove(&key);
            let set = index.datasets.number(DatasetId(r.dataset));
            index.datasets.charge(set, footprint(r.len));
            index.insert(domain, r.hash, set, SlabLocation { slab: n, at: r.at, len: r.len });
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
                self.note_io_error(&e);
            }
        }
        Ok(())
    }

    fn seal_found(&self, n: u32, slab: &Arc<Slab>, file: &File, end: u64) -> Result<(), DiskError> {
        let (bytes, check) = {
            let mut index = self.write_index();
            let table = index.table(n);
            layout::seal(slab.id, end, &table)
        };
        // Bytes after the last record were never a record, or did not verify.
        let now = file
            .set_len(end)
            .and_then(|()| slab::seal(file, end, &bytes))
            .map_err(|e| DiskError::io("seal", self.files.path(slab.id), e))?;
        if let Some(m) = self.write_index().slab_mut(n) {
            m.check = check;
            (m.fixed, m.end) = (BLOCK + bytes.len() as u64, end);
        }
        self.resize(n, slab, now);
        Ok(())
    }

    /// Seals the open slab and writes the catalogue, so that the next start is quick.
    ///
    /// The tier refuses everything after this. Without `close` the next start walks one slab.
    ///
    /// # Errors
    /// [`DiskError`] when the disk fails; the tier is closed all the same.
    pub fn close(&self) -> Result<(), DiskError> {
        let works = self.check_writable().is_ok();
        let _exclusive = self.maintenance.lock();
        {
            let mut s = self.state.lock();
            s.health = Health::Off { why: OffReason::Closed, since: s.now };
            self.set_off(Some(OffReason::Closed));
        }
        let ended = if works { self.seal_active() } else { Ok(()) };
        self.sync_catalogue();
        self.catalogue.disconnect();
        self.files.close_all();
        self.state.lock().directory = None;
        ended
    }
}
