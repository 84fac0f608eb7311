//! The emulator's latency, bandwidth and request rate.

use super::EmulatorConfig;
use crate::seeds;
use parking_lot::{Mutex, RwLock};
use rand::Rng as _;
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// The 99th percentile of the standard normal distribution.
const Z99: f64 = 2.326_348;
/// The part of a rate that may be sent at once after a pause.
const BURST: Duration = Duration::from_millis(5);

/// A rate limiter (GCRA, the generic cell rate algorithm).
///
/// Each reservation returns the time when it may proceed.
struct RateLimiter {
    per_s: f64,
    burst: Duration,
    free: Mutex<Option<Instant>>,
}

impl RateLimiter {
    fn new(per_s: f64, burst: Duration) -> Self {
        RateLimiter { per_s, burst, free: Mutex::new(None) }
    }

    /// Reserves `amount`. Returns the time when it may be sent.
    fn reserve(&self, amount: f64) -> Instant {
        let mut free = self.free.lock();
        let now = Instant::now();
        let earliest = now.checked_sub(self.burst).unwrap_or(now);
        let start = free.unwrap_or(earliest).max(earliest);
        let end = start + Duration::from_secs_f64(amount / self.per_s);
        *free = Some(end);
        end
    }

    /// Whether one request may proceed now; reserves it only then.
    fn admit(&self) -> bool {
        let mut free = self.free.lock();
        let now = Instant::now();
        let earliest = now.checked_sub(self.burst).unwrap_or(now);
        let start = free.unwrap_or(earliest).max(earliest);
        let fits = start <= now;
        if fits {
            *free = Some(start + Duration::from_secs_f64(1.0 / self.per_s));
        }
        fits
    }
}

fn total(bytes_per_s: Option<u64>) -> Option<Arc<RateLimiter>> {
    bytes_per_s.map(|n| Arc::new(RateLimiter::new(n.max(1) as f64, BURST)))
}

pub(super) struct Throttle {
    rng: Mutex<ChaCha8Rng>,
    latency: Option<(f64, f64)>,
    stream: Option<f64>,
    total: RwLock<Option<Arc<RateLimiter>>>,
    requests: Option<RateLimiter>,
}

impl Throttle {
    pub fn new(config: &EmulatorConfig) -> Self {
        let latency = config.first_byte.map(|l| {
            let median = l.median.as_secs_f64().max(1e-9);
            (median, (l.p99.as_secs_f64() / median).max(1.0).ln() / Z99)
        });
        Throttle {
            rng: Mutex::new(seeds::rng(config.seed)),
            latency,
            stream: config.stream_bytes_per_s.map(|n| n.max(1) as f64),
            total: RwLock::new(total(config.total_bytes_per_s)),
            requests: config
                .rps_cap
                .map(|n| RateLimiter::new(f64::from(n.max(1)), Duration::from_millis(100))),
        }
    }

    /// Limits what all streams send together from now on, in bytes a second.
    pub fn set_total(&self, bytes_per_s: Option<u64>) {
        *self.total.write() = total(bytes_per_s);
    }

    fn total(&self) -> Option<Arc<RateLimiter>> {
        self.total.read().clone()
    }

    /// Returns a random time to first byte.
    pub fn first_byte(&self) -> Duration {
        let Some((median, sigma)) = self.latency else { return Duration::ZERO };
        let z = seeds::normal(&mut self.rng.lock());
        Duration::from_secs_f64(median * (sigma * z).exp())
    }

    /// Returns true with this probability.
    pub fn happens(&self, rate: f64) -> bool {
        rate >= 1.0 || self.rng.lock().random::<f64>() < rate
    }

    /// Whether a request is within the request rate.
    pub fn admit(&self) -> bool {
        self.requests.as_ref().is_none_or(RateLimiter::admit)
    }

    /// Returns the length of a piece of a body: about 10 ms of the slowest limit, 4 to 256 KiB.
    pub fn piece(&self) -> u64 {
        let rate = self.stream.unwrap_or(f64::MAX).min(self.total().map_or(f64::MAX, |t| t.per_s));
        ((rate / 100.0) as u64).clamp(4 << 10, 256 << 10)
    }

    /// Waits until a stream that began at `began` and has sent `sent` bytes may send `bytes` more.
    pub async fn wait(&self, began: Instant, sent: u64, bytes: u64) {
        if let Some(rate) = self.stream {
            sleep_until(began + Duration::from_secs_f64((sent + bytes) as f64 / rate)).await;
        }
        if let Some(total) = self.total() {
            sleep_until(total.reserve(bytes as f64)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Latency;

    #[test]
    fn latencies_have_the_quantiles_that_were_asked_for() {
        let latency = Latency { median: Duration::from_millis(25), p99: Duration::from_millis(120) };
        let throttle = Throttle::new(&EmulatorConfig {
            first_byte: Some(latency),
            seed: 3,
            ..EmulatorConfig::default()
        });
        let mut seen: Vec<Duration> = (0..20_000).map(|_| throttle.first_byte()).collect();
        seen.sort();
        let (median, p99) = (seen[10_000].as_secs_f64(), seen[19_800].as_secs_f64());
        assert!((0.023..0.027).contains(&median), "median {median}");
        assert!((0.108..0.132).contains(&p99), "p99 {p99}");
    }

    #[tokio::test(start_paused = true)]
    async fn bandwidth_and_rate_are_kept() {
        let config = EmulatorConfig {
            stream_bytes_per_s: Some(1_000_000),
            total_bytes_per_s: Some(1_500_000),
            rps_cap: Some(100),
            ..EmulatorConfig::default()
        };
        let throttle = Throttle::new(&config);
        let began = Instant::now();
        let one = async {
            for i in 0..100 {
                throttle.wait(began, i * 10_000, 10_000).await;
            }
        };
        one.await;
        assert!((0.99..1.01).contains(&began.elapsed().as_secs_f64()), "{:?}", began.elapsed());

        let began = Instant::now();
        let stream = async || {
            for i in 0..100 {
                throttle.wait(began, i * 10_000, 10_000).await;
            }
        };
        tokio::join!(stream(), stream(), stream());
        assert!((1.95..2.05).contains(&began.elapsed().as_secs_f64()), "{:?}", began.elapsed());

        throttle.set_total(Some(150_000));
        let began = Instant::now();
        throttle.wait(began, 0, 150_000).await;
        // A stream's own limit comes first.
        assert!((1.1..1.2).contains(&began.elapsed().as_secs_f64()), "{:?}", began.elapsed());

        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!((0..50).filter(|_| throttle.admit()).count(), 11, "a burst of a tenth of a second");
        tokio::time::advance(Duration::from_millis(50)).await;
        assert_eq!((0..50).filter(|_| throttle.admit()).count(), 5);
    }
}
