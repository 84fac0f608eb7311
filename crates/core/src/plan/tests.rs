use super::*;
use crate::Root;
use proptest::prelude::*;
use std::collections::BTreeMap;

fn key(seed: u64) -> OrderKey {
    OrderKey::new(Root(Hash::of(b"root")), Hash::of(b"plan"), seed, 0)
}

fn items(p: &Plan) -> BTreeMap<Item, u32> {
    let mut m = BTreeMap::new();
    for e in 0..u32::try_from(p.entries()).expect("short") {
        *m.entry(p.item(e)).or_default() += 1;
    }
    m
}

proptest! {
    #[test]
    fn entries_are_distinct_items_and_sum_up(
        n in 1u64..200,
        weights in proptest::collection::vec(0.0f64..5.0, 200),
        draws in 1u64..500,
        copies in 1u32..4,
        seed: u64,
    ) {
        let w = &weights[..n as usize];
        prop_assume!(w.iter().any(|&x| x > 0.0));
        let p = Plan::weighted(n, w, draws, &key(seed)).expect("good weights");
        prop_assert_eq!(p.entries(), draws);
        let sum: f64 = w.iter().sum();
        for (s, &x) in (0u32..).zip(w) {
            let want = x / sum * draws as f64;
            let got = f64::from(p.copies_of(s));
            prop_assert!((got - want).abs() < 1.0 + 1e-6, "sample {s}: {got} of {want}");
        }
        let base = p.base_entries();
        let p = match p.clone().echoed(copies, (base / 2) as u32) {
            Ok(p) => p,
            Err(e) => {
                prop_assert_eq!(e.kind(), Kind::Invalid);
                p
            }
        };
        let m = items(&p);
        prop_assert!(m.values().all(|&n| n == 1));
        prop_assert_eq!(m.len() as u64, p.entries());
        for s in 0..n as u32 {
            let copies: Vec<u32> = m
                .range(Item { sample: s, copy: 0 }..=Item { sample: s, copy: u32::MAX })
                .map(|(i, _)| i.copy)
                .collect();
            prop_assert_eq!(copies, (0..p.copies_of(s) * p.echo().copies).collect::<Vec<_>>());
            if let Some(e) = p.first_entry(s) {
                prop_assert_eq!(p.item(e), Item { sample: s, copy: 0 });
            }
        }
    }

    #[test]
    fn a_subset_is_what_was_named(n in 1u64..300, named in proptest::collection::vec(0u64..300, 1..40)) {
        let known = named.iter().all(|&s| s < n);
        match Plan::subset(n, named.iter().copied()) {
            Ok(p) => {
                prop_assert!(known);
                let got: Vec<u64> = items(&p).keys().map(|i| u64::from(i.sample)).collect();
                let mut want = named;
                want.sort_unstable();
                want.dedup();
                prop_assert_eq!(got, want);
            }
            Err(e) => {
                prop_assert!(!known);
                let unknown = matches!(e, PlanError::Unknown { .. });
                prop_assert!(unknown);
            }
        }
    }

    #[test]
    fn fits_are_whole_steps(entries in 1u64..10_000, per in 1u32..50, ranks in 1u32..9, tail in 0usize..3) {
        let tail = [Tail::Keep, Tail::Drop, Tail::Pad][tail];
        let world = World { batch: per * ranks, ranks, tail };
        prop_assert_eq!(world.check().is_ok(), tail != Tail::Keep || ranks == 1);
        let d = world.delivered(entries);
        match tail {
            Tail::Keep => prop_assert_eq!(d, entries),
            Tail::Drop => prop_assert!(d <= entries && entries - d < u64::from(world.batch)),
            Tail::Pad => prop_assert!(d >= entries && d - entries < u64::from(world.batch)),
        }
        if tail != Tail::Keep {
            prop_assert_eq!(d, world.steps(entries) * u64::from(world.batch));
        }
    }
}

#[test]
fn weights_are_unbiased() {
    let (n, draws, trials) = (50u64, 20u64, 4000u64);
    let w: Vec<f64> = (0..n).map(|i| (i % 7) as f64).collect();
    let sum: f64 = w.iter().sum();
    let mut got = vec![0u64; n as usize];
    for seed in 0..trials {
        let p = Plan::weighted(n, &w, draws, &key(seed)).expect("good weights");
        (0..n as u32).for_each(|s| got[s as usize] += u64::from(p.copies_of(s)));
    }
    for (g, w) in got.iter().zip(&w) {
        let want = w / sum * (draws * trials) as f64;
        assert!((*g as f64 - want).abs() <= 5.0 * want.sqrt(), "{g} of {want}");
    }
}

#[test]
fn equal_plans_hash_alike_and_others_do_not() {
    let all = Plan::all(5).expect("plan");
    assert_eq!(Plan::subset(5, [4, 3, 2, 1, 0, 0]).expect("plan").hash(), all.hash());
    assert_eq!(all.clone().echoed(1, 99).expect("no echo").hash(), all.hash());
    let others = [
        Plan::all(6).expect("plan"),
        Plan::subset(5, [1, 2]).expect("plan"),
        Plan::subset(5, [1, 3]).expect("plan"),
        all.clone().echoed(2, 1).expect("plan"),
        all.clone().echoed(2, 2).expect("plan"),
        all.clone().echoed(3, 1).expect("plan"),
    ];
    let mut hashes: Vec<Hash> = others.iter().chain([&all]).map(Plan::hash).collect();
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), 7);
}

#[test]
fn impossible_plans_are_rejected() {
    assert_eq!(Plan::all(0), Err(PlanError::Empty));
    assert_eq!(Plan::all(1 << 40), Err(PlanError::TooLong(1 << 40)));
    assert_eq!(Plan::subset(3, []), Err(PlanError::Empty));
    for bad in [f64::NAN, -1.0, f64::INFINITY] {
        assert!(matches!(
            Plan::weighted(2, &[1.0, bad], 3, &key(0)),
            Err(PlanError::Weight { sample: 1, .. })
        ));
    }
    assert_eq!(Plan::weighted(2, &[0.0, 0.0], 3, &key(0)), Err(PlanError::Empty));
    assert!(matches!(Plan::weighted(2, &[1.0], 3, &key(0)), Err(PlanError::Weights { .. })));
    assert!(matches!(Plan::weighted(2, &[1.0, 0.0], 1 << 21, &key(0)), Err(PlanError::Copies { .. })));
    for (copies, apart) in [(0, 1), (2, 6), (5000, 1)] {
        let e = Plan::all(10).expect("plan").echoed(copies, apart);
        assert!(matches!(e, Err(PlanError::Echo { .. })), "{copies} {apart}");
    }
    assert!(World { batch: 10, ranks: 3, tail: Tail::Drop }.check().is_err());
    assert!(World { batch: 0, ranks: 0, tail: Tail::Drop }.check().is_err());
}
