//! Gets a missing chunk on the thread of its reader, if the chunk is close at hand.
//!
//! The leader of a flight tries this before it starts the flight's task.
//!
//! 1. (I1) The bytes are hashed, as those of a fetch. After wrong bytes the flight fetches.
//! 2. (I3) The leader keeps its guard meanwhile, so other readers of the chunk wait for it.
//! 3. (I6) It uses a buffer that is free now, or memory of the caller's. It takes no memory from the cache.

use super::Store;
use crate::{
    dataset_id::DatasetId,
    outcome::{Hit, Tier},
    stats::Counters,
};
use bytes::Bytes;
use fletch_core::{StoreKey, Verified};

/// The longest chunk that a reader gets on its own thread, which also hashes it (about 1 ms).
const AT_ONCE_BYTES_MAX: u32 = 4 << 20;

/// A way to get a chunk without a fetch.
///
/// Its functions run on the thread that polls the read, so their time must have a bound.
pub struct AtOnce<'a> {
    /// Returns the whole chunk in memory of the caller's, which the caller bounds. Is asked only if the store
    /// does not keep the chunk.
    pub bring: Option<&'a mut (dyn FnMut() -> Brought + Send)>,
    /// Fills the buffer with the whole chunk and returns true; or returns false, and the chunk is fetched.
    pub fill: &'a mut (dyn FnMut(&mut [u8]) -> bool + Send),
    /// Whether the store keeps the chunk in memory. If not, its buffer is free when the reader drops it.
    pub keep: bool,
}

/// What a caller has of a chunk in memory of its own.
pub enum Brought {
    /// The chunk, not verified.
    Bytes(Bytes),
    /// The chunk is not at hand.
    Nothing,
    /// The caller has no such memory: a buffer is to be filled.
    NoMemory,
}

impl Store {
    /// Returns a chunk that `at_once` brings. `None` says nothing about the chunk.
    pub(super) fn at_once(
        &self,
        key: &StoreKey,
        len: u32,
        dataset: DatasetId,
        at_once: AtOnce<'_>,
    ) -> Option<Hit> {
        if len > AT_ONCE_BYTES_MAX || self.disk.as_ref().is_some_and(|d| d.has(key, len)) {
            return None;
        }
        let bring = at_once.bring.filter(|_| !at_once.keep);
        let brought = bring.map_or(Brought::NoMemory, |bring| bring());
        let bytes = match brought {
            Brought::Bytes(bytes) if bytes.len() == len as usize => bytes,
            Brought::Bytes(_) | Brought::Nothing => return None,
            Brought::NoMemory => {
                let mut buffer = self.memory.try_buffer(len)?;
                if !(at_once.fill)(buffer.as_mut()) {
                    return None;
                }
                Bytes::from_owner(buffer)
            }
        };
        Counters::add(&self.counters.fetches, 1);
        match Verified::check_grouped(key.hash, bytes) {
            Ok((chunk, groups)) => {
                self.groups.learn(groups);
                let hit = self.fetched(key, dataset, chunk);
                if at_once.keep {
                    self.memory.insert(key.clone(), hit.chunk.clone());
                }
                Some(hit)
            }
            Err(wrong) => {
                Counters::add(&self.counters.corrupt, 1);
                tracing::warn!(chunk = %key.hash, %wrong, "wrong bytes came at once; the chunk is fetched");
                None
            }
        }
    }

    /// Counts a chunk that was fetched, and offers it to the disk.
    pub(super) fn fetched(&self, key: &StoreKey, dataset: DatasetId, chunk: Verified) -> Hit {
        Counters::add(&self.counters.fetched_bytes, chunk.bytes().len() as u64);
        let kept = self.disk.as_ref().is_none_or(|d| d.enqueue(key, dataset, &chunk));
        Hit { chunk, tier: if kept { Tier::Origin } else { Tier::Bypass } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        DiskTier, Fetch, ReadError, StoreLimits,
        disk::{DiskConfig, Policy},
    };
    use fletch_core::{Domain, Hash, Kind};
    use std::{
        sync::{Arc, mpsc},
        time::{Duration, SystemTime},
    };
    use tokio_util::task::TaskTracker;

    const MIB: u64 = 1 << 20;
    const ANY: DatasetId = DatasetId(1);

    fn store(memory_bytes: u64, disk: Option<Arc<DiskTier>>) -> Arc<Store> {
        let limits = StoreLimits { memory_bytes, deadline: Duration::from_millis(500), attempts: 2 };
        Store::new(limits, disk, TaskTracker::new())
    }

    fn content(seed: u32, len: usize) -> Bytes {
        let mut bytes = vec![0; len];
        blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
        bytes.into()
    }

    fn key_of(bytes: &Bytes) -> StoreKey {
        StoreKey { domain: Domain::default_domain(), hash: Hash::of(bytes) }
    }

    fn len_of(bytes: &Bytes) -> u32 {
        u32::try_from(bytes.len()).expect("small")
    }

    fn fetch_of(bytes: &Bytes) -> Fetch {
        let bytes = bytes.clone();
        Arc::new(move |_| {
            let bytes = bytes.clone();
            Box::pin(async move { Ok(bytes) })
        })
    }

    fn no_fetch() -> Fetch {
        Arc::new(|_| Box::pin(async { Err(crate::FetchError::new(Kind::Unavailable, "not expected")) }))
    }

    /// Reads `chunk`, of which `sent` is at hand. Returns the outcome, and how often it was asked for.
    async fn read(
        s: &Arc<Store>,
        chunk: &Bytes,
        sent: Option<&Bytes>,
        keep: bool,
        fetch: Fetch,
    ) -> (Result<Hit, ReadError>, u32) {
        let mut asked = 0;
        let mut fill = |buffer: &mut [u8]| {
            asked += 1;
            sent.is_some_and(|sent| {
                buffer.copy_from_slice(sent);
                true
            })
        };
        let at_once = Some(AtOnce { bring: None, fill: &mut fill, keep });
        let outcome = s.read_with(key_of(chunk), len_of(chunk), ANY, fetch, at_once).await;
        (outcome, asked)
    }

    #[tokio::test]
    async fn a_chunk_at_hand_is_not_fetched_and_no_task_runs() {
        let s = store(64 * MIB, None);
        let chunk = content(1, 110_000);
        let (outcome, asked) = read(&s, &chunk, Some(&chunk), true, no_fetch()).await;
        let hit = outcome.expect("at hand");
        assert_eq!((hit.chunk.bytes(), hit.tier, asked), (&chunk, Tier::Origin, 1));
        let (again, asked) = read(&s, &chunk, Some(&chunk), true, no_fetch()).await;
        assert_eq!((again.expect("in memory").tier, asked), (Tier::Memory, 0));
        let stats = s.stats();
        assert_eq!((stats.fetches, stats.fetched_bytes, stats.flights), (1, 110_000, 0));
        assert_eq!(s.tasks.len(), 0);
    }

    #[tokio::test]
    async fn what_is_not_kept_gives_its_buffer_back() {
        let s = store(64 * MIB, None);
        let mut live = Vec::new();
        for seed in 0..20 {
            let chunk = content(seed, 110_000);
            let (outcome, asked) = read(&s, &chunk, Some(&chunk), false, no_fetch()).await;
            assert_eq!((outcome.expect("at hand").chunk.bytes(), asked), (&chunk, 1));
            assert!(s.cached(&key_of(&chunk)).is_none());
            live.push(s.stats().live_bytes);
        }
        assert!(live.iter().all(|bytes| *bytes == live[0] && *bytes >= 110_000), "one buffer: {live:?}");
    }

    #[tokio::test]
    async fn i1_what_the_caller_brings_is_hashed_where_it_is() {
        let s = store(64 * MIB, None);
        let (chunk, other) = (content(20, 50_000), content(21, 50_000));
        let read = async |brought: Option<Bytes>, keep: bool| {
            let mut bring = || brought.clone().map_or(Brought::Nothing, Brought::Bytes);
            let mut fill = |buffer: &mut [u8]| {
                buffer.copy_from_slice(&chunk);
                true
            };
            let at_once = Some(AtOnce { bring: Some(&mut bring), fill: &mut fill, keep });
            let fetch = fetch_of(&chunk);
            s.read_with(key_of(&chunk), len_of(&chunk), ANY, fetch, at_once).await.expect("read").chunk
        };
        let brought = read(Some(chunk.clone()), false).await;
        assert_eq!(brought.bytes().as_ptr(), chunk.as_ptr(), "not copied");
        assert_eq!((s.stats().fetches, s.stats().live_bytes, s.stats().cached_chunks), (1, 0, 0));
        for wrong in [other, chunk.slice(1..), Bytes::new()] {
            let fetched = read(Some(wrong), false).await;
            assert_eq!(fetched.bytes(), &chunk);
            s.memory.clear();
        }
        assert_eq!((s.stats().corrupt, s.stats().fetches), (1, 5), "wrong bytes, then fetches");
        assert_eq!(read(None, false).await.bytes(), &chunk, "fetched");
        s.memory.clear();
        let kept = read(Some(chunk.clone()), true).await;
        assert_ne!(kept.bytes().as_ptr(), chunk.as_ptr(), "what is kept lies in the store's memory");
        assert!(s.cached(&key_of(&chunk)).is_some());
    }

    #[tokio::test]
    async fn what_is_not_at_hand_is_fetched() {
        let s = store(64 * MIB, None);
        let chunk = content(2, 110_000);
        let (outcome, asked) = read(&s, &chunk, None, false, fetch_of(&chunk)).await;
        assert_eq!((outcome.expect("fetched").chunk.bytes(), asked), (&chunk, 1));
        assert_eq!(s.cached(&key_of(&chunk)).expect("a fetched chunk is kept").tier, Tier::Memory);
        assert_eq!((s.stats().fetches, s.stats().fetched_bytes), (1, 110_000));
        let long = content(3, (4 << 20) + 1);
        let (outcome, asked) = read(&s, &long, Some(&long), true, fetch_of(&long)).await;
        assert_eq!((outcome.expect("fetched").chunk.bytes(), asked), (&long, 0), "too long");
    }

    #[tokio::test]
    async fn i1_wrong_bytes_at_hand_are_counted_and_never_leave() {
        let s = store(64 * MIB, None);
        let (chunk, other) = (content(4, 50_000), content(5, 50_000));
        let (outcome, asked) = read(&s, &chunk, Some(&other), false, fetch_of(&chunk)).await;
        assert_eq!((outcome.expect("fetched").chunk.bytes(), asked), (&chunk, 1));
        assert_eq!((s.stats().corrupt, s.stats().fetches, s.stats().fetched_bytes), (1, 2, 50_000));
    }

    #[tokio::test]
    async fn i6_without_a_free_buffer_nothing_is_asked_at_once() {
        let s = store(MIB, None);
        let held = content(6, 1 << 20);
        let held = read(&s, &held, None, true, fetch_of(&held)).await.0.expect("it fits");
        let chunk = content(7, 1000);
        let (outcome, asked) = read(&s, &chunk, Some(&chunk), true, fetch_of(&chunk)).await;
        assert_eq!((outcome.expect_err("all memory is held").kind(), asked), (Kind::Overloaded, 0));
        drop(held);
        let (outcome, asked) = read(&s, &chunk, Some(&chunk), true, no_fetch()).await;
        assert_eq!((outcome.expect("at hand").chunk.bytes(), asked), (&chunk, 1));
        assert!(s.stats().live_bytes <= MIB);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn i3_other_readers_wait_for_a_chunk_that_comes_at_once() {
        let s = store(64 * MIB, None);
        let chunk = content(8, 200_000);
        let (begun, begins) = mpsc::channel();
        let (go, goes) = mpsc::channel();
        let (store, sent, runtime) = (Arc::clone(&s), chunk.clone(), tokio::runtime::Handle::current());
        let leader = std::thread::spawn(move || {
            let bytes = sent.clone();
            let mut fill = move |buffer: &mut [u8]| {
                begun.send(()).expect("the test listens");
                goes.recv().expect("the test answers");
                buffer.copy_from_slice(&bytes);
                true
            };
            let at_once = Some(AtOnce { bring: None, fill: &mut fill, keep: false });
            runtime.block_on(store.read_with(key_of(&sent), len_of(&sent), ANY, no_fetch(), at_once))
        });
        begins.recv().expect("the leader asks");
        let follower = s.read(key_of(&chunk), len_of(&chunk), ANY, no_fetch());
        tokio::pin!(follower);
        assert!(tokio::time::timeout(Duration::from_millis(20), &mut follower).await.is_err());
        assert_eq!((s.stats().hits_flight, s.stats().flights), (1, 1));
        go.send(()).expect("the leader waits");
        let hit = follower.await.expect("the leader's chunk");
        assert_eq!((hit.chunk.bytes(), hit.tier), (&chunk, Tier::Flight));
        let led = leader.join().expect("no panic").expect("at hand");
        assert_eq!((led.tier, s.stats().fetches, s.stats().flights), (Tier::Origin, 1, 0));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn i6_other_readers_give_up_at_their_deadline_if_the_leader_hangs() {
        let s = store(64 * MIB, None);
        let chunk = content(10, 1000);
        let (begun, begins) = mpsc::channel();
        let (go, goes) = mpsc::channel::<()>();
        let (store, sent, runtime) = (Arc::clone(&s), chunk.clone(), tokio::runtime::Handle::current());
        let leader = std::thread::spawn(move || {
            let mut fill = move |_: &mut [u8]| {
                begun.send(()).expect("the test listens");
                goes.recv().is_ok_and(|()| false)
            };
            let at_once = Some(AtOnce { bring: None, fill: &mut fill, keep: false });
            let fetch = fetch_of(&sent);
            runtime.block_on(store.read_with(key_of(&sent), len_of(&sent), ANY, fetch, at_once))
        });
        begins.recv().expect("the leader asks");
        let late = s.read(key_of(&chunk), len_of(&chunk), ANY, no_fetch()).await.expect_err("it hangs");
        assert!(matches!(late, ReadError::Deadline(_)), "{late}");
        go.send(()).expect("the leader waits");
        let led = leader.join().expect("no panic").expect("fetched, after nothing came at once");
        assert_eq!((led.chunk.bytes(), s.stats().flights), (&chunk, 0));
    }

    #[tokio::test]
    async fn a_chunk_that_came_at_once_goes_to_the_disk_and_comes_from_there() {
        let dir = tempfile::tempdir().expect("a directory");
        let disk = DiskTier::new(16 * MIB);
        let config = DiskConfig {
            dir: dir.path().to_owned(),
            size_max: 64 * MIB,
            free_floor: 0,
            slab_bytes: None,
            policy: Policy::Fletch,
            seed: 7,
            files_max: 16,
            mount_memory: None,
        };
        disk.open(config, SystemTime::now()).expect("open");
        let s = store(64 * MIB, Some(Arc::clone(&disk)));
        let chunk = content(9, 100_000);
        let (outcome, _) = read(&s, &chunk, Some(&chunk), false, no_fetch()).await;
        assert_eq!(outcome.expect("at hand").tier, Tier::Origin);
        disk.wait_flushed(Duration::from_secs(20)).await;
        let (outcome, asked) = read(&s, &chunk, Some(&chunk), false, no_fetch()).await;
        assert_eq!((outcome.expect("on disk").tier, asked), (Tier::Disk, 0));
    }
}
