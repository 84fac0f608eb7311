//! A store over a disk tier: what comes from where, and that a bad disk is only slow.

use super::*;
use crate::{
    Fetch, Hit, Store, StoreLimits, Tier,
    disk::{OffReason, Policy, Refusal, Stored},
};
use bytes::Bytes;
use fletch_bounds::{Waits, in_waits};
use fletch_core::Domain;
use std::{fs, os::unix::fs::FileExt, path::Path, sync::atomic::AtomicU32};
use tokio_util::task::TaskTracker;

mod maintenance;
mod unmounted;

const D1: DatasetId = DatasetId(1);
const MIB: u64 = 1 << 20;
const ALL: Claim =
    Claim { dataset: D1, want: None, most: None, pool: crate::disk::Pool { plain: D1, most: None } };

fn config(dir: &Path, policy: Policy) -> DiskConfig {
    let (size_max, dir) = (64 * MIB, dir.to_owned());
    DiskConfig {
        dir,
        size_max,
        free_floor: 0,
        slab_bytes: None,
        policy,
        seed: 7,
        files_max: 16,
        mount_memory: None,
    }
}

fn store(memory: u64, queue: u64) -> (Arc<Store>, Arc<DiskTier>) {
    let disk = DiskTier::new(queue);
    let limits = StoreLimits { memory_bytes: memory, deadline: Duration::from_secs(20), attempts: 2 };
    (Store::new(limits, Some(Arc::clone(&disk)), TaskTracker::new()), disk)
}

/// Bytes that no other `n` has.
fn content(n: u64, len: usize) -> Bytes {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(&n.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes.into()
}

fn key_of(bytes: &Bytes) -> StoreKey {
    StoreKey { domain: Domain::default_domain(), hash: Hash::of(bytes) }
}

/// Reads chunk `n` with an origin that counts.
async fn read(s: &Arc<Store>, n: u64, len: usize, origin: &Arc<AtomicU32>) -> Hit {
    let bytes = content(n, len);
    let (answer, count) = (bytes.clone(), Arc::clone(origin));
    let fetch: Fetch = Arc::new(move |_| {
        count.fetch_add(1, Relaxed);
        let answer = answer.clone();
        Box::pin(async move { Ok(answer) })
    });
    let hit = s.read(key_of(&bytes), u32::try_from(len).expect("small"), D1, fetch).await.expect("read");
    assert_eq!(*hit.chunk.bytes(), bytes, "I1");
    hit
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_memory_has_no_room_for_is_read_from_disk_and_not_from_the_origin() {
    let dir = tempfile::tempdir().expect("a directory");
    let (s, disk) = store(2 * MIB, 64 * MIB);
    disk.open(config(dir.path(), Policy::Fletch), SystemTime::now()).expect("open");
    let origin = Arc::new(AtomicU32::new(0));
    for n in 0..200 {
        assert_eq!(read(&s, n, 100_000, &origin).await.tier, Tier::Origin);
    }
    disk.wait_flushed(Duration::from_secs(20)).await;
    let mut tiers = [0, 0];
    for n in 0..200 {
        match read(&s, n, 100_000, &origin).await.tier {
            Tier::Disk => tiers[0] += 1,
            Tier::Memory => tiers[1] += 1,
            other => panic!("chunk {n} from {other:?}"),
        }
    }
    assert!(tiers[0] >= 180, "{tiers:?}");
    let (stats, report) = (s.stats(), disk.report());
    assert_eq!((origin.load(Relaxed), stats.fetches, stats.hits_disk), (200, 200, tiers[0]));
    assert_eq!((report.append_drops, report.corrupt, report.queued_bytes), (0, 0, 0));
    // After a restart, too.
    disk.close().expect("closed");
    let (s, disk) = store(2 * MIB, 64 * MIB);
    let found = disk.open(config(dir.path(), Policy::Fletch), SystemTime::now()).expect("open");
    assert_eq!(found.records, 200);
    for n in 0..200 {
        assert_eq!(read(&s, n, 100_000, &origin).await.tier, Tier::Disk);
    }
    assert_eq!(origin.load(Relaxed), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_that_waits_for_other_reads_of_the_disk_names_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let (s, disk) = store(64 * MIB, 64 * MIB);
    disk.open(config(dir.path(), Policy::Fletch), SystemTime::now()).expect("open");
    let origin = Arc::new(AtomicU32::new(0));
    read(&s, 1, 4096, &origin).await;
    disk.wait_flushed(Duration::from_secs(20)).await;
    s.memory.clear();
    let all = u32::try_from(READERS).expect("few");
    let held = Arc::clone(&disk.readers).acquire_many_owned(all).await.expect("open");
    let waits = Waits::of_part();
    let (waiting, freed) = (in_waits(Arc::clone(&waits), read(&s, 1, 4096, &origin)), async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(held);
    });
    let (hit, ()) = tokio::join!(waiting, freed);
    assert_eq!((hit.tier, origin.load(Relaxed)), (Tier::Disk, 1));
    let (gate, time) = waits.longest_first()[0];
    assert!(gate == Gate::DiskQueue && time >= Duration::from_millis(30), "{waits:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn i3_many_readers_of_a_chunk_on_disk_are_one_read_of_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let (s, disk) = store(64 * MIB, 64 * MIB);
    disk.open(config(dir.path(), Policy::Fletch), SystemTime::now()).expect("open");
    let tier = disk.engine().expect("open");
    let origin = Arc::new(AtomicU32::new(0));
    let chunk = Verified::of(content(1, 4 << 20));
    tier.put(&key_of(chunk.bytes()), D1, &chunk).expect("kept");
    let hits = futures::future::join_all((0..64).map(|_| read(&s, 1, 4 << 20, &origin))).await;
    let of = |t: Tier| hits.iter().filter(|h| h.tier == t).count();
    assert_eq!((of(Tier::Disk), of(Tier::Flight) + of(Tier::Memory)), (1, 63));
    assert_eq!((tier.stats().counts.hits, origin.load(Relaxed)), (1, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn i1_wrong_bytes_on_disk_are_quarantined_fetched_again_and_kept_again() {
    // Short chunks, long ones whose groups are known, and long ones whose groups are not known any more.
    for (len, forgets) in [(50_000, false), (300_000, false), (300_000, true)] {
        wrong_bytes_are_quarantined(len, forgets).await;
    }
}

async fn wrong_bytes_are_quarantined(len: usize, forgets: bool) {
    let dir = tempfile::tempdir().expect("a directory");
    let (s, disk) = store(MIB, 64 * MIB);
    disk.open(config(dir.path(), Policy::Fletch), SystemTime::now()).expect("open");
    let origin = Arc::new(AtomicU32::new(0));
    for n in 0..60 {
        read(&s, n, len, &origin).await;
    }
    disk.wait_flushed(Duration::from_secs(20)).await;
    // Every block of every payload gets a flipped bit; headers stay.
    for e in fs::read_dir(dir.path().join("slabs")).expect("slabs") {
        let path = e.expect("entry").path();
        let file = fs::File::options().read(true).write(true).open(&path).expect("open");
        let mut bytes = fs::read(&path).expect("read");
        for n in 0..60 {
            let body = content(n, len);
            if let Some(at) = bytes.windows(64).position(|w| w == &body[..64]) {
                bytes[at + 777] ^= 4;
                file.write_all_at(&bytes[at + 777..at + 778], at as u64 + 777).expect("flip");
            }
        }
    }
    let limits = StoreLimits { memory_bytes: MIB, deadline: Duration::from_secs(20), attempts: 2 };
    let s = if forgets { Store::new(limits, Some(Arc::clone(&disk)), TaskTracker::new()) } else { s };
    let mut again = Vec::new();
    for n in 0..60 {
        again.push(read(&s, n, len, &origin).await.tier);
    }
    let memory = again.iter().filter(|t| **t == Tier::Memory).count() as u64;
    let report = disk.report();
    assert_eq!(report.corrupt + memory, 60, "{again:?}");
    assert_eq!(u64::from(origin.load(Relaxed)), 60 + report.corrupt);
    assert_eq!(report.engine.map(|t| t.counts.quarantined), Some(report.corrupt));
    disk.wait_flushed(Duration::from_secs(20)).await;
    assert_eq!(disk.report().engine.map(|t| t.chunks), Some(60), "what was fetched again is kept again");
}

#[tokio::test]
async fn i5_without_a_tier_and_with_a_closed_one_reads_pass_by() {
    let dir = tempfile::tempdir().expect("a directory");
    let (s, disk) = store(4 * MIB, 64 * MIB);
    let origin = Arc::new(AtomicU32::new(0));
    assert!(matches!(disk.state(), DiskState::Absent(_)));
    assert_eq!(read(&s, 1, 1000, &origin).await.tier, Tier::Bypass);
    assert_eq!(read(&s, 1, 1000, &origin).await.tier, Tier::Memory);
    // A directory that cannot be: a file lies in its place.
    fs::write(dir.path().join("file"), b"x").expect("write");
    let e = disk.open(config(&dir.path().join("file"), Policy::Fletch), SystemTime::now());
    let e = e.expect_err("no directory").to_string();
    assert_eq!(disk.state(), DiskState::Absent(e));
    assert_eq!(read(&s, 2, 1000, &origin).await.tier, Tier::Bypass);
    disk.open(config(dir.path(), Policy::Fletch), SystemTime::now()).expect("open");
    assert_eq!(read(&s, 3, 1000, &origin).await.tier, Tier::Origin);
    disk.wait_flushed(Duration::from_secs(20)).await;
    disk.close().expect("closed");
    assert!(matches!(
        disk.probe(SystemTime::now()),
        DiskState::Open(Health::Off { why: OffReason::Closed, .. })
    ));
    assert_eq!(read(&s, 4, 1000, &origin).await.tier, Tier::Bypass);
    assert!(!disk.has(&key_of(&content(3, 1000)), 1000) && disk.divide(&[ALL], &[]) == Some(0));
}

#[tokio::test]
async fn i6_what_does_not_fit_the_queue_is_dropped_and_counted() {
    let dir = tempfile::tempdir().expect("a directory");
    let (s, disk) = store(4 * MIB, 999);
    disk.open(config(dir.path(), Policy::Fletch), SystemTime::now()).expect("open");
    let origin = Arc::new(AtomicU32::new(0));
    assert_eq!(read(&s, 1, 1000, &origin).await.tier, Tier::Bypass);
    assert_eq!(read(&s, 2, 999, &origin).await.tier, Tier::Origin);
    disk.wait_flushed(Duration::from_secs(20)).await;
    let report = disk.report();
    assert_eq!((report.append_drops, report.append_dropped_bytes), (1, 1000));
    assert_eq!((report.queued_bytes, report.engine.map(|t| t.chunks)), (0, Some(1)));
}

#[tokio::test]
async fn a_refused_chunk_is_bypassed_and_a_full_share_is_not_displaced() {
    let dir = tempfile::tempdir().expect("a directory");
    let (s, disk) = store(MIB, 64 * MIB);
    disk.open(config(dir.path(), Policy::Fletch), SystemTime::now()).expect("open");
    let origin = Arc::new(AtomicU32::new(0));
    let tier = disk.engine().expect("open");
    let one = DiskEngine::footprint(100_000);
    tier.set_shares(&[(D1, 3 * one)]);
    let mut tiers = Vec::new();
    for n in 0..5 {
        tiers.push(read(&s, n, 100_000, &origin).await.tier);
        disk.wait_flushed(Duration::from_secs(20)).await;
    }
    let (kept, not) = (Tier::Origin, Tier::Bypass);
    assert_eq!(tiers, [kept, kept, kept, not, not]);
    let stored = tier.put(&key_of(&content(9, 9)), D1, &Verified::of(content(9, 9))).expect("no error");
    assert_eq!(stored, Stored::Refused(Refusal::Share));
    assert_eq!((tier.stats().chunks, tier.stats().counts.evicted), (3, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_admitted_fits_beside_what_is_queued() {
    let dir = tempfile::tempdir().expect("a directory");
    let (_s, disk) = store(MIB, 64 * MIB);
    disk.open(config(dir.path(), Policy::Fletch), SystemTime::now()).expect("open");
    let chunks: Vec<_> = (0..30).map(|n| Verified::of(content(n, MIB as usize))).collect();
    disk.engine().expect("open").set_shares(&[(D1, 20 * MIB)]);
    // Faster than the disk writes.
    let admitted = chunks.iter().filter(|c| disk.enqueue(&key_of(c.bytes()), D1, c)).count();
    disk.wait_flushed(Duration::from_secs(20)).await;
    let on_disk = chunks.iter().filter(|c| disk.has(&key_of(c.bytes()), MIB as u32)).count();
    assert_eq!(admitted, on_disk);
    assert_eq!(on_disk, 19, "20 MiB have room for 19 chunks of 1 MiB and their heads");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn i5_a_clock_that_steps_back_stops_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let (s, disk) = store(MIB, 64 * MIB);
    let now = SystemTime::now();
    let back = now - Duration::from_secs(86_400 * 365);
    disk.open(config(dir.path(), Policy::Fletch), now).expect("open");
    let origin = Arc::new(AtomicU32::new(0));
    read(&s, 1, 1000, &origin).await;
    disk.wait_flushed(Duration::from_secs(20)).await;
    assert_eq!(disk.probe(back), DiskState::Open(Health::On));
    fs::remove_dir_all(dir.path()).expect("removed");
    // Noticed, and begun anew, although time goes backwards with every call.
    for n in 1..=5 {
        disk.probe(back - Duration::from_secs(n));
    }
    assert_eq!(disk.state(), DiskState::Open(Health::On));
    assert_eq!(read(&s, 2, 1000, &origin).await.tier, Tier::Origin);
    disk.wait_flushed(Duration::from_secs(20)).await;
    assert!(disk.has(&key_of(&content(2, 1000)), 1000) && !disk.has(&key_of(&content(1, 1000)), 1000));
    assert!(disk.scrub(MIB).expect("scrubbed").records >= 1);
    disk.reap(MIB).expect("reaped");
}

/// What is asked of a part: its name, and where it is said to lie.
async fn part_of(s: &Arc<Store>, chunk: &Bytes, at: std::ops::Range<usize>, hash: Hash) -> Option<Hit> {
    let len = u32::try_from(chunk.len()).expect("small");
    s.part(&key_of(chunk), len, &at, hash).await.expect("memory is free")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn i1_a_part_is_read_and_hashed_alone_and_a_wrong_one_proves_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let (s, disk) = store(2 * MIB, 64 * MIB);
    disk.open(config(dir.path(), Policy::Fletch), SystemTime::now()).expect("open");
    let origin = Arc::new(AtomicU32::new(0));
    let (chunk, len) = (content(0, 1_000_000), 1_000_000);
    for n in 0..3 {
        read(&s, n, len, &origin).await;
    }
    disk.wait_flushed(Duration::from_secs(20)).await;
    let before = disk.report().engine.expect("a tier").counts.hit_bytes;
    for at in [0..100_000, 300_001..300_002, 900_000..len, 5..5] {
        let part = chunk.slice(at.clone());
        let hit = part_of(&s, &chunk, at.clone(), Hash::of(&part)).await.expect("there");
        assert_eq!((hit.chunk.bytes(), hit.chunk.hash()), (&part, Hash::of(&part)));
        assert_eq!(hit.tier, Tier::Disk);
        let again = part_of(&s, &chunk, at, Hash::of(&part)).await.expect("there");
        assert_eq!((again.chunk.bytes(), again.tier), (&part, Tier::Memory));
    }
    let read_bytes = disk.report().engine.expect("a tier").counts.hit_bytes - before;
    assert_eq!(read_bytes, 200_001, "nothing but the parts");
    // A placement that lies, or reaches past the end; a chunk that is not there.
    let part = Hash::of(&chunk[..100_000]);
    for at in [1..100_001, 950_000..1_050_000, len..len + 100_000, usize::MAX - 10..usize::MAX] {
        if part_of(&s, &chunk, at.clone(), Hash([7; 32])).await.is_some() {
            panic!("{at:?} is no such part");
        }
    }
    let absent = content(99, len);
    assert!(part_of(&s, &absent, 0..10, Hash::of(&absent[..10])).await.is_none());
    assert_eq!(
        (disk.report().corrupt, disk.has(&key_of(&chunk), 1_000_000)),
        (0, true),
        "nothing is concluded"
    );
    assert!(part_of(&s, &chunk, 0..100_000, part).await.is_some());
    assert_eq!(origin.load(Relaxed), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chunk_evicted_while_it_is_queued_is_never_written() {
    let dir = tempfile::tempdir().expect("a directory");
    let (s, disk) = store(16 * MIB, 8 * MIB);
    disk.open(config(dir.path(), Policy::Fletch), SystemTime::now()).expect("open");
    let origin = Arc::new(AtomicU32::new(0));
    let mut taken = 0;
    for n in 0..60 {
        read(&s, n, 100_000, &origin).await;
        taken += u32::from(disk.evict_of(&key_of(&content(n, 100_000)), D1));
    }
    disk.wait_flushed(Duration::from_secs(20)).await;
    let left: Vec<u64> = (0..60).filter(|&n| disk.has(&key_of(&content(n, 100_000)), 100_000)).collect();
    // At most those that were just being written stay until they are dropped again.
    assert_eq!(u64::from(taken) + left.len() as u64, 60, "{taken} were evicted, {left:?} stayed");
    assert_eq!(disk.report().queued_bytes, 0);
    for n in left {
        assert!(disk.evict_of(&key_of(&content(n, 100_000)), D1));
    }
    assert_eq!(disk.engine().expect("a tier").stats().datasets.iter().map(|d| d.bytes).sum::<u64>(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queued_chunk_is_found_after_memory_evicted_it() {
    let dir = tempfile::tempdir().expect("a directory");
    // Memory caches a quarter of what the queue holds.
    let (s, disk) = store(2 * MIB, 64 * MIB);
    disk.open(config(dir.path(), Policy::Fletch), SystemTime::now()).expect("open");
    let origin = Arc::new(AtomicU32::new(0));
    for n in 0..400 {
        read(&s, n, 50_000, &origin).await;
        // Far behind the newest: on disk, or on its way there.
        if let Some(old) = n.checked_sub(60) {
            read(&s, old, 50_000, &origin).await;
        }
    }
    assert_eq!(origin.load(Relaxed), 400, "each was fetched once");
    disk.wait_flushed(Duration::from_secs(20)).await;
    assert!(disk.queued_chunk(&key_of(&content(399, 50_000))).is_none(), "it is on disk now");
    assert_eq!(disk.report().queued_bytes, 0);
}
