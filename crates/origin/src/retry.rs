//! Decides when a call to an origin is retried. No other code retries one.
//!
//! Full jitter: a uniform wait below an exponentially growing ceiling, after M. Brooker,
//! "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.

use crate::OriginError;
use crate::stats::Counters;
use fletch_bounds::{Gate, pass_gate};
use std::future::Future;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout_at};

const FIRST: Duration = Duration::from_millis(50);
const CEILING: Duration = Duration::from_secs(5);

/// Returns the wait before retry `attempt` (the first retry is 1), with `jitter` in 0..1.
///
/// At least `retry_after`, the time that the origin asked for, and at most 5 s more.
#[must_use]
pub fn backoff(attempt: u32, jitter: f64, retry_after: Option<Duration>) -> Duration {
    let doublings = attempt.saturating_sub(1).min(16);
    let ceiling = FIRST.saturating_mul(1 << doublings).min(CEILING);
    retry_after.unwrap_or_default().saturating_add(ceiling.mul_f64(jitter.clamp(0.0, 1.0)))
}

/// Calls `once` until it succeeds, fails for good, was tried `attempts_max` times, or the deadline is near.
///
/// Does not begin a wait that would pass the deadline.
pub(crate) async fn retrying<T, F: Future<Output = Result<T, OriginError>>>(
    what: &str,
    deadline: Instant,
    attempts_max: u32,
    counters: &Counters,
    mut once: impl FnMut(u32) -> F,
) -> Result<T, OriginError> {
    let mut attempt = 1;
    let mut last: Option<OriginError> = None;
    loop {
        let error = match timeout_at(deadline, once(attempt)).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => error,
            Err(_) => {
                let before = last.map(|e| format!("; the attempt before it failed: {e}")).unwrap_or_default();
                return Err(OriginError::Unavailable {
                    what: what.to_owned(),
                    why: format!("no answer within io_timeout in attempt {attempt}{before}"),
                });
            }
        };
        if !error.transient() || attempt >= attempts_max {
            return Err(error);
        }
        let asked = match &error {
            OriginError::Throttled { retry_after, .. } => *retry_after,
            _ => None,
        };
        let wake = Instant::now() + backoff(attempt, rand::random(), asked);
        if wake >= deadline {
            return Err(error);
        }
        tracing::debug!(%error, attempt, "retrying a call to the origin");
        pass_gate(Gate::Retry, sleep(wake - Instant::now())).await;
        counters.retries.fetch_add(1, Relaxed);
        attempt += 1;
        last = Some(error);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_are_jittered_and_bounded() {
        for attempt in 1..40 {
            let top = backoff(attempt, 1.0, None);
            assert_eq!(backoff(attempt, 0.0, None), Duration::ZERO);
            assert!(top <= CEILING && top >= FIRST);
            assert!(backoff(attempt + 1, 1.0, None) >= top);
            assert!(backoff(attempt, 0.5, None) <= top);
        }
        assert_eq!(backoff(1, 1.0, None), FIRST);
        assert_eq!(backoff(3, 1.0, None), FIRST * 4);
    }

    #[test]
    fn retry_after_is_honoured() {
        let asked = Duration::from_secs(7);
        assert_eq!(backoff(1, 0.0, Some(asked)), asked);
        assert!(backoff(9, 1.0, Some(asked)) <= asked + CEILING);
    }

    fn unavailable() -> OriginError {
        OriginError::Unavailable { what: "x".into(), why: "down".into() }
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_and_time_are_bounded() {
        let counters = Counters::default();
        let start = Instant::now();
        let mut calls = 0;
        let got: Result<(), _> = retrying("x", start + Duration::from_secs(3600), 4, &counters, |_| {
            calls += 1;
            async { Err(unavailable()) }
        })
        .await;
        assert_eq!((got, calls, counters.snapshot().retries), (Err(unavailable()), 4, 3));

        let start = Instant::now();
        let got: Result<(), _> =
            retrying("x", start + Duration::from_secs(2), 100, &counters, |_| std::future::pending()).await;
        assert!(matches!(got, Err(OriginError::Unavailable { .. })));
        assert_eq!(start.elapsed().as_secs(), 2);

        let start = Instant::now();
        let asked = Some(Duration::from_secs(10));
        let throttled = OriginError::Throttled { what: "x".into(), retry_after: asked };
        let got: Result<(), _> = retrying("x", start + Duration::from_secs(2), 100, &counters, |_| {
            std::future::ready(Err(throttled.clone()))
        })
        .await;
        assert_eq!(got, Err(throttled));
        assert_eq!(start.elapsed(), Duration::ZERO, "a wait past the deadline is not begun");
    }

    #[tokio::test(start_paused = true)]
    async fn only_transient_errors_are_retried() {
        let counters = Counters::default();
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut calls = 0;
        let gone = OriginError::NotFound { what: "x".into() };
        let got: Result<(), _> = retrying("x", deadline, 9, &counters, |_| {
            calls += 1;
            std::future::ready(Err(gone.clone()))
        })
        .await;
        assert_eq!((got, calls), (Err(gone), 1));
        let got = retrying("x", deadline, 9, &counters, |attempt| async move {
            if attempt < 3 { Err(unavailable()) } else { Ok(attempt) }
        })
        .await;
        assert_eq!(got, Ok(3));
    }
}
