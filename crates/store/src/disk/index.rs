//! The in-memory index: which record lies where, in which slab, and for which dataset. Pure, no IO.
//!
//! A chunk takes about 80 bytes, and 8 more under LRU: 60 for the record, 4 in its slab's list, 4 in its
//! dataset's list, the rest in the hash table of record numbers.
//!
//! Invariants (`check` states them, the tests call it):
//! 1. a live record is in the hash table, in its slab's list at `row`, in its dataset's list at `pos`, and,
//!    under LRU, in the LRU list once;
//! 2. a dead record is in none of them, and its row in its slab is `NO_RECORD`;
//! 3. the bytes of each slab, of each dataset and of the index are sums of footprints of live records. A
//!    dataset's bytes include the charges for records that are being written.

use super::{
    catalogue::DeadMarks,
    datasets::DatasetTable,
    layout::{LINE, Row, Table, footprint},
    lru::LruList,
    slab::Slab,
};
use crate::dataset_id::DatasetId;
use fletch_core::{Domain, Hash, StoreKey};
use hashbrown::HashTable;
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

/// Records from which their mean footprint is a guide to later records.
pub(super) const MEAN_FROM: u64 = 32;
/// Stands for no record, or no slab.
pub(crate) const NO_RECORD: u32 = u32::MAX;

#[derive(Debug, Clone)]
struct RecordEntry {
    hash: Hash,
    slab: u32,
    /// Where its header begins, in lines of 64 bytes.
    at: u32,
    len: u32,
    row: u32,
    dataset: u32,
    pos: u32,
    domain: u16,
    /// Whether the plain readers of the sweep to which it is charged use it, too.
    shared: bool,
}

/// Where a record lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlabLocation {
    pub slab: u32,
    /// Where its header begins, in bytes.
    pub at: u64,
    pub len: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlabState {
    /// The writer adds records to it.
    Open,
    /// It has a table and takes no more records.
    Sealed,
}

/// A slab in the index.
#[derive(Debug)]
pub(crate) struct SlabMeta {
    pub slab: Arc<Slab>,
    pub state: SlabState,
    /// Record numbers by row; `NO_RECORD` for a dead row.
    pub records: Vec<u32>,
    pub live: u32,
    pub live_bytes: u64,
    /// Most bytes that the file occupies.
    pub blocks: u64,
    /// Bytes of the file that are not records: header, table, footer.
    pub fixed: u64,
    /// Where the records of a sealed slab end; 0 for an open slab.
    pub end: u64,
    pub check: [u8; 8],
    /// Whether rows died since the last write to the catalogue.
    pub dirty: bool,
    /// Number of live records when the slab was last punched.
    pub punched_at: u32,
}

#[derive(Debug)]
pub(crate) struct Index {
    table: HashTable<u32>,
    recs: Vec<RecordEntry>,
    free: Vec<u32>,
    /// By a number that is not reused soon, so that no code mistakes one slab for another.
    slabs: BTreeMap<u32, SlabMeta>,
    next_slab: u32,
    pub datasets: DatasetTable,
    domains: Vec<Domain>,
    domain_slots: HashMap<Domain, u16>,
    lru: Option<LruList>,
    pins: HashMap<u32, u32>,
    key: u64,
    bytes: u64,
}

fn table_hash(key: u64, domain: u16, hash: &Hash) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&hash.0[..8]);
    // An attacker can choose chunks whose hashes begin alike. The key spreads them over the table.
    let x = (u64::from_le_bytes(first) ^ key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ (x >> 29)).wrapping_add(u64::from(domain).wrapping_mul(0xd6e8_feb8_6659_fd93))
}

impl Index {
    pub fn new(key: u64, lru: bool) -> Self {
        Index {
            table: HashTable::new(),
            recs: Vec::new(),
            free: Vec::new(),
            slabs: BTreeMap::new(),
            next_slab: 0,
            datasets: DatasetTable::default(),
            domains: Vec::new(),
            domain_slots: HashMap::new(),
            lru: lru.then(LruList::default),
            pins: HashMap::new(),
            key,
            bytes: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// The order of last use, under `Policy::Lru`.
    pub(super) fn lru(&self) -> Option<&LruList> {
        self.lru.as_ref()
    }

    /// Returns the mean footprint of a record; 0 while there are too few records to tell.
    pub fn mean_footprint(&self) -> u64 {
        let records = self.len() as u64;
        if records < MEAN_FROM { 0 } else { self.bytes / records }
    }

    /// Returns the dataset that a chunk was fetched for.
    pub fn dataset_of(&self, key: &StoreKey) -> Option<DatasetId> {
        let r = self.lookup(key)?;
        Some(self.datasets.id(self.recs[r as usize].dataset))
    }

    /// Returns the footprints of all live records.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns about how many bytes the index occupies in memory.
    pub fn memory(&self) -> usize {
        let lists: usize = self.slabs().map(|(_, s)| s.records.capacity() * 4).sum();
        self.table.allocation_size()
            + self.recs.capacity() * size_of::<RecordEntry>()
            + self.free.capacity() * 4
            + lists
            + self.datasets.memory()
            + self.lru.as_ref().map_or(0, LruList::memory)
    }

    /// Returns the number of a domain, and assigns one if it is new; `None` past 65,535 domains.
    pub fn domain(&mut self, domain: &Domain) -> Option<u16> {
        if let Some(&n) = self.domain_slots.get(domain) {
            return Some(n);
        }
        let n = u16::try_from(self.domains.len()).ok().filter(|&n| n < u16::MAX)?;
        self.domains.push(domain.clone());
        self.domain_slots.insert(domain.clone(), n);
        Some(n)
    }

    // Slabs.

    pub fn add_slab(&mut self, slab: Arc<Slab>, blocks: u64, state: SlabState) -> u32 {
        let meta = SlabMeta {
            slab,
            state,
            records: Vec::new(),
            live: 0,
            live_bytes: 0,
            blocks,
            fixed: 0,
            end: 0,
            check: [0; 8],
            dirty: false,
            punched_at: NO_RECORD,
        };
        while self.next_slab == NO_RECORD || self.slabs.contains_key(&self.next_slab) {
            self.next_slab = self.next_slab.wrapping_add(1);
        }
        let n = self.next_slab;
        self.slabs.insert(n, meta);
        self.next_slab = n.wrapping_add(1);
        n
    }

    pub fn slab(&self, n: u32) -> Option<&SlabMeta> {
        self.slabs.get(&n)
    }

    pub fn slab_mut(&mut self, n: u32) -> Option<&mut SlabMeta> {
        self.slabs.get_mut(&n)
    }

    pub fn slabs(&self) -> impl Iterator<Item = (u32, &SlabMeta)> + '_ {
        self.slabs.iter().map(|(n, s)| (*n, s))
    }

    /// Removes a slab and all its records.
    pub fn drop_slab(&mut self, n: u32) -> Option<SlabMeta> {
        let live: Vec<u32> = self.slab(n)?.records.iter().copied().filter(|&r| r != NO_RECORD).collect();
        for r in live {
            self.remove_record(r);
        }
        self.slabs.remove(&n)
    }

    /// Returns the table of a slab: its live records in order of their offset. Numbers their rows anew.
    pub fn table(&mut self, n: u32) -> Table {
        let mut live: Vec<u32> = self
            .slab(n)
            .map_or(Vec::new(), |s| s.records.iter().copied().filter(|&r| r != NO_RECORD).collect());
        live.sort_by_key(|&r| self.recs[r as usize].at);
        let mut table = Table::default();
        let mut local = HashMap::new();
        for (row, &r) in live.iter().enumerate() {
            let rec = &mut self.recs[r as usize];
            rec.row = row as u32;
            let domain = *local.entry(rec.domain).or_insert_with(|| {
                table.domains.push(self.domains[rec.domain as usize].clone());
                table.domains.len() as u16 - 1
            });
            table.rows.push(Row {
                hash: rec.hash,
                dataset: self.datasets.id(rec.dataset).0,
                at: u64::from(rec.at) * LINE,
                len: rec.len,
                domain,
            });
        }
        live.shrink_to_fit();
        if let Some(s) = self.slab_mut(n) {
            s.records = live;
        }
        table
    }

    /// Returns the dead rows of a sealed slab, for the catalogue.
    pub fn marks(&self, n: u32) -> Option<(u64, DeadMarks)> {
        let s = self.slab(n).filter(|s| s.state == SlabState::Sealed)?;
        let mut dead = Vec::new();
        for (row, _) in s.records.iter().enumerate().filter(|(_, r)| **r == NO_RECORD) {
            dead.resize((row / 8 + 1).max(dead.len()), 0);
            dead[row / 8] |= 1 << (row % 8);
        }
        Some((s.slab.id, DeadMarks { check: s.check, rows: s.records.len() as u32, dead }))
    }

    // Records.

    pub(super) fn lookup(&self, key: &StoreKey) -> Option<u32> {
        let &domain = self.domain_slots.get(&key.domain)?;
        let is = |&r: &u32| {
            let rec = &self.recs[r as usize];
            rec.hash == key.hash && rec.domain == domain
        };
        self.table.find(table_hash(self.key, domain, &key.hash), is).copied()
    }

    pub fn contains(&self, key: &StoreKey) -> bool {
        self.lookup(key).is_some()
    }

    pub fn find(&self, key: &StoreKey) -> Option<SlabLocation> {
        self.lookup(key).map(|r| self.location(r))
    }

    pub fn location(&self, r: u32) -> SlabLocation {
        let rec = &self.recs[r as usize];
        SlabLocation { slab: rec.slab, at: u64::from(rec.at) * LINE, len: rec.len }
    }

    pub fn key_of(&self, r: u32) -> (StoreKey, DatasetId) {
        let rec = &self.recs[r as usize];
        let key = StoreKey { domain: self.domains[rec.domain as usize].clone(), hash: rec.hash };
        (key, self.datasets.id(rec.dataset))
    }

    /// Adds a record that was written at `location`, and for which its dataset was charged.
    ///
    /// `false` when the index has the key already.
    pub fn insert(&mut self, domain: u16, hash: Hash, dataset: u32, location: SlabLocation) -> bool {
        let code = table_hash(self.key, domain, &hash);
        let same =
            |recs: &[RecordEntry], r: u32| recs[r as usize].hash == hash && recs[r as usize].domain == domain;
        if self.table.find(code, |&r| same(&self.recs, r)).is_some() {
            return false;
        }
        let Some(slab) = self.slabs.get_mut(&location.slab) else { return false };
        let rec = RecordEntry {
            hash,
            slab: location.slab,
            at: (location.at / LINE) as u32,
            len: location.len,
            row: slab.records.len() as u32,
            dataset,
            pos: 0,
            domain,
            shared: false,
        };
        let r = match self.free.pop() {
            Some(r) => {
                self.recs[r as usize] = rec;
                r
            }
            None => {
                self.recs.push(rec);
                self.recs.len() as u32 - 1
            }
        };
        slab.records.push(r);
        slab.live += 1;
        slab.live_bytes += footprint(location.len);
        self.recs[r as usize].pos = self.datasets.add_record(dataset, r);
        if self.datasets.is_beyond_claim(dataset) {
            self.datasets.set_spare(dataset, r, footprint(location.len), true);
        }
        self.bytes += footprint(location.len);
        let (recs, key) = (&self.recs, self.key);
        self.table.insert_unique(code, r, |&r| {
            let rec = &recs[r as usize];
            table_hash(key, rec.domain, &rec.hash)
        });
        if let Some(c) = &mut self.lru {
            c.push_front(r);
        }
        true
    }

    /// Adds a dead row to a slab.
    pub fn insert_dead(&mut self, slab: u32) {
        if let Some(s) = self.slab_mut(slab) {
            s.records.push(NO_RECORD);
        }
    }

    /// Moves a record to the location that it was copied to; `false` when it is not at `from` any more.
    pub fn relocate(&mut self, key: &StoreKey, from: SlabLocation, location: SlabLocation) -> bool {
        let Some(r) = self.lookup(key).filter(|&r| self.location(r) == from) else { return false };
        if self.slab(location.slab).is_none() {
            return false;
        }
        let size = footprint(from.len);
        let row = self.recs[r as usize].row as usize;
        if let Some(old) = self.slab_mut(from.slab) {
            old.records[row] = NO_RECORD;
            old.live -= 1;
            old.live_bytes -= size;
            old.dirty = true;
        }
        if let Some(new) = self.slab_mut(location.slab) {
            let row = new.records.len() as u32;
            new.records.push(r);
            new.live += 1;
            new.live_bytes += size;
            let rec = &mut self.recs[r as usize];
            (rec.slab, rec.at, rec.row) = (location.slab, (location.at / LINE) as u32, row);
        }
        true
    }

    /// Removes a record and returns its footprint; `None` when it is absent.
    pub fn remove(&mut self, key: &StoreKey) -> Option<u64> {
        self.lookup(key).map(|r| self.remove_record(r))
    }

    /// Removes a record only if it still lies at `location`.
    pub fn remove_at(&mut self, key: &StoreKey, location: SlabLocation) -> Option<u64> {
        self.lookup(key).filter(|&r| self.location(r) == location).map(|r| self.remove_record(r))
    }

    pub(super) fn remove_record(&mut self, r: u32) -> u64 {
        let rec = self.recs[r as usize].clone();
        let size = footprint(rec.len);
        if let Ok(e) = self.table.find_entry(table_hash(self.key, rec.domain, &rec.hash), |&x| x == r) {
            e.remove();
        }
        if let Some(s) = self.slabs.get_mut(&rec.slab) {
            s.records[rec.row as usize] = NO_RECORD;
            s.live -= 1;
            s.live_bytes -= size;
            s.dirty = true;
        }
        if rec.shared {
            self.datasets.unshare_record(rec.dataset, size);
        }
        if let Some(moved) = self.datasets.remove_record(rec.dataset, rec.pos, size) {
            self.recs[moved as usize].pos = rec.pos;
        }
        if let Some(c) = &mut self.lru {
            c.remove(r);
        }
        self.pins.remove(&r);
        self.free.push(r);
        self.bytes -= size;
        size
    }

    // Records that several datasets use.

    /// Charges a record to dataset `n` instead of the dataset to which it is charged.
    fn charge_to(&mut self, r: u32, n: u32) {
        let rec = self.recs[r as usize].clone();
        let size = footprint(rec.len);
        if let Some(moved) = self.datasets.remove_record(rec.dataset, rec.pos, size) {
            self.recs[moved as usize].pos = rec.pos;
        }
        self.datasets.charge(n, size);
        let pos = self.datasets.add_record(n, r);
        let rec = &mut self.recs[r as usize];
        (rec.dataset, rec.pos) = (n, pos);
    }

    fn set_shared(&mut self, r: u32, shared: bool) {
        let rec = &mut self.recs[r as usize];
        let (n, size) = (rec.dataset, footprint(rec.len));
        match (std::mem::replace(&mut rec.shared, shared), shared) {
            (false, true) => self.datasets.share_record(n, size),
            (true, false) => self.datasets.unshare_record(n, size),
            (true, true) | (false, false) => {}
        }
    }

    /// Whether a chunk is absent, or charged to `dataset` and claimed by it.
    pub fn is_claimed_by(&self, key: &StoreKey, dataset: DatasetId) -> bool {
        let Some(r) = self.lookup(key) else { return true };
        let owner = self.recs[r as usize].dataset;
        self.datasets.id(owner) == dataset && !self.datasets.is_spare(owner, r)
    }

    /// Notes that `dataset` uses a record, which may be charged to another dataset of the same pool.
    ///
    /// A sweep with room is charged for a record of its plain readers. They share it if they claimed it
    /// within their share, and give it up if not. Plain readers claim a spare record, or share a record of a
    /// sweep, if their share has room.
    pub fn use_record(&mut self, key: &StoreKey, dataset: DatasetId) {
        let Some(r) = self.lookup(key) else { return };
        let (owner, size) = (self.recs[r as usize].dataset, footprint(self.recs[r as usize].len));
        let n = self.datasets.number(dataset);
        if owner == n {
            if self.datasets.has_share_for(n, size) {
                self.datasets.set_spare(n, r, size, false);
            }
            return;
        }
        if self.datasets.plain_of(n) == Some(owner) && self.datasets.has_room_for(n, size) {
            let stays_in_use = self.datasets.is_within_share(owner) && !self.datasets.is_spare(owner, r);
            self.charge_to(r, n);
            self.set_shared(r, stays_in_use);
        } else if self.datasets.plain_of(owner) == Some(n)
            && !self.recs[r as usize].shared
            && self.datasets.has_share_for(n, size)
        {
            self.set_shared(r, true);
        }
    }

    /// Charges a sweep's record to its plain readers if they may keep it; returns whether they do.
    ///
    /// They keep what they share, and as spare records those that their share has room for. They keep a
    /// pinned record in any case: a warm-up protects it.
    pub(super) fn hand_over(&mut self, r: u32) -> bool {
        let rec = &self.recs[r as usize];
        let (n, size, shared) = (rec.dataset, footprint(rec.len), rec.shared);
        let Some(plain) = self.datasets.plain_of(n) else { return false };
        let is_claimed = shared && self.datasets.is_within_share(plain);
        let stays = is_claimed || self.datasets.is_in_whole_pool(n) || self.is_record_pinned(r);
        if !stays && !self.datasets.has_room_for(plain, size) {
            return false;
        }
        self.set_shared(r, false);
        self.charge_to(r, plain);
        self.datasets.set_spare(plain, r, size, !stays);
        true
    }

    // Use and pins, for eviction.

    /// Makes a record the most recently used one.
    pub fn touch(&mut self, key: &StoreKey) {
        if let Some(r) = self.lookup(key)
            && let Some(c) = &mut self.lru
        {
            c.remove(r);
            c.push_front(r);
        }
    }

    /// Pins a record once more against eviction; `false` when it is absent.
    pub fn pin(&mut self, key: &StoreKey) -> bool {
        let r = self.lookup(key);
        r.map(|r| *self.pins.entry(r).or_insert(0) += 1).is_some()
    }

    /// Takes one pin off a record.
    pub fn unpin(&mut self, key: &StoreKey) {
        if let Some(r) = self.lookup(key)
            && let Some(n) = self.pins.get_mut(&r)
        {
            *n -= 1;
            if *n == 0 {
                self.pins.remove(&r);
            }
        }
    }

    /// Whether a record has a pin.
    pub fn is_pinned(&self, key: &StoreKey) -> bool {
        self.lookup(key).is_some_and(|r| self.is_record_pinned(r))
    }

    pub(super) fn is_record_pinned(&self, r: u32) -> bool {
        !self.pins.is_empty() && self.pins.contains_key(&r)
    }

    pub fn pinned_records(&self) -> usize {
        self.pins.len()
    }

    /// Whether the slab holds a pinned record.
    pub fn slab_has_pins(&self, n: u32) -> bool {
        !self.pins.is_empty()
            && self
                .slab(n)
                .is_some_and(|s| s.records.iter().any(|r| *r != NO_RECORD && self.pins.contains_key(r)))
    }

    /// Panics where an invariant is broken.
    #[cfg(test)]
    pub fn check(&self) {
        let mut seen = 0;
        for (n, s) in self.slabs() {
            let live: Vec<u32> = s.records.iter().copied().filter(|&r| r != NO_RECORD).collect();
            assert_eq!(live.len() as u32, s.live);
            assert_eq!(live.iter().map(|&r| footprint(self.recs[r as usize].len)).sum::<u64>(), s.live_bytes);
            for (row, &r) in s.records.iter().enumerate().filter(|(_, r)| **r != NO_RECORD) {
                let rec = &self.recs[r as usize];
                assert_eq!((rec.slab, rec.row as usize), (n, row));
                assert_eq!(self.datasets.records(rec.dataset)[rec.pos as usize], r);
                assert_eq!(self.lookup(&self.key_of(r).0), Some(r));
                seen += 1;
            }
        }
        assert_eq!(seen, self.len());
        assert_eq!(self.bytes, self.slabs().map(|(_, s)| s.live_bytes).sum::<u64>());
        self.datasets.check(|r| self.recs[r as usize].len, |r| self.recs[r as usize].shared);
        if let Some(c) = &self.lru {
            assert_eq!(c.len(), self.len());
        }
    }
}
