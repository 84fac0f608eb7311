//! Permits to read from an origin, for the streams of one tenant: [`FairQueue`] decides whose request is
//! next, and callers wait here.

use super::fair_queue::{FairQueue, Stream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// The permits of a tenant at an origin.
#[derive(Debug)]
pub(super) struct StreamPermits {
    requests_max: usize,
    /// The most bytes under way. Two requests are let through, whatever their length is.
    bytes_max: Option<u64>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    requests: usize,
    bytes: u64,
    waiting: FairQueue<oneshot::Sender<StreamPermit>>,
}

/// A permit for one request. Dropping it gives it back.
#[derive(Debug)]
pub(super) struct StreamPermit {
    permits: Arc<StreamPermits>,
    bytes: u32,
}

impl StreamPermits {
    /// At most `requests_max` requests and `bytes_max` bytes at once.
    pub fn new(requests_max: usize, bytes_max: Option<u64>) -> Arc<Self> {
        Arc::new(StreamPermits { requests_max, bytes_max, state: Mutex::default() })
    }

    /// Returns the most requests at once.
    pub fn requests_max(&self) -> usize {
        self.requests_max
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every statement leaves the guarded value whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a request of a stream for `bytes` bytes may begin. The caller bounds the time.
    pub async fn acquire(self: &Arc<Self>, stream: &Stream, weight: f64, bytes: u32) -> StreamPermit {
        loop {
            let (sender, receiver) = oneshot::channel();
            self.lock().waiting.push(stream, weight, bytes, sender);
            self.serve_waiting();
            // A sender is dropped unused only with all permits.
            if let Ok(permit) = receiver.await {
                return permit;
            }
        }
    }

    /// Grants what may begin now.
    fn serve_waiting(self: &Arc<Self>) {
        loop {
            let next = self.lock().next(self.requests_max, self.bytes_max);
            let Some((bytes, sender)) = next else { return };
            // Without the lock: if the caller is gone, the permit is dropped here and gives itself back.
            drop(sender.send(StreamPermit { permits: Arc::clone(self), bytes }));
        }
    }
}

impl State {
    fn next(
        &mut self,
        requests_max: usize,
        bytes_max: Option<u64>,
    ) -> Option<(u32, oneshot::Sender<StreamPermit>)> {
        if self.requests >= requests_max {
            return None;
        }
        let (requests, under_way) = (self.requests, self.bytes);
        let fits = |bytes| bytes_max.is_none_or(|max| under_way + u64::from(bytes) <= max);
        let (bytes, sender) =
            self.waiting.pop(|sender| !sender.is_closed(), |bytes| requests < 2 || fits(bytes))?;
        self.requests += 1;
        self.bytes += u64::from(bytes);
        Some((bytes, sender))
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        {
            let mut state = self.permits.lock();
            state.requests -= 1;
            state.bytes -= u64::from(self.bytes);
        }
        self.permits.serve_waiting();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_core::{DatasetName, Domain};
    use futures::FutureExt as _;

    fn stream(name: &str) -> Stream {
        (Domain::new("d").expect("a name"), DatasetName::new(name).expect("a name"))
    }

    #[tokio::test]
    async fn a_long_queue_of_one_dataset_delays_no_other() {
        let permits = StreamPermits::new(4, None);
        let (scan, train) = (stream("scan"), stream("train"));
        let mut held = Vec::new();
        for _ in 0..4 {
            held.push(permits.acquire(&scan, 1.0, 100).now_or_never().expect("free"));
        }
        let mut queue: Vec<_> = (0..50).map(|_| Box::pin(permits.acquire(&scan, 1.0, 100))).collect();
        for waiting in &mut queue {
            assert!(waiting.as_mut().now_or_never().is_none());
        }
        let mut late = Box::pin(permits.acquire(&train, 1.0, 100));
        assert!(late.as_mut().now_or_never().is_none());
        drop(held.pop());
        let first = late.now_or_never().expect("the stream that got nothing yet goes first");
        assert!(queue[0].as_mut().now_or_never().is_none());
        // Callers that leave take nothing with them.
        drop((queue, first, held));
        let state = permits.lock();
        assert_eq!((state.requests, state.bytes), (0, 0));
    }

    #[tokio::test]
    async fn bytes_bound_what_is_under_way_and_two_requests_always_are() {
        let permits = StreamPermits::new(8, Some(1000));
        let one = stream("one");
        let mut held = Vec::new();
        for _ in 0..2 {
            held.push(permits.acquire(&one, 1.0, 4000).now_or_never().expect("two of any length"));
        }
        let mut third = Box::pin(permits.acquire(&one, 1.0, 10));
        assert!(third.as_mut().now_or_never().is_none());
        held.clear();
        held.push(third.now_or_never().expect("there is room again"));
        for _ in 0..3 {
            held.push(permits.acquire(&one, 1.0, 300).now_or_never().expect("within the bytes"));
        }
        assert!(permits.acquire(&one, 1.0, 300).now_or_never().is_none());
    }
}
