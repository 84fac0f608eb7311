//! Plans whose samples come several times.

use super::*;

proptest! {
    /// Echo: each sample `copies` times, copies at least `apart` draws from each other, whatever
    /// comes back unread; and no more units are loaded than without.
    #[test]
    fn echoes_keep_their_distance(units in 10u32..60, copies in 2u32..4, apart in 1u32..30, seed: u64, back in proptest::collection::vec(0u32..400, 0..6)) {
        prop_assume!(apart * 2 <= units * 4);
        let shape = shape(&vec![4; units as usize]);
        let n = units * 4;
        let mut fly = Flywheel::new(shape.clone(), shape.total_bytes() / 4, &key(seed), Knobs::default());
        let seat = sit(&mut fly, &Plan::all(u64::from(n)).expect("plan"));
        let echo = crate::order::Echo { copies, apart };
        let mut feed = Feed::echoing(echo, key(seed).draws("echo", 0), Bits::zeros(u64::from(n)), vec![]);
        let (mut acts, mut at, mut count) = (Vec::new(), vec![None; n as usize], BTreeSet::new());
        let mut draw = 0u32;
        loop {
            feed.fill(&mut fly, seat, 1, &mut acts, |_| {});
            let Some(p) = feed.next(&fly, 0, |_| true) else { break };
            draw += 1;
            if back.contains(&draw) {
                feed.take_back(&mut fly, seat, p.spot, p.pass);
                continue;
            }
            prop_assert!(count.insert((p.spot, p.pass)), "twice");
            // What came back is re-issued at once and may be nearer.
            if back.is_empty() && let Some(last) = at[p.spot as usize].replace(draw) {
                prop_assert!(draw - last >= apart, "{} apart", draw - last);
            }
        }
        prop_assert_eq!(count.len() as u32, n * copies);
        prop_assert!(acts.iter().filter(|a| matches!(a, Act::Load(_))).count() as u32 <= units + units / 10);
    }

    /// Also where a unit is long on its way: nobody passes a sample for so long that its copies catch up with it.
    #[test]
    fn echoes_keep_their_distance_from_what_is_awaited(units in 20u32..60, apart in 1u32..30, seed: u64, ahead in 1usize..40, late in 1u32..200) {
        let shape = shape(&vec![4; units as usize]);
        let n = units * 4;
        let mut fly = Flywheel::new(shape.clone(), shape.total_bytes() / 4, &key(seed), Knobs::default());
        let seat = sit(&mut fly, &Plan::all(u64::from(n)).expect("plan"));
        let echo = crate::order::Echo { copies: 2, apart };
        let mut feed = Feed::echoing(echo, key(seed).draws("echo", 0), Bits::zeros(u64::from(n)), vec![]);
        let (mut acts, mut at, mut draw) = (Vec::new(), vec![None; n as usize], 0u32);
        loop {
            feed.fill(&mut fly, seat, ahead, &mut acts, |_| {});
            let Some(p) = feed.next(&fly, 4, |p| p.unit % 16 != 0 || draw >= late) else { break };
            draw += 1;
            if let Some(last) = at[p.spot as usize].replace(draw) {
                prop_assert!(draw - last >= apart, "{} apart", draw - last);
            }
        }
        prop_assert_eq!(draw, 2 * n);
    }
}

/// A sweep and a feed that go on where `order`, what was handed out of `n` samples so far as (spot, pass), ends.
fn resumed(
    shape: &Arc<Shape>,
    n: u32,
    echo: crate::order::Echo,
    order: &[(u32, u32)],
    seed: u64,
) -> (Flywheel, SeatId, Feed) {
    let mut fly = Flywheel::new(shape.clone(), shape.total_bytes() / 4, &key(seed), Knobs::default());
    let laid = Laid::new(&Plan::all(u64::from(n)).expect("plan"), shape).expect("laid");
    let (mut left, mut done) = (Bits::ones(u64::from(n)), Bits::zeros(u64::from(n)));
    let mut owed = Vec::new();
    for spot in 0..n {
        let passes: BTreeSet<u32> = order.iter().filter(|o| o.0 == spot).map(|o| o.1).collect();
        if passes.is_empty() {
            continue;
        }
        left.clear(u64::from(spot));
        done.set(u64::from(spot));
        let ago = order.iter().rev().position(|o| o.0 == spot).expect("it was there") as u64;
        let rest: VecDeque<u32> = (0..echo.copies).filter(|p| !passes.contains(p)).collect();
        if !rest.is_empty() {
            owed.push(Owed { spot, unit: laid.unit(spot), passes: rest, ago });
        }
    }
    let seat = fly.join(laid);
    fly.begin(seat, left);
    (fly, seat, Feed::echoing(echo, key(seed).draws("echo", 1), done, owed))
}

proptest! {
    /// A server that is started again keeps the distance, too, at whatever moments: of what was read before from what is
    /// read after.
    #[test]
    fn echoes_keep_their_distance_over_restarts(units in 10u32..40, copies in 2u32..4, apart in 1u32..30, seed: u64, at in proptest::collection::vec(0u32..400, 1..4)) {
        prop_assume!(apart * 2 <= units * 4);
        let shape = shape(&vec![4; units as usize]);
        let n = units * 4;
        let echo = crate::order::Echo { copies, apart };
        let mut order: Vec<(u32, u32)> = Vec::new();
        let (mut fly, mut seat, mut feed) = resumed(&shape, n, echo, &order, seed);
        let mut acts = Vec::new();
        while order.len() < (n * copies) as usize {
            if at.contains(&(order.len() as u32)) {
                (fly, seat, feed) = resumed(&shape, n, echo, &order, seed ^ order.len() as u64);
            }
            feed.fill(&mut fly, seat, 4, &mut acts, |_| {});
            let p = feed.next(&fly, 4, |_| true).expect("some are left");
            let last = order.iter().rposition(|o| o.0 == p.spot);
            if let Some(last) = last {
                prop_assert!(order.len() - last >= apart as usize, "{} apart at {}", order.len() - last, order.len());
            }
            order.push((p.spot, p.pass));
        }
        let once: BTreeSet<(u32, u32)> = order.iter().copied().collect();
        prop_assert_eq!(once.len(), order.len());
    }
}
