//! The versions that the mounts of this process read through the node store.

use crate::access::Access;
use crate::fs::read::ReadCounters;
use fletch_api::node::MountedVersion;
use fletch_core::Root;
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::BTreeMap,
    ops::Bound,
    sync::{Arc, atomic::Ordering::Relaxed},
};

/// A version that a mount of this process reads.
pub struct OwnVersion {
    /// The version, as the owner of the node store knows it.
    pub mounted: MountedVersion,
    /// The access check of the mount, which asks the server already.
    pub access: Arc<Access>,
    /// Counts the reads of the mount.
    pub reads: Arc<ReadCounters>,
    /// Whether the version gets a share of the disk before its first read.
    pub reserves_disk: bool,
}

#[derive(Default)]
struct State {
    /// Each version, with its number of reads when [`OwnVersions::newly_read`] last returned.
    all: BTreeMap<Root, (OwnVersion, u64)>,
    /// The version that [`OwnVersions::next`] returned last.
    last: Option<Root>,
}

/// All versions that the mounts of this process read.
#[derive(Default)]
pub struct OwnVersions(Mutex<State>);

impl OwnVersions {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each method leaves the map consistent, so a panic elsewhere does no harm.
        self.0.lock()
    }

    /// Adds the version of a mount, in place of one with the same root.
    pub fn add(&self, version: OwnVersion) {
        self.lock().all.insert(version.mounted.root, (version, 0));
    }

    /// Removes the version of a mount that ended.
    pub fn remove(&self, root: Root) {
        self.lock().all.remove(&root);
    }

    /// Returns whether the server lets this process read a version; `None` if no mount reads it.
    #[must_use]
    pub fn may_read(&self, root: Root) -> Option<bool> {
        self.lock().all.get(&root).map(|(version, _)| version.access.refused().is_none())
    }

    /// Returns the versions that get a share of the disk before their first read.
    #[must_use]
    pub fn reserving(&self) -> Vec<Root> {
        self.lock().all.iter().filter(|(_, (v, _))| v.reserves_disk).map(|(root, _)| *root).collect()
    }

    /// Returns the versions that were read since the last call.
    pub fn newly_read(&self) -> Vec<Root> {
        let mut state = self.lock();
        let read = state.all.iter_mut().filter_map(|(root, (version, before))| {
            let reads = version.reads.reads.load(Relaxed);
            (std::mem::replace(before, reads) != reads).then_some(*root)
        });
        read.collect()
    }

    /// Returns one version, at each call the one after the last; `None` while there is no version.
    pub fn next(&self) -> Option<MountedVersion> {
        let mut state = self.lock();
        let after = state.last.map_or(Bound::Unbounded, Bound::Excluded);
        let mut later = state.all.range((after, Bound::Unbounded));
        let mounted = later.next().or_else(|| state.all.iter().next()).map(|(_, (v, _))| v.mounted);
        state.last = mounted.map(|m| m.root);
        mounted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_core::Hash;

    fn version(seed: &str) -> OwnVersion {
        OwnVersion {
            mounted: MountedVersion { root: Root(Hash::of(seed.as_bytes())), footprint: 1 },
            access: Arc::default(),
            reads: Arc::default(),
            reserves_disk: seed == "a",
        }
    }

    #[test]
    fn each_version_is_named_in_turn_and_read_ones_once() {
        let all = OwnVersions::default();
        assert_eq!(all.next(), None);
        let (a, b) = (version("a"), version("b"));
        let (roots, reads) = ([a.mounted.root, b.mounted.root], Arc::clone(&b.reads));
        all.add(a);
        all.add(b);
        let mut named: Vec<Root> = (0..4).filter_map(|_| all.next()).map(|v| v.root).collect();
        assert_eq!((named[0], named[1]), (named[2], named[3]));
        named.truncate(2);
        assert!(roots.iter().all(|root| named.contains(root)));
        assert_eq!(all.reserving(), [roots[0]]);
        reads.reads.fetch_add(1, Relaxed);
        assert_eq!((all.newly_read(), all.newly_read()), (vec![roots[1]], vec![]));
        all.remove(roots[1]);
        assert_eq!((all.may_read(roots[0]), all.may_read(roots[1])), (Some(true), None));
    }
}
