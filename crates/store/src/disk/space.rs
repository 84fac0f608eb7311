//! Space (I6): the bytes that the directory may occupy, and the bytes that are reserved.
//!
//! Bytes are counted as the file system counts them (`st_blocks`, not lengths) and reserved *before* anything
//! is written. A new slab reserves all that it can ever grow to. It gives back what it does not need when it
//! is sealed, punched or unlinked. The catalogue, damaged catalogues and directories have a fixed part of the
//! limit.

use super::layout::{BLOCK, CHUNK_BYTES_MAX, ROW, SLAB_BYTES_MAX, footprint, table_bytes};
use std::sync::atomic::{AtomicU64, Ordering};

/// Most bytes that a file occupies beyond its length: a partial block and a block of extents.
pub(crate) const FILE_SLACK: u64 = 8 << 10;
/// File systems give space back in blocks of this many bytes.
pub(crate) const FS_BLOCK: u64 = 4096;
/// Smallest limit of a tier.
pub(crate) const SIZE_MIN: u64 = 16 << 20;
/// Footprint below which capacity reserves no more space for a record's row: one row for each 64 KiB.
const ROW_FOOTPRINT_MIN: u64 = 64 << 10;
/// Most that rounding adds to a table, in rows.
///
/// Capacity counts it apart, so that capacity does not jump with one row less.
const ROUNDING_ROWS: u64 = 2;
/// Most sparse slabs that random deaths leave beside each slab that would be full.
const SPARSE_SLABS_MAX: u64 = 2;
/// Capacity reserves one in this many of the blocks at the edges of holes.
/// Slabs that lost more are compacted together (ADR 47).
const EDGE_BLOCKS_PART: u64 = 12;
/// Capacity reserves at most one part in this many of a slab for what dead records leave behind.
///
/// Short records are compacted together.
const LOSS_PART_MAX: u64 = 66;
/// Slab length at which the reserve falls by one byte for each byte that the mean record is longer.
///
/// The reserve of other slab lengths falls in proportion, so that capacity does not jump with the mean.
const LOSS_FALLS_OVER: u64 = 16 << 20;
/// The same for the reserve of short records, which falls from a mean of 0 on.
const SHORT_LOSS_FALLS_OVER: u64 = (9 << 20) + (1 << 18);
/// Bytes for the lock file, directories and the file that `probe` writes.
const FIXED: u64 = 64 << 10;

/// The division of a limit. Pure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SpacePlan {
    /// Bytes that all slabs together may occupy.
    pub slabs_bytes: u64,
    /// The usual length of a slab. A record that does not fit gets a longer slab of its own.
    pub slab_bytes: u64,
    /// The part of `slabs_bytes` that only compaction may use.
    pub spare_bytes: u64,
    /// Bytes that the catalogue may occupy.
    pub catalogue_bytes: u64,
    /// Bytes that damaged catalogues, kept aside, may occupy together.
    pub aside_bytes: u64,
}

impl SpacePlan {
    /// Divides `size_max` for slabs of `slab_bytes`, or of [`default_slab_bytes`].
    pub fn new(size_max: u64, slab_bytes: Option<u64>) -> Result<Self, String> {
        if size_max < SIZE_MIN {
            return Err(format!(
                "a cache of {size_max} bytes is too small; give it at least {SIZE_MIN} bytes"
            ));
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

    /// Returns the footprints that fit, for records of the mean footprint `mean`.
    ///
    /// Leaves out the spare slab, tables, and what dead records leave behind. Short records need longer
    /// tables and leave more. The footprints fit once slabs that lost too much were compacted
    /// ([`SpacePlan::loses_too_much`], ADR 47).
    pub fn capacity(&self, mean: u64) -> u64 {
        let per_slab = self.slab_bytes + FILE_SLACK;
        // The last slab may be a short one.
        let quarters = (self.slabs_bytes - self.spare_bytes) / (per_slab / 4);
        let all = quarters * ((self.slab_bytes - self.table_bytes_max(mean) - self.dead_loss(mean)) / 4);
        all.saturating_sub(self.newcomer_bytes(mean))
    }

    /// Returns the bytes that must be free for a newcomer beside its own length.
    ///
    /// The newcomer may need a new slab, which has at least a quarter of the usual length.
    pub fn newcomer_bytes(&self, mean: u64) -> u64 {
        self.slab_bytes.saturating_sub(mean) / 4
    }

    /// Returns the most bytes that a slab's table takes, if no record is shorter than [`ROW_FOOTPRINT_MIN`].
    fn table_bytes_max(&self, mean: u64) -> u64 {
        table_bytes(0, 0)
            + self.per_record(ROW as u64, mean.max(ROW_FOOTPRINT_MIN))
            + ROUNDING_ROWS * ROW as u64
    }

    /// Returns the bytes of a slab that capacity reserves for what dead records leave behind.
    ///
    /// Dead records are punched out. Each live record between dead ones keeps up to one block of the file
    /// system, half of one on either side. Random deaths also leave sparse slabs, each with a slack of its
    /// own. A slab that loses more is compacted ([`SpacePlan::loses_too_much`]), so that only a part of these
    /// blocks is lost.
    fn dead_loss(&self, mean: u64) -> u64 {
        let most = self.slab_bytes / LOSS_PART_MAX;
        let short = most.saturating_sub(mul_div(mean, self.slab_bytes, SHORT_LOSS_FALLS_OVER));
        let sparse = self.per_other_record(FILE_SLACK, mean).min(SPARSE_SLABS_MAX * FILE_SLACK);
        let left = self.per_other_record(FS_BLOCK, mean) / EDGE_BLOCKS_PART + sparse;
        // Above the mean at which the reserve is half of the most, it would fall steeply.
        let half = most / 2;
        let others = (half / (FS_BLOCK / EDGE_BLOCKS_PART + FILE_SLACK))
            .max(half.saturating_sub(SPARSE_SLABS_MAX * FILE_SLACK) * EDGE_BLOCKS_PART / FS_BLOCK);
        let beyond = mean.saturating_sub(self.slab_bytes / (1 + others));
        let falls = half.saturating_sub(mul_div(beyond, self.slab_bytes, LOSS_FALLS_OVER));
        left.min(half).max(falls).max(short)
    }

    /// Whether a slab lost more than [`SpacePlan::capacity`] reserves for it.
    ///
    /// `lost` are the bytes lost beside its rows; `live_bytes` and `mean` describe its live records. While
    /// less space is free than capacity promises, some slab lost too much. Exceptions: space that readers
    /// still hold, records that cannot be copied, and rows of records shorter than [`ROW_FOOTPRINT_MIN`].
    pub fn loses_too_much(&self, lost: u64, live_bytes: u64, mean: u64) -> bool {
        let own = FILE_SLACK + table_bytes(0, 0) + ROUNDING_ROWS * ROW as u64;
        lost > mul_div(self.dead_loss(mean) + own, live_bytes, self.slab_bytes)
    }

    /// Returns `bytes` for each record of a slab.
    fn per_record(&self, bytes: u64, mean: u64) -> u64 {
        mul_div(bytes, self.slab_bytes, mean.max(1))
    }

    /// Returns `bytes` for each record of a slab except one.
    fn per_other_record(&self, bytes: u64, mean: u64) -> u64 {
        self.per_record(bytes, mean).saturating_sub(bytes)
    }

    /// Returns the length of a slab for one record of `need` bytes.
    pub fn one_record_slab_bytes(need: u64, domain_bytes: u64) -> u64 {
        (BLOCK + need + table_bytes(1, domain_bytes)).next_multiple_of(4096)
    }

    /// Whether a chunk of `len` bytes fits into this tier at all.
    pub fn fits(&self, len: u32) -> bool {
        len <= CHUNK_BYTES_MAX
            && Self::one_record_slab_bytes(footprint(len), 256) + FILE_SLACK
                <= (self.slabs_bytes - self.spare_bytes) / 2
    }
}

/// Returns the default length of a slab: 1/256 of the limit, since one slab is kept for compaction.
///
/// Slabs grow beyond 32 MiB only when there are 4,096 of them.
fn default_slab_bytes(size_max: u64) -> u64 {
    (size_max / 256).min(32 << 20).max(size_max / 4096).clamp(512 << 10, 256 << 20)
}

/// Returns `a * b / c`, or `u64::MAX` if that is larger.
fn mul_div(a: u64, b: u64, c: u64) -> u64 {
    u64::try_from(u128::from(a) * u128::from(b) / u128::from(c)).unwrap_or(u64::MAX)
}

/// The reserved part of a limit.
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

    /// Returns the bytes that are free while `keep` stays free.
    pub fn free(&self, keep: u64) -> u64 {
        self.limit.saturating_sub(keep).saturating_sub(self.used())
    }

    /// Returns the bytes that are reserved beyond the limit, after the limit was lowered.
    pub fn excess(&self) -> u64 {
        self.used().saturating_sub(self.limit)
    }

    /// Reserves `want` bytes if that leaves `keep` free.
    pub fn take(&self, want: u64, keep: u64) -> bool {
        let fits = |used: u64| used.checked_add(want).filter(|&n| n.saturating_add(keep) <= self.limit);
        self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).is_ok()
    }

    /// Reserves bytes that a file occupies already, even beyond the limit.
    pub fn add(&self, bytes: u64) {
        self.used.fetch_add(bytes, Ordering::AcqRel);
    }

    /// Gives reserved bytes back.
    pub fn give(&self, bytes: u64) {
        let before = self.used.fetch_sub(bytes, Ordering::AcqRel);
        debug_assert!(before >= bytes, "I6: more space was given back than taken");
    }
}

/// The smallest record that did not fit, until a record dies.
///
/// With it a full tier refuses newcomers without looking for space each time.
#[derive(Debug)]
pub(crate) struct FullMark {
    need: AtomicU64,
    deaths: AtomicU64,
}

impl FullMark {
    pub fn new() -> Self {
        FullMark { need: AtomicU64::new(u64::MAX), deaths: AtomicU64::new(0) }
    }

    /// Notes that a record of `need` bytes did not fit while `deaths` records had died.
    pub fn note(&self, need: u64, deaths: u64) {
        let same = self.deaths.swap(deaths, Ordering::Relaxed) == deaths;
        if same {
            self.need.fetch_min(need, Ordering::Relaxed);
        } else {
            self.need.store(need, Ordering::Relaxed);
        }
    }

    /// Forgets the mark: space came free without a death.
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
                let rows = p.slab_bytes.div_ceil(mean.max(ROW_FOOTPRINT_MIN));
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
