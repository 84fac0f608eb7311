//! The kernel asks twice. When a READ of its read-ahead fails, it sends another one for the page a
//! program waits for, and only that one's error reaches the program. After a failure that took the
//! whole of `--io-timeout` the second READ would wait as long again; so for a moment it is told the
//! same. Programs that try again later are not: errors are not kept.

use moka::sync::Cache;
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// Failures that came faster than this are simply met again.
const SLOW_MIN: Duration = Duration::from_millis(300);
/// How long a failure is told again.
const KEPT_FOR: Duration = Duration::from_millis(500);
/// Files remembered at once; one that is forgotten costs its reader one more wait.
const FILES_MAX: u64 = 4096;

/// Failures of a moment ago.
#[derive(Debug)]
pub struct ErrorCache {
    started: Instant,
    /// Milliseconds after `started` until which there may be any: reads that work pay one load.
    until_ms: AtomicU64,
    /// Inode → errno.
    failed: Cache<u64, i32>,
}

impl Default for ErrorCache {
    fn default() -> Self {
        let failed = Cache::builder().max_capacity(FILES_MAX).time_to_live(KEPT_FOR).build();
        ErrorCache { started: Instant::now(), until_ms: AtomicU64::new(0), failed }
    }
}

impl ErrorCache {
    /// What a READ of this inode ended in a moment ago, if that took long.
    #[must_use]
    pub fn recent(&self, ino: u64) -> Option<i32> {
        let until = self.until_ms.load(Relaxed);
        if until == 0 || self.now_ms() > until {
            return None;
        }
        self.failed.get(&ino)
    }

    /// Notes that a READ that began at `since` ended in `errno`.
    pub fn record(&self, ino: u64, since: Instant, errno: i32) {
        if since.elapsed() < SLOW_MIN {
            return;
        }
        self.failed.insert(ino, errno);
        let until = self.now_ms() + u64::try_from(KEPT_FOR.as_millis()).unwrap_or(u64::MAX);
        self.until_ms.fetch_max(until, Relaxed);
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_failures_are_told_again_for_a_moment_and_short_ones_not_at_all() {
        let cache = ErrorCache::default();
        cache.record(1, Instant::now(), libc::EIO);
        assert_eq!(cache.recent(1), None, "it cost nothing");
        let long_ago = Instant::now().checked_sub(2 * SLOW_MIN).expect("the machine is up that long");
        cache.record(1, long_ago, libc::EIO);
        assert_eq!((cache.recent(1), cache.recent(2)), (Some(libc::EIO), None));
        std::thread::sleep(KEPT_FOR + Duration::from_millis(50));
        assert_eq!(cache.recent(1), None, "errors are not kept");
    }
}
