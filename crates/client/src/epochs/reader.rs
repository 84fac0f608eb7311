//! Receives the leases of one worker. Can ask for several leases ahead of its caller.
//!
//! 1. A lease is handed out after its stream ended, so that its grant is durable. A part of it never is.
//! 2. The requests of a worker are granted in the order of their sequence numbers, and their leases are
//!    handed out in this order: a request is sent after the one before it got its lease. Streams overlap.
//! 3. A request that failed, or whose lease is gone, is sent again with its number when its lease is wanted.

use super::{
    JobHandle,
    held::Unanswered,
    journal::LeaseJournal,
    lease::{AckToken, Next},
    request::{Answer, Answered, RequestUnderWay, Requester},
};
use crate::ClientError;
use fletch_api::Visitation;
use fletch_core::delivery::lease::SEQUENCES_MAX;
use std::{
    collections::VecDeque,
    panic::resume_unwind,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{runtime::Handle, sync::oneshot, time::Instant};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

/// How long a reader waits at least for a job of a cluster.
const CLUSTER_PATIENCE: Duration = Duration::from_secs(120);

/// The most leases that a reader asks for ahead of its caller.
///
/// The server remembers as many requests of a worker, and one that the caller waits for.
pub const LEASES_AHEAD_MAX: usize = SEQUENCES_MAX - 1;

/// Receives the leases of one worker. Made by [`JobHandle::reader`].
#[derive(Debug)]
pub struct EpochReader {
    requester: Requester,
    /// How many leases to ask for ahead of the caller.
    leases_ahead: usize,
    tasks: TaskTracker,
    /// The requests ahead of the caller, by ascending sequence number.
    ahead: VecDeque<AbortOnDropHandle<Asked>>,
    /// Gives the number of the last request of `ahead` once that request got a lease.
    granted: Option<oneshot::Receiver<u64>>,
    /// The runtime of the requests ahead.
    runtime: Option<Handle>,
}

/// An answer, with the requester as it is afterwards; `None` if no request was sent, because the one before
/// it got no lease.
type Asked = Option<Answered>;

impl JobHandle {
    /// Returns the reader of one worker of a rank. Sends no request yet.
    #[must_use]
    pub fn reader(&self, epoch: u64, rank: u32, worker: u32) -> EpochReader {
        EpochReader::new(self.clone(), epoch, rank, worker)
    }
}

impl EpochReader {
    fn new(job: JobHandle, epoch: u64, rank: u32, worker: u32) -> Self {
        let io_timeout = job.client.io_timeout();
        let patience = if job.client.has_members() { io_timeout.max(CLUSTER_PATIENCE) } else { io_timeout };
        // Higher than any number of a predecessor of this worker, unless the clock was set back.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let sequence = u64::try_from(now.as_micros()).unwrap_or(0);
        let requester =
            Requester { job, epoch, rank, worker, sequence, refs: false, patience, journal: None };
        EpochReader {
            requester,
            leases_ahead: 0,
            tasks: TaskTracker::new(),
            ahead: VecDeque::new(),
            granted: None,
            runtime: None,
        }
    }

    /// Lists every lease that the reader gets, whole or not, in a journal that another process may read.
    #[must_use]
    pub fn journal(mut self, journal: LeaseJournal) -> Self {
        self.requester.journal = Some(Arc::new(journal));
        self
    }

    /// Sets whether leases come as references to chunks, whose bytes the reader then fetches. Off by default.
    #[must_use]
    pub fn by_refs(mut self, refs: bool) -> Self {
        self.requester.refs = refs;
        self
    }

    /// Sets how long the reader retries while the server or the origin does not answer.
    ///
    /// The default is the client's `io_timeout`, and in a cluster at least 120 s: the job may wait for its
    /// server.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.requester.patience = patience;
        self
    }

    /// Sets the last sequence number that was used: the next request carries the number after it.
    ///
    /// The default is the time in microseconds, which is higher than the numbers of a predecessor that died.
    #[must_use]
    pub fn after_sequence(mut self, sequence: u64) -> Self {
        self.requester.sequence = sequence;
        self
    }

    /// Sets how many leases the reader asks for ahead, while the caller consumes the last one.
    ///
    /// 0 by default, and at most [`LEASES_AHEAD_MAX`]. Under `at-most-once` the reader asks for one lease
    /// ahead at most: with a request the earlier leases of a worker count as delivered.
    ///
    /// All these leases are then in memory, and the rank holds them. They are held while this reader lives,
    /// so run [`JobHandle::keep_alive`] beside it. The reader does not hand out a lease that a renewal
    /// reported gone. A new `want` takes effect with the lease after those ahead.
    ///
    /// A dropped reader releases the leases that it did not hand out. A reader of the same worker that starts
    /// [`after_sequence`](Self::after_sequence) this reader's [`sequence`](Self::sequence) asks for the
    /// leases ahead again, with the same numbers.
    #[must_use]
    pub fn prefetch(mut self, leases_ahead: usize) -> Self {
        let at_most_once = self.requester.job.job.visitation == Visitation::AtMostOnce;
        self.leases_ahead = leases_ahead.min(if at_most_once { 1 } else { LEASES_AHEAD_MAX });
        self
    }

    /// Returns the sequence number of the last request whose answer was handed out.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.requester.sequence
    }

    /// Returns the next samples, at most `want`.
    ///
    /// Waits up to 5 seconds if the rank must acknowledge samples first.
    ///
    /// # Errors
    /// [`ClientError`]: the server rejected the request, or did not answer within the reader's patience.
    pub async fn next(&mut self, want: u32) -> Result<Next, ClientError> {
        let asked = Instant::now();
        loop {
            let next = self.next_granted(want, asked).await?;
            match &next {
                // Its samples come again, from another server.
                Next::Batch(batch) if !self.requester.job.hold(&batch.token, &batch.grant).await? => {
                    let AckToken { epoch, rank, lease, .. } = batch.token;
                    self.requester.job.held.release(epoch, rank, lease);
                }
                _ => return Ok(next),
            }
        }
    }

    async fn next_granted(&mut self, want: u32, asked: Instant) -> Result<Next, ClientError> {
        let Answer { mut next, hold } = match self.take_ahead().await {
            Some(answer) => answer,
            None => {
                self.requester.sequence += 1;
                let request = RequestUnderWay::new(self.requester.clone(), want, None);
                let (requester, answer) = request.await;
                self.requester = requester;
                answer?
            }
        };
        if let Some(hold) = hold {
            hold.hand_out();
            self.ask_ahead(want);
        }
        if let Next::Batch(batch) = &mut next {
            batch.received = asked.elapsed();
        }
        Ok(next)
    }

    /// Asks for leases until enough of them are ahead of the caller, who has the lease of the last request.
    fn ask_ahead(&mut self, want: u32) {
        while self.ahead.len() < self.leases_ahead {
            self.runtime = Handle::try_current().ok();
            let before = self.granted.take().filter(|_| !self.ahead.is_empty());
            let (grants, granted) = oneshot::channel();
            self.granted = Some(granted);
            let mut requester = self.requester.clone();
            self.ahead.push_back(AbortOnDropHandle::new(self.tasks.spawn(async move {
                if let Some(before) = before {
                    requester.sequence = before.await.ok()?;
                }
                requester.sequence += 1;
                Some(RequestUnderWay::new(requester, want, Some(grants)).await)
            })));
        }
    }

    /// Returns the first lease ahead, if its request got one and it is still held.
    ///
    /// In every other case the caller asks again. An answer without a lease is older than the last acks. A
    /// failed or lost request keeps its sequence number, so the server grants the same lease if it still
    /// lives.
    async fn take_ahead(&mut self) -> Option<Answer> {
        let ended = self.ahead.front_mut()?.await;
        self.ahead.pop_front();
        match ended {
            Ok(Some((requester, Ok(answer)))) => match &answer.hold {
                Some(hold) if !hold.is_held() => None,
                hold => {
                    let granted = hold.is_some();
                    self.requester = requester;
                    if !granted {
                        // The requests after it were not sent.
                        self.ahead.clear();
                    }
                    Some(answer).filter(|_| granted)
                }
            },
            Ok(Some((_, Err(_)))) => None,
            Ok(None) => {
                // Neither were the requests after this one.
                self.ahead.clear();
                None
            }
            Err(lost) if lost.is_panic() => resume_unwind(lost.into_panic()),
            Err(_) => None,
        }
    }
}

impl Drop for EpochReader {
    fn drop(&mut self) {
        let Some(runtime) = &self.runtime else { return };
        for request in self.ahead.drain(..).filter(|request| !request.is_finished()) {
            let unanswered = Unanswered::new(&self.requester.job.held);
            let ended = async move {
                request.abort();
                // A cancelled task has no result.
                drop(request.await);
                drop(unanswered);
            };
            drop(self.tasks.spawn_on(ended, runtime));
        }
    }
}
