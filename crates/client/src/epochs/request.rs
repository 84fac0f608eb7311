//! One lease request: sends it, repeats it until its lease is whole, and cleans up if nobody waits for it.
//!
//! 1. A request is repeated with its own number, so it gets one lease at a time.
//! 2. A lease whose request is dropped is released. If the server has not answered the request by then, the
//!    request goes on for [`ANSWER_WITHIN`] until it is known whether it got a lease.

use super::{
    JobHandle,
    held::{LeaseHold, Unanswered},
    journal::LeaseJournal,
    lease::{AckToken, GrantRecord, LeaseBatch, LeasedSample, Next},
    stream::{Stream, StreamError, checked},
};
use crate::{
    ClientError, backoff::Backoff, body::Responder, call::Call, client::to_json, term::TermValidity,
};
use bytes::{Bytes, BytesMut};
use fletch_api::{
    BatchItem, ChunkSpan, Code, GrantStatus, LeaseGrant, LeaseRequest, Problem, SampleHead, SampleRef,
    frames::Frame, routes,
};
use http::Method;
use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::oneshot,
    time::{Instant, sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// How long the server may hold an answer back while the rank must acknowledge first, in milliseconds.
const WAIT_MS: u64 = 5_000;

/// How far a sequence number moves forward after `stale_sequence`: an hour of microseconds.
const SEQUENCE_LEAP: u64 = 3_600_000_000;

/// How long a dropped request goes on, to learn whether it got a lease.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// Sends lease requests and remembers the last sequence number.
#[derive(Debug, Clone)]
pub(super) struct Requester {
    pub job: JobHandle,
    pub epoch: u64,
    pub rank: u32,
    pub worker: u32,
    pub sequence: u64,
    pub refs: bool,
    pub patience: Duration,
    /// Lists the leases for another process.
    pub journal: Option<Arc<LeaseJournal>>,
}

/// The answer to a lease request. Its lease is held while this value lives, and longer if it is handed out.
#[derive(Debug)]
pub(super) struct Answer {
    pub next: Next,
    pub hold: Option<LeaseHold>,
}

/// The part of a lease that was received so far. The lease is held while this value lives.
struct PartialLease {
    grant: LeaseGrant,
    samples: Vec<LeasedSample>,
    hold: LeaseHold,
}

impl Requester {
    /// Requests a lease under the present sequence number, and retries until it is whole or patience ends.
    ///
    /// Tells `grants` the number as soon as the request got a lease, whose samples then arrive.
    async fn next(
        &mut self,
        want: u32,
        mut grants: Option<oneshot::Sender<u64>>,
        answered: &CancellationToken,
    ) -> Result<Answer, ClientError> {
        let until = Instant::now() + self.patience;
        let mut backoff = Backoff::new();
        let mut partial: Option<PartialLease> = None;
        loop {
            let error = match self.receive(want, &mut partial, &mut grants, answered).await {
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
        answered: &CancellationToken,
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
        let term = response.extensions().get::<TermValidity>().cloned();
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
            if let (Some(term), Next::Last | Next::Done) = (&term, &next) {
                term.check().map_err(|why| StreamError::Retry(stream.server.unreachable(why)))?;
            }
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
                if let Some(journal) = &self.journal {
                    journal.note(grant.lease);
                }
                answered.cancel();
                if !hold.is_held() {
                    // A predecessor of this reader releases the lease. Ask for its entries after that.
                    let released = ClientError::LeaseExpired { endpoint: endpoint.clone() };
                    return Err(StreamError::Retry(released));
                }
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
        // Asked again, the server sends no sample twice, and says once more that the lease counts.
        if let Some(term) = &term {
            term.check().map_err(|why| StreamError::Retry(stream.server.unreachable(why)))?;
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
        let grant = GrantRecord {
            term: term.map(|term| term.stamp.term).unwrap_or_default(),
            worker: self.worker,
            sequence: self.sequence,
            entries: grant.entries,
        };
        Ok(Answer {
            next: Next::Batch(LeaseBatch { token, grant, samples, received: Duration::ZERO }),
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
                    StreamError::Retry(ClientError::Problem { problem, request: None, retry_after: None })
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

/// A request and its requester as it is afterwards.
pub(super) type Answered = (Requester, Result<Answer, ClientError>);

/// A request under way. Its output is its answer.
pub(super) struct RequestUnderWay {
    /// Present until the request ended.
    request: Option<Pin<Box<dyn Future<Output = Answered> + Send>>>,
    is_sent: bool,
    /// Cancelled once the request got a lease.
    answered: CancellationToken,
    job: JobHandle,
}

impl RequestUnderWay {
    /// Returns a request for a lease under the sequence number of `requester`.
    pub(super) fn new(mut requester: Requester, want: u32, grants: Option<oneshot::Sender<u64>>) -> Self {
        let (job, answered) = (requester.job.clone(), CancellationToken::new());
        let granted = answered.clone();
        let request = async move {
            let answer = requester.next(want, grants, &granted).await;
            (requester, answer)
        };
        RequestUnderWay { request: Some(Box::pin(request)), is_sent: false, answered, job }
    }
}

impl Future for RequestUnderWay {
    type Output = Answered;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Answered> {
        self.is_sent = true;
        let Some(request) = &mut self.request else { return Poll::Pending };
        let answered = ready!(request.as_mut().poll(context));
        self.request = None;
        Poll::Ready(answered)
    }
}

impl Drop for RequestUnderWay {
    fn drop(&mut self) {
        let Some(request) = self.request.take() else { return };
        if !self.is_sent || self.answered.is_cancelled() {
            // The lease that it is receiving is released with it.
            return;
        }
        // Without a runtime nothing can be sent. The lease expires if the server granted one.
        let Ok(runtime) = Handle::try_current() else { return };
        let (answered, unanswered) = (self.answered.clone(), Unanswered::new(&self.job.held));
        let rest = async move {
            let answer = async {
                tokio::select! {
                    _ = request => {}
                    () = answered.cancelled() => {}
                }
            };
            let is_known = timeout(ANSWER_WITHIN, answer).await.is_ok();
            tracing::trace!(is_known, "ended a lease request that nobody waits for");
            drop(unanswered);
        };
        drop(TaskTracker::new().spawn_on(rest, &runtime));
    }
}
