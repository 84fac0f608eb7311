//! The error cache: answers the kernel's second READ after a slow failure.
//!
//! When a READ of the kernel's read-ahead fails, the kernel sends another READ for the page that the program
//! waits for. Only the error of the second READ reaches the program. If the first READ failed after the whole
//! `--io-timeout`, the second READ would wait as long again. So for half a second this cache gives the second
//! READ the error of the first. It keeps no error longer, so a program that retries later reads again.

use moka::sync::Cache;
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// A READ that failed faster than this is not cached: to fail again costs little.
const SLOW_MIN: Duration = Duration::from_millis(300);
/// How long the cache keeps an error.
const KEPT_FOR: Duration = Duration::from_millis(500);
/// The most files in the cache. The reader of a file that was evicted waits a second time.
const FILES_MAX: u64 = 4096;

/// The errors of recent slow READs, by inode.
#[derive(Debug)]
pub struct ErrorCache {
    started: Instant,
    /// Milliseconds after `started` when the newest error expires, so that a successful READ costs one atomic
    /// load.
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
    /// Returns the errno of a slow READ of this inode that failed less than half a second ago.
    #[must_use]
    pub fn recent(&self, ino: u64) -> Option<i32> {
        let until = self.until_ms.load(Relaxed);
        if until == 0 || self.now_ms() > until {
            return None;
        }
        self.failed.get(&ino)
    }

    /// Records that a READ that started at `since` failed with `errno`. Ignores a READ that failed fast.
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
    fn slow_failures_are_cached_briefly_and_fast_ones_not_at_all() {
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
