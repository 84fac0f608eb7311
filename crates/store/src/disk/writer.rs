//! The writer: it reserves space for records in the open slab, and seals full slabs.
//!
//! Invariants:
//! 1. offsets are reserved under the writer's lock, and records are written without it, so several records of
//!    a slab can be written at once. A slab is sealed when it takes no more records and none is being
//!    written;
//! 2. (I6) the space of a slab is reserved before its file is created, and includes its table;
//! 3. a record is in the index only after all of it was written.

use super::{
    DiskEngine, DiskError,
    index::{SlabLocation, SlabState},
    layout::{self, BLOCK, footprint, table_bytes},
    slab::{self, Slab},
    space::{FILE_SLACK, SpacePlan},
};
use crate::dataset_id::DatasetId;
use fletch_core::{StoreKey, Verified};
use std::{collections::HashMap, fs::File, sync::Arc};

/// A slab that is being written.
#[derive(Debug)]
struct OpenSlab {
    slab: Arc<Slab>,
    file: Arc<File>,
    /// Offset of the next record.
    at: u64,
    /// Most bytes that the file may grow to.
    bytes: u64,
    count: u64,
    domains: Vec<u16>,
    domain_bytes: u64,
    /// Records that are being written.
    pending: usize,
    /// Whether the slab takes no more records.
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

/// The slabs that are being written, and which of them takes new records.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    open: HashMap<u32, OpenSlab>,
    active: Option<u32>,
    pub next_id: u64,
}

/// Space for a record in a slab, until `finish_records`.
pub(super) struct Reservation {
    pub location: SlabLocation,
    pub slab: u64,
    pub file: Arc<File>,
}

impl Reservation {
    /// Whether `other` begins where this one ends, in the same slab.
    pub fn is_followed_by(&self, other: &Reservation) -> bool {
        let end = self.location.at + footprint(self.location.len);
        self.location.slab == other.location.slab && end == other.location.at
    }
}

/// What a record is written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Newcomer,
    /// Compaction may use the spare slab, and must not ask for space to be made.
    Compaction,
}

pub(super) enum ReserveOutcome {
    Reserved(Reservation),
    NoRoom(u64),
}

impl DiskEngine {
    /// Writes a copy of a record that is compacted; `None` when there is no space.
    ///
    /// Its slab stays open. The caller adds the record to the index, then calls `finish_records`.
    pub(crate) fn write_copy(
        &self,
        key: &StoreKey,
        dataset: DatasetId,
        domain: u16,
        chunk: &Verified,
    ) -> Result<Option<SlabLocation>, DiskError> {
        let len = chunk.bytes().len() as u32;
        let reserved = self.reserve(len, domain, layout::domain_bytes(&key.domain), Purpose::Compaction)?;
        let ReserveOutcome::Reserved(at) = reserved else { return Ok(None) };
        let header = layout::record_header(at.slab, key, dataset.0, len);
        if let Err(e) = slab::append(&at.file, at.location.at, &[(&header, chunk.bytes())]) {
            // The reserved space stays unused; a later walk of the slab steps over it.
            drop(self.finish_records(at.location.slab, 1));
            return Err(DiskError::io("write", self.files.path(at.slab), e));
        }
        Ok(Some(at.location))
    }

    /// Reserves space for a record of `len` bytes, in the open slab or in a new one.
    pub(super) fn reserve(
        &self,
        len: u32,
        domain: u16,
        domain_bytes: u64,
        purpose: Purpose,
    ) -> Result<ReserveOutcome, DiskError> {
        let need = footprint(len);
        let mut full = None;
        let got = {
            let mut w = self.writer.lock();
            // After `close` another process may own the directory.
            self.check_not_closed()?;
            // A record that does not fit into a usual slab gets a slab of its own.
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
            // Sealing gives the unused end of the slab back, which may be the space that was missing.
            // If it fails, the next start walks this slab; the record is not affected.
            if let Err(e) = self.seal(n, &open) {
                self.note_io_error(&e);
            }
        }
        got
    }

    /// Creates a slab; `None` when there is no space for one.
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

    /// Returns by how much the file system would fall below its floor if `bytes` more were used.
    pub(crate) fn floor_shortage(&self, bytes: u64) -> Result<u64, DiskError> {
        let v = rustix::fs::statvfs(self.files.dir())
            .map_err(|e| DiskError::io("statvfs", self.files.dir(), e.into()))?;
        Ok(self.config.free_floor.saturating_add(bytes).saturating_sub(v.f_bavail.saturating_mul(v.f_frsize)))
    }

    /// Ends the writing of `count` records in slab `n`, and seals the slab if they were the last ones.
    pub(crate) fn finish_records(&self, n: u32, count: usize) -> Result<(), DiskError> {
        let done = {
            let mut w = self.writer.lock();
            // After the directory vanished no slab is open.
            let Some(open) = w.open.get_mut(&n) else { return Ok(()) };
            open.pending = open.pending.saturating_sub(count);
            if open.full && open.pending == 0 { w.open.remove(&n) } else { None }
        };
        done.map_or(Ok(()), |open| self.seal(n, &open))
    }

    /// Returns the bytes that are left in the open slab, rows of its table deducted.
    pub(crate) fn rest_of_active(&self) -> u64 {
        let w = self.writer.lock();
        let open = w.active.and_then(|n| w.open.get(&n));
        open.map_or(0, |o| o.bytes.saturating_sub(o.at + table_bytes(o.count, o.domain_bytes)))
    }

    /// Seals the open slab, if there is one. If records are being written, the last of them seals it.
    pub(crate) fn seal_active(&self) -> Result<(), DiskError> {
        let done = {
            let mut w = self.writer.lock();
            w.active.and_then(|n| retire(&mut w, n))
        };
        done.map_or(Ok(()), |(n, open)| self.seal(n, &open))
    }

    /// Writes the table of a slab that takes no more records.
    fn seal(&self, n: u32, open: &OpenSlab) -> Result<(), DiskError> {
        // So that no thread punches or unlinks it meanwhile.
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

    /// Notes that a slab occupies only `now` bytes, and returns how many that gave back.
    pub(crate) fn resize(&self, n: u32, slab: &Arc<Slab>, now: u64) -> u64 {
        let mut index = self.write_index();
        let Some(meta) = index.slab_mut(n).filter(|m| Arc::ptr_eq(&m.slab, slab)) else { return 0 };
        // The file system may still add a block of extents when dirty pages reach the disk.
        let now = (now + FILE_SLACK / 2).min(meta.blocks);
        let given = meta.blocks - now;
        meta.blocks = now;
        self.space.give(given);
        given
    }

    /// Makes each write into an open slab find a full disk.
    #[cfg(test)]
    pub(crate) fn break_open_slabs(&self) {
        let full = Arc::new(File::options().write(true).open("/dev/full").expect("opens"));
        self.writer.lock().open.values_mut().for_each(|open| open.file = Arc::clone(&full));
    }

    /// Drops all slabs that are being written, without sealing them.
    pub(crate) fn abandon_writing(&self) {
        let mut w = self.writer.lock();
        w.open.clear();
        w.active = None;
    }
}

/// Takes slab `n` out of use, and returns it if it can be sealed now.
fn retire(w: &mut Writer, n: u32) -> Option<(u32, OpenSlab)> {
    w.active = w.active.filter(|&a| a != n);
    let open = w.open.get_mut(&n)?;
    open.full = true;
    if open.pending > 0 {
        return None;
    }
    w.open.remove(&n).map(|o| (n, o))
}
