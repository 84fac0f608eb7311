//! Eviction: this file chooses every chunk that leaves the disk tier.
//!
//! | a chunk leaves because | the victim is |
//! |---|---|
//! | a newcomer needs space, policy `lru` | the least recently used record |
//! | a newcomer needs space, policy `fletch` | random records of the pool furthest over its allowance |
//! | a newcomer needs space, policy `pin` | none: the newcomer is refused |
//! | the share of a dataset shrank | random records of its pool |
//! | a sweep or a plain reader uses its share | random records of its pool's member that is over its share |
//! | the caller names a chunk or a dataset | that chunk, or all chunks of that dataset |
//! | the file system is below its floor, or `size_max` was lowered | all records of a random sealed slab |
//!
//! Which unit of a sweep leaves is the decision of the sweep's policy; it names the chunks. The plain readers
//! of its dataset keep what the sweep gives up, as far as their share has room. Random victims leave an
//! unbiased sample of the dataset; records that plain readers do not claim leave first. Damaged records do
//! not leave here: they are quarantined.
//!
//! Invariants:
//! 1. a pinned record is no victim, and neither is a slab that holds one when its records leave;
//! 2. a victim leaves the index only. The reaper gives its bytes back to the file system.

use super::{
    DiskEngine, DiskError, Policy, Pools,
    index::{Index, NO_RECORD, SlabState},
    stats::add,
};
use crate::dataset_id::DatasetId;
use fletch_core::StoreKey;

/// Most victims that are chosen under one lock of the index, so that readers get their turn.
const BATCH: usize = 256;

/// How often a slab is chosen anew because it was pinned after it was chosen.
const CHOICES_MAX: usize = 8;

impl DiskEngine {
    /// Evicts a chunk; `false` when it is absent or pinned.
    pub fn evict(&self, key: &StoreKey) -> bool {
        self.evict_if(key, |_| true)
    }

    /// Removes chunks, also pinned ones, and returns how many there were. They do not come back after a
    /// restart: the open slab is sealed, and the catalogue written.
    ///
    /// # Errors
    /// When the open slab cannot be sealed.
    pub fn erase(&self, keys: &[StoreKey]) -> Result<u64, DiskError> {
        let sizes: Vec<u64> = {
            let mut index = self.write_index();
            keys.iter().filter_map(|key| index.remove(key)).collect()
        };
        if sizes.is_empty() {
            return Ok(0);
        }
        self.count_evicted(sizes.len() as u64, sizes.iter().sum());
        self.seal_active()?;
        self.sync_catalogue();
        Ok(sizes.len() as u64)
    }

    /// Gives a chunk of `dataset` up; `false` when it is absent, or is charged to another dataset.
    ///
    /// If the dataset is a sweep, its plain readers keep the chunk if their share has room for it or a
    /// warm-up protects it. Otherwise the chunk is evicted, unless it is pinned.
    pub fn evict_of(&self, key: &StoreKey, dataset: DatasetId) -> bool {
        let mut index = self.write_index();
        let Some(r) = index.lookup(key).filter(|_| index.dataset_of(key) == Some(dataset)) else {
            return false;
        };
        if index.hand_over(r) {
            return true;
        }
        if index.is_record_pinned(r) {
            return false;
        }
        let size = index.remove_record(r);
        drop(index);
        self.count_evicted(1, size);
        true
    }

    /// Notes that a dataset uses a chunk, which may be charged to a dataset with which it shares chunks.
    pub fn use_chunk(&self, key: &StoreKey, dataset: DatasetId) {
        if self.config.policy == Policy::Fletch && !self.read_index().is_claimed_by(key, dataset) {
            self.write_index().use_record(key, dataset);
        }
    }

    fn evict_if(&self, key: &StoreKey, wanted: impl FnOnce(&Index) -> bool) -> bool {
        let mut index = self.write_index();
        if index.is_pinned(key) || !wanted(&index) {
            return false;
        }
        let size = index.remove(key);
        drop(index);
        self.count_evicted(u64::from(size.is_some()), size.unwrap_or(0));
        size.is_some()
    }

    /// Evicts all chunks of a dataset that are not pinned, and returns how many there were.
    ///
    /// Evicts those of the sweeps over it, too, unless the sweep is one of `kept`.
    pub fn evict_dataset(&self, dataset: DatasetId, kept: &[DatasetId]) -> u64 {
        let members: Vec<DatasetId> = {
            let usage = self.read_index().datasets.usage();
            usage.iter().filter(|u| u.plain == dataset).map(|u| u.dataset).collect()
        };
        let evicted = members.into_iter().filter(|member| !kept.contains(member));
        evicted.map(|member| self.evict_all(member)).sum()
    }

    fn evict_all(&self, dataset: DatasetId) -> u64 {
        self.evict_while(|index| {
            let n = index.datasets.number(dataset);
            (index.datasets.bytes(dataset) > 0).then_some((n, false))
        })
    }

    /// Sets the shares of all datasets, in footprints, and returns how many chunks that evicted.
    ///
    /// Evicts random chunks of each pool that is over its allowance, of the members that are over their
    /// shares. Only `Policy::Fletch` has shares.
    pub fn set_shares(&self, shares: &[(DatasetId, u64)]) -> u64 {
        self.set_pooled_shares(shares, &Pools::default())
    }

    /// As [`DiskEngine::set_shares`], and says which datasets share chunks.
    pub fn set_pooled_shares(&self, shares: &[(DatasetId, u64)], pools: &Pools) -> u64 {
        if self.config.policy != Policy::Fletch {
            return 0;
        }
        self.write_index().datasets.set_shares(shares, pools);
        let capacity = self.capacity();
        let over = self.read_index().datasets.pools_over(capacity);
        let shrink =
            |n: u32| self.evict_while(|index| Some((index.datasets.over_in_pool(n, 0, capacity)?.0, true)));
        let evicted = over.into_iter().map(shrink).sum();
        self.sync_catalogue();
        evicted
    }

    /// Evicts random chunks of the dataset that `victim` names until it names none, and returns how many.
    ///
    /// `victim` also says whether the plain readers of a sweep may keep what the sweep gives up.
    fn evict_while(&self, victim: impl Fn(&mut Index) -> Option<(u32, bool)>) -> u64 {
        let mut chunks = 0;
        loop {
            let mut index = self.write_index();
            let evicted = self.evict_each(BATCH, |_| {
                let (n, may_keep) = victim(&mut index)?;
                index.evict_random(n, self.random(), may_keep)
            });
            drop(index);
            chunks += evicted.chunks;
            if evicted.is_last {
                return chunks;
            }
        }
    }

    /// Carries out evictions until there is none left to do, at most `steps`, and counts them. `evict` is
    /// called with the footprints that were evicted before.
    fn evict_each(&self, steps: usize, mut evict: impl FnMut(u64) -> Option<Freed>) -> Evicted {
        let mut evicted = Evicted { chunks: 0, bytes: 0, is_last: false };
        for _ in 0..steps {
            match evict(evicted.bytes) {
                Some(Freed::Bytes(size)) => {
                    evicted.chunks += 1;
                    evicted.bytes += size;
                }
                Some(Freed::HandedOver) => {}
                None => {
                    evicted.is_last = true;
                    break;
                }
            }
        }
        self.count_evicted(evicted.chunks, evicted.bytes);
        evicted
    }

    /// Makes room in the pool of a dataset for `need` bytes that the dataset may use: members that are over
    /// their shares give chunks up, at most `BATCH` for one newcomer. Later newcomers go on.
    pub(super) fn make_room_in_pool(&self, index: &mut Index, n: u32, need: u64, capacity: u64) {
        self.evict_each(BATCH, |_| {
            let (victim, _) = index.datasets.over_in_pool(n, need, capacity)?;
            index.evict_random(victim, self.random(), true)
        });
    }

    /// Evicts records of about `bytes` for a newcomer, as the policy says, and returns their footprints.
    ///
    /// Returns 0 when the policy has no victim.
    pub(super) fn evict_for_newcomer(&self, bytes: u64) -> u64 {
        match self.config.policy {
            Policy::Pin => 0,
            Policy::Lru => self.evict_lru(bytes),
            Policy::Fletch => self.evict_over_allowance(bytes),
        }
    }

    fn evict_lru(&self, bytes: u64) -> u64 {
        let mut index = self.write_index();
        let evict = |freed| if freed < bytes { index.evict_least_recent().map(Freed::Bytes) } else { None };
        self.evict_each(usize::MAX, evict).bytes
    }

    fn evict_over_allowance(&self, bytes: u64) -> u64 {
        let capacity = self.capacity();
        let Some((n, over)) = self.read_index().datasets.furthest_over(capacity) else {
            return 0;
        };
        let evict = |freed| {
            let pick = self.random();
            if freed < bytes.min(over) { self.write_index().evict_random(n, pick, true) } else { None }
        };
        self.evict_each(usize::MAX, evict).bytes
    }

    /// Evicts all records of a random sealed slab without pins, and returns how many.
    ///
    /// `None` when there is no such slab, or pins were faster each time.
    /// Whole slabs hold a mixture of what arrived together. Evicting one is cheap and surely frees its file.
    pub(super) fn evict_random_slab(&self) -> Option<u64> {
        for _ in 0..CHOICES_MAX {
            let n = self.choose_random_slab()?;
            if let Some(evicted) = self.evict_slab(n) {
                return Some(evicted);
            }
        }
        None
    }

    /// Chooses a random sealed slab without pins. Readers go on meanwhile.
    fn choose_random_slab(&self) -> Option<u32> {
        let pick = self.random();
        let index = self.read_index();
        let all: Vec<u32> = index.slabs().map(|(n, _)| n).filter(|&n| index.is_evictable_slab(n)).collect();
        all.get(usize::try_from(pick.checked_rem(all.len() as u64)?).ok()?).copied()
    }

    /// Evicts all records of a slab, and returns how many.
    ///
    /// `None` if the slab was pinned or removed since it was chosen.
    fn evict_slab(&self, n: u32) -> Option<u64> {
        let mut index = self.write_index();
        if !index.is_evictable_slab(n) {
            return None;
        }
        let live: Vec<u32> = index
            .slab(n)
            .map_or(Vec::new(), |s| s.records.iter().copied().filter(|&r| r != NO_RECORD).collect());
        let freed: Vec<u64> = live.iter().map(|&r| index.remove_record(r)).collect();
        drop(index);
        self.count_evicted(freed.len() as u64, freed.iter().sum());
        Some(freed.len() as u64)
    }

    fn count_evicted(&self, chunks: u64, bytes: u64) {
        add(&self.counters.evicted, chunks);
        add(&self.counters.evicted_bytes, bytes);
    }

    /// Pins chunks against eviction, each until an `unpin` of its own, and returns how many are present.
    pub fn pin(&self, keys: &[StoreKey]) -> usize {
        let mut index = self.write_index();
        keys.iter().filter(|k| index.pin(k)).count()
    }

    /// Takes one pin off each chunk.
    pub fn unpin(&self, keys: &[StoreKey]) {
        let mut index = self.write_index();
        keys.iter().for_each(|k| index.unpin(k));
    }
}

impl Index {
    /// Whether all records of the slab may leave at once.
    fn is_evictable_slab(&self, n: u32) -> bool {
        self.slab(n).is_some_and(|m| m.state == SlabState::Sealed) && !self.slab_has_pins(n)
    }

    /// Evicts the least recently used record that is not pinned, and returns its footprint.
    fn evict_least_recent(&mut self) -> Option<u64> {
        let lru = self.lru()?;
        let mut r = lru.oldest()?;
        while self.is_record_pinned(r) {
            r = lru.newer(r)?;
        }
        Some(self.remove_record(r))
    }

    /// Evicts the record of dataset `n` that the random number `pick` points at, a spare record if there is
    /// any.
    ///
    /// If `may_keep`, the plain readers of a sweep keep the record if their share has room for it. Passes
    /// over pinned records; `None` when all are pinned.
    fn evict_random(&mut self, n: u32, pick: u64, may_keep: bool) -> Option<Freed> {
        let list = self.datasets.records(n);
        let start = pick.checked_rem(list.len() as u64)? as usize;
        let free = |&&r: &&u32| !self.is_record_pinned(r);
        let spare = self.datasets.spares(n, list[start]).find(free);
        let r = *spare.or_else(|| list[start..].iter().chain(&list[..start]).find(free))?;
        Some(if may_keep && self.hand_over(r) {
            Freed::HandedOver
        } else {
            Freed::Bytes(self.remove_record(r))
        })
    }
}

/// What some evictions freed.
struct Evicted {
    chunks: u64,
    bytes: u64,
    /// Whether no eviction was left to do.
    is_last: bool,
}

/// What became of a victim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Freed {
    /// It was evicted, and had this footprint.
    Bytes(u64),
    /// The plain readers of its sweep keep it.
    HandedOver,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::DiskConfig;
    use fletch_core::{Domain, Verified};
    use std::time::SystemTime;

    #[test]
    fn a_pin_that_is_taken_after_a_slab_was_chosen_protects_the_slab() {
        let dir = tempfile::tempdir().expect("tempdir");
        let config = DiskConfig {
            dir: dir.path().to_owned(),
            size_max: 64 << 20,
            free_floor: 0,
            slab_bytes: Some(1 << 20),
            policy: Policy::Fletch,
            seed: 3,
            files_max: 8,
            mount_memory: None,
        };
        let (tier, _) = DiskEngine::open(config, SystemTime::now()).expect("opens");
        let domain = Domain::default_domain();
        let keys: Vec<StoreKey> = (0..60u8)
            .map(|n| {
                let chunk = Verified::of(vec![n; 100_000].into());
                let key = StoreKey { domain: domain.clone(), hash: chunk.hash() };
                tier.put(&key, DatasetId(1), &chunk).expect("kept");
                key
            })
            .collect();
        let chosen = tier.choose_random_slab().expect("sealed slabs");
        let pinned: Vec<StoreKey> = {
            let index = tier.read_index();
            keys.iter().filter(|k| index.find(k).is_some_and(|at| at.slab == chosen)).cloned().collect()
        };
        assert!(pinned.len() > 1, "a slab of several records");
        assert_eq!(tier.pin(&pinned[..1]), 1);
        assert_eq!(tier.evict_slab(chosen), None, "it was pinned meanwhile");
        assert!(pinned.iter().all(|k| tier.contains(k)), "nothing of it left");
        tier.unpin(&pinned[..1]);
        assert_eq!(tier.evict_slab(chosen), Some(pinned.len() as u64));
        assert!(!pinned.iter().any(|k| tier.contains(k)));
        assert_eq!(tier.pin(&keys), keys.len() - pinned.len());
        while tier.evict_random_slab().is_some_and(|evicted| evicted > 0) {}
        assert_eq!(tier.stats().chunks, (keys.len() - pinned.len()) as u64, "every other slab has pins");
    }
}
