use super::*;
use proptest::prelude::*;

/// What a store sees.
#[derive(Default)]
struct Seen {
    /// Of each key that is held: whether it was used since it was loaded.
    held: BTreeMap<u32, bool>,
    loads: BTreeMap<u32, u32>,
}

impl Seen {
    fn obey(&mut self, acts: &mut Vec<Act>, bytes: u64, budget: u64) {
        for act in acts.drain(..) {
            match act {
                Act::Load(k) => {
                    assert!(self.held.insert(k, false).is_none(), "{k} was held");
                    *self.loads.entry(k).or_default() += 1;
                    assert!(self.held.len() as u64 * bytes <= budget, "I1");
                }
                Act::Evict(k) => assert_eq!(self.held.remove(&k), Some(true), "{k} in vain"),
            }
        }
    }
}

proptest! {
    /// Blocks of units, cut anywhere into chapters that are no shorter, read a little out of order, by a budget of two blocks: every unit is
    /// loaded exactly once, used, and dropped; a lookahead goes over chapters.
    #[test]
    fn blocks_are_fetched_once_whatever_the_chapters(
        blocks in 1usize..8, units in 1usize..5, per in 1usize..5, longer in 0usize..30, seed in any::<u64>(), late in 0usize..6, skip in proptest::collection::vec(any::<bool>(), 160)
    ) {
        let size = 10;
        let budget = size * 2 * units as u64;
        let chapter = units * per + longer;
        let late = late.min(units * per - 1);
        // Each block's samples, shuffled by a small law.
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
        let mut ahead = Ahead::new(budget, done.clone());
        let (mut seen, mut acts, mut from) = (Seen::default(), Vec::new(), 0);
        let todo: Vec<usize> = (0..n).filter(|&i| !done.get(i as u64)).collect();
        let mut waiting: VecDeque<usize> = VecDeque::new();
        let mut open = |ahead: &mut Ahead, order: &[u32]| {
            while ahead.wants() {
                let to = (from + chapter).min(n);
                let steps = (from..to).map(|p| (p as u32, order[p]));
                ahead.open(Chapter::new(steps, |_| size), to == n).expect("small");
                from = to;
            }
        };
        for &p in &todo {
            open(&mut ahead, &order);
            ahead.look(u64::MAX, |_| false, &mut acts);
            seen.obey(&mut acts, size, budget);
            prop_assert!(seen.held.contains_key(&order[p]), "position {} has its unit", p);
            waiting.push_back(p);
            if waiting.len() > late {
                let q = waiting.pop_front().expect("one");
                seen.held.insert(order[q], true);
                ahead.serve(q as u32, &mut acts);
                seen.obey(&mut acts, size, budget);
            }
        }
        for q in waiting {
            seen.held.insert(order[q], true);
            ahead.serve(q as u32, &mut acts);
            open(&mut ahead, &order);
            ahead.look(u64::MAX, |_| false, &mut acts);
            seen.obey(&mut acts, size, budget);
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
    let chapter = |keys: &[u32]| Chapter::new((0u32..).zip(keys.iter().copied()), |_| 1);
    let mut ahead = Ahead::new(4, Bits::zeros(6));
    let mut acts = Vec::new();
    assert!(ahead.is_new());
    ahead.open(chapter(&[10, 11, 12, 13, 14, 15]), true).expect("small");
    ahead.look(3, |k| k == 11, &mut acts);
    assert_eq!(acts, [Act::Load(10), Act::Load(12)], "three were looked at, one is here");
    assert_eq!((ahead.key(4), ahead.key(9), ahead.holds(12), ahead.holds(11)), (Some(14), None, true, false));
    acts.clear();
    ahead.lost(11);
    ahead.look(1, |_| false, &mut acts);
    assert_eq!(acts, [Act::Load(11)], "it was not here after all");
    acts.clear();
    ahead.serve(0, &mut acts);
    assert_eq!(acts, [Act::Evict(10)], "spent");
    acts.clear();
    let mut done = Bits::zeros(6);
    done.set(0);
    ahead.renew(done);
    assert!(ahead.wants() && ahead.is_new());
    ahead.open(chapter(&[10, 12, 13, 14, 15, 16]), true).expect("small");
    ahead.look(u64::MAX, |_| false, &mut acts);
    let loads = [Act::Load(13), Act::Load(14), Act::Load(15)];
    assert_eq!(acts[..3], loads, "12 is held already, 10 is done");
    assert_eq!(acts[3..], [Act::Evict(11)], "nobody needs it any more");
}
