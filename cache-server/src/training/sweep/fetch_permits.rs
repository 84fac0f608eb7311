//! Permits that bound a sweep's fetches under way, in units and in bytes of chunks.

use tokio::sync::{Semaphore, SemaphorePermit};

/// The permits of one sweep.
pub(super) struct FetchPermits {
    permits: Semaphore,
    kib: Semaphore,
    all_kib: u32,
}

/// Permission to fetch one unit, returned when it is dropped.
pub(super) struct FetchPermit<'a> {
    _fetch: SemaphorePermit<'a>,
    _room: SemaphorePermit<'a>,
}

/// The permits that are free at one moment.
pub(super) struct Free {
    permits: usize,
    kib: usize,
    all_kib: u32,
}

fn kib(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX).max(1)
}

impl FetchPermits {
    /// At most `fetches_max` units and `bytes_max` bytes at once; a longer chunk takes all the bytes there
    /// are.
    pub fn new(fetches_max: usize, bytes_max: u64) -> Self {
        let all_kib = kib(bytes_max);
        FetchPermits { permits: Semaphore::new(fetches_max), kib: Semaphore::new(all_kib as usize), all_kib }
    }

    /// Waits for a permit for a chunk of `bytes` bytes, first come, first served.
    pub async fn acquire(&self, bytes: u32) -> Option<FetchPermit<'_>> {
        let permit = self.permits.acquire().await.ok()?;
        let room = self.kib.acquire_many(kib(bytes.into()).min(self.all_kib)).await.ok()?;
        Some(FetchPermit { _fetch: permit, _room: room })
    }

    /// Returns the permits that are free now.
    pub fn free(&self) -> Free {
        Free {
            permits: self.permits.available_permits(),
            kib: self.kib.available_permits(),
            all_kib: self.all_kib,
        }
    }
}

impl Free {
    /// Returns whether one more fetch may begin.
    pub fn has_room(&self) -> bool {
        self.permits > 0 && self.kib > 0
    }

    /// Takes the permits of a fetch of `bytes` bytes.
    pub fn take(&mut self, bytes: u32) {
        self.permits = self.permits.saturating_sub(1);
        self.kib = self.kib.saturating_sub(kib(bytes.into()).min(self.all_kib) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn turns_and_bytes_both_bound_what_is_brought() {
        let permits = FetchPermits::new(3, 10 << 20);
        let mut free = permits.free();
        let mut begun = 0;
        while free.has_room() {
            free.take(4 << 20);
            begun += 1;
        }
        assert_eq!(begun, 3, "the third begins while there is room, and waits for the rest of it");
        let one = permits.acquire(4 << 20).await.expect("a permit");
        let two = permits.acquire(6 << 20).await.expect("a permit");
        assert!(!permits.free().has_room());
        let third = permits.acquire(1);
        tokio::pin!(third);
        assert!(futures::poll!(&mut third).is_pending());
        drop(one);
        let third = third.await.expect("room came");
        drop((two, third));
        let longest = permits.acquire(u32::MAX).await.expect("more than all is all");
        assert!(!permits.free().has_room());
        drop(longest);
        assert!(permits.free().has_room());
    }
}
