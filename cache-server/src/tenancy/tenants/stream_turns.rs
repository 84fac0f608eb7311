//! Whose request to an origin is next: [`FairQueue`] decides, and callers wait here.

use super::fair_queue::{FairQueue, Stream};
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use tokio::sync::oneshot;

/// The turns of a tenant's requests to one origin. One caller at a time has the turn.
#[derive(Debug, Default)]
pub(super) struct StreamTurns(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    is_taken: bool,
    waiting: FairQueue<oneshot::Sender<StreamTurn>>,
}

/// The turn of one request: nobody else waits for a permit of the origin meanwhile. Dropping it gives the
/// turn to the next one.
#[derive(Debug)]
pub(super) struct StreamTurn(Arc<StreamTurns>);

impl StreamTurns {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Waits for the turn of a request of a stream for `bytes` bytes. The caller bounds the time.
    pub async fn acquire(self: &Arc<Self>, stream: &Stream, weight: f64, bytes: u32) -> StreamTurn {
        loop {
            let (sender, receiver) = oneshot::channel();
            self.lock().waiting.push(stream, weight, bytes, sender);
            self.serve_waiting();
            // A sender is dropped unused only with all turns.
            if let Ok(turn) = receiver.await {
                return turn;
            }
        }
    }

    fn serve_waiting(self: &Arc<Self>) {
        loop {
            let next = self.lock().next();
            let Some(sender) = next else { return };
            // Without the lock: if the caller is gone, the turn is dropped here and goes to the next one.
            drop(sender.send(StreamTurn(Arc::clone(self))));
        }
    }
}

impl State {
    fn next(&mut self) -> Option<oneshot::Sender<StreamTurn>> {
        if self.is_taken {
            return None;
        }
        let sender = self.waiting.pop(|sender| !sender.is_closed())?;
        self.is_taken = true;
        Some(sender)
    }
}

impl Drop for StreamTurn {
    fn drop(&mut self) {
        self.0.lock().is_taken = false;
        self.0.serve_waiting();
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
        let turns = Arc::new(StreamTurns::default());
        let (scan, train) = (stream("scan"), stream("train"));
        let held = turns.acquire(&scan, 1.0, 100).now_or_never().expect("nobody waits");
        let mut queue: Vec<_> = (0..50).map(|_| Box::pin(turns.acquire(&scan, 1.0, 100))).collect();
        for waiting in &mut queue {
            assert!(waiting.as_mut().now_or_never().is_none());
        }
        let mut late = Box::pin(turns.acquire(&train, 1.0, 100));
        assert!(late.as_mut().now_or_never().is_none());
        drop(held);
        let first = late.now_or_never().expect("the stream that got nothing yet goes first");
        assert!(queue[0].as_mut().now_or_never().is_none());
        // A caller that leaves gives its turn to the next one.
        drop((first, queue.remove(0)));
        let second = queue.remove(0).now_or_never().expect("the next of the queue");
        drop((second, queue));
        assert!(turns.acquire(&scan, 1.0, 100).now_or_never().is_some());
    }
}
