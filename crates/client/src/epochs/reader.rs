//! One worker's stream of leases.

use super::{
    JobHandle,
    held::Hold,
    stream::{Stream, checked},
};
use crate::{ClientError, body::From as Answerer, retry::Backoff};
use bytes::{Bytes, BytesMut};
use fletch_api::{
    Ack, BatchItem, BatchTimes, ChunkSpan, Code, Grant, GrantStatus, LeaseRequest, Problem, SampleFile,
    SampleHead, SampleRef, frames::Frame, routes,
};
use std::{
    collections::VecDeque,
    panic::resume_unwind,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::time::{Instant, sleep};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

/// How long an answer may be held back, in milliseconds.
const WAIT_MS: u64 = 5_000;

/// How far a sequence leaps that was behind: an hour of microseconds.
const SEQUENCE_LEAP: u64 = 3_600_000_000;

/// A sample that was leased and received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeasedSample {
    /// The plan's entry.
    pub entry: u32,
    /// The sample's number in the version.
    pub sample: u32,
    /// The ordinal of its first entry in the version.
    pub ordinal: u64,
    /// Which copy of it; from 2^31 on it only fills up a last step.
    pub copy: u32,
    /// What its files are.
    pub heads: Vec<SampleFile>,
    /// Their bytes, one after the other.
    pub bytes: Bytes,
}

impl LeasedSample {
    /// Its files, and the bytes of each (which share the sample's buffer).
    pub fn files(&self) -> impl Iterator<Item = (&SampleFile, Bytes)> {
        let mut at = 0;
        self.heads.iter().map(move |f| {
            let end = at + usize::try_from(f.size).unwrap_or(usize::MAX);
            let bytes = self.bytes.get(at..end).map(|b| self.bytes.slice_ref(b)).unwrap_or_default();
            at = end;
            (f, bytes)
        })
    }
}

/// What acknowledging a batch takes: small, and may travel to the process that steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Token {
    /// Of which epoch.
    pub epoch: u64,
    /// Of which rank.
    pub rank: u32,
    /// The lease.
    pub lease: u64,
    /// Its entries.
    pub entries: u32,
    /// How long it lives without a sign of life, in milliseconds.
    pub ttl_ms: u64,
}

impl Token {
    /// The ack of the whole batch.
    #[must_use]
    pub fn ack(&self, times: BatchTimes) -> Ack {
        let times = BatchTimes { entries: self.entries, ..times };
        Ack { lease: self.lease, upto: self.entries, batches: vec![times] }
    }
}

/// One lease, received whole.
#[derive(Debug, Clone)]
pub struct LeaseBatch {
    /// What acknowledging it takes.
    pub token: Token,
    /// Its samples, in the order of the epoch.
    pub samples: Vec<LeasedSample>,
}

/// What came of asking for more.
#[derive(Debug, Clone)]
pub enum Next {
    /// Samples.
    Batch(LeaseBatch),
    /// The rank holds as much as it may: acknowledge first.
    Full,
    /// Nothing more, unless a lease that the rank still holds expires.
    Last,
    /// Nothing more: the rank had its share and acknowledged it.
    Done,
}

/// See [`JobHandle::reader`]. One request at a time.
#[derive(Debug)]
pub struct EpochReader {
    asking: Asking,
    ahead: bool,
    tasks: TaskTracker,
    /// The request after the one that `asking` remembers, under way.
    begun: Option<AbortOnDropHandle<(Asking, Result<Asked, ClientError>)>>,
}

/// Who asks, and what was asked last.
#[derive(Debug, Clone)]
struct Asking {
    job: JobHandle,
    epoch: u64,
    rank: u32,
    worker: u32,
    sequence: u64,
    refs: bool,
    patience: Duration,
}

/// An answer. Its lease is held for as long as this lives, and on if it is handed out.
#[derive(Debug)]
struct Asked {
    next: Next,
    hold: Option<Hold>,
}

/// Why a stream brought less than a lease.
pub(super) enum Short {
    /// Ask again, after what was received.
    Again(ClientError),
    /// It is of no use to ask again.
    Failed(ClientError),
}

/// What was received of one lease. It is held for as long as it is being received.
struct Part {
    grant: Grant,
    samples: Vec<LeasedSample>,
    hold: Hold,
}

impl EpochReader {
    pub(super) fn new(job: JobHandle, epoch: u64, rank: u32, worker: u32) -> Self {
        let patience = job.client.io_timeout();
        // After whatever a predecessor of this worker asked with.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let sequence = u64::try_from(now.as_micros()).unwrap_or(0);
        let asking = Asking { job, epoch, rank, worker, sequence, refs: false, patience };
        EpochReader { asking, ahead: false, tasks: TaskTracker::new(), begun: None }
    }

    /// Whether only places come with the leases, and the bytes are read from there.
    #[must_use]
    pub fn by_refs(mut self, refs: bool) -> Self {
        self.asking.refs = refs;
        self
    }

    /// How long a server that is gone, or an origin that does not answer, is waited for. By default the client's deadline.
    #[must_use]
    pub fn patient(mut self, patience: Duration) -> Self {
        self.asking.patience = patience;
        self
    }

    /// Sequence numbers go on after this. By default they begin with the time in microseconds, so that they are higher than those
    /// of a predecessor that died.
    #[must_use]
    pub fn after(mut self, sequence: u64) -> Self {
        self.asking.sequence = sequence;
        self
    }

    /// Whether the next lease is asked for and received while the last one that was handed out is being consumed. Its samples
    /// are in memory beside that one's, and its lease is held as long as this reader lives. Then another `want` counts from the
    /// lease after the next. By default not. [`JobHandle::keep_alive`] is to run beside: a lease of which that heard that it is gone is
    /// not handed out. A reader that is dropped holds nothing; what it had received ahead a reader of the same worker, begun
    /// [`after`](Self::after) this one's [`sequence`](Self::sequence), asks for with the same number.
    #[must_use]
    pub fn ahead(mut self, ahead: bool) -> Self {
        self.ahead = ahead;
        self
    }

    /// The number of the last request whose answer was handed out.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.asking.sequence
    }

    /// The next samples, at most `want`. Waits up to some seconds where the rank must acknowledge first.
    ///
    /// # Errors
    /// [`ClientError`]: the server says no, or was not there for as long as there is patience.
    pub async fn next(&mut self, want: u32) -> Result<Next, ClientError> {
        let Asked { next, hold } = match self.received().await {
            Some(asked) => asked,
            None => self.asking.next(want).await?,
        };
        if let Some(hold) = hold {
            hold.keep();
            if self.ahead {
                let mut asking = self.asking.clone();
                self.begun = Some(AbortOnDropHandle::new(self.tasks.spawn(async move {
                    let asked = asking.next(want).await;
                    (asking, asked)
                })));
            }
        }
        Ok(next)
    }

    /// The lease that was asked for ahead, if there is one. Anything else that was answered was answered before the last
    /// acks. What failed, was lost with its runtime, or expired unseen is asked for again with the same number: if it was
    /// granted and lives it is the same lease.
    async fn received(&mut self) -> Option<Asked> {
        let ended = self.begun.as_mut()?.await;
        self.begun = None;
        match ended {
            Ok((asking, Ok(asked))) => match &asked.hold {
                Some(hold) if !hold.lives() => None,
                hold => {
                    let granted = hold.is_some();
                    self.asking = asking;
                    Some(asked).filter(|_| granted)
                }
            },
            Ok((_, Err(_))) => None,
            Err(lost) if lost.is_panic() => resume_unwind(lost.into_panic()),
            Err(_) => None,
        }
    }
}

impl Asking {
    async fn next(&mut self, want: u32) -> Result<Asked, ClientError> {
        self.sequence += 1;
        let until = Instant::now() + self.patience;
        let mut backoff = Backoff::new();
        let mut part: Option<Part> = None;
        loop {
            let again = match self.receive(want, &mut part).await {
                Ok(next) => return Ok(next),
                Err(Short::Failed(e)) => return Err(e),
                Err(Short::Again(e)) => e,
            };
            if again.code() == Some(Code::StaleSequence) {
                // A predecessor of this worker was further: the clock was set back.
                self.sequence += SEQUENCE_LEAP;
                continue;
            }
            let wait = backoff.wait(again.retry_after());
            if Instant::now() + wait >= until {
                return Err(again);
            }
            tracing::debug!(error = %again, ?wait, "asking for the lease again");
            sleep(wait).await;
        }
    }

    async fn receive(&self, want: u32, part: &mut Option<Part>) -> Result<Asked, Short> {
        let received = part.as_ref().map_or(0, |p| u32::try_from(p.samples.len()).unwrap_or(u32::MAX));
        let ask = LeaseRequest {
            rank: self.rank,
            worker: self.worker,
            sequence: self.sequence,
            want,
            refs: self.refs,
            from: received,
            wait_ms: WAIT_MS,
            ..LeaseRequest::default()
        };
        let client = &self.job.client;
        let path = routes::epoch(&self.job.job.id, self.epoch, "leases");
        let response = client.open_json(&path, &ask).await.map_err(|e| {
            if e.retryable() || e.code() == Some(Code::StaleSequence) {
                Short::Again(e)
            } else {
                Short::Failed(e)
            }
        })?;
        let endpoint = client.endpoint().to_string();
        let mut stream = Stream::new(Answerer(&endpoint), response, client.io_timeout());
        let Some(Frame::Grant { grant }) = stream.frame().await.map_err(Short::Again)? else {
            return Err(Short::Failed(stream.from.protocol("a lease does not begin with its grant")));
        };
        let grant: Grant = stream.json(&grant).map_err(Short::Failed)?;
        let none = match grant.status {
            GrantStatus::Full => Some(Next::Full),
            GrantStatus::Last => Some(Next::Last),
            GrantStatus::Done => Some(Next::Done),
            GrantStatus::Granted => None,
        };
        if let Some(next) = none {
            return Ok(Asked { next, hold: None });
        }
        let got = match part {
            Some(p) if p.grant.lease == grant.lease => p,
            // The lease of what was received is gone, and so is that.
            _ => {
                *part = None;
                let hold = Hold::new(&self.job.held, self.epoch, self.rank, grant.lease, grant.ttl_ms);
                let new = Part { grant: grant.clone(), samples: Vec::new(), hold };
                let new = part.insert(new);
                // Where nothing was received nothing is skipped: all of the new one comes.
                if received > 0 {
                    return Err(Short::Again(stream.from.gone("the lease expired on the way")));
                }
                new
            }
        };
        let mut places = Vec::new();
        let ended = stream.samples(&mut got.samples, &mut places).await;
        if !places.is_empty() {
            self.fetch(&mut got.samples, places, &stream.from).await?;
        }
        ended?;
        if got.samples.len() != got.grant.entries.len() {
            return Err(Short::Failed(stream.from.protocol("a lease ended before its entries did")));
        }
        let Some(Part { grant, samples, hold }) = part.take() else {
            return Err(Short::Failed(stream.from.protocol("no lease")));
        };
        let token = Token {
            epoch: self.epoch,
            rank: self.rank,
            lease: grant.lease,
            entries: u32::try_from(samples.len()).unwrap_or(u32::MAX),
            ttl_ms: grant.ttl_ms,
        };
        Ok(Asked { next: Next::Batch(LeaseBatch { token, samples }), hold: Some(hold) })
    }

    /// Reads what refs say, in one batch, and hands the samples over in order; at the first that fails it ends.
    async fn fetch(
        &self,
        samples: &mut Vec<LeasedSample>,
        places: Vec<(SampleHead, SampleRef)>,
        from: &Answerer<'_>,
    ) -> Result<(), Short> {
        let span = |p: &fletch_api::RefPiece| {
            BatchItem::Chunk(ChunkSpan { hash: p.chunk, offset: p.offset.into(), length: Some(p.len.into()) })
        };
        let items: Vec<BatchItem> = places.iter().flat_map(|(_, r)| r.pieces.iter().map(span)).collect();
        let mut pieces: VecDeque<Bytes> = VecDeque::new();
        for some in items.chunks(fletch_api::BATCH_ITEMS_MAX) {
            let batch = self.job.client.batch(self.job.job.root, some.to_vec(), u64::from(u32::MAX)).await;
            let mut batch = batch.map_err(Short::Again)?;
            while let Some(piece) = batch.next().await.map_err(Short::Again)? {
                let problem =
                    |problem: Box<Problem>| Short::Again(ClientError::Problem { problem, retry_after: None });
                pieces.push_back(piece.outcome.map_err(problem)?);
            }
        }
        for (head, place) in places {
            let mut bytes = BytesMut::new();
            for _ in &place.pieces {
                bytes.extend_from_slice(&pieces.pop_front().unwrap_or_default());
            }
            samples.push(checked(head, bytes.freeze(), from).map_err(Short::Again)?);
        }
        Ok(())
    }
}
