//! Packed layouts: which small files lie together in which chunk (`docs/FORMATS.md`, "Packs").
//!
//! Owns the order of a pack, the cuts between its groups, the place of every member in its
//! chunk, and what is kept of a parent's chunks. Reads and writes no bytes: who calls it
//! assembles and hashes. Plans need paths and sizes only, so that a pack reads each file once.
//!
//! Invariants:
//! 1. the grouping is a function of the *set* of (path, size, sample) and the parameters: not
//!    of the order of arrival, nor of content, nor of what was packed before;
//! 2. a chunk holds all small entries of an interval of BLAKE3(path) and no others, so it is a
//!    uniform sample of the version; a sample is never torn over chunks while it fits in one;
//! 3. adding, removing or resizing one sample rewrites at most what [`PackParams::group_bytes`]
//!    and the sample itself hold;
//! 4. no chunk exceeds [`super::CHUNK_BYTES_MAX`]; members begin at multiples of
//!    [`PackParams::align`], zeros between them, nothing after the last.
//!
//! ```text
//! entries (path order) → Keyer → Item → sort by (key, ordinal) → Packer → ChunkPlan
//!                                                     Keeper (with a parent) ↓
//!                                        Same │ Write │ Keep + what lies outside → Packer
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

/// What the grouping of a packed layout depends on, beside its slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PackParams {
    /// No group of more than one sample is longer, in bytes. The mean is about 0.7 of it.
    pub group_bytes: u32,
    /// Members begin at multiples of this many bytes, a power of two.
    pub align: u32,
}

/// No pack may align its members to more bytes.
pub const ALIGN_BYTES_MAX: u32 = 64 << 10;

impl PackParams {
    /// The pack everybody shares: 6 MiB at most, 4.2 MiB on average; what the kernel can map.
    pub const DEFAULT: PackParams = PackParams { group_bytes: 6 << 20, align: 512 };

    /// Whether a pack can be made with them; what is wrong otherwise.
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

    /// The bytes that a member of `len` takes in a group, up to where the next may begin.
    #[must_use]
    pub fn room(&self, len: u32) -> u64 {
        u64::from(len).next_multiple_of(u64::from(self.align.max(1)))
    }
}
