//! Who stays: shares, and the arms of the benchmarks against their theory.

use super::*;
use rand::Rng;
use std::time::SystemTime;

const LEN: usize = 4096;

fn names(from: u64, bytes: u64) -> Vec<Verified> {
    (from..from + bytes / DiskEngine::footprint(LEN as u32)).map(|n| chunk(n, LEN)).collect()
}

/// One pass over all chunks in random order; the share of hits.
fn epoch(tier: &DiskEngine, dataset: DatasetId, chunks: &[Verified], rng: &mut ChaCha8Rng) -> f64 {
    let mut order: Vec<_> = chunks.iter().collect();
    order.shuffle(rng);
    let mut hits = 0;
    for c in &order {
        let (got, wrong) = read(tier, &key(c));
        assert!(!wrong);
        if got.is_some() {
            hits += 1;
        } else if tier.admit(&key(c), dataset, LEN as u32) == Admission::Yes {
            tier.put(&key(c), dataset, c).expect("no error");
        }
    }
    f64::from(hits) / order.len() as f64
}

/// Mean hit share of some epochs after the first, at a cache of a fifth, and what fraction was cached in the
/// end.
fn arm(policy: Policy) -> (f64, f64) {
    let dir = tempfile::tempdir().expect("a directory");
    let (tier, _) = open(dir.path(), 32 << 20, policy);
    let chunks = names(0, tier.capacity() * 5);
    let mut rng = seeded(3);
    epoch(&tier, D1, &chunks, &mut rng);
    let hits: Vec<f64> = (0..4).map(|_| epoch(&tier, D1, &chunks, &mut rng)).collect();
    let c = tier.stats().chunks as f64 / chunks.len() as f64;
    assert!((c - 0.2).abs() < 0.02, "{policy}: {c} of the dataset is cached");
    tier.read_index().check();
    (hits.iter().sum::<f64>() / 4.0, c)
}

#[test]
fn the_arms_are_what_theory_says() {
    let (lru, c) = arm(Policy::Lru);
    // Random permutations: c + (1-c) ln(1-c).
    let theory = c + (1.0 - c) * (1.0 - c).ln();
    assert!(
        (lru - theory).abs() < 0.02 && (lru - 0.02).abs() < 0.02,
        "lru {lru}, theory {theory} at c = {c}"
    );
    for policy in [Policy::Pin, Policy::Fletch] {
        let (hits, c) = arm(policy);
        assert!((hits - c).abs() < 0.005 && (hits - 0.2).abs() < 0.02, "{policy} {hits} at c = {c}");
    }
}

#[test]
fn a_second_dataset_gets_its_half_and_nothing_thrashes() {
    for len in [LEN, 110 << 10] {
        let dir = tempfile::tempdir().expect("a directory");
        let (tier, _) = open(dir.path(), 64 << 20, Policy::Fletch);
        let cap = tier.capacity();
        let put = |from: u64, d: DatasetId| {
            for n in from..from + 2 * cap / DiskEngine::footprint(len as u32) {
                let c = chunk(n, len);
                if tier.admit(&key(&c), d, len as u32) == Admission::Yes {
                    tier.put(&key(&c), d, &c).expect("no error");
                }
            }
        };
        let bytes =
            |d: DatasetId| tier.stats().datasets.iter().find(|x| x.dataset == d).map_or(0, |x| x.bytes);
        tier.set_shares(&equal_split(cap, &[(D1, None)]));
        put(0, D1);
        assert!(bytes(D1) * 100 >= cap * 98, "{} of {cap} is used ({len})", bytes(D1));
        let evicted = tier.stats().counts.evicted;
        put(1 << 32, D1);
        assert_eq!(tier.stats().counts.evicted, evicted, "a full share must not thrash");

        // A newcomer without a share waits for the allocation, which then halves the first at random.
        put(1 << 40, D2);
        assert!(bytes(D2) * 50 <= cap, "{} before it had a share", bytes(D2));
        tier.set_shares(&equal_split(cap, &[(D1, None), (D2, None)]));
        put(1 << 40, D2);
        tier.reap(u64::MAX).expect("reaped");
        put(1 << 41, D2);
        for d in [D1, D2] {
            assert!(
                bytes(d) * 200 >= cap * 97 && bytes(d) * 2 <= cap,
                "{d:?} has {} of {cap} ({len})",
                bytes(d)
            );
        }
        // What stayed of the first is an unbiased sample: as much of its first half as of its second.
        let n = cap / DiskEngine::footprint(len as u32);
        let kept =
            |r: std::ops::Range<u64>| r.filter(|&n| tier.contains(&key(&chunk(n, len)))).count() as f64;
        let (a, b) = (kept(0..n / 2), kept(n / 2..n));
        assert!(
            (a - b).abs() <= 6.0 * (n as f64 / 4.0).sqrt(),
            "{a} of the first half, {b} of the second ({len})"
        );
        tier.read_index().check();
    }
}

#[test]
fn pin_admits_until_full_and_never_evicts() {
    let dir = tempfile::tempdir().expect("a directory");
    let (tier, _) = open(dir.path(), 16 << 20, Policy::Pin);
    let chunks: Vec<_> = (0..400).map(|n| chunk(n, 110 << 10)).collect();
    let kept: HashSet<_> = chunks
        .iter()
        .filter(|c| tier.put(&key(c), D1, c).expect("no error") == Stored::Yes)
        .map(key)
        .collect();
    assert!(kept.len() > 100 && kept.len() < 150, "{}", kept.len());
    assert_eq!((tier.stats().counts.evicted, tier.set_shares(&[(D2, 1)])), (0, 0));
    chunks.iter().for_each(|c| assert_eq!(tier.contains(&key(c)), kept.contains(&key(c))));
    assert_eq!(tier.admit(&key(&chunks[399]), D1, 110 << 10), Admission::No);
    assert_eq!(tier.admit(&key(&chunks[399]), D1, 17 << 20), Admission::No);
}

#[test]
fn evicting_a_dataset_leaves_the_others() {
    let dir = tempfile::tempdir().expect("a directory");
    let (tier, _) = open(dir.path(), 16 << 20, Policy::Fletch);
    for n in 0..1000 {
        let c = chunk(n, 3000);
        tier.put(&key(&c), DatasetId(n % 2), &c).expect("kept");
    }
    assert_eq!((tier.evict_dataset(DatasetId(0), &[]), tier.stats().chunks), (500, 500));
    assert!((0..1000).all(|n| tier.contains(&key(&chunk(n, 3000))) == (n % 2 == 1)));
}

/// Chunks that leave at random: what the tier says it can hold it does hold, since the blocks of each dead
/// one are given back where they lie, in sparse slabs as in full ones. Nothing that fits is refused.
#[test]
fn what_fits_the_capacity_is_kept_whatever_left_before_it() {
    // Slabs of a few; of dozens, most of whose chunks are dead at last; of hundreds, where each hole's edges
    // count.
    for (slab, lens) in [
        (12 << 20, 1_100_000..2_000_000),
        (8 << 20, 400_000..600_000),
        (4 << 20, 90_000..130_000),
        (4 << 20, 40_000..50_000),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        let limit = 160 << 20;
        let config = DiskConfig { slab_bytes: Some(slab), ..config(dir.path(), limit, Policy::Fletch) };
        let (tier, _) = DiskEngine::open(config, SystemTime::now()).expect("a tier");
        let mut rng = seeded(11);
        let mut here: Vec<Verified> = Vec::new();
        for n in 0..4 * limit / lens.start as u64 {
            let len = rng.random_range(lens.clone());
            let next = chunk(n, len);
            let need = DiskEngine::footprint(len as u32);
            // A unit is not as long as the one that leaves for it: room for one is left.
            let room = DiskEngine::footprint(lens.end as u32);
            while tier.stats().bytes + need + room > tier.capacity()
                && here.len() >= index::MEAN_FROM as usize
            {
                let old = here.swap_remove(rng.random_range(0..here.len()));
                assert!(tier.evict(&key(&old)));
            }
            assert_eq!(
                tier.put(&key(&next), D1, &next).expect("no error"),
                Stored::Yes,
                "chunk {n} of {lens:?}"
            );
            here.push(next);
        }
        let s = tier.stats();
        assert!(s.counts.refused_full == 0 && s.counts.punched_bytes > 100 << 20, "{:?}", s.counts);
        assert!(s.slab_bytes <= s.limit, "I6");
        tier.read_index().check();
    }
}

/// Holes' edges come free by copying, and only for what died: where slabs lose much even when they are new
/// (few long chunks in each, or one), where lengths differ widely, and where nothing dies any more, copying
/// ends.
#[test]
fn copying_for_what_was_promised_ends() {
    for (limit, slab, lens) in [
        (64 << 20, 512 << 10, 33_792..33_793),
        (128 << 20, 512 << 10, 600_000..6_000_000),
        (128 << 20, 4 << 20, 2_080_000..2_090_000),
        (128 << 20, 4 << 20, 2_000..200_000),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        let config = DiskConfig { slab_bytes: Some(slab), ..config(dir.path(), limit, Policy::Fletch) };
        let (tier, _) = DiskEngine::open(config, SystemTime::now()).expect("a tier");
        let mut rng = seeded(23);
        let mut here: Vec<Verified> = Vec::new();
        for n in 0..3 * limit / ((lens.start + lens.end) as u64 / 2) {
            let len = rng.random_range(lens.clone());
            let next = chunk(n, len);
            while tier.stats().bytes + DiskEngine::footprint(len as u32) > tier.capacity()
                && here.len() >= index::MEAN_FROM as usize
            {
                let old = here.swap_remove(rng.random_range(0..here.len()));
                assert!(tier.evict(&key(&old)));
            }
            if tier.put(&key(&next), D1, &next).expect("no error") == Stored::Yes {
                here.push(next);
            }
        }
        // Some die and nothing comes: each round copies for what died, and then no more.
        for old in here.drain(..here.len() / 10) {
            assert!(tier.evict(&key(&old)));
        }
        let mut rounds = 0;
        while tier.reap(8 << 20).expect("no error").copied > 0 {
            rounds += 1;
            assert!(rounds < 200, "copying goes on: {:?} of {lens:?}", tier.stats().counts);
        }
        assert!(here.iter().all(|c| tier.contains(&key(c))), "what lives was copied, not lost");
        assert!(tier.stats().slab_bytes <= tier.stats().limit, "I6");
        tier.read_index().check();
    }
}

/// A copy that finds no room for all of a slab: what was copied lives in its new place, and the old one gives
/// its blocks back.
#[test]
fn a_copy_that_is_cut_short_gives_back_what_it_copied() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = DiskConfig { slab_bytes: Some(4 << 20), ..config(dir.path(), 64 << 20, Policy::Fletch) };
    let (tier, _) = DiskEngine::open(config, SystemTime::now()).expect("a tier");
    let here: Vec<Verified> = (0..55).map(|n| chunk(n, 100_000)).collect();
    for c in &here {
        assert_eq!(tier.put(&key(c), D1, c).expect("no error"), Stored::Yes);
    }
    let (first, blocks) = {
        let index = tier.read_index();
        let first = index.find(&key(&here[0])).expect("it is there").slab;
        (first, index.slab(first).expect("its slab").blocks)
    };
    let rest = tier.rest_of_active();
    assert!((300_000..4_000_000).contains(&rest), "the open slab has room for some of them: {rest}");
    let all = tier.space.free(0);
    assert!(tier.space.take(all, 0));
    let (copied, whole) = tier.compact(first).expect("no error");
    assert!(!whole && copied > 200_000 && copied <= rest, "{copied} of {rest}");
    let now = tier.read_index().slab(first).expect("some still live in it").blocks;
    assert!(now + copied <= blocks + 3 * 4096, "{now} of {blocks} after {copied} were copied");
    tier.space.give(all);
    here.iter().for_each(|c| assert_eq!(read(&tier, &key(c)), (Some(c.clone()), false)));
    assert!(tier.compact(first).expect("no error").1, "there is room now");
    here.iter().for_each(|c| assert_eq!(read(&tier, &key(c)), (Some(c.clone()), false)));
    tier.read_index().check();
}
