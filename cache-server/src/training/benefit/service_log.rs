//! The latest requests of an origin or of the disk.

use fletch_core::benefit;
use parking_lot::Mutex;
use std::{collections::VecDeque, sync::LazyLock, time::Instant};

/// The most requests that are remembered.
const REQUESTS_MAX: usize = 4096;

/// When the clock of all observations of this process begins: before the first request of any log.
static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Returns the seconds on the clock of all observations of this process.
pub(super) fn seconds(at: Instant) -> f64 {
    at.saturating_duration_since(*BEGIN).as_secs_f64()
}

/// All requests that an origin or the disk answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ServiceSums {
    /// The number of requests.
    pub requests: u64,
    /// The bytes that they brought.
    pub bytes: u64,
}

/// The latest requests that an origin or the disk answered.
#[derive(Debug)]
pub struct ServiceLog(Mutex<Log>);

impl Default for ServiceLog {
    fn default() -> Self {
        LazyLock::force(&BEGIN);
        ServiceLog(Mutex::default())
    }
}

#[derive(Debug, Default)]
struct Log {
    /// By their ends. `samples` are bytes here.
    requests: VecDeque<benefit::Served>,
    /// When the latest forgotten request ended.
    since: f64,
    /// The number of all requests and their bytes, forgotten ones included.
    sums: ServiceSums,
}

impl ServiceLog {
    /// Notes a request that began at `begun` and brought `bytes` just now.
    pub fn note(&self, begun: Instant, bytes: u64) {
        let request =
            benefit::Served { start: seconds(begun), end: seconds(Instant::now()), samples: bytes as f64 };
        let mut log = self.0.lock();
        log.sums.requests += 1;
        log.sums.bytes += bytes;
        if log.requests.len() == REQUESTS_MAX
            && let Some(forgotten) = log.requests.pop_front()
        {
            log.since = log.since.max(forgotten.end);
        }
        log.requests.push_back(request);
    }

    /// Returns the number of all requests, and their bytes.
    #[must_use]
    pub fn sums(&self) -> ServiceSums {
        self.0.lock().sums
    }

    /// Returns the requests that ended at `from` or later, in samples of `sample_bytes`, and the time before
    /// which requests are forgotten.
    pub(super) fn requests(&self, from: f64, sample_bytes: f64) -> (Vec<benefit::Served>, f64) {
        let log = self.0.lock();
        let wanted = log.requests.iter().filter(|r| r.end >= from);
        let in_samples = |r: &benefit::Served| benefit::Served { samples: r.samples / sample_bytes, ..*r };
        (wanted.map(in_samples).collect(), log.since)
    }
}

/// Returns how fast a link is while requests queue for it, in bytes a second, by the latest requests of all
/// who read over it. `None` if there were none.
#[must_use]
pub fn busy_rate(logs: &[&ServiceLog]) -> Option<f64> {
    let mut all = Vec::new();
    let mut complete_since = 0.0_f64;
    for log in logs {
        let (requests, since) = log.requests(0.0, 1.0);
        all.extend(requests);
        complete_since = complete_since.max(since);
    }
    benefit::service(&all, complete_since, f64::INFINITY).rate
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_datasets_at_one_link_share_its_rate() {
        let (a, b) = (ServiceLog::default(), ServiceLog::default());
        assert_eq!(busy_rate(&[&a, &b]), None);
        let begun = Instant::now();
        std::thread::sleep(std::time::Duration::from_millis(200));
        (0..4).for_each(|_| a.note(begun, 1000));
        (0..4).for_each(|_| b.note(begun, 3000));
        let (alone, both) = (busy_rate(&[&a]).expect("reads"), busy_rate(&[&a, &b]).expect("reads"));
        assert!((3.9..4.1).contains(&(both / alone)), "{both} and {alone}");
        assert!((15_000.0..20_001.0).contains(&alone), "4,000 bytes in 200 ms and a little: {alone}");
    }

    #[test]
    fn a_log_says_from_when_on_it_is_complete() {
        let log = ServiceLog::default();
        let begun = Instant::now();
        (0..REQUESTS_MAX).for_each(|_| log.note(begun, 200));
        let (all, since) = log.requests(0.0, 100.0);
        assert_eq!((all.len(), since), (REQUESTS_MAX, 0.0));
        assert_eq!(all[0].samples, 2.0);
        log.note(begun, 200);
        let (rest, since) = log.requests(0.0, 100.0);
        assert_eq!((rest.len(), since), (REQUESTS_MAX, all[0].end));
        assert!(log.requests(f64::MAX, 100.0).0.is_empty());
        assert_eq!(log.sums().bytes, 200 * (REQUESTS_MAX as u64 + 1), "sums forget nothing");
    }
}
