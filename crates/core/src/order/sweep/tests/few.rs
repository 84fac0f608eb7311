//! Caches of few units: how their sweeps are shuffled, and where there is none.

use super::*;

const SAMPLES: u32 = 65;

/// The result of some epochs.
struct Read {
    /// Units loaded, and samples read by range, in the last epoch of all jobs.
    loads: u64,
    by_range: u64,
    /// The certificates of all epochs but the first.
    certificates: Vec<crate::delivery::certificate::Certificate>,
    progress: SweepProgress,
}

/// Runs three epochs of three jobs, a third of an epoch apart, over `units` units in a cache of `here` units.
fn read(units: u32, here: f64, samples: u32, seed: u64) -> Read {
    let unit_map = unit_map(&vec![samples; units as usize]);
    let capacity = (unit_map.bytes(0) as f64 * here) as u64;
    let n = u64::from(units * samples);
    let mut policy = SweepPolicy::new(unit_map.clone(), capacity, &key(seed), SweepParams::default());
    let mut store = Store::new(&unit_map, capacity);
    let plan = Plan::all(n).expect("plan");
    let subscribers = [0; 3].map(|_| add_job(&mut policy, &plan));
    let (mut actions, mut certificates, mut seen) = (Vec::new(), Vec::new(), [const { BTreeSet::new() }; 3]);
    let mut shuffles: [Shuffle; 3] = Default::default();
    let (mut loads, mut by_range) = (0, 0);
    for turn in 0..4 * n {
        if turn == 3 * n {
            (loads, by_range) = (store.loads, 0);
        }
        for job in 0..3 {
            if turn < job as u64 * n / 3 {
                continue;
            }
            let pick = policy.next(subscribers[job], &mut actions).expect("left");
            store.obey(&mut actions);
            by_range += u64::from(pick.read_from == ReadFrom::Range);
            shuffles[job].see(pick.unit);
            assert!(seen[job].insert(pick.slot), "I1");
            if policy.left(subscribers[job]) == 0 {
                if turn >= 2 * n {
                    certificates.push(
                        std::mem::take(&mut shuffles[job])
                            .certificate(chance(vec![u64::from(samples); units as usize])),
                    );
                }
                (shuffles[job], seen[job]) = (Shuffle::default(), BTreeSet::new());
                policy.begin(subscribers[job], Bits::ones(n));
            }
        }
    }
    Read { loads: store.loads - loads, by_range, certificates, progress: policy.progress() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// R13: a cache of fewer long units than a sweep needs is filled once, and all else is a plain shuffle.
    /// No job fetches more than without a cache. (With a window such sweeps fetched up to 1.5 bytes a byte,
    /// in bursts.)
    #[test]
    fn a_cache_of_too_few_units_is_a_reserve(units in 12u32..90, here in 10u32..50, seed: u64) {
        let here = f64::from(here) / 10.0;
        let read = read(units, here, SAMPLES, seed);
        prop_assert_eq!(read.progress.window_bytes_max, 0);
        prop_assert_eq!(read.progress.reserve_bytes / 65_000, here as u64);
        prop_assert_eq!(read.loads, 0);
        let fetched = read.by_range as f64 / f64::from(3 * units * SAMPLES);
        let best = 1.0 - here.floor() / f64::from(units);
        prop_assert!((fetched - best).abs() < 0.02, "{} for {}", fetched, best);
        prop_assert!(read.certificates.len() >= 3);
        for c in &read.certificates {
            prop_assert!(!c.poor && c.near10 > 0.6 && c.near10 < 1.6, "{:?}", c);
        }
    }

    /// R13: with more units there is a sweep, wide enough that few neighbours come from one unit.
    #[test]
    fn a_sweep_of_few_units_is_wide_enough(units in 24u32..140, part in 10u32..60, seed: u64) {
        let here = f64::from(units * part) / 100.0;
        prop_assume!(here > 6.0);
        let read = read(units, here, SAMPLES, seed);
        prop_assert!(read.progress.window_bytes_max >= 3 * 65_000);
        for c in &read.certificates {
            prop_assert!(c.mates < 0.5, "{:?}", c);
        }
        let shared =
            (read.loads * u64::from(SAMPLES) + read.by_range) as f64 / f64::from(3 * units * SAMPLES);
        prop_assert!(shared < 0.62, "three jobs fetched {} of what they read", shared);
    }
}

/// R13: units of few samples cannot come in a burst, so they keep their sweep.
#[test]
fn units_of_few_samples_keep_their_sweep() {
    let read = read(60, 4.5, 4, 1);
    assert!(
        read.progress.window_bytes_max > 0 && read.certificates.iter().all(|c| !c.poor),
        "{:?}",
        read.certificates
    );
}

/// A capacity that grows and shrinks across the size where a window begins loses no sample. Jobs that joined
/// while there was no cache share the sweep: once their pace was not a number, and they took an eighth of
/// each unit.
#[test]
fn a_window_may_begin_and_end() {
    let unit_map = unit_map(&[SAMPLES; 100]);
    let n = u64::from(100 * SAMPLES);
    let mut policy = SweepPolicy::new(unit_map.clone(), 0, &key(2), SweepParams::default());
    let mut store = Store::new(&unit_map, u64::MAX);
    let plan = Plan::all(n).expect("plan");
    let subscribers = [add_job(&mut policy, &plan), add_job(&mut policy, &plan)];
    let mut actions = Vec::new();
    let mut windows = Vec::new();
    for (units, draws) in [(0, 500), (3, 500), (20, n - 1000), (20, n), (4, 700), (30, 700), (0, n - 1400)] {
        policy.set_capacity(units * 65_000, &mut actions);
        store.obey(&mut actions);
        let before = store.loads;
        let mut by_range = 0;
        for _ in 0..draws {
            for subscriber in subscribers {
                let pick = policy.next(subscriber, &mut actions).expect("left");
                by_range += u64::from(pick.read_from == ReadFrom::Range);
                store.obey(&mut actions);
                assert!(store.bytes <= units * 65_000, "I3");
            }
        }
        windows.push(policy.progress().window_bytes_max > 0);
        if draws == n {
            let fetched = (store.loads - before) * u64::from(SAMPLES) + by_range;
            assert!(fetched < n * 9 / 10, "two jobs in step fetched {fetched} of {}", 2 * n);
        }
        if subscribers.iter().all(|&s| policy.left(s) == 0) {
            subscribers.iter().for_each(|&s| policy.begin(s, Bits::ones(n)));
        }
    }
    assert_eq!(windows, [false, false, true, true, false, true, false]);
    assert!(store.here.is_empty());
}
