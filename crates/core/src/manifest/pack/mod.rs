//! Packed layouts: which small files are grouped in which chunk (`docs/FORMATS-pack.md`).
//!
//! Owns the order of a pack, the cuts between its groups, the offset of every member in its chunk, and the
//! choice of the parent's chunks that stay. Reads and writes no bytes: the caller assembles and hashes
//! chunks. Plans need paths and sizes only, so a pack reads each file once.
//!
//! Invariants:
//! 1. The grouping is a function of the *set* of (path, size, sample) and the parameters. It depends neither
//!    on the order of arrival, nor on content, nor on what was packed before.
//! 2. A chunk holds all small entries of an interval of BLAKE3(path) and no others, so it is a uniform sample
//!    of the version. A sample that fits in one chunk is never divided.
//! 3. Adding, removing or resizing one sample rewrites at most [`PackParams::group_bytes`] bytes and the
//!    sample itself.
//! 4. No chunk exceeds [`super::CHUNK_BYTES_MAX`]. Members begin at multiples of [`PackParams::align`], with
//!    zeros between them and nothing after the last.
//!
//! ```text
//! entries (path order) → Keyer → Item → sort by (key, ordinal) → Packer → ChunkPlan
//!                                                     Keeper (with a parent) ↓
//!                                        Same │ Write │ Keep + members outside → Packer
//! ```

mod group;
mod keep;
mod key;
#[cfg(test)]
mod tests;

pub use group::{BadItem, ChunkPlan, Member, Packer};
pub use keep::{Fate, KeepRule, Keeper, ParentLocation, Survey};
pub use key::{GroupKey, Item, Keyer, Placing, SORT_ROW_BYTES};

use super::CHUNK_BYTES_MAX;
use serde::{Deserialize, Serialize};

/// The parameters of the grouping of a packed layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PackParams {
    /// The longest group of more than one sample, in bytes. The mean is about 0.7 of it.
    pub group_bytes: u32,
    /// Members begin at multiples of this many bytes, a power of two.
    pub align: u32,
}

/// The largest alignment of members, in bytes.
pub const ALIGN_BYTES_MAX: u32 = 64 << 10;

impl PackParams {
    /// The default: groups of 6 MiB at most, 4.2 MiB on average; members aligned so that a mount can map
    /// them.
    pub const DEFAULT: PackParams = PackParams { group_bytes: 6 << 20, align: 512 };

    /// Checks that a pack can be made with these parameters.
    ///
    /// # Errors
    /// The rule that they break, in words.
    pub fn check(&self) -> Result<(), &'static str> {
        if !self.align.is_power_of_two() || self.align > ALIGN_BYTES_MAX {
            return Err("align is not a power of two up to 64 KiB");
        }
        if self.group_bytes < self.align || self.group_bytes > CHUNK_BYTES_MAX {
            return Err("group_bytes is less than align or more than 16 MiB");
        }
        Ok(())
    }

    /// Returns the bytes that a member of `len` bytes takes in a group, up to the next possible member.
    #[must_use]
    pub fn room(&self, len: u32) -> u64 {
        u64::from(len).next_multiple_of(u64::from(self.align.max(1)))
    }
}
