//! The reaper: it turns dead records into free blocks of the file system, cheapest first.
//!
//! It unlinks slabs without live records, punches runs of dead records out of slabs, and compacts slabs that
//! are sparse or lost too much at the edges of holes. `eviction` chooses which records die.

use super::{
    DiskEngine, DiskError, OffReason, Policy,
    index::{NO_RECORD, SlabLocation, SlabMeta, SlabState},
    layout::{BLOCK, HEAD, ROW, footprint},
    slab::{self, RecordReader, Slab},
    space::{FILE_SLACK, FS_BLOCK},
    stats::add,
};
use fletch_core::Verified;
use std::{fs::File, ops::Range, sync::Arc};

/// While a newcomer waits, a copy must gain at least one part in this many of the slab.
const GAIN_URGENT: u64 = 4;
/// In the background, a copy may gain less.
const GAIN_IDLE: u64 = 32;
/// Least gain for which a slab is compacted.
const GAIN_MIN: u64 = 8 << 10;
/// Shortest run of dead records that is punched out.
const HOLE_MIN: u64 = 16 << 10;
/// Most bytes that compaction of lossy slabs copies while a newcomer waits, and the rest of one slab.
///
/// The background copies the rest.
const URGENT_COPY_BYTES: u64 = 64 << 20;
/// Free space that the background keeps ready, in slabs.
const READY_SLABS: u64 = 4;

/// The state of the reaper.
#[derive(Debug, Default)]
pub(crate) struct Reaper {
    /// Dead slabs that readers still hold, and the bytes that they occupy.
    doomed: Vec<(Arc<Slab>, u64)>,
}

/// The result of `reap`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReapReport {
    /// Bytes that came free.
    pub freed: u64,
    /// Bytes that were copied for that.
    pub copied: u64,
    /// Chunks evicted because the file system fell below its floor, or the limit was lowered.
    pub evicted: u64,
}

enum Step {
    Unlink,
    Punch(u32),
    Compact(u32),
}

impl DiskEngine {
    /// Frees the space of dead records, keeps the floor free, and writes the catalogue, in the background.
    ///
    /// Copies at most `budget` bytes, and the rest of one slab.
    ///
    /// # Errors
    /// [`DiskError`] when the disk fails.
    pub fn reap(&self, budget: u64) -> Result<ReapReport, DiskError> {
        self.check_readable()?;
        let before = self.space.used();
        let done = self.reap_within(budget);
        if let Err(e) = &done {
            self.note_io_error(e);
        }
        if !self.catalogue.is_open() {
            self.rebuild_catalogue(true);
        }
        self.sync_catalogue();
        let (copied, evicted) = done?;
        let freed = before.saturating_sub(self.space.used());
        // The records may have been copied into a new slab that has space for more.
        if freed > 0 || copied > 0 {
            self.full.clear();
        }
        Ok(ReapReport { freed, copied, evicted })
    }

    fn reap_within(&self, budget: u64) -> Result<(u64, u64), DiskError> {
        let mut reaper = self.maintenance.lock();
        let mut copied = 0;
        let ready = READY_SLABS * self.plan.slab_bytes;
        let ready = ready.min(self.plan.slabs_bytes / 8);
        let short = self.floor_shortage(ready)?;
        let want = if short > 0 { ready.max(self.space.free(self.plan.spare_bytes) + short) } else { ready };
        self.reclaim(&mut reaper, want, self.plan.spare_bytes, GAIN_IDLE, budget, &mut copied)?;
        let want = self.plan.slab_bytes + FILE_SLACK;
        // Near the floor, and on a disk that is off, there is no space to copy to.
        if self.check_writable().is_ok() && self.floor_shortage(want)? == 0 {
            self.compact_lossy_slabs(&mut reaper, want, false, budget, &mut copied)?;
        }
        let mut evicted = 0;
        while self.floor_shortage(0)? > 0 || self.space.excess() > 0 {
            let Some(chunks) = self.evict_random_slab() else { break };
            evicted += chunks;
            if !self.unlink_dead(&mut reaper)? {
                break;
            }
        }
        Ok((copied, evicted))
    }

    /// Makes `want` bytes free for a newcomer, by the policy; `false` when the policy permits no more.
    pub(crate) fn make_room(&self, want: u64) -> Result<bool, DiskError> {
        let mut reaper = self.maintenance.lock();
        let keep = self.plan.spare_bytes;
        let floor = self.floor_shortage(want)?;
        if floor > 0 && self.config.policy != Policy::Lru {
            // Under these policies only `reap` evicts for the floor.
            self.turn_off(OffReason::Full);
            return Ok(false);
        }
        let goal = if floor > 0 { want.max(self.space.free(keep) + floor) } else { want };
        let (mut copied, mut copied_lossy) = (0, 0);
        loop {
            if self.reclaim(&mut reaper, goal, keep, GAIN_URGENT, u64::MAX, &mut copied)?
                || self.compact_lossy_slabs(&mut reaper, goal, true, URGENT_COPY_BYTES, &mut copied_lossy)?
            {
                return Ok(true);
            }
            if copied_lossy > 0 {
                self.full.clear();
            }
            if self.evict_for_newcomer(want) == 0 {
                if floor > 0 {
                    self.turn_off(OffReason::Full);
                }
                return Ok(false);
            }
        }
    }

    /// Frees space until `want` bytes beside `keep` are free, or no step gains 1/`gain` of a slab.
    fn reclaim(
        &self,
        reaper: &mut Reaper,
        want: u64,
        keep: u64,
        gain: u64,
        budget: u64,
        copied: &mut u64,
    ) -> Result<bool, DiskError> {
        let mut unlinked = false;
        loop {
            if self.space.free(keep) >= want {
                return Ok(true);
            }
            if !unlinked {
                unlinked = true;
                self.unlink_dead(reaper)?;
                continue;
            }
            let Some(step) = self.next_step(gain) else { return Ok(false) };
            // Every step leaves less waste, or is the last one.
            let went_on = match step {
                Step::Unlink => self.unlink_dead(reaper)?,
                Step::Punch(n) => {
                    self.punch(n)?;
                    true
                }
                Step::Compact(n) => {
                    let (bytes, whole) = self.compact(n)?;
                    *copied += bytes;
                    self.unlink_dead(reaper)? && whole
                }
            };
            if !went_on || *copied >= budget {
                return Ok(self.space.free(keep) >= want);
            }
        }
    }

    /// Compacts slabs that lost more than capacity reserves for them, until `want` bytes are free.
    ///
    /// Ends early when all promised bytes are free. Blocks at the edges of holes come free in no other way.
    /// This ends because a slab is compacted only for the records that died in it.
    fn compact_lossy_slabs(
        &self,
        reaper: &mut Reaper,
        want: u64,
        urgent: bool,
        budget: u64,
        copied: &mut u64,
    ) -> Result<bool, DiskError> {
        let keep = self.plan.spare_bytes;
        loop {
            let free = self.space.free(keep);
            if free >= want {
                return Ok(true);
            }
            if *copied >= budget || free >= self.promised_free_bytes() {
                return Ok(false);
            }
            let Some(n) = self.most_lossy_slab(urgent) else { return Ok(false) };
            let (bytes, whole) = self.compact(n)?;
            *copied += bytes;
            if !self.unlink_dead(reaper)? || !whole {
                return Ok(self.space.free(keep) >= want);
            }
        }
    }

    /// Returns the bytes that must be free so that the capacity that is not used yet can be written.
    fn promised_free_bytes(&self) -> u64 {
        let index = self.read_index();
        match self.capacity_of(&index).saturating_sub(index.bytes()) {
            0 => 0,
            _ if self.config.policy != Policy::Fletch => 0,
            unused => unused + self.plan.newcomer_bytes(index.mean_footprint()) + 2 * FILE_SLACK,
        }
    }

    /// Returns the slab that lost most relative to its live records, if it lost too much.
    ///
    /// The live records must fit elsewhere. When `urgent`, considers only slabs whose records are long enough
    /// for holes. In any other slab, all live records would be copied for the few that died.
    fn most_lossy_slab(&self, urgent: bool) -> Option<u32> {
        let (rest, room) = (self.rest_of_active(), self.space.free(0));
        let slab = self.plan.slab_bytes;
        // Live records go to the rest of the open slab, or to a new slab, which has a minimum length.
        let fits = |need: u64| {
            need <= rest || room >= slab + FILE_SLACK || room >= need.max(slab / 4) + 2 * FILE_SLACK
        };
        let index = self.read_index();
        let rows = |m: &SlabMeta| u64::from(m.live) * ROW as u64;
        let lost = |m: &SlabMeta| m.blocks.saturating_sub(m.live_bytes + rows(m));
        let too_much = |m: &SlabMeta| {
            // Without deaths in it, a copy would lose as much as this slab does.
            let died = m.end > BLOCK + m.live_bytes;
            let mean = m.live_bytes.checked_div(m.live.into()).unwrap_or(0);
            m.state == SlabState::Sealed
                && died
                && lost(m) >= GAIN_MIN
                && (punchable(m) || !urgent)
                && fits(m.live_bytes + rows(m) + BLOCK)
                && self.plan.loses_too_much(lost(m), m.live_bytes, mean)
        };
        let part = |m: &SlabMeta| lost(m) as f64 / m.live_bytes.max(1) as f64;
        let slabs = index.slabs().filter(|(_, m)| too_much(m));
        slabs.max_by(|a, b| part(a.1).total_cmp(&part(b.1))).map(|(n, _)| n)
    }

    /// Returns the step that gains most. A copy must gain 1/`gain` of a slab.
    ///
    /// A hole costs only a call. It is punched when no other step is left: in a slab of few long records
    /// every hole gains less than a copy must.
    fn next_step(&self, gain: u64) -> Option<Step> {
        let index = self.read_index();
        let sealed = || index.slabs().filter(|(_, m)| m.state == SlabState::Sealed);
        // Space between records is waste too, except what the file system rounds up.
        let waste = |m: &SlabMeta| m.blocks.saturating_sub(m.live_bytes + m.fixed + FS_BLOCK);
        let punchable = |m: &SlabMeta| punchable(m) && m.live < m.punched_at;
        let (n, m) = sealed().max_by_key(|(_, m)| if m.live == 0 { u64::MAX } else { waste(m) })?;
        if m.live == 0 {
            return Some(Step::Unlink);
        }
        if waste(m) >= (m.blocks / gain).max(GAIN_MIN) {
            // A slab with few live records is compacted, so that sparse slabs do not pile up.
            let much = m.live_bytes > self.plan.slab_bytes / 4;
            return Some(if punchable(m) && much { Step::Punch(n) } else { Step::Compact(n) });
        }
        let holes = sealed().filter(|(_, m)| punchable(m) && waste(m) >= HOLE_MIN);
        holes.max_by_key(|(_, m)| waste(m)).map(|(n, _)| Step::Punch(n))
    }

    /// Unlinks slabs without live records; `false` when there were none.
    fn unlink_dead(&self, reaper: &mut Reaper) -> Result<bool, DiskError> {
        {
            let mut index = self.write_index();
            let dead = index.slabs().filter(|(_, m)| m.state == SlabState::Sealed && m.live == 0);
            let dead: Vec<u32> = dead.map(|(n, _)| n).collect();
            let metas = dead.into_iter().filter_map(|n| index.drop_slab(n));
            reaper.doomed.extend(metas.map(|m| (m.slab, m.blocks)));
        }
        let mut any = false;
        let mut failed = None;
        reaper.doomed.retain(|(slab, blocks)| match self.files.remove(slab) {
            Ok(true) => {
                any = true;
                add(&self.counters.slabs_unlinked, 1);
                self.release_file(slab, *blocks);
                false
            }
            Ok(false) => true,
            Err(e) => {
                failed.get_or_insert(DiskError::io("unlink", self.files.path(slab.id), e));
                true
            }
        });
        failed.map_or(Ok(any), Err)
    }

    /// Gives back the space of a slab whose file is gone, and queues its removal from the catalogue.
    pub(crate) fn release_file(&self, slab: &Slab, blocks: u64) {
        self.space.give(blocks);
        self.removed_slabs.lock().push((slab.id, None));
    }

    /// Punches runs of dead records out of a slab. Moves no record.
    fn punch(&self, n: u32) -> Result<(), DiskError> {
        let Some((slab, holes)) = self.dead_runs(n) else { return Ok(()) };
        // The catalogue first: a restart that trusts it must not find records alive that were punched out.
        self.sync_catalogue();
        let fail = |e| DiskError::io("punch", self.files.path(slab.id), e);
        if !holes.is_empty() && self.files.punch(&slab, &holes).map_err(fail)? {
            let file = self.files.file(&slab).map_err(fail)?;
            let now = slab::blocks(&file).map_err(fail)?;
            add(&self.counters.punched_bytes, self.resize(n, &slab, now));
        }
        Ok(())
    }

    /// Returns the runs between the live records of a slab, and behind the last of them.
    fn dead_runs(&self, n: u32) -> Option<(Arc<Slab>, Vec<Range<u64>>)> {
        let mut index = self.write_index();
        let m = index.slab(n)?;
        let live = m.records.iter().filter(|&&r| r != NO_RECORD).map(|&r| index.location(r));
        let mut live: Vec<SlabLocation> = live.collect();
        live.sort_by_key(|p| p.at);
        let mut holes = Vec::new();
        let mut end = BLOCK;
        for p in &live {
            holes.push(end..p.at);
            end = p.at + footprint(p.len);
        }
        holes.push(end..m.end);
        let aligned = |r: Range<u64>| r.start.next_multiple_of(FS_BLOCK)..r.end / FS_BLOCK * FS_BLOCK;
        let holes = holes.into_iter().map(aligned).filter(|r| r.start + HOLE_MIN <= r.end).collect();
        let (slab, alive) = (Arc::clone(&m.slab), m.live);
        index.slab_mut(n)?.punched_at = alive;
        Some((slab, holes))
    }

    /// Copies the live records of slab `n` into the open slab.
    ///
    /// Returns the bytes that were copied, and whether all records were.
    pub(super) fn compact(&self, n: u32) -> Result<(u64, bool), DiskError> {
        let (slab, live) = {
            let index = self.read_index();
            let Some(m) = index.slab(n) else { return Ok((0, true)) };
            let live = m.records.iter().copied().filter(|&r| r != NO_RECORD);
            let live: Vec<_> = live.map(|r| (index.key_of(r), index.location(r))).collect();
            (Arc::clone(&m.slab), live)
        };
        let (mut copied, mut whole) = (0, true);
        let file: Arc<File> = match self.files.file(&slab) {
            Ok(f) => f,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                self.drop_lost_slab(&slab);
                return Ok((0, true));
            }
            Err(e) => return Err(DiskError::io("open", self.files.path(slab.id), e)),
        };
        for ((key, dataset), from) in live {
            if self.read_index().find(&key) != Some(from) {
                continue;
            }
            let read = RecordReader::new(&file, from.at + HEAD, from.len).whole();
            let bytes = match self.check_read(&key, from, &slab, read) {
                Ok(Some(bytes)) => bytes,
                Ok(None) => continue,
                // A bad sector costs its record; a bad disk turns the tier off.
                Err(e) => match self.check_writable() {
                    Ok(()) => continue,
                    Err(_) => return Err(e),
                },
            };
            let chunk = match Verified::check(key.hash, bytes.into()) {
                Ok(chunk) => chunk,
                _ => {
                    self.quarantine_at(&key, from);
                    continue;
                }
            };
            let Some(domain) = self.write_index().domain(&key.domain) else { continue };
            let Some(to) = self.write_copy(&key, dataset, domain, &chunk)? else {
                whole = false;
                break;
            };
            self.write_index().relocate(&key, from, to);
            self.finish_records(to.slab, 1)?;
            copied += footprint(from.len);
        }
        add(&self.counters.compacted_bytes, copied);
        if !whole {
            // The copied records are one dead run, and their space is missing.
            self.punch(n)?;
        }
        Ok((copied, whole))
    }
}

/// Whether the records of a slab are long enough for holes between them.
fn punchable(m: &SlabMeta) -> bool {
    m.live_bytes.checked_div(m.live.into()).is_some_and(|mean| mean >= 2 * HOLE_MIN)
}
