use super::*;
use crate::Kind;
use fletch_core::{Domain, Hash};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use tokio::sync::Notify;

const MIB: u64 = 1 << 20;
const ANY: DatasetId = DatasetId(1);

fn store(memory_bytes: u64, deadline_ms: u64, attempts: u32) -> Arc<Store> {
    let deadline = Duration::from_millis(deadline_ms);
    Store::new(StoreLimits { memory_bytes, deadline, attempts }, None, TaskTracker::new())
}

fn content(seed: u32, len: usize) -> Bytes {
    let mut v = vec![0; len];
    v.iter_mut().zip(0u32..).for_each(|(b, i)| *b = (i.wrapping_mul(31).wrapping_add(seed)) as u8);
    v[..4.min(len)].copy_from_slice(&seed.to_le_bytes()[..4.min(len)]);
    v.into()
}

fn key_of(bytes: &Bytes) -> StoreKey {
    StoreKey { domain: Domain::default_domain(), hash: Hash::of(bytes) }
}

fn len_of(bytes: &Bytes) -> u32 {
    u32::try_from(bytes.len()).expect("small")
}

fn always(answer: Result<Bytes, FetchError>) -> Fetch {
    Arc::new(move |_| {
        let answer = answer.clone();
        Box::pin(async move { answer })
    })
}

/// A fetch that counts its calls and waits for `gate` before it answers.
fn gated(answer: Result<Bytes, FetchError>, calls: &Arc<AtomicU32>, gate: &Arc<Notify>) -> Fetch {
    let (calls, gate) = (Arc::clone(calls), Arc::clone(gate));
    Arc::new(move |_| {
        calls.fetch_add(1, SeqCst);
        let (answer, gate) = (answer.clone(), Arc::clone(&gate));
        Box::pin(async move {
            gate.notified().await;
            answer
        })
    })
}

async fn until(what: &str, mut is: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if is() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("never: {what}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn i3_64_waiters_one_fetch_and_the_leaders_caller_may_go_away() {
    let s = store(64 * MIB, 10_000, 2);
    let chunk = content(1, 300_000);
    let (calls, gate) = (Arc::new(AtomicU32::new(0)), Arc::new(Notify::new()));
    let fetch = gated(Ok(chunk.clone()), &calls, &gate);
    let spawn = || {
        let (s, key, len, fetch) = (Arc::clone(&s), key_of(&chunk), len_of(&chunk), Arc::clone(&fetch));
        s.tasks.clone().spawn(async move { s.read(key, len, ANY, fetch).await })
    };
    let leader = spawn();
    until("the fetch began", || calls.load(SeqCst) == 1).await;
    let waiters: Vec<_> = (0..63).map(|_| spawn()).collect();
    until("all wait", || s.stats().hits_flight == 63).await;
    leader.abort();
    assert!(leader.await.expect_err("aborted").is_cancelled());
    gate.notify_one();
    for w in waiters {
        let hit = w.await.expect("task").expect("read");
        assert_eq!((hit.chunk.bytes(), hit.tier), (&chunk, Tier::Flight));
    }
    assert_eq!(calls.load(SeqCst), 1);
    let again = s.read(key_of(&chunk), len_of(&chunk), ANY, fetch).await.expect("kept");
    assert_eq!((again.tier, calls.load(SeqCst)), (Tier::Memory, 1));
}

#[tokio::test]
async fn i3_with_every_reader_gone_the_fetch_ends_in_memory() {
    let s = store(64 * MIB, 10_000, 2);
    let chunk = content(2, 1000);
    let (calls, gate) = (Arc::new(AtomicU32::new(0)), Arc::new(Notify::new()));
    let fetch = gated(Ok(chunk.clone()), &calls, &gate);
    {
        let read = s.read(key_of(&chunk), 1000, ANY, fetch);
        tokio::pin!(read);
        assert!(tokio::time::timeout(Duration::from_millis(20), &mut read).await.is_err());
    }
    assert_eq!(calls.load(SeqCst), 1);
    gate.notify_one();
    until("it landed", || s.cached(&key_of(&chunk)).is_some()).await;
    assert_eq!(s.stats().flights, 0);
}

#[tokio::test]
async fn an_error_is_its_fetchers_own_and_is_not_kept() {
    let s = store(64 * MIB, 10_000, 2);
    let chunk = content(3, 1000);
    let (calls, gate) = (Arc::new(AtomicU32::new(0)), Arc::new(Notify::new()));
    let failing = gated(Err(FetchError::new(Kind::Unavailable, "origin is down")), &calls, &gate);
    let reads: Vec<_> = (0..10).map(|_| s.read(key_of(&chunk), 1000, ANY, Arc::clone(&failing))).collect();
    let release = async {
        until("the leader's fetch", || calls.load(SeqCst) == 1).await;
        until("all others wait for it", || s.stats().hits_flight == 9).await;
        gate.notify_one();
        until("one fetch of those who had joined", || calls.load(SeqCst) == 2).await;
        until("the others wait for that", || s.stats().hits_flight == 9 + 8).await;
        gate.notify_one();
    };
    let (all, ()) = tokio::join!(futures::future::join_all(reads), release);
    for r in all {
        let e = r.expect_err("failed");
        assert_eq!((e.kind(), e.to_string().as_str()), (Kind::Unavailable, "origin is down"));
    }
    assert_eq!((calls.load(SeqCst), s.stats().fetch_errors), (2, 2), "two for ten");
    let hit = s.read(key_of(&chunk), 1000, ANY, always(Ok(chunk.clone()))).await.expect("tried again");
    assert_eq!(hit.tier, Tier::Origin);
}

#[tokio::test]
async fn who_joined_a_fetch_that_failed_has_its_own() {
    let s = store(64 * MIB, 10_000, 1);
    let bad = [Err(FetchError::new(Kind::NotFound, "not for you")), Ok(content(9, 1000))];
    for (bad, seed) in bad.into_iter().zip(20..) {
        let chunk = content(seed, 1000);
        let (calls, gate) = (Arc::new(AtomicU32::new(0)), Arc::new(Notify::new()));
        let joined = s.stats().hits_flight;
        let leader = s.read(key_of(&chunk), 1000, ANY, gated(bad, &calls, &gate));
        let other = s.read(key_of(&chunk), 1000, ANY, always(Ok(chunk.clone())));
        let release = async {
            until("it leads", || calls.load(SeqCst) == 1).await;
            until("the other joined", || s.stats().hits_flight == joined + 1).await;
            gate.notify_one();
        };
        let (led, got, ()) = tokio::join!(leader, other, release);
        assert!(matches!(led, Err(ReadError::Fetch(_) | ReadError::Corrupt(_))), "its own: {led:?}");
        assert_eq!(got.expect("by its own fetch").tier, Tier::Origin);
    }
}

#[tokio::test]
async fn i6_joining_twice_takes_no_longer_than_once() {
    let s = store(64 * MIB, 300, 1);
    let chunk = content(10, 1000);
    let (calls, gate) = (Arc::new(AtomicU32::new(0)), Arc::new(Notify::new()));
    let leader = s.read(
        key_of(&chunk),
        1000,
        ANY,
        gated(Err(FetchError::new(Kind::Unavailable, "down")), &calls, &gate),
    );
    let other = s.read(key_of(&chunk), 1000, ANY, Arc::new(|_| Box::pin(std::future::pending())));
    let release = async {
        until("the other joined", || s.stats().hits_flight == 1).await;
        gate.notify_one();
    };
    let begun = Instant::now();
    let (_, got, ()) = tokio::join!(leader, other, release);
    assert!(matches!(got, Err(ReadError::Deadline(_))), "{got:?}");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    // The second flight began late and outlives its reader, but not its own deadline.
    until("the second flight ends, too", || s.stats().flights == 0).await;
    assert_eq!((s.stats().deadlines, s.stats().live_bytes), (1, 0));
}

#[tokio::test]
async fn every_reader_that_finds_no_memory_counts_as_overloaded() {
    let s = store(MIB, 200, 1);
    let held = content(1, 1 << 20);
    let held = s.read(key_of(&held), 1 << 20, ANY, always(Ok(held.clone()))).await.expect("fits");
    let c = content(2, 1000);
    let reads = (0..5).map(|_| s.read(key_of(&c), 1000, ANY, always(Ok(c.clone()))));
    for outcome in futures::future::join_all(reads).await {
        assert_eq!(outcome.expect_err("all memory is held").kind(), Kind::Overloaded);
    }
    assert_eq!((s.stats().hits_flight, s.stats().overloaded), (4, 5), "one flight, five readers");
    drop(held);
}

#[tokio::test]
async fn i1_corrupt_then_good_is_fetched_again_and_counted() {
    let s = store(64 * MIB, 10_000, 3);
    let chunk = content(4, 400_000);
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let (good, seen) = (chunk.clone(), Arc::clone(&attempts));
    let fetch: Fetch = Arc::new(move |n| {
        seen.lock().push(n);
        let mut bytes = good.to_vec();
        match n {
            0 => bytes[399_999] ^= 1,
            1 => bytes.truncate(399_999),
            _ => {}
        }
        Box::pin(async move { Ok(bytes.into()) })
    });
    let hit = s.read(key_of(&chunk), len_of(&chunk), ANY, fetch).await.expect("third is right");
    assert_eq!(*hit.chunk.bytes(), chunk);
    assert_eq!(*attempts.lock(), [0, 1, 2]);
    assert_eq!((s.stats().corrupt, s.stats().fetches), (2, 3));
}

#[tokio::test]
async fn i1_wrong_bytes_are_never_handed_out_nor_kept() {
    let s = store(64 * MIB, 10_000, 2);
    let (asked, other) = (content(5, 1000), content(6, 1000));
    let e = s.read(key_of(&asked), 1000, ANY, always(Ok(other))).await.expect_err("another chunk's bytes");
    assert_eq!(e.kind(), Kind::Corrupt);
    assert!(s.cached(&key_of(&asked)).is_none());
    // Right bytes, wrong length asked for: the permit would not cover them.
    let e = s.read(key_of(&asked), 999, ANY, always(Ok(asked.clone()))).await.expect_err("length");
    assert_eq!(e.kind(), Kind::Corrupt);
    assert_eq!((s.stats().corrupt, s.stats().live_bytes), (4, 0));
}

#[tokio::test]
async fn a_fetch_may_end_the_attempts_with_its_own_word() {
    let s = store(64 * MIB, 10_000, 9);
    let chunk = content(7, 1000);
    let fetch: Fetch = Arc::new(|n| {
        Box::pin(async move {
            if n < 2 {
                Ok(Bytes::from(vec![0; 1000]))
            } else {
                Err(FetchError::new(Kind::Corrupt, "changed"))
            }
        })
    });
    let e = s.read(key_of(&chunk), 1000, ANY, fetch).await.expect_err("no more sources");
    assert_eq!((e.to_string().as_str(), s.stats().fetches), ("changed", 3));
}

/// A buffer that knows how many of its kind are alive.
struct Tracked(Vec<u8>, Arc<AtomicU64>);

impl AsRef<[u8]> for Tracked {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        self.1.fetch_sub(self.0.len() as u64, SeqCst);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn i6_live_buffers_never_exceed_the_bound() {
    let bound = 64 * MIB;
    let s = store(bound, 30_000, 2);
    let (alive, peak) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let readers: Vec<_> = (0..160u32)
        .map(|i| {
            let (s, alive, peak) = (Arc::clone(&s), Arc::clone(&alive), Arc::clone(&peak));
            s.tasks.clone().spawn(async move {
                let bytes = content(i, 4 << 20);
                let key = key_of(&bytes);
                drop(bytes);
                let fetch: Fetch = Arc::new(move |_| {
                    let (alive, peak) = (Arc::clone(&alive), Arc::clone(&peak));
                    Box::pin(async move {
                        let now = alive.fetch_add(4 * MIB, SeqCst) + 4 * MIB;
                        peak.fetch_max(now, SeqCst);
                        Ok(Bytes::from_owner(Tracked(content(i, 4 << 20).to_vec(), alive)))
                    })
                });
                let hit = s.read(key, 4 << 20, ANY, fetch).await.expect("read");
                // A reader in the middle of sending.
                tokio::time::sleep(Duration::from_millis(u64::from(i % 7))).await;
                assert!(s.stats().live_bytes <= bound);
                hit.chunk.bytes().len()
            })
        })
        .collect();
    for r in readers {
        assert_eq!(r.await.expect("task"), 4 << 20);
    }
    let peak = peak.load(SeqCst);
    assert!(peak <= bound, "{} MiB were alive, {} allowed", peak / MIB, bound / MIB);
    assert!(peak >= bound / 2, "the test did not fill memory");
    let stats = s.stats();
    assert!(stats.cached_bytes <= bound / 4 * 3 && stats.cached_bytes > bound / 2, "{stats:?}");
    assert_eq!(stats.live_bytes, alive.load(SeqCst), "what is alive is what the permits say");
    assert_eq!(stats.live_bytes, stats.cached_bytes);
}

#[tokio::test]
async fn i6_without_memory_a_read_ends_as_overloaded_and_dropped_readers_give_it_back() {
    let s = store(MIB, 100, 2);
    let held: Vec<Hit> = {
        let mut held = Vec::new();
        for i in 0..4 {
            let c = content(i, 256 << 10);
            held.push(s.read(key_of(&c), 256 << 10, ANY, always(Ok(c.clone()))).await.expect("fits"));
        }
        held
    };
    assert_eq!(s.stats().live_bytes, MIB);
    let c = content(9, 256 << 10);
    let begun = Instant::now();
    // Three readers share a flight, and each of them is rejected and counted.
    let readers = (0..3).map(|_| s.read(key_of(&c), 256 << 10, ANY, always(Ok(c.clone()))));
    for rejected in futures::future::join_all(readers).await {
        assert_eq!(rejected.expect_err("all memory is held").kind(), Kind::Overloaded);
    }
    assert_eq!(s.stats().overloaded, 3);
    assert!(begun.elapsed() >= Duration::from_millis(100) && begun.elapsed() < Duration::from_secs(2));
    // A slice keeps its whole buffer, and so must keep its whole permit.
    let slice = held[0].chunk.slice(0..10).expect("slice");
    drop(held);
    assert!(s.stats().live_bytes >= 256 << 10);
    s.read(key_of(&c), 256 << 10, ANY, always(Ok(c.clone()))).await.expect("memory came back");
    drop(slice);
}

#[tokio::test]
async fn i6_a_chunk_larger_than_what_the_cache_leaves_free_still_gets_through() {
    let s = store(16 * MIB, 5_000, 2);
    for i in 0..3 {
        let c = content(i, 4 << 20);
        s.read(key_of(&c), 4 << 20, ANY, always(Ok(c.clone()))).await.expect("fills the cache");
    }
    assert_eq!(s.stats().cached_bytes, 12 * MIB);
    let big = content(99, 16 << 20);
    let hit =
        s.read(key_of(&big), 16 << 20, ANY, always(Ok(big.clone()))).await.expect("the cache gives way");
    assert_eq!(hit.chunk.bytes().len(), 16 << 20);
    let e = s.read(key_of(&big), (16 << 20) + 1, ANY, always(Ok(big.clone()))).await;
    drop(hit);
    assert_eq!(e.expect_err("more than all memory").kind(), Kind::Overloaded);
}

#[tokio::test]
async fn i6_a_fetch_that_never_answers_ends_at_the_deadline() {
    let s = store(MIB, 50, 2);
    let c = content(1, 1000);
    let never: Fetch = Arc::new(|_| Box::pin(std::future::pending()));
    let e = s.read(key_of(&c), 1000, ANY, never).await.expect_err("deadline");
    assert_eq!((e.kind(), s.stats().deadlines), (Kind::Unavailable, 1));
    assert_eq!((s.stats().live_bytes, s.stats().flights), (0, 0));
    s.read(key_of(&c), 1000, ANY, always(Ok(c.clone()))).await.expect("the next read tries again");
}

#[tokio::test]
async fn a_fetch_that_panics_is_an_error_and_not_a_hang() {
    let s = store(MIB, 5_000, 2);
    let c = content(1, 1000);
    let panics: Fetch = Arc::new(|_| Box::pin(async { panic!("a defect") }));
    let e = s.read(key_of(&c), 1000, ANY, panics).await.expect_err("lost");
    assert_eq!((e.kind(), s.stats().flights, s.stats().live_bytes), (Kind::Internal, 0, 0));
    s.read(key_of(&c), 1000, ANY, always(Ok(c.clone()))).await.expect("the next read tries again");
}

#[tokio::test]
async fn i7_domains_do_not_share() {
    let s = store(MIB, 5_000, 2);
    let c = content(1, 1000);
    s.read(key_of(&c), 1000, ANY, always(Ok(c.clone()))).await.expect("read");
    let foreign = StoreKey { domain: Domain::new("other").expect("name"), hash: Hash::of(&c) };
    assert!(s.cached(&foreign).is_none());
    let hit = s.read(foreign, 1000, ANY, always(Ok(c.clone()))).await.expect("read");
    assert_eq!((hit.tier, s.stats().cached_chunks), (Tier::Origin, 2));
}

#[tokio::test]
async fn what_is_pinned_outlives_the_cache_and_gives_its_permit_back() {
    let s = store(4 * MIB, 10_000, 1);
    let chunk = content(40, 1 << 20);
    let hit = s.read(key_of(&chunk), 1 << 20, ANY, always(Ok(chunk.clone()))).await.expect("read");
    let pinned = s.pin(key_of(&chunk), hit.chunk);
    assert_eq!(s.stats().pinned_bytes, 1 << 20);
    // More than the memory has room for, thrice.
    for seed in 41..53 {
        let other = content(seed, 1 << 20);
        s.read(key_of(&other), 1 << 20, ANY, always(Ok(other.clone()))).await.expect("room beside the pin");
    }
    let none = always(Err(FetchError::new(Kind::Unavailable, "not asked")));
    let again = s.read(key_of(&chunk), 1 << 20, ANY, none).await.expect("pinned");
    assert_eq!((again.tier, again.chunk.bytes()), (Tier::Memory, &chunk));
    drop((again, pinned));
    let whole = content(60, 4 << 20);
    s.read(key_of(&whole), 4 << 20, ANY, always(Ok(whole.clone()))).await.expect("all of it is free");
    assert_eq!(s.stats().pinned_bytes, 0);
}
