//! The placement of chunks: which member of a view owns a chunk.
//!
//! Weighted rendezvous hashing of (domain, hash) over the members (Thaler and Ravishankar, "Using name-based
//! mappings to increase hit rates", 1998; weights after Schindelhauer and Schomaker, "Weighted distributed
//! hash tables", 2005).
//!
//! I1. Members own chunks in proportion to their weights.
//! I2. When a member leaves, only the chunks that it owned move. When a member joins, only the chunks that it
//!     now owns move.
//! I3. The answer depends on the members, not on their order.
//!
//! The score of a member is weight / −ln u. The number u in (0, 1) comes from the first word of BLAKE3 in
//! key-derivation mode over `domain length u64 · domain · hash 32 · id length u64 · id`. Of two equal scores,
//! the lesser id wins. Machines whose logarithms differ in the last digit could disagree then; that costs one
//! fetch and never a wrong byte.

use crate::names::StoreKey;

/// The context string of format 1.
pub const CONTEXT: &str = "fletch 2026 owner 1";

/// A server that may own chunks.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// Its name in the view.
    pub id: String,
    /// Its share, relative to the other members: its bytes of cache. With 0 or less it owns nothing.
    pub weight: f64,
}

/// The members of one view.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Placement {
    members: Vec<Member>,
}

impl Placement {
    /// Returns the placement of a view. Ignores members whose weight is not a positive finite number.
    #[must_use]
    pub fn new(members: impl IntoIterator<Item = Member>) -> Self {
        let mut members: Vec<Member> =
            members.into_iter().filter(|m| m.weight.is_finite() && m.weight > 0.0).collect();
        members.sort_by(|a, b| a.id.cmp(&b.id));
        Placement { members }
    }

    /// Returns the `n` best owners of a chunk, best first: the owner, and the members that replace it.
    #[must_use]
    pub fn owners(&self, key: &StoreKey, n: usize) -> Vec<&Member> {
        let mut prefix = blake3::Hasher::new_derive_key(CONTEXT);
        let domain = key.domain.as_str().as_bytes();
        prefix.update(&(domain.len() as u64).to_le_bytes()).update(domain).update(key.hash.as_bytes());
        let score = |m: &Member| {
            let mut h = prefix.clone();
            h.update(&(m.id.len() as u64).to_le_bytes()).update(m.id.as_bytes());
            let mut word = [0; 8];
            word.copy_from_slice(&h.finalize().as_bytes()[..8]);
            // 53 bits and a half, so that u is neither 0 nor 1.
            let u = ((u64::from_le_bytes(word) >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
            m.weight / -u.ln()
        };
        let mut scored: Vec<(f64, &Member)> = self.members.iter().map(|m| (score(m), m)).collect();
        // A stable sort: of equal scores the lesser id is first.
        scored.sort_by(|a, b| b.0.total_cmp(&a.0));
        scored.into_iter().take(n).map(|s| s.1).collect()
    }

    /// Returns the owner of a chunk; `None` when there is no member.
    #[must_use]
    pub fn owner(&self, key: &StoreKey) -> Option<&Member> {
        self.owners(key, 1).first().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Domain, Hash};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn key(i: u64) -> StoreKey {
        StoreKey { domain: Domain::default_domain(), hash: Hash::of(&i.to_le_bytes()) }
    }

    fn members(weights: &[f64]) -> Vec<Member> {
        weights.iter().enumerate().map(|(i, &weight)| Member { id: format!("server-{i}"), weight }).collect()
    }

    #[test]
    fn members_own_by_weight() {
        let weights = [1.0, 2.0, 0.5, 4.0];
        let placement = Placement::new(members(&weights));
        let mut count: BTreeMap<&str, f64> = BTreeMap::new();
        let n = 20_000u64;
        for i in 0..n {
            *count.entry(&placement.owner(&key(i)).expect("a member").id).or_default() += 1.0;
        }
        let sum: f64 = weights.iter().sum();
        for (m, w) in members(&weights).iter().zip(weights) {
            let p = w / sum;
            let sigma = (n as f64 * p * (1.0 - p)).sqrt();
            let got = count[m.id.as_str()];
            assert!((got - n as f64 * p).abs() < 5.0 * sigma, "{}: {got} of {n}, weight {w}", m.id);
        }
    }

    proptest! {
        /// I2, I3; and the second owner is the member that would own the chunk without the first.
        #[test]
        fn only_what_must_moves(
            weights in proptest::collection::vec(0.1f64..5.0, 2..7),
            gone: usize,
            keys in proptest::collection::vec(any::<u64>(), 1..40),
        ) {
            let all = members(&weights);
            let gone = gone % all.len();
            let mut rest = all.clone();
            let leaver = rest.remove(gone);
            rest.reverse();
            let (before, after) = (Placement::new(all), Placement::new(rest));
            for k in keys {
                let owners = before.owners(&key(k), 2);
                let now = after.owner(&key(k)).expect("a member");
                if owners[0].id == leaver.id {
                    prop_assert_eq!(&now.id, &owners[1].id);
                } else {
                    prop_assert_eq!(&now.id, &owners[0].id);
                }
            }
        }
    }

    #[test]
    fn answers_are_fixed() {
        let placement = Placement::new(members(&[1.0, 2.0, 3.0]));
        let owners: Vec<&str> =
            (0..6).map(|i| placement.owner(&key(i)).expect("a member").id.as_str()).collect();
        let fixed = [2, 1, 0, 2, 1, 1].map(|i| format!("server-{i}"));
        assert_eq!(owners, fixed);
        let other = StoreKey { domain: Domain::new("other").expect("a name"), ..key(0) };
        let ids = |k: &StoreKey| placement.owners(k, 3).iter().map(|m| m.id.clone()).collect::<Vec<_>>();
        assert_ne!(ids(&other), ids(&key(0)));
    }

    #[test]
    fn a_member_without_weight_owns_nothing() {
        let placement = Placement::new(members(&[0.0, f64::NAN, -1.0, f64::INFINITY]));
        assert_eq!(placement.owner(&key(1)), None);
        assert!(Placement::default().owners(&key(1), 2).is_empty());
    }
}
