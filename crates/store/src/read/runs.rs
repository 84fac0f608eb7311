//! Reads of a part of a long chunk: of the groups that have the bytes, and of no others.
//!
//! 1. (I1) Groups are checked by hashes that make the chunk's name ([`GroupHashes`]). The store learns the
//!    hashes of a chunk whenever it hashes the whole of it, or from a caller that got them elsewhere.
//! 2. (I3) One flight fetches a run of groups. A reader that finds the chunk itself in flight should join
//!    that ([`Store::is_in_flight`]).
//! 3. Groups that were fetched stay in memory under the name of their run, and never go to the disk. The
//!    store remembers which runs of a chunk it fetched last, so that a smaller run is found in a longer one.
//! 4. A reader that goes on a second time where the last one ended gets twice as much as the last one, up to
//!    the chunk. Not the first time: the kernel cuts one read of a program into two.

use super::{Fetch, FlightRequest, Store};
use crate::{
    dataset_id::DatasetId,
    disk_tier::{DiskTier, Wanted},
    outcome::{Hit, PartHit, ReadError, Tier},
    stats::Counters,
};
use bytes::Bytes;
use fletch_core::{
    Expected, Hash, StoreKey, Verified,
    groups::{GROUPED_BYTES_MIN, GroupHashes, GroupRun},
};
use moka::sync::Cache;
use std::{io, ops::Range, sync::Arc};
use tokio::time::Instant;

/// The part of a store's memory that hashes of groups take, one of this many. The hashes of a chunk are a
/// five-hundredth of it, so they cover sixteen times what the memory holds.
const GROUPS_PART: u64 = 32;
/// A store with less memory has the hashes beside it: chunks need all of it.
const SMALL_BYTES: u64 = 128 << 20;
/// What a chunk costs in the cache beside its hashes, in bytes.
const OVERHEAD_BYTES: u32 = 256;
/// The most chunks whose last runs are remembered.
const CHUNKS_RECENT_MAX: u64 = 4096;
/// The most runs of a chunk that are remembered.
const RUNS_RECENT_MAX: usize = 8;

/// Returns how much of a store's memory is for the hashes of groups, in bytes.
pub(crate) fn groups_bytes(memory_bytes: u64) -> u64 {
    if memory_bytes < SMALL_BYTES { 0 } else { memory_bytes / GROUPS_PART }
}

/// The hashes of the groups of chunks, and the runs that were fetched last.
#[derive(Debug)]
pub(crate) struct KnownGroups {
    hashes: Cache<Hash, Arc<GroupHashes>>,
    recent: Cache<Hash, Arc<[Range<usize>]>>,
}

impl KnownGroups {
    pub fn new(bytes: u64) -> Self {
        let hashes = Cache::builder()
            .max_capacity(bytes.max(SMALL_BYTES / GROUPS_PART))
            .weigher(|_: &Hash, groups: &Arc<GroupHashes>| {
                u32::try_from(groups.as_bytes().len()).unwrap_or(u32::MAX).saturating_add(OVERHEAD_BYTES)
            })
            .build();
        KnownGroups { hashes, recent: Cache::new(CHUNKS_RECENT_MAX) }
    }

    /// Returns how to read a whole chunk of `len` bytes from disk. The hashes of its groups are known then.
    pub fn whole(&self, chunk: Hash, len: u32) -> Wanted {
        let needless = len < GROUPED_BYTES_MIN || self.hashes.get(&chunk).is_some();
        if needless { Wanted::Whole } else { Wanted::Grouped }
    }

    /// Remembers the hashes of a chunk, if it has any.
    pub fn learn(&self, groups: Option<GroupHashes>) {
        if let Some(groups) = groups {
            self.hashes.insert(groups.chunk(), Arc::new(groups));
        }
    }

    fn note_run(&self, run: &GroupRun) {
        let chunk = run.of().chunk();
        let before = self.recent.get(&chunk);
        let before = before.as_deref().unwrap_or_default().iter();
        let others = before.filter(|r| **r != run.range()).take(RUNS_RECENT_MAX - 1).cloned();
        self.recent.insert(chunk, std::iter::once(run.range()).chain(others).collect());
    }
}

impl Store {
    /// Returns the hashes of the groups of a chunk, if they are known.
    #[must_use]
    pub fn groups(&self, chunk: Hash) -> Option<Arc<GroupHashes>> {
        self.groups.hashes.get(&chunk)
    }

    /// Remembers the hashes of the groups of a chunk.
    pub fn learn_groups(&self, groups: &Arc<GroupHashes>) {
        self.groups.hashes.insert(groups.chunk(), Arc::clone(groups));
    }

    /// Whether a fetch of the whole chunk is under way.
    #[must_use]
    pub fn is_in_flight(&self, chunk: &StoreKey) -> bool {
        self.flights.has(chunk)
    }

    /// Returns a run of groups of a chunk from memory or disk. `None` says nothing about the chunk: it may be
    /// absent or damaged. A caller that then reads the whole chunk finds out.
    ///
    /// # Errors
    /// [`ReadError::Overloaded`] when no memory came free before the deadline.
    pub async fn run(&self, chunk: &StoreKey, run: &GroupRun) -> Result<Option<PartHit>, ReadError> {
        if let Some(hit) = self.run_in_memory(chunk, run) {
            return Ok(Some(hit));
        }
        let Some(disk) = self.disk_for_run(chunk, run) else { return Ok(None) };
        let (len, within) = (run.len(), self.deadline());
        let until = Instant::now() + within;
        let Some(buffer) = self.buffer(len, until).await else {
            Counters::add(&self.counters.overloaded, 1);
            return Err(ReadError::Overloaded { len, within });
        };
        let part = Wanted::Part { offset: run.range().start, expected: Expected::Run(run.clone()) };
        let Some((chunk, _)) = disk.read(chunk, part, buffer, until).await else { return Ok(None) };
        Counters::add(&self.counters.hits_disk, 1);
        Ok(Some(PartHit { hit: Hit { chunk, tier: Tier::Disk }, begins: run.range().start }))
    }

    /// Fetches a run of groups of a chunk, as [`Store::read`] fetches a chunk, and keeps it in memory.
    ///
    /// # Errors
    /// [`ReadError`].
    pub async fn fetch_run(
        self: &Arc<Self>,
        chunk: &StoreKey,
        run: GroupRun,
        fetch: Fetch,
    ) -> Result<PartHit, ReadError> {
        let (begins, len) = (run.range().start, run.len());
        let key = StoreKey { domain: chunk.domain.clone(), hash: run.name() };
        let until = Instant::now() + self.deadline();
        let dataset = DatasetId::UNCACHED;
        let run_of = run.clone();
        let request = FlightRequest { key, len, until, dataset, fetch, names: None, run: Some(run) };
        let hit = self.join(request, None).await?;
        self.groups.note_run(&run_of);
        Ok(PartHit { hit, begins })
    }

    /// Returns a run whose bytes a caller brought in memory of its own, if they are right. Keeps nothing.
    #[must_use]
    pub fn brought_run(&self, run: &GroupRun, bytes: Bytes) -> Option<PartHit> {
        let len = bytes.len() as u64;
        Counters::add(&self.counters.fetches, 1);
        match Verified::check(run.clone(), bytes) {
            Ok(chunk) => {
                Counters::add(&self.counters.fetched_bytes, len);
                Some(PartHit { hit: Hit { chunk, tier: Tier::Origin }, begins: run.range().start })
            }
            Err(wrong) => {
                Counters::add(&self.counters.corrupt, 1);
                tracing::warn!(chunk = %run.of().chunk(), %wrong, "wrong bytes came at once");
                None
            }
        }
    }

    /// Returns `len` bytes that `fill` reads into a buffer that is free now, as [`Verified::fill`] does: a
    /// run of groups, or a whole file. Keeps nothing. `None`: the bytes are wrong.
    ///
    /// # Errors
    /// Those of `fill`; `WouldBlock` if no buffer is free.
    pub fn fill_now(
        &self,
        expected: impl Into<Expected>,
        len: u32,
        fill: impl FnMut(usize, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<Option<Hit>> {
        let buffer = self.memory.try_buffer(len).ok_or(io::ErrorKind::WouldBlock)?;
        let filled = Verified::fill(expected, buffer, fill)?;
        Counters::add(&self.counters.fetches, 1);
        match filled {
            Ok(chunk) => {
                Counters::add(&self.counters.fetched_bytes, chunk.bytes().len() as u64);
                Ok(Some(Hit { chunk, tier: Tier::Origin }))
            }
            Err(_) => Ok(None),
        }
    }

    /// Returns the run to fetch for a reader that asks for `run`: a longer one if the reader goes on where
    /// the last two fetches in the chunk went, forwards or backwards.
    #[must_use]
    pub fn grown(&self, run: &GroupRun) -> GroupRun {
        let (asked, len) = (run.range(), run.of().chunk_len() as usize);
        let recent = self.groups.recent.get(&run.of().chunk());
        let Some([last, before, ..]) = recent.as_deref() else { return run.clone() };
        let follows = |a: &Range<usize>, b: &Range<usize>| b.start <= a.end && a.end < b.end;
        let precedes = |a: &Range<usize>, b: &Range<usize>| b.start < a.start && a.start <= b.end;
        let size = (2 * last.len()).next_power_of_two();
        let grown = if follows(before, last) && follows(last, &asked) {
            asked.start..(asked.start + size).max(asked.end).min(len)
        } else if precedes(before, last) && precedes(last, &asked) {
            asked.end.saturating_sub(size).min(asked.start)..asked.end
        } else {
            asked
        };
        run.of().run(&grown).unwrap_or_else(|| run.clone())
    }

    /// Returns a run if the chunk is in memory, or a run that has it.
    #[must_use]
    pub fn run_in_memory(&self, chunk: &StoreKey, run: &GroupRun) -> Option<PartHit> {
        if let Some(hit) = self.cached(chunk) {
            return Some(PartHit { hit, begins: 0 });
        }
        let asked = run.range();
        for had in self.groups.recent.get(&chunk.hash)?.iter() {
            if had.start <= asked.start && asked.end <= had.end {
                let longer = run.of().run(had)?;
                let key = StoreKey { domain: chunk.domain.clone(), hash: longer.name() };
                if let Some(hit) = self.cached(&key) {
                    return Some(PartHit { hit, begins: had.start });
                }
            }
        }
        None
    }

    /// Returns the disk, if it has the chunk that the run is of.
    pub(crate) fn disk_for_run(&self, chunk: &StoreKey, run: &GroupRun) -> Option<&Arc<DiskTier>> {
        self.disk().filter(|disk| disk.has(chunk, run.of().chunk_len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        StoreLimits,
        disk::{DiskConfig, Policy},
    };
    use fletch_core::Domain;
    use std::{
        sync::atomic::{AtomicU32, Ordering::Relaxed},
        time::{Duration, SystemTime},
    };
    use tokio_util::task::TaskTracker;

    const MIB: u64 = 1 << 20;
    const ANY: DatasetId = DatasetId(1);
    const KIB: usize = 1 << 10;

    fn store(disk: Option<Arc<DiskTier>>) -> Arc<Store> {
        let limits =
            StoreLimits { memory_bytes: 64 * MIB, deadline: Duration::from_millis(500), attempts: 2 };
        Store::new(limits, disk, TaskTracker::new())
    }

    fn content() -> Bytes {
        let mut bytes = vec![0; 2 << 20];
        blake3::Hasher::new().update(b"runs").finalize_xof().fill(&mut bytes);
        bytes.into()
    }

    fn key(bytes: &Bytes) -> StoreKey {
        StoreKey { domain: Domain::default_domain(), hash: Hash::of(bytes) }
    }

    fn groups(bytes: &Bytes) -> Arc<GroupHashes> {
        let (_, groups) = Verified::check_grouped(Hash::of(bytes), bytes.clone()).expect("right");
        Arc::new(groups.expect("long enough"))
    }

    /// A fetch that returns these bytes, and counts its calls.
    fn fetch(bytes: Bytes, calls: &Arc<AtomicU32>) -> Fetch {
        let calls = Arc::clone(calls);
        Arc::new(move |_| {
            calls.fetch_add(1, Relaxed);
            let bytes = bytes.clone();
            Box::pin(async move { Ok(bytes) })
        })
    }

    fn bytes_of(hit: &PartHit, range: &Range<usize>) -> Bytes {
        hit.slice(range).expect("the range lies in what was read")
    }

    #[tokio::test]
    async fn i3_a_run_is_fetched_once_and_then_lies_in_memory() {
        let (s, bytes, calls) = (store(None), content(), Arc::default());
        let (key, of) = (key(&bytes), groups(&bytes));
        let run = of.run(&(100_000..200_000)).expect("inside");
        assert!(s.run(&key, &run).await.expect("no error").is_none());
        let brought = fetch(bytes.slice(run.range()), &calls);
        let reads = (0..8).map(|_| s.fetch_run(&key, run.clone(), brought.clone()));
        for hit in futures::future::join_all(reads).await {
            let hit = hit.expect("fetched");
            assert_eq!(bytes_of(&hit, &(100_000..200_000)), bytes.slice(100_000..200_000));
        }
        assert_eq!(calls.load(Relaxed), 1);
        let smaller = of.run(&(120_000..120_001)).expect("inside");
        let hit = s.run(&key, &smaller).await.expect("no error").expect("it lies in the longer run");
        assert_eq!(
            (hit.hit.tier, bytes_of(&hit, &(120_000..120_001))),
            (Tier::Memory, bytes.slice(120_000..120_001))
        );
        assert!(s.cached(&key).is_none(), "the chunk itself is not there");
        assert!(s.run_no_wait(&key, &of.run(&(0..1)).expect("inside")).is_none());
    }

    #[tokio::test]
    async fn i1_wrong_groups_are_never_returned() {
        let (s, bytes, calls) = (store(None), content(), Arc::default());
        let (key, of) = (key(&bytes), groups(&bytes));
        let run = of.run(&(0..20_000)).expect("inside");
        let mut flipped = bytes[run.range()].to_vec();
        flipped[5] ^= 1;
        for wrong in [Bytes::from(flipped), bytes.slice(16_384..49_152), bytes.slice(0..16_384)] {
            let got = s.fetch_run(&key, run.clone(), fetch(wrong, &calls)).await;
            assert!(matches!(got, Err(ReadError::Corrupt(_))), "{got:?}");
        }
        assert_eq!((calls.load(Relaxed), s.stats().corrupt), (6, 6), "two attempts each");
    }

    #[tokio::test]
    async fn a_run_is_read_from_disk_without_its_chunk() {
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
        let (s, bytes, calls) = (store(Some(Arc::clone(&disk))), content(), Arc::default());
        let (key, len) = (key(&bytes), u32::try_from(bytes.len()).expect("small"));
        s.read(key.clone(), len, ANY, fetch(bytes.clone(), &calls)).await.expect("fetched");
        let of = s.groups(key.hash).expect("learned when the chunk was hashed");
        assert_eq!(of, groups(&bytes));
        disk.wait_flushed(Duration::from_secs(20)).await;
        s.memory.clear();
        for range in [0..1, 4095..70_000, bytes.len() - 1..bytes.len()] {
            let run = of.run(&range).expect("inside");
            for hit in [s.run(&key, &run).await.expect("no error"), s.run_no_wait(&key, &run)] {
                let hit = hit.expect("on disk, and in the page cache");
                assert_eq!((hit.hit.tier, bytes_of(&hit, &range)), (Tier::Disk, bytes.slice(range.clone())));
                assert_eq!(hit.hit.chunk.bytes().len(), run.range().len(), "only its groups");
            }
        }
        assert!(s.cached(&key).is_none());
        assert_eq!(calls.load(Relaxed), 1);
    }

    #[tokio::test]
    async fn runs_grow_for_a_reader_that_goes_on() {
        let (s, bytes, calls) = (store(None), content(), Arc::default());
        let (key, of) = (key(&bytes), groups(&bytes));
        let read = async |range: Range<usize>| {
            let run = s.grown(&of.run(&range).expect("inside"));
            s.fetch_run(&key, run.clone(), fetch(bytes.slice(run.range()), &calls)).await.expect("fetched");
            run.range()
        };
        assert_eq!(read(0..4 * KIB).await, 0..16 * KIB);
        assert_eq!(read(16 * KIB..20 * KIB).await, 16 * KIB..32 * KIB, "one read, in two");
        assert_eq!(read(32 * KIB..36 * KIB).await, 32 * KIB..64 * KIB, "twice as much");
        assert_eq!(read(64 * KIB..68 * KIB).await, 64 * KIB..128 * KIB);
        assert_eq!(read(1024 * KIB..1028 * KIB).await, 1024 * KIB..1040 * KIB, "a jump");
        assert_eq!(read(1008 * KIB..1020 * KIB).await, 1008 * KIB..1024 * KIB);
        assert_eq!(read(992 * KIB..1000 * KIB).await, 976 * KIB..1008 * KIB, "backwards");
        assert_eq!(read(2044 * KIB..2048 * KIB).await, 2032 * KIB..2048 * KIB, "never past the end");
    }
}
