//! I6: the directory stays below its limit at every moment, whatever is written.

use super::*;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// `du`, as others see it, with what is deleted but still open in this process.
fn du(dir: &Path) -> u64 {
    fn of(p: &Path) -> u64 {
        let Ok(m) = fs::symlink_metadata(p) else { return 0 };
        let inside = if m.is_dir() {
            fs::read_dir(p).into_iter().flatten().flatten().map(|e| of(&e.path())).sum()
        } else {
            0
        };
        m.blocks() * 512 + inside
    }
    let dir = dir.canonicalize().unwrap_or(dir.into());
    let fds = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let unlinked = fds.filter(|e| {
        fs::read_link(e.path())
            .is_ok_and(|t| t.starts_with(&dir) && t.to_string_lossy().ends_with(" (deleted)"))
    });
    of(&dir) + unlinked.filter_map(|e| fs::metadata(e.path()).ok()).map(|m| m.blocks() * 512).sum::<u64>()
}

/// Writes `times` the limit from two threads while a third reads and a fourth samples.
fn overload(size: u64, times: u64, policy: Policy, lens: &[usize]) {
    let dir = tempfile::tempdir().expect("a directory");
    let (tier, _) = open(dir.path(), size, policy);
    let (done, max, samples) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let total = times * size;
    std::thread::scope(|s| {
        s.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                max.fetch_max(du(dir.path()), Ordering::Relaxed);
                samples.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        s.spawn(|| {
            let mut n = 0;
            while !done.load(Ordering::Relaxed) {
                let len = lens[n as usize % lens.len()];
                let (_, wrong) = read(&tier, &key(&chunk(n % 4000, len)));
                assert!(!wrong);
                n += 1;
            }
        });
        let writers: Vec<_> = (0..2u64)
            .map(|w| {
                let tier = &tier;
                s.spawn(move || {
                    let (mut n, mut written) = (w << 40, 0);
                    while written < total / 2 {
                        let len = lens[n as usize % lens.len()];
                        let c = chunk(n, len);
                        tier.put(&key(&c), DatasetId(w), &c).expect("no error");
                        n += 1;
                        written += len as u64;
                        if n % 512 == 0 {
                            // Datasets come and go.
                            let half = tier.capacity() / 2;
                            tier.set_shares(&[(DatasetId(w), half), (DatasetId(w + n % 3), half)]);
                            tier.reap(8 << 20).expect("reaped");
                        }
                    }
                })
            })
            .collect();
        let ended: Vec<_> = writers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        done.store(true, Ordering::Relaxed);
        assert!(ended.into_iter().all(|e| e.is_ok()), "a writer panicked");
    });
    let (max, samples) = (max.into_inner(), samples.into_inner());
    println!(
        "{policy} {size}: {:.4} of the limit at most in {samples} samples; {:?}",
        max as f64 / size as f64,
        tier.stats().counts
    );
    assert!(max * 100 <= size * 101, "{policy}: {max} of {size}");
    assert!(max * 100 >= size * 85, "{policy}: only {max} of {size} was used");
    tier.read_index().check();
    let used: u64 = tier.read_index().slabs().map(|(_, m)| m.blocks).sum();
    assert_eq!(used, tier.space.used(), "space and slabs agree");
    let (usage, du) = (tier.usage(), du(dir.path()));
    assert_eq!((usage.du, usage.unlinked), (du, 0));
    assert_eq!(tier.health(), Health::On);
}

#[test]
fn i6_ten_times_too_much_under_lru() {
    overload(64 << 20, 10, Policy::Lru, &[110 << 10, 4 << 20, 300, 4096]);
}

#[test]
fn i6_ten_times_too_much_under_fletch() {
    overload(64 << 20, 10, Policy::Fletch, &[4096, 4096, 20_000]);
}

#[test]
fn i6_ten_times_too_much_under_pin() {
    overload(64 << 20, 10, Policy::Pin, &[110 << 10]);
}

/// The second limit of the promise: in full with `FLETCH_SOAK`, else a smaller one, and less of it.
#[test]
fn i6_a_large_limit() {
    let (size, times) =
        if std::env::var_os("FLETCH_SOAK").is_some() { (10 << 30, 10) } else { (512 << 20, 3) };
    overload(size, times, Policy::Lru, &[110 << 10, 4 << 20]);
}

/// Chunks that may not leave are hits, always, while everything round them is evicted, punched and copied.
#[test]
fn i1_readers_are_not_disturbed_by_the_reaper() {
    let dir = tempfile::tempdir().expect("a directory");
    let (tier, _) = open(dir.path(), 32 << 20, Policy::Lru);
    let lens = [4096, 40_000, 110 << 10];
    let pinned: Vec<_> = (0..90).map(|n| chunk(n, lens[n as usize % 3])).collect();
    let keys: Vec<_> = pinned.iter().map(key).collect();
    // Scattered over slabs, so that all of those have to be punched and compacted.
    for n in 0..900u64 {
        let c =
            if n % 10 == 0 { pinned[n as usize / 10].clone() } else { chunk(n << 32, lens[n as usize % 3]) };
        assert_eq!(tier.put(&key(&c), D1, &c).expect("no error"), Stored::Yes);
        if n % 10 == 0 {
            assert_eq!(tier.pin(&[key(&c)]), 1);
        }
    }
    let done = AtomicBool::new(false);
    let reads = AtomicU64::new(0);
    std::thread::scope(|s| {
        for t in 0..2 {
            let (tier, done, reads, keys) = (&tier, &done, &reads, &keys);
            s.spawn(move || {
                for k in keys.iter().cycle().skip(t * 45) {
                    let (got, wrong) = read(tier, k);
                    assert!(got.is_some() && !wrong);
                    reads.fetch_add(1, Ordering::Relaxed);
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
        }
        for n in 10_000..12_000u64 {
            let c = chunk(n, lens[n as usize % 3]);
            assert_eq!(tier.put(&key(&c), D1, &c).expect("no error"), Stored::Yes);
            if n % 50 == 0 {
                tier.reap(4 << 20).expect("reaped");
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    let counts = tier.stats().counts;
    assert!(counts.compacted_bytes > 0 && counts.slabs_unlinked > 50, "{counts:?}");
    assert!(reads.into_inner() > 1000);
    tier.read_index().check();
}

#[test]
fn i6_a_lowered_limit_holds_from_the_start() {
    let dir = tempfile::tempdir().expect("a directory");
    let (tier, _) = open(dir.path(), 64 << 20, Policy::Pin);
    for n in 0..500 {
        let c = chunk(n, 110 << 10);
        tier.put(&key(&c), D1, &c).expect("no error");
    }
    drop(tier);
    let (tier, found) = open(dir.path(), 24 << 20, Policy::Pin);
    assert!(found.dropped > 0 && found.records > 100, "{found:?}");
    let du = du(dir.path());
    assert!(du <= 24 << 20, "{du}");
    tier.read_index().check();
}

#[test]
fn i6_the_floor_of_the_file_system_holds() {
    let dir = tempfile::tempdir().expect("a directory");
    let (tier, _) = open(dir.path(), 64 << 20, Policy::Pin);
    for n in 0..100 {
        let c = chunk(n, 110 << 10);
        assert_eq!(tier.put(&key(&c), D1, &c).expect("no error"), Stored::Yes);
    }
    drop(tier);
    let all = DiskConfig { free_floor: u64::MAX / 2, ..config(dir.path(), 64 << 20, Policy::Pin) };
    let (tier, _) = DiskEngine::open(all, SystemTime::now()).expect("the tier opens");
    let c = chunk(1000, 10);
    assert_eq!(tier.put(&key(&c), D1, &c).expect("no error"), Stored::Refused(Refusal::Full));
    // Below the floor everything goes.
    assert_eq!(tier.reap(0).expect("reaped").evicted, 100);
    assert_eq!((tier.stats().chunks, tier.space.used()), (0, 0));
}

#[test]
fn i6_settings_that_cannot_be_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    for bad in [
        config(dir.path(), 1 << 20, Policy::Pin),
        DiskConfig { slab_bytes: Some(1 << 40), ..config(dir.path(), 64 << 20, Policy::Pin) },
    ] {
        assert!(matches!(DiskEngine::open(bad, SystemTime::now()), Err(DiskError::Invalid(_))));
    }
}

#[test]
fn i6_the_index_is_compact() {
    let slab = Slab::new(1);
    let mut index = index::Index::new(9, false);
    let n = index.add_slab(slab, 0, index::SlabState::Open);
    let domain = index.domain(&Domain::default_domain()).expect("a domain");
    let set = index.datasets.number(D1);
    let many = 1_000_000u64;
    for i in 0..many {
        index.datasets.charge(set, footprint(4096));
        assert!(index.insert(
            domain,
            Hash::of(&i.to_le_bytes()),
            set,
            SlabLocation { slab: n, at: layout::LINE * (i + 8), len: 4096 }
        ));
    }
    // Capacities are powers of two: what was allocated, touched or not.
    let per_chunk = index.memory() as u64 / many;
    assert!(per_chunk <= 100, "{per_chunk} bytes a chunk");
}
