//! Eviction: this file chooses every chunk that leaves the disk tier.
//!
//! | a chunk leaves because | the victim is |
//! |---|---|
//! | a newcomer needs space, policy `lru` | the least recently used record |
//! | a newcomer needs space, policy `fletch` | random records of the dataset furthest over its allowance |
//! | a newcomer needs space, policy `pin` | none: the newcomer is refused |
//! | the share of a dataset shrank | random records of that dataset |
//! | the caller names a chunk or a dataset | that chunk, or all chunks of that dataset |
//! | the file system is below its floor, or `size_max` was lowered | all records of a random sealed slab |
//!
//! Which unit of a sweep leaves is the decision of the sweep's policy; it names the chunks. Random victims
//! leave an unbiased sample of the dataset. Damaged records do not leave here: they are quarantined.
//!
//! Invariants:
//! 1. a pinned record is no victim, and neither is a slab that holds one when its records leave;
//! 2. a victim leaves the index only. The reaper gives its bytes back to the file system.

use super::{
    DiskEngine, Policy,
    datasets::{Dataset, DatasetTable},
    index::{Index, NO_RECORD, SlabState},
    stats::add,
};
use crate::dataset_id::DatasetId;
use fletch_core::StoreKey;

/// Victims that are chosen under one lock of the index, so that readers get their turn.
const BATCH: usize = 256;

/// How often a slab is chosen anew because it was pinned after it was chosen.
const CHOICES_MAX: usize = 8;

impl DiskEngine {
    /// Evicts a chunk; `false` when it is absent or pinned.
    pub fn evict(&self, key: &StoreKey) -> bool {
        self.evict_if(key, |_| true)
    }

    /// Evicts a chunk of `dataset`; `false` when it is absent, pinned, or was fetched for another dataset.
    pub fn evict_of(&self, key: &StoreKey, dataset: DatasetId) -> bool {
        self.evict_if(key, |index| index.dataset_of(key) == Some(dataset))
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
    pub fn evict_dataset(&self, dataset: DatasetId) -> u64 {
        self.shrink_dataset(dataset, 0)
    }

    /// Sets the shares of all datasets, in footprints, and returns how many chunks that evicted.
    ///
    /// Evicts random chunks of each dataset that is over its share, and of each dataset without a share that
    /// is over what the others leave. Only `Policy::Fletch` has shares.
    pub fn set_shares(&self, shares: &[(DatasetId, u64)]) -> u64 {
        if self.config.policy != Policy::Fletch {
            return 0;
        }
        self.write_index().datasets.set_shares(shares);
        let capacity = self.capacity();
        let over: Vec<_> = {
            let datasets = &self.read_index().datasets;
            let all = datasets.iter().map(|(_, d)| d).filter(|d| !d.records.is_empty());
            all.map(|d| (DatasetId(d.id), d.bytes, datasets.allowance(DatasetId(d.id), capacity)))
                .filter(|&(_, bytes, allowance)| bytes > allowance)
                .collect()
        };
        let evicted = over.into_iter().map(|(id, _, allowance)| self.shrink_dataset(id, allowance)).sum();
        self.sync_catalogue();
        evicted
    }

    /// Evicts random chunks of a dataset until it has at most `bytes`, and returns how many.
    fn shrink_dataset(&self, dataset: DatasetId, bytes: u64) -> u64 {
        let mut evicted = 0;
        loop {
            let picks: Vec<u64> = (0..BATCH).map(|_| self.random()).collect();
            let mut index = self.write_index();
            let (mut chunks, mut freed) = (0, 0);
            for pick in &picks {
                if index.datasets.bytes(dataset) <= bytes {
                    break;
                }
                let n = index.datasets.number(dataset);
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
        let (mut chunks, mut freed) = (0, 0);
        let mut index = self.write_index();
        while freed < bytes {
            let Some(size) = index.evict_least_recent() else { break };
            chunks += 1;
            freed += size;
        }
        drop(index);
        self.count_evicted(chunks, freed);
        freed
    }

    fn evict_over_allowance(&self, bytes: u64) -> u64 {
        let (mut chunks, mut freed) = (0, 0);
        let capacity = self.capacity();
        let Some((n, over)) = furthest_over_allowance(&self.read_index().datasets, capacity) else {
            return 0;
        };
        while freed < bytes.min(over) {
            let pick = self.random();
            let Some(size) = self.write_index().evict_random(n, pick) else { break };
            chunks += 1;
            freed += size;
        }
        self.count_evicted(chunks, freed);
        freed
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

    /// Evicts the record of dataset `n` that the random number `pick` points at, and returns its footprint.
    ///
    /// Passes over pinned records; `None` when all are pinned.
    fn evict_random(&mut self, n: u32, pick: u64) -> Option<u64> {
        let list = self.datasets.records(n);
        let start = pick.checked_rem(list.len() as u64)? as usize;
        let free = |&&r: &&u32| !self.is_record_pinned(r);
        let r = *list[start..].iter().chain(&list[..start]).find(free)?;
        Some(self.remove_record(r))
    }
}

/// Returns the dataset that is furthest over its allowance, and by how many bytes.
fn furthest_over_allowance(datasets: &DatasetTable, capacity: u64) -> Option<(u32, u64)> {
    if !datasets.any_share() {
        return None;
    }
    let claimed = datasets.claimed();
    let allowed = |d: &Dataset| d.share.unwrap_or(capacity.saturating_sub(claimed.saturating_sub(d.bytes)));
    let over = |d: &Dataset| d.bytes.saturating_sub(allowed(d));
    let all = datasets.iter().filter(|(_, d)| !d.records.is_empty());
    all.map(|(n, d)| (n, over(d))).filter(|&(_, o)| o > 0).max_by_key(|&(_, o)| o)
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
