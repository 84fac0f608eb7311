//! The disk tier: chunks in append-only slabs, within limits at every moment, warm after a crash.
//!
//! ```text
//! put ─► admission (policy, share) ─► space taken ─► append to the open slab ─► index
//! get ─► index ─► slab guard, looked up again ─► pread ─► (the caller hashes; wrong → quarantine)
//! full slab ─► table + footer ─► sealed       dead records ─► reaper: unlink, punch, compact
//! open ─► tables of sealed slabs, dead marks from the catalogue ─► unsealed tail walked and hashed
//! ```
//!
//! Everything here is synchronous and does IO: callers are on blocking threads (`crate::attached`). There are no
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
mod health;
mod index;
mod layout;
mod lru;
mod open;
mod policy;
mod reaper;
mod recover;
mod room;
mod scrub;
mod shares;
mod slab;
mod space;
mod stats;
mod write;

pub use health::{DiskError, Health, Why};
pub use open::Recovery;
pub use policy::{Admission, BadPolicy, Policy, Refusal, Stored, equal_split};
pub use reaper::ReapReport;
pub use room::Room;
pub use scrub::ScrubReport;
pub use stats::{Counts, DatasetUse, DiskStats, Usage};

use bytes::Bytes;
use catalogue::{Catalogue, Change};
use fletch_core::StoreKey;
use index::{Index, Place};
use layout::{BLOCK, HEAD, LINE, footprint};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
pub use slab::Record;
use slab::{Files, Slab};
use space::{Full, Plan, Space};
use stats::{Counters, add};
use std::{
    io,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicU8, AtomicU32, Ordering},
    },
};

/// Which dataset a chunk was brought for; only equality matters. Chunks that several
/// datasets have are of the one that brought them first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DatasetId(pub u64);

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

/// After this many failed reads in a row the device is believed to fail.
const READ_ERRORS_MAX: u32 = 3;
/// Of so many records on the mean length is taken for that of the next.
const MEAN_FROM: u64 = 32;

/// A record's footprint on average; none while there are only a few, which say nothing about those to come.
fn mean_of(index: &Index) -> u64 {
    let records = index.len() as u64;
    if records < MEAN_FROM { 0 } else { index.bytes() / records }
}

/// The disk tier. See the module's invariants.
#[derive(Debug)]
pub struct DiskTier {
    config: DiskConfig,
    plan: Plan,
    files: Files,
    space: Space,
    full: Full,
    catalogue: Catalogue,
    index: RwLock<Index>,
    writer: Mutex<write::Writer>,
    /// One reclaims at a time.
    maintenance: Mutex<reaper::Reaper>,
    scrub: Mutex<scrub::Cursor>,
    /// Slabs that went away since the catalogue was told.
    gone: Mutex<Vec<Change>>,
    /// Held while changes are collected and written.
    telling: Mutex<()>,
    rng: Mutex<ChaCha8Rng>,
    state: Mutex<open::Standing>,
    /// The health in `state`, for looking at without a lock.
    off: AtomicU8,
    /// Failed reads since one succeeded.
    read_errors: AtomicU32,
    counters: Counters,
}

impl DiskTier {
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
    /// [`DiskTier::quarantine`] when they are wrong.
    ///
    /// # Errors
    /// [`DiskError`] when the disk cannot be read; it is a miss all the same.
    pub fn get(&self, key: &StoreKey) -> Result<Option<Bytes>, DiskError> {
        self.get_with(key, |record| record.whole().map(Bytes::from))
    }

    /// Has `read` take the bytes kept under `key` where they lie; as [`DiskTier::get`]. It is called once at most, and
    /// nobody moves or punches the record meanwhile.
    ///
    /// # Errors
    /// As [`DiskTier::get`].
    pub fn get_with<T>(
        &self,
        key: &StoreKey,
        read: impl FnOnce(&Record<'_>) -> io::Result<T>,
    ) -> Result<Option<T>, DiskError> {
        self.readable()?;
        // Whoever compacts may move it between the two looks, hardly twice.
        for _ in 0..4 {
            let Some((place, slab)) = self.locate(key) else { break };
            let guard = slab.reading();
            let still = self.locate(key);
            if !still.is_some_and(|(p, s)| p == place && Arc::ptr_eq(&s, &slab)) {
                continue;
            }
            let mut bytes = 0;
            let got = self.files.file(&slab).and_then(|f| {
                let record = Record::new(&f, place.at + HEAD, place.len);
                let got = read(&record);
                bytes = record.taken();
                got
            });
            drop(guard);
            let Some(got) = self.judge(key, place, &slab, got)? else { break };
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

    fn locate(&self, key: &StoreKey) -> Option<(Place, Arc<Slab>)> {
        let index = self.read_index();
        let place = index.find(key)?;
        Some((place, Arc::clone(&index.slab(place.slab)?.slab)))
    }

    /// What a read says about its record, its slab and the disk.
    fn judge<T>(
        &self,
        key: &StoreKey,
        place: Place,
        slab: &Arc<Slab>,
        read: io::Result<T>,
    ) -> Result<Option<T>, DiskError> {
        match read {
            Ok(got) => {
                self.read_errors.store(0, Ordering::Relaxed);
                Ok(Some(got))
            }
            // The file ends early.
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                self.condemn(key, place);
                Ok(None)
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                if lock(&self.state).lost_ground(&self.config.dir) {
                    self.turn_off(Why::Vanished);
                    return Err(DiskError::Off(Why::Vanished));
                }
                self.lose_slab(slab);
                Ok(None)
            }
            Err(e) => {
                add(&self.counters.errors, 1);
                match health::verdict(&e) {
                    Some(Why::Io) => {
                        self.condemn(key, place);
                        if self.read_errors.fetch_add(1, Ordering::Relaxed) + 1 >= READ_ERRORS_MAX {
                            self.turn_off(Why::Io);
                        }
                    }
                    Some(why) => self.turn_off(why),
                    None => {}
                }
                Err(DiskError::io("read", self.files.path(slab.id), e))
            }
        }
    }

    fn condemn(&self, key: &StoreKey, place: Place) {
        if self.write_index().remove_at(key, place).is_some() {
            add(&self.counters.quarantined, 1);
        }
    }

    /// Forgets a slab whose file is gone.
    fn lose_slab(&self, slab: &Arc<Slab>) {
        let mut index = self.write_index();
        let n = index.slabs().find(|(_, m)| Arc::ptr_eq(&m.slab, slab)).map(|(n, _)| n);
        if let Some(meta) = n.and_then(|n| index.drop_slab(n)) {
            drop(index);
            tracing::warn!(slab = slab.id, records = meta.live, "a slab's file is gone");
            add(&self.counters.slabs_lost, 1);
            self.forget_file(&meta.slab, meta.blocks);
        }
    }

    /// Whether `key` is there. Does no IO.
    #[must_use]
    pub fn contains(&self, key: &StoreKey) -> bool {
        self.length(key).is_some()
    }

    /// How long the chunk `key` is, if it is there. Does no IO.
    #[must_use]
    pub fn length(&self, key: &StoreKey) -> Option<u32> {
        self.readable().ok()?;
        self.read_index().find(key).map(|place| place.len)
    }

    /// The caller hashed what `get` returned, and it is not the chunk: never served again.
    pub fn quarantine(&self, key: &StoreKey) {
        if self.write_index().remove(key).is_some() {
            add(&self.counters.quarantined, 1);
            tracing::warn!(chunk = %key.hash, "wrong bytes on disk, quarantined");
        }
    }

    /// Removes a chunk; `false` when it is not there or leased.
    pub fn evict(&self, key: &StoreKey) -> bool {
        let mut index = self.write_index();
        if index.leased(key) {
            return false;
        }
        let size = index.remove(key);
        drop(index);
        self.count_evicted(size.is_some() as u64, size.unwrap_or(0));
        size.is_some()
    }

    /// Removes a chunk if it was brought for `dataset`; `false` when it is not there, another's, or leased.
    pub fn evict_of(&self, key: &StoreKey, dataset: DatasetId) -> bool {
        let mut index = self.write_index();
        if index.leased(key) || index.dataset_of(key) != Some(dataset) {
            return false;
        }
        let size = index.remove(key);
        drop(index);
        self.count_evicted(size.is_some() as u64, size.unwrap_or(0));
        size.is_some()
    }

    /// What a dataset was given of the tier, in footprints.
    #[must_use]
    pub fn share_of(&self, dataset: DatasetId) -> Option<u64> {
        self.read_index().share_of(dataset)
    }

    /// Removes all chunks of a dataset that nobody leased; how many.
    pub fn evict_dataset(&self, dataset: DatasetId) -> u64 {
        self.shrink_dataset(dataset, 0)
    }

    fn count_evicted(&self, chunks: u64, bytes: u64) {
        add(&self.counters.evicted, chunks);
        add(&self.counters.evicted_bytes, bytes);
    }

    /// Grows whenever a record dies.
    fn deaths(&self) -> u64 {
        let c = &self.counters;
        [&c.evicted, &c.quarantined, &c.slabs_lost].iter().map(|n| n.load(Ordering::Relaxed)).sum()
    }

    /// Evicts random chunks of a dataset until it has at most `bytes`.
    fn shrink_dataset(&self, dataset: DatasetId, bytes: u64) -> u64 {
        let mut evicted = 0;
        loop {
            // In pieces, so that readers get their turn.
            let picks: Vec<u64> = (0..256).map(|_| self.random()).collect();
            let mut index = self.write_index();
            let (mut chunks, mut freed) = (0, 0);
            for pick in &picks {
                if index.dataset_bytes(dataset) <= bytes {
                    break;
                }
                let n = index.dataset(dataset);
                let Some(size) = index.evict_random(n, *pick) else { break };
                chunks += 1;
                freed += size;
            }
            drop(index);
            self.count_evicted(chunks, freed);
            evicted += chunks;
            if chunks < picks.len() as u64 {
                return evicted;
            }
        }
    }

    /// Protects chunks from eviction until as many `release`s; how many of them are there.
    pub fn lease(&self, keys: &[StoreKey]) -> usize {
        let mut index = self.write_index();
        keys.iter().filter(|k| index.lease(k)).count()
    }

    /// Takes one protection back from each chunk.
    pub fn release(&self, keys: &[StoreKey]) {
        let mut index = self.write_index();
        keys.iter().for_each(|k| index.release(k));
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
        self.plan.capacity(mean_of(index))
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

    /// Sets the shares of all datasets, in footprints; one that is over its share (or is not named, and others
    /// need the space) drops random chunks, so that what stays is an unbiased sample. Only `Policy::Fletch`
    /// has shares. How many chunks were dropped.
    pub fn set_shares(&self, shares: &[(DatasetId, u64)]) -> u64 {
        if self.config.policy != Policy::Fletch {
            return 0;
        }
        self.write_index().set_shares(shares);
        let capacity = self.capacity();
        let over: Vec<_> = {
            let index = self.read_index();
            let all = index.datasets().filter(|d| d.2 > 0);
            all.map(|d| (d.0, d.1, index.allowance(d.0, capacity))).filter(|d| d.1 > d.2).collect()
        };
        let dropped = over.into_iter().map(|(id, _, allowance)| self.shrink_dataset(id, allowance)).sum();
        self.sync_catalogue();
        dropped
    }

    /// Whether a chunk of `len` bytes would be kept now. Does no IO.
    #[must_use]
    pub fn admit(&self, key: &StoreKey, dataset: DatasetId, len: u32) -> Admission {
        if self.writable().is_err() || !self.plan.fits(len) {
            return Admission::No;
        }
        let need = footprint(len);
        let index = self.read_index();
        if index.contains(key) {
            return Admission::Yes;
        }
        let room = !self.full.is(need, self.deaths());
        let yes = match self.config.policy {
            Policy::Lru => true,
            Policy::Pin => room,
            Policy::Fletch => {
                room && index.dataset_bytes(dataset).saturating_add(need)
                    <= index.allowance(dataset, self.capacity_of(&index))
            }
        };
        if yes { Admission::Yes } else { Admission::No }
    }

    /// Counters and sizes.
    #[must_use]
    pub fn stats(&self) -> DiskStats {
        let index = self.read_index();
        let datasets = index.datasets();
        DiskStats {
            counts: self.counters.snapshot(),
            chunks: index.len() as u64,
            bytes: index.bytes(),
            limit: self.config.size_max,
            capacity: self.capacity_of(&index),
            slabs: index.slabs().count() as u64,
            slab_bytes: self.space.used(),
            leases: index.leases() as u64,
            index_bytes: index.memory() as u64,
            datasets: datasets
                .map(|(dataset, bytes, chunks, share)| DatasetUse { dataset, bytes, chunks, share })
                .collect(),
        }
    }

    /// What the directory occupies now. Looks at every file in it.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let dir = &self.config.dir;
        let catalogues = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let catalogues = catalogues.filter(|e| e.file_name().to_string_lossy().starts_with("catalogue"));
        Usage {
            catalogue: catalogues.map(|e| catalogue::du(&e.path())).sum(),
            du: catalogue::du(dir),
            nameless: self.files.nameless_bytes(),
            taken: self.space.used(),
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
