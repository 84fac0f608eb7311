use super::*;
use crate::OriginError;
use proptest::prelude::*;
use std::sync::Arc;
use tokio::sync::Semaphore;

const MAX: Duration = Duration::from_secs(10);

fn backend(name: &str) -> Backend {
    Backend::of_table(name)
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Returns a table with `n` calls of one backend, begun a millisecond after each other.
fn table(n: u64, waiting: isize) -> (Stalls, Backend, Instant, Vec<CallId>) {
    let (mut stalls, b, start) = (Stalls::new(64, MAX), backend("a"), Instant::now());
    let ids = (0..n).map(|i| {
        stalls.held(&b, 1);
        stalls.began(&b, (&format!("o{i}"), false), start + ms(i))
    });
    let ids = ids.collect();
    stalls.waiting(WaitsFor::Backend(&b), waiting);
    (stalls, b, start, ids)
}

#[test]
fn the_newest_stalled_calls_beyond_half_are_revoked_while_others_wait() {
    let (mut stalls, b, start, ids) = table(10, 100);
    assert_eq!(stalls.revoke(start + ms(900)), Vec::<CallId>::new(), "none was silent for a second");
    stalls.heard(&b, ids[9], start + ms(50));
    stalls.heard(&b, ids[9], start + ms(1_000));
    // Nine are stalled, and five may be.
    let mut revoked = stalls.revoke(start + ms(1_150));
    revoked.sort_unstable();
    assert_eq!(revoked, ids[5..9], "the newest; the tenth brought bytes");
    assert_eq!(stalls.revoke(start + ms(1_190)), Vec::<CallId>::new(), "the rest keep their half");
    for id in &revoked {
        stalls.ended(&b, *id, start + ms(1_200));
    }
    assert!(
        stalls.is_suspect(&b, "o8", start + ms(2_000)) && !stalls.is_suspect(&b, "o9", start + ms(2_000))
    );
    assert!(!stalls.is_suspect(&b, "o8", start + ms(1_200) + SUSPECT_FOR), "only for a minute");
}

#[test]
fn suspects_and_stalled_calls_share_a_quarter_of_the_permits() {
    let (mut stalls, b, start, ids) = table(3, 0);
    let take = |stalls: &mut Stalls, at| (0..10).filter(|_| stalls.take_slot(&b, 20, start + ms(at))).count();
    assert_eq!(take(&mut stalls, 500), 5, "no call is stalled yet");
    for _ in 0..5 {
        stalls.give_slot_back(&b);
    }
    assert_eq!(take(&mut stalls, 2_000), 2, "three are stalled");
    stalls.ended(&b, ids[0], start + ms(2_000));
    assert_eq!(take(&mut stalls, 2_000), 1);
    assert!(stalls.take_slot(&backend("one"), 1, start), "a quarter of one is one");
    assert!(!stalls.take_slot(&backend("one"), 1, start));
}

#[test]
fn as_many_as_wait_and_none_without_a_caller_that_waits() {
    let (mut stalls, b, start, ids) = table(10, 0);
    let late = start + ms(5_000);
    assert_eq!(stalls.revoke(late), Vec::<CallId>::new());
    stalls.waiting(WaitsFor::Backend(&b), 2);
    assert_eq!(stalls.revoke(late), [ids[9], ids[8]]);
    assert_eq!(stalls.revoke(late), Vec::<CallId>::new(), "two are on their way back");
    stalls.waiting(WaitsFor::Backend(&b), -2);
    // Callers that wait for a permit of all origins count for all backends together: 32 may be stalled.
    stalls.waiting(WaitsFor::Any, 100);
    assert_eq!(stalls.revoke(late), Vec::<CallId>::new());
    let other = backend("b");
    for i in 0..30 {
        stalls.began(&other, (&format!("p{i}"), false), start);
    }
    assert_eq!(stalls.revoke(late).len(), 38 - 32);
}

#[test]
fn a_single_permit_is_taken_from_a_hung_call() {
    let (mut stalls, _, start, ids) = table(1, 1);
    assert_eq!(stalls.revoke(start + ms(1_000)), ids);
}

#[test]
fn a_slow_origin_has_more_patience_and_its_suspects_are_forgiven() {
    let (mut stalls, b, start, ids) = table(8, 100);
    // Every first byte takes three seconds. Half lose their permits once, before anybody can know.
    let revoked = stalls.revoke(start + ms(1_100));
    assert!(revoked.len() == 4 && revoked.contains(&ids[7]));
    stalls.ended(&b, ids[7], start + ms(1_100));
    assert!(stalls.is_suspect(&b, "o7", start + ms(1_200)));
    for id in &ids[..4] {
        stalls.heard(&b, *id, start + ms(3_000));
        stalls.ended(&b, *id, start + ms(3_010));
    }
    assert!(stalls.patience(&b) >= ms(9_900), "{:?}", stalls.patience(&b));
    assert!(!stalls.is_suspect(&b, "o7", start + ms(3_100)), "a second is no long silence here");
    let again = stalls.began(&b, ("o7", false), start + ms(3_100));
    assert!(!stalls.revoke(start + ms(6_200)).contains(&again));
}

#[test]
fn the_patience_follows_the_origin_and_stays_within_its_bounds() {
    let mut calls = Calls::default();
    assert_eq!(calls.patience(MAX), PATIENCE_UNKNOWN);
    for _ in 0..50 {
        calls.answered(ms(1_000));
    }
    assert_eq!(calls.patience(MAX), ms(4_000));
    calls.answered(ms(9_000));
    assert_eq!(calls.patience(MAX), MAX, "12 s, but an attempt ends after 10 s");
    for _ in 0..200 {
        calls.answered(ms(10));
    }
    assert_eq!(calls.patience(MAX), PATIENCE_MIN);
    assert_eq!(calls.patience(ms(200)), ms(200), "no longer than an attempt");
}

#[test]
fn suspects_are_bounded_and_an_answer_clears_them() {
    let (mut stalls, b, start, _) = table(0, 0);
    for i in 0..(SUSPECTS_MAX as u64 + 10) {
        let id = stalls.began(&b, (&format!("o{i}"), false), start + ms(i));
        stalls.ended(&b, id, start + ms(i + 1_000));
    }
    assert_eq!(stalls.of(&b).suspects.len(), SUSPECTS_MAX);
    let now = start + ms(3_000);
    assert!(!stalls.is_suspect(&b, "o0", now) && stalls.is_suspect(&b, "o99", now));
    let id = stalls.began(&b, ("o99", true), now);
    stalls.heard(&b, id, now);
    stalls.ended(&b, id, now);
    assert!(!stalls.is_suspect(&b, "o99", now));
}

proptest! {
    /// Invariants 1 to 3, for every mix of calls.
    #[test]
    fn what_is_revoked_was_silent_and_half_stays(
        calls in prop::collection::vec((0u64..4_000, prop::option::of(0u64..4_000)), 1..80),
        waiting in 0isize..100,
        look in 0u64..8_000,
    ) {
        let (mut stalls, b, start, _) = table(0, waiting);
        let now = start + ms(look);
        let mut last = BTreeMap::new();
        for (began, heard) in &calls {
            stalls.held(&b, 1);
            let id = stalls.began(&b, ("o", false), start + ms(*began));
            last.insert(id, start + ms(*began));
            if let Some(after) = heard {
                stalls.heard(&b, id, start + ms(began + after));
                last.insert(id, start + ms(began + after));
            }
        }
        let patience = stalls.patience(&b);
        let silent = |id: &CallId| now.saturating_duration_since(last[id]) >= patience;
        let stalled = last.keys().filter(|id| silent(id)).count();
        let revoked = stalls.revoke(now);
        prop_assert!(revoked.iter().all(silent));
        prop_assert!(revoked.len() <= usize::try_from(waiting).expect("a count"));
        prop_assert!(stalled - revoked.len() >= stalled.min(calls.len() / 2));
    }
}

/// Reads of a fake origin through a watch, with `permits` permits. Returns when each one ended, and how.
async fn read_all(
    watch: &Arc<StallWatch>,
    (permits, n): (&Arc<Semaphore>, usize),
    objects: Vec<(String, Option<Duration>)>,
    deadline: Instant,
) -> Vec<(String, Option<Duration>)> {
    let start = Instant::now();
    let read = |(name, answers): (String, Option<Duration>)| async move {
        let b = backend("a");
        let until = async {
            loop {
                let is_suspect = watch.is_suspect(&b, &name);
                let slot = match is_suspect {
                    true => watch.suspect_slot((&b, n), &name).await,
                    false => None,
                };
                let permit = watch.waited(WaitsFor::Backend(&b), permits.acquire()).await;
                let _held = (permit.expect("open"), watch.holding(&b));
                let answer = async {
                    match answers {
                        Some(after) => tokio::time::sleep(after).await,
                        None => std::future::pending().await,
                    }
                    heard();
                    Ok::<_, OriginError>(())
                };
                if watch.attempt(&b, (&name, slot.is_some()), answer).await.0.is_ok() {
                    return start.elapsed();
                }
            }
        };
        let took = tokio::time::timeout_at(deadline, until).await.ok();
        (name, took)
    };
    futures::future::join_all(objects.into_iter().map(read)).await
}

#[tokio::test(start_paused = true)]
async fn five_hundred_hung_reads_leave_half_of_the_permits_to_healthy_ones() {
    let (watch, permits) = (StallWatch::new(64, MAX), Arc::new(Semaphore::new(64)));
    let deadline = Instant::now() + Duration::from_secs(120);
    let hung: Vec<_> = (0..500).map(|i| (format!("hung{i}"), None)).collect();
    let hung = read_all(&watch, (&permits, 64), hung, deadline);
    let healthy = async {
        // Until the last hung object is known.
        tokio::time::sleep(Duration::from_secs(25)).await;
        let begun = Instant::now();
        let objects = (0..640).map(|i| (format!("ok{i}"), Some(ms(20)))).collect();
        let ended = read_all(&watch, (&permits, 64), objects, deadline).await;
        assert!(ended.iter().all(|(_, took)| took.is_some()));
        begun.elapsed()
    };
    let (hung, took) = futures::join!(hung, healthy);
    assert!(hung.iter().all(|(_, took)| took.is_none()), "no hung object answers");
    // 640 reads of 20 ms take 200 ms with 64 permits, and twice that with half of them. Before, all permits
    // are with hung calls, and the first look comes after 50 ms.
    assert!(took <= ms(500), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_slow_origin_serves_as_much_as_without_the_watch() {
    let (watch, permits) = (StallWatch::new(64, MAX), Arc::new(Semaphore::new(64)));
    let deadline = Instant::now() + Duration::from_secs(600);
    let objects: Vec<_> = (0..640).map(|i| (format!("o{i}"), Some(ms(3_000)))).collect();
    let ended = read_all(&watch, (&permits, 64), objects, deadline).await;
    let last = ended.iter().map(|(_, took)| took.expect("it answers")).max().expect("one");
    // Ten rounds of three seconds, and one more for what the first round lost.
    assert!(last <= Duration::from_secs(33), "{last:?}");
}

#[tokio::test(start_paused = true)]
async fn an_origin_that_hangs_altogether_gets_few_more_requests() {
    let (watch, permits) = (StallWatch::new(64, MAX), Arc::new(Semaphore::new(64)));
    let deadline = Instant::now() + Duration::from_secs(30);
    let objects: Vec<_> = (0..200).map(|i| (format!("o{i}"), None)).collect();
    let ended = read_all(&watch, (&permits, 64), objects, deadline).await;
    assert!(ended.iter().all(|(_, took)| took.is_none()));
    assert_eq!(Instant::now(), deadline, "a deadline stays a deadline");
    // At most half of the permits change hands in a second.
    let begun = watch.begun();
    assert!(begun <= 64 + 32 * 30, "{begun} attempts");
}
