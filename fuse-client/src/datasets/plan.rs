//! Decides which versions to mount and which to unmount. Pure: the caller passes `now`.
//!
//! 1. A version that a name needs stays mounted, and so does a version that a link still leads to.
//! 2. A version that no name needs stays mounted for `keep`, and for as long as a program uses it. It gives
//!    way earlier if the limit leaves no room for a version that a name needs.
//! 3. A version that the server refuses is kept for nobody.
//! 4. Names get room in their order: first `latest` of each dataset by name, then other tags by name.

use fletch_core::Root;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};
use tokio::time::Instant;

/// A mounted version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MountedState {
    /// When names stopped needing the version; `None` while a name needs it.
    pub unneeded_since: Option<Instant>,
    /// Whether the server refuses the version.
    pub is_refused: bool,
}

/// What to do about versions. The caller tries to unmount; the kernel refuses while a program uses a mount.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Versions to unmount, if no program uses them.
    pub unmount: Vec<Root>,
    /// Further versions to unmount one by one, oldest first, until there is room for `mount`.
    pub make_room: Vec<Root>,
    /// Versions to mount, in the order of their names.
    pub mount: Vec<Root>,
}

/// Plans one pass. `needed` has the roots of names in the order of rule 4; `linked` has the roots to which
/// links lead now.
#[must_use]
pub fn plan(
    needed: &[Root],
    linked: &BTreeSet<Root>,
    mounted: &BTreeMap<Root, MountedState>,
    now: Instant,
    keep: Duration,
) -> Plan {
    let is_needed = |root: &Root| needed.contains(root) || linked.contains(root);
    let mut idle: Vec<(Instant, Root, bool)> = mounted
        .iter()
        .filter(|(root, _)| !is_needed(root))
        .map(|(root, state)| (state.unneeded_since.unwrap_or(now), *root, state.is_refused))
        .collect();
    idle.sort();
    let mut plan = Plan::default();
    for (since, root, is_refused) in idle {
        let expired = is_refused || now.saturating_duration_since(since) >= keep;
        if expired { plan.unmount.push(root) } else { plan.make_room.push(root) }
    }
    for root in needed {
        if !mounted.contains_key(root) && !plan.mount.contains(root) {
            plan.mount.push(*root);
        }
    }
    plan
}

/// Returns how many versions must go so that `wanted` further ones fit.
#[must_use]
pub fn excess(mounted: usize, wanted: usize, mounts_max: usize) -> usize {
    (mounted + wanted).saturating_sub(mounts_max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_core::Hash;

    const KEEP: Duration = Duration::from_secs(60);

    fn root(name: &str) -> Root {
        Root(Hash::of(name.as_bytes()))
    }

    fn state(unneeded_since: Option<Instant>) -> MountedState {
        MountedState { unneeded_since, is_refused: false }
    }

    #[test]
    fn an_old_version_is_kept_and_gives_way_oldest_first() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let (a, b, c) = (root("a"), root("b"), root("c"));
        let mounted = BTreeMap::from([(a, state(Some(at(10)))), (b, state(Some(at(5))))]);
        let kept = plan(&[c], &BTreeSet::new(), &mounted, at(20), KEEP);
        assert_eq!(kept, Plan { unmount: vec![], make_room: vec![b, a], mount: vec![c] });
        let later = plan(&[c], &BTreeSet::new(), &mounted, at(66), KEEP);
        assert_eq!((later.unmount, later.make_room), (vec![b], vec![a]));
        assert_eq!((excess(2, 1, 2), excess(2, 1, 3), excess(0, 5, 2)), (1, 0, 3));
    }

    #[test]
    fn needed_and_linked_versions_stay_and_refused_ones_go() {
        let now = Instant::now();
        let (a, b, c) = (root("a"), root("b"), root("c"));
        let refused = MountedState { unneeded_since: None, is_refused: true };
        let mounted = BTreeMap::from([(a, state(None)), (b, state(Some(now))), (c, refused)]);
        // The tag of `b` moved to a version that is not mounted yet, so its link still leads to `b`.
        let plan = plan(&[a, a, root("d"), root("d")], &BTreeSet::from([b]), &mounted, now, Duration::ZERO);
        assert_eq!(plan, Plan { unmount: vec![c], make_room: vec![], mount: vec![root("d")] });
    }
}
