//! The ring: the list of members that own chunks. It changes only when membership changes for good.
//!
//! I1. The members are sorted by id, and each id occurs once.
//! I2. A change that changes nothing is `None`. Nobody writes it, so a restart keeps the number of the view.
//! I3. `before` is the list before the last change of ownership, and `earlier` has the lists before that, the
//!     latest first. A new URL is no such change.
//! I4. A drained member stays out of the ring until it starts again.

use super::{Member, Placement};
use crate::names::MemberId;
use serde::{Deserialize, Serialize};

/// The most members of a cluster.
pub const MEMBERS_MAX: usize = 256;

/// A member that owns chunks in proportion to its weight.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingMember {
    /// Its name, unique in the cluster.
    pub id: MemberId,
    /// The URL by which clients reach it.
    pub url: String,
    /// Its share of the chunks, relative to the other members: MiB of cache. With 0 it owns nothing.
    pub weight: u32,
    /// Where it runs, such as a rack or a zone of a cloud.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
}

/// The most lists of `earlier`: after so many changes at once, chunks are still found at their former owners.
pub const EARLIER_MAX: usize = 6;

/// A member of an earlier list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EarlierMember {
    /// Its name.
    pub id: MemberId,
    /// Its share of the chunks.
    pub weight: u32,
}

/// The weight with which a member joins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// The weight that an operator set.
    Exact(u32),
    /// The size of the cache in MiB. It differs a little between starts where the size is a percentage, so a
    /// member keeps the weight that it has in the ring within a tenth.
    About(u32),
    /// The cache could not be opened. The member keeps the weight that it has in the ring, or has none.
    Unknown,
}

impl Weight {
    fn beside(self, old: Option<u32>) -> u32 {
        match (self, old) {
            (Weight::Exact(weight), _) | (Weight::About(weight), None) => weight,
            (Weight::About(weight), Some(old)) if weight.abs_diff(old) > old / 10 => weight,
            (Weight::About(_) | Weight::Unknown, Some(old)) => old,
            (Weight::Unknown, None) => 0,
        }
    }
}

/// The members that own chunks, the list before the last change, and the members that were drained.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Parts")]
pub struct Ring {
    members: Vec<RingMember>,
    before: Vec<RingMember>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    earlier: Vec<Vec<EarlierMember>>,
    drained: Vec<MemberId>,
}

/// The parts of a ring as they are at rest, in any order.
#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
struct Parts {
    members: Vec<RingMember>,
    before: Vec<RingMember>,
    earlier: Vec<Vec<EarlierMember>>,
    drained: Vec<MemberId>,
}

impl From<Parts> for Ring {
    fn from(mut parts: Parts) -> Self {
        for list in [&mut parts.members, &mut parts.before] {
            list.sort_by(|a, b| a.id.cmp(&b.id));
            list.dedup_by(|a, b| a.id == b.id);
        }
        parts.drained.sort();
        parts.drained.dedup();
        parts.earlier.truncate(EARLIER_MAX);
        let Parts { members, before, earlier, drained } = parts;
        Ring { members, before, earlier, drained }
    }
}

impl Ring {
    /// Returns the members, sorted by id.
    #[must_use]
    pub fn members(&self) -> &[RingMember] {
        &self.members
    }

    /// Returns the members before the last change of ownership, sorted by id.
    #[must_use]
    pub fn before(&self) -> &[RingMember] {
        &self.before
    }

    /// Returns the drained members, sorted.
    #[must_use]
    pub fn drained(&self) -> &[MemberId] {
        &self.drained
    }

    /// Returns a member.
    #[must_use]
    pub fn get(&self, id: &MemberId) -> Option<&RingMember> {
        self.members.binary_search_by(|m| m.id.cmp(id)).ok().map(|at| &self.members[at])
    }

    /// Returns the weight of a member, 0 outside of the ring, and the weights of all members in sum.
    #[must_use]
    pub fn weights(&self, id: &MemberId) -> (u64, u64) {
        let all = self.members.iter().map(|m| u64::from(m.weight)).sum();
        (self.get(id).map_or(0, |m| m.weight.into()), all)
    }

    /// Returns the placement of chunks on the members.
    #[must_use]
    pub fn placement(&self) -> Placement {
        placement_of(&self.members)
    }

    /// Returns the placements of chunks before the last changes of ownership, the latest first.
    #[must_use]
    pub fn placements_before(&self) -> Vec<Placement> {
        let of = |m: &EarlierMember| Member { id: m.id.to_string(), weight: f64::from(m.weight) };
        let earlier = self.earlier.iter().map(|list| Placement::new(list.iter().map(of)));
        [placement_of(&self.before)].into_iter().chain(earlier).collect()
    }

    /// Returns the ring with a member in it. `starts`: the member has just started, which ends its drain.
    ///
    /// The weight in `member` is ignored; `weight` decides.
    #[must_use]
    pub fn joined(&self, member: &RingMember, weight: Weight, starts: bool) -> Option<Self> {
        if self.drained.contains(&member.id) && !starts {
            return None;
        }
        let weight = weight.beside(self.get(&member.id).map(|m| m.weight));
        let mut next = self.clone();
        next.drained.retain(|id| *id != member.id);
        next.members.retain(|m| m.id != member.id);
        let at = next.members.partition_point(|m| m.id < member.id);
        next.members.insert(at, RingMember { weight, ..member.clone() });
        self.changed_to(next)
    }

    /// Returns the ring without a member that stays up.
    #[must_use]
    pub fn with_drained(&self, id: &MemberId) -> Option<Self> {
        self.get(id)?;
        let mut next = self.clone();
        next.members.retain(|m| m.id != *id);
        let at = next.drained.partition_point(|d| d < id);
        next.drained.insert(at, id.clone());
        self.changed_to(next)
    }

    /// Returns the ring without members that are gone.
    #[must_use]
    pub fn without(&self, gone: &[MemberId]) -> Option<Self> {
        let mut next = self.clone();
        next.members.retain(|m| !gone.contains(&m.id));
        next.drained.retain(|id| !gone.contains(id));
        self.changed_to(next)
    }

    fn changed_to(&self, mut next: Self) -> Option<Self> {
        let owners = |ring: &Ring| ring.members.iter().map(|m| (m.id.clone(), m.weight)).collect::<Vec<_>>();
        if owners(self) != owners(&next) {
            let list = self.before.iter().map(|m| EarlierMember { id: m.id.clone(), weight: m.weight });
            next.earlier.insert(0, list.collect());
            next.earlier.retain(|list| !list.is_empty());
            next.earlier.truncate(EARLIER_MAX);
            next.before = self.members.clone();
        }
        (next != *self).then_some(next)
    }
}

fn placement_of(members: &[RingMember]) -> Placement {
    Placement::new(members.iter().map(|m| Member { id: m.id.to_string(), weight: f64::from(m.weight) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id(i: u8) -> MemberId {
        MemberId::new(&format!("srv-{i}")).expect("a name")
    }

    fn member(i: u8) -> RingMember {
        RingMember { id: id(i), url: format!("http://10.0.0.{i}:7380"), weight: 0, zone: None }
    }

    fn ring(ids: &[u8]) -> Ring {
        ids.iter().fold(Ring::default(), |ring, i| {
            ring.joined(&member(*i), Weight::Exact(100), false).expect("a change")
        })
    }

    proptest! {
        /// I1 to I4 hold after any changes.
        #[test]
        fn changes_keep_the_invariants(
            steps in proptest::collection::vec((0u8..4, 0u8..6, 0u32..300), 0..40),
        ) {
            let mut ring = Ring::default();
            for (what, i, weight) in steps {
                let next = match what {
                    0 => ring.joined(&member(i), Weight::About(weight), false),
                    1 => ring.joined(&member(i), Weight::Exact(weight), true),
                    2 => ring.with_drained(&id(i)),
                    _ => ring.without(&[id(i)]),
                };
                let Some(next) = next else { continue };
                prop_assert_ne!(&next, &ring);
                prop_assert!(next.members.windows(2).all(|w| w[0].id < w[1].id));
                prop_assert!(next.drained.windows(2).all(|w| w[0] < w[1]));
                prop_assert!(next.drained.iter().all(|d| next.get(d).is_none()));
                if next.members != ring.members {
                    prop_assert_eq!(&next.before, &ring.members);
                }
                let text = serde_json::to_string(&next).expect("JSON");
                prop_assert_eq!(&serde_json::from_str::<Ring>(&text).expect("a ring"), &next);
                ring = next;
            }
        }

        /// I2: a member that starts again as it was changes nothing, also with a slightly other disk.
        #[test]
        fn a_restart_changes_nothing(weight in 100u32..1_000_000, other in -9i64..=9) {
            let first = Ring::default().joined(&member(1), Weight::About(weight), true).expect("a change");
            let now = u32::try_from(i64::from(weight) * (100 + other) / 100).expect("positive");
            prop_assert_eq!(first.joined(&member(1), Weight::About(now), true), None);
            prop_assert_eq!(first.joined(&member(1), Weight::Unknown, true), None);
        }
    }

    #[test]
    fn a_drained_member_joins_again_only_when_it_starts() {
        let drained = ring(&[1, 2]).with_drained(&id(1)).expect("a change");
        assert_eq!(
            (drained.members().len(), drained.before().len(), drained.drained()),
            (1, 2, &[id(1)][..])
        );
        assert_eq!(drained.joined(&member(1), Weight::Exact(100), false), None);
        let again = drained.joined(&member(1), Weight::Exact(100), true).expect("a change");
        assert_eq!((again.members().len(), again.drained().len()), (2, 0));
        assert_eq!(drained.with_drained(&id(1)), None, "it is drained already");
        assert_eq!(drained.without(&[id(1)]).expect("a change").drained().len(), 0);
    }

    #[test]
    fn the_lists_before_the_last_changes_stay_known() {
        let all = ring(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let lengths: Vec<usize> = all.earlier.iter().map(Vec::len).collect();
        assert_eq!((all.before.len(), lengths), (8, vec![7, 6, 5, 4, 3, 2]));
        assert_eq!(all.placements_before().len(), 1 + EARLIER_MAX);
        let first = ring(&[1]);
        let text = serde_json::to_string(&first).expect("JSON");
        assert!(!text.contains("earlier"), "older builds have none: {text}");
    }

    #[test]
    fn another_url_or_zone_moves_no_ownership() {
        let first = ring(&[1, 2]);
        let moved = RingMember { url: "http://other".into(), zone: Some("b".into()), ..member(2) };
        let next = first.joined(&moved, Weight::Unknown, true).expect("a change");
        assert_eq!((next.before(), next.members()[1].weight), (first.before(), 100));
    }

    #[test]
    fn weights_follow_the_disk() {
        let weight = |w: Weight, old| w.beside(old);
        assert_eq!(weight(Weight::About(200), Some(100)), 200);
        assert_eq!(weight(Weight::About(0), Some(100)), 0, "a member that lost its disk");
        assert_eq!(weight(Weight::About(64), Some(0)), 64, "a member that got a disk");
        assert_eq!(weight(Weight::Exact(101), Some(100)), 101);
        assert_eq!(weight(Weight::Unknown, None), 0);
    }
}
