//! What happens to a pool from outside: a crash, a full file system, a dataset that is evicted or removed
//! while its sweep runs, equal chunks of two domains, a lowered bound. Each byte counts once afterwards.

use super::*;
use std::time::SystemTime;

const LEN: usize = 60_000;
const SWEEP: DatasetId = DatasetId(11);
const PART: u64 = 20;

fn one() -> u64 {
    DiskEngine::footprint(LEN as u32)
}

fn share(tier: &DiskEngine, plain: u64, sweep: u64) -> u64 {
    let pools = Pools { sweeps: vec![(SWEEP, D1)], most: vec![(D1, 1000 * one())] };
    tier.set_pooled_shares(&[(D1, plain * one()), (SWEEP, sweep * one())], &pools)
}

/// A pool whose members both use chunks 10 to 19; the sweep has 20 to 29, too, and chunks 30 to 34 are spare.
fn pool(dir: &Path) -> Arc<DiskEngine> {
    let tier = Arc::new(open(dir, 16 << 20, Policy::Fletch).0);
    share(&tier, PART, PART);
    (0..20).for_each(|n| put(&tier, n, D1));
    (10..20).for_each(|n| tier.use_chunk(&key(&chunk(n, LEN)), SWEEP));
    for n in (30..35).chain(20..30) {
        put(&tier, n, SWEEP);
        if n >= 30 {
            assert!(tier.evict_of(&key(&chunk(n, LEN)), SWEEP));
        }
    }
    assert_eq!(usage(&tier), [(D1, 15, 10, 5), (SWEEP, 20, 0, 0)]);
    tier
}

fn put(tier: &DiskEngine, n: u64, dataset: DatasetId) {
    let c = chunk(n, LEN);
    assert_eq!(tier.put(&key(&c), dataset, &c).expect("no error"), Stored::Yes, "{:?}", tier.stats());
}

/// The chunks of each dataset, those that sweeps share with it, and the spare ones. They add up.
fn usage(tier: &DiskEngine) -> Vec<(DatasetId, u64, u64, u64)> {
    let stats = tier.stats();
    tier.read_index().check();
    assert_eq!(stats.datasets.iter().map(|d| d.bytes).sum::<u64>(), stats.bytes);
    assert_eq!(stats.bytes, stats.chunks * one());
    let mut all: Vec<_> = stats
        .datasets
        .iter()
        .map(|d| (d.dataset, d.bytes / one(), d.shared_bytes / one(), d.spare_bytes / one()))
        .collect();
    all.sort();
    all
}

/// I5: nothing is lost, and the sweep takes its units over again.
#[test]
fn after_a_crash_the_chunks_of_a_pool_are_there_and_count_once() {
    for close in [false, true] {
        let dir = tempfile::tempdir().expect("a directory");
        let tier = pool(dir.path());
        if close {
            tier.close().expect("closed");
        }
        drop(tier);
        let (tier, _) = open(dir.path(), 16 << 20, Policy::Fletch);
        let found = usage(&tier);
        assert_eq!(found.iter().map(|(_, chunks, ..)| chunks).sum::<u64>(), 35, "{found:?}");
        assert!(found.iter().all(|&(_, _, shared, spare)| (shared, spare) == (0, 0)), "{found:?}");
        assert_eq!(share(&tier, PART, PART), 0);
        (10..30).for_each(|n| tier.use_chunk(&key(&chunk(n, LEN)), SWEEP));
        assert_eq!(usage(&tier)[1], (SWEEP, PART, 0, 0));
        assert!((0..35).all(|n| tier.contains(&key(&chunk(n, LEN)))));
    }
}

/// I6: below the floor of the file system, whole slabs go.
#[test]
fn a_full_file_system_takes_chunks_of_all_members() {
    let dir = tempfile::tempdir().expect("a directory");
    let tier = pool(dir.path());
    while tier.evict_random_slab().is_some_and(|evicted| evicted > 0) {
        usage(&tier);
    }
    // What is left lies in the slab that is open.
    assert!(tier.stats().chunks < 35, "{:?}", tier.stats());
    tier.close().expect("closed");
    drop(tier);
    let full = DiskConfig { free_floor: u64::MAX / 2, ..config(dir.path(), 16 << 20, Policy::Fletch) };
    let (tier, found) = DiskEngine::open(full, SystemTime::now()).expect("the tier opens");
    share(&tier, PART, PART);
    assert_eq!(usage(&tier).iter().map(|(_, chunks, ..)| chunks).sum::<u64>(), found.records);
    assert_eq!(tier.reap(0).expect("reaped").evicted, found.records);
    for dataset in [D1, SWEEP] {
        let c = chunk(500, LEN);
        let stored = tier.put(&key(&c), dataset, &c);
        assert!(!matches!(stored, Ok(Stored::Yes)), "{stored:?}");
    }
    // The charges were given back.
    assert!(usage(&tier).iter().all(|&(_, chunks, ..)| chunks == 0), "{:?}", tier.stats());
}

/// `fletch evict`: without a job, all of the pool; beside one, what its sweep does not use.
#[test]
fn evicting_a_dataset_evicts_its_pool_or_spares_its_sweep() {
    for kept in [&[][..], &[SWEEP]] {
        let dir = tempfile::tempdir().expect("a directory");
        let tier = pool(dir.path());
        put(&tier, 900, D2);
        let evicted = tier.evict_dataset(D1, kept);
        if kept.is_empty() {
            assert_eq!(evicted, 35);
            assert_eq!(usage(&tier), [(D1, 0, 0, 0), (D2, 1, 0, 0), (SWEEP, 0, 0, 0)]);
        } else {
            // The plain readers still share what the sweep has.
            assert_eq!(evicted, 15);
            assert_eq!(usage(&tier), [(D1, 0, 10, 0), (D2, 1, 0, 0), (SWEEP, 20, 0, 0)]);
        }
        assert!(tier.contains(&key(&chunk(900, LEN))), "another dataset loses nothing");
        // A job goes on, and so does a reader.
        (40..60).for_each(|n| put(&tier, n, D1));
        if kept.is_empty() {
            (60..80).for_each(|n| put(&tier, n, SWEEP));
        }
        assert!(usage(&tier).iter().all(|&(_, chunks, ..)| chunks <= PART));
    }
}

/// A dataset that is removed loses its shares while chunks of its sweep are still being loaded.
#[test]
fn a_pool_without_shares_gives_its_room_to_others_and_its_late_chunks_count() {
    let dir = tempfile::tempdir().expect("a directory");
    let tier = pool(dir.path());
    let c = chunk(600, LEN);
    tier.evict_of(&key(&chunk(29, LEN)), SWEEP);
    let late = tier.reserve_share(&key(&c), SWEEP, LEN as u32).expect("a share with room");
    let capacity = tier.capacity() / one();
    let more = capacity - 10;
    tier.set_shares(&[(D2, more * one())]);
    assert!(usage_bytes(&tier) <= tier.capacity(), "{:?}", tier.stats());
    let newcomer = Newcomer { key: &key(&c), dataset: SWEEP, chunk: &c, reserved: late };
    assert_eq!(tier.put_group(vec![newcomer]).expect("no error"), [Stored::Yes]);
    tier.reap(u64::MAX).expect("reaped");
    for n in 1000..1000 + more - 1 {
        put(&tier, n, D2);
        tier.reap(u64::MAX).expect("reaped");
    }
    let left = usage(&tier);
    assert!(left.iter().any(|&(d, chunks, ..)| d == D2 && chunks == more - 1), "{left:?}");
    tier.evict_dataset(D1, &[]);
    let left = usage(&tier);
    assert!(left.iter().all(|&(d, chunks, ..)| d == D2 || chunks == 0), "{left:?}");
}

fn usage_bytes(tier: &DiskEngine) -> u64 {
    tier.stats().datasets.iter().map(|d| d.bytes).sum()
}

/// I7: two domains with equal content have two pools, and each loses only its own.
#[test]
fn equal_chunks_of_two_domains_are_two_pools() {
    let dir = tempfile::tempdir().expect("a directory");
    let tier = pool(dir.path());
    let other =
        |n: u64| StoreKey { domain: Domain::new("other").expect("a name"), hash: chunk(n, LEN).hash() };
    let theirs = DatasetId(12);
    let pools =
        Pools { sweeps: vec![(SWEEP, D1), (theirs, D2)], most: vec![(D1, 1000 * one()), (D2, 1000 * one())] };
    let part = PART * one();
    tier.set_pooled_shares(&[(D1, part), (SWEEP, part), (D2, part), (theirs, part)], &pools);
    for n in 0..20 {
        let c = chunk(n, LEN);
        assert_eq!(tier.put(&other(n), D2, &c).expect("no error"), Stored::Yes);
    }
    let before = usage(&tier);
    // A sweep of one domain takes nothing over from the other.
    (0..20).for_each(|n| tier.use_chunk(&other(n), SWEEP));
    assert_eq!(usage(&tier), before);
    (0..20).for_each(|n| tier.use_chunk(&other(n), theirs));
    let after = usage(&tier);
    assert_eq!(after, [(D1, 15, 10, 5), (D2, 0, 20, 0), (SWEEP, 20, 0, 0), (theirs, 20, 0, 0)]);
    assert_eq!(tier.evict_dataset(D2, &[]), 20);
    assert!((0..20).all(|n| !tier.contains(&other(n)) && tier.contains(&key(&chunk(n, LEN)))));
    assert_eq!(usage(&tier)[0], (D1, 15, 10, 5));
}

/// A tenant's quota counts what a dataset and its sweep share once: what the pool cannot use is for others.
#[test]
fn a_quota_is_divided_among_pools_and_their_members() {
    let claim = |dataset, plain, most| {
        let pool = Pool { plain, most: Some(60) };
        Claim { dataset, want: Some(most), most: Some(most), pool }
    };
    let split = vec![claim(D1, D1, 60), claim(SWEEP, D1, 60), Claim::alone(D2, Some(500), Some(500))];
    let used = [(D1, D1, 0), (SWEEP, D1, 60), (D2, D2, 0)];
    let used = used.map(|(dataset, plain, bytes)| crate::QuotaUse { dataset, plain, bytes }).to_vec();
    let of = |quota| {
        let limited = crate::apply_quotas(split.clone(), &[(quota, used.clone())]);
        limited.iter().map(|c| (c.dataset, c.most, c.pool.plain)).collect::<Vec<_>>()
    };
    // Two thirds of 120 are more than the 60 that the chunks of the pool need.
    assert_eq!(of(120), [(D1, Some(30), D1), (D2, Some(60), D2), (SWEEP, Some(30), D1)]);
    assert_eq!(of(30), [(D1, Some(10), D1), (D2, Some(10), D2), (SWEEP, Some(10), D1)]);
    // The plain readers find the chunks of a sweep that no job uses, so it takes no part of the quota.
    let idle = vec![split[0], split[2]];
    let limited = crate::apply_quotas(idle, &[(200, used.clone())]);
    let of = |id| limited.iter().find(|c| c.dataset == id).and_then(|c| c.most);
    assert_eq!((of(D1), of(SWEEP), of(D2)), (Some(60), Some(0), Some(140)));
    // Nobody reads the pool: each member keeps what it has.
    let limited = crate::apply_quotas(vec![split[2]], &[(200, used)]);
    let of = |id| limited.iter().find(|c| c.dataset == id).and_then(|c| c.most);
    assert_eq!((of(D1), of(SWEEP), of(D2)), (Some(0), Some(60), Some(140)));
}

/// A quota lowers the shares of a pool: each member loses what is over its own, spare chunks first.
#[test]
fn a_lowered_bound_takes_spare_chunks_first_and_what_both_use_last() {
    let dir = tempfile::tempdir().expect("a directory");
    let tier = pool(dir.path());
    // Both use 10 chunks, which are the sweep's to count.
    assert_eq!(share(&tier, 10, PART), 5);
    assert_eq!(usage(&tier), [(D1, 10, 10, 0), (SWEEP, 20, 0, 0)]);
    // The plain readers have more than their share: they lose it when the sweep gives up what both use.
    assert!(tier.evict_of(&key(&chunk(12, LEN)), SWEEP) && !tier.contains(&key(&chunk(12, LEN))));
    assert_eq!(share(&tier, 5, 5), 19);
    assert_eq!(usage(&tier).iter().map(|(_, chunks, ..)| chunks).sum::<u64>(), 10);
    assert_eq!(share(&tier, 0, 0), 10);
    assert!(usage(&tier).iter().all(|&(_, chunks, shared, spare)| (chunks, shared, spare) == (0, 0, 0)));
}
