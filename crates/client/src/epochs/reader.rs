//! Receives the leases of one worker. Can ask for several leases ahead of its caller.
//!
//! 1. A lease is handed out after its stream ended, so that its grant is durable. A part of it never is.
//! 2. The requests of a worker are granted in the order of their sequence numbers, and their leases are
//!    handed out in this order: a request is sent after the one before it got its lease. Streams overlap.
//! 3. A request that failed, or whose lease is gone, is sent again with its number when its lease is wanted.

use super::{
    JobHandle,
    held::LeaseHold,
    lease::{AckToken, LeaseBatch, LeasedSample, Next},
    stream::{Stream, StreamError, checked},
};
use crate::{ClientError, backoff::Backoff, body::Responder, call::Call, client::to_json};
use bytes::{Bytes, BytesMut};
use fletch_api::{
    BatchItem, ChunkSpan, Code, GrantStatus, LeaseGrant, LeaseRequest, Problem, SampleHead, SampleRef,
    Visitation, frames::Frame, routes,
};
use fletch_core::delivery::lease::SEQUENCES_MAX;
use http::Method;
use std::{
    collections::VecDeque,
    panic::resume_unwind,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep},
};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

/// How long the server may hold an answer back while the rank must acknowledge first, in milliseconds.
const WAIT_MS: u64 = 5_000;

/// How long a reader waits at least for a job of a cluster.
const CLUSTER_PATIENCE: Duration = Duration::from_secs(120);

/// How far a sequence number moves forward after `stale_sequence`: an hour of microseconds.
const SEQUENCE_LEAP: u64 = 3_600_000_000;

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
}

/// An answer, with the requester as it is afterwards; `None` if no request was sent, because the one before
/// it got no lease.
type Asked = Option<(Requester, Result<Answer, ClientError>)>;

/// Sends lease requests and remembers the last sequence number.
#[derive(Debug, Clone)]
struct Requester {
    job: JobHandle,
    epoch: u64,
    rank: u32,
    worker: u32,
    sequence: u64,
    refs: bool,
    patience: Duration,
}

/// The answer to a lease request. Its lease is held while this value lives, and longer if it is handed out.
#[derive(Debug)]
struct Answer {
    next: Next,
    hold: Option<LeaseHold>,
}

/// The part of a lease that was received so far. The lease is held while this value lives.
struct PartialLease {
    grant: LeaseGrant,
    samples: Vec<LeasedSample>,
    hold: LeaseHold,
}

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
        let requester = Requester { job, epoch, rank, worker, sequence, refs: false, patience };
        EpochReader {
            requester,
            leases_ahead: 0,
            tasks: TaskTracker::new(),
            ahead: VecDeque::new(),
            granted: None,
        }
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
    /// A dropped reader holds no lease that it did not hand out. A reader of the same worker that starts
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
        let Answer { mut next, hold } = match self.take_ahead().await {
            Some(answer) => answer,
            None => self.requester.next(want, None).await?,
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
            let before = self.granted.take().filter(|_| !self.ahead.is_empty());
            let (grants, granted) = oneshot::channel();
            self.granted = Some(granted);
            let mut requester = self.requester.clone();
            self.ahead.push_back(AbortOnDropHandle::new(self.tasks.spawn(async move {
                if let Some(before) = before {
                    requester.sequence = before.await.ok()?;
                }
                let answer = requester.next(want, Some(grants)).await;
                Some((requester, answer))
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

impl Requester {
    /// Requests the next lease under a new sequence number, and retries until it is whole or patience ends.
    ///
    /// Tells `grants` the number as soon as the request got a lease, whose samples then arrive.
    async fn next(
        &mut self,
        want: u32,
        mut grants: Option<oneshot::Sender<u64>>,
    ) -> Result<Answer, ClientError> {
        self.sequence += 1;
        let until = Instant::now() + self.patience;
        let mut backoff = Backoff::new();
        let mut partial: Option<PartialLease> = None;
        loop {
            let error = match self.receive(want, &mut partial, &mut grants).await {
                Ok(next) => return Ok(next),
                Err(StreamError::Fatal(e)) => return Err(e),
                Err(StreamError::Retry(e)) => e,
            };
            if error.code() == Some(Code::StaleSequence) {
                // A predecessor of this worker used higher numbers: the clock was set back.
                self.sequence += SEQUENCE_LEAP;
                continue;
            }
            let wait = backoff.wait(error.retry_after());
            if Instant::now() + wait >= until {
                return Err(error);
            }
            tracing::debug!(%error, ?wait, "retrying the lease request");
            sleep(wait).await;
        }
    }

    /// Sends one request and receives the rest of the lease into `partial`.
    async fn receive(
        &self,
        want: u32,
        partial: &mut Option<PartialLease>,
        grants: &mut Option<oneshot::Sender<u64>>,
    ) -> Result<Answer, StreamError> {
        let received = partial.as_ref().map_or(0, |p| u32::try_from(p.samples.len()).unwrap_or(u32::MAX));
        let request = LeaseRequest {
            rank: self.rank,
            worker: self.worker,
            sequence: self.sequence,
            want,
            refs: self.refs,
            from: received,
            wait_ms: WAIT_MS,
            loader: Some(self.job.loader.for_request().map_err(StreamError::Fatal)?),
            ..LeaseRequest::default()
        };
        let client = &self.job.client;
        let path = routes::epoch(&self.job.job.id, self.epoch, "leases");
        let call = Call::new(Method::POST, path).json(to_json(&request).map_err(StreamError::Fatal)?);
        let opened = client.open(&call, Instant::now() + client.io_timeout()).await;
        let (server, response) = opened.map_err(|e| {
            if e.retryable() || e.code() == Some(Code::StaleSequence) {
                StreamError::Retry(e)
            } else {
                StreamError::Fatal(e)
            }
        })?;
        let endpoint = server.shown.to_string();
        let mut stream = Stream::new(Responder(&endpoint), response, client.io_timeout());
        let Some(Frame::Grant { grant }) = stream.frame().await.map_err(StreamError::Retry)? else {
            return Err(stream.broken("a lease stream does not begin with a grant frame"));
        };
        let grant: LeaseGrant = stream.json(&grant).map_err(StreamError::Fatal)?;
        let none = match grant.status {
            GrantStatus::Full => Some(Next::Full),
            GrantStatus::Last => Some(Next::Last),
            GrantStatus::Done => Some(Next::Done),
            GrantStatus::Granted => None,
        };
        if let Some(next) = none {
            return Ok(Answer { next, hold: None });
        }
        if let Some(grants) = grants.take() {
            // Nobody listens if no further lease is wanted ahead.
            grants.send(self.sequence).ok();
        }
        let lease = match partial {
            // A number alone would not do: a grant that never became durable may have had the same.
            Some(p) if (p.grant.lease, &p.grant.entries) == (grant.lease, &grant.entries) => p,
            // Another lease than the one that was being received: that one is gone, and so are its samples.
            _ => {
                *partial = None;
                let hold = LeaseHold::new(&self.job.held, self.epoch, self.rank, grant.lease, grant.ttl_ms);
                let new = PartialLease { grant: grant.clone(), samples: Vec::new(), hold };
                let new = partial.insert(new);
                // This stream skips as many samples as were received of the old lease.
                if received > 0 {
                    let expired = ClientError::LeaseExpired { endpoint: endpoint.clone() };
                    return Err(StreamError::Retry(expired));
                }
                new
            }
        };
        let mut refs = Vec::new();
        let ended = stream.samples(&mut lease.samples, &mut refs).await;
        if !refs.is_empty() {
            self.fetch(&mut lease.samples, refs, &stream.server).await?;
        }
        ended?;
        if lease.samples.len() != lease.grant.entries.len() {
            return Err(stream.broken("a lease stream ended before the lease's last sample"));
        }
        let Some(PartialLease { grant, samples, hold }) = partial.take() else {
            return Err(stream.broken("no lease"));
        };
        let token = AckToken {
            epoch: self.epoch,
            rank: self.rank,
            lease: grant.lease,
            entries: u32::try_from(samples.len()).unwrap_or(u32::MAX),
            ttl_ms: grant.ttl_ms,
        };
        Ok(Answer {
            next: Next::Batch(LeaseBatch { token, samples, received: Duration::ZERO }),
            hold: Some(hold),
        })
    }

    /// Fetches the bytes that `refs` locate and appends the samples in order, up to the first that fails.
    async fn fetch(
        &self,
        samples: &mut Vec<LeasedSample>,
        refs: Vec<(SampleHead, SampleRef)>,
        server: &Responder<'_>,
    ) -> Result<(), StreamError> {
        let span = |p: &fletch_api::RefPiece| {
            BatchItem::Chunk(ChunkSpan { hash: p.chunk, offset: p.offset.into(), length: Some(p.len.into()) })
        };
        let items: Vec<BatchItem> = refs.iter().flat_map(|(_, r)| r.pieces.iter().map(span)).collect();
        let mut pieces: VecDeque<Bytes> = VecDeque::new();
        for some in items.chunks(fletch_api::BATCH_ITEMS_MAX) {
            let client = self.job.client.routed();
            let batch = client.batch(self.job.job.root, some.to_vec(), u64::from(u32::MAX)).await;
            let mut batch = batch.map_err(StreamError::Retry)?;
            while let Some(piece) = batch.next().await.map_err(StreamError::Retry)? {
                let problem = |problem: Box<Problem>| {
                    StreamError::Retry(ClientError::Problem { problem, retry_after: None })
                };
                pieces.push_back(piece.outcome.map_err(problem)?);
            }
        }
        for (head, sample_ref) in refs {
            let mut bytes = BytesMut::new();
            for _ in &sample_ref.pieces {
                bytes.extend_from_slice(&pieces.pop_front().unwrap_or_default());
            }
            samples.push(checked(head, bytes.freeze(), server).map_err(StreamError::Retry)?);
        }
        Ok(())
    }
}
