//! Writing: admission, space, a place in the open slab, the record, the index; sealing.
//!
//! Invariants:
//! 1. places are given out under the writer's lock and written outside of it, so several records
//!    of a slab can be under way; a slab is sealed when it takes no more and none is under way;
//! 2. (I6) a slab's space is taken before its file is made, and includes its table;
//! 3. a record is in the index only after all of it was written.

use super::{
    DatasetId, DiskEngine, DiskError, Policy, Refusal, Stored,
    index::{SlabLocation, SlabState},
    layout::{self, BLOCK, footprint, table_bytes},
    lock,
    slab::{self, Slab},
    space::{FILE_SLACK, SpacePlan},
    stats::add,
};
use fletch_core::{StoreKey, Verified};
use std::{collections::HashMap, fs::File, sync::Arc};

/// How often a newcomer may find that others took the room that was made for it.
const ROUNDS: usize = 4;

/// A slab that is being written.
#[derive(Debug)]
struct OpenSlab {
    slab: Arc<Slab>,
    file: Arc<File>,
    /// Where the next record goes.
    at: u64,
    /// What the file may grow to.
    bytes: u64,
    count: u64,
    domains: Vec<u16>,
    domain_bytes: u64,
    /// Records under way.
    pending: u32,
    /// It takes no more.
    full: bool,
}

impl OpenSlab {
    fn fits(&self, need: u64, domain: u16, domain_bytes: u64) -> bool {
        let more = if self.domains.contains(&domain) { 0 } else { domain_bytes };
        self.at + need + table_bytes(self.count + 1, self.domain_bytes + more) <= self.bytes
    }

    fn take(&mut self, need: u64, domain: u16, domain_bytes: u64) -> u64 {
        if !self.domains.contains(&domain) {
            self.domains.push(domain);
            self.domain_bytes += domain_bytes;
        }
        let at = self.at;
        self.at += need;
        self.count += 1;
        self.pending += 1;
        at
    }
}

/// Which slabs are being written, and which of them takes records.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    open: HashMap<u32, OpenSlab>,
    active: Option<u32>,
    pub next_id: u64,
}

/// A place to write to, until `finish`.
struct Reservation {
    location: SlabLocation,
    slab: u64,
    file: Arc<File>,
}

/// Who asks for space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Newcomer,
    /// May take the spare, and must not ask for room to be made.
    Compaction,
}

enum ReserveOutcome {
    Reserved(Reservation),
    NoRoom(u64),
}

impl DiskEngine {
    /// Keeps a chunk, if the policy wants it and there is room.
    ///
    /// # Errors
    /// [`DiskError`] when the tier is off or the disk fails (which may turn it off): the chunk is not kept.
    pub fn put(&self, key: &StoreKey, dataset: DatasetId, chunk: &Verified) -> Result<Stored, DiskError> {
        self.check_writable()?;
        debug_assert_eq!(key.hash, chunk.hash(), "I1: kept under another name");
        let stored = self.admit_and_write(key, dataset, chunk);
        match &stored {
            Ok(Stored::Yes) => {
                add(&self.counters.puts, 1);
                add(&self.counters.put_bytes, chunk.bytes().len() as u64);
            }
            Ok(Stored::Already) => {}
            Ok(Stored::Refused(Refusal::Share)) => add(&self.counters.refused_share, 1),
            Ok(Stored::Refused(_)) => add(&self.counters.refused_full, 1),
            Err(e) => self.note_io_error(e),
        }
        stored
    }

    fn admit_and_write(
        &self,
        key: &StoreKey,
        dataset: DatasetId,
        chunk: &Verified,
    ) -> Result<Stored, DiskError> {
        if key.hash != chunk.hash() {
            return Err(DiskError::Invalid(format!("chunk {} cannot be kept as {}", chunk.hash(), key.hash)));
        }
        let Some(len) = u32::try_from(chunk.bytes().len()).ok().filter(|&l| self.plan.fits(l)) else {
            return Ok(Stored::Refused(Refusal::TooLong));
        };
        let need = footprint(len);
        let capacity = self.capacity();
        let (domain, set) = {
            let mut index = self.write_index();
            if index.contains(key) {
                return Ok(Stored::Already);
            }
            let fletch = self.config.policy == Policy::Fletch;
            if fletch
                && index.datasets.bytes(dataset).saturating_add(need)
                    > index.datasets.allowance(dataset, capacity)
            {
                return Ok(Stored::Refused(Refusal::Share));
            }
            if self.config.policy != Policy::Lru && self.full.excludes(need, self.deaths()) {
                return Ok(Stored::Refused(Refusal::Full));
            }
            let Some(domain) = index.domain(&key.domain) else {
                return Ok(Stored::Refused(Refusal::Domains));
            };
            let set = index.datasets.number(dataset);
            index.datasets.charge(set, need);
            (domain, set)
        };
        let deaths = self.deaths();
        let written = self.write_record(key, dataset, domain, chunk, Purpose::Newcomer);
        let inserted = match &written {
            Ok(Some(location)) => self.write_index().insert(domain, key.hash, set, *location),
            _ => false,
        };
        if !inserted {
            self.write_index().datasets.discharge(set, need);
        }
        let Some(location) = written? else {
            self.full.note(need, deaths);
            return Ok(Stored::Refused(Refusal::Full));
        };
        self.finish_record(location.slab)?;
        Ok(if inserted { Stored::Yes } else { Stored::Already })
    }

    /// Writes a record and leaves its slab pending: the caller puts it into the index, then calls
    /// `finish`. `None` when there is no room.
    pub(crate) fn write_record(
        &self,
        key: &StoreKey,
        dataset: DatasetId,
        domain: u16,
        chunk: &Verified,
        purpose: Purpose,
    ) -> Result<Option<SlabLocation>, DiskError> {
        let len = chunk.bytes().len() as u32;
        let (mut rounds, mut last) = (0, false);
        let slot = loop {
            match self.reserve(len, domain, layout::domain_bytes(&key.domain), purpose)? {
                ReserveOutcome::Reserved(s) => break s,
                ReserveOutcome::NoRoom(want) => {
                    rounds += 1;
                    if purpose == Purpose::Compaction || rounds > ROUNDS || last {
                        return Ok(None);
                    }
                    // What did come free may do for a short slab.
                    last = !self.make_room(want)?;
                }
            }
        };
        let header = layout::record_header(slot.slab, key, dataset.0, len);
        if let Err(e) = slab::append(&slot.file, slot.location.at, &header, chunk.bytes()) {
            // The place stays unused; the next reader of the slab steps over it.
            drop(self.finish_record(slot.location.slab));
            return Err(DiskError::io("write", self.files.path(slot.slab), e));
        }
        Ok(Some(slot.location))
    }

    /// A place for a record of `len` bytes, in the open slab or a new one.
    fn reserve(
        &self,
        len: u32,
        domain: u16,
        domain_bytes: u64,
        purpose: Purpose,
    ) -> Result<ReserveOutcome, DiskError> {
        let need = footprint(len);
        let mut full = None;
        let got = {
            let mut w = lock(&self.writer);
            // After `close` the directory may be somebody else's.
            self.check_not_closed()?;
            // A record as large as a slab gets one of its own.
            let single = SpacePlan::one_record_slab_bytes(need, domain_bytes);
            let own_slab = single > self.plan.slab_bytes;
            let active = w.active.filter(|_| !own_slab);
            let fits =
                active.and_then(|n| w.open.get(&n)).is_some_and(|o| o.fits(need, domain, domain_bytes));
            if let (Some(n), false) = (active, fits) {
                full = retire(&mut w, n);
            }
            match active.filter(|_| fits) {
                Some(n) => Ok(Some(n)),
                None => self.open_slab(&mut w, single, own_slab, purpose),
            }
            .map(|n| match n.and_then(|n| Some((n, w.open.get_mut(&n)?))) {
                Some((n, o)) => {
                    let at = o.take(need, domain, domain_bytes);
                    let location = SlabLocation { slab: n, at, len };
                    ReserveOutcome::Reserved(Reservation {
                        location,
                        slab: o.slab.id,
                        file: Arc::clone(&o.file),
                    })
                }
                None => {
                    ReserveOutcome::NoRoom(if own_slab { single } else { self.plan.slab_bytes } + FILE_SLACK)
                }
            })
        };
        if let Some((n, open)) = full {
            // Sealing gives the unused end of the slab back, which may be what was missing.
            // Failing costs the next start a walk, not this record.
            if let Err(e) = self.seal(n, &open) {
                self.note_io_error(&e);
            }
        }
        got
    }

    /// Makes a slab; `None` when there is no room for one.
    fn open_slab(
        &self,
        w: &mut Writer,
        single: u64,
        own_slab: bool,
        purpose: Purpose,
    ) -> Result<Option<u32>, DiskError> {
        let keep = if purpose == Purpose::Compaction { 0 } else { self.plan.spare_bytes };
        // The last slab before the limit may be a short one.
        let room = self.space.free(keep).saturating_sub(FILE_SLACK) / 4096 * 4096;
        let bytes = match own_slab {
            true => single,
            false => self.plan.slab_bytes.min(room.max(single.max(self.plan.slab_bytes / 4))),
        };
        if self.floor_shortage(bytes)? > 0 || !self.space.take(bytes + FILE_SLACK, keep) {
            return Ok(None);
        }
        let id = w.next_id;
        w.next_id += 1;
        let (slab, file) = self.files.create(id, bytes).map_err(|e| {
            self.space.give(bytes + FILE_SLACK);
            DiskError::io("create", self.files.path(id), e)
        })?;
        let n = self.write_index().add_slab(Arc::clone(&slab), bytes + FILE_SLACK, SlabState::Open);
        let open = OpenSlab {
            slab,
            file,
            at: BLOCK,
            bytes,
            count: 0,
            domains: Vec::new(),
            domain_bytes: 0,
            pending: 0,
            full: own_slab,
        };
        w.open.insert(n, open);
        if !own_slab {
            w.active = Some(n);
        }
        Ok(Some(n))
    }

    /// By how much the file system would fall below its floor if `bytes` more were used.
    pub(crate) fn floor_shortage(&self, bytes: u64) -> Result<u64, DiskError> {
        let v = rustix::fs::statvfs(self.files.dir())
            .map_err(|e| DiskError::io("statvfs", self.files.dir(), e.into()))?;
        Ok(self.config.free_floor.saturating_add(bytes).saturating_sub(v.f_bavail.saturating_mul(v.f_frsize)))
    }

    /// A record of slab `n` is no longer under way.
    pub(crate) fn finish_record(&self, n: u32) -> Result<(), DiskError> {
        let done = {
            let mut w = lock(&self.writer);
            // After the directory vanished there is nothing to finish.
            let Some(open) = w.open.get_mut(&n) else { return Ok(()) };
            open.pending = open.pending.saturating_sub(1);
            if open.full && open.pending == 0 { w.open.remove(&n) } else { None }
        };
        done.map_or(Ok(()), |open| self.seal(n, &open))
    }

    /// What the slab that takes records now has room for, with rows.
    pub(crate) fn rest_of_active(&self) -> u64 {
        let w = lock(&self.writer);
        let open = w.active.and_then(|n| w.open.get(&n));
        open.map_or(0, |o| o.bytes.saturating_sub(o.at + table_bytes(o.count, o.domain_bytes)))
    }

    /// Seals the slab that takes records now, if there is one. Records under way seal it when they are done.
    pub(crate) fn seal_active(&self) -> Result<(), DiskError> {
        let done = {
            let mut w = lock(&self.writer);
            w.active.and_then(|n| retire(&mut w, n))
        };
        done.map_or(Ok(()), |(n, open)| self.seal(n, &open))
    }

    /// Writes the table of a slab that nobody adds to any more.
    fn seal(&self, n: u32, open: &OpenSlab) -> Result<(), DiskError> {
        // Neither punched nor unlinked meanwhile.
        let _here = open.slab.lock_shared();
        let bytes = {
            let mut index = self.write_index();
            if !index.slab(n).is_some_and(|s| Arc::ptr_eq(&s.slab, &open.slab)) {
                return Ok(());
            }
            let table = index.table(n);
            let (bytes, check) = layout::seal(open.slab.id, open.at, &table);
            let Some(meta) = index.slab_mut(n) else { return Ok(()) };
            meta.state = SlabState::Sealed;
            meta.check = check;
            meta.dirty = false;
            (meta.fixed, meta.end) = (BLOCK + bytes.len() as u64, open.at);
            bytes
        };
        let now = slab::seal(&open.file, open.at, &bytes)
            .map_err(|e| DiskError::io("seal", self.files.path(open.slab.id), e))?;
        self.resize(n, &open.slab, now);
        Ok(())
    }

    /// Notes that a slab occupies only `now` any more; what was given back.
    pub(crate) fn resize(&self, n: u32, slab: &Arc<Slab>, now: u64) -> u64 {
        let mut index = self.write_index();
        let Some(meta) = index.slab_mut(n).filter(|m| Arc::ptr_eq(&m.slab, slab)) else { return 0 };
        // A block of extents may still be added when dirty pages reach the disk.
        let now = (now + FILE_SLACK / 2).min(meta.blocks);
        let given = meta.blocks - now;
        meta.blocks = now;
        self.space.give(given);
        given
    }

    /// Forgets all slabs that are being written.
    pub(crate) fn abandon_writing(&self) {
        let mut w = lock(&self.writer);
        w.open.clear();
        w.active = None;
    }
}

/// Takes slab `n` out of use; it is returned when it can be sealed now.
fn retire(w: &mut Writer, n: u32) -> Option<(u32, OpenSlab)> {
    w.active = w.active.filter(|&a| a != n);
    let open = w.open.get_mut(&n)?;
    open.full = true;
    if open.pending > 0 {
        return None;
    }
    w.open.remove(&n).map(|o| (n, o))
}
