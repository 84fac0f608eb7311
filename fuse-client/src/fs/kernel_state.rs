//! The record of what the kernel may cache of a mount: inodes, and the names in the root directory.
//!
//! It takes the place of FUSE lookup counts, so that the mount can make the kernel forget a refused version.
//! A record costs one bit for a file or symlink. Records are only added: the mount does not follow FORGET
//! requests. A process that takes over a mount does not know what the kernel was told before, so it records
//! that every file may be known.

use super::inode::Ino;
use parking_lot::{Mutex, RwLock};
use std::{
    collections::BTreeSet,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// The entries in one block of bits, which takes 8 KiB of memory.
const BLOCK_ENTRIES: u64 = 1 << 16;
/// The most recorded names of the root directory. The kernel keeps a further name until its TTL ends, but its
/// inode is recorded and so forgotten.
const ROOT_NAMES_MAX: usize = 1 << 16;

type Block = Box<[AtomicU64]>;

/// The inodes and names that the mount told the kernel.
#[derive(Debug, Default)]
pub struct KernelState {
    /// The number of entries that all count as recorded.
    all_below: AtomicU64,
    files: RwLock<Vec<OnceLock<Block>>>,
    dirs: Mutex<BTreeSet<u64>>,
    names: Mutex<BTreeSet<Box<[u8]>>>,
}

impl KernelState {
    /// Records all files and symlinks of a version with `entries` entries.
    pub fn record_all(&self, entries: u64) {
        self.all_below.store(entries, Relaxed);
    }

    /// Records an inode that the mount tells the kernel.
    pub fn record_inode(&self, ino: u64) {
        let Some(Ino::Entry(ordinal)) = Ino::decode(ino) else {
            self.dirs.lock().insert(ino);
            return;
        };
        if ordinal < self.all_below.load(Relaxed) {
            return;
        }
        // A version has at most 2^48 entries, and a block is allocated at its first record.
        let Ok(block) = usize::try_from(ordinal / BLOCK_ENTRIES) else { return };
        let within = ordinal % BLOCK_ENTRIES;
        let set = |files: &[OnceLock<Block>]| {
            let Some(slot) = files.get(block) else { return false };
            let new = || (0..BLOCK_ENTRIES / 64).map(|_| AtomicU64::new(0)).collect();
            let word = &slot.get_or_init(new)[(within / 64) as usize];
            if word.load(Relaxed) >> (within % 64) & 1 == 0 {
                word.fetch_or(1 << (within % 64), Relaxed);
            }
            true
        };
        if !set(&self.files.read()) {
            let mut files = self.files.write();
            if files.len() <= block {
                files.resize_with(block + 1, OnceLock::new);
            }
            set(&files);
        }
    }

    /// Records a name that the mount tells the kernel. Keeps the names of the root directory only.
    pub fn record_name(&self, parent: u64, name: &[u8]) {
        if Ino::decode(parent) != Some(Ino::ROOT) || matches!(name, b"." | b"..") {
            return;
        }
        let mut names = self.names.lock();
        if names.len() < ROOT_NAMES_MAX && !names.contains(name) {
            names.insert(name.into());
        }
    }

    /// Returns every recorded inode, and the root directory. Holds no lock between two inodes.
    pub fn inodes(&self) -> impl Iterator<Item = u64> + '_ {
        let dirs: Vec<u64> = self.dirs.lock().iter().copied().collect();
        let blocks = self.files.read().len();
        let files = (0..blocks).flat_map(move |block| self.block(block));
        let all = (0..self.all_below.load(Relaxed)).filter_map(|ordinal| Ino::Entry(ordinal).number());
        Ino::ROOT.number().into_iter().chain(dirs).chain(all).chain(files)
    }

    fn block(&self, block: usize) -> Vec<u64> {
        let files = self.files.read();
        let Some(words) = files.get(block).and_then(OnceLock::get) else { return Vec::new() };
        let base = block as u64 * BLOCK_ENTRIES;
        let bits = (0..BLOCK_ENTRIES).filter(|i| words[(i / 64) as usize].load(Relaxed) >> (i % 64) & 1 == 1);
        bits.filter_map(|i| Ino::Entry(base + i).number()).collect()
    }

    /// Returns every recorded name, with the inode of its directory.
    #[must_use]
    pub fn names(&self) -> Vec<(u64, Box<[u8]>)> {
        let names = self.names.lock();
        let Some(root) = Ino::ROOT.number() else { return Vec::new() };
        names.iter().map(|n| (root, n.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_core::manifest::locate::DirId;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn recorded_inodes_are_returned_once_and_nothing_else_is(
            ordinals in proptest::collection::btree_set(0u64..300_000, 0..50),
            dirs in proptest::collection::btree_set((0u64..1000, 1u16..5), 0..10),
        ) {
            let state = KernelState::default();
            let mut want: BTreeSet<u64> = [1].into();
            let all = ordinals.iter().map(|o| Ino::Entry(*o));
            let dir = |(first, depth): &(u64, u16)| Ino::Dir(DirId { first: *first, depth: *depth });
            let all = all.chain(dirs.iter().map(dir));
            for ino in all {
                let number = ino.number().expect("in range");
                state.record_inode(number);
                state.record_inode(number);
                want.insert(number);
            }
            let got: Vec<u64> = state.inodes().collect();
            prop_assert_eq!(got.len(), want.len());
            prop_assert_eq!(got.into_iter().collect::<BTreeSet<u64>>(), want);
        }
    }

    #[test]
    fn a_successor_counts_all_files_as_known() {
        let state = KernelState::default();
        state.record_all(100);
        for ordinal in [3, 99, 100] {
            state.record_inode(Ino::Entry(ordinal).number().expect("in range"));
        }
        let entry = |ordinal| Ino::Entry(ordinal).number().expect("in range");
        let want: Vec<u64> = [1].into_iter().chain((0..=100).map(entry)).collect();
        assert_eq!(state.inodes().collect::<Vec<_>>(), want);
    }

    #[test]
    fn names_of_the_root_are_kept_and_bounded() {
        let state = KernelState::default();
        state.record_name(1, b"a");
        state.record_name(1, b"a");
        state.record_name(2, b"not of the root");
        assert_eq!(state.names(), [(1, Box::from(*b"a"))]);
        for i in 0..ROOT_NAMES_MAX + 10 {
            state.record_name(1, i.to_string().as_bytes());
        }
        assert_eq!(state.names().len(), ROOT_NAMES_MAX);
    }
}
