//! Memory for items that a stream (of a lease or a batch) reads ahead of sending them.
//!
//! A few bytes of a large chunk are copied out of it ([`Copies`]) as long as the budget has room. So an item
//! that waits to be sent, or whose client is slow, holds no chunk.
//!
//! Invariants:
//! 1. (I6) All streams together reserve at most half of [`ReadAhead`], and one stream at most a quarter.
//!    Copies and buffers of small pieces together take at most all of it.
//! 2. The item that a stream sends next waits for no memory; only later items do. So no stream can block
//!    another, however many there are and however slow their clients are.

use fletch_store::Copies;
use futures::{Stream, StreamExt as _};
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Items of at most this many bytes are read ahead. Larger ones are read while they are sent.
pub const READ_AHEAD_BYTES_MAX: u64 = 1 << 20;

/// The part of the memory for buffers of small pieces, one of this many, up to [`FRAMING_BYTES_MAX`].
const FRAMING_PART: u64 = 8;
const FRAMING_BYTES_MAX: u64 = 8 << 20;

/// The memory of all streams of a server.
#[derive(Debug)]
pub struct ReadAhead {
    /// Copies out of chunks.
    pub copies: Copies,
    /// Buffers of small pieces that are sent together. Apart from `copies`: where those have no room, a
    /// reply holds its chunk.
    pub framing: Copies,
    all: MemoryBudget,
}

/// A budget in KiB.
#[derive(Debug)]
struct MemoryBudget {
    kib: Arc<Semaphore>,
    all: u32,
}

/// The budget of one stream.
#[derive(Debug)]
pub struct StreamBudget {
    own: MemoryBudget,
    shared: Arc<ReadAhead>,
    /// The number of items that were sent.
    sent: Arc<watch::Sender<u32>>,
}

/// The memory that is reserved for one item.
#[derive(Debug)]
pub struct Reservation {
    number: u32,
    own: Option<OwnedSemaphorePermit>,
    shared: Option<OwnedSemaphorePermit>,
    sent: Arc<watch::Sender<u32>>,
}

/// Marks its item as sent when it is dropped.
struct SendingItem(Reservation);

fn kib(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX)
}

impl ReadAhead {
    /// Creates a budget of `bytes` bytes.
    #[must_use]
    pub fn new(bytes: u64) -> Arc<Self> {
        let framing = (bytes / FRAMING_PART).min(FRAMING_BYTES_MAX);
        Arc::new(ReadAhead {
            copies: Copies::new(bytes - framing),
            framing: Copies::new(framing),
            all: MemoryBudget::of(kib(bytes / 2)),
        })
    }

    #[must_use]
    pub fn reserved_bytes(&self) -> u64 {
        (u64::from(self.all.all) - self.all.kib.available_permits() as u64) << 10
    }
}

impl MemoryBudget {
    fn of(all: u32) -> Self {
        MemoryBudget { kib: Arc::new(Semaphore::new(all as usize)), all }
    }

    /// Waits for `bytes` bytes, or for the whole budget if it is smaller.
    async fn reserve(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        // The semaphore is never closed.
        Arc::clone(&self.kib).acquire_many_owned(kib(bytes).min(self.all)).await.ok()
    }

    fn try_reserve(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.kib).try_acquire_many_owned(kib(bytes).min(self.all)).ok()
    }
}

impl StreamBudget {
    /// Creates the budget of one stream, which is half of what all streams may reserve.
    #[must_use]
    pub fn new(shared: &Arc<ReadAhead>) -> Self {
        StreamBudget {
            own: MemoryBudget::of(shared.all.all / 2),
            shared: Arc::clone(shared),
            sent: Arc::new(watch::Sender::new(0)),
        }
    }

    /// Returns an empty reservation, for an item without bytes.
    #[must_use]
    pub fn empty(&self, number: u32) -> Reservation {
        Reservation { number, own: None, shared: None, sent: Arc::clone(&self.sent) }
    }

    /// Waits for memory for the stream's item `number`, counted from 0, of `bytes` bytes.
    ///
    /// The reservation is empty for an item of more than [`READ_AHEAD_BYTES_MAX`], and for the item that is
    /// sent next.
    pub async fn reserve(&self, number: u32, bytes: u64) -> Reservation {
        if let Some(held) = self.try_reserve(number, bytes) {
            return held;
        }
        let mut held = self.empty(number);
        let budget = async {
            let own = self.own.reserve(bytes).await;
            (own, self.shared.all.reserve(bytes).await)
        };
        let mut sent = self.sent.subscribe();
        tokio::select! {
            biased;
            // This stream owns the sender, so that it cannot be dropped.
            _ = sent.wait_for(|&n| n >= number) => {}
            (own, shared) = budget => (held.own, held.shared) = (own, shared),
        }
        held
    }

    /// Does the same without waiting. `None` if there is not enough memory now.
    #[must_use]
    pub fn try_reserve(&self, number: u32, bytes: u64) -> Option<Reservation> {
        let mut held = self.empty(number);
        if bytes > 0 && bytes <= READ_AHEAD_BYTES_MAX && *self.sent.borrow() < number {
            held.own = Some(self.own.try_reserve(bytes)?);
            held.shared = Some(self.shared.all.try_reserve(bytes)?);
        }
        Some(held)
    }
}

impl Reservation {
    /// Holds the reservation until the last piece of the item was taken. Then the next item is sent.
    pub fn until_sent<P: Stream>(self, pieces: P) -> impl Stream<Item = P::Item> {
        let sending = SendingItem(self);
        pieces.map(move |piece| {
            let _until_the_end = &sending;
            piece
        })
    }
}

impl Drop for SendingItem {
    fn drop(&mut self) {
        self.0.sent.send_modify(|n| *n = (*n).max(self.0.number + 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::{FutureExt as _, stream};

    fn sent(held: Reservation) {
        drop(held.until_sent(stream::empty::<()>()));
    }

    #[tokio::test]
    async fn what_is_sent_next_waits_for_nobody() {
        let shared = ReadAhead::new(128 << 10);
        let (a, b) = (StreamBudget::new(&shared), StreamBudget::new(&shared));
        // The first item of a stream needs no memory. Later ones reserve at most half, and then wait.
        let first = a.reserve(0, 40 << 10).await;
        let second = a.reserve(1, 20 << 10).await;
        assert_eq!(shared.reserved_bytes(), 20 << 10);
        assert!(a.reserve(2, 20 << 10).now_or_never().is_none(), "more than its half");
        let third = a.reserve(2, 12 << 10).await;
        let ahead = [b.reserve(1, 30 << 10).await, b.reserve(2, 2 << 10).await];
        assert_eq!(shared.reserved_bytes(), 64 << 10);
        // Without free memory, a stream still sends item after item. Long and empty items need no memory.
        let alone = StreamBudget::new(&shared);
        for n in 0..3 {
            assert!(
                alone.reserve(n + 1, 1).now_or_never().is_none() && alone.try_reserve(n + 1, 1).is_none()
            );
            assert!(
                alone.try_reserve(n + 1, 0).is_some()
                    && alone.try_reserve(n + 1, READ_AHEAD_BYTES_MAX + 1).is_some()
            );
            sent(alone.reserve(n, READ_AHEAD_BYTES_MAX).now_or_never().expect("it is its turn"));
        }
        drop((first, second, third, ahead));
        assert_eq!(shared.reserved_bytes(), 0);
    }

    #[tokio::test]
    async fn a_turn_that_comes_ends_the_wait() {
        let shared = ReadAhead::new(16 << 10);
        let (other, budget) = (StreamBudget::new(&shared), StreamBudget::new(&shared));
        let _kept = other.reserve(1, 4 << 10).await;
        let (first, second) = (budget.reserve(0, 4 << 10).await, budget.reserve(1, 4 << 10).await);
        assert_eq!(shared.reserved_bytes(), 8 << 10);
        let waiting = budget.reserve(2, 4 << 10);
        tokio::pin!(waiting);
        assert!((&mut waiting).now_or_never().is_none());
        sent(first);
        assert!((&mut waiting).now_or_never().is_none(), "the second is not sent");
        // A reservation that is dropped unsent does not advance the stream, but frees its memory.
        drop(budget.reserve(5, 0).await);
        assert!((&mut waiting).now_or_never().is_none());
        sent(second);
        let last = waiting.now_or_never().expect("it is its turn");
        assert_eq!((shared.reserved_bytes(), last.own.is_none()), (4 << 10, true));
    }
}
