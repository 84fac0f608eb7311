//! The disk tier: chunks in append-only slabs, within limits at every moment, warm after a crash.
//!
//! ```text
//! put ─► admission (policy, share) ─► space taken ─► append to the open slab ─► index
//! get ─► index ─► slab guard, looked up again ─► pread ─► (the caller hashes; wrong → quarantine)
//! full slab ─► table + footer ─► sealed       dead records ─► reaper: unlink, punch, compact
//! open ─► tables of sealed slabs, dead marks from the catalogue ─► unsealed tail walked and hashed
//! ```
//!
//! Everything here is synchronous and does IO: callers are on blocking threads (`crate::disk_tier`). There are no
//! tasks or threads of its own (sled has some); whoever owns the tier calls `reap`, `scrub_next` and `probe` now and then.
//!
//! Invariants:
//! 1. (I1) bytes that `get` returns are *not* checked: whoever asked hashes them into a
//!    `Verified`, and calls `quarantine` when they are wrong. Their length is right;
//! 2. (I5) whatever is done to the directory costs speed only: no wrong length, no panic;
//! 3. (I6) space is taken before it is written to, so the directory never exceeds `size_max`,
//!    with everything in it and with what was deleted but is still open;
//! 4. (I7) the key is (domain, hash);
//! 5. a chunk whose `put` returned `Stored::Yes` is a hit after `kill -9`. Nothing is synced, so after a
//!    power loss it may be a miss, or wrong bytes that invariant 1 catches.
//!
//! Lock order: maintenance → writer → telling → index; slab guard → index. Nobody waits for a slab's
//! guard, or does IO, with the index locked.

mod catalogue;
mod datasets;
mod directory_lock;
mod error;
mod eviction;
mod fs_space;
mod health;
mod index;
mod layout;
mod lru;
mod open;
mod policy;
mod reaper;
mod recover;
mod scrub;
mod slab;
mod space;
mod stats;
mod writer;

pub use error::{DiskError, OffReason};
pub use fs_space::FsSpace;
pub use health::Health;
pub use open::Recovery;
pub use policy::{Admission, BadPolicy, Policy, Refusal, Stored, equal_split};
pub use reaper::ReapReport;
pub use scrub::ScrubReport;
pub use stats::{Counts, DatasetUsage, DirectoryUsage, DiskStats};

use crate::DatasetId;
use bytes::Bytes;
use catalogue::{Catalogue, Change};
use fletch_core::StoreKey;
use index::{Index, SlabLocation, SlabMeta, SlabState};
use layout::{HEAD, LINE, footprint};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
pub use slab::RecordReader;
use slab::{Files, Slab};
use space::{FullMark, Space, SpacePlan};
use stats::{Counters, add};
use std::{
    io,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicU8, AtomicU32, Ordering},
    },
};

/// What a tier is given.
#[derive(Debug, Clone)]
pub struct DiskConfig {
    /// A directory of its own; made if need be.
    pub dir: PathBuf,
    /// Bytes it may occupy, as `du` counts them; at least 16 MiB.
    pub size_max: u64,
    /// Bytes that stay free on the file system.
    pub free_floor: u64,
    /// Length of a slab; `None` for 1/256 of `size_max`, 0.5 to 32 MiB, and 1/4096 from 128 GiB on, 256 MiB at most.
    pub slab_bytes: Option<u64>,
    /// What decides residency.
    pub policy: Policy,
    /// Where random choices begin.
    pub seed: u64,
    /// How many slab files are kept open for reading.
    pub files_max: usize,
}

/// The disk tier. See the module's invariants.
#[derive(Debug)]
pub struct DiskEngine {
    config: DiskConfig,
    plan: SpacePlan,
    files: Files,
    space: Space,
    full: FullMark,
    catalogue: Catalogue,
    index: RwLock<Index>,
    writer: Mutex<writer::Writer>,
    /// One reclaims at a time.
    maintenance: Mutex<reaper::Reaper>,
    scrub: Mutex<scrub::Cursor>,
    /// Slabs that went away since the catalogue was told.
    removed_slabs: Mutex<Vec<Change>>,
    /// Held while changes are collected and written.
    catalogue_sync: Mutex<()>,
    rng: Mutex<ChaCha8Rng>,
    state: Mutex<health::HealthState>,
    /// The health in `state`, for looking at without a lock.
    off: AtomicU8,
    /// Failed reads since one succeeded.
    read_errors: AtomicU32,
    counters: Counters,
}

impl DiskEngine {
    fn read_index(&self) -> RwLockReadGuard<'_, Index> {
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_index(&self) -> RwLockWriteGuard<'_, Index> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn random(&self) -> u64 {
        lock(&self.rng).random()
    }

    /// The bytes kept under `key`, as they are on disk: **the caller hashes them**, and calls
    /// [`DiskEngine::quarantine`] when they are wrong.
    ///
    /// # Errors
    /// [`DiskError`] when the disk cannot be read; it is a miss all the same.
    pub fn get(&self, key: &StoreKey) -> Result<Option<Bytes>, DiskError> {
        self.get_with(key, |record| record.whole().map(Bytes::from))
    }

    /// Has `read` take the bytes kept under `key` where they lie; as [`DiskEngine::get`]. It is called once at most, and
    /// nobody moves or punches the record meanwhile.
    ///
    /// # Errors
    /// As [`DiskEngine::get`].
    pub fn get_with<T>(
        &self,
        key: &StoreKey,
        read: impl FnOnce(&RecordReader<'_>) -> io::Result<T>,
    ) -> Result<Option<T>, DiskError> {
        self.check_readable()?;
        // Whoever compacts may move it between the two looks, hardly twice.
        for _ in 0..4 {
            let Some((location, slab)) = self.locate(key) else { break };
            let guard = slab.lock_shared();
            let still = self.locate(key);
            if !still.is_some_and(|(p, s)| p == location && Arc::ptr_eq(&s, &slab)) {
                continue;
            }
            let mut bytes = 0;
            let got = self.files.file(&slab).and_then(|f| {
                let record = RecordReader::new(&f, location.at + HEAD, location.len);
                let got = read(&record);
                bytes = record.taken();
                got
            });
            drop(guard);
            let Some(got) = self.check_read(key, location, &slab, got)? else { break };
            if self.config.policy == Policy::Lru {
                self.write_index().touch(key);
            }
            add(&self.counters.hits, 1);
            add(&self.counters.hit_bytes, bytes);
            return Ok(Some(got));
        }
        add(&self.counters.misses, 1);
        Ok(None)
    }

    fn locate(&self, key: &StoreKey) -> Option<(SlabLocation, Arc<Slab>)> {
        let index = self.read_index();
        let location = index.find(key)?;
        Some((location, Arc::clone(&index.slab(location.slab)?.slab)))
    }

    /// Whether `key` is there. Does no IO.
    #[must_use]
    pub fn contains(&self, key: &StoreKey) -> bool {
        self.length(key).is_some()
    }

    /// How long the chunk `key` is, if it is there. Does no IO.
    #[must_use]
    pub fn length(&self, key: &StoreKey) -> Option<u32> {
        self.check_readable().ok()?;
        self.read_index().find(key).map(|location| location.len)
    }

    /// The caller hashed what `get` returned, and it is not the chunk: never served again.
    pub fn quarantine(&self, key: &StoreKey) {
        if self.write_index().remove(key).is_some() {
            add(&self.counters.quarantined, 1);
            tracing::warn!(chunk = %key.hash, "wrong bytes on disk, quarantined");
        }
    }

    /// What a dataset was given of the tier, in footprints.
    #[must_use]
    pub fn share_of(&self, dataset: DatasetId) -> Option<u64> {
        self.read_index().datasets.share(dataset)
    }

    /// Grows whenever a record dies.
    fn deaths(&self) -> u64 {
        let c = &self.counters;
        [&c.evicted, &c.quarantined, &c.slabs_lost].iter().map(|n| n.load(Ordering::Relaxed)).sum()
    }

    /// What decides residency.
    #[must_use]
    pub fn policy(&self) -> Policy {
        self.config.policy
    }

    /// What footprints may add up to, for records as long as those that are here. Shares are parts of this.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.capacity_of(&self.read_index())
    }

    pub(crate) fn capacity_of(&self, index: &Index) -> u64 {
        self.plan.capacity(index.mean_footprint())
    }

    /// What a chunk of `len` bytes counts against a share: its bytes in lines of 64, and 256 for its header.
    #[must_use]
    pub fn footprint(len: u32) -> u64 {
        footprint(len)
    }

    /// What so many chunks of so many bytes together count against a share, at most.
    #[must_use]
    pub fn footprint_max(bytes: u64, chunks: u64) -> u64 {
        bytes.saturating_add(chunks.saturating_mul(HEAD + LINE - 1))
    }

    /// Whether a chunk of `len` bytes would be kept now. Does no IO.
    #[must_use]
    pub fn admit(&self, key: &StoreKey, dataset: DatasetId, len: u32) -> Admission {
        if self.check_writable().is_err() || !self.plan.fits(len) {
            return Admission::No;
        }
        let need = footprint(len);
        let index = self.read_index();
        if index.contains(key) {
            return Admission::Yes;
        }
        let room = !self.full.excludes(need, self.deaths());
        let yes = match self.config.policy {
            Policy::Lru => true,
            Policy::Pin => room,
            Policy::Fletch => {
                room && index.datasets.bytes(dataset).saturating_add(need)
                    <= index.datasets.allowance(dataset, self.capacity_of(&index))
            }
        };
        if yes { Admission::Yes } else { Admission::No }
    }

    /// Counters and sizes.
    #[must_use]
    pub fn stats(&self) -> DiskStats {
        let index = self.read_index();
        DiskStats {
            counts: self.counters.snapshot(),
            chunks: index.len() as u64,
            bytes: index.bytes(),
            limit: self.config.size_max,
            capacity: self.capacity_of(&index),
            slabs: index.slabs().count() as u64,
            slab_bytes: self.space.used(),
            pinned: index.pinned_records() as u64,
            index_bytes: index.memory() as u64,
            datasets: index.datasets.usage(),
        }
    }

    /// What the directory occupies now. Looks at every file in it.
    #[must_use]
    pub fn usage(&self) -> DirectoryUsage {
        let dir = &self.config.dir;
        let catalogues = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let catalogues = catalogues.filter(|e| e.file_name().to_string_lossy().starts_with("catalogue"));
        DirectoryUsage {
            catalogue: catalogues.map(|e| catalogue::du(&e.path())).sum(),
            du: catalogue::du(dir),
            unlinked: self.files.unlinked_bytes(),
            taken: self.space.used(),
        }
    }

    /// Tells the catalogue what changed. Failing costs at most that evicted records come back
    /// after a restart.
    pub(crate) fn sync_catalogue(&self) {
        // Whoever punches after this must find told what anybody collected.
        let _one = lock(&self.catalogue_sync);
        let mut changes: Vec<Change> = std::mem::take(&mut *lock(&self.removed_slabs));
        {
            let mut index = self.write_index();
            let dirty = index.slabs().filter(|(_, m)| m.dirty && m.state == SlabState::Sealed);
            let dirty: Vec<u32> = dirty.map(|(n, _)| n).collect();
            for n in dirty {
                changes.extend(index.marks(n).map(|(id, m)| (id, Some(m))));
                if let Some(m) = index.slab_mut(n) {
                    m.dirty = false;
                }
            }
        }
        if let Err(doubt) = self.catalogue.write(changes) {
            tracing::warn!(%doubt, "the catalogue is begun anew");
            self.rebuild_catalogue(doubt.damaged());
        }
    }

    /// Begins the catalogue anew from the index.
    pub(crate) fn rebuild_catalogue(&self, damaged: bool) {
        add(&self.counters.catalogue_rebuilds, 1);
        let all: Vec<Change> = {
            let index = self.read_index();
            let some_dead =
                |m: &SlabMeta| m.state == SlabState::Sealed && (m.live as usize) < m.records.len();
            let slabs = index.slabs().filter(|(_, m)| some_dead(m)).map(|(n, _)| n);
            slabs.filter_map(|n| index.marks(n).map(|(id, m)| (id, Some(m)))).collect()
        };
        if let Err(doubt) = self.catalogue.rebuild(all, damaged) {
            tracing::warn!(%doubt, "there is no catalogue for now");
        }
    }
}

/// A lock whose holder panicked is still a lock: what it guards is consistent after every statement that can panic.
fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

fn seeded(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

#[cfg(test)]
mod tests;
