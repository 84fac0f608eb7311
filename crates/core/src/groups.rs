//! Proves a part of a chunk under the chunk's own name.
//!
//! BLAKE3 hashes a tree: the name of a chunk is made of the hashes of its *groups*, [`GROUP_BYTES`] each. Who
//! knows these hashes can check a few groups without the rest of the chunk. The hashes prove nothing by
//! themselves: a [`GroupHashes`] exists only if they make the chunk's name. So they may come from anywhere.
//!
//! A group is a subtree of the tree because its length is a power of two of BLAKE3's own 1 KiB chunks, and
//! because it begins at a multiple of its length. ("Verified streaming" in section 6.4 of the BLAKE3 paper.)
//!
//! A [`Hasher`] for each group takes 6 % longer than one for the chunk, because the upper nodes of a group do
//! not fill the lanes of the processor. So groups that lie side by side are hashed at once, by the function
//! that a `Hasher` itself is made of ([`Platform::hash_many`]). The crate does not promise that one: its
//! version is pinned, and the tests here compare every hash with that of a `Hasher`
//! (`docs/adr/0098-groups-are-hashed-side-by-side.md`).

use crate::{Hash, hash::context};
use blake3::{
    Hasher, IncrementCounter,
    hazmat::{ChainingValue, HasherExt as _, Mode, merge_subtrees_non_root, merge_subtrees_root},
    platform::Platform,
};
use std::{fmt, ops::Range, sync::Arc};

/// The length of a group in bytes. The last group of a chunk may be shorter.
pub const GROUP_BYTES: usize = 16 << 10;
/// A shorter chunk is always read whole: that costs no more than a few groups and their hashes.
pub const GROUPED_BYTES_MIN: u32 = 256 << 10;
/// The length of the hash of a group in bytes.
pub const GROUP_HASH_BYTES: usize = 32;

/// Returns how many groups a chunk of `len` bytes has.
#[must_use]
pub fn groups_of(len: u32) -> usize {
    (len as usize).div_ceil(GROUP_BYTES)
}

/// Returns how many bytes the hashes of the groups of a chunk of `len` bytes take.
#[must_use]
pub fn group_hash_bytes(len: u32) -> u32 {
    // A group is longer than its hash.
    u32::try_from(groups_of(len) * GROUP_HASH_BYTES).unwrap_or(len)
}

/// The length of BLAKE3's own chunks in bytes.
const LEAF_BYTES: usize = blake3::CHUNK_LEN;
/// The initial chaining value, and the domain flags, of section 2.2 of the BLAKE3 paper.
const IV: [u32; 8] =
    [0x6A09_E667, 0xBB67_AE85, 0x3C6E_F372, 0xA54F_F53A, 0x510E_527F, 0x9B05_688C, 0x1F83_D9AB, 0x5BE0_CD19];
const CHUNK_START: u8 = 1;
const CHUNK_END: u8 = 2;
const PARENT: u8 = 4;

/// Hashes that do not make the name of their chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the hashes of the groups do not make the name of the chunk {0}")]
pub struct WrongGroups(pub Hash);

/// The hashes of all groups of a chunk. They make the chunk's name.
#[derive(Clone, PartialEq, Eq)]
pub struct GroupHashes {
    chunk: Hash,
    len: u32,
    hashes: Box<[ChainingValue]>,
}

impl fmt::Debug for GroupHashes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupHashes({}, {} groups)", self.chunk.short(), self.hashes.len())
    }
}

impl GroupHashes {
    /// Returns the hashes of the groups of a chunk of `len` bytes: 32 bytes a group, in order.
    ///
    /// # Errors
    /// [`WrongGroups`] if they do not make the chunk's name, or if the chunk has less than two groups.
    pub fn check(chunk: Hash, len: u32, hashes: &[u8]) -> Result<Self, WrongGroups> {
        let (hashes, rest) = hashes.as_chunks::<GROUP_HASH_BYTES>();
        if !rest.is_empty() || hashes.len() != groups_of(len) || root_of(hashes) != Some(chunk) {
            return Err(WrongGroups(chunk));
        }
        Ok(GroupHashes { chunk, len, hashes: hashes.into() })
    }

    /// Returns the chunk's name.
    #[must_use]
    pub fn chunk(&self) -> Hash {
        self.chunk
    }

    /// Returns the chunk's length in bytes.
    #[must_use]
    pub fn chunk_len(&self) -> u32 {
        self.len
    }

    /// Returns the hashes, 32 bytes a group.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.hashes.as_flattened()
    }

    /// Returns the run of groups that has the bytes `range` of the chunk. `None` for no bytes, or for bytes
    /// past the end.
    #[must_use]
    pub fn run(self: &Arc<Self>, range: &Range<usize>) -> Option<GroupRun> {
        if range.is_empty() || range.end > self.len as usize {
            return None;
        }
        let groups = range.start / GROUP_BYTES..range.end.div_ceil(GROUP_BYTES);
        Some(GroupRun { of: Arc::clone(self), groups })
    }
}

/// Groups of a chunk that follow each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupRun {
    of: Arc<GroupHashes>,
    groups: Range<usize>,
}

impl GroupRun {
    /// Returns the hashes of all groups of the chunk.
    #[must_use]
    pub fn of(&self) -> &Arc<GroupHashes> {
        &self.of
    }

    /// Returns the bytes of the chunk that the run has.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.groups.start * GROUP_BYTES..(self.groups.end * GROUP_BYTES).min(self.of.len as usize)
    }

    /// Returns the length of the run in bytes: at most that of a chunk.
    #[must_use]
    pub fn len(&self) -> u32 {
        u32::try_from(self.range().len()).unwrap_or(u32::MAX)
    }

    /// Returns false: a run has at least one group.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Returns whether the run is all of its chunk.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.groups == (0..self.of.hashes.len())
    }

    /// Returns a name for the run. No chunk has it, and no other run.
    #[must_use]
    pub fn name(&self) -> Hash {
        let mut hasher = Hasher::new_derive_key(context::GROUP_RUN);
        hasher.update(self.of.chunk.as_bytes());
        for bound in [self.groups.start, self.groups.end] {
            hasher.update(&(bound as u64).to_le_bytes());
        }
        hasher.finalize().into()
    }

    /// Returns whether `bytes`, from byte `at` of the run on, are the bytes of these groups. `at` must be a
    /// multiple of [`GROUP_BYTES`].
    pub(crate) fn has(&self, at: usize, bytes: &[u8]) -> bool {
        let first = self.groups.start + at / GROUP_BYTES;
        let Some(hashes) = self.of.hashes.get(first..self.groups.end) else { return false };
        let groups = bytes.len().div_ceil(GROUP_BYTES);
        groups <= hashes.len() && hashes_of_groups(first, bytes) == hashes[..groups]
    }
}

/// Hashes a chunk group by group, so that the hashes of its groups remain.
#[derive(Debug, Default)]
pub struct GroupHasher {
    /// The hashes of the groups that are closed.
    hashes: Vec<ChainingValue>,
    /// The group that is not closed, if there is one, and its length so far.
    open: Hasher,
    filled: usize,
}

impl GroupHasher {
    /// Hashes the next bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            // Closed only when another one follows: a chunk of one group has no inner hash.
            if self.filled == GROUP_BYTES {
                self.close();
            }
            let number = self.hashes.len();
            if number > 0 && self.filled == 0 && bytes.len() >= GROUP_BYTES {
                let (whole, rest) = bytes.split_at(bytes.len() - bytes.len() % GROUP_BYTES);
                self.hashes.extend(hashes_of_groups(number, whole));
                bytes = rest;
                continue;
            }
            let (group, rest) = bytes.split_at(bytes.len().min(GROUP_BYTES - self.filled));
            bytes = rest;
            if self.filled == 0 {
                self.open.set_input_offset((number * GROUP_BYTES) as u64);
            }
            self.open.update(group);
            self.filled += group.len();
        }
    }

    fn close(&mut self) {
        self.hashes.push(self.open.finalize_non_root());
        // `Hasher::reset` keeps the offset.
        self.open = Hasher::new();
        self.filled = 0;
    }

    /// Returns the value of the bytes so far as a subtree, at the beginning of a longer tree.
    #[must_use]
    pub fn first_subtree(&self) -> ChainingValue {
        let last = (self.filled > 0).then(|| self.open.finalize_non_root());
        match halves(self.hashes.iter().copied().chain(last).collect()).as_slice() {
            [left, right] => merge_subtrees_non_root(left, right, Mode::Hash),
            _ => self.open.finalize_non_root(),
        }
    }

    /// Returns the hash of all bytes, and the hashes of the groups. A chunk of one group has none.
    #[must_use]
    pub fn finish(mut self) -> (Hash, Option<GroupHashes>) {
        let len = u32::try_from(self.hashes.len() * GROUP_BYTES + self.filled);
        if !self.hashes.is_empty() && self.filled > 0 {
            self.close();
        }
        // The first group is open as long as it is the only one.
        let Some(chunk) = root_of(&self.hashes) else { return (self.open.finalize().into(), None) };
        let groups = len.ok().map(|len| GroupHashes { chunk, len, hashes: self.hashes.into() });
        (chunk, groups)
    }
}

/// Returns the hashes of the groups from `first` on that have these bytes. The last group may be shorter.
fn hashes_of_groups(first: usize, bytes: &[u8]) -> Vec<ChainingValue> {
    let (whole, last) = bytes.split_at(bytes.len() - bytes.len() % GROUP_BYTES);
    let mut hashes = hashes_of_whole_groups(first, whole);
    if !last.is_empty() {
        let mut hasher = Hasher::new();
        hasher.set_input_offset((first * GROUP_BYTES + whole.len()) as u64);
        hasher.update(last);
        hashes.push(hasher.finalize_non_root());
    }
    hashes
}

fn hashes_of_whole_groups(first: usize, bytes: &[u8]) -> Vec<ChainingValue> {
    let leaves: Vec<&[u8; LEAF_BYTES]> = bytes.as_chunks().0.iter().collect();
    let mut values = vec![[0; GROUP_HASH_BYTES]; leaves.len()];
    Platform::detect().hash_many(
        &leaves,
        &IV,
        (first * GROUP_BYTES / LEAF_BYTES) as u64,
        IncrementCounter::Yes,
        0,
        CHUNK_START,
        CHUNK_END,
        values.as_flattened_mut(),
    );
    for _ in 0..(GROUP_BYTES / LEAF_BYTES).ilog2() {
        values = parents(&values);
    }
    values
}

/// Returns the values of the nodes above these neighbours. An odd one is a neighbour of those.
fn parents(values: &[ChainingValue]) -> Vec<ChainingValue> {
    let (pairs, odd) = values.as_flattened().as_chunks::<{ 2 * GROUP_HASH_BYTES }>();
    let pairs: Vec<_> = pairs.iter().collect();
    let mut above = vec![[0; GROUP_HASH_BYTES]; pairs.len()];
    let out = above.as_flattened_mut();
    Platform::detect().hash_many(&pairs, &IV, 0, IncrementCounter::No, PARENT, 0, 0, out);
    above.extend(odd.as_chunks().0);
    above
}

/// Returns the name that the hashes of at least two groups make.
fn root_of(hashes: &[ChainingValue]) -> Option<Hash> {
    match halves(hashes.to_vec()).as_slice() {
        [left, right] => Some(merge_subtrees_root(left, right, Mode::Hash).into()),
        _ => None,
    }
}

/// Returns the values of the two halves of a tree with these groups, or of less if it has less.
fn halves(mut values: Vec<ChainingValue>) -> Vec<ChainingValue> {
    while values.len() > 2 {
        values = parents(&values);
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        Hasher::new().update(b"groups").finalize_xof().fill(&mut bytes);
        bytes
    }

    fn hashes(bytes: &[u8]) -> Option<GroupHashes> {
        let mut hasher = GroupHasher::default();
        hasher.update(bytes);
        let (hash, groups) = hasher.finish();
        assert_eq!(hash, Hash::of(bytes));
        for piece in [1000, GROUP_BYTES, 100_000] {
            let mut hasher = GroupHasher::default();
            bytes.chunks(piece).for_each(|piece| hasher.update(piece));
            if !bytes.is_empty() {
                let alone = Hasher::new().update(bytes).finalize_non_root();
                assert_eq!(hasher.first_subtree(), alone, "pieces of {piece}");
            }
            assert_eq!(hasher.finish(), (hash, groups.clone()), "pieces of {piece}");
        }
        groups
    }

    #[test]
    fn the_hashes_of_groups_make_the_plain_hash() {
        for len in [GROUP_BYTES + 1, 2 * GROUP_BYTES, 3 * GROUP_BYTES - 1, 5 * GROUP_BYTES, 300_000, 4 << 20]
        {
            let bytes = content(len);
            let of = hashes(&bytes).expect("two groups or more");
            let len = u32::try_from(len).expect("small");
            assert_eq!((of.chunk(), of.chunk_len()), (Hash::of(&bytes), len));
            assert_eq!(GroupHashes::check(of.chunk(), len, of.as_bytes()), Ok(of.clone()));
            assert_eq!(of.as_bytes().len(), groups_of(len) * GROUP_HASH_BYTES);
        }
        for len in [0, 1, GROUP_BYTES] {
            assert_eq!(hashes(&content(len)), None, "one group proves nothing that its name does not");
        }
    }

    #[test]
    fn groups_side_by_side_have_the_hashes_that_each_has_alone() {
        for (first, len) in [(0, 1), (0, GROUP_BYTES), (1, 5 * GROUP_BYTES + 77), (1000, 300 * GROUP_BYTES)] {
            let bytes = content(len);
            let alone = (first..).zip(bytes.chunks(GROUP_BYTES)).map(|(number, group)| {
                let mut hasher = Hasher::new();
                hasher.set_input_offset((number * GROUP_BYTES) as u64);
                hasher.update(group).finalize_non_root()
            });
            assert!(
                hashes_of_groups(first, &bytes).into_iter().eq(alone),
                "{len} bytes from group {first} on"
            );
        }
    }

    #[test]
    fn i1_hashes_that_do_not_make_the_name_are_refused() {
        let bytes = content(300_000);
        let of = hashes(&bytes).expect("many groups");
        let check = |chunk, len, hashes: &[u8]| GroupHashes::check(chunk, len, hashes);
        let wrong = Err(WrongGroups(of.chunk()));
        for bit in [0, 77, of.as_bytes().len() * 8 - 1] {
            let mut flipped = of.as_bytes().to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(check(of.chunk(), 300_000, &flipped), wrong);
        }
        let all = of.as_bytes();
        for few in [&all[..all.len() - 32], &all[32..], &all[..all.len() - 1], &[]] {
            assert_eq!(check(of.chunk(), 300_000, few), wrong);
        }
        assert_eq!(check(of.chunk(), 600_000, all), wrong, "another length");
        let other = Hash::of(b"another chunk");
        assert_eq!(check(other, 300_000, all), Err(WrongGroups(other)));
    }

    #[test]
    fn a_run_has_its_groups_and_no_others() {
        let bytes = content(300_000);
        let of = Arc::new(hashes(&bytes).expect("many groups"));
        let run = of.run(&(20_000..40_000)).expect("inside");
        assert_eq!((run.range(), run.len(), run.is_whole()), (16_384..49_152, 32_768, false));
        assert!(run.has(0, &bytes[run.range()]));
        assert!(run.has(GROUP_BYTES, &bytes[32_768..49_152]), "the second group alone");
        assert!(!run.has(0, &bytes[32_768..49_152]), "another group");
        assert!(!run.has(0, &bytes[16_384..65_536]), "more than the run");
        let mut flipped = bytes[run.range()].to_vec();
        flipped[20_000] ^= 4;
        assert!(!run.has(0, &flipped));
        let last = of.run(&(299_999..300_000)).expect("inside");
        assert_eq!(last.range(), 294_912..300_000);
        assert!(last.has(0, &bytes[last.range()]) && !last.has(0, &bytes[294_912..299_999]));
        assert!(of.run(&(0..300_000)).expect("all").is_whole());
        assert!(of.run(&(5..5)).is_none() && of.run(&(0..300_001)).is_none());
        let names = [run.name(), last.name(), of.run(&(0..1)).expect("inside").name()];
        assert!(names[0] != names[1] && names[1] != names[2] && !names.contains(&of.chunk()));
        assert_eq!(run.name(), of.run(&(16_384..32_769)).expect("inside").name(), "the same groups");
    }
}
