use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// A store that obeys, and checks every invariant at every action.
struct Store<'a> {
    order: &'a [u32],
    bytes: &'a [u64],
    budget: u64,
    held: BTreeMap<u32, bool>,
    loads: Vec<u32>,
    served: Vec<bool>,
}

impl Store<'_> {
    fn next_use(&self, unit: u32) -> Option<u64> {
        (0u64..).zip(self.order).find(|(p, u)| **u == unit && !self.served[*p as usize]).map(|x| x.0)
    }

    fn obey(&mut self, actions: &mut Vec<CacheAction>) {
        for action in actions.drain(..) {
            match action {
                CacheAction::Load(u) => {
                    assert!(self.held.insert(u, false).is_none(), "loaded twice");
                    self.loads.push(u);
                    let sum: u64 = self.held.keys().map(|&u| self.bytes[u as usize]).sum();
                    assert!(sum <= self.budget || self.held.len() == 1, "I1: {sum} of {}", self.budget);
                }
                CacheAction::Evict(u) => {
                    let uses = self.held.keys().map(|&u| (u, self.next_use(u)));
                    // Only units that are never used again can tie.
                    let oracle = furthest(uses).expect("something is held");
                    assert_eq!(self.next_use(u), self.next_use(oracle), "the furthest next use leaves");
                    assert_eq!(self.held.remove(&u), Some(true), "I3: evicted before its use");
                }
            }
        }
    }
}

/// The fewest loads that any rule can achieve with room for `room` units, fetching on demand.
fn belady(order: &[u32], room: usize) -> usize {
    let (mut held, mut loads) = (Vec::new(), 0);
    for (p, u) in order.iter().enumerate() {
        if held.contains(u) {
            continue;
        }
        loads += 1;
        if held.len() == room {
            let next = |v: &u32| order[p..].iter().position(|x| x == v).unwrap_or(usize::MAX);
            let worst = (0..held.len()).max_by_key(|&i| next(&held[i])).expect("room for one");
            held.swap_remove(worst);
        }
        held.push(*u);
    }
    loads
}

proptest! {
    /// I1 to I4, with any budget, and positions served a little out of order.
    #[test]
    fn promises(
        order in proptest::collection::vec(0u32..12, 1..120),
        bytes in proptest::collection::vec(1u64..9, 12),
        budget in 1u64..60,
        early in proptest::collection::vec(0usize..5, 120),
    ) {
        let uses = Uses::new(order.clone(), 12).expect("uses");
        let mut p = Prefetch::new(uses, bytes.clone(), budget);
        let mut store = Store {
            order: &order,
            bytes: &bytes,
            budget,
            held: BTreeMap::new(),
            loads: Vec::new(),
            served: vec![false; order.len()],
        };
        let mut actions = Vec::new();
        let mut round = 0;
        while p.head() < order.len() as u64 {
            p.advance(u64::MAX, |_| false, &mut actions);
            store.obey(&mut actions);
            prop_assert!(p.holds(order[p.head() as usize]), "I4");
            // Serve a position whose unit is held, not always the first.
            let ready: Vec<u64> =
                (p.head()..p.ahead()).filter(|&q| !store.served[q as usize]).take(5).collect();
            let q = ready[early[round % early.len()].min(ready.len() - 1)];
            let unit = order[q as usize];
            prop_assert_eq!(store.held.insert(unit, true).is_some(), true, "served from what is held");
            store.served[q as usize] = true;
            p.serve(q);
            round += 1;
        }
        // I2: the first loads are the first uses.
        let mut seen = Vec::new();
        for u in &store.loads {
            if !seen.contains(u) {
                seen.push(*u);
            }
        }
        let mut first = Vec::new();
        for u in &order {
            if !first.contains(u) {
                first.push(*u);
            }
        }
        prop_assert_eq!(seen, first);
    }

    /// On demand, without looking ahead, it loads no more than the best possible rule.
    #[test]
    fn on_demand_it_is_belady(order in proptest::collection::vec(0u32..9, 1..100), room in 1usize..8) {
        let uses = Uses::new(order.clone(), 9).expect("uses");
        let mut p = Prefetch::new(uses, vec![1; 9], room as u64);
        let mut actions = Vec::new();
        for q in 0..order.len() as u64 {
            p.advance(q + 1, |_| false, &mut actions);
            p.serve(q);
        }
        let loads = actions.iter().filter(|a| matches!(a, CacheAction::Load(_))).count();
        prop_assert_eq!(loads, belady(&order, room));
    }

    /// With lost units, and units that are cached anyway: every position is served, no unit is evicted
    /// unread, and no more positions are read directly than units were lost.
    #[test]
    fn losses_cost_a_read_and_no_wait(
        order in proptest::collection::vec(0u32..10, 1..80),
        budget in 1u64..8,
        here in 0u32..10,
        lose in proptest::collection::vec(any::<Option<u32>>(), 80),
    ) {
        let uses = Uses::new(order.clone(), 10).expect("uses");
        let mut p = Prefetch::new(uses, vec![1; 10], budget);
        let (mut actions, mut used, mut losses, mut without) = (Vec::new(), [true; 10], 0, 0);
        for q in 0..order.len() as u64 {
            if let Some(u) = lose[q as usize] {
                let u = u % 10;
                losses += u32::from(p.holds(u));
                used[u as usize] |= p.holds(u);
                p.lost(u);
            }
            p.advance(u64::MAX, |u| u == here, &mut actions);
            for action in actions.drain(..) {
                match action {
                    CacheAction::Load(u) => {
                        prop_assert!(u != here);
                        used[u as usize] = false;
                    }
                    CacheAction::Evict(u) => prop_assert!(used[u as usize], "unit {} in vain", u),
                }
            }
            let unit = order[q as usize];
            without += u32::from(unit != here && !p.holds(unit));
            prop_assert!(p.held_bytes() <= budget);
            used[unit as usize] = true;
            p.serve(q);
        }
        prop_assert!(without <= losses, "{} of {}", without, losses);
    }
}

#[test]
fn a_smaller_budget_evicts_nothing_that_is_due() {
    let order = vec![0, 1, 2, 3, 0, 1, 2, 3];
    let mut p = Prefetch::new(Uses::new(order, 4).expect("uses"), vec![1; 4], 4);
    let mut actions = Vec::new();
    p.advance(2, |_| false, &mut actions);
    assert_eq!(actions, [CacheAction::Load(0), CacheAction::Load(1)]);
    actions.clear();
    p.set_budget(1, &mut actions);
    assert!(actions.is_empty(), "both are due: {actions:?}");
    p.serve(0);
    p.advance(u64::MAX, |_| false, &mut actions);
    assert!(actions.is_empty(), "still over the budget, and unit 1 is due");
    p.serve(1);
    p.advance(u64::MAX, |_| false, &mut actions);
    assert_eq!(actions, [CacheAction::Evict(1), CacheAction::Evict(0), CacheAction::Load(2)]);
}

#[test]
fn impossible_uses_are_rejected() {
    assert_eq!(Uses::new(vec![0, 3], 3).err(), Some(BadUses::Unit { position: 1, unit: 3, units: 3 }));
    assert!(Uses::new(Vec::new(), 0).expect("uses").is_empty());
}

/// Returns the victim of Belady's rule: of `(unit, position of its next use)`, the unit whose next use is
/// furthest. A unit without a next use goes first. Of equal units the lowest goes.
fn furthest<C: Copy + Ord>(candidates: impl IntoIterator<Item = (C, Option<u64>)>) -> Option<C> {
    candidates
        .into_iter()
        .max_by_key(|&(unit, next)| (next.unwrap_or(u64::MAX), std::cmp::Reverse(unit)))
        .map(|c| c.0)
}

#[test]
fn the_furthest_next_use_leaves() {
    assert_eq!(furthest([(1, Some(5)), (2, Some(9)), (3, Some(7))]), Some(2));
    assert_eq!(furthest([(1, Some(5)), (2, None), (0, None)]), Some(0));
    assert_eq!(furthest::<u32>([]), None);
}
