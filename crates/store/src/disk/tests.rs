//! What the tier promises, tried from outside: put, get, and things done to its files.

use super::*;
use fletch_core::{Domain, Hash, Verified};
use rand::seq::SliceRandom;
use std::{
    collections::{BTreeMap, HashSet},
    fs,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    time::{Duration, SystemTime},
};

mod crash;
mod damage;
mod groups;
mod limits;
mod model;
mod pool_events;
mod pools;
mod residency;

const D1: DatasetId = DatasetId(1);
const D2: DatasetId = DatasetId(2);

fn config(dir: &Path, size_max: u64, policy: Policy) -> DiskConfig {
    DiskConfig {
        dir: dir.into(),
        size_max,
        free_floor: 0,
        slab_bytes: None,
        policy,
        seed: 7,
        files_max: 16,
        mount_memory: None,
    }
}

fn open(dir: &Path, size_max: u64, policy: Policy) -> (DiskEngine, Recovery) {
    DiskEngine::open(config(dir, size_max, policy), SystemTime::now()).expect("the tier opens")
}

/// Chunk `n`: bytes that no other has.
fn chunk(n: u64, len: usize) -> Verified {
    let mut bytes = vec![0; len];
    let mut h = blake3::Hasher::new();
    h.update(&n.to_le_bytes());
    h.finalize_xof().fill(&mut bytes);
    Verified::of(bytes.into())
}

fn key(c: &Verified) -> StoreKey {
    StoreKey { domain: Domain::default_domain(), hash: c.hash() }
}

/// `get` as its callers use it: hash, and quarantine what is wrong. (hit, wrong)
fn read(tier: &DiskEngine, key: &StoreKey) -> (Option<Verified>, bool) {
    let Ok(Some(bytes)) = tier.get(key) else { return (None, false) };
    match Verified::check(key.hash, bytes) {
        Ok(v) => (Some(v), false),
        Err(_) => {
            tier.quarantine(key);
            (None, true)
        }
    }
}

fn slab_files(dir: &Path) -> Vec<std::path::PathBuf> {
    let all = fs::read_dir(dir.join("slabs")).expect("the directory").map(|e| e.expect("an entry").path());
    let mut all: Vec<_> = all.collect();
    all.sort();
    all
}

#[test]
fn what_is_put_is_got_and_what_is_evicted_is_not() {
    let dir = tempfile::tempdir().expect("a directory");
    let (tier, found) = open(dir.path(), 64 << 20, Policy::Fletch);
    assert_eq!((found.slabs, found.records), (0, 0));
    for (n, len) in [(0, 0), (1, 1), (2, 63), (3, 64), (4, 65), (5, 110_000), (6, 4 << 20)] {
        let c = chunk(n, len);
        assert_eq!(tier.admit(&key(&c), D1, len as u32), Admission::Yes);
        assert_eq!(tier.get(&key(&c)).expect("no error"), None);
        assert_eq!(tier.put(&key(&c), D1, &c).expect("no error"), Stored::Yes, "{len} bytes");
        assert_eq!(tier.put(&key(&c), D2, &c).expect("no error"), Stored::Already);
        assert!(tier.contains(&key(&c)));
        assert_eq!(tier.get(&key(&c)).expect("no error").as_ref(), Some(c.bytes()));
    }
    let c = chunk(5, 110_000);
    assert!(tier.evict(&key(&c)) && !tier.evict(&key(&c)) && !tier.contains(&key(&c)));
    assert_eq!(tier.get(&key(&c)).expect("no error"), None);
    let s = tier.stats();
    assert_eq!((s.counts.puts, s.counts.evicted, s.chunks, s.counts.hits, s.counts.misses), (7, 1, 6, 7, 8));
    assert_eq!(s.datasets.len(), 1);
    tier.read_index().check();
}

#[test]
fn i7_a_chunk_of_another_domain_is_absent() {
    let dir = tempfile::tempdir().expect("a directory");
    let (tier, _) = open(dir.path(), 64 << 20, Policy::Fletch);
    let c = chunk(1, 1000);
    let foreign = StoreKey { domain: Domain::new("other").expect("a name"), hash: c.hash() };
    tier.put(&key(&c), D1, &c).expect("kept");
    assert!(!tier.contains(&foreign));
    assert_eq!(tier.get(&foreign).expect("no error"), None);
    tier.put(&foreign, D1, &c).expect("kept");
    assert!(tier.evict(&key(&c)));
    assert_eq!(tier.get(&foreign).expect("no error").as_ref(), Some(c.bytes()));
    tier.close().expect("closed");
    drop(tier);
    let (tier, found) = open(dir.path(), 64 << 20, Policy::Fletch);
    assert_eq!(found.records, 1);
    assert!(tier.contains(&foreign) && !tier.contains(&key(&c)));
}

#[test]
fn a_restart_is_warm_whether_closed_or_not() {
    for close in [true, false] {
        let dir = tempfile::tempdir().expect("a directory");
        let (tier, _) = open(dir.path(), 64 << 20, Policy::Fletch);
        let chunks: Vec<_> = (0..300).map(|n| chunk(n, 10_000 + n as usize * 7)).collect();
        for c in &chunks {
            assert_eq!(
                tier.put(&key(c), DatasetId(c.bytes().len() as u64 % 3), c).expect("no error"),
                Stored::Yes
            );
        }
        for c in &chunks[..100] {
            assert!(tier.evict(&key(c)));
        }
        tier.reap(u64::MAX).expect("reaped");
        let before = tier.stats();
        if close {
            tier.close().expect("closed");
            assert!(tier.put(&key(&chunks[0]), D1, &chunks[0]).is_err());
        }
        drop(tier);
        let (tier, found) = open(dir.path(), 64 << 20, Policy::Fletch);
        assert_eq!((found.walked, found.rebuilt), (u64::from(!close), false));
        let back = tier.stats();
        if close {
            assert_eq!((back.chunks, back.bytes), (before.chunks, before.bytes));
            let by_id = |s: &DiskStats| {
                s.datasets.iter().map(|d| (d.dataset, (d.bytes, d.chunks))).collect::<BTreeMap<_, _>>()
            };
            assert_eq!(by_id(&back), by_id(&before));
        }
        for c in &chunks[100..] {
            assert_eq!(read(&tier, &key(c)).0.as_ref(), Some(c));
        }
        // Evicted chunks of the slab that had no table yet may be back, but no others.
        let revived = chunks[..100].iter().filter(|c| read(&tier, &key(c)).0.is_some()).count();
        assert!(revived == 0 || !close, "{revived} evicted chunks came back");
        tier.read_index().check();
    }
}

#[test]
fn what_is_erased_stays_away_after_a_crash_also_if_it_was_pinned() {
    let dir = tempfile::tempdir().expect("a directory");
    let (tier, _) = open(dir.path(), 64 << 20, Policy::Fletch);
    let chunks: Vec<_> = (0..30).map(|n| chunk(n, 10_000)).collect();
    let keys: Vec<_> = chunks.iter().map(key).collect();
    chunks.iter().for_each(|c| assert_eq!(tier.put(&key(c), D1, c).expect("no error"), Stored::Yes));
    assert_eq!(tier.pin(&keys[..2]), 2);
    let absent = key(&chunk(999, 10));
    assert_eq!(tier.erase(&[keys[..3].to_vec(), vec![absent.clone()]].concat()).expect("erased"), 3);
    assert_eq!(tier.erase(&[absent]).expect("nothing"), 0);
    tier.unpin(&keys[..2]);
    assert_eq!(tier.stats().pinned, 0);
    tier.read_index().check();
    // Not closed, as after a kill.
    drop(tier);
    let (tier, _) = open(dir.path(), 64 << 20, Policy::Fletch);
    assert!(keys[..3].iter().all(|key| !tier.contains(key)), "they came back");
    chunks[3..].iter().for_each(|c| assert_eq!(read(&tier, &key(c)).0.as_ref(), Some(c)));
}

#[test]
fn a_second_owner_of_the_directory_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let (tier, _) = open(dir.path(), 64 << 20, Policy::Fletch);
    let err = DiskEngine::open(config(dir.path(), 64 << 20, Policy::Fletch), SystemTime::now())
        .expect_err("locked");
    assert!(matches!(err, DiskError::Locked { .. }));
    assert!(err.to_string().contains(&format!("pid {}", std::process::id())), "{err}");
    drop(tier);
    open(dir.path(), 64 << 20, Policy::Fletch);
}

#[test]
fn pinned_chunks_stay() {
    let dir = tempfile::tempdir().expect("a directory");
    let (tier, _) = open(dir.path(), 16 << 20, Policy::Lru);
    let pinned: Vec<_> = (0..20).map(|n| chunk(n, 50_000)).collect();
    let keys: Vec<_> = pinned.iter().map(key).collect();
    pinned.iter().for_each(|c| assert_eq!(tier.put(&key(c), D1, c).expect("no error"), Stored::Yes));
    let absent = key(&chunk(999, 10));
    assert_eq!(tier.pin(&[keys.clone(), vec![absent]].concat()), 20);
    assert!(!tier.evict(&keys[0]));
    for n in 100..1000 {
        let c = chunk(n, 50_000);
        assert_eq!(tier.put(&key(&c), D1, &c).expect("no error"), Stored::Yes);
    }
    pinned.iter().for_each(|c| assert_eq!(read(&tier, &key(c)).0.as_ref(), Some(c)));
    tier.unpin(&keys);
    assert_eq!(tier.stats().pinned, 0);
    assert!(tier.evict(&keys[0]));
    tier.read_index().check();
}

#[test]
fn scrubbing_reads_everything_once_and_begins_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let (tier, _) = open(dir.path(), 64 << 20, Policy::Fletch);
    assert_eq!(
        tier.scrub_next(1 << 20).expect("scrubbed"),
        ScrubReport { wrapped: true, ..Default::default() }
    );
    for n in 0..200 {
        let c = chunk(n, 20_000);
        tier.put(&key(&c), D1, &c).expect("kept");
    }
    for _ in 0..2 {
        let (mut records, mut bytes) = (0, 0);
        loop {
            let r = tier.scrub_next(500_000).expect("scrubbed");
            assert!(r.bytes <= 500_000 + 21_000 && r.bad == 0);
            (records, bytes) = (records + r.records, bytes + r.bytes);
            if r.wrapped {
                break;
            }
        }
        assert_eq!((records, bytes), (200, tier.stats().bytes));
    }
}

#[test]
fn another_process_that_has_a_slab_open_keeps_no_space() {
    let dir = tempfile::tempdir().expect("a directory");
    let (tier, _) = open(dir.path(), 64 << 20, Policy::Fletch);
    let c = chunk(1, 400_000);
    assert!(tier.lend(&key(&c)).is_none(), "it is not there");
    assert_eq!(tier.put(&key(&c), D1, &c).expect("no error"), Stored::Yes);
    let (file, at, len) = tier.lend(&key(&c)).expect("it is there");
    let mut got = vec![0; len as usize];
    file.read_exact_at(&mut got, at).expect("read");
    assert_eq!(&got[..], &c.bytes()[..]);
    assert!(file.write_at(b"x", at).is_err(), "it can only be read");
    for n in 2..200 {
        let more = chunk(n, 400_000);
        tier.put(&key(&more), D1, &more).expect("no error");
    }
    tier.evict_dataset(D1, &[]);
    while file.metadata().expect("metadata").nlink() > 0 {
        tier.reap(64 << 20).expect("no error");
    }
    assert_eq!(file.metadata().expect("metadata").blocks(), 0, "its space is free");
    assert!(file.read_exact_at(&mut got, at).is_err());
    let dir = tempfile::tempdir().expect("a directory");
    let (lru, _) = open(dir.path(), 64 << 20, Policy::Lru);
    assert_eq!(lru.put(&key(&c), D1, &c).expect("no error"), Stored::Yes);
    assert!(lru.lend(&key(&c)).is_none(), "it must see each read");
}
