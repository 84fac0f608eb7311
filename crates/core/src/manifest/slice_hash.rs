//! The hashes of the slices of a large file, from which the hash of the whole file follows.
//!
//! BLAKE3 is a tree hash, and a slice of 4 MiB is a complete subtree. A slice has its own hash as a chunk,
//! and the value of its subtree in the tree of the file. The file's hash is folded from these values
//! ([`blake3::hazmat`], "subtrees"), so that nobody reads the file in one go.

use super::SLICE_BYTES_DEFAULT;
use crate::{
    Hash,
    groups::{GroupHasher, GroupHashes},
};
pub use blake3::hazmat::ChainingValue;
use blake3::hazmat::{HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};

/// The two hashes of one slice of a large file.
#[derive(Debug, Clone, Copy)]
pub struct SliceHash {
    /// BLAKE3 of the slice alone.
    pub chunk: Hash,
    /// The value of its subtree in the tree of the whole file.
    pub subtree: ChainingValue,
}

/// Computes both hashes of a slice.
#[derive(Debug)]
pub struct SliceHasher {
    chunk: GroupHasher,
    /// Not for the first slice: its groups are those of the file.
    subtree: Option<blake3::Hasher>,
}

impl SliceHasher {
    /// Starts the slice at `offset` of the file, in bytes, a multiple of 4 MiB.
    #[must_use]
    pub fn new(offset: u64) -> Self {
        let subtree = (offset > 0).then(|| {
            let mut hasher = blake3::Hasher::new();
            hasher.set_input_offset(offset);
            hasher
        });
        SliceHasher { chunk: GroupHasher::default(), subtree }
    }

    /// Hashes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.chunk.update(bytes);
        if let Some(subtree) = &mut self.subtree {
            subtree.update(bytes);
        }
    }

    /// Returns both hashes, and those of the groups of the slice.
    #[must_use]
    pub fn finish(self) -> (SliceHash, Option<GroupHashes>) {
        let first = || self.chunk.first_subtree();
        let subtree = self.subtree.map_or_else(first, |subtree| subtree.finalize_non_root());
        let (chunk, groups) = self.chunk.finish();
        (SliceHash { chunk, subtree }, groups)
    }
}

/// Returns the number of slices of a large file of `size` bytes.
#[must_use]
pub fn slice_count(size: u64) -> u64 {
    size.div_ceil(u64::from(SLICE_BYTES_DEFAULT))
}

/// Returns offset and length of slice `i` of a file of `size` bytes.
#[must_use]
pub fn slice_at(size: u64, i: u64) -> (u64, u32) {
    let step = u64::from(SLICE_BYTES_DEFAULT);
    let offset = i * step;
    (offset, u32::try_from((size - offset).min(step)).unwrap_or(SLICE_BYTES_DEFAULT))
}

/// Returns the hash of a file from the hashes of its slices, in order, at least two.
///
/// # Panics
/// With fewer than two slices.
#[must_use]
pub fn file_hash(slices: &[SliceHash]) -> Hash {
    // The left subtree holds the largest power of two of slices that leaves something.
    let cut = slices.len().next_power_of_two() / 2;
    merge_subtrees_root(&subtree(&slices[..cut]), &subtree(&slices[cut..]), Mode::Hash).into()
}

fn subtree(slices: &[SliceHash]) -> ChainingValue {
    if let [one] = slices {
        return one.subtree;
    }
    let cut = slices.len().next_power_of_two() / 2;
    merge_subtrees_non_root(&subtree(&slices[..cut]), &subtree(&slices[cut..]), Mode::Hash)
}
