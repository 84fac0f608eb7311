//! I6: what the directory may occupy, and who has taken how much of it.
//!
//! Bytes are counted as the file system counts them (`st_blocks`, not lengths) and are taken
//! *before* anything is written: a slab takes all it can ever grow to when it is created, and
//! gives back what it did not need when it is sealed, punched or unlinked. The catalogue's
//! allowance, files set aside and directories are taken out once, at the start.

use super::layout::{BLOCK, CHUNK_BYTES_MAX, ROW, SLAB_BYTES_MAX, footprint, table_bytes};
use std::sync::atomic::{AtomicU64, Ordering};

/// What a file may occupy beyond its length: a partial block and a block of extents.
pub(crate) const FILE_SLACK: u64 = 8 << 10;
/// File systems give space back in blocks of this many bytes.
pub(crate) const FS_BLOCK: u64 = 4096;
/// No tier is smaller.
pub(crate) const SIZE_MIN: u64 = 16 << 20;
/// Of records with shorter footprints no more room is taken out for their rows in a table.
const ROWS_OF: u64 = 64 << 10;
/// What a table's rounding takes at most, in rows: rows are counted without it, so that no capacity jumps where one is less.
const ROUNDED_ROWS: u64 = 2;
/// Where records die at random there are up to so many more slabs for each that would be full.
const SPARSE: u64 = 2;
/// Of the blocks at the edges of holes one in so many is kept back: slabs that lost more are copied together (ADR 47).
const EDGES_PART: u64 = 12;
/// One part in so many of a slab is the most that is kept back for what the dead leave: short records are copied together.
const LEFT_MAX_PART: u64 = 66;
/// Of a slab of so many bytes what is kept back falls by about a byte at most for each that records are longer on average, so
/// that no capacity jumps with the mean.
const LEFT_FALLS_OVER: u64 = 16 << 20;
/// What short ones may lose at most falls likewise, from none on.
const SHORT_FALLS_OVER: u64 = (9 << 20) + (1 << 18);
/// Lock file, directories, a probe.
const FIXED: u64 = 64 << 10;

/// How a limit is divided. Pure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SpacePlan {
    /// What slabs may occupy together.
    pub slabs_bytes: u64,
    /// The usual size of one; one record more than fits gets a slab of its own.
    pub slab_bytes: u64,
    /// What only compaction may take of `slabs_bytes`.
    pub spare_bytes: u64,
    /// What the catalogue may occupy.
    pub catalogue_bytes: u64,
    /// What damaged catalogues that were set aside may occupy together.
    pub aside_bytes: u64,
}

impl SpacePlan {
    /// Divides `size_max`; slabs are `slab_bytes` long, or as [`default_slab_bytes`] says.
    pub fn new(size_max: u64, slab_bytes: Option<u64>) -> Result<Self, String> {
        if size_max < SIZE_MIN {
            return Err(format!("a cache of {size_max} bytes is too small: the least is {SIZE_MIN}"));
        }
        let slab_bytes = slab_bytes.unwrap_or_else(|| default_slab_bytes(size_max));
        if slab_bytes < 64 << 10 || slab_bytes > size_max / 8 || slab_bytes > SLAB_BYTES_MAX {
            return Err(format!(
                "slabs of {slab_bytes} bytes do not suit a cache of {size_max}: 64 KiB to an eighth of it"
            ));
        }
        let slab_bytes = slab_bytes / 4096 * 4096;
        // A row of a few bytes and a bit a record per slab, and what sled's log needs to be rewritten.
        let catalogue_bytes = (size_max / 2048).clamp(3 << 19, 256 << 20);
        let aside_bytes = (size_max / 4096).min(64 << 20);
        let slabs_bytes = size_max - catalogue_bytes - aside_bytes - FIXED;
        Ok(SpacePlan {
            slabs_bytes,
            slab_bytes,
            spare_bytes: slab_bytes + FILE_SLACK,
            catalogue_bytes,
            aside_bytes,
        })
    }

    /// Footprints of records that fit: without the spare, tables, and what the dead leave behind. `mean` is a record's
    /// footprint on average: short ones need longer tables, and leave more. They fit once what lost too much was copied together
    /// ([`SpacePlan::loses_too_much`], ADR 47).
    pub fn capacity(&self, mean: u64) -> u64 {
        let per_slab = self.slab_bytes + FILE_SLACK;
        // The last slab may be a short one.
        let quarters = (self.slabs_bytes - self.spare_bytes) / (per_slab / 4);
        let all = quarters * ((self.slab_bytes - self.table_bytes_max(mean) - self.dead_loss(mean)) / 4);
        all.saturating_sub(self.newcomer_bytes(mean))
    }

    /// What stays free for a newcomer beside its own length: it may need a new slab, of a quarter of the usual length at least.
    pub fn newcomer_bytes(&self, mean: u64) -> u64 {
        self.slab_bytes.saturating_sub(mean) / 4
    }

    /// What a slab's table takes at most, if no record is shorter than [`ROWS_OF`].
    fn table_bytes_max(&self, mean: u64) -> u64 {
        table_bytes(0, 0) + self.per_record(ROW as u64, mean.max(ROWS_OF)) + ROUNDED_ROWS * ROW as u64
    }

    /// What may be lost of a slab to those that died in it. They are punched out, less a block of the file system for each that
    /// lives between dead ones: half of one on either side. What dies at random leaves sparse slabs, each with a slack of its own.
    /// What loses more is copied together ([`SpacePlan::loses_too_much`]), so that no more than a part of the blocks is lost.
    fn dead_loss(&self, mean: u64) -> u64 {
        let most = self.slab_bytes / LEFT_MAX_PART;
        let short = most.saturating_sub(mul_div(mean, self.slab_bytes, SHORT_FALLS_OVER));
        let sparse = self.per_other_record(FILE_SLACK, mean).min(SPARSE * FILE_SLACK);
        let left = self.per_other_record(FS_BLOCK, mean) / EDGES_PART + sparse;
        // Past the mean at which that is half of the most, it would fall steeply.
        let half = most / 2;
        let others = (half / (FS_BLOCK / EDGES_PART + FILE_SLACK))
            .max(half.saturating_sub(SPARSE * FILE_SLACK) * EDGES_PART / FS_BLOCK);
        let beyond = mean.saturating_sub(self.slab_bytes / (1 + others));
        let falls = half.saturating_sub(mul_div(beyond, self.slab_bytes, LEFT_FALLS_OVER));
        left.min(half).max(falls).max(short)
    }

    /// Whether a slab that lost `lost` bytes beside its rows, and in which `live` ones live of records of `mean` bytes, lost more
    /// than [`SpacePlan::capacity`] keeps back for it. While all is not free that was promised some slab did, but for what readers still
    /// hold, what cannot be copied, and rows of records that are shorter than [`ROWS_OF`].
    pub fn loses_too_much(&self, lost: u64, live: u64, mean: u64) -> bool {
        let own = FILE_SLACK + table_bytes(0, 0) + ROUNDED_ROWS * ROW as u64;
        lost > mul_div(self.dead_loss(mean) + own, live, self.slab_bytes)
    }

    /// `bytes` for each record of a slab.
    fn per_record(&self, bytes: u64, mean: u64) -> u64 {
        mul_div(bytes, self.slab_bytes, mean.max(1))
    }

    /// `bytes` for each record of a slab but one.
    fn per_other_record(&self, bytes: u64, mean: u64) -> u64 {
        self.per_record(bytes, mean).saturating_sub(bytes)
    }

    /// How long a slab must be for one record of `need` bytes.
    pub fn one_record_slab_bytes(need: u64, domain_bytes: u64) -> u64 {
        (BLOCK + need + table_bytes(1, domain_bytes)).next_multiple_of(4096)
    }

    /// Whether the longest chunk can be kept at all.
    pub fn fits(&self, len: u32) -> bool {
        len <= CHUNK_BYTES_MAX
            && Self::one_record_slab_bytes(footprint(len), 256) + FILE_SLACK
                <= (self.slabs_bytes - self.spare_bytes) / 2
    }
}

/// How long slabs are where nobody says: 1/256 of the limit, since one is kept for compaction; but not longer than 32 MiB
/// before there are 4,096 of them.
fn default_slab_bytes(size_max: u64) -> u64 {
    (size_max / 256).min(32 << 20).max(size_max / 4096).clamp(512 << 10, 256 << 20)
}

/// `a * b / c`, or the most there is.
fn mul_div(a: u64, b: u64, c: u64) -> u64 {
    u64::try_from(u128::from(a) * u128::from(b) / u128::from(c)).unwrap_or(u64::MAX)
}

/// Who has taken how much.
#[derive(Debug)]
pub(crate) struct Space {
    limit: u64,
    used: AtomicU64,
}

impl Space {
    pub fn new(limit: u64) -> Self {
        Space { limit, used: AtomicU64::new(0) }
    }

    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }

    /// What is free while `keep` stays untouched.
    pub fn free(&self, keep: u64) -> u64 {
        self.limit.saturating_sub(keep).saturating_sub(self.used())
    }

    /// What is taken beyond the limit (after it was lowered).
    pub fn excess(&self) -> u64 {
        self.used().saturating_sub(self.limit)
    }

    /// Takes `want` if that leaves `keep` free.
    pub fn take(&self, want: u64, keep: u64) -> bool {
        let fits = |used: u64| used.checked_add(want).filter(|&n| n.saturating_add(keep) <= self.limit);
        self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).is_ok()
    }

    /// Takes what is there already.
    pub fn add(&self, bytes: u64) {
        self.used.fetch_add(bytes, Ordering::AcqRel);
    }

    pub fn give(&self, bytes: u64) {
        let before = self.used.fetch_sub(bytes, Ordering::AcqRel);
        debug_assert!(before >= bytes, "I6: more space was given back than taken");
    }
}

/// The smallest record that did not fit, until something dies: so that a full tier refuses
/// newcomers without looking for room each time.
#[derive(Debug)]
pub(crate) struct FullMark {
    need: AtomicU64,
    deaths: AtomicU64,
}

impl FullMark {
    pub fn new() -> Self {
        FullMark { need: AtomicU64::new(u64::MAX), deaths: AtomicU64::new(0) }
    }

    /// A record of `need` bytes did not fit when `deaths` had died.
    pub fn note(&self, need: u64, deaths: u64) {
        let same = self.deaths.swap(deaths, Ordering::Relaxed) == deaths;
        if same {
            self.need.fetch_min(need, Ordering::Relaxed);
        } else {
            self.need.store(need, Ordering::Relaxed);
        }
    }

    /// Space came free in another way.
    pub fn clear(&self) {
        self.need.store(u64::MAX, Ordering::Relaxed);
    }

    /// Whether a record of `need` bytes is known not to fit.
    pub fn excludes(&self, need: u64, deaths: u64) -> bool {
        need >= self.need.load(Ordering::Relaxed) && self.deaths.load(Ordering::Relaxed) == deaths
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i6_the_parts_of_a_plan_never_exceed_the_limit() {
        let usual = (24..46).map(|shift| ((1u64 << shift) + 12345, None));
        let asked = [64 << 10, 300_000, 480 << 10, 503_808, 2_200_000].map(|slab| (18_000_000, Some(slab)));
        for (size, slab) in usual.chain(asked) {
            let p = SpacePlan::new(size, slab).expect("a plan");
            assert!(p.slabs_bytes + p.catalogue_bytes + p.aside_bytes + FIXED <= size);
            assert!(p.capacity(4 << 20) <= p.slabs_bytes - p.spare_bytes);
            for mean in [0, 64 << 10, 65 << 10, 200_000, 1 << 20, 5 << 20] {
                let rows = p.slab_bytes.div_ceil(mean.max(ROWS_OF));
                assert!(p.table_bytes_max(mean) >= table_bytes(rows, 0), "{size}: {rows} rows");
            }
            assert!(p.capacity(0) <= p.capacity(8 << 10) && p.capacity(8 << 10) <= p.capacity(1 << 20));
            for mean in (0..=2 << 20).step_by(4096) {
                let (now, next) = (p.capacity(mean), p.capacity(mean + 4096));
                assert!(now <= next && next - now <= size / 2000, "{size}: {now} at {mean}, then {next}");
            }
            if size >= 64 << 20 {
                assert!(p.capacity(0) * 100 >= size * 90, "{} of {size} is usable", p.capacity(0));
            }
        }
        assert!(SpacePlan::new(1 << 20, None).is_err());
        assert!(SpacePlan::new(1 << 30, Some(1 << 30)).is_err());
        assert!(SpacePlan::new(1 << 30, Some(1)).is_err());
    }

    #[test]
    fn i6_what_is_taken_never_exceeds_the_limit() {
        let s = Space::new(100);
        assert!(s.take(60, 0) && !s.take(50, 0) && !s.take(40, 1) && s.take(40, 0));
        s.give(30);
        assert_eq!((s.used(), s.free(10), s.excess()), (70, 20, 0));
        assert!(!s.take(u64::MAX, 0));
    }
}
