//! The engine of the disk tier: it keeps chunks in append-only slabs, within its limits, also across a crash.
//!
//! ```text
//! put ─► admission (policy, share) ─► space reserved ─► append to the open slab ─► index
//! get ─► index ─► slab guard, looked up again ─► pread ─► (the caller hashes; wrong → quarantine)
//! full slab ─► table + footer ─► sealed       dead records ─► reaper: unlink, punch, compact
//! open ─► tables of sealed slabs, dead marks from the catalogue ─► unsealed slab walked and hashed
//! ```
//!
//! The engine is synchronous and does IO, so its callers are on blocking threads (`crate::disk_tier`). It has
//! no tasks or threads of its own; sled has some. The tier's owner calls `reap`, `scrub_next` and `probe`
//! regularly.
//!
//! Invariants:
//! 1. (I1) `get` returns bytes that are *not* verified. The caller hashes them into a `Verified`, and calls
//!    `quarantine` when they are wrong. Their length is right;
//! 2. (I5) any change to the directory costs speed only: no wrong length, no panic;
//! 3. (I6) the engine reserves space before it writes, so the directory never exceeds `size_max`, with
//!    everything in it and with files that are deleted but still open;
//! 4. (I7) the key is (domain, hash);
//! 5. a chunk whose `put` returned `Stored::Yes` is a hit after `kill -9`. The engine does not sync, so after
//!    a power loss it may be a miss, or wrong bytes that invariant 1 catches.
//!
//! Lock order: maintenance → writer → catalogue_sync → index; slab guard → index. No code waits for a slab's
//! guard, or does IO, while it holds the index lock.

mod catalogue;
mod datasets;
mod directory_lock;
mod error;
mod eviction;
mod fs_space;
#[doc(hidden)]
pub mod fuzzing;
mod health;
mod index;
mod layout;
mod lru;
mod mount_memory;
mod open;
mod policy;
mod put;
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
pub use mount_memory::MountMemory;
pub use open::Recovery;
pub use policy::{
    Admission, BadPolicy, Claim, Policy, Pool, Pools, Refusal, Stored, equal_split, split_by_claims,
    sweeps_first,
};
pub use reaper::ReapReport;
pub use scrub::ScrubReport;
pub use stats::{Counts, DatasetUsage, DirectoryUsage, DiskStats};

use crate::dataset_id::DatasetId;
use bytes::Bytes;
use catalogue::{Catalogue, Change};
use fletch_core::StoreKey;
use index::{Index, SlabLocation, SlabMeta, SlabState};
use layout::{HEAD, LINE, footprint};
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
pub(crate) use put::{Newcomer, ReservedShare};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
pub use slab::RecordReader;
use slab::{Files, Slab};
use space::{FullMark, Space, SpacePlan};
use stats::{Counters, add};
use std::{
    fs::File,
    io,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU32, Ordering},
    },
};

/// The settings of a tier.
#[derive(Debug, Clone)]
pub struct DiskConfig {
    /// The tier's own directory. The engine creates it if it does not exist.
    pub dir: PathBuf,
    /// Bytes that the directory may occupy, as `du` counts them; at least 16 MiB.
    pub size_max: u64,
    /// Bytes of the file system that stay free.
    pub free_floor: u64,
    /// Length of a slab; `None` for the default.
    ///
    /// The default is 1/256 of `size_max`, from 0.5 to 32 MiB; from 128 GiB on 1/4096, at most 256 MiB.
    pub slab_bytes: Option<u64>,
    /// The policy that decides which chunks stay.
    pub policy: Policy,
    /// Seed of the random choices.
    pub seed: u64,
    /// Most slab files that stay open for reading.
    pub files_max: usize,
    /// Where the directory's mount point is remembered; `None` remembers nothing.
    pub mount_memory: Option<MountMemory>,
}

/// The engine of an open disk tier. See the invariants of the module.
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
    /// Held by the one thread that reclaims space.
    maintenance: Mutex<reaper::Reaper>,
    scrub: Mutex<scrub::Cursor>,
    /// Slabs that were removed since the last write to the catalogue.
    removed_slabs: Mutex<Vec<Change>>,
    /// Held while changes to the catalogue are collected and written.
    catalogue_sync: Mutex<()>,
    rng: Mutex<ChaCha8Rng>,
    state: Mutex<health::HealthState>,
    /// A copy of the health in `state` that is read without a lock.
    off: AtomicU8,
    /// Failed reads since the last read that succeeded.
    read_errors: AtomicU32,
    counters: Counters,
}

impl DiskEngine {
    fn read_index(&self) -> RwLockReadGuard<'_, Index> {
        self.index.read()
    }

    fn write_index(&self) -> RwLockWriteGuard<'_, Index> {
        self.index.write()
    }

    fn random(&self) -> u64 {
        self.rng.lock().random()
    }

    /// Returns the bytes kept under `key`, unverified: **the caller hashes them**.
    ///
    /// The caller calls [`DiskEngine::quarantine`] when they are wrong.
    ///
    /// # Errors
    /// [`DiskError`] when the disk cannot be read. The caller treats it as a miss.
    pub fn get(&self, key: &StoreKey) -> Result<Option<Bytes>, DiskError> {
        self.get_with(key, |record| record.whole().map(Bytes::from))
    }

    /// Lets `read` read the record kept under `key` in place; otherwise as [`DiskEngine::get`].
    ///
    /// Calls `read` at most once. The record is not moved or punched meanwhile. If `read` fails with
    /// `WouldBlock`, nothing is counted, and the result is that of a miss.
    ///
    /// # Errors
    /// As [`DiskEngine::get`].
    pub fn get_with<T>(
        &self,
        key: &StoreKey,
        read: impl FnOnce(&RecordReader<'_>) -> io::Result<T>,
    ) -> Result<Option<T>, DiskError> {
        self.check_readable()?;
        // Compaction may move the record between the two lookups, but hardly twice.
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
            if got.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock) {
                return Ok(None);
            }
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

    /// Opens the file that has the record kept under `key`, for another process, and returns where the
    /// record's bytes begin there. Nobody holds the record: it may be moved, punched or cut at any time.
    ///
    /// `None` if there is none; if its file cannot be opened; and with the policy `lru`, which must see each
    /// read.
    #[must_use]
    pub fn lend(&self, key: &StoreKey) -> Option<(File, u64, u32)> {
        self.check_readable().ok()?;
        if self.config.policy == Policy::Lru {
            return None;
        }
        let (location, slab) = self.locate(key)?;
        let file = self.files.lend(&slab).ok()?;
        Some((file, location.at + HEAD, location.len))
    }

    fn locate(&self, key: &StoreKey) -> Option<(SlabLocation, Arc<Slab>)> {
        let index = self.read_index();
        let location = index.find(key)?;
        Some((location, Arc::clone(&index.slab(location.slab)?.slab)))
    }

    /// Whether the tier has the chunk. Does no IO.
    #[must_use]
    pub fn contains(&self, key: &StoreKey) -> bool {
        self.length(key).is_some()
    }

    /// Returns the length of the chunk, if the tier has it. Does no IO.
    #[must_use]
    pub fn length(&self, key: &StoreKey) -> Option<u32> {
        self.check_readable().ok()?;
        self.read_index().find(key).map(|location| location.len)
    }

    /// Removes a chunk whose bytes the caller found wrong, so that it is never served again.
    pub fn quarantine(&self, key: &StoreKey) {
        if self.write_index().remove(key).is_some() {
            add(&self.counters.quarantined, 1);
            let chunk = key.hash;
            tracing::warn!(%chunk, "a chunk on disk is damaged; it is removed and fetched again when read");
        }
    }

    /// Returns the share of a dataset, in footprints: what it may use. Where a dataset has room for all of
    /// its chunks, that is the room of its plain readers and its sweeps together.
    #[must_use]
    pub fn share_of(&self, dataset: DatasetId) -> Option<u64> {
        self.read_index().datasets.usable(dataset)
    }

    /// Returns the part of the disk that a dataset has for itself, in footprints. Parts add up.
    #[must_use]
    pub fn part_of(&self, dataset: DatasetId) -> Option<u64> {
        self.read_index().datasets.share(dataset)
    }

    /// Returns the number of records that died. Grows whenever a record dies.
    fn deaths(&self) -> u64 {
        let c = &self.counters;
        [&c.evicted, &c.quarantined, &c.slabs_lost].iter().map(|n| n.load(Ordering::Relaxed)).sum()
    }

    /// The policy that decides which chunks stay.
    #[must_use]
    pub fn policy(&self) -> Policy {
        self.config.policy
    }

    /// Returns the footprints that the tier can hold, for records of the present mean length.
    ///
    /// Shares divide this.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.capacity_of(&self.read_index())
    }

    pub(crate) fn capacity_of(&self, index: &Index) -> u64 {
        self.plan.capacity(index.mean_footprint())
    }

    /// Returns the footprint of a chunk of `len` bytes: lines of 64 bytes, and 256 bytes for its header.
    #[must_use]
    pub fn footprint(len: u32) -> u64 {
        footprint(len)
    }

    /// Returns the largest possible footprint of `chunks` chunks that have `bytes` together.
    #[must_use]
    pub fn footprint_max(bytes: u64, chunks: u64) -> u64 {
        bytes.saturating_add(chunks.saturating_mul(HEAD + LINE - 1))
    }

    /// Says whether the tier would keep a chunk of `len` bytes now. Does no IO.
    #[must_use]
    pub fn admit(&self, key: &StoreKey, dataset: DatasetId, len: u32) -> Admission {
        self.admit_beside(key, dataset, len, 0)
    }

    /// As [`DiskEngine::admit`], if the dataset occupied `beside` more bytes, in footprints.
    pub(crate) fn admit_beside(
        &self,
        key: &StoreKey,
        dataset: DatasetId,
        len: u32,
        beside: u64,
    ) -> Admission {
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
                let need = need.saturating_add(beside);
                room && index.datasets.has_space(dataset, need, self.capacity_of(&index))
            }
        };
        if yes { Admission::Yes } else { Admission::No }
    }

    /// Returns counters and sizes.
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

    /// Returns what the directory occupies now. Looks at every file in it.
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

    /// Writes changes to the catalogue. If that fails, evicted records may come back after a restart.
    pub(crate) fn sync_catalogue(&self) {
        // A thread that punches after this must find the changes of all other threads written.
        let _one = self.catalogue_sync.lock();
        let mut changes: Vec<Change> = std::mem::take(&mut *self.removed_slabs.lock());
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
        if let Err(e) = self.catalogue.write(changes) {
            tracing::warn!(error = %e, "rebuilding the catalogue of the disk tier");
            self.rebuild_catalogue(e.damaged());
        }
    }

    /// Replaces the catalogue by a new one, written from the index.
    pub(crate) fn rebuild_catalogue(&self, damaged: bool) {
        add(&self.counters.catalogue_rebuilds, 1);
        let all: Vec<Change> = {
            let index = self.read_index();
            let some_dead =
                |m: &SlabMeta| m.state == SlabState::Sealed && (m.live as usize) < m.records.len();
            let slabs = index.slabs().filter(|(_, m)| some_dead(m)).map(|(n, _)| n);
            slabs.filter_map(|n| index.marks(n).map(|(id, m)| (id, Some(m)))).collect()
        };
        if let Err(e) = self.catalogue.rebuild(all, damaged) {
            tracing::warn!(error = %e, "the disk tier has no catalogue; a restart may revive evicted chunks");
        }
    }
}

fn seeded(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

#[cfg(test)]
mod tests;
