use super::*;
use crate::{
    Hash, Root,
    plan::{Tail, unit_map::UnitMap},
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn key(seed: u64) -> OrderKey {
    OrderKey::new(Root(Hash::of(b"root")), Hash::of(b"plan"), seed, 3)
}

proptest! {
    /// I1, I2: steps are the same sets for every number of ranks, and together exactly the plan.
    #[test]
    fn steps_are_the_same_sets_for_all_worlds(
        n in 1u64..400,
        per in 1u32..6,
        tail in 0usize..2,
        copies in 1u32..4,
        seed: u64,
    ) {
        let tail = [Tail::Drop, Tail::Pad][tail];
        let batch = per * 12;
        let plan = Plan::all(n).expect("plan");
        let plan = plan.clone().echoed(copies, (n / 4) as u32).unwrap_or(plan);
        let mut first: Option<Vec<BTreeSet<u32>>> = None;
        for ranks in [1, 2, 3, 4, 6, 12] {
            let order = Strict::new(plan.clone(), World { batch, ranks, tail }, key(seed));
            let mut seen = BTreeSet::new();
            let sets: Vec<BTreeSet<u32>> = (0..order.steps())
                .map(|step| {
                    let mut set = BTreeSet::new();
                    for rank in 0..ranks {
                        let range = order.positions(step, rank);
                        assert_eq!(range.end - range.start, u64::from(batch / ranks));
                        for (index, p) in (0u32..).zip(range) {
                            assert_eq!(order.step_position(p), StepPosition { step, rank, index });
                            assert!(seen.insert(order.entry(p)));
                            set.insert(order.entry(p));
                        }
                    }
                    set
                })
                .collect();
            let left_out: BTreeSet<u32> = order.dropped().collect();
            prop_assert!(left_out.iter().all(|e| seen.insert(*e)));
            let extra: BTreeSet<u32> = order.padded().collect();
            prop_assert_eq!(seen.len() as u64, plan.entries() + extra.len() as u64);
            let items: BTreeSet<Item> = seen.iter().map(|&e| order.item(e)).collect();
            prop_assert_eq!(items.len(), seen.len());
            prop_assert!(extra.iter().all(|&e| order.item(e).copy >= PAD));
            match &first {
                None => first = Some(sets),
                Some(f) => prop_assert_eq!(f, &sets),
            }
        }
    }

    /// I3.
    #[test]
    fn copies_keep_their_distance(n in 2u64..500, copies in 2u32..5, part in 0u64..1000, seed: u64) {
        // A plan of n samples can keep any distance up to n / 2.
        let apart = u32::try_from(1 + part * (n / 2) / 1000).expect("small");
        prop_assert!(u64::from(apart) * 2 <= n);
        let plan = Plan::all(n).expect("plan").echoed(copies, apart).expect("fits");
        let order = Strict::new(plan, World { batch: 1, ranks: 1, tail: Tail::Keep }, key(seed));
        let mut last: BTreeMap<u32, (u64, u32)> = BTreeMap::new();
        for p in 0..order.len() {
            let Item { sample, copy } = order.item(order.entry(p));
            if let Some((q, c)) = last.insert(sample, (p, copy)) {
                prop_assert!(p - q >= u64::from(apart), "copies {} apart, not {apart}", p - q);
                prop_assert_eq!(copy, c + 1);
            } else {
                prop_assert_eq!(copy, 0);
            }
        }
        prop_assert!(last.values().all(|&(_, c)| c == copies - 1));
    }
}

#[test]
fn a_resumed_order_is_the_same_order() {
    let order = |ranks| {
        Strict::new(Plan::all(1000).expect("plan"), World { batch: 24, ranks, tail: Tail::Drop }, key(9))
    };
    let (a, b) = (order(4), order(8));
    let rest: Vec<u32> = (17 * 24..a.len()).map(|p| a.entry(p)).collect();
    let again: Vec<u32> = (17..b.steps())
        .flat_map(|s| (0..8).flat_map(|r| b.positions(s, r)).map(|p| b.entry(p)).collect::<Vec<_>>())
        .collect();
    assert_eq!(rest, again);
}

#[test]
fn keep_shortens_only_the_last_step() {
    let o = Strict::new(Plan::all(10).expect("plan"), World { batch: 4, ranks: 1, tail: Tail::Keep }, key(1));
    assert_eq!((o.steps(), o.positions(1, 0), o.positions(2, 0), o.len()), (3, 4..8, 8..10, 10));
}

proptest! {
    /// By units the order is still exactly the plan, and a reader of one block needs few units.
    #[test]
    fn by_units_is_the_plan_in_blocks(
        sizes in proptest::collection::vec(0u32..9, 1..80),
        block in 1u32..100,
        copies in 1u32..3,
        seed: u64,
    ) {
        let unit_of: Vec<u32> = (0u32..).zip(&sizes).flat_map(|(u, &g)| vec![u; g as usize]).collect();
        prop_assume!(unit_of.len() > 1);
        let unit_map = UnitMap::new(&unit_of, vec![1; sizes.len()]).expect("unit_map");
        let n = unit_of.len() as u64;
        let plan = Plan::all(n).expect("plan").echoed(copies, (n / 2) as u32).expect("fits");
        let plan_units = PlanUnits::new(&plan, &unit_map).expect("one version");
        let world = World { batch: 1, ranks: 1, tail: Tail::Keep };
        let order = Strict::by_units(plan, world, key(seed), plan_units, block);
        let got: Vec<u32> = (0..order.len()).map(|p| order.entry(p)).collect();
        let mut all = got.clone();
        all.sort_unstable();
        prop_assert_eq!(all, (0..(n * u64::from(copies)) as u32).collect::<Vec<_>>());
        if copies == 1 {
            let mut seen: BTreeMap<u32, BTreeSet<usize>> = BTreeMap::new();
            let blocks = (n as usize / block as usize).max(1);
            for (p, &e) in got.iter().enumerate() {
                seen.entry(unit_of[e as usize]).or_default().insert((p / block as usize).min(blocks - 1));
            }
            for (u, b) in seen {
                let most = 2 + sizes[u as usize] as usize / block as usize;
                prop_assert!(b.len() <= most, "unit {} is in {} blocks", u, b.len());
            }
        }
    }
}
