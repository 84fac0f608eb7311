use super::*;
use futures::FutureExt as _;
use proptest::prelude::*;

type Permits = Arc<SharedPermits<u32>>;

fn try_take(permits: &Permits, key: u32) -> Option<SharedPermit<u32>> {
    permits.acquire(&key).now_or_never()
}

/// Takes permits of a backend until it gets no more.
fn take_all(permits: &Permits, key: u32) -> Vec<SharedPermit<u32>> {
    std::iter::from_fn(|| try_take(permits, key)).collect()
}

#[test]
fn each_backend_leaves_a_part_of_what_is_left() {
    let permits = SharedPermits::new(88, 66);
    let held: Vec<_> = (0..5).map(|key| take_all(&permits, key)).collect();
    let taken: Vec<_> = held.iter().map(Vec::len).collect();
    assert_eq!(taken, [66, 17, 4, 1, 0]);
    drop(held);
    for (all, to_one) in [(64, 48), (4, 2), (1, 1), (7, 7), (64, 1), (100, 99)] {
        assert_eq!(take_all(&SharedPermits::new(all, to_one), 7).len(), to_one, "{to_one} of {all}");
    }
}

/// What the head of the module says: backends that want more than there is come to equal numbers.
#[test]
fn backends_that_all_want_more_share_equally() {
    for (backends, together) in [(1, 66), (2, 76), (3, 80), (8, 85)] {
        let permits = SharedPermits::new(88, 66);
        let mut held: Vec<_> = (0u32..backends).map(|key| take_all(&permits, key)).collect();
        for round in 0..2_000usize {
            // Any backend gives one back, and the one that holds least goes first.
            held[round * 7 % backends as usize].pop();
            loop {
                let least = held.iter_mut().zip(0u32..).min_by_key(|(mine, _)| mine.len());
                let (mine, key) = least.expect("a backend");
                let Some(taken) = try_take(&permits, key) else { break };
                mine.push(taken);
            }
        }
        let numbers: Vec<_> = held.iter().map(Vec::len).collect();
        let (least, most) = (numbers.iter().min().expect("one"), numbers.iter().max().expect("one"));
        assert!(most - least <= 1, "{numbers:?}");
        assert_eq!(numbers.iter().sum::<usize>(), together, "{numbers:?}");
    }
}

#[tokio::test]
async fn callers_are_served_in_their_order_and_the_backend_that_holds_least_goes_first() {
    let permits = SharedPermits::new(4, 2);
    let mut first = take_all(&permits, 1);
    let mut second = take_all(&permits, 2);
    assert_eq!((first.len(), second.len()), (2, 1));
    let third = take_all(&permits, 3);
    assert_eq!(third.len(), 1);
    let wait = |key: u32| {
        let permits = Arc::clone(&permits);
        let mut waiting = Box::pin(async move { permits.acquire(&key).await });
        assert!(waiting.as_mut().now_or_never().is_none(), "{key}");
        waiting
    };
    let (mut of_one, gone, mut of_four, mut later) = (wait(1), wait(4), wait(4), wait(4));
    drop(gone);
    drop(first.pop());
    assert!(of_one.as_mut().now_or_never().is_none(), "it holds one already");
    let four = of_four.as_mut().now_or_never().expect("it holds none");
    assert!(later.as_mut().now_or_never().is_none());
    assert!(try_take(&permits, 4).is_none(), "nobody overtakes the callers of its own backend");
    drop((four, second.pop(), first.pop()));
    later.as_mut().now_or_never().expect("in its turn");
    of_one.as_mut().now_or_never().expect("in its turn");
    drop(third);
    assert_eq!((1..5).map(|key| permits.held(&key)).sum::<usize>(), 0);
}

#[tokio::test]
async fn other_numbers_take_effect_for_callers_that_wait() {
    let permits = SharedPermits::new(2, 1);
    let held = take_all(&permits, 1);
    let mut waiting = Box::pin(permits.acquire(&1));
    assert!(waiting.as_mut().now_or_never().is_none());
    permits.resize(4, 3);
    let second = waiting.now_or_never().expect("there is more now");
    permits.resize(1, 1);
    assert!(try_take(&permits, 2).is_none());
    drop((held, second));
    assert!(try_take(&permits, 2).is_some());
}

proptest! {
    /// Invariants 1 and 2, for every order of calls.
    #[test]
    fn a_backend_that_holds_nothing_gets_what_is_free(
        all in 1usize..80,
        part in 1usize..100,
        steps in prop::collection::vec((0u32..9, any::<bool>()), 1..400),
    ) {
        let to_one = (all * part / 100).max(1);
        let permits = SharedPermits::new(all, to_one);
        let mut held: BTreeMap<u32, Vec<SharedPermit<u32>>> = BTreeMap::new();
        for (key, take) in steps {
            let used: usize = held.values().map(Vec::len).sum();
            let mine = held.entry(key).or_default();
            if !take {
                mine.pop();
                continue;
            }
            let taken = try_take(&permits, key);
            if mine.is_empty() {
                prop_assert_eq!(taken.is_some(), used < all);
            }
            mine.extend(taken);
            prop_assert!(mine.len() <= to_one && permits.held(&key) == mine.len());
        }
        let used: usize = held.values().map(Vec::len).sum();
        prop_assert!(used <= all);
    }
}
