//! Caches of few units: how their sweeps are shuffled, and where there is none.

use super::*;

const SAMPLES: u32 = 65;

/// What became of some epochs.
struct Read {
    /// Loads, and samples that were read alone, of the last epoch of all jobs.
    loads: u64,
    alone: u64,
    /// The certificates of all epochs but the first.
    said: Vec<crate::delivery::certificate::Certificate>,
    progress: SweepProgress,
}

/// Three jobs a third of an epoch apart, three epochs of each, over `units` units of which `here` have room.
fn read(units: u32, here: f64, samples: u32, seed: u64) -> Read {
    let unit_map = unit_map(&vec![samples; units as usize]);
    let capacity = (unit_map.bytes(0) as f64 * here) as u64;
    let n = u64::from(units * samples);
    let mut policy = SweepPolicy::new(unit_map.clone(), capacity, &key(seed), SweepParams::default());
    let mut store = Store::new(&unit_map, capacity);
    let plan = Plan::all(n).expect("plan");
    let subscribers = [0; 3].map(|_| sit(&mut policy, &plan));
    let (mut actions, mut said, mut seen) = (Vec::new(), Vec::new(), [const { BTreeSet::new() }; 3]);
    let mut shuffles: [Shuffle; 3] = Default::default();
    let (mut loads, mut alone) = (0, 0);
    for turn in 0..4 * n {
        if turn == 3 * n {
            (loads, alone) = (store.loads, 0);
        }
        for job in 0..3 {
            if turn < job as u64 * n / 3 {
                continue;
            }
            let pick = policy.next(subscribers[job], &mut actions).expect("left");
            store.obey(&mut actions);
            alone += u64::from(pick.read_from == ReadFrom::Range);
            shuffles[job].see(pick.unit);
            assert!(seen[job].insert(pick.slot), "I1");
            if policy.left(subscribers[job]) == 0 {
                if turn >= 2 * n {
                    said.push(
                        std::mem::take(&mut shuffles[job])
                            .certificate(chance(vec![u64::from(samples); units as usize])),
                    );
                }
                (shuffles[job], seen[job]) = (Shuffle::default(), BTreeSet::new());
                policy.begin(subscribers[job], Bits::ones(n));
            }
        }
    }
    Read { loads: store.loads - loads, alone, said, progress: policy.progress() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// A cache of fewer long units than a sweep needs is filled once, and what is not there is a plain shuffle; nobody
    /// reads more than without a cache. (Such sweeps brought up to 1.5 bytes a byte, in bursts of one unit.)
    #[test]
    fn a_cache_of_too_few_units_is_a_reserve(units in 12u32..90, here in 10u32..50, seed: u64) {
        let here = f64::from(here) / 10.0;
        let read = read(units, here, SAMPLES, seed);
        prop_assert_eq!(read.progress.window_bytes_max, 0);
        prop_assert_eq!(read.progress.reserve_bytes / 65_000, here as u64);
        prop_assert_eq!(read.loads, 0);
        let fetched = read.alone as f64 / f64::from(3 * units * SAMPLES);
        let best = 1.0 - here.floor() / f64::from(units);
        prop_assert!((fetched - best).abs() < 0.02, "{} for {}", fetched, best);
        prop_assert!(read.said.len() >= 3);
        for c in &read.said {
            prop_assert!(!c.poor && c.near10 > 0.6 && c.near10 < 1.6, "{:?}", c);
        }
    }

    /// With more of them there is a sweep, wide enough that few neighbours come from one unit.
    #[test]
    fn a_sweep_of_few_units_is_wide_enough(units in 24u32..140, part in 10u32..60, seed: u64) {
        let here = f64::from(units * part) / 100.0;
        prop_assume!(here > 6.0);
        let read = read(units, here, SAMPLES, seed);
        prop_assert!(read.progress.window_bytes_max >= 3 * 65_000);
        for c in &read.said {
            prop_assert!(c.mates < 0.5, "{:?}", c);
        }
        let shared = (read.loads * u64::from(SAMPLES) + read.alone) as f64 / f64::from(3 * units * SAMPLES);
        prop_assert!(shared < 0.62, "three jobs fetched {} of what they read", shared);
    }
}

/// Units of few samples cannot follow each other in a burst: they keep their sweep.
#[test]
fn units_of_few_samples_keep_their_sweep() {
    let read = read(60, 4.5, 4, 1);
    assert!(read.progress.window_bytes_max > 0 && read.said.iter().all(|c| !c.poor), "{:?}", read.said);
}

/// A share that grows and shrinks over the point where a sweep begins loses nothing, and jobs that sat down before there was
/// a cache share its sweep: their pace was not a number, and they took an eighth of each unit.
#[test]
fn a_sweep_may_begin_and_end() {
    let unit_map = unit_map(&[SAMPLES; 100]);
    let n = u64::from(100 * SAMPLES);
    let mut policy = SweepPolicy::new(unit_map.clone(), 0, &key(2), SweepParams::default());
    let mut store = Store::new(&unit_map, u64::MAX);
    let plan = Plan::all(n).expect("plan");
    let subscribers = [sit(&mut policy, &plan), sit(&mut policy, &plan)];
    let mut actions = Vec::new();
    let mut windows = Vec::new();
    for (units, draws) in [(0, 500), (3, 500), (20, n - 1000), (20, n), (4, 700), (30, 700), (0, n - 1400)] {
        policy.set_capacity(units * 65_000, &mut actions);
        store.obey(&mut actions);
        let before = store.loads;
        let mut alone = 0;
        for _ in 0..draws {
            for subscriber in subscribers {
                let pick = policy.next(subscriber, &mut actions).expect("left");
                alone += u64::from(pick.read_from == ReadFrom::Range);
                store.obey(&mut actions);
                assert!(store.bytes <= units * 65_000, "I3");
            }
        }
        windows.push(policy.progress().window_bytes_max > 0);
        if draws == n {
            let fetched = (store.loads - before) * u64::from(SAMPLES) + alone;
            assert!(fetched < n * 9 / 10, "two jobs in step fetched {fetched} of {}", 2 * n);
        }
        if subscribers.iter().all(|&s| policy.left(s) == 0) {
            subscribers.iter().for_each(|&s| policy.begin(s, Bits::ones(n)));
        }
    }
    assert_eq!(windows, [false, false, true, true, false, true, false]);
    assert!(store.here.is_empty());
}
