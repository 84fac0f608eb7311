//! How many units are brought at once: so many, and so many bytes of chunks.

use tokio::sync::{Semaphore, SemaphorePermit};

/// StrictAssignment to bring a unit, and room for its chunks.
pub(super) struct FetchPermits {
    turns: Semaphore,
    kib: Semaphore,
    all_kib: u32,
}

/// The right to bring a unit now, until it is dropped.
pub(super) struct FetchPermit<'a> {
    _turn: SemaphorePermit<'a>,
    _room: SemaphorePermit<'a>,
}

/// What is free at a moment.
pub(super) struct Free {
    turns: usize,
    kib: usize,
    all_kib: u32,
}

fn kib(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX).max(1)
}

impl FetchPermits {
    /// At most `turns_max` units at once, and chunks of `bytes_max`; a longer one waits for all there is.
    pub fn new(turns_max: usize, bytes_max: u64) -> Self {
        let all_kib = kib(bytes_max);
        FetchPermits { turns: Semaphore::new(turns_max), kib: Semaphore::new(all_kib as usize), all_kib }
    }

    /// A turn for chunks of so many bytes, first come, first served; `None` when there will be none.
    pub async fn turn(&self, bytes: u32) -> Option<FetchPermit<'_>> {
        let turn = self.turns.acquire().await.ok()?;
        let room = self.kib.acquire_many(kib(bytes.into()).min(self.all_kib)).await.ok()?;
        Some(FetchPermit { _turn: turn, _room: room })
    }

    /// What is free now.
    pub fn free(&self) -> Free {
        Free {
            turns: self.turns.available_permits(),
            kib: self.kib.available_permits(),
            all_kib: self.all_kib,
        }
    }
}

impl Free {
    /// Whether one more may begin.
    pub fn has_room(&self) -> bool {
        self.turns > 0 && self.kib > 0
    }

    /// One of so many bytes begins.
    pub fn take(&mut self, bytes: u32) {
        self.turns = self.turns.saturating_sub(1);
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
        let one = permits.turn(4 << 20).await.expect("a turn");
        let two = permits.turn(6 << 20).await.expect("a turn");
        assert!(!permits.free().has_room());
        let third = permits.turn(1);
        tokio::pin!(third);
        assert!(futures::poll!(&mut third).is_pending());
        drop(one);
        let third = third.await.expect("room came");
        drop((two, third));
        let longest = permits.turn(u32::MAX).await.expect("more than all is all");
        assert!(!permits.free().has_room());
        drop(longest);
        assert!(permits.free().has_room());
    }
}
