//! The view: the ring, the number of its revision, and which members are up.
//!
//! I1. Two servers with equal views send a chunk to the same member.
//! I2. When a member goes down, only the chunks that it served move, and none does when it is back.

use super::{Placement, Ring, RingMember};
use crate::names::{MemberId, StoreKey};
use std::collections::BTreeSet;

/// A view of the cluster. It never changes; a newer one takes its place.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct View {
    number: u64,
    ring: Ring,
    up: BTreeSet<MemberId>,
    placement: Placement,
    placements_before: Vec<Placement>,
}

impl View {
    /// Returns a view. `number` grows with every change of the ring.
    #[must_use]
    pub fn new(number: u64, ring: Ring, up: BTreeSet<MemberId>) -> Self {
        let (placement, placements_before) = (ring.placement(), ring.placements_before());
        View { number, ring, up, placement, placements_before }
    }

    /// Returns the number of the ring's revision.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the ring.
    #[must_use]
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Returns the members that are up, in the ring or outside.
    #[must_use]
    pub fn up(&self) -> &BTreeSet<MemberId> {
        &self.up
    }

    /// Whether a member is up.
    #[must_use]
    pub fn is_up(&self, id: &MemberId) -> bool {
        self.up.contains(id)
    }

    /// Returns the members of the ring that are not up.
    pub fn silent(&self) -> impl Iterator<Item = &MemberId> {
        self.ring.members().iter().map(|m| &m.id).filter(|id| !self.is_up(id))
    }

    /// Returns the members that serve a chunk, best first: those of the chunk's ranking that are up.
    pub fn serving(&self, key: &StoreKey) -> impl Iterator<Item = &RingMember> {
        let ranked = self.placement.owners(key, self.ring.members().len());
        ranked.into_iter().filter_map(|m| {
            let id = MemberId::new(&m.id).ok()?;
            self.ring.get(&id).filter(|_| self.is_up(&id))
        })
    }

    /// Returns the member that serves a chunk: the first of the chunk's ranking that is up.
    #[must_use]
    pub fn owner(&self, key: &StoreKey) -> Option<&RingMember> {
        self.serving(key).next()
    }

    /// Returns the members that are up and owned a chunk before the last changes of the ring, the latest
    /// first. The owner of now may be among them, and members outside of the ring.
    #[must_use]
    pub fn former_owners(&self, key: &StoreKey) -> Vec<MemberId> {
        let mut former = Vec::new();
        for placement in &self.placements_before {
            let owner = placement.owner(key).and_then(|m| MemberId::new(&m.id).ok());
            former.extend(owner.filter(|id| self.is_up(id) && !former.contains(id)));
        }
        former
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Domain, Hash, cluster::Weight};
    use proptest::prelude::*;

    fn id(i: usize) -> MemberId {
        MemberId::new(&format!("srv-{i}")).expect("a name")
    }

    fn ring(weights: &[u32]) -> Ring {
        weights.iter().enumerate().fold(Ring::default(), |ring, (i, weight)| {
            let member = RingMember { id: id(i), url: format!("http://{i}"), weight: 0, zone: None };
            ring.joined(&member, Weight::Exact(*weight), true).expect("a change")
        })
    }

    fn key(i: u64) -> StoreKey {
        StoreKey { domain: Domain::default_domain(), hash: Hash::of(&i.to_le_bytes()) }
    }

    proptest! {
        /// I2, and members without weight serve nothing.
        #[test]
        fn only_chunks_of_a_silent_member_move(
            weights in proptest::collection::vec(0u32..5, 1..7),
            down: usize,
            keys in proptest::collection::vec(any::<u64>(), 1..40),
        ) {
            let all: BTreeSet<MemberId> = (0..weights.len()).map(id).collect();
            let down = id(down % weights.len());
            let rest: BTreeSet<MemberId> = all.iter().filter(|i| **i != down).cloned().collect();
            let before = View::new(7, ring(&weights), all);
            let after = View::new(7, ring(&weights), rest);
            for k in keys {
                let (old, new) = (before.owner(&key(k)), after.owner(&key(k)));
                prop_assert!(new.is_none_or(|m| m.id != down && m.weight > 0));
                if old.is_some_and(|m| m.id != down) {
                    prop_assert_eq!(old, new);
                }
                prop_assert_eq!(old.is_none(), weights.iter().all(|w| *w == 0));
            }
            prop_assert_eq!(after.silent().collect::<Vec<_>>(), vec![&down]);
        }

        /// After a member joined, a chunk that moved had its former owner among the others.
        #[test]
        fn the_former_owner_is_that_of_the_view_before(
            weights in proptest::collection::vec(1u32..5, 2..7),
            keys in proptest::collection::vec(any::<u64>(), 1..40),
        ) {
            let all: BTreeSet<MemberId> = (0..weights.len()).map(id).collect();
            let before = View::new(7, ring(&weights[1..]), all.clone());
            let after = View::new(8, ring(&weights), all.clone());
            let last = id(weights.len() - 1);
            let previous = View::new(8, ring(&weights[..weights.len() - 1]), all);
            for k in keys {
                let owner = after.owner(&key(k)).map(|m| m.id.clone());
                let former = after.former_owners(&key(k)).into_iter().next();
                prop_assert_eq!(&former, &previous.owner(&key(k)).map(|m| m.id.clone()));
                prop_assert!(former == owner || owner == Some(last.clone()));
            }
            prop_assert_eq!(before.serving(&key(0)).count(), weights.len() - 1);
        }

        /// After several members joined at once, the owner before all of them is among the former owners.
        #[test]
        fn the_owner_before_several_joins_is_a_former_owner(
            weights in proptest::collection::vec(1u32..5, 5..8),
            keys in proptest::collection::vec(any::<u64>(), 1..40),
        ) {
            let all: BTreeSet<MemberId> = (0..weights.len()).map(id).collect();
            let (first, after) = (ring(&weights[..2]), ring(&weights));
            let (first, after) = (View::new(7, first, all.clone()), View::new(8, after, all));
            for k in keys {
                let owner = first.owner(&key(k)).map(|m| m.id.clone());
                let former = after.former_owners(&key(k));
                prop_assert!(former.contains(&owner.clone().expect("an owner")), "{:?} {:?}", owner, former);
                let unique: BTreeSet<_> = former.iter().collect();
                prop_assert_eq!(unique.len(), former.len());
            }
        }
    }
}
