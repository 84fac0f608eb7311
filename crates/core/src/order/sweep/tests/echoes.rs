//! Data echoing: plans that deliver each sample several times.

use super::*;

proptest! {
    /// Each sample comes `copies` times, its copies at least `apart` draws from each other.
    ///
    /// Some picks are given back unread. Hardly more units are loaded than without echoes.
    #[test]
    fn echoes_keep_their_distance(
        units in 10u32..60,
        copies in 2u32..4,
        apart in 1u32..30,
        seed: u64,
        back in proptest::collection::vec(0u32..400, 0..6),
    ) {
        prop_assume!(apart * 2 <= units * 4);
        let unit_map = unit_map(&vec![4; units as usize]);
        let n = units * 4;
        let mut policy = SweepPolicy::new(
            unit_map.clone(),
            unit_map.total_bytes() / 4,
            &key(seed),
            SweepParams::default(),
        );
        let subscriber = add_job(&mut policy, &Plan::all(u64::from(n)).expect("plan"));
        let echo = crate::plan::Echo { copies, apart };
        let mut queue =
            PickQueue::echoing(echo, key(seed).draws("echo", 0), Bits::zeros(u64::from(n)), vec![]);
        let (mut actions, mut at, mut count) = (Vec::new(), vec![None; n as usize], BTreeSet::new());
        let mut draw = 0u32;
        loop {
            queue.fill(&mut policy, subscriber, 1, &mut actions, |_| {});
            let Some(p) = queue.next(&policy, 0, |_| true) else { break };
            draw += 1;
            if back.contains(&draw) {
                queue.take_back(&mut policy, subscriber, p.slot, p.pass);
                continue;
            }
            prop_assert!(count.insert((p.slot, p.pass)), "twice");
            // A slot that was given back is handed out again at once, and may be nearer.
            if back.is_empty()
                && let Some(last) = at[p.slot as usize].replace(draw)
            {
                prop_assert!(draw - last >= apart, "{} apart", draw - last);
            }
        }
        prop_assert_eq!(count.len() as u32, n * copies);
        prop_assert!(
            actions.iter().filter(|a| matches!(a, CacheAction::Load(_))).count() as u32 <= units + units / 10
        );
    }

    /// The distance holds where a load takes long: no pick waits so long that its copies catch up with it.
    #[test]
    fn echoes_keep_their_distance_from_what_is_awaited(
        units in 20u32..60,
        apart in 1u32..30,
        seed: u64,
        ahead in 1usize..40,
        late in 1u32..200,
    ) {
        let unit_map = unit_map(&vec![4; units as usize]);
        let n = units * 4;
        let mut policy = SweepPolicy::new(
            unit_map.clone(),
            unit_map.total_bytes() / 4,
            &key(seed),
            SweepParams::default(),
        );
        let subscriber = add_job(&mut policy, &Plan::all(u64::from(n)).expect("plan"));
        let echo = crate::plan::Echo { copies: 2, apart };
        let mut queue =
            PickQueue::echoing(echo, key(seed).draws("echo", 0), Bits::zeros(u64::from(n)), vec![]);
        let (mut actions, mut at, mut draw) = (Vec::new(), vec![None; n as usize], 0u32);
        loop {
            queue.fill(&mut policy, subscriber, ahead, &mut actions, |_| {});
            let Some(p) = queue.next(&policy, 4, |p| p.unit % 16 != 0 || draw >= late) else { break };
            draw += 1;
            if let Some(last) = at[p.slot as usize].replace(draw) {
                prop_assert!(draw - last >= apart, "{} apart", draw - last);
            }
        }
        prop_assert_eq!(draw, 2 * n);
    }
}

/// A sweep and a queue that resume an epoch of `n` samples. `order` has the (slot, pass) pairs handed out so
/// far.
fn resumed(
    unit_map: &Arc<UnitMap>,
    n: u32,
    echo: crate::plan::Echo,
    order: &[(u32, u32)],
    seed: u64,
) -> (SweepPolicy, SubscriberId, PickQueue) {
    let mut policy =
        SweepPolicy::new(unit_map.clone(), unit_map.total_bytes() / 4, &key(seed), SweepParams::default());
    let plan_units = PlanUnits::new(&Plan::all(u64::from(n)).expect("plan"), unit_map).expect("plan_units");
    let (mut left, mut done) = (Bits::ones(u64::from(n)), Bits::zeros(u64::from(n)));
    let mut owed = Vec::new();
    for slot in 0..n {
        let passes: BTreeSet<u32> = order.iter().filter(|o| o.0 == slot).map(|o| o.1).collect();
        if passes.is_empty() {
            continue;
        }
        left.clear(u64::from(slot));
        done.set(u64::from(slot));
        let ago = order.iter().rev().position(|o| o.0 == slot).expect("it was there") as u64;
        let rest: VecDeque<u32> = (0..echo.copies).filter(|p| !passes.contains(p)).collect();
        if !rest.is_empty() {
            owed.push(DueCopies { slot, unit: plan_units.unit(slot), passes: rest, ago });
        }
    }
    let subscriber = policy.join(plan_units);
    policy.begin(subscriber, left);
    (policy, subscriber, PickQueue::echoing(echo, key(seed).draws("echo", 1), done, owed))
}

proptest! {
    /// The distance holds across restarts at any moment: between samples read before and after a restart.
    #[test]
    fn echoes_keep_their_distance_over_restarts(
        units in 10u32..40,
        copies in 2u32..4,
        apart in 1u32..30,
        seed: u64,
        at in proptest::collection::vec(0u32..400, 1..4),
    ) {
        prop_assume!(apart * 2 <= units * 4);
        let unit_map = unit_map(&vec![4; units as usize]);
        let n = units * 4;
        let echo = crate::plan::Echo { copies, apart };
        let mut order: Vec<(u32, u32)> = Vec::new();
        let (mut policy, mut subscriber, mut queue) = resumed(&unit_map, n, echo, &order, seed);
        let mut actions = Vec::new();
        while order.len() < (n * copies) as usize {
            if at.contains(&(order.len() as u32)) {
                (policy, subscriber, queue) = resumed(&unit_map, n, echo, &order, seed ^ order.len() as u64);
            }
            queue.fill(&mut policy, subscriber, 4, &mut actions, |_| {});
            let p = queue.next(&policy, 4, |_| true).expect("some are left");
            let last = order.iter().rposition(|o| o.0 == p.slot);
            if let Some(last) = last {
                prop_assert!(
                    order.len() - last >= apart as usize,
                    "{} apart at {}",
                    order.len() - last,
                    order.len()
                );
            }
            order.push((p.slot, p.pass));
        }
        let once: BTreeSet<(u32, u32)> = order.iter().copied().collect();
        prop_assert_eq!(once.len(), order.len());
    }
}
