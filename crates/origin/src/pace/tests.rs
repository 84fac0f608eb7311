use super::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use tokio::time::sleep;

/// An origin with a request cap and a token bucket, in virtual time.
struct Capped {
    per_s: f64,
    burst: f64,
    retry_after: Option<Duration>,
    latency: Duration,
    level: Mutex<(f64, Instant)>,
}

impl Capped {
    fn new(per_s: f64, retry_after: Option<u64>, latency_ms: u64) -> Self {
        Capped {
            per_s,
            burst: per_s / 10.0,
            retry_after: retry_after.map(Duration::from_secs),
            latency: Duration::from_millis(latency_ms),
            level: Mutex::new((per_s / 10.0, Instant::now())),
        }
    }

    fn let_pass(&self) -> bool {
        let mut level = self.level.lock();
        let now = Instant::now();
        level.0 = (level.0 + self.per_s * (now - level.1).as_secs_f64()).min(self.burst);
        level.1 = now;
        let passes = level.0 >= 1.0;
        level.0 -= if passes { 1.0 } else { 0.0 };
        passes
    }
}

#[derive(Debug)]
struct Seen {
    sent: u64,
    passed: u64,
    early: u64,
}

/// Runs `callers` loops of requests for a time, and returns what the origin saw.
async fn ask(origin: Capped, callers: u64, seconds: u64) -> Seen {
    let (pace, origin) = (Arc::new(Pace::new(None, None, Instant::now())), Arc::new(origin));
    let end = Instant::now() + Duration::from_secs(seconds);
    let free = Arc::new(Mutex::new(Instant::now()));
    let (sent, passed, early) = (Arc::default(), Arc::default(), Arc::default());
    let mut tasks = tokio::task::JoinSet::new();
    for caller in 0..callers {
        let (pace, origin, free) = (Arc::clone(&pace), Arc::clone(&origin), Arc::clone(&free));
        let (sent, passed, early): (Arc<AtomicU64>, Arc<AtomicU64>, Arc<AtomicU64>) =
            (Arc::clone(&sent), Arc::clone(&passed), Arc::clone(&early));
        tasks.spawn(async move {
            let mut n = caller;
            while Instant::now() < end {
                let far = Instant::now() + Duration::from_secs(3600);
                let ticket = pace.admit("x", 0, far).await.expect("in time");
                sent.fetch_add(1, Relaxed);
                early.fetch_add(u64::from(Instant::now() < *free.lock()), Relaxed);
                sleep(origin.latency / 2).await;
                let passes = origin.let_pass();
                sleep(origin.latency - origin.latency / 2).await;
                if passes {
                    passed.fetch_add(1, Relaxed);
                    pace.answered(ticket);
                } else {
                    n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    pace.refused(ticket, origin.retry_after, (n >> 33) as f64 / (1u64 << 31) as f64);
                    let mut free = free.lock();
                    *free = (*free).max(Instant::now() + origin.retry_after.unwrap_or_default());
                }
            }
        });
    }
    while tasks.join_next().await.is_some() {}
    Seen { sent: sent.load(Relaxed), passed: passed.load(Relaxed), early: early.load(Relaxed) }
}

#[tokio::test(start_paused = true)]
async fn a_cap_is_found_and_used() {
    let mut bad = 0;
    for per_s in [50.0, 500.0, 3_000.0] {
        for (retry_after, seconds) in [(None, 30), (Some(0), 30), (Some(1), 30), (Some(2), 90)] {
            for latency in [1, 25, 100] {
                let seen = ask(Capped::new(per_s, retry_after, latency), 64, seconds).await;
                let case = format!("{per_s}/s, Retry-After {retry_after:?}, {latency} ms: {seen:?}");
                // The most requests of 64 loops, each request a timer's millisecond longer.
                let cap = per_s.min(64.0 / (latency as f64 / 1e3 + 0.002)) * seconds as f64;
                eprintln!(
                    "{case} goodput {:.3} asked {:.3}",
                    seen.passed as f64 / cap,
                    seen.sent as f64 / cap
                );
                assert_eq!(seen.early, 0, "sent before Retry-After: {case}");
                // A burst of five requests says little about the rate.
                let goodput = if per_s < 100.0 { 0.75 } else { 0.9 };
                bad += usize::from((seen.passed as f64) < goodput * cap || seen.sent as f64 > 1.15 * cap);
            }
        }
    }
    assert_eq!(bad, 0, "goodput of 0.9 and requests of 1.15 of the cap: see above");
}

#[tokio::test(start_paused = true)]
async fn who_is_never_refused_never_waits() {
    let seen = ask(Capped::new(1e9, None, 10), 64, 5).await;
    // 64 callers, 10 ms each (a timer's millisecond more).
    assert!(seen.sent == seen.passed && seen.sent > 64 * 5 * 85, "{seen:?}");
}

#[tokio::test(start_paused = true)]
async fn configured_rates_are_kept() {
    let pace = Pace::new(Some(100), None, Instant::now());
    let began = Instant::now();
    let far = began + Duration::from_secs(3600);
    for _ in 0..500 {
        pace.admit("x", 0, far).await.expect("in time");
    }
    assert!((4.9..5.1).contains(&began.elapsed().as_secs_f64()), "{:?}", began.elapsed());
    let pace = Pace::new(None, Some(1 << 20), Instant::now());
    let began = Instant::now();
    for _ in 0..50 {
        let ticket = pace.admit("x", 100 << 10, far).await.expect("in time");
        pace.answered(ticket);
        pace.charge_more(4 << 10);
    }
    let seconds = (50.0 * 104.0) / 1024.0;
    assert!((began.elapsed().as_secs_f64() - seconds).abs() < 0.2, "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_pause_holds_for_all_and_who_cannot_wait_is_told_at_once() {
    let pace = Pace::new(None, None, Instant::now());
    let far = Instant::now() + Duration::from_secs(3600);
    let one = pace.admit("x", 0, far).await.expect("open");
    let two = pace.admit("x", 0, far).await.expect("open");
    assert!(pace.refused(one, Some(Duration::from_secs(7)), 0.5));
    assert!(!pace.refused(two, Some(Duration::from_secs(8)), 0.5), "one event");
    let began = Instant::now();
    let soon = began + Duration::from_secs(5);
    match pace.admit("x", 0, soon).await {
        Err(OriginError::Throttled { retry_after: Some(after), .. }) => assert_eq!(after.as_secs(), 8),
        other => panic!("{other:?}"),
    }
    assert_eq!(began.elapsed(), Duration::ZERO);
    pace.admit("x", 0, far).await.expect("after the pause");
    assert!(began.elapsed() >= Duration::from_secs(8), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_cap_that_is_lifted_is_forgotten() {
    let pace = Pace::new(None, None, Instant::now());
    let far = Instant::now() + Duration::from_secs(36_000);
    let ticket = pace.admit("x", 0, far).await.expect("open");
    pace.refused(ticket, None, 0.5);
    sleep(FORGET + Duration::from_secs(2)).await;
    let began = Instant::now();
    for _ in 0..10_000 {
        pace.admit("x", 0, far).await.expect("open");
    }
    assert_eq!(began.elapsed(), Duration::ZERO);
}
