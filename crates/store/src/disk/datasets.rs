//! The datasets of the index: the records and bytes that each one has, and its share. Pure, no IO.
//!
//! A share is the part of the tier, in footprints, that a dataset may use. A dataset without a share may use
//! the space that the other datasets leave. `eviction` decides which dataset gives space up.
//!
//! The plain readers of a dataset and the sweeps over it read the same chunks, so their records are in one
//! *pool*. Each record is charged to one member of its pool, and counts once. A record that is charged to a
//! sweep, and that the plain readers use too, counts as used by them (`shared`), so that it is theirs again
//! when the sweep gives it up. It occupies no room of their share meanwhile. That room holds *spare* records:
//! the plain readers keep them, but do not claim them, and the pool evicts them first.
//!
//! Invariants:
//! 1. the bytes of a pool are the sum of the bytes of its members;
//! 2. a plain dataset's `shared` is the sum of the footprints of the records that sweeps share with it, and
//!    its `spare` that of its spare records;
//! 3. members may use more than their shares only while all of the pool has room. A pool without room evicts
//!    records of the member that is furthest over its share, its spare records first. So plain readers within
//!    their share lose nothing that they claim.

#[cfg(test)]
use super::layout::footprint;
use super::{policy::Pools, stats::DatasetUsage};
use crate::dataset_id::DatasetId;
use std::collections::{BTreeSet, HashMap, HashSet};

/// One dataset of the index.
#[derive(Debug, Default)]
pub(crate) struct Dataset {
    pub id: u64,
    /// The plain dataset of its pool: itself, unless it is a sweep.
    pub pool: u64,
    /// Record numbers, in no order.
    pub records: Vec<u32>,
    /// Footprints of `records`, and of the records that are being written.
    pub bytes: u64,
    /// Footprints of the sweeps' records that this plain dataset uses too.
    pub shared: u64,
    /// Footprints of `spares`.
    pub spare: u64,
    /// Its records that it does not claim.
    pub spares: BTreeSet<u32>,
    pub share: Option<u64>,
    used: bool,
}

impl Dataset {
    /// Returns the footprints that it claims: its records but the spare ones, and what sweeps share with it.
    fn in_use(&self) -> u64 {
        self.bytes.saturating_sub(self.spare).saturating_add(self.shared)
    }

    /// Returns the bytes by which its records would exceed its share with `more` bytes.
    fn excess(&self, more: u64) -> u64 {
        self.bytes.saturating_add(more).saturating_sub(self.share.unwrap_or(0))
    }
}

/// The datasets that share chunks: a plain dataset and the sweeps over it.
#[derive(Debug, Default, Clone, Copy)]
struct PoolUse {
    /// Footprints of all records of the pool, records that are being written included.
    bytes: u64,
    /// The sum of its members' shares, if any has one.
    share: Option<u64>,
    /// Whether a member with records has no share.
    has_unshared: bool,
    /// Whether all chunks of the pool fit into its share.
    is_whole: bool,
}

/// All datasets that have records or a share, by a small number of their own.
#[derive(Debug, Default)]
pub(crate) struct DatasetTable {
    datasets: Vec<Dataset>,
    numbers: HashMap<u64, u32>,
    /// The plain dataset of each sweep.
    plain_of: HashMap<u64, u64>,
    /// By plain dataset.
    pools: HashMap<u64, PoolUse>,
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
        let pool = self.plain_of.get(&id.0).copied().unwrap_or(id.0);
        self.datasets[n] = Dataset { id: id.0, pool, used: true, ..Dataset::default() };
        self.numbers.insert(id.0, n as u32);
        self.pools.entry(pool).or_default().has_unshared = true;
        n as u32
    }

    fn by_id(&self, id: DatasetId) -> Option<&Dataset> {
        self.numbers.get(&id.0).map(|&n| &self.datasets[n as usize])
    }

    pub fn id(&self, n: u32) -> DatasetId {
        DatasetId(self.datasets[n as usize].id)
    }

    /// Returns the number of the plain dataset with which the sweep `n` shares chunks. `None` for a plain
    /// dataset, and while the plain dataset has neither records nor a share.
    pub fn plain_of(&self, n: u32) -> Option<u32> {
        let dataset = &self.datasets[n as usize];
        let plain = self.numbers.get(&dataset.pool).copied();
        plain.filter(|_| dataset.pool != dataset.id)
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
        self.discharge(n, footprint);
        let r = self.datasets[n as usize].records.swap_remove(pos as usize);
        self.set_spare(n, r, footprint, false);
        self.datasets[n as usize].records.get(pos as usize).copied()
    }

    /// Notes whether dataset `n` keeps its record `r` without a claim to it.
    pub fn set_spare(&mut self, n: u32, r: u32, footprint: u64, spare: bool) {
        let dataset = &mut self.datasets[n as usize];
        if spare && dataset.spares.insert(r) {
            dataset.spare += footprint;
        } else if !spare && dataset.spares.remove(&r) {
            dataset.spare -= footprint;
        }
    }

    /// Whether the record `r` of dataset `n` is spare.
    pub fn is_spare(&self, n: u32, r: u32) -> bool {
        self.datasets[n as usize].spares.contains(&r)
    }

    /// Returns the spare records of dataset `n`, from `start` on and then those below it.
    pub fn spares(&self, n: u32, start: u32) -> impl Iterator<Item = &u32> + '_ {
        let spares = &self.datasets[n as usize].spares;
        spares.range(start..).chain(spares.range(..start))
    }

    /// Charges dataset `n` for a record that is being written.
    pub fn charge(&mut self, n: u32, bytes: u64) {
        let dataset = &mut self.datasets[n as usize];
        dataset.bytes += bytes;
        self.pools.entry(dataset.pool).or_default().bytes += bytes;
    }

    /// Takes a charge back: the record was not written, or was removed.
    pub fn discharge(&mut self, n: u32, bytes: u64) {
        let dataset = &mut self.datasets[n as usize];
        dataset.bytes = dataset.bytes.saturating_sub(bytes);
        if let Some(pool) = self.pools.get_mut(&dataset.pool) {
            pool.bytes = pool.bytes.saturating_sub(bytes);
        }
    }

    /// Notes that the plain readers of sweep `n` use a record of the sweep, too.
    pub fn share_record(&mut self, n: u32, bytes: u64) {
        if let Some(plain) = self.plain_of(n) {
            self.datasets[plain as usize].shared += bytes;
        }
    }

    /// Notes that the plain readers of sweep `n` use a record of the sweep no longer.
    pub fn unshare_record(&mut self, n: u32, bytes: u64) {
        if let Some(plain) = self.plain_of(n) {
            let shared = &mut self.datasets[plain as usize].shared;
            *shared = shared.saturating_sub(bytes);
        }
    }

    /// Whether dataset `n` uses no more than its share.
    pub fn is_within_share(&self, n: u32) -> bool {
        self.has_share_for(n, 0)
    }

    /// Whether dataset `n` may claim `bytes` more.
    pub fn has_share_for(&self, n: u32, bytes: u64) -> bool {
        let dataset = &self.datasets[n as usize];
        dataset.share.is_some_and(|share| dataset.in_use().saturating_add(bytes) <= share)
    }

    /// Whether all chunks of the pool of dataset `n` fit into the pool's share.
    pub fn is_in_whole_pool(&self, n: u32) -> bool {
        self.pools.get(&self.datasets[n as usize].pool).is_some_and(|pool| pool.is_whole)
    }

    /// Whether a new record of dataset `n`, which was charged for it, is beyond what the dataset may claim.
    pub fn is_beyond_claim(&self, n: u32) -> bool {
        let dataset = &self.datasets[n as usize];
        let is_plain = dataset.pool == dataset.id && dataset.share.is_some();
        is_plain && !self.is_within_share(n) && !self.is_in_whole_pool(n)
    }

    /// Whether the share of dataset `n` has room for `bytes` more. Records that sweeps share with it take no
    /// room of its share.
    pub fn has_room_for(&self, n: u32, bytes: u64) -> bool {
        let dataset = &self.datasets[n as usize];
        dataset.share.is_some_and(|share| dataset.bytes.saturating_add(bytes) <= share)
    }

    /// Returns the footprints of a dataset, records that are being written included.
    pub fn bytes(&self, id: DatasetId) -> u64 {
        self.by_id(id).map_or(0, |d| d.bytes)
    }

    pub fn share(&self, id: DatasetId) -> Option<u64> {
        self.by_id(id).and_then(|d| d.share)
    }

    /// Returns the bytes that a dataset may use: its share, or that of its pool if all of it fits.
    pub fn usable(&self, id: DatasetId) -> Option<u64> {
        let dataset = self.by_id(id)?;
        let share = dataset.share?;
        let pool = self.pools.get(&dataset.pool)?;
        Some(if pool.is_whole { share.max(pool.share.unwrap_or(0)) } else { share })
    }

    /// Whether any dataset has a share.
    pub fn any_share(&self) -> bool {
        self.datasets.iter().any(|d| d.share.is_some())
    }

    /// Sets all shares. A dataset that `shares` does not name has no share, and is removed when it is empty.
    pub fn set_shares(&mut self, shares: &[(DatasetId, u64)], pools: &Pools) {
        for d in &mut self.datasets {
            d.share = None;
        }
        let sweeps: HashMap<u64, u64> =
            pools.sweeps.iter().filter(|(s, plain)| s != plain).map(|(s, plain)| (s.0, plain.0)).collect();
        let numbers = &self.numbers;
        self.plain_of.retain(|sweep, _| numbers.contains_key(sweep));
        self.plain_of.extend(sweeps);
        // A sweep that has a plain dataset keeps it: they may share records.
        for d in self.datasets.iter_mut().filter(|d| d.used && d.pool == d.id) {
            if let Some(&plain) = self.plain_of.get(&d.id) {
                d.pool = plain;
            }
        }
        for &(id, bytes) in shares {
            let n = self.number(id);
            self.datasets[n as usize].share = Some(bytes);
        }
        for d in self.datasets.iter_mut().filter(|d| d.used) {
            if d.share.is_none() && d.bytes == 0 && d.shared == 0 && d.records.is_empty() {
                d.used = false;
                self.numbers.remove(&d.id);
            }
        }
        self.sum_pools(&pools.most.iter().map(|(id, most)| (id.0, *most)).collect());
    }

    /// Sums the members of each pool. A pool that `most` does not name is not whole.
    fn sum_pools(&mut self, most: &HashMap<u64, u64>) {
        self.pools.clear();
        for d in self.datasets.iter().filter(|d| d.used) {
            let pool = self.pools.entry(d.pool).or_default();
            pool.bytes += d.bytes;
            pool.has_unshared |= d.share.is_none();
            if let Some(share) = d.share {
                pool.share = Some(pool.share.unwrap_or(0).saturating_add(share));
            }
        }
        for (plain, pool) in &mut self.pools {
            pool.is_whole = most.get(plain).is_some_and(|most| pool.share.is_some_and(|s| s >= *most));
        }
    }

    /// Returns the bytes that pool `plain` may occupy: its share, and if a member has no share, what the
    /// other pools leave of `capacity`. Without any share every dataset may occupy everything.
    fn pool_allowance(&self, pool: &PoolUse, claimed: u64, capacity: u64) -> u64 {
        let own = pool.share.unwrap_or(0).max(pool.bytes);
        let left = capacity.saturating_sub(claimed.saturating_sub(own));
        match pool.share {
            Some(share) if pool.has_unshared => share.max(left),
            Some(share) => share,
            None if self.any_share() => left,
            None => u64::MAX,
        }
    }

    /// Whether a dataset may use `need` more bytes.
    pub fn has_space(&self, id: DatasetId, need: u64, capacity: u64) -> bool {
        let dataset = self.by_id(id);
        let plain = self.plain_of.get(&id.0).copied().unwrap_or(id.0);
        let pool = self.pools.get(&plain).copied().unwrap_or_default();
        let fits_pool =
            pool.is_whole && pool.share.is_some_and(|share| pool.bytes.saturating_add(need) <= share);
        if let Some((dataset, share)) = dataset.and_then(|d| Some((d, d.share?))) {
            // Spare records leave for those that it claims, and take the room of those that it shares.
            let least = dataset.in_use().min(dataset.bytes);
            return fits_pool || least.saturating_add(need) <= share;
        }
        if !self.any_share() || fits_pool {
            return true;
        }
        let members: u64 = self
            .datasets
            .iter()
            .filter(|d| d.used && d.pool == plain && d.id != id.0)
            .map(|d| d.share.unwrap_or(0).max(d.bytes))
            .sum();
        let others = self.claimed().saturating_sub(pool.share.unwrap_or(0).max(pool.bytes));
        let own = dataset.map_or(0, |d| d.bytes);
        let claimed = others.saturating_add(members).saturating_add(own);
        claimed.saturating_add(need) <= capacity
    }

    /// Returns the member of the pool of dataset `n` that is furthest over its share, if the pool would be
    /// over its allowance with `need` more bytes; and by how many bytes the pool would be.
    pub fn over_in_pool(&self, n: u32, need: u64, capacity: u64) -> Option<(u32, u64)> {
        let plain = self.datasets[n as usize].pool;
        let pool = self.pools.get(&plain)?;
        let with = pool.bytes.saturating_add(need);
        // Most of the time: no other pool matters.
        if pool.share.is_some_and(|share| with <= share) || !self.any_share() {
            return None;
        }
        let over = with.saturating_sub(self.pool_allowance(pool, self.claimed(), capacity));
        let excess = |number: u32, d: &Dataset| d.excess(if number == n { need } else { 0 });
        let members = self.iter().filter(|(_, d)| d.pool == plain && !d.records.is_empty());
        let furthest = members.map(|(number, d)| (excess(number, d), number)).max()?;
        (over > 0 && furthest.0 > 0).then_some((furthest.1, over))
    }

    /// Returns the dataset that is furthest over its share, of the pool that is furthest over its allowance,
    /// and by how many bytes that pool is.
    pub fn furthest_over(&self, capacity: u64) -> Option<(u32, u64)> {
        if !self.any_share() {
            return None;
        }
        let claimed = self.claimed();
        let over = |pool: &PoolUse| pool.bytes.saturating_sub(self.pool_allowance(pool, claimed, capacity));
        let (plain, over) =
            self.pools.iter().map(|(id, p)| (*id, over(p))).max_by_key(|&(id, over)| (over, id))?;
        let members = self.iter().filter(|(_, d)| d.pool == plain && !d.records.is_empty());
        let (n, _) = members.max_by_key(|(_, d)| d.excess(0))?;
        (over > 0).then_some((n, over))
    }

    /// Returns a member of each pool that is over its allowance.
    pub fn pools_over(&self, capacity: u64) -> Vec<u32> {
        let mut seen = HashSet::new();
        let first = self.iter().filter(|(_, d)| seen.insert(d.pool)).map(|(n, _)| n);
        first
            .collect::<Vec<_>>()
            .into_iter()
            .filter(|&n| self.over_in_pool(n, 0, capacity).is_some())
            .collect()
    }

    /// Returns the bytes that all pools claim: for each the larger of its share and its footprints.
    pub fn claimed(&self) -> u64 {
        let each = self.pools.values().map(|pool| pool.share.unwrap_or(0).max(pool.bytes));
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
            plain: DatasetId(d.pool),
            bytes: d.bytes,
            shared_bytes: d.shared,
            spare_bytes: d.spare,
            chunks: d.records.len() as u64,
            share: d.share,
        };
        self.iter().map(|(_, d)| one(d)).collect()
    }

    /// Returns about how many bytes the lists of records occupy in memory.
    pub fn memory(&self) -> usize {
        self.datasets.iter().map(|d| d.records.capacity() * 4 + d.spares.len() * 8).sum()
    }

    /// Panics where an invariant is broken. `len` is a record's length, `shared` says whether the record is
    /// shared.
    #[cfg(test)]
    pub fn check(&self, len: impl Fn(u32) -> u32, shared: impl Fn(u32) -> bool) {
        let mut pools: HashMap<u64, u64> = HashMap::new();
        let mut by_plain: HashMap<u64, u64> = HashMap::new();
        for (_, d) in self.iter() {
            assert!(d.bytes >= d.records.iter().map(|&r| footprint(len(r))).sum());
            let own: HashSet<u32> = d.records.iter().copied().collect();
            assert!(d.spares.iter().all(|r| own.contains(r)), "a spare record is one of its dataset");
            assert_eq!(d.spare, d.spares.iter().map(|&r| footprint(len(r))).sum::<u64>(), "invariant 2");
            *pools.entry(d.pool).or_default() += d.bytes;
            *by_plain.entry(d.pool).or_default() +=
                d.records.iter().filter(|&&r| shared(r)).map(|&r| footprint(len(r))).sum::<u64>();
        }
        for (plain, bytes) in pools {
            assert_eq!(self.pools.get(&plain).map(|p| p.bytes), Some(bytes), "invariant 1");
            let shared = self.by_id(DatasetId(plain)).map_or(0, |d| d.shared);
            assert_eq!(by_plain.get(&plain).copied().unwrap_or(0), shared, "invariant 2");
        }
    }
}
