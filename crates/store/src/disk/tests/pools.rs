//! Datasets that share chunks: each byte counts once, and no member of a pool takes what another one claims.

use super::*;
use proptest::prelude::{
    Just, ProptestConfig, Strategy, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest,
};
use std::collections::HashMap;

const LEN: usize = 60_000;
const SWEEP: DatasetId = DatasetId(11);
const OTHER: DatasetId = DatasetId(12);

fn pools(most: u64) -> Pools {
    Pools { sweeps: vec![(SWEEP, D1)], most: vec![(D1, most)] }
}

fn used(tier: &DiskEngine, dataset: DatasetId) -> DatasetUsage {
    let none = DatasetUsage {
        dataset,
        plain: dataset,
        bytes: 0,
        shared_bytes: 0,
        spare_bytes: 0,
        chunks: 0,
        share: None,
    };
    tier.stats().datasets.into_iter().find(|d| d.dataset == dataset).unwrap_or(none)
}

/// What a dataset claims: its chunks but the spare ones, and those that sweeps share with it.
fn claimed(usage: &DatasetUsage) -> u64 {
    usage.bytes - usage.spare_bytes + usage.shared_bytes
}

fn put(tier: &DiskEngine, n: u64, dataset: DatasetId) -> Stored {
    let c = chunk(n, LEN);
    tier.put(&key(&c), dataset, &c).expect("no error")
}

fn one() -> u64 {
    DiskEngine::footprint(LEN as u32)
}

#[derive(Debug, Clone)]
enum Do {
    Put(u8, DatasetId),
    Use(u8, DatasetId),
    GiveUp(u8),
    Evict(u8),
    Pin(u8),
    /// Shares in sixteenths of the capacity, and whether all chunks of the pool fit.
    Shares(Option<u8>, Option<u8>, u8, bool),
    EvictDataset,
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Do>> {
    let member = || prop_oneof![Just(D1), Just(SWEEP), Just(OTHER)];
    let share = || prop::option::of(0u8..8);
    let one = prop_oneof![
        12 => (any::<u8>(), member()).prop_map(|(n, d)| Do::Put(n, d)),
        8 => (any::<u8>(), member()).prop_map(|(n, d)| Do::Use(n, d)),
        4 => any::<u8>().prop_map(Do::GiveUp),
        2 => any::<u8>().prop_map(Do::Evict),
        1 => any::<u8>().prop_map(Do::Pin),
        2 => (share(), share(), 0u8..4, any::<bool>()).prop_map(|(a, b, c, w)| Do::Shares(a, b, c, w)),
        1 => Just(Do::EvictDataset),
        1 => Just(Do::Reopen),
    ];
    prop::collection::vec(one, 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// I4, I8.
    #[test]
    fn each_byte_counts_once_and_nobody_takes_what_another_claims(steps in steps()) {
        let dir = tempfile::tempdir().expect("a directory");
        let mut tier = Arc::new(open(dir.path(), 16 << 20, Policy::Fletch).0);
        for step in steps {
            let before: HashMap<_, _> = [D1, SWEEP, OTHER].map(|d| (d, used(&tier, d))).into();
            // A dataset within its share keeps what it uses, whatever another one does.
            let within = |d: DatasetId| before[&d].share.is_some_and(|share| claimed(&before[&d]) <= share);
            let in_use = |d: DatasetId| claimed(&used(&tier, d));
            let was_in_use = |d: DatasetId| claimed(&before[&d]);
            match step {
                Do::Put(n, dataset) => {
                    let stored = put(&tier, u64::from(n), dataset);
                    for d in [D1, SWEEP, OTHER].into_iter().filter(|&d| d != dataset && within(d)) {
                        prop_assert!(in_use(d) >= was_in_use(d), "{d:?} lost to {dataset:?}");
                    }
                    prop_assert!(stored != Stored::Yes || tier.contains(&key(&chunk(u64::from(n), LEN))));
                }
                Do::Use(n, dataset) => {
                    let key = key(&chunk(u64::from(n), LEN));
                    let was = tier.contains(&key);
                    tier.use_chunk(&key, dataset);
                    prop_assert_eq!(tier.contains(&key), was);
                    if within(D1) {
                        prop_assert!(in_use(D1) >= was_in_use(D1), "the plain readers lost a chunk");
                    }
                }
                Do::GiveUp(n) => {
                    tier.evict_of(&key(&chunk(u64::from(n), LEN)), SWEEP);
                    if within(D1) {
                        prop_assert!(in_use(D1) >= was_in_use(D1), "the plain readers lost a chunk");
                    }
                }
                Do::Evict(n) => drop(tier.evict(&key(&chunk(u64::from(n), LEN)))),
                Do::Pin(n) => drop(tier.pin(&[key(&chunk(u64::from(n), LEN))])),
                Do::Shares(plain, sweep, other, whole) => {
                    let part = |n: u8| tier.capacity() / 16 * u64::from(n);
                    let mut shares = vec![(OTHER, part(other))];
                    shares.extend(plain.map(|n| (D1, part(n))));
                    shares.extend(sweep.map(|n| (SWEEP, part(n))));
                    let most = part(plain.unwrap_or(0)) + part(sweep.unwrap_or(0));
                    tier.set_pooled_shares(&shares, &pools(if whole { most } else { most + 1 }));
                    let over = tier.read_index().datasets.pools_over(tier.capacity());
                    prop_assert!(over.is_empty() || tier.stats().pinned > 0, "{over:?} are over");
                }
                Do::EvictDataset => {
                    tier.evict_dataset(D1, &[]);
                    // The link to the sweep is not known before the first division.
                    let linked = used(&tier, SWEEP).plain == D1;
                    let left = used(&tier, D1).chunks + if linked { used(&tier, SWEEP).chunks } else { 0 };
                    prop_assert!(left <= tier.stats().pinned);
                }
                Do::Reopen => {
                    tier.close().expect("closed");
                    drop(tier);
                    tier = Arc::new(open(dir.path(), 16 << 20, Policy::Fletch).0);
                }
            }
            tier.read_index().check();
            let stats = tier.stats();
            prop_assert_eq!(stats.datasets.iter().map(|d| d.bytes).sum::<u64>(), stats.bytes);
            prop_assert_eq!(stats.datasets.iter().map(|d| d.chunks).sum::<u64>(), stats.chunks);
        }
    }
}

/// What plain readers cached stays when a sweep begins, and is the sweep's without a byte from the origin.
#[test]
fn a_sweep_takes_over_what_its_plain_readers_cached_and_they_get_it_back() {
    let dir = tempfile::tempdir().expect("a directory");
    let (tier, _) = open(dir.path(), 16 << 20, Policy::Fletch);
    let n = tier.capacity() * 9 / 10 / one();
    let all = n * one();
    tier.set_pooled_shares(&[(D1, all)], &pools(all));
    (0..n).for_each(|n| assert_eq!(put(&tier, n, D1), Stored::Yes));
    // The sweep comes: all of the dataset fits.
    assert_eq!(tier.set_pooled_shares(&[(D1, 0), (SWEEP, all)], &pools(all)), 0);
    assert_eq!((tier.share_of(D1), tier.share_of(SWEEP)), (Some(all), Some(all)));
    (0..n).for_each(|n| tier.use_chunk(&key(&chunk(n, LEN)), SWEEP));
    assert_eq!((used(&tier, D1).bytes, used(&tier, SWEEP).bytes), (0, all));
    // It is idle, while another dataset wants room.
    let (half, rest) = (n / 2 * one(), tier.capacity() - n / 2 * one());
    assert!(tier.set_pooled_shares(&[(D1, half), (OTHER, rest)], &pools(all)) > 0);
    assert!(used(&tier, D1).bytes <= half && used(&tier, D1).bytes + one() > half);
    assert_eq!(used(&tier, SWEEP).bytes, 0);
    assert_eq!(tier.stats().counts.evicted, n - n / 2);
}

/// What plain readers use and their share has room for, a sweep that passes over it leaves them.
#[test]
fn a_sweep_evicts_nothing_that_plain_readers_claim() {
    let dir = tempfile::tempdir().expect("a directory");
    let (tier, _) = open(dir.path(), 16 << 20, Policy::Fletch);
    let part = 20 * one();
    tier.set_pooled_shares(&[(D1, part), (SWEEP, part)], &pools(1000 * one()));
    (0..20).for_each(|n| assert_eq!(put(&tier, n, D1), Stored::Yes));
    for n in 0..200 {
        let key = key(&chunk(n, LEN));
        if tier.contains(&key) {
            tier.use_chunk(&key, SWEEP);
        } else {
            assert_eq!(put(&tier, n, SWEEP), Stored::Yes);
        }
        if n >= 10 {
            tier.evict_of(&super::key(&chunk(n - 10, LEN)), SWEEP);
        }
    }
    assert!((0..20).all(|n| tier.contains(&key(&chunk(n, LEN)))));
    let plain = used(&tier, D1);
    assert_eq!((plain.bytes, plain.shared_bytes, used(&tier, SWEEP).chunks), (part, 0, 10));
    // A warm-up protects a chunk that the sweep gives up, although the share is full.
    assert_eq!(tier.pin(&[key(&chunk(195, LEN))]), 1);
    assert!(tier.evict_of(&key(&chunk(195, LEN)), SWEEP) && tier.contains(&key(&chunk(195, LEN))));
    assert_eq!((used(&tier, D1).chunks, used(&tier, SWEEP).chunks), (21, 9));
}

/// Plain readers that filled the disk keep what a sweep does not need yet, and lose no more than that.
#[test]
fn what_is_over_a_share_stays_until_the_pool_needs_the_room() {
    let dir = tempfile::tempdir().expect("a directory");
    let (tier, _) = open(dir.path(), 16 << 20, Policy::Fletch);
    let n = tier.capacity() / one();
    let part = n / 2 * one();
    tier.set_pooled_shares(&[(D1, n * one())], &pools(3 * n * one()));
    (0..n).for_each(|n| assert_eq!(put(&tier, n, D1), Stored::Yes));
    assert_eq!(tier.set_pooled_shares(&[(D1, part), (SWEEP, part)], &pools(3 * n * one())), n % 2);
    (0..n / 4).for_each(|n| tier.use_chunk(&key(&chunk(n, LEN)), SWEEP));
    let evicted = tier.stats().counts.evicted;
    // The plain readers get nothing new; the sweep gets its whole share.
    assert_eq!(put(&tier, 5000, D1), Stored::Refused(Refusal::Share));
    for more in 1000..1000 + n / 8 {
        assert_eq!(put(&tier, more, SWEEP), Stored::Yes, "{:?}", tier.stats());
        tier.reap(u64::MAX).expect("reaped");
    }
    assert_eq!(tier.stats().counts.evicted - evicted, n / 8);
    assert!(used(&tier, D1).bytes >= part, "{:?}", used(&tier, D1));
}

/// Plays turns of a sweep over `units` chunks: the sweep holds `most` of them, and gives up random ones.
/// Between its loads, plain readers read random chunks if `reading`. Returns how many chunks they wrote.
fn turns(tier: &DiskEngine, units: u64, most: usize, reading: bool, rng: &mut ChaCha8Rng) -> usize {
    let (mut held, mut written) = (Vec::new(), 0);
    // It ends where it met chunks of the plain readers last.
    for step in 0..4 * units - units / 3 {
        let next = key(&chunk(step % units, LEN));
        if held.contains(&next) {
            continue;
        }
        if held.len() >= most {
            let given_up = held.swap_remove(rng.random_range(0..held.len()));
            tier.evict_of(&given_up, SWEEP);
        }
        if tier.contains(&next) {
            tier.use_chunk(&next, SWEEP);
        } else {
            assert_eq!(put(tier, step % units, SWEEP), Stored::Yes, "{:?}", tier.stats());
        }
        held.push(next);
        let read = chunk(rng.random_range(0..units), LEN);
        if reading && !tier.contains(&key(&read)) {
            written += usize::from(tier.put(&key(&read), D1, &read).expect("no error") == Stored::Yes);
        }
        tier.reap(u64::MAX).expect("reaped");
    }
    written
}

/// What a dataset and its sweep both use occupies room once: the pool fills the rest with other chunks.
#[test]
fn a_pool_that_is_smaller_than_its_dataset_is_full() {
    for reading in [false, true] {
        let dir = tempfile::tempdir().expect("a directory");
        let (tier, _) = open(dir.path(), 16 << 20, Policy::Fletch);
        let mut rng = seeded(5);
        let n = tier.capacity() * 9 / 10 / one() / 2 * 2;
        let (part, units) = (n / 2 * one(), 3 * n);
        tier.set_pooled_shares(&[(D1, 2 * part)], &pools(units * one()));
        (0..n).for_each(|n| assert_eq!(put(&tier, 2 * n, D1), Stored::Yes));
        tier.set_pooled_shares(&[(D1, part), (SWEEP, part)], &pools(units * one()));
        let most = usize::try_from(n / 2).expect("a number");
        let written = turns(&tier, units, most, reading, &mut rng);
        let (plain, sweep) = (used(&tier, D1), used(&tier, SWEEP));
        println!("reading {reading}: {plain:?} {sweep:?}, {written} written");
        assert!(plain.shared_bytes * 20 > part, "the two use some chunks both: {plain:?}");
        assert!(plain.bytes + sweep.bytes + 2 * one() >= 2 * part, "{plain:?} {sweep:?}");
        assert!(plain.bytes + sweep.bytes <= 2 * part, "{plain:?} {sweep:?}");
        assert!(claimed(&plain) + one() >= part, "the plain readers have their part: {plain:?}");
        tier.read_index().check();
    }
}

/// What a sweep gave up fills the room of plain readers until they need it for what they read.
#[test]
fn spare_chunks_leave_for_those_that_plain_readers_read() {
    let dir = tempfile::tempdir().expect("a directory");
    let (tier, _) = open(dir.path(), 16 << 20, Policy::Fletch);
    let part = 20 * one();
    tier.set_pooled_shares(&[(D1, part), (SWEEP, part)], &pools(1000 * one()));
    for n in 0..40 {
        assert_eq!(put(&tier, n, SWEEP), Stored::Yes);
        if n < 20 {
            assert!(tier.evict_of(&key(&chunk(n, LEN)), SWEEP) && tier.contains(&key(&chunk(n, LEN))));
        }
    }
    let plain = used(&tier, D1);
    assert_eq!((plain.bytes, plain.spare_bytes, used(&tier, SWEEP).bytes), (part, part, part));
    // A warm-up uses some of them, so that plain readers claim them.
    (0..5).for_each(|n| tier.use_chunk(&key(&chunk(n, LEN)), D1));
    assert_eq!(used(&tier, D1).spare_bytes, 15 * one());
    (100..115).for_each(|n| assert_eq!(put(&tier, n, D1), Stored::Yes));
    assert_eq!(put(&tier, 115, D1), Stored::Refused(Refusal::Share));
    let plain = used(&tier, D1);
    assert_eq!((plain.bytes, plain.spare_bytes, used(&tier, SWEEP).bytes), (part, 0, part));
    assert!((0..5).chain(20..40).chain(100..115).all(|n| tier.contains(&key(&chunk(n, LEN)))));
    assert_eq!(tier.stats().counts.evicted, 15);
    tier.read_index().check();
}
