use super::*;
use proptest::prelude::*;

/// A store that obeys, and checks every action.
#[derive(Default)]
struct Seen {
    /// Of each held key: whether it was used after its load.
    held: BTreeMap<u32, bool>,
    loads: BTreeMap<u32, u32>,
}

impl Seen {
    fn obey(&mut self, actions: &mut Vec<CacheAction>, bytes: u64, budget: u64) {
        for action in actions.drain(..) {
            match action {
                CacheAction::Load(k) => {
                    assert!(self.held.insert(k, false).is_none(), "{k} was held");
                    *self.loads.entry(k).or_default() += 1;
                    assert!(self.held.len() as u64 * bytes <= budget, "I1");
                }
                CacheAction::Evict(k) => assert_eq!(self.held.remove(&k), Some(true), "{k} in vain"),
            }
        }
    }
}

proptest! {
    /// The order is blocks of units, cut anywhere into segments that are no shorter than a block. Entries are
    /// served a little out of order, with a budget of two blocks. Then every unit is loaded exactly once,
    /// used, and evicted, and the prefetch looks across segments.
    #[test]
    fn blocks_are_fetched_once_whatever_the_segments(
        blocks in 1usize..8,
        units in 1usize..5,
        per in 1usize..5,
        longer in 0usize..30,
        seed in any::<u64>(),
        late in 0usize..6,
        skip in proptest::collection::vec(any::<bool>(), 160),
    ) {
        let size = 10;
        let budget = size * 2 * units as u64;
        let segment = units * per + longer;
        let late = late.min(units * per - 1);
        // Each block's samples, shuffled by a simple rule.
        let mut order: Vec<u32> = Vec::new();
        for b in 0..blocks {
            let n = units * per;
            let mut of: Vec<u32> = (0..n).map(|i| (b * units + i / per) as u32).collect();
            let mut x = seed | 1;
            for i in (1..n).rev() {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                of.swap(i, ((x >> 33) as usize) % (i + 1));
            }
            order.extend(of);
        }
        let n = order.len();
        let mut done = Bits::zeros(n as u64);
        for (i, _) in skip.iter().enumerate().filter(|(i, s)| **s && *i < n && i % 7 == 3) {
            done.set(i as u64);
        }
        let mut ahead = SegmentedPrefetch::new(budget, done.clone());
        let (mut seen, mut actions, mut from) = (Seen::default(), Vec::new(), 0);
        let todo: Vec<usize> = (0..n).filter(|&i| !done.get(i as u64)).collect();
        let mut waiting: VecDeque<usize> = VecDeque::new();
        let mut open = |ahead: &mut SegmentedPrefetch, order: &[u32]| {
            while ahead.wants() {
                let to = (from + segment).min(n);
                let steps = (from..to).map(|p| (p as u32, order[p]));
                ahead.open(Segment::new(steps, |_| size), to == n).expect("small");
                from = to;
            }
        };
        for &p in &todo {
            open(&mut ahead, &order);
            ahead.look(u64::MAX, |_| false, &mut actions);
            seen.obey(&mut actions, size, budget);
            prop_assert!(seen.held.contains_key(&order[p]), "position {} has its unit", p);
            waiting.push_back(p);
            if waiting.len() > late {
                let q = waiting.pop_front().expect("one");
                seen.held.insert(order[q], true);
                ahead.serve(q as u32, &mut actions);
                seen.obey(&mut actions, size, budget);
            }
        }
        for q in waiting {
            seen.held.insert(order[q], true);
            ahead.serve(q as u32, &mut actions);
            open(&mut ahead, &order);
            ahead.look(u64::MAX, |_| false, &mut actions);
            seen.obey(&mut actions, size, budget);
        }
        prop_assert!(seen.held.is_empty(), "I3: {:?}", seen.held);
        prop_assert_eq!(ahead.held_bytes(), 0);
        prop_assert!(seen.loads.values().all(|&n| n == 1), "I2: {:?}", seen.loads);
        let wanted: BTreeSet<u32> = todo.iter().map(|&p| order[p]).collect();
        prop_assert_eq!(seen.loads.len(), wanted.len());
    }
}

#[test]
fn another_order_keeps_what_it_needs() {
    let segment = |keys: &[u32]| Segment::new((0u32..).zip(keys.iter().copied()), |_| 1);
    let mut ahead = SegmentedPrefetch::new(4, Bits::zeros(6));
    let mut actions = Vec::new();
    assert!(ahead.is_new());
    ahead.open(segment(&[10, 11, 12, 13, 14, 15]), true).expect("small");
    ahead.look(3, |k| k == 11, &mut actions);
    assert_eq!(actions, [CacheAction::Load(10), CacheAction::Load(12)], "three were looked at, one is here");
    assert_eq!((ahead.key(4), ahead.key(9), ahead.holds(12), ahead.holds(11)), (Some(14), None, true, false));
    actions.clear();
    ahead.lost(11);
    ahead.look(1, |_| false, &mut actions);
    assert_eq!(actions, [CacheAction::Load(11)], "it was not here after all");
    actions.clear();
    ahead.serve(0, &mut actions);
    assert_eq!(actions, [CacheAction::Evict(10)], "spent");
    actions.clear();
    let mut done = Bits::zeros(6);
    done.set(0);
    ahead.renew(done);
    assert!(ahead.wants() && ahead.is_new());
    ahead.open(segment(&[10, 12, 13, 14, 15, 16]), true).expect("small");
    ahead.look(u64::MAX, |_| false, &mut actions);
    let loads = [CacheAction::Load(13), CacheAction::Load(14), CacheAction::Load(15)];
    assert_eq!(actions[..3], loads, "12 is held already, 10 is done");
    assert_eq!(actions[3..], [CacheAction::Evict(11)], "it has no use left");
}
