//! Datasets of the index: what they hold, what they may hold, and who of them gives way. Pure.

use super::{DatasetId, index::Index};
use fletch_core::{DatasetName, Domain, LayoutId, Root, StoreKey};

/// Keys the hash that a dataset's number is taken from.
const DATASET_CONTEXT: &str = "fletch 2026 dataset number 1";
/// Keys the hash that a sweep's number is taken from.
const SWEEP_CONTEXT: &str = "fletch 2026 sweep number 1";

impl DatasetId {
    /// Of reads that pass: nothing is kept on disk for them.
    pub const PASSING: DatasetId = DatasetId(0);

    /// The number under which a sweep over a dataset's version in one layout keeps its chunks: it has
    /// a share of its own beside that of the dataset's plain readers.
    #[must_use]
    pub fn sweep_of(domain: &Domain, dataset: &DatasetName, root: Root, layout: LayoutId) -> Self {
        let mut h = blake3::Hasher::new_derive_key(SWEEP_CONTEXT);
        h.update(domain.as_str().as_bytes()).update(&[0]).update(dataset.as_str().as_bytes()).update(&[0]);
        h.update(root.0.as_bytes()).update(layout.0.as_bytes());
        let mut first = [0; 8];
        h.finalize_xof().fill(&mut first);
        DatasetId(u64::from_le_bytes(first))
    }

    /// The number of a domain's dataset: the first eight bytes of a hash of both names, so that
    /// it is the same after every restart (FORMATS-slab).
    #[must_use]
    pub fn of(domain: &Domain, dataset: &DatasetName) -> Self {
        let mut h = blake3::Hasher::new_derive_key(DATASET_CONTEXT);
        // No name has a zero byte.
        h.update(domain.as_str().as_bytes()).update(&[0]).update(dataset.as_str().as_bytes());
        let mut first = [0; 8];
        h.finalize_xof().fill(&mut first);
        DatasetId(u64::from_le_bytes(first))
    }
}

/// A dataset's part of the index.
#[derive(Debug, Default)]
pub(crate) struct Dataset {
    pub id: u64,
    /// Record numbers, in no order.
    pub records: Vec<u32>,
    /// Footprints of those, and of records on their way.
    pub bytes: u64,
    pub share: Option<u64>,
    used: bool,
}

impl Index {
    /// The number of a dataset, given anew if need be.
    pub fn dataset(&mut self, id: DatasetId) -> u32 {
        if let Some(&n) = self.dataset_slots.get(&id.0) {
            return n;
        }
        let unused = self.datasets.iter().position(|d| !d.used);
        let n = unused.unwrap_or_else(|| {
            self.datasets.push(Dataset::default());
            self.datasets.len() - 1
        });
        self.datasets[n] = Dataset { id: id.0, used: true, ..Dataset::default() };
        self.dataset_slots.insert(id.0, n as u32);
        n as u32
    }

    /// For which dataset a chunk was brought.
    pub fn dataset_of(&self, key: &StoreKey) -> Option<DatasetId> {
        let r = self.lookup(key)?;
        Some(self.key_of(r).1)
    }

    /// What a dataset was given.
    pub fn share_of(&self, id: DatasetId) -> Option<u64> {
        self.dataset_slots.get(&id.0).and_then(|&n| self.datasets[n as usize].share)
    }

    pub fn dataset_bytes(&self, id: DatasetId) -> u64 {
        self.dataset_slots.get(&id.0).map_or(0, |&n| self.datasets[n as usize].bytes)
    }

    /// (dataset, its bytes, its chunks, its share).
    pub fn datasets(&self) -> impl Iterator<Item = (DatasetId, u64, u64, Option<u64>)> + '_ {
        let used = self.datasets.iter().filter(|d| d.used);
        used.map(|d| (DatasetId(d.id), d.bytes, d.records.len() as u64, d.share))
    }

    /// Sets all shares; datasets that are not named have none, and are forgotten when empty.
    pub fn set_shares(&mut self, shares: &[(DatasetId, u64)]) {
        for d in &mut self.datasets {
            d.share = None;
        }
        for &(id, bytes) in shares {
            let n = self.dataset(id);
            self.datasets[n as usize].share = Some(bytes);
        }
        for d in self.datasets.iter_mut().filter(|d| d.used) {
            if d.share.is_none() && d.bytes == 0 && d.records.is_empty() {
                d.used = false;
                self.dataset_slots.remove(&d.id);
            }
        }
    }

    /// Whether shares were ever given.
    pub fn shared(&self) -> bool {
        self.datasets.iter().any(|d| d.share.is_some())
    }

    /// What a dataset may hold: its share; without one, what others leave of `capacity`
    /// (all of it while nobody has a share).
    pub fn allowance(&self, id: DatasetId, capacity: u64) -> u64 {
        let own = self.dataset_slots.get(&id.0).map(|&n| &self.datasets[n as usize]);
        if let Some(share) = own.and_then(|d| d.share) {
            return share;
        }
        if !self.shared() {
            return u64::MAX;
        }
        let own = own.map_or(0, |d| d.bytes);
        capacity.saturating_sub(self.taken().saturating_sub(own))
    }

    /// What datasets may hold or do hold, together.
    fn taken(&self) -> u64 {
        let each = self.datasets.iter().filter(|d| d.used).map(|d| d.share.unwrap_or(0).max(d.bytes));
        each.fold(0, u64::saturating_add)
    }

    /// Counts a record on its way into the dataset's bytes.
    pub fn charge(&mut self, dataset: u32, bytes: u64) {
        self.datasets[dataset as usize].bytes += bytes;
    }

    /// Takes a charge back.
    pub fn discharge(&mut self, dataset: u32, bytes: u64) {
        let d = &mut self.datasets[dataset as usize];
        d.bytes = d.bytes.saturating_sub(bytes);
    }

    /// The dataset that is furthest over its allowance, and by how much.
    pub fn most_over(&self, capacity: u64) -> Option<(u32, u64)> {
        if !self.shared() {
            return None;
        }
        let taken = self.taken();
        let allowed = |d: &Dataset| d.share.unwrap_or(capacity.saturating_sub(taken.saturating_sub(d.bytes)));
        let over = |d: &Dataset| d.bytes.saturating_sub(allowed(d));
        let all = self.datasets.iter().enumerate().filter(|(_, d)| d.used && !d.records.is_empty());
        all.map(|(n, d)| (n as u32, over(d))).filter(|&(_, o)| o > 0).max_by_key(|&(_, o)| o)
    }

    /// Evicts a random record of dataset `n`; `pick` is a random number. `None` when all are leased.
    pub fn evict_random(&mut self, n: u32, pick: u64) -> Option<u64> {
        let list = &self.datasets.get(n as usize)?.records;
        if list.is_empty() {
            return None;
        }
        let start = (pick % list.len() as u64) as usize;
        let free = |&&r: &&u32| !self.is_leased(r);
        let r = *list[start..].iter().chain(&list[..start]).find(free)?;
        Some(self.kill(r))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_datasets_number_never_changes() {
        let of = |d: &str, n: &str| {
            DatasetId::of(&Domain::new(d).expect("name"), &DatasetName::new(n).expect("name"))
        };
        assert_eq!(of("default", "images").0, 283_200_182_055_979_889);
        assert_ne!(of("ab", "c"), of("a", "bc"));
        assert_ne!(of("default", "images"), of("other", "images"), "I7");
    }
}
