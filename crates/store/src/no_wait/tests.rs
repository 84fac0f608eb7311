use super::*;
use crate::{
    DatasetId, DiskTier, StoreLimits,
    disk::{DiskConfig, Policy},
};
use bytes::Bytes;
use fletch_core::{Domain, Verified};
use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};
use tokio_util::task::TaskTracker;

const LEN: usize = 200_000;

fn content(n: u64) -> Bytes {
    let mut bytes = vec![0; LEN];
    blake3::Hasher::new().update(&n.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes.into()
}

fn key(bytes: &[u8]) -> StoreKey {
    StoreKey { domain: Domain::default_domain(), hash: Hash::of(bytes) }
}

fn len() -> u32 {
    u32::try_from(LEN).expect("small")
}

/// A store whose disk has chunks 0 to 3, and whose memory is empty.
fn store(dir: &Path, memory_bytes: u64) -> (Arc<Store>, Arc<DiskTier>) {
    let disk = DiskTier::new(1 << 20);
    let config = DiskConfig {
        dir: dir.to_owned(),
        size_max: 64 << 20,
        free_floor: 0,
        slab_bytes: None,
        policy: Policy::Fletch,
        seed: 7,
        files_max: 16,
        mount_memory: None,
    };
    disk.open(config, SystemTime::now()).expect("open");
    for n in 0..4 {
        let chunk = Verified::of(content(n));
        disk.engine().expect("open").put(&key(chunk.bytes()), DatasetId(1), &chunk).expect("kept");
    }
    let limits = StoreLimits { memory_bytes, deadline: Duration::from_secs(20), attempts: 2 };
    (Store::new(limits, Some(Arc::clone(&disk)), TaskTracker::new()), disk)
}

#[test]
fn what_the_system_has_in_memory_is_read_from_disk_and_then_from_memory() {
    let dir = tempfile::tempdir().expect("a directory");
    let (s, disk) = store(dir.path(), 8 << 20);
    for n in 0..4 {
        let bytes = content(n);
        let hit = s.read_no_wait(&key(&bytes), len()).expect("just written, so in the page cache");
        assert_eq!((hit.chunk.bytes(), hit.tier), (&bytes, Tier::Disk));
        let hit = s.read_no_wait(&key(&bytes), len()).expect("in memory");
        assert_eq!((hit.chunk.bytes(), hit.tier), (&bytes, Tier::Memory));
    }
    assert!(s.read_no_wait(&key(b"absent"), 6).is_none());
    assert!(s.read_no_wait(&key(&content(5)), len()).is_none());
    let counts = disk.report().engine.expect("open").counts;
    assert_eq!((s.stats().hits_disk, s.stats().hits_memory, counts.hits), (4, 4, 4));
}

#[test]
fn i1_a_part_is_hashed_under_its_own_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let (s, _disk) = store(dir.path(), 8 << 20);
    let chunk = content(1);
    let part = chunk.slice(1000..90_000);
    let found = s.part_no_wait(&key(&chunk), len(), &(1000..90_000), Hash::of(&part)).expect("on disk");
    assert_eq!((found.chunk.bytes(), found.tier), (&part, Tier::Disk));
    let found = s.part_no_wait(&key(&chunk), len(), &(1000..90_000), Hash::of(&part)).expect("in memory");
    assert_eq!(found.tier, Tier::Memory);
    let other = Hash::of(b"other");
    assert!(s.part_no_wait(&key(&chunk), len(), &(1000..90_000), other).is_none(), "other bytes");
    assert!(s.part_no_wait(&key(&chunk), len(), &(150_000..250_000), other).is_none(), "past the end");
}

#[tokio::test]
async fn i1_a_flipped_bit_is_not_here_and_the_usual_read_quarantines_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let (s, disk) = store(dir.path(), 8 << 20);
    let bytes = content(2);
    for slab in std::fs::read_dir(dir.path().join("slabs")).expect("slabs") {
        let path = slab.expect("entry").path();
        let all = std::fs::read(&path).expect("read");
        if let Some(at) = all.windows(64).position(|w| w == &bytes[..64]) {
            let file = File::options().write(true).open(&path).expect("open");
            file.write_all_at(&[all[at + 500] ^ 1], at as u64 + 500).expect("flip");
        }
    }
    assert!(s.read_no_wait(&key(&bytes), len()).is_none());
    assert_eq!(disk.report().corrupt, 0, "it says nothing about the chunk");
    let answer = bytes.clone();
    let fetch: crate::Fetch = Arc::new(move |_| {
        let answer = answer.clone();
        Box::pin(async move { Ok(answer) })
    });
    let hit = s.read(key(&bytes), len(), DatasetId(1), fetch).await.expect("fetched");
    assert_eq!((hit.chunk.bytes(), hit.tier, disk.report().corrupt), (&bytes, Tier::Origin, 1));
}

#[test]
fn i6_without_a_free_buffer_nothing_is_read() {
    let dir = tempfile::tempdir().expect("a directory");
    let (s, disk) = store(dir.path(), 300_000);
    let held = s.read_no_wait(&key(&content(0)), len()).expect("there is room for one");
    assert!(s.read_no_wait(&key(&content(1)), len()).is_none());
    assert_eq!(disk.report().engine.expect("open").counts.hits, 1);
    drop(held);
}

#[test]
fn i5_a_closed_tier_is_a_miss() {
    let dir = tempfile::tempdir().expect("a directory");
    let (s, disk) = store(dir.path(), 8 << 20);
    disk.close().expect("closed");
    assert!(s.read_no_wait(&key(&content(0)), len()).is_none());
}
