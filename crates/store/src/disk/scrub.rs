//! Scrubbing: reads and hashes all records in turn, a budget at a time, to find silent damage.

use super::{
    DiskEngine, DiskError,
    index::{NO_RECORD, SlabLocation},
    layout::{HEAD, footprint},
    slab::{RecordReader, Slab},
    stats::add,
};
use fletch_core::{Hash, StoreKey};
use std::sync::Arc;

/// A record and its location.
type Named = (StoreKey, SlabLocation);

/// Where the next call of `scrub_next` begins.
#[derive(Debug, Default)]
pub(crate) struct Cursor {
    slab_id: u64,
    at: u64,
}

/// The result of `scrub_next`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScrubReport {
    /// Records that were read.
    pub records: u64,
    /// Footprints of those records.
    pub bytes: u64,
    /// Records that were damaged. They are quarantined.
    pub bad: u64,
    /// Whether the last record was reached, so that the next call begins at the first.
    pub wrapped: bool,
}

impl DiskEngine {
    /// Reads and hashes records of about `budget` bytes, at least one, from where the last call ended.
    ///
    /// Quarantines damaged records.
    ///
    /// # Errors
    /// [`DiskError`] when the disk cannot be read.
    pub fn scrub_next(&self, budget: u64) -> Result<ScrubReport, DiskError> {
        self.check_readable()?;
        let mut cursor = self.scrub.lock();
        let mut report = ScrubReport::default();
        while report.bytes < budget || report.records == 0 {
            let Some((slab, records)) = self.slab_after(&cursor) else {
                *cursor = Cursor::default();
                report.wrapped = true;
                break;
            };
            for (key, location) in records {
                if report.bytes >= budget && report.records > 0 {
                    break;
                }
                *cursor = Cursor { slab_id: slab.id, at: location.at + 1 };
                self.scrub_one(&slab, &key, location, &mut report)?;
            }
        }
        Ok(report)
    }

    /// Returns the records at or after the cursor in the first slab that has any, in order of their offset.
    fn slab_after(&self, c: &Cursor) -> Option<(Arc<Slab>, Vec<Named>)> {
        let index = self.read_index();
        let mut slabs: Vec<_> = index.slabs().filter(|(_, m)| m.slab.id >= c.slab_id && m.live > 0).collect();
        slabs.sort_unstable_by_key(|(_, m)| m.slab.id);
        slabs.into_iter().find_map(|(_, m)| {
            let after = |p: &SlabLocation| m.slab.id > c.slab_id || p.at >= c.at;
            let live = m.records.iter().filter(|&&r| r != NO_RECORD);
            let mut live: Vec<_> = live.map(|&r| (r, index.location(r))).filter(|(_, p)| after(p)).collect();
            live.sort_unstable_by_key(|(_, p)| p.at);
            let live: Vec<_> = live.into_iter().map(|(r, p)| (index.key_of(r).0, p)).collect();
            (!live.is_empty()).then(|| (Arc::clone(&m.slab), live))
        })
    }

    fn scrub_one(
        &self,
        slab: &Arc<Slab>,
        key: &StoreKey,
        location: SlabLocation,
        report: &mut ScrubReport,
    ) -> Result<(), DiskError> {
        let guard = slab.lock_shared();
        // It may have been evicted or moved meanwhile.
        if self.read_index().find(key) != Some(location) {
            return Ok(());
        }
        let read = self
            .files
            .file(slab)
            .and_then(|f| RecordReader::new(&f, location.at + HEAD, location.len).whole());
        drop(guard);
        report.records += 1;
        report.bytes += footprint(location.len);
        add(&self.counters.scrubbed_bytes, footprint(location.len));
        match self.check_read(key, location, slab, read)? {
            Some(payload) if Hash::of(&payload) == key.hash => {}
            Some(_) => {
                report.bad += 1;
                self.quarantine_at(key, location);
            }
            None => report.bad += 1,
        }
        Ok(())
    }
}
