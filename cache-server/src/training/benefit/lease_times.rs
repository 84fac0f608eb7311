//! What the stream of a lease waited for.

use fletch_api::{ByteResult, ByteTier};
use std::time::Duration;

/// What a stream waits for until a sample is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitCause {
    /// A fetch from the origin, for this read or for another one.
    Origin,
    /// A read of the disk.
    Disk,
    /// The server itself: memory or a turn.
    Queue,
}

impl WaitCause {
    /// Returns what a sample waited for whose bytes were counted as `costs`.
    #[must_use]
    pub fn of(costs: impl IntoIterator<Item = (ByteResult, ByteTier)>) -> Self {
        let mut cause = WaitCause::Queue;
        for cost in costs {
            match cost {
                // A flight is a fetch that another read began, and a miss from memory one that was ahead.
                (_, ByteTier::Origin | ByteTier::Flight)
                | (ByteResult::Miss, ByteTier::Memory)
                | (ByteResult::Miss | ByteResult::Bypass, ByteTier::Peer) => return WaitCause::Origin,
                // The disk of another server, or its memory.
                (_, ByteTier::Peer | ByteTier::Disk) => cause = WaitCause::Disk,
                (_, ByteTier::Memory) => {}
            }
        }
        cause
    }
}

/// What the stream of a lease waited for, and what it brought.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LeaseTimes {
    /// The entries that it brought.
    pub entries: u32,
    /// Time for which the server held the answer back until the rank acknowledged earlier entries.
    pub held: Duration,
    /// Bytes of these entries.
    pub bytes: u64,
    /// Bytes of these entries that the server did not read from the origin for this epoch.
    pub shared_bytes: u64,
    /// Time that it was blocked on the origin.
    pub origin: Duration,
    /// Time that it was blocked on the disk.
    pub disk: Duration,
    /// Time that it was in the server's own queue.
    pub queue: Duration,
}

impl LeaseTimes {
    /// Adds the time for which the stream was blocked until a sample was there. `queued` of the sample's own
    /// time went by before its read began.
    pub fn add_wait(&mut self, cause: WaitCause, blocked: Duration, queued: Duration) {
        let queued = queued.min(blocked);
        self.queue += queued;
        let rest = blocked - queued;
        match cause {
            WaitCause::Origin => self.origin += rest,
            WaitCause::Disk => self.disk += rest,
            WaitCause::Queue => self.queue += rest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_divided_between_the_queue_and_its_cause() {
        let ms = Duration::from_millis;
        let mut times = LeaseTimes::default();
        times.add_wait(WaitCause::Origin, ms(10), ms(3));
        // The queue was over before the stream came to this sample.
        times.add_wait(WaitCause::Disk, ms(2), ms(50));
        times.add_wait(WaitCause::Queue, ms(1), ms(0));
        assert_eq!((times.origin, times.disk, times.queue), (ms(7), ms(0), ms(6)));
    }
}
