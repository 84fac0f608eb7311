//! The datasets of the index: the records and bytes that each one has, and its share. Pure, no IO.
//!
//! A share is the part of the tier, in footprints, that a dataset may occupy. A dataset without a share may
//! occupy the space that the other datasets leave. `eviction` decides which dataset gives space up.

#[cfg(test)]
use super::layout::footprint;
use super::stats::DatasetUsage;
use crate::dataset_id::DatasetId;
use std::collections::HashMap;

/// One dataset of the index.
#[derive(Debug, Default)]
pub(crate) struct Dataset {
    pub id: u64,
    /// Record numbers, in no order.
    pub records: Vec<u32>,
    /// Footprints of `records`, and of the records that are being written.
    pub bytes: u64,
    pub share: Option<u64>,
    used: bool,
}

/// All datasets that have records or a share, by a small number of their own.
#[derive(Debug, Default)]
pub(crate) struct DatasetTable {
    datasets: Vec<Dataset>,
    numbers: HashMap<u64, u32>,
}

impl DatasetTable {
    /// Returns the number of a dataset, and assigns one if the dataset is new.
    pub fn number(&mut self, id: DatasetId) -> u32 {
        if let Some(&n) = self.numbers.get(&id.0) {
            return n;
        }
        let unused = self.datasets.iter().position(|d| !d.used);
        let n = unused.unwrap_or_else(|| {
            self.datasets.push(Dataset::default());
            self.datasets.len() - 1
        });
        self.datasets[n] = Dataset { id: id.0, used: true, ..Dataset::default() };
        self.numbers.insert(id.0, n as u32);
        n as u32
    }

    fn by_id(&self, id: DatasetId) -> Option<&Dataset> {
        self.numbers.get(&id.0).map(|&n| &self.datasets[n as usize])
    }

    pub fn id(&self, n: u32) -> DatasetId {
        DatasetId(self.datasets[n as usize].id)
    }

    /// Returns the records of dataset `n`, in no order.
    pub fn records(&self, n: u32) -> &[u32] {
        self.datasets.get(n as usize).map_or(&[], |d| &d.records)
    }

    /// Adds record `r` to dataset `n`, which was charged for it, and returns its position.
    pub fn add_record(&mut self, n: u32, r: u32) -> u32 {
        let records = &mut self.datasets[n as usize].records;
        records.push(r);
        records.len() as u32 - 1
    }

    /// Removes the record at `pos` of dataset `n`, and returns the record that took its position.
    pub fn remove_record(&mut self, n: u32, pos: u32, footprint: u64) -> Option<u32> {
        let dataset = &mut self.datasets[n as usize];
        dataset.records.swap_remove(pos as usize);
        dataset.bytes -= footprint;
        dataset.records.get(pos as usize).copied()
    }

    /// Charges dataset `n` for a record that is being written.
    pub fn charge(&mut self, n: u32, bytes: u64) {
        self.datasets[n as usize].bytes += bytes;
    }

    /// Takes a charge back: the record was not written.
    pub fn discharge(&mut self, n: u32, bytes: u64) {
        let d = &mut self.datasets[n as usize];
        d.bytes = d.bytes.saturating_sub(bytes);
    }

    /// Returns the footprints of a dataset, records that are being written included.
    pub fn bytes(&self, id: DatasetId) -> u64 {
        self.by_id(id).map_or(0, |d| d.bytes)
    }

    pub fn share(&self, id: DatasetId) -> Option<u64> {
        self.by_id(id).and_then(|d| d.share)
    }

    /// Whether any dataset has a share.
    pub fn any_share(&self) -> bool {
        self.datasets.iter().any(|d| d.share.is_some())
    }

    /// Sets all shares. A dataset that `shares` does not name has no share, and is removed when it is empty.
    pub fn set_shares(&mut self, shares: &[(DatasetId, u64)]) {
        for d in &mut self.datasets {
            d.share = None;
        }
        for &(id, bytes) in shares {
            let n = self.number(id);
            self.datasets[n as usize].share = Some(bytes);
        }
        for d in self.datasets.iter_mut().filter(|d| d.used) {
            if d.share.is_none() && d.bytes == 0 && d.records.is_empty() {
                d.used = false;
                self.numbers.remove(&d.id);
            }
        }
    }

    /// Returns the bytes that a dataset may occupy: its share, or what the others leave of `capacity`.
    ///
    /// Without any share every dataset may occupy everything.
    pub fn allowance(&self, id: DatasetId, capacity: u64) -> u64 {
        let dataset = self.by_id(id);
        if let Some(share) = dataset.and_then(|d| d.share) {
            return share;
        }
        if !self.any_share() {
            return u64::MAX;
        }
        let own = dataset.map_or(0, |d| d.bytes);
        capacity.saturating_sub(self.claimed().saturating_sub(own))
    }

    /// Whether a dataset may occupy `need` more bytes.
    pub fn has_space(&self, id: DatasetId, need: u64, capacity: u64) -> bool {
        self.bytes(id).saturating_add(need) <= self.allowance(id, capacity)
    }

    /// Returns the bytes that all datasets claim: for each the larger of its share and its footprints.
    pub fn claimed(&self) -> u64 {
        let each = self.iter().map(|(_, d)| d.share.unwrap_or(0).max(d.bytes));
        each.fold(0, u64::saturating_add)
    }

    /// The datasets in use, with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Dataset)> + '_ {
        self.datasets.iter().enumerate().filter(|(_, d)| d.used).map(|(n, d)| (n as u32, d))
    }

    /// What every dataset uses, for reports.
    pub fn usage(&self) -> Vec<DatasetUsage> {
        let one = |d: &Dataset| DatasetUsage {
            dataset: DatasetId(d.id),
            bytes: d.bytes,
            chunks: d.records.len() as u64,
            share: d.share,
        };
        self.iter().map(|(_, d)| one(d)).collect()
    }

    /// Returns about how many bytes the lists of records occupy in memory.
    pub fn memory(&self) -> usize {
        self.datasets.iter().map(|d| d.records.capacity() * 4).sum()
    }

    /// Panics where a dataset has fewer bytes than the footprints of its records. `len` is a record's length.
    #[cfg(test)]
    pub fn check(&self, len: impl Fn(u32) -> u32) {
        for d in &self.datasets {
            assert!(d.bytes >= d.records.iter().map(|&r| footprint(len(r))).sum());
        }
    }
}
